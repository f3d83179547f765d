/*-------------------------------------------------------------------------
 *
 * failed.c
 *	  Jobs that failed for good: how they come to jq.failed_jobs, and how they
 *	  leave it by jq.retry(), jq.retry_all(), jq.forget() and jq.flush().
 *
 * A job keeps its id through all of this.  Whoever takes a failed job locks its
 * row first; of two who take it at the same time the second leaves it to the
 * first.  So nobody waits for another, and two who take the same jobs in
 * different order cannot come to a deadlock.
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
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

PG_FUNCTION_INFO_V1(jq_retry);
PG_FUNCTION_INFO_V1(jq_retry_all);
PG_FUNCTION_INFO_V1(jq_forget);
PG_FUNCTION_INFO_V1(jq_flush);

/* ---------------------------------------------------------------------
 * Coming
 * --------------------------------------------------------------------- */

static void
set_jsonb(Datum *values, bool *nulls, int column, Datum value)
{
	values[column - 1] = value;
	nulls[column - 1] = value == (Datum) 0;
}

/*
 * Write the job to jq.failed_jobs.
 */
void
jq_insert_failed(const JqJob *job, int32 attempts, const JqFailure *failure)
{
	Relation	rel = table_open(jq_catalog()->failed_jobs, RowExclusiveLock);
	Datum		values[FAILED_NATTS];
	bool		nulls[FAILED_NATTS] = {false};

	values[FAILED_ID - 1] = Int64GetDatum(job->id);
	jq_set_text(values, nulls, FAILED_QUEUE, job->queue);
	jq_set_text(values, nulls, FAILED_NAME, job->name);
	values[FAILED_PAYLOAD - 1] = job->payload;
	values[FAILED_PRIORITY - 1] = Int32GetDatum(job->priority);
	values[FAILED_ATTEMPTS - 1] = Int32GetDatum(attempts);
	values[FAILED_MAX_ATTEMPTS - 1] = Int32GetDatum(job->max_attempts);
	jq_set_text(values, nulls, FAILED_ROLE, job->role);
	jq_set_text(values, nulls, FAILED_ERROR, failure->message);
	jq_set_text(values, nulls, FAILED_SQLSTATE, unpack_sql_state(failure->sqlerrcode));
	jq_set_text(values, nulls, FAILED_DETAIL, failure->detail);
	jq_set_text(values, nulls, FAILED_HINT, failure->hint);
	jq_set_text(values, nulls, FAILED_CONTEXT, failure->context);
	jq_set_text(values, nulls, FAILED_LOG, failure->log);
	values[FAILED_CREATED_AT - 1] = TimestampTzGetDatum(job->created_at);
	values[FAILED_FAILED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	set_jsonb(values, nulls, FAILED_META, job->meta);
	set_jsonb(values, nulls, FAILED_FAILURE, job->failure);
	values[FAILED_CHAIN_ID - 1] = Int64GetDatum(job->chain_id);
	nulls[FAILED_CHAIN_ID - 1] = job->chain_id == 0;
	set_jsonb(values, nulls, FAILED_CHAIN, job->chain);
	set_jsonb(values, nulls, FAILED_PREVIOUS, job->previous);
	values[FAILED_BATCH_ID - 1] = Int64GetDatum(job->batch_id);
	nulls[FAILED_BATCH_ID - 1] = job->batch_id == 0;
	values[FAILED_CALLBACK_OF - 1] = Int64GetDatum(job->callback_of);
	nulls[FAILED_CALLBACK_OF - 1] = job->callback_of == 0;
	jq_set_text(values, nulls, FAILED_UNIQUE_KEY, job->unique_key);
	values[FAILED_UNIQUE_FOR - 1] = IntervalPGetDatum(&job->unique_for);
	nulls[FAILED_UNIQUE_FOR - 1] = jq_interval_is_zero(&job->unique_for);
	jq_set_text(values, nulls, FAILED_UNIQUE_UNTIL,
				job->unique_key ? jq_unique_until_name(job->unique_until) : NULL);
	jq_set_text(values, nulls, FAILED_GROUP_KEY, job->group_key);
	nulls[FAILED_SUPERSEDED_BY - 1] = true;

	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
}

/* ---------------------------------------------------------------------
 * Leaving
 * --------------------------------------------------------------------- */

/*
 * Fill in *job with what the failed one was, as a new one of the same id.
 */
static void
renew_job(TupleTableSlot *slot, JqJob *job)
{
	Datum	   *values = slot->tts_values;

	job->stamp = jq_random_stamp();
	job->created_at = DatumGetTimestampTz(values[FAILED_CREATED_AT - 1]);
	job->available_at = GetCurrentTimestamp();
	job->counts_from = job->available_at;
	job->priority = DatumGetInt32(values[FAILED_PRIORITY - 1]);
	job->max_attempts = DatumGetInt32(values[FAILED_MAX_ATTEMPTS - 1]);
	job->queue = TextDatumGetCString(values[FAILED_QUEUE - 1]);
	job->name = TextDatumGetCString(values[FAILED_NAME - 1]);
	job->payload = jq_copy_jsonb(slot, FAILED_PAYLOAD);
	job->meta = jq_copy_jsonb(slot, FAILED_META);
	job->failure = jq_copy_jsonb(slot, FAILED_FAILURE);
	job->chain_id = slot->tts_isnull[FAILED_CHAIN_ID - 1] ? 0 :
		DatumGetInt64(values[FAILED_CHAIN_ID - 1]);
	job->chain = jq_copy_jsonb(slot, FAILED_CHAIN);
	job->previous = jq_copy_jsonb(slot, FAILED_PREVIOUS);
	job->batch_id = slot->tts_isnull[FAILED_BATCH_ID - 1] ? 0 :
		DatumGetInt64(values[FAILED_BATCH_ID - 1]);
	job->callback_of = slot->tts_isnull[FAILED_CALLBACK_OF - 1] ? 0 :
		DatumGetInt64(values[FAILED_CALLBACK_OF - 1]);
	if (!slot->tts_isnull[FAILED_UNIQUE_KEY - 1])
	{
		job->unique_key = TextDatumGetCString(values[FAILED_UNIQUE_KEY - 1]);
		job->unique_until = jq_parse_unique_until(values[FAILED_UNIQUE_UNTIL - 1]);
		if (!slot->tts_isnull[FAILED_UNIQUE_FOR - 1])
			job->unique_for = *DatumGetIntervalP(values[FAILED_UNIQUE_FOR - 1]);
	}
	if (!slot->tts_isnull[FAILED_GROUP_KEY - 1])
		job->group_key = TextDatumGetCString(values[FAILED_GROUP_KEY - 1]);
}

/*
 * Lock the row of a failed job and fill in *job with what it was.  Returns a
 * slot with the row, or NULL if the job has not failed.  Of two sessions that
 * want the same job the second leaves it to the first.
 */
static TupleTableSlot *
lock_failed(Relation rel, int64 id, JqJob *job)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		locked = false;

	ScanKeyInit(&key, FAILED_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(id));
	scan = systable_beginscan(rel, jq_catalog()->failed_jobs_pkey, true, NULL,
							  1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;

		locked = table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
								  GetCurrentCommandId(false), LockTupleExclusive,
								  LockWaitSkip, 0, &tmfd) == TM_Ok;
	}
	systable_endscan(scan);
	if (!locked)
	{
		ExecDropSingleTupleTableSlot(slot);
		return NULL;
	}
	slot_getallattrs(slot);
	job->id = id;
	job->role = TextDatumGetCString(slot->tts_values[FAILED_ROLE - 1]);
	jq_require_own_job(id, job->role);
	renew_job(slot, job);
	return slot;
}

