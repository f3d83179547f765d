/*
 * session_state: what one job does to its session never reaches the next.
 *
 * All jobs here are of one role and there is one worker, so they share a
 * process; each spoils something, and the next one looks.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 1;
-- what a database sets for sessions must not strike jobs
ALTER DATABASE :"db" SET statement_timeout = '200 ms';
ALTER DATABASE :"db" SET lock_timeout = '10 ms';
ALTER DATABASE :"db" SET idle_in_transaction_session_timeout = '50 ms';
ALTER DATABASE :"db" SET idle_session_timeout = '50 ms';
ALTER DATABASE :"db" SET default_transaction_isolation = 'serializable';
ALTER DATABASE :"db" SET default_transaction_read_only = on;
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA state_test;
CREATE ROLE regress_jq_state LOGIN;
CREATE ROLE regress_jq_other;
GRANT regress_jq_other TO regress_jq_state;
ALTER ROLE regress_jq_state SET work_mem = '5678kB';
ALTER ROLE regress_jq_state SET search_path = 'state_test';
GRANT USAGE, CREATE ON SCHEMA state_test TO regress_jq_state;
SELECT jq.grant('regress_jq_state', 'dispatch');

CREATE TABLE state_test.seen (id bigint GENERATED ALWAYS AS IDENTITY, step text, pid integer, state jsonb);
CREATE SEQUENCE state_test.counter;
GRANT SELECT, INSERT ON state_test.seen TO regress_jq_state, regress_jq_other;
GRANT USAGE ON SCHEMA state_test TO regress_jq_other;
GRANT USAGE ON SEQUENCE state_test.counter TO regress_jq_state;

CREATE FUNCTION state_test.value_of(command text) RETURNS text LANGUAGE plpgsql
AS $$
DECLARE
	result text;
BEGIN
	EXECUTE command INTO result;
	RETURN result;
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
CREATE FUNCTION state_test.look(payload jsonb) RETURNS void LANGUAGE sql
AS $$
	INSERT INTO state_test.seen (step, pid, state)
	SELECT payload #>> '{}', pg_backend_pid(), jsonb_build_object(
		'settings', (SELECT jsonb_object_agg(name, setting) FROM pg_catalog.pg_settings
			-- random marks, and what says when and where we are
			WHERE name NOT IN ('seed', 'transaction_deferrable')),
		'own setting', coalesce(current_setting('regress.own', true), ''),
		'temporary tables', (SELECT count(*) FROM pg_catalog.pg_class WHERE relnamespace = pg_my_temp_schema()),
		'prepared statements', (SELECT count(*) FROM pg_catalog.pg_prepared_statements),
		'held cursors', (SELECT count(*) FROM pg_catalog.pg_cursors WHERE is_holdable),
		'advisory locks', (SELECT count(*) FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
		'channels', (SELECT count(*) FROM pg_listening_channels()),
		'current_user', current_user,
		'session_user', session_user,
		'currval', state_test.value_of('SELECT currval(''state_test.counter'')'),
		'lastval', state_test.value_of('SELECT lastval()'))
$$;
CREATE FUNCTION state_test.spoil(payload jsonb) RETURNS void LANGUAGE plpgsql
AS $$
BEGIN
	EXECUTE payload ->> 'command';
	-- it must have had its effect, else there is nothing to see
	INSERT INTO state_test.seen (step, pid) VALUES ('spoilt', pg_backend_pid());
	IF payload ? 'fail' THEN
		RAISE 'spoilt and failed';
	END IF;
END
$$;
SELECT jq.register('state_test.look(jsonb)', max_attempts => 1);
SELECT jq.register('state_test.spoil(jsonb)', max_attempts => 1);

-- waits until all jobs are done, for no more than a minute
CREATE PROCEDURE state_test.wait() LANGUAGE plpgsql
AS $$
DECLARE
	give_up_at timestamptz := clock_timestamp() + interval '60 s';
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

-- how a worker's session is before all this
SET SESSION AUTHORIZATION regress_jq_state;
SELECT jq.dispatch('look', '"before"') > 0 AS ok;
RESET SESSION AUTHORIZATION;
CALL state_test.wait();
SELECT state ->> 'current_user' AS "current_user", state #>> '{settings,work_mem}' AS work_mem,
	state #>> '{settings,search_path}' AS search_path,
	state #>> '{settings,transaction_isolation}' AS isolation, state #>> '{settings,transaction_read_only}' AS read_only,
	state #>> '{settings,statement_timeout}' AS statement_timeout, state #>> '{settings,lock_timeout}' AS lock_timeout,
	state #>> '{settings,idle_in_transaction_session_timeout}' AS idle_timeout, state ->> 'currval' AS currval
FROM state_test.seen ORDER BY id;
SELECT name, sqlstate, error FROM jq.failed_jobs;

-- each way of spoiling it, once well and once with a failure at the end
CREATE TABLE state_test.spoilers (n integer GENERATED ALWAYS AS IDENTITY, command text);
INSERT INTO state_test.spoilers (command) VALUES
	('SET work_mem = ''123kB'''),
	('SELECT set_config(''regress.own'', ''set'', false)'),
	('SET search_path = pg_catalog'),
	('SET SESSION TIME ZONE 12'),
	('SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY'),
	('SET datestyle = ''German'''),
	('SET statement_timeout = 1'),
	('SET lock_timeout = 1'),
	('SET check_function_bodies = off'),
	('SET default_table_access_method = heap'),
	('SET row_security = off'),
	('RESET ALL'),
	('CREATE TEMPORARY TABLE spoilt (x) AS SELECT 1'),
	('CREATE TEMPORARY TABLE pg_class (x) AS SELECT 1'),
	('PREPARE spoilt AS SELECT 1'),
	('DECLARE spoilt CURSOR WITH HOLD FOR SELECT * FROM generate_series(1, 10)'),
	('SELECT pg_advisory_lock(1), pg_advisory_lock(1), pg_advisory_lock_shared(2)'),
	('SELECT nextval(''state_test.counter'')'),
	('SET ROLE regress_jq_other'),
	('SET SESSION ROLE regress_jq_other; SET work_mem = ''1MB'''),
	('SET SESSION AUTHORIZATION regress_jq_state'),
	('SET CONSTRAINTS ALL DEFERRED'),
	('SET LOCAL work_mem = ''321kB'''),
	('SELECT pg_sleep(0.3)');
GRANT SELECT ON state_test.spoilers TO regress_jq_state;
SET SESSION AUTHORIZATION regress_jq_state;
SELECT count(jq.dispatch(j.name, j.payload))
FROM (SELECT v.name, v.payload
	FROM state_test.spoilers AS s,
		(VALUES (1, '{}'::jsonb), (2, '{"fail": true}')) AS w (n, how),
		LATERAL (VALUES (1, 'spoil', w.how || jsonb_build_object('command', s.command)), (2, 'look', to_jsonb(w.n || ' after ' || s.command))) AS v (n, name, payload)
	ORDER BY s.n, w.n, v.n) AS j;
RESET SESSION AUTHORIZATION;
CALL state_test.wait();

-- one process ran them all
SELECT count(DISTINCT pid) AS processes, count(*) FILTER (WHERE step = 'spoilt') = (SELECT count(*) FROM state_test.spoilers) AS all_spoilt,
	count(*) FILTER (WHERE state IS NOT NULL) = 1 + 2 * (SELECT count(*) FROM state_test.spoilers) AS all_looked
FROM state_test.seen;
SELECT payload ->> 'command' AS command, payload ? 'fail' AS meant_to, sqlstate, error FROM jq.failed_jobs
WHERE NOT (payload ? 'fail' AND error = 'spoilt and failed') ORDER BY id;
-- and whatever differs from how it was is a leak
SELECT s.step, d.key, b.value AS before, d.value AS after
FROM state_test.seen AS s,
	LATERAL (SELECT state FROM state_test.seen WHERE step = 'before') AS f,
	LATERAL jsonb_each((s.state - 'settings') || (s.state -> 'settings')) AS d,
	LATERAL jsonb_each((f.state - 'settings') || (f.state -> 'settings')) AS b
WHERE b.key = d.key AND b.value <> d.value
ORDER BY s.id, d.key;

-- what the server does not let a worker do at all
TRUNCATE jq.failed_jobs;
SET SESSION AUTHORIZATION regress_jq_state;
SELECT count(jq.dispatch('spoil', jsonb_build_object('command', c))) FROM unnest('{LISTEN a, UNLISTEN a, "NOTIFY a"}'::text[]) AS c;
RESET SESSION AUTHORIZATION;
CALL state_test.wait();
SELECT payload ->> 'command' AS command, sqlstate, error FROM jq.failed_jobs ORDER BY id;

ALTER DATABASE :"db" RESET jq.workers;
ALTER DATABASE :"db" RESET statement_timeout;
ALTER DATABASE :"db" RESET lock_timeout;
ALTER DATABASE :"db" RESET idle_in_transaction_session_timeout;
ALTER DATABASE :"db" RESET idle_session_timeout;
ALTER DATABASE :"db" RESET default_transaction_isolation;
ALTER DATABASE :"db" RESET default_transaction_read_only;
DROP EXTENSION jq;
SET client_min_messages = warning;
DROP SCHEMA state_test CASCADE;
DROP OWNED BY regress_jq_state, regress_jq_other;
DROP ROLE regress_jq_state, regress_jq_other;
