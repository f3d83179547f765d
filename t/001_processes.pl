# Launcher, schedulers and workers: where they run, and that they make way for
# commands on databases and on the extension.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = jq_server('main', 'jq.workers = 2', 'jq.max_workers = 16');

# A statement on a database must not hang: this is how long it may take.
my $limit = "SET statement_timeout = '20s';";

sub scheduler_up
{
	my ($database, $name) = @_;

	return wait_until($node, $database, 'SELECT scheduler_pid IS NOT NULL FROM jq.status', $name);
}

sub schedulers_of
{
	my ($database) = @_;

	return $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'jq scheduler' AND datname = '$database'");
}

# ---------------------------------------------------------------------
# Who is there
# ---------------------------------------------------------------------

wait_until($node, 'postgres',
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'jq launcher'",
	'the launcher runs');

# CREATE EXTENSION in several databases at once
my @databases = qw(one two three);
$node->safe_psql('postgres', "CREATE DATABASE $_") foreach @databases, 'none';
my @sessions = map { $node->background_psql($_) } @databases;
$_->query_safe('BEGIN; CREATE EXTENSION jq;') foreach @sessions;
$_->query_safe('COMMIT') foreach @sessions;
$_->quit foreach @sessions;
scheduler_up($_, "CREATE EXTENSION brings a scheduler up in $_") foreach @databases;
is(schedulers_of('none'), 0, 'no scheduler where there is no extension');
is( $node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'jq worker'"),
	0, 'no worker before there is a job');

foreach my $database (@databases)
{
	jq_handlers($node, $database);
	$node->safe_psql($database,
		"SELECT count(jq.dispatch('note', jsonb_build_object('from', '$database'))) FROM generate_series(1, 20)");
}
foreach my $database (@databases)
{
	wait_for_done($node, $database, 20, "jobs of $database run");
	is( $node->safe_psql($database,
			"SELECT count(*), count(DISTINCT job), bool_and(payload ->> 'from' = '$database' AND database = '$database') FROM done"),
		'20|20|t', "the jobs of $database ran in it");
}
is( $node->safe_psql('one', "SELECT DISTINCT backend_type, application_name FROM pg_stat_activity WHERE backend_type = 'jq worker' AND datname = 'one'"),
	'jq worker|jq worker', 'the worker can be recognized');
wait_until($node, 'one', 'SELECT workers BETWEEN 1 AND 2 AND idle = workers AND ready = 0 AND note IS NULL FROM jq.status',
	'jq.status shows all at rest');

# a role's jobs are run by a session of that role
$node->safe_psql('one', "CREATE ROLE alice LOGIN; SELECT jq.grant('alice', 'dispatch')");
$node->safe_psql('one', "SET ROLE alice; SELECT jq.dispatch('note')");
wait_for_done($node, 'one', 21);
is($node->safe_psql('one', "SELECT role FROM done WHERE role = 'alice'"), 'alice', "a role's job runs as that role");

# ---------------------------------------------------------------------
# Stop and start
# ---------------------------------------------------------------------

my @pids = jq_pids($node);
cmp_ok(scalar @pids, '>=', 7, 'launcher, schedulers and workers are there');
$node->stop('fast');
ok(wait_for_gone(@pids), 'all leave when the server stops');
$node->start;
scheduler_up($_, "the scheduler of $_ is back after the start") foreach @databases;
$node->safe_psql('two', "SELECT jq.dispatch('note')");
wait_for_done($node, 'two', 21, 'jobs run after the start');

# ---------------------------------------------------------------------
# A schema of the same name is not the extension
# ---------------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE impostor');
$node->safe_psql('impostor', 'CREATE SCHEMA jq AUTHORIZATION alice; SET ROLE alice; CREATE TABLE jq.jobs (what text)');
my $offset = log_size($node);
$node->restart;
scheduler_up('one');
is(schedulers_of('impostor'), 0, 'a schema called jq gets no scheduler');
my ($status, $stdout, $stderr) = $node->psql('impostor', 'CREATE EXTENSION jq');
isnt($status, 0, 'the extension is not created into a foreign schema that is in its way');
is(log_count($node, qr/jq (scheduler|worker) (?!57P01)\w+ (ERROR|FATAL)/, $offset), 0, 'no process stumbles over it');

# ---------------------------------------------------------------------
# DROP EXTENSION
# ---------------------------------------------------------------------

$node->safe_psql('three', "SELECT jq.dispatch('gate', '{\"gate\": 1}')");
my $gate = $node->background_psql('three');
$gate->query_safe('SELECT pg_advisory_lock(2)');
$node->safe_psql('three', "SELECT jq.dispatch('gate', '{\"gate\": 2}')");
wait_for_running($node, 'three', 1);

$node->safe_psql('three', "$limit BEGIN; DROP EXTENSION jq CASCADE; ROLLBACK");
wait_for_running($node, 'three', 1);
pass('DROP EXTENSION that is rolled back leaves the jobs, and they go on');
$gate->query_safe('SELECT pg_advisory_unlock(2)');
wait_for_empty($node, 'three');
is( $node->safe_psql('three', "SELECT attempt FROM done WHERE payload ->> 'gate' = '2'"),
	'1', 'the job that had to make way has spent no attempt');

