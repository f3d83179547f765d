/*-------------------------------------------------------------------------
 *
 * record.c
 *	  Writes how an attempt ended.
 *
 * Each function works in the caller's transaction and on the row that the job
 * was claimed from, found by its id and proved by stamp and token.  A row
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

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "commands/async.h"
#include "executor/tuptable.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/procarray.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/elog.h"
#include "utils/fmgroids.h"
#include "utils/json.h"
#include "utils/jsonb.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* Default wait after the n-th failed attempt: n times this, a day at most. */
#define DEFAULT_BACKOFF_US	(10 * USECS_PER_SEC)

/* A released job waits this long at least, so that it cannot spin. */
#define MIN_RELEASE_US		INT64CONST(100000)

static void follow_up(const JqJob *job, Oid roleid, const JqHandler *handler,
					  const JqFailure *failure, int32 attempts);
static void update_row(Relation rel, TupleTableSlot *slot, int ncolumns,
					   int *columns, Datum *values, bool *nulls);

/*
 * Find the job's row as it is now.  The place that it was claimed from may
 * have been given to another row, unless we have it locked.
 */
static bool
find_row(Relation rel, const JqJob *job, ItemPointer tid)
{
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, JOBS_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(job->id));
	scan = systable_beginscan(rel, jq_catalog()->jobs_pkey, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		*tid = tuple->t_self;
	systable_endscan(scan);
	return HeapTupleIsValid(tuple);
}

/*
 * Lock the job's row, in whatever version it is now.  Returns a slot with it,
 * or NULL if it is not ours any more, or somebody has it and we do not wait.
 */
static TupleTableSlot *
lock_row(Relation rel, const JqJob *job, LockWaitPolicy policy)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ItemPointerData tid;
	TM_FailureData tmfd;

	if (find_row(rel, job, &tid) &&
		table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
						 GetCurrentCommandId(false), LockTupleExclusive, policy,
						 TUPLE_LOCK_FLAG_FIND_LAST_VERSION, &tmfd) == TM_Ok)
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
 * Whether a job of that id waits or runs, by what has committed, and what we
 * have done ourselves.
 */
bool
jq_job_exists(int64 id)
{
	Relation	rel = table_open(jq_catalog()->jobs, AccessShareLock);
	JqJob		job = {.id = id};
	ItemPointerData tid;
	bool		result = find_row(rel, &job, &tid);

	table_close(rel, AccessShareLock);
	return result;
}

/*
 * Whether the job is held under the lease of that token, and the lease is not
 * over.
 */
bool
jq_lease_is_valid(int64 job_id, int64 token)
{
	Relation	rel = table_open(jq_catalog()->jobs, AccessShareLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	JqJob		job = {.id = job_id};
	ItemPointerData tid;
	bool		result = false;

	if (find_row(rel, &job, &tid) &&
		table_tuple_fetch_row_version(rel, &tid, SnapshotAny, slot))
	{
		Datum	   *values = slot->tts_values;
		bool	   *nulls = slot->tts_isnull;

		slot_getallattrs(slot);
		result = !nulls[JOBS_TOKEN - 1] &&
			DatumGetInt64(values[JOBS_TOKEN - 1]) == token &&
			DatumGetTimestampTz(values[JOBS_LEASE_UNTIL - 1]) > GetCurrentTimestamp() &&
			(nulls[JOBS_HOLDER_PID - 1] ||
			 jq_holder_lives(DatumGetInt32(values[JOBS_HOLDER_PID - 1]),
							 DatumGetTimestampTz(values[JOBS_HOLDER_STARTED - 1])));
	}
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, AccessShareLock);
	return result;
}

/*
 * Lock the row of a job that we have claimed before, in a transaction that was
 * rolled back.  Returns false if somebody else has come to it.
 */
bool
jq_lock_job(JqJob *job)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job, LockWaitSkip);

	if (slot)
	{
		job->tid = slot->tts_tid;
		ExecDropSingleTupleTableSlot(slot);
	}
	table_close(rel, NoLock);
	return slot != NULL;
}

static void
delete_row(Relation rel, ItemPointer tid, const JqJob *job)
{
	TM_FailureData tmfd;

	if (table_tuple_delete(rel, tid, GetCurrentCommandId(true),
						   InvalidSnapshot, InvalidSnapshot, true,
						   &tmfd, false) != TM_Ok)
		elog(ERROR, "could not remove job " INT64_FORMAT, job->id);
}

