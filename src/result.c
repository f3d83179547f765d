/*-------------------------------------------------------------------------
 *
 * result.c
 *	  Results of done jobs, and waiting for the end of a job.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/ipc.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/*
 * How often a waiting session looks by itself.  The end of a job that a worker
 * runs wakes it, if shared memory has room for the wish.
 */
#define WAIT_MS			1000
#define UNAIDED_WAIT_MS	100

static int	my_waiter = -1;

PG_FUNCTION_INFO_V1(jq_result);
PG_FUNCTION_INFO_V1(jq_wait_for);

/* ---------------------------------------------------------------------
 * Results
 * --------------------------------------------------------------------- */

/*
 * Keep what the handler of a done job returned.
 */
void
jq_keep_result(const JqJob *job, const JqHandler *handler,
			   const JqCallResult *result)
{
	Relation	rel = table_open(jq_catalog()->results, RowExclusiveLock);
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[RESULTS_NATTS];
	bool		nulls[RESULTS_NATTS] = {false};

	values[RESULTS_ID - 1] = Int64GetDatum(job->id);
	values[RESULTS_ROLE - 1] = CStringGetTextDatum(job->role);
	values[RESULTS_DONE_AT - 1] = TimestampTzGetDatum(now);
	values[RESULTS_KEEP_UNTIL - 1] =
		TimestampTzGetDatum(jq_time_after(now, &handler->keep_result));
	nulls[RESULTS_RESULT - 1] = result->isnull || !handler->returns_jsonb;
	if (!nulls[RESULTS_RESULT - 1])
		values[RESULTS_RESULT - 1] = PointerGetDatum(PG_DETOAST_DATUM(result->value));

	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
}

/*
 * jq.result(id)
 */
Datum
jq_result(PG_FUNCTION_ARGS)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	TimestampTz latest = DT_NOBEGIN;
	Datum		result = (Datum) 0;
	bool		found = false;

	if (PG_ARGISNULL(0))
		PG_RETURN_NULL();
	rel = table_open(catalog->results, AccessShareLock);
	ScanKeyInit(&key, RESULTS_ID, BTEqualStrategyNumber, F_INT8EQ,
				PG_GETARG_DATUM(0));
	scan = systable_beginscan(rel, catalog->results_id, true, GetActiveSnapshot(),
							  1, &key);

	/* an id can come again after a restore; the last one counts */
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Datum		values[RESULTS_NATTS];
		bool		nulls[RESULTS_NATTS];
		TimestampTz done_at;

		heap_deform_tuple(tuple, RelationGetDescr(rel), values, nulls);
		done_at = DatumGetTimestampTz(values[RESULTS_DONE_AT - 1]);
		if (done_at < latest ||
			!jq_may_see_role(TextDatumGetCString(values[RESULTS_ROLE - 1])))
			continue;
		latest = done_at;
		found = !nulls[RESULTS_RESULT - 1];
		if (found)
			result = PointerGetDatum(PG_DETOAST_DATUM_COPY(values[RESULTS_RESULT - 1]));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);

	if (!found)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(result);
}

/* ---------------------------------------------------------------------
 * Waiting
 * --------------------------------------------------------------------- */

static void
leave_waiters(int code, Datum arg)
{
	if (my_waiter < 0)
		return;
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	JqShared->waiters[my_waiter].job_id = 0;
	JqShared->nwaiters--;
	LWLockRelease(JqShared->lock);
	my_waiter = -1;
}

/*
 * Ask to be woken when a worker lets go of the job.
 */
static void
join_waiters(int64 id)
{
	if (JqShared == NULL)
		return;
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JQ_MAX_WAITERS && my_waiter < 0; i++)
	{
		JqWaiter   *waiter = &JqShared->waiters[i];

		if (waiter->job_id != 0)
			continue;
		waiter->dboid = MyDatabaseId;
		waiter->job_id = id;
		waiter->latch = MyLatch;
		JqShared->nwaiters++;
		my_waiter = i;
	}
	LWLockRelease(JqShared->lock);
}

/*
 * What has become of the job by now; *ended tells if that is final.
 *
 * An id that was given out and is in no table is called done.  It may as well
 * belong to a dispatch that was rolled back, or has not committed yet, which
 * leave no trace that could be asked for.
 */