$gate->query_safe('SELECT pg_advisory_lock(2)');
$node->safe_psql('three', "SELECT jq.dispatch('gate', '{\"gate\": 2}')");
wait_for_running($node, 'three', 1);
$node->safe_psql('three', "$limit DROP EXTENSION jq CASCADE");
wait_until($node, 'postgres',
	"SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type LIKE 'jq%' AND datname = 'three'",
	'DROP EXTENSION sends scheduler and busy workers away');
$gate->quit;

$node->safe_psql('postgres', "$limit ALTER DATABASE three RENAME TO third");
$node->safe_psql('third', 'DROP TABLE done; CREATE EXTENSION jq');
jq_handlers($node, 'third');
$node->safe_psql('third', "SELECT jq.dispatch('note')");
wait_for_done($node, 'third', 1, 'CREATE EXTENSION brings them back, without a restart');

# ---------------------------------------------------------------------
# CREATE and DROP EXTENSION in a loop, under load
# ---------------------------------------------------------------------

$node->safe_psql('none', q{
	CREATE TABLE stop ();
	CREATE TABLE ticks (n bigint GENERATED ALWAYS AS IDENTITY);
	CREATE FUNCTION tick(jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO public.ticks DEFAULT VALUES';
	CREATE FUNCTION nap(jsonb) RETURNS void LANGUAGE sql AS 'SELECT pg_sleep(30)';
	CREATE PROCEDURE load() LANGUAGE plpgsql AS $$
	BEGIN
		WHILE NOT EXISTS (SELECT FROM stop) LOOP
			BEGIN
				PERFORM jq.dispatch('tick') FROM generate_series(1, 3);
			EXCEPTION WHEN OTHERS THEN
				NULL;  -- the extension is not there, or goes
			END;
			COMMIT;
		END LOOP;
	END $$;
});
my @load = map { $node->background_psql('none', on_error_stop => 0) } 1 .. 2;
$_->query_until(qr/started/, "\\echo started\nCALL load();\n\\echo finished\n") foreach @load;

my $trouble = '';
my $retries = 0;
foreach my $round (1 .. 10)
{
	($status, $stdout, $stderr) = $node->psql('none', "$limit CREATE EXTENSION jq");
	$trouble .= "round $round, CREATE: $stderr\n" if $status != 0;
	$node->psql('none', q{
		SELECT jq.register('tick(jsonb)');
		SELECT jq.register('nap(jsonb)');
		SELECT jq.dispatch('nap')});
	# some rounds long enough for workers to be busy, some not
	wait_until($node, 'none', 'SELECT running >= 1 FROM jq.status') if $round % 3 == 0;
	foreach my $try (1 .. 5)
	{
		($status, $stdout, $stderr) = $node->psql('none', "$limit DROP EXTENSION jq");
		last if $status == 0 || $stderr !~ /deadlock detected/;
		$retries++;
	}
	$trouble .= "round $round, DROP: $stderr\n" if $status != 0;
}
is($trouble, '', 'CREATE and DROP EXTENSION under load neither hang nor fail');
note("$retries times DROP EXTENSION met a deadlock with a dispatching session");

$node->safe_psql('none', "CREATE EXTENSION jq; SELECT jq.register('tick(jsonb)')");
wait_until($node, 'none', 'SELECT count(*) > 0 FROM ticks', 'jobs run after all that');
$node->safe_psql('none', 'INSERT INTO stop DEFAULT VALUES');
$_->quit foreach @load;
wait_for_empty($node, 'none', 'all jobs are done');
no_crash($node, 'no crash in the loop');

# ---------------------------------------------------------------------
# Commands on databases
# ---------------------------------------------------------------------

# "one" has idle workers, "two" busy ones and jobs that wait behind them
$node->safe_psql('one', "SELECT jq.dispatch('note')");
wait_until($node, 'one', 'SELECT idle >= 1 FROM jq.status');
$node->safe_psql('two', q{
	TRUNCATE done;
	SELECT count(jq.dispatch('slow', '{"seconds": 600}')) FROM generate_series(1, 2);
	SELECT count(jq.dispatch('note')) FROM generate_series(1, 5)});
wait_for_running($node, 'two', 1);

foreach my $strategy ('wal_log', 'file_copy')
{
	($status, $stdout, $stderr) = $node->psql('postgres',
		"$limit CREATE DATABASE one_$strategy TEMPLATE one STRATEGY $strategy");
	is("$status $stderr", '0 ', "CREATE DATABASE from one with idle workers, strategy $strategy");
	wait_for_running($node, 'two', 1);
	($status, $stdout, $stderr) = $node->psql('postgres',
		"$limit CREATE DATABASE two_$strategy TEMPLATE two STRATEGY $strategy");
	is("$status $stderr", '0 ', "CREATE DATABASE from one with busy workers, strategy $strategy");
}

# copied jobs are held
foreach my $copy ('two_wal_log', 'two_file_copy')
{
	scheduler_up($copy, "$copy gets a scheduler, though nobody created the extension there");
	is( $node->safe_psql($copy, 'SELECT sum(held), sum(ready), sum(running) FROM jq.queue_stats'),
		'7|0|0', "the jobs of $copy are held");
	is($node->safe_psql($copy, 'SELECT count(*) FROM done'), '0', "none of them ran in $copy");
	$node->safe_psql($copy, "SELECT jq.dispatch('note')");
	wait_for_done($node, $copy, 1, "a job of $copy itself runs");
}
$node->wait_for_log(qr/7 jobs in database "two_wal_log" were not dispatched there and are held/, 0);
$node->safe_psql('two_wal_log', "UPDATE jq.jobs SET payload = '{\"seconds\": 0}' WHERE name = 'slow'");
is( $node->safe_psql('two_wal_log', 'SELECT sum(held), sum(ready), sum(running) FROM jq.queue_stats'),
	'7|0|0', 'a held job that is changed by hand stays held');
is($node->safe_psql('two_wal_log', 'SELECT jq.adopt()'), '7', 'jq.adopt() frees them');
wait_for_done($node, 'two_wal_log', 8, 'and they run');
is( $node->safe_psql('two_wal_log', 'SELECT count(*), count(DISTINCT job), max(attempt) FROM done'),
	'8|8|1', 'each of them once');

# rename
wait_for_running($node, 'two', 1);
($status, $stdout, $stderr) = $node->psql('postgres', "$limit ALTER DATABASE two RENAME TO second");
is("$status $stderr", '0 ', 'ALTER DATABASE RENAME with busy workers');
($status, $stdout, $stderr) = $node->psql('postgres', "$limit ALTER DATABASE one RENAME TO first");
is("$status $stderr", '0 ', 'ALTER DATABASE RENAME with idle workers');
$node->safe_psql('first', "TRUNCATE done; SELECT jq.dispatch('note')");
wait_for_done($node, 'first', 1, 'jobs of a renamed database run');
wait_for_running($node, 'second', 1);
is( $node->safe_psql('second', 'SELECT min(attempt), max(attempt) FROM jq.running'),
	'1|1', 'jobs that made way go on there, in their first attempt');

# closed to connections
($status, $stdout, $stderr) = $node->psql('postgres', "$limit ALTER DATABASE first ALLOW_CONNECTIONS false");
is("$status $stderr", '0 ', 'ALTER DATABASE ALLOW_CONNECTIONS false');
wait_until($node, 'postgres',
	"SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'first'", 'nobody stays in it');
$node->safe_psql('postgres', "$limit ALTER DATABASE first ALLOW_CONNECTIONS true");
scheduler_up('first', 'opened again, it gets its scheduler back');

# other databases come and go while workers are busy
$trouble = '';
foreach my $round (1 .. 10)
{
	($status, $stdout, $stderr) = $node->psql('postgres', 'CREATE DATABASE fleeting');
	$trouble .= "round $round: $stderr\n" if $status != 0;
	($status, $stdout, $stderr) = $node->psql('postgres', "$limit DROP DATABASE fleeting");
	$trouble .= "round $round: $stderr\n" if $status != 0;
}
is($trouble, '', 'CREATE and DROP DATABASE of others, ten times');

# drop
$node->safe_psql('first', "SELECT jq.dispatch('note')");
wait_until($node, 'first', 'SELECT idle >= 1 FROM jq.status');
($status, $stdout, $stderr) = $node->psql('postgres', "$limit DROP DATABASE first");
is("$status $stderr", '0 ', 'DROP DATABASE with idle workers');
wait_for_running($node, 'second', 1);
($status, $stdout, $stderr) = $node->psql('postgres', "$limit DROP DATABASE second");
is("$status $stderr", '0 ', 'DROP DATABASE with busy workers');

# a refused command disturbs nobody
$node->safe_psql('third', "SELECT jq.dispatch('slow', '{\"seconds\": 600}')");
wait_for_running($node, 'third', 1);
my $before = $node->safe_psql('third', 'SELECT pid FROM jq.running');
$node->psql('postgres', 'SET ROLE alice; DROP DATABASE third');
$node->psql('third', 'SET ROLE alice; DROP EXTENSION jq CASCADE');
is($node->safe_psql('third', 'SELECT pid FROM jq.running'), $before,
	'whoever may not drop a database or the extension interrupts no job');

# a scheduler that had to make way is not held to have failed
{
	local $ENV{JQ_TEST_TIMEOUT} = 5;
	my $turns = join('; ', ('CREATE EXTENSION jq', 'DROP EXTENSION jq') x 4, 'CREATE EXTENSION jq');

	$node->safe_psql('postgres', 'CREATE DATABASE quick');
	foreach my $round (1 .. 8)
	{
		$node->safe_psql('quick', $_) foreach split(/; /, $turns);
		wait_until($node, 'quick', 'SELECT scheduler_pid IS NOT NULL FROM jq.status',
			"the scheduler is back at once after CREATE and DROP in quick turn, round $round");
		$node->safe_psql('quick', 'DROP EXTENSION jq');
	}
}

no_crash($node);
$node->stop;
done_testing();
