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

PG_FUNCTION_INFO_V1(jq_dispatch);
PG_FUNCTION_INFO_V1(jq_dispatch_unique);
PG_FUNCTION_INFO_V1(jq_dispatch_spec);
PG_FUNCTION_INFO_V1(jq_dispatch_specs);

/*
 * Raise an error where a job cannot be queued whatever it is.
 */
void
jq_check_may_dispatch(void)
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
 * Read what a job_spec says of uniqueness into *job; its key, if it has one,
 * is not what its handler says.
 */
void
jq_read_unique(const Datum *values, const bool *nulls, JqJob *job)
{
	if (!nulls[SPEC_UNIQUE_KEY])
	{
		text	   *key = DatumGetTextPP(values[SPEC_UNIQUE_KEY]);

		job->unique_key = jq_stored_key(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
	}
	if (!nulls[SPEC_UNIQUE_FOR])
		job->unique_for = *DatumGetIntervalP(values[SPEC_UNIQUE_FOR]);
	if (!nulls[SPEC_UNIQUE_UNTIL])
		job->unique_until = jq_parse_unique_until(values[SPEC_UNIQUE_UNTIL]);
	if (!nulls[SPEC_ON_CONFLICT])
		job->on_conflict = jq_parse_on_conflict(values[SPEC_ON_CONFLICT]);
}

/*
 * Find out whether a job is to be unique, and how.
 */
static void
resolve_unique(const Datum *values, const bool *nulls,
			   const JqHandler *handler, JqJob *job)
{
	bool		given = !nulls[SPEC_UNIQUE_KEY] || !nulls[SPEC_UNIQUE_FOR] ||
	!nulls[SPEC_UNIQUE_UNTIL];

	if (handler)
	{
		job->unique_for = handler->unique_for;
		job->unique_until = handler->unique_until;
		job->on_conflict = handler->on_conflict;
	}
	jq_read_unique(values, nulls, job);
	if (!given && !(handler && handler->unique))
		return;

	if (nulls[SPEC_UNIQUE_KEY])
		job->unique_key = handler && handler->unique_key.text ?
			jq_evaluate_key(&handler->unique_key, values[SPEC_PAYLOAD]) :
			pstrdup("");
	if (!nulls[SPEC_UNIQUE_FOR])
		jq_check_span(DatumGetIntervalP(values[SPEC_UNIQUE_FOR]), "unique_for");
	if (job->unique_until == JQ_UNTIL_EXPIRY && jq_interval_is_zero(&job->unique_for))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("unique_until \"expiry\" needs unique_for")));
}

/*
 * The group of a job, NULL if it is in none.
 */
static char *
resolve_group(const Datum *values, const bool *nulls, const JqHandler *handler)
{
	if (!nulls[SPEC_GROUP_KEY])
	{
		text	   *key = DatumGetTextPP(values[SPEC_GROUP_KEY]);

		return jq_stored_key(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
	}
	if (handler && handler->group_key.text)
		return jq_evaluate_key(&handler->group_key, values[SPEC_PAYLOAD]);
	return NULL;
}

/*
 * Check what a job is to be, as far as the current role is concerned, and fill
 * in what its handler decides: name, queue, priority, attempts, unique key and
 * group of *job.
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
	resolve_unique(values, nulls, handler, job);
	job->group_key = resolve_group(values, nulls, handler);
}

/*
 * Queue a job: claim its key if it is unique, let it join its group, and
 * insert it.  Its id, and the outcome, say which job there is then.
 */
JqOutcome
jq_enqueue(JqJob *job, Oid roleid)
{
	JqOutcome	outcome = JQ_CREATED;

	if (job->unique_key)
		outcome = jq_claim_key(job);
	if (outcome == JQ_KEPT)
		return outcome;
	if (job->chain && job->chain_id == 0)
		job->chain_id = job->id;
	if (job->group_key)
		jq_join_group(job);
	jq_insert_job(job, roleid);
	return outcome;
}

/*
 * Check one job and queue it, in a batch that the transaction has joined, or
 * in none (0); returns its id, and in *outcome what became of it.
 */
static int64
dispatch_one(const Datum *values, const bool *nulls, int64 batch_id,
			 JqOutcome *outcome)
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
	job.batch_id = batch_id;
	if (!nulls[SPEC_CHAIN])
		job.chain = jq_resolve_chain(values[SPEC_CHAIN], 2);
	job.id = jq_next_job_id();

	*outcome = jq_enqueue(&job, roleid);
	if (batch_id != 0 && *outcome == JQ_CREATED)
		jq_add_to_total(batch_id, 1 + jq_chain_length(&job));
	return job.id;
}

