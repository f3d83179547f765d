/*-------------------------------------------------------------------------
 *
 * handler.c
 *	  Handlers: how they are registered, and how a name leads to a function.
 *
 * A session remembers the handlers it has looked up until the configuration
 * changes (jq_configuration_epoch).
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "common/int.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "compat.h"
#include "jq.h"

/* Longest timeout: what a timer can be set to, about 24 days. */
#define MAX_TIMEOUT_US	(INT64CONST(1000) * INT_MAX)

/* Longest wait, and the like: 100 years. */
#define MAX_SPAN_US \
	(INT64CONST(100) * MONTHS_PER_YEAR * DAYS_PER_MONTH * USECS_PER_DAY)

/* Arguments of jq.register() */
enum
{
	REGISTER_HANDLER,
	REGISTER_NAME,
	REGISTER_QUEUE,
	REGISTER_MAX_ATTEMPTS,
	REGISTER_TIMEOUT,
	REGISTER_BACKOFF,
	REGISTER_PRIORITY,
	REGISTER_RETRY_FOR,
	REGISTER_EXPIRES,
	REGISTER_FAIL_ON_TIMEOUT,
	REGISTER_MAX_EXCEPTIONS,
	REGISTER_PERMANENT_ERRORS,
	REGISTER_ON_FAILED,
	REGISTER_KEEP_RESULT,
	REGISTER_UNIQUE_KEY,
	REGISTER_UNIQUE_FOR,
	REGISTER_UNIQUE_UNTIL,
	REGISTER_ON_CONFLICT,
	REGISTER_DEBOUNCE_MAX,
	REGISTER_OVERLAP_KEY,
	REGISTER_OVERLAP_WAIT,
	REGISTER_MAX_RUNNING,
	REGISTER_RUNNING_KEY,
	REGISTER_RATE_KEY,
	REGISTER_RATE_MAX,
	REGISTER_RATE_PER,
	REGISTER_RATE_BURST,
	REGISTER_LIMIT_SCOPE,
	REGISTER_GROUP_KEY,
	REGISTER_MIDDLEWARE
};

typedef struct HandlerEntry
{
	char		name[JQ_NAME_MAX + 1];
	JqHandler	handler;
} HandlerEntry;

static MemoryContext cache_cxt = NULL;
static HTAB *cache = NULL;
static uint64 cache_epoch = 0;

static void read_policy(JqHandler *handler, const Datum *values,
						const bool *nulls);
static void read_unique(JqHandler *handler, const Datum *values,
						const bool *nulls);
static void read_limits(JqHandler *handler, const Datum *values,
						const bool *nulls);
static int *read_sqlstates(ArrayType *array, int *count);
static void find_function(JqHandler *handler);

PG_FUNCTION_INFO_V1(jq_register);
PG_FUNCTION_INFO_V1(jq_unregister);
PG_FUNCTION_INFO_V1(jq_rename_handler);

/* ---------------------------------------------------------------------
 * Look-up
 * --------------------------------------------------------------------- */

