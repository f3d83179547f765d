/*-------------------------------------------------------------------------
 *
 * chain.c
 *	  Chains: jobs that follow one another.
 *
 * A job carries what follows it in its column chain:
 *
 *		{"links": [{"name": ..., "payload": ..., ...}, ...], "catch": {...}}
 *
 * When it is done, the transaction that removes it queues the first link,
 * which carries the rest.  When it fails for good, the rest goes with it into
 * jq.failed_jobs, and "catch" is queued.  So each link is queued once, and what
 * is left of a chain is in one place.
 *
 * A job_spec can be written by hand, so what it says of its links is checked
 * like any other argument when it is dispatched, and all that the handlers'
 * registration decides is filled in.
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
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/numeric.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "compat.h"
#include "jq.h"

/* Each link is written anew with all that follow it when it is queued. */
#define MAX_LINKS 1000

typedef enum LinkType
{
	LINK_TEXT,
	LINK_JSONB,
	LINK_INTEGER,
	LINK_INTERVAL,
	LINK_TIMESTAMPTZ
} LinkType;

/* What a link has of a job_spec, in the order of that. */
static const struct
{
	const char *key;
	LinkType	type;
}			link_fields[SPEC_CHAIN] =
{
	[SPEC_NAME] = {"name", LINK_TEXT},
	[SPEC_PAYLOAD] = {"payload", LINK_JSONB},
	[SPEC_QUEUE] = {"queue", LINK_TEXT},
	[SPEC_PRIORITY] = {"priority", LINK_INTEGER},
	[SPEC_DELAY] = {"delay", LINK_INTERVAL},
	[SPEC_RUN_AT] = {"run_at", LINK_TIMESTAMPTZ},
	[SPEC_MAX_ATTEMPTS] = {"max_attempts", LINK_INTEGER},
	[SPEC_UNIQUE_KEY] = {"unique_key", LINK_TEXT},
	[SPEC_UNIQUE_FOR] = {"unique_for", LINK_INTERVAL},
	[SPEC_UNIQUE_UNTIL] = {"unique_until", LINK_TEXT},
	[SPEC_ON_CONFLICT] = {"on_conflict", LINK_TEXT},
	[SPEC_META] = {"meta", LINK_JSONB},
	[SPEC_GROUP_KEY] = {"group_key", LINK_TEXT}
};

PG_FUNCTION_INFO_V1(jq_chain);
PG_FUNCTION_INFO_V1(jq_prepend);
PG_FUNCTION_INFO_V1(jq_append);

/* ---------------------------------------------------------------------
 * Reading
 * --------------------------------------------------------------------- */

static void
report_invalid(const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid chain of jobs"),
			 errdetail("%s", detail),
			 errhint("Build it with jq.chain().")));
}

static JsonbValue *
get_key(JsonbContainer *object, const char *key)
{
	JsonbValue *value;

	if (!JsonContainerIsObject(object))
		report_invalid("It is not an object.");
	value = getKeyJsonValueFromContainer(object, key, strlen(key), NULL);
	return value && value->type != jbvNull ? value : NULL;
}

/*
 * The links of a chain, or NULL if there is none.
 */
static JsonbContainer *
get_links(Datum chain)
{
	JsonbValue *links = get_key(&DatumGetJsonbP(chain)->root, "links");

	if (links == NULL)
		return NULL;
	if (links->type != jbvBinary || !JsonContainerIsArray(links->val.binary.data))
		report_invalid("Its links are not an array.");
	return links->val.binary.data;
}

static int
count_links(Datum chain)
{
	JsonbContainer *links = chain == (Datum) 0 ? NULL : get_links(chain);

	return links ? JsonContainerSize(links) : 0;
}

/*
 * The job that follows a failure, or NULL.
 */
static JsonbContainer *
get_catch(Datum chain)
{
	JsonbValue *value = get_key(&DatumGetJsonbP(chain)->root, "catch");

	if (value == NULL)
		return NULL;
	if (value->type != jbvBinary)
		report_invalid("Its catch_job is not an object.");
	return value->val.binary.data;
}

static char *
scalar_as_cstring(const JsonbValue *value)
{
	if (value->type != jbvString)
		report_invalid("A name, queue or time is not a string.");
	return pnstrdup(value->val.string.val, value->val.string.len);
}

