/* jq--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION jq" to load this file. \quit

SET LOCAL search_path = pg_catalog, pg_temp;

-- Whoever owns the schema could put functions there that users of jq would
-- call.  CREATE EXTENSION makes it; a restore has made it already.
DO $$
BEGIN
	IF NOT EXISTS (SELECT
				   FROM pg_namespace AS n
				   JOIN pg_roles AS r ON r.oid = n.nspowner
				   WHERE n.nspname = 'jq' AND (r.rolsuper OR r.rolname = current_user)) THEN
		RAISE EXCEPTION USING
			ERRCODE = 'object_not_in_prerequisite_state',
			MESSAGE = 'schema "jq" belongs to a role that is no superuser',
			HINT = 'Drop the schema, or rename it.';
	END IF;
END
$$;

-- What a former installation granted on the schema outlived it.
DO $$
DECLARE
	grantee text;
BEGIN
	FOR grantee IN
		SELECT DISTINCT r.rolname
		FROM pg_namespace AS n
		CROSS JOIN aclexplode(n.nspacl) AS a
		JOIN pg_roles AS r ON r.oid = a.grantee
		WHERE n.nspname = 'jq' AND a.grantee <> n.nspowner
	LOOP
		EXECUTE format('REVOKE ALL ON SCHEMA jq FROM %I', grantee);
	END LOOP;
END
$$;

COMMENT ON SCHEMA jq IS 'jq, the job queue: dispatch(), register(), and the views that show what runs';

/* ---------------------------------------------------------------------
 * Types
 * --------------------------------------------------------------------- */

CREATE TYPE jq.job_spec AS (
	name text,
	payload jsonb,
	queue text,
	priority integer,
	delay interval,
	run_at timestamptz,
	max_attempts integer,
	unique_key text,
	unique_for interval,
	unique_until text,
	on_conflict text,
	meta jsonb,
	group_key text,
	chain jsonb
);

COMMENT ON TYPE jq.job_spec IS 'a job that is not dispatched yet, as jq.job() builds it; a plain value that carries no role and no id';
COMMENT ON COLUMN jq.job_spec.name IS 'handler to run';
COMMENT ON COLUMN jq.job_spec.payload IS 'argument of the handler; NULL: {}';
COMMENT ON COLUMN jq.job_spec.queue IS 'queue to wait in; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.priority IS 'smaller runs first; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.delay IS 'due this long after dispatch; excludes run_at';
COMMENT ON COLUMN jq.job_spec.run_at IS 'due at this time, at once if it has passed; excludes delay';
COMMENT ON COLUMN jq.job_spec.max_attempts IS 'attempts before the job fails for good; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.unique_key IS 'no second job of the handler with this key; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.unique_for IS 'how long the key is claimed, from when the job is due; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.unique_until IS 'done, start or expiry: what ends the claim; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.on_conflict IS 'keep, replace, debounce or error: what becomes of a second job; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.meta IS 'what the dispatcher wants to say about the job; shown to the handler, not used by jq';
COMMENT ON COLUMN jq.job_spec.group_key IS 'jobs of a group run one after the other, in the order of their ids; NULL: as registered';
COMMENT ON COLUMN jq.job_spec.chain IS 'jobs that follow, as jq.chain() builds it; NULL: none';

CREATE TYPE jq.context AS (
	id bigint,
	name text,
	queue text,
	attempt integer,
	max_attempts integer,
	chain_id bigint,
	batch_id bigint,
	dispatched_at timestamptz,
	dispatched_by text,
	deadline timestamptz,
	previous jsonb,
	failure jsonb,
	meta jsonb
);

COMMENT ON TYPE jq.context IS 'what a handler is told about the job it runs';
COMMENT ON COLUMN jq.context.id IS 'the job''s id; 0 under jq.run()';
COMMENT ON COLUMN jq.context.name IS 'name the job was dispatched under';
COMMENT ON COLUMN jq.context.queue IS 'queue the job waited in';
COMMENT ON COLUMN jq.context.attempt IS 'number of this attempt, from 1';
COMMENT ON COLUMN jq.context.max_attempts IS 'attempts before the job fails for good';
COMMENT ON COLUMN jq.context.chain_id IS 'chain that the job is a link of: the id of its first job; NULL: none';
COMMENT ON COLUMN jq.context.batch_id IS 'batch that the job is in, or that it is a callback of; NULL: none';
COMMENT ON COLUMN jq.context.dispatched_at IS 'time of the dispatch';
COMMENT ON COLUMN jq.context.dispatched_by IS 'role that dispatched the job, and that it runs as';
COMMENT ON COLUMN jq.context.deadline IS 'no further attempt is made after this time (retry_for); NULL: max_attempts counts';
COMMENT ON COLUMN jq.context.previous IS 'result of the link before this one';
COMMENT ON COLUMN jq.context.failure IS 'for a job dispatched as on_failed or catch_job: the failed job''s id, name, queue, attempts, error, sqlstate, detail, hint, context and failed_at';
COMMENT ON COLUMN jq.context.meta IS 'what the dispatcher said about the job';

/* ---------------------------------------------------------------------
 * Tables
 *
 * Columns and their order are known to the library (src/catalog.h).  Roles
 * and functions are stored by name: an OID means something else after a
 * dump is restored, and pg_upgrade refuses most reg* columns.
 * --------------------------------------------------------------------- */

CREATE TABLE jq.jobs (
	id bigint GENERATED BY DEFAULT AS IDENTITY,
	stamp bigint NOT NULL,
	available_at timestamptz NOT NULL,
	created_at timestamptz NOT NULL,
	origin oid NOT NULL,
	priority integer NOT NULL,
	attempts integer NOT NULL DEFAULT 0,
	max_attempts integer NOT NULL,
	exceptions integer NOT NULL DEFAULT 0,
	role text COLLATE "C" NOT NULL,
	queue text COLLATE "C" NOT NULL,
	name text COLLATE "C" NOT NULL,
	payload jsonb NOT NULL,
	counts_from timestamptz,
	meta jsonb,
	failure jsonb,
	chain_id bigint,
	chain jsonb,
	previous jsonb,
	batch_id bigint,
	callback_of bigint,
	unique_key text COLLATE "C",
	unique_for interval,
	unique_until text COLLATE "C",
	group_key text COLLATE "C",
	token bigint,
	reserved_at timestamptz,
	lease_until timestamptz,
	holder_pid integer,
	holder_started timestamptz,
	last_error text,
	CONSTRAINT jobs_pkey PRIMARY KEY (id),
	CONSTRAINT jobs_attempts_check CHECK (attempts >= 0),
	CONSTRAINT jobs_max_attempts_check CHECK (max_attempts > 0),
	CONSTRAINT jobs_exceptions_check CHECK (exceptions >= 0),
	CONSTRAINT jobs_queue_check CHECK (octet_length(queue) BETWEEN 1 AND 59),
	CONSTRAINT jobs_name_check CHECK (octet_length(name) BETWEEN 1 AND 59),
	CONSTRAINT jobs_lease_check CHECK (num_nulls(token, reserved_at, lease_until) IN (0, 3)),
	CONSTRAINT jobs_holder_check CHECK (num_nulls(holder_pid, holder_started) IN (0, 2))
);

-- A queue's table turns over all the time: vacuum by number of dead rows, not
-- by share, and never give pages back that the next second needs again.
ALTER TABLE jq.jobs SET (
	autovacuum_vacuum_scale_factor = 0,
	autovacuum_vacuum_threshold = 10000,
	autovacuum_vacuum_cost_delay = 0,
	autovacuum_analyze_scale_factor = 0,
	autovacuum_analyze_threshold = 100000,
	vacuum_truncate = off
);

CREATE INDEX jobs_due ON jq.jobs (origin, role, queue, priority, available_at, id);

-- The library leaves jobs without a batch out of it by itself (src/insert.c).
CREATE INDEX jobs_batch ON jq.jobs (batch_id) WHERE batch_id IS NOT NULL;

COMMENT ON TABLE jq.jobs IS 'jobs that wait or run; a row leaves when its job is done or has failed for good';
COMMENT ON COLUMN jq.jobs.id IS 'the job''s id, for life: kept through failure and retry';
COMMENT ON COLUMN jq.jobs.stamp IS 'random mark of this dispatch; with the id it names a job beyond doubt, also after a restore';
COMMENT ON COLUMN jq.jobs.available_at IS 'not to be started before this time; infinity: waits in jq.held for a limit or for its group';
COMMENT ON COLUMN jq.jobs.created_at IS 'time of the dispatch';
COMMENT ON COLUMN jq.jobs.origin IS 'database the job was dispatched in, as pg_database.oid; another value (0: written by a restore, by replication or by hand) holds the job until jq.adopt()';
COMMENT ON COLUMN jq.jobs.priority IS 'smaller runs first';
COMMENT ON COLUMN jq.jobs.attempts IS 'attempts spent';
COMMENT ON COLUMN jq.jobs.max_attempts IS 'attempts before the job fails for good';
COMMENT ON COLUMN jq.jobs.exceptions IS 'those of them that ended with an error, not with a timeout or the death of the process';
COMMENT ON COLUMN jq.jobs.role IS 'name of the role that dispatched the job, and that it runs as';
COMMENT ON COLUMN jq.jobs.queue IS 'queue the job waits in';
COMMENT ON COLUMN jq.jobs.name IS 'handler to run';
COMMENT ON COLUMN jq.jobs.payload IS 'argument of the handler';
COMMENT ON COLUMN jq.jobs.counts_from IS 'when retry_for and expires began to count: when the job was due first, or was retried; NULL: at created_at';
COMMENT ON COLUMN jq.jobs.meta IS 'what the dispatcher said about the job';
COMMENT ON COLUMN jq.jobs.failure IS 'failure of another job that this one was dispatched to follow (on_failed, catch_job)';
COMMENT ON COLUMN jq.jobs.chain_id IS 'chain that the job is a link of: the id of its first job';
COMMENT ON COLUMN jq.jobs.chain IS 'the links that follow, and the job that follows a failure';
COMMENT ON COLUMN jq.jobs.previous IS 'result of the link before this one';
COMMENT ON COLUMN jq.jobs.batch_id IS 'batch that the job is in';
COMMENT ON COLUMN jq.jobs.callback_of IS 'batch that the job is a callback of';
COMMENT ON COLUMN jq.jobs.unique_key IS 'key that the job has, or had, a claim on; NULL: it is not unique';
COMMENT ON COLUMN jq.jobs.unique_for IS 'how long the claim lasts; NULL: no limit';
COMMENT ON COLUMN jq.jobs.unique_until IS 'done, start or expiry: what ends the claim';
COMMENT ON COLUMN jq.jobs.group_key IS 'group that the job is in; NULL: none';
COMMENT ON COLUMN jq.jobs.token IS 'proof of the lease under which the job is held; NULL: not leased';
COMMENT ON COLUMN jq.jobs.reserved_at IS 'start of the lease';
COMMENT ON COLUMN jq.jobs.lease_until IS 'end of the lease; the job is free again after it';
COMMENT ON COLUMN jq.jobs.holder_pid IS 'session of this server that holds the lease, which ends with it';
COMMENT ON COLUMN jq.jobs.holder_started IS 'start of that session, since process ids come back';
COMMENT ON COLUMN jq.jobs.last_error IS 'SQLSTATE and message of the last attempt that failed';

