/*-------------------------------------------------------------------------
 *
 * wakeup.c
 *	  Tells workers of jobs that became due, at the commit that made them so.
 *
 * What a transaction makes due is noted while it runs, by lane and level of
 * nesting, so that a subtransaction that rolls back takes its notes along.
 * When the transaction has committed and its rows can be seen, the callback
 * lowers the lanes' search positions and sets latches.  Nothing there can
 * fail: it allocates nothing, and where shared memory has no room it asks the
 * scheduler for a full look at the table instead.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "jq.h"

typedef struct DueKey
{
	Oid			roleid;
	int32		priority;
	int32		nest_level;
	char		queue[JQ_NAME_MAX + 1];
} DueKey;

typedef struct DueEntry
{
	DueKey		lane;
	char		role[NAMEDATALEN];	/* name of the lane's role */
	JqKey		low;
	JqKey		high;
	int64		count;
} DueEntry;

/* in TopTransactionContext; NULL: nothing noted */
static HTAB *due_entries = NULL;
static DueEntry *last_entry = NULL;
static int	deepest_level = 0;

/* A running job that is to be interrupted. */
typedef struct CancelNote
{
	int64		job_id;
	int64		stamp;
	int			nest_level;
} CancelNote;

/* in TopTransactionContext */
static List *cancel_notes = NIL;

static int64 batches_noted[JQ_MAX_TOUCHED];
static int	nbatches_noted = 0; /* more if there was no room for all */
static bool cancelled_batches_noted = false;
static bool configuration_noted = false;
static TimestampTz held_noted = DT_NOEND;
static bool full_look_noted = false;
static bool launcher_noted = false;
static bool pauses_noted = false;
static bool restart_noted = false;

/* latches to be set, collected under the lock; jq_max_workers + 2 of them */
static Latch **latches = NULL;
static int	nlatches;

/* ---------------------------------------------------------------------
 * Notes
 * --------------------------------------------------------------------- */

static void
make_latches(void)
{
	if (latches == NULL)
		latches = MemoryContextAlloc(TopMemoryContext,
									 (JqShared->nslots + 2) * sizeof(Latch *));
}

