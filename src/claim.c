/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  Finds the next due job and claims it.
 *
 * The claim is a row lock, taken without waiting, so that the death of the
 * claimer frees the job at once.  Workers also say in their slots what they
 * hold, before they lock it: others pass such a row without touching it, and
 * the search position may pass it too.
 *
 * Of several lanes the one with the least bound is searched first, where the
 * bound of a lane is the time before which it has no live job.  If the job
 * found there is due later than the bound of another lane, the lane's bound is
 * raised to it and the other one is searched.  So the order is exact, though
 * only one lane is looked at as a rule.
 *
 * An index scan reads a page of entries to find one, so the search keeps the
 * rows that it met behind the one it claimed, and tries those next.  That is
 * the same search going on: its lane stays announced, and a key that became
 * live before the next row of it (pend) ends it.
 *
 * The same code searches the lanes in shared memory, and private ones of a
 * session that drains a queue (JqLaneSet).
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relscan.h"
#include "access/skey.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* A row that somebody else than a worker holds is looked at again after: */
#define BLOCKED_RECHECK_US	INT64CONST(200000)
/* One that is leased to a session of this server, since that may end: */
#define HOLDER_RECHECK_US	USECS_PER_SEC

/* What a search in one lane works with. */
typedef struct Probe
{
	JqLaneSet  *set;
	int			laneno;
	int			nranges;
	JqRange		ranges[JQ_LATE_RANGES + 1]; /* as they were, the main one last */
	TimestampTz rival;			/* bound of the next best lane */
	TimestampTz now;			/* taken before the snapshot */
	bool		goes_on;		/* the last search in the lane goes on */
	int			nheld;
	int64	   *held;			/* jobs held by other workers */

	Relation	rel;
	Relation	index;
	TupleTableSlot *row;

	/* found on the way */
	TimestampTz first_later;	/* first job that is not due */
	TimestampTz recheck;		/* when to look again at a blocked row */
	JqKey		pins[JQ_LATE_RANGES + 1];	/* first blocked row of a range */
	bool		range_ended;	/* a row was beyond it, or not due */
} Probe;

typedef enum ProbeResult
{
	PROBE_CLAIMED,
	PROBE_EMPTY,				/* nothing due in the lane */
	PROBE_AGAIN					/* another lane comes first, or a new search */
} ProbeResult;

static const JqKey NO_KEY = {DT_NOEND, PG_INT64_MAX};

static bool pick_lane(Probe *probe, List *queues);
static ProbeResult search_lane(Probe *probe, const char *role, JqJob *job);
static ProbeResult search_ahead(Probe *probe, const char *role, JqJob *job);
static ProbeResult search_range(Probe *probe, IndexScanDesc scan, int range,
								JqJob *job);
static ProbeResult try_row(Probe *probe, int range, JqJob *job);
static ProbeResult claim_row(Probe *probe, int range, JqKey key, JqJob *job);
static void finish_empty(Probe *probe);

/* ---------------------------------------------------------------------
 * Lanes
 * --------------------------------------------------------------------- */

static void
lock_lanes(const JqLaneSet *set, LWLockMode mode)
{
	if (set->shared)
		LWLockAcquire(JqShared->lock, mode);
}

static void
unlock_lanes(const JqLaneSet *set)
{
	if (set->shared)
		LWLockRelease(JqShared->lock);
}

static int
first_lane(const JqLaneSet *set)
{
	return set->shared ? set->role->first_lane : set->first_lane;
}

/*
 * Position of a queue in the list that is served; -1: it is not served.
 */
static int
queue_rank(List *queues, const char *queue)
{
	ListCell   *lc;

	if (queues == NIL)
		return 0;
	foreach(lc, queues)
	{
		if (strcmp(lfirst(lc), queue) == 0)
			return foreach_current_index(lc);
	}
	return -1;
}

