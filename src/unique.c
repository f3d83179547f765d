/*-------------------------------------------------------------------------
 *
 * unique.c
 *	  Unique jobs: claims on keys.
 *
 * A claim is a row of jq.claims, whose primary key lets there be one for each
 * handler and key.  It is taken in the transaction that queues the job and
 * given up in the one that ends it, after the handler: so a dispatch waits for
 * an open transaction that dispatches, cancels or retries a job of the same key,
 * and never for a handler.
 *
 * The claim names the job that has it, and only that job gives it up.  If the
 * job is there no more, however it went, the claim is void and may be taken
 * over; so one that could not be given up blocks nobody.
 *
 * The statements look at the table as it is now, whatever the transaction's
 * snapshot, as those of foreign keys do (ri_triggers.c).
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

typedef struct Claim
{
	int64		job_id;
	bool		outlives;
	TimestampTz claimed_at;
	TimestampTz expires_at;		/* DT_NOEND: never */
} Claim;

typedef enum Statement
{
	INSERT_CLAIM,
	READ_CLAIM,
	LOCK_CLAIM,
	MOVE_CLAIM
} Statement;

/* parameters of all: name, key, job, outlives, expires_at, former job,
 * claimed_at */
static Oid	parameter_types[] = {TEXTOID, TEXTOID, INT8OID, BOOLOID,
TIMESTAMPTZOID, INT8OID, TIMESTAMPTZOID};

static const char *const statements[] = {
	[INSERT_CLAIM] =
	"INSERT INTO jq.claims (name, key, job_id, outlives, expires_at, claimed_at)"
	" VALUES ($1, $2, $3, $4, $5, $7) ON CONFLICT (name, key) DO NOTHING",
	[READ_CLAIM] =
	"SELECT c.job_id, c.outlives, c.claimed_at, c.expires_at"
	" FROM jq.claims AS c WHERE c.name = $1 AND c.key = $2",
	[LOCK_CLAIM] =
	"SELECT c.job_id, c.outlives, c.claimed_at, c.expires_at"
	" FROM jq.claims AS c WHERE c.name = $1 AND c.key = $2 FOR UPDATE",
	[MOVE_CLAIM] =
	"UPDATE jq.claims SET job_id = $3, outlives = $4, expires_at = $5, claimed_at = $7"
	" WHERE name = $1 AND key = $2 AND job_id = $6"
};

static SPIPlanPtr plans[lengthof(statements)];

/* ---------------------------------------------------------------------
 * Words
 * --------------------------------------------------------------------- */

static const char *const until_names[] = {
	[JQ_UNTIL_DONE] = "done",
	[JQ_UNTIL_START] = "start",
	[JQ_UNTIL_EXPIRY] = "expiry"
};

static const char *const conflict_names[] = {
	[JQ_CONFLICT_KEEP] = "keep",
	[JQ_CONFLICT_REPLACE] = "replace",
	[JQ_CONFLICT_DEBOUNCE] = "debounce",
	[JQ_CONFLICT_ERROR] = "error"
};

static int
parse_word(Datum value, const char *const *words, int nwords,
		   const char *message)
{
	char	   *word = TextDatumGetCString(value);

	for (int i = 0; i < nwords; i++)
	{
		if (strcmp(word, words[i]) == 0)
			return i;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg_internal("%s", message),
			 errdetail("\"%s\" is none of these.", word)));
	return 0;					/* keep compiler quiet */
}

JqUniqueUntil
jq_parse_unique_until(Datum value)
{
	return parse_word(value, until_names, lengthof(until_names),
					  "unique_until must be done, start or expiry");
}

JqOnConflict
jq_parse_on_conflict(Datum value)
{
	return parse_word(value, conflict_names, lengthof(conflict_names),
					  "on_conflict must be keep, replace, debounce or error");
}

const char *
jq_unique_until_name(JqUniqueUntil until)
{
	return until_names[until];
}

const char *
jq_on_conflict_name(JqOnConflict conflict)
{
	return conflict_names[conflict];
}

/* ---------------------------------------------------------------------
 * Statements
 * --------------------------------------------------------------------- */

/*
 * Run a statement about the claim on the job's key, as the extension's owner.
 * Returns the number of rows; *claim, if not NULL, is filled in from the row.
 */
static uint64
execute(Statement statement, const JqJob *job, const Claim *former,
		TimestampTz claimed_at, Claim *claim)
{
	const JqHandler *handler = jq_find_handler(job->name);
	JqOwnerSection section;
	Datum		values[7];
	char		nulls[] = "       ";
	uint64		processed;

	values[0] = CStringGetTextDatum(handler ? handler->name : job->name);
	values[1] = CStringGetTextDatum(job->unique_key);
	values[2] = Int64GetDatum(job->id);
	values[3] = BoolGetDatum(job->unique_until == JQ_UNTIL_EXPIRY);
	if (jq_interval_is_zero(&job->unique_for))
		nulls[4] = 'n';
	else
		values[4] = TimestampTzGetDatum(jq_time_after(job->available_at,
													  &job->unique_for));
	values[5] = Int64GetDatum(former ? former->job_id : 0);
	values[6] = TimestampTzGetDatum(claimed_at);

	jq_enter_owner(&section);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (plans[statement] == NULL)
	{
		SPIPlanPtr	plan = SPI_prepare(statements[statement],
									   lengthof(parameter_types), parameter_types);

		if (plan == NULL || SPI_keepplan(plan) != 0)
			elog(ERROR, "could not prepare \"%s\"", statements[statement]);
		plans[statement] = plan;
	}
	if (SPI_execute_snapshot(plans[statement], values, nulls,
							 GetLatestSnapshot(), InvalidSnapshot,
							 false, true, 0) < 0)
		elog(ERROR, "could not execute \"%s\"", statements[statement]);
	processed = SPI_processed;
	if (claim && processed > 0)
	{
		HeapTuple	tuple = SPI_tuptable->vals[0];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		bool		isnull;

		claim->job_id = DatumGetInt64(SPI_getbinval(tuple, desc, 1, &isnull));
		claim->outlives = DatumGetBool(SPI_getbinval(tuple, desc, 2, &isnull));
		claim->claimed_at = DatumGetTimestampTz(SPI_getbinval(tuple, desc, 3, &isnull));
		claim->expires_at = DatumGetTimestampTz(SPI_getbinval(tuple, desc, 4, &isnull));
		if (isnull)
			claim->expires_at = DT_NOEND;
	}
	SPI_finish();
	jq_leave_owner(&section);
	return processed;
}

