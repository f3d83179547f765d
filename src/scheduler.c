/*-------------------------------------------------------------------------
 *
 * scheduler.c
 *	  A database's scheduler: keeps the time and starts the workers.
 *
 * It sleeps until the next job falls due that no worker is awake for, or
 * until a commit calls it because a role has work and no free worker.  Once a
 * minute at most it looks at the whole table for what nobody told it of.
 *
 * It also ends by force what does not end otherwise: handlers that do not heed
 * jq.cancel(), and jobs that still run when the server has been asked to stop
 * and their grace is over.
 *
 * Order is strict within a role.  Between roles, places go to the role whose
 * oldest due job has waited longest; a role that has no worker at all may
 * take the place of another's, who gives it up between two jobs.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_type.h"
#include "commands/dbcommands.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "tcop/tcopprot.h"
#include "utils/acl.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

#define FULL_LOOK_INTERVAL_US	(60 * USECS_PER_SEC)

/* Batches whose jobs end all the time are considered so often, and one that
 * somebody is adding to. */
#define BATCH_INTERVAL_US		(50 * INT64CONST(1000))

/* Jobs of a cancelled batch are settled for so long without a break. */
#define SETTLE_TIME_US			(100 * INT64CONST(1000))
/* when asked for, or with lanes that found no room */
#define HURRIED_LOOK_INTERVAL_US	USECS_PER_SEC
/* after no place was found for a worker */
#define SLOT_RETRY_US			(5 * USECS_PER_SEC)
#define SLOT_REPORT_INTERVAL_US	(60 * USECS_PER_SEC)
/* a busy worker keeps its place at least this long */
#define MIN_TENURE_US			USECS_PER_SEC
/* after something could not be cancelled yet */
#define CANCEL_RETRY_US			USECS_PER_SEC
/* a reserved slot whose worker has not come by then is given up */
#define STARTUP_LIMIT_US		(60 * USECS_PER_SEC)

static const char *const ROLE_IS_GONE = "the role does not exist";

/* What the scheduler sees of a role. */
typedef struct Demand
{
	Oid			roleid;
	TimestampTz due;			/* of its oldest due job */
	int			workers;
	int			idle;
	int			starting;
} Demand;

/* A worker that was asked for and has not attached yet. */
typedef struct Start
{
	int			slotno;
	uint32		generation;
	BackgroundWorkerHandle *handle;
} Start;

static JqDatabase *MyDatabase = NULL;
static char database_name[NAMEDATALEN];
static List *starts = NIL;
static List *queues = NIL;
static TimestampTz last_full_look = 0;
static TimestampTz slots_retry_at = 0;
static int64 held_reported = 0;

/* Set when the postmaster has asked all to leave. */
static volatile sig_atomic_t shutdown_requested = false;

static void handle_sigterm(int signo, siginfo_t *info, void *context);
static void close_down(void);
static TimestampTz end_overdue_jobs(void);
static bool process_cancellations(void);
static void load_pauses(void);
static void attach(void);
static void detach(int code, Datum arg);
static bool extension_present(void);
static void full_look(void);
static TimestampTz consider_batches(TimestampTz now);
static TimestampTz look_at_held(TimestampTz now);
static TimestampTz share_workers(void);
static void sweep_starts(void);

/* ---------------------------------------------------------------------
 * Life
 * --------------------------------------------------------------------- */

/*
 * Main function of a scheduler; the argument is its database's OID.
 */