static Datum
read_field(JsonbValue *value, LinkType type)
{
	switch (type)
	{
		case LINK_TEXT:
			return CStringGetTextDatum(scalar_as_cstring(value));
		case LINK_INTERVAL:
			return DirectFunctionCall3(interval_in,
									   CStringGetDatum(scalar_as_cstring(value)),
									   ObjectIdGetDatum(InvalidOid),
									   Int32GetDatum(-1));
		case LINK_TIMESTAMPTZ:
			return DirectFunctionCall3(timestamptz_in,
									   CStringGetDatum(scalar_as_cstring(value)),
									   ObjectIdGetDatum(InvalidOid),
									   Int32GetDatum(-1));
		case LINK_INTEGER:
			if (value->type != jbvNumeric)
				report_invalid("A priority or number of attempts is not a number.");
			return DirectFunctionCall1(numeric_int4,
									   NumericGetDatum(value->val.numeric));
		default:
			return JsonbPGetDatum(JsonbValueToJsonb(value));
	}
}

/*
 * Read a link into the values of a job_spec without a chain.
 */
static void
read_link(JsonbContainer *link, Datum *values, bool *nulls)
{
	for (int i = 0; i < SPEC_CHAIN; i++)
	{
		JsonbValue *value;

		if (!JsonContainerIsObject(link))
			report_invalid("A link is not an object.");
		/* the payload and meta data may be a JSON null */
		value = getKeyJsonValueFromContainer(link, link_fields[i].key,
											 strlen(link_fields[i].key), NULL);
		if (value && value->type == jbvNull && link_fields[i].type != LINK_JSONB)
			value = NULL;
		nulls[i] = value == NULL;
		values[i] = value ? read_field(value, link_fields[i].type) : (Datum) 0;
	}
	values[SPEC_CHAIN] = (Datum) 0;
	nulls[SPEC_CHAIN] = true;
	if (nulls[SPEC_PAYLOAD])
	{
		values[SPEC_PAYLOAD] = DirectFunctionCall1(jsonb_in, CStringGetDatum("{}"));
		nulls[SPEC_PAYLOAD] = false;
	}
}

static JsonbContainer *
get_link(JsonbContainer *links, int n)
{
	JsonbValue *value = getIthJsonbValueFromContainer(links, n);

	if (value == NULL || value->type != jbvBinary)
		report_invalid("A link is not an object.");
	return value->val.binary.data;
}

/* ---------------------------------------------------------------------
 * Writing
 * --------------------------------------------------------------------- */

static void
write_field(StringInfo json, Datum value, LinkType type)
{
	Jsonb	   *jsonb;

	switch (type)
	{
		case LINK_TEXT:
			escape_json(json, TextDatumGetCString(value));
			break;
		case LINK_INTEGER:
			appendStringInfo(json, "%d", DatumGetInt32(value));
			break;
		case LINK_INTERVAL:
			escape_json(json, DatumGetCString(DirectFunctionCall1(interval_out, value)));
			break;
		case LINK_TIMESTAMPTZ:
			escape_json(json, timestamptz_to_str(DatumGetTimestampTz(value)));
			break;
		default:
			jsonb = DatumGetJsonbP(value);
			(void) JsonbToCString(json, &jsonb->root, VARSIZE(jsonb));
			break;
	}
}

/*
 * Write the values of a job_spec as a link, without its chain.
 */
static void
write_link(StringInfo json, const Datum *values, const bool *nulls)
{
	const char *separator = "{";

	for (int i = 0; i < SPEC_CHAIN; i++)
	{
		if (nulls[i])
			continue;
		appendStringInfo(json, "%s\"%s\": ", separator, link_fields[i].key);
		write_field(json, values[i], link_fields[i].type);
		separator = ", ";
	}
	appendStringInfoString(json, *separator == '{' ? "{}" : "}");
}

/*
 * Write the elements of an array as they are; *count is how many there are
 * before, and after.
 */
static void
write_links(StringInfo json, JsonbContainer *links, int *count)
{
	for (int i = 0; links && i < JsonContainerSize(links); i++)
	{
		JsonbContainer *link = get_link(links, i);

		if ((*count)++ > 0)
			appendStringInfoString(json, ", ");
		(void) JsonbToCString(json, link, -1);
	}
}

static Datum
finish_chain(StringInfo json, int count)
{
	if (count > MAX_LINKS)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("a chain cannot have more than %d links", MAX_LINKS),
				 errhint("Let a link append others with jq.append().")));
	return DirectFunctionCall1(jsonb_in, CStringGetDatum(json->data));
}

/* ---------------------------------------------------------------------
 * Building
 * --------------------------------------------------------------------- */

static void
which_job(void *arg)
{
	int			n = *(int *) arg;

	if (n > 0)
		errcontext("job %d of the chain", n);
}

/*
 * Add a spec and what follows it to the links.
 */
