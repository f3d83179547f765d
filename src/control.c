/*-------------------------------------------------------------------------
 *
 * control.c
 *	  What is done by hand: run a handler, drain a queue, and see to jobs that
 *	  failed or are held.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

/* A session that drains: its lanes, and memory for one job at a time. */
typedef struct Drain
{
	JqLaneSet	lanes;
	int			max_lanes;
	List	   *queues;
	MemoryContext cxt;			/* as long as the drain */
	MemoryContext job_cxt;
} Drain;

static void drain_one(Drain *drain, JqJob *job);

PG_FUNCTION_INFO_V1(jq_drain);
PG_FUNCTION_INFO_V1(jq_run);
PG_FUNCTION_INFO_V1(jq_retry);
PG_FUNCTION_INFO_V1(jq_forget);
PG_FUNCTION_INFO_V1(jq_flush);
PG_FUNCTION_INFO_V1(jq_adopt);
PG_FUNCTION_INFO_V1(jq_announce);

/* ---------------------------------------------------------------------
 * jq.run
 * --------------------------------------------------------------------- */

/*
 * jq.run(name, payload)
 */
Datum
jq_run(PG_FUNCTION_ARGS)
{
	const JqHandler *found;
	JqHandler  *handler;
	JqJob		job = {0};
	JqCallResult result;
	FmgrInfo	flinfo;
	text	   *name;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a handler and payload must not be NULL")));
	name = PG_GETARG_TEXT_PP(0);
	jq_check_name(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), "handler");
	job.name = text_to_cstring(name);
	found = jq_find_handler(job.name);
	if (found == NULL)
		jq_report_unregistered(job.name);
	handler = jq_copy_handler(found);
	jq_check_handler_rights(handler, GetUserId());

	/* the caller's own time limits hold, not the job's */
	handler->timeout_us = 0;
	job.queue = handler->queue;
	job.max_attempts = handler->max_attempts;
	job.role = GetUserNameFromId(GetUserId(), false);
	job.created_at = GetCurrentTimestamp();
	job.payload = PG_GETARG_DATUM(1);

	fmgr_info(handler->function, &flinfo);
	jq_call_handler(handler, &job, &flinfo, false, &result);
	if (result.isnull || !handler->returns_jsonb)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(result.value);
}

/* ---------------------------------------------------------------------
 * jq.drain
 * --------------------------------------------------------------------- */

/*
 * Add a lane to those of the drain, or lower the one that is there.
 */
static void
see_lane(const char *role, const char *queue, int32 priority, JqKey first,
		 void *arg)
{
	Drain	   *drain = arg;
	JqLaneSet  *set = &drain->lanes;
	int			n;

	for (n = set->first_lane; n >= 0; n = set->lanes[n].next)
	{
		if (set->lanes[n].priority == priority &&
			strcmp(set->lanes[n].queue, queue) == 0)
			break;
	}
	if (n < 0)
	{
		if (set->nlanes == drain->max_lanes)
		{
			drain->max_lanes *= 2;
			set->lanes = repalloc(set->lanes, drain->max_lanes * sizeof(JqLane));
		}
		n = set->nlanes++;
		jq_lane_init(&set->lanes[n], queue, priority);
		set->lanes[n].next = set->first_lane;
		set->first_lane = n;
	}
	jq_lane_lower(&set->lanes[n], -1, first, first);
}

static void
start_drain(Drain *drain, FunctionCallInfo fcinfo)
{
	MemoryContext oldcxt;

	memset(drain, 0, sizeof(Drain));
	drain->cxt = AllocSetContextCreate(PortalContext, "jq drain",
									   ALLOCSET_DEFAULT_SIZES);
	drain->job_cxt = AllocSetContextCreate(drain->cxt, "jq job",
										   ALLOCSET_DEFAULT_SIZES);
	oldcxt = MemoryContextSwitchTo(drain->cxt);
	if (!PG_ARGISNULL(0))
	{
		ArrayType  *array = PG_GETARG_ARRAYTYPE_P_COPY(0);
		Datum	   *elements;
		bool	   *nulls;
		int			count;

		deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT,
						  &elements, &nulls, &count);
		for (int i = 0; i < count; i++)
		{
			char	   *queue;

			if (nulls[i])
				ereport(ERROR,
						(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
						 errmsg("name of a queue must not be NULL")));
			queue = TextDatumGetCString(elements[i]);
			jq_check_name(queue, strlen(queue), "queue");
			drain->queues = lappend(drain->queues, queue);
		}
		if (count == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("array of queues must not be empty"),
					 errhint("NULL means all queues.")));
	}
	drain->lanes.roleid = GetUserId();
	drain->max_lanes = 16;
	drain->lanes.lanes = palloc(drain->max_lanes * sizeof(JqLane));
	drain->lanes.first_lane = -1;
	MemoryContextSwitchTo(oldcxt);
}

/*
 * Claim the next due job.  The lanes are private, so what others dispatch is
 * seen only when they are loaded anew, which is done when they are empty.
 */