void
jq_scheduler_main(Datum main_arg)
{
	uint32		wait_event;
	TimestampTz cancels_retry_at = 0;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	jq_set_signal_handler(SIGTERM, handle_sigterm);
	BackgroundWorkerUnblockSignals();

	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(main_arg),
											  InvalidOid, 0);
	pgstat_report_appname("jq scheduler");
	SetConfigOption("statement_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("lock_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_isolation", "read committed",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_read_only", "off",
					PGC_SUSET, PGC_S_OVERRIDE);
	wait_event = WaitEventExtensionNew("JqSchedulerMain");
	queues = jq_split_names(jq_queues);

	attach();
	if (!extension_present() || !jq_database_is_served(database_name))
		proc_exit(0);
	full_look();
	ereport(LOG, (errmsg("jq scheduler for database \"%s\" started",
						 database_name)));

	for (;;)
	{
		TimestampTz wake_at;
		TimestampTz now;
		TimestampTz look_interval;
		TimestampTz batches_at;
		TimestampTz held_at;
		long		timeout;

		CHECK_FOR_INTERRUPTS();
		if (shutdown_requested)
			close_down();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			list_free_deep(queues);
			queues = jq_split_names(jq_queues);
			if (!jq_database_is_served(database_name))
				proc_exit(0);
		}
		if (MyDatabase->held_by != 0 || MyDatabase->restart)
			proc_exit(0);

		now = GetCurrentTimestamp();
		look_interval = MyDatabase->full_look || MyDatabase->lanes_full ?
			HURRIED_LOOK_INTERVAL_US : FULL_LOOK_INTERVAL_US;
		if (now >= last_full_look + look_interval)
		{
			if (!extension_present())
				proc_exit(0);
			full_look();
			look_interval = MyDatabase->lanes_full ?
				HURRIED_LOOK_INTERVAL_US : FULL_LOOK_INTERVAL_US;
		}

		if (MyDatabase->cancels && !process_cancellations())
			cancels_retry_at = now + CANCEL_RETRY_US;
		load_pauses();
		batches_at = consider_batches(now);
		held_at = look_at_held(now);
		wake_at = Min(share_workers(), last_full_look + look_interval);
		wake_at = Min(wake_at, Min(batches_at, held_at));
		wake_at = Min(wake_at, end_overdue_jobs());
		if (MyDatabase->cancels)
			wake_at = Min(wake_at, cancels_retry_at);
		pgstat_report_activity(STATE_IDLE, NULL);
		timeout = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), wake_at);
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 timeout, wait_event);
		ResetLatch(MyLatch);
	}
}

static void
attach(void)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase = jq_find_database(MyDatabaseId, false);
	if (MyDatabase && MyDatabase->held_by == 0 &&
		MyDatabase->state == JQ_DATABASE_STARTING)
	{
		MyDatabase->state = JQ_DATABASE_RUNNING;
		MyDatabase->scheduler_pid = MyProcPid;
		MyDatabase->scheduler_latch = MyLatch;
		MyDatabase->restart = false;
		MyDatabase->cancels = true; /* who knows */
		MyDatabase->ntouched = JQ_MAX_TOUCHED + 1;
		MyDatabase->held_due = 0;
		MyDatabase->wants_calls = true;
		MyDatabase->wakes_at = DT_NOEND;
	}
	else
	{
		/* not wanted any more, which is no failure to start */
		if (MyDatabase && MyDatabase->state == JQ_DATABASE_STARTING)
			MyDatabase->state = JQ_DATABASE_STOPPED;
		MyDatabase = NULL;
	}
	LWLockRelease(JqShared->lock);

	if (MyDatabase == NULL)
		proc_exit(0);
	before_shmem_exit(detach, (Datum) 0);
}

static void
detach(int code, Datum arg)
{
	Latch	   *launcher;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase->scheduler_pid = 0;
	MyDatabase->scheduler_latch = NULL;
	if (MyDatabase->state == JQ_DATABASE_RUNNING)
	{
		MyDatabase->state = JQ_DATABASE_STOPPED;
		MyDatabase->start_after = code == 0 ? 0 :
			GetCurrentTimestamp() + USECS_PER_SEC;
	}
	launcher = JqShared->launcher_latch;
	LWLockRelease(JqShared->lock);

	if (launcher)
		SetLatch(launcher);
}

static void
handle_sigterm(int signo, siginfo_t *info, void *context)
{
	int			save_errno = errno;

	if (info->si_pid == PostmasterPid)
	{
		shutdown_requested = true;
		SetLatch(MyLatch);
	}
	else
		die(signo);
	errno = save_errno;
}

/*
 * End the workers of this database that run a job.  Returns how many do.
 */
static int
end_running_jobs(bool by_force)
{
	int			running = 0;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_FREE || slot->dboid != MyDatabaseId ||
			!jq_attempt_of(slot)->begun)
			continue;
		running++;
		if (by_force)
			jq_slot_end_worker(slot, true);
	}
	LWLockRelease(JqShared->lock);
	return running;
}

