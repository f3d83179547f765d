/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  Batches of jobs: how they are made, counted, finished and cancelled.
 *
 * No row is shared by the jobs of a batch.  Each process adds up what it did
 * in a row of its own in jq.batch_counts, and whoever wants the batch's numbers
 * sums these up.  A job's end changes the counts in the transaction that
 * removes the job, so the sum, taken by one snapshot, is always exact.
 *
 * Whether a batch is finished is decided by jq_consider_batch(), which the
 * scheduler calls after transactions that counted have committed.  It holds
 * the batch's lock exclusively and marks in jq.batches what it did, so each
 * callback is queued once.  Transactions that add jobs hold the lock in share
 * mode, so that a batch cannot finish while one is being added to.  The first
 * failure is seen to in the transaction that records it.
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
#include "catalog/index.h"
#include "catalog/indexing.h"
#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* Jobs of a cancelled batch that are settled in one transaction. */
#define SETTLE_CHUNK 1000

typedef struct Counts
{
	int64		total;
	int64		ended;
	int64		failed;
	int64		cancelled;
} Counts;

/* This process's row of the batch that it counted in last. */
static struct
{
	bool		valid;
	bool		written;		/* by the current transaction */
	int64		batch_id;
	int64		id;
	ItemPointerData tid;
	uint64		epoch;			/* of the catalog */
	Counts		counts;
}			own;

/* A batch that a (sub)transaction adds jobs to. */
typedef struct Joining
{
	int64		batch_id;
	int			nest_level;
	int64		total;
} Joining;

static List *joins = NIL;		/* in TopTransactionContext */

/* A row of jq.batches. */
typedef struct Batch
{
	ItemPointerData tid;
	HeapTuple	tuple;
	Datum		values[BATCHES_NATTS];
	bool		nulls[BATCHES_NATTS];
} Batch;

PG_FUNCTION_INFO_V1(jq_dispatch_batch);
PG_FUNCTION_INFO_V1(jq_open_batch);
PG_FUNCTION_INFO_V1(jq_close_batch);
PG_FUNCTION_INFO_V1(jq_add_to_batch);
PG_FUNCTION_INFO_V1(jq_cancel_batch);

/* ---------------------------------------------------------------------
 * Rows of jq.batches
 * --------------------------------------------------------------------- */

/*
 * Read the batch as it is now, and lock its row if asked for; false if there
 * is no such batch.
 */
static bool
read_batch(int64 batch_id, bool lock, Batch *batch)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->batches, lock ? RowExclusiveLock : AccessShareLock);
	bool		found = false;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, BATCHES_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(batch_id));
	scan = systable_beginscan(rel, catalog->batches_pkey, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple) && !lock)
	{
		batch->tuple = heap_copytuple(tuple);
		found = true;
	}
	else if (HeapTupleIsValid(tuple))
	{
		TupleTableSlot *slot = table_slot_create(rel, NULL);
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;

		/* only the removal of a batch long finished can come between */
		found = table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
								 GetCurrentCommandId(false),
								 LockTupleExclusive, LockWaitBlock,
								 TUPLE_LOCK_FLAG_FIND_LAST_VERSION, &tmfd) == TM_Ok;
		if (found)
			batch->tuple = ExecCopySlotHeapTuple(slot);
		ExecDropSingleTupleTableSlot(slot);
	}
	if (found)
	{
		batch->tid = batch->tuple->t_self;
		heap_deform_tuple(batch->tuple, RelationGetDescr(rel), batch->values,
						  batch->nulls);
	}
	systable_endscan(scan);
	table_close(rel, NoLock);
	return found;
}