static void
add_spec(StringInfo json, const Datum *values, const bool *nulls, int *count)
{
	if ((*count)++ > 0)
		appendStringInfoString(json, ", ");
	write_link(json, values, nulls);
	if (!nulls[SPEC_CHAIN])
		write_links(json, get_links(values[SPEC_CHAIN]), count);
}

static void
refuse_catch(const Datum *values, const bool *nulls)
{
	if (!nulls[SPEC_CHAIN] && get_catch(values[SPEC_CHAIN]))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a chain within a chain cannot have a catch_job of its own")));
}

/*
 * Append "catch" to the chain that is being written, if there is one.
 */
static void
add_catch(StringInfo json, Datum catch_job)
{
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];

	jq_deform_spec(catch_job, values, nulls);
	if (!nulls[SPEC_CHAIN])
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("catch_job cannot be a chain")));
	appendStringInfoString(json, ", \"catch\": ");
	write_link(json, values, nulls);
}

/*
 * jq.chain(jobs, catch_job)
 */
Datum
jq_chain(PG_FUNCTION_ARGS)
{
	ErrorContextCallback errcallback;
	StringInfoData json;
	TupleDesc	desc;
	ArrayIterator iterator;
	Datum		first_values[SPEC_NATTS];
	bool		first_nulls[SPEC_NATTS];
	bool		has_catch = PG_NARGS() > 1 && !PG_ARGISNULL(1);
	int			element = 0;
	int			count = 0;
	Datum		spec;
	bool		isnull;

	if (PG_ARGISNULL(0))
		PG_RETURN_NULL();

	errcallback.callback = which_job;
	errcallback.arg = &element;
	errcallback.previous = error_context_stack;
	error_context_stack = &errcallback;

	initStringInfo(&json);
	appendStringInfoString(&json, "{\"links\": [");
	iterator = array_create_iterator(PG_GETARG_ARRAYTYPE_P(0), 0, NULL);
	while (array_iterate(iterator, &spec, &isnull))
	{
		Datum		values[SPEC_NATTS];
		bool		nulls[SPEC_NATTS];

		CHECK_FOR_INTERRUPTS();
		element++;
		if (isnull)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("job must not be NULL")));
		jq_deform_spec(spec, values, nulls);
		refuse_catch(values, nulls);
		if (element > 1)
			add_spec(&json, values, nulls, &count);
		else
		{
			memcpy(first_values, values, sizeof(values));
			memcpy(first_nulls, nulls, sizeof(nulls));
			if (!nulls[SPEC_CHAIN])
				write_links(&json, get_links(values[SPEC_CHAIN]), &count);
		}
	}
	array_free_iterator(iterator);
	error_context_stack = errcallback.previous;
	if (element == 0)
		PG_RETURN_NULL();

	appendStringInfoChar(&json, ']');
	if (has_catch)
		add_catch(&json, PG_GETARG_DATUM(1));
	appendStringInfoChar(&json, '}');
	first_nulls[SPEC_CHAIN] = count == 0 && !has_catch;
	if (!first_nulls[SPEC_CHAIN])
		first_values[SPEC_CHAIN] = finish_chain(&json, count);

	desc = lookup_rowtype_tupdesc(jq_catalog()->spec_type, -1);
	spec = HeapTupleGetDatum(heap_form_tuple(desc, first_values, first_nulls));
	ReleaseTupleDesc(desc);
	PG_RETURN_DATUM(spec);
}

/*
 * Put the unique key and the group of the job into the values of its spec: in
 * a link that waits they are as they came out at the dispatch.
 */
static void
resolve_keys(const JqJob *job, Datum *values, bool *nulls)
{
	nulls[SPEC_UNIQUE_KEY] = nulls[SPEC_UNIQUE_UNTIL] =
		nulls[SPEC_ON_CONFLICT] = job->unique_key == NULL;
	nulls[SPEC_UNIQUE_FOR] = job->unique_key == NULL ||
		jq_interval_is_zero(&job->unique_for);
	if (job->unique_key)
	{
		values[SPEC_UNIQUE_KEY] = CStringGetTextDatum(job->unique_key);
		values[SPEC_UNIQUE_FOR] = IntervalPGetDatum(&job->unique_for);
		values[SPEC_UNIQUE_UNTIL] =
			CStringGetTextDatum(jq_unique_until_name(job->unique_until));
		values[SPEC_ON_CONFLICT] =
			CStringGetTextDatum(jq_on_conflict_name(job->on_conflict));
	}
	nulls[SPEC_GROUP_KEY] = job->group_key == NULL;
	if (job->group_key)
		values[SPEC_GROUP_KEY] = CStringGetTextDatum(job->group_key);
}

/*
 * Write a link again with all that its handler decides filled in.  Raises an
 * error if it cannot be dispatched.
 */
