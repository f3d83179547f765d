/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  The launcher: one for the server, keeps a scheduler in each database
 *	  that has the extension.
 *
 * Which databases have it cannot be seen from outside, so a scheduler is
 * started in each, and one that finds no extension leaves and is not started
 * again until someone says that this has changed: CREATE EXTENSION does when
 * it commits (jq.announce()).
 *
 * As the launcher of logical replication it has no error recovery of its own:
 * it exits, and the postmaster starts it again after five seconds.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

#define LAUNCHER_RESTART_S		5
#define LOOK_INTERVAL_US		(60 * USECS_PER_SEC)
#define RETRY_US				(5 * USECS_PER_SEC)
/* schedulers that may be on their way up at one time */
#define MAX_STARTING			4

typedef struct DatabaseInfo
{
	Oid			oid;
	char	   *name;
} DatabaseInfo;

/* A scheduler that was started. */
typedef struct Launch
{
	Oid			dboid;
	BackgroundWorkerHandle *handle;
} Launch;

static List *launches = NIL;
static bool slots_missing = false;

/*
 * Ask the postmaster for the launcher.  Called while it loads the library.
 */
void
jq_register_launcher(void)
{
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = LAUNCHER_RESTART_S;
	strlcpy(worker.bgw_library_name, "jq", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "jq_launcher_main",
			sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, "jq launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "jq launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

/*
 * Whether the settings let jq run jobs in the database.
 */
bool
jq_database_is_served(const char *name)
{
	List	   *names = jq_split_names(jq_databases);
	ListCell   *lc;

	if (!jq_enabled)
		return false;
	if (names == NIL)
		return true;
	foreach(lc, names)
	{
		if (strcmp(lfirst(lc), name) == 0)
			return true;
	}
	return false;
}

static void
detach(int code, Datum arg)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	JqShared->launcher_latch = NULL;
	JqShared->launcher_pid = 0;
	LWLockRelease(JqShared->lock);
}

/*
 * The databases that can be connected to and are not templates, in the
 * current memory context.
 */
static List *
list_databases(void)
{
	MemoryContext cxt = CurrentMemoryContext;
	List	   *databases = NIL;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while (HeapTupleIsValid(tuple = heap_getnext(scan, ForwardScanDirection)))
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);
		MemoryContext oldcxt;
		DatabaseInfo *info;

		if (!form->datallowconn || form->datistemplate)
			continue;
		oldcxt = MemoryContextSwitchTo(cxt);
		info = palloc(sizeof(DatabaseInfo));
		info->oid = form->oid;
		info->name = pstrdup(NameStr(form->datname));
		databases = lappend(databases, info);
		MemoryContextSwitchTo(oldcxt);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	MemoryContextSwitchTo(cxt);
	return databases;
}

/*
 * Note the schedulers that ended before they attached: try again later, less
 * and less often.  Returns how many are still on their way.
 */
static int
sweep_launches(void)
{
	int			starting = 0;
	ListCell   *lc;

	foreach(lc, launches)
	{
		Launch	   *launch = lfirst(lc);
		JqDatabase *database;
		BgwHandleStatus status;
		pid_t		pid;

		status = GetBackgroundWorkerPid(launch->handle, &pid);
		LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
		database = jq_find_database(launch->dboid, false);
		if (status != BGWH_STOPPED)
			starting += database && database->state == JQ_DATABASE_STARTING;
		else if (database && database->state == JQ_DATABASE_STARTING)
		{
			database->state = JQ_DATABASE_STOPPED;
			database->failures = Min(database->failures + 1, 6);
			database->start_after = GetCurrentTimestamp() +
				((int64) USECS_PER_SEC << database->failures);
		}
		else if (database)
			database->failures = 0;
		LWLockRelease(JqShared->lock);

		if (status == BGWH_STOPPED)
		{
			pfree(launch->handle);
			pfree(launch);
			launches = foreach_delete_current(launches, lc);
		}
	}
	return starting;
}

/*
 * Forget databases that are gone; their processes have left.
 */
static void
forget_databases(List *databases)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JQ_MAX_DATABASES; i++)
	{
		JqDatabase *database = &JqShared->databases[i];
		bool		exists = false;
		ListCell   *lc;

		if (!database->in_use || database->scheduler_latch != NULL ||
			database->held_by != 0 || database->state == JQ_DATABASE_STARTING)
			continue;
		foreach(lc, databases)
			exists |= ((DatabaseInfo *) lfirst(lc))->oid == database->dboid;
		if (!exists)
		{
			jq_forget_database(database);
			database->in_use = false;
		}
	}
	LWLockRelease(JqShared->lock);
}

/*
 * Forget earlier starts of the database's scheduler: their end is not that of
 * the one which is started now.
 */
