/*-------------------------------------------------------------------------
 *
 * drain.c
 *	  jq.drain(): runs jobs in the caller's own session.
 *
 * Nobody would notice if the session died with a job, so the attempt is
 * counted before: the job is leased to this session, and that is committed
 * first.  The lease ends with the session (jq_holder_lives), or when its time
 * is over; then the session's record is refused.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* A drain that jobs keep going by dispatching others ends after so many times
 * that it found nothing left. */
#define MAX_ROUNDS	10000

/* A session that drains: its lanes, and memory for one job at a time. */
typedef struct Drain
{
	JqLaneSet	lanes;
	int			max_lanes;
	List	   *queues;
	List	   *batches;		/* ids of those whose jobs were run */
	int			rounds;			/* times that all lanes were found empty */
	MemoryContext cxt;			/* as long as the drain */
	MemoryContext job_cxt;
} Drain;

static bool drain_one(Drain *drain, JqJob *job);

PG_FUNCTION_INFO_V1(jq_drain);

/*
 * Add a lane to those of the drain, or lower the one that is there.
 */
static void
see_lane(const char *role, const char *queue, int32 priority, JqKey first,
		 void *arg)
{
	Drain	   *drain = arg;
	JqLaneSet  *set = &drain->lanes;
	int			n;

	for (n = set->first_lane; n >= 0; n = set->lanes[n].next)
	{
		if (set->lanes[n].priority == priority &&
			strcmp(set->lanes[n].queue, queue) == 0)
			break;
	}
	if (n < 0)
	{
		if (set->nlanes == drain->max_lanes)
		{
			drain->max_lanes *= 2;
			set->lanes = repalloc(set->lanes, drain->max_lanes * sizeof(JqLane));
		}
		n = set->nlanes++;
		jq_lane_init(&set->lanes[n], queue, priority);
		set->lanes[n].next = set->first_lane;
		set->first_lane = n;
	}
	jq_lane_lower(&set->lanes[n], -1, first, first);
}

static void
start_drain(Drain *drain, FunctionCallInfo fcinfo)
{
	MemoryContext oldcxt;

	memset(drain, 0, sizeof(Drain));
	drain->cxt = AllocSetContextCreate(PortalContext, "jq drain",
									   ALLOCSET_DEFAULT_SIZES);
	drain->job_cxt = AllocSetContextCreate(drain->cxt, "jq job",
										   ALLOCSET_DEFAULT_SIZES);
	oldcxt = MemoryContextSwitchTo(drain->cxt);
	if (!PG_ARGISNULL(0))
	{
		ArrayType  *array = PG_GETARG_ARRAYTYPE_P_COPY(0);
		Datum	   *elements;
		bool	   *nulls;
		int			count;

		deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT,
						  &elements, &nulls, &count);
		for (int i = 0; i < count; i++)
		{
			char	   *queue;

			if (nulls[i])
				ereport(ERROR,
						(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
						 errmsg("name of a queue must not be NULL")));
			queue = TextDatumGetCString(elements[i]);
			jq_check_name(queue, strlen(queue), "queue");
			drain->queues = lappend(drain->queues, queue);
		}
		if (count == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("array of queues must not be empty"),
					 errhint("NULL means all queues.")));
	}
	drain->lanes.roleid = GetUserId();
	drain->max_lanes = 16;
	drain->lanes.lanes = palloc(drain->max_lanes * sizeof(JqLane));
	drain->lanes.first_lane = -1;
	MemoryContextSwitchTo(oldcxt);
}

/*
 * No job is left: do what a scheduler does, so that others become due.  Let go
 * on what limits hold, and end the batches whose jobs have been run.
 */
static void
let_others_come(Drain *drain)
{
	ListCell   *lc;

	PushActiveSnapshot(GetTransactionSnapshot());
	(void) jq_look_at_held(true);
	PopActiveSnapshot();
	SPI_commit();

	foreach(lc, drain->batches)
	{
		int64		batch_id = *(int64 *) lfirst(lc);
		int64		after = 0;
		bool		settled;

		do
		{
			PushActiveSnapshot(GetTransactionSnapshot());
			after = jq_settle_cancelled(batch_id, after, &settled);
			if (after == 0)
				(void) jq_consider_batch(batch_id);
			PopActiveSnapshot();
			SPI_commit();
		} while (after != 0);
	}
	list_free_deep(drain->batches);
	drain->batches = NIL;
}

/*
 * Claim the next due job.  The lanes are private, so what others dispatch is
 * seen only when they are loaded anew, which is done when they are empty.
 */
