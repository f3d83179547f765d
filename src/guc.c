/*-------------------------------------------------------------------------
 *
 * guc.c
 *	  All settings.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"

#include "jq.h"

/*
 * Off: no process of jq runs jobs, in any database.  Dispatching goes on.
 */
bool		jq_enabled = true;

/*
 * Databases that the launcher looks at, comma-separated; empty: every one.
 */
char	   *jq_databases = NULL;

/*
 * Worker slots of the server.  Each worker also needs one of PostgreSQL's own
 * max_worker_processes, as do the launcher and each database's scheduler.
 */
int			jq_max_workers = 8;

/*
 * Combinations of database, role, queue and priority whose search position is
 * remembered.  With more of them than this in use at one time, those that
 * find no room wait for the scheduler's next look.
 */
int			jq_max_lanes = 1024;

/*
 * Workers of one database at most.
 */
int			jq_workers = 4;

/*
 * Queues that workers serve, strictly in this order; empty: all queues, in
 * order of priority, due time and id.
 */
char	   *jq_queues = NULL;

/*
 * Whether a worker waits for the flush of each job's commit.
 */
int			jq_commit_wait = JQ_COMMIT_WAIT_AUTO;

/*
 * Length of a lease for handlers whose timeout is shorter, in seconds.
 */
int			jq_lease = 15 * 60;

/*
 * Whether dispatching under a name that nobody registered is an error.
 */
bool		jq_require_handler = true;

/*
 * What becomes of jobs that were not dispatched in this database.
 */
int			jq_after_restore = JQ_AFTER_RESTORE_HOLD;

/*
 * How long running jobs may go on when the server is shut down, in seconds.
 */
int			jq_shutdown_grace = 30;

/*
 * How long a handler may go on after it was interrupted, by jq.cancel() or its
 * time limit, before its worker is ended; in milliseconds.
 */
int			jq_cancel_grace = 5000;

/*
 * Whether jobs that fail for good are told of by NOTIFY jq_failed.
 */
bool		jq_notify_failed = false;

/*
 * How long the history of attempts is kept, in minutes; 0: none is written.
 */
int			jq_keep_attempts = 0;

/*
 * How long finished batches are kept, in minutes.
 */
int			jq_keep_batches = 24 * 60;

static const struct config_enum_entry commit_wait_options[] = {
	{"auto", JQ_COMMIT_WAIT_AUTO, false},
	{"on", JQ_COMMIT_WAIT_ON, false},
	{"off", JQ_COMMIT_WAIT_OFF, false},
	{"true", JQ_COMMIT_WAIT_ON, true},
	{"false", JQ_COMMIT_WAIT_OFF, true},
	{"yes", JQ_COMMIT_WAIT_ON, true},
	{"no", JQ_COMMIT_WAIT_OFF, true},
	{"1", JQ_COMMIT_WAIT_ON, true},
	{"0", JQ_COMMIT_WAIT_OFF, true},
	{NULL, 0, false}
};

static const struct config_enum_entry after_restore_options[] = {
	{"hold", JQ_AFTER_RESTORE_HOLD, false},
	{"adopt", JQ_AFTER_RESTORE_ADOPT, false},
	{NULL, 0, false}
};

static bool
check_queues(char **newval, void **extra, GucSource source)
{
	List	   *names = jq_split_names(*newval);
	ListCell   *lc;

	/* "a," and "a,,b" name an empty queue, which no job can be in */
	foreach(lc, names)
	{
		char	   *name = lfirst(lc);

		if (*name == '\0' || strlen(name) > JQ_NAME_MAX)
		{
			GUC_check_errdetail("Names of queues have 1 to %d bytes.",
								JQ_NAME_MAX);
			return false;
		}
	}
	return true;
}

/*
 * Define the settings.  Those that only the postmaster can act on may be
 * declared as such only while it loads the library; elsewhere they are there
 * to be read.
 */