/*
 * The earliest time at which a served lane of the set may have a due job that
 * is not held back by a pause; DT_NOEND: none is known.  The caller holds the
 * lock, and knows the pauses (jq_load_pauses).
 */
TimestampTz
jq_lanes_due(const JqLaneSet *set, List *queues)
{
	TimestampTz due = DT_NOEND;

	for (int n = first_lane(set); n >= 0; n = set->lanes[n].next)
	{
		const JqLane *lane = &set->lanes[n];

		if (lane->due < due && queue_rank(queues, lane->queue) >= 0)
			due = Min(due, Max(lane->due, jq_paused_until(lane->queue)));
	}
	return due;
}

/*
 * Choose the lane to search: by rank of its queue, priority, and bound; and
 * announce the search.  Returns false if no lane has anything due.
 */
static bool
pick_lane(Probe *probe, List *queues)
{
	JqLaneSet  *set = probe->set;
	JqLane	   *best = NULL;
	int			best_rank = 0;

	probe->now = GetCurrentTimestamp();
	probe->rival = DT_NOEND;
	lock_lanes(set, LW_SHARED);

	for (int n = first_lane(set); n >= 0; n = set->lanes[n].next)
	{
		JqLane	   *lane = &set->lanes[n];
		int			rank;

		if (lane->due > probe->now)
			continue;
		rank = queue_rank(queues, lane->queue);
		if (rank < 0 || jq_paused_until(lane->queue) > probe->now)
			continue;

		if (best == NULL || rank < best_rank ||
			(rank == best_rank &&
			 (lane->priority < best->priority ||
			  (lane->priority == best->priority && lane->due < best->due))))
		{
			probe->rival = (best && rank == best_rank &&
							lane->priority == best->priority) ?
				best->due : DT_NOEND;
			best = lane;
			best_rank = rank;
			probe->laneno = n;
		}
		else if (rank == best_rank && lane->priority == best->priority)
			probe->rival = Min(probe->rival, lane->due);
	}

	if (best)
	{
		probe->nranges = best->nlate + 1;
		memcpy(probe->ranges, best->late, best->nlate * sizeof(JqRange));
		probe->ranges[best->nlate].low = best->low;
		probe->ranges[best->nlate].high = NO_KEY;

		probe->goes_on = set->ahead.next < set->ahead.count &&
			set->ahead.laneno == probe->laneno && best->nlate == 0 &&
			(!set->shared || MyJqSlot->scan_lane == probe->laneno);
		probe->nheld = 0;
		if (set->shared)
		{
			for (int i = 0; i < JqShared->nslots; i++)
			{
				JqSlot	   *slot = &JqSlots[i];

				if (slot->state == JQ_SLOT_BUSY && slot->job_id != 0 &&
					slot->dboid == MyDatabaseId && slot != MyJqSlot)
					probe->held[probe->nheld++] = slot->job_id;
			}

			/* only we write these, but for the lowering by others */
			if (!probe->goes_on)
			{
				MyJqSlot->scan_lane = probe->laneno;
				MyJqSlot->pend = NO_KEY;
			}
		}
	}

	unlock_lanes(set);
	return best != NULL;
}

/* ---------------------------------------------------------------------
 * Search
 * --------------------------------------------------------------------- */

/*
 * Claim the next due job of the set's role, in the queues given (NIL: all),
 * and fill in *job, in the current memory context.  Returns false if nothing
 * is due.
 *
 * The caller is in a transaction without an active snapshot, and knows the
 * pauses (jq_load_pauses); on return with a job there is a snapshot, as of the
 * claim.  A worker's slot names the job then.
 */
