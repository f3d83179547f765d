/*-------------------------------------------------------------------------
 *
 * execute.c
 *	  Runs the body of one job: the handler's function, its time limit, and
 *	  what has to be finished before the job may count as done.
 *
 * Nothing here knows of rows or outcomes.  The function runs in the caller's
 * transaction as the current role; an error is the caller's to catch.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/trigger.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "pgstat.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* An attempt that met a deadlock or the like is made so often; the waits grow
 * from this. */
#define MAX_TRIES 6
#define TRY_AGAIN_MS 5

static TimeoutId attempt_timeout = MAX_TIMEOUTS;
static volatile sig_atomic_t timed_out = false;

static Datum call_function(const JqHandler *handler, const JqJob *job,
						   FmgrInfo *flinfo, bool *isnull);

/* ---------------------------------------------------------------------
 * The time limit
 * --------------------------------------------------------------------- */

/*
 * The time is up: interrupt the handler as a cancel request would.  If it
 * traps that and is still there after the grace, its worker has to go.  A
 * session that is no worker is its user's, and is only interrupted again.
 */
static void
attempt_timed_out(void)
{
	if (timed_out && MyJqAttempt)
	{
		MyJqAttempt->timed_out = true;
		ProcDiePending = true;
	}
	timed_out = true;
	InterruptPending = true;
	QueryCancelPending = true;
	SetLatch(MyLatch);
}

/*
 * Start the time limit, if the handler has one.  A handler without one may be
 * called from within another (jq.run), whose limit goes on.
 */
static void
start_timeout(const JqHandler *handler)
{
	TimestampTz end;

	if (handler->timeout_us == 0)
		return;
	if (attempt_timeout == MAX_TIMEOUTS)
		attempt_timeout = RegisterTimeout(USER_TIMEOUT, attempt_timed_out);
	end = GetCurrentTimestamp() + handler->timeout_us;
	enable_timeout_every(attempt_timeout, end, jq_cancel_grace);
}

/*
 * Stop the time limit.  Returns whether the handler's time was up.
 */
static bool
stop_timeout(const JqHandler *handler)
{
	if (handler->timeout_us == 0)
		return false;
	disable_timeout(attempt_timeout, false);
	if (timed_out)
		QueryCancelPending = false;
	return timed_out;
}

/*
 * What is reported of an attempt that took too long.
 */
static char *
timed_out_message(const JqHandler *handler)
{
	return psprintf("handler \"%s\" timed out after " INT64_FORMAT " ms",
					handler->name, handler->timeout_us / 1000);
}

/* ---------------------------------------------------------------------
 * The call
 * --------------------------------------------------------------------- */

/*
 * Run a job's handler and fill in *result.  To the handler, the job is the
 * current one meanwhile.  flinfo is for the handler's
 * function, and may be kept by the caller from call to call.
 *
 * When this returns, the handler has kept its time limit, and the settings
 * that it changed are back.  With "settle" its deferred constraints hold, too:
 * what it left to the commit belongs to its attempt, to its time, its rights
 * and its failure.
 */
void
jq_call_handler(const JqHandler *handler, const JqJob *job, FmgrInfo *flinfo,
				bool settle, JqCallResult *result)
{
	MemoryContext cxt = CurrentMemoryContext;
	int			guc_level = NewGUCNestLevel();
	const JqHandler *outer_handler;
	const JqJob *outer_job = jq_current(&outer_handler);

	if (outer_job == NULL)
		timed_out = false;
	jq_set_current_job(handler, job);
	start_timeout(handler);
	PG_TRY();
	{
		result->value = call_function(handler, job, flinfo, &result->isnull);
		if (settle)
			AfterTriggerSetState(makeNode(ConstraintsSetStmt));
	}
	PG_CATCH();
	{
		jq_return_to_job(outer_handler, outer_job);
		if (stop_timeout(handler) && geterrcode() == ERRCODE_QUERY_CANCELED)
		{
			ErrorData  *edata;

			MemoryContextSwitchTo(cxt);
			edata = CopyErrorData();
			FlushErrorState();
			edata->message = timed_out_message(handler);
			ReThrowError(edata);
		}
		PG_RE_THROW();
	}
	PG_END_TRY();

	jq_return_to_job(outer_handler, outer_job);

	/* it may have trapped the interrupt, and then it has had its time */
	if (stop_timeout(handler))
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg_internal("%s", timed_out_message(handler))));

	result->synchronous_commit = synchronous_commit;
	AtEOXact_GUC(false, guc_level);
}

/*
 * Set synchronous_commit for the rest of the transaction, to one of the
 * values of SyncCommitLevel.
 */