static bool
next_job(Drain *drain, JqJob *job)
{
	for (int look = 0; look < 2; look++)
	{
		if (jq_lanes_due(&drain->lanes, drain->queues) <= GetCurrentTimestamp() &&
			jq_claim_next(&drain->lanes, drain->queues, job))
			return true;
		if (look == 0)
		{
			MemoryContextSwitchTo(drain->cxt);
			jq_scan_lanes(GetUserNameFromId(drain->lanes.roleid, false),
						  see_lane, drain);
			MemoryContextSwitchTo(drain->job_cxt);
		}
	}
	return false;
}

/*
 * Tell of due jobs that only their own roles, or workers, run.
 */
static void
notice_others(void)
{
	Oid			types[] = {OIDOID, TEXTOID};
	Datum		values[2];
	int64		others;

	values[0] = ObjectIdGetDatum(MyDatabaseId);
	values[1] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));
	PushActiveSnapshot(GetTransactionSnapshot());
	jq_owner_execute("SELECT count(*) FROM jq.jobs WHERE origin = $1 AND role <> $2"
					 " AND available_at <= clock_timestamp()",
					 2, types, values, NULL, &others);
	PopActiveSnapshot();
	if (others > 0)
		ereport(NOTICE,
				(errmsg_plural("%lld due job of another role was left",
							   "%lld due jobs of other roles were left",
							   (unsigned long) others, (long long) others)));
}

/*
 * CALL jq.drain(queues, max_jobs, ran)
 */
Datum
jq_drain(PG_FUNCTION_ARGS)
{
	int64		max_jobs = PG_ARGISNULL(1) ? PG_INT64_MAX : PG_GETARG_INT64(1);
	int64		ran = 0;
	Drain		drain;
	TupleDesc	desc;
	Datum		value;
	bool		isnull = false;
	MemoryContext caller_cxt = CurrentMemoryContext;

	if (!fcinfo->context || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("jq.drain() cannot run inside a transaction block"),
				 errdetail("It commits each job by itself.")));
	PreventCommandIfReadOnly("jq.drain()");
	if (max_jobs < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_jobs must not be negative")));
	(void) jq_catalog();
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	desc = CreateTupleDescCopy(desc);

	start_drain(&drain, fcinfo);
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");

	while (ran < max_jobs)
	{
		JqJob	   *job;

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(drain.job_cxt);
		MemoryContextSwitchTo(drain.job_cxt);
		job = palloc0(sizeof(JqJob));
		if (!next_job(&drain, job))
			break;
		drain_one(&drain, job);
		ran++;
	}
	notice_others();

	SPI_finish();
	MemoryContextSwitchTo(caller_cxt);
	MemoryContextDelete(drain.cxt);

	value = Int64GetDatum(ran);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  &value, &isnull)));
}

/*
 * Run the handler in a subtransaction; returns how it failed, or NULL.
 */
static JqFailure *
run_in_subtransaction(const JqHandler *handler, const JqJob *job)
{
	MemoryContext cxt = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	JqFailure  *volatile failure = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(cxt);
	PG_TRY();
	{
		JqCallResult result;
		FmgrInfo	flinfo;

		jq_check_handler_rights(handler, GetUserId());
		fmgr_info(handler->function, &flinfo);
		jq_call_handler(handler, job, &flinfo, true, &result);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		failure = jq_capture_failure(cxt);
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(cxt);
	CurrentResourceOwner = owner;
	return failure;
}

/*
 * Run the claimed job, record how it ended, and commit.
 *
 * Where jq is not preloaded nobody would notice if this session died with the
 * job, so the attempt is counted before: the job is leased, and that is
 * committed first.
 */
static void
drain_one(Drain *drain, JqJob *job)
{
	const JqHandler *found = jq_find_handler(job->name);
	JqHandler  *handler = found ? jq_copy_handler(found) : NULL;
	JqFailure  *failure = jq_failure_before_start(job);

	if (failure == NULL && handler == NULL)
		failure = jq_unregistered_failure(job);

	if (failure == NULL)
	{
		if (JqShared == NULL)
		{
			jq_start_lease(job, handler);
			PopActiveSnapshot();
			SPI_commit();
			PushActiveSnapshot(GetTransactionSnapshot());
		}
		failure = run_in_subtransaction(handler, job);
	}

	if (failure)
	{
		/* not as an error: the client's command goes on */
		ereport(WARNING,
				(errcode(failure->sqlerrcode),
				 errmsg("job " INT64_FORMAT ", handler \"%s\", attempt %d of %d failed: %s",
						job->id, job->name, job->attempts + 1,
						job->max_attempts, failure->message)));
		jq_record_failure(job, drain->lanes.roleid, handler, failure);
	}
	else
	{
		if (!jq_record_done(job))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("job " INT64_FORMAT " is not this session's any more",
							job->id),
					 errdetail("Its lease ended, or it was removed, while it ran; what it did is rolled back.")));
	}
	PopActiveSnapshot();
	SPI_commit();
	if (failure)
		jq_forget_unsettled(job);
}

/* ---------------------------------------------------------------------
 * Failed jobs
 * --------------------------------------------------------------------- */

/*
 * Raise an error unless the current role may handle jobs of that role.
 */
