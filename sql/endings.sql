/*
 * endings: how a job can end: by what its handler says, by what was registered
 * for it, by hand; and what is kept of it.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA endings_test;
SET search_path = endings_test;
CREATE TABLE ran (n bigint GENERATED ALWAYS AS IDENTITY, job bigint, attempt integer, what text);

-- does what it is told: a verdict, an error, a statement
CREATE FUNCTION act(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO endings_test.ran (job, attempt, what) VALUES (context.id, context.attempt, payload ->> 'do');
	PERFORM jq.log('line ' || i) FROM generate_series(1, (payload ->> 'lines')::integer) AS i;
	CASE payload ->> 'do'
		WHEN 'fail' THEN PERFORM jq.fail('given up');
		WHEN 'fail without a word' THEN PERFORM jq.fail(NULL);
		WHEN 'release' THEN PERFORM jq.release((payload ->> 'delay')::interval);
		WHEN 'skip' THEN PERFORM jq.skip('no need');
		WHEN 'trap' THEN
			BEGIN
				PERFORM jq.fail('not heeded');
			EXCEPTION WHEN OTHERS THEN
				RETURN to_jsonb(SQLSTATE);
			END;
		WHEN 'error' THEN RAISE EXCEPTION 'failed as told' USING ERRCODE = payload ->> 'code';
		WHEN 'sleep' THEN PERFORM pg_sleep(60);
		ELSE NULL;
	END CASE;
	RETURN coalesce(payload -> 'return', to_jsonb(context) - '{id,dispatched_at,dispatched_by}'::text[]);
END
$$;
CREATE FUNCTION follow(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
AS $$INSERT INTO endings_test.ran (job, attempt, what)
VALUES (context.id, context.attempt, concat_ws(' ', payload, context.meta, context.failure ->> 'name', context.failure ->> 'queue',
	context.failure ->> 'attempts', context.failure ->> 'sqlstate', context.failure ->> 'error',
	(context.failure ->> 'failed_at')::timestamptz <= clock_timestamp()))$$;
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}', timeout => '10 s');
SELECT jq.register('follow(jsonb, jq.context)');
\set ran 'SELECT attempt, what FROM ran ORDER BY n; TRUNCATE ran;'
\set failed 'SELECT attempts, max_attempts AS max, sqlstate, error, log FROM jq.failed_jobs ORDER BY id; DELETE FROM jq.failed_jobs;'
\set jobs 'SELECT attempts, exceptions, round(extract(epoch FROM available_at - clock_timestamp())) AS wait FROM jq.jobs ORDER BY id; DELETE FROM jq.jobs;'
-- numbers of jobs and times differ from run to run
SET client_min_messages = error;

/*
 * Verdicts
 */
SELECT jq.dispatch('act', '{"do": "fail", "lines": 2}') > 0 AS ok;
CALL jq.drain();
:ran
:failed
SELECT jq.dispatch('act', '{"do": "fail without a word"}') > 0 AS ok;
CALL jq.drain();
:ran
:failed
SELECT jq.dispatch('act', '{"do": "skip"}') > 0 AS ok;
CALL jq.drain();
:ran
SELECT count(*) FROM jq.jobs;
:failed
SELECT jq.dispatch('act', '{"do": "trap"}') > 0 AS ok;
CALL jq.drain();
:ran
:failed
-- a released job keeps its attempts, however often it comes
SELECT jq.dispatch('act', '{"do": "release", "delay": "1 h"}') AS id \gset
CALL jq.drain();
SELECT id = :id AS same, attempts, available_at > clock_timestamp() + interval '59 min' AS later FROM jq.jobs;
SELECT jq.reschedule(:id, run_at => '-infinity');
SELECT jq.reschedule(:id, run_at => '2000-01-01');
CALL jq.drain();
SELECT jq.reschedule(:id, run_at => '2000-01-01');
CALL jq.drain();
SELECT jq.reschedule(:id, run_at => '2000-01-01');
CALL jq.drain();
:ran
:jobs
-- it waits a little even so
SELECT jq.dispatch('act', '{"do": "release", "delay": "-1 h"}') > 0 AS ok;
CALL jq.drain();
SELECT attempts, available_at > created_at + interval '99 ms' AS later FROM jq.jobs;
DELETE FROM jq.jobs;
SELECT jq.dispatch('act', '{"do": "release"}') > 0 AS ok;
CALL jq.drain();
SELECT attempts, available_at > created_at + interval '99 ms' AS later FROM jq.jobs;
DELETE FROM jq.jobs;
-- a delay that leads nowhere is an error like any
SELECT jq.dispatch('act', '{"do": "release", "delay": "300000 years"}', max_attempts => 1) > 0 AS ok;
CALL jq.drain();
:failed
-- raised by hand
SELECT jq.dispatch('act', jsonb_build_object('do', 'error', 'code', 'JQ00' || i)) > 0 AS ok FROM generate_series(1, 3) AS i;
CALL jq.drain();
:jobs
:failed
-- outside of a job
SELECT jq.current_job() IS NULL AS none;
SELECT jq.fail('x');
\echo :SQLSTATE
-- jq.run lets them through
SELECT jq.run('act', '{"do": "fail"}');
\echo :SQLSTATE
SELECT jq.run('act', '{"do": "skip"}');
\echo :SQLSTATE
SELECT jq.run('act', '{"do": "release"}');
\echo :SQLSTATE
SELECT jq.current_job() IS NULL AS none;
TRUNCATE ran;

