# Commands that need the table of jobs for themselves get it, from idle and
# from busy workers, and no job fails for it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = jq_server('main', 'jq.workers = 2');
jq_database($node, 'd');
my $limit = "SET lock_timeout = '20s'; SET statement_timeout = '40s';";
my @commands = (
	'VACUUM FULL jq.jobs',
	'VACUUM (FULL, ANALYZE) jq.failed_jobs',
	'VACUUM (FREEZE) jq.jobs',
	'REINDEX TABLE CONCURRENTLY jq.jobs',
	'REINDEX TABLE jq.jobs',
	'CLUSTER jq.jobs USING jobs_due',
	'ALTER TABLE jq.jobs SET (fillfactor = 90)',
	'ALTER TABLE jq.handlers SET (fillfactor = 90)',
	'ALTER TABLE jq.jobs ALTER payload SET STORAGE external',
	'ANALYZE jq.jobs',
	'TRUNCATE jq.failed_jobs');

# LOCK TABLE for two seconds, on each of the tables
my $lock = join('', map { "BEGIN; LOCK TABLE jq.$_ IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(0.5); COMMIT;" }
	qw(jobs handlers failed_jobs handler_aliases grants));
my $lock_jobs = 'BEGIN; LOCK TABLE jq.jobs IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(2); COMMIT;';

sub run_commands
{
	my ($when) = @_;

	foreach my $command (@commands)
	{
		my ($status, $stdout, $stderr) = $node->psql('d', "$limit\n$command");
		is("$status $stderr", '0 ', "$command, $when");
	}
	my ($status, $stdout, $stderr) = $node->psql('d', "$limit $lock_jobs $lock");
	is("$status $stderr", '0 ', "LOCK TABLE, $when");
	return;
}

# ---------------------------------------------------------------------
# Idle workers
# ---------------------------------------------------------------------

$node->safe_psql('d', "SELECT count(jq.dispatch('note', jsonb_build_object('n', i))) FROM generate_series(1, 200) AS i");
wait_for_empty($node, 'd');
wait_until($node, 'd', 'SELECT idle >= 1 AND idle = workers FROM jq.status');
is( $node->safe_psql('d', q{
		SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
		WHERE a.backend_type LIKE 'jq %' AND l.locktype = 'relation'}),
	'0', 'idle processes hold no locks');
my $pids = join(' ', jq_pids($node));
run_commands('workers idle');
is(join(' ', jq_pids($node)), $pids, 'all processes are still there');
$node->safe_psql('d', "TRUNCATE done; SELECT jq.dispatch('note')");
wait_for_done($node, 'd', 1, 'and work');

# ---------------------------------------------------------------------
# Busy ones, with dispatchers beside them
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	TRUNCATE done;
	CREATE TABLE stop ();
	CREATE TABLE sent (n bigint);
	CREATE PROCEDURE load() LANGUAGE plpgsql AS $$
	BEGIN
		WHILE NOT EXISTS (SELECT FROM stop) LOOP
			INSERT INTO sent SELECT jq.dispatch('shaky', jsonb_build_object('failures', (random() < 0.1)::integer)) FROM generate_series(1, 3);
			COMMIT;
			PERFORM pg_sleep(0.003);
			COMMIT;
		END LOOP;
	END $$});
my @load = map { $node->background_psql('d', on_error_stop => 0) } 1 .. 2;
$_->query_until(qr/started/, "\\echo started\nCALL load();\n\\echo finished\n") foreach @load;
wait_for_done($node, 'd', 100);
run_commands('workers busy');
my $seen = $node->safe_psql('d', 'SELECT count(*) FROM done');
wait_until($node, 'd', "SELECT count(*) > $seen + 100 FROM done", 'workers go on');
$node->safe_psql('d', 'INSERT INTO stop DEFAULT VALUES');
$_->quit foreach @load;
wait_for_empty($node, 'd', 'all jobs end');
is( $node->safe_psql('d', 'SELECT count(*) - count(DISTINCT job), count(DISTINCT job) = (SELECT count(*) FROM sent) FROM done'),
	'0|t', 'each ran exactly once');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.failed_jobs'), '0', 'none failed');
is(log_count($node, qr/client backend (?!55P03)\w+ 010_ddl_locks.pl (ERROR|FATAL)/), 0, 'nor did a session that dispatches');
is( $node->safe_psql('d', q{SELECT count(*) FROM done WHERE attempt <> 1 + (payload ->> 'failures')::integer}),
	'0', 'none lost an attempt to a lock');

# A job that runs long holds its row and its tables: such a command has to wait
# for it, as for any transaction that uses the table, and jobs behind it too;
# but all goes on when it is done, or when the command gives up.
my $gate = $node->background_psql('d');
$gate->query_safe('SELECT pg_advisory_lock(1)');
$node->safe_psql('d', q{TRUNCATE done; SELECT jq.dispatch('gate', '{"gate": 1}')});
wait_for_running($node, 'd', 1);
my ($status, $stdout, $stderr) = $node->psql('d', "SET lock_timeout = '500 ms'; VACUUM FULL jq.jobs");
like($stderr, qr/lock timeout/, 'VACUUM FULL waits for a job that runs');
$node->safe_psql('d', "SELECT jq.dispatch('note')");
wait_until($node, 'd', q{SELECT count(*) = 1 FROM done WHERE NOT payload ? 'gate'}, 'when it gives up, jobs go on');
my $ddl = $node->background_psql('d');
$ddl->query_until(qr/started/, "\\echo started\nVACUUM FULL jq.jobs;\n\\echo finished\n");
wait_until($node, 'postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE 'VACUUM FULL%' AND wait_event_type = 'Lock'});
$gate->query_safe('SELECT pg_advisory_unlock(1)');
$ddl->quit;
wait_until($node, 'd', q{SELECT count(*) = 1 FROM done WHERE payload ? 'gate'}, 'when the job ends, the command gets its turn');
is($node->safe_psql('d', q{SELECT attempt FROM done WHERE payload ? 'gate'}), '1', 'and the job is not harmed');

no_crash($node);
$node->stop;
done_testing();
