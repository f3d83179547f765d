/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  A worker: runs the jobs of one role, one transaction a job.
 *
 * The transaction claims the row, runs the handler, removes the row, and
 * commits; there is no subtransaction.  If any of that fails, the commit
 * included, the transaction is aborted and a second one records the failure.
 * Between the two the slot still says that we hold the job, so no other
 * worker takes it; should we die there, the attempt is unsettled.
 *
 * Interrupts that cancel a query are held off but while a handler runs.
 *
 * Two signals mean one thing from the postmaster and another from anybody
 * else.  SIGQUIT from it says that some other process has crashed: what we are
 * doing is innocent.  SIGTERM from it says that the server is shut down: the
 * job may come to its end, and the scheduler ends us when the grace is over.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>
#include <unistd.h>

#include "access/xact.h"
#include "access/xlog.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_db_role_setting.h"
#include "commands/async.h"
#include "commands/prepare.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "replication/syncrep.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/*
 * While busy, a worker flushes the WAL of commits that ran ahead at least
 * this often, and more often where a flush is cheap: as soon as a page of WAL
 * is full, but for no more than a third of its time.  Each commit that finds
 * a full page unflushed signals the WAL writer, which costs more than that.
 */
#define MAX_FLUSH_INTERVAL_US	INT64CONST(5000)
#define FLUSH_SHARE				3

/* Waits between the tries to write a record, in ms. */
static const int record_waits[] = {100, 400, 1000, 2500, 6000};

typedef struct CachedCall
{
	Oid			function;
	FmgrInfo	flinfo;
} CachedCall;

static JqLaneSet lanes;
static List *queues = NIL;		/* of jq.queues */
static char *queues_value = NULL;	/* that it was made from */

static MemoryContext job_cxt;
static MemoryContext call_cxt;
static HTAB *calls = NULL;		/* in call_cxt */
static uint64 calls_epoch = 0;

/* Set if the role cannot log in and this server cannot connect as it. */
static bool borrowed_session = false;
static bool asking_middleware = false;

/* Set when the postmaster has asked all to leave. */
static volatile sig_atomic_t shutdown_requested = false;

/* What the last look at jq.pauses said. */
static uint32 pauses_seen = 0;

static bool commits_run_ahead = false;
static bool sync_commit_is_users = false;
static TimestampTz last_flush = 0;
static int64 flush_interval = MAX_FLUSH_INTERVAL_US;

static bool run_next_job(void);
static void attempt_job(JqJob *job);
static JqFailure *capture_failure(void);
static bool take_again(JqJob *job);
static void record_failure(JqJob *job, const JqFailure *failure);
static void reset_session(void);
static void sleep_until_called(void);

/* ---------------------------------------------------------------------
 * Signals
 * --------------------------------------------------------------------- */

/*
 * Some process has crashed, and the postmaster ends us: say that it was not
 * our job, if the word is the postmaster's, and quit as all others do.
 */
static void
handle_sigquit(int signo, siginfo_t *info, void *context)
{
	/* a child that the handler has forked shares our journal */
	if (info->si_pid == PostmasterPid && MyJqAttempt && MyProcPid == (int) getpid())
		MyJqAttempt->innocent = true;
	SignalHandlerForCrashExit(signo);
}

/*
 * Leave.  A shutdown lets the job that we run come to its end, if there is a
 * scheduler to see to it that this does not take too long; and if it does,
 * that is not the job's doing.
 */
static void
handle_sigterm(int signo, siginfo_t *info, void *context)
{
	int			save_errno = errno;

	if (info->si_pid == PostmasterPid)
	{
		shutdown_requested = true;
		if (MyJqAttempt && MyJqAttempt->begun)
		{
			MyJqAttempt->innocent = true;
			if (jq_shutdown_grace > 0 && jq_scheduler_is_there(MyDatabaseId))
			{
				SetLatch(MyLatch);
				errno = save_errno;
				return;
			}
		}
	}
	die(signo);
	errno = save_errno;
}

/*
 * Somebody cancels the job that we run, if we still do: one that has begun
 * since is not marked.
 */
static void
handle_sigusr2(int signo)
{
	int			save_errno = errno;

	if (MyJqAttempt && MyJqAttempt->begun && MyJqAttempt->cancelled)
	{
		InterruptPending = true;
		QueryCancelPending = true;
		SetLatch(MyLatch);
	}
	errno = save_errno;
}

