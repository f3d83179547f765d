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

/* attributes of jq.job_spec; all but the last one are arguments of
 * jq.dispatch() too, in the same order but for batch_id before SPEC_META */
enum
{
	SPEC_NAME,
	SPEC_PAYLOAD,
	SPEC_QUEUE,
	SPEC_PRIORITY,
	SPEC_DELAY,
	SPEC_RUN_AT,
	SPEC_MAX_ATTEMPTS,
	SPEC_UNIQUE_KEY,
	SPEC_UNIQUE_FOR,
	SPEC_UNIQUE_UNTIL,
	SPEC_ON_CONFLICT,
	SPEC_META,
	SPEC_GROUP_KEY,
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
	JOBS_BATCH_ID,
	JOBS_CALLBACK_OF,
	JOBS_UNIQUE_KEY,
	JOBS_UNIQUE_FOR,
	JOBS_UNIQUE_UNTIL,
	JOBS_GROUP_KEY,
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
	FAILED_BATCH_ID,
	FAILED_CALLBACK_OF,
	FAILED_UNIQUE_KEY,
	FAILED_UNIQUE_FOR,
	FAILED_UNIQUE_UNTIL,
	FAILED_GROUP_KEY,
	FAILED_SUPERSEDED_BY,
	FAILED_NATTS = FAILED_SUPERSEDED_BY
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
	HANDLERS_UNIQUE_KEY,
	HANDLERS_UNIQUE_FOR,
	HANDLERS_UNIQUE_UNTIL,
	HANDLERS_ON_CONFLICT,
	HANDLERS_DEBOUNCE_MAX,
	HANDLERS_OVERLAP_KEY,
	HANDLERS_OVERLAP_WAIT,
	HANDLERS_MAX_RUNNING,
	HANDLERS_RUNNING_KEY,
	HANDLERS_RATE_KEY,
	HANDLERS_RATE_MAX,
	HANDLERS_RATE_PER,
	HANDLERS_RATE_BURST,
	HANDLERS_LIMIT_SCOPE,
	HANDLERS_GROUP_KEY,
	HANDLERS_MIDDLEWARE,
	HANDLERS_REGISTERED_BY,
	HANDLERS_REGISTERED_AT,
	HANDLERS_NATTS = HANDLERS_REGISTERED_AT,
	ALIASES_ALIAS = 1,
	ALIASES_NAME
};

/* columns of jq.claims */
enum
{
	CLAIMS_NAME = 1,
	CLAIMS_KEY,
	CLAIMS_JOB_ID,
	CLAIMS_OUTLIVES,
	CLAIMS_CLAIMED_AT,
	CLAIMS_EXPIRES_AT
};

/* columns of jq.batches */
enum
{
	BATCHES_ID = 1,
	BATCHES_NAME,
	BATCHES_ROLE,
	BATCHES_TOTAL,
	BATCHES_ALLOW_FAILURES,
	BATCHES_THEN_JOB,
	BATCHES_CATCH_JOB,
	BATCHES_FINALLY_JOB,
	BATCHES_CREATED_AT,
	BATCHES_CLOSED_AT,
	BATCHES_CANCELLED_AT,
	BATCHES_CANCELLED_BY,
	BATCHES_CAUGHT_AT,
	BATCHES_DONE_AT,
	BATCHES_ENDED_AT,
	BATCHES_FINISHED_AT,
	BATCHES_NATTS = BATCHES_FINISHED_AT
};

/* columns of jq.batch_counts */
enum
{
	COUNTS_BATCH_ID = 1,
	COUNTS_ID,
	COUNTS_TOTAL,
	COUNTS_ENDED,
	COUNTS_FAILED,
	COUNTS_CANCELLED,
	COUNTS_NATTS = COUNTS_CANCELLED
};

/* columns of jq.queues */
enum
{
	QUEUES_QUEUE = 1,
	QUEUES_MAX_RUNNING
};

/* columns of jq.limit_settings */
enum
{
	LIMITS_SCOPE = 1,
	LIMITS_KEY,
	LIMITS_MAX_RUNNING,
	LIMITS_RATE_MAX,
	LIMITS_RATE_PER,
	LIMITS_RATE_BURST
};

/* columns of jq.holders */
enum
{
	HOLDERS_KIND = 1,
	HOLDERS_SCOPE,
	HOLDERS_KEY,
	HOLDERS_PLACE,
	HOLDERS_JOB_ID,
	HOLDERS_TOKEN,
	HOLDERS_NATTS = HOLDERS_TOKEN
};

/* columns of jq.held */
enum
{
	HELD_KIND = 1,
	HELD_SCOPE,
	HELD_KEY,
	HELD_PRIORITY,
	HELD_JOB_ID,
	HELD_DUE_AT,
	HELD_PLACES,
	HELD_EVERY,
	HELD_WAKE_AT,
	HELD_NATTS = HELD_WAKE_AT
};

/* columns of jq.group_members */
enum
{
	MEMBERS_KEY = 1,
	MEMBERS_JOB_ID,
	MEMBERS_NATTS = MEMBERS_JOB_ID
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
	Oid			claims;
	Oid			claims_job_id;
	Oid			batches;
	Oid			batches_pkey;
	Oid			batches_sequence;
	Oid			batch_counts;
	Oid			queues;
	Oid			limit_settings;
	Oid			limit_settings_pkey;
	Oid			holders;
	Oid			holders_pkey;
	Oid			holders_job_id;
	Oid			held;
	Oid			held_pkey;
	Oid			held_job_id;
	Oid			group_members;
	Oid			group_members_pkey;
	Oid			context_type;	/* jq.context */
	Oid			spec_type;		/* jq.job_spec */
} JqCatalog;

#endif							/* JQ_CATALOG_H */
