/*-------------------------------------------------------------------------
 *
 * cancel.c
 *	  jq.cancel().
 *
 * A job that waits is moved to jq.failed_jobs at once.  The row of one that
 * runs is its worker's, so a wish is written to jq.cancellations instead, and
 * when it has committed, the worker is interrupted (wakeup.c) and records the
 * job as cancelled.  If the job does not run by then, the scheduler sees what
 * has become of it: ended, then the wish is moot, or due again, then it is
 * cancelled as one that waits.  So the wish is kept even through a crash.
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
#include "catalog/indexing.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/latch.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* A row that somebody else than a worker has locked is tried so often, with
 * this wait in between. */
#define LOCK_TRIES		50
#define LOCK_WAIT_MS	20

typedef enum Taking
{
	TAKEN,						/* locked, and still there */
	TAKEN_LEASED,				/* the same, and held under a lease */
	TAKING_LEASED,				/* held under a lease, and left alone */
	TAKING_RUNS,				/* a worker has it */
	TAKING_BLOCKED,				/* somebody else has it */
	TAKING_GONE					/* there is no such job */
} Taking;

PG_FUNCTION_INFO_V1(jq_cancel);

/* ---------------------------------------------------------------------
 * Taking a waiting job
 * --------------------------------------------------------------------- */

/*
 * Whether a worker holds the job of that id.
 */
static bool
worker_holds(int64 id)
{
	bool		result = false;

	if (JqShared)
	{
		LWLockAcquire(JqShared->lock, LW_SHARED);
		result = jq_slot_of_job(id, 0) != NULL;
		LWLockRelease(JqShared->lock);
	}
	return result;
}

/*
 * Whether the job is held under a lease whose holder is still there.
 */
static bool
lease_holds(TupleTableSlot *row)
{
	Datum	   *values = row->tts_values;
	bool	   *nulls = row->tts_isnull;

	if (nulls[JOBS_LEASE_UNTIL - 1] ||
		DatumGetTimestampTz(values[JOBS_LEASE_UNTIL - 1]) <= GetCurrentTimestamp())
		return false;
	return nulls[JOBS_HOLDER_PID - 1] ||
		jq_holder_lives(DatumGetInt32(values[JOBS_HOLDER_PID - 1]),
						DatumGetTimestampTz(values[JOBS_HOLDER_STARTED - 1]));
}

/*
 * Find the job's row, as it is now whatever the transaction's snapshot, and
 * lock it if nobody has it.  Fills in *job unless there is none.  With
 * "waiting" a job that is held under a lease is left alone: its holder, who is
 * going to record its end, must not wait for us.
 */
static Taking
take_job(int64 id, bool waiting, JqJob *job)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->jobs, RowExclusiveLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Taking		result = TAKING_GONE;
	bool		leased;

	ScanKeyInit(&key, JOBS_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(id));
	scan = systable_beginscan(rel, catalog->jobs_pkey, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		TM_FailureData tmfd;
		TM_Result	locking = TM_WouldBlock;

		ExecForceStoreHeapTuple(tuple, slot, false);
		jq_read_job(slot, job);
		job->tid = tuple->t_self;
		leased = lease_holds(slot);
		ExecClearTuple(slot);

		if (leased && waiting)
			result = TAKING_LEASED;
		else if (!worker_holds(id))
			locking = table_tuple_lock(rel, &job->tid, GetActiveSnapshot(), slot,
									   GetCurrentCommandId(false),
									   LockTupleExclusive, LockWaitSkip, 0, &tmfd);
		if (locking == TM_Ok)
		{
			jq_read_job(slot, job);
			result = lease_holds(slot) ? TAKEN_LEASED : TAKEN;
		}
		else if (result == TAKING_LEASED)
			 /* not tried */ ;
		else if (worker_holds(id))
			result = TAKING_RUNS;
		else if (locking == TM_WouldBlock || locking == TM_Updated)
			result = TAKING_BLOCKED;
	}
	systable_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	return result;
}

/*
 * The same, but do not give up at once if the row is locked: nobody but a
 * worker locks it for long.  The job must be one that the current role may
 * handle.
 */
