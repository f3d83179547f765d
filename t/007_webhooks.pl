# Real payloads go through unharmed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# 329 webhooks of GitHub's, where they are at hand, or the sample
my $source = $ENV{JQ_SOURCE_DIR} // "$FindBin::RealBin/..";
my ($file) = grep { -r $_ } "$source/../shared/data/github-webhooks.ndjson",
  "$source/script/webhooks.ndjson", "$FindBin::RealBin/../script/webhooks.ndjson";
plan skip_all => 'no webhooks found' unless defined $file;

# COPY's text format gives a meaning to these
my @lines = split(/\n/, slurp_file($file));
my $copy = join('', map { my $line = $_; $line =~ s/([\\])/\\\\/g; $line =~ s/\t/\\t/g; $line =~ s/\r/\\r/g; "$line\n" } @lines);

my $node = jq_server('main');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE hooks (n bigint GENERATED ALWAYS AS IDENTITY, body jsonb, job bigint);
	CREATE TABLE stored (job bigint, body jsonb);
	CREATE FUNCTION store(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO stored VALUES (context.id, payload);
		RETURN payload;
	END $$;
	SELECT jq.register('store(jsonb, jq.context)')});
$node->safe_psql('d', "COPY hooks (body) FROM stdin;\n$copy\\.\n");
is($node->safe_psql('d', 'SELECT count(*) FROM hooks'), scalar(@lines), scalar(@lines) . ' webhooks loaded');

$node->safe_psql('d', "UPDATE hooks SET job = jq.dispatch('store', body)");
wait_for_empty($node, 'd', 'all are handled');
is( $node->safe_psql('d', 'SELECT count(*), count(*) FILTER (WHERE h.body = s.body AND h.body::text = s.body::text) FROM hooks AS h JOIN stored AS s USING (job)'),
	@lines . '|' . @lines, 'each arrives as it was sent, once');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.failed_jobs'), '0', 'none failed');

# the same in one array of specs, through failure and retry
$node->safe_psql('d', q{
	TRUNCATE stored;
	CREATE OR REPLACE FUNCTION store(payload jsonb, context jq.context) RETURNS jsonb LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO stored VALUES (context.id, payload);
		IF NOT EXISTS (SELECT FROM hooks WHERE job = context.id AND n < 0) THEN
			RAISE 'not yet';
		END IF;
		RETURN payload;
	END $$;
	SET log_min_messages = fatal;
	WITH d AS (SELECT id, row_number() OVER () AS n
		FROM jq.dispatch((SELECT array_agg(jq.job('store', body, max_attempts => 1) ORDER BY n) FROM hooks)) AS id)
	UPDATE hooks AS h SET job = d.id FROM d WHERE d.n = h.n});
wait_for_empty($node, 'd', 'all fail when they should');
is( $node->safe_psql('d', 'SELECT count(*), count(*) FILTER (WHERE h.body = f.payload) FROM hooks AS h JOIN jq.failed_jobs AS f ON f.id = h.job'),
	@lines . '|' . @lines, 'and are in jq.failed_jobs as they were sent');
$node->safe_psql('d', 'ALTER TABLE hooks ALTER n DROP IDENTITY; UPDATE hooks SET n = -n; SELECT count(jq.retry(id)) FROM jq.failed_jobs');
wait_for_empty($node, 'd');
is( $node->safe_psql('d', 'SELECT count(*), count(*) FILTER (WHERE h.body = s.body) FROM hooks AS h JOIN stored AS s USING (job)'),
	@lines . '|' . @lines, 'and when retried arrive as they were');

no_crash($node);
$node->stop;

# the demonstration with the same file; its PostgreSQL is this one
SKIP:
{
	my $demo = "$FindBin::RealBin/../script/demo";
	skip 'no script/demo', 1 unless -x $demo;
	local $ENV{JQ_NO_BUILD} = 1;
	local $ENV{PG_CONFIG} = $node->config_data('--bindir') . '/pg_config';
	my ($out, $err);
	my $ok = IPC::Run::run([ $demo, $file ], '>', \$out, '2>', \$err);
	ok($ok, 'script/demo runs with them') or diag("$out\n$err");
}

done_testing();
