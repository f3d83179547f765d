/*-------------------------------------------------------------------------
 *
 * limit.c
 *	  What a job may have to wait for before it is started: running limits,
 *	  rates, and earlier jobs of its group.
 *
 * A running limit of n is n places.  A worker takes one by a lock of its
 * transaction, whose death frees it at once.  The holder of a lease has no
 * transaction: it marks the place in jq.holders, under the same lock, and the
 * mark is void when the lease is.  So both count against one limit, and nobody
 * sees half of it.
 *
 * A group is a place, too, and its members stand in jq.group_members by their
 * ids: the first may take it.
 *
 * A token of a rate is taken last, when all else has been passed, and must be
 * committed before the job is started (worker.c).
 *
 * What cannot go on waits in jq.held (held.c).
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
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* Tokens of a bucket are let through in slices of this length at least. */
#define MIN_SLICE_US	INT64CONST(10000)

/* A job whose middleware failed is tried again after: */
#define MIDDLEWARE_RETRY_US USECS_PER_SEC

/* The limits of one key. */
typedef struct KeyLimit
{
	int32		max_running;	/* -1: none */
	int32		rate_max;		/* -1: none */
	Interval	rate_per;
	int32		rate_burst;		/* 0: a fixed window */
} KeyLimit;

/* One of a queue. */
typedef struct QueueLimit
{
	char		queue[JQ_NAME_MAX + 1];
	int32		max_running;
} QueueLimit;

PG_FUNCTION_INFO_V1(jq_set_limit);
PG_FUNCTION_INFO_V1(jq_set_queue);

/* The queues that have a limit, and whether single keys have some. */
static MemoryContext limits_cxt = NULL;
static List *queue_limits = NIL;
static bool keys_have_limits = false;
static uint64 limits_epoch = 0;

/* ---------------------------------------------------------------------
 * Settings
 * --------------------------------------------------------------------- */

