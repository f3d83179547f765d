/*-------------------------------------------------------------------------
 *
 * enqueue.c
 *	  SQL entry points that queue jobs: jq.dispatch() and its forms.
 *
 * Everything is checked before anything is written, in the order in which the
 * executor would: may this transaction write at all, do the objects exist, has
 * the role the rights, are the values good.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "compat.h"
#include "jq.h"

static int64 dispatch(const Datum *values, const bool *nulls);

PG_FUNCTION_INFO_V1(jq_dispatch);
PG_FUNCTION_INFO_V1(jq_dispatch_spec);
PG_FUNCTION_INFO_V1(jq_dispatch_specs);

/*
 * Raise an error where a job cannot be queued whatever it is.
 */
static void
check_may_write(void)
{
	PreventCommandIfReadOnly("jq.dispatch()");
	PreventCommandIfParallelMode("jq.dispatch()");
	if (InSecurityRestrictedOperation())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("cannot dispatch a job within security-restricted operation")));
}

/*
 * The time at which a job is due, from its delay or its own time.  What has
 * passed is due now: a key in the past would send searches back.
 */
TimestampTz
jq_due_time(const Datum *values, const bool *nulls, TimestampTz now)
{
	TimestampTz due = now;

	if (!nulls[SPEC_DELAY] && !nulls[SPEC_RUN_AT])
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("delay and run_at cannot be given together"),
				 errhint("Give one of them; neither means at once.")));
	if (!nulls[SPEC_DELAY])
		due = DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
													  TimestampTzGetDatum(now),
													  values[SPEC_DELAY]));
	else if (!nulls[SPEC_RUN_AT])
		due = DatumGetTimestampTz(values[SPEC_RUN_AT]);

	if (TIMESTAMP_NOT_FINITE(due))
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_FIELD_OVERFLOW),
				 errmsg("a job cannot be due at an infinite time")));
	return Max(due, now);
}

static char *
checked_name(Datum value, const char *what)
{
	text	   *name = DatumGetTextPP(value);

	jq_check_name(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), what);
	return text_to_cstring(name);
}

/*
 * Check what a job is to be, as far as the current role is concerned, and fill
 * in what its handler decides: name, queue, priority and attempts of *job.
 */
void
jq_resolve_spec(const Datum *values, const bool *nulls, JqJob *job)
{
	const JqHandler *handler;
	Oid			roleid = GetUserId();

	if (nulls[SPEC_NAME])
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a handler must not be NULL")));
	if (nulls[SPEC_PAYLOAD])
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("payload must not be NULL"),
				 errhint("Use '{}' or 'null'::jsonb.")));

	job->name = checked_name(values[SPEC_NAME], "handler");
	handler = jq_find_handler(job->name);
	if (handler == NULL && jq_require_handler)
		jq_report_unregistered(job->name);
	if (handler)
		jq_check_handler_rights(handler, roleid);

	if (!nulls[SPEC_QUEUE])
		job->queue = checked_name(values[SPEC_QUEUE], "queue");
	else
		job->queue = handler ? pstrdup(handler->queue) : "default";
	jq_require_dispatch(roleid, job->queue);

	job->priority = !nulls[SPEC_PRIORITY] ? DatumGetInt32(values[SPEC_PRIORITY]) :
		handler ? handler->priority : 0;
	job->max_attempts = !nulls[SPEC_MAX_ATTEMPTS] ?
		DatumGetInt32(values[SPEC_MAX_ATTEMPTS]) :
		handler ? handler->max_attempts : 3;
	if (job->max_attempts <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be at least 1")));
}

/*
 * Check one job and queue it; returns its id.
 */
static int64
dispatch(const Datum *values, const bool *nulls)
{
	Oid			roleid = GetUserId();
	static Oid	role_cached = InvalidOid;
	static uint64 role_epoch = 0;
	static char role[NAMEDATALEN];
	JqJob		job = {0};

	jq_resolve_spec(values, nulls, &job);
	if (role_cached != roleid || role_epoch != jq_configuration_epoch())
	{
		strlcpy(role, GetUserNameFromId(roleid, false), sizeof(role));
		role_cached = roleid;
		role_epoch = jq_configuration_epoch();
	}
	job.role = role;
	job.created_at = GetCurrentTimestamp();
	job.available_at = jq_due_time(values, nulls, job.created_at);
	job.counts_from = job.available_at;
	job.payload = values[SPEC_PAYLOAD];
	if (!nulls[SPEC_META])
		job.meta = values[SPEC_META];
	job.stamp = jq_random_stamp();
	if (!nulls[SPEC_CHAIN])
		job.chain = jq_resolve_chain(values[SPEC_CHAIN], 2);
	job.id = jq_next_job_id();
	if (job.chain)
		job.chain_id = job.id;

	jq_insert_job(&job, roleid);
	return job.id;
}

