/*-------------------------------------------------------------------------
 *
 * pause.c
 *	  Pauses: jq.pause() and jq.resume(), and what a worker or scheduler
 *	  remembers of them.
 *
 * A pause is a row of jq.pauses; the mark for all queues is one of its own.
 * Each process keeps the rows until the configuration changes.  A commit that
 * changes them also wakes everybody (by the trigger configuration_written),
 * and a worker that has not seen the change does not fall asleep over it
 * (pause_changes).
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

typedef struct Pause
{
	char		queue[JQ_NAME_MAX + 1]; /* '': all */
	TimestampTz until;
} Pause;

static MemoryContext pauses_cxt = NULL;
static Pause *pauses = NULL;
static int	npauses = 0;
static uint64 pauses_epoch = 0;
static uint32 pauses_changes = 0;

PG_FUNCTION_INFO_V1(jq_pause);
PG_FUNCTION_INFO_V1(jq_resume);

/* ---------------------------------------------------------------------
 * Look-up
 * --------------------------------------------------------------------- */

static void
read_pauses(void)
{
	Relation	rel = table_open(jq_catalog()->pauses, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	int			room = 16;
	HeapTuple	tuple;

	npauses = 0;
	pauses = MemoryContextAlloc(pauses_cxt, room * sizeof(Pause));
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		TupleDesc	desc = RelationGetDescr(rel);
		Pause	   *pause;
		bool		isnull;
		Datum		value;

		if (npauses == room)
		{
			room *= 2;
			pauses = repalloc(pauses, room * sizeof(Pause));
		}
		pause = &pauses[npauses];
		value = heap_getattr(tuple, PAUSES_QUEUE, desc, &isnull);
		pause->queue[0] = '\0';
		if (!isnull)
			text_to_cstring_buffer(DatumGetTextPP(value), pause->queue,
								   sizeof(pause->queue));
		value = heap_getattr(tuple, PAUSES_UNTIL, desc, &isnull);
		pause->until = isnull ? DT_NOEND : DatumGetTimestampTz(value);
		npauses++;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
}

/*
 * Learn of the pauses that have been committed, in a transaction.  Returns a
 * number that is another one once they have changed again.
 */
uint32
jq_load_pauses(void)
{
	JqDatabase *database;
	uint32		changes = 0;

	/* first, so that a change in between is seen as one */
	if (JqShared)
	{
		LWLockAcquire(JqShared->lock, LW_SHARED);
		database = jq_find_database(MyDatabaseId, false);
		if (database)
			changes = database->pause_changes;
		LWLockRelease(JqShared->lock);
	}

	/*
	 * Who commits a change tells of it before he sends the invalidation, so
	 * that alone does not do.
	 */
	AcceptInvalidationMessages();
	if (pauses_epoch != jq_configuration_epoch() || pauses_changes != changes)
	{
		uint64		epoch = jq_configuration_epoch();

		if (pauses_cxt == NULL)
			pauses_cxt = AllocSetContextCreate(TopMemoryContext, "jq pauses",
											   ALLOCSET_SMALL_SIZES);
		npauses = 0;
		MemoryContextReset(pauses_cxt);
		read_pauses();
		pauses_epoch = epoch;
		pauses_changes = changes;
	}
	return changes;
}

/*
 * Until when the queue is paused, by itself or with all others, as far as
 * jq_load_pauses() has seen; DT_NOEND: until it is resumed; DT_NOBEGIN: it is
 * not paused.
 */
TimestampTz
jq_paused_until(const char *queue)
{
	TimestampTz until = DT_NOBEGIN;

	for (int i = 0; i < npauses; i++)
	{
		if (pauses[i].queue[0] == '\0' || strcmp(pauses[i].queue, queue) == 0)
			until = Max(until, pauses[i].until);
	}
	return until;
}

/* ---------------------------------------------------------------------
 * Commands
 * --------------------------------------------------------------------- */

/*
 * The queue given as first argument, as it stands in jq.pauses, and what is
 * there no more goes.  An empty name, the default, is the mark for all queues;
 * NULL is a mistake that must not stop or start them all.
 */
static void
queue_argument(FunctionCallInfo fcinfo, Datum *value, char *null)
{
	text	   *queue;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of a queue must not be NULL"),
				 errhint("Leave it out for all queues.")));
	queue = PG_GETARG_TEXT_PP(0);
	*value = PointerGetDatum(queue);
	*null = VARSIZE_ANY_EXHDR(queue) == 0 ? 'n' : ' ';
	if (*null == ' ')
		jq_check_name(VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue), "queue");

	jq_owner_execute("DELETE FROM jq.pauses WHERE until <= clock_timestamp()",
					 0, NULL, NULL, NULL, NULL);
}

/*
 * jq.pause(queue, reason, until)
 */
Datum
jq_pause(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, TEXTOID, TIMESTAMPTZOID, TEXTOID};
	Datum		values[4];
	char		nulls[] = "    ";
	int64		is_new;

	jq_require_administer();
	queue_argument(fcinfo, &values[0], &nulls[0]);
	for (int i = 1; i < 3; i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i) ? 'n' : ' ';
	}
	values[3] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));

	/* a row that was inserted has no xmax */
	jq_owner_execute("INSERT INTO jq.pauses AS p (queue, paused_at, paused_by, reason, until)"
					 " VALUES ($1, clock_timestamp(), $4, $2, $3)"
					 " ON CONFLICT (coalesce(queue, '')) DO UPDATE SET"
					 " paused_at = excluded.paused_at, paused_by = excluded.paused_by,"
					 " reason = excluded.reason, until = excluded.until"
					 " RETURNING CASE WHEN p.xmax = 0 THEN 1::bigint ELSE 0 END",
					 lengthof(types), types, values, nulls, &is_new);
	PG_RETURN_BOOL(is_new != 0);
}

/*
 * jq.resume(queue)
 */
Datum
jq_resume(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID};
	Datum		values[1];
	char		nulls[] = " ";

	jq_require_administer();
	queue_argument(fcinfo, &values[0], &nulls[0]);
	PG_RETURN_BOOL(jq_owner_execute("DELETE FROM jq.pauses WHERE queue IS NOT DISTINCT FROM $1",
									1, types, values, nulls, NULL) > 0);
}
