/*
 * batch: batches of jobs: how they are counted and finished, what a failure and
 * a cancellation do, adding, and retrying.
 */
\set SHOW_CONTEXT errors
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA batch_test;
SET search_path = batch_test;
CREATE TABLE ran (n bigint GENERATED ALWAYS AS IDENTITY, label text, batch bigint, failed text);
CREATE FUNCTION act(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO batch_test.ran (label, batch, failed)
	VALUES (payload ->> 'l', context.batch_id, context.failure ->> 'error');
	CASE payload ->> 'do'
		WHEN 'fail' THEN RAISE 'as asked for';
		WHEN 'skip' THEN PERFORM jq.skip();
		WHEN 'run' THEN EXECUTE payload ->> 'sql';
		ELSE NULL;
	END CASE;
END
$$;
CREATE FUNCTION j(l text, what text DEFAULT NULL) RETURNS jq.job_spec LANGUAGE sql
AS $$SELECT jq.job('act', jsonb_build_object('l', l, 'do', what))$$;
CREATE FUNCTION r(l text, command text) RETURNS jq.job_spec LANGUAGE sql
AS $$SELECT jq.job('act', jsonb_build_object('l', l, 'do', 'run', 'sql', command))$$;
-- runs all there is, together with the scheduler, which sees to batches as well
CREATE PROCEDURE settle(id bigint) LANGUAGE plpgsql AS $$
DECLARE
	ran bigint;
BEGIN
	FOR i IN 1 .. 500 LOOP
		CALL jq.drain(NULL, NULL, ran);
		EXIT WHEN ran = 0 AND (SELECT finished_at IS NOT NULL FROM jq.batch_status AS b WHERE b.id = settle.id);
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END
$$;
SELECT jq.register('act(jsonb, jq.context)', max_attempts => 1);
\set drain 'SET client_min_messages = error; CALL settle(:b); RESET client_min_messages;'
\set ran 'SELECT string_agg(concat_ws(\':\', label, failed), $$ $$ ORDER BY n) AS ran, bool_and(batch = :b) AS in_batch FROM ran; TRUNCATE ran;'
\set status 'SELECT name, total, pending, failed, cancelled, progress, state FROM jq.batch_status WHERE id = :b;'

-- all done
SELECT jq.dispatch_batch(ARRAY[j('a'), j('b', 'skip'), jq.chain(j('c'), j('d'), j('e'))], 'done', j('then'), j('catch'), j('finally')) AS b \gset
:status
SET client_min_messages = error;
CALL jq.drain(max_jobs => 2);
RESET client_min_messages;
:status
:drain
:status
:ran
-- no jobs
SELECT jq.dispatch_batch(NULL, 'empty', j('then'), j('catch'), j('finally')) AS b \gset
:status
:drain
:ran
SELECT jq.dispatch_batch('{}', 'empty') AS b \gset
:status
-- the first failure cancels what waits, also what is due later, and jobs of chains
SELECT jq.dispatch_batch(ARRAY[j('a'), j('b', 'fail'), jq.chain(j('c'), j('d')), jq.job('act', '{"l": "later"}', delay => '1 h')], 'fails', j('then'), j('catch'), j('finally')) AS b \gset
:drain
:status
:ran
-- unless failures are allowed
SELECT jq.dispatch_batch(ARRAY[j('a', 'fail'), j('b', 'fail'), jq.chain(j('c', 'fail'), j('d')), j('e')], 'allowed', j('then'), j('catch'), j('finally'), true) AS b \gset
:drain
:status
:ran
-- a retry lets the batch come to a good end, with no callback twice
SELECT jq.retry_all(batch_id => :b);
:status
SELECT payload ->> 'l' AS l, batch_id = :b AS b FROM jq.jobs ORDER BY id;
CREATE OR REPLACE FUNCTION act(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
AS $$INSERT INTO batch_test.ran (label, batch) VALUES (payload ->> 'l', context.batch_id)$$;
:drain
:status
:ran
CREATE OR REPLACE FUNCTION act(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO batch_test.ran (label, batch, failed)
	VALUES (payload ->> 'l', context.batch_id, context.failure ->> 'error');
	CASE payload ->> 'do'
		WHEN 'fail' THEN RAISE 'as asked for';
		WHEN 'skip' THEN PERFORM jq.skip();
		WHEN 'run' THEN EXECUTE payload ->> 'sql';
		ELSE NULL;
	END CASE;
END
$$;
-- a retry lifts a cancellation that a failure caused, not one by somebody
SELECT jq.dispatch_batch(ARRAY[j('a', 'fail')], 'lifted', finally_job => j('finally')) AS b \gset
:drain
:status
SELECT jq.retry(id) FROM jq.failed_jobs WHERE batch_id = :b;
:status
:drain
:ran
SELECT jq.dispatch_batch(ARRAY[j('a', 'fail'), jq.job('act', '{"l": "later"}', delay => '1 h')], 'by hand', allow_failures => true) AS b \gset
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT jq.cancel_batch(:b), jq.cancel_batch(:b), jq.cancel_batch(1000000);
CALL settle(:b);
:status
\set VERBOSITY sqlstate
SELECT jq.retry(id) FROM jq.failed_jobs WHERE batch_id = :b;
\set VERBOSITY default
SELECT jq.cancel_batch(:b);
:ran

-- open batches
SELECT jq.open_batch('open', j('then'), j('catch'), j('finally')) AS b \gset
:status
SELECT count(jq.dispatch('act', jsonb_build_object('l', i), batch_id => :b)) FROM generate_series(1, 3) AS i;
BEGIN;
SELECT jq.dispatch('act', '{"l": "undone"}', batch_id => :b) > 0 AS ok;
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT jq.dispatch('act', '{"l": "undone"}', batch_id => :b) > 0 AS ok;
ROLLBACK TO s;
SAVEPOINT s;
SELECT jq.dispatch('act', '{"l": "sub"}', batch_id => :b) > 0 AS ok;
RELEASE s;
COMMIT;
:status
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:status
SELECT jq.close_batch(:b), jq.close_batch(:b);
:status
:drain
:ran
SELECT jq.dispatch('act', batch_id => :b);
SELECT jq.add_to_batch(:b, ARRAY[j('a')]);
-- added and closed by one transaction
BEGIN;
SELECT jq.open_batch('at once', j('then')) AS b \gset
SELECT jq.dispatch('act', '{"l": "a"}', batch_id => :b) > 0 AS ok;
SELECT jq.close_batch(:b);
COMMIT;
:status
SELECT jq.dispatch('act', batch_id => :b);
:drain
:status
:ran
-- a job adds to its own batch
SELECT jq.dispatch_batch(ARRAY[r('a', 'SELECT jq.add_to_batch((jq.current_job()).batch_id, ARRAY[batch_test.j($$added$$), jq.chain(batch_test.j($$c$$), batch_test.j($$d$$))])'),
	r('b', 'SELECT jq.append(batch_test.j($$appended$$))')], 'grows', j('then')) AS b \gset
:drain
:status
:ran
-- a callback may be a chain, and fail, and is no part of the batch
SELECT jq.dispatch_batch(ARRAY[j('a')], 'callback', jq.chain(j('t1'), j('t2', 'fail'), j('t3')), finally_job => j('finally')) AS b \gset
:drain
:status
:ran
SELECT payload ->> 'l' AS l, batch_id, callback_of = :b AS callback, jsonb_array_length(chain -> 'links') AS links FROM jq.failed_jobs ORDER BY id DESC LIMIT 1;
-- unique jobs: what is kept is not in the batch
SELECT jq.dispatch('act', '{"l": "holds"}', unique_key => 'k', delay => '1 h') > 0 AS ok;
SELECT jq.dispatch_batch(ARRAY[jq.job('act', '{"l": "u"}', unique_key => 'k'), j('a')], 'unique') AS b \gset
:status
SELECT jq.dispatch_batch(ARRAY[jq.job('act', '{"l": "u"}', unique_key => 'k')], 'all kept', j('then')) AS b2 \gset
SELECT state FROM jq.batch_status WHERE id = :b2;
:drain
TRUNCATE ran;
-- a handler asks whether its batch was cancelled
SELECT jq.batch_cancelled();
SELECT jq.dispatch_batch(ARRAY[r('a', 'SELECT jq.cancel_batch((jq.current_job()).batch_id); INSERT INTO batch_test.ran (label) VALUES (jq.batch_cancelled())'), j('b')], 'cancels itself', finally_job => j('finally')) AS b \gset
:drain
:status
SELECT string_agg(label, ' ' ORDER BY n) FROM ran; TRUNCATE ran;

-- bad input queues nothing, and says which element it is
SELECT count(*) AS batches FROM jq.batches \gset
SELECT jq.dispatch_batch(ARRAY[j('a'), NULL]);
SELECT jq.dispatch_batch(ARRAY[j('a'), jq.job('nobody')]);
SELECT jq.dispatch_batch(ARRAY[j('a'), jq.chain(j('b'), jq.job('nobody'))]);
SELECT jq.dispatch_batch(ARRAY[j('a')], then_job => jq.job('nobody'));
SELECT jq.dispatch_batch(ARRAY[j('a')], catch_job => jq.job('act', delay => '1 s', run_at => now()));
SELECT jq.close_batch(NULL);
SELECT jq.close_batch(1000000);
SELECT jq.add_to_batch(1000000, '{}');
SELECT jq.add_to_batch(:b, NULL);
SELECT jq.dispatch('act', batch_id => 1000000);
SELECT count(*) - :batches AS more FROM jq.batches;
SELECT count(*) AS jobs FROM jq.jobs;

-- batches go away, and their jobs are as others then
SELECT jq.dispatch_batch(ARRAY[j('a', 'fail'), j('b')], 'pruned', allow_failures => true) AS b \gset
:drain
SET jq.keep_batches = 0;
SELECT jq.prune() > 0 AS ok;
RESET jq.keep_batches;
SELECT count(*) FROM jq.batch_status WHERE finished_at IS NOT NULL;
SELECT count(*) FROM jq.batch_counts AS c WHERE NOT EXISTS (SELECT FROM jq.batches AS b WHERE b.id = c.batch_id);
TRUNCATE ran;
SELECT jq.retry_all(batch_id => :b);
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:ran

SET client_min_messages = warning;
DROP EXTENSION jq CASCADE;
DROP SCHEMA batch_test CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