static void
forget_launches(Oid dboid)
{
	ListCell   *lc;

	foreach(lc, launches)
	{
		Launch	   *launch = lfirst(lc);

		if (launch->dboid != dboid)
			continue;
		pfree(launch->handle);
		pfree(launch);
		launches = foreach_delete_current(launches, lc);
	}
}

static bool
start_scheduler(const DatabaseInfo *info)
{
	BackgroundWorker worker = {0};
	MemoryContext oldcxt;
	Launch	   *launch;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "jq", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "jq_scheduler_main",
			sizeof(worker.bgw_function_name));
	snprintf(worker.bgw_name, BGW_MAXLEN, "jq scheduler for %s", info->name);
	strlcpy(worker.bgw_type, "jq scheduler", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(info->oid);
	worker.bgw_notify_pid = MyProcPid;

	forget_launches(info->oid);
	oldcxt = MemoryContextSwitchTo(TopMemoryContext);
	launch = palloc0(sizeof(Launch));
	launch->dboid = info->oid;
	if (RegisterDynamicBackgroundWorker(&worker, &launch->handle))
		launches = lappend(launches, launch);
	else
	{
		pfree(launch);
		launch = NULL;
	}
	MemoryContextSwitchTo(oldcxt);
	return launch != NULL;
}

/*
 * Mark the database as being started, if it needs a scheduler now.  Lowers
 * *wake_at to when it will.
 */
static bool
begin_start(Oid dboid, TimestampTz now, TimestampTz *wake_at)
{
	JqDatabase *database;
	bool		start = false;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	database = jq_find_database(dboid, true);
	if (database && database->held_by == 0 &&
		(database->state == JQ_DATABASE_UNKNOWN ||
		 database->state == JQ_DATABASE_STOPPED))
	{
		start = database->start_after <= now;
		if (start)
			database->state = JQ_DATABASE_STARTING;
		else
			*wake_at = Min(*wake_at, database->start_after);
	}
	LWLockRelease(JqShared->lock);
	return start;
}

static void
cancel_start(Oid dboid)
{
	JqDatabase *database;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	database = jq_find_database(dboid, false);
	if (database && database->state == JQ_DATABASE_STARTING)
		database->state = JQ_DATABASE_UNKNOWN;
	LWLockRelease(JqShared->lock);
}

/*
 * Start the schedulers that are missing.  Returns when to look again.
 */
static TimestampTz
start_schedulers(void)
{
	List	   *databases = list_databases();
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz wake_at = now + LOOK_INTERVAL_US;
	int			starting = sweep_launches();
	ListCell   *lc;

	forget_databases(databases);

	foreach(lc, databases)
	{
		DatabaseInfo *info = lfirst(lc);

		/* the next one is started when one of these has come up or gone */
		if (starting >= MAX_STARTING)
			break;
		if (!jq_database_is_served(info->name) ||
			!begin_start(info->oid, now, &wake_at))
			continue;
		if (start_scheduler(info))
		{
			starting++;
			slots_missing = false;
			continue;
		}
		cancel_start(info->oid);
		if (!slots_missing)
			ereport(LOG,
					(errmsg("could not start the jq scheduler for database \"%s\": no free slot",
							info->name),
					 errhint("Raise max_worker_processes.")));
		slots_missing = true;
		wake_at = Min(wake_at, now + RETRY_US);
		break;
	}
	return wake_at;
}

/*
 * Main function of the launcher.
 */
void
jq_launcher_main(Datum main_arg)
{
	MemoryContext lap_cxt;
	uint32		wait_event;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	pgstat_report_appname("jq launcher");
	wait_event = WaitEventExtensionNew("JqLauncherMain");

	before_shmem_exit(detach, (Datum) 0);
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	JqShared->launcher_latch = MyLatch;
	JqShared->launcher_pid = MyProcPid;
	for (int i = 0; i < JQ_MAX_DATABASES; i++)
	{
		/* started by a launcher before us, who would have been told */
		if (JqShared->databases[i].in_use &&
			JqShared->databases[i].state == JQ_DATABASE_STARTING)
			JqShared->databases[i].state = JQ_DATABASE_UNKNOWN;
	}
	LWLockRelease(JqShared->lock);

	lap_cxt = AllocSetContextCreate(TopMemoryContext, "jq launcher lap",
									ALLOCSET_DEFAULT_SIZES);
	for (;;)
	{
		TimestampTz wake_at = DT_NOEND;
		long		timeout;

		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}

		MemoryContextReset(lap_cxt);
		MemoryContextSwitchTo(lap_cxt);
		if (jq_enabled)
			wake_at = start_schedulers();
		pgstat_report_activity(STATE_IDLE, NULL);

		timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), wake_at);
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 timeout, wait_event);
		ResetLatch(MyLatch);
	}
}
