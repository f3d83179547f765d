/*
 * privileges: who may do what with jq's objects, and as whom jobs run.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db, current_user AS me \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself in the first part
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA privileges_test;
SET search_path = privileges_test;
CREATE ROLE regress_jq_plain;
CREATE ROLE regress_jq_dispatch;
CREATE ROLE regress_jq_mail;
CREATE ROLE regress_jq_admin;
CREATE ROLE regress_jq_owner;
CREATE ROLE regress_jq_member IN ROLE regress_jq_dispatch;
CREATE ROLE regress_jq_apart NOINHERIT IN ROLE regress_jq_dispatch;
CREATE ROLE regress_jq_super SUPERUSER;
GRANT USAGE, CREATE ON SCHEMA privileges_test TO PUBLIC;

CREATE TABLE ran (id bigint GENERATED ALWAYS AS IDENTITY, what text, who text DEFAULT current_user);
GRANT INSERT, SELECT ON ran TO PUBLIC;
CREATE FUNCTION note(payload jsonb) RETURNS void LANGUAGE sql
AS $$INSERT INTO privileges_test.ran (what) VALUES (payload #>> '{}')$$;
CREATE FUNCTION fail(payload jsonb) RETURNS void LANGUAGE plpgsql
AS $$BEGIN RAISE 'it failed'; END$$;
CREATE FUNCTION guarded(payload jsonb) RETURNS void LANGUAGE sql
AS $$INSERT INTO privileges_test.ran (what) VALUES ('guarded')$$;
REVOKE EXECUTE ON FUNCTION guarded FROM PUBLIC;
SELECT jq.register('note(jsonb)');
SELECT jq.register('fail(jsonb)', max_attempts => 1);
SELECT jq.register('guarded(jsonb)', max_attempts => 1);
\set ran 'SELECT what, who FROM ran ORDER BY id; TRUNCATE ran;'

/*
 * What each right opens
 */
CREATE TABLE watched (x integer);
CREATE TRIGGER watch AFTER INSERT ON watched FOR EACH ROW EXECUTE FUNCTION jq.dispatch_row('note');
GRANT INSERT ON watched TO PUBLIC;
CREATE TABLE commands (n integer GENERATED ALWAYS AS IDENTITY, command text);
INSERT INTO commands (command) VALUES
	('SELECT jq.dispatch(''note'')'),
	('SELECT jq.dispatch(''note'', queue => ''mail'')'),
	('SELECT jq.dispatch(''note'', queue => ''mai'')'),
	('SELECT jq.dispatch(''note'', queue => ''Mail'')'),
	('SELECT jq.dispatch(jq.job(''note''))'),
	('SELECT jq.dispatch(jq.job(''note'', queue => ''mail''))'),
	('SELECT jq.dispatch(ARRAY[jq.job(''note'', queue => ''mail''), jq.job(''note'')])'),
	('SELECT jq.dispatch(''{}''::jq.job_spec[])'),
	('SELECT jq.dispatch_unique(''note'')'),
	('SELECT jq.dispatch_batch(NULL)'),
	('SELECT jq.dispatch_batch(NULL, then_job => jq.job(''note''))'),
	('SELECT jq.open_batch()'),
	('SELECT jq.close_batch(1)'),
	('SELECT jq.add_to_batch(1, ''{}'')'),
	('SELECT jq.cancel_batch(1)'),
	('SELECT jq.batch_cancelled()'),
	('SELECT jq.set_limit(''note'', ''x'', 1)'),
	('SELECT jq.set_queue(''mail'', NULL)'),
	('SELECT jq.job(''note'')'),
	('INSERT INTO privileges_test.watched VALUES (1)'),
	('SELECT jq.dispatch_row()'),
	('SELECT jq.run(''note'')'),
	('SELECT jq.run(''guarded'')'),
	('CALL jq.drain()'),	-- as far as this can get in a function
	('SELECT jq.retry(0)'),
	('SELECT jq.forget(0)'),
	('SELECT jq.flush()'),
	('SELECT jq.retry_all()'),
	('SELECT jq.cancel(1)'),
	('SELECT jq.cancel(1000000)'),
	('SELECT jq.reschedule(1, queue => ''mail'')'),
	('SELECT jq.reschedule(1000000)'),
	('SELECT jq.result(1)'),
	('CALL jq.wait_for(1)'),
	('SELECT jq.pause()'),
	('SELECT jq.pause(''mail'')'),
	('SELECT jq.resume()'),
	('SELECT jq.restart_workers()'),
	('SELECT jq.prune()'),
	('SELECT jq.current_job()'),
	('SELECT jq.fail(''x'')'),
	('SELECT jq.release()'),
	('SELECT jq.skip()'),
	('SELECT jq.progress(1)'),
	('SELECT jq.chain(jq.job(''note''))'),
	('SELECT jq.prepend(jq.job(''note''))'),
	('SELECT jq.append(jq.job(''note''))'),
	('SELECT jq.log(''x'')'),
	('SELECT jq.adopt()'),
	('SELECT jq.register(''privileges_test.note(jsonb)'', ''noted'')'),
	('SELECT jq.unregister(''note'', force => true)'),
	('SELECT jq.rename_handler(''note'', ''noted'')'),
	('SELECT jq.grant(current_user, ''administer'')'),
	('SELECT jq.revoke(''regress_jq_admin'', ''administer'')'),
	('SELECT jq.may_see(current_user)'),
	('SELECT jq.worker_slots()'),
	('SELECT jq.lease_holds(now(), 1, now())'),
	('SELECT jq.process_status()'),
	('SELECT jq.announce()'),
	('SELECT jq.job_written()'),
	('SELECT jq.configuration_written()'),
	('SELECT FROM jq.jobs'),
	('SELECT FROM jq.failed_jobs'),
	('SELECT FROM jq.attempts'),
	('SELECT FROM jq.pauses'),
	('SELECT FROM jq.results'),
	('SELECT FROM jq.cancellations'),
	('SELECT FROM jq.claims'),
	('SELECT FROM jq.batches'),
	('SELECT FROM jq.batch_counts'),
	('SELECT FROM jq.queues'),
	('SELECT FROM jq.limit_settings'),
	('SELECT FROM jq.rates'),
	('SELECT FROM jq.holders'),
	('SELECT FROM jq.held'),
	('SELECT FROM jq.group_members'),
	('SELECT FROM jq.batch_status'),
	('SELECT FROM jq.limits'),
	('SELECT FROM jq.queue_stats'),
	('SELECT FROM jq.status'),
	('SELECT FROM jq.workers'),
	('SELECT FROM jq.running'),
	('SELECT FROM jq.handlers'),
	('SELECT FROM jq.handler_aliases'),
	('SELECT FROM jq.grants'),
	('SELECT FROM jq.jobs_id_seq'),
	('SELECT nextval(''jq.jobs_id_seq'')'),
	('SELECT setval(''jq.jobs_id_seq'', 1)'),
	('SELECT FROM jq.jobs FOR UPDATE'),
	('SELECT FROM jq.jobs FOR KEY SHARE'),
	('INSERT INTO jq.jobs (stamp, available_at, created_at, origin, priority, max_attempts, role, queue, name, payload) VALUES (1, now(), now(), 0, 0, 1, ''regress_jq_super'', ''q'', ''note'', ''{}'')'),
	('INSERT INTO jq.jobs DEFAULT VALUES'),
	('UPDATE jq.jobs SET role = ''regress_jq_super'''),
	('DELETE FROM jq.jobs'),
	('TRUNCATE jq.jobs'),
	('LOCK TABLE jq.jobs'),
	('INSERT INTO jq.failed_jobs DEFAULT VALUES'),
	('UPDATE jq.failed_jobs SET role = ''regress_jq_super'''),
	('DELETE FROM jq.failed_jobs'),
	('TRUNCATE jq.failed_jobs'),
	('INSERT INTO jq.handlers DEFAULT VALUES'),
	('UPDATE jq.handlers SET queue = ''mail'''),
	('DELETE FROM jq.handlers'),
	('INSERT INTO jq.handler_aliases DEFAULT VALUES'),
	('UPDATE jq.handler_aliases SET alias = ''x'''),
	('DELETE FROM jq.handler_aliases'),
	('INSERT INTO jq.grants VALUES (current_user, ''administer'')'),
	('UPDATE jq.grants SET privilege = ''administer'''),
	('DELETE FROM jq.grants'),
	('INSERT INTO jq.pauses VALUES (''mail'', now(), ''x'')'),
	('INSERT INTO jq.cancellations VALUES (1, 1, now(), ''x'')'),
	('DELETE FROM jq.attempts'),
	('UPDATE jq.results SET result = NULL'),
	('DELETE FROM jq.running'),
	('CREATE TABLE jq.mine ()'),
	('CREATE FUNCTION jq.job(text) RETURNS text LANGUAGE sql AS ''SELECT $1'''),
	('CREATE TRIGGER mine BEFORE INSERT ON jq.jobs FOR EACH ROW EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()'),
	('CREATE TABLE privileges_test.mine (job bigint REFERENCES jq.jobs)'),
	('ALTER TABLE jq.jobs DISABLE ROW LEVEL SECURITY'),
	('CREATE POLICY mine ON jq.jobs USING (true)'),
	('CREATE TABLE privileges_test.mine (job jq.job_spec, context jq.context)'),
	('ALTER EXTENSION jq UPDATE'),
	('DROP EXTENSION jq CASCADE');