static void
start_cache(void)
{
	HASHCTL		ctl = {0};

	if (cache_cxt == NULL)
		cache_cxt = AllocSetContextCreate(TopMemoryContext, "jq handlers",
										  ALLOCSET_DEFAULT_SIZES);
	else
		MemoryContextReset(cache_cxt);

	ctl.keysize = JQ_NAME_MAX + 1;
	ctl.entrysize = sizeof(HandlerEntry);
	ctl.hcxt = cache_cxt;
	cache = hash_create("jq handlers", 64, &ctl,
						HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
}

/*
 * Follow an alias: the name that the handler has now, or NULL.
 */
static char *
resolve_alias(const char *name)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->handler_aliases, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	char	   *result = NULL;

	ScanKeyInit(&key, ALIASES_ALIAS, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(name));
	scan = systable_beginscan(rel, catalog->handler_aliases_pkey, true, NULL,
							  1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;

		result = TextDatumGetCString(heap_getattr(tuple, ALIASES_NAME,
												  RelationGetDescr(rel),
												  &isnull));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return result;
}

/*
 * Fill in a handler from a row of jq.handlers.  Its parts are allocated in
 * the current memory context.
 */
static void
read_handler(JqHandler *handler, HeapTuple tuple, TupleDesc desc)
{
	Datum		values[HANDLERS_NATTS];
	bool		nulls[HANDLERS_NATTS];

	Assert(desc->natts == HANDLERS_NATTS);
	heap_deform_tuple(tuple, desc, values, nulls);

	MemSet(handler, 0, sizeof(JqHandler));
	text_to_cstring_buffer(DatumGetTextPP(values[HANDLERS_NAME - 1]),
						   handler->name, sizeof(handler->name));
	handler->signature = TextDatumGetCString(values[HANDLERS_HANDLER - 1]);
	text_to_cstring_buffer(DatumGetTextPP(values[HANDLERS_QUEUE - 1]),
						   handler->queue, sizeof(handler->queue));
	handler->priority = DatumGetInt32(values[HANDLERS_PRIORITY - 1]);
	handler->max_attempts = DatumGetInt32(values[HANDLERS_MAX_ATTEMPTS - 1]);
	if (!nulls[HANDLERS_TIMEOUT - 1])
		handler->timeout_us =
			jq_interval_us(DatumGetIntervalP(values[HANDLERS_TIMEOUT - 1]));
	if (!nulls[HANDLERS_BACKOFF - 1])
	{
		Datum	   *elements;

		deconstruct_array(DatumGetArrayTypeP(values[HANDLERS_BACKOFF - 1]),
						  INTERVALOID, sizeof(Interval), false,
						  TYPALIGN_DOUBLE, &elements, NULL,
						  &handler->nbackoff);
		handler->backoff = palloc(handler->nbackoff * sizeof(Interval));
		for (int i = 0; i < handler->nbackoff; i++)
			handler->backoff[i] = *DatumGetIntervalP(elements[i]);
	}
	read_policy(handler, values, nulls);
	read_unique(handler, values, nulls);
	read_limits(handler, values, nulls);
	find_function(handler);
}

static void
read_interval(Interval *interval, const Datum *values, const bool *nulls,
			  int column)
{
	if (!nulls[column - 1])
		*interval = *DatumGetIntervalP(values[column - 1]);
}

/*
 * The same for what is to happen when its jobs fail or are done.
 */
static void
read_policy(JqHandler *handler, const Datum *values, const bool *nulls)
{
	read_interval(&handler->retry_for, values, nulls, HANDLERS_RETRY_FOR);
	read_interval(&handler->expires, values, nulls, HANDLERS_EXPIRES);
	read_interval(&handler->keep_result, values, nulls, HANDLERS_KEEP_RESULT);
	handler->fail_on_timeout = DatumGetBool(values[HANDLERS_FAIL_ON_TIMEOUT - 1]);
	if (!nulls[HANDLERS_MAX_EXCEPTIONS - 1])
		handler->max_exceptions = DatumGetInt32(values[HANDLERS_MAX_EXCEPTIONS - 1]);
	if (!nulls[HANDLERS_PERMANENT_ERRORS - 1])
		handler->permanent =
			read_sqlstates(DatumGetArrayTypeP(values[HANDLERS_PERMANENT_ERRORS - 1]),
						   &handler->npermanent);
	if (!nulls[HANDLERS_ON_FAILED - 1])
		text_to_cstring_buffer(DatumGetTextPP(values[HANDLERS_ON_FAILED - 1]),
							   handler->on_failed, sizeof(handler->on_failed));
}

/*
 * The same for what makes its jobs unique.
 */
static void
read_unique(JqHandler *handler, const Datum *values, const bool *nulls)
{
	handler->unique = !nulls[HANDLERS_UNIQUE_KEY - 1] ||
		!nulls[HANDLERS_UNIQUE_FOR - 1] || !nulls[HANDLERS_UNIQUE_UNTIL - 1];
	jq_read_key_source(&handler->unique_key, values[HANDLERS_UNIQUE_KEY - 1],
					   nulls[HANDLERS_UNIQUE_KEY - 1]);
	read_interval(&handler->unique_for, values, nulls, HANDLERS_UNIQUE_FOR);
	read_interval(&handler->debounce_max, values, nulls, HANDLERS_DEBOUNCE_MAX);
	if (!nulls[HANDLERS_UNIQUE_UNTIL - 1])
		handler->unique_until = jq_parse_unique_until(values[HANDLERS_UNIQUE_UNTIL - 1]);
	if (!nulls[HANDLERS_ON_CONFLICT - 1])
		handler->on_conflict = jq_parse_on_conflict(values[HANDLERS_ON_CONFLICT - 1]);
}

static int32
read_integer(const Datum *values, const bool *nulls, int column, int32 missing)
{
	return nulls[column - 1] ? missing : DatumGetInt32(values[column - 1]);
}

/*
 * The same for what they may have to wait for.
 */
static void
read_limits(JqHandler *handler, const Datum *values, const bool *nulls)
{
	jq_read_key_source(&handler->overlap_key, values[HANDLERS_OVERLAP_KEY - 1],
					   nulls[HANDLERS_OVERLAP_KEY - 1]);
	jq_read_key_source(&handler->running_key, values[HANDLERS_RUNNING_KEY - 1],
					   nulls[HANDLERS_RUNNING_KEY - 1]);
	jq_read_key_source(&handler->rate_key, values[HANDLERS_RATE_KEY - 1],
					   nulls[HANDLERS_RATE_KEY - 1]);
	jq_read_key_source(&handler->group_key, values[HANDLERS_GROUP_KEY - 1],
					   nulls[HANDLERS_GROUP_KEY - 1]);
	read_interval(&handler->overlap_wait, values, nulls, HANDLERS_OVERLAP_WAIT);
	read_interval(&handler->rate_per, values, nulls, HANDLERS_RATE_PER);
	handler->max_running = read_integer(values, nulls, HANDLERS_MAX_RUNNING, -1);
	handler->rate_max = read_integer(values, nulls, HANDLERS_RATE_MAX, -1);
	handler->rate_burst = read_integer(values, nulls, HANDLERS_RATE_BURST, 0);
	strlcpy(handler->limit_scope, handler->name, sizeof(handler->limit_scope));
	if (!nulls[HANDLERS_LIMIT_SCOPE - 1])
		text_to_cstring_buffer(DatumGetTextPP(values[HANDLERS_LIMIT_SCOPE - 1]),
							   handler->limit_scope, sizeof(handler->limit_scope));
	if (!nulls[HANDLERS_MIDDLEWARE - 1])
	{
		Datum	   *elements;

		deconstruct_array(DatumGetArrayTypeP(values[HANDLERS_MIDDLEWARE - 1]),
						  TEXTOID, -1, false, TYPALIGN_INT, &elements, NULL,
						  &handler->nmiddleware);
		handler->middleware = palloc(handler->nmiddleware * sizeof(char *));
		for (int i = 0; i < handler->nmiddleware; i++)
			handler->middleware[i] = TextDatumGetCString(elements[i]);
	}
	handler->limited = handler->overlap_key.text || handler->max_running >= 0 ||
		handler->rate_max >= 0;
}

/*
 * The errors in an array of SQLSTATEs and classes.
 */
static int *
read_sqlstates(ArrayType *array, int *count)
{
	Datum	   *elements;
	bool	   *nulls;
	int		   *result;

	deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT,
					  &elements, &nulls, count);
	result = palloc(*count * sizeof(int));
	for (int i = 0; i < *count; i++)
	{
		char	   *code = nulls[i] ? "" : TextDatumGetCString(elements[i]);

		if (strspn(code, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != strlen(code) ||
			(strlen(code) != 5 && strlen(code) != 2))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("permanent_errors must hold SQLSTATEs of five characters, or their classes of two"),
					 errdetail("\"%s\" is neither.", code)));
		result[i] = strlen(code) == 5 ?
			MAKE_SQLSTATE(code[0], code[1], code[2], code[3], code[4]) :
			MAKE_SQLSTATE(code[0], code[1], '0', '0', '0');
	}
	return result;
}