static void
require_own_job(int64 id, const char *role)
{
	Oid			roleid = get_role_oid(role, true);

	if (OidIsValid(roleid) && has_privs_of_role(GetUserId(), roleid))
		return;
	if (!jq_may_administer(GetUserId()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for job " INT64_FORMAT, id),
				 errdetail("It belongs to role \"%s\".", role)));
}

/*
 * Remove a job from jq.failed_jobs and fill in *job with what it was.
 * Returns false if it has not failed.  Of two sessions that take the same job
 * the second waits for the first, and takes it only if that one rolls back.
 */
static bool
take_failed(int64 id, JqJob *job)
{
	const JqCatalog *catalog = jq_catalog();
	Relation	rel = table_open(catalog->failed_jobs, RowExclusiveLock);
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		taken = false;

	ScanKeyInit(&key, FAILED_ID, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(id));
	scan = systable_beginscan(rel, catalog->failed_jobs_pkey, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		ItemPointerData tid = tuple->t_self;
		TM_FailureData tmfd;

		if (table_tuple_lock(rel, &tid, GetActiveSnapshot(), slot,
							 GetCurrentCommandId(false), LockTupleExclusive,
							 LockWaitBlock, 0, &tmfd) == TM_Ok)
		{
			Datum	   *values = slot->tts_values;

			slot_getallattrs(slot);
			job->id = id;
			job->role = TextDatumGetCString(values[FAILED_ROLE - 1]);
			require_own_job(id, job->role);
			job->stamp = jq_random_stamp();
			job->created_at = DatumGetTimestampTz(values[FAILED_CREATED_AT - 1]);
			job->available_at = GetCurrentTimestamp();
			job->priority = DatumGetInt32(values[FAILED_PRIORITY - 1]);
			job->attempts = 0;
			job->max_attempts = DatumGetInt32(values[FAILED_MAX_ATTEMPTS - 1]);
			job->queue = TextDatumGetCString(values[FAILED_QUEUE - 1]);
			job->name = TextDatumGetCString(values[FAILED_NAME - 1]);
			job->payload = PointerGetDatum(PG_DETOAST_DATUM_COPY(values[FAILED_PAYLOAD - 1]));
			taken = table_tuple_delete(rel, &slot->tts_tid,
									   GetCurrentCommandId(true),
									   InvalidSnapshot, InvalidSnapshot, true,
									   &tmfd, false) == TM_Ok;
		}
	}
	systable_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	table_close(rel, NoLock);
	return taken;
}

static int64
id_argument(FunctionCallInfo fcinfo, const char *function)
{
	PreventCommandIfReadOnly(function);
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("id of a job must not be NULL")));
	return PG_GETARG_INT64(0);
}

/*
 * jq.retry(id)
 */
Datum
jq_retry(PG_FUNCTION_ARGS)
{
	JqJob		job = {0};

	if (!take_failed(id_argument(fcinfo, "jq.retry()"), &job))
		PG_RETURN_BOOL(false);
	jq_insert_job(&job, get_role_oid(job.role, true));
	PG_RETURN_BOOL(true);
}

/*
 * jq.forget(id)
 */
Datum
jq_forget(PG_FUNCTION_ARGS)
{
	JqJob		job = {0};

	PG_RETURN_BOOL(take_failed(id_argument(fcinfo, "jq.forget()"), &job));
}

/*
 * jq.flush(older_than, queue, name)
 */
Datum
jq_flush(PG_FUNCTION_ARGS)
{
	Oid			types[] = {INTERVALOID, TEXTOID, TEXTOID};
	Datum		values[3];
	char		nulls[] = "   ";

	jq_require_administer();
	for (int i = 0; i < lengthof(values); i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		if (PG_ARGISNULL(i))
			nulls[i] = 'n';
	}
	PG_RETURN_INT64(jq_owner_execute("DELETE FROM jq.failed_jobs"
									 " WHERE ($1 IS NULL OR failed_at < clock_timestamp() - $1)"
									 " AND ($2 IS NULL OR queue = $2)"
									 " AND ($3 IS NULL OR name = $3)",
									 3, types, values, nulls, NULL));
}

/* ---------------------------------------------------------------------
 * Origin
 * --------------------------------------------------------------------- */

/*
 * jq.adopt()
 */
Datum
jq_adopt(PG_FUNCTION_ARGS)
{
	Oid			types[] = {OIDOID};
	Datum		values[] = {ObjectIdGetDatum(MyDatabaseId)};

	jq_require_administer();

	/* the table's trigger tells the workers */
	PG_RETURN_INT64(jq_owner_execute("UPDATE jq.jobs SET origin = $1 WHERE origin <> $1",
									 1, types, values, NULL, NULL));
}

/*
 * jq.announce()
 */
Datum
jq_announce(PG_FUNCTION_ARGS)
{
	if (JqShared == NULL && !IsBinaryUpgrade)
		ereport(WARNING,
				(errmsg("jq is not preloaded, so no worker runs jobs by itself"),
				 errhint("Add jq to shared_preload_libraries and restart the server, or call jq.drain().")));
	jq_note_launcher();
	PG_RETURN_VOID();
}
