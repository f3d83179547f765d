/*
 * dispatch: queueing jobs, with every argument, in every kind of transaction.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA dispatch_test;
SET search_path = dispatch_test;
CREATE TABLE ran (id bigint GENERATED ALWAYS AS IDENTITY, job_id bigint, payload jsonb);
CREATE FUNCTION note(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
AS 'INSERT INTO dispatch_test.ran (job_id, payload) VALUES ((context).id, payload)';
SELECT jq.register('note(jsonb, jq.context)', 'note', 'noted', max_attempts => 5, priority => 3);
-- takes the jobs away, so that each step shows its own
CREATE VIEW waiting AS SELECT id, name, queue, priority AS prio, attempts, max_attempts AS max, payload,
	round(extract(epoch FROM available_at - created_at)) AS wait,
	available_at <= clock_timestamp() AS due, role = current_user AS mine FROM jq.jobs;
\set take 'SELECT name, queue, prio, attempts, max, payload, wait, due, mine FROM waiting ORDER BY id; DELETE FROM jq.jobs;'
\set count 'SELECT count(*) FROM jq.jobs; DELETE FROM jq.jobs;'

-- as registered, by position, by name
SELECT jq.dispatch('note');
SELECT jq.dispatch('note', '{"a": 1}', 'mail', -2, '1 hour', NULL, 9);
SELECT jq.dispatch(max_attempts => 1, priority => 2147483647, queue => 'mail', payload => '[]', name => 'note');
SELECT jq.dispatch('note', priority => -2147483648, max_attempts => 2147483647);
-- NULL is as registered
SELECT jq.dispatch('note', '1', NULL, NULL, NULL, NULL, NULL);
:take
-- ids rise, and the row tells where it comes from
SELECT array_agg(jq.dispatch('note')) AS ids FROM generate_series(1, 3) \gset
SELECT count(*), bool_and(j.id = i.id), bool_and(j.origin = d.oid), count(DISTINCT stamp) AS stamps,
	bool_and(j.token IS NULL AND j.reserved_at IS NULL AND j.lease_until IS NULL) AS free,
	bool_and(j.created_at BETWEEN now() - interval '1 min' AND clock_timestamp()) AS recent
FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM jq.jobs) AS j
JOIN unnest(:'ids'::bigint[]) WITH ORDINALITY AS i (id, n) USING (n)
JOIN pg_database AS d ON d.datname = current_database();
DELETE FROM jq.jobs;

-- one name of a function, three forms: plain literals and parameters are names
PREPARE dispatch_it AS SELECT jq.dispatch($1) > 0 AS ok;
EXECUTE dispatch_it('note');
SELECT jq.dispatch(NULL);
\echo :SQLSTATE
:take

-- payloads
SELECT jq.dispatch('note', NULL);
\echo :SQLSTATE
SELECT jq.dispatch('note', payload => NULL);
SELECT jq.dispatch('note', p) > 0 AS ok FROM unnest('{"null",true,0,"\"\"","{}","[]"}'::jsonb[]) AS p;
:take
\set VERBOSITY sqlstate
SELECT jq.dispatch('note', '');
SELECT jq.dispatch('note', '{"a": "\u0000"}');
SELECT jq.dispatch('note', '"\ud800"');
\set VERBOSITY default

-- names
SELECT jq.dispatch('');
\echo :SQLSTATE
SELECT jq.dispatch('note ');
\echo :SQLSTATE
SELECT jq.dispatch(repeat('n', 60));
\echo :SQLSTATE
SELECT jq.dispatch(E'note\n');
SELECT jq.dispatch('note', queue => '');
\echo :SQLSTATE
SELECT jq.dispatch('note', queue => ' q');
SELECT jq.dispatch('note', queue => repeat('q', 60));
SELECT jq.dispatch('note', queue => E'a\x1fb');
SELECT jq.dispatch('note', queue => repeat('q', 59)), jq.dispatch('note', queue => repeat('q', 58) || 'r'),
	jq.dispatch('note', queue => 'Default'), jq.dispatch('note', queue => repeat(U&'\00fc', 29));
SELECT count(DISTINCT queue), max(octet_length(queue)) FROM jq.jobs;
DELETE FROM jq.jobs;
-- a handler that is not there
SELECT jq.dispatch('noet');
\echo :SQLSTATE
SELECT jq.dispatch('Note');
SELECT jq.dispatch('something else');
SET jq.require_handler = off;
SELECT jq.dispatch('noet') > 0 AS ok;
SELECT jq.dispatch('noet', queue => 'q', priority => 1, max_attempts => 7) > 0 AS ok;
:take
RESET jq.require_handler;
SELECT jq.dispatch('noet');

-- times
SELECT jq.dispatch('note', delay => '1 day') > 0 AS ok;
SELECT jq.dispatch('note', delay => '-1 day') > 0 AS ok;
SELECT jq.dispatch('note', delay => '0') > 0 AS ok;
SELECT jq.dispatch('note', delay => '-2147483648 days') > 0 AS ok;
\echo :SQLSTATE
SELECT jq.dispatch('note', run_at => '2001-01-01') > 0 AS ok;
SELECT jq.dispatch('note', run_at => '0001-01-01 BC') > 0 AS ok;
SELECT jq.dispatch('note', run_at => clock_timestamp() + interval '2 days') > 0 AS ok;
:take
SELECT jq.dispatch('note', delay => '250 ms') > 0 AS ok;	-- not cut to seconds
SELECT extract(milliseconds FROM available_at - created_at)::integer AS wait FROM jq.jobs;
DELETE FROM jq.jobs;
SELECT jq.dispatch('note', run_at => '294276-12-31 00:00+00') > 0 AS ok;
SELECT available_at AT TIME ZONE 'UTC' FROM jq.jobs;
DELETE FROM jq.jobs;
SELECT jq.dispatch('note', run_at => 'infinity');
\echo :SQLSTATE
SELECT jq.dispatch('note', run_at => '-infinity');
\echo :SQLSTATE
SELECT jq.dispatch('note', delay => '300000 years');
\echo :SQLSTATE
SELECT jq.dispatch('note', delay => '178000000 years');
\echo :SQLSTATE
DO $$
DECLARE
	word text;
BEGIN
	FOREACH word IN ARRAY '{infinity,-infinity}'::text[] LOOP
		BEGIN
			-- before PostgreSQL 17 there is no such interval
			PERFORM jq.dispatch('note', delay => word::interval);
			RAISE NOTICE 'accepted %', word;
		EXCEPTION WHEN datetime_field_overflow OR invalid_datetime_format THEN
			RAISE NOTICE 'refused %', word;
		END;
	END LOOP;
END
$$;
SELECT jq.dispatch('note', delay => '1 s', run_at => '2040-01-01');
\echo :SQLSTATE

-- attempts
SELECT jq.dispatch('note', max_attempts => 0);
\echo :SQLSTATE
SELECT jq.dispatch('note', max_attempts => -1);
SELECT jq.dispatch('note', max_attempts => -2147483648);
SELECT count(*) FROM jq.jobs;

/*
 * Specs
 */
