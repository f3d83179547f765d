/*-------------------------------------------------------------------------
 *
 * lane.c
 *	  The remembered search positions.
 *
 * A search that starts at the left end of an index walks over the entries of
 * all jobs that are done and cannot be removed yet, because some snapshot, or
 * a commit that is not flushed, keeps them.  So each lane remembers the lowest
 * key at which a live job can be, and a search starts there.
 *
 * The position must never pass a live job that nobody holds.  Three rules keep
 * this true:
 *
 * 1. Whatever makes a key live lowers the lane after it has become visible to
 *	  new snapshots: a commit does so in its callback (wakeup.c), a worker that
 *	  gives up a job when it lets go of its slot.
 * 2. A search says which lane it looks at before it takes its snapshot.  Every
 *	  lowering from then on is noted in its slot as well (pend), and the search
 *	  raises the position no higher than that.  A key that became live before
 *	  the search announced itself is in its snapshot.
 * 3. A search passes a visible row only if a live slot holds it.  A row that
 *	  is locked by anybody else pins the position.
 *
 * A transaction that was open for long commits keys far below the position.
 * Lowering the position to them would send the next search back through all
 * that was done meanwhile, so such keys are kept as a range of their own.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/timestamp.h"

#include "jq.h"

#define KEY_MIN(a, b) (JQ_KEY_LESS(a, b) ? (a) : (b))
#define KEY_MAX(a, b) (JQ_KEY_LESS(a, b) ? (b) : (a))
#define KEY_EQUAL(a, b) ((a).at == (b).at && (a).id == (b).id)

static void remove_late(JqLane *lane, int i);

/*
 * Make a lane of which nothing is known yet.
 */
void
jq_lane_init(JqLane *lane, const char *queue, int32 priority)
{
	MemSet(lane, 0, sizeof(JqLane));
	lane->next = -1;
	lane->in_use = true;
	lane->priority = priority;
	strlcpy(lane->queue, queue, sizeof(lane->queue));
	lane->due = DT_NOEND;
	lane->low.at = DT_NOEND;
}

/*
 * Number of the lane of that queue and priority in shared memory; -1 if there
 * is none, or no room for it.  The caller holds the lock, exclusively to
 * create.
 */
int
jq_lane_find(JqRole *role, const char *queue, int32 priority, bool create)
{
	static int	hint = 0;

	Assert(LWLockHeldByMe(JqShared->lock));

	for (int n = role->first_lane; n >= 0; n = JqLanes[n].next)
	{
		if (JqLanes[n].priority == priority &&
			strcmp(JqLanes[n].queue, queue) == 0)
			return n;
	}
	if (!create)
		return -1;

	for (int i = 0; i < JqShared->nlanes; i++)
	{
		int			n = (hint + i) % JqShared->nlanes;

		if (JqLanes[n].in_use)
			continue;
		jq_lane_init(&JqLanes[n], queue, priority);
		JqLanes[n].next = role->first_lane;
		role->first_lane = n;
		hint = n + 1;
		return n;
	}
	return -1;
}

/*
 * Note that jobs with keys from low to high have become live.  The caller
 * holds the lock exclusively, unless the lane is private (laneno < 0).
 */
void
jq_lane_lower(JqLane *lane, int laneno, JqKey low, JqKey high)
{
	int			i;

	if (laneno >= 0)
	{
		Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));

		for (i = 0; i < JqShared->nslots; i++)
		{
			if (JqSlots[i].scan_lane == laneno &&
				JqSlots[i].state == JQ_SLOT_BUSY)
				JqSlots[i].pend = KEY_MIN(JqSlots[i].pend, low);
		}
	}

	lane->due = Min(lane->due, low.at);

	if (lane->low.at == DT_NOEND)
	{
		/* the first key of the lane; what comes before it may still follow */
		JqKey		now = {GetCurrentTimestamp(), 0};

		lane->low = KEY_MIN(low, now);
		return;
	}
	if (!JQ_KEY_LESS(low, lane->low))
		return;
	if (!JQ_KEY_LESS(high, lane->low))
	{
		lane->low = low;
		while (lane->nlate > 0 &&
			   !JQ_KEY_LESS(lane->late[lane->nlate - 1].low, low))
			lane->nlate--;
		return;
	}
	if (lane->nlate == JQ_LATE_RANGES)
	{
		/* no room: join it with the range that it is nearest to the end of */
		for (i = JQ_LATE_RANGES - 1; i > 0; i--)
		{
			if (!JQ_KEY_LESS(low, lane->late[i].low))
				break;
		}
		lane->late[i].low = KEY_MIN(lane->late[i].low, low);
		lane->late[i].high = KEY_MAX(lane->late[i].high, high);
		return;
	}
	for (i = lane->nlate; i > 0; i--)
	{
		if (!JQ_KEY_LESS(low, lane->late[i - 1].low))
			break;
		lane->late[i] = lane->late[i - 1];
	}
	lane->late[i].low = low;
	lane->late[i].high = high;
	lane->nlate++;
}

/*
 * Note what a search found: in the range it went over, as it was when the
 * search began, nothing live is below "to", or in all of it if exhausted.
 * "pend" is the least key that went live since.  A range whose high end is
 * DT_NOEND is the main one.  The caller holds the lock exclusively, unless
 * the lane is private.
 */
void
jq_lane_advance(JqLane *lane, const JqRange *range, JqKey to, JqKey pend,
				bool exhausted)
{
	if (range->high.at == DT_NOEND)
	{
		to = KEY_MIN(to, pend);
		lane->low = KEY_MAX(lane->low, to);
		return;
	}

	for (int i = 0; i < lane->nlate; i++)
	{
		JqRange    *late = &lane->late[i];

		/* changed by somebody else: what he knows is newer */
		if (!KEY_EQUAL(late->low, range->low) ||
			!KEY_EQUAL(late->high, range->high))
			continue;

		/* a key that came meanwhile has a range of its own, or is in this one */
		if (exhausted && JQ_KEY_LESS(late->high, pend))
			remove_late(lane, i);
		else
			late->low = KEY_MAX(late->low, KEY_MIN(to, pend));
		return;
	}
}

static void
remove_late(JqLane *lane, int i)
{
	lane->nlate--;
	memmove(&lane->late[i], &lane->late[i + 1],
			(lane->nlate - i) * sizeof(JqRange));
}

/*
 * Free the lanes of this database in which nothing waits.  The next dispatch
 * makes them again.  The caller holds the lock exclusively.
 */
void
jq_lanes_recycle(void)
{
	Assert(LWLockHeldByMeInMode(JqShared->lock, LW_EXCLUSIVE));

	for (int i = 0; i < JQ_MAX_ROLES; i++)
	{
		JqRole	   *role = &JqShared->roles[i];
		int		   *link = &role->first_lane;

		if (!role->in_use || role->dboid != MyDatabaseId)
			continue;
		while (*link >= 0)
		{
			JqLane	   *lane = &JqLanes[*link];
			bool		busy = lane->due != DT_NOEND || lane->nlate > 0;

			for (int s = 0; !busy && s < JqShared->nslots; s++)
			{
				JqSlot	   *slot = &JqSlots[s];

				busy = slot->state == JQ_SLOT_BUSY &&
					(slot->scan_lane == *link ||
					 (slot->job_id != 0 && slot->job_lane == *link));
			}
			if (busy)
				link = &lane->next;
			else
			{
				int			freed = *link;

				*link = lane->next;
				JqLanes[freed].in_use = false;
			}
		}
	}
}
