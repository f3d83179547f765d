# Many workers, many dispatchers: every job runs exactly once, and in order
# where there is one worker.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $factor = $ENV{JQ_TEST_LONG} ? 20 : 1;
my $node = jq_server('main', 'jq.workers = 8', 'jq.max_workers = 8');
jq_database($node, 'd');

# One statement that shows all that could be wrong: jobs that never ran, ran
# twice to the end, or are left.
sub exactly_once
{
	my ($jobs, $name) = @_;

	wait_for_empty($node, 'd', "$name: all jobs end");
	is( $node->safe_psql('d', 'SELECT count(*), count(DISTINCT job) FROM done'),
		"$jobs|$jobs", "$name: each ran exactly once");
	is($node->safe_psql('d', 'SELECT count(*) FROM jq.failed_jobs'), '0', "$name: none failed");
	$node->safe_psql('d', 'DELETE FROM jq.jobs; TRUNCATE done');
	return;
}

# ---------------------------------------------------------------------
# A backlog brings all workers up
# ---------------------------------------------------------------------

$node->safe_psql('d', q{SELECT count(jq.dispatch('gate', '{"gate": 1}')) FROM generate_series(1, 8)});
my $gate = $node->background_psql('d');
$gate->query_safe('SELECT pg_advisory_lock(2)');
wait_for_empty($node, 'd');
$node->safe_psql('d', q{TRUNCATE done; SELECT count(jq.dispatch('gate', '{"gate": 2}')) FROM generate_series(1, 8)});
{
	# nothing else is dispatched that could call somebody, and the full look at
	# the table, once a minute, is too far away to be what helps
	local $ENV{JQ_TEST_TIMEOUT} = 15;
	wait_until($node, 'd', 'SELECT count(*) = 8 FROM jq.running', 'as many workers start as there are due jobs');
}
$gate->query_safe('SELECT pg_advisory_unlock(2)');
exactly_once(8, 'gated');

# ---------------------------------------------------------------------
# Dispatchers and workers at full speed
# ---------------------------------------------------------------------

sub pgbench_script
{
	my ($name, $sql) = @_;
	my $file = $node->basedir . "/$name.sql";

	open(my $fh, '>', $file) or die "$file: $!";
	print $fh $sql;
	close($fh);
	return $file;
}

sub dispatchers
{
	my ($clients, $transactions, $file) = @_;

	$node->command_ok(
		[ 'pgbench', '-n', '-c', $clients, '-j', 2, '-t', $transactions, '-f', $file, '-p', $node->port, '-h', $node->host, 'd' ],
		'dispatchers run');
	return;
}

dispatchers(8, 250 * $factor, pgbench_script('single', "SELECT jq.dispatch('note');\n"));
exactly_once(2000 * $factor, 'single dispatches');

dispatchers(4, 25 * $factor, pgbench_script('bulk',
	"SELECT count(jq.dispatch('note', priority => i % 3)) FROM generate_series(1, 20) AS i;\n"));
exactly_once(2000 * $factor, 'bulk dispatches');

# transactions that overlap, so that jobs become visible out of order, and
# some that roll back
dispatchers(8, 50 * $factor, pgbench_script('overlap', q{
\set keep random(0, 3)
BEGIN;
SELECT count(jq.dispatch('note')) FROM generate_series(1, 3);
SAVEPOINT s;
SELECT jq.dispatch('note', '{"lost": true}');
\sleep 3 ms
\if :keep
ROLLBACK TO s;
SELECT jq.dispatch('note', delay => '50 ms');
COMMIT;
\else
ROLLBACK;
\endif
INSERT INTO kept SELECT 4 WHERE :keep > 0;
})) if $node->safe_psql('d', 'CREATE TABLE kept (n integer)') eq '';
wait_for_empty($node, 'd');
is($node->safe_psql('d', "SELECT count(*) FROM done WHERE payload ? 'lost'"), '0', 'no rolled-back job ran');
exactly_once($node->safe_psql('d', 'SELECT sum(n) FROM kept'), 'overlapping dispatches');

# ---------------------------------------------------------------------
# With failures
# ---------------------------------------------------------------------

$node->safe_psql('d', 'ALTER SYSTEM SET log_min_messages = fatal');    # 10 % of thousands of errors
$node->reload;
dispatchers(4, 500 * $factor, pgbench_script('shaky', q{
\set n random(1, 10)
SELECT jq.dispatch('shaky', jsonb_build_object('failures', (:n = 1)::integer));
}));
exactly_once(2000 * $factor, 'with failing first attempts');
$node->safe_psql('d', 'ALTER SYSTEM RESET log_min_messages');
$node->reload;