bool
jq_claim_next(JqLaneSet *set, List *queues, JqJob *job)
{
	Probe		probe = {.set = set};
	ProbeResult result = PROBE_EMPTY;
	char	   *role = GetUserNameFromId(set->roleid, false);

	if (set->shared)
		probe.held = palloc(JqShared->nslots * sizeof(int64));

	while (result != PROBE_CLAIMED && pick_lane(&probe, queues))
	{
		PushActiveSnapshot(GetTransactionSnapshot());
		if (probe.goes_on)
			result = search_ahead(&probe, role, job);
		else
			result = search_lane(&probe, role, job);
		if (result != PROBE_CLAIMED)
			PopActiveSnapshot();
	}
	return result == PROBE_CLAIMED;
}

/*
 * Whether the row is of the lane that is searched.  The place of one that was
 * met earlier may have been given to another since.
 */
static bool
is_of_lane(const Probe *probe, const char *role)
{
	const JqLane *lane = &probe->set->lanes[probe->laneno];
	TupleTableSlot *row = probe->row;
	text	   *role_value;
	text	   *queue_value;

	slot_getsomeattrs(row, JOBS_QUEUE);
	role_value = DatumGetTextPP(row->tts_values[JOBS_ROLE - 1]);
	queue_value = DatumGetTextPP(row->tts_values[JOBS_QUEUE - 1]);
	return DatumGetObjectId(row->tts_values[JOBS_ORIGIN - 1]) == MyDatabaseId &&
		DatumGetInt32(row->tts_values[JOBS_PRIORITY - 1]) == lane->priority &&
		VARSIZE_ANY_EXHDR(role_value) == strlen(role) &&
		memcmp(VARDATA_ANY(role_value), role, strlen(role)) == 0 &&
		VARSIZE_ANY_EXHDR(queue_value) == strlen(lane->queue) &&
		memcmp(VARDATA_ANY(queue_value), lane->queue, strlen(lane->queue)) == 0;
}

/*
 * Go on with the last search in the lane, over the rows that it met.
 *
 * A row that has come to the place of one of them since then is of another
 * lane, or its commit has lowered this one, so that it is not below pend.
 */
static ProbeResult
search_ahead(Probe *probe, const char *role, JqJob *job)
{
	JqAhead    *ahead = &probe->set->ahead;
	ProbeResult result = PROBE_EMPTY;
	IndexFetchTableData *fetch;

	Assert(probe->nranges == 1);
	probe->pins[0] = ahead->pin;
	probe->first_later = DT_NOEND;
	probe->recheck = DT_NOEND;
	probe->rel = table_open(jq_catalog()->jobs, RowExclusiveLock);
	probe->row = table_slot_create(probe->rel, NULL);
	fetch = table_index_fetch_begin(probe->rel);

	/* now that we have the lock: if the table was rewritten, all has moved */
	if (ahead->epoch != jq_catalog_epoch())
		ahead->count = 0;

	while (result == PROBE_EMPTY && ahead->next < ahead->count)
	{
		ItemPointerData tid = ahead->tids[ahead->next++];
		bool		call_again = false;

		if (table_index_fetch_tuple(fetch, &tid, GetActiveSnapshot(),
									probe->row, &call_again, NULL) &&
			is_of_lane(probe, role))
			result = try_row(probe, 0, job);
	}
	ahead->pin = probe->pins[0];

	table_index_fetch_end(fetch);
	ExecDropSingleTupleTableSlot(probe->row);
	table_close(probe->rel, NoLock);

	if (result != PROBE_CLAIMED)
		ahead->count = 0;
	return result == PROBE_EMPTY ? PROBE_AGAIN : result;
}

/*
 * Keep the rows behind the one that was just claimed for the next search.
 */
static void
look_ahead(Probe *probe, IndexScanDesc scan, int range)
{
	JqAhead    *ahead = &probe->set->ahead;
	ItemPointer tid;

	if (range < probe->nranges - 1)
		return;
	ahead->laneno = probe->laneno;
	ahead->epoch = jq_catalog_epoch();
	ahead->pin = probe->pins[range];
	while (ahead->count < JQ_MAX_AHEAD &&
		   (tid = index_getnext_tid(scan, ForwardScanDirection)) != NULL)
		ahead->tids[ahead->count++] = *tid;
}