void
jq_define_settings(void)
{
	GucContext	startup_context = process_shared_preload_libraries_in_progress ?
	PGC_POSTMASTER : PGC_SIGHUP;

	DefineCustomBoolVariable("jq.enabled",
							 "Lets jq's processes run jobs.",
							 "When off, no scheduler and no worker runs in any database; dispatching goes on.",
							 &jq_enabled,
							 true,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);

	DefineCustomStringVariable("jq.databases",
							   "Databases in which jobs are run, separated by commas.",
							   "Empty means every database that has the extension.",
							   &jq_databases,
							   "",
							   PGC_SIGHUP, GUC_LIST_INPUT,
							   NULL, NULL, NULL);

	DefineCustomIntVariable("jq.max_workers",
							"Maximum number of jq's workers on this server.",
							"Each of them, the launcher and one scheduler for each database also take one of max_worker_processes.",
							&jq_max_workers,
							8, 1, 1024,
							startup_context, 0,
							NULL, NULL, NULL);

	DefineCustomIntVariable("jq.max_lanes",
							"Number of combinations of database, role, queue and priority whose search position is remembered.",
							"With more of them in use at one time, those that find no room are served with a delay.",
							&jq_max_lanes,
							1024, 16, 1048576,
							startup_context, 0,
							NULL, NULL, NULL);

	DefineCustomIntVariable("jq.workers",
							"Maximum number of workers of a database.",
							"A change made with ALTER DATABASE takes effect when the database's scheduler starts anew.",
							&jq_workers,
							4, 0, 1024,
							PGC_SUSET, 0,
							NULL, NULL, NULL);

	DefineCustomStringVariable("jq.queues",
							   "Queues that workers serve, separated by commas, strictly in this order.",
							   "Empty means all queues, in order of priority, due time and id.",
							   &jq_queues,
							   "",
							   PGC_SUSET, GUC_LIST_INPUT,
							   check_queues, NULL, NULL);

	DefineCustomEnumVariable("jq.commit_wait",
							 "Whether a worker waits until the commit of a job is on disk.",
							 "auto waits where synchronous standbys are defined; else the worker goes on and flushes every few milliseconds. Neither loses or doubles a job.",
							 &jq_commit_wait,
							 JQ_COMMIT_WAIT_AUTO,
							 commit_wait_options,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("jq.lease",
							"Time for which a job that runs outside of jq's workers is held.",
							"A handler with a longer timeout gets its timeout and a minute.",
							&jq_lease,
							15 * 60, 1, INT_MAX / 1000,
							PGC_SUSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("jq.require_handler",
							 "Refuses jobs for a handler that is not registered.",
							 "When off, such a job is queued, and fails for good if the handler is still missing when it is run.",
							 &jq_require_handler,
							 true,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);

	DefineCustomEnumVariable("jq.after_restore",
							 "What becomes of jobs that are written to the table by a restore, by replication or by hand.",
							 "hold keeps them until jq.adopt() is called; adopt lets them run.",
							 &jq_after_restore,
							 JQ_AFTER_RESTORE_HOLD,
							 after_restore_options,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("jq.shutdown_grace",
							"Time for which running jobs may go on when the server is shut down.",
							"Jobs that are interrupted then keep their attempt.",
							&jq_shutdown_grace,
							30, 0, INT_MAX / 1000,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("jq.cancel_grace",
							"Time for which a handler may go on after it was interrupted.",
							"A handler that jq.cancel() or its time limit has interrupted and that has not ended by then is ended with its worker.",
							&jq_cancel_grace,
							5000, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("jq.notify_failed",
							 "Sends NOTIFY jq_failed with the id of each job that fails for good.",
							 NULL,
							 &jq_notify_failed,
							 false,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("jq.keep_attempts",
							"Time for which each attempt of a job is kept in jq.attempts.",
							"0 writes no history.",
							&jq_keep_attempts,
							0, 0, INT_MAX / 60,
							PGC_SUSET, GUC_UNIT_MIN,
							NULL, NULL, NULL);

	DefineCustomIntVariable("jq.keep_batches",
							"Time for which a finished batch is kept.",
							"Failed jobs of a batch that is gone can be retried as any other.",
							&jq_keep_batches,
							24 * 60, 0, INT_MAX / 60,
							PGC_SUSET, GUC_UNIT_MIN,
							NULL, NULL, NULL);

	MarkGUCPrefixReserved("jq");
}

/*
 * Split a comma-separated setting into names without the spaces around them,
 * in the current memory context.  Names are taken as they are: no quotes, no
 * folding.  An empty setting gives no names.
 */
List *
jq_split_names(const char *value)
{
	List	   *names = NIL;
	const char *p = value;

	while (p && isspace((unsigned char) *p))
		p++;
	if (p == NULL || *p == '\0')
		return NIL;

	for (;;)
	{
		const char *end = strchr(p, ',');
		const char *next = end ? end + 1 : NULL;

		if (end == NULL)
			end = p + strlen(p);
		while (p < end && isspace((unsigned char) *p))
			p++;
		while (end > p && isspace((unsigned char) end[-1]))
			end--;
		names = lappend(names, pnstrdup(p, end - p));
		if (next == NULL)
			return names;
		p = next;
	}
}