static void
make_entries(void)
{
	HASHCTL		ctl = {0};

	make_latches();
	ctl.keysize = sizeof(DueKey);
	ctl.entrysize = sizeof(DueEntry);
	ctl.hcxt = TopTransactionContext;
	due_entries = hash_create("jq jobs due at commit", 16, &ctl,
							  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	last_entry = NULL;
	deepest_level = 0;
}

/*
 * Add to the note on a lane; role is the name of its role, or NULL if it is
 * to be looked up for a new note.
 */
static void
merge_entry(const DueKey *lane, const char *role, JqKey low, JqKey high,
			int64 count)
{
	DueEntry   *entry = last_entry;
	bool		found = true;

	if (entry == NULL || memcmp(&entry->lane, lane, sizeof(DueKey)) != 0)
		entry = hash_search(due_entries, lane, HASH_ENTER, &found);
	if (!found)
	{
		if (role == NULL)
			role = GetUserNameFromId(lane->roleid, true);
		strlcpy(entry->role, role ? role : "", sizeof(entry->role));
		entry->low = low;
		entry->high = high;
		entry->count = count;
	}
	else
	{
		if (JQ_KEY_LESS(low, entry->low))
			entry->low = low;
		if (JQ_KEY_LESS(entry->high, high))
			entry->high = high;
		entry->count += count;
	}
	last_entry = entry;
	deepest_level = Max(deepest_level, lane->nest_level);
}

/*
 * Note that the current (sub)transaction made a job live.
 */
void
jq_note_due(Oid roleid, const char *queue, int32 priority, JqKey key)
{
	DueKey		lane;

	if (JqShared == NULL)
		return;
	if (due_entries == NULL)
		make_entries();

	memset(&lane, 0, sizeof(lane));
	lane.roleid = roleid;
	lane.priority = priority;
	lane.nest_level = GetCurrentTransactionNestLevel();
	strlcpy(lane.queue, queue, sizeof(lane.queue));
	merge_entry(&lane, NULL, key, key, 1);
}

/*
 * Note that the scheduler is to search the whole table once the transaction
 * has committed.
 */
void
jq_note_full_look(void)
{
	full_look_noted = true;
}

/*
 * Note that the launcher is to look at this database once the transaction has
 * committed.
 */
void
jq_note_launcher(void)
{
	launcher_noted = true;
}

/*
 * Note that the transaction changed jq.pauses: once it has committed, workers
 * and scheduler are to look again at what is due.
 */
void
jq_note_pauses(void)
{
	if (JqShared == NULL)
		return;
	make_latches();
	pauses_noted = true;
}

/*
 * Note that workers and scheduler of this database are to be replaced once
 * the transaction has committed.
 */
void
jq_note_restart(void)
{
	restart_noted = true;
}

/*
 * Note that the current (sub)transaction cancelled a running job, which is to
 * be interrupted once it has committed.
 */
void
jq_note_cancel(int64 job_id, int64 stamp)
{
	MemoryContext oldcxt = MemoryContextSwitchTo(TopTransactionContext);
	CancelNote *note = palloc(sizeof(CancelNote));

	note->job_id = job_id;
	note->stamp = stamp;
	note->nest_level = GetCurrentTransactionNestLevel();
	cancel_notes = lappend(cancel_notes, note);
	MemoryContextSwitchTo(oldcxt);
}

/*
 * Note that a batch may have come to its end.  A note too many does no harm, so
 * the end of subtransactions does not matter.
 */
void
jq_note_batch(int64 batch_id)
{
	for (int i = 0; i < Min(nbatches_noted, JQ_MAX_TOUCHED); i++)
	{
		if (batches_noted[i] == batch_id)
			return;
	}
	if (nbatches_noted < JQ_MAX_TOUCHED)
		batches_noted[nbatches_noted] = batch_id;
	nbatches_noted++;
}

/*
 * Note that a batch was cancelled, so that workers look up theirs again.
 */
void
jq_note_cancelled_batch(int64 batch_id)
{
	cancelled_batches_noted = true;
	jq_note_batch(batch_id);
}

/*
 * Note that the configuration has changed: workers that are woken by the
 * commit could come before its invalidations.
 */
void
jq_note_configuration(void)
{
	configuration_noted = true;
}

/*
 * Note that the scheduler is to look at what is held by limits: at this time,
 * or at once at all of it (0).
 */
void
jq_note_held(TimestampTz at)
{
	held_noted = Min(held_noted, at);
}

/*
 * Whether the scheduler is going to consider the only batch that we noted
 * anyway.  We have committed: it takes its snapshot after it has cleared what
 * we look at here, so it will see what we did.
 */
static bool
batch_is_touched(void)
{
	int			ntouched;

	if (MyJqDatabase == NULL || nbatches_noted != 1)
		return false;
	pg_memory_barrier();
	ntouched = Min(MyJqDatabase->ntouched, JQ_MAX_TOUCHED);
	for (int i = 0; i < ntouched; i++)
	{
		if (MyJqDatabase->touched[i] == batches_noted[0])
			return true;
	}
	return false;
}

static bool
anything_noted(void)
{
	return due_entries || cancel_notes != NIL || full_look_noted ||
		launcher_noted || pauses_noted || restart_noted ||
		held_noted != DT_NOEND || cancelled_batches_noted ||
		configuration_noted ||
		(nbatches_noted > 0 && !batch_is_touched());
}

static void
forget_notes(void)
{
	/* the memory goes with the transaction */
	due_entries = NULL;
	last_entry = NULL;
	cancel_notes = NIL;
	full_look_noted = false;
	launcher_noted = false;
	pauses_noted = false;
	restart_noted = false;
	nbatches_noted = 0;
	cancelled_batches_noted = false;
	configuration_noted = false;
	held_noted = DT_NOEND;
}

/* ---------------------------------------------------------------------
 * At the end of subtransactions
 * --------------------------------------------------------------------- */

/*
 * Hand the notes of cancelled jobs of the ending subtransaction to its parent,
 * or drop them.
 */
static void
end_subxact_cancels(bool commit)
{
	int			level = GetCurrentTransactionNestLevel();
	ListCell   *lc;

	foreach(lc, cancel_notes)
	{
		CancelNote *note = lfirst(lc);

		if (note->nest_level < level)
			continue;
		if (commit)
			note->nest_level = level - 1;
		else
			cancel_notes = foreach_delete_current(cancel_notes, lc);
	}
}

/*
 * The same for the notes of due jobs.
 */
static void
end_subxact(bool commit)
{
	int			level = GetCurrentTransactionNestLevel();
	HASH_SEQ_STATUS status;
	DueEntry   *entry;
	List	   *moved = NIL;
	ListCell   *lc;

	if (due_entries == NULL || deepest_level < level)
		return;

	last_entry = NULL;
	hash_seq_init(&status, due_entries);
	while ((entry = hash_seq_search(&status)) != NULL)
	{
		if (entry->lane.nest_level < level)
			continue;
		if (commit)
		{
			DueEntry   *copy = MemoryContextAlloc(TopTransactionContext,
												  sizeof(DueEntry));
			MemoryContext oldcxt = MemoryContextSwitchTo(TopTransactionContext);

			*copy = *entry;
			moved = lappend(moved, copy);
			MemoryContextSwitchTo(oldcxt);
		}
		/* the scan may go on after the removal of its current entry */
		hash_search(due_entries, &entry->lane, HASH_REMOVE, NULL);
	}
	deepest_level = level - 1;

	foreach(lc, moved)
	{
		DueEntry   *copy = lfirst(lc);

		copy->lane.nest_level = level - 1;
		merge_entry(&copy->lane, copy->role, copy->low, copy->high, copy->count);
	}
	last_entry = NULL;
	list_free_deep(moved);
}

static void
subxact_callback(SubXactEvent event, SubTransactionId subid,
				 SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_COMMIT_SUB || event == SUBXACT_EVENT_ABORT_SUB)
	{
		end_subxact(event == SUBXACT_EVENT_COMMIT_SUB);
		end_subxact_cancels(event == SUBXACT_EVENT_COMMIT_SUB);
		jq_batches_at_subxact_end(event == SUBXACT_EVENT_COMMIT_SUB);
	}
}

