/*-------------------------------------------------------------------------
 *
 * held.c
 *	  Where due jobs wait for a limit, or for their group.
 *
 * Such a job must not be met by each search for work.  So its row goes to the
 * far end of its lane (available_at is infinity), and jq.held says what it
 * waits for, and when it was due.  Whoever frees a place lets the next job go
 * on, after its own transaction has committed and given up its locks; and who
 * held a job looks again, after that has committed, whether the place is still
 * taken.  So one of the two sees the other, and no job is forgotten.
 *
 * What waits for a rate is let go on by the scheduler, in the rate's time.
 * The scheduler also looks at all that is held, once a minute, and when a place
 * may have become free with nobody to tell (jq_note_held).
 *
 * A row of jq.held whose job has left, or was moved, is void and goes away
 * when its turn comes.
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
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* Jobs that one look lets go on for one key. */
#define MAX_FREED 1000

/* ---------------------------------------------------------------------
 * Holding
 * --------------------------------------------------------------------- */

/*
 * The first that waits at the gate, or NULL.
 */
static HeapTuple
first_held(Relation rel, const JqGate *gate)
{
	Relation	index = index_open(jq_catalog()->held_pkey, AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData keys[3];
	SysScanDesc scan;
	HeapTuple	tuple;

	jq_gate_scan_keys(gate, keys);
	scan = systable_beginscan_ordered(rel, index, snapshot, 3, keys);
	tuple = systable_getnext_ordered(scan, ForwardScanDirection);
	if (HeapTupleIsValid(tuple))
		tuple = heap_copytuple(tuple);
	systable_endscan_ordered(scan);
	UnregisterSnapshot(snapshot);
	index_close(index, AccessShareLock);
	return tuple;
}

/*
 * Whether the scheduler is going to come for that row: not if it is its time
 * already, since then it may be letting that one go on at this moment.
 */
static bool
has_wake_time(Relation rel, HeapTuple tuple)
{
	bool		isnull;
	Datum		wake_at = heap_getattr(tuple, HELD_WAKE_AT, RelationGetDescr(rel),
									   &isnull);

	return !isnull && DatumGetTimestampTz(wake_at) > GetCurrentTimestamp();
}

/*
 * Remove what is left in jq.held of an earlier wait of the job.
 */
static void
forget_held(int64 job_id)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->held, RowExclusiveLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, HELD_JOB_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(job_id));
	scan = systable_beginscan(rel, catalog->held_job_id, true, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;

		(void) table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
								  InvalidSnapshot, InvalidSnapshot, true,
								  &tmfd, false);
	}
	systable_endscan(scan);
	table_close(rel, NoLock);
}

/*
 * Let the job, whose row is ours, wait at the gate.
 */
static void
hold_job(JqJob *job, const JqGate *gate)
{
	Relation	rel = table_open(jq_catalog()->held, RowExclusiveLock);
	bool		timed = gate->wake_at != DT_NOEND && gate->places > 0;
	Datum		values[HELD_NATTS] = {0};
	bool		nulls[HELD_NATTS] = {false};
	HeapTuple	first;

	values[HELD_KIND - 1] = CStringGetTextDatum(gate->kind);
	values[HELD_SCOPE - 1] = CStringGetTextDatum(gate->scope);
	values[HELD_KEY - 1] = CStringGetTextDatum(gate->key);
	/* a group keeps the order of its jobs whatever their priorities */
	values[HELD_PRIORITY - 1] =
		Int32GetDatum(strcmp(gate->kind, JQ_GATE_GROUP) == 0 ? 0 : job->priority);
	values[HELD_JOB_ID - 1] = Int64GetDatum(job->id);
	values[HELD_DUE_AT - 1] = TimestampTzGetDatum(job->available_at);
	values[HELD_PLACES - 1] = Int32GetDatum(gate->places);
	values[HELD_EVERY - 1] = IntervalPGetDatum(&gate->every);
	nulls[HELD_EVERY - 1] = !timed;

	/* one time to wake for each key will do */
	first = timed ? first_held(rel, gate) : NULL;
	timed = timed && !(first && has_wake_time(rel, first));
	values[HELD_WAKE_AT - 1] = TimestampTzGetDatum(gate->wake_at);
	nulls[HELD_WAKE_AT - 1] = !timed;
	forget_held(job->id);
	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
	jq_put_off(job, DT_NOEND);
	if (timed)
		jq_note_held(gate->wake_at);
}

/*
 * The same, or put the job off if its handler wants that; returns what it has
 * become.
 */
JqFailure *
jq_hold_at_gate(JqJob *job, Oid roleid, const JqHandler *handler,
				const JqGate *gate)
{
	JqFailure  *failure = jq_make_failure(0, NULL);

	failure->end = JQ_END_HELD;
	failure->gate = *gate;
	if (strcmp(gate->kind, JQ_GATE_OVERLAP) == 0 &&
		!jq_interval_is_zero(&handler->overlap_wait))
		jq_release_until(job, roleid,
						 jq_time_after(GetCurrentTimestamp(), &handler->overlap_wait));
	else
		hold_job(job, gate);
	return failure;
}