static char *
state_of_job(int64 id, bool *ended)
{
	Oid			types[] = {INT8OID};
	Datum		values[] = {Int64GetDatum(id)};
	JqOwnerSection section;
	char	   *state;
	char	   *role;

	PushActiveSnapshot(GetTransactionSnapshot());
	jq_enter_owner(&section);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args("SELECT CASE WHEN EXISTS (SELECT FROM jq.worker_slots() AS s WHERE s.job_id = j.id)"
							  " OR jq.lease_holds(j.lease_until, j.holder_pid, j.holder_started)"
							  " THEN 'running' ELSE 'waiting' END, j.role"
							  " FROM jq.jobs AS j WHERE j.id = $1"
							  " UNION ALL"
							  " SELECT CASE WHEN f.sqlstate = 'JQ004' THEN 'cancelled' ELSE 'failed' END, f.role"
							  " FROM jq.failed_jobs AS f WHERE f.id = $1"
							  " UNION ALL"
							  " SELECT 'done', NULL"
							  " FROM jq.jobs_id_seq AS s WHERE s.is_called AND $1 BETWEEN 1 AND s.last_value"
							  " LIMIT 1",
							  1, types, values, NULL, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not look for the job");
	if (SPI_processed == 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("job " INT64_FORMAT " does not exist", id)));
	state = SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1);
	role = SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 2);
	if (role && !jq_may_handle_role(section.save_userid, role))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for job " INT64_FORMAT, id)));
	*ended = strcmp(state, "waiting") != 0 && strcmp(state, "running") != 0;
	state = MemoryContextStrdup(PortalContext, state);
	SPI_finish();
	jq_leave_owner(&section);
	PopActiveSnapshot();
	return state;
}

/*
 * Sleep until the job may have ended, but not beyond that time.
 */
static void
wait_a_while(TimestampTz until)
{
	TimestampTz now = GetCurrentTimestamp();
	long		timeout = my_waiter >= 0 ? WAIT_MS : UNAIDED_WAIT_MS;

	if (until != DT_NOEND)
		timeout = Min(timeout, TimestampDifferenceMilliseconds(now, until));
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 timeout, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Wait until the job has ended, but not beyond that time; returns its state.
 * Between two looks there is no snapshot, which would keep dead rows alive.
 */
static char *
wait_for_end(int64 id, TimestampTz until)
{
	for (;;)
	{
		bool		ended;
		char	   *state = state_of_job(id, &ended);

		SPI_commit();
		if (ended || GetCurrentTimestamp() >= until)
			return state;
		wait_a_while(until);
	}
}

/*
 * Raise an error where waiting would answer wrongly or do harm.
 */
static void
require_waitable(FunctionCallInfo fcinfo)
{
	/*
	 * What has not been replayed yet looks like what is done, since sequences
	 * run ahead in WAL.
	 */
	PreventCommandDuringRecovery("jq.wait_for()");

	if (!fcinfo->context || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("jq.wait_for() cannot run inside a transaction block"),
				 errdetail("It would not see the end of the job.")));

	/* whether the job has ended already makes no difference: that is luck */
	if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("jq.wait_for() cannot run in a transaction that has written"),
				 errdetail("It would commit what was written so far."),
				 errhint("Commit before you wait.")));
}

/*
 * CALL jq.wait_for(id, timeout, state)
 */
Datum
jq_wait_for(PG_FUNCTION_ARGS)
{
	TimestampTz until;
	MemoryContext caller_cxt = CurrentMemoryContext;
	TupleDesc	desc;
	char	   *state;
	Datum		value;
	bool		isnull = false;
	int64		id;

	require_waitable(fcinfo);
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("id of a job must not be NULL")));
	id = PG_GETARG_INT64(0);
	until = PG_ARGISNULL(1) ? DT_NOEND :
		jq_time_after(GetCurrentTimestamp(), PG_GETARG_INTERVAL_P(1));
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	desc = CreateTupleDescCopy(desc);

	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	join_waiters(id);
	PG_ENSURE_ERROR_CLEANUP(leave_waiters, (Datum) 0);
	{
		state = wait_for_end(id, until);
	}
	PG_END_ENSURE_ERROR_CLEANUP(leave_waiters, (Datum) 0);
	leave_waiters(0, (Datum) 0);
	SPI_finish();

	MemoryContextSwitchTo(caller_cxt);
	value = CStringGetTextDatum(state);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  &value, &isnull)));
}