/*
 * The server is being shut down: let the jobs that run come to their end, but
 * only for the grace, then leave.  Their workers have been asked to go
 * themselves.
 */
static void
close_down(void)
{
	TimestampTz end = GetCurrentTimestamp() +
	(int64) jq_shutdown_grace * USECS_PER_SEC;

	pgstat_report_activity(STATE_RUNNING, "jq: waiting for running jobs to end");
	while (end_running_jobs(false) > 0 && GetCurrentTimestamp() < end)
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 100L, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	(void) end_running_jobs(true);
	proc_exit(0);
}

/*
 * End the workers whose jobs were cancelled and did not end by themselves.
 * Returns when the next one has to be.
 */
static TimestampTz
end_overdue_jobs(void)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz next = DT_NOEND;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];
		JqAttempt  *attempt = jq_attempt_of(slot);

		if (slot->state == JQ_SLOT_FREE || slot->dboid != MyDatabaseId ||
			!attempt->begun || attempt->end_by == 0)
			continue;
		if (attempt->end_by <= now)
		{
			jq_slot_end_worker(slot, false);
			attempt->end_by = now + (int64) jq_cancel_grace * 1000;
		}
		next = Min(next, attempt->end_by);
	}
	LWLockRelease(JqShared->lock);
	return next;
}

/*
 * See to the jobs that were cancelled while they ran.  Returns false if some
 * must be looked at again.
 */
static bool
process_cancellations(void)
{
	bool		settled;

	/* whatever is asked for from here on is looked at again */
	MyDatabase->cancels = false;
	settled = jq_process_cancellations();
	if (!settled)
		MyDatabase->cancels = true;
	return settled;
}

/*
 * Learn of pauses that were committed.
 */
static void
load_pauses(void)
{
	static uint32 seen = 0;
	static bool loaded = false;

	if (loaded && seen == MyDatabase->pause_changes)
		return;
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	seen = jq_load_pauses();
	CommitTransactionCommand();
	loaded = true;
}

/*
 * Whether the extension is in this database, in a version that this library
 * serves.  If not, workers are sent home, and the launcher leaves the
 * database alone until someone tells it of a change.
 */
static bool
extension_present(void)
{
	volatile bool present = false;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	strlcpy(database_name, get_database_name(MyDatabaseId), NAMEDATALEN);
	PG_TRY();
	{
		present = jq_catalog_if_any() != NULL;
	}
	PG_CATCH();
	{
		/* of another version: say so once, and stand still */
		EmitErrorReport();
		FlushErrorState();
		AbortCurrentTransaction();
		StartTransactionCommand();
	}
	PG_END_TRY();
	CommitTransactionCommand();
	if (present)
		return true;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase->state = JQ_DATABASE_ABSENT;
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state != JQ_SLOT_FREE && slot->dboid == MyDatabaseId)
		{
			slot->leave = true;
			if (slot->latch)
				SetLatch(slot->latch);
		}
	}
	LWLockRelease(JqShared->lock);
	return false;
}

/* ---------------------------------------------------------------------
 * The full look
 * --------------------------------------------------------------------- */

static void
see_lane(const char *role_name, const char *queue, int32 priority, JqKey first,
		 void *arg)
{
	static char missing[NAMEDATALEN];
	Oid			roleid = get_role_oid(role_name, true);
	JqRole	   *role;
	int			lane = -1;

	if (!OidIsValid(roleid))
	{
		if (strcmp(missing, role_name) != 0)
			ereport(LOG,
					(errmsg("jobs of role \"%s\" in database \"%s\" wait: the role does not exist",
							role_name, database_name)));
		strlcpy(missing, role_name, sizeof(missing));
		return;
	}

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	role = jq_find_role(MyDatabaseId, roleid, true);
	if (role)
	{
		strlcpy(role->name, role_name, sizeof(role->name));
		lane = jq_lane_find(role, queue, priority, true);
	}
	if (lane >= 0)
	{
		JqKey		last = {DT_NOEND, PG_INT64_MAX};

		/* there may be others behind it that nobody told of */
		jq_lane_lower(&JqLanes[lane], lane, first, last);
	}
	else
		MyDatabase->lanes_full = true;
	LWLockRelease(JqShared->lock);
}

