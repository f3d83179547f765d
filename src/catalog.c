/*-------------------------------------------------------------------------
 *
 * catalog.c
 *	  Finds jq's own objects, and notices when what is remembered of them, or
 *	  of the configuration in them, is out of date.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/indexing.h"
#include "catalog/namespace.h"
#include "catalog/pg_extension.h"
#include "commands/trigger.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "compat.h"
#include "jq.h"

static JqCatalog catalog;
static bool catalog_valid = false;
static uint64 catalog_changes = 0;

/* Grows whenever handlers, pauses, grants, limits, functions or roles may have
 * changed. */
static uint64 configuration_epoch = 1;

static bool callbacks_registered = false;

PG_FUNCTION_INFO_V1(jq_configuration_written);

static void
relation_changed(Datum arg, Oid relid)
{
	if (relid == InvalidOid ||
		relid == catalog.jobs || relid == catalog.jobs_due ||
		relid == catalog.failed_jobs || relid == catalog.batch_counts)
	{
		catalog_valid = false;
		catalog_changes++;
	}
	if (relid == InvalidOid ||
		relid == catalog.handlers || relid == catalog.handler_aliases ||
		relid == catalog.pauses || relid == catalog.grants ||
		relid == catalog.queues || relid == catalog.limit_settings)
	{
		catalog_valid = false;
		catalog_changes++;
		configuration_epoch++;
	}
}

static void
syscache_changed(Datum arg, int cacheid, uint32 hashvalue)
{
	configuration_epoch++;
}

/*
 * A number that changes whenever the table of jobs may have been rewritten or
 * altered.
 */
uint64
jq_catalog_epoch(void)
{
	return catalog_changes;
}

/*
 * A number that changes whenever something that was looked up in handlers,
 * aliases, pauses, grants, or about functions and roles must be looked up again.
 */
uint64
jq_configuration_epoch(void)
{
	return configuration_epoch;
}

/*
 * Forget what was looked up there, in a worker, if it has changed since the
 * last call.  Returns whether it had.
 */
bool
jq_follow_configuration(void)
{
	static uint32 seen = 0;
	uint32		changes = MyJqDatabase->config_changes;

	if (changes == seen)
		return false;
	pg_read_barrier();
	seen = changes;
	configuration_epoch++;
	return true;
}

static Oid
relation_oid(Oid schema, const char *name)
{
	Oid			relid = get_relname_relid(name, schema);

	if (!OidIsValid(relid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("relation \"jq.%s\" does not exist", name),
				 errhint("Drop the extension and create it again.")));
	return relid;
}

static Oid
type_oid(Oid schema, const char *name)
{
	Oid			typid = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
										CStringGetDatum(name),
										ObjectIdGetDatum(schema));

	if (!OidIsValid(typid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("type \"jq.%s\" does not exist", name),
				 errhint("Drop the extension and create it again.")));
	return typid;
}

/*
 * Read pg_extension's row of jq into the catalog, and give the version, or
 * NULL if the extension is not there.
 */
static char *
read_extension(void)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	char	   *version = NULL;

	ScanKeyInit(&key, Anum_pg_extension_extname,
				BTEqualStrategyNumber, F_NAMEEQ, CStringGetDatum("jq"));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		Form_pg_extension form = (Form_pg_extension) GETSTRUCT(tuple);
		bool		isnull;
		Datum		datum;

		catalog.extension = form->oid;
		catalog.owner = form->extowner;
		catalog.schema = form->extnamespace;
		datum = heap_getattr(tuple, Anum_pg_extension_extversion,
							 RelationGetDescr(rel), &isnull);
		version = TextDatumGetCString(datum);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return version;
}

/*
 * jq's objects in this database, or NULL if the extension is not there.
 * Raises an error if it is of a version that this library does not serve.
 */