SELECT jq.job('note');
SELECT jq.job('note', '{"a": 1}', 'q', 1, '1 s', '2040-01-01 00:00+00', 2) = ROW('note', '{"a": 1}', 'q', 1, '1 s', '2040-01-01 00:00+00', 2, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::jq.job_spec AS same;
SELECT jq.job(NULL, NULL);
SELECT count(*) FROM jq.jobs;
SELECT jq.dispatch(jq.job('note', '{"a": 1}', 'q', 1, '1 h', max_attempts => 2)) > 0 AS ok;
SELECT jq.dispatch(jq.job('note', NULL)) > 0 AS ok;
SELECT jq.dispatch(ROW('note', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::jq.job_spec) > 0 AS ok;
:take
SELECT jq.dispatch(NULL::jq.job_spec);
\echo :SQLSTATE
SELECT jq.dispatch(jq.job(NULL));
\echo :SQLSTATE
SELECT jq.dispatch(ROW(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::jq.job_spec);
SELECT jq.dispatch(jq.job('note', delay => '1 s', run_at => '2040-01-01'));
SELECT jq.dispatch(jq.job('noet'));
-- arrays keep the order
CREATE TEMPORARY TABLE ids AS
SELECT * FROM jq.dispatch(ARRAY[jq.job('note', '1'), jq.job('note', '2', 'other'), jq.job('note', '3', delay => '1 h')]) WITH ORDINALITY AS d (id, n);
SELECT n, payload, queue FROM ids JOIN waiting USING (id) ORDER BY n;
DELETE FROM jq.jobs;
SELECT count(*) FROM (SELECT jq.dispatch(array_agg(jq.job('note', to_jsonb(n)))) FROM generate_series(1, 1000) AS n) AS d;
:count
SELECT jq.dispatch('{}'::jq.job_spec[]);
SELECT count(*) FROM (SELECT jq.dispatch(ARRAY[[jq.job('note'), jq.job('note')], [jq.job('note'), jq.job('note')]])) AS d;
:count
SELECT jq.dispatch(NULL::jq.job_spec[]);
\echo :SQLSTATE
-- if one is bad, none is queued, and the error says which
\set SHOW_CONTEXT errors
SELECT jq.dispatch(ARRAY[jq.job('note'), NULL]);
\echo :SQLSTATE
SELECT jq.dispatch(ARRAY[jq.job('note'), jq.job('note'), jq.job('noet'), jq.job('note')]);
\echo :SQLSTATE
SELECT jq.dispatch(ARRAY[jq.job('note', queue => 'q '), jq.job('note')]);
SELECT jq.dispatch(ARRAY[jq.job('note'), jq.job('note', max_attempts => 0)]);
-- only there
SELECT jq.dispatch('noet');
\set SHOW_CONTEXT never
SELECT count(*) FROM jq.jobs;

/*
 * Transactions
 */
BEGIN;
SELECT jq.dispatch('note', '"gone"') > 0 AS ok;
ROLLBACK;
BEGIN;
SELECT jq.dispatch('note', '1') > 0 AS ok;
SAVEPOINT a;
SELECT jq.dispatch('note', '"gone"') > 0 AS ok;
SAVEPOINT b;
SELECT jq.dispatch('note', '"gone"') > 0 AS ok;
RELEASE b;
ROLLBACK TO a;
SELECT jq.dispatch('note', '2') > 0 AS ok;
SAVEPOINT c;
SELECT jq.dispatch('note', '3') > 0 AS ok;
RELEASE c;
SELECT jq.dispatch('noet');
ROLLBACK TO a;
SELECT jq.dispatch('note', '4') > 0 AS ok;
COMMIT;
SELECT payload FROM waiting ORDER BY id;
DELETE FROM jq.jobs;
-- the first of a transaction in a subtransaction that is undone
BEGIN;
SAVEPOINT a;
SELECT jq.dispatch('note', '"gone"') > 0 AS ok;
ROLLBACK TO a;
SELECT jq.dispatch('note', '1') > 0 AS ok;
COMMIT;
SELECT payload FROM waiting ORDER BY id;
DELETE FROM jq.jobs;
-- blocks with exceptions
DO $$
BEGIN
	FOR i IN 1 .. 20 LOOP
		BEGIN
			PERFORM jq.dispatch('note', to_jsonb(i));
			IF i % 3 = 0 THEN
				PERFORM jq.dispatch('noet');
			ELSIF i % 5 = 0 THEN
				PERFORM 1 / 0;
			END IF;
		EXCEPTION WHEN undefined_object OR division_by_zero THEN
			BEGIN
				PERFORM jq.dispatch('note', to_jsonb(-i));
				RAISE unique_violation;
			EXCEPTION WHEN unique_violation THEN
				NULL;
			END;
		END;
	END LOOP;
END
$$;
SELECT array_agg(payload ORDER BY id) FROM jq.jobs;
DELETE FROM jq.jobs;
-- transactions inside a procedural block
DO $$
BEGIN
	FOR i IN 1 .. 6 LOOP
		PERFORM jq.dispatch('note', to_jsonb(i));
		IF i % 2 = 0 THEN
			COMMIT;
		ELSE
			ROLLBACK;
		END IF;
	END LOOP;
END
$$;
SELECT array_agg(payload ORDER BY id) FROM jq.jobs;
DELETE FROM jq.jobs;
-- cursors, also one that is run to its end by the commit
BEGIN;
DECLARE c CURSOR FOR SELECT jq.dispatch('note', to_jsonb(n)) > 0 AS ok FROM generate_series(1, 10) AS n;
DECLARE h CURSOR WITH HOLD FOR SELECT jq.dispatch('note', to_jsonb(n)) > 0 AS ok FROM generate_series(11, 13) AS n;
FETCH 1 FROM c;
SAVEPOINT a;
FETCH 1 FROM c;
CLOSE c;
COMMIT;
SELECT array_agg(payload ORDER BY id) FROM jq.jobs;
CLOSE h;
DELETE FROM jq.jobs;
-- in the midst of other statements
WITH d AS MATERIALIZED (SELECT jq.dispatch('note', '1') AS id), i AS (INSERT INTO ran (job_id) SELECT id FROM d RETURNING job_id)
SELECT count(*) FROM i;
UPDATE ran SET job_id = jq.dispatch('note', '2');
TRUNCATE ran;
:count

-- the table can be altered after, and in the midst of, much dispatching
BEGIN;
SELECT count(jq.dispatch('note')) FROM generate_series(1, 1000);
ALTER TABLE jq.jobs SET (fillfactor = 90);
SELECT count(jq.dispatch('note')) FROM generate_series(1, 10);
CREATE INDEX dispatch_test_index ON jq.jobs (name, id);
SELECT count(jq.dispatch('note')) FROM generate_series(1, 10);
REINDEX TABLE jq.jobs;
SELECT jq.dispatch('note') > 0 AS ok;
DECLARE c CURSOR FOR SELECT jq.dispatch('note') > 0 AS ok FROM generate_series(1, 10) AS n;
FETCH 1 FROM c;
ALTER TABLE jq.jobs RESET (fillfactor);
FETCH 1 FROM c;
CLOSE c;
COMMIT;
SET enable_seqscan = off;
SELECT count(*) FROM jq.jobs WHERE name = 'note';
SELECT count(*) FROM jq.jobs WHERE id > 0;
RESET enable_seqscan;
BEGIN;
SELECT jq.dispatch('note') > 0 AS ok;
DROP INDEX jq.dispatch_test_index;
SELECT jq.dispatch('note') > 0 AS ok;
TRUNCATE jq.jobs;
SELECT jq.dispatch('note') > 0 AS ok;
COMMIT;
:count
DO $$
BEGIN
	PERFORM jq.dispatch('note');
	ALTER TABLE jq.jobs SET (fillfactor = 80);
	PERFORM jq.dispatch('note');
	BEGIN
		PERFORM jq.dispatch('note');
		ALTER TABLE jq.jobs RESET (fillfactor);
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
		PERFORM jq.dispatch('note');
	END;
	ALTER TABLE jq.jobs RESET (fillfactor);
END
$$;
:count
SELECT reloptions::text ~ 'fillfactor' AS left_over FROM pg_class WHERE oid = 'jq.jobs'::regclass;

-- where nothing may be written
BEGIN READ ONLY;
SELECT jq.dispatch('note');
\echo :SQLSTATE
ROLLBACK;
BEGIN READ ONLY;
SELECT jq.dispatch(jq.job('note'));
ROLLBACK;
BEGIN READ ONLY;
SELECT jq.dispatch('{}'::jq.job_spec[]);
ROLLBACK;
CREATE MATERIALIZED VIEW restricted AS SELECT jq.dispatch('note') AS id WITH NO DATA;
REFRESH MATERIALIZED VIEW restricted;
\echo :SQLSTATE
CREATE FUNCTION untrue(payload jsonb) RETURNS bigint IMMUTABLE PARALLEL SAFE LANGUAGE plpgsql
AS $$BEGIN RETURN jq.dispatch('note', payload); END$$;
INSERT INTO ran (payload) VALUES ('1');
CREATE INDEX restricted_index ON ran (untrue(payload));
\echo :SQLSTATE
TRUNCATE ran;
SELECT count(set_config(name, 'on', false)) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SELECT untrue(to_jsonb(g)) FROM generate_series(1, 1) AS g;
\echo :SQLSTATE
SELECT count(set_config(name, 'off', false)) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SELECT count(*) FROM jq.jobs;

/*
 * Objects that users have put on the table
 */
CREATE FUNCTION on_jobs() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
BEGIN;
SELECT jq.dispatch('note') > 0 AS ok;
CREATE TRIGGER users_trigger AFTER INSERT ON jq.jobs FOR EACH ROW EXECUTE FUNCTION on_jobs();
SAVEPOINT s;
SELECT jq.dispatch('note');
\echo :SQLSTATE
ROLLBACK TO s;
DROP TRIGGER users_trigger ON jq.jobs;
SELECT jq.dispatch('note') > 0 AS ok;
COMMIT;
CREATE TRIGGER users_statement_trigger AFTER DELETE ON jq.jobs FOR EACH STATEMENT EXECUTE FUNCTION on_jobs();
SELECT jq.dispatch('note');
DROP TRIGGER users_statement_trigger ON jq.jobs;
CREATE RULE users_rule AS ON INSERT TO jq.jobs DO ALSO INSERT INTO dispatch_test.ran (job_id) VALUES (1);
SELECT jq.dispatch('note');
\echo :SQLSTATE
DROP RULE users_rule ON jq.jobs;
CREATE POLICY users_policy ON jq.jobs FOR INSERT WITH CHECK (false);
SELECT jq.dispatch('note');
\echo :SQLSTATE
DROP POLICY users_policy ON jq.jobs;
CREATE INDEX users_expression ON jq.jobs ((payload ->> 'a'));
SELECT jq.dispatch('note');
\echo :SQLSTATE
DROP INDEX jq.users_expression;
CREATE INDEX users_partial ON jq.jobs (name) WHERE queue = 'q';
SELECT jq.dispatch('note');
DROP INDEX jq.users_partial;
ALTER TABLE jq.jobs ADD CONSTRAINT users_check CHECK (queue <> 'x');
SELECT jq.dispatch('note');
ALTER TABLE jq.jobs DROP CONSTRAINT users_check;
CREATE TABLE refers (job bigint REFERENCES jq.jobs);
SELECT jq.dispatch('note');
DROP TABLE refers;
ALTER TABLE jq.jobs ADD CONSTRAINT users_deferred UNIQUE (stamp) DEFERRABLE;
SELECT jq.dispatch('note');
ALTER TABLE jq.jobs DROP CONSTRAINT users_deferred;
BEGIN;
ALTER TABLE jq.jobs ADD COLUMN users_column integer;
SAVEPOINT s;
SELECT jq.dispatch('note');
\echo :SQLSTATE
ROLLBACK TO s;
-- it says to drop the column, so that must help
ALTER TABLE jq.jobs DROP COLUMN users_column;
SELECT jq.dispatch('note') > 0 AS ok;
ROLLBACK;
-- all gone, all well
SELECT jq.dispatch('note') > 0 AS ok;
:count

/*
 * Rows that did not come through jq
 */
INSERT INTO jq.jobs (stamp, available_at, created_at, origin, priority, max_attempts, role, queue, name, payload)
SELECT 1, now(), now(), d.oid, 0, 1, current_user, 'by hand', 'note', '"inserted"'
FROM pg_database AS d WHERE d.datname = current_database();
CREATE TEMPORARY TABLE copied AS TABLE jq.jobs;
UPDATE copied SET payload = '"copied"', id = id + 1000000;
INSERT INTO jq.jobs TABLE copied;
SELECT jq.dispatch('note', '"dispatched"') > 0 AS ok;
SELECT payload, origin = 0 AS held FROM jq.jobs ORDER BY payload;
SELECT queue, ready, later, running, held, failed, oldest_wait IS NULL AS none_waits FROM jq.queue_stats ORDER BY queue;
SELECT ready, held FROM jq.status;
CALL jq.drain();
SELECT payload FROM ran ORDER BY id;
SELECT jq.adopt();
SELECT jq.adopt();
SELECT held FROM jq.status;
CALL jq.drain();
SELECT payload FROM ran ORDER BY id;
TRUNCATE ran;
SET jq.after_restore = 'adopt';
INSERT INTO jq.jobs TABLE copied;
SELECT held FROM jq.status;
RESET jq.after_restore;
CALL jq.drain();
SELECT payload FROM ran ORDER BY id;
TRUNCATE ran;
-- COPY, as a restore does it
COPY jq.jobs (id, stamp, available_at, created_at, origin, priority, attempts, max_attempts, role, queue, name, payload, token, reserved_at, lease_until) FROM stdin;
7000001	1	2020-01-01 00:00:00+00	2020-01-01 00:00:00+00	1	0	0	1	regress_jq_nobody	copied	note	"restored"	\N	\N	\N
7000002	2	2020-01-01 00:00:00+00	2020-01-01 00:00:00+00	1	0	0	1	regress_jq_nobody	copied	unknown	"restored"	\N	\N	\N
\.
SELECT queue, held FROM jq.queue_stats;
SELECT jq.adopt();
-- the role does not exist: they wait
CALL jq.drain();
SELECT id, attempts FROM jq.jobs ORDER BY id;
DELETE FROM jq.jobs;
-- impossible rows are refused
\set VERBOSITY terse
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, '{"name": ""}') FROM copied AS c) AS s (c);
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, jsonb_build_object('queue', repeat('q', 60))) FROM copied AS c) AS s (c);
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, '{"exceptions": -1}') FROM copied AS c) AS s (c);
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, '{"attempts": -1}') FROM copied AS c) AS s (c);
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, '{"max_attempts": 0}') FROM copied AS c) AS s (c);
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, '{"token": 1}') FROM copied AS c) AS s (c);
INSERT INTO jq.jobs SELECT (c).* FROM (SELECT jsonb_populate_record(c, '{"payload": null}') FROM copied AS c) AS s (c);
\set VERBOSITY default

