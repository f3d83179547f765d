# Pauses, replacing the workers, and the end of the server while jobs run.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $node = jq_server('main', 'jq.workers = 3', "jq.shutdown_grace = '20 s'", 'fsync = off');
jq_database($node, 'd');
$node->safe_psql('d', "SELECT jq.register('slow(jsonb, jq.context)', timeout => NULL)");

my $gate;

sub shut_gate
{
	$gate = $node->background_psql('d', on_error_stop => 0);
	$gate->query_safe('SELECT pg_advisory_lock(1)');
	return;
}

sub start
{
	my ($queue) = @_;

	my $id = $node->safe_psql('d', "SELECT jq.dispatch('gate', '{\"gate\": 1}', queue => '$queue')");
	wait_until($node, 'd', "SELECT count(*) = 1 FROM jq.running JOIN pg_stat_activity AS a USING (pid) WHERE id = $id AND a.wait_event = 'advisory'");
	return $id;
}

sub dispatch
{
	my ($count, $queue, $more) = @_;

	$node->safe_psql('d', "SELECT count(jq.dispatch('note', queue => '$queue'" . ($more // '') . ")) FROM generate_series(1, $count)");
	return;
}

# Nobody runs anything, and nobody is busy finding that out.
sub still
{
	my ($name) = @_;

	wait_until($node, 'd', "SELECT count(*) = 0 FROM jq.workers WHERE state <> 'idle'");
	my $before = $node->safe_psql('d', 'SELECT count(*) FROM done');
	my $offset = time();
	usleep(700_000);
	is($node->safe_psql('d', 'SELECT count(*) FROM done'), $before, "$name: nothing runs");
	is( $node->safe_psql('d', "SELECT count(*) FROM jq.workers WHERE state <> 'idle'"), '0', "$name: and nobody is busy");
	return;
}

sub done_in
{
	return $node->safe_psql('d', "SELECT count(*) FROM done WHERE queue = '$_[0]'");
}

# ---------------------------------------------------------------------
# Pauses
# ---------------------------------------------------------------------

# workers are there and sleep
dispatch(20, 'a');
wait_for_empty($node, 'd');
$node->safe_psql('d', 'TRUNCATE done');
my @before = jq_pids($node);

$node->safe_psql('d', "SELECT jq.pause('a', 'maintenance')");
dispatch(100, 'a');
dispatch(10, 'b');
wait_until($node, 'd', "SELECT count(*) = 10 FROM done WHERE queue = 'b'", 'other queues go on');
still('a paused queue');
is(done_in('a'), '0', 'of the paused one no job has run');
is($node->safe_psql('d', 'SELECT queue, paused, ready FROM jq.queue_stats'), 'a|t|100', 'jq.queue_stats shows it');
$node->safe_psql('d', "SELECT jq.pause(reason => 'all')");
dispatch(10, 'b');
still('all paused');
is($node->safe_psql('d', 'SELECT note FROM jq.status'), 'all queues are paused, see jq.pauses', 'jq.status says why');
$node->safe_psql('d', "SELECT jq.resume('a')");
still('one resumed, all paused');
$node->safe_psql('d', "SELECT jq.pause('a')");
{
	local $ENV{JQ_TEST_TIMEOUT} = 20;    # the look that comes once a minute is not what helps
	$node->safe_psql('d', 'SELECT jq.resume()');
	wait_until($node, 'd', "SELECT count(*) = 20 FROM done WHERE queue = 'b'", 'when the mark for all is taken away, others go on');
	is(done_in('a'), '0', 'but not the one that is paused itself');
	$node->safe_psql('d', "BEGIN; SELECT jq.resume('a'); ROLLBACK");
	still('a resume that is rolled back');
	my $start = time();
	$node->safe_psql('d', "SELECT jq.resume('a')");
	wait_until($node, 'd', "SELECT count(*) = 100 FROM done WHERE queue = 'a'", 'resumed, it goes on');
	cmp_ok(time() - $start, '<', 10, 'at once');
	is(scalar(grep { kill(0, $_) } @before), scalar @before, 'the processes are the same');
	$node->safe_psql('d', 'TRUNCATE done');

	# one that ends by itself
	$node->safe_psql('d', "SELECT jq.pause('a', until => clock_timestamp() + interval '1.5 s')");
	dispatch(10, 'a');
	usleep(300_000);
	is(done_in('a'), '0', 'paused for a while');
	wait_until($node, 'd', "SELECT count(*) = 10 FROM done WHERE queue = 'a'", 'then it goes on by itself');
	is($node->safe_psql('d', "SELECT min(at) >= (SELECT min(until) FROM jq.pauses) FROM done"), 't', 'not before');

	# in a prepared transaction, and by hand
	$node->safe_psql('d', "TRUNCATE done; SELECT jq.pause('a')");
	dispatch(10, 'a');
	$node->safe_psql('d', "BEGIN; SELECT jq.resume('a'); PREPARE TRANSACTION 'resume'");
	still('a resume that is only prepared');
	$node->safe_psql('d', "COMMIT PREPARED 'resume'");
	wait_until($node, 'd', "SELECT count(*) = 10 FROM done WHERE queue = 'a'", 'COMMIT PREPARED resumes');
	$node->safe_psql('d', "TRUNCATE done; SELECT jq.pause('a')");
	dispatch(10, 'a');
	still('paused');
	$node->safe_psql('d', 'DELETE FROM jq.pauses');
	wait_until($node, 'd', "SELECT count(*) = 10 FROM done WHERE queue = 'a'", 'a row that is deleted by hand holds nothing');
}

# what runs goes on
shut_gate();
my $id = start('a');
$node->safe_psql('d', "SELECT jq.pause('a'), jq.pause()");
is($node->safe_psql('d', "SELECT attempt FROM jq.running WHERE id = $id"), '1', 'a job that runs goes on');
$gate->quit;
wait_until($node, 'd', "SELECT count(*) = 1 FROM done WHERE job = $id", 'to its end');

# a job pauses its own queue; delayed and released jobs wait like others
$node->safe_psql('d', q{
	SELECT jq.resume('a'), jq.resume();
	CREATE FUNCTION pauses(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM jq.pause(context.queue, 'by a job');
		INSERT INTO public.done (job, queue) VALUES (context.id, context.queue);
	END $$;
	SELECT jq.register('pauses(jsonb, jq.context)');
	TRUNCATE done;
	SELECT jq.dispatch('pauses', queue => 'c')});
wait_for_done($node, 'd', 1);
dispatch(5, 'c', ", delay => '100 ms'");
still('paused by its own job');
is($node->safe_psql('d', 'SELECT queue, reason FROM jq.pauses'), 'c|by a job', 'the reason is there');

# it is there after a restart
$node->restart;
wait_until($node, 'd', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
dispatch(1, 'd');
wait_until($node, 'd', "SELECT count(*) = 1 FROM done WHERE queue = 'd'", 'after a restart others run');
still('after a restart');
is(done_in('c'), '1', 'the paused queue is still paused');
$node->safe_psql('d', "SELECT jq.resume('c')");
wait_for_empty($node, 'd', 'until it is resumed');

# many at a time, while jobs run
$node->safe_psql('d', 'TRUNCATE done');
dispatch(2000, 'e');
my $churn = $node->background_psql('d');
$churn->query_until(qr/started/, q{\echo started
DO $$ BEGIN FOR i IN 1 .. 300 LOOP
	PERFORM jq.pause('e'), jq.pause(), jq.pause('other ' || i); COMMIT;
	PERFORM jq.resume(), jq.resume('e'); COMMIT;
END LOOP; END $$;
});
wait_until($node, 'd', "SELECT count(*) = 300 FROM jq.pauses WHERE queue LIKE 'other %'");
$churn->quit;
wait_for_empty($node, 'd', 'pausing and resuming 300 times stops nothing for good');
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job) FROM done'), '2000|2000', 'each job ran once');
$node->safe_psql('d', 'TRUNCATE done, jq.pauses');

# ---------------------------------------------------------------------
# jq.restart_workers()
# ---------------------------------------------------------------------

shut_gate();
$id = start('a');
dispatch(1, 'a');
wait_until($node, 'd', "SELECT count(*) > 0 FROM jq.workers WHERE state = 'idle'");
my $busy = $node->safe_psql('d', "SELECT pid FROM jq.running WHERE id = $id");
my @others = grep { $_ != $busy } (jq_pids($node, 'worker'), jq_pids($node, 'scheduler'));
$node->safe_psql('postgres', 'ALTER DATABASE d SET jq.workers = 1');
$node->safe_psql('d', "CREATE FUNCTION work_mem(payload jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(current_setting(''work_mem''))'; SELECT jq.register('work_mem(jsonb)', keep_result => '1 h')");
$node->safe_psql('d', "ALTER ROLE CURRENT_USER SET work_mem = '7MB'");
$node->safe_psql('d', 'BEGIN; SELECT jq.restart_workers(); ROLLBACK');
usleep(300_000);
is(scalar(grep { kill(0, $_) } @others), scalar @others, 'rolled back, nothing is restarted');
my $workers = $node->safe_psql('d', 'SELECT count(*) FROM jq.workers');
is($node->safe_psql('d', 'SELECT jq.restart_workers()'), $workers, 'jq.restart_workers() tells how many');
ok(wait_for_gone(@others), 'idle workers and the scheduler leave at once');
is($node->safe_psql('d', "SELECT attempt, pid = $busy FROM jq.running WHERE id = $id"), '1|t', 'the busy one does not');
is($node->safe_psql('d', "SELECT state FROM jq.workers WHERE pid = $busy"), 'leaving', 'but will');
$gate->quit;
ok(wait_for_gone($busy), 'after its job');
is($node->safe_psql('d', "SELECT attempt FROM done WHERE job = $id"), '1', 'which has come to its end');
wait_until($node, 'd', "SELECT scheduler_pid IS NOT NULL FROM jq.status", 'a scheduler is there again');
my $work_mem = $node->safe_psql('d', "SELECT jq.dispatch('work_mem')");
$node->safe_psql('d', "CALL jq.wait_for($work_mem)");
is($node->safe_psql('d', "SELECT jq.result($work_mem)"), '"7MB"', 'new workers have the settings of now');
dispatch(50, 'a');
$node->safe_psql('d', q{SELECT count(jq.dispatch('slow', '{"seconds": 0.1}')) FROM generate_series(1, 5)});
wait_for_empty($node, 'd');
is($node->safe_psql('d', "SELECT count(*) FROM jq.workers"), '1', 'and the scheduler starts no more of them');
$node->safe_psql('postgres', 'ALTER DATABASE d RESET jq.workers');
$node->safe_psql('d', 'ALTER ROLE CURRENT_USER RESET work_mem; TRUNCATE done; SELECT jq.restart_workers()');

# again and again: no start is taken for a failure of another one
my $slowest = 0;
foreach (1 .. 6)
{
	wait_until($node, 'd', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
	my $old = $node->safe_psql('d', 'SELECT scheduler_pid FROM jq.status');
	my $begin = time();

	$node->safe_psql('d', 'SELECT jq.restart_workers()');
	wait_until($node, 'd', "SELECT scheduler_pid <> $old FROM jq.status");
	$slowest = time() - $begin if time() - $begin > $slowest;
}
cmp_ok($slowest, '<', 1.8, 'a scheduler is replaced at once');

# ---------------------------------------------------------------------
# SIGHUP
# ---------------------------------------------------------------------

# all processes again and again, while jobs run
dispatch(3000, 'a');
foreach (1 .. 30)
{
	kill('HUP', jq_pids($node));
	usleep(20_000);
}
wait_for_empty($node, 'd', 'a storm of SIGHUP harms nothing');
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job), max(attempt) FROM done'), '3000|3000|1', 'each job ran once');
$node->safe_psql('d', 'TRUNCATE done');

# ---------------------------------------------------------------------
# The end of the server
# ---------------------------------------------------------------------

# a job that ends in time
wait_until($node, 'd', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
$id = $node->safe_psql('d', q{SELECT jq.dispatch('slow', '{"seconds": 2}')});
wait_for_running($node, 'd', 1);
dispatch(50, 'a', ", delay => '500 ms'");
my $offset = log_size($node);
$node->stop('fast');
is(log_count($node, qr/terminating background worker "jq worker.*due to administrator command/, $offset)
	<= 2 ? 'yes' : 'no', 'yes', 'idle workers go at once');
$node->start;
is($node->safe_psql('d', "SELECT attempt FROM done WHERE job = $id"), '1', 'a job that ends within the grace has its effect');
is($node->safe_psql('d', "SELECT count(*) FROM jq.jobs WHERE id = $id"), '0', 'and is done');
wait_for_empty($node, 'd', 'what fell due meanwhile runs after the start');
is($node->safe_psql('d', 'SELECT count(*), max(attempt) FROM done'), '51|1', 'once');

# one that does not
$node->append_conf('postgresql.conf', "jq.shutdown_grace = '1 s'");
$node->reload;
wait_until($node, 'd', "SELECT current_setting('jq.shutdown_grace') = '1s'");
usleep(300_000);
$id = $node->safe_psql('d', q{TRUNCATE done; SELECT jq.dispatch('slow', '{"seconds": 600}', max_attempts => 1)});
wait_for_running($node, 'd', 1);
my $start = time();
$node->stop('fast');
my $took = time() - $start;
cmp_ok($took, '>=', 0.9, 'one that does not has its grace');
cmp_ok($took, '<', 20, 'and no more');
$node->append_conf('postgresql.conf', "jq.shutdown_grace = 0");
$node->start;
wait_until($node, 'd', "SELECT attempt = 1 FROM jq.running WHERE id = $id", 'it runs again, and has not spent its only attempt');

# without a grace
wait_for_running($node, 'd', 1);
$start = time();
$node->stop('fast');
cmp_ok(time() - $start, '<', 10, 'without a grace it is interrupted at once');
$node->start;
wait_until($node, 'd', "SELECT attempt = 1 FROM jq.running WHERE id = $id", 'and has not spent its attempt either');
is($node->safe_psql('d', "SELECT attempts FROM jq.jobs WHERE id = $id"), '0', 'as its row says');
$node->safe_psql('d', "SELECT jq.cancel($id)");
wait_for_empty($node, 'd');

no_crash($node);
$node->stop;
done_testing();