/*
 * Whether a job that is due at this time may take the claim over.
 */
static bool
is_void(const Claim *claim, TimestampTz due)
{
	if (claim->expires_at != DT_NOEND && claim->expires_at <= due)
		return true;
	return !claim->outlives && !jq_job_exists(claim->job_id);
}

/* ---------------------------------------------------------------------
 * Taking
 * --------------------------------------------------------------------- */

/*
 * Another dispatch has the key: put the job in the place of that one's, or if
 * it runs already, behind it.  The claim's row is locked.
 */
static JqOutcome
replace(JqJob *job, const Claim *claim)
{
	const JqHandler *handler = jq_find_handler(job->name);
	TimestampTz claimed_at = claim->claimed_at;
	JqJob		former = {0};
	bool		waits = jq_take_waiting_job(claim->job_id, &former);

	if (!waits)
		claimed_at = job->created_at;
	else
	{
		if (job->on_conflict == JQ_CONFLICT_DEBOUNCE && handler &&
			!jq_interval_is_zero(&handler->debounce_max))
			job->available_at = Max(job->created_at,
									Min(job->available_at,
										jq_time_after(claimed_at, &handler->debounce_max)));
		job->id = former.id;
		jq_replace_job(&former, job);
	}
	if (execute(MOVE_CLAIM, job, claim, claimed_at, NULL) == 0)
		elog(ERROR, "claim of job " INT64_FORMAT " is gone though locked",
			 claim->job_id);
	return waits ? JQ_REPLACED : JQ_CREATED;
}

/*
 * Claim the key of a job that is about to be queued.  If another one has it,
 * the job's id becomes that one's; JQ_KEPT means that it must not be queued,
 * JQ_REPLACED that it is to be queued in place of the other, which is removed.
 */
JqOutcome
jq_claim_key(JqJob *job)
{
	bool		replaces = job->on_conflict == JQ_CONFLICT_REPLACE ||
	job->on_conflict == JQ_CONFLICT_DEBOUNCE;

	for (;;)
	{
		Claim		claim;

		CHECK_FOR_INTERRUPTS();
		if (execute(INSERT_CLAIM, job, NULL, job->created_at, NULL) > 0)
			return JQ_CREATED;
		if (execute(replaces ? LOCK_CLAIM : READ_CLAIM, job, NULL,
					job->created_at, &claim) == 0)
			continue;			/* given up meanwhile */
		if (is_void(&claim, job->available_at))
		{
			if (execute(MOVE_CLAIM, job, &claim, job->created_at, NULL) > 0)
				return JQ_CREATED;
			continue;
		}
		if (replaces)
			return replace(job, &claim);
		if (job->on_conflict == JQ_CONFLICT_ERROR)
			ereport(ERROR,
					(errcode(ERRCODE_UNIQUE_VIOLATION),
					 errmsg("job " INT64_FORMAT " has the same unique key",
							claim.job_id),
					 errdetail("Handler \"%s\", key \"%s\".", job->name,
							   job->unique_key)));
		job->id = claim.job_id;
		return JQ_KEPT;
	}
}

/*
 * Claim the key of a job again, as it is to be retried.  Returns 0, or the id
 * of the newer job that has it.
 */
int64
jq_reclaim_key(const JqJob *job)
{
	for (;;)
	{
		Claim		claim;

		CHECK_FOR_INTERRUPTS();
		if (execute(INSERT_CLAIM, job, NULL, job->available_at, NULL) > 0)
			return 0;
		if (execute(READ_CLAIM, job, NULL, job->available_at, &claim) == 0)
			continue;
		if (claim.job_id != job->id && !is_void(&claim, job->available_at))
			return claim.job_id;
		if (execute(MOVE_CLAIM, job, &claim, job->available_at, NULL) > 0)
			return 0;
	}
}

/* ---------------------------------------------------------------------
 * Giving up
 * --------------------------------------------------------------------- */

/*
 * Give up the job's claim, if it has one.  Never waits: whoever has locked the
 * claim takes it over, or leaves one that is void.
 */
void
jq_release_key(const JqJob *job)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->claims, RowExclusiveLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, CLAIMS_JOB_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(job->id));
	scan = systable_beginscan(rel, catalog->claims_job_id, true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;

		if (table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
							 GetCurrentCommandId(false), LockTupleExclusive,
							 LockWaitSkip, 0, &tmfd) == TM_Ok)
			(void) table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
									  InvalidSnapshot, InvalidSnapshot, true,
									  &tmfd, false);
	}
	systable_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
}