const JqCatalog *
jq_catalog_if_any(void)
{
	uint64		changes = catalog_changes;
	char	   *version;

	if (catalog_valid)
		return &catalog;

	if (!callbacks_registered)
	{
		CacheRegisterRelcacheCallback(relation_changed, (Datum) 0);
		CacheRegisterSyscacheCallback(PROCOID, syscache_changed, (Datum) 0);
		CacheRegisterSyscacheCallback(AUTHOID, syscache_changed, (Datum) 0);
		CacheRegisterSyscacheCallback(AUTHMEMMEMROLE, syscache_changed, (Datum) 0);
		callbacks_registered = true;
	}

	version = read_extension();
	if (version == NULL)
		return NULL;
	if (strcmp(version, JQ_EXTVERSION) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"jq\" has version \"%s\", the library serves \"%s\"",
						version, JQ_EXTVERSION),
				 errhint("Run ALTER EXTENSION jq UPDATE, or restart the server if it still has an older library loaded.")));

	catalog.jobs = relation_oid(catalog.schema, "jobs");
	catalog.jobs_pkey = relation_oid(catalog.schema, "jobs_pkey");
	catalog.jobs_due = relation_oid(catalog.schema, "jobs_due");
	catalog.jobs_sequence = relation_oid(catalog.schema, "jobs_id_seq");
	catalog.failed_jobs = relation_oid(catalog.schema, "failed_jobs");
	catalog.failed_jobs_pkey = relation_oid(catalog.schema, "failed_jobs_pkey");
	catalog.pauses = relation_oid(catalog.schema, "pauses");
	catalog.cancellations = relation_oid(catalog.schema, "cancellations");
	catalog.cancellations_id = relation_oid(catalog.schema, "cancellations_id");
	catalog.results = relation_oid(catalog.schema, "results");
	catalog.results_id = relation_oid(catalog.schema, "results_id");
	catalog.attempts = relation_oid(catalog.schema, "attempts");
	catalog.handlers = relation_oid(catalog.schema, "handlers");
	catalog.handlers_pkey = relation_oid(catalog.schema, "handlers_pkey");
	catalog.handler_aliases = relation_oid(catalog.schema, "handler_aliases");
	catalog.handler_aliases_pkey = relation_oid(catalog.schema, "handler_aliases_pkey");
	catalog.grants = relation_oid(catalog.schema, "grants");
	catalog.claims = relation_oid(catalog.schema, "claims");
	catalog.claims_job_id = relation_oid(catalog.schema, "claims_job_id");
	catalog.batches = relation_oid(catalog.schema, "batches");
	catalog.batches_pkey = relation_oid(catalog.schema, "batches_pkey");
	catalog.batches_sequence = relation_oid(catalog.schema, "batches_id_seq");
	catalog.batch_counts = relation_oid(catalog.schema, "batch_counts");
	catalog.queues = relation_oid(catalog.schema, "queues");
	catalog.limit_settings = relation_oid(catalog.schema, "limit_settings");
	catalog.limit_settings_pkey = relation_oid(catalog.schema, "limit_settings_pkey");
	catalog.holders = relation_oid(catalog.schema, "holders");
	catalog.holders_pkey = relation_oid(catalog.schema, "holders_pkey");
	catalog.holders_job_id = relation_oid(catalog.schema, "holders_job_id");
	catalog.held = relation_oid(catalog.schema, "held");
	catalog.held_pkey = relation_oid(catalog.schema, "held_pkey");
	catalog.held_job_id = relation_oid(catalog.schema, "held_job_id");
	catalog.group_members = relation_oid(catalog.schema, "group_members");
	catalog.group_members_pkey = relation_oid(catalog.schema, "group_members_pkey");
	catalog.context_type = type_oid(catalog.schema, "context");
	catalog.spec_type = type_oid(catalog.schema, "job_spec");

	/* unless something changed while we looked */
	catalog_valid = changes == catalog_changes;
	return &catalog;
}

/*
 * jq's objects in this database; an error if the extension is not there.
 */
const JqCatalog *
jq_catalog(void)
{
	const JqCatalog *found = jq_catalog_if_any();

	if (found == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"jq\" does not exist"),
				 errhint("Run CREATE EXTENSION jq in this database.")));
	return found;
}

/*
 * Set a text in the values of a row that is to be formed; NULL stays NULL.
 */
void
jq_set_text(Datum *values, bool *nulls, int column, const char *text)
{
	nulls[column - 1] = (text == NULL);
	if (text)
		values[column - 1] = CStringGetTextDatum(text);
}

/*
 * A copy of a jsonb in a row, detoasted, in the current memory context; 0 for
 * NULL.
 */
Datum
jq_copy_jsonb(TupleTableSlot *row, int column)
{
	if (row->tts_isnull[column - 1])
		return (Datum) 0;
	return PointerGetDatum(PG_DETOAST_DATUM_COPY(row->tts_values[column - 1]));
}

/*
 * Trigger on the tables of handlers, aliases, pauses, queues, limits and
 * grants: all sessions are to look again, once the change has committed.
 */
Datum
jq_configuration_written(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("jq.configuration_written() must be called as a trigger")));

	CacheInvalidateRelcache(trigdata->tg_relation);
	jq_note_configuration();
	if (RelationGetRelid(trigdata->tg_relation) == jq_catalog()->pauses)
		jq_note_pauses();
	return PointerGetDatum(NULL);
}