/*
 * Dispatch with the arguments of jq.dispatch().
 */
static int64
dispatch_arguments(FunctionCallInfo fcinfo, JqOutcome *outcome)
{
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];
	int64		batch_id = 0;

	jq_check_may_dispatch();
	for (int i = 0; i < SPEC_CHAIN; i++)
	{
		int			n = i < SPEC_META ? i : i + 1;

		values[i] = PG_GETARG_DATUM(n);
		nulls[i] = PG_ARGISNULL(n);
	}
	nulls[SPEC_CHAIN] = true;
	if (!PG_ARGISNULL(SPEC_META))
	{
		batch_id = PG_GETARG_INT64(SPEC_META);
		jq_join_batch(batch_id, false);
	}
	return dispatch_one(values, nulls, batch_id, outcome);
}

/*
 * jq.dispatch(name, payload, queue, priority, delay, run_at, max_attempts,
 *			   unique_key, unique_for, unique_until, on_conflict, batch_id,
 *			   meta, group_key)
 */
Datum
jq_dispatch(PG_FUNCTION_ARGS)
{
	JqOutcome	outcome;

	PG_RETURN_INT64(dispatch_arguments(fcinfo, &outcome));
}

/*
 * jq.dispatch_unique(the same)
 */
Datum
jq_dispatch_unique(PG_FUNCTION_ARGS)
{
	static const char *const names[] = {
		[JQ_CREATED] = "created",
		[JQ_KEPT] = "kept",
		[JQ_REPLACED] = "replaced"
	};
	TupleDesc	desc;
	Datum		values[2];
	bool		nulls[2] = {false, false};
	JqOutcome	outcome;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	values[0] = Int64GetDatum(dispatch_arguments(fcinfo, &outcome));
	values[1] = CStringGetTextDatum(names[outcome]);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
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
	JqOutcome	outcome;

	jq_check_may_dispatch();
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("job must not be NULL"),
				 errhint("Build it with jq.job().")));
	jq_deform_spec(PG_GETARG_DATUM(0), values, nulls);
	PG_RETURN_INT64(dispatch_one(values, nulls, 0, &outcome));
}

static void
which_element(void *arg)
{
	errcontext("element %d of the array of jobs", *(int *) arg);
}

/*
 * Queue the jobs of an array of jq.job_spec, in a batch that the transaction
 * has joined, or in none (0).  Returns how many elements there are; their ids
 * go to *result, if that is not NULL.
 */
int64
jq_dispatch_array(ArrayType *jobs, int64 batch_id, ReturnSetInfo *result)
{
	ErrorContextCallback errcallback;
	ArrayIterator iterator;
	MemoryContext job_cxt;
	MemoryContext oldcxt;
	int			element = 0;
	Datum		spec;
	bool		isnull;

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
		JqOutcome	outcome;
		Datum		id;

		CHECK_FOR_INTERRUPTS();
		element++;
		if (isnull)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("job must not be NULL")));
		oldcxt = MemoryContextSwitchTo(job_cxt);
		jq_deform_spec(spec, values, nulls);
		id = Int64GetDatum(dispatch_one(values, nulls, batch_id, &outcome));
		MemoryContextSwitchTo(oldcxt);
		MemoryContextReset(job_cxt);

		isnull = false;
		if (result)
			tuplestore_putvalues(result->setResult, result->setDesc, &id, &isnull);
	}
	array_free_iterator(iterator);
	MemoryContextDelete(job_cxt);

	error_context_stack = errcallback.previous;
	return element;
}

/*
 * jq.dispatch(jobs)
 */
Datum
jq_dispatch_specs(PG_FUNCTION_ARGS)
{
	jq_check_may_dispatch();
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("array of jobs must not be NULL")));
	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	jq_dispatch_array(PG_GETARG_ARRAYTYPE_P(0), 0,
					  (ReturnSetInfo *) fcinfo->resultinfo);
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
	(void) jq_enqueue(follow, roleid);
}