static void
delete_failed(Relation rel, TupleTableSlot *slot)
{
	TM_FailureData tmfd;

	if (table_tuple_delete(rel, &slot->tts_tid, GetCurrentCommandId(true),
						   InvalidSnapshot, InvalidSnapshot, true,
						   &tmfd, false) != TM_Ok)
		elog(ERROR, "could not remove a failed job that is locked");
}

/*
 * A newer job has the key of the failed one: say so in its row.
 */
static void
mark_superseded(Relation rel, TupleTableSlot *slot, const JqJob *job,
				int64 holder)
{
	int			column = FAILED_SUPERSEDED_BY;
	Datum		value = Int64GetDatum(holder);
	bool		isnull = false;
	bool		should_free;
	HeapTuple	old = ExecFetchSlotHeapTuple(slot, true, &should_free);

	CatalogTupleUpdate(rel, &slot->tts_tid,
					   heap_modify_tuple_by_cols(old, RelationGetDescr(rel), 1,
												 &column, &value, &isnull));
	ereport(NOTICE,
			(errmsg("job " INT64_FORMAT " is not retried, since job " INT64_FORMAT " has its unique key",
					job->id, holder)));
}

/*
 * Queue a failed job again, due after the delay and with another payload if
 * these are not NULL.  Returns false if that was not done.
 */
