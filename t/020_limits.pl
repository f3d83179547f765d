# Limits and groups with many workers, sessions that drain beside them, and
# processes that die: never above the limit, and nothing waits for ever.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);

my $jobs = $ENV{JQ_TEST_LONG} ? 10_000 : 2_000;
my $node = jq_server('main', 'jq.max_workers = 10', 'jq.workers = 8', 'fsync = off', 'max_connections = 40');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE span (name text, key text, job bigint, began timestamptz, ended timestamptz);
	CREATE FUNCTION act(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz := clock_timestamp();
	BEGIN
		IF random() < coalesce((payload ->> 'fails')::float8, 0) THEN
			RAISE 'as asked for';
		ELSIF random() < coalesce((payload ->> 'dies')::float8, 0) AND EXISTS (
			-- a worker: the sessions that drain are to come to their end
			SELECT FROM pg_stat_activity WHERE pid = pg_backend_pid() AND backend_type = 'jq worker')
		THEN
			PERFORM pg_terminate_backend(pg_backend_pid());
		END IF;
		PERFORM pg_sleep(random() * coalesce((payload ->> 'sleep')::float8, 0.004));
		INSERT INTO public.span VALUES (context.name, payload ->> 'k', context.id, began, clock_timestamp());
	END $$;
	-- most jobs of a key that were inside of their handlers at a time
	CREATE VIEW most AS
	SELECT m.name, m.key, max(m.depth) AS depth, count(*) / 2 AS jobs
	FROM (SELECT e.name, e.key, sum(e.step) OVER (PARTITION BY e.name, e.key ORDER BY e.at, e.step) AS depth
		  FROM (SELECT name, key, began AS at, 1 AS step FROM span UNION ALL SELECT name, key, ended, -1 FROM span) AS e) AS m
	GROUP BY m.name, m.key;
	SELECT jq.register('act(jsonb, jq.context)', 'overlap', overlap_key => '$.k', max_attempts => 50, backoff => '{0 s}');
	SELECT jq.register('act(jsonb, jq.context)', 'three', max_running => 3, running_key => '$.k', max_attempts => 50, backoff => '{0 s}');
	SELECT jq.register('act(jsonb, jq.context)', 'group', group_key => '$.k', max_attempts => 50, backoff => '{0 s}');
	SELECT jq.register('act(jsonb, jq.context)', 'queue', queue => 'narrow', max_attempts => 50, backoff => '{0 s}');
	SELECT jq.register('act(jsonb, jq.context)', 'free');
	SELECT jq.set_queue('narrow', 2)});

sub dispatch
{
	my ($name, $count, $payload) = @_;

	$node->safe_psql('d', "SELECT count(jq.dispatch('$name', jsonb_build_object('k', i % 5) || '$payload')) FROM generate_series(1, $count) AS i");
	return;
}

sub nothing_left
{
	my ($message) = @_;

	is( $node->safe_psql('d', q{
			SELECT (SELECT count(*) FROM jq.jobs), (SELECT count(*) FROM jq.held), (SELECT count(*) FROM jq.holders),
				(SELECT count(*) FROM jq.group_members), (SELECT count(*) FROM pg_locks WHERE locktype = 'userlock')}),
		'0|0|0|0|0', $message);
	return;
}

# ---------------------------------------------------------------------
# All at once
# ---------------------------------------------------------------------

my @drains = map { $node->background_psql('d', on_error_stop => 0) } 1 .. 2;
dispatch($_, $jobs / 4, '{"fails": 0.02, "dies": 0.002}') foreach qw(overlap three group queue);
foreach (1 .. 5)
{
	$_->query("SET client_min_messages = error; \nCALL jq.drain(max_jobs => 50);") foreach @drains;
}
wait_for_empty($node, 'd', 'all jobs end');
$_->quit foreach @drains;
is( $node->safe_psql('d', 'SELECT name, count(*), count(DISTINCT job) FROM span GROUP BY name ORDER BY name'),
	join("\n", map { "$_|" . $jobs / 4 . '|' . $jobs / 4 } qw(group overlap queue three)), 'each once');