/*
 * What follows the job by now, 0 if nothing does.  The job is being run, and
 * its row is ours or leased to us.
 */
Datum
jq_lock_chain(const JqJob *job)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job, LockWaitBlock);
	Datum		chain;

	if (slot == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("job " INT64_FORMAT " is not this session's any more",
						job->id)));
	chain = jq_copy_jsonb(slot, JOBS_CHAIN);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	return chain;
}

/*
 * Write what follows the job that is being run.
 */
void
jq_write_chain(const JqJob *job, Datum chain)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job, LockWaitBlock);
	int			columns[] = {JOBS_CHAIN_ID, JOBS_CHAIN};
	bool		nulls[] = {false, false};
	Datum		values[2];

	if (slot == NULL)
		elog(ERROR, "job " INT64_FORMAT " is gone though locked", job->id);
	values[0] = Int64GetDatum(job->chain_id ? job->chain_id : job->id);
	values[1] = chain;
	update_row(rel, slot, lengthof(columns), columns, values, nulls);
	CommandCounterIncrement();
	jq_note_chain_written();
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
}

/*
 * The job has left jq.jobs, and is not retried: give up what it had on others.
 */
static void
settle_ties(const JqJob *job)
{
	if (job->unique_key && job->unique_until != JQ_UNTIL_EXPIRY)
		jq_release_key(job);
	if (job->group_key)
		jq_leave_group(job);
}

/*
 * The job is done, or counts as such: let others go on.  previous is its
 * result for the next link of its chain, 0 if there is none.
 */
static void
go_on(const JqJob *job, Oid roleid, Datum previous)
{
	int			dropped = 0;

	settle_ties(job);
	if (job->chain)
		dropped = jq_queue_next_link(job, roleid, previous);
	if (job->batch_id != 0)
		jq_count_ended(job, 1 + dropped);
}

/*
 * The job is done: remove it, queue what follows it, and keep its result if
 * the handler was registered so.  Returns false if it was not ours to remove.
 */
bool
jq_record_done(JqJob *job, Oid roleid, const JqHandler *handler,
			   const JqCallResult *result)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	ItemPointerData tid = job->tid;
	TM_FailureData tmfd;
	bool		ours = true;

	/* only we ourselves can have changed a row that we have locked */
	if (job->token != 0 || jq_chain_was_written())
	{
		TupleTableSlot *slot = lock_row(rel, job, LockWaitBlock);

		ours = (slot != NULL);
		if (ours)
		{
			tid = slot->tts_tid;
			job->chain = jq_copy_jsonb(slot, JOBS_CHAIN);
			if (!slot->tts_isnull[JOBS_CHAIN_ID - 1])
				job->chain_id = DatumGetInt64(slot->tts_values[JOBS_CHAIN_ID - 1]);
			ExecDropSingleTupleTableSlot(slot);
		}
	}
	if (ours)
		ours = table_tuple_delete(rel, &tid, GetCurrentCommandId(true),
								  InvalidSnapshot, InvalidSnapshot, true,
								  &tmfd, false) == TM_Ok;
	table_close(rel, NoLock);

	if (ours)
		go_on(job, roleid,
			  result->isnull || !handler->returns_jsonb ? (Datum) 0 :
			  PointerGetDatum(PG_DETOAST_DATUM(result->value)));
	if (ours && !jq_interval_is_zero(&handler->keep_result))
		jq_keep_result(job, handler, result);
	if (ours && jq_keep_attempts > 0)
		jq_keep_attempt(job, "done", NULL);
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
		wait.time = Min(DEFAULT_BACKOFF_US * attempt, USECS_PER_DAY);
	return jq_time_after(now, &wait);
}

static bool
is_permanent(const JqHandler *handler, const JqFailure *failure)
{
	for (int i = 0; i < handler->npermanent; i++)
	{
		int			code = handler->permanent[i];

		if (code == failure->sqlerrcode ||
			(ERRCODE_IS_CATEGORY(code) &&
			 code == ERRCODE_TO_CATEGORY(failure->sqlerrcode)))
			return true;
	}
	return false;
}