/*
 * The current job, progress, log
 */
CREATE FUNCTION tell(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql
AS $$
DECLARE
	inner_name text := (jq.run('act', '{"do": "nothing"}')) ->> 'name';
BEGIN
	PERFORM jq.progress(0), jq.progress(100, 'done'), jq.progress(NULL), jq.progress(50, repeat('ä', 300));
	PERFORM jq.log(repeat('x', 3000)), jq.log(NULL), jq.log('');
	RETURN jsonb_build_object('same', jq.current_job() = context, 'inner', inner_name, 'name', (jq.current_job()).name);
END
$$;
SELECT jq.register('tell(jsonb, jq.context)', keep_result => '1 day');
SELECT jq.dispatch('tell', meta => '{"from": "me"}') AS id \gset
CALL jq.drain();
SELECT jq.result(:id);
CREATE FUNCTION too_far(payload jsonb) RETURNS void LANGUAGE sql AS $$SELECT jq.progress((payload #>> '{}')::float8)$$;
SELECT jq.register('too_far(jsonb)', max_attempts => 1);
SELECT count(jq.dispatch('too_far', p::jsonb)) FROM unnest('{"-0.1", "100.1", "\"NaN\""}'::text[]) AS p;
CALL jq.drain();
:failed
-- the log keeps its end, in whole lines
SELECT jq.dispatch('act', '{"do": "fail", "lines": 1000}') > 0 AS ok;
CALL jq.drain();
SELECT length(log) BETWEEN 1900 AND 2047 AS bounded, right(log, 9), log ~ '^line \d+\n' AS whole FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
-- of a long line its end, and that is there after a short one, too
CREATE FUNCTION say(payload jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM jq.log(line) FROM jsonb_array_elements_text(payload) AS line;
	PERFORM jq.fail('said');
END
$$;
SELECT jq.register('say(jsonb)', max_attempts => 1);
SELECT count(jq.dispatch('say', to_jsonb(lines))) FROM (VALUES
	(ARRAY['first', repeat('x', 2500) || 'end']),
	(ARRAY['first', repeat('x', 2500) || 'end', 'last']),
	(ARRAY['first', repeat('ä', 1500) || 'end', 'last']),
	(ARRAY[repeat('ä', 1022), 'last', repeat('€', 1000)]),
	(ARRAY[repeat('x', 2046), '', '']),
	(ARRAY[repeat('x', 1500), repeat('y', 1500), repeat('z', 1500)])) AS v (lines);
CALL jq.drain();
SELECT octet_length(log) AS bytes, regexp_replace(log, '([xyzä€])\1+', '\1+', 'g') AS log FROM jq.failed_jobs ORDER BY id;
DELETE FROM jq.failed_jobs;
TRUNCATE ran;

/*
 * What was registered
 */
-- errors that are not tried again
SELECT jq.register('act(jsonb, jq.context)', backoff => '{0 s}', permanent_errors => '{22012,23}');
SELECT jq.dispatch('act', jsonb_build_object('do', 'error', 'code', c)) > 0 AS ok FROM unnest('{22012,22013,23505,23000,40002}'::text[]) AS c;
CALL jq.drain();
:failed
SELECT jq.register('act(jsonb, jq.context)', permanent_errors => '{2201}');
\echo :SQLSTATE
SELECT jq.register('act(jsonb, jq.context)', permanent_errors => '{NULL}');
SELECT jq.register('act(jsonb, jq.context)', permanent_errors => '{p0001}');
SELECT jq.register('act(jsonb, jq.context)', permanent_errors => '{}');
-- errors count, releases do not
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 9, backoff => '{0 s}', max_exceptions => 2);
SELECT jq.dispatch('act', '{"do": "error", "code": "22012"}') > 0 AS ok;
CALL jq.drain();
:failed
SELECT jq.register('act(jsonb, jq.context)', max_exceptions => 0);
\echo :SQLSTATE
-- a deadline instead of a number
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 1, backoff => '{0 s,0 s,0 s,1 h}', retry_for => '30 min');
SELECT jq.dispatch('act', '{"do": "error", "code": "22012"}') > 0 AS ok;
CALL jq.drain();
:failed
SELECT jq.dispatch('act') > 0 AS ok;
UPDATE jq.jobs SET counts_from = now() - interval '1 hour';
CALL jq.drain();
SELECT count(*) AS first_attempt_is_made FROM ran WHERE what IS NULL;
SELECT jq.dispatch('act') > 0 AS ok;
UPDATE jq.jobs SET counts_from = now() - interval '1 hour', attempts = 1;
CALL jq.drain();
:failed
-- nor does a release lead beyond it
SELECT jq.dispatch('act', '{"do": "release", "delay": "20 min"}') > 0 AS ok;
CALL jq.drain();
UPDATE jq.jobs SET counts_from = now() - interval '20 min', available_at = now(), last_error = '22012: failed before';
SET jq.keep_attempts = '1 h';
CALL jq.drain();
RESET jq.keep_attempts;
SELECT attempt, outcome, sqlstate FROM jq.attempts;
DELETE FROM jq.attempts;
SELECT detail FROM jq.failed_jobs;
:failed
SELECT jq.register('act(jsonb, jq.context)', retry_for => '0 s');
\echo :SQLSTATE
SELECT jq.register('act(jsonb, jq.context)', retry_for => '-1 day');
SELECT jq.register('act(jsonb, jq.context)', expires => '101 years');
SELECT jq.register('act(jsonb, jq.context)', keep_result => '0');
-- too late to be started
SELECT jq.register('act(jsonb, jq.context)', expires => '1 h');
SELECT jq.dispatch('act') > 0 AS ok, jq.dispatch('act', delay => '1 day') > 0 AS ok;
UPDATE jq.jobs SET counts_from = coalesce(counts_from, created_at) - interval '2 hours', available_at = available_at - interval '1 day';
SELECT round(extract(epoch FROM counts_from - created_at) / 3600) AS hours FROM jq.jobs ORDER BY id;
TRUNCATE ran;
CALL jq.drain();
SELECT count(*) FROM ran;
SELECT id AS expired FROM jq.failed_jobs \gset
:failed
-- what an attempt failed of before is told
SELECT jq.register('act(jsonb, jq.context)', expires => '1 h', backoff => '{0 s,1 h}');
SELECT jq.dispatch('act', '{"do": "error", "code": "22012"}') > 0 AS ok;
CALL jq.drain();
SELECT attempts, last_error FROM jq.jobs;
UPDATE jq.jobs SET counts_from = now() - interval '2 hours', available_at = now();
CALL jq.drain();
SELECT attempts, sqlstate, error, detail FROM jq.failed_jobs;
SELECT jq.retry(id) FROM jq.failed_jobs;
SELECT attempts, last_error FROM jq.jobs;
DELETE FROM jq.jobs;
TRUNCATE ran;
-- a timeout ends it
SELECT jq.register('act(jsonb, jq.context)', timeout => '50 ms', fail_on_timeout => true);
SELECT jq.dispatch('act', '{"do": "sleep"}') > 0 AS ok, jq.dispatch('act', '{"do": "error", "code": "22012"}') > 0 AS ok;
CALL jq.drain();
:failed
:jobs
-- each context has the deadline and the meta data
SELECT jq.register('act(jsonb, jq.context)', retry_for => '1 day', keep_result => '1 h');
SELECT jq.dispatch('act', meta => '{"k": [1]}', priority => 3) AS id \gset
CALL jq.drain();
SELECT (jq.result(:id) ->> 'deadline')::timestamptz > now() + interval '23 hours' AS deadline, jq.result(:id) - 'deadline' AS context;
TRUNCATE ran;

/*
 * Follow-ups
 */
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 1, on_failed => 'follow');
SELECT jq.dispatch('act', '{"do": "error", "code": "22012"}', meta => '{"m": 1}', queue => 'q') AS id \gset
CALL jq.drain();
:ran
SELECT id = :id AS same, error FROM jq.failed_jobs;
-- retried and failed again, it is followed again, and stands there once
SELECT jq.retry(:id);
CALL jq.drain();
:ran
SELECT id = :id AS same, error FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
-- one that cannot be dispatched stands there itself, and prevents nothing
SET client_min_messages = notice;
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 1, on_failed => 'nobody');
SET client_min_messages = error;
SELECT jq.dispatch('act', '{"do": "fail"}') > 0 AS ok;
CALL jq.drain();
SELECT name, attempts, sqlstate, error, failure ->> 'error' AS follows FROM jq.failed_jobs ORDER BY id;
DELETE FROM jq.failed_jobs;
-- one that fails is not followed itself
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 1, on_failed => 'act');
SELECT jq.dispatch('act', '{"do": "fail"}') > 0 AS ok;
CALL jq.drain();
SELECT name, attempts, error, failure ->> 'error' AS follows FROM jq.failed_jobs ORDER BY id;
DELETE FROM jq.failed_jobs;
TRUNCATE ran;