/*
 * pqsignal() cannot tell who sends a signal.
 */
void
jq_set_signal_handler(int signo, void (*handler) (int, siginfo_t *, void *))
{
	struct sigaction action;

	memset(&action, 0, sizeof(action));
	action.sa_sigaction = handler;
	action.sa_flags = SA_RESTART | SA_SIGINFO;
	sigemptyset(&action.sa_mask);
	if (sigaction(signo, &action, NULL) < 0)
		elog(FATAL, "could not set handler of signal %d: %m", signo);
}

/* ---------------------------------------------------------------------
 * Start
 * --------------------------------------------------------------------- */

/*
 * Settings that a worker needs whatever database or role prefer.  Time limits
 * of sessions must not hit the bookkeeping, and a job has its own.
 */
static void
force_settings(void)
{
	static const char *const forced[][2] = {
		{"statement_timeout", "0"},
		{"lock_timeout", "0"},
		{"idle_in_transaction_session_timeout", "0"},
		{"idle_session_timeout", "0"},
#if PG_VERSION_NUM >= 170000
		{"transaction_timeout", "0"},
#endif
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_read_only", "off"},
		{"default_transaction_deferrable", "off"},
		{"row_security", "on"},
	};

	for (int i = 0; i < lengthof(forced); i++)
		SetConfigOption(forced[i][0], forced[i][1], PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * Whether database or role have a synchronous_commit of their own.
 */
static bool
sync_commit_set_by_user(void)
{
	int64		count;

	jq_owner_execute("SELECT count(*) FROM pg_catalog.pg_settings"
					 " WHERE name = 'synchronous_commit'"
					 " AND source IN ('database', 'user', 'database user')",
					 0, NULL, NULL, NULL, &count);
	return count > 0;
}

/*
 * Decide whether commits run ahead of their flush, and read jq.queues.  Both
 * may change with the configuration.
 */
static void
apply_settings(void)
{
	bool		standbys_defined = SyncRepStandbyNames != NULL &&
	SyncRepStandbyNames[0] != '\0';
	bool		run_ahead;

	switch (jq_commit_wait)
	{
		case JQ_COMMIT_WAIT_AUTO:
			run_ahead = !sync_commit_is_users && !standbys_defined;
			break;
		case JQ_COMMIT_WAIT_OFF:
			run_ahead = true;
			break;
		default:
			run_ahead = false;
			break;
	}

	/*
	 * As a session's own setting, so that a handler which says SET LOCAL
	 * synchronous_commit differs from it and is heard.  Without a value it is
	 * reset to what configuration, database or role say, and follows them
	 * from then on.  If that is not to wait, jq.commit_wait = on means more.
	 */
	SetConfigOption("synchronous_commit", run_ahead ? "off" : NULL,
					PGC_USERSET, PGC_S_SESSION);
	if (jq_commit_wait == JQ_COMMIT_WAIT_ON &&
		synchronous_commit == SYNCHRONOUS_COMMIT_OFF)
		SetConfigOption("synchronous_commit", "on", PGC_USERSET, PGC_S_SESSION);
	commits_run_ahead = run_ahead;

	if (queues_value == NULL || strcmp(queues_value, jq_queues) != 0)
	{
		MemoryContext oldcxt = MemoryContextSwitchTo(TopMemoryContext);

		list_free_deep(queues);
		if (queues_value)
			pfree(queues_value);
		queues = jq_split_names(jq_queues);
		queues_value = pstrdup(jq_queues);
		MemoryContextSwitchTo(oldcxt);
	}
}

/*
 * Start a transaction as the role whose jobs we run.
 *
 * Where we could not connect as it, our session is a superuser's with the
 * role as its session user.  All that would let a job change that back is
 * forbidden by the security context.  It must be set after the transaction
 * has started with a clean one; the callback below puts it back once nothing
 * of the role's can run any more, deferred triggers included.
 */
static void
start_transaction(void)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	if (borrowed_session)
		SetUserIdAndSecContext(MyJqSlot->roleid, SECURITY_LOCAL_USERID_CHANGE);
}

static void
borrowed_xact_callback(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT)
		SetUserIdAndSecContext(MyJqSlot->roleid, 0);
}