/*
 * Find the function of a handler by its signature.  It is looked up each time
 * the cache is filled, since it may have been dropped and made again.  What is
 * found is the same for all roles; whether one may use it is for
 * jq_check_handler_rights() to say.
 */
static void
find_function(JqHandler *handler)
{
	Oid			function = jq_function_of_signature(handler->signature);
	HeapTuple	tuple;
	Form_pg_proc form;

	if (!OidIsValid(function))
		return;
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	if (!HeapTupleIsValid(tuple))
		return;
	form = (Form_pg_proc) GETSTRUCT(tuple);
	if (form->prokind == PROKIND_FUNCTION && !form->proretset)
	{
		handler->function = form->oid;
		handler->schema = form->pronamespace;
		handler->takes_context = (form->pronargs == 2);
		handler->returns_jsonb = (form->prorettype == JSONBOID);
		handler->definer = form->prosecdef;
		handler->superuser_owned = superuser_arg(form->proowner);
	}
	ReleaseSysCache(tuple);
}

/*
 * The handler of that name, or one that was renamed from it; NULL if there is
 * none.  The result is good until the next call.
 */
const JqHandler *
jq_find_handler(const char *name)
{
	const JqCatalog *catalog = jq_catalog();
	HandlerEntry *entry;
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple = NULL;
	bool		found;

	if (cache == NULL || cache_epoch != jq_configuration_epoch())
	{
		cache_epoch = jq_configuration_epoch();
		start_cache();
	}
	entry = hash_search(cache, name, HASH_FIND, NULL);
	if (entry)
		return &entry->handler;

	rel = table_open(catalog->handlers, AccessShareLock);
	for (const char *wanted = name; wanted != NULL;
		 wanted = (wanted == name) ? resolve_alias(name) : NULL)
	{
		ScanKeyData key;

		ScanKeyInit(&key, HANDLERS_NAME, BTEqualStrategyNumber, F_TEXTEQ,
					CStringGetTextDatum(wanted));
		scan = systable_beginscan(rel, catalog->handlers_pkey, true, NULL,
								  1, &key);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple))
			tuple = heap_copytuple(tuple);
		systable_endscan(scan);
		if (HeapTupleIsValid(tuple))
			break;
	}

	if (HeapTupleIsValid(tuple))
	{
		MemoryContext oldcxt = MemoryContextSwitchTo(cache_cxt);
		JqHandler	handler;

		read_handler(&handler, tuple, RelationGetDescr(rel));
		MemoryContextSwitchTo(oldcxt);
		entry = hash_search(cache, name, HASH_ENTER, &found);
		entry->handler = handler;
	}
	table_close(rel, AccessShareLock);
	return entry ? &entry->handler : NULL;
}

/*
 * A copy of a handler in the current memory context, for a caller that keeps
 * it while others look up theirs.
 */
JqHandler *
jq_copy_handler(const JqHandler *handler)
{
	JqHandler  *copy = palloc(sizeof(JqHandler));

	*copy = *handler;
	copy->signature = pstrdup(handler->signature);
	if (handler->nbackoff > 0)
	{
		copy->backoff = palloc(handler->nbackoff * sizeof(Interval));
		memcpy(copy->backoff, handler->backoff,
			   handler->nbackoff * sizeof(Interval));
	}
	if (handler->npermanent > 0)
	{
		copy->permanent = palloc(handler->npermanent * sizeof(int));
		memcpy(copy->permanent, handler->permanent,
			   handler->npermanent * sizeof(int));
	}
	jq_copy_key_source(&copy->unique_key, &handler->unique_key);
	jq_copy_key_source(&copy->overlap_key, &handler->overlap_key);
	jq_copy_key_source(&copy->running_key, &handler->running_key);
	jq_copy_key_source(&copy->rate_key, &handler->rate_key);
	jq_copy_key_source(&copy->group_key, &handler->group_key);
	if (handler->nmiddleware > 0)
	{
		copy->middleware = palloc(handler->nmiddleware * sizeof(char *));
		for (int i = 0; i < handler->nmiddleware; i++)
			copy->middleware[i] = pstrdup(handler->middleware[i]);
	}
	return copy;
}

