/*-------------------------------------------------------------------------
 *
 * record.c
 *	  Writes how an attempt ended.
 *
 * Each function works in the caller's transaction and on the row that the job
 * was claimed from, found by its tid and proved by id, stamp and token.  A row
 * that is gone, or is another holder's by now, is left alone, and the function
 * says so.
 *
 * The catalogs' insertion and update do for jq's tables what is needed off
 * the hot path: they maintain plain indexes and fire no triggers.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "executor/tuptable.h"
#include "utils/builtins.h"
#include "utils/elog.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* Default wait after the n-th failed attempt: n times this. */
#define DEFAULT_BACKOFF_US	(10 * USECS_PER_SEC)

/*
 * Lock the job's row, in whatever version it is now.  Returns a slot with it,
 * or NULL if it is not ours any more.
 */
static TupleTableSlot *
lock_row(Relation rel, const JqJob *job)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ItemPointerData tid = job->tid;
	TM_FailureData tmfd;
	TM_Result	result;

	result = table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
							  GetCurrentCommandId(false), LockTupleExclusive,
							  LockWaitBlock, TUPLE_LOCK_FLAG_FIND_LAST_VERSION,
							  &tmfd);
	if (result == TM_Ok)
	{
		slot_getallattrs(slot);
		if (DatumGetInt64(slot->tts_values[JOBS_ID - 1]) == job->id &&
			DatumGetInt64(slot->tts_values[JOBS_STAMP - 1]) == job->stamp &&
			(slot->tts_isnull[JOBS_TOKEN - 1] ? 0 :
			 DatumGetInt64(slot->tts_values[JOBS_TOKEN - 1])) == job->token)
			return slot;
	}
	ExecDropSingleTupleTableSlot(slot);
	return NULL;
}

/*
 * The job is done: remove it.  Returns false if it was not ours to remove.
 */
bool
jq_record_done(const JqJob *job)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	ItemPointerData tid = job->tid;
	TM_FailureData tmfd;
	bool		ours = true;

	/* a row that we have locked in this transaction cannot have changed */
	if (job->token != 0)
	{
		TupleTableSlot *slot = lock_row(rel, job);

		ours = (slot != NULL);
		if (ours)
		{
			tid = slot->tts_tid;
			ExecDropSingleTupleTableSlot(slot);
		}
	}
	if (ours)
		ours = table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
								  InvalidSnapshot, InvalidSnapshot, true,
								  &tmfd, false) == TM_Ok;
	table_close(rel, NoLock);
	return ours;
}

/*
 * The time at which a job is due again after its n-th attempt failed.
 */
static TimestampTz
next_attempt_at(const JqHandler *handler, int32 attempt)
{
	TimestampTz now = GetCurrentTimestamp();
	Interval	wait = {0};

	if (handler && handler->nbackoff > 0)
		wait = handler->backoff[Min(attempt, handler->nbackoff) - 1];
	else
		wait.time = DEFAULT_BACKOFF_US * attempt;

	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(now),
												   IntervalPGetDatum(&wait)));
}

static void
set_text(Datum *values, bool *nulls, int column, const char *text)
{
	nulls[column - 1] = (text == NULL);
	if (text)
		values[column - 1] = CStringGetTextDatum(text);
}

/*
 * Move the job to jq.failed_jobs.
 */
static void
insert_failed(TupleTableSlot *row, int32 attempts, const JqFailure *failure)
{
	Relation	rel = table_open(jq_catalog()->failed_jobs, RowExclusiveLock);
	Datum		values[FAILED_NATTS];
	bool		nulls[FAILED_NATTS] = {false};
	Datum	   *job = row->tts_values;
	HeapTuple	tuple;

	values[FAILED_ID - 1] = job[JOBS_ID - 1];
	values[FAILED_QUEUE - 1] = job[JOBS_QUEUE - 1];
	values[FAILED_NAME - 1] = job[JOBS_NAME - 1];
	values[FAILED_PAYLOAD - 1] = job[JOBS_PAYLOAD - 1];
	values[FAILED_PRIORITY - 1] = job[JOBS_PRIORITY - 1];
	values[FAILED_ATTEMPTS - 1] = Int32GetDatum(attempts);
	values[FAILED_MAX_ATTEMPTS - 1] = job[JOBS_MAX_ATTEMPTS - 1];
	values[FAILED_ROLE - 1] = job[JOBS_ROLE - 1];
	set_text(values, nulls, FAILED_ERROR, failure->message);
	set_text(values, nulls, FAILED_SQLSTATE, unpack_sql_state(failure->sqlerrcode));
	set_text(values, nulls, FAILED_DETAIL, failure->detail);
	set_text(values, nulls, FAILED_HINT, failure->hint);
	set_text(values, nulls, FAILED_CONTEXT, failure->context);
	values[FAILED_CREATED_AT - 1] = job[JOBS_CREATED_AT - 1];
	values[FAILED_FAILED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());

	tuple = heap_form_tuple(RelationGetDescr(rel), values, nulls);
	CatalogTupleInsert(rel, tuple);
	table_close(rel, NoLock);
}

