/*
 * run: handlers called at once, drained in a session, failing, tried again;
 * what is kept of a failure, and what can be done with it.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA run_test;
SET search_path = run_test;
CREATE TABLE ran (id bigint GENERATED ALWAYS AS IDENTITY, what text);
CREATE FUNCTION note(payload jsonb) RETURNS void LANGUAGE sql
AS $$INSERT INTO run_test.ran (what) VALUES (payload #>> '{}')$$;
CREATE FUNCTION echo(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE sql
AS $$SELECT jsonb_build_object('payload', payload, 'name', context.name, 'queue', context.queue, 'id', context.id,
	'attempt', context.attempt, 'max', context.max_attempts, 'by_me', context.dispatched_by = current_user,
	'recent', context.dispatched_at BETWEEN now() - interval '1 hour' AND clock_timestamp())$$;
CREATE FUNCTION fail(payload jsonb) RETURNS void LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO run_test.ran (what) VALUES ('undone');
	RAISE EXCEPTION 'it is % that failed', payload USING ERRCODE = 'RG001', DETAIL = 'The detail.', HINT = 'The hint.';
END
$$;
CREATE FUNCTION do_it(payload jsonb) RETURNS void LANGUAGE plpgsql
AS $$BEGIN EXECUTE payload #>> '{}'; END$$;
SELECT jq.register('note(jsonb)');
SELECT jq.register('echo(jsonb, jq.context)', queue => 'echoes', max_attempts => 4);
SELECT jq.register('fail(jsonb)', max_attempts => 1);
SELECT jq.register('do_it(jsonb)', max_attempts => 1, timeout => NULL);
\set ran 'SELECT what FROM ran ORDER BY id; TRUNCATE ran;'
\set failed 'SELECT name, payload, attempts, max_attempts AS max, sqlstate, error, detail, hint FROM jq.failed_jobs ORDER BY id; DELETE FROM jq.failed_jobs;'

/*
 * jq.run
 */
SELECT jq.run('echo', '{"a": 1}');
SELECT jq.run('echo') -> 'payload' AS default_payload;
SELECT jq.run('note', '"hello"') IS NULL AS no_result;
:ran
SELECT jq.run('fail', '1');
\echo :SQLSTATE
:ran
SELECT jq.run('noet');
\echo :SQLSTATE
SELECT jq.run(NULL);
\echo :SQLSTATE
SELECT jq.run('note', NULL);
\echo :SQLSTATE
SELECT jq.run('');
\echo :SQLSTATE
SELECT jq.rename_handler('note', 'renamed');
SELECT jq.run('note', '"by its alias"') IS NULL AS no_result;
SELECT jq.rename_handler('renamed', 'note');
:ran
-- in the caller's transaction and with its limits
BEGIN;
SELECT jq.run('note', '"gone"');
ROLLBACK;
SELECT jq.register('do_it(jsonb)', 'limited', timeout => '1 ms');
SELECT jq.run('limited', '"SELECT pg_sleep(0.05)"') IS NULL AS ok;
SELECT count(*) AS jobs, (SELECT count(*) FROM jq.failed_jobs) AS failed FROM jq.jobs;
:ran
-- what it sets does not outlive it
SELECT jq.run('do_it', '"SET work_mem = ''111kB''"');
SHOW work_mem;

/*
 * drain
 *
 * What fails in a job is the job's error, not that of who drains the queue.
 */
