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

#include "access/htup_details.h"
#include "access/xact.h"
#include "commands/trigger.h"
#include "funcapi.h"
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
#include "utils/typcache.h"

#include "compat.h"
#include "jq.h"

/* attributes of jq.context */
enum
{
	CONTEXT_ID,
	CONTEXT_NAME,
	CONTEXT_QUEUE,
	CONTEXT_ATTEMPT,
	CONTEXT_MAX_ATTEMPTS,
	CONTEXT_DISPATCHED_AT,
	CONTEXT_DISPATCHED_BY,
	CONTEXT_NATTS
};

static TimeoutId attempt_timeout = MAX_TIMEOUTS;
static volatile sig_atomic_t timed_out = false;

static Datum call_function(const JqHandler *handler, const JqJob *job,
						   FmgrInfo *flinfo, bool *isnull);

/* ---------------------------------------------------------------------
 * The time limit
 * --------------------------------------------------------------------- */

/*
 * The time is up: interrupt the handler as a cancel request would.
 */
static void
attempt_timed_out(void)
{
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
	if (handler->timeout_us == 0)
		return;
	timed_out = false;
	if (attempt_timeout == MAX_TIMEOUTS)
		attempt_timeout = RegisterTimeout(USER_TIMEOUT, attempt_timed_out);
	enable_timeout_after(attempt_timeout,
						 (int) ((handler->timeout_us + 999) / 1000));
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
 * Run a job's handler and fill in *result.  flinfo is for the handler's
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

	start_timeout(handler);
	PG_TRY();
	{
		result->value = call_function(handler, job, flinfo, &result->isnull);
		if (settle)
			AfterTriggerSetState(makeNode(ConstraintsSetStmt));
	}
	PG_CATCH();
	{
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
make_context(const JqJob *job)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(jq_catalog()->context_type, -1);
	Datum		values[CONTEXT_NATTS];
	bool		nulls[CONTEXT_NATTS] = {false};
	HeapTuple	tuple;

	if (desc->natts != CONTEXT_NATTS)
		elog(ERROR, "jq.context has %d attributes instead of %d",
			 desc->natts, CONTEXT_NATTS);
	values[CONTEXT_ID] = Int64GetDatum(job->id);
	values[CONTEXT_NAME] = CStringGetTextDatum(job->name);
	values[CONTEXT_QUEUE] = CStringGetTextDatum(job->queue);
	values[CONTEXT_ATTEMPT] = Int32GetDatum(job->attempts + 1);
	values[CONTEXT_MAX_ATTEMPTS] = Int32GetDatum(job->max_attempts);
	values[CONTEXT_DISPATCHED_AT] = TimestampTzGetDatum(job->created_at);
	values[CONTEXT_DISPATCHED_BY] = CStringGetTextDatum(job->role);
	tuple = heap_form_tuple(desc, values, nulls);
	ReleaseTupleDesc(desc);
	return HeapTupleGetDatum(tuple);
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
		fcinfo->args[1].value = make_context(job);
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
 * Make the current error a failure in the given memory context, and end the
 * error's processing.  The caller still has to abort the (sub)transaction.
 */
JqFailure *
jq_capture_failure(MemoryContext cxt)
{
	MemoryContext oldcxt = MemoryContextSwitchTo(cxt);
	ErrorData  *edata = CopyErrorData();
	JqFailure  *failure = palloc0(sizeof(JqFailure));

	FlushErrorState();
	failure->sqlerrcode = edata->sqlerrcode;
	failure->message = storable_text(edata->message ? edata->message : "missing error text");
	failure->detail = storable_text(edata->detail);
	failure->hint = storable_text(edata->hint);
	failure->context = storable_text(edata->context);
	MemoryContextSwitchTo(oldcxt);
	return failure;
}

static JqFailure *
make_failure(int sqlerrcode, bool permanent, char *message)
{
	JqFailure  *failure = palloc0(sizeof(JqFailure));

	failure->sqlerrcode = sqlerrcode;
	failure->permanent = permanent;
	failure->message = message;
	return failure;
}

/*
 * If a claimed job must not be run but settled, say how: its last attempt
 * ended with its worker and is not counted yet, or it has none left, its last
 * one having ended with its lease.  Else NULL.
 */
JqFailure *
jq_failure_before_start(const JqJob *job)
{
	pid_t		pid;

	if (jq_is_unsettled(job, &pid))
		return make_failure(ERRCODE_OPERATOR_INTERVENTION, false,
							psprintf("worker process with PID %d ended while it ran the job",
									 (int) pid));
	if (job->attempts >= job->max_attempts)
		return make_failure(ERRCODE_OPERATOR_INTERVENTION, true,
							pstrdup("session that ran the last attempt did not record its end"));
	return NULL;
}

/*
 * The failure of a job whose handler nobody has registered.
 */
JqFailure *
jq_unregistered_failure(const JqJob *job)
{
	return make_failure(ERRCODE_UNDEFINED_OBJECT, true,
						psprintf("handler \"%s\" is not registered", job->name));
}
