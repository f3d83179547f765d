/*-------------------------------------------------------------------------
 *
 * catalog.h
 *	  jq's own tables as the library sees them: their OIDs and columns.
 *
 * The numbers are those of jq--1.0.sql; jq_catalog() refuses to work with
 * objects of another version.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#ifndef JQ_CATALOG_H
#define JQ_CATALOG_H

/* attributes of jq.job_spec, which are jq.dispatch()'s arguments too, but for
 * the last one */
enum
{
	SPEC_NAME,
	SPEC_PAYLOAD,
	SPEC_QUEUE,
	SPEC_PRIORITY,
	SPEC_DELAY,
	SPEC_RUN_AT,
	SPEC_MAX_ATTEMPTS,
	SPEC_META,
	SPEC_CHAIN,
	SPEC_NATTS
};

/* columns of jq.jobs */
enum
{
	JOBS_ID = 1,
	JOBS_STAMP,
	JOBS_AVAILABLE_AT,
	JOBS_CREATED_AT,
	JOBS_ORIGIN,
	JOBS_PRIORITY,
	JOBS_ATTEMPTS,
	JOBS_MAX_ATTEMPTS,
	JOBS_EXCEPTIONS,
	JOBS_ROLE,
	JOBS_QUEUE,
	JOBS_NAME,
	JOBS_PAYLOAD,
	JOBS_COUNTS_FROM,
	JOBS_META,
	JOBS_FAILURE,
	JOBS_CHAIN_ID,
	JOBS_CHAIN,
	JOBS_PREVIOUS,
	JOBS_TOKEN,
	JOBS_RESERVED_AT,
	JOBS_LEASE_UNTIL,
	JOBS_HOLDER_PID,
	JOBS_HOLDER_STARTED,
	JOBS_LAST_ERROR,
	JOBS_NATTS = JOBS_LAST_ERROR
};

/* columns of the index jq.jobs_due */
enum
{
	DUE_ORIGIN = 1,
	DUE_ROLE,
	DUE_QUEUE,
	DUE_PRIORITY,
	DUE_AVAILABLE_AT,
	DUE_ID
};

/* columns of jq.failed_jobs */
enum
{
	FAILED_ID = 1,
	FAILED_QUEUE,
	FAILED_NAME,
	FAILED_PAYLOAD,
	FAILED_PRIORITY,
	FAILED_ATTEMPTS,
	FAILED_MAX_ATTEMPTS,
	FAILED_ROLE,
	FAILED_ERROR,
	FAILED_SQLSTATE,
	FAILED_DETAIL,
	FAILED_HINT,
	FAILED_CONTEXT,
	FAILED_LOG,
	FAILED_CREATED_AT,
	FAILED_FAILED_AT,
	FAILED_META,
	FAILED_FAILURE,
	FAILED_CHAIN_ID,
	FAILED_CHAIN,
	FAILED_PREVIOUS,
	FAILED_NATTS = FAILED_PREVIOUS
};

/* columns of jq.pauses */
enum
{
	PAUSES_QUEUE = 1,
	PAUSES_PAUSED_AT,
	PAUSES_PAUSED_BY,
	PAUSES_REASON,
	PAUSES_UNTIL
};

/* columns of jq.cancellations */
enum
{
	CANCELLATIONS_ID = 1,
	CANCELLATIONS_STAMP,
	CANCELLATIONS_REQUESTED_AT,
	CANCELLATIONS_REQUESTED_BY,
	CANCELLATIONS_REASON,
	CANCELLATIONS_NATTS = CANCELLATIONS_REASON
};

/* columns of jq.results */
enum
{
	RESULTS_ID = 1,
	RESULTS_ROLE,
	RESULTS_DONE_AT,
	RESULTS_KEEP_UNTIL,
	RESULTS_RESULT,
	RESULTS_NATTS = RESULTS_RESULT
};

/* columns of jq.attempts */
enum
{
	ATTEMPTS_ID = 1,
	ATTEMPTS_ATTEMPT,
	ATTEMPTS_NAME,
	ATTEMPTS_QUEUE,
	ATTEMPTS_ROLE,
	ATTEMPTS_PID,
	ATTEMPTS_STARTED_AT,
	ATTEMPTS_ENDED_AT,
	ATTEMPTS_OUTCOME,
	ATTEMPTS_SQLSTATE,
	ATTEMPTS_ERROR,
	ATTEMPTS_LOG,
	ATTEMPTS_NATTS = ATTEMPTS_LOG
};

/* columns of jq.handlers and jq.handler_aliases */
enum
{
	HANDLERS_NAME = 1,
	HANDLERS_HANDLER,
	HANDLERS_QUEUE,
	HANDLERS_PRIORITY,
	HANDLERS_MAX_ATTEMPTS,
	HANDLERS_TIMEOUT,
	HANDLERS_BACKOFF,
	HANDLERS_RETRY_FOR,
	HANDLERS_EXPIRES,
	HANDLERS_FAIL_ON_TIMEOUT,
	HANDLERS_MAX_EXCEPTIONS,
	HANDLERS_PERMANENT_ERRORS,
	HANDLERS_ON_FAILED,
	HANDLERS_KEEP_RESULT,
	ALIASES_ALIAS = 1,
	ALIASES_NAME
};

/* columns of jq.grants */
enum
{
	GRANTS_ROLE = 1,
	GRANTS_PRIVILEGE,
	GRANTS_QUEUE
};

typedef struct JqCatalog
{
	Oid			extension;
	Oid			owner;			/* of the extension */
	Oid			schema;
	Oid			jobs;
	Oid			jobs_pkey;
	Oid			jobs_due;
	Oid			jobs_sequence;
	Oid			failed_jobs;
	Oid			failed_jobs_pkey;
	Oid			pauses;
	Oid			cancellations;
	Oid			cancellations_id;
	Oid			results;
	Oid			results_id;
	Oid			attempts;
	Oid			handlers;
	Oid			handlers_pkey;
	Oid			handler_aliases;
	Oid			handler_aliases_pkey;
	Oid			grants;
	Oid			context_type;	/* jq.context */
	Oid			spec_type;		/* jq.job_spec */
} JqCatalog;

#endif							/* JQ_CATALOG_H */
