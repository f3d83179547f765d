/*-------------------------------------------------------------------------
 *
 * insert.c
 *	  Direct insertion into jq.jobs, past planner and executor.
 *
 * What is opened for it stays open until the transaction ends or runs a
 * utility command (which might alter the table), so that one statement that
 * dispatches many jobs pays for it once.  It belongs to the transaction's own
 * resource owner and memory: neither the end of a statement nor the rollback
 * of a subtransaction touches it, and after an abort it is merely forgotten.
 *
 * The executor's checks are made here by hand, or do not apply: rights are
 * checked by the callers, the CHECK constraints hold by construction, and
 * triggers, rules, policies and expression indexes of users are refused, since
 * they would run as somebody else.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_rewrite.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "common/pg_prng.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/primnodes.h"
#include "rewrite/prs2lock.h"
#include "rewrite/rowsecurity.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

typedef struct Insertion
{
	Relation	rel;			/* NULL: not open */
	int			nindexes;
	Relation   *indexes;
	IndexInfo **infos;
	TupleTableSlot *slot;
	MemoryContext row_cxt;		/* reset for each row */
	bool		ready;
	bool		checked;		/* nothing that insertion would pass by */
} Insertion;

static Insertion insertion;

static void open_insertion(void);

PG_FUNCTION_INFO_V1(jq_job_written);

/* ---------------------------------------------------------------------
 * Opening and closing
 * --------------------------------------------------------------------- */

static void
refuse(const char *object)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("%s is not supported", object),
			 errdetail("jq writes the table directly, past the executor, and with its owner's rights."),
			 errhint("Drop it.")));
}

static bool
is_own_check(const char *name)
{
	static const char *const own[] = {
		"jobs_attempts_check", "jobs_max_attempts_check",
		"jobs_exceptions_check", "jobs_queue_check", "jobs_name_check",
		"jobs_lease_check", "jobs_holder_check"
	};

	for (int i = 0; i < lengthof(own); i++)
	{
		if (strcmp(name, own[i]) == 0)
			return true;
	}
	return false;
}

/*
 * Refuse to write to a table that users have given code of their own.
 */
static void
check_table(Relation rel)
{
	TriggerDesc *trigdesc = rel->trigdesc;
	TupleConstr *constr = RelationGetDescr(rel)->constr;

	for (int i = 0; trigdesc && i < trigdesc->numtriggers; i++)
	{
		Trigger    *trigger = &trigdesc->triggers[i];

		if (trigger->tgisinternal)
		{
			/* of a foreign key, which nothing would maintain */
			ObjectAddress constraint;

			ObjectAddressSet(constraint, ConstraintRelationId,
							 trigger->tgconstraint);
			refuse(getObjectDescription(&constraint, false));
		}
		else if (strcmp(trigger->tgname, "job_written") != 0)
			refuse(psprintf("trigger \"%s\" on table jq.jobs", trigger->tgname));
	}
	for (int i = 0; constr && i < constr->num_check; i++)
	{
		if (!is_own_check(constr->check[i].ccname))
			refuse(psprintf("constraint \"%s\" on table jq.jobs",
							constr->check[i].ccname));
	}
	if (rel->rd_rules && rel->rd_rules->numLocks > 0)
	{
		ObjectAddress rule;

		ObjectAddressSet(rule, RewriteRelationId,
						 rel->rd_rules->rules[0]->ruleId);
		refuse(getObjectDescription(&rule, false));
	}
	if (rel->rd_rsdesc)
	{
		ListCell   *lc;

		foreach(lc, rel->rd_rsdesc->policies)
		{
			RowSecurityPolicy *policy = lfirst(lc);

			if (strcmp(policy->policy_name, "own_jobs") != 0)
				refuse(psprintf("policy \"%s\" on table jq.jobs", policy->policy_name));
		}
	}
	for (int i = JOBS_NATTS; i < RelationGetNumberOfAttributes(rel); i++)
	{
		Form_pg_attribute column = TupleDescAttr(RelationGetDescr(rel), i);

		if (!column->attisdropped)
			refuse(psprintf("column \"%s\" of table jq.jobs",
							NameStr(column->attname)));
	}
}

/*
 * Whether it is our own partial index, which jobs without a batch are not in,
 * or one that REINDEX CONCURRENTLY builds in its place.
 */