/*
 * Whether the job has failed for good; *next is when it is due again if not.
 */
static bool
is_final(const JqJob *job, const JqHandler *handler, const JqFailure *failure,
		 int32 attempts, int32 exceptions, TimestampTz *next)
{
	TimestampTz deadline = jq_deadline(handler, job);

	if (failure->permanent || failure->end == JQ_END_CANCELLED)
		return true;
	if (handler)
	{
		if (is_permanent(handler, failure) ||
			(handler->fail_on_timeout && failure->timed_out) ||
			(handler->max_exceptions > 0 && exceptions >= handler->max_exceptions))
			return true;
	}
	*next = failure->at_once ? GetCurrentTimestamp() :
		next_attempt_at(handler, attempts);
	if (deadline != DT_NOEND)
		return *next > deadline;
	return attempts >= job->max_attempts;
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

	jq_update_job(rel, &slot->tts_tid, new);
	if (should_free)
		heap_freetuple(old);
}

/*
 * The job is due again at this time; last_error may be NULL.
 */
static void
put_back(Relation rel, TupleTableSlot *slot, const JqJob *job, Oid roleid,
		 int32 attempts, int32 exceptions, const char *last_error,
		 TimestampTz at)
{
	int			columns[] = {JOBS_ATTEMPTS, JOBS_EXCEPTIONS, JOBS_AVAILABLE_AT,
		JOBS_LAST_ERROR, JOBS_TOKEN, JOBS_RESERVED_AT, JOBS_LEASE_UNTIL,
	JOBS_HOLDER_PID, JOBS_HOLDER_STARTED};
	bool		nulls[] = {false, false, false, last_error == NULL, true, true, true,
	true, true};
	Datum		values[lengthof(columns)] = {0};
	JqKey		key = {at, job->id};

	values[0] = Int32GetDatum(attempts);
	values[1] = Int32GetDatum(exceptions);
	values[2] = TimestampTzGetDatum(at);
	if (last_error)
		values[3] = CStringGetTextDatum(last_error);
	update_row(rel, slot, lengthof(columns), columns, values, nulls);
	if (OidIsValid(roleid))
		jq_note_due(roleid, job->queue, job->priority, key);
}

/*
 * The job, which is ours, is due at this time, and else as it was.
 */
void
jq_put_off(const JqJob *job, TimestampTz at)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job, LockWaitBlock);
	int			column = JOBS_AVAILABLE_AT;
	Datum		value = TimestampTzGetDatum(at);
	bool		isnull = false;

	if (slot == NULL)
		elog(ERROR, "job " INT64_FORMAT " is gone though locked", job->id);
	update_row(rel, slot, 1, &column, &value, &isnull);
	CommandCounterIncrement();
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
}

/*
 * The same, and let workers know.
 */
void
jq_release_until(const JqJob *job, Oid roleid, TimestampTz at)
{
	JqKey		key = {at, job->id};

	jq_put_off(job, at);
	jq_note_due(roleid, job->queue, job->priority, key);
}

/*
 * We had a job and have held it, and let go of it since: if somebody has made it
 * due again meanwhile, those who passed it as ours have to be told.
 */