/*
 * Search the ranges of the picked lane in turn.
 */
static ProbeResult
search_lane(Probe *probe, const char *role, JqJob *job)
{
	const JqCatalog *catalog = jq_catalog();
	JqLane	   *lane = &probe->set->lanes[probe->laneno];
	ProbeResult result = PROBE_EMPTY;
	ScanKeyData keys[5];
	ScanKeyData bound[2];
	IndexScanDesc scan;

	probe->first_later = DT_NOEND;
	probe->recheck = DT_NOEND;
	probe->set->ahead.next = probe->set->ahead.count = 0;
	probe->rel = table_open(catalog->jobs, RowExclusiveLock);
	probe->index = index_open(catalog->jobs_due, AccessShareLock);
	probe->row = table_slot_create(probe->rel, NULL);

	ScanKeyInit(&keys[0], DUE_ORIGIN, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(MyDatabaseId));
	ScanKeyInit(&keys[1], DUE_ROLE, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(role));
	ScanKeyInit(&keys[2], DUE_QUEUE, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(lane->queue));
	ScanKeyInit(&keys[3], DUE_PRIORITY, BTEqualStrategyNumber, F_INT4EQ,
				Int32GetDatum(lane->priority));

	/* (available_at, id) >= (low.at, low.id), as a row comparison */
	ScanKeyEntryInitialize(&bound[0], SK_ROW_MEMBER, DUE_AVAILABLE_AT,
						   BTGreaterEqualStrategyNumber, InvalidOid,
						   InvalidOid, F_TIMESTAMPTZ_CMP, (Datum) 0);
	ScanKeyEntryInitialize(&bound[1], SK_ROW_MEMBER | SK_ROW_END, DUE_ID,
						   BTGreaterEqualStrategyNumber, InvalidOid,
						   InvalidOid, F_BTINT8CMP, (Datum) 0);
	MemSet(&keys[4], 0, sizeof(ScanKeyData));
	keys[4].sk_flags = SK_ROW_HEADER;
	keys[4].sk_attno = DUE_AVAILABLE_AT;
	keys[4].sk_strategy = BTGreaterEqualStrategyNumber;
	keys[4].sk_argument = PointerGetDatum(bound);

	scan = index_beginscan_compat(probe->rel, probe->index,
								  GetActiveSnapshot(), lengthof(keys));
	for (int i = 0; i < probe->nranges && result == PROBE_EMPTY; i++)
	{
		probe->pins[i] = NO_KEY;
		if (probe->ranges[i].low.at > probe->now)
		{
			probe->first_later = Min(probe->first_later,
									 probe->ranges[i].low.at);
			continue;
		}
		bound[0].sk_argument = TimestampTzGetDatum(probe->ranges[i].low.at);
		bound[1].sk_argument = Int64GetDatum(probe->ranges[i].low.id);
		index_rescan(scan, keys, lengthof(keys), NULL, 0);
		result = search_range(probe, scan, i, job);
	}
	index_endscan(scan);

	ExecDropSingleTupleTableSlot(probe->row);
	index_close(probe->index, NoLock);
	table_close(probe->rel, NoLock);

	if (result == PROBE_EMPTY)
		finish_empty(probe);
	return result;
}

/*
 * Somebody who is no worker holds the row: do not pass it, and come again.
 */
static void
note_blocked(Probe *probe, int range, JqKey key, TimestampTz recheck)
{
	probe->recheck = Min(probe->recheck, recheck);
	if (JQ_KEY_LESS(key, probe->pins[range]))
		probe->pins[range] = key;
}

static bool
is_held(const Probe *probe, int64 id)
{
	for (int i = 0; i < probe->nheld; i++)
	{
		if (probe->held[i] == id)
			return true;
	}
	return false;
}

/*
 * Search one range of the lane.  PROBE_EMPTY means that it holds nothing due
 * that could be claimed.
 */
