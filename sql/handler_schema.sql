/*
 * handler_schema: a handler whose schema the job's role may not enter.
 *
 * Such a role could not call the function itself, so its job may not either.
 * That is a failure of the attempt like any other: not an error of the session
 * that drains the queue, nor one that a worker meets again and again.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 1;
SET client_min_messages = warning;
CREATE EXTENSION jq;
SET client_min_messages = error;	-- what fails in a job is not told here
CREATE SCHEMA schema_test;
CREATE FUNCTION schema_test.note(payload jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE ROLE regress_jq_schema;
SELECT jq.grant('regress_jq_schema', 'dispatch');
SELECT jq.register('schema_test.note(jsonb)', max_attempts => 2, backoff => '{0}');
-- nobody waits for ever
CREATE PROCEDURE public.schema_test_wait() LANGUAGE plpgsql
AS $$
DECLARE
	give_up_at timestamptz := clock_timestamp() + interval '15 s';
BEGIN
	WHILE EXISTS (SELECT FROM jq.jobs) LOOP
		COMMIT;
		IF clock_timestamp() > give_up_at THEN
			RAISE 'jobs are left';
		END IF;
		PERFORM pg_sleep(0.005);
	END LOOP;
END
$$;

-- dispatching and running at once are refused, also when the session, as
-- another role, has used the handler before
\set VERBOSITY sqlstate
SET ROLE regress_jq_schema;
SELECT jq.dispatch('note');
RESET ROLE;
SELECT jq.run('note') IS NULL AS ok;
SET ROLE regress_jq_schema;
SELECT jq.dispatch('note');
SELECT jq.run('note');
RESET ROLE;
\set VERBOSITY default

-- in a worker: both attempts fail, and then the job has failed
GRANT USAGE ON SCHEMA schema_test TO regress_jq_schema;
SET ROLE regress_jq_schema;
SELECT jq.dispatch('note', delay => '1 hour') > 0 AS ok;
RESET ROLE;
REVOKE USAGE ON SCHEMA schema_test FROM regress_jq_schema;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL schema_test_wait();
SELECT name, role, attempts, max_attempts AS max, sqlstate FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
DELETE FROM jq.jobs;

-- the same where a queue is drained; the job behind it is run
GRANT USAGE ON SCHEMA schema_test TO regress_jq_schema;
DROP EXTENSION jq;
ALTER DATABASE :"db" SET jq.workers = 0;
CREATE EXTENSION jq;
SELECT jq.grant('regress_jq_schema', 'dispatch');
SELECT jq.register('schema_test.note(jsonb)', max_attempts => 2, backoff => '{0}');
SELECT jq.register('pg_catalog.jsonb_typeof(jsonb)', 'behind it');
SET ROLE regress_jq_schema;
SELECT jq.dispatch('note') > 0 AS ok;
SELECT jq.dispatch('behind it') > 0 AS ok;
RESET ROLE;
REVOKE USAGE ON SCHEMA schema_test FROM regress_jq_schema;
\c -
\set SHOW_CONTEXT never
SET client_min_messages = error;
SET ROLE regress_jq_schema;
CALL jq.drain();
\echo :ERROR
RESET ROLE;
SELECT name FROM jq.jobs ORDER BY id;
SELECT name, role, attempts, max_attempts AS max, sqlstate FROM jq.failed_jobs;
-- and if the schema is gone altogether, the function is
DELETE FROM jq.failed_jobs;
DELETE FROM jq.jobs;
GRANT USAGE ON SCHEMA schema_test TO regress_jq_schema;
SET ROLE regress_jq_schema;
SELECT jq.dispatch('note') > 0 AS ok;
RESET ROLE;
SET client_min_messages = warning;
DROP SCHEMA schema_test CASCADE;
SET client_min_messages = error;
SET ROLE regress_jq_schema;
CALL jq.drain();
RESET ROLE;
SELECT name, role, attempts, max_attempts AS max, sqlstate FROM jq.failed_jobs;

SELECT current_database() AS db \gset
DROP PROCEDURE public.schema_test_wait;
DROP EXTENSION jq;
DROP OWNED BY regress_jq_schema;
DROP ROLE regress_jq_schema;
ALTER DATABASE :"db" RESET jq.workers;