is( $node->safe_psql('d', q{SELECT name, max(depth) FROM most WHERE name IN ('overlap', 'group') GROUP BY name ORDER BY name}),
	"group|1\noverlap|1", 'one at a time for each key and group');
is($node->safe_psql('d', q{SELECT max(depth) FROM most WHERE name = 'three'}), '3', 'three at a time, and no more');
is( $node->safe_psql('d', q{
		SELECT max(depth) FROM (SELECT sum(step) OVER (ORDER BY at, step) AS depth
			FROM (SELECT began AS at, 1 AS step FROM span WHERE name = 'queue' UNION ALL SELECT ended, -1 FROM span WHERE name = 'queue') AS e) AS m}),
	'2', 'two at a time in the queue');
is( $node->safe_psql('d', q{SELECT count(*) FROM (SELECT job < lag(job) OVER (PARTITION BY key ORDER BY began) AS wrong FROM span WHERE name = 'group') AS s WHERE wrong}),
	'0', 'groups keep the order of their jobs');
nothing_left('nothing is left behind');

# ---------------------------------------------------------------------
# A key is free at once, however its job ended
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	SELECT jq.register('act(jsonb, jq.context)', 'overlap', overlap_key => '$.k', max_attempts => 1, timeout => '500 ms');
	SELECT jq.register('act(jsonb, jq.context)', 'group', group_key => '$.k', max_attempts => 1, timeout => '500 ms')});
foreach my $name (qw(overlap group))
{
	foreach my $how ('timeout', 'cancel', 'terminate', 'itself')
	{
		$node->safe_psql('d', 'TRUNCATE span; SELECT jq.flush()');
		my $first = $node->safe_psql('d', $how eq 'itself' ?
			qq{SELECT jq.dispatch('$name', '{"k": 1, "dies": 1}')} :
			qq{SELECT jq.dispatch('$name', '{"k": 1, "sleep": 1000}', priority => -1)});
		wait_for_running($node, 'd', 1) if $how ne 'itself';
		my $second = $node->safe_psql('d', qq{SELECT jq.dispatch('$name', '{"k": 1, "sleep": 0}')});
		my $began = time;

		$node->safe_psql('d', "SELECT jq.cancel($first)") if $how eq 'cancel';
		$node->safe_psql('d', "SELECT pg_terminate_backend(pid) FROM jq.running WHERE id = $first") if $how eq 'terminate';
		wait_until($node, 'd', 'SELECT count(*) = 1 FROM span');
		cmp_ok(time - $began, '<', 5, "$name: the next job goes on after $how");
		wait_for_empty($node, 'd');
	}
}
nothing_left('nothing is left behind of these');

# the server crashes while jobs wait
$node->safe_psql('d', q{TRUNCATE span; SELECT jq.register('act(jsonb, jq.context)', 'overlap', overlap_key => '$.k', max_attempts => 5, backoff => '{0 s}')});
dispatch('overlap', 200, '{"k": 1, "sleep": 0.02}');
wait_until($node, 'd', 'SELECT count(*) > 50 FROM jq.held');
$node->stop('immediate');
$node->start;
wait_for_empty($node, 'd', 'after a crash all go on');
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job), max(depth) FROM span, most'), '200|200|1', 'one at a time');
nothing_left('nothing is left behind of a crash');

# ---------------------------------------------------------------------
# Rates
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	TRUNCATE span;
	CREATE TABLE dispatched (name text, began timestamptz);
	SELECT jq.register('act(jsonb, jq.context)', 'window', rate_max => 20, rate_per => '1 s');
	SELECT jq.register('act(jsonb, jq.context)', 'bucket', rate_max => 40, rate_per => '1 s', rate_burst => 10, rate_key => '$.none')});