static bool
is_batch_index(const IndexInfo *info)
{
	NullTest   *test;

	if (info->ii_NumIndexAttrs != 1 ||
		info->ii_IndexAttrNumbers[0] != JOBS_BATCH_ID ||
		list_length(info->ii_Predicate) != 1 ||
		!IsA(linitial(info->ii_Predicate), NullTest))
		return false;
	test = linitial_node(NullTest, info->ii_Predicate);
	return test->nulltesttype == IS_NOT_NULL && IsA(test->arg, Var) &&
		((Var *) test->arg)->varattno == JOBS_BATCH_ID;
}

static void
open_indexes(Relation rel)
{
	List	   *oids = RelationGetIndexList(rel);
	ListCell   *lc;

	insertion.indexes = palloc(list_length(oids) * sizeof(Relation));
	insertion.infos = palloc(list_length(oids) * sizeof(IndexInfo *));
	foreach(lc, oids)
	{
		Relation	index = index_open(lfirst_oid(lc), RowExclusiveLock);
		IndexInfo  *info;

		insertion.indexes[insertion.nindexes] = index;
		insertion.nindexes++;
		info = BuildIndexInfo(index);
		insertion.infos[insertion.nindexes - 1] = info;
		if (info->ii_Expressions != NIL || info->ii_ExclusionOps != NULL ||
			!index->rd_index->indimmediate ||
			(info->ii_Predicate != NIL && !is_batch_index(info)))
			refuse(psprintf("index \"%s\" on table jq.jobs",
							RelationGetRelationName(index)));
	}
	list_free(oids);
}

static void
open_insertion(void)
{
	const JqCatalog *catalog = jq_catalog();
	ResourceOwner save_owner = CurrentResourceOwner;
	MemoryContext oldcxt;

	/* left over from an attempt to open it that failed in a subtransaction */
	jq_close_insertion();

	oldcxt = MemoryContextSwitchTo(TopTransactionContext);
	CurrentResourceOwner = TopTransactionResourceOwner;
	PG_TRY();
	{
		insertion.rel = table_open(catalog->jobs, RowExclusiveLock);
		open_indexes(insertion.rel);
		insertion.slot = MakeSingleTupleTableSlot(RelationGetDescr(insertion.rel),
												  &TTSOpsHeapTuple);
		insertion.row_cxt = AllocSetContextCreate(TopTransactionContext,
												  "jq insertion",
												  ALLOCSET_SMALL_SIZES);
		insertion.ready = true;
	}
	PG_FINALLY();
	{
		CurrentResourceOwner = save_owner;
		MemoryContextSwitchTo(oldcxt);
	}
	PG_END_TRY();
}

/*
 * Close what is open for insertion, before the transaction commits or a
 * utility command looks at the table.
 */
void
jq_close_insertion(void)
{
	ResourceOwner save_owner = CurrentResourceOwner;

	if (insertion.rel == NULL)
		return;

	CurrentResourceOwner = TopTransactionResourceOwner;
	if (insertion.slot)
		ExecDropSingleTupleTableSlot(insertion.slot);
	for (int i = 0; i < insertion.nindexes; i++)
		index_close(insertion.indexes[i], NoLock);
	table_close(insertion.rel, NoLock);
	CurrentResourceOwner = save_owner;
	if (insertion.row_cxt)
		MemoryContextDelete(insertion.row_cxt);
	memset(&insertion, 0, sizeof(insertion));
}

/*
 * Forget what was open: the abort of the transaction has released it.
 */
void
jq_forget_insertion(void)
{
	memset(&insertion, 0, sizeof(insertion));
}

/* ---------------------------------------------------------------------
 * Inserting
 * --------------------------------------------------------------------- */

/*
 * An id for a job that is to be dispatched.
 */
int64
jq_next_job_id(void)
{
	return nextval_internal(jq_catalog()->jobs_sequence, false);
}

/*
 * A random mark for a job.  It has to differ from those that other sessions
 * and other servers give to jobs of the same id, but is no secret.
 */
int64
jq_random_stamp(void)
{
	static pg_prng_state state;
	static int	seeded_for = 0;

	if (seeded_for != MyProcPid)
	{
		if (!pg_prng_strong_seed(&state))
			pg_prng_seed(&state, (uint64) GetCurrentTimestamp() ^ MyProcPid);
		seeded_for = MyProcPid;
	}
	return (int64) pg_prng_uint64(&state);
}

/*
 * Make the index entries of the row in the slot.
 */