static ProbeResult
search_range(Probe *probe, IndexScanDesc scan, int range, JqJob *job)
{
	ProbeResult result = PROBE_EMPTY;

	probe->range_ended = false;
	while (result == PROBE_EMPTY && !probe->range_ended &&
		   index_getnext_slot(scan, ForwardScanDirection, probe->row))
		result = try_row(probe, range, job);
	if (result == PROBE_CLAIMED)
		look_ahead(probe, scan, range);
	return result;
}

/*
 * Whether the row is held under a lease; *recheck is when to look again.  The
 * lease of a session of this server ends with the session.
 */
static bool
is_leased(Probe *probe, TimestampTz *recheck)
{
	TupleTableSlot *row = probe->row;
	bool		isnull;
	Datum		until = slot_getattr(row, JOBS_LEASE_UNTIL, &isnull);
	Datum		pid;

	if (isnull || DatumGetTimestampTz(until) <= probe->now)
		return false;
	*recheck = DatumGetTimestampTz(until);
	pid = slot_getattr(row, JOBS_HOLDER_PID, &isnull);
	if (isnull)
		return true;
	*recheck = Min(*recheck, probe->now + HOLDER_RECHECK_US);
	return jq_holder_lives(DatumGetInt32(pid),
						   DatumGetTimestampTz(slot_getattr(row, JOBS_HOLDER_STARTED, &isnull)));
}

/*
 * Claim the visible row in probe->row, unless it is not due, not free, or not
 * the next one.  PROBE_EMPTY means to go on with the next row, if there is
 * one that can be due.
 */
static ProbeResult
try_row(Probe *probe, int range, JqJob *job)
{
	TupleTableSlot *row = probe->row;
	TimestampTz recheck;
	bool		isnull;
	JqKey		key;

	key.at = DatumGetTimestampTz(slot_getattr(row, JOBS_AVAILABLE_AT, &isnull));
	key.id = DatumGetInt64(slot_getattr(row, JOBS_ID, &isnull));

	if (JQ_KEY_LESS(probe->ranges[range].high, key))
	{
		probe->range_ended = true;
		return PROBE_EMPTY;
	}
	if (key.at > probe->now)
	{
		probe->first_later = Min(probe->first_later, key.at);
		probe->range_ended = true;
		return probe->goes_on ? PROBE_AGAIN : PROBE_EMPTY;
	}
	if (is_held(probe, key.id))
		return PROBE_EMPTY;

	if (is_leased(probe, &recheck))
	{
		note_blocked(probe, range, key, recheck);
		return PROBE_EMPTY;
	}
	if (key.at > probe->rival)
	{
		lock_lanes(probe->set, LW_EXCLUSIVE);
		probe->set->lanes[probe->laneno].due =
			probe->set->shared ? Min(key.at, MyJqSlot->pend.at) : key.at;
		unlock_lanes(probe->set);
		return PROBE_AGAIN;
	}
	return claim_row(probe, range, key, job);
}

/*
 * Say in our slot that we hold the job, and note how far the search has come,
 * in all ranges up to this one.  PROBE_EMPTY means that another worker was
 * first, or that the job must wait for another suspect of a crash; PROBE_AGAIN
 * that another job comes first.
 */
