/*
 * chain: jobs that follow one another, what happens when one of them fails, is
 * skipped, cancelled or retried, and links that are added while one runs.
 */
\set SHOW_CONTEXT never
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;	-- nothing runs by itself here
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;
CREATE SCHEMA chain_test;
SET search_path = chain_test;
CREATE TABLE ran (n bigint GENERATED ALWAYS AS IDENTITY, job bigint, chain bigint, label text, queue text, attempt integer, previous jsonb);

-- notes what it is told, does what it is told
CREATE FUNCTION link(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO chain_test.ran (job, chain, label, queue, attempt, previous)
	VALUES (context.id, context.chain_id, payload ->> 'label', context.queue, context.attempt, context.previous);
	CASE payload ->> 'do'
		WHEN 'fail' THEN RAISE EXCEPTION 'link fails' USING ERRCODE = 'RG001';
		WHEN 'skip' THEN PERFORM jq.skip('no need');
		WHEN 'null' THEN RETURN NULL;
		WHEN 'run' THEN EXECUTE payload ->> 'sql';
		ELSE NULL;
	END CASE;
	RETURN to_jsonb(payload ->> 'label');
END
$$;
CREATE FUNCTION caught(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
AS $$INSERT INTO chain_test.ran (job, chain, label, queue, attempt)
VALUES (context.id, context.chain_id, concat_ws(' ', 'caught', payload, context.failure ->> 'error'), context.queue, context.attempt)$$;
CREATE FUNCTION l(label text, what text DEFAULT NULL) RETURNS jq.job_spec LANGUAGE sql
AS $$SELECT jq.job('link', jsonb_build_object('label', label, 'do', what))$$;
SELECT jq.register('link(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}');
SELECT jq.register('caught(jsonb, jq.context)');
\set ran 'SELECT label, queue, attempt AS att, previous, chain = min(chain) OVER () AS one_chain, chain = job AS first FROM ran ORDER BY n; TRUNCATE ran;'
\set failed 'SELECT payload ->> $$label$$ AS label, attempts, error, jsonb_array_length(chain -> $$links$$) AS links, chain ? $$catch$$ AS caught, previous FROM jq.failed_jobs ORDER BY id;'
SET client_min_messages = error;	-- numbers of jobs differ from run to run

/*
 * In order
 */
SELECT jq.dispatch(jq.chain(l('a'), l('b', 'null'), l('c'), l('d'))) > 0 AS ok;
SELECT count(*) AS only_the_first FROM jq.jobs;
CALL jq.drain(max_jobs => 1);
SELECT payload ->> 'label' AS label, jsonb_array_length(chain -> 'links') AS links FROM jq.jobs;
CALL jq.drain();
:ran
-- each with its own queue, priority, attempts and delay
SELECT jq.dispatch(jq.chain(l('a'), jq.job('link', '{"label": "b"}', queue => 'q', priority => 7, delay => '1 h', max_attempts => 5, meta => '{"m": 1}'), l('c'))) > 0 AS ok;
CALL jq.drain();
SELECT queue, priority, max_attempts, round(extract(epoch FROM available_at - created_at)) AS wait, meta FROM jq.jobs;
SELECT jq.reschedule(id, run_at => now()) FROM jq.jobs;
CALL jq.drain();
:ran
-- what is registered is fixed when the chain is dispatched
SELECT jq.dispatch(jq.chain(l('a'), l('b'))) > 0 AS ok;
SELECT jq.register('link(jsonb, jq.context)', queue => 'later', max_attempts => 2, backoff => '{0 s}');
CALL jq.drain();
:ran
SELECT jq.register('link(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}');
-- a skipped link counts as done
SELECT jq.dispatch(jq.chain(l('a'), l('b', 'skip'), l('c'))) > 0 AS ok;
CALL jq.drain();
:ran
-- chains of chains
SELECT jq.dispatch(jq.chain(jq.chain(l('a'), l('b')), jq.chain(l('c'), jq.chain(l('d'), l('e'))), l('f'))) > 0 AS ok;
CALL jq.drain();
:ran
-- in an array, and one alone
SELECT count(*) FROM jq.dispatch(ARRAY[jq.chain(l('a'), l('b')), l('x'), jq.chain(l('y'))]);
SELECT count(chain) AS chains, count(chain_id) AS ids FROM jq.jobs;
CALL jq.drain();
SELECT label FROM ran ORDER BY label;
TRUNCATE ran;

/*
 * Failures
 */
SELECT jq.dispatch(jq.chain(ARRAY[l('a'), l('b', 'fail'), l('c'), l('d')], jq.job('caught', '{"own": 1}', queue => 'catch'))) > 0 AS ok;
CALL jq.drain();
:ran
:failed
SELECT count(*) FROM jq.jobs;
-- retried, it goes on from there
SELECT jq.retry(id, payload => '{"label": "b again"}') FROM jq.failed_jobs;
CALL jq.drain();
:ran
:failed
-- retried in vain, it is caught again
SELECT jq.dispatch(jq.chain(ARRAY[l('a', 'fail'), l('b')], jq.job('caught'))) > 0 AS ok;
CALL jq.drain();
SELECT jq.retry_all();
CALL jq.drain();
:ran
:failed
SET client_min_messages = notice;
SELECT jq.forget(id) FROM jq.failed_jobs;
SET client_min_messages = error;
-- cancelled
SELECT jq.dispatch(jq.chain(ARRAY[l('a'), l('b')], jq.job('caught'))) AS id \gset
SELECT jq.cancel(:id, 'no more');
SELECT error ~ 'no more$' AS told FROM jq.failed_jobs;
CALL jq.drain();
SELECT label ~ 'caught .* no more$' AS caught FROM ran;
TRUNCATE ran;
DELETE FROM jq.failed_jobs;
-- the last one and its catch_job
SELECT jq.dispatch(jq.chain(ARRAY[l('a'), l('b', 'fail')], jq.job('caught'))) > 0 AS ok;
CALL jq.drain();
:ran
DELETE FROM jq.failed_jobs;
-- a catch_job that cannot be dispatched any more
SELECT jq.dispatch(jq.chain(ARRAY[l('a', 'fail')], jq.job('caught', queue => 'q'))) > 0 AS ok;
SELECT jq.unregister('caught');
CALL jq.drain();
SELECT name, queue, error FROM jq.failed_jobs ORDER BY id;
DELETE FROM jq.failed_jobs;
SELECT jq.register('caught(jsonb, jq.context)');
TRUNCATE ran;

/*
 * Added by a link
 */
SELECT jq.dispatch(jq.chain(jq.job('link', jsonb_build_object('label', 'a', 'do', 'run', 'sql',
	$$SELECT jq.append(chain_test.l('appended')), jq.prepend(chain_test.l('second')), jq.prepend(jq.chain(chain_test.l('first'), chain_test.l('after it')));
	  DO $do$BEGIN PERFORM jq.append(chain_test.l('undone')); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END$do$ $$)), l('b'))) > 0 AS ok;
CALL jq.drain();
:ran
-- by a job that was in no chain
SELECT jq.dispatch('link', jsonb_build_object('label', 'alone', 'do', 'run', 'sql', $$SELECT jq.append(chain_test.l('follows'))$$)) > 0 AS ok;
CALL jq.drain();
:ran
-- a failed attempt has added nothing
SELECT jq.dispatch('link', jsonb_build_object('label', 'fails', 'do', 'run', 'sql', $$SELECT jq.append(chain_test.l('never')); SELECT 1 / 0$$), max_attempts => 1) > 0 AS ok;
CALL jq.drain();
SELECT chain FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
SELECT jq.dispatch('link', jsonb_build_object('label', 'errs', 'do', 'run', 'sql', $$SELECT jq.append(jq.job('nobody'))$$), max_attempts => 1) > 0 AS ok;
CALL jq.drain();
SELECT sqlstate, error FROM jq.failed_jobs;
DELETE FROM jq.failed_jobs;
SELECT jq.append(l('x'));
\echo :SQLSTATE
SELECT jq.run('link', jsonb_build_object('do', 'run', 'sql', $$SELECT jq.prepend(chain_test.l('x'))$$));
\echo :SQLSTATE
TRUNCATE ran;

/*
 * Nothing is queued of a chain with an error, and the error tells which job
 */
\set SHOW_CONTEXT always
SELECT jq.chain(VARIADIC '{}'::jq.job_spec[]) IS NULL AS none, jq.chain(NULL::jq.job_spec[], NULL) IS NULL AS none;
SELECT jq.chain(l('a'), NULL);
\echo :SQLSTATE
SELECT jq.dispatch(jq.chain(l('a'), jq.job('nobody')));
\echo :SQLSTATE
SELECT jq.dispatch(jq.chain(l('a'), l('b'), jq.job('link', max_attempts => 0)));
\echo :SQLSTATE
SELECT jq.dispatch(jq.chain(l('a'), jq.job('link', queue => ' x')));
SELECT jq.dispatch(jq.chain(l('a'), jq.job('link', delay => '1 s', run_at => now())));
SELECT jq.dispatch(jq.chain(l('a'), jq.job('link', run_at => 'infinity')));
\echo :SQLSTATE
SELECT jq.dispatch(jq.chain(ARRAY[l('a')], jq.job('nobody')));
SELECT jq.chain(l('a'), jq.chain(ARRAY[l('b')], jq.job('caught')));
\echo :SQLSTATE
SELECT jq.chain(ARRAY[l('a')], jq.chain(l('b'), l('c')));
SELECT jq.chain(VARIADIC array_agg(l('a'))) IS NULL FROM generate_series(1, 1002);
\echo :SQLSTATE
SELECT jsonb_array_length((jq.chain(VARIADIC array_agg(l('a')))).chain -> 'links') FROM generate_series(1, 1001);
-- written by hand
CREATE FUNCTION forged(chain jsonb) RETURNS bigint LANGUAGE sql
AS $$SELECT jq.dispatch(ROW('link', '{}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, chain)::jq.job_spec)$$;
\set SHOW_CONTEXT never
SELECT forged('1');
\echo :SQLSTATE
SELECT forged('[]');
SELECT forged('{"links": {}}');
SELECT forged('{"links": [1]}');
SELECT forged('{"links": [[]]}');
SELECT forged('{"links": [{}]}');
SELECT forged('{"links": [{"name": 1}]}');
SELECT forged('{"links": [{"name": "link", "priority": "high"}]}');
SELECT forged('{"links": [{"name": "link", "priority": 1e10}]}');
SELECT forged('{"links": [{"name": "link", "delay": "never"}]}');
SELECT forged('{"catch": 1}');
SELECT forged('{"catch": {"name": "nobody"}}');
SELECT count(*) FROM jq.jobs;
SELECT forged('{}') > 0 AS ok, forged('{"links": [], "more": 1}') > 0 AS ok, forged('{"links": [{"name": "link", "id": 1, "role": "x"}]}') > 0 AS ok;
SELECT chain FROM jq.jobs ORDER BY id;
DELETE FROM jq.jobs;

SET client_min_messages = warning;
DROP EXTENSION jq CASCADE;
DROP SCHEMA chain_test CASCADE;
ALTER DATABASE :"db" RESET jq.workers;
