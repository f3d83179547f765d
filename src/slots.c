/*-------------------------------------------------------------------------
 *
 * slots.c
 *	  The workers' slots in shared memory: who is there, what he holds.
 *
 * A slot is reserved by the scheduler, attached by the worker that it starts,
 * and freed by that worker's exit, or by the scheduler if the worker never
 * came.  The generation tells a worker that came too late that the slot is
 * not his any more.
 *
 * What a slot says it holds is true from before the row is locked until after
 * the commit that settles the job.  From the entry of the handler on it also
 * stands in the journal.  A worker that ends in between leaves the attempt
 * among the unsettled ones, for whoever claims the job next.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/timestamp.h"

#include "jq.h"

JqDatabase *MyJqDatabase = NULL;
JqSlot	   *MyJqSlot = NULL;
JqAttempt  *MyJqAttempt = NULL;

static void detach(int code, Datum arg);
static void drop_job(JqSlot *slot);

/*
 * Reserve a free slot for a worker that is to be started.  Returns false if
 * there is none.
 */
bool
jq_slot_reserve(Oid dboid, Oid roleid, int *slotno, uint32 *generation)
{
	bool		found = false;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JqShared->nslots && !found; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state != JQ_SLOT_FREE)
			continue;
		*generation = slot->generation + 1;
		MemSet(slot, 0, sizeof(JqSlot));
		slot->generation = *generation;
		slot->state = JQ_SLOT_STARTING;
		slot->dboid = dboid;
		slot->roleid = roleid;
		slot->started_at = GetCurrentTimestamp();
		slot->scan_lane = -1;
		*slotno = i;
		found = true;
	}
	LWLockRelease(JqShared->lock);
	return found;
}

/*
 * Free a slot whose worker never came.
 */
void
jq_slot_release(int slotno, uint32 generation)
{
	JqSlot	   *slot = &JqSlots[slotno];

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	if (slot->state == JQ_SLOT_STARTING && slot->generation == generation)
		slot->state = JQ_SLOT_FREE;
	LWLockRelease(JqShared->lock);
}

/*
 * Make the slot this process's own; exit if it is not meant for us any more.
 * To be called before the database connection is made, so that at exit the
 * transaction is ended before the slot is.
 */
void
jq_slot_attach(int slotno, uint32 generation)
{
	JqSlot	   *slot = &JqSlots[slotno];
	bool		ours;

	before_shmem_exit(detach, (Datum) 0);

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	ours = slot->state == JQ_SLOT_STARTING && slot->generation == generation;
	if (ours)
	{
		JqDatabase *database = jq_find_database(slot->dboid, false);

		slot->state = JQ_SLOT_BUSY;
		slot->pid = MyProcPid;
		slot->latch = MyLatch;
		slot->started_at = GetCurrentTimestamp();
		if (database && database->held_by != 0)
			slot->leave = true;
		MyJqSlot = slot;
		MyJqDatabase = database;
		MyJqAttempt = jq_attempt_of(slot);
	}
	LWLockRelease(JqShared->lock);

	if (!ours)
		proc_exit(0);
}

/*
 * How this worker dies in the middle of its attempt.
 */
static JqDeath
death_of(const JqAttempt *attempt)
{
	if (attempt->cancelled)
		return JQ_DEATH_CANCEL;
	if (attempt->timed_out)
		return JQ_DEATH_TIMEOUT;
	return JQ_DEATH_EXIT;
}

static void
detach(int code, Datum arg)
{
	JqSlot	   *slot = MyJqSlot;
	JqDatabase *database;
	JqRole	   *role;

	if (slot == NULL)
		return;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	database = jq_find_database(slot->dboid, false);
	role = jq_find_role(slot->dboid, slot->roleid, false);

	if (MyJqAttempt->begun &&
		(MyJqAttempt->cancelled || !MyJqAttempt->innocent))
		jq_leave_unsettled(MyJqAttempt, death_of(MyJqAttempt));
	if (database && slot->state == JQ_SLOT_BUSY)
		database->held_due = 0; /* places that it had may be free */
	drop_job(slot);
	if (role && code != 0 && !slot->proved)
	{
		/* it could not even start: do not try again at once */
		role->refusals = Min(role->refusals + 1, 6);
		role->refused_until = GetCurrentTimestamp() +
			((int64) USECS_PER_SEC << role->refusals);
		strlcpy(role->refusal, "its worker could not start, see the server's log",
				sizeof(role->refusal));
	}

	slot->state = JQ_SLOT_FREE;
	slot->scan_lane = -1;
	slot->latch = NULL;
	MyJqSlot = NULL;
	MyJqDatabase = NULL;
	MyJqAttempt = NULL;

	/* our own database's scheduler, and all that wait for a slot */
	for (int i = 0; i < JQ_MAX_DATABASES; i++)
	{
		JqDatabase *waiting = &JqShared->databases[i];

		if (waiting->in_use && waiting->scheduler_latch &&
			(waiting == database || waiting->no_slot))
			SetLatch(waiting->scheduler_latch);
	}
	LWLockRelease(JqShared->lock);
}