static void
load_limits(void)
{
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;
	MemoryContext oldcxt;

	if (limits_epoch == jq_configuration_epoch())
		return;
	if (limits_cxt == NULL)
		limits_cxt = AllocSetContextCreate(TopMemoryContext, "jq limits",
										   ALLOCSET_SMALL_SIZES);
	MemoryContextReset(limits_cxt);
	queue_limits = NIL;
	limits_epoch = jq_configuration_epoch();

	rel = table_open(jq_catalog()->queues, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		QueueLimit *limit;
		bool		isnull;
		Datum		max_running = heap_getattr(tuple, QUEUES_MAX_RUNNING,
											   RelationGetDescr(rel), &isnull);

		if (isnull)
			continue;
		oldcxt = MemoryContextSwitchTo(limits_cxt);
		limit = palloc(sizeof(QueueLimit));
		limit->max_running = DatumGetInt32(max_running);
		text_to_cstring_buffer(DatumGetTextPP(heap_getattr(tuple, QUEUES_QUEUE,
														   RelationGetDescr(rel),
														   &isnull)),
							   limit->queue, sizeof(limit->queue));
		queue_limits = lappend(queue_limits, limit);
		MemoryContextSwitchTo(oldcxt);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);

	rel = table_open(jq_catalog()->limit_settings, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	keys_have_limits = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
}

/*
 * How many jobs of the queue may run at a time; -1: no limit.
 */
static int32
queue_max_running(const char *queue)
{
	ListCell   *lc;

	load_limits();
	foreach(lc, queue_limits)
	{
		QueueLimit *limit = lfirst(lc);

		if (strcmp(limit->queue, queue) == 0)
			return limit->max_running;
	}
	return -1;
}

static int32
integer_of(HeapTuple tuple, TupleDesc desc, int column, int32 missing)
{
	bool		isnull;
	Datum		value = heap_getattr(tuple, column, desc, &isnull);

	return isnull ? missing : DatumGetInt32(value);
}

/*
 * The handler's limits for jobs of that key.
 */
static KeyLimit
limit_of_key(const JqHandler *handler, const char *key)
{
	KeyLimit	limit = {handler->max_running, handler->rate_max,
	handler->rate_per, handler->rate_burst};
	Relation	rel;
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	load_limits();
	if (!keys_have_limits)
		return limit;

	rel = table_open(jq_catalog()->limit_settings, AccessShareLock);
	ScanKeyInit(&keys[0], LIMITS_SCOPE, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(handler->limit_scope));
	ScanKeyInit(&keys[1], LIMITS_KEY, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(key));
	scan = systable_beginscan(rel, jq_catalog()->limit_settings_pkey, true, NULL,
							  2, keys);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		TupleDesc	desc = RelationGetDescr(rel);
		bool		isnull;
		Datum		per = heap_getattr(tuple, LIMITS_RATE_PER, desc, &isnull);

		limit.max_running = integer_of(tuple, desc, LIMITS_MAX_RUNNING, limit.max_running);
		limit.rate_max = integer_of(tuple, desc, LIMITS_RATE_MAX, limit.rate_max);
		limit.rate_burst = integer_of(tuple, desc, LIMITS_RATE_BURST, limit.rate_burst);
		if (!isnull)
			limit.rate_per = *DatumGetIntervalP(per);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return limit;
}

/*
 * Whether the job can be held up by anything, or has to be asked for.
 */
bool
jq_needs_admission(const JqJob *job, const JqHandler *handler)
{
	return handler->limited || handler->nmiddleware > 0 ||
		job->group_key != NULL ||
		(job->unique_key != NULL && job->unique_until == JQ_UNTIL_START) ||
		queue_max_running(job->queue) >= 0;
}

/* ---------------------------------------------------------------------
 * Places
 * --------------------------------------------------------------------- */

/*
 * Fill in the tag of one of jq's own locks.  They are of a kind that the server
 * and its users leave alone.
 */
void
jq_set_locktag(LOCKTAG *tag, uint64 id, uint16 place)
{
	tag->locktag_field1 = MyDatabaseId;
	tag->locktag_field2 = (uint32) (id >> 32);
	tag->locktag_field3 = (uint32) id;
	tag->locktag_field4 = place;
	tag->locktag_type = LOCKTAG_USERLOCK;
	tag->locktag_lockmethodid = USER_LOCKMETHOD;
}

/*
 * A number for the gate.  It is cut from a strong hash, so that keys of equal
 * numbers, which would wait for each other, are not found on purpose, nor by
 * chance.
 */
static uint64
gate_id(const JqGate *gate)
{
	StringInfoData text;
	bytea	   *hash;
	uint64		id;

	initStringInfo(&text);
	appendStringInfo(&text, "%s%c%s%c%s", gate->kind, '\1', gate->scope, '\1', gate->key);
	hash = DatumGetByteaPP(DirectFunctionCall1(sha256_bytea,
											   PointerGetDatum(cstring_to_text_with_len(text.data, text.len))));
	memcpy(&id, VARDATA_ANY(hash), sizeof(id));
	pfree(text.data);
	return id;
}

/*
 * Scan keys that find what is stored of a gate, in tables that begin with
 * kind, scope and key.
 */
void
jq_gate_scan_keys(const JqGate *gate, ScanKey keys)
{
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(gate->kind));
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(gate->scope));
	ScanKeyInit(&keys[2], 3, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(gate->key));
}

/*
 * Whether the place is marked by the holder of a lease that is not over.  A
 * void mark can be removed by who has the place's lock.
 */
static bool
place_is_marked(const JqGate *gate, int place, bool remove)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->holders, RowExclusiveLock);
	ScanKeyData keys[4];
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		marked = false;

	jq_gate_scan_keys(gate, keys);
	ScanKeyInit(&keys[3], HOLDERS_PLACE, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(place));
	scan = systable_beginscan(rel, catalog->holders_pkey, true, NULL, 4, keys);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		TupleDesc	desc = RelationGetDescr(rel);
		bool		isnull;
		int64		job_id = DatumGetInt64(heap_getattr(tuple, HOLDERS_JOB_ID, desc, &isnull));
		int64		token = DatumGetInt64(heap_getattr(tuple, HOLDERS_TOKEN, desc, &isnull));

		marked = jq_lease_is_valid(job_id, token);
		if (!marked && remove)
		{
			ItemPointerData tid = tuple->t_self;
			TM_FailureData tmfd;

			/* its former holder may remove it as well */
			(void) table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
									  InvalidSnapshot, InvalidSnapshot, true,
									  &tmfd, false);
		}
	}
	systable_endscan(scan);
	table_close(rel, NoLock);
	return marked;
}

/*
 * Take a free place, which is ours until the transaction ends.  Returns false
 * if there is none.
 */