static void
resolve_link(StringInfo json, JsonbContainer *link)
{
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];
	JqJob		job = {0};

	read_link(link, values, nulls);
	jq_resolve_spec(values, nulls, &job);
	(void) jq_due_time(values, nulls, GetCurrentTimestamp());
	values[SPEC_QUEUE] = CStringGetTextDatum(job.queue);
	values[SPEC_PRIORITY] = Int32GetDatum(job.priority);
	values[SPEC_MAX_ATTEMPTS] = Int32GetDatum(job.max_attempts);
	nulls[SPEC_QUEUE] = nulls[SPEC_PRIORITY] = nulls[SPEC_MAX_ATTEMPTS] = false;
	resolve_keys(&job, values, nulls);
	write_link(json, values, nulls);
}

/*
 * Check the chain of a job that is to be dispatched by the current role, and
 * give it as it is to be stored; 0 if nothing follows.  first is the number of
 * its first link, for messages; 0 if it is no chain to the user.
 */
Datum
jq_resolve_chain(Datum chain, int first)
{
	ErrorContextCallback errcallback;
	StringInfoData json;
	JsonbContainer *links = get_links(chain);
	JsonbContainer *catch = get_catch(chain);
	int			count = links ? JsonContainerSize(links) : 0;
	int			element = first;

	if (count == 0 && catch == NULL)
		return (Datum) 0;

	errcallback.callback = which_job;
	errcallback.arg = &element;
	errcallback.previous = error_context_stack;
	error_context_stack = &errcallback;

	initStringInfo(&json);
	appendStringInfoString(&json, "{\"links\": [");
	for (int i = 0; i < count; i++, element++)
	{
		if (i > 0)
			appendStringInfoString(&json, ", ");
		resolve_link(&json, get_link(links, i));
	}
	error_context_stack = errcallback.previous;

	appendStringInfoChar(&json, ']');
	if (catch)
	{
		appendStringInfoString(&json, ", \"catch\": ");
		resolve_link(&json, catch);
	}
	appendStringInfoChar(&json, '}');
	return finish_chain(&json, count);
}

/* ---------------------------------------------------------------------
 * Going on
 * --------------------------------------------------------------------- */

/*
 * What is left of a chain without its first link; 0 if nothing.
 */
static Datum
rest_of_chain(Datum chain)
{
	Datum		path[] = {CStringGetTextDatum("links"), CStringGetTextDatum("0")};

	if (count_links(chain) <= 1 && get_catch(chain) == NULL)
		return (Datum) 0;
	return DirectFunctionCall2(jsonb_delete_path, chain,
							   PointerGetDatum(construct_array(path, 2, TEXTOID, -1,
															   false, TYPALIGN_INT)));
}

/*
 * Fill in *next with the job that this link describes.
 */
static void
make_link(JsonbContainer *link, const JqJob *job, JqJob *next)
{
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];

	read_link(link, values, nulls);
	memset(next, 0, sizeof(JqJob));
	next->id = jq_next_job_id();
	next->stamp = jq_random_stamp();
	next->created_at = GetCurrentTimestamp();
	next->available_at = jq_due_time(values, nulls, next->created_at);
	next->counts_from = next->available_at;
	next->role = job->role;
	next->name = TextDatumGetCString(values[SPEC_NAME]);
	next->payload = values[SPEC_PAYLOAD];
	next->queue = TextDatumGetCString(values[SPEC_QUEUE]);
	next->priority = DatumGetInt32(values[SPEC_PRIORITY]);
	next->max_attempts = DatumGetInt32(values[SPEC_MAX_ATTEMPTS]);
	next->meta = nulls[SPEC_META] ? (Datum) 0 : values[SPEC_META];
	next->chain_id = job->chain_id;
	jq_read_unique(values, nulls, next);
	if (!nulls[SPEC_GROUP_KEY])
		next->group_key = TextDatumGetCString(values[SPEC_GROUP_KEY]);
}

/*
 * The job is done: queue what follows it.  previous is its result, 0 if there
 * is none.  Whether the role may still run the link is seen when it is run.
 *
 * A link whose unique key another job has is passed over; one that may not be
 * queued then goes to jq.failed_jobs.  Returns how many links will not come.
 */