static ProbeResult
announce_claim(Probe *probe, int range, JqKey key, int64 stamp)
{
	JqLaneSet  *set = probe->set;
	JqLane	   *lane = &set->lanes[probe->laneno];
	JqKey		pend = set->shared ? MyJqSlot->pend : NO_KEY;

	if (set->shared)
	{
		bool		suspect = JqJournal->nsuspects > 0 &&
		jq_is_suspect(MyDatabaseId, key.id, stamp);

		if (suspect && jq_suspect_runs())
		{
			note_blocked(probe, range, key, probe->now + BLOCKED_RECHECK_US);
			return PROBE_EMPTY;
		}
		for (int i = 0; i < JqShared->nslots; i++)
		{
			JqSlot	   *slot = &JqSlots[i];

			if (slot->job_id == key.id && slot->dboid == MyDatabaseId &&
				slot->state == JQ_SLOT_BUSY && slot != MyJqSlot)
				return PROBE_EMPTY;
		}
		if (probe->goes_on && !JQ_KEY_LESS(key, pend))
			return PROBE_AGAIN;
		MyJqSlot->job_id = key.id;
		MyJqSlot->job_lane = probe->laneno;
		MyJqSlot->job_key = key;
		MyJqSlot->suspect = suspect;
	}

	for (int i = 0; i <= range; i++)
	{
		JqKey		to = {key.at, key.id + 1};
		bool		exhausted = i < range && probe->pins[i].at == DT_NOEND;

		if (i < range)
			to = probe->ranges[i].high;
		if (JQ_KEY_LESS(probe->pins[i], to))
			to = probe->pins[i];
		jq_lane_advance(lane, &probe->ranges[i], to, pend, exhausted);
	}
	if (lane->due != DT_NOEND)
	{
		TimestampTz bound = lane->nlate > 0 ? lane->late[0].low.at : lane->low.at;

		bound = Min(bound, pend.at);
		lane->due = Max(lane->due, Min(bound, lane->low.at));
	}
	return PROBE_CLAIMED;
}

/*
 * Take back what announce_claim() said: the job could not be locked.
 */
static void
withdraw_claim(Probe *probe, JqKey key, bool live)
{
	JqLane	   *lane = &probe->set->lanes[probe->laneno];

	lock_lanes(probe->set, LW_EXCLUSIVE);
	if (probe->set->shared)
	{
		MyJqSlot->job_id = 0;
		MyJqSlot->suspect = false;
	}
	if (live)
		jq_lane_lower(lane, probe->set->shared ? probe->laneno : -1, key, key);
	unlock_lanes(probe->set);
}

/*
 * Claim the row in probe->row.
 */
static ProbeResult
claim_row(Probe *probe, int range, JqKey key, JqJob *job)
{
	TM_FailureData tmfd;
	TupleTableSlot *locked;
	ItemPointerData tid = probe->row->tts_tid;
	TM_Result	locking;
	ProbeResult result;
	bool		isnull;
	int64		stamp = DatumGetInt64(slot_getattr(probe->row, JOBS_STAMP, &isnull));

	lock_lanes(probe->set, LW_EXCLUSIVE);
	result = announce_claim(probe, range, key, stamp);
	unlock_lanes(probe->set);
	if (result != PROBE_CLAIMED)
		return result;

	locked = table_slot_create(probe->rel, NULL);
	locking = table_tuple_lock(probe->rel, &tid, GetActiveSnapshot(), locked,
							   GetCurrentCommandId(false), LockTupleExclusive,
							   LockWaitSkip, 0, &tmfd);
	if (locking == TM_Ok)
		jq_read_job(locked, job);
	ExecDropSingleTupleTableSlot(locked);
	if (locking == TM_Ok)
		return PROBE_CLAIMED;

	/* if it was only just finished, there is nothing to come back for */
	withdraw_claim(probe, key, locking == TM_WouldBlock);
	if (locking == TM_WouldBlock)
		note_blocked(probe, range, key, probe->now + BLOCKED_RECHECK_US);
	return PROBE_EMPTY;
}

/*
 * Nothing in the lane is due: note when it will be, and that all up to now
 * has been seen.
 */