/*
 * Make the session of a superuser the role's, with the settings that it would
 * have.
 */
static void
borrow_session(void)
{
	Relation	rel;
	Snapshot	snapshot;

	borrowed_session = true;
	RegisterXactCallback(borrowed_xact_callback, NULL);
	SetConfigOption("session_authorization",
					GetUserNameFromId(MyJqSlot->roleid, false),
					PGC_SUSET, PGC_S_OVERRIDE);

	rel = table_open(DbRoleSettingRelationId, AccessShareLock);
	snapshot = RegisterSnapshot(GetCatalogSnapshot(DbRoleSettingRelationId));
	ApplySetting(snapshot, MyDatabaseId, MyJqSlot->roleid, rel, PGC_S_DATABASE_USER);
	ApplySetting(snapshot, InvalidOid, MyJqSlot->roleid, rel, PGC_S_USER);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
}

static bool
can_log_in(Oid roleid)
{
	HeapTuple	tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(roleid));
	bool		result;

	if (!HeapTupleIsValid(tuple))
		proc_exit(0);			/* dropped meanwhile */
	result = ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;
	ReleaseSysCache(tuple);
	return result;
}

static void
prepare_session(bool borrow)
{
	StartTransactionCommand();
	force_settings();
	if (borrow)
		borrow_session();
	else if (!can_log_in(MyJqSlot->roleid) && JQ_NEEDS_LOGIN)
		proc_exit(0);			/* changed meanwhile; the scheduler will see */
	if (jq_catalog_if_any() == NULL)
		proc_exit(0);
	PushActiveSnapshot(GetTransactionSnapshot());
	sync_commit_is_users = sync_commit_set_by_user();
	PopActiveSnapshot();
	CommitTransactionCommand();

	apply_settings();

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	lanes.shared = true;
	lanes.roleid = MyJqSlot->roleid;
	lanes.lanes = JqLanes;
	lanes.role = jq_find_role(MyDatabaseId, MyJqSlot->roleid, true);
	LWLockRelease(JqShared->lock);
	if (lanes.role == NULL)
		proc_exit(1);

	job_cxt = AllocSetContextCreate(TopMemoryContext, "jq job",
									ALLOCSET_DEFAULT_SIZES);
	call_cxt = AllocSetContextCreate(TopMemoryContext, "jq calls",
									 ALLOCSET_DEFAULT_SIZES);
}

/*
 * Main function of a worker.
 */
void
jq_worker_main(Datum main_arg)
{
	JqWorkerArgs args;
	bool		awake = false;	/* looked for work since the last sleep */

	memcpy(&args, MyBgworkerEntry->bgw_extra, sizeof(args));

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGUSR2, handle_sigusr2);
	jq_set_signal_handler(SIGQUIT, handle_sigquit);
	jq_set_signal_handler(SIGTERM, handle_sigterm);
	BackgroundWorkerUnblockSignals();

	jq_slot_attach(DatumGetInt32(main_arg), args.generation);
	BackgroundWorkerInitializeConnectionByOid(MyJqSlot->dboid,
											  args.borrow ? InvalidOid : MyJqSlot->roleid,
											  BGWORKER_BYPASS_ROLELOGINCHECK);
	HOLD_CANCEL_INTERRUPTS();
	pgstat_report_appname("jq worker");
	prepare_session(args.borrow);
	if (!jq_database_is_served(args.database))
		proc_exit(0);

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			apply_settings();
			if (!jq_database_is_served(args.database))
				break;
		}
		if (MyJqSlot->leave || shutdown_requested)
			break;				/* a late look at "leave" does no harm */

		if (jq_slot_try_idle(&lanes, queues, pauses_seen))
		{
			sleep_until_called();
			awake = false;
			continue;
		}
		if (run_next_job() && !awake)
			jq_slot_wake_next();
		awake = true;
	}

	proc_exit(0);
}

/*
 * Write out the WAL up to this record.
 */
static void
flush_wal(XLogRecPtr upto)
{
	TimestampTz start = GetCurrentTimestamp();

	XLogFlush(upto);
	last_flush = GetCurrentTimestamp();
	flush_interval = Min((last_flush - start) * FLUSH_SHARE,
						 MAX_FLUSH_INTERVAL_US);
}

/*
 * Write out what ran ahead, if it is time; called just before a commit.
 */