/*
 * Retry, reschedule, cancel
 */
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 1, keep_result => '1 h', expires => '1 h');
SELECT count(jq.dispatch('act', jsonb_build_object('do', 'error', 'code', '2201' || i), queue => 'q' || i % 2)) FROM generate_series(1, 6) AS i;
SELECT jq.dispatch('act', '{"do": "fail"}') AS id \gset
CALL jq.drain();
SELECT jq.retry(:id, delay => '1 h', payload => '{"do": "fine"}');
SELECT jq.retry(:id), jq.retry(:id + 1000);
SELECT attempts, payload, round(extract(epoch FROM available_at - now())) AS wait, counts_from = available_at AS anew FROM jq.jobs;
SELECT jq.reschedule(:id, now() - interval '1 h', 'other', -5, 7), jq.reschedule(:id + 1000);
SELECT queue, priority, max_attempts, available_at <= clock_timestamp() AS due FROM jq.jobs;
SELECT jq.reschedule(:id), jq.reschedule(NULL);
\echo :SQLSTATE
SELECT jq.reschedule(:id, queue => '');
SELECT jq.reschedule(:id, max_attempts => 0);
SELECT jq.reschedule(:id, 'infinity');
\echo :SQLSTATE
CALL jq.drain('{other}');
SELECT jq.result(:id) ->> 'queue' AS queue, jq.result(:id) ->> 'max_attempts' AS max;
SELECT jq.reschedule(:id);
SELECT jq.retry(NULL);
\echo :SQLSTATE
SELECT jq.retry_all(queue => 'q9'), jq.retry_all(sqlstate => '22011'), jq.retry_all('q1', 'act', NULL, now() - interval '1 h'), jq.retry_all(failed_since => now() + interval '1 h');
SELECT queue, count(*) FROM jq.jobs GROUP BY queue ORDER BY queue;
SELECT queue, sqlstate FROM jq.failed_jobs ORDER BY id;
SELECT jq.retry_all(), jq.retry_all();
DELETE FROM jq.jobs;
-- an expired job has its time anew
SELECT jq.dispatch('act') AS id \gset
UPDATE jq.jobs SET counts_from = now() - interval '1 day', created_at = now() - interval '1 day';
CALL jq.drain();
:failed
SELECT jq.dispatch('act', '{"do": "fail"}') AS id \gset
CALL jq.drain();
UPDATE jq.failed_jobs SET created_at = now() - interval '1 day';
SELECT jq.retry(:id, payload => '{}');
CALL jq.drain();
SELECT jq.result(:id) IS NOT NULL AS done;
-- cancel
SELECT jq.dispatch('act', delay => '1 h') AS id \gset
SELECT jq.cancel(:id, 'changed my mind'), jq.cancel(:id), jq.cancel(:id + 1000);
SELECT attempts, sqlstate, error = format('cancelled by role "%s": changed my mind', current_user) AS told FROM jq.failed_jobs;
SELECT jq.retry(:id), jq.reschedule(:id, now() + interval '1 day'), jq.cancel(:id), jq.retry(:id), jq.forget(:id), jq.cancel(:id), jq.cancel(:id);
SELECT error = format('cancelled by role "%s"', current_user) AS told FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
-- the reason is cut, where a character ends
SELECT jq.dispatch('act', delay => '1 h') AS id \gset
SELECT jq.cancel(:id, 'x' || repeat('ä', 5000));
SELECT octet_length(error) BETWEEN 8191 AND 8192 AS cut, right(error, 2) FROM jq.failed_jobs;
SELECT jq.flush(older_than => '-1 s');
\echo :SQLSTATE
SELECT jq.flush(older_than => '-1 mon +29 days');
SELECT jq.flush(older_than => '1 h'), jq.flush(older_than => '0');
SELECT jq.cancel(NULL);
\echo :SQLSTATE
SELECT count(*) FROM jq.cancellations;
-- a job that runs in a session cannot be cancelled by itself
CREATE FUNCTION suicide(payload jsonb, context jq.context) RETURNS void LANGUAGE sql AS $$SELECT jq.cancel(context.id)$$;
SELECT jq.register('suicide(jsonb, jq.context)', max_attempts => 1);
SELECT jq.dispatch('suicide') > 0 AS ok;
CALL jq.drain();
:failed
TRUNCATE ran;