static void
insert_index_entries(TupleTableSlot *slot)
{
	Datum		values[INDEX_MAX_KEYS];
	bool		nulls[INDEX_MAX_KEYS];

	for (int i = 0; i < insertion.nindexes; i++)
	{
		Relation	index = insertion.indexes[i];

		/* one that is being built concurrently may not want rows yet */
		if (!insertion.infos[i]->ii_ReadyForInserts)
			continue;
		FormIndexDatum(insertion.infos[i], slot, NULL, values, nulls);
		if (nulls[0] && insertion.infos[i]->ii_Predicate != NIL)
			continue;			/* it has no batch */
		index_insert(index, values, nulls, &slot->tts_tid, insertion.rel,
					 index->rd_index->indisunique ?
					 UNIQUE_CHECK_YES : UNIQUE_CHECK_NO,
					 false, insertion.infos[i]);
	}
}

/*
 * Write a new version of a row of jq.jobs that we have locked.  Makes the index
 * entries that CatalogTupleUpdate() cannot make.
 */
void
jq_update_job(Relation rel, ItemPointer tid, HeapTuple tuple)
{
	MemoryContext oldcxt;

	if (!simple_heap_update_compat(rel, tid, tuple))
		return;
	if (!insertion.ready)
		open_insertion();
	oldcxt = MemoryContextSwitchTo(insertion.row_cxt);
	ExecForceStoreHeapTuple(tuple, insertion.slot, false);
	insert_index_entries(insertion.slot);
	ExecClearTuple(insertion.slot);
	MemoryContextSwitchTo(oldcxt);
	MemoryContextReset(insertion.row_cxt);
}

/*
 * Insert a job of the role, as it is given, and see to it that a worker is
 * woken when the transaction commits.  Rights and values have been checked.
 * The role may be gone (InvalidOid): then nobody needs to be told.
 */
void
jq_insert_job(const JqJob *job, Oid roleid)
{
	TupleTableSlot *slot;
	MemoryContext oldcxt;
	JqKey		key = {job->available_at, job->id};

	if (!insertion.ready)
		open_insertion();
	if (!insertion.checked)
	{
		check_table(insertion.rel);
		insertion.checked = true;
	}

	slot = insertion.slot;
	oldcxt = MemoryContextSwitchTo(insertion.row_cxt);

	ExecClearTuple(slot);
	memset(slot->tts_isnull, true,
		   slot->tts_tupleDescriptor->natts * sizeof(bool));	/* dropped columns */
	memset(slot->tts_isnull, false, JOBS_PAYLOAD * sizeof(bool));
	slot->tts_values[JOBS_ID - 1] = Int64GetDatum(job->id);
	slot->tts_values[JOBS_STAMP - 1] = Int64GetDatum(job->stamp);
	slot->tts_values[JOBS_AVAILABLE_AT - 1] = TimestampTzGetDatum(job->available_at);
	slot->tts_values[JOBS_CREATED_AT - 1] = TimestampTzGetDatum(job->created_at);
	slot->tts_values[JOBS_ORIGIN - 1] = ObjectIdGetDatum(MyDatabaseId);
	slot->tts_values[JOBS_PRIORITY - 1] = Int32GetDatum(job->priority);
	slot->tts_values[JOBS_ATTEMPTS - 1] = Int32GetDatum(job->attempts);
	slot->tts_values[JOBS_MAX_ATTEMPTS - 1] = Int32GetDatum(job->max_attempts);
	slot->tts_values[JOBS_EXCEPTIONS - 1] = Int32GetDatum(job->exceptions);
	slot->tts_values[JOBS_ROLE - 1] = CStringGetTextDatum(job->role);
	slot->tts_values[JOBS_QUEUE - 1] = CStringGetTextDatum(job->queue);
	slot->tts_values[JOBS_NAME - 1] = CStringGetTextDatum(job->name);
	slot->tts_values[JOBS_PAYLOAD - 1] = job->payload;
	slot->tts_values[JOBS_COUNTS_FROM - 1] = TimestampTzGetDatum(job->counts_from);
	slot->tts_isnull[JOBS_COUNTS_FROM - 1] = job->counts_from == job->created_at;
	slot->tts_values[JOBS_META - 1] = job->meta;
	slot->tts_isnull[JOBS_META - 1] = job->meta == (Datum) 0;
	slot->tts_values[JOBS_FAILURE - 1] = job->failure;
	slot->tts_isnull[JOBS_FAILURE - 1] = job->failure == (Datum) 0;
	slot->tts_values[JOBS_CHAIN_ID - 1] = Int64GetDatum(job->chain_id);
	slot->tts_isnull[JOBS_CHAIN_ID - 1] = job->chain_id == 0;
	slot->tts_values[JOBS_CHAIN - 1] = job->chain;
	slot->tts_isnull[JOBS_CHAIN - 1] = job->chain == (Datum) 0;
	slot->tts_values[JOBS_PREVIOUS - 1] = job->previous;
	slot->tts_isnull[JOBS_PREVIOUS - 1] = job->previous == (Datum) 0;
	slot->tts_values[JOBS_BATCH_ID - 1] = Int64GetDatum(job->batch_id);
	slot->tts_isnull[JOBS_BATCH_ID - 1] = job->batch_id == 0;
	slot->tts_values[JOBS_CALLBACK_OF - 1] = Int64GetDatum(job->callback_of);
	slot->tts_isnull[JOBS_CALLBACK_OF - 1] = job->callback_of == 0;
	if (job->unique_key)
	{
		slot->tts_values[JOBS_UNIQUE_KEY - 1] = CStringGetTextDatum(job->unique_key);
		slot->tts_isnull[JOBS_UNIQUE_KEY - 1] = false;
		slot->tts_values[JOBS_UNIQUE_FOR - 1] = IntervalPGetDatum(&job->unique_for);
		slot->tts_isnull[JOBS_UNIQUE_FOR - 1] = jq_interval_is_zero(&job->unique_for);
		slot->tts_values[JOBS_UNIQUE_UNTIL - 1] =
			CStringGetTextDatum(jq_unique_until_name(job->unique_until));
		slot->tts_isnull[JOBS_UNIQUE_UNTIL - 1] = false;
	}
	if (job->group_key)
	{
		slot->tts_values[JOBS_GROUP_KEY - 1] = CStringGetTextDatum(job->group_key);
		slot->tts_isnull[JOBS_GROUP_KEY - 1] = false;
	}
	ExecStoreVirtualTuple(slot);

	table_tuple_insert(insertion.rel, slot, GetCurrentCommandId(true), 0, NULL);
	insert_index_entries(slot);

	ExecClearTuple(slot);
	MemoryContextSwitchTo(oldcxt);
	MemoryContextReset(insertion.row_cxt);

	if (OidIsValid(roleid))
		jq_note_due(roleid, job->queue, job->priority, key);
}

