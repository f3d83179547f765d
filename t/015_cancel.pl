# What can be done to a job that runs: cancel it, wait for it, look at it; and
# what becomes of handlers that do not heed an interrupt.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $node = jq_server('main', 'jq.workers = 4', "jq.cancel_grace = '1 s'", 'fsync = off');
jq_database($node, 'd');
$node->safe_psql('d', q{
	-- traps every interrupt
	CREATE FUNCTION stubborn(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
		LOOP
			BEGIN
				PERFORM pg_sleep(60);
			EXCEPTION WHEN query_canceled THEN NULL;
			END;
		END LOOP;
	END $$;
	-- traps the interrupt and ends well
	CREATE FUNCTION deaf(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
		BEGIN
			PERFORM pg_sleep(60);
		EXCEPTION WHEN query_canceled THEN NULL;
		END;
	END $$;
	CREATE FUNCTION follow(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
		AS $$INSERT INTO public.done (job, payload) VALUES (context.id, context.failure)$$;
	SELECT jq.register('stubborn(jsonb, jq.context)', max_attempts => 1, timeout => NULL);
	SELECT jq.register('deaf(jsonb, jq.context)', timeout => NULL);
	SELECT jq.register('follow(jsonb, jq.context)');
	SELECT jq.register('gate(jsonb, jq.context)', timeout => NULL, on_failed => 'follow')});

my $gate = $node->background_psql('d');
$gate->query_safe('SELECT pg_advisory_lock(1)');

sub start
{
	my ($handler, $more) = @_;

	my $id = $node->safe_psql('d', "SELECT jq.dispatch('$handler', '{\"gate\": 1}'" . ($more // '') . ')');
	wait_until($node, 'd', "SELECT count(*) = 1 FROM jq.running JOIN pg_stat_activity AS a USING (pid) WHERE id = $id AND a.wait_event IN ('advisory', 'PgSleep')");
	return $id;
}

sub failed
{
	return $node->safe_psql('d', "SELECT attempts, sqlstate, error FROM jq.failed_jobs WHERE id = $_[0]");
}

sub running
{
	return $node->safe_psql('d', "SELECT count(*) FROM jq.running WHERE id = $_[0]");
}

# ---------------------------------------------------------------------
# A running job
# ---------------------------------------------------------------------

my $id = start('gate');
my $pid = $node->safe_psql('d', "SELECT pid FROM jq.running WHERE id = $id");
my $start = time();
is($node->safe_psql('d', "SELECT jq.cancel($id, 'no more')"), 'running', 'jq.cancel() says that the job runs');
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'cancelled', 'it ends');
cmp_ok(time() - $start, '<', 5, 'at once');
is(failed($id), '1|JQ004|cancelled by role "' . $node->safe_psql('d', 'SELECT current_user') . '": no more', 'and is recorded as cancelled');
wait_for_done($node, 'd', 1);
is( $node->safe_psql('d', "SELECT payload ->> 'sqlstate', payload ->> 'id' = '$id', pid = $pid FROM done"),
	'JQ004|t|t', 'it is followed as any failure, by the same worker, and its effects are gone');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.cancellations'), '0', 'nothing is left of the wish');
is($node->safe_psql('d', "SELECT coalesce(jq.cancel($id), 'none')"), 'none', 'it cannot be cancelled again');

# only a transaction that commits cancels
$id = start('gate');
$node->safe_psql('d', "BEGIN; SELECT jq.cancel($id); ROLLBACK");
$node->safe_psql('d', "BEGIN; SAVEPOINT s; SELECT jq.cancel($id); ROLLBACK TO s; COMMIT");
$node->safe_psql('d', "DO 'BEGIN PERFORM jq.cancel($id); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END'");
usleep(300_000);
is($node->safe_psql('d', "SELECT attempt, cancelled FROM jq.running WHERE id = $id"), '1|f', 'what is rolled back cancels nothing');
$node->safe_psql('d', "BEGIN; SELECT jq.cancel($id); PREPARE TRANSACTION 'cancel'");
usleep(200_000);
is(running($id), '1', 'nor does what is only prepared');
$node->safe_psql('d', "COMMIT PREPARED 'cancel'");
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'cancelled', 'when that commits, the job is cancelled');
$id = start('gate');
$node->safe_psql('d', "BEGIN; SAVEPOINT s; SELECT jq.cancel($id); RELEASE s; SELECT jq.cancel($id, 'twice'); COMMIT");
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'cancelled', 'in a subtransaction, and twice');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.cancellations'), '0', 'nothing is left of the wishes');

# an interrupt by somebody else is a failure like any
$id = start('gate', ', max_attempts => 1');
$node->safe_psql('d', "SELECT pg_cancel_backend(pid) FROM jq.running WHERE id = $id");
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'failed', 'pg_cancel_backend() makes it fail');
is(failed($id), '1|57014|canceling statement due to user request', 'with the SQLSTATE of that');

# whose it is
$node->safe_psql('d', "CREATE ROLE other LOGIN; SELECT jq.grant('other', 'dispatch')");
$id = start('gate');
my ($status, $stdout, $stderr) = $node->psql('d', "SET ROLE other; SELECT jq.cancel($id)", extra_params => [ '-v', 'VERBOSITY=verbose' ]);
like($stderr, qr/42501: permission denied for job $id/, 'others may not cancel it');
is(running($id), '1', 'it goes on');
$node->safe_psql('d', "SELECT jq.cancel($id)");
$node->safe_psql('d', "CALL jq.wait_for($id)");

# ---------------------------------------------------------------------
# Handlers that do not heed it
# ---------------------------------------------------------------------

$id = start('deaf');
$node->safe_psql('d', "SELECT jq.cancel($id)");
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'cancelled', 'a handler that traps the interrupt and ends well is cancelled');
is($node->safe_psql('d', "SELECT count(*) FROM done WHERE job = $id"), '0', 'its effects are gone');