/*
 * Big numbers, big payloads
 */
ALTER SEQUENCE jq.jobs_id_seq RESTART WITH 2147483650;
SELECT jq.dispatch('note', '1');
SELECT * FROM jq.dispatch(ARRAY[jq.job('note', '2')]);
ALTER SEQUENCE jq.jobs_id_seq RESTART WITH 9223372036854775806;
SELECT jq.dispatch('note', '3');
SELECT jq.dispatch('note', '4');
SELECT jq.dispatch('note', '5');
\echo :SQLSTATE
SELECT ready FROM jq.status;
CALL jq.drain();
SELECT job_id, payload FROM ran ORDER BY id;
TRUNCATE ran;
ALTER SEQUENCE jq.jobs_id_seq RESTART WITH 1;
SELECT jq.dispatch('note', to_jsonb(repeat('x', 1048576))) > 0 AS ok;
SELECT jq.dispatch('note', to_jsonb(array_agg(md5(n::text)))) > 0 AS ok FROM generate_series(1, 50000) AS n;
CALL jq.drain();
SELECT payload = to_jsonb(repeat('x', 1048576)) AS one, payload = (SELECT to_jsonb(array_agg(md5(n::text))) FROM generate_series(1, 50000) AS n) AS other
FROM ran ORDER BY id;

DROP VIEW waiting;
DROP FUNCTION note;
DROP MATERIALIZED VIEW restricted;
DROP EXTENSION jq;
SET client_min_messages = warning;
DROP SCHEMA dispatch_test CASCADE;
DROP TABLE ids, copied;
ALTER DATABASE :"db" RESET jq.workers;
