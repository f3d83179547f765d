/*-------------------------------------------------------------------------
 *
 * current_job.c
 *	  What a handler may ask and say about the job that it runs: its context,
 *	  how it is to end (jq.fail, jq.release, jq.skip), progress and log.
 *
 * A verdict is an error, so what the attempt did is rolled back, and a handler
 * that traps it goes on as after any error.  It is also remembered here, since
 * some procedural languages pass on an error's message but not its SQLSTATE.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
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
	CONTEXT_CHAIN_ID,
	CONTEXT_BATCH_ID,
	CONTEXT_DISPATCHED_AT,
	CONTEXT_DISPATCHED_BY,
	CONTEXT_DEADLINE,
	CONTEXT_PREVIOUS,
	CONTEXT_FAILURE,
	CONTEXT_META,
	CONTEXT_NATTS
};

static const JqHandler *current_handler = NULL;
static const JqJob *current_job = NULL;
static JqVerdict verdict;
static bool chain_written = false;

/* where a session that is no worker keeps what its handler says */
static JqReport own_report;

PG_FUNCTION_INFO_V1(jq_current_job);
PG_FUNCTION_INFO_V1(jq_fail);
PG_FUNCTION_INFO_V1(jq_release);
PG_FUNCTION_INFO_V1(jq_skip);
PG_FUNCTION_INFO_V1(jq_progress);
PG_FUNCTION_INFO_V1(jq_log);
PG_FUNCTION_INFO_V1(jq_batch_cancelled);

/* ---------------------------------------------------------------------
 * The job
 * --------------------------------------------------------------------- */

/*
 * From now on this is the job that is being run.  Both must live until
 * jq_return_to_job().
 */
void
jq_set_current_job(const JqHandler *handler, const JqJob *job)
{
	if (current_job == NULL)
	{
		own_report.percent = -1;
		own_report.note[0] = '\0';
		own_report.log[0] = '\0';
		chain_written = false;
	}
	verdict.sqlerrcode = 0;
	current_handler = handler;
	current_job = job;
}

/*
 * The handler has ended: the job that it was called within (NULL: none) is the
 * current one again.  What it said of its end stays, for the error that it may
 * have ended with.
 */
void
jq_return_to_job(const JqHandler *handler, const JqJob *job)
{
	current_handler = handler;
	current_job = job;
}

/*
 * The job that is being run, or NULL.
 */
const JqJob *
jq_current(const JqHandler **handler)
{
	*handler = current_handler;
	return current_job;
}

/*
 * The chain of the current job has been written to its row, which therefore is
 * another version of it now.
 */
void
jq_note_chain_written(void)
{
	chain_written = true;
}

/*
 * Whether that may be so, of the last job that was current.
 */
bool
jq_chain_was_written(void)
{
	return chain_written;
}

static void
require_job(const char *function)
{
	if (current_job == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s must be called by the handler of a job", function),
				 errdetail("This session is not running a job.")));
}

/*
 * A jq.context for the job, in the current memory context.
 */
Datum
jq_make_context(const JqHandler *handler, const JqJob *job)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(jq_catalog()->context_type, -1);
	Datum		values[CONTEXT_NATTS];
	bool		nulls[CONTEXT_NATTS] = {false};
	TimestampTz deadline = jq_deadline(handler, job);
	HeapTuple	tuple;

	if (desc->natts != CONTEXT_NATTS)
		elog(ERROR, "jq.context has %d attributes instead of %d",
			 desc->natts, CONTEXT_NATTS);
	values[CONTEXT_ID] = Int64GetDatum(job->id);
	values[CONTEXT_NAME] = CStringGetTextDatum(job->name);
	values[CONTEXT_QUEUE] = CStringGetTextDatum(job->queue);
	values[CONTEXT_ATTEMPT] = Int32GetDatum(job->attempts + 1);
	values[CONTEXT_MAX_ATTEMPTS] = Int32GetDatum(job->max_attempts);
	values[CONTEXT_CHAIN_ID] = Int64GetDatum(job->chain_id);
	nulls[CONTEXT_CHAIN_ID] = job->chain_id == 0;
	values[CONTEXT_BATCH_ID] = Int64GetDatum(job->batch_id ? job->batch_id :
											 job->callback_of);
	nulls[CONTEXT_BATCH_ID] = job->batch_id == 0 && job->callback_of == 0;
	values[CONTEXT_DISPATCHED_AT] = TimestampTzGetDatum(job->created_at);
	values[CONTEXT_DISPATCHED_BY] = CStringGetTextDatum(job->role);
	values[CONTEXT_DEADLINE] = TimestampTzGetDatum(deadline);
	nulls[CONTEXT_DEADLINE] = deadline == DT_NOEND;
	values[CONTEXT_PREVIOUS] = job->previous;
	nulls[CONTEXT_PREVIOUS] = job->previous == (Datum) 0;
	values[CONTEXT_FAILURE] = job->failure;
	nulls[CONTEXT_FAILURE] = job->failure == (Datum) 0;
	values[CONTEXT_META] = job->meta;
	nulls[CONTEXT_META] = job->meta == (Datum) 0;
	tuple = heap_form_tuple(desc, values, nulls);
	ReleaseTupleDesc(desc);
	return HeapTupleGetDatum(tuple);
}

/*
 * jq.current_job()
 */
Datum
jq_current_job(PG_FUNCTION_ARGS)
{
	if (current_job == NULL)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(jq_make_context(current_handler, current_job));
}

/*
 * jq.batch_cancelled()
 */
