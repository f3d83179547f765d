# Handlers that hang, in whatever way, end when their time is up, and let the
# quick ones through; attempts are honoured whatever they fail of; thousands of
# failures leave nothing behind in a worker.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = jq_server('main', 'jq.workers = 4', "jq.cancel_grace = '500 ms'", 'fsync = off', 'max_parallel_maintenance_workers = 2');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE many AS SELECT md5(i::text) AS t FROM generate_series(1, 200000) AS i;
	CREATE TABLE one (n integer PRIMARY KEY);
	INSERT INTO one VALUES (1);
	CREATE FUNCTION run(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.done (job, attempt, queue) VALUES (context.id, context.attempt, context.queue);
		EXECUTE payload #>> '{}';
	END $$;
	SELECT jq.register('run(jsonb, jq.context)', max_attempts => 1, timeout => '1 s')});

# ---------------------------------------------------------------------
# Ways to hang
# ---------------------------------------------------------------------

my %hangs = (
	sleep => 'SELECT pg_sleep(60)',
	row => 'UPDATE one SET n = 2',
	table => 'LOCK TABLE many',
	advisory => 'SELECT pg_advisory_xact_lock(1)',
	loop => 'DO $do$BEGIN LOOP NULL; END LOOP; END$do$',
	query => 'SELECT count(*) FROM generate_series(1, 100000) AS a, generate_series(1, 100000) AS b WHERE a = b + 1 OR b = a + 1',
	sort => 'SELECT count(*) FROM (SELECT a.t FROM many AS a, generate_series(1, 200) ORDER BY md5(a.t)) AS s',
	index => 'CREATE INDEX ON many ((md5(md5(md5(md5(t))) || repeat(t, 200))))',
	nested => 'DO $do$BEGIN BEGIN BEGIN BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN division_by_zero THEN NULL; END; EXCEPTION WHEN division_by_zero THEN NULL; END; EXCEPTION WHEN division_by_zero THEN NULL; END; END$do$',
	deaf => 'DO $do$BEGIN LOOP BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; END$do$');
my $gate = $node->background_psql('d');
$gate->query_safe('BEGIN; UPDATE one SET n = n; LOCK TABLE many IN ROW SHARE MODE; SELECT pg_advisory_xact_lock(1)');
# one statement, so that none is done before all are there
$node->safe_psql('d', "SELECT jq.pause();\n"
	  . join('', map { "SELECT jq.dispatch('run', to_jsonb(\$jq\$$hangs{$_}\$jq\$::text), queue => '$_');\n" } sort keys %hangs)
	  . "SELECT count(jq.dispatch('note', queue => 'quick', priority => 1)) FROM generate_series(1, 100);\nSELECT jq.resume()");
my $start = time();
wait_until($node, 'd', "SELECT count(*) = 100 FROM done WHERE queue = 'quick'", 'quick jobs behind those that hang get through');
wait_for_empty($node, 'd', 'all end');
# three rounds of 1 s with 4 workers, and the grace
cmp_ok(time() - $start, '<', 30, 'soon');
foreach my $how (sort keys %hangs)
{
	my $error = $how eq 'deaf'
	  ? qr/^1\|57014\|handler "run" did not end when its time was up, so worker process with PID \d+ was ended$/
	  : qr/^1\|57014\|handler "run" timed out after 1000 ms$/;

	like($node->safe_psql('d', "SELECT attempts, sqlstate, error FROM jq.failed_jobs WHERE queue = '$how'"), $error, "$how: timed out");
}
is($node->safe_psql('d', "SELECT count(*) FROM done WHERE queue <> 'quick'"), '0', 'without an effect');
$gate->quit;

# ---------------------------------------------------------------------
# Attempts are honoured whatever they fail of
# ---------------------------------------------------------------------

my %fails = (
	'error' => 'SELECT 1 / 0',
	'timeout' => 'SELECT pg_sleep(60)',
	'ended' => 'DO $do$BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); END$do$',
	'syntax' => 'no statement',
	'cancelled' => 'DO $do$BEGIN PERFORM pg_cancel_backend(pg_backend_pid()); PERFORM pg_sleep(60); END$do$',
	'too much' => q{SELECT repeat('x', 1000000000) || repeat('x', 1000000000)},
	'too deep' => 'WITH RECURSIVE f AS (SELECT 1) SELECT repeat(\'(\', 1000000)::point',
	'not in a transaction' => 'VACUUM many',
	'concurrently' => 'CREATE INDEX CONCURRENTLY ON many (t)',
	'database' => 'CREATE DATABASE other',
	'discard' => 'DISCARD ALL',
	'system' => 'ALTER SYSTEM SET work_mem = 1000',
	'commit' => 'COMMIT');