static bool
take_place(JqGate *gate)
{
	uint64		id = gate_id(gate);
	int			first = gate->places > 1 ? MyProcPid % gate->places : 0;

	for (int i = 0; i < gate->places; i++)
	{
		int			place = (first + i) % gate->places;
		LOCKTAG		tag;

		jq_set_locktag(&tag, id, place);
		if (LockAcquire(&tag, ExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
			continue;
		if (!place_is_marked(gate, place, true))
		{
			gate->place = place;
			return true;
		}
		LockRelease(&tag, ExclusiveLock, false);
	}
	return false;
}

/*
 * How many places are free now, "most" at most.  None is taken, not even for a
 * moment, or somebody could be turned away by that and not be told of its end.
 */
int
jq_count_free_places(JqGate *gate, int most)
{
	uint64		id = gate_id(gate);
	int			count = 0;

	for (int place = 0; place < gate->places && count < most; place++)
	{
		LOCKTAG		tag;
		int			holders;

		jq_set_locktag(&tag, id, place);
		pfree(GetLockConflicts(&tag, ExclusiveLock, &holders));
		if (holders == 0 && !place_is_marked(gate, place, false))
			count++;
	}
	return count;
}

/*
 * The job is leased: mark the places that it has taken, so that they stay its
 * when the transaction has committed.
 */
void
jq_mark_places(const JqJob *job)
{
	Relation	rel;

	if (job->ngates == 0)
		return;
	rel = table_open(jq_catalog()->holders, RowExclusiveLock);
	for (int i = 0; i < job->ngates; i++)
	{
		const JqGate *gate = &job->gates[i];
		Datum		values[HOLDERS_NATTS];
		bool		nulls[HOLDERS_NATTS] = {false};

		values[HOLDERS_KIND - 1] = CStringGetTextDatum(gate->kind);
		values[HOLDERS_SCOPE - 1] = CStringGetTextDatum(gate->scope);
		values[HOLDERS_KEY - 1] = CStringGetTextDatum(gate->key);
		values[HOLDERS_PLACE - 1] = Int32GetDatum(gate->place);
		values[HOLDERS_JOB_ID - 1] = Int64GetDatum(job->id);
		values[HOLDERS_TOKEN - 1] = Int64GetDatum(job->token);
		CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	}
	table_close(rel, NoLock);
}

/*
 * The lease is over: remove the marks of this job.
 */
void
jq_unmark_places(const JqJob *job)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->holders, RowExclusiveLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, HOLDERS_JOB_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(job->id));
	scan = systable_beginscan(rel, catalog->holders_job_id, true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;
		bool		isnull;

		if (DatumGetInt64(heap_getattr(tuple, HOLDERS_TOKEN, RelationGetDescr(rel),
									   &isnull)) != job->token)
			continue;
		/* whoever finds the mark void may remove it as well */
		(void) table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
								  InvalidSnapshot, InvalidSnapshot, true,
								  &tmfd, false);
	}
	systable_endscan(scan);
	table_close(rel, NoLock);
}

/* ---------------------------------------------------------------------
 * Groups
 * --------------------------------------------------------------------- */

/*
 * The job, which is being queued, is the group's.
 */
void
jq_join_group(const JqJob *job)
{
	Relation	rel = table_open(jq_catalog()->group_members, RowExclusiveLock);
	Datum		values[MEMBERS_NATTS];
	bool		nulls[MEMBERS_NATTS] = {false};

	values[MEMBERS_KEY - 1] = CStringGetTextDatum(job->group_key);
	values[MEMBERS_JOB_ID - 1] = Int64GetDatum(job->id);
	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
}

static void
delete_member(Relation rel, HeapTuple tuple)
{
	ItemPointerData tid = tuple->t_self;
	TM_FailureData tmfd;

	(void) table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
							  InvalidSnapshot, InvalidSnapshot, true,
							  &tmfd, false);
}

/*
 * The job is out of its group.
 */
void
jq_leave_group(const JqJob *job)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->group_members, RowExclusiveLock);
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&keys[0], MEMBERS_KEY, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(job->group_key));
	ScanKeyInit(&keys[1], MEMBERS_JOB_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(job->id));
	scan = systable_beginscan(rel, catalog->group_members_pkey, true, NULL, 2, keys);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		delete_member(rel, tuple);
	systable_endscan(scan);
	table_close(rel, NoLock);
}

/*
 * Whether the job of that id is the first of its group.  Members that are no
 * jobs any more, however that came about, are removed on the way.
 */
