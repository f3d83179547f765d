/*
 * register: adding, replacing, removing and renaming handlers.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA register_test;
SET search_path = register_test;
CREATE TABLE ran (id bigint GENERATED ALWAYS AS IDENTITY, what text);

CREATE FUNCTION plain(payload jsonb) RETURNS void LANGUAGE plpgsql
AS $$BEGIN INSERT INTO register_test.ran (what) VALUES (format('plain %s', payload)); END$$;
CREATE FUNCTION told(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql
AS $$BEGIN INSERT INTO register_test.ran (what)
VALUES (format('told %s of %s in %s, %s of %s', payload, context.name, context.queue, context.attempt, context.max_attempts)); END$$;

\set handlers 'SELECT name, handler, queue, priority AS prio, max_attempts AS attempts, timeout, backoff, registered_by = current_user AS mine FROM jq.handlers ORDER BY name'
\set aliases 'SELECT alias, name FROM jq.handler_aliases ORDER BY alias'

-- defaults
SELECT jq.register('plain(jsonb)');
SELECT jq.register('told(jsonb, jq.context)');
:handlers;

-- everything, by position and by name
SELECT jq.register('plain(jsonb)', 'all', 'mail', 5, '10 s', '{1 s,2 s,1 min}', -7);
SELECT jq.register(backoff => '{0}', timeout => NULL, max_attempts => 2147483647, queue => 'a queue',
	priority => 2147483647, name => 'all the rest', handler => 'told(jsonb, jq.context)');
:handlers;

-- replacing puts back what is not given, NULL is as not given
SELECT jq.register('told(jsonb, jq.context)', 'all');
SELECT jq.register('told(jsonb, jq.context)', 'all the rest', queue => NULL, max_attempts => NULL, priority => NULL);
:handlers;
SELECT count(*) AS handlers FROM jq.handlers;

-- and the next job goes to the new function, also in the same session
SELECT jq.register('plain(jsonb)', 'changing', queue => 'one');
SELECT jq.dispatch('changing', '1') > 0 AS ok;
SELECT jq.register('told(jsonb, jq.context)', 'changing', queue => 'two', max_attempts => 9);
SELECT jq.dispatch('changing', '2') > 0 AS ok;
SELECT queue, payload, max_attempts FROM jq.jobs ORDER BY id;
CALL jq.drain();
SELECT what FROM ran ORDER BY id;
TRUNCATE ran;

-- odd but good functions
CREATE SCHEMA "Register; Test";
CREATE FUNCTION "Register; Test"."do ""it"""(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1 || ''1''';
CREATE FUNCTION with_out(payload jsonb, OUT result jsonb) LANGUAGE sql AS 'SELECT $1 || ''2''';
CREATE FUNCTION no_text(payload jsonb) RETURNS integer LANGUAGE sql AS 'SELECT 3';
SELECT jq.register('"Register; Test"."do ""it"""(jsonb)');
SELECT jq.register('with_out(jsonb)');
SELECT jq.register('no_text(jsonb)');
SELECT jq.register('pg_catalog.jsonb_typeof(jsonb)');
SELECT name, handler FROM jq.handlers WHERE handler !~ 'plain|told' ORDER BY name;
SELECT jq.run('do "it"', '[0]'), jq.run('with_out', '[0]'), jq.run('no_text', '[0]') AS none, jq.run('jsonb_typeof') AS none;

-- what cannot be a handler
CREATE PROCEDURE a_procedure(jsonb) LANGUAGE sql AS 'SELECT 1';
CREATE AGGREGATE an_aggregate(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
CREATE FUNCTION a_set(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION a_table(jsonb) RETURNS TABLE (r jsonb) LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION no_argument() RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION of_text(text) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION of_path(jsonpath) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION of_any(anyelement) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION of_many(VARIADIC jsonb[]) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION of_two(jsonb, jsonb) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION turned(jq.context, jsonb) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION of_three(jsonb, jq.context, integer DEFAULT 0) RETURNS void LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION a_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
SELECT jq.register('a_procedure(jsonb)');
\echo :SQLSTATE
SELECT jq.register('an_aggregate(jsonb)');
\echo :SQLSTATE
SELECT jq.register('a_set(jsonb)');
\echo :SQLSTATE
SELECT jq.register('a_table(jsonb)');
SELECT jq.register('no_argument()');
\echo :SQLSTATE
SELECT jq.register('of_text(text)');
SELECT jq.register('of_path(jsonpath)');
SELECT jq.register('of_any(anyelement)');
SELECT jq.register('of_many(jsonb[])');
SELECT jq.register('of_two(jsonb, jsonb)');
SELECT jq.register('turned(jq.context, jsonb)');
SELECT jq.register('of_three(jsonb, jq.context, integer)');
SELECT jq.register('a_trigger()');
CREATE FUNCTION pg_temp.fleeting(jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
DO $$
BEGIN
	-- its schema has another name each time
	PERFORM jq.register('pg_temp.fleeting(jsonb)');
EXCEPTION WHEN invalid_parameter_value THEN
	RAISE NOTICE '%', regexp_replace(SQLERRM, 'pg_temp_\d+', 'pg_temp');
END
$$;
SELECT jq.register('nowhere(jsonb)');
\echo :SQLSTATE
SELECT jq.register(0);
\echo :SQLSTATE
SELECT jq.register(NULL, 'x');
\echo :SQLSTATE

-- names
SELECT jq.register('plain(jsonb)', '');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', repeat('x', 60));
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', repeat('x', 100000));
SELECT jq.register('plain(jsonb)', ' x');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x ');
SELECT jq.register('plain(jsonb)', E'x\ty');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', E'x\n');
SELECT jq.register('plain(jsonb)', E'x\x7f');
SELECT jq.register('plain(jsonb)', 'x', '');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', repeat('q', 60));
SELECT jq.register('plain(jsonb)', 'x', 'q ');
SELECT jq.register('plain(jsonb)', 'x', E'\x01');
CREATE FUNCTION handler_whose_own_name_has_63_bytes_and_is_too_long_for_a_queue(jsonb) RETURNS void
LANGUAGE sql AS 'SELECT 1';
SELECT jq.register('handler_whose_own_name_has_63_bytes_and_is_too_long_for_a_queue(jsonb)');
SELECT jq.register('handler_whose_own_name_has_63_bytes_and_is_too_long_for_a_queue(jsonb)', 'shorter');
-- 59 bytes are good, and the last of them counts; so are characters of several bytes
SELECT octet_length(jq.register('plain(jsonb)', repeat('x', 58) || 'a', repeat('q', 59)));
SELECT octet_length(jq.register('told(jsonb, jq.context)', repeat('x', 58) || 'b', repeat('q', 58) || 'p'));
SELECT octet_length(jq.register('plain(jsonb)', repeat(U&'\00fc', 29) || 'x'));
SELECT octet_length(jq.register('plain(jsonb)', repeat(U&'\00fc', 29) || 'y'));
SELECT jq.register('plain(jsonb)', repeat(U&'\00fc', 30)) IS NULL AS never;
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'Case'), jq.register('plain(jsonb)', 'case'), jq.register('plain(jsonb)', ':"; --%s');
SELECT count(jq.dispatch(name, to_jsonb(substr(name, char_length(name))))) FROM jq.handlers
WHERE octet_length(name) = 59;
SELECT count(*) FROM jq.jobs AS j JOIN jq.handlers AS h USING (name) WHERE j.queue = h.queue;
CALL jq.drain();
SELECT regexp_replace(what, 'x{58}(.) in q{58}(.)', '..\1 in ..\2') AS what FROM ran ORDER BY what COLLATE "C";
TRUNCATE ran;
SELECT jq.unregister(repeat('x', 58) || 'a');
SELECT right(name, 2) AS name FROM jq.handlers WHERE octet_length(name) = 59 ORDER BY 1;

-- attempts
SELECT jq.register('plain(jsonb)', 'x', max_attempts => 0);
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', max_attempts => -1);
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', max_attempts => -2147483648);

-- time limits
SELECT jq.register('plain(jsonb)', 'x', timeout => '0');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', timeout => '-1 s');
SELECT jq.register('plain(jsonb)', 'x', timeout => '0.5 ms');
SELECT jq.register('plain(jsonb)', 'x', timeout => '25 days');
SELECT jq.register('plain(jsonb)', 'x', timeout => '1 month');
SELECT jq.register('plain(jsonb)', 'x', timeout => '178000000 years');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', timeout => '-178000000 years');
\echo :SQLSTATE
DO $$
BEGIN
	-- before PostgreSQL 17 there is no such interval
	PERFORM jq.register('plain(jsonb)', 'x', timeout => 'infinity'::text::interval);
	RAISE 'accepted';
EXCEPTION WHEN invalid_parameter_value OR invalid_datetime_format THEN
	RAISE NOTICE 'refused';
END
$$;
SELECT jq.register('plain(jsonb)', '1 ms', timeout => '1 ms'),
	jq.register('plain(jsonb)', '24 days', timeout => '24 days'),
	jq.register('plain(jsonb)', 'added up', timeout => '1 month -29 days -23:59:59'),
	jq.register('plain(jsonb)', 'none', timeout => NULL);
SELECT name, timeout FROM jq.handlers WHERE name IN ('1 ms', '24 days', 'added up', 'none') ORDER BY name;

-- backoff
SELECT jq.register('plain(jsonb)', 'x', backoff => '{}');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', backoff => '{1 s,NULL}');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', backoff => '{1 s,-1 s}');
\echo :SQLSTATE
SELECT jq.register('plain(jsonb)', 'x', backoff => '{{1 s,2 s},{3 s,4 s}}');
SELECT jq.register('plain(jsonb)', 'x', backoff => '{101 years}');
SELECT jq.register('plain(jsonb)', 'x', backoff => '{178000000 years}');
SELECT jq.register('plain(jsonb)', 'x', backoff => '{0,1 us,100 years}');
SELECT jq.register('plain(jsonb)', 'x', backoff => NULL);
SELECT name, backoff FROM jq.handlers WHERE name = 'x';

-- a rollback takes the registration back, also from what the session remembers
BEGIN;
SELECT jq.register('plain(jsonb)', 'ephemeral');
SELECT jq.dispatch('ephemeral') > 0 AS ok;
ROLLBACK;
SELECT jq.dispatch('ephemeral');
\echo :SQLSTATE
BEGIN;
SAVEPOINT s;
SELECT jq.register('plain(jsonb)', 'ephemeral', 'there');
SELECT jq.dispatch('ephemeral') > 0 AS ok;
ROLLBACK TO s;
SAVEPOINT s;
SELECT jq.dispatch('ephemeral');
ROLLBACK TO s;
SELECT jq.register('plain(jsonb)', 'ephemeral', 'here');
SELECT jq.dispatch('ephemeral') > 0 AS ok;
COMMIT;
SELECT name, queue FROM jq.jobs ORDER BY id;

/*
 * unregister
 */
