# Chains while workers and the server die: each link has its effect once, and
# in order.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $chains = $ENV{JQ_TEST_LONG} ? 2000 : 200;
my $node = jq_server('main', 'jq.workers = 4', 'fsync = off');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE linked (chain bigint, link integer, job bigint, attempt integer, previous jsonb, at timestamptz DEFAULT clock_timestamp());
	CREATE FUNCTION link(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.linked VALUES (context.chain_id, (payload ->> 'link')::integer, context.id, context.attempt, context.previous);
		PERFORM pg_sleep(random() * 0.01);
		IF context.attempt = 1 AND random() < 0.1 THEN RAISE 'once'; END IF;
		RETURN payload -> 'link';
	END $$;
	SELECT jq.register('link(jsonb, jq.context)', max_attempts => 50, backoff => '{0 s}')});

sub dispatch
{
	my ($count) = @_;

	return $node->safe_psql('d', qq{
		SELECT count(jq.dispatch(jq.chain(VARIADIC links))) FROM generate_series(1, $count),
			(SELECT array_agg(jq.job('link', jsonb_build_object('link', l))) AS links FROM generate_series(1, 5) AS l) AS s});
}

foreach my $how ('KILL', 'TERM', 'KILL')
{
	dispatch($chains / 4);
	usleep(100_000);
	wait_until($node, 'd', 'SELECT count(*) > 0 FROM jq.running');
	my ($pid) = jq_pids($node, 'worker');
	my $offset = log_size($node);

	kill($how, $pid);
	$node->wait_for_log($how eq 'KILL' ? qr/all server processes terminated; reinitializing/ : qr/terminating background worker "jq worker/, $offset);
	$node->poll_query_until('d', 'SELECT true');
}
dispatch($chains / 4);
$node->restart;
wait_for_empty($node, 'd', 'all chains end');
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job), count(DISTINCT chain) FROM linked'),
	5 * $chains . '|' . 5 * $chains . "|$chains", 'each link had its effect once');
is( $node->safe_psql('d', q{SELECT count(*) FROM (SELECT array_agg(link ORDER BY at) AS links FROM linked GROUP BY chain) AS c WHERE links <> '{1,2,3,4,5}'}),
	'0', 'in order');
is($node->safe_psql('d', q{SELECT count(*) FROM linked WHERE previous IS DISTINCT FROM nullif(to_jsonb(link - 1), '0')}),
	'0', 'and was told the result of the one before');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.failed_jobs'), '0', 'none failed');

# in a session
$node->safe_psql('d', 'TRUNCATE linked; ALTER SYSTEM SET jq.enabled = off; SELECT pg_reload_conf()');
wait_until($node, 'd', 'SELECT scheduler_pid IS NULL AND workers = 0 FROM jq.status');
dispatch(20);
$node->safe_psql('d', 'CALL jq.drain()');
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT chain) FROM linked'), '100|20', 'a session drains chains to their end');

no_crash($node);
$node->stop;
done_testing();