/*
 * Say once how many jobs are held because they are not of this database.
 */
static void
report_held(void)
{
	Oid			types[] = {OIDOID};
	Datum		values[] = {ObjectIdGetDatum(MyDatabaseId)};
	int64		held;

	/* both sides of the index; counting is rare, since they are rare */
	jq_owner_execute("SELECT CASE WHEN EXISTS (SELECT FROM jq.jobs WHERE origin < $1)"
					 " OR EXISTS (SELECT FROM jq.jobs WHERE origin > $1)"
					 " THEN (SELECT count(*) FROM jq.jobs WHERE origin <> $1) ELSE 0 END",
					 1, types, values, NULL, &held);
	if (held > 0 && held != held_reported)
		ereport(LOG,
				(errmsg_plural("%lld job in database \"%s\" was not dispatched there and is held",
							   "%lld jobs in database \"%s\" were not dispatched there and are held",
							   (unsigned long) held, (long long) held,
							   database_name),
				 errhint("Call jq.adopt() to let them run.")));
	held_reported = held;
}

/*
 * Search the table for lanes that have jobs, whoever put them there.
 */
static void
full_look(void)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	if (MyDatabase->lanes_full)
		jq_lanes_recycle();
	MyDatabase->full_look = false;
	MyDatabase->lanes_full = false;
	LWLockRelease(JqShared->lock);

	pgstat_report_activity(STATE_RUNNING, "jq: looking at the table of jobs");
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	jq_scan_lanes(NULL, see_lane, NULL);
	PushActiveSnapshot(GetTransactionSnapshot());
	report_held();
	(void) jq_prune_kept();
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(true);
	last_full_look = GetCurrentTimestamp();

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase->ntouched = JQ_MAX_TOUCHED + 1;
	MyDatabase->held_due = 0;
	LWLockRelease(JqShared->lock);
}

/* ---------------------------------------------------------------------
 * Batches and limits
 * --------------------------------------------------------------------- */

static void
start_transaction(const char *activity)
{
	pgstat_report_activity(STATE_RUNNING, activity);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
}

static void
end_transaction(void)
{
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(false);
}

/*
 * Settle what waits of the batch if it was cancelled, and finish it if no job
 * is left.  Returns false if it must be looked at again: somebody has one of its
 * jobs, or is adding to it, or there are more than should keep us from our other
 * duties.
 */
static bool
consider_batch(int64 batch_id)
{
	static int64 settling = 0;	/* batch that we have begun to settle */
	static int64 after = 0;
	TimestampTz stop_at = GetCurrentTimestamp() + SETTLE_TIME_US;
	bool		settled = true;
	bool		decided;

	if (settling != batch_id)
		after = 0;
	settling = batch_id;
	do
	{
		start_transaction("jq: considering a batch");
		after = jq_settle_cancelled(batch_id, after, &settled);
		end_transaction();
		CHECK_FOR_INTERRUPTS();
		if (after != 0 && GetCurrentTimestamp() > stop_at)
			return false;
	} while (after != 0);

	start_transaction("jq: considering a batch");
	decided = jq_consider_batch(batch_id);
	end_transaction();
	return decided && settled;
}

/*
 * Consider the batches whose jobs have ended since the last time.  Returns
 * when to do so next.
 */
static TimestampTz
consider_batches(TimestampTz now)
{
	static TimestampTz next = 0;
	int64		touched[JQ_MAX_TOUCHED];
	int64	   *ids = touched;
	int			count;

	if (MyDatabase->ntouched == 0)
		return DT_NOEND;
	if (now < next && next <= now + BATCH_INTERVAL_US)
		return next;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	count = MyDatabase->ntouched;
	memcpy(touched, MyDatabase->touched, sizeof(touched));
	MyDatabase->ntouched = 0;
	LWLockRelease(JqShared->lock);

	if (count > JQ_MAX_TOUCHED)
	{
		MemoryContext cxt = MemoryContextSwitchTo(TopMemoryContext);

		start_transaction("jq: looking for batches to consider");
		MemoryContextSwitchTo(TopMemoryContext);
		count = jq_unfinished_batches(&ids);
		end_transaction();
		MemoryContextSwitchTo(cxt);
	}
	for (int i = 0; i < count; i++)
	{
		if (consider_batch(ids[i]))
			continue;
		LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
		jq_touch_batch(MyDatabase, ids[i]);
		LWLockRelease(JqShared->lock);
	}
	if (ids != touched)
		pfree(ids);
	next = GetCurrentTimestamp() + BATCH_INTERVAL_US;
	return MyDatabase->ntouched > 0 ? next : DT_NOEND;
}

