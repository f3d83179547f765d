# A server that does not preload jq: everything by hand works, and a session
# that dies in the middle of a job leaves a lease behind.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = jq_server('main', "shared_preload_libraries = ''");
$node->safe_psql('postgres', 'CREATE DATABASE d');
my ($status, $stdout, $stderr) = $node->psql('d', 'CREATE EXTENSION jq');
is($status, 0, 'the extension can be created');
like($stderr, qr/(NOTICE|WARNING): +jq is not preloaded.*HINT: +Add jq to shared_preload_libraries/s, 'with a notice that tells what is missing');
jq_handlers($node, 'd');
like($node->safe_psql('d', 'SELECT note FROM jq.status'), qr/not in shared_preload_libraries/, 'jq.status tells, too');
is($node->safe_psql('d', 'SELECT launcher, scheduler_pid, workers FROM jq.status'), 'f||0', 'there are no processes');

# dispatch and drain
$node->safe_psql('d', q{
	SELECT count(jq.dispatch('note', jsonb_build_object('n', i), priority => -i)) FROM generate_series(1, 5) AS i;
	SELECT jq.dispatch('note', '{"late": true}', delay => '1 day'), jq.dispatch('note', queue => 'other');
	BEGIN; SELECT jq.dispatch('note', '{"lost": true}'); ROLLBACK});
is($node->safe_psql('d', 'SELECT queue, ready, later, running FROM jq.queue_stats ORDER BY 1'),
	"default|5|1|0\nother|1|0|0", 'jobs wait');
is($node->safe_psql('d', "CALL jq.drain('{default}', 2)"), '2', 'jq.drain() runs as many as it is told to');
is($node->safe_psql('d', 'CALL jq.drain()'), '4', 'and then the rest that is due');
is($node->safe_psql('d', "SELECT string_agg(coalesce(payload ->> 'n', queue), ',' ORDER BY n) FROM done"),
	'5,4,3,2,1,other', 'in their order');
is($node->safe_psql('d', 'SELECT jq.run($$note$$, $${"by": "hand"}$$)'), '', 'jq.run() works');

# failures
($status, $stdout, $stderr) = $node->psql('d', q{
	TRUNCATE done;
	DELETE FROM jq.jobs;
	SELECT jq.dispatch('shaky', '{"failures": 1}') \gset good_
	SELECT jq.dispatch('shaky', '{"failures": 9}') \gset bad_
	CALL jq.drain()});
is("$status $stdout", '0 5', 'failed attempts are made again');
is($node->safe_psql('d', 'SELECT attempt FROM done'), '2', 'the second attempt did it');
is($node->safe_psql('d', 'SELECT attempts, sqlstate FROM jq.failed_jobs'), '3|P0001', 'the job that always fails has failed');
is($node->safe_psql('d', 'SELECT jq.retry(id) FROM jq.failed_jobs'), 't', 'jq.retry()');
$node->psql('d', 'CALL jq.drain()');
is($node->safe_psql('d', 'SELECT jq.forget(id) FROM jq.failed_jobs'), 't', 'jq.forget()');
$node->psql('d', q{SELECT jq.dispatch('shaky', '{"failures": 9}', max_attempts => 1) FROM generate_series(1, 3); CALL jq.drain()});
is($node->safe_psql('d', 'SELECT jq.flush()'), '3', 'jq.flush()');
is($node->safe_psql('d', 'SELECT (SELECT count(*) FROM jq.jobs), (SELECT count(*) FROM jq.failed_jobs)'), '0|0', 'nothing is left');

# ---------------------------------------------------------------------
# Leases
# ---------------------------------------------------------------------

# A session that drains, killed in the middle of a job.
sub killed_drain
{
	my ($gate) = @_;
	my $session = $node->background_psql('d', on_error_stop => 0);

	$session->query_until(qr/started/, "\\echo started\nSET jq.lease = '1h';\nSET jq.keep_attempts = '1d';\nCALL jq.drain();\n");
	wait_until($node, 'd', "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'advisory'");
	return $session;
}

# Time passes.
my $id;

sub end_lease
{
	$node->safe_psql('d', "UPDATE jq.jobs SET lease_until = clock_timestamp() WHERE id = $id AND lease_until > clock_timestamp()");
	return;
}

my $gate = $node->background_psql('d');
$gate->query_safe('SELECT pg_advisory_lock(1)');
$id = $node->safe_psql('d', q{TRUNCATE done; SELECT jq.dispatch('gate', '{"gate": 1}', max_attempts => 2)});
$node->safe_psql('d', "SELECT jq.dispatch('note')");
my $session = killed_drain();
is($node->safe_psql('d', "SELECT attempts, token IS NOT NULL FROM jq.jobs WHERE id = $id"),
	'1|t', 'the attempt is counted before the handler runs');
is($node->safe_psql('d', "SELECT lease_until - reserved_at FROM jq.jobs WHERE id = $id"),
	'01:00:00', 'without a timeout of the handler the lease is jq.lease');
