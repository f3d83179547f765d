/*
 * dispatch_row: the ready-made row trigger.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA row_test;
SET search_path = row_test;
CREATE FUNCTION note(jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
SELECT jq.register('note(jsonb)', 'note', 'default', priority => 3);
CREATE TABLE t (id integer PRIMARY KEY, name text, "Odd, name" integer, secret text);
-- takes the jobs away, so that each step shows its own
CREATE VIEW taken AS SELECT id, name, queue, priority, payload,
	round(extract(epoch FROM available_at - created_at)) AS wait FROM jq.jobs;
\set take 'SELECT name, queue, priority AS prio, wait, payload FROM taken ORDER BY id; DELETE FROM jq.jobs;'

-- the whole row, for each kind of event, before and after
CREATE TRIGGER dispatch AFTER INSERT OR UPDATE OR DELETE ON t
	FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note');
INSERT INTO t VALUES (1, 'one', 11, 's'), (2, NULL, NULL, NULL);
:take
UPDATE t SET name = 'two' WHERE id = 2;
:take
DELETE FROM t WHERE id = 1;
:take
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch BEFORE INSERT OR UPDATE OR DELETE ON t
	FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note');
INSERT INTO t VALUES (3, 'three', 33, 's');
UPDATE t SET name = 'drei' WHERE id = 3;
DELETE FROM t WHERE id = 2;
:take
TABLE t ORDER BY id;
DROP TRIGGER dispatch ON t;

-- arguments
CREATE TRIGGER dispatch AFTER INSERT OR UPDATE OR DELETE ON t
	FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'queue=mail', 'delay=1 hour', 'priority=-5', 'columns=id,name');
INSERT INTO t VALUES (4, 'four', 44, 's');
DELETE FROM t WHERE id = 4;
:take
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t
	FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', ' queue = a=b ', 'columns= id , name ', 'priority= 7');
INSERT INTO t VALUES (5, NULL, 55, 's');
:take
DROP TRIGGER dispatch ON t;
-- at most one column, and one that has gone NULL
CREATE TRIGGER dispatch AFTER UPDATE OF name ON t
	FOR EACH ROW WHEN (old.name IS DISTINCT FROM new.name) EXECUTE FUNCTION jq.dispatch_row('note', 'columns=name');
UPDATE t SET secret = 'x' WHERE id = 3;
UPDATE t SET name = NULL WHERE id = 3;
:take
DROP TRIGGER dispatch ON t;

-- in the transaction of the change
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note');
BEGIN;
INSERT INTO t VALUES (6, 'six');
SAVEPOINT s;
INSERT INTO t VALUES (7, 'seven');
ROLLBACK TO s;
COMMIT;
BEGIN;
INSERT INTO t VALUES (8, 'eight');
ROLLBACK;
INSERT INTO t VALUES (6, 'again') ON CONFLICT DO NOTHING;
COPY t (id, name) FROM stdin;
9	nine
10	ten
\.
:take
DROP TRIGGER dispatch ON t;

-- partitions, and a constraint trigger that waits for the commit
CREATE TABLE p (id integer, at date) PARTITION BY RANGE (id);
CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20);
CREATE TRIGGER dispatch AFTER INSERT ON p FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note');
INSERT INTO p VALUES (1, '2026-01-31'), (11, NULL);
:take
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'columns=id');
BEGIN;
INSERT INTO t VALUES (12);
SELECT count(*) FROM jq.jobs;
COMMIT;
:take
DROP TRIGGER late ON t;

-- misuse: the error comes with the first row, and the change with it is undone
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION jq.dispatch_row('note');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER TRUNCATE ON t FOR EACH STATEMENT EXECUTE FUNCTION jq.dispatch_row('note');
TRUNCATE t;
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row();
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('notes');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'mail');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'role=postgres');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'queue=');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'delay=soon');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'priority=high');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'columns=id,nmae');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'columns=');
INSERT INTO t VALUES (20);
\echo :SQLSTATE
DROP TRIGGER dispatch ON t;
SELECT count(*) AS rows, (SELECT count(*) FROM jq.jobs) AS jobs FROM t WHERE id >= 20;
SELECT jq.dispatch_row();
\echo :SQLSTATE

-- it runs as the role that changes the row, and dispatches as that role
CREATE ROLE regress_jq_row;
GRANT USAGE ON SCHEMA row_test TO regress_jq_row;
GRANT INSERT ON t TO regress_jq_row;
CREATE TRIGGER dispatch AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note', 'columns=id');
SET ROLE regress_jq_row;
INSERT INTO t VALUES (30);
\echo :SQLSTATE
RESET ROLE;
SELECT jq.grant('regress_jq_row', 'dispatch');
SET ROLE regress_jq_row;
INSERT INTO t VALUES (30);
RESET ROLE;
SELECT role, payload FROM jq.jobs ORDER BY id;

-- a temporary table must not stand in for what the function uses
CREATE TEMPORARY TABLE pg_type (x integer);
CREATE FUNCTION pg_temp.to_jsonb(anyelement) RETURNS jsonb LANGUAGE sql AS $$SELECT '"forged"'::jsonb$$;
INSERT INTO t VALUES (31);
SELECT payload FROM jq.jobs WHERE payload @> '{"id": 31}';
DROP TABLE pg_temp.pg_type;
DROP FUNCTION pg_temp.to_jsonb;

DROP TRIGGER dispatch ON t;
DROP TRIGGER dispatch ON p;
SELECT jq.revoke('regress_jq_row', 'dispatch');
DROP VIEW taken;
DROP EXTENSION jq;
SET client_min_messages = warning;
DROP SCHEMA row_test CASCADE;
DROP ROLE regress_jq_row;
ALTER DATABASE :"db" RESET jq.workers;