/*
 * jq.dispatch(name, payload, queue, priority, delay, run_at, max_attempts,
 *			   meta)
 */
Datum
jq_dispatch(PG_FUNCTION_ARGS)
{
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];

	check_may_write();
	for (int i = 0; i < SPEC_CHAIN; i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i);
	}
	nulls[SPEC_CHAIN] = true;
	PG_RETURN_INT64(dispatch(values, nulls));
}

/*
 * Take a jq.job_spec apart.  Its payload alone may be NULL where a job's may
 * not: a spec can be written as a row, which has no defaults.
 */
void
jq_deform_spec(Datum spec, Datum *values, bool *nulls)
{
	HeapTupleHeader header = DatumGetHeapTupleHeader(spec);
	HeapTupleData tuple;
	TupleDesc	desc;

	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(header),
								  HeapTupleHeaderGetTypMod(header));
	if (desc->natts != SPEC_NATTS)
		elog(ERROR, "jq.job_spec has %d attributes instead of %d",
			 desc->natts, SPEC_NATTS);
	tuple.t_len = HeapTupleHeaderGetDatumLength(header);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_tableOid = InvalidOid;
	tuple.t_data = header;
	heap_deform_tuple(&tuple, desc, values, nulls);
	ReleaseTupleDesc(desc);

	if (nulls[SPEC_PAYLOAD])
	{
		values[SPEC_PAYLOAD] = DirectFunctionCall1(jsonb_in, CStringGetDatum("{}"));
		nulls[SPEC_PAYLOAD] = false;
	}
}

/*
 * jq.dispatch(job)
 */
Datum
jq_dispatch_spec(PG_FUNCTION_ARGS)
{
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];

	check_may_write();
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("job must not be NULL"),
				 errhint("Build it with jq.job().")));
	jq_deform_spec(PG_GETARG_DATUM(0), values, nulls);
	PG_RETURN_INT64(dispatch(values, nulls));
}

static void
which_element(void *arg)
{
	errcontext("element %d of the array of jobs", *(int *) arg);
}

/*
 * jq.dispatch(jobs)
 */
Datum
jq_dispatch_specs(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	ErrorContextCallback errcallback;
	ArrayIterator iterator;
	ArrayType  *jobs;
	MemoryContext job_cxt;
	MemoryContext oldcxt;
	int			element = 0;
	Datum		spec;
	bool		isnull;

	check_may_write();
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("array of jobs must not be NULL")));
	jobs = PG_GETARG_ARRAYTYPE_P(0);
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);

	errcallback.callback = which_element;
	errcallback.arg = &element;
	errcallback.previous = error_context_stack;
	error_context_stack = &errcallback;

	job_cxt = AllocSetContextCreate(CurrentMemoryContext, "jq job",
									ALLOCSET_DEFAULT_SIZES);
	iterator = array_create_iterator(jobs, 0, NULL);

	while (array_iterate(iterator, &spec, &isnull))
	{
		Datum		values[SPEC_NATTS];
		bool		nulls[SPEC_NATTS];
		Datum		id;

		element++;
		if (isnull)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("job must not be NULL")));
		oldcxt = MemoryContextSwitchTo(job_cxt);
		jq_deform_spec(spec, values, nulls);
		id = Int64GetDatum(dispatch(values, nulls));
		MemoryContextSwitchTo(oldcxt);
		MemoryContextReset(job_cxt);

		isnull = false;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, &id, &isnull);
	}
	array_free_iterator(iterator);
	MemoryContextDelete(job_cxt);

	error_context_stack = errcallback.previous;
	return (Datum) 0;
}

/*
 * Queue the job that follows another one's failure, for the role of that one.
 * Without a queue it has the handler's queue, priority and attempts.  Raises
 * an error if the role may not dispatch it.
 */
void
jq_dispatch_follow_up(JqJob *follow, Oid roleid)
{
	const JqHandler *handler = jq_find_handler(follow->name);

	if (handler == NULL)
		jq_report_unregistered(follow->name);
	if (!OidIsValid(roleid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role \"%s\" does not exist", follow->role)));
	if (follow->queue == NULL)
	{
		follow->queue = pstrdup(handler->queue);
		follow->priority = handler->priority;
		follow->max_attempts = handler->max_attempts;
	}
	jq_check_handler_rights(handler, roleid);
	jq_require_dispatch(roleid, follow->queue);
	jq_insert_job(follow, roleid);
}