bool
jq_interval_is_zero(const Interval *interval)
{
	return interval->time == 0 && interval->day == 0 && interval->month == 0;
}

/*
 * The time plus an interval, as PostgreSQL adds them.
 */
TimestampTz
jq_time_after(TimestampTz time, const Interval *interval)
{
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(time),
												   IntervalPGetDatum(interval)));
}

/*
 * The time after which no attempt of the job is made; DT_NOEND if it is their
 * number that counts.  handler may be NULL.
 */
TimestampTz
jq_deadline(const JqHandler *handler, const JqJob *job)
{
	if (handler == NULL || jq_interval_is_zero(&handler->retry_for))
		return DT_NOEND;
	return jq_time_after(job->counts_from, &handler->retry_for);
}

/*
 * Raise an error unless the handler's function is there, and one that the role
 * could call itself.
 */
void
jq_check_function_rights(const JqHandler *handler, Oid roleid)
{
	if (!OidIsValid(handler->function))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function %s of handler \"%s\" does not exist",
						handler->signature, handler->name),
				 errhint("Create the function, or register the handler with another one.")));
	if (object_aclcheck(NamespaceRelationId, handler->schema, roleid,
						ACL_USAGE) != ACLCHECK_OK)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for handler \"%s\"", handler->name),
				 errdetail("Role \"%s\" lacks USAGE on the schema of function %s.",
						   GetUserNameFromId(roleid, false),
						   handler->signature)));
	if (object_aclcheck(ProcedureRelationId, handler->function, roleid,
						ACL_EXECUTE) != ACLCHECK_OK)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for handler \"%s\"", handler->name),
				 errdetail("Role \"%s\" lacks EXECUTE on function %s.",
						   GetUserNameFromId(roleid, false),
						   handler->signature)));
}

/*
 * Raise an error unless the role may run the handler.  A superuser's job must
 * not be a way for others to run their code as that superuser, so its function
 * must be a superuser's, or run as its own owner.
 */
void
jq_check_handler_rights(const JqHandler *handler, Oid roleid)
{
	jq_check_function_rights(handler, roleid);
	if (superuser_arg(roleid) && !handler->definer && !handler->superuser_owned)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for handler \"%s\"", handler->name),
				 errdetail("A superuser's job does not run function %s as the superuser, because its owner is none.",
						   handler->signature),
				 errhint("Dispatch as another role, or make the function SECURITY DEFINER.")));
}

/*
 * Of all registered names the one most like this; NULL if none is like it.
 */
static char *
nearest_handler(const char *name)
{
	Relation	rel = table_open(jq_catalog()->handlers, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	int			len = strlen(name);
	int			nearest_distance = Max(len / 2, 1);
	char	   *nearest = NULL;
	HeapTuple	tuple;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		Datum		datum = heap_getattr(tuple, HANDLERS_NAME,
										 RelationGetDescr(rel), &isnull);
		char	   *candidate = TextDatumGetCString(datum);
		int			distance;

		distance = varstr_levenshtein_less_equal(name, len, candidate,
												 strlen(candidate), 1, 1, 1,
												 nearest_distance, true);
		if (distance <= nearest_distance &&
			(nearest == NULL || distance < nearest_distance))
		{
			nearest = candidate;
			nearest_distance = distance;
		}
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return nearest;
}

/*
 * Raise the error that there is no handler of that name, with this hint (NULL:
 * none) if no other name is like it.
 */
static void
report_no_handler(const char *name, const char *hint)
{
	char	   *nearest = nearest_handler(name);

	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("handler \"%s\" is not registered", name),
			 nearest ? errhint("Perhaps you meant \"%s\".", nearest) :
			 hint ? errhint("%s", hint) : 0));
}

/*
 * The same to somebody who wants to use the handler.
 */
void
jq_report_unregistered(const char *name)
{
	report_no_handler(name, "Register it with jq.register().");
}

/* ---------------------------------------------------------------------
 * Registration
 * --------------------------------------------------------------------- */

/*
 * Length of an interval in microseconds, with months of 30 days and days of
 * 24 hours, as PostgreSQL compares intervals; PG_INT64_MAX if it is longer.
 */
int64
jq_interval_us(const Interval *interval)
{
	int64		days = (int64) interval->month * DAYS_PER_MONTH + interval->day;
	int64		us;

	if (pg_mul_s64_overflow(days, USECS_PER_DAY, &us) ||
		pg_add_s64_overflow(us, interval->time, &us))
		return days < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	return us;
}

/*
 * Raise an error unless the function can be a handler.
 */