# ---------------------------------------------------------------------
# Many queues and priorities
# ---------------------------------------------------------------------

dispatchers(4, 500 * $factor, pgbench_script('queues', q{
\set q random(1, 200)
\set p random(-2, 2)
SELECT jq.dispatch('note', queue => 'queue ' || :q, priority => :p);
}));
exactly_once(2000 * $factor, '200 queues, 5 priorities');

# ---------------------------------------------------------------------
# Several roles beside each other, more than there are workers
# ---------------------------------------------------------------------

$node->safe_psql('d', join('', map { "CREATE ROLE r$_ LOGIN; SELECT jq.grant('r$_', 'dispatch');" } 1 .. 12));
$node->safe_psql('d', join('', map { "SET ROLE r$_; SELECT count(jq.dispatch('note')) FROM generate_series(1, 20); RESET ROLE;" } 1 .. 12));
wait_for_empty($node, 'd');
is( $node->safe_psql('d', 'SELECT count(*), min(n), max(n) FROM (SELECT role, count(*) AS n FROM done GROUP BY role) AS r'),
	'12|20|20', 'each role has its jobs run');
exactly_once(240, '12 roles');

no_crash($node);
$node->stop;

# ---------------------------------------------------------------------
# Order
# ---------------------------------------------------------------------

$node = jq_server('order', 'jq.workers = 1', 'jq.enabled = off');
jq_database($node, 'd', 'listed');
$node->safe_psql('postgres', "ALTER DATABASE listed SET jq.queues = 'urgent, normal'");
foreach my $database ('d', 'listed')
{
	$node->safe_psql($database, q{
		CREATE TABLE planned (job bigint, queue text, priority integer, due timestamptz);
		INSERT INTO planned
		SELECT jq.dispatch('note', queue => q, priority => p, run_at => t), q, p, t
		FROM generate_series(1, 300) AS i,
			LATERAL (SELECT (ARRAY['normal', 'urgent', 'never'])[1 + i % 3]) AS a (q),
			LATERAL (SELECT i % 5 - 2) AS b (p),
			LATERAL (SELECT '2020-01-01'::timestamptz + (i % 7) * interval '1 minute') AS c (t)
		ORDER BY md5(i::text)});
}
$node->safe_psql('postgres', 'ALTER SYSTEM SET jq.enabled = on');
$node->reload;
wait_for_done($node, 'd', 300);
is( $node->safe_psql('d', q{
		SELECT array_agg(job ORDER BY n) = (SELECT array_agg(job ORDER BY priority,
			-- a job in the past is due when it is dispatched
			job) FROM planned)
		FROM done}),
	't', 'order of priority, due time and id, over all queues');
wait_for_done($node, 'listed', 200);
is( $node->safe_psql('listed', q{
		SELECT array_agg(job ORDER BY n) = (SELECT array_agg(job ORDER BY queue = 'normal', priority, job)
			FROM planned WHERE queue <> 'never')
		FROM done}),
	't', 'with jq.queues strict order of these queues, then priority, due time and id');
wait_until($node, 'listed', 'SELECT idle = workers FROM jq.status');
is( $node->safe_psql('listed', 'SELECT string_agg(DISTINCT queue, $$,$$), count(*) FROM jq.jobs'),
	'never|100', 'queues that are not listed wait');

# due later but sooner than others that were dispatched before
$node->safe_psql('postgres', 'ALTER SYSTEM SET jq.enabled = off');
$node->reload;
wait_until($node, 'd', 'SELECT scheduler_pid IS NULL AND workers = 0 FROM jq.status');
$node->safe_psql('d', q{
	TRUNCATE done, planned;
	INSERT INTO planned
	SELECT jq.dispatch('note', delay => d), NULL, NULL, clock_timestamp() + d
	FROM (SELECT (i * 7 % 11) * interval '20 ms' FROM generate_series(1, 11) AS i) AS x (d)});
wait_until($node, 'd', 'SELECT max(due) < clock_timestamp() FROM planned');
$node->safe_psql('postgres', 'ALTER SYSTEM SET jq.enabled = on');
$node->reload;
wait_for_done($node, 'd', 11);
is( $node->safe_psql('d', 'SELECT array_agg(job ORDER BY n) = (SELECT array_agg(job ORDER BY due) FROM planned) FROM done'),
	't', 'delayed jobs run in the order of their due times');

no_crash($node);
$node->stop;
done_testing();