CREATE TABLE jq.failed_jobs (
	id bigint NOT NULL,
	queue text COLLATE "C" NOT NULL,
	name text COLLATE "C" NOT NULL,
	payload jsonb NOT NULL,
	priority integer NOT NULL,
	attempts integer NOT NULL,
	max_attempts integer NOT NULL,
	role text COLLATE "C" NOT NULL,
	error text NOT NULL,
	sqlstate text NOT NULL,
	detail text,
	hint text,
	context text,
	log text,
	created_at timestamptz NOT NULL,
	failed_at timestamptz NOT NULL,
	meta jsonb,
	failure jsonb,
	chain_id bigint,
	chain jsonb,
	previous jsonb,
	batch_id bigint,
	callback_of bigint,
	unique_key text COLLATE "C",
	unique_for interval,
	unique_until text COLLATE "C",
	group_key text COLLATE "C",
	superseded_by bigint,
	CONSTRAINT failed_jobs_pkey PRIMARY KEY (id)
);

CREATE INDEX failed_jobs_failed_at ON jq.failed_jobs (failed_at);
CREATE INDEX failed_jobs_batch ON jq.failed_jobs (batch_id);

COMMENT ON TABLE jq.failed_jobs IS 'jobs that failed for good; jq.retry() puts one back, jq.forget() and jq.flush() remove them';
COMMENT ON COLUMN jq.failed_jobs.id IS 'the id the job has had since its dispatch';
COMMENT ON COLUMN jq.failed_jobs.queue IS 'queue the job waited in';
COMMENT ON COLUMN jq.failed_jobs.name IS 'handler of the job';
COMMENT ON COLUMN jq.failed_jobs.payload IS 'argument of the handler';
COMMENT ON COLUMN jq.failed_jobs.priority IS 'priority of the job';
COMMENT ON COLUMN jq.failed_jobs.attempts IS 'attempts made';
COMMENT ON COLUMN jq.failed_jobs.max_attempts IS 'attempts allowed; a retry starts with all of them';
COMMENT ON COLUMN jq.failed_jobs.role IS 'name of the role that dispatched the job';
COMMENT ON COLUMN jq.failed_jobs.error IS 'primary message of the last error';
COMMENT ON COLUMN jq.failed_jobs.sqlstate IS 'SQLSTATE of the last error';
COMMENT ON COLUMN jq.failed_jobs.detail IS 'detail of the last error';
COMMENT ON COLUMN jq.failed_jobs.hint IS 'hint of the last error';
COMMENT ON COLUMN jq.failed_jobs.context IS 'call stack of the last error';
COMMENT ON COLUMN jq.failed_jobs.log IS 'what the last attempt wrote with jq.log(), its end if that is long';
COMMENT ON COLUMN jq.failed_jobs.created_at IS 'time of the dispatch';
COMMENT ON COLUMN jq.failed_jobs.failed_at IS 'time of the last error';
COMMENT ON COLUMN jq.failed_jobs.meta IS 'what the dispatcher said about the job';
COMMENT ON COLUMN jq.failed_jobs.failure IS 'failure of another job that this one was dispatched to follow (on_failed, catch_job)';
COMMENT ON COLUMN jq.failed_jobs.chain_id IS 'chain that the job is a link of: the id of its first job';
COMMENT ON COLUMN jq.failed_jobs.chain IS 'the links that would have followed; they do if the job is retried and done';
COMMENT ON COLUMN jq.failed_jobs.previous IS 'result of the link before this one';
COMMENT ON COLUMN jq.failed_jobs.batch_id IS 'batch that the job is in';
COMMENT ON COLUMN jq.failed_jobs.callback_of IS 'batch that the job is a callback of';
COMMENT ON COLUMN jq.failed_jobs.unique_key IS 'key that the job had a claim on; a retry takes it again';
COMMENT ON COLUMN jq.failed_jobs.unique_for IS 'how long the claim lasts; NULL: no limit';
COMMENT ON COLUMN jq.failed_jobs.unique_until IS 'done, start or expiry: what ends the claim';
COMMENT ON COLUMN jq.failed_jobs.group_key IS 'group that the job is in';
COMMENT ON COLUMN jq.failed_jobs.superseded_by IS 'newer job that held the key when a retry was tried, which therefore was not made; NULL: none';

CREATE TABLE jq.handlers (
	name text COLLATE "C" NOT NULL,
	handler text NOT NULL,
	queue text COLLATE "C" NOT NULL,
	priority integer NOT NULL,
	max_attempts integer NOT NULL,
	timeout interval,
	backoff interval[],
	retry_for interval,
	expires interval,
	fail_on_timeout boolean NOT NULL,
	max_exceptions integer,
	permanent_errors text[],
	on_failed text COLLATE "C",
	keep_result interval,
	unique_key text,
	unique_for interval,
	unique_until text,
	on_conflict text,
	debounce_max interval,
	overlap_key text,
	overlap_wait interval,
	max_running integer,
	running_key text,
	rate_key text,
	rate_max integer,
	rate_per interval,
	rate_burst integer,
	limit_scope text COLLATE "C",
	group_key text,
	middleware text[],
	registered_by text COLLATE "C" NOT NULL,
	registered_at timestamptz NOT NULL,
	CONSTRAINT handlers_pkey PRIMARY KEY (name),
	CONSTRAINT handlers_max_attempts_check CHECK (max_attempts > 0)
);

COMMENT ON TABLE jq.handlers IS 'handlers by name, as jq.register() left them';
COMMENT ON COLUMN jq.handlers.name IS 'name that jobs are dispatched under';
COMMENT ON COLUMN jq.handlers.handler IS 'function to call, as schema-qualified signature';
COMMENT ON COLUMN jq.handlers.queue IS 'queue of jobs dispatched without one';
COMMENT ON COLUMN jq.handlers.priority IS 'priority of jobs dispatched without one';
COMMENT ON COLUMN jq.handlers.max_attempts IS 'attempts of jobs dispatched without a number';
COMMENT ON COLUMN jq.handlers.timeout IS 'time limit of one attempt; NULL: none';
COMMENT ON COLUMN jq.handlers.backoff IS 'waits after the 1st, 2nd, ... failed attempt, the last one repeats; NULL: 10 s x attempt, a day at most';
COMMENT ON COLUMN jq.handlers.retry_for IS 'how long attempts are repeated, whatever their number; NULL: max_attempts counts';
COMMENT ON COLUMN jq.handlers.expires IS 'not to be started so long after it was due first; NULL: never too late';
COMMENT ON COLUMN jq.handlers.fail_on_timeout IS 'whether a job that exceeds the time limit fails for good';
COMMENT ON COLUMN jq.handlers.max_exceptions IS 'errors after which a job fails for good, whatever attempts are left; NULL: no such limit';
COMMENT ON COLUMN jq.handlers.permanent_errors IS 'SQLSTATEs, or their two-letter classes, after which a job fails for good at once';
COMMENT ON COLUMN jq.handlers.on_failed IS 'handler of the job that is dispatched when one fails for good; NULL: none';
COMMENT ON COLUMN jq.handlers.keep_result IS 'how long results are kept for jq.result(); NULL: not at all';
COMMENT ON COLUMN jq.handlers.unique_key IS 'jsonpath or function that gives the key no two jobs may have; NULL: one job of the handler if it is unique at all';
COMMENT ON COLUMN jq.handlers.unique_for IS 'how long a key is claimed, from when the job is due; NULL: no limit';
COMMENT ON COLUMN jq.handlers.unique_until IS 'done, start or expiry: what ends the claim; NULL: done';
COMMENT ON COLUMN jq.handlers.on_conflict IS 'keep, replace, debounce or error: what becomes of a second job; NULL: keep';
COMMENT ON COLUMN jq.handlers.debounce_max IS 'how long debounced dispatches can put a job off altogether; NULL: no limit';
COMMENT ON COLUMN jq.handlers.overlap_key IS 'jsonpath or function: no two jobs with the same key run at a time';
COMMENT ON COLUMN jq.handlers.overlap_wait IS 'put off for so long if the key is taken; NULL: until it is free';
COMMENT ON COLUMN jq.handlers.max_running IS 'so many jobs with the same key run at a time; NULL: no limit';
COMMENT ON COLUMN jq.handlers.running_key IS 'jsonpath or function for that; NULL: all jobs of the handler have the same';
COMMENT ON COLUMN jq.handlers.rate_key IS 'jsonpath or function for rate_max; NULL: all jobs of the handler have the same';
COMMENT ON COLUMN jq.handlers.rate_max IS 'so many jobs with the same key are started in rate_per; NULL: no limit';
COMMENT ON COLUMN jq.handlers.rate_per IS 'period that rate_max is for';
COMMENT ON COLUMN jq.handlers.rate_burst IS 'size of the token bucket; NULL: rate_max in each fixed window of rate_per';
COMMENT ON COLUMN jq.handlers.limit_scope IS 'handlers with the same scope share the limits of equal keys; NULL: the handler''s own';
COMMENT ON COLUMN jq.handlers.group_key IS 'jsonpath or function: jobs of a group run one after the other, in the order of their ids';
COMMENT ON COLUMN jq.handlers.middleware IS 'functions (jsonb, jq.context) that are asked in order before each attempt and may put it off, as schema-qualified signatures';
COMMENT ON COLUMN jq.handlers.registered_by IS 'role that registered the handler';
COMMENT ON COLUMN jq.handlers.registered_at IS 'time of the registration';