/*
 * Let jobs go on that are held by limits, if it is time.  Returns when it is
 * next.
 */
static TimestampTz
look_at_held(TimestampTz now)
{
	TimestampTz due = MyDatabase->held_due;
	TimestampTz next;

	if (due > now)
		return due;
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase->held_due = DT_NOEND;
	LWLockRelease(JqShared->lock);

	start_transaction("jq: looking at jobs held by limits");
	next = jq_look_at_held(due == 0);
	end_transaction();

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase->held_due = Min(MyDatabase->held_due, next);
	next = MyDatabase->held_due;
	LWLockRelease(JqShared->lock);
	return next;
}

/* ---------------------------------------------------------------------
 * Workers
 * --------------------------------------------------------------------- */

/*
 * Why a worker for the role must not be started now; NULL if it may.  *borrow
 * tells how it has to connect.  To be called in a transaction.
 */
static const char *
check_role(Oid roleid, bool *borrow)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(roleid));
	bool		can_log_in;

	if (!HeapTupleIsValid(tuple))
		return ROLE_IS_GONE;
	can_log_in = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
	ReleaseSysCache(tuple);

	*borrow = !can_log_in && JQ_NEEDS_LOGIN;
	if (object_aclcheck(DatabaseRelationId, MyDatabaseId, roleid,
						ACL_CONNECT) != ACLCHECK_OK)
		return "the role lacks CONNECT on the database";
	return NULL;
}

static void
forget_role(Oid roleid)
{
	JqRole	   *role;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	role = jq_find_role(MyDatabaseId, roleid, false);
	if (role)
		jq_forget_role(role);
	MyDatabase->full_look = true;
	LWLockRelease(JqShared->lock);
}

static void
refuse_role(Oid roleid, const char *reason)
{
	char		name[NAMEDATALEN] = "";
	JqRole	   *role;
	bool		news = false;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	role = jq_find_role(MyDatabaseId, roleid, false);
	if (role)
	{
		news = strcmp(role->refusal, reason) != 0;
		strlcpy(name, role->name, sizeof(name));
		role->refusals = Min(role->refusals + 1, 6);
		role->refused_until = GetCurrentTimestamp() +
			((int64) USECS_PER_SEC << role->refusals);
		strlcpy(role->refusal, reason, sizeof(role->refusal));

	}
	LWLockRelease(JqShared->lock);

	/* if there is another role of that name now, the jobs are that one's */
	if (reason == ROLE_IS_GONE && OidIsValid(get_role_oid(name, true)))
		forget_role(roleid);
	else if (news)
		ereport(LOG,
				(errmsg("jobs of role \"%s\" are not run: %s", name, reason)));
}

/*
 * Say that workers find no place in the server, once a minute at most, and
 * that they do again.
 */
static void
report_slots(bool found, const char *hint)
{
	static TimestampTz reported_at = 0;
	static bool reported = false;
	TimestampTz now = GetCurrentTimestamp();

	if (found == !reported || (!found && now < reported_at + SLOT_REPORT_INTERVAL_US))
		return;
	if (found)
		ereport(LOG, (errmsg("jq workers for database \"%s\" can be started again",
							 database_name)));
	else
	{
		ereport(LOG,
				(errmsg("could not start a jq worker for database \"%s\": no free slot",
						database_name),
				 errhint("%s", hint)));
		reported_at = now;
	}
	reported = !found;
}

/*
 * Start a worker for the role.  Returns false if there is no place for one.
 */