static Taking
take_own_job(int64 id, bool waiting, JqJob *job)
{
	Taking		taking;

	for (int try = 0;; try++)
	{
		taking = take_job(id, waiting, job);
		if (taking != TAKING_GONE)
			jq_require_own_job(id, job->role);
		if (taking != TAKING_BLOCKED)
			return taking;
		if (try == LOCK_TRIES)
			break;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 LOCK_WAIT_MS, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	ereport(ERROR,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("job " INT64_FORMAT " is locked by another session", id),
			 errhint("Try again when that session's transaction has ended.")));
	return TAKING_BLOCKED;		/* keep compiler quiet */
}

/*
 * Lock the row of a job that waits, and that the current role may handle, and
 * fill in *job.  Returns false if no such job waits.
 */
bool
jq_take_waiting_job(int64 id, JqJob *job)
{
	return take_own_job(id, true, job) == TAKEN;
}

/*
 * The batch of the job of that id was cancelled: if it waits, it leaves.
 * Returns false if somebody has its row, so that it must be seen to again.
 */
bool
jq_drop_waiting_job(int64 id)
{
	JqJob		job = {0};
	JqFailure  *failure;
	Taking		taking = take_job(id, true, &job);
	bool		gone;

	if (taking != TAKEN)
		return taking != TAKING_BLOCKED;
	failure = jq_make_failure(ERRCODE_JQ_SKIPPED, pstrdup("batch was cancelled"));
	failure->end = JQ_END_DROPPED;
	failure->unspent = true;
	jq_record_failure(&job, get_role_oid(job.role, true), NULL, failure, &gone);
	CommandCounterIncrement();
	return true;
}

/* ---------------------------------------------------------------------
 * Wishes
 * --------------------------------------------------------------------- */

static void
write_wish(const JqJob *job, const char *reason)
{
	Relation	rel = table_open(jq_catalog()->cancellations, RowExclusiveLock);
	Datum		values[CANCELLATIONS_NATTS];
	bool		nulls[CANCELLATIONS_NATTS] = {false};

	values[CANCELLATIONS_ID - 1] = Int64GetDatum(job->id);
	values[CANCELLATIONS_STAMP - 1] = Int64GetDatum(job->stamp);
	values[CANCELLATIONS_REQUESTED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	jq_set_text(values, nulls, CANCELLATIONS_REQUESTED_BY,
				GetUserNameFromId(GetUserId(), false));
	jq_set_text(values, nulls, CANCELLATIONS_REASON, reason);
	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
	jq_note_cancel(job->id, job->stamp);
}

/*
 * Cut a text where it gets too long for what is kept of an error.
 */
static char *
clipped(char *text)
{
	text[pg_mbcliplen(text, strlen(text), JQ_ERROR_MAX)] = '\0';
	return text;
}

static char *
cancelled_message(const char *by, const char *reason)
{
	if (reason)
		return clipped(psprintf("cancelled by role \"%s\": %s", by, reason));
	return psprintf("cancelled by role \"%s\"", by);
}

/*
 * Go over the wishes to cancel this job: with failure, say there who cancelled
 * it and why; with "remove", remove them.
 */
static void
scan_wishes(int64 id, int64 stamp, JqFailure *failure, bool remove)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->cancellations, RowExclusiveLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, CANCELLATIONS_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(id));
	scan = systable_beginscan(rel, catalog->cancellations_id, true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[CANCELLATIONS_NATTS];
		bool		nulls[CANCELLATIONS_NATTS];

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		if (DatumGetInt64(values[CANCELLATIONS_STAMP - 1]) != stamp)
			continue;
		if (failure)
			failure->message =
				cancelled_message(TextDatumGetCString(values[CANCELLATIONS_REQUESTED_BY - 1]),
								  nulls[CANCELLATIONS_REASON - 1] ? NULL :
								  TextDatumGetCString(values[CANCELLATIONS_REASON - 1]));
		if (remove)
		{
			/* two who remove it do the same */
			TM_FailureData tmfd;
			ItemPointerData tid = tuple->t_self;

			(void) table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
									  InvalidSnapshot, InvalidSnapshot, true,
									  &tmfd, false);
		}
	}
	systable_endscan(scan);
	table_close(rel, NoLock);
}

/*
 * Say in the failure of a cancelled job who cancelled it, if that is not said
 * yet.
 */