/* ---------------------------------------------------------------------
 * At commit
 * --------------------------------------------------------------------- */

/*
 * Wake sleeping workers of the role, at most so many; returns how many.  The
 * caller holds the lock exclusively, and sets the collected latches after it
 * has let go of it.
 */
static int64
collect_sleepers(Oid roleid, int64 wanted)
{
	int64		woken = 0;

	for (int i = 0; i < JqShared->nslots && woken < wanted; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_IDLE && slot->dboid == MyDatabaseId &&
			slot->roleid == roleid && !slot->leave)
		{
			/* so that the next one to look for a sleeper takes another */
			slot->state = JQ_SLOT_BUSY;
			slot->scan_lane = -1;
			latches[nlatches++] = slot->latch;
			woken++;
		}
	}
	return woken;
}

/*
 * Publish one note.  Returns whether the scheduler has to see to it.
 */
static bool
publish(const DueEntry *entry, JqDatabase *database, TimestampTz now)
{
	JqRole	   *role = jq_find_role(MyDatabaseId, entry->lane.roleid, true);
	int			lane = -1;

	if (role)
	{
		if (entry->role[0] != '\0') /* it may have been dropped meanwhile */
			strlcpy(role->name, entry->role, sizeof(role->name));
		lane = jq_lane_find(role, entry->lane.queue, entry->lane.priority, true);
	}
	if (lane < 0)
	{
		database->lanes_full = true;
		database->full_look = true;
		return true;
	}
	jq_lane_lower(&JqLanes[lane], lane, entry->low, entry->high);

	if (entry->low.at > now)
		return entry->low.at < database->wakes_at;
	if (collect_sleepers(entry->lane.roleid, entry->count) == entry->count)
		return false;
	return database->wants_calls || !jq_role_has_worker(role);
}

/*
 * Interrupt the running jobs that the transaction cancelled.  Of one that does
 * not run now the scheduler finds out what became of it.  It also sees to it
 * that a handler which does not heed the interrupt is ended.  The caller holds
 * the lock: so the worker cannot go on to another job, nor leave.
 */
static void
interrupt_jobs(JqDatabase *database, TimestampTz now)
{
	ListCell   *lc;

	foreach(lc, cancel_notes)
	{
		CancelNote *note = lfirst(lc);
		JqSlot	   *slot = jq_slot_of_job(note->job_id, note->stamp);

		if (slot)
			jq_slot_interrupt(slot, now);
		else
			database->cancels = true;
	}
}

/*
 * Let all workers and the scheduler look again at what is due, since pauses
 * have changed.  The caller holds the lock.
 */