Datum
jq_batch_cancelled(PG_FUNCTION_ARGS)
{
	require_job("jq.batch_cancelled()");
	PG_RETURN_BOOL(current_job->batch_id != 0 &&
				   jq_batch_is_cancelled(current_job->batch_id));
}

/* ---------------------------------------------------------------------
 * Verdicts
 * --------------------------------------------------------------------- */

/*
 * What the current job's handler said last about its end; sqlerrcode is 0 if
 * it said nothing.
 */
const JqVerdict *
jq_last_verdict(void)
{
	return &verdict;
}

static void
set_verdict(int sqlerrcode, const char *message)
{
	int			len = pg_mbcliplen(message, strlen(message), JQ_ERROR_MAX);

	verdict.sqlerrcode = sqlerrcode;
	memcpy(verdict.message, message, len);
	verdict.message[len] = '\0';
	memset(&verdict.delay, 0, sizeof(Interval));
}

/*
 * jq.fail(message)
 */
Datum
jq_fail(PG_FUNCTION_ARGS)
{
	require_job("jq.fail()");
	/* a message that could not be put together must not make it try again */
	set_verdict(ERRCODE_JQ_FAILED,
				PG_ARGISNULL(0) ? "failed by its handler" :
				text_to_cstring(PG_GETARG_TEXT_PP(0)));
	ereport(ERROR,
			(errcode(ERRCODE_JQ_FAILED),
			 errmsg_internal("%s", verdict.message)));
}

/*
 * jq.release(delay)
 */
Datum
jq_release(PG_FUNCTION_ARGS)
{
	Interval	delay = {0};

	require_job("jq.release()");
	if (!PG_ARGISNULL(0))
		delay = *PG_GETARG_INTERVAL_P(0);

	/* it must lead to a time that can be stored */
	(void) jq_time_after(GetCurrentTimestamp(), &delay);
	set_verdict(ERRCODE_JQ_RELEASED, "job is released");
	verdict.delay = delay;
	ereport(ERROR,
			(errcode(ERRCODE_JQ_RELEASED),
			 errmsg_internal("%s", verdict.message)));
}

/*
 * jq.skip(reason)
 */
Datum
jq_skip(PG_FUNCTION_ARGS)
{
	require_job("jq.skip()");
	set_verdict(ERRCODE_JQ_SKIPPED,
				PG_ARGISNULL(0) ? "job is skipped" :
				text_to_cstring(PG_GETARG_TEXT_PP(0)));
	ereport(ERROR,
			(errcode(ERRCODE_JQ_SKIPPED),
			 errmsg_internal("%s", verdict.message)));
}

/* ---------------------------------------------------------------------
 * Progress and log
 * --------------------------------------------------------------------- */

static bool
report_is_shared(void)
{
	return MyJqAttempt && MyJqAttempt->begun;
}

static JqReport *
open_report(void)
{
	if (!report_is_shared())
		return &own_report;
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	return &MyJqAttempt->report;
}

static void
close_report(void)
{
	if (report_is_shared())
		LWLockRelease(JqShared->lock);
}

/*
 * jq.progress(percent, note)
 */
Datum
jq_progress(PG_FUNCTION_ARGS)
{
	JqReport   *report;
	double		percent = PG_ARGISNULL(0) ? -1 : PG_GETARG_FLOAT8(0);
	char	   *note = PG_ARGISNULL(1) ? "" :
	text_to_cstring(PG_GETARG_TEXT_PP(1));
	int			len = pg_mbcliplen(note, strlen(note), JQ_NOTE_SIZE - 1);

	require_job("jq.progress()");
	if (!PG_ARGISNULL(0) && !(percent >= 0 && percent <= 100))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("progress must be between 0 and 100 percent")));

	report = open_report();
	report->percent = percent;
	memcpy(report->note, note, len);
	report->note[len] = '\0';
	close_report();
	PG_RETURN_VOID();
}

/*
 * The first character of the text that begins at this byte or after it.  Never
 * fails, since it is also called under the lock.
 */
static char *
skip_bytes(char *text, int bytes)
{
	char	   *end = text + bytes;

	while (text < end)
		text += pg_encoding_mblen(GetDatabaseEncoding(), text);
	return text;
}

/*
 * Add a line to the log.  If it gets too long its begin goes, in whole lines
 * except for the last one there is, which may be the only one that tells
 * something.
 */
static void
append_line(char *log, const char *line, int len)
{
	int			used = strlen(log);
	char	   *fits = log + Max(used + len + 2 - JQ_LOG_SIZE, 0);
	char	   *start = log;
	char	   *end;

	while (start < fits && (end = strchr(start, '\n')) != NULL)
		start = end + 1;
	if (start < fits)
		start = skip_bytes(start, fits - start);
	used -= start - log;
	memmove(log, start, used);
	if (used > 0)
		log[used++] = '\n';
	memcpy(log + used, line, len);
	log[used + len] = '\0';
}

/*
 * jq.log(line)
 */
Datum
jq_log(PG_FUNCTION_ARGS)
{
	JqReport   *report;
	char	   *line;
	int			len;

	require_job("jq.log()");
	if (PG_ARGISNULL(0))
		PG_RETURN_VOID();
	line = text_to_cstring(PG_GETARG_TEXT_PP(0));
	line = skip_bytes(line, Max((int) strlen(line) - (JQ_LOG_SIZE - 2), 0));
	len = strlen(line);

	report = open_report();
	append_line(report->log, line, len);
	close_report();
	PG_RETURN_VOID();
}

/*
 * What the handler of the current attempt has written so far; NULL: nothing.
 */
const char *
jq_current_log(void)
{
	const char *log = report_is_shared() ? MyJqAttempt->report.log : own_report.log;

	return log[0] != '\0' ? log : NULL;
}