static bool
start_worker(Oid roleid)
{
	BackgroundWorker worker = {0};
	JqWorkerArgs args = {0};
	const char *refusal;
	Start	   *start;
	MemoryContext oldcxt;
	int			slotno;
	bool		registered = false;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	refusal = check_role(roleid, &args.borrow);
	if (refusal)
		refuse_role(roleid, refusal);
	else if (!jq_slot_reserve(MyDatabaseId, roleid, &slotno, &args.generation))
		report_slots(false, "Raise jq.max_workers.");
	else
	{
		StaticAssertStmt(sizeof(args) <= BGW_EXTRALEN,
						 "arguments do not fit into bgw_extra");
		strlcpy(args.database, database_name, sizeof(args.database));
		worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
		worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
		worker.bgw_restart_time = BGW_NEVER_RESTART;
		strlcpy(worker.bgw_library_name, "jq", sizeof(worker.bgw_library_name));
		strlcpy(worker.bgw_function_name, "jq_worker_main",
				sizeof(worker.bgw_function_name));
		snprintf(worker.bgw_name, BGW_MAXLEN, "jq worker for %s", database_name);
		strlcpy(worker.bgw_type, "jq worker", BGW_MAXLEN);
		worker.bgw_main_arg = Int32GetDatum(slotno);
		memcpy(worker.bgw_extra, &args, sizeof(args));
		worker.bgw_notify_pid = MyProcPid;

		oldcxt = MemoryContextSwitchTo(TopMemoryContext);
		start = palloc0(sizeof(Start));
		start->slotno = slotno;
		start->generation = args.generation;
		registered = RegisterDynamicBackgroundWorker(&worker, &start->handle);
		if (registered)
			starts = lappend(starts, start);
		else
		{
			pfree(start);
			jq_slot_release(slotno, args.generation);
		}
		MemoryContextSwitchTo(oldcxt);
		report_slots(registered, "Raise max_worker_processes, or lower jq.workers.");
	}
	CommitTransactionCommand();
	return registered || refusal != NULL;
}

/*
 * Forget the starts that have succeeded, and free the slots of those that
 * came to nothing.
 */
static void
sweep_starts(void)
{
	TimestampTz now = GetCurrentTimestamp();
	ListCell   *lc;

	foreach(lc, starts)
	{
		Start	   *start = lfirst(lc);
		JqSlot	   *slot = &JqSlots[start->slotno];
		pid_t		pid;
		bool		pending = slot->state == JQ_SLOT_STARTING &&
		slot->generation == start->generation;

		if (pending && GetBackgroundWorkerPid(start->handle, &pid) != BGWH_STOPPED)
			continue;
		if (pending)
			jq_slot_release(start->slotno, start->generation);
		pfree(start->handle);
		pfree(start);
		starts = foreach_delete_current(starts, lc);
	}

	/* slots that a former scheduler reserved */
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_STARTING && slot->dboid == MyDatabaseId &&
			slot->started_at + STARTUP_LIMIT_US < now)
			slot->state = JQ_SLOT_FREE;
	}
	LWLockRelease(JqShared->lock);
}

/*
 * Ask a worker of another role to give up its place: an idle one, or, with
 * "busy", one that has had its time; with "anywhere" also one of another
 * database.  Returns whether one was found, or has been asked before and is
 * about to go.
 */
static bool
make_room(TimestampTz now, bool busy, bool anywhere)
{
	JqSlot	   *victim = NULL;
	bool		leaving = false;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);

	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if ((slot->dboid != MyDatabaseId && !anywhere) || slot->latch == NULL ||
			(slot->state != JQ_SLOT_IDLE && slot->state != JQ_SLOT_BUSY))
			continue;
		leaving |= slot->leave;
		if (slot->state == JQ_SLOT_BUSY &&
			(!busy || slot->started_at + MIN_TENURE_US > now))
			continue;
		if (victim == NULL ||
			(slot->state == JQ_SLOT_IDLE && victim->state != JQ_SLOT_IDLE) ||
			(slot->state == victim->state && slot->started_at < victim->started_at))
			victim = slot;
	}
	if (victim && !leaving)
	{
		victim->leave = true;
		SetLatch(victim->latch);
	}
	LWLockRelease(JqShared->lock);
	return victim != NULL || leaving;
}

/*
 * A role without a worker comes first; else the one that gave up a place for
 * it, whose jobs are older, would take the place back.
 */