static void
set_time(Batch *batch, int column)
{
	batch->values[column - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	batch->nulls[column - 1] = false;
}

static bool
is_set(const Batch *batch, int column)
{
	return !batch->nulls[column - 1];
}

/*
 * Write the batch, whose row is locked, as it is now.
 */
static void
write_batch(Batch *batch)
{
	Relation	rel = table_open(jq_catalog()->batches, RowExclusiveLock);

	CatalogTupleUpdate(rel, &batch->tid,
					   heap_form_tuple(RelationGetDescr(rel), batch->values,
									   batch->nulls));
	table_close(rel, NoLock);
	CommandCounterIncrement();
}

static char *
batch_role(const Batch *batch)
{
	return TextDatumGetCString(batch->values[BATCHES_ROLE - 1]);
}

/*
 * Take the lock that stands between those who add to a batch and those who
 * end it.  Returns false if it could not be had without waiting.
 */
static bool
lock_batch(int64 batch_id, LOCKMODE mode, bool wait)
{
	LOCKTAG		tag;

	jq_set_locktag(&tag, (uint64) batch_id, JQ_PLACE_BATCH);
	return LockAcquire(&tag, mode, false, !wait) != LOCKACQUIRE_NOT_AVAIL;
}

/* ---------------------------------------------------------------------
 * Counting
 * --------------------------------------------------------------------- */

static HeapTuple
form_counts(Relation rel, int64 batch_id, int64 id, const Counts *counts)
{
	Datum		values[COUNTS_NATTS];
	bool		nulls[COUNTS_NATTS] = {false};

	values[COUNTS_BATCH_ID - 1] = Int64GetDatum(batch_id);
	values[COUNTS_ID - 1] = Int64GetDatum(id);
	values[COUNTS_TOTAL - 1] = Int64GetDatum(counts->total);
	values[COUNTS_ENDED - 1] = Int64GetDatum(counts->ended);
	values[COUNTS_FAILED - 1] = Int64GetDatum(counts->failed);
	values[COUNTS_CANCELLED - 1] = Int64GetDatum(counts->cancelled);
	return heap_form_tuple(RelationGetDescr(rel), values, nulls);
}

/*
 * Whether our own row is still where we left it.
 */
static bool
own_row_is_there(Relation rel)
{
	TupleTableSlot *slot;
	bool		isnull;
	bool		result;

	if (own.epoch != jq_catalog_epoch())
		return false;			/* the table may have been rewritten */
	slot = table_slot_create(rel, NULL);
	result = table_tuple_fetch_row_version(rel, &own.tid, SnapshotSelf, slot) &&
		DatumGetInt64(slot_getattr(slot, COUNTS_ID, &isnull)) == own.id;
	ExecDropSingleTupleTableSlot(slot);
	return result;
}

/*
 * Replace our own row.  As a rule there is room for the new version on its
 * page, and the index need not be opened.
 */
static void
update_own_row(Relation rel, HeapTuple tuple)
{
	CatalogIndexState indexes;
	Datum		values[INDEX_MAX_KEYS];
	bool		nulls[INDEX_MAX_KEYS];
	TupleTableSlot *slot;

	if (!simple_heap_update_compat(rel, &own.tid, tuple))
		return;
	indexes = CatalogOpenIndexes(rel);
	slot = MakeSingleTupleTableSlot(RelationGetDescr(rel), &TTSOpsHeapTuple);
	ExecStoreHeapTuple(tuple, slot, false);
	for (int i = 0; i < indexes->ri_NumIndices; i++)
	{
		FormIndexDatum(indexes->ri_IndexRelationInfo[i], slot, NULL, values, nulls);
		index_insert(indexes->ri_IndexRelationDescs[i], values, nulls,
					 &tuple->t_self, rel, UNIQUE_CHECK_NO, false,
					 indexes->ri_IndexRelationInfo[i]);
	}
	ExecDropSingleTupleTableSlot(slot);
	CatalogCloseIndexes(indexes);
}

/*
 * Add to the batch's numbers, and let it be considered when the transaction
 * has committed.
 */
static void
count(int64 batch_id, int64 total, int64 ended, int64 failed, int64 cancelled)
{
	Relation	rel = table_open(jq_catalog()->batch_counts, RowExclusiveLock);
	Counts		counts = {total, ended, failed, cancelled};
	HeapTuple	tuple;

	if (own.written)
		CommandCounterIncrement();	/* our row may be of this command */
	if (own.valid && own.batch_id == batch_id && own_row_is_there(rel))
	{
		counts.total += own.counts.total;
		counts.ended += own.counts.ended;
		counts.failed += own.counts.failed;
		counts.cancelled += own.counts.cancelled;
		tuple = form_counts(rel, batch_id, own.id, &counts);
		update_own_row(rel, tuple);
	}
	else
	{
		own.id = jq_random_stamp();
		tuple = form_counts(rel, batch_id, own.id, &counts);
		CatalogTupleInsert(rel, tuple);
	}
	own.valid = true;
	own.written = true;
	own.batch_id = batch_id;
	own.tid = tuple->t_self;
	own.epoch = jq_catalog_epoch();
	own.counts = counts;
	heap_freetuple(tuple);
	table_close(rel, NoLock);
	jq_note_batch(batch_id);
}

/*
 * The job, and links of its chain that will not follow, have ended.
 */
void
jq_count_ended(const JqJob *job, int jobs)
{
	count(job->batch_id, 0, jobs, 0, 0);
}

/*
 * The job was not run, since its batch was cancelled.
 */
void
jq_count_cancelled(const JqJob *job)
{
	int			jobs = 1 + jq_chain_length(job);

	count(job->batch_id, 0, jobs, 0, jobs);
}

/*
 * Queue a callback of the batch, as one of its role's jobs.
 */
static void
queue_callback(const Batch *batch, int column, Datum failure)
{
	JqJob		job = {0};

	if (!is_set(batch, column))
		return;
	job.role = batch_role(batch);
	jq_make_callback(batch->values[column - 1], &job);
	job.callback_of = DatumGetInt64(batch->values[BATCHES_ID - 1]);
	job.failure = failure;
	jq_dispatch_follower(&job, get_role_oid(job.role, true));
}

/*
 * The job has failed for good: if it is the first of its batch, its callback
 * is queued, and the batch cancelled unless it allows failures.
 */
void
jq_count_failed(const JqJob *job, const JqFailure *failure, int32 attempts)
{
	Batch		batch;
	bool		cancels;

	if (!read_batch(job->batch_id, false, &batch))
		return;
	cancels = !DatumGetBool(batch.values[BATCHES_ALLOW_FAILURES - 1]);
	if ((!is_set(&batch, BATCHES_CAUGHT_AT) ||
		 (cancels && !is_set(&batch, BATCHES_CANCELLED_AT))) &&
		read_batch(job->batch_id, true, &batch))
	{
		if (!is_set(&batch, BATCHES_CAUGHT_AT))
		{
			set_time(&batch, BATCHES_CAUGHT_AT);
			queue_callback(&batch, BATCHES_CATCH_JOB,
						   jq_failure_as_jsonb(job, failure, attempts));
		}
		if (cancels && !is_set(&batch, BATCHES_CANCELLED_AT))
		{
			set_time(&batch, BATCHES_CANCELLED_AT);
			jq_note_cancelled_batch(job->batch_id);
		}
		write_batch(&batch);
	}
	count(job->batch_id, 0, 1 + jq_chain_length(job), 1, 0);
}

/*
 * A failed job of a batch is to be queued again: it counts as pending again,
 * and lifts a cancellation that a failure caused.  Returns false if the batch
 * was cancelled by somebody, so that the job would not be run.
 */
bool
jq_count_retried(const JqJob *job)
{
	Batch		batch;

	lock_batch(job->batch_id, ShareLock, true);
	if (!read_batch(job->batch_id, false, &batch))
		return true;			/* pruned: the job is as any other */
	if (is_set(&batch, BATCHES_CANCELLED_BY))
		return false;
	if ((is_set(&batch, BATCHES_CANCELLED_AT) || is_set(&batch, BATCHES_FINISHED_AT)) &&
		read_batch(job->batch_id, true, &batch))
	{
		if (is_set(&batch, BATCHES_CANCELLED_BY))
			return false;
		batch.nulls[BATCHES_CANCELLED_AT - 1] = true;
		batch.nulls[BATCHES_FINISHED_AT - 1] = true;
		write_batch(&batch);
	}
	count(job->batch_id, 0, -(1 + jq_chain_length(job)), -1, 0);
	return true;
}

/*
 * Whether the batch is cancelled by now; false if it is gone.
 */
bool
jq_batch_is_cancelled(int64 batch_id)
{
	Batch		batch;
	bool		result;

	if (!read_batch(batch_id, false, &batch))
		return false;
	result = is_set(&batch, BATCHES_CANCELLED_AT);
	heap_freetuple(batch.tuple);
	return result;
}

/*
 * The same the other way round, for a worker that runs job after job of a
 * batch: it need not look again before some batch is cancelled.
 */
bool
jq_batch_goes_on(int64 batch_id)
{
	static int64 known_id = 0;
	static uint32 known_changes = 0;
	uint32		changes;

	if (MyJqDatabase == NULL)
		return !jq_batch_is_cancelled(batch_id);
	changes = MyJqDatabase->cancel_changes;
	if (batch_id == known_id && changes == known_changes)
		return true;
	pg_read_barrier();
	if (jq_batch_is_cancelled(batch_id))
		return false;
	known_id = batch_id;
	known_changes = changes;
	return true;
}

/* ---------------------------------------------------------------------
 * Adding
 * --------------------------------------------------------------------- */

static Joining *
find_join(int64 batch_id, int nest_level)
{
	ListCell   *lc;

	foreach(lc, joins)
	{
		Joining    *join = lfirst(lc);

		if (join->batch_id == batch_id && join->nest_level == nest_level)
			return join;
	}
	return NULL;
}

static Joining *
make_join(int64 batch_id, int nest_level)
{
	MemoryContext oldcxt = MemoryContextSwitchTo(TopTransactionContext);
	Joining    *join = palloc0(sizeof(Joining));

	join->batch_id = batch_id;
	join->nest_level = nest_level;
	joins = lappend(joins, join);
	MemoryContextSwitchTo(oldcxt);
	return join;
}

static void
report_unknown(int64 batch_id)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("batch " INT64_FORMAT " does not exist", batch_id)));
}

