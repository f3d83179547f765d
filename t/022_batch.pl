# Batches whose jobs end at the same moment, in every way there is, and while
# workers and the server die: each job counts once, each callback comes once.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $long = $ENV{JQ_TEST_LONG};
my $node = jq_server('main', 'jq.max_workers = 12', 'jq.workers = 8', 'fsync = off', 'max_connections = 60');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE called (batch bigint, label text);
	CREATE FUNCTION member(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		what text := payload ->> 'do';
	BEGIN
		IF payload ? 'until' THEN
			PERFORM pg_sleep(extract(epoch FROM (payload ->> 'until')::timestamptz - clock_timestamp()));
		END IF;
		IF what = 'fail' OR (what = 'once' AND context.attempt = 1) THEN
			RAISE 'as asked for';
		ELSIF what = 'skip' THEN
			PERFORM jq.skip();
		ELSIF what = 'sleep' THEN
			PERFORM pg_sleep(60);
		ELSIF what = 'die' THEN
			PERFORM pg_terminate_backend(pg_backend_pid());
		ELSIF what = 'call' THEN
			INSERT INTO public.called VALUES (context.batch_id, payload ->> 'label');
			RETURN;
		ELSIF what = 'add' THEN
			PERFORM jq.add_to_batch(context.batch_id, ARRAY[jq.job('member'), jq.job('member', '{"do": "once"}')]);
		END IF;
		INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
	END $$;
	CREATE FUNCTION gone(payload jsonb) RETURNS void LANGUAGE sql AS 'SELECT';
	CREATE FUNCTION call(label text) RETURNS jq.job_spec LANGUAGE sql
	AS $$SELECT jq.job('member', jsonb_build_object('do', 'call', 'label', label))$$;
	CREATE VIEW calls AS
	SELECT b.id, coalesce(string_agg(c.label, ' ' ORDER BY c.label), '') AS calls
	FROM jq.batches AS b LEFT JOIN called AS c ON c.batch = b.id GROUP BY b.id;
	SELECT jq.register('member(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}', timeout => '1 s', retry_for => NULL);
	SELECT jq.register('gone(jsonb)', max_attempts => 1);
	SELECT jq.register('member(jsonb, jq.context)', 'late', expires => '1 ms')});

sub settled
{
	my ($message) = @_;

	wait_until($node, 'd', 'SELECT NOT EXISTS (SELECT FROM jq.jobs) AND NOT EXISTS (SELECT FROM jq.batches WHERE finished_at IS NULL)');
	is( $node->safe_psql('d', 'SELECT count(*) FROM jq.batch_status WHERE pending <> 0 OR failed < 0 OR cancelled < 0'),
		'0', $message);
	return;
}

# ---------------------------------------------------------------------
# At the same moment
# ---------------------------------------------------------------------

my $rounds = $long ? 100 : 8;
foreach my $round (1 .. $rounds)
{
	my $failing = $round % 2 ? "CASE WHEN n % 10 = 0 THEN 'fail' END" : 'NULL';

	$node->safe_psql('d', qq{
		SELECT jq.dispatch_batch((SELECT array_agg(jq.job('member', jsonb_build_object('do', $failing, 'until', clock_timestamp() + interval '150 ms'), max_attempts => 1)) FROM generate_series(1, 100) AS n),
			'moment', call('then'), call('catch'), call('finally'), true)});
}
settled('jobs that end at the same moment are all counted');
is( $node->safe_psql('d', 'SELECT calls, count(*) FROM calls GROUP BY calls ORDER BY calls'),
	'catch finally|' . $rounds / 2 . "\nfinally then|" . $rounds / 2, 'each callback comes once');
is( $node->safe_psql('d', 'SELECT DISTINCT total, failed, cancelled FROM jq.batch_status ORDER BY failed'),
	"100|0|0\n100|10|0", 'and the numbers are exact');
$node->safe_psql('d', 'TRUNCATE done, called, jq.batches, jq.batch_counts; SELECT jq.flush()');

# ---------------------------------------------------------------------
# In every way
# ---------------------------------------------------------------------