static void
flush_if_due(void)
{
	int64		elapsed = GetCurrentStatementStartTimestamp() - last_flush;

	if (!commits_run_ahead || XactLastRecEnd == 0)
		return;
	if (elapsed > MAX_FLUSH_INTERVAL_US ||
		(elapsed > flush_interval &&
		 XactLastRecEnd / XLOG_BLCKSZ > GetFlushRecPtr(NULL) / XLOG_BLCKSZ))
		flush_wal(XactLastRecEnd);
}

static void
sleep_until_called(void)
{
	static uint32 wait_event = 0;

	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("JqWorkerMain");

	if (commits_run_ahead && XactLastCommitEnd != 0)
		flush_wal(XactLastCommitEnd);
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);

	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_EXIT_ON_PM_DEATH, -1L, wait_event);
	ResetLatch(MyLatch);
	jq_slot_set_busy();
}

/* ---------------------------------------------------------------------
 * Jobs
 * --------------------------------------------------------------------- */

/*
 * Claim the next job and run it.  Returns false if there was none.
 */
static bool
run_next_job(void)
{
	JqJob	   *job;

	MemoryContextReset(job_cxt);
	start_transaction();
	MemoryContextSwitchTo(job_cxt);

	/* the extension or the role was dropped under us: leave, quietly */
	if (jq_catalog_if_any() == NULL ||
		!SearchSysCacheExists1(AUTHOID, ObjectIdGetDatum(MyJqSlot->roleid)))
		proc_exit(0);

	(void) jq_follow_configuration();
	pauses_seen = jq_load_pauses();
	job = palloc0(sizeof(JqJob));
	if (!jq_claim_next(&lanes, queues, job))
	{
		CommitTransactionCommand();
		MemoryContextSwitchTo(job_cxt);
		return false;
	}
	attempt_job(job);
	reset_session();

	pgstat_report_stat(false);
	return true;
}

static void
job_error_context(void *arg)
{
	JqJob	   *job = arg;

	errcontext("job " INT64_FORMAT ", handler \"%s\", %s",
			   job->id, job->name, jq_attempt_text(job));
}

static FmgrInfo *
cached_call(Oid function)
{
	CachedCall *call;
	bool		found;

	if (calls == NULL || calls_epoch != jq_configuration_epoch())
	{
		HASHCTL		ctl = {0};

		MemoryContextReset(call_cxt);
		ctl.keysize = sizeof(Oid);
		ctl.entrysize = sizeof(CachedCall);
		ctl.hcxt = call_cxt;
		calls = hash_create("jq calls", 32, &ctl,
							HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
		calls_epoch = jq_configuration_epoch();
	}
	call = hash_search(calls, &function, HASH_ENTER, &found);
	if (!found)
	{
		call->flinfo.fn_oid = InvalidOid;
		fmgr_info_cxt(function, &call->flinfo, call_cxt);
	}
	return &call->flinfo;
}

static void
report_vanished(const JqJob *job)
{
	ereport(LOG,
			(errmsg("job " INT64_FORMAT " was removed while it ran", job->id)));
}

/*
 * Take for the job what it needs before it can be started: places behind
 * limits, for this transaction, then middleware's leave, and a token of its
 * rate.  The token, and the end of a claim that lasts until the start, must be
 * committed first; so the transaction, and its locks, are begun anew then.
 *
 * Returns NULL if the job can be started.  With JQ_END_HELD it waits, when this
 * transaction has committed; with JQ_END_LOST somebody else has it, and there
 * is no transaction.
 */
static JqFailure *
admit(JqJob *job, const JqHandler *handler)
{
	bool		ends_claim = job->unique_key != NULL &&
	job->unique_until == JQ_UNTIL_START;
	JqFailure  *failure;
	JqGate		gate;
	JqGate		rate;
	bool		taken;

	if (!jq_enter_limits(job, handler, &gate))
		return jq_hold_at_gate(job, MyJqSlot->roleid, handler, &gate);
	if (job->admitted)
		return NULL;
	asking_middleware = true;
	failure = jq_middleware_verdict(job, handler, job_cxt);
	asking_middleware = false;
	if (failure)
		return failure;
	if (!jq_take_token(job, handler, &rate, &taken))
		return jq_hold_at_gate(job, MyJqSlot->roleid, handler, &rate);
	if (taken || ends_claim)
	{
		if (ends_claim)
			jq_release_key(job);
		PopActiveSnapshot();
		CommitTransactionCommand();
		MemoryContextSwitchTo(job_cxt);
		if (!take_again(job))
		{
			failure = jq_make_failure(0, NULL);
			failure->end = JQ_END_LOST;
			return failure;
		}
		if (!jq_enter_limits(job, handler, &gate))
		{
			if (taken)
				jq_return_token(&rate);
			return jq_hold_at_gate(job, MyJqSlot->roleid, handler, &gate);
		}
	}
	job->admitted = true;
	return NULL;
}

/*
 * Run the handler of the claimed job and remove the job's row.  Returns the
 * failure of a job that cannot be run at all; any other is an error.
 */
static JqFailure *
execute_job(JqJob *job)
{
	const JqHandler *found = jq_find_handler(job->name);
	JqFailure  *failure = jq_failure_before_start(job, found);
	JqHandler  *handler;
	JqCallResult result;

	if (failure)
		return failure;
	handler = jq_copy_handler(found);
	jq_check_handler_rights(handler, GetUserId());
	jq_slot_begin_job(job);

	QueryCancelPending = false;
	if (MyJqAttempt->cancelled) /* already */
		InterruptPending = QueryCancelPending = true;
	RESUME_CANCEL_INTERRUPTS();
	if (jq_needs_admission(job, handler))
		failure = admit(job, handler);
	if (failure)
	{
		HOLD_CANCEL_INTERRUPTS();
		return failure;
	}
	jq_call_handler(handler, job, cached_call(handler->function), true, &result);
	PortalHashTableDeleteAll();
	HOLD_CANCEL_INTERRUPTS();

	/* it may have trapped the interrupt, but is not to count as done */
	if (MyJqAttempt->cancelled)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("job was cancelled")));

	ResetTempTableNamespace();
	if (!jq_record_done(job, MyJqSlot->roleid, handler, &result))
		report_vanished(job);
	if (result.synchronous_commit != synchronous_commit)
		jq_set_local_synchronous_commit(result.synchronous_commit);
	return NULL;
}