static bool
is_first_of_group(const char *key, int64 job_id)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->group_members, RowExclusiveLock);
	Relation	index = index_open(catalog->group_members_pkey, AccessShareLock);
	ScanKeyData scan_key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		result = true;
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());

	ScanKeyInit(&scan_key, MEMBERS_KEY, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(key));
	scan = systable_beginscan_ordered(rel, index, snapshot, 1, &scan_key);
	while (HeapTupleIsValid(tuple = systable_getnext_ordered(scan, ForwardScanDirection)))
	{
		bool		isnull;
		int64		member = DatumGetInt64(heap_getattr(tuple, MEMBERS_JOB_ID,
														RelationGetDescr(rel), &isnull));

		if (member >= job_id)
			break;
		if (jq_job_exists(member))
		{
			result = false;
			break;
		}
		delete_member(rel, tuple);
	}
	systable_endscan_ordered(scan);
	UnregisterSnapshot(snapshot);
	index_close(index, AccessShareLock);
	table_close(rel, NoLock);
	return result;
}

/* ---------------------------------------------------------------------
 * Admission
 * --------------------------------------------------------------------- */

/*
 * Take a place behind one more limit for the job.  If that cannot be had,
 * *blocked says where the job has to wait.
 */
static bool
enter(JqJob *job, const char *kind, const char *scope, const char *key,
	  int32 places, JqGate *blocked)
{
	JqGate	   *gate = &job->gates[job->ngates];

	memset(gate, 0, sizeof(JqGate));
	gate->kind = kind;
	gate->scope = pstrdup(scope);
	gate->key = pstrdup(key);
	gate->places = places;
	gate->wake_at = DT_NOEND;
	if (!take_place(gate))
	{
		*blocked = *gate;
		return false;
	}
	job->ngates++;
	return true;
}

/*
 * Take the places that the job needs, for the rest of the transaction.  If
 * one is not to be had, *blocked says which; those that were taken go with the
 * transaction, too.
 */
bool
jq_enter_limits(JqJob *job, const JqHandler *handler, JqGate *blocked)
{
	int32		queue_limit = queue_max_running(job->queue);
	char	   *key;

	job->ngates = 0;
	if (job->group_key)
	{
		if (!enter(job, JQ_GATE_GROUP, "", job->group_key, 1, blocked))
			return false;
		if (!is_first_of_group(job->group_key, job->id))
		{
			*blocked = job->gates[--job->ngates];
			return false;
		}
	}
	if (queue_limit >= 0 &&
		!enter(job, JQ_GATE_QUEUE, job->queue, "", queue_limit, blocked))
		return false;
	if (handler->overlap_key.text)
	{
		key = jq_evaluate_key(&handler->overlap_key, job->payload);
		if (key && !enter(job, JQ_GATE_OVERLAP, handler->limit_scope, key, 1, blocked))
			return false;
	}
	if (handler->max_running >= 0)
	{
		key = handler->running_key.text ?
			jq_evaluate_key(&handler->running_key, job->payload) : "";
		if (key && !enter(job, JQ_GATE_RUNNING, handler->limit_scope, key,
						  limit_of_key(handler, key).max_running, blocked))
			return false;
	}
	return true;
}

/*
 * Whether a job that was turned away there would be let through now.
 */
bool
jq_gate_is_open(JqGate *gate, int64 job_id)
{
	if (strcmp(gate->kind, JQ_GATE_RATE) == 0)
		return false;			/* it opens in its time */
	if (strcmp(gate->kind, JQ_GATE_GROUP) == 0 &&
		!is_first_of_group(gate->key, job_id))
		return false;
	return jq_count_free_places(gate, 1) > 0;
}

/* ---------------------------------------------------------------------
 * Rates
 * --------------------------------------------------------------------- */

/* parameters: scope, key, now, start of the window or tokens a second, limit */
static const char *const take_from_window =
"INSERT INTO jq.rates AS r (scope, key, since, used) VALUES ($1, $2, $4, 1)"
" ON CONFLICT (scope, key) DO UPDATE SET since = greatest(r.since, $4),"
" used = CASE WHEN r.since < $4 THEN 1 ELSE r.used + 1 END"
" WHERE r.since < $4 OR r.used < $5";

static const char *const take_from_bucket =
"INSERT INTO jq.rates AS r (scope, key, since, used) VALUES ($1, $2, $3, 1)"
" ON CONFLICT (scope, key) DO UPDATE SET since = greatest(r.since, $3),"
" used = greatest(0, r.used - $4 * greatest(0, extract(epoch FROM $3 - r.since)::float8)) + 1"
" WHERE greatest(0, r.used - $4 * greatest(0, extract(epoch FROM $3 - r.since)::float8)) + 1 <= $5";

