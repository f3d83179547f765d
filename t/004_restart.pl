# Processes that end in the middle of a job, one at a time or all together:
# nothing is lost, nothing happens twice, and what a job did to its worker is
# counted.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes;

my $node = jq_server('main', 'jq.workers = 2');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE SEQUENCE starts;
	CREATE FUNCTION deadly(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM nextval('public.starts');	-- stays, whatever becomes of us
		PERFORM pg_terminate_backend(pg_backend_pid());
		PERFORM pg_sleep(60);
	END $$;
	SELECT jq.register('deadly(jsonb, jq.context)', backoff => ARRAY[interval '0 s'])});

sub up
{
	my ($name) = @_;

	return wait_until($node, 'd', 'SELECT launcher AND scheduler_pid IS NOT NULL FROM jq.status', $name);
}

# Start a job that waits until the server is told otherwise.
sub start_gated
{
	my ($more) = @_;

	my $id = $node->safe_psql('d', q{SELECT jq.dispatch('gate', '{"gate": 1}'} . ($more // '') . ')');
	wait_until($node, 'd', "SELECT EXISTS (SELECT FROM jq.running JOIN pg_stat_activity AS a USING (pid) WHERE id = $id AND a.wait_event = 'advisory')");
	return $id;
}

sub shut_gate
{
	my $session = $node->background_psql('d', on_error_stop => 0);

	$session->query_safe('SELECT pg_advisory_lock(1)');
	return $session;
}

sub open_gate
{
	my ($session) = @_;

	# it may have lost its server
	eval { $session->quit };
	return;
}

sub kill_worker
{
	my ($id) = @_;
	my $pid = $node->safe_psql('d', "SELECT pid FROM jq.running WHERE id = $id");

	is($node->safe_psql('d', "SELECT pg_terminate_backend($pid, 20000)"), 't', 'the worker ends');
	return $pid;
}

# ---------------------------------------------------------------------
# One worker
# ---------------------------------------------------------------------

my $gate = shut_gate();
my $id = start_gated();
my $old = kill_worker($id);
wait_until($node, 'd', "SELECT pid <> $old AND attempt = 2 FROM jq.running WHERE id = $id",
	'the job of a terminated worker is run again by another one');
is($node->safe_psql('d', "SELECT attempts FROM jq.jobs WHERE id = $id"), '1', 'one attempt is counted');
open_gate($gate);
wait_for_empty($node, 'd');
is($node->safe_psql('d', "SELECT string_agg(attempt::text, ',') FROM done WHERE job = $id"),
	'2', 'what the first attempt did is gone, the second is there once');

# at the limit
$gate = shut_gate();
$id = start_gated(', max_attempts => 1');
$old = kill_worker($id);
wait_for_empty($node, 'd', 'the last attempt ends the job');
is( $node->safe_psql('d', "SELECT attempts, sqlstate, error FROM jq.failed_jobs WHERE id = $id"),
	"1|57000|worker process with PID $old ended while it ran the job", 'and jq.failed_jobs tells why');
$node->safe_psql('d', "SELECT jq.retry($id)");
wait_until($node, 'd', "SELECT attempt = 1 FROM jq.running WHERE id = $id", 'it can be retried');
open_gate($gate);
wait_for_empty($node, 'd');

# a job that kills its worker each time, among others
$node->safe_psql('d', q{TRUNCATE done;
	SELECT count(jq.dispatch('note')) FROM generate_series(1, 20);
	SELECT jq.dispatch('deadly');
	SELECT count(jq.dispatch('note')) FROM generate_series(1, 20)});
wait_for_empty($node, 'd', 'a job that kills its workers is stopped');
is($node->safe_psql('d', 'SELECT last_value FROM starts'), '3', 'it was started as often as it may');
is( $node->safe_psql('d', "SELECT attempts, sqlstate FROM jq.failed_jobs WHERE name = 'deadly'"),
	'3|57000', 'and is among the failed ones');
is($node->safe_psql('d', 'SELECT count(*), max(attempt) FROM done'), '40|1', 'the others ran, and are not blamed');

# cancelled as a query
$gate = shut_gate();
$id = start_gated();
$node->safe_psql('d', "SELECT pg_cancel_backend(pid) FROM jq.running WHERE id = $id");
wait_until($node, 'd', "SELECT attempt = 2 FROM jq.running WHERE id = $id", 'pg_cancel_backend() ends the attempt');
open_gate($gate);
wait_for_empty($node, 'd');
my @before = jq_pids($node);
$node->safe_psql('d', 'SELECT pg_cancel_backend(pid) FROM jq.workers');
$node->safe_psql('d', "TRUNCATE done; SELECT jq.dispatch('note')");
wait_for_done($node, 'd', 1, 'on an idle worker it has no effect');
is(join(' ', jq_pids($node)), join(' ', @before), 'the processes are the same');

# ---------------------------------------------------------------------
# Scheduler and launcher
# ---------------------------------------------------------------------

foreach my $type ('scheduler', 'launcher')
{
	$gate = shut_gate();
	$id = start_gated();
	my ($pid) = jq_pids($node, $type);
	$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid, 20000)");
	$node->safe_psql('d', "DELETE FROM done; SELECT jq.dispatch('note', '{\"now\": true}'), jq.dispatch('note', '{\"later\": true}', delay => '100 ms', queue => 'new $type')");
	wait_until($node, 'postgres', "SELECT count(*) = 1 AND min(pid) <> $pid FROM pg_stat_activity WHERE backend_type = 'jq $type'",
		"the $type is back after its termination");
	wait_for_done($node, 'd', 2, "jobs dispatched without a $type run");
	is($node->safe_psql('d', "SELECT attempt FROM jq.running WHERE id = $id"), '1', 'the job that was running goes on');
	cmp_ok($node->safe_psql('d', 'SELECT workers FROM jq.status'), '<=', 2, 'no more workers than there may be');
	open_gate($gate);
	wait_for_empty($node, 'd');
}

# everybody off; the job may be begun again by one that is still to be ended
$gate = shut_gate();
$id = start_gated(', max_attempts => 9');
@before = jq_pids($node);
$node->safe_psql('postgres', "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE backend_type LIKE 'jq %'");
ok(wait_for_gone(@before), 'all processes end when all are terminated');
open_gate($gate);
wait_for_empty($node, 'd', 'and all come back');
like($node->safe_psql('d', "SELECT string_agg(attempt::text, ',') FROM done WHERE job = $id"),
	qr/^[23]$/, 'the job ran once, in its second attempt or third');
no_crash($node);

# ---------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------

# More than a worker can do before the end comes, and a job in the middle.
sub fill
{
	$node->safe_psql('d', 'TRUNCATE done');
	$gate = shut_gate();
	$id = start_gated();
	$node->safe_psql('d', "SELECT count(jq.dispatch('note')) FROM generate_series(1, 5000)");
	wait_for_done($node, 'd', 10);
	return;
}

sub settle
{
	my ($name, $attempt) = @_;

	open_gate($gate);
	up("$name: launcher and scheduler are back");
	wait_for_empty($node, 'd', "$name: all jobs end");
	is( $node->safe_psql('d', "SELECT count(*), count(DISTINCT job) FROM done WHERE payload = '{}'"),
		'5000|5000', "$name: each ran exactly once");
	like($node->safe_psql('d', "SELECT string_agg(attempt::text, ',') FROM done WHERE job = $id"),
		$attempt, "$name: the job in the middle too");
	is($node->safe_psql('d', "SELECT count(*) FROM jq.failed_jobs WHERE failed_at > (SELECT min(at) FROM done)"), '0', "$name: none failed");
	return;
}

foreach my $mode ('fast', 'immediate')
{
	fill();
	$node->restart if $mode eq 'fast';
	if ($mode eq 'immediate')
	{
		$node->stop('immediate');
		$node->start;
	}
	settle("$mode restart", qr/^1$/);
}

# a backend crashes, and the postmaster ends all others
fill();
my $victim = $node->background_psql('postgres', on_error_stop => 0);
my $pid = $victim->query_safe('SELECT pg_backend_pid()');
my $offset = log_size($node);
kill('KILL', $pid);
$node->wait_for_log(qr/all server processes terminated; reinitializing/, $offset);
eval { $victim->quit };
settle('crash restart', qr/^[12]$/);

# a worker is killed outright
fill();
$offset = log_size($node);
kill('KILL', $node->safe_psql('d', "SELECT pid FROM jq.running WHERE id = $id"));
$node->wait_for_log(qr/all server processes terminated; reinitializing/, $offset);
settle('killed worker', qr/^[12]$/);

# the postmaster is killed
fill();
@before = jq_pids($node);
my ($postmaster) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
$node->kill9;
ok(wait_for_gone(@before), 'all processes leave when the postmaster is killed');
open_gate($gate);
# until the dead postmaster has been reaped, its pid is taken for a living one
foreach (1 .. 600)
{
	last unless kill(0, $postmaster);
	Time::HiRes::usleep(100_000);
}
$node->start;
settle('killed postmaster', qr/^[12]$/);

no_crash($node);
$node->stop;
done_testing();
