/*-------------------------------------------------------------------------
 *
 * key.c
 *	  Keys of jobs: what makes a job unique, and what it shares a limit or a
 *	  group with.
 *
 * A handler is registered with where its keys come from: a jsonpath if the
 * text begins with '$', else the name of a function (jsonb) RETURNS text.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"

#include "compat.h"
#include "jq.h"

/* A longer key, in bytes, is stored as its hash, as an index entry is bounded. */
#define MAX_KEY_LENGTH 255

#define HASH_PREFIX "sha256:"

/*
 * A key as it is stored and compared.
 */
char *
jq_stored_key(const char *key, int len)
{
	bytea	   *hash;
	char	   *result;
	int			prefix_len = strlen(HASH_PREFIX);
	uint64		hex_len;

	if (len <= MAX_KEY_LENGTH)
		return pnstrdup(key, len);

	hash = DatumGetByteaPP(DirectFunctionCall1(sha256_bytea,
											   PointerGetDatum(cstring_to_text_with_len(key, len))));
	result = palloc(prefix_len + VARSIZE_ANY_EXHDR(hash) * 2 + 1);
	memcpy(result, HASH_PREFIX, prefix_len);
	hex_len = hex_encode(VARDATA_ANY(hash), VARSIZE_ANY_EXHDR(hash),
						 result + prefix_len);
	result[prefix_len + hex_len] = '\0';
	return result;
}

/*
 * The function of a schema-qualified signature; InvalidOid if there is none.
 */
Oid
jq_function_of_signature(const char *signature)
{
	LOCAL_FCINFO(fcinfo, 1);
	JqOwnerSection section;
	Datum		function;

	InitFunctionCallInfoData(*fcinfo, NULL, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = CStringGetTextDatum(signature);
	fcinfo->args[0].isnull = false;
	jq_enter_owner(&section);
	function = to_regprocedure(fcinfo);
	jq_leave_owner(&section);
	return fcinfo->isnull ? InvalidOid : DatumGetObjectId(function);
}

/*
 * Check where a key is to come from, and give it as it is to be stored; what
 * names the parameter.
 */
char *
jq_check_key_source(text *source, const char *what)
{
	char	   *given = text_to_cstring(source);
	Oid			function;
	HeapTuple	tuple;
	Form_pg_proc form;
	bool		fits;

	if (given[0] == '$')
	{
		(void) DirectFunctionCall1(jsonpath_in, CStringGetDatum(given));
		return given;
	}
	if (strchr(given, '(') == NULL)
		given = psprintf("%s(jsonb)", given);
	function = DatumGetObjectId(DirectFunctionCall1(regprocedurein,
													CStringGetDatum(given)));
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", function);
	form = (Form_pg_proc) GETSTRUCT(tuple);
	fits = form->prokind == PROKIND_FUNCTION && !form->proretset &&
		form->prorettype == TEXTOID && form->provolatile == PROVOLATILE_IMMUTABLE &&
		form->pronargs == 1 && form->proargtypes.values[0] == JSONBOID;
	ReleaseSysCache(tuple);
	if (!fits)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s cannot come from function %s", what, given),
				 errdetail("A key comes from a jsonpath that begins with $, or an immutable function (jsonb) that returns text.")));
	return format_procedure_qualified(function);
}

/*
 * Fill in a source of keys from a column of jq.handlers.
 */
void
jq_read_key_source(JqKeySource *source, Datum value, bool isnull)
{
	memset(source, 0, sizeof(JqKeySource));
	if (isnull)
		return;
	source->text = TextDatumGetCString(value);
	if (source->text[0] == '$')
		source->path = DirectFunctionCall1(jsonpath_in,
										   CStringGetDatum(source->text));
}

void
jq_copy_key_source(JqKeySource *copy, const JqKeySource *source)
{
	*copy = *source;
	if (source->text)
		copy->text = pstrdup(source->text);
	if (source->path)
		copy->path = PointerGetDatum(PG_DETOAST_DATUM_COPY(source->path));
}

/*
 * What the path finds first, as text: a string without its quotes.
 */
static char *
evaluate_path(Datum path, Datum payload)
{
	LOCAL_FCINFO(fcinfo, 4);
	Datum		found;
	Jsonb	   *jsonb;
	JsonbValue	scalar;

	InitFunctionCallInfoData(*fcinfo, NULL, 4, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = payload;
	fcinfo->args[1].value = path;
	fcinfo->args[2].value = DirectFunctionCall1(jsonb_in, CStringGetDatum("{}"));
	fcinfo->args[3].value = BoolGetDatum(true);
	for (int i = 0; i < 4; i++)
		fcinfo->args[i].isnull = false;
	found = jsonb_path_query_first(fcinfo);
	if (fcinfo->isnull)
		return NULL;

	jsonb = DatumGetJsonbP(found);
	if (JsonbExtractScalar(&jsonb->root, &scalar))
	{
		if (scalar.type == jbvNull)
			return NULL;
		if (scalar.type == jbvString)
			return pnstrdup(scalar.val.string.val, scalar.val.string.len);
	}
	return JsonbToCString(NULL, &jsonb->root, VARSIZE(jsonb));
}

/*
 * What the function returns, called with the current role's rights.
 */
static char *
evaluate_function(const char *signature, Datum payload)
{
	LOCAL_FCINFO(fcinfo, 1);
	Oid			function = jq_function_of_signature(signature);
	FmgrInfo	flinfo;
	Datum		result;

	if (!OidIsValid(function))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function %s, which gives a key, does not exist", signature),
				 errhint("Create the function, or register the handler with another one.")));
	if (object_aclcheck(ProcedureRelationId, function, GetUserId(),
						ACL_EXECUTE) != ACLCHECK_OK)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for function %s, which gives a key", signature)));
	fmgr_info(function, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = payload;
	fcinfo->args[0].isnull = false;
	result = FunctionCallInvoke(fcinfo);
	return fcinfo->isnull ? NULL : TextDatumGetCString(result);
}

/*
 * The key of a job with this payload, as it is stored; NULL if it has none.
 */
char *
jq_evaluate_key(const JqKeySource *source, Datum payload)
{
	char	   *key = source->path ?
	evaluate_path(source->path, payload) :
	evaluate_function(source->text, payload);

	return key ? jq_stored_key(key, strlen(key)) : NULL;
}
