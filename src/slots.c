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
 * the commit that settles the job.  A worker that ends in between leaves the
 * attempt among the unsettled ones, for whoever claims the job next.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "utils/timestamp.h"

#include "jq.h"

JqSlot	   *MyJqSlot = NULL;

static void detach(int code, Datum arg);
static void leave_unsettled(JqSlot *slot);

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
	}
	LWLockRelease(JqShared->lock);

	if (!ours)
		proc_exit(0);
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

	if (slot->job_id != 0)
	{
		/* a job that had to make way for a command on its database is free */
		if (slot->job_begun && !(database && database->held_by != 0))
			leave_unsettled(slot);
		jq_lane_lower(&JqLanes[slot->job_lane], slot->job_lane,
					  slot->job_key, slot->job_key);
	}
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
	slot->job_id = 0;
	slot->scan_lane = -1;
	slot->latch = NULL;
	MyJqSlot = NULL;

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
jq_slot_begin_job(const JqJob *job)
{
	JqSlot	   *slot = MyJqSlot;
	Latch	   *scheduler = NULL;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	slot->job_stamp = job->stamp;
	slot->job_attempt = job->attempts + 1;
	slot->job_started_at = GetCurrentTimestamp();
	strlcpy(slot->job_name, job->name, sizeof(slot->job_name));
	strlcpy(slot->job_queue, job->queue, sizeof(slot->job_queue));
	slot->job_begun = true;
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
 * The claimed job is settled: its outcome has committed.  The search that
 * found it may go on.
 */
void
jq_slot_end_job(void)
{
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	MyJqSlot->job_id = 0;
	MyJqSlot->job_begun = false;
	MyJqSlot->job_settles = false;
	LWLockRelease(JqShared->lock);
}

/*
 * The claimed job goes back as it was: its row is unlocked.
 */
void
jq_slot_drop_job(void)
{
	JqSlot	   *slot = MyJqSlot;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	if (slot->job_id != 0)
		jq_lane_lower(&JqLanes[slot->job_lane], slot->job_lane,
					  slot->job_key, slot->job_key);
	slot->job_id = 0;
	slot->job_begun = false;
	slot->job_settles = false;
	LWLockRelease(JqShared->lock);
}

/*
 * Go to sleep unless something is due: from now on whoever makes a job due
 * sets our latch, and the scheduler does when one falls due.  Returns whether
 * we may sleep.
 */
bool
jq_slot_try_idle(const JqLaneSet *set, List *queues)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz due;
	Latch	   *scheduler = NULL;
	bool		idle;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	due = jq_lanes_due(set, queues);
	idle = due > now && !MyJqSlot->leave;
	if (idle)
	{
		JqDatabase *database = jq_find_database(MyDatabaseId, false);

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

static void
leave_unsettled(JqSlot *slot)
{
	JqUnsettled *unsettled = NULL;

	for (int i = 0; i < JQ_MAX_UNSETTLED && unsettled == NULL; i++)
	{
		if (JqShared->unsettled[i].job_id == 0)
			unsettled = &JqShared->unsettled[i];
	}
	if (unsettled == NULL)
	{
		/* all in use: the oldest entries are of jobs that were removed */
		unsettled = &JqShared->unsettled[JqShared->next_unsettled];
		JqShared->next_unsettled = (JqShared->next_unsettled + 1) % JQ_MAX_UNSETTLED;
		JqShared->nunsettled--;
	}
	unsettled->dboid = slot->dboid;
	unsettled->job_id = slot->job_id;
	unsettled->job_stamp = slot->job_stamp;
	unsettled->attempt = slot->job_attempt;
	unsettled->pid = slot->pid;
	JqShared->nunsettled++;
}

static JqUnsettled *
find_unsettled(const JqJob *job)
{
	for (int i = 0; i < JQ_MAX_UNSETTLED; i++)
	{
		JqUnsettled *unsettled = &JqShared->unsettled[i];

		if (unsettled->job_id == job->id &&
			unsettled->job_stamp == job->stamp &&
			unsettled->dboid == MyDatabaseId)
			return unsettled;
	}
	return NULL;
}

/*
 * Whether a worker died in an attempt of this job that is not counted in its
 * row yet; *pid is that worker's.
 */
bool
jq_is_unsettled(const JqJob *job, pid_t *pid)
{
	JqUnsettled *unsettled;
	bool		result = false;

	if (JqShared == NULL || JqShared->nunsettled == 0)
		return false;

	LWLockAcquire(JqShared->lock, LW_SHARED);
	unsettled = find_unsettled(job);
	if (unsettled)
	{
		result = unsettled->attempt > job->attempts;
		*pid = unsettled->pid;
	}
	LWLockRelease(JqShared->lock);
	return result;
}

/*
 * The attempt is counted now.
 */
void
jq_forget_unsettled(const JqJob *job)
{
	JqUnsettled *unsettled;

	if (JqShared == NULL || JqShared->nunsettled == 0)
		return;

	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);
	unsettled = find_unsettled(job);
	if (unsettled)
	{
		unsettled->job_id = 0;
		JqShared->nunsettled--;
	}
	LWLockRelease(JqShared->lock);
}