static void
check_function(Oid function, const char *signature)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Form_pg_proc form;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist", function)));
	form = (Form_pg_proc) GETSTRUCT(tuple);

	if (isAnyTempNamespace(form->pronamespace))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("temporary function %s cannot be a handler", signature),
				 errhint("Create the function in another schema; it must outlive the session.")));
	if (form->prokind == PROKIND_PROCEDURE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("procedure %s cannot be a handler", signature),
				 errhint("Write the handler as a function.")));
	if (form->prokind != PROKIND_FUNCTION || form->proretset)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("function %s cannot be a handler", signature),
				 errdetail("A handler is a plain function that returns one value.")));
	if (!((form->pronargs == 1 || form->pronargs == 2) &&
		  form->proargtypes.values[0] == JSONBOID &&
		  (form->pronargs == 1 ||
		   form->proargtypes.values[1] == jq_catalog()->context_type)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("function %s cannot be a handler", signature),
				 errdetail("A handler takes (jsonb) or (jsonb, jq.context).")));
	ReleaseSysCache(tuple);
}

static void
check_timeout(const Interval *timeout)
{
	int64		us = jq_interval_us(timeout);

	if (us < 1000 || us > MAX_TIMEOUT_US)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("timeout must be between 1 ms and 24 days"),
				 errhint("NULL means no timeout.")));
}

static void
check_backoff(ArrayType *backoff)
{
	Datum	   *elements;
	bool	   *nulls;
	int			count;

	if (ARR_NDIM(backoff) != 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("backoff must be a one-dimensional array with at least one wait"),
				 errhint("NULL means 10 s x attempt.")));
	deconstruct_array(backoff, INTERVALOID, sizeof(Interval), false,
					  TYPALIGN_DOUBLE, &elements, &nulls, &count);
	for (int i = 0; i < count; i++)
	{
		int64		us;

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("backoff must not contain NULL")));
		us = jq_interval_us(DatumGetIntervalP(elements[i]));
		if (us < 0 || us > MAX_SPAN_US)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("backoff must lie between 0 and 100 years")));
	}
}

/*
 * The name given as argument n, checked; NULL is an error.
 */
static text *
name_argument(FunctionCallInfo fcinfo, int n, const char *what)
{
	text	   *name;

	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a %s must not be NULL", what)));
	name = PG_GETARG_TEXT_PP(n);
	jq_check_name(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), what);
	return name;
}

/*
 * Raise an error unless it is a length of time that jq works with.
 */
void
jq_check_span(const Interval *interval, const char *what)
{
	int64		us = jq_interval_us(interval);

	if (us <= 0 || us > MAX_SPAN_US)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be greater than zero and at most 100 years", what)));
}

static void
check_span(FunctionCallInfo fcinfo, int n, const char *what)
{
	if (!PG_ARGISNULL(n))
		jq_check_span(PG_GETARG_INTERVAL_P(n), what);
}

/*
 * Check what is to happen when jobs fail.
 */
static void
check_policy(FunctionCallInfo fcinfo)
{
	check_span(fcinfo, REGISTER_RETRY_FOR, "retry_for");
	check_span(fcinfo, REGISTER_EXPIRES, "expires");
	check_span(fcinfo, REGISTER_KEEP_RESULT, "keep_result");
	if (!PG_ARGISNULL(REGISTER_MAX_EXCEPTIONS) &&
		PG_GETARG_INT32(REGISTER_MAX_EXCEPTIONS) <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_exceptions must be at least 1"),
				 errhint("NULL means no limit of its own.")));
	if (!PG_ARGISNULL(REGISTER_PERMANENT_ERRORS))
	{
		int			count;

		(void) read_sqlstates(PG_GETARG_ARRAYTYPE_P(REGISTER_PERMANENT_ERRORS),
							  &count);
	}
	if (!PG_ARGISNULL(REGISTER_ON_FAILED))
	{
		text	   *name = name_argument(fcinfo, REGISTER_ON_FAILED, "handler");

		if (jq_find_handler(text_to_cstring(name)) == NULL)
			ereport(NOTICE,
					(errmsg("handler \"%s\", given as on_failed, is not registered yet",
							text_to_cstring(name))));
	}
}

/*
 * Set a column of the handler's row to an argument as it is given.
 */
static void
set_column(FunctionCallInfo fcinfo, int column, int argument, Datum *values,
		   char *nulls)
{
	values[column - 1] = PG_GETARG_DATUM(argument);
	nulls[column - 1] = PG_ARGISNULL(argument) ? 'n' : ' ';
}

static void
set_key_source(FunctionCallInfo fcinfo, int column, int argument,
			   const char *what, Datum *values, char *nulls)
{
	if (PG_ARGISNULL(argument))
		nulls[column - 1] = 'n';
	else
		values[column - 1] =
			CStringGetTextDatum(jq_check_key_source(PG_GETARG_TEXT_PP(argument), what));
}

/*
 * Check what is to make jobs unique, and set the columns for it.
 */
