/*
 * unique: jobs with keys: where a key comes from, what a second dispatch gets,
 * what ends a claim, and what a retry does.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA unique_test;
SET search_path = unique_test;
CREATE TABLE ran (n bigint GENERATED ALWAYS AS IDENTITY, label text);
CREATE FUNCTION act(payload jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO unique_test.ran (label) VALUES (coalesce(payload ->> 'label', payload ->> 'k'));
	IF payload ? 'fail' THEN
		RAISE 'as asked for';
	END IF;
	IF payload ? 'run' THEN
		EXECUTE payload ->> 'run';
	END IF;
END
$$;
CREATE FUNCTION key_of(payload jsonb) RETURNS text IMMUTABLE LANGUAGE sql AS $$SELECT lower(payload ->> 'k')$$;
CREATE FUNCTION volatile_key(payload jsonb) RETURNS text LANGUAGE sql AS $$SELECT random()::text$$;
CREATE FUNCTION number_key(payload jsonb) RETURNS integer IMMUTABLE LANGUAGE sql AS $$SELECT 1$$;
\set ran 'SELECT string_agg(label, $$ $$ ORDER BY n) FROM ran; TRUNCATE ran;'

-- what does not work
SELECT jq.register('act(jsonb)', unique_key => '$.');
SELECT jq.register('act(jsonb)', unique_key => 'no_such_function');
SELECT jq.register('act(jsonb)', unique_key => 'unique_test.volatile_key');
SELECT jq.register('act(jsonb)', unique_key => 'unique_test.number_key');
SELECT jq.register('act(jsonb)', unique_key => '$.k', unique_until => 'ever');
SELECT jq.register('act(jsonb)', unique_key => '$.k', unique_until => 'expiry');
SELECT jq.register('act(jsonb)', unique_key => '$.k', unique_for => '-1 s');
SELECT jq.register('act(jsonb)', unique_key => '$.k', on_conflict => 'ignore');
SELECT jq.register('act(jsonb)', on_conflict => 'replace');
SELECT jq.register('act(jsonb)', unique_key => '$.k', debounce_max => '1 h');

-- a key by path, by function, by dispatch, or one for all jobs of the handler
SELECT jq.register('act(jsonb)', 'path', unique_key => '$.k', max_attempts => 1);
SELECT jq.register('act(jsonb)', 'func', unique_key => 'key_of', max_attempts => 1);
SELECT jq.register('act(jsonb)', 'one', unique_until => 'done');
SELECT jq.register('act(jsonb)', 'plain', max_attempts => 1);
SELECT name, unique_key, unique_for, unique_until, on_conflict FROM jq.handlers ORDER BY name;
SELECT outcome FROM jq.dispatch_unique('path', '{"k": "a"}');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": "a", "label": "second"}');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": "A"}');
SELECT outcome FROM jq.dispatch_unique('func', '{"k": "a"}');
SELECT outcome FROM jq.dispatch_unique('func', '{"k": "A"}');
SELECT outcome FROM jq.dispatch_unique('one', '{"k": "one"}');
SELECT outcome FROM jq.dispatch_unique('one', '{"k": "two"}');
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "plain"}');
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "plain"}');
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "keyed"}', unique_key => 'x');
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "keyed"}', unique_key => 'x');
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "empty"}', unique_key => '');
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "empty"}', unique_key => '');
-- no key, no claim; numbers, objects and arrays are keys, too
SELECT outcome FROM jq.dispatch_unique('path', '{"label": "none"}');
SELECT outcome FROM jq.dispatch_unique('path', '{"label": "none", "k": null}');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": 1}');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": "1", "label": "number"}');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": {"b": 1, "a": 2}, "label": "object"}');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": {"a": 2, "b": 1}, "label": "object"}');
-- a long key is not cut
SELECT outcome FROM jq.dispatch_unique('path', jsonb_build_object('k', repeat('x', 3000), 'label', 'long'));
SELECT outcome FROM jq.dispatch_unique('path', jsonb_build_object('k', repeat('x', 3000), 'label', 'long'));
SELECT outcome FROM jq.dispatch_unique('path', jsonb_build_object('k', repeat('x', 2999) || 'y', 'label', 'long'));
-- jq.dispatch() gives the id of the job that has the key
SELECT jq.dispatch('path', '{"k": "a"}') = (SELECT id FROM jq.jobs WHERE payload ->> 'k' = 'a' AND name = 'path') AS holder;
SELECT count(*) AS jobs, count(DISTINCT id) AS ids FROM jq.dispatch(ARRAY[jq.job('path', '{"k": "arr"}'), jq.job('path', '{"k": "arr"}')]) AS id;
SELECT name, left(key, 20) AS key, length(key) AS len FROM jq.claims ORDER BY name, key;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:ran
SELECT count(*) AS claims FROM jq.claims;

-- a failed or cancelled job gives its key up, a retried one takes it again
SELECT jq.dispatch('path', '{"k": "f", "fail": true}') AS failed \gset
SELECT jq.dispatch('path', '{"k": "c"}') AS cancelled \gset
SELECT jq.cancel(:cancelled);
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT count(*) AS claims FROM jq.claims;
SELECT jq.retry(:failed, delay => '1 h');
SELECT outcome FROM jq.dispatch_unique('path', '{"k": "f"}');
SELECT jq.cancel(:failed, 'again');
SELECT jq.dispatch('path', '{"k": "f", "label": "new"}', delay => '1 h') AS newer \gset
\set VERBOSITY sqlstate
SELECT jq.retry(:failed);
\set VERBOSITY default
SELECT superseded_by = :newer AS superseded FROM jq.failed_jobs WHERE id = :failed;
SELECT jq.cancel(:newer);
\set VERBOSITY sqlstate
SELECT jq.retry_all() AS retried;
\set VERBOSITY default
SELECT count(*) AS claims FROM jq.claims;
SELECT count(*) FROM jq.jobs, LATERAL jq.cancel(id);
SELECT jq.flush() > 0 AS ok;
TRUNCATE ran;

-- a handler that is gone, or a key that cannot be told any more, leaves no claim
SELECT jq.dispatch('func', '{"k": "gone"}') > 0 AS ok;
DROP FUNCTION key_of(jsonb);
SELECT jq.dispatch('func', '{"k": "gone"}');
SELECT jq.unregister('func', force => true);
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT name, error FROM jq.failed_jobs;
SELECT count(*) AS claims FROM jq.claims;
SELECT jq.flush() > 0 AS ok;

-- replace, debounce, error
SELECT jq.register('act(jsonb)', 'path', unique_key => '$.k', on_conflict => 'replace');
SELECT id AS first, outcome FROM jq.dispatch_unique('path', '{"k": "r", "label": "first"}', priority => 5) \gset
SELECT id = :first AS same, outcome FROM jq.dispatch_unique('path', '{"k": "r", "label": "second"}', queue => 'other', delay => '1 h', meta => '"m"');
SELECT payload ->> 'label' AS label, queue, priority, available_at > now() + interval '59 min' AS later, meta FROM jq.jobs;
SELECT id = :first AS same, outcome FROM jq.dispatch_unique('path', '{"k": "r", "label": "third"}', on_conflict => 'keep');
\set VERBOSITY sqlstate
SELECT jq.dispatch('path', '{"k": "r"}', on_conflict => 'error');
\set VERBOSITY default
SELECT id = :first AS same, outcome FROM jq.dispatch_unique('path', '{"k": "r", "label": "fourth"}');
BEGIN;
SELECT outcome FROM jq.dispatch_unique('path', '{"k": "r", "label": "undone"}');
ROLLBACK;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:ran
SELECT jq.register('act(jsonb)', 'late', unique_key => '$.k', on_conflict => 'debounce', debounce_max => '1 h');
SELECT outcome FROM jq.dispatch_unique('late', '{"k": "d", "label": 1}', delay => '10 min');
SELECT outcome FROM jq.dispatch_unique('late', '{"k": "d", "label": 2}', delay => '20 min');
SELECT payload -> 'label' AS label, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS minutes FROM jq.jobs;
SELECT outcome FROM jq.dispatch_unique('late', '{"k": "d", "label": 3}', delay => '2 h');
SELECT payload -> 'label' AS label, round(extract(epoch FROM available_at - clock_timestamp()) / 60) AS minutes FROM jq.jobs;
SELECT count(*) FROM jq.jobs, LATERAL jq.cancel(id);

-- what ends a claim
SELECT jq.register('act(jsonb)', 'start', unique_key => '$.k', unique_until => 'start');
SELECT jq.dispatch('start', '{"k": "s", "run": "SELECT jq.dispatch($$start$$, $${\"k\": \"s\", \"label\": \"next\"}$$)"}') > 0 AS ok;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:ran
SELECT count(*) AS claims FROM jq.claims;
SELECT jq.register('act(jsonb)', 'hook', unique_key => '$.k', unique_until => 'expiry', unique_for => '1 h');
SELECT outcome FROM jq.dispatch_unique('hook', '{"k": "h"}');
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT outcome FROM jq.dispatch_unique('hook', '{"k": "h"}');
SELECT name, key, outlives, expires_at > now() + interval '59 min' AS lasts FROM jq.claims;
-- time counts from when the job is due, for the one that has the key and for the next
SELECT jq.register('act(jsonb)', 'timed', unique_key => '$.k', unique_for => '10 min');
SELECT outcome FROM jq.dispatch_unique('timed', '{"k": "t"}', delay => '20 min');
SELECT outcome FROM jq.dispatch_unique('timed', '{"k": "t"}', delay => '29 min');
SELECT outcome FROM jq.dispatch_unique('timed', '{"k": "t"}', delay => '31 min');
SELECT count(*) AS jobs FROM jq.jobs;
SELECT count(*) AS claims FROM jq.claims WHERE name = 'timed';
SELECT count(*) FROM jq.jobs, LATERAL jq.cancel(id);

-- what a subtransaction claims goes with it
DO $$
BEGIN
	BEGIN
		PERFORM jq.dispatch('plain', unique_key => 'sub');
		RAISE 'undo';
	EXCEPTION WHEN raise_exception THEN NULL;
	END;
END
$$;
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "after"}', unique_key => 'sub');
-- the claim of a job that was removed by hand is void
SET client_min_messages = error;
DELETE FROM jq.jobs;
RESET client_min_messages;
SELECT outcome FROM jq.dispatch_unique('plain', '{"k": "after"}', unique_key => 'sub');
-- a renamed handler keeps its claims, under both names
SELECT jq.rename_handler('plain', 'renamed');
SELECT outcome FROM jq.dispatch_unique('plain', unique_key => 'sub');
SELECT outcome FROM jq.dispatch_unique('renamed', unique_key => 'sub');
SELECT jq.rename_handler('renamed', 'plain');

-- in a chain: a link whose key is taken is passed over
SELECT jq.dispatch('plain', '{"k": "holds"}', unique_key => 'link', delay => '1 h') > 0 AS ok;
SELECT jq.dispatch(jq.chain(jq.job('plain', '{"k": "l1"}'), jq.job('plain', '{"k": "l2"}', unique_key => 'link'), jq.job('plain', '{"k": "l3"}', unique_key => 'l3'))) > 0 AS ok;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:ran
SELECT jq.dispatch(jq.chain(jq.job('plain', '{"k": "l1"}'), jq.job('plain', '{"k": "l2"}', unique_key => 'link', on_conflict => 'error'), jq.job('plain', '{"k": "l3"}'))) > 0 AS ok;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
:ran
SELECT payload ->> 'k' AS k, sqlstate, jsonb_array_length(chain -> 'links') AS links FROM jq.failed_jobs WHERE sqlstate <> 'JQ004' ORDER BY id;

SET client_min_messages = warning;
DROP EXTENSION jq CASCADE;
DROP SCHEMA unique_test CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