static void
require_own_batch(const Batch *batch)
{
	char	   *role = batch_role(batch);

	if (!jq_may_handle_role(GetUserId(), role))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for batch " INT64_FORMAT,
						DatumGetInt64(batch->values[BATCHES_ID - 1])),
				 errdetail("It belongs to role \"%s\".", role)));
}

/*
 * The current (sub)transaction is going to add jobs to the batch, which cannot
 * finish before the transaction has ended.
 */
void
jq_join_batch(int64 batch_id, bool may_be_closed)
{
	Batch		batch;

	if (find_join(batch_id, GetCurrentTransactionNestLevel()))
		return;
	lock_batch(batch_id, ShareLock, true);
	if (!read_batch(batch_id, false, &batch))
		report_unknown(batch_id);
	require_own_batch(&batch);
	if (is_set(&batch, BATCHES_FINISHED_AT))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("batch " INT64_FORMAT " has finished", batch_id)));
	if (is_set(&batch, BATCHES_CLOSED_AT) && !may_be_closed)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("batch " INT64_FORMAT " is closed", batch_id),
				 errhint("Use jq.add_to_batch().")));
	make_join(batch_id, GetCurrentTransactionNestLevel());
}

/*
 * Jobs were added to a batch that has been joined.
 */
void
jq_add_to_total(int64 batch_id, int64 jobs)
{
	find_join(batch_id, GetCurrentTransactionNestLevel())->total += jobs;
}

