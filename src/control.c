/*-------------------------------------------------------------------------
 *
 * control.c
 *	  What is done by hand: run a handler, change a job that waits, replace the
 *	  workers, adopt what is held.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

PG_FUNCTION_INFO_V1(jq_run);
PG_FUNCTION_INFO_V1(jq_reschedule);
PG_FUNCTION_INFO_V1(jq_restart_workers);
PG_FUNCTION_INFO_V1(jq_adopt);
PG_FUNCTION_INFO_V1(jq_announce);

/* ---------------------------------------------------------------------
 * jq.run
 * --------------------------------------------------------------------- */

/*
 * jq.run(name, payload)
 */
Datum
jq_run(PG_FUNCTION_ARGS)
{
	const JqHandler *found;
	JqHandler  *handler;
	JqJob		job = {0};
	JqCallResult result;
	FmgrInfo	flinfo;
	text	   *name;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a handler and payload must not be NULL")));
	name = PG_GETARG_TEXT_PP(0);
	jq_check_name(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), "handler");
	job.name = text_to_cstring(name);
	found = jq_find_handler(job.name);
	if (found == NULL)
		jq_report_unregistered(job.name);
	handler = jq_copy_handler(found);
	jq_check_handler_rights(handler, GetUserId());

	/* the caller's own time limits hold, not the job's */
	handler->timeout_us = 0;
	job.queue = handler->queue;
	job.max_attempts = handler->max_attempts;
	job.role = GetUserNameFromId(GetUserId(), false);
	job.created_at = GetCurrentTimestamp();
	job.counts_from = job.created_at;
	job.payload = PG_GETARG_DATUM(1);

	fmgr_info(handler->function, &flinfo);
	jq_call_handler(handler, &job, &flinfo, false, &result);
	if (result.isnull || !handler->returns_jsonb)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(result.value);
}

/* ---------------------------------------------------------------------
 * Jobs that wait
 * --------------------------------------------------------------------- */

/*
 * The id of a job given as first argument of a function that writes.
 */
int64
jq_id_argument(FunctionCallInfo fcinfo, const char *function)
{
	PreventCommandIfReadOnly(function);
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("id of a job must not be NULL")));
	return PG_GETARG_INT64(0);
}

/*
 * jq.reschedule(id, run_at, queue, priority, max_attempts)
 */
Datum
jq_reschedule(PG_FUNCTION_ARGS)
{
	JqJob		job = {0};
	int64		id = jq_id_argument(fcinfo, "jq.reschedule()");

	if (!jq_take_waiting_job(id, &job))
		PG_RETURN_BOOL(false);

	if (!PG_ARGISNULL(1))
	{
		TimestampTz run_at = PG_GETARG_TIMESTAMPTZ(1);

		if (TIMESTAMP_NOT_FINITE(run_at))
			ereport(ERROR,
					(errcode(ERRCODE_DATETIME_FIELD_OVERFLOW),
					 errmsg("a job cannot be due at an infinite time")));
		job.available_at = Max(run_at, GetCurrentTimestamp());
		job.counts_from = job.available_at;
	}
	if (!PG_ARGISNULL(2))
	{
		text	   *queue = PG_GETARG_TEXT_PP(2);

		jq_check_name(VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue), "queue");
		job.queue = text_to_cstring(queue);
		jq_require_dispatch(GetUserId(), job.queue);
	}
	if (!PG_ARGISNULL(3))
		job.priority = PG_GETARG_INT32(3);
	if (!PG_ARGISNULL(4))
	{
		job.max_attempts = PG_GETARG_INT32(4);
		if (job.max_attempts <= 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("max_attempts must be at least 1")));
	}
	jq_move_job(&job, get_role_oid(job.role, true));
	PG_RETURN_BOOL(true);
}

/* ---------------------------------------------------------------------
 * Processes
 * --------------------------------------------------------------------- */

/*
 * jq.restart_workers()
 */
Datum
jq_restart_workers(PG_FUNCTION_ARGS)
{
	int64		count = 0;

	jq_require_administer();
	if (JqShared == NULL)
		PG_RETURN_INT64(0);
	LWLockAcquire(JqShared->lock, LW_SHARED);
	for (int i = 0; i < JqShared->nslots; i++)
	{
		if (JqSlots[i].state != JQ_SLOT_FREE && JqSlots[i].dboid == MyDatabaseId)
			count++;
	}
	LWLockRelease(JqShared->lock);
	jq_note_restart();
	PG_RETURN_INT64(count);
}

/* ---------------------------------------------------------------------
 * Origin
 * --------------------------------------------------------------------- */

/*
 * jq.adopt()
 */
Datum
jq_adopt(PG_FUNCTION_ARGS)
{
	Oid			types[] = {OIDOID};
	Datum		values[] = {ObjectIdGetDatum(MyDatabaseId)};

	jq_require_administer();

	/* the table's trigger tells the workers */
	PG_RETURN_INT64(jq_owner_execute("UPDATE jq.jobs SET origin = $1 WHERE origin <> $1",
									 1, types, values, NULL, NULL));
}

/*
 * jq.announce()
 */
Datum
jq_announce(PG_FUNCTION_ARGS)
{
	if (JqShared == NULL && !IsBinaryUpgrade)
		ereport(WARNING,
				(errmsg("jq is not preloaded, so no worker runs jobs by itself"),
				 errhint("Add jq to shared_preload_libraries and restart the server, or call jq.drain().")));
	jq_note_launcher();
	PG_RETURN_VOID();
}