void
jq_set_local_synchronous_commit(int value)
{
	static const char *const names[] = {
		[SYNCHRONOUS_COMMIT_OFF] = "off",
		[SYNCHRONOUS_COMMIT_LOCAL_FLUSH] = "local",
		[SYNCHRONOUS_COMMIT_REMOTE_WRITE] = "remote_write",
		[SYNCHRONOUS_COMMIT_REMOTE_FLUSH] = "on",
		[SYNCHRONOUS_COMMIT_REMOTE_APPLY] = "remote_apply"
	};

	(void) set_config_option("synchronous_commit", names[value], PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
}

static Datum
call_function(const JqHandler *handler, const JqJob *job, FmgrInfo *flinfo,
			  bool *isnull)
{
	LOCAL_FCINFO(fcinfo, 2);
	PgStat_FunctionCallUsage usage;
	Datum		result;

	InitFunctionCallInfoData(*fcinfo, flinfo, handler->takes_context ? 2 : 1,
							 InvalidOid, NULL, NULL);
	fcinfo->args[0].value = job->payload;
	fcinfo->args[0].isnull = false;
	if (handler->takes_context)
	{
		fcinfo->args[1].value = jq_make_context(handler, job);
		fcinfo->args[1].isnull = false;
	}

	pgstat_init_function_usage(fcinfo, &usage);
	result = FunctionCallInvoke(fcinfo);
	pgstat_end_function_usage(&usage, true);

	*isnull = fcinfo->isnull;
	return result;
}

/* ---------------------------------------------------------------------
 * Failures
 * --------------------------------------------------------------------- */

/*
 * A part of an error as it can be stored: valid in the server's encoding and
 * bounded in length.  NULL stays NULL.
 */
static char *
storable_text(const char *text)
{
	char	   *copy;
	int			len;

	if (text == NULL)
		return NULL;
	len = strlen(text);
	if (len > JQ_ERROR_MAX)
		len = pg_mbcliplen(text, len, JQ_ERROR_MAX);
	copy = pnstrdup(text, len);

	if (!pg_verify_mbstr(GetDatabaseEncoding(), copy, len, true))
	{
		for (char *p = copy; *p; p++)
		{
			if (IS_HIGHBIT_SET(*p))
				*p = '?';
		}
	}
	return copy;
}

/*
 * Whether the error is the verdict that the handler gave.  A language that
 * does not pass on the SQLSTATE of an error passes on its message.
 */
static bool
is_verdict(const ErrorData *edata, const JqVerdict *verdict)
{
	if (verdict->sqlerrcode == 0)
		return false;
	if (edata->sqlerrcode == verdict->sqlerrcode)
		return true;
	return edata->sqlerrcode == ERRCODE_EXTERNAL_ROUTINE_EXCEPTION &&
		edata->message && strncmp(edata->message, verdict->message,
								  strlen(verdict->message)) == 0;
}

/*
 * Classify a failure by its SQLSTATE, be it from jq.fail() and its like or
 * from an error that the handler raised under it.
 */
static void
classify(JqFailure *failure)
{
	switch (failure->sqlerrcode)
	{
		case ERRCODE_JQ_FAILED:
			failure->permanent = true;
			failure->exception = true;
			break;
		case ERRCODE_JQ_RELEASED:
			failure->end = JQ_END_RELEASED;
			failure->unspent = true;
			break;
		case ERRCODE_JQ_SKIPPED:
			failure->end = JQ_END_SKIPPED;
			break;
		default:
			failure->timed_out = timed_out &&
				failure->sqlerrcode == ERRCODE_QUERY_CANCELED;
			failure->exception = !failure->timed_out;
			break;
	}
}

/*
 * Make the current error a failure in the given memory context.  The caller
 * still has to end the error's processing and abort the (sub)transaction.
 */
JqFailure *
jq_capture_failure(MemoryContext cxt)
{
	MemoryContext oldcxt = MemoryContextSwitchTo(cxt);
	ErrorData  *edata = CopyErrorData();
	const JqVerdict *verdict = jq_last_verdict();
	JqFailure  *failure = palloc0(sizeof(JqFailure));

	failure->sqlerrcode = edata->sqlerrcode;
	failure->message = edata->message ? edata->message : "missing error text";
	if (is_verdict(edata, verdict))
	{
		failure->sqlerrcode = verdict->sqlerrcode;
		failure->message = pstrdup(verdict->message);
		failure->delay = verdict->delay;
	}
	failure->message = storable_text(failure->message);
	failure->detail = storable_text(edata->detail);
	failure->hint = storable_text(edata->hint);
	failure->context = storable_text(edata->context);
	failure->log = storable_text(jq_current_log());
	classify(failure);
	MemoryContextSwitchTo(oldcxt);
	return failure;
}

/*
 * A failure that is no error, in the current memory context; message is kept.
 */
JqFailure *
jq_make_failure(int sqlerrcode, char *message)
{
	JqFailure  *failure = palloc0(sizeof(JqFailure));

	failure->sqlerrcode = sqlerrcode;
	failure->message = message;
	return failure;
}

/*
 * Whether the attempt is to be repeated without being spent: what it failed of
 * comes from others, and is over now.  tries: how often it was made.  Returns
 * at once the first time, then after a random wait that grows, or those who
 * met would meet again.
 */
bool
jq_try_again(const JqFailure *failure, int tries)
{
	if (tries == MAX_TRIES ||
		(failure->sqlerrcode != ERRCODE_T_R_DEADLOCK_DETECTED &&
		 failure->sqlerrcode != ERRCODE_T_R_SERIALIZATION_FAILURE))
		return false;
	if (tries > 1)
	{
		long		limit = TRY_AGAIN_MS << tries;

		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 1 + (uint64) jq_random_stamp() % limit, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	return true;
}

/*
 * Which attempt is at hand, for messages.  With retry_for their number does
 * not count, so there may be more than max_attempts.
 */
char *
jq_attempt_text(const JqJob *job)
{
	if (job->attempts >= job->max_attempts)
		return psprintf("attempt %d", job->attempts + 1);
	return psprintf("attempt %d of %d", job->attempts + 1, job->max_attempts);
}

/*
 * How the attempt failed whose worker died; the rest of *job is told of it.
 */
static JqFailure *
failure_of_dead(JqJob *job, const JqUnsettled *unsettled)
{
	const JqAttempt *attempt = &unsettled->attempt;
	JqFailure  *failure;

	switch (unsettled->death)
	{
		case JQ_DEATH_CANCEL:
			failure = jq_make_failure(ERRCODE_JQ_CANCELLED, NULL);
			failure->end = JQ_END_CANCELLED;
			break;
		case JQ_DEATH_TIMEOUT:
			failure = jq_make_failure(ERRCODE_QUERY_CANCELED,
									  psprintf("handler \"%s\" did not end when its time was up, so worker process with PID %d was ended",
											   job->name, (int) attempt->pid));
			failure->timed_out = true;
			break;
		case JQ_DEATH_CRASH:
			failure = jq_make_failure(ERRCODE_CRASH_SHUTDOWN,
									  psprintf("worker process with PID %d crashed or was killed while it ran the job",
											   (int) attempt->pid));
			break;
		default:
			failure = jq_make_failure(ERRCODE_OPERATOR_INTERVENTION,
									  psprintf("worker process with PID %d ended while it ran the job",
											   (int) attempt->pid));
			break;
	}
	failure->durable = true;

	/* the record of an earlier attempt may have been lost in the crash */
	job->attempts = Max(job->attempts, attempt->attempt - 1);
	failure->log = attempt->report.log[0] != '\0' ?
		storable_text(attempt->report.log) : NULL;
	job->pid = attempt->pid;
	job->started_at = attempt->started_at;
	return failure;
}

/*
 * How the attempt failed whose lease is over, or whose session is, before it
 * said how it ended.
 */
static JqFailure *
failure_of_lost_lease(void)
{
	JqFailure  *failure = jq_make_failure(ERRCODE_OPERATOR_INTERVENTION,
										  pstrdup("session that ran the attempt did not record its end"));

	failure->durable = true;
	failure->at_once = true;
	return failure;
}

/*
 * The detail for the end of a job that is not attempted any more: the error of
 * the last attempt that was made, if there is one, is what somebody will look
 * for.
 */
char *
jq_last_error_detail(const JqJob *job)
{
	if (job->last_error == NULL)
		return NULL;
	return storable_text(psprintf("The last error was %s", job->last_error));
}

/*
 * The failure of a job that is not to be attempted any more.
 */
static JqFailure *
permanent_failure(const JqJob *job, int sqlerrcode, char *message)
{
	JqFailure  *failure = jq_make_failure(sqlerrcode, message);

	failure->permanent = true;
	failure->unspent = true;
	failure->detail = jq_last_error_detail(job);
	return failure;
}

/*
 * If a claimed job must not be run but settled, say how: its last attempt
 * ended with its worker or session and that is not recorded yet, or it may not
 * be run any more.
 * Else NULL.  handler is NULL if nobody has registered it.
 */
JqFailure *
jq_failure_before_start(JqJob *job, const JqHandler *handler)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz deadline = jq_deadline(handler, job);
	JqUnsettled unsettled;

	if (jq_is_unsettled(job, &unsettled))
		return failure_of_dead(job, &unsettled);
	if (job->batch_id != 0 && !jq_batch_goes_on(job->batch_id))
	{
		JqFailure  *failure = permanent_failure(job, ERRCODE_JQ_SKIPPED,
												pstrdup("batch was cancelled"));

		failure->end = JQ_END_DROPPED;
		return failure;
	}
	if (job->token != 0)
		return failure_of_lost_lease();

	if (deadline != DT_NOEND)
	{
		if (job->attempts > 0 && now > deadline)
			return permanent_failure(job, ERRCODE_JQ_EXPIRED,
									 psprintf("time for further attempts was over before attempt %d",
											  job->attempts + 1));
	}
	else if (job->attempts >= job->max_attempts)
		return permanent_failure(job, ERRCODE_OPERATOR_INTERVENTION,
								 pstrdup("no attempt is left"));

	if (handler == NULL)
	{
		JqFailure  *failure = permanent_failure(job, ERRCODE_UNDEFINED_OBJECT,
												psprintf("handler \"%s\" is not registered", job->name));

		failure->unspent = false;
		return failure;
	}
	if (!jq_interval_is_zero(&handler->expires) &&
		now > jq_time_after(job->counts_from, &handler->expires))
		return permanent_failure(job, ERRCODE_JQ_EXPIRED,
								 psprintf("expired before attempt %d",
										  job->attempts + 1));
	return NULL;
}