void
jq_note_if_freed(const JqJob *job, Oid roleid)
{
	Relation	rel = table_open(jq_catalog()->jobs, AccessShareLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ItemPointerData tid;

	if (find_row(rel, job, &tid) &&
		table_tuple_fetch_row_version(rel, &tid, SnapshotAny, slot))
	{
		bool		isnull;
		JqKey		key = {0, job->id};

		key.at = DatumGetTimestampTz(slot_getattr(slot, JOBS_AVAILABLE_AT, &isnull));
		if (key.at != DT_NOEND)
			jq_note_due(roleid, job->queue, job->priority, key);
	}
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
}

/*
 * The job of that id, if it waits in jq.held, is due again.
 */
JqFreeing
jq_free_held_job(int64 id, TimestampTz due_at)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	JqJob		job = {.id = id};
	JqFreeing	result = JQ_HELD_VOID;
	ItemPointerData tid;
	TM_FailureData tmfd;
	TM_Result	locking = TM_Deleted;

	if (find_row(rel, &job, &tid))
		locking = table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
								   GetCurrentCommandId(false), LockTupleExclusive,
								   LockWaitSkip, TUPLE_LOCK_FLAG_FIND_LAST_VERSION,
								   &tmfd);
	if (locking == TM_WouldBlock)
		result = JQ_HELD_BUSY;
	else if (locking == TM_Ok)
	{
		slot_getallattrs(slot);
		if (DatumGetInt64(slot->tts_values[JOBS_ID - 1]) == id &&
			DatumGetTimestampTz(slot->tts_values[JOBS_AVAILABLE_AT - 1]) == DT_NOEND)
		{
			int			column = JOBS_AVAILABLE_AT;
			Datum		value = TimestampTzGetDatum(due_at);
			bool		isnull = false;
			JqKey		key = {due_at, id};
			Oid			roleid = get_role_oid(TextDatumGetCString(slot->tts_values[JOBS_ROLE - 1]), true);
			char	   *queue = TextDatumGetCString(slot->tts_values[JOBS_QUEUE - 1]);
			int32		priority = DatumGetInt32(slot->tts_values[JOBS_PRIORITY - 1]);

			update_row(rel, slot, 1, &column, &value, &isnull);
			if (OidIsValid(roleid))
				jq_note_due(roleid, queue, priority, key);
			result = JQ_HELD_FREED;
		}
	}
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	return result;
}

/*
 * Write the due time, queue, priority and number of attempts of the job, whose
 * row is locked, as they are in *job.
 */
void
jq_move_job(const JqJob *job, Oid roleid)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job, LockWaitBlock);
	int			columns[] = {JOBS_AVAILABLE_AT, JOBS_QUEUE, JOBS_PRIORITY,
	JOBS_MAX_ATTEMPTS, JOBS_COUNTS_FROM};
	bool		nulls[lengthof(columns)] = {false};
	Datum		values[lengthof(columns)];
	JqKey		key = {job->available_at, job->id};

	if (slot == NULL)
		elog(ERROR, "job " INT64_FORMAT " is gone though locked", job->id);
	values[0] = TimestampTzGetDatum(job->available_at);
	values[1] = CStringGetTextDatum(job->queue);
	values[2] = Int32GetDatum(job->priority);
	values[3] = Int32GetDatum(job->max_attempts);
	values[4] = TimestampTzGetDatum(job->counts_from);
	update_row(rel, slot, lengthof(columns), columns, values, nulls);
	CommandCounterIncrement();
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	jq_note_held(0);			/* it may have had its turn at a limit */
	if (OidIsValid(roleid))
		jq_note_due(roleid, job->queue, job->priority, key);
}

/*
 * Remove a waiting job, whose row is locked, because another one takes its
 * place: *job, which will have its id, is in its batch then.
 */
void
jq_replace_job(const JqJob *former, JqJob *job)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	ItemPointerData tid = former->tid;

	delete_row(rel, &tid, former);
	table_close(rel, NoLock);
	if (former->group_key)
		jq_leave_group(former);
	job->batch_id = former->batch_id;
	job->callback_of = former->callback_of;
	if (job->batch_id != 0)
	{
		jq_join_batch(job->batch_id, true);
		jq_add_to_total(job->batch_id,
						jq_chain_length(job) - jq_chain_length(former));
	}
}

static int32
one_more(int32 count, bool counts)
{
	return counts && count < PG_INT32_MAX ? count + 1 : count;
}

static TimestampTz
release_time(const JqFailure *failure)
{
	TimestampTz now = GetCurrentTimestamp();

	return Max(jq_time_after(now, &failure->delay), now + MIN_RELEASE_US);
}

/*
 * What the job's row says of the failure while the job waits for its next
 * attempt.
 */
static char *
error_to_keep(const JqFailure *failure)
{
	return psprintf("%s: %s", unpack_sql_state(failure->sqlerrcode),
					failure->message);
}

/*
 * A release that leads past the time for attempts ends the job.  It spends no
 * attempt, so nothing else would ever end a job that is always released.
 */
static void
judge_release(const JqJob *job, const JqHandler *handler, JqFailure *failure)
{
	if (failure->end != JQ_END_RELEASED ||
		release_time(failure) <= jq_deadline(handler, job))
		return;
	failure->end = JQ_END_FAILED;
	failure->permanent = true;
	failure->sqlerrcode = ERRCODE_JQ_EXPIRED;
	failure->message = "released beyond its deadline";
	failure->detail = jq_last_error_detail(job);
	failure->hint = NULL;
	failure->context = NULL;
}

