/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  Shared memory: its size, its start, and the finding of entries in it.
 *
 * All of it is made by the postmaster from the library's settings, so it
 * exists only where jq is in shared_preload_libraries.  After a crash restart
 * it is made anew and empty; the scheduler's first look at the table fills it.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "jq.h"

JqSharedState *JqShared = NULL;
JqSlot	   *JqSlots = NULL;
JqLane	   *JqLanes = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

static Size
shared_size(void)
{
	Size		size = MAXALIGN(sizeof(JqSharedState));

	size = add_size(size, MAXALIGN(mul_size(jq_max_workers, sizeof(JqSlot))));
	size = add_size(size, MAXALIGN(mul_size(jq_max_lanes, sizeof(JqLane))));
	return size;
}

static void
request_shmem(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();

	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("jq", 1);
}

static void
startup_shmem(void)
{
	bool		found;
	char	   *base;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);

	base = ShmemInitStruct("jq", shared_size(), &found);
	JqShared = (JqSharedState *) base;
	base += MAXALIGN(sizeof(JqSharedState));
	JqSlots = (JqSlot *) base;
	base += MAXALIGN(jq_max_workers * sizeof(JqSlot));
	JqLanes = (JqLane *) base;

	if (!found)
	{
		MemSet(JqShared, 0, shared_size());
		JqShared->lock = &GetNamedLWLockTranche("jq")->lock;
		JqShared->nslots = jq_max_workers;
		JqShared->nlanes = jq_max_lanes;
		jq_journal_recover();
	}

	LWLockRelease(AddinShmemInitLock);
}

/*
 * Ask for the shared memory.  Called while shared_preload_libraries are
 * loaded.
 */
void
jq_shmem_init(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shmem;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = startup_shmem;
	jq_journal_init();
}

/*
 * The entry of a database; NULL if there is none and none is to be made or
 * there is no room.  The caller holds the lock, exclusively to create.
 */
JqDatabase *
jq_find_database(Oid dboid, bool create)
{
	JqDatabase *free_entry = NULL;

	Assert(LWLockHeldByMe(JqShared->lock));

	for (int i = 0; i < JQ_MAX_DATABASES; i++)
	{
		JqDatabase *database = &JqShared->databases[i];

		if (database->in_use && database->dboid == dboid)
			return database;
		if (!database->in_use && free_entry == NULL)
			free_entry = database;
	}
	if (!create || free_entry == NULL)
		return NULL;

	MemSet(free_entry, 0, sizeof(JqDatabase));
	free_entry->in_use = true;
	free_entry->dboid = dboid;
	free_entry->state = JQ_DATABASE_UNKNOWN;
	return free_entry;
}

/*
 * The entry of a role in a database; as jq_find_database().
 */
JqRole *
jq_find_role(Oid dboid, Oid roleid, bool create)
{
	JqRole	   *free_entry = NULL;

	Assert(LWLockHeldByMe(JqShared->lock));

	for (int i = 0; i < JQ_MAX_ROLES; i++)
	{
		JqRole	   *role = &JqShared->roles[i];

		if (role->in_use && role->dboid == dboid && role->roleid == roleid)
			return role;
		if (!role->in_use && free_entry == NULL)
			free_entry = role;
	}
	if (!create || free_entry == NULL)
		return NULL;

	MemSet(free_entry, 0, sizeof(JqRole));
	free_entry->in_use = true;
	free_entry->dboid = dboid;
	free_entry->roleid = roleid;
	free_entry->first_lane = -1;
	return free_entry;
}

static void
forget_role(JqRole *role)
{
	for (int n = role->first_lane; n >= 0; n = JqLanes[n].next)
		JqLanes[n].in_use = false;
	role->in_use = false;
}

/*
 * Forget a role that does not exist any more, unless a worker still serves it.
 * The caller holds the lock exclusively.
 */
void
jq_forget_role(JqRole *role)
{
	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));

	for (int i = 0; i < JqShared->nslots; i++)
	{
		if (JqSlots[i].state != JQ_SLOT_FREE &&
			JqSlots[i].dboid == role->dboid && JqSlots[i].roleid == role->roleid)
			return;
	}
	forget_role(role);
}

/*
 * Something has changed in the database: look at it again, and at once.  The
 * caller holds the lock exclusively, and calls the launcher.
 */
void
jq_reconsider_database(JqDatabase *database)
{
	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));

	if (database->state == JQ_DATABASE_ABSENT)
		database->state = JQ_DATABASE_UNKNOWN;
	database->failures = 0;
	database->start_after = 0;
}

/*
 * Whether a worker serves the role, or is being started for it.  The caller
 * holds the lock.
 */
bool
jq_role_has_worker(const JqRole *role)
{
	for (int i = 0; i < JqShared->nslots; i++)
	{
		if (JqSlots[i].state != JQ_SLOT_FREE &&
			JqSlots[i].dboid == role->dboid &&
			JqSlots[i].roleid == role->roleid && !JqSlots[i].leave)
			return true;
	}
	return false;
}

/*
 * Let the scheduler consider the batch, or all batches if there are too many
 * to name.  The caller holds the lock exclusively.
 */
void
jq_touch_batch(JqDatabase *database, int64 batch_id)
{
	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));

	for (int i = 0; i < Min(database->ntouched, JQ_MAX_TOUCHED); i++)
	{
		if (database->touched[i] == batch_id)
			return;
	}
	if (database->ntouched < JQ_MAX_TOUCHED)
		database->touched[database->ntouched] = batch_id;
	if (database->ntouched <= JQ_MAX_TOUCHED)
		database->ntouched++;
}

/*
 * Forget all that is remembered of a database that is gone, or has jq no
 * longer.  The caller holds the lock exclusively, and no process of jq works
 * there any more.
 */
void
jq_forget_database(JqDatabase *database)
{
	Oid			dboid = database->dboid;

	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));

	for (int i = 0; i < JQ_MAX_ROLES; i++)
	{
		JqRole	   *role = &JqShared->roles[i];

		if (role->in_use && role->dboid == dboid)
			forget_role(role);
	}
	jq_journal_forget_database(dboid);
	database->full_look = false;
	database->lanes_full = false;
	database->no_slot = false;
	database->ntouched = 0;
	database->held_due = DT_NOEND;
}