static bool
retry_job(int64 id, const Interval *delay, Datum payload)
{
	Relation	rel = table_open(jq_catalog()->failed_jobs, RowExclusiveLock);
	JqJob		job = {0};
	TupleTableSlot *slot = lock_failed(rel, id, &job);
	int64		holder = 0;
	bool		retried = false;

	if (slot)
	{
		if (delay)
		{
			TimestampTz at = jq_time_after(job.available_at, delay);

			if (TIMESTAMP_NOT_FINITE(at))
				ereport(ERROR,
						(errcode(ERRCODE_DATETIME_FIELD_OVERFLOW),
						 errmsg("a job cannot be due at an infinite time")));
			job.available_at = Max(at, job.available_at);
			job.counts_from = job.available_at;
		}
		if (payload)
			job.payload = payload;

		if (job.unique_key)
			holder = jq_reclaim_key(&job);
		if (holder != 0)
			mark_superseded(rel, slot, &job, holder);
		else if (job.batch_id != 0 && !jq_count_retried(&job))
		{
			if (job.unique_key)
				jq_release_key(&job);
			ereport(NOTICE,
					(errmsg("job " INT64_FORMAT " is not retried, since its batch was cancelled",
							job.id)));
		}
		else
		{
			delete_failed(rel, slot);
			if (job.group_key)
				jq_join_group(&job);
			jq_insert_job(&job, get_role_oid(job.role, true));
			retried = true;
		}
		CommandCounterIncrement();
		ExecDropSingleTupleTableSlot(slot);
	}
	table_close(rel, NoLock);
	return retried;
}

/*
 * jq.retry(id, delay, payload)
 */
Datum
jq_retry(PG_FUNCTION_ARGS)
{
	int64		id = jq_id_argument(fcinfo, "jq.retry()");

	PG_RETURN_BOOL(retry_job(id,
							 PG_ARGISNULL(1) ? NULL : PG_GETARG_INTERVAL_P(1),
							 PG_ARGISNULL(2) ? (Datum) 0 : PG_GETARG_DATUM(2)));
}

/*
 * Retry the jobs that were fetched, as far as that user may; returns how many.
 */
static int64
retry_fetched(Oid userid, MemoryContext job_cxt)
{
	int64		count = 0;

	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext oldcxt = MemoryContextSwitchTo(job_cxt);
		HeapTuple	tuple = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		bool		isnull;
		int64		id = DatumGetInt64(SPI_getbinval(tuple, desc, 1, &isnull));

		if (jq_may_handle_role(userid, SPI_getvalue(tuple, desc, 2)) &&
			retry_job(id, NULL, (Datum) 0))
			count++;
		MemoryContextSwitchTo(oldcxt);
		MemoryContextReset(job_cxt);
	}
	return count;
}

