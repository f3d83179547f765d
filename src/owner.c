/*-------------------------------------------------------------------------
 *
 * owner.c
 *	  Sections that work on jq's tables with the rights of the extension's
 *	  owner, and SQL run in them.
 *
 * As PostgreSQL's own foreign-key triggers do: the section is short, runs no
 * code of users, and pins the search path.  An error inside needs no cleaning
 * here, since the end of the (sub)transaction puts user and settings back.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "jq.h"

/*
 * Become the extension's owner, with a search path that leads nowhere else.
 */
void
jq_enter_owner(JqOwnerSection *section)
{
	GetUserIdAndSecContext(&section->save_userid, &section->save_sec_context);
	SetUserIdAndSecContext(jq_catalog()->owner,
						   section->save_sec_context |
						   SECURITY_LOCAL_USERID_CHANGE |
						   SECURITY_NOFORCE_RLS);
	section->guc_level = NewGUCNestLevel();
	RestrictSearchPath();
}

/*
 * Be the former user again.
 */
void
jq_leave_owner(JqOwnerSection *section)
{
	AtEOXact_GUC(false, section->guc_level);
	SetUserIdAndSecContext(section->save_userid, section->save_sec_context);
}

/*
 * Let queries of this section use indexes wherever they can: statistics of a
 * queue's tables are always out of date.
 */
void
jq_insist_on_indexes(void)
{
	(void) set_config_option("enable_seqscan", "off", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	(void) set_config_option("enable_bitmapscan", "off", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
}

/*
 * Run one SQL command as the extension's owner.  Returns the number of rows
 * it processed; if result is not NULL, the first column of the first row, a
 * bigint, goes there (0 if there is none).
 */
uint64
jq_owner_execute(const char *command, int nargs, Oid *argtypes, Datum *values,
				 const char *nulls, int64 *result)
{
	JqOwnerSection section;
	uint64		processed;
	int			code;

	jq_enter_owner(&section);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");

	code = SPI_execute_with_args(command, nargs, argtypes, values, nulls,
								 false, 0);
	if (code < 0)
		elog(ERROR, "could not execute \"%s\": %s", command,
			 SPI_result_code_string(code));
	processed = SPI_processed;
	if (result)
	{
		*result = 0;
		if (processed > 0)
		{
			bool		isnull;
			Datum		datum = SPI_getbinval(SPI_tuptable->vals[0],
											  SPI_tuptable->tupdesc, 1,
											  &isnull);

			if (!isnull)
				*result = DatumGetInt64(datum);
		}
	}

	SPI_finish();
	jq_leave_owner(&section);
	return processed;
}

/*
 * Run a query as the extension's owner that sees what has committed by now.
 * Returns the number of rows, and in *ids, in the current memory context, the
 * bigints that they consist of.
 */
uint64
jq_owner_fetch_ids(const char *query, int nargs, Oid *argtypes, Datum *values,
				   int64 **ids)
{
	MemoryContext cxt = CurrentMemoryContext;
	JqOwnerSection section;
	uint64		count;

	jq_enter_owner(&section);
	jq_insist_on_indexes();
	PushActiveSnapshot(GetLatestSnapshot());
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args(query, nargs, argtypes, values, NULL, true, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not execute \"%s\"", query);
	count = SPI_processed;
	*ids = MemoryContextAlloc(cxt, Max(count, 1) * sizeof(int64));
	for (uint64 i = 0; i < count; i++)
	{
		bool		isnull;

		(*ids)[i] = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[i],
												SPI_tuptable->tupdesc, 1, &isnull));
	}
	SPI_finish();
	PopActiveSnapshot();
	jq_leave_owner(&section);
	return count;
}