-- nothing is forgotten
SELECT p.oid::regprocedure AS missing FROM pg_proc AS p
WHERE p.pronamespace = 'jq'::regnamespace
	AND NOT EXISTS (SELECT FROM commands WHERE strpos(command, 'jq.' || p.proname || '(') > 0)
ORDER BY p.proname COLLATE "C";
SELECT c.oid::regclass AS missing FROM pg_class AS c
WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind IN ('r', 'v', 'm', 'p', 'S', 'f')
	AND NOT EXISTS (SELECT FROM commands WHERE strpos(command, 'SELECT FROM jq.' || c.relname) > 0)
ORDER BY c.relname COLLATE "C";

-- runs the command and takes it back
CREATE FUNCTION attempt(command text) RETURNS text LANGUAGE plpgsql
AS $$
BEGIN
	EXECUTE command;
	RAISE SQLSTATE 'RGOK1';
EXCEPTION
	WHEN SQLSTATE 'RGOK1' THEN
		RETURN 'ok';
	WHEN OTHERS THEN
		RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;
CREATE TABLE outcomes (n integer, who text DEFAULT current_user, outcome text);
GRANT SELECT ON commands TO PUBLIC;
GRANT INSERT ON outcomes TO PUBLIC;
\set attempt 'INSERT INTO outcomes (n, outcome) SELECT n, attempt(command) FROM commands ORDER BY n;'

SELECT jq.grant('regress_jq_dispatch', 'dispatch');
SELECT jq.grant('regress_jq_mail', 'dispatch', 'mail');
SELECT jq.grant('regress_jq_admin', 'administer');
SELECT role, privilege, queue FROM jq.grants ORDER BY role;
SET client_min_messages = warning;
SET ROLE regress_jq_plain;
:attempt
SET ROLE regress_jq_dispatch;
:attempt
SET ROLE regress_jq_mail;
:attempt
SET ROLE regress_jq_admin;
:attempt
SET ROLE regress_jq_member;
:attempt
SET ROLE regress_jq_apart;
:attempt
RESET ROLE;
RESET client_min_messages;
SELECT left(c.command, 70) AS command,
	max(left(outcome, 5)) FILTER (WHERE who = 'regress_jq_plain') AS plain,
	max(left(outcome, 5)) FILTER (WHERE who = 'regress_jq_mail') AS mail,
	max(left(outcome, 5)) FILTER (WHERE who = 'regress_jq_dispatch') AS dispatch,
	max(left(outcome, 5)) FILTER (WHERE who = 'regress_jq_admin') AS administer