foreach my $name (qw(window bucket))
{
	$node->safe_psql('d', "INSERT INTO dispatched VALUES ('$name', clock_timestamp())");
	dispatch($name, 70, '{"sleep": 0, "none": 0}');
}
wait_for_empty($node, 'd', 'what waits for a rate goes on in its time');
# By any time no more have started than the windows, or the bucket, have given
# until then; a start that is late does not matter.
is( $node->safe_psql('d', q{
		SELECT count(*) FROM (SELECT row_number() OVER (ORDER BY began) AS n, date_trunc('second', began) - date_trunc('second', dispatched_at) AS past
			FROM span CROSS JOIN (SELECT min(began) AS dispatched_at FROM dispatched) AS d WHERE name = 'window') AS s
		WHERE n > 20 * (extract(epoch FROM past) + 1)}),
	'0', 'never more than so many in a window');
is( $node->safe_psql('d', q{
		SELECT count(*) FROM (SELECT row_number() OVER (ORDER BY s.began) AS n, s.began - d.began AS past
			FROM span AS s CROSS JOIN dispatched AS d WHERE s.name = 'bucket' AND d.name = 'bucket') AS s
		WHERE n > 10 + 40 * extract(epoch FROM past) + 1}),
	'0', 'nor more from a bucket than it had and got');
is( $node->safe_psql('d', q{SELECT max(began) - min(began) < interval '10 s' FROM span WHERE name IN ('window', 'bucket')}),
	't', 'and they are used up');
nothing_left('nothing is left behind of rates');

# ---------------------------------------------------------------------
# Limits that change
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	TRUNCATE span;
	SELECT jq.register('act(jsonb, jq.context)', 'changes', max_running => 1, running_key => '$.k')});
$node->safe_psql('d', q{SELECT jq.dispatch('changes', '{"k": "x", "sleep": 3}') FROM generate_series(1, 8)});
wait_until($node, 'd', 'SELECT count(*) = 7 FROM jq.held');
my $began = time;
$node->safe_psql('d', q{SELECT jq.set_limit('changes', 'x', max_running => 8)});
wait_until($node, 'd', 'SELECT count(*) >= 6 FROM jq.running');
cmp_ok(time - $began, '<', 1.5, 'a limit that is raised lets jobs go on at once');
wait_for_empty($node, 'd');
$node->safe_psql('d', q{SELECT jq.set_queue('shut', 0); SELECT jq.dispatch('free', queue => 'shut')});
wait_until($node, 'd', 'SELECT count(*) = 1 FROM jq.held');
$node->safe_psql('d', q{SELECT jq.set_queue('shut')});
wait_for_empty($node, 'd', 'so does a queue that is opened');

# ---------------------------------------------------------------------
# Middleware
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	TRUNCATE span;
	CREATE FUNCTION ask(payload jsonb, context jq.context) RETURNS interval LANGUAGE plpgsql AS $$
	BEGIN
		CASE payload ->> 'ask'
			WHEN 'wait' THEN RETURN CASE WHEN clock_timestamp() < context.dispatched_at + interval '300 ms' THEN interval '200 ms' END;
			WHEN 'raise' THEN
				IF clock_timestamp() < context.dispatched_at + interval '500 ms' THEN RAISE 'not now'; END IF;
			WHEN 'skip' THEN PERFORM jq.skip();
			WHEN 'fail' THEN PERFORM jq.fail('never');
			ELSE NULL;
		END CASE;
		RETURN NULL;
	END $$;
	SELECT jq.register('act(jsonb, jq.context)', 'asks', middleware => ARRAY['ask(jsonb, jq.context)'::regprocedure], max_attempts => 1);
	SELECT jq.flush();
	SELECT jq.dispatch('asks', jsonb_build_object('ask', a, 'k', a)) FROM unnest('{go,wait,raise,skip,fail}'::text[]) AS a});
wait_for_empty($node, 'd', 'jobs end whatever middleware says');
is($node->safe_psql('d', q{SELECT string_agg(key, ' ' ORDER BY key) FROM span}), 'go raise wait', 'those run that it let');
is($node->safe_psql('d', 'SELECT error, sqlstate FROM jq.failed_jobs'), 'never|JQ001', 'that one fails that it failed');

no_crash($node);
$node->stop;
done_testing();
