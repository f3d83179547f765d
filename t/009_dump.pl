# A dump carries everything over, and what is restored does not run by itself.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = jq_server('main', 'jq.workers = 2');
jq_database($node, 'source');
$node->safe_psql('source', q{
	CREATE ROLE alice LOGIN;
	CREATE ROLE bob LOGIN;
	SELECT jq.grant('alice', 'dispatch'), jq.grant('alice', 'administer'), jq.grant('bob', 'dispatch', 'bobs');
	SELECT jq.register('note(jsonb, jq.context)', 'renamed', 'mail', 7, '5 min', ARRAY[interval '1 s', '1 min'], -3);
	SELECT jq.rename_handler('renamed', 'note2');
	SELECT jq.dispatch('shaky', jsonb_build_object('failures', 9, 'n', i), max_attempts => 1) FROM generate_series(1, 3) AS i});
wait_for_empty($node, 'source');
$node->safe_psql('source', q{
	ALTER DATABASE source SET jq.workers = 0;
	SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity WHERE backend_type ~ '^jq (scheduler|worker)' AND datname = 'source'});
wait_until($node, 'source', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
$node->safe_psql('source', q{
	SELECT jq.dispatch('renamed', '{"as": "postgres"}'), jq.dispatch('note', '{"later": "\u00e9 \\\\ ''"}', delay => '1 day', priority => 4);
	SET ROLE alice; SELECT jq.dispatch('note', '{"as": "alice"}'); RESET ROLE;
	SET ROLE bob; SELECT jq.dispatch('note', '{"as": "bob"}', queue => 'bobs'); RESET ROLE});
is($node->safe_psql('source', 'SELECT count(*), count(*) FILTER (WHERE origin <> 0) FROM jq.jobs'), '4|4', 'jobs wait');

# all but what says in which database a job was dispatched
my $jobs = q{SELECT to_jsonb(j) - 'origin' FROM jq.jobs AS j ORDER BY id};
my $everything = join(";\n", $jobs, map { "SELECT to_jsonb(t) FROM jq.$_ AS t ORDER BY to_jsonb(t)::text" }
	qw(failed_jobs handlers handler_aliases grants));
my $rights = q{
	SELECT c.relname, a.grantee::regrole, a.privilege_type FROM pg_class AS c, aclexplode(c.relacl) AS a
	WHERE c.relnamespace = 'jq'::regnamespace AND a.grantee <> c.relowner ORDER BY 1, a.grantee::regrole::text, 3;
	SELECT p.proname, count(*), a.grantee::regrole FROM pg_proc AS p, aclexplode(p.proacl) AS a
	WHERE p.pronamespace = 'jq'::regnamespace AND a.grantee <> p.proowner GROUP BY 1, a.grantee ORDER BY 1, a.grantee::regrole::text};
my $before = $node->safe_psql('source', $everything);
my $rights_before = $node->safe_psql('source', $rights);
like($rights_before, qr/alice/, 'there are rights to be dumped');

my $last = $node->safe_psql('source', 'SELECT max(id) FROM jq.jobs');
my $dir = $node->basedir;
foreach my $format ('plain', 'custom')
{
	$node->safe_psql('postgres', "CREATE DATABASE target_$format");
	$node->command_ok([ 'pg_dump', '-d', $node->connstr('source'), '-F', $format, '-f', "$dir/$format" ], "pg_dump, format $format");
	if ($format eq 'plain')
	{
		$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr("target_$format"), '-f', "$dir/$format" ], 'psql restores it');
	}
	else
	{
		# several sessions at once
		$node->command_ok([ 'pg_restore', '-e', '-j', 2, '-d', $node->connstr("target_$format"), "$dir/$format" ], 'pg_restore restores it');
	}
	my $target = "target_$format";

	is($node->safe_psql($target, $everything), $before, 'jobs, failed jobs, handlers, aliases and grants arrive');
	is($node->safe_psql($target, $rights), $rights_before, 'with the SQL privileges that go with the grants');
	wait_until($node, $target, 'SELECT scheduler_pid IS NOT NULL FROM jq.status', 'the restored database has a scheduler');
	is($node->safe_psql($target, 'SELECT sum(held), sum(ready), sum(later), sum(failed) FROM jq.queue_stats'), '4|0|0|3', 'the jobs are held');

	# new ones run, with ids beyond the restored ones
	$node->safe_psql($target, q{TRUNCATE done; SELECT jq.dispatch('note')});
	wait_for_done($node, $target, 1, 'a new job runs');
	cmp_ok($node->safe_psql($target, 'SELECT job FROM done'), '>', $last, 'its id comes after those of the dump');
	is($node->safe_psql($target, 'SELECT sum(held) FROM jq.queue_stats'), '4', 'the others are still held');

	is($node->safe_psql($target, 'SET ROLE alice; SELECT jq.adopt()'), '4', 'jq.adopt()');
	wait_for_done($node, $target, 4, 'lets them run');
	is( $node->safe_psql($target, q{SELECT string_agg(role, ',' ORDER BY role) FROM done WHERE payload ? 'as' AND payload ->> 'as' = role}),
		join(',', sort 'alice', 'bob', $node->safe_psql('postgres', 'SELECT current_user') eq 'postgres' ? 'postgres' : ()), 'as their own roles');
	is($node->safe_psql($target, 'SELECT ready, later, held FROM jq.status'), '0|1|0', 'the delayed one waits for its day');

	# a failed job that was restored can be retried
	$node->safe_psql($target, q{SELECT jq.retry(min(id)) FROM jq.failed_jobs});
	wait_until($node, $target, q{SELECT count(*) = 3 AND max(failed_at) > now() - interval '1 minute' FROM jq.failed_jobs}, 'a restored failure can be retried');
}
is($node->safe_psql('source', $everything), $before, 'the source is as it was');

# without the hold
$node->safe_psql('postgres', "CREATE DATABASE adopting; ALTER DATABASE adopting SET jq.after_restore = 'adopt'");
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('adopting'), '-f', "$dir/plain" ], 'a restore with jq.after_restore = adopt');
wait_until($node, 'adopting', q{SELECT count(*) = 3 FROM done WHERE payload ? 'as'}, 'the jobs run at once');
is($node->safe_psql('adopting', 'SELECT sum(held) FROM jq.queue_stats'), '0', 'none is held');

no_crash($node);
$node->stop;
done_testing();