/* ---------------------------------------------------------------------
 * Others who write the table
 * --------------------------------------------------------------------- */

/*
 * Row trigger on jq.jobs, fired by whoever writes the table through the
 * executor: a restore, an apply worker of logical replication, a person.
 *
 * A row that arrives that way was not dispatched here, and is held: origin 0
 * is no database.  A row that is changed by hand stays what it is, and
 * workers are told, since it may be due earlier now.
 */
Datum
jq_job_written(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	TupleDesc	desc;
	HeapTuple	tuple;
	bool		isnull;
	Oid			origin;
	Oid			roleid;
	bool		foreign;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_BEFORE(trigdata->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigdata->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("jq.job_written() must be fired before each row")));

	desc = RelationGetDescr(trigdata->tg_relation);
	tuple = TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event) ?
		trigdata->tg_newtuple : trigdata->tg_trigtuple;

	foreign = TRIGGER_FIRED_BY_INSERT(trigdata->tg_event) ||
		SessionReplicationRole == SESSION_REPLICATION_ROLE_REPLICA;
	if (foreign)
	{
		int			column = JOBS_ORIGIN;
		Datum		value;
		bool		null = false;

		origin = jq_after_restore == JQ_AFTER_RESTORE_ADOPT ?
			MyDatabaseId : InvalidOid;
		value = ObjectIdGetDatum(origin);
		tuple = heap_modify_tuple_by_cols(tuple, desc, 1, &column, &value, &null);
	}
	else
		origin = DatumGetObjectId(heap_getattr(tuple, JOBS_ORIGIN, desc, &isnull));

	if (origin != MyDatabaseId)
		jq_note_full_look();	/* the scheduler tells of them */
	else
	{
		Datum		role = heap_getattr(tuple, JOBS_ROLE, desc, &isnull);
		JqKey		key;

		roleid = isnull ? InvalidOid : get_role_oid(TextDatumGetCString(role), true);
		if (OidIsValid(roleid))
		{
			key.at = DatumGetTimestampTz(heap_getattr(tuple, JOBS_AVAILABLE_AT, desc, &isnull));
			key.id = DatumGetInt64(heap_getattr(tuple, JOBS_ID, desc, &isnull));
			jq_note_due(roleid,
						TextDatumGetCString(heap_getattr(tuple, JOBS_QUEUE, desc, &isnull)),
						DatumGetInt32(heap_getattr(tuple, JOBS_PRIORITY, desc, &isnull)),
						key);
		}
	}
	return PointerGetDatum(tuple);
}