static int
compare_demands(const void *a, const void *b)
{
	const Demand *left = a;
	const Demand *right = b;

	if ((left->workers == 0) != (right->workers == 0))
		return left->workers == 0 ? -1 : 1;
	if (left->due != right->due)
		return left->due < right->due ? -1 : 1;
	return 0;
}

/*
 * Collect the roles that have something due, first those that have no worker,
 * else by the age of their oldest due job; lower *wake_at to
 * the time at which this may change.  The caller holds the lock.
 */
static int
collect_demands(Demand *demands, TimestampTz now, TimestampTz *wake_at)
{
	int			count = 0;

	for (int i = 0; i < JQ_MAX_ROLES; i++)
	{
		JqRole	   *role = &JqShared->roles[i];
		JqLaneSet	set = {.shared = true, .role = role, .lanes = JqLanes};
		Demand	   *demand = &demands[count];

		if (!role->in_use || role->dboid != MyDatabaseId)
			continue;
		memset(demand, 0, sizeof(Demand));
		demand->roleid = role->roleid;
		demand->due = Max(jq_lanes_due(&set, queues), role->refused_until);
		if (demand->due > now)
		{
			*wake_at = Min(*wake_at, demand->due);
			continue;
		}
		for (int s = 0; s < JqShared->nslots; s++)
		{
			JqSlot	   *slot = &JqSlots[s];

			if (slot->state == JQ_SLOT_FREE || slot->dboid != MyDatabaseId ||
				slot->roleid != role->roleid || slot->leave)
				continue;
			demand->workers++;
			if (slot->state == JQ_SLOT_STARTING || !slot->proved)
				demand->starting++;
			if (slot->state == JQ_SLOT_IDLE)
			{
				demand->idle++;
				if (demand->idle == 1)
				{
					/* its job fell due while it slept */
					slot->state = JQ_SLOT_BUSY;
					slot->scan_lane = -1;
					SetLatch(slot->latch);
				}
			}
		}
		count++;
	}
	qsort(demands, count, sizeof(Demand), compare_demands);
	return count;
}

/*
 * Start workers, or make room for them, for the roles that have work and
 * nobody to do it.  Returns when to look again.
 */
static TimestampTz
share_workers(void)
{
	static Demand demands[JQ_MAX_ROLES];
	TimestampTz wake_at = DT_NOEND;
	TimestampTz now = GetCurrentTimestamp();
	int			workers = 0;
	bool		no_slot = false;
	int			count;

	sweep_starts();

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	/* whatever changes from here on, we want to hear of it */
	MyDatabase->wants_calls = true;
	MyDatabase->wakes_at = DT_NOEND;
	count = collect_demands(demands, now, &wake_at);
	for (int i = 0; i < JqShared->nslots; i++)
	{
		if (JqSlots[i].state != JQ_SLOT_FREE && JqSlots[i].dboid == MyDatabaseId)
			workers++;
	}
	LWLockRelease(JqShared->lock);

	for (int i = 0; i < count; i++)
	{
		Demand	   *demand = &demands[i];

		if (demand->idle > 0 || demand->starting > 0)
			continue;
		if (workers < jq_workers && now < slots_retry_at)
			no_slot = true;
		else if (workers < jq_workers)
		{
			if (start_worker(demand->roleid))
			{
				workers++;
				continue;
			}
			no_slot = true;
			if (demand->workers == 0 && make_room(now, true, true))
				wake_at = Min(wake_at, now + MIN_TENURE_US);
			else
				slots_retry_at = now + (demand->workers == 0 ? MIN_TENURE_US : SLOT_RETRY_US);
		}
		else if (jq_workers > 0)
		{
			/* who has a worker already gets no place that others need */
			(void) make_room(now, demand->workers == 0, false);
			wake_at = Min(wake_at, now + MIN_TENURE_US);
		}
	}
	if (slots_retry_at > now)
		wake_at = Min(wake_at, slots_retry_at);
	if (workers > jq_workers)
	{
		/* the setting was lowered */
		(void) make_room(now, true, false);
		wake_at = Min(wake_at, now + MIN_TENURE_US);
	}

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyDatabase->no_slot = no_slot;
	MyDatabase->wants_calls = workers < jq_workers && slots_retry_at <= now;
	MyDatabase->wakes_at = wake_at;
	LWLockRelease(JqShared->lock);
	return wake_at;
}