FROM outcomes JOIN commands AS c USING (n)
GROUP BY c.n, c.command ORDER BY c.n;
-- what a plain role is told, where it is anything but this
SELECT left(c.command, 70) AS command, outcome FROM outcomes JOIN commands AS c USING (n)
WHERE who = 'regress_jq_plain' AND outcome <> '42501 permission denied for schema jq'
ORDER BY n;
-- and the others
SELECT DISTINCT outcome COLLATE "C" AS outcome FROM outcomes
WHERE who IN ('regress_jq_mail', 'regress_jq_dispatch', 'regress_jq_admin') ORDER BY 1;
-- a member is as good as the role itself; one that does not inherit is a plain role
SELECT n, a.outcome, b.outcome FROM outcomes AS a JOIN outcomes AS b USING (n)
WHERE a.who = 'regress_jq_member' AND b.who = 'regress_jq_dispatch' AND left(a.outcome, 5) <> left(b.outcome, 5)
	OR a.who = 'regress_jq_apart' AND b.who = 'regress_jq_plain' AND left(a.outcome, 5) <> left(b.outcome, 5)
ORDER BY 1;
-- nothing of it remained
SELECT count(*) AS jobs, (SELECT count(*) FROM jq.handlers) AS handlers, (SELECT count(*) FROM jq.grants) AS grants FROM jq.jobs;

-- the words
SET ROLE regress_jq_plain;
SELECT jq.dispatch('note');
\echo :SQLSTATE
SET ROLE regress_jq_mail;
SELECT jq.dispatch('note', queue => 'mail') > 0 AS ok;
SELECT jq.dispatch('note');
\echo :SQLSTATE
SELECT jq.dispatch(ARRAY[jq.job('note', queue => 'mail'), jq.job('note', queue => 'post')]);
\echo :SQLSTATE
SELECT jq.flush();
\echo :SQLSTATE
SET ROLE regress_jq_apart;
SELECT jq.dispatch('note');
\echo :SQLSTATE
SET ROLE regress_jq_dispatch;	-- the session was refused before, as another role
SELECT jq.dispatch('note') > 0 AS ok;
SET ROLE regress_jq_member;
SELECT jq.dispatch('note') > 0 AS ok;
RESET ROLE;
SELECT role, queue, name FROM jq.jobs ORDER BY id;
DELETE FROM jq.jobs;
-- a session forgets what a role could do when that has changed
REVOKE regress_jq_dispatch FROM regress_jq_member;
GRANT regress_jq_mail TO regress_jq_member;
SET ROLE regress_jq_member;
SELECT jq.dispatch('note');
\echo :SQLSTATE
SELECT jq.dispatch('note', queue => 'mail') > 0 AS ok;
RESET ROLE;
GRANT regress_jq_dispatch TO regress_jq_member;
SET ROLE regress_jq_member;
SELECT jq.dispatch('note') > 0 AS ok;
RESET ROLE;
REVOKE regress_jq_mail FROM regress_jq_member;
DELETE FROM jq.jobs;

/*
 * grant, revoke
 */
SELECT jq.grant('regress_jq_nobody', 'dispatch');
\echo :SQLSTATE
SELECT jq.grant('public', 'dispatch');
\echo :SQLSTATE
SELECT jq.grant('regress_jq_plain', 'Dispatch');
\echo :SQLSTATE
SELECT jq.grant('regress_jq_plain', 'all');
SELECT jq.grant('regress_jq_plain', 'administer', 'mail');
\echo :SQLSTATE
SELECT jq.grant('regress_jq_plain', 'dispatch', '');
\echo :SQLSTATE
SELECT jq.grant('regress_jq_plain', 'dispatch', repeat('q', 60));
\echo :SQLSTATE
SELECT jq.grant(NULL, 'dispatch');
\echo :SQLSTATE
SELECT jq.grant('regress_jq_plain', NULL);
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_plain', 'dispatch');
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_nobody', 'dispatch');
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_mail', 'dispatch');	-- for its queue it was
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_mail', 'dispatch', 'post');
SELECT jq.revoke('regress_jq_dispatch', 'dispatch', 'mail');	-- for all it was
SELECT jq.revoke('regress_jq_mail', 'administer');
SELECT jq.revoke('regress_jq_mail', 'dispathc');
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_admin', 'administer', 'mail');
\echo :SQLSTATE
SELECT jq.revoke(NULL, 'dispatch');
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_mail', NULL);
SET ROLE regress_jq_admin;
SELECT jq.grant('regress_jq_admin', 'dispatch');
\echo :SQLSTATE
SELECT jq.revoke('regress_jq_dispatch', 'dispatch');
\echo :SQLSTATE
RESET ROLE;
SELECT role, privilege, queue FROM jq.grants ORDER BY role;

-- the SQL privileges come with the first right, and go with the last
CREATE VIEW sql_privileges AS
	SELECT 'schema' AS kind, n.nspname AS name, a.grantee, a.privilege_type
	FROM pg_namespace AS n, aclexplode(n.nspacl) AS a WHERE n.nspname = 'jq'
	UNION ALL
	SELECT 'relation', c.relname, a.grantee, a.privilege_type
	FROM pg_class AS c, aclexplode(c.relacl) AS a WHERE c.relnamespace = 'jq'::regnamespace
	UNION ALL
	SELECT 'routine', p.proname, a.grantee, a.privilege_type
	FROM pg_proc AS p, aclexplode(p.proacl) AS a WHERE p.pronamespace = 'jq'::regnamespace
	UNION ALL
	SELECT 'type', t.typname, a.grantee, a.privilege_type
	FROM pg_type AS t, aclexplode(t.typacl) AS a WHERE t.typnamespace = 'jq'::regnamespace;
