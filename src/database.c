/*-------------------------------------------------------------------------
 *
 * database.c
 *	  Makes way for commands that need a database, or jq's own objects, to be
 *	  out of use; and hears of what such commands changed.
 *
 * DROP DATABASE and its like fail while others are connected, and DROP
 * EXTENSION waits for whoever uses the tables.  So before such a command the
 * session that runs it sets a hold on the database: the scheduler and idle
 * workers leave, running jobs are interrupted and keep their attempt.  The
 * hold ends with the transaction.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "pgstat.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* Handlers that do not let themselves be interrupted are waited for so long. */
#define HOLD_LIMIT_US	(30 * USECS_PER_SEC)

static ProcessUtility_hook_type prev_process_utility = NULL;
static Oid	held_database = InvalidOid;

/* ---------------------------------------------------------------------
 * Holds
 * --------------------------------------------------------------------- */

/*
 * Ask all processes of jq in the database to go.  Returns how many are there.
 * The caller holds the lock.
 */
static int
send_away(JqDatabase *database)
{
	int			present = 0;

	if (database->scheduler_latch)
	{
		present++;
		SetLatch(database->scheduler_latch);
	}
	present += database->state == JQ_DATABASE_STARTING;
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_FREE || slot->dboid != database->dboid)
			continue;
		present++;
		if (slot->latch == NULL)
			continue;
		if (!slot->leave || jq_attempt_of(slot)->begun)
		{
			slot->leave = true;
			jq_slot_end_worker(slot, true);
			SetLatch(slot->latch);
		}
	}
	return present;
}

/*
 * Set a hold on the database and wait until jq has left it.
 */