/*
 * The job has put so many more links into its own chain.
 */
void
jq_count_links(const JqJob *job, int links)
{
	Batch		batch;

	if (!read_batch(job->batch_id, false, &batch))
		return;
	jq_join_batch(job->batch_id, true);
	jq_add_to_total(job->batch_id, links);
}

/*
 * Write what the transaction added to batches; called before it commits.  What
 * a subtransaction that was rolled back has written is in no row.
 */
void
jq_write_batch_totals(void)
{
	ListCell   *lc;

	foreach(lc, joins)
	{
		Joining    *join = lfirst(lc);

		if (join->total != 0)
			count(join->batch_id, join->total, 0, 0, 0);
		join->total = 0;
	}
}

/*
 * Hand what the ending subtransaction added to its parent, or drop it.
 */
void
jq_batches_at_subxact_end(bool commit)
{
	int			level = GetCurrentTransactionNestLevel();
	ListCell   *lc;

	foreach(lc, joins)
	{
		Joining    *join = lfirst(lc);
		Joining    *parent = find_join(join->batch_id, level - 1);

		if (join->nest_level < level)
			continue;
		if (commit && parent == NULL)
			join->nest_level = level - 1;
		else
		{
			if (commit)
				parent->total += join->total;
			joins = foreach_delete_current(joins, lc);
		}
	}
	if (!commit && own.written)
		own.valid = false;
}