static Interval
interval_of_us(int64 us)
{
	Interval	result = {0};

	result.time = us;
	return result;
}

/*
 * Take one of what the window has left.
 */
static bool
take_window_token(const KeyLimit *limit, TimestampTz now, JqGate *gate)
{
	int64		length = jq_interval_us(&limit->rate_per);
	TimestampTz start = now - ((now % length) + length) % length;
	Oid			types[] = {TEXTOID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, FLOAT8OID};
	Datum		values[5];

	values[0] = CStringGetTextDatum(gate->scope);
	values[1] = CStringGetTextDatum(gate->key);
	values[2] = TimestampTzGetDatum(now);
	values[3] = TimestampTzGetDatum(start);
	values[4] = Float8GetDatum(limit->rate_max);
	gate->places = limit->rate_max;
	gate->every = limit->rate_per;
	gate->wake_at = start + length;
	return limit->rate_max > 0 &&
		jq_owner_execute(take_from_window, 5, types, values, NULL, NULL) > 0;
}

/*
 * Take a token from the bucket.
 */
static bool
take_bucket_token(const KeyLimit *limit, TimestampTz now, JqGate *gate)
{
	double		a_second = limit->rate_max * (double) USECS_PER_SEC /
	jq_interval_us(&limit->rate_per);
	Oid			types[] = {TEXTOID, TEXTOID, TIMESTAMPTZOID, FLOAT8OID, FLOAT8OID};
	Datum		values[5];
	int64		slice;

	if (limit->rate_max == 0)
		return take_window_token(limit, now, gate);

	values[0] = CStringGetTextDatum(gate->scope);
	values[1] = CStringGetTextDatum(gate->key);
	values[2] = TimestampTzGetDatum(now);
	values[3] = Float8GetDatum(a_second);
	values[4] = Float8GetDatum(limit->rate_burst);
	slice = Max((int64) (USECS_PER_SEC / a_second), MIN_SLICE_US);
	gate->places = Max(1, (int32) (slice * a_second / USECS_PER_SEC));
	gate->every = interval_of_us(slice);
	gate->wake_at = now + slice;
	return jq_owner_execute(take_from_bucket, 5, types, values, NULL, NULL) > 0;
}

/*
 * Take a token of the rate that the job is under.  If there is none,
 * *blocked says where the job has to wait, and nothing was taken.
 * *taken tells whether one was.
 */
bool
jq_take_token(const JqJob *job, const JqHandler *handler, JqGate *blocked,
			  bool *taken)
{
	TimestampTz now = GetCurrentTimestamp();
	char	   *key;
	KeyLimit	limit;

	*taken = false;
	if (handler->rate_max < 0)
		return true;
	key = handler->rate_key.text ?
		jq_evaluate_key(&handler->rate_key, job->payload) : pstrdup("");
	if (key == NULL)
		return true;
	limit = limit_of_key(handler, key);

	memset(blocked, 0, sizeof(JqGate));
	blocked->kind = JQ_GATE_RATE;
	blocked->scope = pstrdup(handler->limit_scope);
	blocked->key = key;
	*taken = limit.rate_burst > 0 ? take_bucket_token(&limit, now, blocked) :
		take_window_token(&limit, now, blocked);
	return *taken;
}

/*
 * Give back a token that was taken: the job was not started after all.
 */
void
jq_return_token(const JqGate *gate)
{
	Oid			types[] = {TEXTOID, TEXTOID};
	Datum		values[2];

	values[0] = CStringGetTextDatum(gate->scope);
	values[1] = CStringGetTextDatum(gate->key);
	jq_owner_execute("UPDATE jq.rates SET used = greatest(0, used - 1)"
					 " WHERE scope = $1 AND key = $2",
					 2, types, values, NULL, NULL);
}

/* ---------------------------------------------------------------------
 * Middleware
 * --------------------------------------------------------------------- */

/*
 * Ask the handler's middleware whether the job may be started.  Returns NULL,
 * or in the given memory context the release of the job that is asked for.
 */
