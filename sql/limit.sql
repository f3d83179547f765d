/*
 * limit: what a job may have to wait for: jobs with the same key, rates,
 * earlier jobs of its group, and middleware; and how limits are changed.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
CREATE EXTENSION dblink;
RESET client_min_messages;
CREATE SCHEMA limit_test;
SET search_path = limit_test, public;
CREATE TABLE ran (n bigint GENERATED ALWAYS AS IDENTITY, label text, attempt integer);
CREATE FUNCTION act(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO limit_test.ran (label, attempt) VALUES (payload ->> 'l', context.attempt);
	IF payload ? 'fail' AND context.attempt = 1 THEN
		RAISE 'as asked for';
	ELSIF payload ? 'drain' THEN
		-- another session runs what it can while this job runs
		PERFORM limit_test.drain();
	END IF;
END
$$;
CREATE FUNCTION drain() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM public.dblink_connect('other', format('host=%s port=%s dbname=%s user=%s',
		split_part(current_setting('unix_socket_directories'), ',', 1), current_setting('port'),
		current_database(), current_user));
	PERFORM public.dblink_exec('other', 'SET client_min_messages = error');
	PERFORM ran FROM public.dblink('other', 'CALL jq.drain()') AS d(ran bigint);
	PERFORM public.dblink_disconnect('other');
	INSERT INTO limit_test.ran (label) SELECT '[' || coalesce(sum(held), 0) || ' held]' FROM jq.limits;
END
$$;
-- the scheduler lets jobs go on as well, in its time
CREATE PROCEDURE drain_group() LANGUAGE plpgsql AS $$
DECLARE
	ran bigint;
BEGIN
	FOR i IN 1 .. 500 LOOP
		CALL jq.drain(NULL, NULL, ran);
		EXIT WHEN NOT EXISTS (SELECT FROM jq.group_members);
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END
$$;
\set ran 'SELECT string_agg(label, $$ $$ ORDER BY n) AS ran FROM ran; TRUNCATE ran;'
\set drain 'SET client_min_messages = error; CALL jq.drain(); RESET client_min_messages;'

-- what does not work
SELECT jq.register('act(jsonb, jq.context)', overlap_key => '$..[');
SELECT jq.register('act(jsonb, jq.context)', overlap_wait => '1 s');
SELECT jq.register('act(jsonb, jq.context)', max_running => -1);
SELECT jq.register('act(jsonb, jq.context)', running_key => '$.k');
SELECT jq.register('act(jsonb, jq.context)', rate_max => 1);
SELECT jq.register('act(jsonb, jq.context)', rate_per => '1 s');
SELECT jq.register('act(jsonb, jq.context)', rate_max => 1, rate_per => '0 s');
SELECT jq.register('act(jsonb, jq.context)', rate_key => '$.k');
SELECT jq.register('act(jsonb, jq.context)', rate_max => 1, rate_per => '1 s', rate_burst => 0);
SELECT jq.register('act(jsonb, jq.context)', limit_scope => '');
SELECT jq.register('act(jsonb, jq.context)', middleware => '{act}');
SELECT jq.register('act(jsonb, jq.context)', middleware => ARRAY['act(jsonb, jq.context)'::regprocedure]);
SELECT jq.register('act(jsonb, jq.context)', middleware => ARRAY[NULL::regprocedure]);
SELECT jq.set_queue(NULL, 1);
SELECT jq.set_queue('q', -1);
SELECT jq.set_limit(NULL, 'k');
SELECT jq.set_limit('act', 'k', rate_max => -1);
SELECT jq.set_limit('act', 'k', rate_per => '0 s');

-- no two jobs with the same key at a time; the outer one runs when the inner is held
SELECT jq.register('act(jsonb, jq.context)', 'over', overlap_key => '$.k');
SELECT count(jq.dispatch('over', j)) FROM unnest(ARRAY['{"l": "a1", "k": "a", "drain": 1}', '{"l": "a2", "k": "a"}', '{"l": "b1", "k": "b"}', '{"l": "none"}']::jsonb[]) AS j;
CALL jq.drain(max_jobs => 1);
:drain
:ran
SELECT count(*) AS held FROM jq.held;
-- with overlap_wait it is put off instead
SELECT jq.register('act(jsonb, jq.context)', 'over', overlap_key => '$.k', overlap_wait => '1 h');
SELECT count(jq.dispatch('over', j)) FROM unnest(ARRAY['{"l": "a1", "k": "a", "drain": 1}', '{"l": "a2", "k": "a"}']::jsonb[]) AS j;
CALL jq.drain(max_jobs => 1);
SELECT payload ->> 'l' AS l, attempts, available_at > now() + interval '59 min' AS later FROM jq.jobs;
SELECT count(*) FROM jq.jobs, LATERAL jq.cancel(id);
TRUNCATE ran;

-- so many at a time, for all handlers of the scope; another limit for one key
SELECT jq.register('act(jsonb, jq.context)', 'run1', max_running => 2, running_key => '$.k', limit_scope => 'shared');
SELECT jq.register('act(jsonb, jq.context)', 'run2', max_running => 2, running_key => '$.k', limit_scope => 'shared');
SELECT jq.set_limit('shared', 'b', max_running => 1, note => 'small');
SELECT count(jq.dispatch('run1', j)) FROM unnest(ARRAY['{"l": "a1", "k": "a", "drain": 1}']::jsonb[]) AS j;
SELECT count(jq.dispatch('run2', j)) FROM unnest(ARRAY['{"l": "a2", "k": "a", "drain": 1}', '{"l": "a3", "k": "a"}']::jsonb[]) AS j;
SELECT count(jq.dispatch('run1', j)) FROM unnest(ARRAY['{"l": "b1", "k": "b", "drain": 1}', '{"l": "b2", "k": "b"}']::jsonb[]) AS j;
CALL jq.drain(max_jobs => 1);
:drain
:ran
-- a limit of none holds all of a key; a higher one lets them go on
SELECT jq.set_limit('shared', 'c', max_running => 0);
SELECT jq.dispatch('run1', '{"l": "c", "k": "c"}') > 0 AS ok;
:drain
SELECT kind, scope, key, held FROM jq.limits;
SELECT jq.set_limit('shared', 'c');
SELECT scope, key, max_running, note FROM jq.limit_settings ORDER BY key;
:drain
:ran
-- a queue
SELECT jq.register('act(jsonb, jq.context)', 'plain', max_attempts => 2, backoff => '{0 s}');
SELECT jq.set_queue('narrow', 1, 'one at a time');
SELECT count(jq.dispatch('plain', j, 'narrow')) FROM unnest(ARRAY['{"l": "n1", "drain": 1}', '{"l": "n2"}']::jsonb[]) AS j;
SELECT jq.dispatch('plain', '{"l": "wide"}') > 0 AS ok;
CALL jq.drain('{narrow}', max_jobs => 1);
:drain
:ran
SELECT jq.set_queue('narrow', 0);
SELECT jq.dispatch('plain', '{"l": "n3"}', 'narrow') > 0 AS ok;
:drain
SELECT jq.set_queue('narrow');
:drain
:ran
SELECT * FROM jq.queues;
-- a job that is held can be cancelled, moved, and cleared by hand
SELECT jq.set_queue('narrow', 0);
SELECT jq.dispatch('plain', '{"l": "cancelled"}', 'narrow') AS cancelled \gset
SELECT jq.dispatch('plain', '{"l": "moved"}', 'narrow') AS moved \gset
:drain
SELECT jq.cancel(:cancelled), jq.reschedule(:moved, now(), 'default');
:drain
:ran
SELECT jq.set_queue('narrow');
SELECT count(*) AS held FROM jq.held;

-- so many in a time: a window of a century does not end here
SELECT jq.register('act(jsonb, jq.context)', 'rate', rate_max => 2, rate_per => '100 years', rate_key => '$.k', max_attempts => 1);
SELECT count(jq.dispatch('rate', j)) FROM unnest(ARRAY['{"l": "r1", "k": "r"}', '{"l": "r2", "k": "r"}', '{"l": "r3", "k": "r"}', '{"l": "s1", "k": "s"}']::jsonb[]) AS j;
:drain
:ran
SELECT kind, scope, key, held FROM jq.limits;
SELECT j.attempts, j.available_at, h.places, h.wake_at > now() + interval '1 year' AS later FROM jq.jobs AS j JOIN jq.held AS h ON h.job_id = j.id;
SELECT jq.set_limit('rate', 'r', rate_max => 3);
:drain
:ran
SELECT key, used FROM jq.rates ORDER BY key;
SELECT jq.register('act(jsonb, jq.context)', 'tokens', rate_max => 1, rate_per => '1 hour', rate_burst => 3);
SELECT count(jq.dispatch('tokens', jsonb_build_object('l', i))) FROM generate_series(1, 5) AS i;
:drain
:ran
SELECT held FROM jq.limits;
-- what is held for its group or key takes no token
SELECT jq.register('act(jsonb, jq.context)', 'both', rate_max => 3, rate_per => '100 years', overlap_key => '$.k');
SELECT count(jq.dispatch('both', j)) FROM unnest(ARRAY['{"l": "b1", "k": "b", "drain": 1}', '{"l": "b2", "k": "b"}']::jsonb[]) AS j;
CALL jq.drain('{default}', 1);
SELECT used FROM jq.rates WHERE scope = 'both';
:drain
SELECT used FROM jq.rates WHERE scope = 'both';
:ran
SELECT count(*) FROM jq.jobs, LATERAL jq.cancel(id);

-- groups: one after the other, by their ids
SELECT jq.register('act(jsonb, jq.context)', 'group', group_key => '$.g', max_attempts => 2, backoff => '{1 h}');
SELECT count(jq.dispatch('group', j)) FROM unnest(ARRAY['{"l": "a1", "g": "a", "fail": 1}', '{"l": "a2", "g": "a"}', '{"l": "b1", "g": "b", "drain": 1}', '{"l": "b2", "g": "b"}', '{"l": "none"}']::jsonb[]) AS j;
SELECT jq.dispatch('plain', '{"l": "b3"}', group_key => 'b') > 0 AS ok;
SELECT jq.dispatch('group', '{"l": "b4", "g": "b"}', priority => -5) > 0 AS ok;
:drain
:ran
SELECT key, count(*) FROM jq.group_members GROUP BY key;
SELECT kind, key, held FROM jq.limits;
-- a2 waits while a1 waits for its second attempt; a final failure lets it go on
SELECT jq.cancel(id) FROM jq.jobs WHERE payload ->> 'l' = 'a1';
SELECT jq.dispatch('group', '{"l": "a3", "g": "a"}') > 0 AS ok;
CALL drain_group();
:ran
SELECT count(*) AS members FROM jq.group_members;
SELECT jq.retry_all(name => 'group');
:drain
:ran
SELECT count(*) FROM jq.jobs, LATERAL jq.cancel(id);
SELECT jq.flush() > 0 AS ok;

-- middleware
CREATE FUNCTION wait_for_it(payload jsonb, context jq.context) RETURNS interval LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO limit_test.ran (label) VALUES ('asked');
	CASE payload ->> 'm'
		WHEN 'wait' THEN RETURN '1 h';
		WHEN 'raise' THEN RAISE 'not now';
		WHEN 'skip' THEN PERFORM jq.skip();
		WHEN 'fail' THEN PERFORM jq.fail('never');
		ELSE NULL;
	END CASE;
	RETURN NULL;
END
$$;
SELECT jq.register('act(jsonb, jq.context)', 'asks', middleware => ARRAY['wait_for_it(jsonb, jq.context)'::regprocedure]);
SELECT count(jq.dispatch('asks', jsonb_build_object('l', m, 'm', m))) FROM unnest(ARRAY['go', 'wait', 'raise', 'skip', 'fail']) AS m;
SET client_min_messages = error;
CALL jq.drain(max_jobs => 5);
RESET client_min_messages;
:ran
SELECT payload ->> 'm' AS m, attempts, available_at > clock_timestamp() + interval '59 min' AS hour, available_at > clock_timestamp() - interval '1 s' AS soon FROM jq.jobs ORDER BY id;
SELECT error, sqlstate, attempts FROM jq.failed_jobs;
DROP FUNCTION wait_for_it(jsonb, jq.context);
SELECT jq.dispatch('asks', '{"l": "gone"}') > 0 AS ok;
SET client_min_messages = error;
CALL jq.drain(max_jobs => 1);
RESET client_min_messages;
SELECT attempts FROM jq.jobs WHERE payload ->> 'l' = 'gone';

SELECT count(*) AS holders FROM jq.holders;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'userlock';
SET client_min_messages = warning;
DROP EXTENSION jq CASCADE;
DROP EXTENSION dblink;
DROP SCHEMA limit_test CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