int
jq_queue_next_link(const JqJob *job, Oid roleid, Datum previous)
{
	JqJob		next = *job;
	int			dropped = 0;

	while (count_links(next.chain) > 0)
	{
		Datum		rest = rest_of_chain(next.chain);

		make_link(get_link(get_links(next.chain), 0), job, &next);
		next.batch_id = job->batch_id;
		next.callback_of = job->callback_of;
		next.previous = previous;
		next.chain = rest;
		if (next.unique_key && next.on_conflict == JQ_CONFLICT_ERROR)
		{
			jq_dispatch_follower(&next, roleid);
			break;
		}
		if (jq_enqueue(&next, roleid) != JQ_KEPT)
			break;
		dropped++;
		if (next.chain == (Datum) 0)
			break;
	}
	return dropped;
}

/*
 * Check the job that is to follow the end of a batch, for the current role,
 * and give it as it is to be stored.
 */
Datum
jq_resolve_callback(Datum spec)
{
	StringInfoData json;
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];
	int			count = 0;

	jq_deform_spec(spec, values, nulls);
	initStringInfo(&json);
	appendStringInfoString(&json, "{\"links\": [");
	add_spec(&json, values, nulls, &count);
	appendStringInfoChar(&json, ']');
	if (!nulls[SPEC_CHAIN] && get_catch(values[SPEC_CHAIN]))
	{
		appendStringInfoString(&json, ", \"catch\": ");
		(void) JsonbToCString(&json, get_catch(values[SPEC_CHAIN]), -1);
	}
	appendStringInfoChar(&json, '}');
	return jq_resolve_chain(finish_chain(&json, count), count > 1 ? 1 : 0);
}

/*
 * Fill in *job, whose role is set, with what jq_resolve_callback() stored.  It
 * is queued once for the batch, and makes no claim of its own.
 */
void
jq_make_callback(Datum callback, JqJob *job)
{
	JqJob		made;

	make_link(get_link(get_links(callback), 0), job, &made);
	made.chain = rest_of_chain(callback);
	made.unique_key = NULL;
	*job = made;
	if (job->chain)
		job->chain_id = job->id;
}

/*
 * The job that is to be queued because this one failed for good; false if
 * there is none.
 */
bool
jq_make_catch_job(const JqJob *job, JqJob *catch_job)
{
	JsonbContainer *catch = job->chain == (Datum) 0 ? NULL : get_catch(job->chain);

	if (catch == NULL)
		return false;
	make_link(catch, job, catch_job);
	return true;
}

/*
 * Number of links that would follow the job.
 */
int
jq_chain_length(const JqJob *job)
{
	return count_links(job->chain);
}

/* ---------------------------------------------------------------------
 * From inside a link
 * --------------------------------------------------------------------- */

/*
 * Put the given spec before or behind what follows the current job.  It is
 * written to the job's row, so it goes with the transaction, or the
 * subtransaction, that does it.
 */
static void
extend_chain(FunctionCallInfo fcinfo, bool front, const char *function)
{
	const JqHandler *handler;
	const JqJob *job = jq_current(&handler);
	StringInfoData json;
	Datum		values[SPEC_NATTS];
	bool		nulls[SPEC_NATTS];
	Datum		chain;
	Datum		resolved;
	int			count = 0;

	if (job == NULL || job->id == 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s must be called by the handler of a job", function),
				 errdetail("This session is not running a job.")));
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("job must not be NULL"),
				 errhint("Build it with jq.job().")));
	jq_deform_spec(PG_GETARG_DATUM(0), values, nulls);
	refuse_catch(values, nulls);

	initStringInfo(&json);
	appendStringInfoString(&json, "{\"links\": [");
	add_spec(&json, values, nulls, &count);
	appendStringInfoString(&json, "]}");
	resolved = jq_resolve_chain(finish_chain(&json, count), 1);
	if (job->batch_id != 0)
		jq_count_links(job, count);

	chain = jq_lock_chain(job);
	resetStringInfo(&json);
	count = 0;
	appendStringInfoString(&json, "{\"links\": [");
	if (front)
		write_links(&json, get_links(resolved), &count);
	if (chain)
		write_links(&json, get_links(chain), &count);
	if (!front)
		write_links(&json, get_links(resolved), &count);
	appendStringInfoChar(&json, ']');
	if (chain && get_catch(chain))
	{
		appendStringInfoString(&json, ", \"catch\": ");
		(void) JsonbToCString(&json, get_catch(chain), -1);
	}
	appendStringInfoChar(&json, '}');
	jq_write_chain(job, finish_chain(&json, count));
}

/*
 * jq.prepend(job)
 */
Datum
jq_prepend(PG_FUNCTION_ARGS)
{
	extend_chain(fcinfo, true, "jq.prepend()");
	PG_RETURN_VOID();
}

/*
 * jq.append(job)
 */
Datum
jq_append(PG_FUNCTION_ARGS)
{
	extend_chain(fcinfo, false, "jq.append()");
	PG_RETURN_VOID();
}