static void
hold_database(Oid dboid)
{
	TimestampTz give_up_at = GetCurrentTimestamp() + HOLD_LIMIT_US;
	JqDatabase *database;

	if (JqShared == NULL || OidIsValid(held_database))
		return;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	database = jq_find_database(dboid, false);
	if (database && database->held_by == 0)
	{
		database->held_by = MyProcPid;
		held_database = dboid;
	}
	LWLockRelease(JqShared->lock);
	if (!OidIsValid(held_database))
		return;

	while (GetCurrentTimestamp() < give_up_at)
	{
		int			present;

		LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
		present = send_away(database);
		LWLockRelease(JqShared->lock);
		if (present == 0)
			return;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 10L, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

static void
release_hold(void)
{
	JqDatabase *database;
	Latch	   *launcher;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	database = jq_find_database(held_database, false);
	if (database)
	{
		database->held_by = 0;
		jq_reconsider_database(database);
	}
	launcher = JqShared->launcher_latch;
	LWLockRelease(JqShared->lock);

	held_database = InvalidOid;
	if (launcher)
		SetLatch(launcher);
}

static void
hold_xact_callback(XactEvent event, void *arg)
{
	if (OidIsValid(held_database) &&
		(event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		 event == XACT_EVENT_PREPARE))
		release_hold();
}

/* ---------------------------------------------------------------------
 * Which commands
 * --------------------------------------------------------------------- */

static Oid
owned_database(const char *name)
{
	Oid			dboid = get_database_oid(name, true);

	/* whoever may not run the command must not disturb anybody with it */
	if (OidIsValid(dboid) && !object_ownercheck(DatabaseRelationId, dboid, GetUserId()))
		return InvalidOid;
	return dboid;
}

static bool
has_option(List *options, const char *name)
{
	ListCell   *lc;

	foreach(lc, options)
	{
		if (strcmp(((DefElem *) lfirst(lc))->defname, name) == 0)
			return true;
	}
	return false;
}

/*
 * The database that is to be copied, if the current role may do that: it owns
 * it, or it is a template.
 */
static Oid
template_of(CreatedbStmt *stmt)
{
	char	   *name = "template1";
	Oid			dboid;
	HeapTuple	tuple;
	bool		may_copy = false;
	ListCell   *lc;

	if (!have_createdb_privilege())
		return InvalidOid;
	foreach(lc, stmt->options)
	{
		DefElem    *option = lfirst(lc);

		if (strcmp(option->defname, "template") == 0 && option->arg)
			name = defGetString(option);
	}
	dboid = get_database_oid(name, true);
	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(dboid));
	if (HeapTupleIsValid(tuple))
	{
		may_copy = ((Form_pg_database) GETSTRUCT(tuple))->datistemplate ||
			object_ownercheck(DatabaseRelationId, dboid, GetUserId());
		ReleaseSysCache(tuple);
	}
	return may_copy ? dboid : InvalidOid;
}

static bool
names_jq(List *objects)
{
	ListCell   *lc;

	foreach(lc, objects)
	{
		if (strcmp(strVal(lfirst(lc)), "jq") == 0)
			return true;
	}
	return false;
}

static Oid
own_database(void)
{
	const JqCatalog *catalog = jq_catalog_if_any();

	if (catalog == NULL ||
		!object_ownercheck(ExtensionRelationId, catalog->extension, GetUserId()))
		return InvalidOid;
	return MyDatabaseId;
}

/*
 * The database that has to be free of jq's processes for this command, or
 * InvalidOid.
 */
static Oid
database_to_hold(Node *parsetree)
{
	switch (nodeTag(parsetree))
	{
		case T_DropdbStmt:
			return owned_database(((DropdbStmt *) parsetree)->dbname);

		case T_AlterDatabaseStmt:
			{
				AlterDatabaseStmt *stmt = (AlterDatabaseStmt *) parsetree;

				if (has_option(stmt->options, "allow_connections") ||
					has_option(stmt->options, "tablespace"))
					return owned_database(stmt->dbname);
				return InvalidOid;
			}

		case T_RenameStmt:
			if (((RenameStmt *) parsetree)->renameType == OBJECT_DATABASE)
				return owned_database(((RenameStmt *) parsetree)->subname);
			return InvalidOid;

		case T_CreatedbStmt:
			return template_of((CreatedbStmt *) parsetree);

		case T_DropStmt:
			if ((((DropStmt *) parsetree)->removeType == OBJECT_EXTENSION ||
				 ((DropStmt *) parsetree)->removeType == OBJECT_SCHEMA) &&
				names_jq(((DropStmt *) parsetree)->objects))
				return own_database();
			return InvalidOid;

		case T_AlterExtensionStmt:
			if (strcmp(((AlterExtensionStmt *) parsetree)->extname, "jq") == 0)
				return own_database();
			return InvalidOid;

		default:
			return InvalidOid;
	}
}

/*
 * Tell the scheduler that rows became visible of which nobody made a note:
 * jobs, pauses, cancellations.
 */
static void
call_for_full_look(void)
{
	JqDatabase *database;
	Latch	   *scheduler = NULL;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	database = jq_find_database(MyDatabaseId, false);
	if (database)
	{
		database->full_look = true;
		database->cancels = true;
		database->pause_changes++;
		database->cancel_changes++;
		database->config_changes++;
		scheduler = database->scheduler_latch;
		jq_reconsider_database(database);
	}
	if (JqShared->launcher_latch)
		SetLatch(JqShared->launcher_latch);
	LWLockRelease(JqShared->lock);
	if (scheduler)
		SetLatch(scheduler);
}

static void
process_utility(PlannedStmt *pstmt, const char *queryString,
				bool readOnlyTree, ProcessUtilityContext context,
				ParamListInfo params, QueryEnvironment *queryEnv,
				DestReceiver *dest, QueryCompletion *qc)
{
	Node	   *parsetree = pstmt->utilityStmt;
	bool		of_databases = IsA(parsetree, CreatedbStmt) ||
	IsA(parsetree, DropdbStmt) || IsA(parsetree, AlterDatabaseStmt);
	bool		commits_prepared = IsA(parsetree, TransactionStmt) &&
	((TransactionStmt *) parsetree)->kind == TRANS_STMT_COMMIT_PREPARED;

	/* the command may want to alter what we have open */
	jq_close_insertion();

	if (JqShared && IsTransactionState())
	{
		Oid			dboid = database_to_hold(parsetree);

		/* it would interrupt itself, uncharged, and run again without end */
		if (dboid == MyDatabaseId && MyJqAttempt && MyJqAttempt->begun)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_IN_USE),
					 errmsg("a job cannot run a command that makes jq leave its own database")));
		if (OidIsValid(dboid))
			hold_database(dboid);
		if (of_databases)
			jq_note_launcher();
	}

	if (prev_process_utility)
		prev_process_utility(pstmt, queryString, readOnlyTree, context,
							 params, queryEnv, dest, qc);
	else
		standard_ProcessUtility(pstmt, queryString, readOnlyTree, context,
								params, queryEnv, dest, qc);

	if (JqShared && commits_prepared)
		call_for_full_look();
}

/*
 * Install the hook and the callback; once in each process that loads the
 * library.
 */
void
jq_install_hooks(void)
{
	prev_process_utility = ProcessUtility_hook;
	ProcessUtility_hook = process_utility;
	RegisterXactCallback(hold_xact_callback, NULL);
}
