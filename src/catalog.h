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
	JOBS_ROLE,
	JOBS_QUEUE,
	JOBS_NAME,
	JOBS_PAYLOAD,
	JOBS_TOKEN,
	JOBS_RESERVED_AT,
	JOBS_LEASE_UNTIL,
	JOBS_NATTS = JOBS_LEASE_UNTIL
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
	FAILED_CREATED_AT,
	FAILED_FAILED_AT,
	FAILED_NATTS = FAILED_FAILED_AT
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
	Oid			jobs_due;
	Oid			jobs_sequence;
	Oid			failed_jobs;
	Oid			failed_jobs_pkey;
	Oid			handlers;
	Oid			handlers_pkey;
	Oid			handler_aliases;
	Oid			handler_aliases_pkey;
	Oid			grants;
	Oid			context_type;	/* jq.context */
	Oid			spec_type;		/* jq.job_spec */
} JqCatalog;

#endif							/* JQ_CATALOG_H */