$id = start('stubborn');
my $beside = start('gate');
$pid = $node->safe_psql('d', "SELECT pid FROM jq.running WHERE id = $id");
$start = time();
$node->safe_psql('d', "SELECT jq.cancel($id)");
usleep(300_000);
is($node->safe_psql('d', "SELECT cancelled, pid FROM jq.running WHERE id = $id"), "t|$pid", 'one that goes on has its grace');
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'cancelled', 'then its worker is ended');
cmp_ok(time() - $start, '>=', 1, 'not before');
like(failed($id), qr/^1\|JQ004\|cancelled by role/, 'the job is recorded as cancelled');
ok(wait_for_gone($pid), 'the process is gone');
is($node->safe_psql('d', "SELECT attempt FROM jq.running WHERE id = $beside"), '1', 'the job beside it goes on');

# the same with the time limit
$node->safe_psql('d', "SELECT jq.register('stubborn(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}', timeout => '200 ms')");
$id = $node->safe_psql('d', "SELECT jq.dispatch('stubborn')");
is($node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"), 'failed', 'a handler that does not end when its time is up is ended, too');
like(failed($id), qr/^2\|57014\|handler "stubborn" did not end when its time was up, so worker process with PID \d+ was ended$/, 'after each of its attempts, with the reason');
is($node->safe_psql('d', "SELECT attempt FROM jq.running WHERE id = $beside"), '1', 'the job beside it goes on');

# a wish outlives a crash
$node->safe_psql('d', q{
	SELECT jq.register('stubborn(jsonb, jq.context)', max_attempts => 3, timeout => NULL);
	ALTER SYSTEM SET jq.cancel_grace = '10 min'; SELECT pg_reload_conf()});
$id = start('stubborn');
my $waiting = start('gate');
wait_until($node, 'd', "SELECT current_setting('jq.cancel_grace') = '10min'");
is($node->safe_psql('d', "SELECT jq.cancel($id, 'before the crash')"), 'running', 'a job that will not end in time');
my $offset = log_size($node);
kill('KILL', $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"));
$node->wait_for_log(qr/all server processes terminated; reinitializing/, $offset);
eval { $gate->quit };
$node->poll_query_until('d', "SELECT count(*) = 1 FROM jq.failed_jobs WHERE id = $id") or die;
like(failed($id), qr/\|JQ004\|.*: before the crash/, 'is cancelled after the crash');
$gate = $node->background_psql('d');
$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('d', "ALTER SYSTEM SET jq.cancel_grace = '1 s'; SELECT pg_reload_conf()");
wait_for_empty($node, 'd', 'the others ran');

# ---------------------------------------------------------------------
# The race with the end of the job
# ---------------------------------------------------------------------

# Jobs of a few milliseconds are cancelled at any moment: each ends once, as
# done or as cancelled, and no job gets what is meant for another.
$node->safe_psql('d', q{
	TRUNCATE done, jq.failed_jobs;
	CREATE FUNCTION short(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_sleep(random() * 0.004);
		IF context.attempt = 1 AND context.id % 5 = 0 THEN
			RAISE 'again';
		END IF;
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
	END $$;
	SELECT jq.register('short(jsonb, jq.context)', backoff => '{5 ms}');
	CREATE TABLE answers (job bigint, answer text);
	CREATE PROCEDURE cancel_some(rounds integer) LANGUAGE plpgsql AS $$
	DECLARE
		wanted bigint;
		answer text;
	BEGIN
		FOR i IN 1 .. rounds LOOP
			SELECT max(d) INTO wanted FROM (SELECT jq.dispatch('short') AS d FROM generate_series(1, 4)) AS s;
			COMMIT;
			PERFORM pg_sleep(random() * 0.01);
			answer := jq.cancel(wanted - (random() * 3)::integer);
			COMMIT;
			INSERT INTO answers VALUES (wanted, answer);
		END LOOP;
	END $$});
my @sessions = map { $node->background_psql('d') } 1 .. 2;
my $rounds = $ENV{JQ_TEST_LONG} ? 4000 : 400;
$_->query_until(qr/started/, "\\echo started\nCALL cancel_some($rounds);\n") foreach @sessions;
wait_until($node, 'd', 'SELECT count(*) = ' . 2 * $rounds . ' FROM answers');
$_->quit foreach @sessions;
wait_for_empty($node, 'd', 'all jobs end');
is( $node->safe_psql('d', q{SELECT count(*) FROM (SELECT job FROM done UNION ALL SELECT id FROM jq.failed_jobs) AS e}),
	8 * $rounds, 'as many as were dispatched');
is( $node->safe_psql('d', q{SELECT count(DISTINCT job) FROM (SELECT job FROM done UNION ALL SELECT id FROM jq.failed_jobs) AS e}),
	8 * $rounds, 'each once');
is($node->safe_psql('d', "SELECT count(*) FROM jq.failed_jobs WHERE sqlstate <> 'JQ004'"), '0', 'those that failed were cancelled');
my ($answered, $cancelled) = split(/\|/, $node->safe_psql('d',
	'SELECT (SELECT count(answer) FROM answers), (SELECT count(*) FROM jq.failed_jobs)'));
cmp_ok($cancelled, '<=', $answered, 'no more than were answered');
cmp_ok($node->safe_psql('d', "SELECT count(*) FROM answers WHERE answer = 'running'"), '>', 0, 'some of them were running');
wait_until($node, 'd', 'SELECT count(*) = 0 FROM jq.cancellations', 'no wish is left');
note("$answered answers, $cancelled cancelled");

# ---------------------------------------------------------------------
# Progress and log; waiting
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	CREATE FUNCTION talks(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM jq.progress(33.5, 'a third'), jq.log('first'), jq.log('second');
		PERFORM pg_advisory_xact_lock_shared(1);
		RETURN '{"said": "all"}';
	END $$;
	SELECT jq.register('talks(jsonb, jq.context)', keep_result => '1 h')});
$id = start('talks');
is( $node->safe_psql('d', "SELECT progress, note, replace(log, E'\\n', '/') FROM jq.running WHERE id = $id"),
	'33.5|a third|first/second', 'progress and log are seen while the job runs');
is($node->safe_psql('d', "SET ROLE other; SELECT count(*) FROM jq.running"), '0', 'not by others');
is($node->safe_psql('d', "CALL jq.wait_for($id, '100 ms')"), 'running', 'jq.wait_for() says so when the time is up');
my $waiter = $node->background_psql('d');
$waiter->query_until(qr/started/, "\\echo started\nCALL jq.wait_for($id);\n\\echo ended\n");
wait_until($node, 'd', "SELECT count(*) = 1 FROM pg_stat_activity WHERE query ~ 'wait_for' AND wait_event_type = 'Extension' AND backend_xmin IS NULL AND pid <> pg_backend_pid()",
	'a session that waits holds no snapshot');
$gate->query_safe('SELECT pg_advisory_unlock(1)');
$start = time();
$waiter->query_until(qr/ended/, '');
cmp_ok(time() - $start, '<', 5, 'it is woken by the end');
$waiter->quit;
is($node->safe_psql('d', "SELECT jq.result($id)"), '{"said": "all"}', 'there is the result');
is($node->safe_psql('d', "SET ROLE other; SELECT coalesce(jq.result($id)::text, 'none')"), 'none', 'not for others');
# more than have room to be woken
$gate->query_safe('SELECT pg_advisory_lock(1)');
$id = start('talks');
$node->append_conf('postgresql.conf', 'log_min_messages = warning');
@sessions = map { $node->background_psql('d') } 1 .. 70;
$_->query_until(qr/started/, "\\echo started\nCALL jq.wait_for($id);\n") foreach @sessions;
wait_until($node, 'd', "SELECT count(*) = 70 FROM pg_stat_activity WHERE query ~ 'wait_for' AND wait_event_type = 'Extension'");
$gate->query_safe('SELECT pg_advisory_unlock(1)');
wait_until($node, 'd', "SELECT count(*) = 0 FROM pg_stat_activity WHERE query ~ 'wait_for' AND state = 'active' AND pid <> pg_backend_pid()", '70 sessions that wait all come back');
$_->quit foreach @sessions;

# ---------------------------------------------------------------------
# Verdicts leave no error in the log; deadlocks are repeated
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	CREATE FUNCTION judge(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF payload ->> 'do' = 'skip' THEN PERFORM jq.skip(); END IF;
		IF nextval('judged') = 1 THEN PERFORM jq.release('10 ms'); END IF;
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
	END $$;
	CREATE SEQUENCE judged;
	SELECT jq.register('judge(jsonb, jq.context)', max_attempts => 1);
	CREATE TABLE account (n integer PRIMARY KEY, value integer);
	INSERT INTO account SELECT i, 0 FROM generate_series(1, 2) AS i;
	CREATE FUNCTION crosswise(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		UPDATE account SET value = value + 1 WHERE n = 1 + context.id % 2;
		PERFORM pg_sleep(0.05);
		UPDATE account SET value = value + 1 WHERE n = 2 - context.id % 2;
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
	END $$;
	CREATE FUNCTION always_serial(payload jsonb) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM nextval('judged');
		RAISE serialization_failure;
	END $$;
	SELECT jq.register('crosswise(jsonb, jq.context)', max_attempts => 1);
	SELECT jq.register('always_serial(jsonb)', max_attempts => 1);
	ALTER SYSTEM SET deadlock_timeout = '20 ms';
	ALTER SYSTEM SET jq.notify_failed = on;
	SELECT pg_reload_conf();
	TRUNCATE done, jq.failed_jobs});
$offset = log_size($node);
$node->safe_psql('d', q{SELECT jq.dispatch('judge', '{"do": "skip"}'), jq.dispatch('judge')});
wait_for_empty($node, 'd');
is($node->safe_psql('d', "SELECT attempt FROM done"), '1', 'a released job runs in the same attempt');
is(log_count($node, qr/ERROR|JQ00/, $offset), 0, 'the log says nothing of a release or a skip');

$node->safe_psql('d', "TRUNCATE done; SELECT count(jq.dispatch('crosswise')) FROM generate_series(1, 8)");
wait_for_empty($node, 'd');
cmp_ok(log_count($node, qr/deadlock detected/, $offset), '>', 0, 'jobs deadlock');
is($node->safe_psql('d', 'SELECT count(*), max(attempt), (SELECT count(*) FROM jq.failed_jobs), (SELECT sum(value) FROM account) FROM done'),
	'8|1|0|16', 'and are repeated in place, without a further attempt');

my $listener = $node->background_psql('d');
$listener->query_safe('LISTEN jq_failed');
$node->safe_psql('d', "SELECT setval('judged', 1)");
$id = $node->safe_psql('d', "SELECT jq.dispatch('always_serial')");
$node->safe_psql('d', "CALL jq.wait_for($id)");
is(failed($id), '1|40001|serialization_failure', 'one that always fails so, fails');
is($node->safe_psql('d', "SELECT last_value FROM judged"), '7', 'after a few tries');
like($listener->query('SELECT 1'), qr/"jq_failed" with payload "$id"/, 'who listens is told by NOTIFY');
$listener->quit;

# a job that a session drains
$node->safe_psql('d', 'ALTER SYSTEM SET jq.enabled = off; SELECT pg_reload_conf()');
wait_until($node, 'd', 'SELECT scheduler_pid IS NULL AND workers = 0 FROM jq.status');
$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('d', 'TRUNCATE done');
$id = $node->safe_psql('d', q{SELECT jq.dispatch('gate', '{"gate": 1}')});
my $drain = $node->background_psql('d', on_error_stop => 0);
$drain->query_until(qr/started/, "\\echo started\nCALL jq.drain();\n");
wait_until($node, 'd', "SELECT count(*) = 1 FROM jq.running WHERE id = $id");
is($node->safe_psql('d', "SELECT jq.reschedule($id)"), 'f', 'it cannot be rescheduled');
is($node->safe_psql('d', "SELECT jq.cancel($id)"), 'external', 'it can be cancelled');
$gate->query_safe('SELECT pg_advisory_unlock(1)');
$drain->query('SELECT 1');
is($node->safe_psql('d', 'SELECT count(*) FROM done'), '0', 'and then has no effect');
like($drain->{stderr}, qr/job $id is not this session's any more/, 'the session is told');
$drain->quit;

no_crash($node);
$gate->quit;
$node->stop;
done_testing();
