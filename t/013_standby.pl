# A streaming pair: nothing runs on a standby, and after its promotion all goes
# on as if the server had been restarted.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $primary = PostgreSQL::Test::Cluster->new('first');
$primary->init(allows_streaming => 1, extra => [ '--encoding=UTF8', '--locale=C' ]);
$primary->append_conf('postgresql.conf', join("\n",
	"shared_preload_libraries = 'jq'", 'max_worker_processes = 32', 'jq.workers = 2', 'autovacuum = off',
	"log_line_prefix = '%m [%p] %b %e %q%a '") . "\n");
$primary->start;
jq_database($primary, 'd');
$primary->safe_psql('d', q{
	CREATE SEQUENCE released;
	CREATE FUNCTION release(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF nextval('released') = 1 THEN PERFORM jq.release('2 s'); END IF;
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
	END $$;
	SELECT jq.register('release(jsonb, jq.context)', max_attempts => 1);
	SELECT jq.register('shaky(jsonb, jq.context)', backoff => '{3 s}')});

sub standby_of
{
	my ($node, $name) = @_;
	my $standby = PostgreSQL::Test::Cluster->new($name);

	$node->backup($name);
	$standby->init_from_backup($node, $name, has_streaming => 1);
	$standby->start;
	return $standby;
}

# End a server for good, as a power failure would.
sub lose
{
	my ($node) = @_;
	my ($postmaster) = slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
	my @processes = jq_pids($node);

	$node->kill9;
	ok(wait_for_gone($postmaster, @processes), 'the primary is lost, and jq has gone with it');
	return;
}

sub shut_gate
{
	my ($node) = @_;
	my $session = $node->background_psql('d', on_error_stop => 0);

	$session->query_safe('SELECT pg_advisory_lock(1)');
	return $session;
}

# ---------------------------------------------------------------------
# While it is a standby
# ---------------------------------------------------------------------

my $standby = standby_of($primary, 'second');
$primary->safe_psql('d', "SELECT count(jq.dispatch('note')) FROM generate_series(1, 20)");
wait_for_done($primary, 'd', 20);
my $paused = $primary->safe_psql('d', "SELECT jq.pause('waits', 'for the failover'); SELECT jq.dispatch('note', queue => 'waits')");
$paused =~ s/.*\n//;
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('write'));
is(join(' ', jq_pids($standby)), '', 'no process of jq runs on a standby');
is($standby->safe_psql('d', 'SELECT ready, launcher FROM jq.status'), '1|f', 'views can be read there');
like($standby->safe_psql('d', 'SELECT note FROM jq.status'), qr/server is a standby/, 'and say why nothing runs');
is($standby->safe_psql('d', 'SELECT queue, ready, paused FROM jq.queue_stats'), 'waits|1|t', 'queue by queue');
is($standby->safe_psql('d', 'SELECT (SELECT count(*) FROM jq.jobs), (SELECT count(*) FROM jq.failed_jobs), (SELECT count(*) FROM jq.running), (SELECT count(*) FROM jq.workers)'),
	'1|0|0|0', 'job by job');