DELETE FROM jq.jobs;
SELECT jq.dispatch('plain') > 0 AS ok;
SELECT jq.unregister('plain');
\echo :SQLSTATE
SELECT jq.dispatch('plain', delay => '1 day') > 0 AS ok;
SELECT jq.unregister('plain');
SELECT jq.unregister('plain', NULL);
SELECT jq.unregister('plain', force => false);
SELECT jq.unregister('plain', force => true);
SELECT jq.dispatch('plain');
CALL jq.drain();
SELECT name, attempts, max_attempts, sqlstate, error FROM jq.failed_jobs;
-- registered again, what waited goes on
SELECT jq.register('plain(jsonb)');
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL jq.drain();
SELECT what FROM ran ORDER BY id;
TRUNCATE ran;
SELECT jq.unregister('plain');
SELECT jq.unregister('plain');
\echo :SQLSTATE
SELECT jq.unregister('chaning');
SELECT jq.unregister('nothing like it at all');
SELECT jq.unregister(NULL);
\echo :SQLSTATE
SELECT jq.unregister('');

/*
 * rename_handler
 */
DELETE FROM jq.handlers;
SELECT jq.register('plain(jsonb)', 'a', 'qa', max_attempts => 7, priority => 2, timeout => '5 s', backoff => '{1 s}');
SELECT jq.register('told(jsonb, jq.context)', 'other');
SELECT jq.dispatch('a', '"as a"') > 0 AS ok;
SELECT jq.rename_handler('a', 'b');
:handlers;
:aliases;
-- both names lead there; the job keeps the one it was dispatched under
SELECT jq.dispatch('a', '"as a, later"') > 0 AS ok;
SELECT jq.dispatch('b', '"as b"') > 0 AS ok;
SELECT name, queue, priority, max_attempts, payload FROM jq.jobs ORDER BY id;
SELECT jq.run('a', '"run as a"') IS NULL AS ok;
-- what waits under the alias waits for the handler
SELECT jq.unregister('b');
DELETE FROM jq.jobs WHERE name = 'b';
SELECT jq.unregister('b');
CALL jq.drain();
SELECT what FROM ran ORDER BY id;
TRUNCATE ran;
-- a chain of renames
SELECT jq.rename_handler('b', 'c');
SELECT jq.rename_handler('c', 'd');
:aliases;
SELECT jq.dispatch(n, to_jsonb(n)) > 0 AS ok FROM unnest('{a,b,c,d}'::text[]) AS n;
CALL jq.drain();
SELECT what FROM ran ORDER BY id;
TRUNCATE ran;
-- and back
SELECT jq.rename_handler('d', 'a');
:aliases;
SELECT jq.dispatch(n, to_jsonb(n)) > 0 AS ok FROM unnest('{a,b,c,d}'::text[]) AS n;
CALL jq.drain();
SELECT what FROM ran ORDER BY id;
TRUNCATE ran;
-- refused
SELECT jq.rename_handler('a', 'other');
\echo :SQLSTATE
SELECT jq.rename_handler('a', 'a');
\echo :SQLSTATE
SELECT jq.rename_handler('othre', 'new');
\echo :SQLSTATE
SELECT jq.rename_handler('b', 'new');	-- an alias is no handler
\echo :SQLSTATE
SELECT jq.rename_handler(NULL, 'new');
\echo :SQLSTATE
SELECT jq.rename_handler('a', NULL);
SELECT jq.rename_handler('a', '');
\echo :SQLSTATE
SELECT jq.rename_handler('a', repeat('x', 60));
SELECT jq.rename_handler('a', 'a ');
:aliases;
-- registering under an alias takes the name over
SELECT jq.register('told(jsonb, jq.context)', 'b');
:aliases;
SELECT jq.dispatch(n, to_jsonb(n)) > 0 AS ok FROM unnest('{a,b,c,d}'::text[]) AS n;
CALL jq.drain();
SELECT what FROM ran ORDER BY id;
TRUNCATE ran;
-- a rename that is rolled back
BEGIN;
SELECT jq.rename_handler('a', 'z');
SELECT jq.dispatch('z') > 0 AS ok;
ROLLBACK;
SELECT jq.dispatch('z');
SELECT jq.dispatch('a') > 0 AS ok;
DELETE FROM jq.jobs;
-- aliases go with the handler
SELECT jq.unregister('a');
:aliases;
SELECT jq.dispatch('c');

DROP FUNCTION told, turned, of_three;
DROP EXTENSION jq;
SET client_min_messages = warning;
DROP SCHEMA register_test, "Register; Test" CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