static void
publish_pauses(JqDatabase *database)
{
	database->pause_changes++;
	database->held_due = 0;		/* those whose turn it is may be paused now */
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_IDLE && slot->dboid == MyDatabaseId)
		{
			slot->state = JQ_SLOT_BUSY;
			slot->scan_lane = -1;
			latches[nlatches++] = slot->latch;
		}
	}
}

/*
 * Ask the processes of this database to leave, each after what it is doing,
 * and forget why workers could not be started.  The caller holds the lock.
 */
static void
publish_restart(JqDatabase *database)
{
	database->restart = true;
	for (int i = 0; i < JQ_MAX_ROLES; i++)
	{
		JqRole	   *role = &JqShared->roles[i];

		if (role->in_use && role->dboid == MyDatabaseId)
		{
			role->refused_until = 0;
			role->refusals = 0;
		}
	}
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqSlot	   *slot = &JqSlots[i];

		if (slot->state == JQ_SLOT_FREE || slot->dboid != MyDatabaseId)
			continue;
		slot->leave = true;
		if (slot->latch)
			SetLatch(slot->latch);
	}
}

/*
 * Tell the scheduler of batches that may have come to their end.  Returns
 * whether it must be called: it is not when it will look at one already.  The
 * caller holds the lock.
 */
static bool
publish_batches(JqDatabase *database)
{
	bool		call = nbatches_noted > 0 && database->ntouched == 0;

	for (int i = 0; i < Min(nbatches_noted, JQ_MAX_TOUCHED); i++)
		jq_touch_batch(database, batches_noted[i]);
	if (nbatches_noted > JQ_MAX_TOUCHED)
		database->ntouched = JQ_MAX_TOUCHED + 1;
	return call;
}

static void
wake_at_commit(void)
{
	HASH_SEQ_STATUS status;
	DueEntry   *entry;
	JqDatabase *database;
	Latch	   *scheduler = NULL;
	Latch	   *launcher = NULL;
	TimestampTz now = GetCurrentTimestamp();

	nlatches = 0;
	LWLockAcquire(JqShared->lock, LW_EXCLUSIVE);

	if (MyJqSlot && MyJqSlot->job_settles)
		jq_slot_let_go();

	database = jq_find_database(MyDatabaseId, true);
	if (database)
	{
		bool		call = full_look_noted || pauses_noted || restart_noted ||
		cancel_notes != NIL;

		database->full_look |= full_look_noted;
		if (due_entries)
		{
			hash_seq_init(&status, due_entries);
			while ((entry = hash_seq_search(&status)) != NULL)
				call |= publish(entry, database, now);
		}
		if (nbatches_noted > 0)
			call |= publish_batches(database);
		if (cancelled_batches_noted)
			database->cancel_changes++;
		if (configuration_noted)
			database->config_changes++;
		if (held_noted < database->held_due)
		{
			database->held_due = held_noted;
			call |= held_noted < database->wakes_at;
		}
		if (pauses_noted)
			publish_pauses(database);
		interrupt_jobs(database, now);
		if (restart_noted)
			publish_restart(database);
		if (call)
			scheduler = database->scheduler_latch;
		if (launcher_noted)
			jq_reconsider_database(database);
	}
	if (launcher_noted)
		launcher = JqShared->launcher_latch;

	LWLockRelease(JqShared->lock);

	for (int i = 0; i < nlatches; i++)
		SetLatch(latches[i]);
	if (scheduler)
		SetLatch(scheduler);
	if (launcher)
		SetLatch(launcher);
}

static void
xact_callback(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			jq_write_batch_totals();
			jq_close_insertion();
			break;

		case XACT_EVENT_COMMIT:
			if (JqShared && anything_noted())
				wake_at_commit();
			forget_notes();
			jq_batches_at_xact_end(true);
			break;

		case XACT_EVENT_ABORT:
			jq_forget_insertion();
			forget_notes();
			jq_batches_at_xact_end(false);
			break;

		case XACT_EVENT_PREPARE:

			/*
			 * Whoever commits it knows nothing of these notes; the hook on
			 * COMMIT PREPARED asks for a full look.
			 */
			forget_notes();
			jq_batches_at_xact_end(false);
			break;

		default:
			break;
	}
}

/*
 * Register the callbacks; once in each process that loads the library.
 */
void
jq_wakeup_init(void)
{
	RegisterXactCallback(xact_callback, NULL);
	RegisterSubXactCallback(subxact_callback, NULL);
}