/*
 * Waiting
 */
SELECT jq.dispatch('act', '{"return": {"a": [1, "x"]}}') AS done, jq.dispatch('act', delay => '1 h') AS later,
	jq.dispatch('act', '{"do": "fail"}') AS lost, jq.dispatch('act', delay => '1 h') AS cancelled \gset
SELECT jq.cancel(:cancelled);
CALL jq.wait_for(:done, '10 ms');
CALL jq.drain();
CALL jq.wait_for(:done);
CALL jq.wait_for(:lost);
CALL jq.wait_for(:cancelled);
CALL jq.wait_for(:later, '0');
CALL jq.wait_for(:later, '-1 day');
CALL jq.wait_for(0);
\echo :SQLSTATE
CALL jq.wait_for(9223372036854775807);
CALL jq.wait_for(NULL);
\echo :SQLSTATE
BEGIN;
CALL jq.wait_for(:done);
\echo :SQLSTATE
ROLLBACK;
-- a procedure may wait, but what it has written is its own to commit
CREATE TABLE written (n integer);
CREATE PROCEDURE write_and_wait(job bigint, first boolean, INOUT state text DEFAULT NULL) LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO written VALUES (1);
	IF first THEN COMMIT; END IF;
	CALL jq.wait_for(job, '0', state);