\set has 'SELECT kind, privilege_type, CASE kind WHEN ''routine'' THEN (count(*) = (SELECT count(*) FROM pg_proc WHERE pronamespace = ''jq''::regnamespace))::text ELSE string_agg(name, '', '' ORDER BY name COLLATE "C") END AS what FROM sql_privileges WHERE grantee = ''regress_jq_plain''::regrole GROUP BY kind, privilege_type ORDER BY kind, privilege_type;'
:has
SELECT jq.grant('regress_jq_plain', 'dispatch', 'mail');
SELECT jq.grant('regress_jq_plain', 'dispatch', 'mail');	-- twice is once
SELECT jq.grant('regress_jq_plain', 'dispatch');
SELECT jq.grant('regress_jq_plain', 'administer');
SELECT role, privilege, queue FROM jq.grants WHERE role = 'regress_jq_plain' ORDER BY privilege, queue;
:has
SELECT jq.revoke('regress_jq_plain', 'dispatch');
-- what is left is left
SET ROLE regress_jq_plain;
SELECT jq.dispatch('note');
SELECT jq.dispatch('note', queue => 'mail') > 0 AS ok;
SELECT jq.flush();
RESET ROLE;
SELECT jq.revoke('regress_jq_plain', 'administer');
SET ROLE regress_jq_plain;
SELECT jq.flush();
RESET ROLE;
:has
SELECT jq.revoke('regress_jq_plain', 'dispatch', 'mail');
:has
SET ROLE regress_jq_plain;
SELECT jq.dispatch('note', queue => 'mail');
SELECT FROM jq.jobs;
RESET ROLE;
-- a transaction that is rolled back gave nothing, and took nothing
BEGIN;
SELECT jq.grant('regress_jq_plain', 'dispatch');
SET ROLE regress_jq_plain;
SELECT jq.dispatch('note') > 0 AS ok;
RESET ROLE;
ROLLBACK;
SET ROLE regress_jq_plain;
SELECT jq.dispatch('note');
RESET ROLE;
BEGIN;
SELECT jq.revoke('regress_jq_dispatch', 'dispatch');
ROLLBACK;
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('note') > 0 AS ok;
RESET ROLE;
DELETE FROM jq.jobs;
-- a role that has gone can be revoked its rights; one with quotes has them
CREATE ROLE "regress_jq ""Quoted"", 'x'; --";
SELECT jq.grant('regress_jq "Quoted", ''x''; --', 'dispatch');
SET ROLE "regress_jq ""Quoted"", 'x'; --";
SELECT jq.dispatch('note') > 0 AS ok;
RESET ROLE;
SELECT role FROM jq.jobs;
DELETE FROM jq.jobs;
\set VERBOSITY terse
DROP ROLE "regress_jq ""Quoted"", 'x'; --";	-- has privileges
\set VERBOSITY default
DROP OWNED BY "regress_jq ""Quoted"", 'x'; --";
DROP ROLE "regress_jq ""Quoted"", 'x'; --";
SELECT role FROM jq.grants WHERE role ~ 'Quoted';
SELECT jq.revoke('regress_jq "Quoted", ''x''; --', 'dispatch');
SELECT role FROM jq.grants WHERE role ~ 'Quoted';

/*
 * A SECURITY DEFINER handler says things with the rights of its owner
 */
CREATE FUNCTION says(payload jsonb) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
	IF payload ? 'raise' THEN
		RAISE 'raised' USING ERRCODE = 'JQ001';
	END IF;
	PERFORM jq.log('a word');
	PERFORM jq.fail('failed');
END
$$;
ALTER FUNCTION says OWNER TO regress_jq_owner;
SELECT jq.register('says(jsonb)', max_attempts => 1);
\set said 'SELECT sqlstate, error, log FROM jq.failed_jobs ORDER BY id; DELETE FROM jq.failed_jobs;'
SET client_min_messages = error;
SET ROLE regress_jq_dispatch;
SELECT count(jq.dispatch('says', payload)) FROM unnest('{"{}", "{\"raise\": 1}"}'::jsonb[]) AS payload;
CALL jq.drain();
RESET ROLE;
:said
SELECT jq.grant('regress_jq_owner', 'dispatch', 'unused');
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('says') > 0 AS ok;
CALL jq.drain();
RESET ROLE;
:said
SELECT jq.revoke('regress_jq_owner', 'dispatch', 'unused');
RESET client_min_messages;
SELECT jq.unregister('says');
DROP FUNCTION says;

/*
 * Who sees what
 */