void
jq_batches_at_xact_end(bool commit)
{
	joins = NIL;				/* its memory goes with the transaction */
	if (!commit && own.written)
		own.valid = false;
	own.written = false;
}

/* ---------------------------------------------------------------------
 * Ending
 * --------------------------------------------------------------------- */

/*
 * The batch's numbers by what has committed, and what we have done ourselves.
 */
static Counts
sum_counts(int64 batch_id)
{
	Oid			types[] = {INT8OID};
	Datum		values[] = {Int64GetDatum(batch_id)};
	Counts		counts = {0};
	JqOwnerSection section;

	jq_enter_owner(&section);
	PushActiveSnapshot(GetLatestSnapshot());
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args("SELECT sum(c.total)::bigint, sum(c.ended)::bigint,"
							  " sum(c.failed)::bigint, sum(c.cancelled)::bigint"
							  " FROM jq.batch_counts AS c WHERE c.batch_id = $1",
							  1, types, values, NULL, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not read jq.batch_counts");
	for (int i = 0; i < 4; i++)
	{
		bool		isnull;
		Datum		sum = SPI_getbinval(SPI_tuptable->vals[0],
										SPI_tuptable->tupdesc, i + 1, &isnull);
		int64	   *fields[] = {&counts.total, &counts.ended, &counts.failed,
		&counts.cancelled};

		*fields[i] = isnull ? 0 : DatumGetInt64(sum);
	}
	SPI_finish();
	PopActiveSnapshot();
	jq_leave_owner(&section);
	return counts;
}

/*
 * What the current transaction has added and not written yet.
 */
static int64
unwritten_total(int64 batch_id)
{
	int64		total = 0;
	ListCell   *lc;

	foreach(lc, joins)
	{
		Joining    *join = lfirst(lc);

		if (join->batch_id == batch_id)
			total += join->total;
	}
	return total;
}

/*
 * No job of the batch is left: finish it.
 */
static void
finish(Batch *batch, const Counts *counts)
{
	set_time(batch, BATCHES_FINISHED_AT);
	if (counts->failed == 0 && counts->cancelled == 0 &&
		!is_set(batch, BATCHES_CANCELLED_AT) && !is_set(batch, BATCHES_DONE_AT))
	{
		set_time(batch, BATCHES_DONE_AT);
		queue_callback(batch, BATCHES_THEN_JOB, (Datum) 0);
	}
	if (!is_set(batch, BATCHES_ENDED_AT))
	{
		set_time(batch, BATCHES_ENDED_AT);
		queue_callback(batch, BATCHES_FINALLY_JOB, (Datum) 0);
	}
	write_batch(batch);
}

/*
 * See whether the batch has come to its end, and finish it then.  The caller
 * is in a transaction with a snapshot.  Returns false if it must be looked at
 * again, since somebody is adding to it.
 */
bool
jq_consider_batch(int64 batch_id)
{
	Batch		batch;
	Counts		counts;

	if (!lock_batch(batch_id, ExclusiveLock, false))
		return false;
	CommandCounterIncrement();
	if (!read_batch(batch_id, false, &batch) ||
		!is_set(&batch, BATCHES_CLOSED_AT) || is_set(&batch, BATCHES_FINISHED_AT))
		return true;
	counts = sum_counts(batch_id);
	counts.total += DatumGetInt64(batch.values[BATCHES_TOTAL - 1]) +
		unwritten_total(batch_id);
	if (counts.total == counts.ended && read_batch(batch_id, true, &batch))
		finish(&batch, &counts);
	return true;
}

/*
 * The batches that are not finished and can be, or were cancelled; returns
 * their number, and their ids in *ids, in the current memory context.
 */
int
jq_unfinished_batches(int64 **ids)
{
	return jq_owner_fetch_ids("SELECT b.id FROM jq.batches AS b WHERE b.finished_at IS NULL"
							  " AND (b.closed_at IS NOT NULL OR b.cancelled_at IS NOT NULL)"
							  " ORDER BY b.id", 0, NULL, NULL, ids);
}

/*
 * Settle jobs of a cancelled batch that wait, those with ids greater than
 * "after", in order, a limited number of them.  Returns the last id that was
 * looked at, or 0 if there are no more; *settled becomes false if one has to be
 * seen to again.
 */
int64
jq_settle_cancelled(int64 batch_id, int64 after, bool *settled)
{
	Oid			types[] = {INT8OID, INT8OID, INT4OID};
	Datum		values[] = {Int64GetDatum(batch_id), Int64GetDatum(after),
	Int32GetDatum(SETTLE_CHUNK)};
	int64	   *ids;
	uint64		found;

	if (!jq_batch_is_cancelled(batch_id))
		return 0;
	found = jq_owner_fetch_ids("SELECT j.id FROM jq.jobs AS j"
							   " WHERE j.batch_id = $1 AND j.id > $2 ORDER BY j.id LIMIT $3",
							   lengthof(types), types, values, &ids);
	for (uint64 i = 0; i < found; i++)
		*settled &= jq_drop_waiting_job(ids[i]);
	after = found < SETTLE_CHUNK ? 0 : ids[found - 1];
	pfree(ids);
	return after;
}

/* ---------------------------------------------------------------------
 * SQL functions
 * --------------------------------------------------------------------- */

static void
which_callback(void *arg)
{
	errcontext("%s of the batch", (char *) arg);
}

/*
 * Insert a batch; "first" is the number of the argument name, which callbacks
 * and allow_failures follow.  Returns its id.
 */
static int64
insert_batch(FunctionCallInfo fcinfo, int first, bool open)
{
	Relation	rel;
	Datum		values[BATCHES_NATTS] = {0};
	bool		nulls[BATCHES_NATTS];
	static const char *const names[] = {"then_job", "catch_job", "finally_job"};
	int64		id;

	memset(nulls, true, sizeof(nulls));
	if (!PG_ARGISNULL(first))
	{
		values[BATCHES_NAME - 1] = PG_GETARG_DATUM(first);
		nulls[BATCHES_NAME - 1] = false;
	}
	for (int i = 0; i < lengthof(names); i++)
	{
		ErrorContextCallback errcallback;

		if (PG_ARGISNULL(first + 1 + i))
			continue;
		errcallback.callback = which_callback;
		errcallback.arg = unconstify(char *, names[i]);
		errcallback.previous = error_context_stack;
		error_context_stack = &errcallback;
		values[BATCHES_THEN_JOB - 1 + i] =
			jq_resolve_callback(PG_GETARG_DATUM(first + 1 + i));
		nulls[BATCHES_THEN_JOB - 1 + i] = false;
		error_context_stack = errcallback.previous;
	}
	id = nextval_internal(jq_catalog()->batches_sequence, false);
	values[BATCHES_ID - 1] = Int64GetDatum(id);
	values[BATCHES_ROLE - 1] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));
	values[BATCHES_TOTAL - 1] = Int64GetDatum(0);
	values[BATCHES_ALLOW_FAILURES - 1] =
		BoolGetDatum(!PG_ARGISNULL(first + 4) && PG_GETARG_BOOL(first + 4));
	values[BATCHES_CREATED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	nulls[BATCHES_ID - 1] = nulls[BATCHES_ROLE - 1] = nulls[BATCHES_TOTAL - 1] =
		nulls[BATCHES_ALLOW_FAILURES - 1] = nulls[BATCHES_CREATED_AT - 1] = false;
	if (!open)
	{
		values[BATCHES_CLOSED_AT - 1] = values[BATCHES_CREATED_AT - 1];
		nulls[BATCHES_CLOSED_AT - 1] = false;
	}
	rel = table_open(jq_catalog()->batches, RowExclusiveLock);
	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
	CommandCounterIncrement();
	return id;
}