END $$;
CALL write_and_wait(:done, false);
\echo :SQLSTATE
CALL write_and_wait(:later, false);
SELECT count(*) FROM written;
CALL write_and_wait(:done, true);
CALL write_and_wait(:later, true);
DROP PROCEDURE write_and_wait;
DROP TABLE written;
-- a dispatch that was rolled back has left nothing to ask for
BEGIN;
SELECT jq.dispatch('act') AS undone \gset
ROLLBACK;
CALL jq.wait_for(:undone);
SELECT jq.result(:done), jq.result(:lost), jq.result(NULL);
DELETE FROM jq.jobs;
DELETE FROM jq.failed_jobs;
-- what is not jsonb is no result, but done it is
CREATE FUNCTION number(payload jsonb) RETURNS integer LANGUAGE sql AS 'SELECT 1';
SELECT jq.register('number(jsonb)', keep_result => '1 h');
SELECT jq.dispatch('number') AS id \gset
CALL jq.drain();
SELECT jq.result(:id), (SELECT count(*) FROM jq.results WHERE id = :id);
-- a long one is kept whole
SELECT jq.dispatch('act', jsonb_build_object('return', (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 50000) AS i))) AS id \gset
CALL jq.drain();
SELECT jsonb_array_length(jq.result(:id)), jq.result(:id) ->> 49999 = md5('50000') AS whole;
-- each has its time
SELECT jq.prune();
UPDATE jq.results SET keep_until = now() - interval '1 s' WHERE id = :id;
SELECT jq.prune();
SELECT jq.result(:id);