-- No foreign key: pg_restore with several jobs may load both tables at a time.
CREATE TABLE jq.handler_aliases (
	alias text COLLATE "C" NOT NULL,
	name text COLLATE "C" NOT NULL,
	CONSTRAINT handler_aliases_pkey PRIMARY KEY (alias)
);

CREATE INDEX handler_aliases_name ON jq.handler_aliases (name);

COMMENT ON TABLE jq.handler_aliases IS 'former names of renamed handlers, under which waiting jobs still find them';
COMMENT ON COLUMN jq.handler_aliases.alias IS 'former name';
COMMENT ON COLUMN jq.handler_aliases.name IS 'name the handler has now';

CREATE TABLE jq.pauses (
	queue text COLLATE "C",
	paused_at timestamptz NOT NULL,
	paused_by text COLLATE "C" NOT NULL,
	reason text,
	until timestamptz
);

CREATE UNIQUE INDEX pauses_key ON jq.pauses (coalesce(queue, ''));

COMMENT ON TABLE jq.pauses IS 'queues that jq.pause() stopped, and the mark that stops all of them';
COMMENT ON COLUMN jq.pauses.queue IS 'queue that is paused; NULL: the mark for all queues';
COMMENT ON COLUMN jq.pauses.paused_at IS 'time of jq.pause()';
COMMENT ON COLUMN jq.pauses.paused_by IS 'role that paused';
COMMENT ON COLUMN jq.pauses.reason IS 'why, as that role said';
COMMENT ON COLUMN jq.pauses.until IS 'when the pause ends by itself; NULL: with jq.resume()';

CREATE TABLE jq.cancellations (
	id bigint NOT NULL,
	stamp bigint NOT NULL,
	requested_at timestamptz NOT NULL,
	requested_by text COLLATE "C" NOT NULL,
	reason text
);

CREATE INDEX cancellations_id ON jq.cancellations (id);

COMMENT ON TABLE jq.cancellations IS 'jobs that were running when jq.cancel() was called, until they have ended';
COMMENT ON COLUMN jq.cancellations.id IS 'the job''s id';
COMMENT ON COLUMN jq.cancellations.stamp IS 'the job''s stamp';
COMMENT ON COLUMN jq.cancellations.requested_at IS 'time of jq.cancel()';
COMMENT ON COLUMN jq.cancellations.requested_by IS 'role that called it';
COMMENT ON COLUMN jq.cancellations.reason IS 'why, as that role said';

CREATE TABLE jq.results (
	id bigint NOT NULL,
	role text COLLATE "C" NOT NULL,
	done_at timestamptz NOT NULL,
	keep_until timestamptz NOT NULL,
	result jsonb
);

CREATE INDEX results_id ON jq.results (id);
CREATE INDEX results_keep_until ON jq.results (keep_until);

COMMENT ON TABLE jq.results IS 'results of done jobs whose handlers were registered with keep_result; jq.result() reads them';
COMMENT ON COLUMN jq.results.id IS 'the job''s id';
COMMENT ON COLUMN jq.results.role IS 'name of the role that the job ran as';
COMMENT ON COLUMN jq.results.done_at IS 'end of the job';
COMMENT ON COLUMN jq.results.keep_until IS 'when the row may be removed';
COMMENT ON COLUMN jq.results.result IS 'what the handler returned, if that was jsonb';

CREATE TABLE jq.attempts (
	id bigint NOT NULL,
	attempt integer NOT NULL,
	name text COLLATE "C" NOT NULL,
	queue text COLLATE "C" NOT NULL,
	role text COLLATE "C" NOT NULL,
	pid integer,
	started_at timestamptz,
	ended_at timestamptz NOT NULL,
	outcome text NOT NULL,
	sqlstate text,
	error text,
	log text,
	CONSTRAINT attempts_outcome_check CHECK (outcome IN ('done', 'failed', 'released', 'skipped', 'cancelled'))
);

CREATE INDEX attempts_id ON jq.attempts (id);
CREATE INDEX attempts_ended_at ON jq.attempts (ended_at);

COMMENT ON TABLE jq.attempts IS 'history of attempts, kept for jq.keep_attempts';
COMMENT ON COLUMN jq.attempts.id IS 'the job''s id';
COMMENT ON COLUMN jq.attempts.attempt IS 'number of the attempt, from 1; the same again after one that was not spent';
COMMENT ON COLUMN jq.attempts.name IS 'handler of the job';
COMMENT ON COLUMN jq.attempts.queue IS 'queue of the job';
COMMENT ON COLUMN jq.attempts.role IS 'name of the role that the job ran as';
COMMENT ON COLUMN jq.attempts.pid IS 'process that ran it; NULL: it was not run';
COMMENT ON COLUMN jq.attempts.started_at IS 'start of the attempt; NULL: it was not run';
COMMENT ON COLUMN jq.attempts.ended_at IS 'end of the attempt, or when its end was noticed';
COMMENT ON COLUMN jq.attempts.outcome IS 'done, failed (tried again or not), released, skipped or cancelled';
COMMENT ON COLUMN jq.attempts.sqlstate IS 'SQLSTATE of its error';
COMMENT ON COLUMN jq.attempts.error IS 'message of its error, or reason of its release or skip';
COMMENT ON COLUMN jq.attempts.log IS 'what it wrote with jq.log(), its end if that is long';

CREATE TABLE jq.claims (
	name text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	job_id bigint NOT NULL,
	outlives boolean NOT NULL,
	claimed_at timestamptz NOT NULL,
	expires_at timestamptz,
	CONSTRAINT claims_pkey PRIMARY KEY (name, key),
	CONSTRAINT claims_outlives_check CHECK (NOT outlives OR expires_at IS NOT NULL)
);

CREATE INDEX claims_job_id ON jq.claims (job_id);
CREATE INDEX claims_expires_at ON jq.claims (expires_at);

COMMENT ON TABLE jq.claims IS 'keys of unique jobs';
COMMENT ON COLUMN jq.claims.name IS 'handler of the job';
COMMENT ON COLUMN jq.claims.key IS 'the key, or if that is longer than 255 bytes its SHA-256';
COMMENT ON COLUMN jq.claims.job_id IS 'job that holds the key; if it is there no more, the claim is void, unless it outlives the job';
COMMENT ON COLUMN jq.claims.outlives IS 'whether the claim lasts until expires_at whatever becomes of the job';
COMMENT ON COLUMN jq.claims.claimed_at IS 'time of the first dispatch; debounce_max counts from it';
COMMENT ON COLUMN jq.claims.expires_at IS 'a job that is due from then on may take the key over; NULL: never';

CREATE SEQUENCE jq.batches_id_seq AS bigint;

COMMENT ON SEQUENCE jq.batches_id_seq IS 'ids of batches';

CREATE TABLE jq.batches (
	id bigint NOT NULL,
	name text COLLATE "C",
	role text COLLATE "C" NOT NULL,
	total bigint NOT NULL DEFAULT 0,
	allow_failures boolean NOT NULL,
	then_job jsonb,
	catch_job jsonb,
	finally_job jsonb,
	created_at timestamptz NOT NULL,
	closed_at timestamptz,
	cancelled_at timestamptz,
	cancelled_by text COLLATE "C",
	caught_at timestamptz,
	done_at timestamptz,
	ended_at timestamptz,
	finished_at timestamptz,
	CONSTRAINT batches_pkey PRIMARY KEY (id)
);

CREATE INDEX batches_finished_at ON jq.batches (finished_at);

COMMENT ON TABLE jq.batches IS 'batches of jobs; jq.batch_status shows how far they are';
COMMENT ON COLUMN jq.batches.id IS 'the batch''s id';
COMMENT ON COLUMN jq.batches.name IS 'name that its creator gave it';
COMMENT ON COLUMN jq.batches.role IS 'name of the role that created it, and that its callbacks run as';
COMMENT ON COLUMN jq.batches.total IS 'jobs that it was created with; others are in jq.batch_counts';
COMMENT ON COLUMN jq.batches.allow_failures IS 'whether it goes on when a job fails; else the first failure cancels it';
COMMENT ON COLUMN jq.batches.then_job IS 'job that is queued when all jobs are done and none failed';
COMMENT ON COLUMN jq.batches.catch_job IS 'job that is queued when the first one fails';
COMMENT ON COLUMN jq.batches.finally_job IS 'job that is queued when no job is left';
COMMENT ON COLUMN jq.batches.created_at IS 'time of its creation';
COMMENT ON COLUMN jq.batches.closed_at IS 'when it became able to finish; NULL: jq.close_batch() has still to be called';
COMMENT ON COLUMN jq.batches.cancelled_at IS 'when it was cancelled';
COMMENT ON COLUMN jq.batches.cancelled_by IS 'role that called jq.cancel_batch(); NULL: a failure cancelled it';
COMMENT ON COLUMN jq.batches.caught_at IS 'when catch_job was queued, or would have been';
COMMENT ON COLUMN jq.batches.done_at IS 'when then_job was queued, or would have been';
COMMENT ON COLUMN jq.batches.ended_at IS 'when finally_job was queued, or would have been';
COMMENT ON COLUMN jq.batches.finished_at IS 'when no job was left; NULL again after a retry';