static const char *
outcome_name(const JqFailure *failure)
{
	switch (failure->end)
	{
		case JQ_END_RELEASED:
			return "released";
		case JQ_END_SKIPPED:
		case JQ_END_DROPPED:
			return "skipped";
		case JQ_END_CANCELLED:
			return "cancelled";
		default:
			return "failed";
	}
}

/*
 * The attempt did not end well: write what becomes of the job.  It is removed
 * if it was skipped, due again if it was released or has attempts left, and
 * else moved to jq.failed_jobs; *gone tells whether it has left jq.jobs.
 * handler may be NULL.  Returns false if the job was not ours any more.
 */
bool
jq_record_failure(const JqJob *job, Oid roleid, const JqHandler *handler,
				  const JqFailure *failure, bool *gone)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot = lock_row(rel, job, LockWaitBlock);
	JqFailure	described = *failure;
	int32		attempts = one_more(job->attempts, !failure->unspent);
	int32		exceptions = one_more(job->exceptions, failure->exception);
	TimestampTz next;

	*gone = true;
	if (failure->durable)
		ForceSyncCommit();
	if (slot == NULL)
	{
		table_close(rel, NoLock);
		return false;
	}

	if (failure->end == JQ_END_CANCELLED)
		jq_describe_cancellation(job, &described);
	if (jq_keep_attempts > 0)
		jq_keep_attempt(job, outcome_name(failure), &described);
	judge_release(job, handler, &described);

	/* it had its turn at a limit, or a lease that is over had a place there */
	if (job->ngates == 0 && handler && jq_needs_admission(job, handler))
		jq_note_held(0);

	if (described.end == JQ_END_SKIPPED)
	{
		delete_row(rel, &slot->tts_tid, job);
		go_on(job, roleid, (Datum) 0);
	}
	else if (described.end == JQ_END_DROPPED)
	{
		delete_row(rel, &slot->tts_tid, job);
		settle_ties(job);
		jq_note_held(0);
		jq_count_cancelled(job);
	}
	else if (described.end == JQ_END_RELEASED)
	{
		put_back(rel, slot, job, roleid, attempts, exceptions, job->last_error,
				 release_time(&described));
		*gone = false;
	}
	else if (is_final(job, handler, &described, attempts, exceptions, &next))
	{
		delete_row(rel, &slot->tts_tid, job);
		jq_insert_failed(job, attempts, &described);
		jq_remove_cancellation(job);
		settle_ties(job);
		if (job->batch_id != 0)
			jq_count_failed(job, &described, attempts);
		follow_up(job, roleid, handler, &described, attempts);
	}
	else
	{
		put_back(rel, slot, job, roleid, attempts, exceptions,
				 error_to_keep(&described), next);
		*gone = false;
	}
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	return true;
}

/*
 * What the follower of a failed job is told of it.
 */
Datum
jq_failure_as_jsonb(const JqJob *job, const JqFailure *failure, int32 attempts)
{
	StringInfoData json;
	const char *const texts[][2] = {
		{"name", job->name},
		{"queue", job->queue},
		{"error", failure->message},
		{"sqlstate", unpack_sql_state(failure->sqlerrcode)},
		{"detail", failure->detail},
		{"hint", failure->hint},
		{"context", failure->context},
		{"failed_at", timestamptz_to_str(GetCurrentTimestamp())},
	};

	initStringInfo(&json);
	appendStringInfo(&json, "{\"id\": " INT64_FORMAT ", \"attempts\": %d",
					 job->id, attempts);
	for (int i = 0; i < lengthof(texts); i++)
	{
		appendStringInfo(&json, ", \"%s\": ", texts[i][0]);
		if (texts[i][1])
			escape_json(&json, texts[i][1]);
		else
			appendStringInfoString(&json, "null");
	}
	appendStringInfoChar(&json, '}');
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data));
}

/*
 * Dispatch a job that follows the failure of another one.  If that cannot be
 * done, it goes to jq.failed_jobs itself: the failure of the other one must be
 * recorded whatever happens.
 */