/*
 * History
 */
SET jq.keep_attempts = '1 h';
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}');
TRUNCATE ran;
SELECT jq.dispatch('act', jsonb_build_object('do', d, 'lines', 1, 'code', '22012', 'delay', '1 h')) > 0 AS ok FROM unnest('{fine,error,fail,skip,release}'::text[]) AS d;
CALL jq.drain();
SELECT jq.cancel(id) FROM jq.jobs;
SELECT dense_rank() OVER (ORDER BY id) AS job, attempt, outcome, sqlstate, split_part(error, ' by role', 1) AS error, log,
	pid = pg_backend_pid() AS here, ended_at >= started_at AS timed
FROM jq.attempts ORDER BY id, ended_at;
SELECT jq.prune();
UPDATE jq.attempts SET ended_at = now() - interval '2 h' WHERE outcome = 'failed';
SELECT jq.prune();
RESET jq.keep_attempts;
SELECT jq.prune();
DELETE FROM jq.failed_jobs;
TRUNCATE ran;

/*
 * Pauses
 */
SELECT jq.dispatch('act', '{"do": "a"}', queue => 'a') > 0 AS ok, jq.dispatch('act', '{"do": "b"}', queue => 'b') > 0 AS ok;
SELECT jq.pause('a', 'for a while'), jq.pause('a', 'again'), jq.pause('c');
CALL jq.drain();
:ran
SELECT queue, ready, paused FROM jq.queue_stats ORDER BY queue;
SELECT queue, paused_by = current_user AS by_me, reason, until FROM jq.pauses ORDER BY queue;
SELECT jq.pause(reason => 'all');
SELECT jq.resume('a'), jq.resume('a'), jq.resume('never');
CALL jq.drain();
SELECT jq.resume(), jq.resume();
SELECT jq.pause('a', until => clock_timestamp() + interval '1 h'), jq.pause('b', until => clock_timestamp() - interval '1 s');
CALL jq.drain();
SELECT jq.pause('b'), jq.resume('b');
-- one that has come to its end is none, to neither of the two
SELECT jq.pause('b', until => clock_timestamp()), jq.pause('b', until => clock_timestamp()), jq.resume('b');
-- taken back with the transaction
BEGIN;
SELECT jq.resume('a');
ROLLBACK;
CALL jq.drain();
SELECT jq.resume('a');
CALL jq.drain();
:ran
SELECT jq.pause(NULL);
\echo :SQLSTATE
SELECT jq.resume(NULL);
SELECT jq.pause(' a');
\echo :SQLSTATE
SELECT jq.resume('c');
SELECT count(*) FROM jq.pauses;

/*
 * Odd rows, and jobs that do not come to an end
 */
-- attempts spent by hand, in front of others
SELECT jq.dispatch('act', '{"do": "never"}', max_attempts => 1) > 0 AS ok;
SELECT count(jq.dispatch('act', '{"do": "healthy"}')) FROM generate_series(1, 3);
UPDATE jq.jobs SET attempts = 5 WHERE payload ->> 'do' = 'never';
CALL jq.drain();
:ran
:failed
-- what jobs look at prunes the pages that their own rows are in
CREATE FUNCTION counts(payload jsonb) RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM jq.jobs';
SELECT jq.register('counts(jsonb)');
SELECT count(jq.dispatch('counts')) FROM generate_series(1, 300);
CALL jq.drain();
SELECT (SELECT count(*) FROM jq.jobs) AS jobs, (SELECT count(*) FROM jq.failed_jobs) AS failed;
-- a job that dispatches itself
CREATE FUNCTION again(payload jsonb) RETURNS void LANGUAGE sql AS $$SELECT jq.dispatch('again', payload)$$;
SELECT jq.register('again(jsonb)');
SELECT jq.dispatch('again') > 0 AS ok;
CALL jq.drain(max_jobs => 20);
SELECT count(*) FROM jq.jobs;

SET client_min_messages = warning;
DROP EXTENSION jq CASCADE;
DROP SCHEMA endings_test CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