SELECT jq.grant('regress_jq_plain', 'dispatch', 'mail');
SET client_min_messages = error;
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('fail', '"of dispatch"') AS failed_id \gset
CALL jq.drain();
SELECT jq.dispatch('note', '"of dispatch"', delay => '1 hour') > 0 AS ok;
SET ROLE regress_jq_mail;
SELECT jq.dispatch('fail', '"of mail"', queue => 'mail') > 0 AS ok;
CALL jq.drain();
SELECT jq.dispatch('note', '"of mail"', 'mail', delay => '1 hour') > 0 AS ok;
RESET ROLE;
SELECT jq.dispatch('note', '"of a superuser"', 'own', delay => '1 hour') > 0 AS ok;
RESET client_min_messages;
-- as if an external program held them
UPDATE jq.jobs SET token = 1, reserved_at = now(), lease_until = now() + interval '1 hour';
\set sees 'SELECT (SELECT string_agg(payload #>> ''{}'', '', '' ORDER BY payload::text COLLATE "C") FROM jq.jobs) AS jobs, (SELECT string_agg(payload #>> ''{}'', '', '' ORDER BY payload::text COLLATE "C") FROM jq.failed_jobs) AS failed, (SELECT string_agg(format(''%s: %s, %s'', queue, running, failed), ''; '' ORDER BY queue COLLATE "C") FROM jq.queue_stats) AS queues, (SELECT string_agg(queue, '', '' ORDER BY queue COLLATE "C") FROM jq.running) AS running, (SELECT format(''%s, %s'', s.running, s.failed) FROM jq.status AS s) AS status;'
SET ROLE regress_jq_plain;
:sees
SET ROLE regress_jq_dispatch;
:sees
SET ROLE regress_jq_member;
:sees
SET ROLE regress_jq_mail;
:sees
SET ROLE regress_jq_admin;
:sees
SELECT jq.may_see('regress_jq_mail'), jq.may_see('regress_jq_nobody'), jq.may_see(NULL) IS NULL AS strict;
SET ROLE regress_jq_mail;
SELECT jq.may_see('regress_jq_mail'), jq.may_see('regress_jq_dispatch'), jq.may_see('regress_jq_nobody'), jq.may_see('');
-- nor by the planner's help: a cheap function must not be shown what is hidden
CREATE TABLE leaked (what text);
CREATE FUNCTION leak(place text, what text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001
AS $$BEGIN INSERT INTO privileges_test.leaked VALUES (place || ': ' || what); RETURN true; END$$;
SELECT count(*) FROM jq.jobs WHERE leak('jobs', queue);
SELECT count(*) FROM jq.failed_jobs WHERE leak('failed_jobs', queue);
SELECT count(*) FROM jq.running WHERE leak('running', queue);
SELECT count(*) FROM jq.queue_stats WHERE leak('queue_stats', queue);
SELECT count(*) FROM jq.workers WHERE leak('workers', role);
SELECT what FROM leaked ORDER BY what COLLATE "C";
RESET ROLE;
UPDATE jq.jobs SET token = NULL, reserved_at = NULL, lease_until = NULL;
-- a member that may administer no more sees only its own again
GRANT regress_jq_admin TO regress_jq_mail;
SET ROLE regress_jq_mail;
SELECT count(*) FROM jq.jobs;
RESET ROLE;
REVOKE regress_jq_admin FROM regress_jq_mail;
SET ROLE regress_jq_mail;
SELECT count(*) FROM jq.jobs;
SELECT count(*) FROM jq.failed_jobs;

/*
 * Failed jobs of others
 */
\set try 'SELECT regexp_replace(attempt(format(''SELECT jq.retry(%s)'', :failed_id)), ''\\d+$'', ''n'') AS retry, regexp_replace(attempt(format(''SELECT jq.forget(%s)'', :failed_id)), ''\\d+$'', ''n'') AS forget;'
:try
SET ROLE regress_jq_apart;
:try
SET ROLE regress_jq_admin;
SELECT jq.retry(:failed_id);
SELECT role, name, payload, attempts FROM jq.jobs WHERE id = :failed_id;
SET ROLE regress_jq_dispatch;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT role, name, payload FROM jq.failed_jobs ORDER BY id;
SET ROLE regress_jq_member;
SELECT jq.retry(:failed_id);
RESET ROLE;
SELECT role, name, payload FROM jq.jobs WHERE id = :failed_id;
SET ROLE regress_jq_dispatch;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SET ROLE regress_jq_admin;
SELECT jq.forget(:failed_id);
SELECT jq.flush();
RESET ROLE;
DELETE FROM jq.jobs;

/*
 * EXECUTE on the handler
 */
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('guarded');
\echo :SQLSTATE
SELECT jq.run('guarded');
\echo :SQLSTATE
RESET ROLE;
GRANT EXECUTE ON FUNCTION guarded TO regress_jq_dispatch;
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('guarded') > 0 AS ok;
CALL jq.drain();
SELECT jq.dispatch('guarded') > 0 AS ok;
RESET ROLE;
:ran
REVOKE EXECUTE ON FUNCTION guarded FROM regress_jq_dispatch;
SET ROLE regress_jq_dispatch;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
RESET ROLE;
SELECT role, name, attempts, sqlstate, error, detail FROM jq.failed_jobs;
:ran
DELETE FROM jq.failed_jobs;
-- a job registers as little as its role may
SET ROLE regress_jq_dispatch;
CREATE FUNCTION own(payload jsonb) RETURNS void LANGUAGE sql
AS $$SELECT jq.register('privileges_test.note(jsonb)', 'mine')$$;
RESET ROLE;
SELECT jq.register('own(jsonb)', max_attempts => 1);
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('own') > 0 AS ok;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT role, sqlstate, error FROM jq.failed_jobs;
RESET ROLE;
DELETE FROM jq.failed_jobs;

/*
 * As whom a job runs
 */
SET ROLE regress_jq_owner;
CREATE FUNCTION invoker(payload jsonb) RETURNS void LANGUAGE sql
AS $$INSERT INTO privileges_test.ran (what) VALUES ('invoker')$$;
CREATE FUNCTION definer(payload jsonb) RETURNS void LANGUAGE sql SECURITY DEFINER
AS $$INSERT INTO privileges_test.ran (what) VALUES ('definer, session user ' || (session_user <> current_user))$$;
SELECT attempt('CREATE FUNCTION told(payload jsonb, context jq.context) RETURNS void LANGUAGE sql AS ''''');	-- no right to the type
SET ROLE regress_jq_admin;
SELECT jq.register('invoker(jsonb)', max_attempts => 1);
SELECT jq.register('definer(jsonb)', max_attempts => 1);
RESET ROLE;
CREATE FUNCTION told(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
AS $$INSERT INTO privileges_test.ran (what) VALUES ('dispatched by ' || context.dispatched_by)$$;
SELECT jq.register('told(jsonb, jq.context)');
SELECT name, registered_by = :'me' AS by_me, registered_by = 'regress_jq_admin' AS by_admin FROM jq.handlers
WHERE name IN ('invoker', 'definer', 'told') ORDER BY name;
SET ROLE regress_jq_dispatch;
SELECT jq.dispatch('note', '"plain"') > 0 AS ok;
SELECT jq.dispatch('told') > 0 AS ok;
SELECT jq.dispatch('invoker') > 0 AS ok;
SELECT jq.dispatch('definer') > 0 AS ok;
CALL jq.drain();
RESET ROLE;
:ran
-- dispatched by a SECURITY DEFINER function it is the job of that one's owner
SELECT jq.grant('regress_jq_owner', 'dispatch', 'default');
SET ROLE regress_jq_owner;
CREATE FUNCTION dispatch_for_all() RETURNS boolean LANGUAGE sql SECURITY DEFINER
AS $$SELECT jq.dispatch('told') > 0$$;
SET ROLE regress_jq_plain;
SELECT dispatch_for_all();
CALL jq.drain();
SET ROLE regress_jq_owner;
CALL jq.drain();
RESET ROLE;
:ran
-- a superuser's job does not run what others wrote
SELECT jq.dispatch('invoker');
\echo :SQLSTATE
SELECT jq.run('invoker');
\echo :SQLSTATE
SELECT jq.dispatch('definer') > 0 AS ok;
CALL jq.drain();
SELECT jq.run('definer') IS NULL AS ok;
:ran
-- nor what was given away since
ALTER FUNCTION invoker OWNER TO regress_jq_super;
SELECT jq.dispatch('invoker') > 0 AS ok;
CALL jq.drain();
SELECT what, who = :'me' AS mine FROM ran ORDER BY id;
TRUNCATE ran;
SELECT jq.dispatch('invoker') > 0 AS ok;
SELECT jq.dispatch('definer') > 0 AS ok;
ALTER FUNCTION invoker OWNER TO regress_jq_owner;
ALTER FUNCTION definer SECURITY INVOKER;
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT name, sqlstate, error, detail, hint FROM jq.failed_jobs ORDER BY id;
:ran
DELETE FROM jq.failed_jobs;
-- nor if its owner is no superuser any more
ALTER FUNCTION invoker OWNER TO regress_jq_super;
SELECT jq.run('invoker') IS NULL AS ok;
SELECT jq.dispatch('invoker') > 0 AS ok;
TRUNCATE ran;
ALTER ROLE regress_jq_super NOSUPERUSER;
SELECT jq.run('invoker');
SELECT jq.dispatch('invoker');
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT name, sqlstate FROM jq.failed_jobs ORDER BY id;
:ran
DELETE FROM jq.failed_jobs;
-- a role made a superuser is held to that, too
SELECT jq.grant('regress_jq_super', 'dispatch');
SET ROLE regress_jq_super;
ALTER FUNCTION invoker RENAME TO invoked;
RESET ROLE;
ALTER FUNCTION invoked OWNER TO regress_jq_owner;
SELECT jq.register('invoked(jsonb)', max_attempts => 1);
SET ROLE regress_jq_super;
SELECT jq.dispatch('invoked') > 0 AS ok;
RESET ROLE;
ALTER ROLE regress_jq_super SUPERUSER;
SET ROLE regress_jq_super;
SELECT jq.dispatch('invoked');
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
RESET ROLE;
SELECT role, name, sqlstate FROM jq.failed_jobs ORDER BY id;
:ran
DELETE FROM jq.failed_jobs;

/*
 * A role that has gone
 */
CREATE ROLE regress_jq_gone;
SELECT jq.grant('regress_jq_gone', 'dispatch');
SET ROLE regress_jq_gone;
SELECT jq.dispatch('fail') AS failed_id \gset
SET client_min_messages = error;
CALL jq.drain();
RESET client_min_messages;
SELECT jq.dispatch('note', '"of a role that has gone"') > 0 AS ok;
RESET ROLE;
SELECT jq.revoke('regress_jq_gone', 'dispatch');
DROP ROLE regress_jq_gone;
CALL jq.drain();
SET ROLE regress_jq_dispatch;
SELECT count(*) FROM jq.jobs;
:try
SET ROLE regress_jq_admin;
SELECT jq.retry(:failed_id);
SELECT role, name, attempts FROM jq.jobs ORDER BY id;
SELECT queue, ready, held, failed FROM jq.queue_stats ORDER BY queue;
RESET ROLE;
CALL jq.drain();
:ran
SELECT count(*) AS failed FROM jq.failed_jobs;

/*
 * In background workers
 */
DROP FUNCTION told;
DROP TABLE watched;
DROP EXTENSION jq;
ALTER DATABASE :"db" SET jq.workers = 2;
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
TRUNCATE ran;
CREATE ROLE regress_jq_login LOGIN;
CREATE ROLE regress_jq_nologin NOLOGIN;
-- waits until all jobs that can be run are done, for no more than a minute
CREATE PROCEDURE wait() LANGUAGE plpgsql
AS $$
DECLARE
	give_up_at timestamptz := clock_timestamp() + interval '60 s';
BEGIN
	WHILE EXISTS (SELECT FROM jq.jobs AS j JOIN pg_roles AS r ON r.rolname = j.role) LOOP
		COMMIT;
		IF clock_timestamp() > give_up_at THEN
			RAISE 'jobs are left';
		END IF;
		PERFORM pg_sleep(0.005);
	END LOOP;
END
$$;

CREATE TABLE seen (id bigint GENERATED ALWAYS AS IDENTITY, place text, trick text, job_of text,
	who text DEFAULT current_user, session text DEFAULT session_user, superuser text DEFAULT current_setting('is_superuser'));
GRANT SELECT, INSERT ON seen TO PUBLIC;
CREATE TABLE tricks (n integer GENERATED ALWAYS AS IDENTITY, command text);
GRANT SELECT ON tricks TO PUBLIC;
INSERT INTO tricks (command)
SELECT format(command, :'me')
FROM unnest(ARRAY[
	'SELECT 1',
	'SET ROLE %I',
	'SET LOCAL ROLE %I',
	'SET ROLE regress_jq_super',
	'SET ROLE regress_jq_admin',
	'RESET ROLE',
	'SET ROLE NONE',
	'SET SESSION AUTHORIZATION %I',
	'SET LOCAL SESSION AUTHORIZATION %I',
	'SET SESSION AUTHORIZATION regress_jq_super',
	'RESET SESSION AUTHORIZATION',
	'SET SESSION AUTHORIZATION DEFAULT',
	'SELECT set_config(''role'', %L, false)',
	'SELECT set_config(''role'', ''none'', false)',
	'SELECT set_config(''session_authorization'', %L, false)',
	'SELECT set_config(''session_authorization'', NULL, false)',
	'UPDATE pg_catalog.pg_settings SET setting = %L WHERE name = ''role''',
	'UPDATE pg_catalog.pg_settings SET setting = %L WHERE name = ''session_authorization''',
	'SET is_superuser = on',
	'RESET ALL',
	'DISCARD ALL',
	'CREATE FUNCTION pg_temp.as_super() RETURNS void LANGUAGE sql SET role = %I AS ''INSERT INTO privileges_test.seen (place) VALUES (NULL)''',
	'SELECT pg_temp.as_super()',
	'CREATE FUNCTION pg_temp.as_nobody() RETURNS void LANGUAGE sql SET session_authorization = default AS ''INSERT INTO privileges_test.seen (place) VALUES (NULL)''',
	'SELECT pg_temp.as_nobody()',
	'ALTER ROLE CURRENT_USER SUPERUSER',
	'ALTER ROLE SESSION_USER SUPERUSER',
	'SELECT jq.grant(current_user::text, ''administer'')',
	'INSERT INTO privileges_test.trophies VALUES (current_user)',
	'SELECT privileges_test.take_trophy()'
]) WITH ORDINALITY AS t (command, n) ORDER BY n;
CREATE TABLE trophies (who text);	-- for none but superusers
CREATE FUNCTION take_trophy() RETURNS void LANGUAGE plpgsql SECURITY DEFINER
AS $$
BEGIN
	EXECUTE format('SET ROLE %I', session_user);
	INSERT INTO privileges_test.trophies VALUES (current_user);