foreach my $allow ('true', 'false')
{
	$node->safe_psql('d', qq{
		SELECT jq.open_batch('ways', call('then'), call('catch'), call('finally'), $allow)});
	my $batch = $node->safe_psql('d', 'SELECT max(id) FROM jq.batches');
	my $cancelled = $node->safe_psql('d', qq{
		SELECT jq.dispatch('member', delay => '1 h', batch_id => $batch)});

	$node->safe_psql('d', qq{
		SELECT jq.dispatch('member', jsonb_build_object('do', what), batch_id => $batch)
		FROM unnest('{ok,once,skip,add,die}'::text[]) AS what;
		SELECT jq.dispatch('late', batch_id => $batch, delay => '-1 h', unique_key => 'late')});
	wait_until($node, 'd', "SELECT count(*) = 0 FROM jq.jobs WHERE id <> $cancelled");
	$node->safe_psql('d', qq{
		SELECT jq.dispatch('member', jsonb_build_object('do', what), batch_id => $batch)
		FROM unnest('{fail,sleep}'::text[]) AS what});
	wait_until($node, 'd', "SELECT count(*) = 0 FROM jq.jobs WHERE id <> $cancelled");
	$node->safe_psql('d', qq{
		SELECT jq.cancel($cancelled);
		SELECT jq.close_batch($batch)});
	settled("jobs that end in every way are counted, allow_failures = $allow");
	is($node->safe_psql('d', qq{
			SELECT total, total - failed - cancelled - (SELECT count(DISTINCT job) FROM done) AS skipped FROM jq.batch_status WHERE id = $batch}),
		'11|1', 'none twice');
	is($node->safe_psql('d', "SELECT calls FROM calls WHERE id = $batch"), 'catch finally', 'with one catch and one finally');
	$node->safe_psql('d', 'TRUNCATE done');
}

# ---------------------------------------------------------------------
# While processes die
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	TRUNCATE done, called, jq.batches, jq.batch_counts;
	SELECT jq.flush();
	CREATE FUNCTION work(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.done (job, attempt, payload) VALUES (context.id, context.attempt, payload);
		PERFORM pg_sleep(random() * 0.03);
	END $$;
	SELECT jq.register('work(jsonb, jq.context)', max_attempts => 50, backoff => '{0 s}', unique_key => '$.n', group_key => '$.g', max_running => 5)});
my $batches = $long ? 200 : 20;
foreach my $how ('KILL', 'TERM', 'immediate', 'KILL')
{
	$node->safe_psql('d', qq{
		SELECT count(jq.dispatch_batch((SELECT array_agg(jq.chain(jq.job('work', jsonb_build_object('n', concat(i, random()), 'g', n % 7)), jq.job('work', jsonb_build_object('n', concat(i, random())))))
				FROM generate_series(1, 20) AS n), 'die', call('then'), call('catch'), call('finally')))
		FROM generate_series(1, $batches / 4) AS i});
	if ($how eq 'immediate')
	{
		usleep(100_000);
		$node->stop('immediate');
		$node->start;
	}
	else
	{
		wait_until($node, 'd', 'SELECT count(*) > 0 FROM jq.running');
		my ($pid) = jq_pids($node, 'worker');
		my $offset = log_size($node);

		kill($how, $pid);
		$node->wait_for_log($how eq 'KILL' ? qr/all server processes terminated; reinitializing/ : qr/terminating background worker "jq worker/, $offset);
		$node->poll_query_until('d', 'SELECT true');
	}
}
settled('batches end though processes die');
my $jobs = 40 * $batches;
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job) FROM done WHERE payload IS NOT NULL'), "$jobs|$jobs", 'each job had its effect once');
is($node->safe_psql('d', 'SELECT DISTINCT calls, total, failed, cancelled, state FROM calls JOIN jq.batch_status USING (id)'), 'finally then|40|0|0|finished', 'each batch came to a good end, once');
is( $node->safe_psql('d', q{
		SELECT (SELECT count(*) FROM jq.claims), (SELECT count(*) FROM jq.group_members), (SELECT count(*) FROM jq.held), (SELECT count(*) FROM jq.holders),
			(SELECT count(*) FROM jq.failed_jobs)}),
	'0|0|0|0|0', 'nothing is left behind');

no_crash($node);
$node->stop;
done_testing();