void
jq_describe_cancellation(const JqJob *job, JqFailure *failure)
{
	if (failure->message == NULL)
		scan_wishes(job->id, job->stamp, failure, false);
	if (failure->message == NULL)
		failure->message = pstrdup("cancelled");
}

/*
 * The job has failed for good: nobody need cancel it any more.
 */
void
jq_remove_cancellation(const JqJob *job)
{
	scan_wishes(job->id, job->stamp, NULL, true);
}

/* ---------------------------------------------------------------------
 * Cancelling
 * --------------------------------------------------------------------- */

/*
 * Record the job, whose row is locked, as cancelled; message may be NULL, if
 * there is a wish.
 */
static void
cancel_taken(JqJob *job, char *message)
{
	const JqHandler *found = jq_find_handler(job->name);
	JqFailure  *failure = jq_make_failure(ERRCODE_JQ_CANCELLED, message);
	bool		gone;

	failure->end = JQ_END_CANCELLED;
	failure->unspent = job->token == 0; /* else an attempt is being made */
	jq_record_failure(job, get_role_oid(job->role, true),
					  found ? jq_copy_handler(found) : NULL, failure, &gone);
	CommandCounterIncrement();
}

/*
 * jq.cancel(id, reason)
 */
Datum
jq_cancel(PG_FUNCTION_ARGS)
{
	JqJob		job = {0};
	char	   *reason = PG_ARGISNULL(1) ? NULL :
	clipped(text_to_cstring(PG_GETARG_TEXT_PP(1)));
	const JqHandler *handler;
	const JqJob *current;
	const char *was = NULL;
	Taking		taking;
	int64		id = jq_id_argument(fcinfo, "jq.cancel()");

	current = jq_current(&handler);
	if (current && current->id == id)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_IN_USE),
				 errmsg("a job cannot cancel itself"),
				 errhint("Use jq.fail().")));

	taking = take_own_job(id, false, &job);
	switch (taking)
	{
		case TAKING_RUNS:
			was = "running";
			write_wish(&job, reason);
			break;
		case TAKEN:
		case TAKEN_LEASED:
			was = taking == TAKEN_LEASED ? "external" : "waiting";
			cancel_taken(&job,
						 cancelled_message(GetUserNameFromId(GetUserId(), false), reason));
			break;
		default:
			PG_RETURN_NULL();
	}
	PG_RETURN_TEXT_P(cstring_to_text(was));
}

/*
 * See to one wish.  Returns whether that is over, one way or another.
 */
static bool
process_wish(int64 id, int64 stamp)
{
	JqJob		job = {0};
	Taking		taking = take_job(id, false, &job);

	if (taking == TAKING_GONE || job.stamp != stamp)
	{
		scan_wishes(id, stamp, NULL, true);
		return true;
	}
	if (taking == TAKING_RUNS)
	{
		JqSlot	   *slot;

		LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
		slot = jq_slot_of_job(id, stamp);
		if (slot)
			jq_slot_interrupt(slot, GetCurrentTimestamp());
		LWLockRelease(JqShared->lock);
		return slot != NULL;	/* its end brings us back */
	}
	if (taking == TAKING_BLOCKED)
		return false;
	cancel_taken(&job, NULL);
	return true;
}

/*
 * See to all wishes; called by the scheduler.  Returns false if some must be
 * looked at again soon.
 */
bool
jq_process_cancellations(void)
{
	MemoryContext cxt = CurrentMemoryContext;
	bool		settled = true;
	uint64		count;
	int64	   *ids;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute("SELECT id, stamp FROM jq.cancellations", true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read jq.cancellations");
	count = SPI_processed;
	ids = MemoryContextAlloc(cxt, Max(count, 1) * 2 * sizeof(int64));
	for (uint64 i = 0; i < count * 2; i++)
	{
		bool		isnull;

		ids[i] = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[i / 2],
											 SPI_tuptable->tupdesc,
											 i % 2 + 1, &isnull));
	}
	SPI_finish();
	PopActiveSnapshot();
	CommitTransactionCommand();

	for (uint64 i = 0; i < count; i++)
	{
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		settled &= process_wish(ids[2 * i], ids[2 * i + 1]);
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	MemoryContextSwitchTo(cxt);
	pfree(ids);
	return settled;
}