END
$$;
ALTER FUNCTION take_trophy OWNER TO regress_jq_owner;
-- tries them all, and notes what came of each
CREATE FUNCTION climb(place text, job_of text) RETURNS void LANGUAGE plpgsql
AS $$
DECLARE
	trick text;
BEGIN
	FOR trick IN SELECT command FROM privileges_test.tricks ORDER BY n LOOP
		BEGIN
			EXECUTE trick;
		EXCEPTION WHEN OTHERS THEN
			NULL;
		END;
		INSERT INTO privileges_test.seen (place, trick, job_of) VALUES (place, trick, job_of);
	END LOOP;
END
$$;
CREATE TABLE later (place text, job_of text, again integer);
GRANT INSERT ON later TO PUBLIC;
CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql
AS $$
BEGIN
	IF NEW.again > 0 THEN
		-- beyond the end of the handler, if there is a way
		SET CONSTRAINTS ALL DEFERRED;
		INSERT INTO privileges_test.later VALUES (NEW.place, NEW.job_of, NEW.again - 1);
	ELSIF NEW.place ~ 'cursor' THEN
		EXECUTE format('DECLARE later CURSOR WITH HOLD FOR SELECT privileges_test.climb(%L, %L)', NEW.place, NEW.job_of);
	ELSE
		PERFORM privileges_test.climb(NEW.place, NEW.job_of);
	END IF;
	RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER later AFTER INSERT ON later DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION later();