-- Each process adds up in a row of its own, which it updates in place.
CREATE TABLE jq.batch_counts (
	batch_id bigint NOT NULL,
	id bigint NOT NULL,
	total bigint NOT NULL,
	ended bigint NOT NULL,
	failed bigint NOT NULL,
	cancelled bigint NOT NULL
) WITH (
	fillfactor = 20,
	autovacuum_vacuum_scale_factor = 0,
	autovacuum_vacuum_threshold = 10000,
	autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX batch_counts_batch ON jq.batch_counts (batch_id);

COMMENT ON TABLE jq.batch_counts IS 'numbers of batches'' jobs, to be summed up; a row for each process that has run some';
COMMENT ON COLUMN jq.batch_counts.batch_id IS 'the batch';
COMMENT ON COLUMN jq.batch_counts.id IS 'random mark of the row';
COMMENT ON COLUMN jq.batch_counts.total IS 'jobs that were added';
COMMENT ON COLUMN jq.batch_counts.ended IS 'jobs that ended in any way, with those of their chains that will not follow';
COMMENT ON COLUMN jq.batch_counts.failed IS 'jobs that failed for good and were not retried';
COMMENT ON COLUMN jq.batch_counts.cancelled IS 'jobs that were not run since the batch was cancelled';

CREATE TABLE jq.queues (
	queue text COLLATE "C" NOT NULL,
	max_running integer,
	note text,
	CONSTRAINT queues_pkey PRIMARY KEY (queue),
	CONSTRAINT queues_max_running_check CHECK (max_running BETWEEN 0 AND 10000)
);

COMMENT ON TABLE jq.queues IS 'what jq.set_queue() said of queues; others need no row';
COMMENT ON COLUMN jq.queues.queue IS 'name of the queue';
COMMENT ON COLUMN jq.queues.max_running IS 'so many of its jobs run at a time; NULL: no limit';
COMMENT ON COLUMN jq.queues.note IS 'a remark';

CREATE TABLE jq.limit_settings (
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	max_running integer,
	rate_max integer,
	rate_per interval,
	rate_burst integer,
	note text,
	CONSTRAINT limit_settings_pkey PRIMARY KEY (scope, key)
);

COMMENT ON TABLE jq.limit_settings IS 'limits of single keys, as jq.set_limit() left them';
COMMENT ON COLUMN jq.limit_settings.scope IS 'limit_scope of handlers, or the name of one';
COMMENT ON COLUMN jq.limit_settings.key IS 'the key, or if that is longer than 255 bytes its SHA-256';
COMMENT ON COLUMN jq.limit_settings.max_running IS 'in place of the handler''s; NULL: the handler''s';
COMMENT ON COLUMN jq.limit_settings.rate_max IS 'in place of the handler''s; NULL: the handler''s';
COMMENT ON COLUMN jq.limit_settings.rate_per IS 'in place of the handler''s; NULL: the handler''s';
COMMENT ON COLUMN jq.limit_settings.rate_burst IS 'in place of the handler''s; NULL: the handler''s';
COMMENT ON COLUMN jq.limit_settings.note IS 'a remark';

CREATE TABLE jq.rates (
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	since timestamptz NOT NULL,
	used double precision NOT NULL,
	CONSTRAINT rates_pkey PRIMARY KEY (scope, key)
) WITH (fillfactor = 50);

COMMENT ON TABLE jq.rates IS 'how far rate limits are used up';
COMMENT ON COLUMN jq.rates.scope IS 'limit_scope of handlers, or the name of one';
COMMENT ON COLUMN jq.rates.key IS 'the key, or if that is longer than 255 bytes its SHA-256';
COMMENT ON COLUMN jq.rates.since IS 'start of the fixed window, or when the token bucket was looked at last';
COMMENT ON COLUMN jq.rates.used IS 'starts in the window, or tokens missing in the bucket at that time';

CREATE TABLE jq.holders (
	kind text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	place integer NOT NULL,
	job_id bigint NOT NULL,
	token bigint NOT NULL,
	CONSTRAINT holders_pkey PRIMARY KEY (kind, scope, key, place)
);

CREATE INDEX holders_job_id ON jq.holders (job_id);

COMMENT ON TABLE jq.holders IS 'places behind running limits that are held by jobs under a lease; workers hold theirs by locks';
COMMENT ON COLUMN jq.holders.kind IS 'overlap, running, queue or group';
COMMENT ON COLUMN jq.holders.scope IS 'limit_scope of handlers, or the name of one; a queue; empty for groups';
COMMENT ON COLUMN jq.holders.key IS 'the key';
COMMENT ON COLUMN jq.holders.place IS 'which of the places, from 0';
COMMENT ON COLUMN jq.holders.job_id IS 'job that holds it';
COMMENT ON COLUMN jq.holders.token IS 'its lease; the place is free when that is over';

CREATE TABLE jq.held (
	kind text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	priority integer NOT NULL,
	job_id bigint NOT NULL,
	due_at timestamptz NOT NULL,
	places integer NOT NULL,
	every interval,
	wake_at timestamptz,
	CONSTRAINT held_pkey PRIMARY KEY (kind, scope, key, priority, job_id)
);

CREATE INDEX held_wake_at ON jq.held (wake_at);
CREATE INDEX held_job_id ON jq.held (job_id);

COMMENT ON TABLE jq.held IS 'due jobs that wait for a limit, or for an earlier job of their group; available_at in jq.jobs is infinity meanwhile';
COMMENT ON COLUMN jq.held.kind IS 'overlap, running, queue, rate or group: what the job waits for';
COMMENT ON COLUMN jq.held.scope IS 'limit_scope of handlers, or the name of one; a queue; empty for groups';
COMMENT ON COLUMN jq.held.key IS 'the key';
COMMENT ON COLUMN jq.held.priority IS 'priority of the job; smaller goes first, then the lower id';
COMMENT ON COLUMN jq.held.job_id IS 'the job';
COMMENT ON COLUMN jq.held.due_at IS 'when it was due';
COMMENT ON COLUMN jq.held.places IS 'how many may go on at a time';
COMMENT ON COLUMN jq.held.every IS 'and for a rate limit, in what time';
COMMENT ON COLUMN jq.held.wake_at IS 'when the rate limit lets some go on; set in one row of a key at least';

CREATE TABLE jq.group_members (
	key text COLLATE "C" NOT NULL,
	job_id bigint NOT NULL,
	CONSTRAINT group_members_pkey PRIMARY KEY (key, job_id)
);

COMMENT ON TABLE jq.group_members IS 'jobs of groups, in the order in which they run';
COMMENT ON COLUMN jq.group_members.key IS 'the group';
COMMENT ON COLUMN jq.group_members.job_id IS 'the job';

CREATE TABLE jq.grants (
	role text COLLATE "C" NOT NULL,
	privilege text COLLATE "C" NOT NULL,
	queue text COLLATE "C",
	CONSTRAINT grants_privilege_check CHECK (privilege IN ('dispatch', 'administer')),
	CONSTRAINT grants_queue_check CHECK (queue IS NULL OR privilege <> 'administer')
);

CREATE UNIQUE INDEX grants_key ON jq.grants (role, privilege, coalesce(queue, ''));

COMMENT ON TABLE jq.grants IS 'rights given by jq.grant(); members of a role have its rights';
COMMENT ON COLUMN jq.grants.role IS 'name of the role that has the right';
COMMENT ON COLUMN jq.grants.privilege IS 'dispatch: dispatch jobs; administer: register handlers and handle the jobs of all roles';
COMMENT ON COLUMN jq.grants.queue IS 'queue the right is for; NULL: all queues';

SELECT pg_extension_config_dump('jq.jobs', '');
SELECT pg_extension_config_dump('jq.jobs_id_seq', '');
SELECT pg_extension_config_dump('jq.failed_jobs', '');
SELECT pg_extension_config_dump('jq.pauses', '');
SELECT pg_extension_config_dump('jq.cancellations', '');
SELECT pg_extension_config_dump('jq.results', '');
SELECT pg_extension_config_dump('jq.attempts', '');
SELECT pg_extension_config_dump('jq.handlers', '');
SELECT pg_extension_config_dump('jq.handler_aliases', '');
SELECT pg_extension_config_dump('jq.claims', '');
SELECT pg_extension_config_dump('jq.batches', '');
SELECT pg_extension_config_dump('jq.batches_id_seq', '');
SELECT pg_extension_config_dump('jq.batch_counts', '');
SELECT pg_extension_config_dump('jq.queues', '');
SELECT pg_extension_config_dump('jq.limit_settings', '');
SELECT pg_extension_config_dump('jq.rates', '');
SELECT pg_extension_config_dump('jq.holders', '');
SELECT pg_extension_config_dump('jq.held', '');
SELECT pg_extension_config_dump('jq.group_members', '');
SELECT pg_extension_config_dump('jq.grants', '');

/* ---------------------------------------------------------------------
 * Triggers on the tables
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.job_written() RETURNS trigger
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_job_written';

COMMENT ON FUNCTION jq.job_written() IS 'holds rows that did not come through jq (restored, replicated, written by hand), and tells workers of rows changed by hand';

-- jq's own insertion does not go through the executor and fires no trigger.
CREATE TRIGGER job_written
	BEFORE INSERT OR UPDATE ON jq.jobs
	FOR EACH ROW EXECUTE FUNCTION jq.job_written();
ALTER TABLE jq.jobs ENABLE ALWAYS TRIGGER job_written;

CREATE FUNCTION jq.configuration_written() RETURNS trigger
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_configuration_written';

COMMENT ON FUNCTION jq.configuration_written() IS 'makes all sessions forget what they remember of the table';

CREATE TRIGGER configuration_written
	AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON jq.handlers
	FOR EACH STATEMENT EXECUTE FUNCTION jq.configuration_written();
ALTER TABLE jq.handlers ENABLE ALWAYS TRIGGER configuration_written;

CREATE TRIGGER configuration_written
	AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON jq.handler_aliases
	FOR EACH STATEMENT EXECUTE FUNCTION jq.configuration_written();
ALTER TABLE jq.handler_aliases ENABLE ALWAYS TRIGGER configuration_written;

CREATE TRIGGER configuration_written
	AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON jq.pauses
	FOR EACH STATEMENT EXECUTE FUNCTION jq.configuration_written();
ALTER TABLE jq.pauses ENABLE ALWAYS TRIGGER configuration_written;

CREATE TRIGGER configuration_written
	AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON jq.queues
	FOR EACH STATEMENT EXECUTE FUNCTION jq.configuration_written();
ALTER TABLE jq.queues ENABLE ALWAYS TRIGGER configuration_written;

CREATE TRIGGER configuration_written
	AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON jq.limit_settings
	FOR EACH STATEMENT EXECUTE FUNCTION jq.configuration_written();
ALTER TABLE jq.limit_settings ENABLE ALWAYS TRIGGER configuration_written;

CREATE TRIGGER configuration_written
	AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON jq.grants
	FOR EACH STATEMENT EXECUTE FUNCTION jq.configuration_written();
ALTER TABLE jq.grants ENABLE ALWAYS TRIGGER configuration_written;

/* ---------------------------------------------------------------------
 * Handlers
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.register(
	handler regprocedure,
	name text DEFAULT NULL,
	queue text DEFAULT 'default',
	max_attempts integer DEFAULT 3,
	timeout interval DEFAULT '60 s',
	backoff interval[] DEFAULT NULL,
	priority integer DEFAULT 0,
	retry_for interval DEFAULT NULL,
	expires interval DEFAULT NULL,
	fail_on_timeout boolean DEFAULT false,
	max_exceptions integer DEFAULT NULL,
	permanent_errors text[] DEFAULT NULL,
	on_failed text DEFAULT NULL,
	keep_result interval DEFAULT NULL,
	unique_key text DEFAULT NULL,
	unique_for interval DEFAULT NULL,
	unique_until text DEFAULT NULL,
	on_conflict text DEFAULT NULL,
	debounce_max interval DEFAULT NULL,
	overlap_key text DEFAULT NULL,
	overlap_wait interval DEFAULT NULL,
	max_running integer DEFAULT NULL,
	running_key text DEFAULT NULL,
	rate_key text DEFAULT NULL,
	rate_max integer DEFAULT NULL,
	rate_per interval DEFAULT NULL,
	rate_burst integer DEFAULT NULL,
	limit_scope text DEFAULT NULL,
	group_key text DEFAULT NULL,
	middleware regprocedure[] DEFAULT NULL
) RETURNS text
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_register';

COMMENT ON FUNCTION jq.register(regprocedure, text, text, integer, interval, interval[], integer, interval, interval, boolean, integer, text[], text, interval, text, interval, text, text, interval, text, interval, integer, text, text, integer, interval, integer, text, text, regprocedure[]) IS
'adds a handler, or replaces its whole definition; returns its name.
handler: function (jsonb) or (jsonb, jq.context); name: default is the function''s own name; queue, max_attempts, priority: for jobs dispatched without them; timeout: of one attempt, NULL is none; backoff: waits after the 1st, 2nd, ... failure, NULL is 10 s x attempt, a day at most. retry_for: repeat attempts for so long, whatever max_attempts says; expires: do not start a job so long after it was due first; fail_on_timeout: no attempt after one that took too long; max_exceptions: errors allowed; permanent_errors: SQLSTATEs, or their two-letter classes, that are not tried again; on_failed: handler of a job that is dispatched when one fails for good; keep_result: how long jq.result() knows results.
unique_key, unique_for, unique_until, on_conflict, debounce_max: no two jobs with the same key; overlap_key, overlap_wait: no two with the same key run at a time; max_running, running_key: so many with the same key run at a time; rate_max, rate_per, rate_burst, rate_key: so many with the same key are started in a time; limit_scope: handlers that share these limits; group_key: jobs of a group run one after the other; middleware: functions (jsonb, jq.context) that return an interval to put the attempt off, or NULL. A key is a jsonpath if it begins with $, else the name of an immutable function (jsonb) that returns text; jobs for which it gives NULL have no such limit. Needs the right ''administer''.';

CREATE FUNCTION jq.unregister(name text, force boolean DEFAULT false) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_unregister';

COMMENT ON FUNCTION jq.unregister(text, boolean) IS
'removes a handler; refuses while jobs of that name wait, unless forced. Needs the right ''administer''.';

CREATE FUNCTION jq.rename_handler(old text, new text) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_rename_handler';

COMMENT ON FUNCTION jq.rename_handler(text, text) IS
'renames a handler; the old name stays as its alias, so that jobs dispatched under it go on. Needs the right ''administer''.';

/* ---------------------------------------------------------------------
 * Dispatching
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.dispatch(
	name text,
	payload jsonb DEFAULT '{}',
	queue text DEFAULT NULL,
	priority integer DEFAULT NULL,
	delay interval DEFAULT NULL,
	run_at timestamptz DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	unique_key text DEFAULT NULL,
	unique_for interval DEFAULT NULL,
	unique_until text DEFAULT NULL,
	on_conflict text DEFAULT NULL,
	batch_id bigint DEFAULT NULL,
	meta jsonb DEFAULT NULL,
	group_key text DEFAULT NULL
) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_dispatch';

COMMENT ON FUNCTION jq.dispatch(text, jsonb, text, integer, interval, timestamptz, integer, text, interval, text, text, bigint, jsonb, text) IS
'queues a job that runs, as the current role, once this transaction has committed; returns its id, or if it is unique and its key is taken the id of the job that has the key.
name: a registered handler; payload: its argument; queue, priority, max_attempts: NULL is as registered; delay or run_at: when it is due, a time in the past is now; unique_key: the key itself, unique_for, unique_until, on_conflict: NULL is as registered; batch_id: an open batch that it is to be in; meta: a remark for the handler''s context; group_key: the group itself, NULL is as registered. Needs the right ''dispatch'' and EXECUTE on the handler.';

CREATE FUNCTION jq.dispatch_unique(
	name text,
	payload jsonb DEFAULT '{}',
	queue text DEFAULT NULL,
	priority integer DEFAULT NULL,
	delay interval DEFAULT NULL,
	run_at timestamptz DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	unique_key text DEFAULT NULL,
	unique_for interval DEFAULT NULL,
	unique_until text DEFAULT NULL,
	on_conflict text DEFAULT NULL,
	batch_id bigint DEFAULT NULL,
	meta jsonb DEFAULT NULL,
	group_key text DEFAULT NULL,
	OUT id bigint,
	OUT outcome text
) RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_dispatch_unique';

COMMENT ON FUNCTION jq.dispatch_unique(text, jsonb, text, integer, interval, timestamptz, integer, text, interval, text, text, bigint, jsonb, text) IS
'does what jq.dispatch() does with the same arguments, and also tells what that was; outcome: created; kept, nothing was queued since the job of that id has the key; or replaced, that job is now what this call says';

CREATE FUNCTION jq.job(
	name text,
	payload jsonb DEFAULT '{}',
	queue text DEFAULT NULL,
	priority integer DEFAULT NULL,
	delay interval DEFAULT NULL,
	run_at timestamptz DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	unique_key text DEFAULT NULL,
	unique_for interval DEFAULT NULL,
	unique_until text DEFAULT NULL,
	on_conflict text DEFAULT NULL,
	meta jsonb DEFAULT NULL,
	group_key text DEFAULT NULL
) RETURNS jq.job_spec
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS 'SELECT ROW($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, NULL)::jq.job_spec';

COMMENT ON FUNCTION jq.job(text, jsonb, text, integer, interval, timestamptz, integer, text, interval, text, text, jsonb, text) IS
'builds a job for jq.dispatch() from the same arguments, and queues nothing';

CREATE FUNCTION jq.chain(
	jobs jq.job_spec[],
	catch_job jq.job_spec
) RETURNS jq.job_spec
LANGUAGE C STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'jq_chain';

COMMENT ON FUNCTION jq.chain(jq.job_spec[], jq.job_spec) IS
'builds one job for jq.dispatch() of several: each is queued when the one before it is done, in the same transaction, with its own queue, attempts and delay. An element may be a chain itself. catch_job is queued when one of them fails for good; those behind it then wait in jq.failed_jobs for a retry. NULL for no jobs.';

CREATE FUNCTION jq.chain(VARIADIC jobs jq.job_spec[]) RETURNS jq.job_spec
LANGUAGE C STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'jq_chain';

COMMENT ON FUNCTION jq.chain(jq.job_spec[]) IS 'the same, without a catch_job';

CREATE FUNCTION jq.dispatch(job jq.job_spec) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_dispatch_spec';

COMMENT ON FUNCTION jq.dispatch(jq.job_spec) IS 'queues a job built by jq.job(); returns its id';

CREATE FUNCTION jq.dispatch(jobs jq.job_spec[]) RETURNS SETOF bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_dispatch_specs';

COMMENT ON FUNCTION jq.dispatch(jq.job_spec[]) IS
'queues jobs built by jq.job(), all or none; returns their ids in the same order';

CREATE FUNCTION jq.dispatch_row() RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	payload jsonb;
	key text;
	value text;
	queue text;
	delay interval;
	priority integer;
	columns text[];
	missing text;
BEGIN
	IF TG_LEVEL <> 'ROW' THEN
		RAISE EXCEPTION USING
			ERRCODE = 'object_not_in_prerequisite_state',
			MESSAGE = 'jq.dispatch_row() must be fired for each row',
			HINT = 'Create the trigger with FOR EACH ROW.';
	END IF;
	IF TG_NARGS = 0 THEN
		RAISE EXCEPTION USING
			ERRCODE = 'invalid_parameter_value',
			MESSAGE = 'jq.dispatch_row() needs the name of a handler',
			HINT = 'Give it as the first argument of the trigger function.';
	END IF;

	FOR i IN 1 .. TG_NARGS - 1 LOOP
		key := trim(split_part(TG_ARGV[i], '=', 1));
		value := trim(substr(TG_ARGV[i], strpos(TG_ARGV[i], '=') + 1));
		IF strpos(TG_ARGV[i], '=') = 0
		   OR key NOT IN ('queue', 'delay', 'priority', 'columns') THEN
			RAISE EXCEPTION USING
				ERRCODE = 'invalid_parameter_value',
				MESSAGE = format('unrecognized argument of jq.dispatch_row(): "%s"', TG_ARGV[i]),
				HINT = 'Arguments after the name are queue=..., delay=..., priority=... and columns=a,b.';
		END IF;
		CASE key
			WHEN 'queue' THEN queue := value;
			WHEN 'delay' THEN delay := value::interval;
			WHEN 'priority' THEN priority := value::integer;
			WHEN 'columns' THEN columns := regexp_split_to_array(value, '\s*,\s*');
		END CASE;
	END LOOP;

	IF TG_OP = 'DELETE' THEN
		payload := to_jsonb(OLD);
	ELSE
		payload := to_jsonb(NEW);
	END IF;

	IF columns IS NOT NULL THEN
		SELECT c INTO missing FROM unnest(columns) AS c WHERE NOT payload ? c LIMIT 1;
		IF FOUND THEN
			RAISE EXCEPTION USING
				ERRCODE = 'undefined_column',
				MESSAGE = format('column "%s" of relation "%s" does not exist', missing, TG_TABLE_NAME);
		END IF;
		SELECT jsonb_object_agg(c, payload -> c) INTO payload FROM unnest(columns) AS c;
	END IF;

	-- whoever changes a row need not know of jq: say more than "permission
	-- denied for schema jq"
	IF NOT has_schema_privilege('jq', 'USAGE') THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = 'permission denied for extension "jq"',
			DETAIL = format('Trigger "%s" on relation "%s" dispatches a job, and role "%s" has not the right to.', TG_NAME, TG_TABLE_NAME, current_user),
			HINT = 'The extension''s owner gives it with jq.grant().';
	END IF;
	PERFORM jq.dispatch(TG_ARGV[0], payload, queue => queue, priority => priority, delay => delay);

	-- a BEFORE trigger must hand the row on; after the fact nobody looks
	IF TG_OP = 'DELETE' THEN
		RETURN OLD;
	END IF;
	RETURN NEW;
END
$$;

COMMENT ON FUNCTION jq.dispatch_row() IS
'row trigger that dispatches the changed row (the old one of a DELETE) as payload; arguments: the handler, then any of ''queue=...'', ''delay=...'', ''priority=...'', ''columns=a,b''. Dispatches as the role that changes the row, which needs the right ''dispatch''.';

/* ---------------------------------------------------------------------
 * Batches
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.dispatch_batch(
	jobs jq.job_spec[],
	name text DEFAULT NULL,
	then_job jq.job_spec DEFAULT NULL,
	catch_job jq.job_spec DEFAULT NULL,
	finally_job jq.job_spec DEFAULT NULL,
	allow_failures boolean DEFAULT false
) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_dispatch_batch';

COMMENT ON FUNCTION jq.dispatch_batch(jq.job_spec[], text, jq.job_spec, jq.job_spec, jq.job_spec, boolean) IS
'queues jobs, all or none, as a batch, and returns its id. An element may be a chain, of which each link counts; without jobs the batch is finished at once.
then_job is queued when all jobs are done and none failed; catch_job when the first one fails; finally_job when no job is left; each once at most, and may be a chain. Unless allow_failures, the first failure cancels the batch: what waits is not run.';

CREATE FUNCTION jq.open_batch(
	name text DEFAULT NULL,
	then_job jq.job_spec DEFAULT NULL,
	catch_job jq.job_spec DEFAULT NULL,
	finally_job jq.job_spec DEFAULT NULL,
	allow_failures boolean DEFAULT false
) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_open_batch';

COMMENT ON FUNCTION jq.open_batch(text, jq.job_spec, jq.job_spec, jq.job_spec, boolean) IS
'creates a batch that jq.dispatch(batch_id => ...) adds to, in any number of transactions, until jq.close_batch(); returns its id. Its jobs may run meanwhile, but it does not finish. Other arguments as of jq.dispatch_batch().';

CREATE FUNCTION jq.close_batch(batch_id bigint) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_close_batch';

COMMENT ON FUNCTION jq.close_batch(bigint) IS
'lets an open batch finish; false if it was closed already. Waits for transactions that are adding to it. Needs the rights of the role that opened it, or ''administer''.';

CREATE FUNCTION jq.add_to_batch(batch_id bigint, jobs jq.job_spec[]) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_add_to_batch';

COMMENT ON FUNCTION jq.add_to_batch(bigint, jq.job_spec[]) IS
'queues jobs, all or none, in a batch that has not finished; returns how many. Made for a job of the batch that finds more to do. Needs the rights of the role that created the batch, or ''administer''.';

CREATE FUNCTION jq.cancel_batch(batch_id bigint) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_cancel_batch';

COMMENT ON FUNCTION jq.cancel_batch(bigint) IS
'cancels a batch: jobs of it that wait are not run, those that run end as they do; then_job is not queued, finally_job is. False if it was cancelled already, or has finished. Needs the rights of the role that created it, or ''administer''.';

CREATE FUNCTION jq.batch_cancelled() RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_batch_cancelled';

COMMENT ON FUNCTION jq.batch_cancelled() IS
'in a handler: whether the batch of the job that is being run has been cancelled by now; false if it is in none';

/* ---------------------------------------------------------------------
 * Limits
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.set_limit(
	scope text,
	key text,
	max_running integer DEFAULT NULL,
	rate_max integer DEFAULT NULL,
	rate_per interval DEFAULT NULL,
	rate_burst integer DEFAULT NULL,
	note text DEFAULT NULL
) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_set_limit';

COMMENT ON FUNCTION jq.set_limit(text, text, integer, integer, interval, integer, text) IS
'sets limits for one key in place of those that its handlers were registered with; NULL leaves theirs, and if all are NULL the key is as any other again.
scope: limit_scope of the handlers, or the name of one; key: as running_key and rate_key give it. Holds for what is started from then on. Needs the right ''administer''.';

CREATE FUNCTION jq.set_queue(
	queue text,
	max_running integer DEFAULT NULL,
	note text DEFAULT NULL
) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_set_queue';

COMMENT ON FUNCTION jq.set_queue(text, integer, text) IS
'sets how many jobs of a queue run at a time, NULL is no limit, and a remark on it. Holds for what is started from then on; jobs that run without a limit are not counted. Needs the right ''administer''.';

/* ---------------------------------------------------------------------
 * Inside a handler
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.current_job() RETURNS jq.context
LANGUAGE C STABLE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'jq_current_job';

COMMENT ON FUNCTION jq.current_job() IS 'the context of the job that is being run here; NULL outside of a job';

CREATE FUNCTION jq.fail(message text) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_fail';

COMMENT ON FUNCTION jq.fail(text) IS
'ends the job that is being run here: it fails for good with this message (NULL: failed by its handler), whatever attempts are left; raises an error of SQLSTATE JQ001, so that what the attempt has done is rolled back';

CREATE FUNCTION jq.release(delay interval DEFAULT '0 s') RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_release';

COMMENT ON FUNCTION jq.release(interval) IS
'ends the attempt that is being run here without spending it: the job is due again after the delay, of 100 ms at least, or fails with SQLSTATE JQ005 if that is past its deadline (retry_for); raises an error of SQLSTATE JQ002, so that what the attempt has done is rolled back';

CREATE FUNCTION jq.skip(reason text DEFAULT NULL) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_skip';

COMMENT ON FUNCTION jq.skip(text) IS
'ends the job that is being run here as done, but what the attempt has done is rolled back: raises an error of SQLSTATE JQ003';

CREATE FUNCTION jq.prepend(job jq.job_spec) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_prepend';

COMMENT ON FUNCTION jq.prepend(jq.job_spec) IS 'puts a job, or a chain of them, right behind the one that is being run here: it is queued when that is done, before what followed so far';

CREATE FUNCTION jq.append(job jq.job_spec) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_append';

COMMENT ON FUNCTION jq.append(jq.job_spec) IS 'puts a job, or a chain of them, at the end of the chain of the one that is being run here';

CREATE FUNCTION jq.progress(percent double precision, note text DEFAULT NULL) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_progress';

COMMENT ON FUNCTION jq.progress(double precision, text) IS
'shows in jq.running, at once, how far the job is that is being run here.
percent: 0 to 100, NULL is not known; note: at most 127 bytes are shown';

CREATE FUNCTION jq.log(line text) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_log';

COMMENT ON FUNCTION jq.log(text) IS
'adds a line to the log of the attempt that is being run here: shown in jq.running at once, kept in jq.failed_jobs if the job fails for good; the last 2 kB are kept';

/* ---------------------------------------------------------------------
 * By hand
 * --------------------------------------------------------------------- */

CREATE PROCEDURE jq.drain(
	queues text[] DEFAULT NULL,
	max_jobs bigint DEFAULT NULL,
	INOUT ran bigint DEFAULT NULL
)
LANGUAGE C
AS 'MODULE_PATHNAME', 'jq_drain';

COMMENT ON PROCEDURE jq.drain(text[], bigint, bigint) IS
'runs the current role''s due jobs in this session, each in its own transaction, until none is due; ran: attempts made.
queues: only these, strictly in this order, NULL is all; max_jobs: stop after so many attempts, NULL is no limit. Refuses to run in a transaction block. Jobs see the session''s own settings.';

CREATE FUNCTION jq.run(name text, payload jsonb DEFAULT '{}') RETURNS jsonb
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_run';

COMMENT ON FUNCTION jq.run(text, jsonb) IS
'calls a handler here and now, without queueing anything, and lets its error through; returns its result if that is jsonb';

CREATE FUNCTION jq.result(id bigint) RETURNS jsonb
LANGUAGE C STABLE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'jq_result';

COMMENT ON FUNCTION jq.result(bigint) IS
'what the handler of a done job returned; NULL if it is not done, returned no jsonb, was not registered with keep_result, or is not the current role''s to see';

CREATE PROCEDURE jq.wait_for(
	id bigint,
	timeout interval DEFAULT NULL,
	INOUT state text DEFAULT NULL
)
LANGUAGE C
AS 'MODULE_PATHNAME', 'jq_wait_for';

COMMENT ON PROCEDURE jq.wait_for(bigint, interval, text) IS
'waits until a job has ended; state: done, failed or cancelled, or waiting or running if the time was up before.
timeout: how long to wait, NULL is for ever. done: no such job waits, runs or has failed; so also a job that was forgotten, one whose dispatch was rolled back, or is not committed yet. An id that was never given out is an error. Holds no snapshot while it waits; refuses to run in a transaction block, in a transaction that has written, and on a standby.';

CREATE FUNCTION jq.cancel(id bigint, reason text DEFAULT NULL) RETURNS text
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_cancel';

COMMENT ON FUNCTION jq.cancel(bigint, text) IS
'cancels a job: it fails for good, with SQLSTATE JQ004. Returns what it was doing: waiting; running, it is interrupted when this transaction commits; external, it was held under a lease, which is void now; NULL if there is no such job. Needs the right ''administer'' for jobs of other roles.';

CREATE FUNCTION jq.reschedule(
	id bigint,
	run_at timestamptz DEFAULT NULL,
	queue text DEFAULT NULL,
	priority integer DEFAULT NULL,
	max_attempts integer DEFAULT NULL
) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_reschedule';

COMMENT ON FUNCTION jq.reschedule(bigint, timestamptz, text, integer, integer) IS
'changes a waiting job; NULL leaves as it is; false if no such job waits. run_at: a time in the past is now. Needs the right ''administer'' for jobs of other roles.';

CREATE FUNCTION jq.retry(
	id bigint,
	delay interval DEFAULT NULL,
	payload jsonb DEFAULT NULL
) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_retry';

COMMENT ON FUNCTION jq.retry(bigint, interval, jsonb) IS
'puts a failed job back into its queue with its id, its role, all its attempts and a new deadline; false if no such job has failed, or another session is just taking it.
delay: due after it, NULL is now; payload: instead of the job''s own. Needs the right ''administer'' for jobs of other roles.';

CREATE FUNCTION jq.retry_all(
	queue text DEFAULT NULL,
	name text DEFAULT NULL,
	batch_id bigint DEFAULT NULL,
	failed_since timestamptz DEFAULT NULL,
	sqlstate text DEFAULT NULL
) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_retry_all';

COMMENT ON FUNCTION jq.retry_all(text, text, bigint, timestamptz, text) IS
'puts failed jobs back as jq.retry() does, due now, and returns their number; each argument that is given narrows the choice. Without the right ''administer'' only jobs of roles whose rights the current one has.';

CREATE FUNCTION jq.forget(id bigint) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_forget';

COMMENT ON FUNCTION jq.forget(bigint) IS
'removes a failed job; false if no such job has failed, or another session is just taking it. Needs the right ''administer'' for jobs of other roles.';

CREATE FUNCTION jq.flush(
	older_than interval DEFAULT NULL,
	queue text DEFAULT NULL,
	name text DEFAULT NULL
) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_flush';

COMMENT ON FUNCTION jq.flush(interval, text, text) IS
'removes failed jobs and returns their number; each argument that is given narrows the choice: failed longer ago than this, of this queue, of this name. Needs the right ''administer''.';

CREATE FUNCTION jq.prune() RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_prune';

COMMENT ON FUNCTION jq.prune() IS
'removes results, attempts and finished batches that have been kept long enough, and claims and counters that are of no use any more, as the scheduler does once a minute; returns their number. Needs the right ''administer''.';

CREATE FUNCTION jq.adopt() RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_adopt';

COMMENT ON FUNCTION jq.adopt() IS
'frees jobs that are held because they were not dispatched in this database (restored, copied, replicated); returns their number. Needs the right ''administer''.';

CREATE FUNCTION jq.pause(
	queue text DEFAULT '',
	reason text DEFAULT NULL,
	until timestamptz DEFAULT NULL
) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_pause';

COMMENT ON FUNCTION jq.pause(text, text, timestamptz) IS
'stops a queue, or without one sets the mark that stops all of them: no job is started, what runs goes on, dispatching too. False if it was paused already; reason and until are replaced then.
until: when the pause ends by itself, NULL is with jq.resume(). Needs the right ''administer''.';

CREATE FUNCTION jq.resume(queue text DEFAULT '') RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_resume';

COMMENT ON FUNCTION jq.resume(text) IS
'lets a paused queue go on, or without one takes the mark for all queues away, not those of single ones; false if there was no such pause. Needs the right ''administer''.';

CREATE FUNCTION jq.restart_workers() RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_restart_workers';

COMMENT ON FUNCTION jq.restart_workers() IS
'replaces the workers and the scheduler of this database when this transaction commits, each after the job it runs, so that what was set by ALTER DATABASE and ALTER ROLE takes effect; returns the number of workers. Needs the right ''administer''.';

/* ---------------------------------------------------------------------
 * Rights
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.grant(role text, privilege text, queue text DEFAULT NULL) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_grant';

COMMENT ON FUNCTION jq.grant(text, text, text) IS
'gives a role a right: ''dispatch'' (for one queue, or NULL for all) or ''administer''. Only the extension''s owner grants. A role that has a right can be dropped after jq.revoke(), or DROP OWNED BY, in each database.';

CREATE FUNCTION jq.revoke(role text, privilege text, queue text DEFAULT NULL) RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_revoke';

COMMENT ON FUNCTION jq.revoke(text, text, text) IS
'takes back what jq.grant() gave with the same arguments';

CREATE FUNCTION jq.may_see(role text) RETURNS boolean
LANGUAGE C STABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME', 'jq_may_see';

COMMENT ON FUNCTION jq.may_see(text) IS
'whether the current role is shown jobs of that role: its own, those of roles whose rights it has, with the right ''administer'' all';

/* ---------------------------------------------------------------------
 * Views
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.worker_slots(
	OUT pid integer,
	OUT role text,
	OUT state text,
	OUT started_at timestamptz,
	OUT job_id bigint,
	OUT name text,
	OUT queue text,
	OUT attempt integer,
	OUT job_started_at timestamptz,
	OUT progress double precision,
	OUT note text,
	OUT log text,
	OUT cancelled boolean
) RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'jq_worker_slots';

COMMENT ON FUNCTION jq.worker_slots() IS 'the workers of this database and what each is doing; the views jq.workers and jq.running read it';

CREATE FUNCTION jq.process_status(
	OUT launcher boolean,
	OUT scheduler_pid integer,
	OUT note text
) RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_process_status';

COMMENT ON FUNCTION jq.process_status() IS 'whether jq''s processes serve this database, and if not, why; the view jq.status reads it';

CREATE FUNCTION jq.lease_holds(
	lease_until timestamptz,
	holder_pid integer,
	holder_started timestamptz
) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'jq_lease_holds';

COMMENT ON FUNCTION jq.lease_holds(timestamptz, integer, timestamptz) IS
'whether the job with these values in jq.jobs is held under a lease now: its time is not over, and if a session of this server holds it, that is still there';

CREATE VIEW jq.workers AS
	SELECT s.pid, s.role, s.state, s.started_at, s.job_id, s.name, s.queue, s.job_started_at
	FROM jq.worker_slots() AS s
	WHERE jq.may_see(s.role);

COMMENT ON VIEW jq.workers IS 'worker processes of this database';
COMMENT ON COLUMN jq.workers.pid IS 'process id';
COMMENT ON COLUMN jq.workers.role IS 'role whose jobs the worker runs';
COMMENT ON COLUMN jq.workers.state IS 'starting, idle, busy or leaving';
COMMENT ON COLUMN jq.workers.started_at IS 'start of the process';
COMMENT ON COLUMN jq.workers.job_id IS 'job it is running';
COMMENT ON COLUMN jq.workers.name IS 'handler of that job';
COMMENT ON COLUMN jq.workers.queue IS 'queue of that job';
COMMENT ON COLUMN jq.workers.job_started_at IS 'start of the attempt';

-- Materialized, so that a condition of the user's own is not asked about rows
-- that the user may not see.
CREATE VIEW jq.running AS
	WITH running AS MATERIALIZED (
		SELECT s.job_id AS id, s.name, s.queue, s.role, s.pid, s.attempt, s.job_started_at AS started_at,
			s.progress, s.note, s.log, s.cancelled
		FROM jq.worker_slots() AS s
		WHERE s.job_id IS NOT NULL AND jq.may_see(s.role)
		UNION ALL
		SELECT j.id, j.name, j.queue, j.role, j.holder_pid, j.attempts, j.reserved_at,
			NULL, NULL, NULL, false
		FROM jq.jobs AS j
		WHERE jq.may_see(j.role) AND j.lease_until > clock_timestamp()
			AND jq.lease_holds(j.lease_until, j.holder_pid, j.holder_started)
	)
	SELECT r.id, r.name, r.queue, r.role, r.pid, r.attempt, r.started_at,
		r.progress, r.note, r.log, r.cancelled
	FROM running AS r;

COMMENT ON VIEW jq.running IS 'jobs that run now: in workers, and under a lease';
COMMENT ON COLUMN jq.running.id IS 'the job''s id';
COMMENT ON COLUMN jq.running.name IS 'its handler';
COMMENT ON COLUMN jq.running.queue IS 'its queue';
COMMENT ON COLUMN jq.running.role IS 'the role it runs as';
COMMENT ON COLUMN jq.running.pid IS 'worker or session that runs it; NULL: somebody outside of the server';
COMMENT ON COLUMN jq.running.attempt IS 'number of this attempt';
COMMENT ON COLUMN jq.running.started_at IS 'start of the attempt';
COMMENT ON COLUMN jq.running.progress IS 'percent, as the handler last said with jq.progress()';
COMMENT ON COLUMN jq.running.note IS 'its remark on that';
COMMENT ON COLUMN jq.running.log IS 'what it wrote with jq.log(), its end if that is long';
COMMENT ON COLUMN jq.running.cancelled IS 'whether jq.cancel() has asked it to end';

-- One pass over the jobs: what workers hold is few and comes as an array, and
-- rows leased by others say so themselves.
CREATE VIEW jq.queue_stats AS
	WITH here AS MATERIALIZED (
		SELECT d.oid AS origin, clock_timestamp() AS now,
			ARRAY(SELECT s.job_id FROM jq.worker_slots() AS s WHERE s.job_id IS NOT NULL) AS held_ids
		FROM pg_catalog.pg_database AS d
		WHERE d.datname = current_database()
	), jobs AS (
		SELECT j.queue, j.available_at, j.origin = h.origin AS ours,
			j.id = ANY (h.held_ids) OR (j.lease_until > h.now
				AND jq.lease_holds(j.lease_until, j.holder_pid, j.holder_started)) IS TRUE AS running,
			j.available_at <= h.now AS due,
			j.available_at = 'infinity' AS blocked
		FROM jq.jobs AS j
		CROSS JOIN here AS h
		WHERE jq.may_see(j.role)
	), waiting AS (
		SELECT j.queue,
			count(*) FILTER (WHERE j.ours AND NOT j.running AND j.due) AS ready,
			count(*) FILTER (WHERE j.ours AND NOT j.running AND NOT j.due AND NOT j.blocked) AS later,
			count(*) FILTER (WHERE j.ours AND NOT j.running AND j.blocked) AS blocked,
			count(*) FILTER (WHERE j.ours AND j.running) AS running,
			count(*) FILTER (WHERE NOT j.ours) AS held,
			min(j.available_at) FILTER (WHERE j.ours AND NOT j.running AND j.due) AS oldest
		FROM jobs AS j
		GROUP BY j.queue
	), failed AS (
		SELECT f.queue, count(*) AS failed
		FROM jq.failed_jobs AS f
		WHERE jq.may_see(f.role)
		GROUP BY f.queue
	), paused AS (
		SELECT p.queue
		FROM jq.pauses AS p
		CROSS JOIN here AS h
		WHERE p.queue IS NOT NULL AND (p.until IS NULL OR p.until > h.now)
	)
	SELECT queue,
		coalesce(w.ready, 0) AS ready,
		coalesce(w.later, 0) AS later,
		coalesce(w.blocked, 0) AS blocked,
		coalesce(w.running, 0) AS running,
		coalesce(w.held, 0) AS held,
		coalesce(f.failed, 0) AS failed,
		h.now - w.oldest AS oldest_wait,
		p.queue IS NOT NULL AS paused
	FROM waiting AS w
	FULL JOIN failed AS f USING (queue)
	FULL JOIN paused AS p USING (queue)
	CROSS JOIN here AS h;

COMMENT ON VIEW jq.queue_stats IS 'queues that have jobs, or are paused, with their numbers';
COMMENT ON COLUMN jq.queue_stats.queue IS 'name of the queue';
COMMENT ON COLUMN jq.queue_stats.ready IS 'jobs that are due and wait for a worker';
COMMENT ON COLUMN jq.queue_stats.later IS 'jobs that are due later: delayed, or waiting to be tried again';
COMMENT ON COLUMN jq.queue_stats.blocked IS 'jobs that are due and wait for a limit, or for an earlier job of their group';
COMMENT ON COLUMN jq.queue_stats.running IS 'jobs that run now';
COMMENT ON COLUMN jq.queue_stats.held IS 'jobs that were not dispatched in this database and wait for jq.adopt()';
COMMENT ON COLUMN jq.queue_stats.failed IS 'jobs that failed for good';
COMMENT ON COLUMN jq.queue_stats.oldest_wait IS 'how long the oldest ready job has been due; NULL: none is ready';
COMMENT ON COLUMN jq.queue_stats.paused IS 'whether the queue is paused by itself; jq.status tells if all are';

-- A barrier, so that a condition of the user's own is not asked about rows
-- that the user may not see, but an id still finds its batch alone.
CREATE VIEW jq.batch_status WITH (security_barrier) AS
	SELECT b.id, b.name, b.role,
		b.total + c.total AS total,
		b.total + c.total - c.ended AS pending,
		c.failed,
		c.cancelled,
		CASE WHEN b.total + c.total = 0 THEN 100
			ELSE (c.ended * 100 / (b.total + c.total))::integer
		END AS progress,
		CASE WHEN b.cancelled_at IS NOT NULL THEN 'cancelled'
			WHEN b.finished_at IS NOT NULL THEN 'finished'
			WHEN b.closed_at IS NULL THEN 'open'
			ELSE 'running'
		END AS state,
		b.created_at,
		b.finished_at
	FROM jq.batches AS b
	CROSS JOIN LATERAL (
		SELECT coalesce(sum(n.total), 0)::bigint AS total,
			coalesce(sum(n.ended), 0)::bigint AS ended,
			coalesce(sum(n.failed), 0)::bigint AS failed,
			coalesce(sum(n.cancelled), 0)::bigint AS cancelled
		FROM jq.batch_counts AS n
		WHERE n.batch_id = b.id
	) AS c
	WHERE jq.may_see(b.role);

COMMENT ON VIEW jq.batch_status IS 'batches and how far they are';
COMMENT ON COLUMN jq.batch_status.id IS 'the batch''s id';
COMMENT ON COLUMN jq.batch_status.name IS 'name that its creator gave it';
COMMENT ON COLUMN jq.batch_status.role IS 'role that created it';
COMMENT ON COLUMN jq.batch_status.total IS 'its jobs, with the links of chains that are still to follow';
COMMENT ON COLUMN jq.batch_status.pending IS 'those that have not ended';
COMMENT ON COLUMN jq.batch_status.failed IS 'those that failed for good and were not retried';
COMMENT ON COLUMN jq.batch_status.cancelled IS 'those that were not run since the batch was cancelled';
COMMENT ON COLUMN jq.batch_status.progress IS 'percent that have ended, rounded down';
COMMENT ON COLUMN jq.batch_status.state IS 'open: not closed yet; running; finished: no job is left; cancelled: by jq.cancel_batch() or by a failure';
COMMENT ON COLUMN jq.batch_status.created_at IS 'time of its creation';
COMMENT ON COLUMN jq.batch_status.finished_at IS 'when no job was left';

CREATE VIEW jq.limits AS
	SELECT h.kind, h.scope, h.key, count(*) AS held, min(h.due_at) AS oldest_due
	FROM jq.held AS h
	JOIN jq.jobs AS j ON j.id = h.job_id
	WHERE jq.may_see(j.role) AND j.available_at = 'infinity'
	GROUP BY h.kind, h.scope, h.key;

COMMENT ON VIEW jq.limits IS 'keys of limits and groups that jobs wait for';
COMMENT ON COLUMN jq.limits.kind IS 'overlap, running, queue, rate or group';
COMMENT ON COLUMN jq.limits.scope IS 'limit_scope of handlers, or the name of one; a queue; empty for groups';
COMMENT ON COLUMN jq.limits.key IS 'the key';
COMMENT ON COLUMN jq.limits.held IS 'due jobs that wait for it';
COMMENT ON COLUMN jq.limits.oldest_due IS 'when the first of them was due';

CREATE VIEW jq.status AS
	SELECT e.extversion AS version,
		p.launcher,
		p.scheduler_pid,
		p.note,
		(SELECT count(*) FROM jq.workers) AS workers,
		(SELECT count(*) FROM jq.workers AS w WHERE w.state = 'idle') AS idle,
		s.ready, s.later, s.blocked, s.running, s.held, s.failed, s.oldest_wait
	FROM pg_catalog.pg_extension AS e
	CROSS JOIN jq.process_status() AS p
	CROSS JOIN (
		SELECT coalesce(sum(q.ready), 0)::bigint AS ready,
			coalesce(sum(q.later), 0)::bigint AS later,
			coalesce(sum(q.blocked), 0)::bigint AS blocked,
			coalesce(sum(q.running), 0)::bigint AS running,
			coalesce(sum(q.held), 0)::bigint AS held,
			coalesce(sum(q.failed), 0)::bigint AS failed,
			max(q.oldest_wait) AS oldest_wait
		FROM jq.queue_stats AS q
	) AS s
	WHERE e.extname = 'jq';

COMMENT ON VIEW jq.status IS 'the whole queue of this database in one row';
COMMENT ON COLUMN jq.status.version IS 'version of the extension';
COMMENT ON COLUMN jq.status.launcher IS 'whether the server runs jq''s launcher';
COMMENT ON COLUMN jq.status.scheduler_pid IS 'process id of this database''s scheduler; NULL: none, see note';
COMMENT ON COLUMN jq.status.note IS 'why jobs are not being run: none of them, those of some role, or those of a queue that jq.queues leaves out, as it is set for the session that asks; NULL: all is well';
COMMENT ON COLUMN jq.status.workers IS 'worker processes';
COMMENT ON COLUMN jq.status.idle IS 'those of them that wait for work';
COMMENT ON COLUMN jq.status.ready IS 'jobs that are due and wait for a worker';
COMMENT ON COLUMN jq.status.later IS 'jobs that are due later';
COMMENT ON COLUMN jq.status.blocked IS 'jobs that wait for a limit, or for an earlier job of their group';
COMMENT ON COLUMN jq.status.running IS 'jobs that run now';
COMMENT ON COLUMN jq.status.held IS 'jobs that wait for jq.adopt()';
COMMENT ON COLUMN jq.status.failed IS 'jobs that failed for good';
COMMENT ON COLUMN jq.status.oldest_wait IS 'how long the oldest ready job has been due; NULL: none is ready';

/* ---------------------------------------------------------------------
 * Privileges
 *
 * Nothing for PUBLIC; jq.grant() opens what a right needs.  The tables of
 * jobs show each role its own; the library does not read them through SQL
 * as anybody but their owner, whom these policies do not bind.
 * --------------------------------------------------------------------- */

ALTER TABLE jq.jobs ENABLE ROW LEVEL SECURITY;
CREATE POLICY own_jobs ON jq.jobs FOR SELECT USING (jq.may_see(role));

ALTER TABLE jq.failed_jobs ENABLE ROW LEVEL SECURITY;
CREATE POLICY own_jobs ON jq.failed_jobs FOR SELECT USING (jq.may_see(role));

ALTER TABLE jq.attempts ENABLE ROW LEVEL SECURITY;
CREATE POLICY own_jobs ON jq.attempts FOR SELECT USING (jq.may_see(role));

REVOKE ALL ON SCHEMA jq FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA jq FROM PUBLIC;
REVOKE ALL ON ALL ROUTINES IN SCHEMA jq FROM PUBLIC;
REVOKE ALL ON TYPE jq.job_spec FROM PUBLIC;
REVOKE ALL ON TYPE jq.context FROM PUBLIC;

/* ---------------------------------------------------------------------
 * Tell the launcher that this database has jq now
 * --------------------------------------------------------------------- */

CREATE FUNCTION jq.announce() RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'jq_announce';

COMMENT ON FUNCTION jq.announce() IS 'asks the launcher, when the transaction commits, to look whether this database needs jq''s processes';

REVOKE ALL ON FUNCTION jq.announce() FROM PUBLIC;

SELECT jq.announce();
