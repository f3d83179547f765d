/*
 * extension: coming and going.
 */
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;
SET client_min_messages = warning;

CREATE EXTENSION jq;
CREATE FUNCTION extension_test(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
SELECT jq.register('extension_test(jsonb)');
SELECT jq.dispatch('extension_test');

-- it stays where it is
ALTER EXTENSION jq SET SCHEMA public;
\echo :SQLSTATE
DROP SCHEMA jq;
\echo :SQLSTATE
DROP TABLE jq.jobs;
\echo :SQLSTATE
DROP FUNCTION jq.dispatch(jq.job_spec);
\echo :SQLSTATE
CREATE EXTENSION jq;
\echo :SQLSTATE
SELECT count(*) FROM jq.jobs;

-- a drop that is rolled back changes nothing
BEGIN;
DROP EXTENSION jq;
SELECT to_regclass('jq.jobs') IS NULL AS gone;
ROLLBACK;
SELECT jq.dispatch('extension_test');
SELECT name, payload FROM jq.jobs ORDER BY id;
BEGIN;
SAVEPOINT s;
DROP EXTENSION jq;
ROLLBACK TO s;
SELECT jq.dispatch('extension_test');
COMMIT;
SELECT count(*) FROM jq.jobs;
-- nor does one that fails
CREATE VIEW depends_on_jq AS SELECT count(*) FROM jq.jobs;
\set VERBOSITY terse
DROP EXTENSION jq;
\set VERBOSITY default
DROP VIEW depends_on_jq;
SELECT jq.dispatch('extension_test');

-- after dropping it in the transaction that dispatched
BEGIN;
SELECT jq.dispatch('extension_test');
DROP EXTENSION jq;
COMMIT;
SELECT jq.dispatch('extension_test');
\echo :SQLSTATE
SELECT to_regclass('jq.jobs') IS NULL AS gone;

-- made again it is empty, and this session has forgotten the former one
CREATE EXTENSION jq;
SELECT count(*) AS jobs, (SELECT count(*) FROM jq.handlers) AS handlers, (SELECT count(*) FROM jq.grants) AS grants FROM jq.jobs;
SELECT jq.dispatch('extension_test');
\echo :SQLSTATE
SELECT jq.register('extension_test(jsonb)');
SELECT jq.dispatch('extension_test');
CALL jq.drain();
SELECT count(*) FROM jq.jobs;

-- and again, together with its first use
DROP EXTENSION jq;
BEGIN;
CREATE EXTENSION jq;
SELECT jq.register('extension_test(jsonb)');
SELECT jq.dispatch('extension_test');
COMMIT;
CALL jq.drain();
DROP EXTENSION jq;
-- created and rolled back
BEGIN;
CREATE EXTENSION jq;
SELECT jq.register('extension_test(jsonb)');
SELECT jq.dispatch('extension_test');
ROLLBACK;
SELECT to_regclass('jq.jobs') IS NULL AS gone;

-- PostgreSQL leaves the schema that it made; another's is not taken, since its
-- owner could put there what users call
SELECT count(*) AS left_in_schema
FROM pg_depend WHERE refclassid = 'pg_namespace'::regclass AND refobjid = to_regnamespace('jq');
DROP SCHEMA IF EXISTS jq;
CREATE ROLE regress_jq_squatter;
CREATE SCHEMA jq AUTHORIZATION regress_jq_squatter;
DO $$
BEGIN
	EXECUTE 'CREATE EXTENSION jq';
	RAISE WARNING 'made in a schema of regress_jq_squatter';
EXCEPTION WHEN OTHERS THEN
	RAISE WARNING 'refused';
END
$$;
DROP EXTENSION IF EXISTS jq;
DROP SCHEMA jq CASCADE;
DROP ROLE regress_jq_squatter;

-- handlers outlive it, functions that use its types do not without CASCADE
CREATE EXTENSION jq;
CREATE FUNCTION with_context(jsonb, jq.context) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
SELECT jq.register('with_context(jsonb, jq.context)');
\set VERBOSITY terse
DROP EXTENSION jq;
DROP EXTENSION jq CASCADE;
\set VERBOSITY default
SELECT to_regproc('with_context') IS NULL AS gone, to_regproc('extension_test') IS NOT NULL AS there;

-- only a superuser brings it
CREATE ROLE regress_jq_plain;
GRANT CREATE ON DATABASE :"db" TO regress_jq_plain;
SET ROLE regress_jq_plain;
CREATE EXTENSION jq;
\echo :SQLSTATE
RESET ROLE;
CREATE EXTENSION jq;
SET ROLE regress_jq_plain;
DROP EXTENSION jq;
\echo :SQLSTATE
RESET ROLE;
REVOKE CREATE ON DATABASE :"db" FROM regress_jq_plain;
DROP ROLE regress_jq_plain;

DROP EXTENSION jq;
DROP SCHEMA IF EXISTS jq;
DROP FUNCTION extension_test;
ALTER DATABASE :"db" RESET jq.workers;