static void
finish_empty(Probe *probe)
{
	JqLaneSet  *set = probe->set;
	JqLane	   *lane = &set->lanes[probe->laneno];
	JqKey		pend;

	lock_lanes(set, LW_EXCLUSIVE);
	pend = set->shared ? MyJqSlot->pend : NO_KEY;
	for (int i = 0; i < probe->nranges; i++)
	{
		bool		main = i == probe->nranges - 1;
		bool		pinned = probe->pins[i].at != DT_NOEND;
		JqKey		to = probe->ranges[i].high;

		if (main)
		{
			to.at = probe->now;
			to.id = 0;
		}
		if (pinned && JQ_KEY_LESS(probe->pins[i], to))
			to = probe->pins[i];
		jq_lane_advance(lane, &probe->ranges[i], to, pend, !pinned);
	}
	lane->due = Min(Min(probe->first_later, probe->recheck), pend.at);
	if (set->shared)
		MyJqSlot->scan_lane = -1;
	unlock_lanes(set);
}

/*
 * The lease in the row, if there is one.  The attempt that it is for is counted
 * in the row already, but not ended: to us it is the attempt at hand.
 */
static void
read_lease(TupleTableSlot *row, JqJob *job)
{
	Datum	   *values = row->tts_values;
	bool	   *nulls = row->tts_isnull;

	job->token = 0;
	job->pid = 0;
	if (nulls[JOBS_TOKEN - 1])
		return;
	job->token = DatumGetInt64(values[JOBS_TOKEN - 1]);
	job->attempts = Max(job->attempts - 1, 0);
	job->pid = nulls[JOBS_HOLDER_PID - 1] ? 0 :
		DatumGetInt32(values[JOBS_HOLDER_PID - 1]);
	job->started_at = DatumGetTimestampTz(values[JOBS_RESERVED_AT - 1]);
}

/*
 * Copy a row of jq.jobs, so that it can be used when the row is gone.
 */
void
jq_read_job(TupleTableSlot *row, JqJob *job)
{
	Datum	   *values = row->tts_values;

	slot_getallattrs(row);
	job->tid = row->tts_tid;
	job->id = DatumGetInt64(values[JOBS_ID - 1]);
	job->stamp = DatumGetInt64(values[JOBS_STAMP - 1]);
	job->available_at = DatumGetTimestampTz(values[JOBS_AVAILABLE_AT - 1]);
	job->created_at = DatumGetTimestampTz(values[JOBS_CREATED_AT - 1]);
	job->priority = DatumGetInt32(values[JOBS_PRIORITY - 1]);
	job->attempts = DatumGetInt32(values[JOBS_ATTEMPTS - 1]);
	job->max_attempts = DatumGetInt32(values[JOBS_MAX_ATTEMPTS - 1]);
	job->role = TextDatumGetCString(values[JOBS_ROLE - 1]);
	job->queue = TextDatumGetCString(values[JOBS_QUEUE - 1]);
	job->name = TextDatumGetCString(values[JOBS_NAME - 1]);
	job->exceptions = DatumGetInt32(values[JOBS_EXCEPTIONS - 1]);
	job->counts_from = row->tts_isnull[JOBS_COUNTS_FROM - 1] ? job->created_at :
		DatumGetTimestampTz(values[JOBS_COUNTS_FROM - 1]);
	job->payload = jq_copy_jsonb(row, JOBS_PAYLOAD);
	job->meta = jq_copy_jsonb(row, JOBS_META);
	job->failure = jq_copy_jsonb(row, JOBS_FAILURE);
	job->chain_id = row->tts_isnull[JOBS_CHAIN_ID - 1] ? 0 :
		DatumGetInt64(values[JOBS_CHAIN_ID - 1]);
	job->chain = jq_copy_jsonb(row, JOBS_CHAIN);
	job->previous = jq_copy_jsonb(row, JOBS_PREVIOUS);
	job->batch_id = row->tts_isnull[JOBS_BATCH_ID - 1] ? 0 :
		DatumGetInt64(values[JOBS_BATCH_ID - 1]);
	job->callback_of = row->tts_isnull[JOBS_CALLBACK_OF - 1] ? 0 :
		DatumGetInt64(values[JOBS_CALLBACK_OF - 1]);
	if (!row->tts_isnull[JOBS_UNIQUE_KEY - 1])
	{
		job->unique_key = TextDatumGetCString(values[JOBS_UNIQUE_KEY - 1]);
		job->unique_until = jq_parse_unique_until(values[JOBS_UNIQUE_UNTIL - 1]);
		if (!row->tts_isnull[JOBS_UNIQUE_FOR - 1])
			job->unique_for = *DatumGetIntervalP(values[JOBS_UNIQUE_FOR - 1]);
	}
	if (!row->tts_isnull[JOBS_GROUP_KEY - 1])
		job->group_key = TextDatumGetCString(values[JOBS_GROUP_KEY - 1]);
	job->last_error = row->tts_isnull[JOBS_LAST_ERROR - 1] ? NULL :
		TextDatumGetCString(values[JOBS_LAST_ERROR - 1]);
	read_lease(row, job);
}