/* ---------------------------------------------------------------------
 * Letting go on
 * --------------------------------------------------------------------- */

/*
 * Let the first jobs that wait at the gate go on, so many of them.  Those that
 * somebody else is letting go on at this moment count, too.
 */
static void
free_jobs(const JqGate *gate, int64 count)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->held, RowExclusiveLock);
	Relation	index = index_open(catalog->held_pkey, AccessShareLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData keys[3];
	SysScanDesc scan;
	HeapTuple	tuple;

	jq_gate_scan_keys(gate, keys);
	scan = systable_beginscan_ordered(rel, index, snapshot, 3, keys);
	while (count > 0 &&
		   HeapTupleIsValid(tuple = systable_getnext_ordered(scan, ForwardScanDirection)))
	{
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;
		bool		isnull;
		TM_Result	locking;
		JqFreeing	freeing;

		locking = table_tuple_lock(rel, &tid, snapshot, slot,
								   GetCurrentCommandId(false),
								   LockTupleExclusive, LockWaitSkip, 0, &tmfd);
		if (locking == TM_WouldBlock)
			count--;
		if (locking != TM_Ok)
			continue;
		freeing = jq_free_held_job(DatumGetInt64(slot_getattr(slot, HELD_JOB_ID, &isnull)),
								   DatumGetTimestampTz(slot_getattr(slot, HELD_DUE_AT, &isnull)));
		if (freeing == JQ_HELD_BUSY)
			continue;
		if (freeing == JQ_HELD_FREED)
			count--;
		simple_heap_delete(rel, &tid);
	}
	systable_endscan_ordered(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
	table_close(rel, NoLock);
	CommandCounterIncrement();
}

/*
 * Whether it is another one's turn in the group of a job that has given up the
 * group's place: the job has left it, or is not the first.
 */
static bool
group_goes_on(const JqGate *gate, int64 job_id)
{
	Relation	rel;
	HeapTuple	first;
	bool		result = true;

	if (!jq_job_exists(job_id))
		return true;
	rel = table_open(jq_catalog()->held, AccessShareLock);
	first = first_held(rel, gate);
	if (first)
	{
		bool		isnull;

		result = DatumGetInt64(heap_getattr(first, HELD_JOB_ID,
											RelationGetDescr(rel), &isnull)) < job_id;
	}
	table_close(rel, AccessShareLock);
	return result;
}

/*
 * Let the next job go on at each gate that the job, which has ended or was
 * turned away at another, had a place behind.  To be called in a transaction
 * of its own.
 */
void
jq_leave_gates(const JqJob *job)
{
	for (int i = 0; i < job->ngates; i++)
	{
		const JqGate *gate = &job->gates[i];

		if (strcmp(gate->kind, JQ_GATE_GROUP) != 0 ||
			group_goes_on(gate, job->id))
			free_jobs(gate, 1);
	}
}

/*
 * The job was turned away, and that has committed: if the gate is open by now,
 * or "anyway", let the next one go on.  To be called in a transaction of its
 * own.
 */
void
jq_look_at_gate_again(JqGate *gate, int64 job_id, bool anyway)
{
	if (anyway || jq_gate_is_open(gate, job_id))
		free_jobs(gate, 1);
}

/*
 * The gates that a query finds in jq.held, in the current memory context.
 */
static List *
find_gates(const char *query, int nargs, Oid *types, Datum *values)
{
	MemoryContext cxt = CurrentMemoryContext;
	JqOwnerSection section;
	List	   *gates = NIL;

	jq_enter_owner(&section);
	jq_insist_on_indexes();
	PushActiveSnapshot(GetLatestSnapshot());
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args(query, nargs, types, values, NULL, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read jq.held");
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	tuple = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		MemoryContext oldcxt = MemoryContextSwitchTo(cxt);
		JqGate	   *gate = palloc0(sizeof(JqGate));
		bool		isnull;
		Datum		every;

		gate->kind = SPI_getvalue(tuple, desc, 1);
		gate->scope = SPI_getvalue(tuple, desc, 2);
		gate->key = SPI_getvalue(tuple, desc, 3);
		gate->places = DatumGetInt32(SPI_getbinval(tuple, desc, 4, &isnull));
		every = SPI_getbinval(tuple, desc, 5, &isnull);
		if (!isnull)
			gate->every = *DatumGetIntervalP(every);
		gate->wake_at = DatumGetTimestampTz(SPI_getbinval(tuple, desc, 6, &isnull));
		if (isnull)
			gate->wake_at = 0;
		gates = lappend(gates, gate);
		MemoryContextSwitchTo(oldcxt);
	}
	SPI_finish();
	PopActiveSnapshot();
	jq_leave_owner(&section);
	return gates;
}

/*
 * Let the jobs that wait for limits of that scope, or of that queue, try again,
 * since the limits have changed.
 */
void
jq_retry_held(const char *scope, bool queue)
{
	Oid			types[] = {TEXTOID, BOOLOID};
	Datum		values[] = {CStringGetTextDatum(scope), BoolGetDatum(queue)};
	ListCell   *lc;

	foreach(lc, find_gates("SELECT DISTINCT ON (h.kind, h.scope, h.key)"
						   " h.kind, h.scope, h.key, h.places, h.every, h.wake_at FROM jq.held AS h"
						   " WHERE h.scope = $1 AND (h.kind = 'queue') = $2",
						   lengthof(types), types, values))
	{
		free_jobs(lfirst(lc), MAX_FREED);
	}
	jq_note_held(0);			/* if there were more */
}

/*
 * The rate has let some go on: note when it does so next, if more wait.  If a
 * worker has the row at this moment, look at all of them again.
 */
static void
set_next_wake(const JqGate *gate)
{
	Relation	rel = table_open(jq_catalog()->held, RowExclusiveLock);
	HeapTuple	first = first_held(rel, gate);
	int64		length = jq_interval_us(&gate->every);
	TimestampTz now = GetCurrentTimestamp();

	if (first)
	{
		TupleTableSlot *slot = table_slot_create(rel, NULL);
		TM_FailureData tmfd;
		int			column = HELD_WAKE_AT;
		bool		isnull = false;
		Datum		value = TimestampTzGetDatum(now - ((now % length) + length) % length + length);

		if (table_tuple_lock(rel, &first->t_self, GetActiveSnapshot(), slot,
							 GetCurrentCommandId(false), LockTupleExclusive,
							 LockWaitSkip, 0, &tmfd) == TM_Ok)
		{
			CatalogTupleUpdate(rel, &first->t_self,
							   heap_modify_tuple_by_cols(first, RelationGetDescr(rel), 1,
														 &column, &value, &isnull));
			CommandCounterIncrement();
		}
		else
			jq_note_held(0);
		ExecDropSingleTupleTableSlot(slot);
	}
	table_close(rel, NoLock);
}

/*
 * How many of the jobs that wait at the gate could go on now.
 */
static int
count_openings(JqGate *gate)
{
	Relation	rel;
	HeapTuple	first;
	int			count = 0;

	if (strcmp(gate->kind, JQ_GATE_GROUP) != 0)
		return jq_count_free_places(gate, MAX_FREED);

	rel = table_open(jq_catalog()->held, AccessShareLock);
	first = first_held(rel, gate);
	if (first)
	{
		bool		isnull;

		count = jq_gate_is_open(gate, DatumGetInt64(heap_getattr(first, HELD_JOB_ID,
																 RelationGetDescr(rel),
																 &isnull)));
	}
	table_close(rel, AccessShareLock);
	return count;
}

/*
 * Let go on what may at the gate.
 */
static void
look_at_gate(JqGate *gate)
{
	int			count;

	if (strcmp(gate->kind, JQ_GATE_RATE) != 0)
	{
		count = count_openings(gate);
		if (count > 0)
			free_jobs(gate, count);
	}
	else if (gate->places > 0 && gate->wake_at <= GetCurrentTimestamp())
	{
		free_jobs(gate, gate->places);
		set_next_wake(gate);
	}
}

/* The first job at each gate; the recursion steps from gate to gate. */
static const char *const all_gates =
"WITH RECURSIVE gates AS ("
" (SELECT h.kind, h.scope, h.key, h.places, h.every, h.wake_at FROM jq.held AS h"
"  ORDER BY h.kind, h.scope, h.key, h.priority, h.job_id LIMIT 1)"
" UNION ALL"
" SELECT n.kind, n.scope, n.key, n.places, n.every, n.wake_at FROM gates AS g CROSS JOIN LATERAL"
" (SELECT h.kind, h.scope, h.key, h.places, h.every, h.wake_at FROM jq.held AS h"
"  WHERE (h.kind, h.scope, h.key) > (g.kind, g.scope, g.key)"
"  ORDER BY h.kind, h.scope, h.key, h.priority, h.job_id LIMIT 1) AS n)"
" SELECT g.kind, g.scope, g.key, g.places, g.every, g.wake_at FROM gates AS g";

/* The gates of rates whose time has come. */
static const char *const due_gates =
"SELECT DISTINCT ON (h.kind, h.scope, h.key) h.kind, h.scope, h.key, h.places, h.every, h.wake_at"
" FROM jq.held AS h WHERE h.wake_at <= clock_timestamp() ORDER BY h.kind, h.scope, h.key, h.wake_at";

/*
 * Let go on what waits for a rate whose time has come, or with "all" whatever
 * can go on by now.  To be called in a transaction of its own.  Returns when to
 * look again.
 */
TimestampTz
jq_look_at_held(bool all)
{
	int64		next;
	ListCell   *lc;

	foreach(lc, find_gates(all ? all_gates : due_gates, 0, NULL, NULL))
	{
		look_at_gate(lfirst(lc));
	}
	if (jq_owner_execute("SELECT (extract(epoch FROM min(h.wake_at) - '2000-01-01 00:00:00+00') * 1000000)::bigint"
						 " FROM jq.held AS h WHERE h.wake_at IS NOT NULL HAVING count(*) > 0",
						 0, NULL, NULL, NULL, &next) == 0)
		return DT_NOEND;
	return next;
}