static bool
next_job(Drain *drain, JqJob *job)
{
	(void) jq_load_pauses();
	for (int look = 0; look < 2; look++)
	{
		if (jq_lanes_due(&drain->lanes, drain->queues) <= GetCurrentTimestamp() &&
			jq_claim_next(&drain->lanes, drain->queues, job))
			return true;
		if (look == 0 && drain->rounds == MAX_ROUNDS)
			ereport(WARNING,
					(errmsg("jq.drain() stopped while jobs dispatch others"),
					 errdetail("It found new jobs %d times after it had run all.",
							   MAX_ROUNDS)));
		else if (look == 0)
		{
			drain->rounds++;
			let_others_come(drain);
			MemoryContextSwitchTo(drain->cxt);
			jq_scan_lanes(GetUserNameFromId(drain->lanes.roleid, false),
						  see_lane, drain);
			MemoryContextSwitchTo(drain->job_cxt);
		}
	}
	return false;
}

/*
 * Tell of due jobs that only their own roles, or workers, run.
 */
static void
notice_others(void)
{
	Oid			types[] = {OIDOID, TEXTOID};
	Datum		values[2];
	int64		others;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	values[1] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));
	PushActiveSnapshot(GetTransactionSnapshot());
	jq_owner_execute("SELECT count(*) FROM jq.jobs WHERE origin = $1 AND role <> $2"
					 " AND available_at <= clock_timestamp()",
					 2, types, values, NULL, &others);
	PopActiveSnapshot();
	if (others > 0)
		ereport(NOTICE,
				(errmsg_plural("%lld due job of another role was left",
							   "%lld due jobs of other roles were left",
							   (unsigned long) others, (long long) others)));
}

/*
 * CALL jq.drain(queues, max_jobs, ran)
 */
Datum
jq_drain(PG_FUNCTION_ARGS)
{
	int64		max_jobs = PG_ARGISNULL(1) ? PG_INT64_MAX : PG_GETARG_INT64(1);
	int64		ran = 0;
	Drain		drain;
	TupleDesc	desc;
	Datum		value;
	bool		isnull = false;
	MemoryContext caller_cxt = CurrentMemoryContext;

	if (!fcinfo->context || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("jq.drain() cannot run inside a transaction block"),
				 errdetail("It commits each job by itself.")));
	if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("jq.drain() cannot run in a transaction that has written"),
				 errdetail("It would commit what was written so far."),
				 errhint("Commit before you drain.")));
	PreventCommandIfReadOnly("jq.drain()");
	if (max_jobs < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_jobs must not be negative")));
	(void) jq_catalog();
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	desc = CreateTupleDescCopy(desc);

	start_drain(&drain, fcinfo);
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");

	while (ran < max_jobs)
	{
		JqJob	   *job;

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(drain.job_cxt);
		MemoryContextSwitchTo(drain.job_cxt);
		job = palloc0(sizeof(JqJob));
		if (!next_job(&drain, job))
			break;
		if (drain_one(&drain, job))
			ran++;
	}
	notice_others();

	SPI_finish();
	MemoryContextSwitchTo(caller_cxt);
	MemoryContextDelete(drain.cxt);

	value = Int64GetDatum(ran);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  &value, &isnull)));
}

/*
 * Run the handler in a subtransaction; returns how it failed, or NULL.
 */