/* ---------------------------------------------------------------------
 * A look at the whole table
 * --------------------------------------------------------------------- */

/*
 * All lanes that have rows, each with its first row.  The recursion steps
 * from lane to lane through the index, past the jobs in them.  The first rows
 * are those that any snapshot sees as live, held or not.
 */
static const char *const lanes_query =
"WITH RECURSIVE lanes AS ("
" (SELECT j.role, j.queue, j.priority FROM jq.jobs AS j WHERE j.origin = $1"
"  AND ($2 IS NULL OR j.role = $2)"
"  ORDER BY j.role, j.queue, j.priority LIMIT 1)"
" UNION ALL"
" SELECT n.role, n.queue, n.priority FROM lanes AS l CROSS JOIN LATERAL"
" (SELECT j.role, j.queue, j.priority FROM jq.jobs AS j WHERE j.origin = $1"
"  AND ($2 IS NULL OR j.role = $2)"
"  AND (j.role, j.queue, j.priority) > (l.role, l.queue, l.priority)"
"  ORDER BY j.role, j.queue, j.priority LIMIT 1) AS n)"
" SELECT l.role, l.queue, l.priority, f.available_at, f.id"
" FROM lanes AS l CROSS JOIN LATERAL"
" (SELECT j.available_at, j.id FROM jq.jobs AS j WHERE j.origin = $1"
"  AND j.role = l.role AND j.queue = l.queue AND j.priority = l.priority"
"  ORDER BY j.available_at, j.id LIMIT 1) AS f";

/*
 * Call the function for each lane that has rows, of one role (NULL: of all).
 * The caller is in a transaction.
 */
void
jq_scan_lanes(const char *role, JqLaneCallback callback, void *arg)
{
	Oid			types[] = {OIDOID, TEXTOID};
	Datum		values[2] = {ObjectIdGetDatum(MyDatabaseId), (Datum) 0};
	JqOwnerSection section;
	int			code;

	if (role)
		values[1] = CStringGetTextDatum(role);

	PushActiveSnapshot(GetLatestSnapshot());
	jq_enter_owner(&section);

	jq_insist_on_indexes();
	(void) set_config_option("enable_sort", "off", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	code = SPI_execute_with_args(lanes_query, 2, types, values,
								 role ? "  " : " n", true, 0);
	if (code != SPI_OK_SELECT)
		elog(ERROR, "could not search jq.jobs: %s", SPI_result_code_string(code));

	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	tuple = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		bool		isnull;
		JqKey		key;

		key.at = DatumGetTimestampTz(SPI_getbinval(tuple, desc, 4, &isnull));
		key.id = DatumGetInt64(SPI_getbinval(tuple, desc, 5, &isnull));
		callback(SPI_getvalue(tuple, desc, 1), SPI_getvalue(tuple, desc, 2),
				 DatumGetInt32(SPI_getbinval(tuple, desc, 3, &isnull)),
				 key, arg);
	}

	SPI_finish();
	jq_leave_owner(&section);
	PopActiveSnapshot();
}