static void
set_unique(FunctionCallInfo fcinfo, Datum *values, char *nulls)
{
	bool		unique = !PG_ARGISNULL(REGISTER_UNIQUE_KEY) ||
	!PG_ARGISNULL(REGISTER_UNIQUE_FOR) || !PG_ARGISNULL(REGISTER_UNIQUE_UNTIL);
	JqUniqueUntil until = JQ_UNTIL_DONE;
	JqOnConflict conflict = JQ_CONFLICT_KEEP;

	set_key_source(fcinfo, HANDLERS_UNIQUE_KEY, REGISTER_UNIQUE_KEY,
				   "unique_key", values, nulls);
	set_column(fcinfo, HANDLERS_UNIQUE_FOR, REGISTER_UNIQUE_FOR, values, nulls);
	set_column(fcinfo, HANDLERS_UNIQUE_UNTIL, REGISTER_UNIQUE_UNTIL, values, nulls);
	set_column(fcinfo, HANDLERS_ON_CONFLICT, REGISTER_ON_CONFLICT, values, nulls);
	set_column(fcinfo, HANDLERS_DEBOUNCE_MAX, REGISTER_DEBOUNCE_MAX, values, nulls);
	check_span(fcinfo, REGISTER_UNIQUE_FOR, "unique_for");
	check_span(fcinfo, REGISTER_DEBOUNCE_MAX, "debounce_max");
	if (!PG_ARGISNULL(REGISTER_UNIQUE_UNTIL))
		until = jq_parse_unique_until(PG_GETARG_DATUM(REGISTER_UNIQUE_UNTIL));
	if (!PG_ARGISNULL(REGISTER_ON_CONFLICT))
		conflict = jq_parse_on_conflict(PG_GETARG_DATUM(REGISTER_ON_CONFLICT));
	if (until == JQ_UNTIL_EXPIRY && PG_ARGISNULL(REGISTER_UNIQUE_FOR))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("unique_until \"expiry\" needs unique_for")));
	if (!unique && !PG_ARGISNULL(REGISTER_ON_CONFLICT))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("on_conflict needs unique_key, unique_for or unique_until")));
	if (!PG_ARGISNULL(REGISTER_DEBOUNCE_MAX) && conflict != JQ_CONFLICT_DEBOUNCE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("debounce_max needs on_conflict \"debounce\"")));
}

/*
 * Check a number given as argument n; NULL is none.
 */
void
jq_check_number(FunctionCallInfo fcinfo, int n, int least, int most,
				const char *what)
{
	if (!PG_ARGISNULL(n) &&
		(PG_GETARG_INT32(n) < least || PG_GETARG_INT32(n) > most))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be between %d and %d", what, least, most)));
}

/*
 * A function of the middleware, checked, as it is stored.
 */
static Datum
checked_middleware(Oid function)
{
	char	   *signature = format_procedure_qualified(function);

	check_function(function, signature);
	if (get_func_rettype(function) != INTERVALOID || get_func_nargs(function) != 2)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("function %s cannot be middleware", signature),
				 errdetail("Middleware takes (jsonb, jq.context) and returns interval.")));
	return CStringGetTextDatum(signature);
}

static void
set_middleware(FunctionCallInfo fcinfo, Datum *values, char *nulls)
{
	Datum	   *elements;
	bool	   *element_nulls;
	int			count;

	nulls[HANDLERS_MIDDLEWARE - 1] = 'n';
	if (PG_ARGISNULL(REGISTER_MIDDLEWARE))
		return;
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(REGISTER_MIDDLEWARE), REGPROCEDUREOID,
					  sizeof(Oid), true, TYPALIGN_INT, &elements, &element_nulls,
					  &count);
	for (int i = 0; i < count; i++)
	{
		if (element_nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("middleware must not contain NULL")));
		elements[i] = checked_middleware(DatumGetObjectId(elements[i]));
	}
	if (count == 0)
		return;
	values[HANDLERS_MIDDLEWARE - 1] =
		PointerGetDatum(construct_array(elements, count, TEXTOID, -1, false,
										TYPALIGN_INT));
	nulls[HANDLERS_MIDDLEWARE - 1] = ' ';
}

/*
 * Check what jobs may have to wait for, and set the columns for it.
 */
static void
set_limits(FunctionCallInfo fcinfo, Datum *values, char *nulls)
{
	set_key_source(fcinfo, HANDLERS_OVERLAP_KEY, REGISTER_OVERLAP_KEY,
				   "overlap_key", values, nulls);
	set_key_source(fcinfo, HANDLERS_RUNNING_KEY, REGISTER_RUNNING_KEY,
				   "running_key", values, nulls);
	set_key_source(fcinfo, HANDLERS_RATE_KEY, REGISTER_RATE_KEY,
				   "rate_key", values, nulls);
	set_key_source(fcinfo, HANDLERS_GROUP_KEY, REGISTER_GROUP_KEY,
				   "group_key", values, nulls);
	set_column(fcinfo, HANDLERS_OVERLAP_WAIT, REGISTER_OVERLAP_WAIT, values, nulls);
	set_column(fcinfo, HANDLERS_RATE_PER, REGISTER_RATE_PER, values, nulls);
	set_column(fcinfo, HANDLERS_MAX_RUNNING, REGISTER_MAX_RUNNING, values, nulls);
	set_column(fcinfo, HANDLERS_RATE_MAX, REGISTER_RATE_MAX, values, nulls);
	set_column(fcinfo, HANDLERS_RATE_BURST, REGISTER_RATE_BURST, values, nulls);
	nulls[HANDLERS_LIMIT_SCOPE - 1] = 'n';
	if (!PG_ARGISNULL(REGISTER_LIMIT_SCOPE))
	{
		values[HANDLERS_LIMIT_SCOPE - 1] =
			PointerGetDatum(name_argument(fcinfo, REGISTER_LIMIT_SCOPE, "limit_scope"));
		nulls[HANDLERS_LIMIT_SCOPE - 1] = ' ';
	}
	set_middleware(fcinfo, values, nulls);

	check_span(fcinfo, REGISTER_OVERLAP_WAIT, "overlap_wait");
	check_span(fcinfo, REGISTER_RATE_PER, "rate_per");
	jq_check_number(fcinfo, REGISTER_MAX_RUNNING, 0, JQ_MAX_PLACES, "max_running");
	jq_check_number(fcinfo, REGISTER_RATE_MAX, 0, INT_MAX, "rate_max");
	jq_check_number(fcinfo, REGISTER_RATE_BURST, 1, INT_MAX, "rate_burst");
	if (PG_ARGISNULL(REGISTER_RATE_MAX) != PG_ARGISNULL(REGISTER_RATE_PER))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("rate_max and rate_per must be given together")));
	if (PG_ARGISNULL(REGISTER_RATE_MAX) &&
		(!PG_ARGISNULL(REGISTER_RATE_KEY) || !PG_ARGISNULL(REGISTER_RATE_BURST)))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("rate_key and rate_burst need rate_max")));
	if (PG_ARGISNULL(REGISTER_MAX_RUNNING) && !PG_ARGISNULL(REGISTER_RUNNING_KEY))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("running_key needs max_running")));
	if (PG_ARGISNULL(REGISTER_OVERLAP_KEY) && !PG_ARGISNULL(REGISTER_OVERLAP_WAIT))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("overlap_wait needs overlap_key")));
}