is( $node->safe_psql('d', 'SELECT r.id, r.attempt FROM jq.running AS r JOIN pg_stat_activity AS a USING (pid)'),
	"$id|1", 'jq.running shows it');
is($node->safe_psql('d', 'CALL jq.drain()'), '1', 'another session goes past it');
$node->safe_psql('d', "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE wait_event = 'advisory'");
eval { $session->quit };
is($node->safe_psql('d', "SELECT count(*) FROM done WHERE job = $id"), '0', 'a killed session leaves no effect');
is( $node->safe_psql('d', "SELECT lease_until > clock_timestamp(), attempts FROM jq.jobs WHERE id = $id"),
	't|1', 'its lease has not come to its end');
is($node->safe_psql('d', 'SELECT sum(running), sum(ready) FROM jq.queue_stats'), '0|1', 'but does not outlive the session');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.running'), '0', 'and nothing runs');
$session = killed_drain();
is($node->safe_psql('d', "SELECT attempt FROM jq.running WHERE id = $id"), '2', 'the next session runs it in its second attempt');

# a drain that outlives its lease does no harm, and leaves none
end_lease();
my ($ran, $warning);
$node->psql('d', "SET jq.keep_attempts = '1d'; CALL jq.drain()", stdout => \$ran, stderr => \$warning);
is($ran, '1', 'a job whose last attempt was not recorded is settled');
like($warning, qr/job $id, handler "gate", attempt 2 of 2 failed: session that ran the attempt did not record its end/, 'and the session that does it is told');
is($node->safe_psql('d', 'SELECT attempts, sqlstate, error FROM jq.failed_jobs'),
	'2|57000|session that ran the attempt did not record its end', 'as failed, with the reason');
$gate->query_safe('SELECT pg_advisory_unlock(1)');
is( $node->safe_psql('d', "SELECT attempt, outcome, sqlstate, pid IS NOT NULL, started_at < ended_at FROM jq.attempts WHERE id = $id ORDER BY attempt"),
	"1|failed|57000|t|t\n2|failed|57000|t|t", 'both attempts are in the history, with their numbers');
wait_until($node, 'd', "SELECT count(*) = 0 FROM pg_stat_activity WHERE query ~ 'jq.drain' AND state = 'active' AND pid <> pg_backend_pid()");
is($node->safe_psql('d', "SELECT count(*) FROM done WHERE job = $id"), '0', 'the session that comes too late changes nothing');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.jobs'), '0', 'and no job is left');
eval { $session->quit };
$node->safe_psql('d', "SELECT jq.retry($id)");
is($node->safe_psql('d', 'CALL jq.drain()'), '1', 'retried, it runs');
is($node->safe_psql('d', "SELECT attempt FROM done WHERE job = $id"), '1', 'with all its attempts');

# cancelled while a session runs it, and after that died
$gate->query_safe('SELECT pg_advisory_lock(1)');
$id = $node->safe_psql('d', q{TRUNCATE jq.attempts; TRUNCATE jq.failed_jobs; SELECT jq.dispatch('gate', '{"gate": 1}', max_attempts => 2)});
$session = killed_drain();
is($node->safe_psql('d', "SET jq.keep_attempts = '1d'; SELECT jq.cancel($id)"), 'external', 'a job that a session runs is cancelled');
is( $node->safe_psql('d', "SELECT f.attempts, a.attempt, a.outcome, a.pid IS NOT NULL, a.started_at < a.ended_at FROM jq.failed_jobs AS f JOIN jq.attempts AS a USING (id) WHERE id = $id"),
	'1|1|cancelled|t|t', 'after one attempt');
$node->safe_psql('d', "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE wait_event = 'advisory'");
eval { $session->quit };
$id = $node->safe_psql('d', q{TRUNCATE jq.attempts; SELECT jq.dispatch('gate', '{"gate": 1}', max_attempts => 2)});
$session = killed_drain();
$node->safe_psql('d', "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE wait_event = 'advisory'");
eval { $session->quit };
is($node->safe_psql('d', "SET jq.keep_attempts = '1d'; SELECT jq.cancel($id)"), 'waiting', 'one whose session died waits');
is($node->safe_psql('d', "SELECT f.attempts, a.attempt, a.outcome FROM jq.failed_jobs AS f JOIN jq.attempts AS a USING (id) WHERE id = $id"),
	'1|1|cancelled', 'and has made one attempt as well');
$gate->query_safe('SELECT pg_advisory_unlock(1)');

# with preload from now on: what was left under a lease is found
$gate->query_safe('SELECT pg_advisory_lock(1)');
$id = $node->safe_psql('d', q{TRUNCATE done; SELECT jq.dispatch('gate', '{"gate": 1}')});
$session = killed_drain();
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'jq'");
$node->stop('fast');
eval { $session->quit };
eval { $gate->quit };
$node->start;
wait_for_done($node, 'd', 1, 'workers run it, since the session is gone with the server');
is($node->safe_psql('d', "SELECT attempt FROM done WHERE job = $id"), '2', 'in its second attempt');

no_crash($node);
$node->stop;
done_testing();
