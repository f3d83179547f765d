/*-------------------------------------------------------------------------
 *
 * history.c
 *	  The history of attempts, and the removal of what was kept long enough.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/indexing.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "jq.h"

PG_FUNCTION_INFO_V1(jq_prune);

/*
 * Write the attempt that the job has just made to jq.attempts.  failure is
 * NULL if it ended well.
 */
void
jq_keep_attempt(const JqJob *job, const char *outcome, const JqFailure *failure)
{
	Relation	rel = table_open(jq_catalog()->attempts, RowExclusiveLock);
	Datum		values[ATTEMPTS_NATTS];
	bool		nulls[ATTEMPTS_NATTS] = {false};

	values[ATTEMPTS_ID - 1] = Int64GetDatum(job->id);
	values[ATTEMPTS_ATTEMPT - 1] = Int32GetDatum(job->attempts + 1);
	jq_set_text(values, nulls, ATTEMPTS_NAME, job->name);
	jq_set_text(values, nulls, ATTEMPTS_QUEUE, job->queue);
	jq_set_text(values, nulls, ATTEMPTS_ROLE, job->role);
	values[ATTEMPTS_PID - 1] = Int32GetDatum(job->pid);
	nulls[ATTEMPTS_PID - 1] = job->pid == 0;
	values[ATTEMPTS_STARTED_AT - 1] = TimestampTzGetDatum(job->started_at);
	nulls[ATTEMPTS_STARTED_AT - 1] = job->pid == 0;
	values[ATTEMPTS_ENDED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	jq_set_text(values, nulls, ATTEMPTS_OUTCOME, outcome);
	jq_set_text(values, nulls, ATTEMPTS_SQLSTATE,
				failure ? unpack_sql_state(failure->sqlerrcode) : NULL);
	jq_set_text(values, nulls, ATTEMPTS_ERROR, failure ? failure->message : NULL);
	jq_set_text(values, nulls, ATTEMPTS_LOG,
				failure ? failure->log : jq_current_log());

	CatalogTupleInsert(rel, heap_form_tuple(RelationGetDescr(rel), values, nulls));
	table_close(rel, NoLock);
}

/*
 * Remove what has been kept long enough, or is of no use any more; returns how
 * many rows that were.
 */
int64
jq_prune_kept(void)
{
	static const struct
	{
		int		   *setting;	/* in minutes, $1; NULL: none */
		const char *command;
	}			prunes[] =
	{
		{NULL, "DELETE FROM jq.results WHERE keep_until < clock_timestamp()"},
		{&jq_keep_attempts, "DELETE FROM jq.attempts"
		" WHERE ended_at < clock_timestamp() - make_interval(mins => $1)"},
		{&jq_keep_batches, "DELETE FROM jq.batches"
		" WHERE finished_at < clock_timestamp() - make_interval(mins => $1)"},
		{NULL, "DELETE FROM jq.batch_counts AS c"
		" WHERE NOT EXISTS (SELECT FROM jq.batches AS b WHERE b.id = c.batch_id)"},
		{NULL, "DELETE FROM jq.claims WHERE (name, key) IN"
			" (SELECT c.name, c.key FROM jq.claims AS c WHERE c.expires_at < clock_timestamp()"
		" FOR UPDATE SKIP LOCKED)"},
		{NULL, "DELETE FROM jq.rates WHERE since < clock_timestamp() - interval '1 day'"
		" AND NOT EXISTS (SELECT FROM jq.handlers AS h WHERE h.rate_per >= interval '1 day')"}
	};
	int64		count = 0;

	for (int i = 0; i < lengthof(prunes); i++)
	{
		Oid			types[] = {INT4OID};
		Datum		values[] = {Int32GetDatum(prunes[i].setting ? *prunes[i].setting : 0)};

		count += jq_owner_execute(prunes[i].command, prunes[i].setting ? 1 : 0,
								  types, values, NULL, NULL);
	}
	return count;
}

/*
 * jq.prune()
 */
Datum
jq_prune(PG_FUNCTION_ARGS)
{
	jq_require_administer();
	PG_RETURN_INT64(jq_prune_kept());
}