/*
 * jq.register(handler, name, ...)
 */
Datum
jq_register(PG_FUNCTION_ARGS)
{
	/* the columns in order, but for the last one */
	Oid			types[] = {TEXTOID, TEXTOID, TEXTOID, INT4OID, INT4OID,
		INTERVALOID, INTERVALARRAYOID, INTERVALOID, INTERVALOID, BOOLOID,
		INT4OID, TEXTARRAYOID, TEXTOID, INTERVALOID, TEXTOID, INTERVALOID,
		TEXTOID, TEXTOID, INTERVALOID, TEXTOID, INTERVALOID, INT4OID, TEXTOID,
		TEXTOID, INT4OID, INTERVALOID, INT4OID, TEXTOID, TEXTOID, TEXTARRAYOID,
	TEXTOID};
	Datum		values[HANDLERS_REGISTERED_BY] = {0};
	char		nulls[HANDLERS_REGISTERED_BY + 1];
	Oid			function;
	char	   *signature;
	int32		max_attempts;
	text	   *name;
	text	   *queue;

	StaticAssertStmt(lengthof(types) == lengthof(values),
					 "a type for each column of jq.handlers");
	jq_require_administer();

	if (PG_ARGISNULL(REGISTER_HANDLER))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("handler must not be NULL")));
	function = PG_GETARG_OID(REGISTER_HANDLER);
	signature = format_procedure_qualified(function);
	check_function(function, signature);

	if (PG_ARGISNULL(REGISTER_NAME))
	{
		name = cstring_to_text(get_func_name(function));
		jq_check_name(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), "handler");
	}
	else
		name = name_argument(fcinfo, REGISTER_NAME, "handler");
	queue = PG_ARGISNULL(REGISTER_QUEUE) ? cstring_to_text("default") :
		name_argument(fcinfo, REGISTER_QUEUE, "queue");
	max_attempts = PG_ARGISNULL(REGISTER_MAX_ATTEMPTS) ? 3 :
		PG_GETARG_INT32(REGISTER_MAX_ATTEMPTS);
	if (max_attempts <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be at least 1")));
	if (!PG_ARGISNULL(REGISTER_TIMEOUT))
		check_timeout(PG_GETARG_INTERVAL_P(REGISTER_TIMEOUT));
	if (!PG_ARGISNULL(REGISTER_BACKOFF))
		check_backoff(PG_GETARG_ARRAYTYPE_P(REGISTER_BACKOFF));
	check_policy(fcinfo);

	memset(nulls, ' ', lengthof(values));
	nulls[lengthof(values)] = '\0';
	values[HANDLERS_NAME - 1] = PointerGetDatum(name);
	values[HANDLERS_HANDLER - 1] = CStringGetTextDatum(signature);
	values[HANDLERS_QUEUE - 1] = PointerGetDatum(queue);
	values[HANDLERS_PRIORITY - 1] =
		Int32GetDatum(PG_ARGISNULL(REGISTER_PRIORITY) ? 0 : PG_GETARG_INT32(REGISTER_PRIORITY));
	values[HANDLERS_MAX_ATTEMPTS - 1] = Int32GetDatum(max_attempts);
	set_column(fcinfo, HANDLERS_TIMEOUT, REGISTER_TIMEOUT, values, nulls);
	set_column(fcinfo, HANDLERS_BACKOFF, REGISTER_BACKOFF, values, nulls);
	set_column(fcinfo, HANDLERS_RETRY_FOR, REGISTER_RETRY_FOR, values, nulls);
	set_column(fcinfo, HANDLERS_EXPIRES, REGISTER_EXPIRES, values, nulls);
	values[HANDLERS_FAIL_ON_TIMEOUT - 1] =
		BoolGetDatum(!PG_ARGISNULL(REGISTER_FAIL_ON_TIMEOUT) &&
					 PG_GETARG_BOOL(REGISTER_FAIL_ON_TIMEOUT));
	set_column(fcinfo, HANDLERS_MAX_EXCEPTIONS, REGISTER_MAX_EXCEPTIONS, values, nulls);
	set_column(fcinfo, HANDLERS_PERMANENT_ERRORS, REGISTER_PERMANENT_ERRORS, values, nulls);
	set_column(fcinfo, HANDLERS_ON_FAILED, REGISTER_ON_FAILED, values, nulls);
	set_column(fcinfo, HANDLERS_KEEP_RESULT, REGISTER_KEEP_RESULT, values, nulls);
	set_unique(fcinfo, values, nulls);
	set_limits(fcinfo, values, nulls);
	values[HANDLERS_REGISTERED_BY - 1] =
		CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));

	/* a name that somebody was renamed from is taken over */
	jq_owner_execute("DELETE FROM jq.handler_aliases WHERE alias = $1",
					 1, types, values, nulls, NULL);
	jq_owner_execute("INSERT INTO jq.handlers AS h (name, handler, queue, priority, max_attempts,"
					 " timeout, backoff, retry_for, expires, fail_on_timeout, max_exceptions,"
					 " permanent_errors, on_failed, keep_result, unique_key, unique_for,"
					 " unique_until, on_conflict, debounce_max, overlap_key, overlap_wait,"
					 " max_running, running_key, rate_key, rate_max, rate_per, rate_burst,"
					 " limit_scope, group_key, middleware, registered_by, registered_at)"
					 " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15,"
					 " $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30,"
					 " $31, clock_timestamp())"
					 " ON CONFLICT (name) DO UPDATE SET (handler, queue, priority, max_attempts,"
					 " timeout, backoff, retry_for, expires, fail_on_timeout, max_exceptions,"
					 " permanent_errors, on_failed, keep_result, unique_key, unique_for,"
					 " unique_until, on_conflict, debounce_max, overlap_key, overlap_wait,"
					 " max_running, running_key, rate_key, rate_max, rate_per, rate_burst,"
					 " limit_scope, group_key, middleware, registered_by, registered_at) ="
					 " ROW ($2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15,"
					 " $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30,"
					 " $31, clock_timestamp())",
					 lengthof(values), types, values, nulls, NULL);
	jq_retry_held(PG_ARGISNULL(REGISTER_LIMIT_SCOPE) ? text_to_cstring(name) :
				  TextDatumGetCString(values[HANDLERS_LIMIT_SCOPE - 1]), false);
	PG_RETURN_TEXT_P(name);
}

