/*-------------------------------------------------------------------------
 *
 * shmem.h
 *	  Shared memory: databases, roles, lanes with their search positions, and
 *	  worker slots.
 *
 * Everything here is guarded by JqShared->lock unless a field says otherwise.
 * The lock is held for a few instructions at a time and never across anything
 * that can fail, so that the transaction callback may take it.
 *
 * A lane is what one index scan can search: the jobs of one role, queue and
 * priority, in order of due time and id.  For each lane the shared memory
 * remembers how far all below is known to be finished; src/README tells the
 * protocol that keeps this true.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#ifndef JQ_SHMEM_H
#define JQ_SHMEM_H

#include <signal.h>

#include "datatype/timestamp.h"
#include "storage/itemptr.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"

/* Databases that can have a scheduler, and (database, role) pairs that can
 * have workers, at one time. */
#define JQ_MAX_DATABASES 128
#define JQ_MAX_ROLES 512

/* Attempts of dead workers that are remembered until someone counts them, and
 * jobs that are run one at a time since one of them crashes the server. */
#define JQ_MAX_UNSETTLED 64
#define JQ_MAX_SUSPECTS 64

/* Batches that the scheduler is told of one by one. */
#define JQ_MAX_TOUCHED 16

/* What a handler can say of itself, in bytes with the final zero. */
#define JQ_NOTE_SIZE 128
#define JQ_LOG_SIZE 2048

/* Ranges of late keys kept for a lane before they are merged. */
#define JQ_LATE_RANGES 4

/* Where a job stands in its lane. */
typedef struct JqKey
{
	TimestampTz at;
	int64		id;
} JqKey;

/* Keys from low to high, both included. */
typedef struct JqRange
{
	JqKey		low;
	JqKey		high;
} JqRange;

typedef struct JqLane
{
	int			next;			/* next lane of the role, -1: last */
	bool		in_use;
	int32		priority;
	char		queue[60];

	/*
	 * No live job of the lane is due before this time; DT_NOEND when none is
	 * known.  A bound, not a fact: it may be too early.
	 */
	TimestampTz due;

	/*
	 * No live job lies below low but for those in the late ranges, which are
	 * ordered, below low, and came from transactions that committed after the
	 * search had passed their keys.
	 */
	JqKey		low;
	int			nlate;
	JqRange		late[JQ_LATE_RANGES];
} JqLane;

typedef struct JqRole
{
	bool		in_use;
	Oid			dboid;
	Oid			roleid;
	char		name[NAMEDATALEN];	/* for messages, when the role is gone */
	int			first_lane;		/* -1: none */

	/* why the scheduler does not start a worker, and until when */
	TimestampTz refused_until;
	int			refusals;		/* in a row */
	char		refusal[128];	/* '': none */
} JqRole;

typedef enum JqDatabaseState
{
	JQ_DATABASE_UNKNOWN,		/* to be looked at */
	JQ_DATABASE_STARTING,		/* scheduler requested */
	JQ_DATABASE_RUNNING,		/* scheduler attached */
	JQ_DATABASE_STOPPED,		/* scheduler gone, may be started again */
	JQ_DATABASE_ABSENT			/* no jq in it */
} JqDatabaseState;

typedef struct JqDatabase
{
	bool		in_use;
	Oid			dboid;
	JqDatabaseState state;
	TimestampTz start_after;	/* not to be started before */
	int			failures;		/* starts in a row that came to nothing */
	pid_t		scheduler_pid;
	Latch	   *scheduler_latch;	/* NULL: none */
	bool		full_look;		/* scheduler is to search the table anew */
	bool		cancels;		/* scheduler is to see to jq.cancellations */
	bool		restart;		/* scheduler is to start anew */
	int			ntouched;		/* batches to be considered; too many: all */
	int64		touched[JQ_MAX_TOUCHED];
	uint32		config_changes; /* grows when the configuration has changed */
	uint32		cancel_changes; /* grows when batches are cancelled or go away */
	TimestampTz held_due;		/* when to look at jq.held; 0: at all of it */
	uint32		pause_changes;	/* grows when a pause or resume commits */
	bool		wants_calls;	/* scheduler could start another worker */
	TimestampTz wakes_at;		/* when the scheduler next looks by itself */
	bool		lanes_full;		/* a lane could not be remembered */
	bool		no_slot;		/* a worker could not be started */
	pid_t		held_by;		/* session that needs jq out of the way */
} JqDatabase;

typedef enum JqSlotState
{
	JQ_SLOT_FREE,
	JQ_SLOT_STARTING,
	JQ_SLOT_IDLE,
	JQ_SLOT_BUSY
} JqSlotState;

/* A worker's slot. */
typedef struct JqSlot
{
	JqSlotState state;
	uint32		generation;		/* grows with each use */
	Oid			dboid;
	Oid			roleid;
	pid_t		pid;			/* 0 until attached */
	Latch	   *latch;			/* NULL until attached */
	TimestampTz started_at;
	bool		leave;			/* asked to go, by scheduler or hold */
	bool		proved;			/* has come as far as looking for work */

	/* what it searches: lane, and the least key that went live meanwhile */
	int			scan_lane;		/* -1: none */
	JqKey		pend;

	/* what it holds; what it runs is in the journal */
	int64		job_id;			/* 0: nothing */
	int			job_lane;
	JqKey		job_key;
	bool		job_settles;	/* the outcome is committing */
	bool		suspect;		/* the job is one that runs alone */
} JqSlot;

/* What a handler said with jq.progress() and jq.log(). */
typedef struct JqReport
{
	double		percent;		/* below 0: not known */
	char		note[JQ_NOTE_SIZE];
	char		log[JQ_LOG_SIZE];
} JqReport;

/*
 * An attempt that a worker is making: entry of its slot in the journal.  All
 * but innocent is written under the lock.
 */