/*
 * Write a new version of a locked row, with these columns replaced.
 */
static void
update_row(Relation rel, TupleTableSlot *slot, int ncolumns, int *columns,
		   Datum *values, bool *nulls)
{
	bool		should_free;
	HeapTuple	old = ExecFetchSlotHeapTuple(slot, true, &should_free);
	HeapTuple	new = heap_modify_tuple_by_cols(old, RelationGetDescr(rel),
												ncolumns, columns, values, nulls);

	CatalogTupleUpdate(rel, &slot->tts_tid, new);
	if (should_free)
		heap_freetuple(old);
}

/*
 * The attempt failed: write when the job is due again or, after its last
 * attempt or a permanent failure, move it to jq.failed_jobs.  handler may be
 * NULL.  Returns false if the job was not ours any more.
 */
bool
jq_record_failure(const JqJob *job, Oid roleid, const JqHandler *handler,
				  const JqFailure *failure)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job);
	int32		attempts = job->attempts + (failure->unspent ? 0 : 1);

	if (slot == NULL)
	{
		table_close(rel, NoLock);
		return false;
	}

	if (failure->permanent || attempts >= job->max_attempts)
	{
		ItemPointerData tid = slot->tts_tid;
		TM_FailureData tmfd;

		insert_failed(slot, Min(attempts, job->max_attempts), failure);
		if (table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
							   InvalidSnapshot, InvalidSnapshot, true,
							   &tmfd, false) != TM_Ok)
			elog(ERROR, "could not remove failed job " INT64_FORMAT, job->id);
	}
	else
	{
		int			columns[] = {JOBS_ATTEMPTS, JOBS_AVAILABLE_AT, JOBS_TOKEN,
		JOBS_RESERVED_AT, JOBS_LEASE_UNTIL};
		bool		nulls[] = {false, false, true, true, true};
		Datum		values[5] = {0};
		JqKey		key = {next_attempt_at(handler, attempts), job->id};

		if (failure->unspent)
			key.at = GetCurrentTimestamp();
		values[0] = Int32GetDatum(attempts);
		values[1] = TimestampTzGetDatum(key.at);
		update_row(rel, slot, lengthof(columns), columns, values, nulls);
		jq_note_due(roleid, job->queue, job->priority, key);
	}
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	return true;
}

/*
 * Hold the job, whose row is locked, under a lease from now on, and count the
 * attempt.  When this has committed, the job is the holder of the token's.
 */
void
jq_start_lease(JqJob *job, const JqHandler *handler)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot;
	int64		lease_us = jq_lease * USECS_PER_SEC;
	TimestampTz now = GetCurrentTimestamp();
	int			columns[] = {JOBS_ATTEMPTS, JOBS_TOKEN, JOBS_RESERVED_AT,
	JOBS_LEASE_UNTIL};
	bool		nulls[] = {false, false, false, false};
	Datum		values[4];
	int64		token;

	if (handler && handler->timeout_us > 0)
		lease_us = Max(lease_us, handler->timeout_us + USECS_PER_MINUTE);
	do
	{
		if (!pg_strong_random(&token, sizeof(token)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate a token")));
	} while (token == 0);

	slot = lock_row(rel, job);
	if (slot == NULL)
		elog(ERROR, "job " INT64_FORMAT " is gone though locked", job->id);
	values[0] = Int32GetDatum(job->attempts + 1);
	values[1] = Int64GetDatum(token);
	values[2] = TimestampTzGetDatum(now);
	values[3] = TimestampTzGetDatum(now + lease_us);
	update_row(rel, slot, lengthof(columns), columns, values, nulls);
	job->tid = slot->tts_tid;
	job->token = token;
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
}