static JqFailure *
run_in_subtransaction(const JqHandler *handler, const JqJob *job,
					  JqCallResult *result)
{
	MemoryContext cxt = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	JqFailure  *volatile failure = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(cxt);
	PG_TRY();
	{
		FmgrInfo	flinfo;

		jq_check_handler_rights(handler, GetUserId());
		fmgr_info(handler->function, &flinfo);
		jq_call_handler(handler, job, &flinfo, true, result);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		failure = jq_capture_failure(cxt);
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(cxt);
	CurrentResourceOwner = owner;
	return failure;
}

/*
 * Lease the claimed job to this session and run it; returns how it failed, or
 * NULL.
 */
static JqFailure *
run_leased(JqJob *job, const JqHandler *handler, JqCallResult *result)
{
	JqFailure  *failure;
	int			tries = 0;

	jq_start_lease(job, handler);
	jq_mark_places(job);
	PopActiveSnapshot();
	SPI_commit();
	PushActiveSnapshot(GetTransactionSnapshot());
	do
	{
		failure = run_in_subtransaction(handler, job, result);
		tries++;
	} while (failure && jq_try_again(failure, tries));
	return failure;
}

/*
 * Ask the middleware, in a subtransaction.  An error of its own puts the job
 * off for a moment.
 */
static JqFailure *
ask_middleware(const JqJob *job, const JqHandler *handler)
{
	MemoryContext cxt = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	JqFailure  *volatile failure = NULL;

	if (handler->nmiddleware == 0)
		return NULL;
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(cxt);
	PG_TRY();
	{
		failure = jq_middleware_verdict(job, handler, cxt);
		if (failure)
			RollbackAndReleaseCurrentSubTransaction();
		else
			ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		failure = jq_capture_failure(cxt);
		jq_excuse_middleware(failure);
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(cxt);
	CurrentResourceOwner = owner;
	return failure;
}

/*
 * Take for the job what it needs before it can be started, in the transaction
 * that leases it.  Returns NULL if it can be; with JQ_END_HELD it waits.
 */
static JqFailure *
admit(Drain *drain, JqJob *job, const JqHandler *handler)
{
	JqFailure  *failure;
	JqGate		gate;
	bool		taken;

	if (!jq_enter_limits(job, handler, &gate))
		return jq_hold_at_gate(job, drain->lanes.roleid, handler, &gate);
	failure = ask_middleware(job, handler);
	if (failure)
		return failure;
	if (!jq_take_token(job, handler, &gate, &taken))
		return jq_hold_at_gate(job, drain->lanes.roleid, handler, &gate);
	if (job->unique_key && job->unique_until == JQ_UNTIL_START)
		jq_release_key(job);
	return NULL;
}

/*
 * The job was drained, or held: let others go on that waited for that.
 */
static void
let_others_go_on(JqJob *job, JqFailure *failure)
{
	bool		held = failure && failure->end == JQ_END_HELD;

	if (!held && job->ngates == 0)
		return;
	PushActiveSnapshot(GetTransactionSnapshot());
	if (held)
		jq_look_at_gate_again(&failure->gate, job->id, false);
	jq_leave_gates(job);
	PopActiveSnapshot();
	SPI_commit();
}

static void
remember_batch(Drain *drain, int64 batch_id)
{
	MemoryContext oldcxt;
	ListCell   *lc;
	int64	   *copy;

	foreach(lc, drain->batches)
	{
		if (*(int64 *) lfirst(lc) == batch_id)
			return;
	}
	oldcxt = MemoryContextSwitchTo(drain->cxt);
	copy = palloc(sizeof(int64));
	*copy = batch_id;
	drain->batches = lappend(drain->batches, copy);
	MemoryContextSwitchTo(oldcxt);
}

static void
report_failure(const JqJob *job, const JqFailure *failure)
{
	static const char *const endings[] = {
		[JQ_END_FAILED] = "failed",
		[JQ_END_RELEASED] = "was released",
		[JQ_END_SKIPPED] = "was skipped",
		[JQ_END_CANCELLED] = "was cancelled",
		[JQ_END_DROPPED] = "was skipped"
	};

	bool		attempted = failure->end != JQ_END_FAILED || !failure->unspent;

	/* not as an error: the client's command goes on */
	ereport(failure->end == JQ_END_FAILED ? WARNING : NOTICE,
			(errcode(failure->sqlerrcode),
			 errmsg("job " INT64_FORMAT ", handler \"%s\"%s%s %s: %s",
					job->id, job->name,
					attempted ? ", " : "",
					attempted ? jq_attempt_text(job) : "",
					endings[failure->end],
					failure->message ? failure->message : "")));
}

/*
 * Run the claimed job, record how it ended, and commit.  Returns false if it
 * was not run, since it has to wait, or an attempt that another session or a
 * worker left was ended.
 */
static bool
drain_one(Drain *drain, JqJob *job)
{
	const JqHandler *found = jq_find_handler(job->name);
	JqHandler  *handler = found ? jq_copy_handler(found) : NULL;
	JqFailure  *failure = jq_failure_before_start(job, handler);
	JqCallResult result;
	bool		ours = true;
	bool		held;
	bool		run;
	bool		gone = true;

	if (failure == NULL && jq_needs_admission(job, handler))
		failure = admit(drain, job, handler);
	held = failure && failure->end == JQ_END_HELD;
	run = failure == NULL;
	if (run)
		failure = run_leased(job, handler, &result);

	/* or the job would stay leased to this session, which goes on living */
	HOLD_CANCEL_INTERRUPTS();
	if (failure && !held)
	{
		report_failure(job, failure);
		ours = jq_record_failure(job, drain->lanes.roleid, handler, failure, &gone);
	}
	else if (failure == NULL)
		ours = jq_record_done(job, drain->lanes.roleid, handler, &result);

	if (!ours && failure == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("job " INT64_FORMAT " is not this session's any more",
						job->id),
				 errdetail("It was cancelled or removed, or its lease ended, while it ran; what it did is rolled back.")));
	if (job->token != 0 && job->ngates > 0)
		jq_unmark_places(job);
	PopActiveSnapshot();
	SPI_commit();
	RESUME_CANCEL_INTERRUPTS();
	if (failure && !held)
		jq_forget_unsettled(job, gone);
	let_others_go_on(job, failure);
	if (job->batch_id != 0)
		remember_batch(drain, job->batch_id);
	return !held && (run || gone);
}