typedef struct JqAttempt
{
	bool		begun;			/* the handler has been entered */
	volatile sig_atomic_t innocent; /* its end will not be the job's doing */
	bool		cancelled;		/* jq.cancel() has asked for its end */
	bool		timed_out;		/* outlived its time limit and the grace */
	Oid			dboid;
	int64		job_id;
	int64		job_stamp;
	int32		attempt;
	pid_t		pid;
	TimestampTz started_at;
	TimestampTz end_by;			/* to be ended by force then; 0: no */
	char		name[60];
	char		queue[60];
	JqReport	report;
} JqAttempt;

typedef enum JqDeath
{
	JQ_DEATH_EXIT,				/* left by itself, or was told to */
	JQ_DEATH_CRASH,				/* crashed or was killed */
	JQ_DEATH_CANCEL,			/* did not heed jq.cancel() */
	JQ_DEATH_TIMEOUT			/* did not heed its time limit */
} JqDeath;

/* An attempt whose worker died before it could be recorded; free if it is not
 * begun. */
typedef struct JqUnsettled
{
	JqDeath		death;
	JqAttempt	attempt;
} JqUnsettled;

typedef struct JqSuspect
{
	Oid			dboid;
	int64		job_id;			/* 0: free */
	int64		job_stamp;
} JqSuspect;

/*
 * What outlives the restart after a crash: memory that the postmaster maps
 * when it loads the library, and that is not the shared memory it makes anew.
 */
typedef struct JqJournalData
{
	int			nunsettled;
	int			next_unsettled;
	int			nsuspects;
	int			next_suspect;
	JqUnsettled unsettled[JQ_MAX_UNSETTLED];
	JqSuspect	suspects[JQ_MAX_SUSPECTS];
	JqAttempt	attempts[FLEXIBLE_ARRAY_MEMBER];	/* of the slots */
} JqJournalData;

/* Sessions that wait for a job and are woken when its worker lets go of it;
 * others that find no room look from time to time. */
#define JQ_MAX_WAITERS 64

typedef struct JqWaiter
{
	Oid			dboid;
	int64		job_id;			/* 0: free */
	Latch	   *latch;
} JqWaiter;

typedef struct JqSharedState
{
	LWLock	   *lock;
	pid_t		launcher_pid;
	Latch	   *launcher_latch; /* NULL: no launcher */
	int			nslots;
	int			nlanes;
	int			nwaiters;
	JqDatabase	databases[JQ_MAX_DATABASES];
	JqRole		roles[JQ_MAX_ROLES];
	JqWaiter	waiters[JQ_MAX_WAITERS];
} JqSharedState;

/* Set up by the postmaster; NULL where the library was not preloaded. */
extern JqSharedState *JqShared;
extern JqSlot *JqSlots;
extern JqLane *JqLanes;
extern JqJournalData *JqJournal;

/* The slot of this process, its database's entry, and its attempt, if it is a
 * worker. */
extern JqDatabase *MyJqDatabase;
extern JqSlot *MyJqSlot;
extern JqAttempt *MyJqAttempt;

/* Rows that a search has met behind the one it claimed, in order. */
#define JQ_MAX_AHEAD 64

typedef struct JqAhead
{
	int			laneno;
	int			next;			/* of them, the next one to be tried */
	int			count;
	ItemPointerData tids[JQ_MAX_AHEAD];
	JqKey		pin;			/* first blocked row before them */
	uint64		epoch;			/* of the catalog, when they were met */
} JqAhead;

/*
 * The lanes a search goes over: those of a role in shared memory, or those of
 * a session that has none (jq.drain).
 */
typedef struct JqLaneSet
{
	bool		shared;
	Oid			roleid;
	JqRole	   *role;			/* shared only */
	JqLane	   *lanes;			/* array that lane numbers point into */
	int			first_lane;
	int			nlanes;			/* not shared: how many there are */
	JqAhead		ahead;
} JqLaneSet;

#define JQ_KEY_LESS(a, b) \
	((a).at < (b).at || ((a).at == (b).at && (a).id < (b).id))

/* "shmem.c" */
extern void jq_shmem_init(void);
extern JqDatabase *jq_find_database(Oid dboid, bool create);
extern JqRole *jq_find_role(Oid dboid, Oid roleid, bool create);
extern void jq_touch_batch(JqDatabase *database, int64 batch_id);
extern void jq_forget_database(JqDatabase *database);
extern void jq_forget_role(JqRole *role);
extern void jq_reconsider_database(JqDatabase *database);
extern bool jq_role_has_worker(const JqRole *role);

/* "journal.c" */
extern void jq_journal_init(void);
extern void jq_journal_recover(void);
extern JqAttempt *jq_attempt_of(const JqSlot *slot);
extern void jq_leave_unsettled(const JqAttempt *attempt, JqDeath death);
extern JqUnsettled *jq_find_unsettled(Oid dboid, int64 job_id, int64 stamp);
extern void jq_settle(JqUnsettled *unsettled);
extern bool jq_is_suspect(Oid dboid, int64 job_id, int64 stamp);
extern void jq_clear_suspect(Oid dboid, int64 job_id, int64 stamp);
extern void jq_journal_forget_database(Oid dboid);

/* "lane.c" */
extern int	jq_lane_find(JqRole *role, const char *queue, int32 priority,
						 bool create);
extern void jq_lane_init(JqLane *lane, const char *queue, int32 priority);
extern void jq_lane_lower(JqLane *lane, int laneno, JqKey low, JqKey high);
extern void jq_lane_advance(JqLane *lane, const JqRange *range, JqKey to,
							JqKey pend, bool exhausted);
extern void jq_lanes_recycle(void);

#endif							/* JQ_SHMEM_H */