/*
 * Queue the jobs of an array in the batch; returns how many there are in it.
 */
static int64
add_jobs(int64 batch_id, ArrayType *jobs)
{
	jq_join_batch(batch_id, true);
	(void) jq_dispatch_array(jobs, batch_id, NULL);
	return find_join(batch_id, GetCurrentTransactionNestLevel())->total;
}

/*
 * jq.dispatch_batch(jobs, name, then_job, catch_job, finally_job,
 *					 allow_failures)
 */
Datum
jq_dispatch_batch(PG_FUNCTION_ARGS)
{
	int64		id;
	int64		total = 0;

	jq_check_may_dispatch();
	id = insert_batch(fcinfo, 1, false);
	if (!PG_ARGISNULL(0))
		total = add_jobs(id, PG_GETARG_ARRAYTYPE_P(0));
	if (total == 0)
		(void) jq_consider_batch(id);
	PG_RETURN_INT64(id);
}

/*
 * jq.open_batch(name, then_job, catch_job, finally_job, allow_failures)
 */
Datum
jq_open_batch(PG_FUNCTION_ARGS)
{
	jq_check_may_dispatch();
	PG_RETURN_INT64(insert_batch(fcinfo, 0, true));
}

/*
 * The id of a batch given as first argument of a function that changes it.
 */
