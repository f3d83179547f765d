/*-------------------------------------------------------------------------
 *
 * inspect.c
 *	  What jq's views show of the processes and their shared memory.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "jq.h"

/* A note that is longer than this is not made longer. */
#define NOTE_LIMIT	1000

typedef struct LaneNotes
{
	StringInfo	note;
	Oid			userid;			/* who reads it */
	List	   *queues;			/* that are served; NIL: all */
} LaneNotes;

PG_FUNCTION_INFO_V1(jq_worker_slots);
PG_FUNCTION_INFO_V1(jq_process_status);
PG_FUNCTION_INFO_V1(jq_lease_holds);

static const char *
slot_state(const JqSlot *slot)
{
	if (slot->leave)
		return "leaving";
	switch (slot->state)
	{
		case JQ_SLOT_STARTING:
			return "starting";
		case JQ_SLOT_IDLE:
			return "idle";
		default:
			return "busy";
	}
}

/*
 * jq.worker_slots()
 */
Datum
jq_worker_slots(PG_FUNCTION_ARGS)
{
	enum
	{
		PID, ROLE, STATE, STARTED_AT, JOB_ID, NAME, QUEUE, ATTEMPT,
		JOB_STARTED_AT, PROGRESS, NOTE, JOB_LOG, CANCELLED, NATTS
	};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	JqSlot	   *slots;
	JqAttempt  *attempts;
	int			count = 0;

	InitMaterializedSRF(fcinfo, 0);
	if (JqShared == NULL)
		return (Datum) 0;

	slots = palloc(JqShared->nslots * sizeof(JqSlot));
	attempts = palloc(JqShared->nslots * sizeof(JqAttempt));
	LWLockAcquire(JqShared->lock, LW_SHARED);
	for (int i = 0; i < JqShared->nslots; i++)
	{
		if (JqSlots[i].state == JQ_SLOT_FREE || JqSlots[i].dboid != MyDatabaseId)
			continue;
		slots[count] = JqSlots[i];
		attempts[count] = *jq_attempt_of(&JqSlots[i]);
		count++;
	}
	LWLockRelease(JqShared->lock);

	for (int i = 0; i < count; i++)
	{
		JqSlot	   *slot = &slots[i];
		JqAttempt  *attempt = &attempts[i];
		char	   *role = GetUserNameFromId(slot->roleid, true);
		Datum		values[NATTS] = {0};
		bool		nulls[NATTS] = {false};

		if (role == NULL || !jq_may_see_role(role))
			continue;
		nulls[PID] = slot->pid == 0;
		values[PID] = Int32GetDatum(slot->pid);
		values[ROLE] = CStringGetTextDatum(role);
		values[STATE] = CStringGetTextDatum(slot_state(slot));
		values[STARTED_AT] = TimestampTzGetDatum(slot->started_at);
		if (attempt->begun)
		{
			const JqReport *report = &attempt->report;

			values[JOB_ID] = Int64GetDatum(attempt->job_id);
			jq_set_text(values, nulls, NAME + 1, attempt->name);
			jq_set_text(values, nulls, QUEUE + 1, attempt->queue);
			values[ATTEMPT] = Int32GetDatum(attempt->attempt);
			values[JOB_STARTED_AT] = TimestampTzGetDatum(attempt->started_at);
			values[PROGRESS] = Float8GetDatum(report->percent);
			nulls[PROGRESS] = report->percent < 0;
			jq_set_text(values, nulls, NOTE + 1,
						report->note[0] != '\0' ? report->note : NULL);
			jq_set_text(values, nulls, JOB_LOG + 1,
						report->log[0] != '\0' ? report->log : NULL);
			values[CANCELLED] = BoolGetDatum(attempt->cancelled);
		}
		else
		{
			for (int column = JOB_ID; column < NATTS; column++)
				nulls[column] = true;
		}
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/*
 * jq.lease_holds(lease_until, holder_pid, holder_started)
 */
Datum
jq_lease_holds(PG_FUNCTION_ARGS)
{
	if (PG_ARGISNULL(0) || PG_GETARG_TIMESTAMPTZ(0) <= GetCurrentTimestamp())
		PG_RETURN_BOOL(false);
	PG_RETURN_BOOL(PG_ARGISNULL(1) || PG_ARGISNULL(2) ||
				   jq_holder_lives(PG_GETARG_INT32(1), PG_GETARG_TIMESTAMPTZ(2)));
}

/*
 * Why nothing runs in this database, or NULL.  The caller holds the lock.
 */
static const char *
standstill(const JqDatabase *database, const char *database_name)
{
	if (RecoveryInProgress())
		return "the server is a standby";
	if (!jq_enabled)
		return "jq.enabled is off";
	if (!jq_database_is_served(database_name))
		return "jq.databases does not name this database";
	if (JqShared->launcher_latch == NULL)
		return "the launcher is not running";
	if (database == NULL || database->state == JQ_DATABASE_UNKNOWN ||
		database->state == JQ_DATABASE_ABSENT)
		return "the launcher has not come to this database yet";
	if (database->held_by != 0)
		return "jq makes way for a command on this database";
	if (database->scheduler_latch == NULL)
		return "the scheduler is being started, see the server's log if it stays so";
	if (database->no_slot)
		return "no free slot for a worker, see jq.max_workers and max_worker_processes";
	if (jq_paused_until("") > GetCurrentTimestamp())
		return "all queues are paused, see jq.pauses";
	return NULL;
}

static void
add_remark(StringInfo note, const char *remark)
{
	if (note->len > NOTE_LIMIT || strstr(note->data, remark) != NULL)
		return;
	appendStringInfo(note, "%s%s", note->len > 0 ? "; " : "", remark);
}

/*
 * Say if the jobs of the lane are nobody's, or in a queue that is not served.
 */
static void
note_lane(const char *role, const char *queue, int32 priority, JqKey first,
		  void *arg)
{
	LaneNotes  *notes = arg;
	ListCell   *lc;

	if (!jq_may_handle_role(notes->userid, role))
		return;
	if (!OidIsValid(get_role_oid(role, true)))
	{
		add_remark(notes->note,
				   psprintf("jobs of role \"%s\" are not run: the role does not exist",
							role));
		return;
	}
	if (notes->queues == NIL)
		return;
	foreach(lc, notes->queues)
	{
		if (strcmp(lfirst(lc), queue) == 0)
			return;
	}
	add_remark(notes->note,
			   psprintf("jobs of queue \"%s\" are not run: jq.queues leaves it out",
						queue));
}

/*
 * Jobs that nobody serves are found in the table only.
 */
static void
note_lanes(StringInfo note)
{
	LaneNotes	notes = {note, GetUserId(), jq_split_names(jq_queues)};

	jq_scan_lanes(NULL, note_lane, &notes);
}

/*
 * jq.process_status()
 */
Datum
jq_process_status(PG_FUNCTION_ARGS)
{
	enum
	{
		LAUNCHER, SCHEDULER_PID, NOTE, NATTS
	};
	TupleDesc	desc;
	Datum		values[NATTS] = {0};
	bool		nulls[NATTS] = {false};
	StringInfoData note;
	JqRole	   *refused;
	int			nrefused = 0;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	initStringInfo(&note);
	refused = palloc(JQ_MAX_ROLES * sizeof(JqRole));
	nulls[SCHEDULER_PID] = true;
	if (JqShared == NULL)
		appendStringInfoString(&note, "jq is not in shared_preload_libraries");
	else
	{
		JqDatabase *database;
		char	   *database_name = get_database_name(MyDatabaseId);
		const char *reason;

		(void) jq_load_pauses();
		LWLockAcquire(JqShared->lock, LW_SHARED);
		database = jq_find_database(MyDatabaseId, false);
		values[LAUNCHER] = BoolGetDatum(JqShared->launcher_latch != NULL);
		if (database && database->scheduler_latch)
		{
			values[SCHEDULER_PID] = Int32GetDatum(database->scheduler_pid);
			nulls[SCHEDULER_PID] = false;
		}
		reason = standstill(database, database_name);
		for (int i = 0; i < JQ_MAX_ROLES; i++)
		{
			JqRole	   *role = &JqShared->roles[i];

			if (role->in_use && role->dboid == MyDatabaseId &&
				role->refused_until > GetCurrentTimestamp())
				refused[nrefused++] = *role;
		}
		LWLockRelease(JqShared->lock);
		if (reason)
			appendStringInfoString(&note, reason);
	}

	for (int i = 0; i < nrefused; i++)
	{
		if (jq_may_see_role(refused[i].name))
			add_remark(&note, psprintf("jobs of role \"%s\" are not run: %s",
									   refused[i].name, refused[i].refusal));
	}
	note_lanes(&note);
	nulls[NOTE] = note.len == 0;
	values[NOTE] = CStringGetTextDatum(note.data);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
}