/*
 * jq.unregister(name, force)
 */
Datum
jq_unregister(PG_FUNCTION_ARGS)
{
	text	   *name = name_argument(fcinfo, 0, "handler");
	bool		force = !PG_ARGISNULL(1) && PG_GETARG_BOOL(1);
	Oid			types[] = {TEXTOID};
	Datum		values[] = {PointerGetDatum(name)};
	int64		waiting;

	jq_require_administer();

	if (!force)
	{
		jq_owner_execute("SELECT count(*) FROM jq.jobs WHERE name = $1"
						 " OR name IN (SELECT alias FROM jq.handler_aliases AS a WHERE a.name = $1)",
						 1, types, values, NULL, &waiting);
		if (waiting > 0)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg_plural("%lld job waits for handler \"%s\"",
								   "%lld jobs wait for handler \"%s\"",
								   (unsigned long) waiting,
								   (long long) waiting,
								   text_to_cstring(name)),
					 errhint("Wait until they have run, or use force => true: they then fail when run.")));
	}
	if (jq_owner_execute("DELETE FROM jq.handlers WHERE name = $1",
						 1, types, values, NULL, NULL) == 0)
		report_no_handler(text_to_cstring(name), NULL);
	jq_owner_execute("DELETE FROM jq.handler_aliases WHERE name = $1",
					 1, types, values, NULL, NULL);
	jq_retry_held(text_to_cstring(name), false);
	PG_RETURN_VOID();
}

/*
 * jq.rename_handler(old, new)
 */
Datum
jq_rename_handler(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, TEXTOID};
	Datum		values[2];
	int64		taken;
	text	   *old;
	text	   *new;

	jq_require_administer();
	old = name_argument(fcinfo, 0, "handler");
	new = name_argument(fcinfo, 1, "handler");
	values[0] = PointerGetDatum(old);
	values[1] = PointerGetDatum(new);

	jq_owner_execute("SELECT count(*) FROM jq.handlers WHERE name = $2",
					 2, types, values, NULL, &taken);
	if (taken > 0)
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("handler \"%s\" is registered already",
						text_to_cstring(new))));

	/* renaming it back: the name is no alias then, nor another handler's */
	jq_owner_execute("DELETE FROM jq.handler_aliases WHERE alias = $2",
					 2, types, values, NULL, NULL);
	if (jq_owner_execute("UPDATE jq.handlers SET name = $2 WHERE name = $1",
						 2, types, values, NULL, NULL) == 0)
		report_no_handler(text_to_cstring(old), NULL);
	jq_owner_execute("UPDATE jq.handler_aliases SET name = $2 WHERE name = $1",
					 2, types, values, NULL, NULL);
	jq_owner_execute("UPDATE jq.claims SET name = $2 WHERE name = $1",
					 2, types, values, NULL, NULL);
	jq_owner_execute("INSERT INTO jq.handler_aliases (alias, name) VALUES ($1, $2)",
					 2, types, values, NULL, NULL);
	jq_retry_held(text_to_cstring(old), false);
	PG_RETURN_VOID();
}