/* ---------------------------------------------------------------------
 * What the worker does
 * --------------------------------------------------------------------- */

/*
 * We have come as far as looking for work.  The scheduler, whose latch is
 * returned, starts workers one after the other.  The caller holds the lock.
 */
static Latch *
prove(JqSlot *slot)
{
	JqDatabase *database = jq_find_database(slot->dboid, false);
	JqRole	   *role = jq_find_role(slot->dboid, slot->roleid, false);

	slot->proved = true;
	if (role)
	{
		role->refusals = 0;
		role->refusal[0] = '\0';
	}
	return database ? database->scheduler_latch : NULL;
}

/*
 * The handler of the claimed job is about to be entered.
 */
void
jq_slot_begin_job(JqJob *job)
{
	JqSlot	   *slot = MyJqSlot;
	JqAttempt  *attempt = MyJqAttempt;
	Latch	   *scheduler = NULL;

	job->pid = MyProcPid;
	job->started_at = GetCurrentTimestamp();

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	if (!attempt->begun)		/* else it is repeated */
	{
		attempt->innocent = false;
		attempt->cancelled = false;
		attempt->timed_out = false;
		attempt->end_by = 0;
		attempt->report.percent = -1;
		attempt->report.note[0] = '\0';
		attempt->report.log[0] = '\0';
	}
	attempt->dboid = MyDatabaseId;
	attempt->job_id = job->id;
	attempt->job_stamp = job->stamp;
	attempt->attempt = job->attempts + 1;
	attempt->pid = MyProcPid;
	attempt->started_at = job->started_at;
	strlcpy(attempt->name, job->name, sizeof(attempt->name));
	strlcpy(attempt->queue, job->queue, sizeof(attempt->queue));
	pg_write_barrier();			/* should we be killed here */
	attempt->begun = true;
	slot->job_settles = false;
	if (!slot->proved)
		scheduler = prove(slot);
	LWLockRelease(JqShared->lock);
	if (scheduler)
		SetLatch(scheduler);
}

/*
 * The transaction that commits next settles the claimed job.  The commit's
 * callback lets go of the job before it tells others that it is due again;
 * otherwise they could pass it as held.
 */
void
jq_slot_settle_at_commit(bool settles)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyJqSlot->job_settles = settles;
	LWLockRelease(JqShared->lock);
}

/*
 * Let go of the job, which has come to an end: its outcome has committed.
 * The caller holds the lock.
 */
void
jq_slot_let_go(void)
{
	JqSlot	   *slot = MyJqSlot;
	JqAttempt  *attempt = MyJqAttempt;

	for (int i = 0; i < JQ_MAX_WAITERS && JqShared->nwaiters > 0; i++)
	{
		JqWaiter   *waiter = &JqShared->waiters[i];

		if (waiter->job_id == slot->job_id && slot->job_id != 0 &&
			waiter->dboid == MyDatabaseId)
			SetLatch(waiter->latch);
	}
	if (attempt->begun)
	{
		if (attempt->cancelled)
		{
			/* perhaps too late for us to notice */
			JqDatabase *database = jq_find_database(MyDatabaseId, false);

			if (database)
				database->cancels = true;
			if (database && database->scheduler_latch)
				SetLatch(database->scheduler_latch);
		}
		if (slot->suspect)
			jq_clear_suspect(MyDatabaseId, attempt->job_id, attempt->job_stamp);
	}
	attempt->begun = false;
	slot->job_id = 0;
	slot->job_settles = false;
	slot->suspect = false;
}

/*
 * The claimed job is settled: its outcome has committed.  The search that
 * found it may go on.
 */
void
jq_slot_end_job(void)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	jq_slot_let_go();
	LWLockRelease(JqShared->lock);
}

/*
 * The job goes back as it was: make its lane live again.  The caller holds
 * the lock.
 */
static void
drop_job(JqSlot *slot)
{
	if (slot->job_id != 0)
		jq_lane_lower(&JqLanes[slot->job_lane], slot->job_lane,
					  slot->job_key, slot->job_key);
	jq_attempt_of(slot)->begun = false;
	slot->job_id = 0;
	slot->job_settles = false;
	slot->suspect = false;
}

/*
 * The claimed job goes back as it was: its row is unlocked.
 */
void
jq_slot_drop_job(void)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	drop_job(MyJqSlot);
	LWLockRelease(JqShared->lock);
}

/*
 * Interrupt the job that the slot's worker runs, and let it be ended by force
 * after the grace.  The caller holds the lock, so that the worker is there,
 * and still at that job.
 */
void
jq_slot_interrupt(JqSlot *slot, TimestampTz now)
{
	JqAttempt  *attempt = jq_attempt_of(slot);

	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));
	if (attempt->cancelled)
		return;
	attempt->cancelled = true;
	attempt->end_by = now + (int64) jq_cancel_grace * 1000;
	(void) kill(slot->pid, SIGUSR2);
}

/*
 * Whether the database has a scheduler now.  Takes no lock, for signal
 * handlers: a late answer does no harm.
 */