/*
 * Do what the claim was for and commit.  Returns how it failed, or NULL; then
 * the transaction is over.
 */
static JqFailure *
try_job(JqJob *job)
{
	JqFailure  *volatile failure = NULL;

	PG_TRY();
	{
		failure = execute_job(job);
		if (failure && failure->end == JQ_END_LOST)
			 /* there is no transaction */ ;
		else if (failure && failure->end == JQ_END_HELD)
		{
			PopActiveSnapshot();
			jq_slot_settle_at_commit(true);
			CommitTransactionCommand();
		}
		else if (failure)
			AbortCurrentTransaction();
		else
		{
			PopActiveSnapshot();
			flush_if_due();
			CommitTransactionCommand();
		}
	}
	PG_CATCH();
	{
		/* the error has let go of all interrupts that were held */
		HOLD_INTERRUPTS();
		HOLD_CANCEL_INTERRUPTS();
		failure = capture_failure();
		AbortOutOfAnyTransaction();
		jq_slot_settle_at_commit(false);
		calls = NULL;			/* a call that was cut off is good no more */
		RESUME_INTERRUPTS();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(job_cxt);
	return failure;
}

/*
 * Make the current error the job's failure.  It goes to the log as well,
 * unless it is no error but the way the job was meant to end.
 */
static JqFailure *
capture_failure(void)
{
	JqFailure  *failure = jq_capture_failure(job_cxt);

	if (MyJqAttempt->begun && MyJqAttempt->cancelled)
	{
		failure->end = JQ_END_CANCELLED;
		failure->sqlerrcode = ERRCODE_JQ_CANCELLED;
		failure->message = NULL;	/* told by who cancelled it */
		failure->unspent = false;
	}
	if (failure->end == JQ_END_FAILED)
		EmitErrorReport();
	FlushErrorState();
	if (asking_middleware)
		jq_excuse_middleware(failure);
	asking_middleware = false;
	return failure;
}

/*
 * Start another transaction for the job and take its row again.  Returns false
 * if somebody came to it in between.
 */
static bool
take_again(JqJob *job)
{
	start_transaction();
	MemoryContextSwitchTo(job_cxt);
	PushActiveSnapshot(GetTransactionSnapshot());
	if (jq_lock_job(job))
		return true;
	PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(job_cxt);
	return false;
}

/*
 * The job has given up the places that it had: let others go on.
 */
static void
leave_gates(const JqJob *job)
{
	start_transaction();
	PushActiveSnapshot(GetTransactionSnapshot());
	jq_leave_gates(job);
	PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(job_cxt);
}

/*
 * The job waits there now: see that whoever stood in its way has not left
 * before he could see that.
 */
static void
look_at_gate_again(const JqJob *job, JqGate *gate)
{
	start_transaction();
	PushActiveSnapshot(GetTransactionSnapshot());
	jq_note_if_freed(job, MyJqSlot->roleid);
	/* or it was turned away by limits that have just been changed */
	jq_look_at_gate_again(gate, job->id, jq_follow_configuration());
	PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(job_cxt);
}

/*
 * Make an attempt of the claimed job, see to it that its outcome is recorded,
 * and let go of the job.
 */
static void
attempt_job(JqJob *job)
{
	ErrorContextCallback errcallback;
	JqFailure  *failure;
	int			tries = 0;

	errcallback.callback = job_error_context;
	errcallback.arg = job;
	errcallback.previous = error_context_stack;
	error_context_stack = &errcallback;

	pgstat_report_activity(STATE_RUNNING,
						   psprintf("jq: %s, job " INT64_FORMAT, job->name, job->id));
	do
	{
		failure = try_job(job);
		tries++;
	} while (failure && failure->end == JQ_END_FAILED &&
			 jq_try_again(failure, tries) && take_again(job));

	if (failure == NULL)
		jq_slot_end_job();
	else if (failure->end == JQ_END_LOST)
		jq_slot_drop_job();
	else if (failure->end == JQ_END_HELD)
	{
		jq_slot_end_job();
		look_at_gate_again(job, &failure->gate);
	}
	else
		record_failure(job, failure);
	if (job->ngates > 0)
		leave_gates(job);

	error_context_stack = errcallback.previous;
}

/*
 * Try to record the failure of an attempt, in a transaction of its own.  Only
 * the first time by the handler's terms: they must not be what prevents it.
 */
static bool
try_record_failure(JqJob *job, const JqFailure *failure, bool first, bool *gone)
{
	volatile bool recorded = false;

	PG_TRY();
	{
		const JqHandler *found;

		start_transaction();
		MemoryContextSwitchTo(job_cxt);
		PushActiveSnapshot(GetTransactionSnapshot());
		found = first ? jq_find_handler(job->name) : NULL;
		if (!jq_record_failure(job, MyJqSlot->roleid,
							   found ? jq_copy_handler(found) : NULL,
							   failure, gone))
			report_vanished(job);
		PopActiveSnapshot();
		jq_slot_settle_at_commit(true);
		CommitTransactionCommand();
		recorded = true;
	}
	PG_CATCH();
	{
		HOLD_INTERRUPTS();
		HOLD_CANCEL_INTERRUPTS();
		MemoryContextSwitchTo(job_cxt);
		EmitErrorReport();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		jq_slot_settle_at_commit(false);
		RESUME_INTERRUPTS();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(job_cxt);
	return recorded;
}

/*
 * Record the failure of an attempt.  If that fails, for want of disk space
 * say, it is tried again after a while; the job stays ours meanwhile.  In the
 * end it goes back as it was.
 */
static void
record_failure(JqJob *job, const JqFailure *failure)
{
	for (int try = 0;; try++)
	{
		bool		gone;

		if (try_record_failure(job, failure, try == 0, &gone))
		{
			jq_forget_unsettled(job, gone);
			jq_slot_end_job();
			return;
		}
		if (try == lengthof(record_waits))
			break;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 record_waits[try], PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}

	ereport(LOG,
			(errmsg("could not record the failure of job " INT64_FORMAT ", it will be run again",
					job->id)));
	jq_slot_drop_job();
}

/*
 * What a job may leave behind in the session, beyond its settings and its
 * temporary tables, must not reach the next one: the rest of DISCARD ALL.
 */
static void
reset_session(void)
{
	LockReleaseAll(USER_LOCKMETHOD, true);
	DropAllPreparedStatements();
	ResetSequenceCaches();
}