static int64
batch_argument(FunctionCallInfo fcinfo, const char *function)
{
	PreventCommandIfReadOnly(function);
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("id of a batch must not be NULL")));
	return PG_GETARG_INT64(0);
}

/*
 * jq.close_batch(batch_id)
 */
Datum
jq_close_batch(PG_FUNCTION_ARGS)
{
	int64		id = batch_argument(fcinfo, "jq.close_batch()");
	Batch		batch;

	lock_batch(id, ExclusiveLock, true);
	if (!read_batch(id, true, &batch))
		report_unknown(id);
	require_own_batch(&batch);
	if (is_set(&batch, BATCHES_CLOSED_AT))
		PG_RETURN_BOOL(false);
	set_time(&batch, BATCHES_CLOSED_AT);
	write_batch(&batch);
	(void) jq_consider_batch(id);
	PG_RETURN_BOOL(true);
}

/*
 * jq.add_to_batch(batch_id, jobs)
 */
Datum
jq_add_to_batch(PG_FUNCTION_ARGS)
{
	int64		id = batch_argument(fcinfo, "jq.add_to_batch()");
	int64		before = 0;
	Joining    *join;

	jq_check_may_dispatch();
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("array of jobs must not be NULL")));
	join = find_join(id, GetCurrentTransactionNestLevel());
	if (join)
		before = join->total;
	PG_RETURN_INT64(add_jobs(id, PG_GETARG_ARRAYTYPE_P(1)) - before);
}

/*
 * jq.cancel_batch(batch_id)
 *
 * Where there is a scheduler, it settles the waiting jobs when this has
 * committed.
 */
Datum
jq_cancel_batch(PG_FUNCTION_ARGS)
{
	int64		id = batch_argument(fcinfo, "jq.cancel_batch()");
	Batch		batch;

	if (!read_batch(id, true, &batch))
		PG_RETURN_BOOL(false);
	require_own_batch(&batch);
	if (is_set(&batch, BATCHES_CANCELLED_BY) || is_set(&batch, BATCHES_FINISHED_AT))
		PG_RETURN_BOOL(false);
	if (!is_set(&batch, BATCHES_CANCELLED_AT))
		set_time(&batch, BATCHES_CANCELLED_AT);
	batch.values[BATCHES_CANCELLED_BY - 1] =
		CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));
	batch.nulls[BATCHES_CANCELLED_BY - 1] = false;
	write_batch(&batch);
	jq_note_cancelled_batch(id);
	if (JqShared == NULL)
	{
		int64		after = 0;
		bool		settled = true;

		do
			after = jq_settle_cancelled(id, after, &settled);
		while (after != 0);
		(void) jq_consider_batch(id);
	}
	PG_RETURN_BOOL(true);
}