bool
jq_scheduler_is_there(Oid dboid)
{
	for (int i = 0; i < JQ_MAX_DATABASES; i++)
	{
		const JqDatabase *database = &JqShared->databases[i];

		if (database->in_use && database->dboid == dboid)
			return database->scheduler_latch != NULL;
	}
	return false;
}

/*
 * End the slot's worker if it runs a job; innocent: the attempt does not
 * count.  The caller holds the lock, under which the worker detaches, so that
 * the pid is its own.
 */
void
jq_slot_end_worker(JqSlot *slot, bool innocent)
{
	JqAttempt  *attempt = jq_attempt_of(slot);

	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));
	if (!attempt->begun)
		return;
	if (innocent)
		attempt->innocent = true;
	(void) kill(slot->pid, SIGTERM);
}

/*
 * Whether another worker is running a suspect.  The caller holds the lock.
 */
bool
jq_suspect_runs(void)
{
	for (int i = 0; i < JqShared->nslots; i++)
	{
		if (JqSlots[i].state == JQ_SLOT_BUSY && JqSlots[i].suspect &&
			JqSlots[i].job_id != 0 && &JqSlots[i] != MyJqSlot)
			return true;
	}
	return false;
}

/*
 * The slot of the worker that runs this job, or, with stamp 0, holds a job of
 * this id in any way; NULL if none does.  The caller holds the lock.
 */
JqSlot *
jq_slot_of_job(int64 job_id, int64 stamp)
{
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];
		JqAttempt  *attempt = jq_attempt_of(slot);

		if (slot->state == JQ_SLOT_BUSY && slot->job_id == job_id &&
			slot->dboid == MyDatabaseId &&
			(stamp == 0 || (attempt->begun && attempt->job_stamp == stamp)))
			return slot;
	}
	return NULL;
}

/*
 * Go to sleep unless something is due: from now on whoever makes a job due
 * sets our latch, and the scheduler does when one falls due.  Returns whether
 * we may sleep.
 */
bool
jq_slot_try_idle(const JqLaneSet *set, List *queues, uint32 pauses_seen)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz due;
	JqDatabase *database;
	Latch	   *scheduler = NULL;
	bool		idle;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	due = jq_lanes_due(set, queues);
	database = jq_find_database(MyDatabaseId, false);
	idle = due > now && !MyJqSlot->leave &&
		(database == NULL || database->pause_changes == pauses_seen);
	if (idle)
	{
		MyJqSlot->state = JQ_SLOT_IDLE;
		if (database && due < database->wakes_at)
			scheduler = database->scheduler_latch;
		if (!MyJqSlot->proved)
			scheduler = prove(MyJqSlot);
	}
	LWLockRelease(JqShared->lock);

	if (scheduler)
		SetLatch(scheduler);
	return idle;
}

/*
 * We are awake again.
 */
void
jq_slot_set_busy(void)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyJqSlot->state = JQ_SLOT_BUSY;
	MyJqSlot->scan_lane = -1;
	LWLockRelease(JqShared->lock);
}

/*
 * Wake one more sleeping worker of our role: we were woken and found work, so
 * there may be more.
 */
void
jq_slot_wake_next(void)
{
	Latch	   *latch = NULL;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < JqShared->nslots && latch == NULL; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_IDLE && slot->dboid == MyJqSlot->dboid &&
			slot->roleid == MyJqSlot->roleid)
		{
			slot->state = JQ_SLOT_BUSY;
			slot->scan_lane = -1;
			latch = slot->latch;
		}
	}
	LWLockRelease(JqShared->lock);
	if (latch)
		SetLatch(latch);
}

/* ---------------------------------------------------------------------
 * Unsettled attempts
 * --------------------------------------------------------------------- */

/*
 * If a worker died in an attempt of this job that is not counted in its row
 * yet, fill in *unsettled.
 */
bool
jq_is_unsettled(const JqJob *job, JqUnsettled *unsettled)
{
	JqUnsettled *found;

	if (JqShared == NULL || JqJournal->nunsettled == 0)
		return false;

	LWLockAcquire(JqShared->lock, LW_SHARED);
	found = jq_find_unsettled(MyDatabaseId, job->id, job->stamp);
	if (found && found->attempt.attempt <= job->attempts)
		found = NULL;			/* counted by somebody who then died */
	if (found)
		*unsettled = *found;
	LWLockRelease(JqShared->lock);
	return found != NULL;
}

/*
 * The attempt is counted now, or the job has ended for good (gone).
 */
void
jq_forget_unsettled(const JqJob *job, bool gone)
{
	JqUnsettled *found;

	if (JqShared == NULL ||
		(JqJournal->nunsettled == 0 && JqJournal->nsuspects == 0))
		return;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	found = jq_find_unsettled(MyDatabaseId, job->id, job->stamp);
	if (found)
		jq_settle(found);
	if (gone)
		jq_clear_suspect(MyDatabaseId, job->id, job->stamp);
	LWLockRelease(JqShared->lock);
}