SET client_min_messages = error;
CALL jq.drain();
-- order: priority, due time, id
SELECT jq.dispatch('note', '"3: late"', priority => 0, run_at => clock_timestamp() + interval '100 ms') > 0 AS ok;
SELECT jq.dispatch('note', '"2: first id"', priority => 0) > 0 AS ok;
SELECT jq.dispatch('note', '"2: second id"', priority => 0) > 0 AS ok;
SELECT jq.dispatch('note', '"4: last"', priority => 1) > 0 AS ok;
SELECT jq.dispatch('note', '"1: first"', 'other', priority => -1) > 0 AS ok;
SELECT jq.dispatch('note', '"never"', delay => '1 hour') > 0 AS ok;
SELECT pg_sleep(0.15);
CALL jq.drain();
:ran
DELETE FROM jq.jobs;
-- queues come strictly in the order of the list, whatever the priority
SELECT jq.dispatch('note', '"c"', 'c', -9) > 0 AS ok;
SELECT jq.dispatch('note', '"a"', 'a', 9) > 0 AS ok;
SELECT jq.dispatch('note', '"b"', 'b', 0) > 0 AS ok;
SELECT jq.dispatch('note', '"a, urgent"', 'a', 8) > 0 AS ok;
CALL jq.drain('{b,a}');
:ran
CALL jq.drain('{nobody}');
CALL jq.drain(queues => '{c}');
:ran
-- so many and no more
SELECT count(jq.dispatch('note', to_jsonb(n))) FROM generate_series(1, 5) AS n;
CALL jq.drain(max_jobs => 0);
CALL jq.drain(max_jobs => 2);
:ran
CALL jq.drain(NULL, 1, NULL);
CALL jq.drain(ran => 77);
:ran
-- what a job dispatches is run, too; one that dispatches itself has no end but max_jobs
CREATE FUNCTION go_on(payload jsonb) RETURNS void LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO run_test.ran (what) VALUES ('go on ' || (payload #>> '{}'));
	PERFORM jq.dispatch('go_on', to_jsonb(payload::integer + 1));
END
$$;
SELECT jq.register('go_on(jsonb)');
SELECT jq.dispatch('go_on', '1') > 0 AS ok;
CALL jq.drain(max_jobs => 3);
:ran
DELETE FROM jq.jobs;
-- a failure counts, and is not the caller's error
SELECT jq.dispatch('fail', '1') > 0 AS ok;
SELECT jq.dispatch('note', '"after it"') > 0 AS ok;
CALL jq.drain();
\echo :ERROR :SQLSTATE
:ran
:failed
-- not in a transaction, not from a function; from a block that is none it may
BEGIN;
CALL jq.drain();
\echo :SQLSTATE
ROLLBACK;
CREATE FUNCTION drain_it() RETURNS void LANGUAGE plpgsql
AS $$DECLARE n bigint; BEGIN CALL jq.drain(NULL, NULL, n); END$$;
SELECT drain_it();
\echo :SQLSTATE
CREATE PROCEDURE write_and_drain(first boolean) LANGUAGE plpgsql
AS $$DECLARE n bigint; BEGIN CREATE TABLE written (); IF first THEN COMMIT; END IF; CALL jq.drain(NULL, NULL, n); END$$;
CALL write_and_drain(false);
SELECT to_regclass('written') AS none;
CALL write_and_drain(true);
DROP TABLE written;
SELECT jq.dispatch('do_it', '"CALL jq.drain()"') > 0 AS ok;
CALL jq.drain();
:failed
SELECT jq.dispatch('note', '"from a block"') > 0 AS ok;
DO $$
DECLARE
	n bigint;
BEGIN
	CALL jq.drain(NULL, NULL, n);
	PERFORM jq.run('note', to_jsonb('ran ' || n));
	PERFORM jq.dispatch('note', '"and again"');
	COMMIT;
	CALL jq.drain(NULL, NULL, n);
	PERFORM jq.run('note', to_jsonb('ran ' || n));
END
$$;
:ran
SET default_transaction_read_only = on;
CALL jq.drain();
\echo :SQLSTATE
RESET default_transaction_read_only;
-- bad arguments
CALL jq.drain('{}');
\echo :SQLSTATE
CALL jq.drain('{a,NULL}');
\echo :SQLSTATE
CALL jq.drain('{a,""}');
\echo :SQLSTATE
CALL jq.drain(ARRAY[repeat('q', 60)]);
CALL jq.drain('{" a"}');
CALL jq.drain(max_jobs => -1);
\echo :SQLSTATE
-- jobs of others stay
CREATE ROLE regress_jq_run;
GRANT USAGE ON SCHEMA run_test TO regress_jq_run;
RESET client_min_messages;
SELECT jq.grant('regress_jq_run', 'dispatch');
SET ROLE regress_jq_run;
SELECT jq.dispatch('note', '"of another"') > 0 AS ok;
RESET ROLE;
CALL jq.drain();
SET ROLE regress_jq_run;
SELECT jq.dispatch('note', '"of another"') > 0 AS ok;
RESET ROLE;
CALL jq.drain();
:ran
DELETE FROM jq.jobs;
SELECT jq.revoke('regress_jq_run', 'dispatch');
REVOKE USAGE ON SCHEMA run_test FROM regress_jq_run;
DROP ROLE regress_jq_run;
SET client_min_messages = error;

/*
 * Trying again
 */
SELECT jq.register('fail(jsonb)', 'thrice', max_attempts => 3, backoff => '{1 hour,2 hours}');
SELECT jq.dispatch('thrice') AS thrice \gset
CALL jq.drain();
SELECT attempts, max_attempts, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS minutes FROM jq.jobs;
CALL jq.drain();
SELECT later, ready FROM jq.queue_stats;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL jq.drain();
SELECT attempts, max_attempts, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS minutes FROM jq.jobs;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL jq.drain();
SELECT count(*) FROM jq.jobs;
SELECT id = :thrice AS same_id, failed_at BETWEEN created_at AND clock_timestamp() AS timely FROM jq.failed_jobs;
:failed
:ran
-- the last wait repeats
SELECT jq.register('fail(jsonb)', 'repeated', max_attempts => 9, backoff => '{1 hour}');
SELECT jq.dispatch('repeated') > 0 AS ok;
CALL jq.drain();
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL jq.drain();
SELECT attempts, max_attempts, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS minutes FROM jq.jobs;
DELETE FROM jq.jobs;
-- by default ten seconds more each time
SELECT jq.register('fail(jsonb)', 'by default');
SELECT jq.dispatch('by default') > 0 AS ok;
CALL jq.drain();
SELECT attempts, extract(epoch FROM available_at - clock_timestamp()) BETWEEN 5 AND 10 AS in_time FROM jq.jobs;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL jq.drain();
SELECT attempts, extract(epoch FROM available_at - clock_timestamp()) BETWEEN 15 AND 20 AS in_time FROM jq.jobs;
DELETE FROM jq.jobs;
-- no wait at all, and the handler sees the number of its attempt
CREATE FUNCTION second_time(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO run_test.ran (what) VALUES (format('attempt %s of %s', context.attempt, context.max_attempts));
	IF context.attempt < 3 THEN
		RAISE 'not yet';
	END IF;
END
$$;
SELECT jq.register('second_time(jsonb, jq.context)', max_attempts => 5, backoff => '{0}');
SELECT jq.dispatch('second_time') > 0 AS ok;
CALL jq.drain();
:ran
SELECT jq.dispatch('second_time', max_attempts => 2) > 0 AS ok;
CALL jq.drain();
:failed
-- the handler's terms are those of today, the job's own are of its dispatch
SELECT jq.dispatch('second_time', max_attempts => 2) > 0 AS ok;
SELECT jq.register('second_time(jsonb, jq.context)', max_attempts => 99, backoff => '{3 hours}');
CALL jq.drain();
SELECT attempts, max_attempts, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS minutes FROM jq.jobs;
DELETE FROM jq.jobs;

/*
 * What is kept of a failure
 */
SELECT jq.dispatch('do_it', to_jsonb(command)) > 0 AS ok
FROM (VALUES
	(1, 'SELECT 1 / 0'),
	(2, 'SELECT * FROM nowhere.at_all'),
	(3, 'not SQL'),
	(4, 'VACUUM'),
	(5, 'DISCARD ALL'),
	(6, 'CREATE DATABASE regress_jq_never'),
	(7, 'DO $do$BEGIN COMMIT; END$do$'),
	(8, 'ROLLBACK'),
	(9, $c$DO $do$BEGIN RAISE EXCEPTION USING MESSAGE = ''; END$do$$c$),
	(10, $c$DO $do$BEGIN RAISE EXCEPTION USING MESSAGE = E'two\nlines, \x01 and %s'; END$do$$c$),
	(11, $c$DO $do$BEGIN RAISE SQLSTATE '40001'; END$do$$c$),
	(12, $c$DO $do$BEGIN RAISE SQLSTATE '57014'; END$do$$c$),
	(13, 'SELECT jq.dispatch(''noet'')')
) AS c (n, command) ORDER BY n;
CALL jq.drain();
SELECT payload, sqlstate FROM jq.failed_jobs ORDER BY id;
SELECT error FROM jq.failed_jobs WHERE sqlstate = 'P0001' ORDER BY id;
SELECT id IS NOT NULL AS ok, context FROM jq.failed_jobs WHERE payload = '"SELECT 1 / 0"';
SELECT name, queue, priority, payload, role = current_user AS mine, hint FROM jq.failed_jobs WHERE payload::text ~ 'noet';
SELECT queue, failed FROM jq.queue_stats;
DELETE FROM jq.failed_jobs;
-- long texts are cut between characters
SELECT jq.dispatch('do_it', to_jsonb($c$DO $do$BEGIN RAISE EXCEPTION USING MESSAGE = 'x' || repeat(U&'\00e9', 5000),
	DETAIL = repeat('d', 8192), HINT = repeat('h', 8193), ERRCODE = 'RG002'; END$do$$c$::text)) > 0 AS ok;
CALL jq.drain();
SELECT octet_length(error), right(error, 1) = U&'\00e9' AS whole, octet_length(detail), octet_length(hint), octet_length(context) <= 8192 AS bounded, sqlstate
FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
-- a handler that traps its errors has done well
SELECT jq.dispatch('do_it', to_jsonb($c$DO $do$BEGIN PERFORM 1 / 0; EXCEPTION WHEN OTHERS THEN
	INSERT INTO run_test.ran (what) VALUES ('trapped'); END$do$$c$::text)) > 0 AS ok;
CALL jq.drain();
:ran
:failed
-- constraints that wait for the commit belong to the attempt
CREATE TABLE parent (id integer PRIMARY KEY);
CREATE TABLE child (id integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
SELECT jq.dispatch('do_it', '"INSERT INTO run_test.child VALUES (1)"') > 0 AS ok;
SELECT jq.dispatch('do_it', '"INSERT INTO run_test.child VALUES (2); INSERT INTO run_test.parent VALUES (2)"') > 0 AS ok;
CALL jq.drain();
:failed
TABLE child;
-- time limits
SELECT jq.register('do_it(jsonb)', 'limited', max_attempts => 1, timeout => '50 ms');
SELECT jq.dispatch('limited', '"SELECT pg_sleep(60)"') > 0 AS ok;
SELECT jq.dispatch('limited', to_jsonb($c$DO $do$BEGIN LOOP NULL; END LOOP; END$do$$c$::text)) > 0 AS ok;
SELECT jq.dispatch('limited', to_jsonb($c$DO $do$BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN
	INSERT INTO run_test.ran (what) VALUES ('undone'); END$do$$c$::text)) > 0 AS ok;
SELECT jq.dispatch('limited', '"SELECT 1"') > 0 AS ok;
CALL jq.drain();
:failed
:ran
SELECT pg_sleep(0.1);	-- nothing is left to strike now
SELECT jq.register('do_it(jsonb)', 'limited', max_attempts => 3, timeout => '50 ms', backoff => '{1 hour}');
SELECT jq.dispatch('limited', '"SELECT pg_sleep(60)"') > 0 AS ok;
CALL jq.drain();
SELECT attempts, max_attempts FROM jq.jobs;
DELETE FROM jq.jobs;

/*
 * Handlers that are not there
 */
SET jq.require_handler = off;
SELECT jq.dispatch('noet', max_attempts => 7) > 0 AS ok;
RESET jq.require_handler;
CALL jq.drain();
:failed
-- registered, but its function is gone: deploys do that
CREATE FUNCTION fleeting(payload jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
SELECT jq.register('fleeting(jsonb)', max_attempts => 2, backoff => '{1 hour}');
SELECT jq.dispatch('fleeting') > 0 AS ok;
SELECT jq.dispatch('fleeting', delay => '1 hour') > 0 AS ok;
DROP FUNCTION fleeting;
SELECT jq.dispatch('fleeting');
\echo :SQLSTATE
SELECT jq.run('fleeting');
\echo :SQLSTATE
CALL jq.drain();
SELECT attempts, max_attempts FROM jq.jobs ORDER BY id;
UPDATE jq.jobs SET available_at = clock_timestamp() WHERE attempts = 1;
CALL jq.drain();
:failed
-- and when it is back, all is well
CREATE FUNCTION fleeting(payload jsonb) RETURNS void LANGUAGE sql AS $$INSERT INTO run_test.ran (what) VALUES ('back')$$;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL jq.drain();
:ran
-- replaced by something that is no handler
DROP FUNCTION fleeting;
CREATE FUNCTION fleeting(payload jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
SELECT jq.dispatch('fleeting');
\echo :SQLSTATE

/*
 * Afterwards
 */
SELECT jq.dispatch('fail', to_jsonb(n), 'q' || n) AS id FROM generate_series(1, 6) AS n;
SELECT jq.dispatch('do_it', '"SELECT 1 / 0"', 'q1') > 0 AS ok;
CALL jq.drain();
SELECT max(id) AS last, min(id) AS first FROM jq.failed_jobs \gset
SELECT jq.retry(:first);
SELECT jq.retry(:first);
SELECT id = :first AS same, attempts, max_attempts, queue, payload, available_at <= clock_timestamp() AS due FROM jq.jobs;
CALL jq.drain();
SELECT count(*) FROM jq.failed_jobs WHERE id = :first;
BEGIN;
SELECT jq.retry(:first);
ROLLBACK;
SELECT count(*) FROM jq.failed_jobs WHERE id = :first;
SELECT count(*) FROM jq.jobs;
SELECT jq.retry(0);
SELECT jq.retry(-1);
SELECT jq.retry(NULL);
\echo :SQLSTATE
BEGIN READ ONLY;
SELECT jq.retry(:first);
\echo :SQLSTATE
ROLLBACK;
-- made for this
SELECT count(*), count(*) FILTER (WHERE r) AS retried FROM (SELECT jq.retry(id) AS r FROM jq.failed_jobs WHERE name = 'do_it') AS s;
UPDATE jq.jobs SET payload = '"SELECT 1"';
CALL jq.drain();
SELECT count(*) AS failed FROM jq.failed_jobs;
SELECT jq.forget(:first);
SELECT jq.forget(:first);
SELECT jq.retry(:first);
SELECT jq.forget(0);
SELECT jq.forget(NULL);
\echo :SQLSTATE
SELECT jq.flush(older_than => '1 hour');
SELECT jq.flush(queue => 'q2', name => 'do_it');
SELECT jq.flush(queue => 'q2');
SELECT jq.flush(NULL, 'q3', 'fail');
SELECT jq.flush('0', 'nowhere');
UPDATE jq.failed_jobs SET failed_at = failed_at - interval '1 day' WHERE queue = 'q4';
SELECT jq.flush('23 hours');
SELECT jq.flush(name => 'do_it');
SELECT jq.flush();
SELECT count(*) FROM jq.failed_jobs;
-- a sequence that fell behind what was restored
INSERT INTO jq.jobs (id, stamp, available_at, created_at, origin, priority, max_attempts, role, queue, name, payload)
SELECT last_value + 1, 1, now(), now(), 0, 0, 1, 'regress_jq_nobody', 'q', 'note', '{}' FROM jq.jobs_id_seq;
\set VERBOSITY sqlstate
SELECT jq.dispatch('note') > 0 AS ok;
SELECT jq.dispatch('note', '"on we go"') > 0 AS ok;
\set VERBOSITY default
CALL jq.drain();
:ran
DELETE FROM jq.jobs;

/*
 * Views
 */
SELECT jq.dispatch('note', queue => 'v1') > 0 AS ok;
SELECT jq.dispatch('note', queue => 'v1', delay => '1 hour') > 0 AS ok;
SELECT jq.dispatch('fail', '0', queue => 'v2') > 0 AS ok;
CALL jq.drain('{v2}');
SELECT queue, ready, later, running, held, failed, oldest_wait >= '0' AS waits FROM jq.queue_stats ORDER BY queue;
SELECT version, ready, later, running, held, failed, oldest_wait >= '0' AS waits, workers, idle FROM jq.status;
SELECT count(*) FROM jq.running;
SELECT count(*) FROM jq.workers;

DROP FUNCTION echo, second_time;
DROP EXTENSION jq;
SET client_min_messages = warning;
DROP SCHEMA run_test CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