CREATE FUNCTION climb(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql
AS $$
DECLARE
	place text := payload ->> 'place';
BEGIN
	IF payload ? 'again' THEN
		INSERT INTO privileges_test.later VALUES (place, context.dispatched_by, (payload ->> 'again')::integer);
	ELSIF place = 'cursor' THEN
		EXECUTE format('DECLARE climb CURSOR WITH HOLD FOR SELECT privileges_test.climb(%L, %L)', place, context.dispatched_by);
	ELSE
		PERFORM privileges_test.climb(place, context.dispatched_by);
	END IF;
	IF payload ? 'fail' THEN
		RAISE 'failed as it should';
	END IF;
END
$$;
SELECT jq.register('climb(jsonb, jq.context)', max_attempts => 1);
SELECT jq.register('note(jsonb)');
SELECT jq.register('guarded(jsonb)', max_attempts => 1);
SELECT jq.grant('regress_jq_login', 'dispatch');
SELECT jq.grant('regress_jq_nologin', 'dispatch');
CREATE FUNCTION dispatch_all() RETURNS bigint LANGUAGE sql
AS $$
	SELECT count(jq.dispatch('climb', payload))
	FROM unnest(ARRAY[
		'{"place": "at once"}',
		'{"place": "in a job that fails", "fail": true}',
		'{"place": "after it"}',
		'{"place": "deferred", "again": 0}',
		'{"place": "deferred in a job that fails", "again": 0, "fail": true}',
		'{"place": "deferred again", "again": 1}',
		'{"place": "deferred thrice", "again": 3}',
		'{"place": "cursor"}',
		'{"place": "deferred cursor", "again": 0}',
		'{"place": "cursor deferred again", "again": 1}',
		'{"place": "at last"}'
	]::jsonb[]) WITH ORDINALITY AS p (payload, n)
$$;
SET ROLE regress_jq_login;
SELECT dispatch_all();
SET ROLE regress_jq_nologin;
SELECT dispatch_all();
RESET ROLE;
CALL wait();
SELECT role, payload, sqlstate, error FROM jq.failed_jobs WHERE error <> 'failed as it should'
ORDER BY role, id;
-- where they got to try: a holdable cursor may be closed unread
SELECT job_of, place, count(*) = (SELECT count(*) FROM tricks) AS all_tricks FROM seen
WHERE place !~ 'cursor' GROUP BY job_of, place ORDER BY job_of, place COLLATE "C";
-- and what they got: nothing
SELECT place, trick, job_of, who, session, superuser FROM seen
WHERE who <> coalesce(job_of, session) OR session <> coalesce(job_of, who) OR superuser <> 'off'
ORDER BY id;
SELECT who FROM trophies ORDER BY 1;
SELECT rolname FROM pg_roles WHERE rolname ~ '^regress_jq_' AND rolsuper ORDER BY 1;
SELECT role, privilege FROM jq.grants ORDER BY role;

-- settings of the role that would make its session another's; a worker may well refuse to start with them
CREATE ROLE regress_jq_set_role;
CREATE ROLE regress_jq_set_session;
SET client_min_messages = error;
ALTER ROLE regress_jq_set_role SET role = :"me";
ALTER ROLE regress_jq_set_session SET session_authorization = :"me";
RESET client_min_messages;
SELECT jq.grant('regress_jq_set_role', 'dispatch');
SELECT jq.grant('regress_jq_set_session', 'dispatch');
TRUNCATE seen;
SET ROLE regress_jq_set_role;
SELECT jq.dispatch('climb', '{"place": "role set"}') > 0 AS ok;
SET ROLE regress_jq_set_session;
SELECT jq.dispatch('climb', '{"place": "session set"}') > 0 AS ok;
RESET ROLE;
DO $$
BEGIN
	FOR i IN 1 .. 100 LOOP
		EXIT WHEN NOT EXISTS (SELECT FROM jq.jobs);
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END
$$;
SELECT place, trick, job_of, who, session, superuser FROM seen
WHERE who <> coalesce(job_of, session) OR session <> coalesce(job_of, who) OR superuser <> 'off'
ORDER BY id;
SELECT who FROM trophies ORDER BY 1;
ALTER ROLE regress_jq_set_role RESET role;
ALTER ROLE regress_jq_set_session RESET session_authorization;
DELETE FROM jq.jobs;

-- EXECUTE taken away while the job waited
GRANT EXECUTE ON FUNCTION guarded TO regress_jq_nologin;
SET ROLE regress_jq_nologin;
SELECT jq.dispatch('guarded', delay => '1 hour') > 0 AS ok;
RESET ROLE;
REVOKE EXECUTE ON FUNCTION guarded FROM regress_jq_nologin;
DELETE FROM jq.failed_jobs;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL wait();
SELECT role, name, sqlstate, error FROM jq.failed_jobs;
-- a superuser's job, as in a session of its own
SELECT jq.register('definer(jsonb)', max_attempts => 1);
ALTER FUNCTION definer SECURITY DEFINER;
SELECT jq.dispatch('definer') > 0 AS ok;
SELECT jq.dispatch('definer', delay => '1 hour') > 0 AS ok;
DELETE FROM jq.failed_jobs;
DO $$
BEGIN
	FOR i IN 1 .. 3000 LOOP
		EXIT WHEN EXISTS (SELECT FROM privileges_test.ran) OR EXISTS (SELECT FROM jq.failed_jobs);
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END
$$;
:ran
ALTER FUNCTION definer SECURITY INVOKER;
UPDATE jq.jobs SET available_at = clock_timestamp();
CALL wait();
SELECT role = :'me' AS mine, name, sqlstate, error FROM jq.failed_jobs;
:ran
-- jobs of a role that has gone wait, and those of others do not wait for them
CREATE ROLE regress_jq_gone;
SELECT jq.grant('regress_jq_gone', 'dispatch');
SET ROLE regress_jq_gone;
SELECT jq.dispatch('note', '"of a role that has gone"', delay => '1 hour') > 0 AS ok;
RESET ROLE;
SELECT jq.revoke('regress_jq_gone', 'dispatch');
DROP ROLE regress_jq_gone;
UPDATE jq.jobs SET available_at = clock_timestamp();
SET ROLE regress_jq_nologin;
SELECT jq.dispatch('note', '"of another"') > 0 AS ok;
RESET ROLE;
CALL wait();
:ran
SELECT role, name, attempts FROM jq.jobs;

ALTER DATABASE :"db" RESET jq.workers;
DROP FUNCTION climb(jsonb, jq.context);
DROP EXTENSION jq;
SET client_min_messages = warning;
DROP SCHEMA privileges_test CASCADE;
-- DROP EXTENSION leaves the schema, and what was granted on it
DROP OWNED BY regress_jq_plain, regress_jq_dispatch, regress_jq_mail, regress_jq_admin, regress_jq_owner, regress_jq_super,
	regress_jq_login, regress_jq_nologin, regress_jq_set_role, regress_jq_set_session;
DROP ROLE regress_jq_plain, regress_jq_dispatch, regress_jq_mail, regress_jq_admin, regress_jq_owner, regress_jq_member,
	regress_jq_apart, regress_jq_super, regress_jq_login, regress_jq_nologin, regress_jq_set_role, regress_jq_set_session;