$node->safe_psql('d', q{
	CREATE SEQUENCE starts;
	CREATE TABLE started (queue text, n bigint);
	CREATE FUNCTION counts(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM nextval('public."starts ' || context.queue || '"');
		EXECUTE payload #>> '{}';
	END $$;
	SELECT jq.register('counts(jsonb, jq.context)', timeout => '200 ms', backoff => '{0 s}');
	TRUNCATE jq.failed_jobs});
foreach my $how (sort keys %fails)
{
	$node->safe_psql('d', "CREATE SEQUENCE \"starts $how\"; SELECT jq.dispatch('counts', to_jsonb(\$jq\$$fails{$how}\$jq\$::text), queue => '$how', max_attempts => 2)");
}
wait_for_empty($node, 'd', 'all come to their end');
foreach my $how (sort keys %fails)
{
	is($node->safe_psql('d', "SELECT last_value, attempts FROM jq.failed_jobs, \"starts $how\" WHERE queue = '$how'"), '2|2', "$how: as many starts as attempts");
}
# an index built by parallel workers is no trouble
my $id = $node->safe_psql('d', q{SELECT jq.register('run(jsonb, jq.context)'); SELECT jq.dispatch('run', '"CREATE INDEX by_t ON many (t)"')});
$id =~ s/.*\n//;
is($node->safe_psql('d', "CALL jq.wait_for($id)"), 'done', 'an index is built');

# waits that grow have an end
$node->safe_psql('d', q{SELECT jq.pause();
	SELECT jq.dispatch('counts', '"SELECT 1 / 0"', queue => 'error', max_attempts => 2147483647) FROM generate_series(1, 3);
	UPDATE jq.jobs SET attempts = n FROM (SELECT id AS i, (ARRAY[1000, 1000000, 2147483645])[row_number() OVER (ORDER BY id)] AS n FROM jq.jobs) AS j WHERE id = i;
	SELECT jq.register('counts(jsonb, jq.context)'), jq.resume()});
wait_until($node, 'd', 'SELECT count(*) = 3 FROM jq.jobs WHERE available_at > clock_timestamp() + interval \'1 hour\'', 'jobs with many attempts wait');
is($node->safe_psql('d', "SELECT bool_and(available_at < clock_timestamp() + interval '1 day 1 min') FROM jq.jobs"), 't', 'a day at most');
$node->safe_psql('d', "SELECT jq.cancel(id) FROM jq.jobs");

# ---------------------------------------------------------------------
# Nothing is left behind
# ---------------------------------------------------------------------

$node->append_conf('postgresql.conf', "log_min_messages = log\njq.workers = 1\nlog_error_verbosity = terse");
$node->safe_psql('d', q{SELECT jq.register('run(jsonb, jq.context)', max_attempts => 1, timeout => '1 ms'); TRUNCATE jq.failed_jobs});
$node->restart;
wait_until($node, 'd', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');

sub spoil
{
	my ($rounds) = @_;

	$node->safe_psql('d', qq{
		SELECT count(jq.dispatch('note')), count(jq.dispatch('run', '"SELECT pg_sleep(1)"')), count(jq.dispatch('run', '"SELECT 1/0"')),
			count(jq.dispatch('run', '"SELECT jq.release(''1 ms'')"')), count(jq.dispatch('run', '"SELECT jq.skip()"'))
		FROM generate_series(1, $rounds)});
	wait_until($node, 'd', "SELECT count(*) = 0 FROM jq.jobs WHERE payload <> '\"SELECT jq.release(''1 ms'')\"'");
	$node->safe_psql('d', 'SELECT jq.cancel(id) FROM jq.jobs');
	wait_for_empty($node, 'd');
	$node->safe_psql('d', 'TRUNCATE done, jq.failed_jobs; SELECT pg_sleep(0.2)');

	my ($pid) = jq_pids($node, 'worker');
	my $offset = log_size($node);
	$node->safe_psql('d', "SELECT pg_log_backend_memory_contexts($pid)");
	$node->safe_psql('d', "SELECT jq.dispatch('note')");    # it says so at its next interrupt
	$node->wait_for_log(qr/Grand total: (\d+) bytes/, $offset);
	my ($bytes) = log_since($node, $offset) =~ /Grand total: (\d+) bytes/;
	my @files = glob("/proc/$pid/fd/*");
	return ($pid, $bytes, scalar @files);
}

my ($pid, $bytes, $files) = spoil(300);
my ($pid2, $bytes2, $files2) = spoil($ENV{JQ_TEST_LONG} ? 20000 : 1500);
is($pid2, $pid, 'the worker is the same after thousands of failures');
cmp_ok($bytes2, '<', $bytes + 300_000, 'its memory has not grown');
cmp_ok($files2, '<=', $files + 3, 'nor its open files');
note("$bytes and $bytes2 bytes, $files and $files2 files");

no_crash($node);
$node->stop;
done_testing();