void
jq_dispatch_follower(JqJob *follow, Oid roleid)
{
	MemoryContext cxt = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(cxt);
	PG_TRY();
	{
		jq_dispatch_follow_up(follow, roleid);
		ReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(cxt);
		CurrentResourceOwner = owner;
	}
	PG_CATCH();
	{
		JqFailure  *reason = jq_capture_failure(cxt);

		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(cxt);
		CurrentResourceOwner = owner;
		reason->log = NULL;
		if (follow->queue == NULL)
		{
			follow->queue = "default";
			follow->max_attempts = 1;
		}
		jq_insert_failed(follow, 0, reason);
		if (follow->batch_id != 0)
			jq_count_failed(follow, reason, 0);
	}
	PG_END_TRY();
}

/*
 * The job that the handler of a failed one asks for.
 */
static void
make_on_failed_job(const JqJob *job, const JqHandler *handler, JqJob *follow)
{
	memset(follow, 0, sizeof(JqJob));
	follow->id = jq_next_job_id();
	follow->stamp = jq_random_stamp();
	follow->created_at = GetCurrentTimestamp();
	follow->available_at = follow->created_at;
	follow->counts_from = follow->created_at;
	follow->role = job->role;
	follow->name = pstrdup(handler->on_failed);
	follow->payload = job->payload;
	follow->meta = job->meta;
}

/*
 * Tell others of a job that failed for good.  The follower of a failure has
 * none itself, or one that always fails would go on for ever.
 */
static void
follow_up(const JqJob *job, Oid roleid, const JqHandler *handler,
		  const JqFailure *failure, int32 attempts)
{
	bool		has_on_failed = handler && handler->on_failed[0] != '\0' &&
	job->failure == (Datum) 0;
	JqJob		follow;

	if (has_on_failed)
	{
		make_on_failed_job(job, handler, &follow);
		follow.failure = jq_failure_as_jsonb(job, failure, attempts);
		jq_dispatch_follower(&follow, roleid);
	}
	if (jq_make_catch_job(job, &follow))
	{
		follow.failure = jq_failure_as_jsonb(job, failure, attempts);
		jq_dispatch_follower(&follow, roleid);
	}
	if (handler && jq_notify_failed)
		Async_Notify("jq_failed", psprintf(INT64_FORMAT, job->id));
}

/*
 * Hold the job, whose row is locked, under a lease of this session from now
 * on, and count the attempt.  When this has committed, the job is the holder
 * of the token's.
 */
void
jq_start_lease(JqJob *job, const JqHandler *handler)
{
	Relation	rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	TupleTableSlot *slot;
	int64		lease_us = jq_lease * USECS_PER_SEC;
	TimestampTz now = GetCurrentTimestamp();
	int			columns[] = {JOBS_ATTEMPTS, JOBS_TOKEN, JOBS_RESERVED_AT,
	JOBS_LEASE_UNTIL, JOBS_HOLDER_PID, JOBS_HOLDER_STARTED};
	bool		nulls[lengthof(columns)] = {false};
	Datum		values[lengthof(columns)];
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

	ForceSyncCommit();			/* the count must outlive a crash */
	slot = lock_row(rel, job, LockWaitBlock);
	if (slot == NULL)
		elog(ERROR, "job " INT64_FORMAT " is gone though locked", job->id);
	values[0] = Int32GetDatum(one_more(job->attempts, true));
	values[1] = Int64GetDatum(token);
	values[2] = TimestampTzGetDatum(now);
	values[3] = TimestampTzGetDatum(now + lease_us);
	values[4] = Int32GetDatum(MyProcPid);
	values[5] = TimestampTzGetDatum(MyStartTimestamp);
	update_row(rel, slot, lengthof(columns), columns, values, nulls);
	job->token = token;
	job->pid = MyProcPid;
	job->started_at = now;
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
}

/*
 * Whether the session that holds a lease is still there.  The start tells it
 * from a later one with the same process id, and from one of another server.
 */
bool
jq_holder_lives(int32 pid, TimestampTz started)
{
	if (BackendPidGetProc(pid) == NULL)
		return false;

	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
	{
		PgBackendStatus *status = &pgstat_get_local_beentry_by_index(i)->backendStatus;

		if (status->st_procpid == pid)
			return status->st_proc_start_timestamp == started;
	}
	return false;
}