JqFailure *
jq_middleware_verdict(const JqJob *job, const JqHandler *handler,
					  MemoryContext cxt)
{
	for (int i = 0; i < handler->nmiddleware; i++)
	{
		JqHandler	asked = *handler;
		JqFailure  *failure;
		JqCallResult result;
		FmgrInfo	flinfo;
		MemoryContext oldcxt;

		asked.signature = handler->middleware[i];
		asked.function = jq_function_of_signature(asked.signature);
		asked.takes_context = true;
		asked.returns_jsonb = false;
		if (OidIsValid(asked.function))
			asked.schema = get_func_namespace(asked.function);
		jq_check_function_rights(&asked, GetUserId());
		fmgr_info(asked.function, &flinfo);
		jq_call_handler(&asked, job, &flinfo, false, &result);
		if (result.isnull)
			continue;

		oldcxt = MemoryContextSwitchTo(cxt);
		failure = jq_make_failure(ERRCODE_JQ_RELEASED,
								  psprintf("job was put off by middleware %s",
										   asked.signature));
		failure->end = JQ_END_RELEASED;
		failure->unspent = true;
		failure->delay = *DatumGetIntervalP(result.value);
		MemoryContextSwitchTo(oldcxt);
		return failure;
	}
	return NULL;
}

/*
 * Middleware has failed: that is not the job's fault, unless it said so by
 * jq.fail().
 */
void
jq_excuse_middleware(JqFailure *failure)
{
	if (failure->end != JQ_END_FAILED || failure->sqlerrcode == ERRCODE_JQ_FAILED)
		return;
	failure->end = JQ_END_RELEASED;
	failure->unspent = true;
	failure->exception = false;
	failure->delay.time = MIDDLEWARE_RETRY_US;
}

/* ---------------------------------------------------------------------
 * SQL functions
 * --------------------------------------------------------------------- */

/*
 * jq.set_limit(scope, key, max_running, rate_max, rate_per, rate_burst, note)
 */
Datum
jq_set_limit(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, TEXTOID, INT4OID, INT4OID, INTERVALOID,
	INT4OID, TEXTOID};
	Datum		values[lengthof(types)] = {0};
	char		nulls[] = "       ";
	bool		empty = true;
	text	   *key;
	char	   *scope;

	jq_require_administer();
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("scope and key of a limit must not be NULL")));
	jq_check_number(fcinfo, 2, 0, JQ_MAX_PLACES, "max_running");
	jq_check_number(fcinfo, 3, 0, INT_MAX, "rate_max");
	if (!PG_ARGISNULL(4))
		jq_check_span(PG_GETARG_INTERVAL_P(4), "rate_per");
	jq_check_number(fcinfo, 5, 1, INT_MAX, "rate_burst");

	scope = text_to_cstring(PG_GETARG_TEXT_PP(0));
	key = PG_GETARG_TEXT_PP(1);
	values[0] = CStringGetTextDatum(scope);
	values[1] = CStringGetTextDatum(jq_stored_key(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key)));
	for (int i = 2; i < lengthof(types); i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i) ? 'n' : ' ';
		empty = empty && (PG_ARGISNULL(i) || i == 6);
	}
	jq_owner_execute("DELETE FROM jq.limit_settings WHERE scope = $1 AND key = $2",
					 2, types, values, nulls, NULL);
	if (!empty)
		jq_owner_execute("INSERT INTO jq.limit_settings"
						 " (scope, key, max_running, rate_max, rate_per, rate_burst, note)"
						 " VALUES ($1, $2, $3, $4, $5, $6, $7)",
						 lengthof(types), types, values, nulls, NULL);
	jq_retry_held(scope, false);
	PG_RETURN_VOID();
}

/*
 * jq.set_queue(queue, max_running, note)
 */
Datum
jq_set_queue(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, INT4OID, TEXTOID};
	Datum		values[lengthof(types)] = {0};
	char		nulls[] = "   ";
	text	   *queue;

	jq_require_administer();
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a queue must not be NULL")));
	queue = PG_GETARG_TEXT_PP(0);
	jq_check_name(VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue), "queue");
	jq_check_number(fcinfo, 1, 0, JQ_MAX_PLACES, "max_running");

	values[0] = PointerGetDatum(queue);
	for (int i = 1; i < lengthof(types); i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i) ? 'n' : ' ';
	}
	jq_owner_execute("INSERT INTO jq.queues (queue, max_running, note) VALUES ($1, $2, $3)"
					 " ON CONFLICT (queue) DO UPDATE SET max_running = excluded.max_running,"
					 " note = excluded.note",
					 lengthof(types), types, values, nulls, NULL);
	jq_retry_held(text_to_cstring(queue), true);
	PG_RETURN_VOID();
}