foreach my $command ("SELECT jq.dispatch('note')", "SELECT jq.cancel($paused)", 'SELECT jq.retry(1)', 'SELECT jq.retry_all()',
	"SELECT jq.reschedule($paused)", 'SELECT jq.flush()', 'SELECT jq.forget(1)', 'SELECT jq.pause()', "SELECT jq.resume('waits')", 'CALL jq.drain()',
	"SELECT jq.register('note(jsonb, jq.context)')", 'SELECT jq.adopt()', 'SELECT jq.prune()',
	'CALL jq.wait_for(1)', "CALL jq.wait_for($paused, '100 ms')")
{
	my ($status, $stdout, $stderr) = $standby->psql('d', $command, extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	like($stderr, qr/25006/, "$command: read-only");
}

# Why CALL jq.wait_for() is among them: what is not replayed yet looks done.
$standby->safe_psql('d', 'SELECT pg_wal_replay_pause()');
wait_until($standby, 'd', "SELECT pg_get_wal_replay_pause_state() = 'paused'");
my $unseen = $primary->safe_psql('d', "SELECT jq.dispatch('note', queue => 'waits')");
my ($status, $stdout, $stderr) = $standby->psql('d', "CALL jq.wait_for($unseen, '100 ms')");
is($stdout, '', 'a job that the standby has not heard of is not called done');
like($stderr, qr/cannot execute jq\.wait_for\(\) during recovery/, 'it says why');
$primary->safe_psql('d', "SELECT jq.cancel($unseen); SELECT jq.forget($unseen)");
$standby->safe_psql('d', 'SELECT pg_wal_replay_resume()');
is($primary->safe_psql('d', 'SELECT count(*) FROM done'), '20', 'nothing has run twice');

# ---------------------------------------------------------------------
# Failover, twice
# ---------------------------------------------------------------------

foreach my $round (1, 2)
{
	my ($failures, $delayed, $leased, $drain);
	my $gate = shut_gate($primary);

	$primary->safe_psql('d', q{TRUNCATE done; SELECT setval('released', 1, false)});
	# a session that drains, and dies with the primary
	$primary->safe_psql('d', 'ALTER SYSTEM SET jq.enabled = off; SELECT pg_reload_conf()');
	wait_until($primary, 'd', 'SELECT scheduler_pid IS NULL AND workers = 0 FROM jq.status');
	$leased = $primary->safe_psql('d', q{SELECT jq.dispatch('gate', '{"gate": 1}', max_attempts => 2)});
	$drain = $primary->background_psql('d', on_error_stop => 0);
	$drain->query_until(qr/started/, "\\echo started\nCALL jq.drain();\n");
	wait_until($primary, 'd', "SELECT count(*) = 1 FROM jq.running WHERE id = $leased");
	$primary->safe_psql('d', 'ALTER SYSTEM SET jq.enabled = on; SELECT pg_reload_conf()');

	my $running = $primary->safe_psql('d', q{SELECT jq.dispatch('gate', '{"gate": 1}')});
	wait_until($primary, 'd', "SELECT count(*) = 1 FROM jq.running WHERE id = $running");
	my $released = $primary->safe_psql('d', "SELECT jq.dispatch('release')");
	my $shaky = $primary->safe_psql('d', q{SELECT jq.dispatch('shaky', '{"failures": 1}')});
	$delayed = $primary->safe_psql('d', "SELECT jq.dispatch('note', delay => '3 s')");
	wait_until($primary, 'd', "SELECT count(*) = 2 FROM jq.jobs WHERE id = $shaky AND attempts = 1 OR id = $released AND available_at > clock_timestamp()");
	my $waiting = $primary->safe_psql('d', "SELECT count(jq.dispatch('gate', '{\"gate\": 1}')) FROM generate_series(1, 5)");

	$primary->wait_for_catchup($standby, 'replay', $primary->lsn('write'));
	lose($primary);
	eval { $_->quit } foreach $gate, $drain;
	$standby->promote;
	wait_until($standby, 'd', 'SELECT launcher AND scheduler_pid IS NOT NULL FROM jq.status', "promotion $round: launcher and scheduler come up");
	wait_until($standby, 'd', 'SELECT count(*) = 1 FROM jq.jobs', "promotion $round: all jobs run");
	is($standby->safe_psql('d', 'SELECT held FROM jq.status'), '0', "promotion $round: none is held");
	is( $standby->safe_psql('d', 'SELECT count(*), count(DISTINCT job) FROM done'),
		'10|10', "promotion $round: each has its effect once");
	is($standby->safe_psql('d', "SELECT attempt FROM done WHERE job = $running"), '1', "promotion $round: the job that was running has not spent its attempt");
	is($standby->safe_psql('d', "SELECT attempt FROM done WHERE job = $released"), '1', "promotion $round: nor has the released one");
	is($standby->safe_psql('d', "SELECT attempt FROM done WHERE job = $shaky"), '2', "promotion $round: the one that had failed has spent it");
	is($standby->safe_psql('d', "SELECT attempt FROM done WHERE job = $leased"), '2', "promotion $round: and the one that a session had drained, which is void");
	is($standby->safe_psql('d', 'SELECT count(*) FROM jq.failed_jobs'), '0', "promotion $round: none failed");
	is($standby->safe_psql('d', 'SELECT id, attempts, isfinite(available_at) FROM jq.jobs'), "$paused|0|t", "promotion $round: the paused queue is still paused");
	is($standby->safe_psql('d', 'SELECT queue, reason FROM jq.pauses'), 'waits|for the failover', "promotion $round: with the reason");
	my $new = $standby->safe_psql('d', "SELECT jq.dispatch('note')");
	is($standby->safe_psql('d', "CALL jq.wait_for($new, '20 s')"), 'done', "promotion $round: new jobs run");
	no_crash($primary);

	$primary = $standby;
	last if $round == 2;
	$standby = standby_of($primary, 'third');
}
$primary->safe_psql('d', "TRUNCATE done; SELECT jq.resume('waits')");
wait_for_empty($primary, 'd', 'resumed, its job runs');
is($primary->safe_psql('d', 'SELECT job, attempt FROM done'), "$paused|1", 'once');

# ---------------------------------------------------------------------
# Synchronous standbys, and a backup that becomes a server of its own
# ---------------------------------------------------------------------

# Each look is a job, and says what its worker's commit waits for.
$primary->safe_psql('d', q{
	CREATE TABLE seen (pid integer, waits_for text, at timestamptz DEFAULT clock_timestamp());
	CREATE FUNCTION look(payload jsonb) RETURNS void LANGUAGE sql AS $$
		INSERT INTO public.seen VALUES (pg_backend_pid(), current_setting('synchronous_commit'))
	$$;
	SELECT jq.register('look(jsonb)');
	TRUNCATE done});

sub commits_wait_for
{
	my ($value, $name) = @_;

	return wait_until($primary, 'd', qq{SELECT jq.dispatch('look') \\g /dev/null
		SELECT waits_for = '$value' FROM seen ORDER BY at DESC LIMIT 1}, $name);
}

$standby = standby_of($primary, 'fourth');
commits_wait_for('off', 'commits run ahead');
$primary->safe_psql('postgres', "ALTER SYSTEM SET synchronous_standby_names = '*'; ALTER SYSTEM SET synchronous_commit = remote_apply; SELECT pg_reload_conf()");
wait_until($primary, 'postgres', "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'");
commits_wait_for('remote_apply', 'with synchronous standbys a worker that is there already does as configured');
my $there = 0;
foreach my $i (1 .. 20)
{
	my $id = $primary->safe_psql('d', "SELECT jq.dispatch('note')");

	wait_until($primary, 'd', "SELECT count(*) = 1 FROM done WHERE job = $id");
	$there += $standby->safe_psql('d', "SELECT count(*) FROM done WHERE job = $id");
}
is($there, 20, 'with synchronous standbys what a reader sees of a job is on the standby, too');
foreach my $value ('off', 'local', 'on')
{
	$primary->safe_psql('postgres', "ALTER SYSTEM SET synchronous_commit = $value; SELECT pg_reload_conf()");
	commits_wait_for($value, "and follows when that changes to $value");
}
$primary->safe_psql('postgres', "ALTER SYSTEM RESET synchronous_standby_names; ALTER SYSTEM SET jq.commit_wait = on; ALTER SYSTEM SET synchronous_commit = off; SELECT pg_reload_conf()");
commits_wait_for('on', 'jq.commit_wait = on waits whatever is configured');
$primary->safe_psql('postgres', "ALTER SYSTEM RESET jq.commit_wait; ALTER SYSTEM RESET synchronous_commit; SELECT pg_reload_conf()");
commits_wait_for('off', 'in the end commits run ahead again');
is($primary->safe_psql('d', 'SELECT count(DISTINCT pid) <= 2 FROM seen'), 't', 'no worker was replaced for that');
$standby->stop('immediate');

# A copy of the files is not told from the server it was taken of: whoever
# starts one beside the other does not want its jobs to run, and says so.
$primary->safe_psql('d', "TRUNCATE done; SELECT jq.pause(); SELECT count(jq.dispatch('note')) FROM generate_series(1, 3)");
$primary->backup('copy');
my $copy = PostgreSQL::Test::Cluster->new('copy');
$copy->init_from_backup($primary, 'copy');
$copy->start;
is($copy->safe_psql('d', 'SELECT held, ready FROM jq.status'), '0|3', 'the jobs of a physical backup are not held');
$copy->safe_psql('d', 'SELECT jq.resume()');
wait_for_done($copy, 'd', 3, 'and run there');

no_crash($_) foreach $primary, $copy;
$_->stop foreach $primary, $copy;
done_testing();