/*
 * jq.retry_all(queue, name, batch_id, failed_since, sqlstate)
 *
 * Jobs that somebody else takes at this moment are left to him, so that two
 * of these can neither take the same job nor wait for each other.
 */
Datum
jq_retry_all(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, TEXTOID, INT8OID, TIMESTAMPTZOID, TEXTOID};
	Datum		values[5];
	char		nulls[] = "     ";
	JqOwnerSection section;
	MemoryContext job_cxt;
	Portal		portal;
	int64		count = 0;

	PreventCommandIfReadOnly("jq.retry_all()");
	for (int i = 0; i < lengthof(values); i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i) ? 'n' : ' ';
	}
	job_cxt = AllocSetContextCreate(CurrentMemoryContext, "jq job",
									ALLOCSET_DEFAULT_SIZES);

	jq_enter_owner(&section);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	portal = SPI_cursor_open_with_args(NULL,
									   "SELECT f.id, f.role FROM jq.failed_jobs AS f"
									   " WHERE ($1 IS NULL OR f.queue = $1)"
									   " AND ($2 IS NULL OR f.name = $2)"
									   " AND ($3 IS NULL OR f.batch_id = $3)"
									   " AND ($4 IS NULL OR f.failed_at >= $4)"
									   " AND ($5 IS NULL OR f.sqlstate = $5)"
									   " ORDER BY f.id",
									   lengthof(types), types, values, nulls,
									   false, 0);
	for (;;)
	{
		SPI_cursor_fetch(portal, true, 1000);
		if (SPI_processed == 0)
			break;
		count += retry_fetched(section.save_userid, job_cxt);
		SPI_freetuptable(SPI_tuptable);
	}
	SPI_cursor_close(portal);
	SPI_finish();
	jq_leave_owner(&section);
	PG_RETURN_INT64(count);
}

/*
 * jq.forget(id)
 */
Datum
jq_forget(PG_FUNCTION_ARGS)
{
	int64		id = jq_id_argument(fcinfo, "jq.forget()");
	Relation	rel = table_open(jq_catalog()->failed_jobs, RowExclusiveLock);
	JqJob		job = {0};
	TupleTableSlot *slot = lock_failed(rel, id, &job);
	int			links;

	if (slot)
	{
		delete_failed(rel, slot);
		ExecDropSingleTupleTableSlot(slot);
	}
	table_close(rel, NoLock);
	if (slot == NULL)
		PG_RETURN_BOOL(false);
	links = jq_chain_length(&job);
	if (links > 0)
		ereport(NOTICE,
				(errmsg_plural("%d job that would have followed is forgotten, too",
							   "%d jobs that would have followed are forgotten, too",
							   links, links)));
	PG_RETURN_BOOL(true);
}

/*
 * jq.flush(older_than, queue, name)
 */
Datum
jq_flush(PG_FUNCTION_ARGS)
{
	Oid			types[] = {INTERVALOID, TEXTOID, TEXTOID};
	Datum		values[3];
	char		nulls[] = "   ";
	Interval	zero = {0};

	jq_require_administer();
	for (int i = 0; i < lengthof(values); i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		if (PG_ARGISNULL(i))
			nulls[i] = 'n';
	}

	/* it would remove all, and is likely a slip */
	if (!PG_ARGISNULL(0) &&
		DatumGetBool(DirectFunctionCall2(interval_lt, values[0],
										 IntervalPGetDatum(&zero))))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("older_than must not be negative")));

	/* what somebody else takes is left to him, as in take_failed() */
	PG_RETURN_INT64(jq_owner_execute("DELETE FROM jq.failed_jobs WHERE id IN"
									 " (SELECT f.id FROM jq.failed_jobs AS f"
									 " WHERE ($1 IS NULL OR f.failed_at < clock_timestamp() - $1)"
									 " AND ($2 IS NULL OR f.queue = $2)"
									 " AND ($3 IS NULL OR f.name = $3)"
									 " ORDER BY f.id FOR UPDATE SKIP LOCKED)",
									 3, types, values, nulls, NULL));
}
