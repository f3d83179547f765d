# Jobs start at their commit or at their time, whatever way they were
# dispatched, and nothing happens otherwise.

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
my $node = jq_server('main', 'jq.workers = 1');
jq_database($node, 'd');

# What jq's processes have done so far: their states do not change while they
# sleep, and neither do the counters of what they did in the database.
my $traces = q{
	SELECT string_agg(concat_ws(' ', pid, state, state_change, query), E'\n' ORDER BY pid)
	FROM pg_stat_activity WHERE backend_type LIKE 'jq %'};

# The scheduler looks once more a second after it saw work that all workers
# were too busy for; that look is waited for, too.
sub rest
{
	my ($before, $after);

	wait_for_empty($node, 'd');
	wait_until($node, 'd', 'SELECT idle = 1 AND workers = 1 FROM jq.status');
	for my $try (1 .. 5)
	{
		$before = $node->safe_psql('d', $traces);
		usleep(1_300_000);
		$after = $node->safe_psql('d', $traces);
		last if $after eq $before;
	}
	return $after;
}

$node->safe_psql('d', "SELECT jq.dispatch('note')");
wait_for_done($node, 'd', 1);
my $before = rest();
like($before, qr/idle/, 'the worker is asleep');

# ---------------------------------------------------------------------
# What is rolled back wakes nobody
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	BEGIN; SELECT jq.dispatch('note'); ROLLBACK;
	BEGIN; SELECT jq.dispatch('note', delay => '10 ms'); ROLLBACK;
	BEGIN; SAVEPOINT s; SELECT jq.dispatch('note'); ROLLBACK TO s; COMMIT;
	BEGIN; SAVEPOINT s; SAVEPOINT t; SELECT jq.dispatch('note'); RELEASE t; ROLLBACK TO s; COMMIT;
	DO $$
	BEGIN
		FOR i IN 1 .. 100 LOOP
			BEGIN
				PERFORM jq.dispatch('note', queue => 'q' || i);
				RAISE 'no';
			EXCEPTION WHEN raise_exception THEN
				NULL;
			END;
		END LOOP;
	END $$;
	BEGIN; SELECT jq.dispatch('note'); PREPARE TRANSACTION 'r'; ROLLBACK PREPARED 'r';
});
$node->psql('d', "SELECT jq.dispatch('note'), 1 / 0");

# A job that waits for ever makes no traces either; when this one has its say
# whatever else was set off has had the time to be seen.
is($node->safe_psql('d', $traces), $before, 'dispatches that were rolled back wake nobody');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.jobs'), '0', 'and leave nothing');

# the session is killed before it commits
my $session = $node->background_psql('d', on_error_stop => 0);
$session->query_safe("BEGIN; SELECT jq.dispatch('note')");
$node->safe_psql('d', "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE state = 'idle in transaction'");
is($node->safe_psql('d', $traces), $before, 'nor does one whose session was killed');
is($node->safe_psql('d', 'SELECT count(*) FROM done'), '1', 'nothing has run');
eval { $session->quit };

# ---------------------------------------------------------------------
# Commits
# ---------------------------------------------------------------------

$node->safe_psql('d', 'TRUNCATE done');
$session = $node->background_psql('d');
$session->query_safe("BEGIN; SELECT jq.dispatch('note', '{\"n\": 1}')");
$session->query_safe("SAVEPOINT a; SELECT jq.dispatch('note', '{\"n\": 2}')");
$session->query_safe("ROLLBACK TO a; SAVEPOINT b; SELECT jq.dispatch('note', '{\"n\": 3}'); RELEASE b");
is($node->safe_psql('d', $traces), $before, 'a dispatch wakes nobody before its commit');
$session->query_safe('COMMIT');
wait_for_empty($node, 'd', 'its jobs start at the commit');
is( $node->safe_psql('d', "SELECT string_agg(payload ->> 'n', ',' ORDER BY n) FROM done"),
	'1,3', 'but for the one that a savepoint took back');

# a savepoint's dispatch alone, in another queue and priority than any before
rest();
$session->query_safe("BEGIN; SAVEPOINT a; SAVEPOINT b; SELECT jq.dispatch('note', queue => 'fresh', priority => -7); RELEASE b; RELEASE a; COMMIT");
wait_for_done($node, 'd', 3, 'a dispatch in nested savepoints wakes');

# late commits: the worker has gone past their keys long ago
rest();
$session->query_safe("BEGIN; SELECT jq.dispatch('note', '{\"late\": true}')");
$node->safe_psql('d', "SELECT count(jq.dispatch('note')) FROM generate_series(1, 50)");
wait_for_done($node, 'd', 53);
$session->query_safe('COMMIT');
wait_for_done($node, 'd', 54, 'a job is found whose transaction committed after younger ones were run');

# promptly: the start is close to the commit, not to some poll
rest();
my $rounds = $long ? 500 : 100;
$node->safe_psql('d', "TRUNCATE done");
$session->query_safe(qq{
	CREATE PROCEDURE prompt(rounds integer) LANGUAGE plpgsql AS \$\$
	DECLARE id bigint;
	BEGIN
		FOR i IN 1 .. rounds LOOP
			id := jq.dispatch('note', jsonb_build_object('due', clock_timestamp()));
			COMMIT;
			-- until it has run, so that the worker sleeps when the next one comes
			LOOP
				EXIT WHEN EXISTS (SELECT FROM done WHERE job = id);
				PERFORM pg_sleep(0.002);
				COMMIT;
			END LOOP;
		END LOOP;
	END \$\$});
$session->query_safe("CALL prompt($rounds)");
my $median = $node->safe_psql('d',
	"SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - (payload ->> 'due')::timestamptz) * 1000) FROM done");
note("median of $rounds: $median ms from dispatch to start");
# no measurement: a poll, however quick, would show in it
cmp_ok($median, '<', 100, 'jobs start promptly');

# ---------------------------------------------------------------------
# Later
# ---------------------------------------------------------------------

rest();
$node->safe_psql('d', q{
	TRUNCATE done;
	SELECT jq.dispatch('note', jsonb_build_object('due', clock_timestamp() + d), delay => d)
	FROM unnest('{2 s, 300 ms, 1 s, 1 day}'::interval[]) AS d;
	SELECT jq.dispatch('note', jsonb_build_object('due', t), run_at => t)
	FROM (SELECT clock_timestamp() + interval '1500 ms') AS x (t);
	SELECT jq.dispatch('shaky', '{"failures": 1}', delay => '100 ms')});
wait_for_done($node, 'd', 5, 'delayed jobs run, and one that is tried again');
is( $node->safe_psql('d', "SELECT count(*) FROM done WHERE started_at < (payload ->> 'due')::timestamptz - interval '2 ms'"),
	'0', 'none before its time');
is( $node->safe_psql('d', "SELECT count(*) FROM done WHERE started_at > (payload ->> 'due')::timestamptz + interval '1 s'"),
	'0', 'and none much later');
is($node->safe_psql('d', 'SELECT sum(later), sum(ready) FROM jq.queue_stats'), '1|0', 'the one for tomorrow waits');

# made due by hand
$node->safe_psql('d', "UPDATE jq.jobs SET available_at = clock_timestamp()");
wait_for_done($node, 'd', 6, 'a job that is made due by hand runs');

# ---------------------------------------------------------------------
# Idle
# ---------------------------------------------------------------------

$node->safe_psql('d', "SELECT jq.dispatch('note', delay => '1 day'), jq.dispatch('note', queue => 'other', delay => '1 week')");
wait_until($node, 'd', 'SELECT idle = 1 AND ready = 0 FROM jq.status');

# a session reports what it did up to ten seconds late, or when it ends
$session->quit;

# The processes' own accounting, from outside: a query that runs in the
# database would be counted with theirs.
my @pids = jq_pids($node);
my $count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'd'";

# what is still to be reported comes in when it no longer changes
my ($last, $now) = (-1, $node->safe_psql('postgres', $count));
while ($last != $now)
{
	usleep(1_500_000);
	($last, $now) = ($now, $node->safe_psql('postgres', $count));
}
my $states = $node->safe_psql('postgres', $traces);
my $wal = $node->safe_psql('postgres', 'SELECT pg_current_wal_insert_lsn()');
usleep(5_000_000);
my $after = $node->safe_psql('postgres', $count);

# once a minute the scheduler looks at the whole table: one transaction, or
# two, may fall into these seconds
cmp_ok($after - $now, '<=', 2, 'idle processes run no transactions');
is(scalar(grep { my $pid = $_; grep { $_ == $pid } @pids } jq_pids($node)), scalar(@pids), 'and stay');
my $moved = $node->safe_psql('postgres', "SELECT pg_current_wal_insert_lsn() - '$wal'");
cmp_ok($moved, '<', 1000, 'nor do they write WAL');

# ---------------------------------------------------------------------
# Two-phase commit
# ---------------------------------------------------------------------

$node->safe_psql('d', 'DELETE FROM jq.jobs; TRUNCATE done');
$before = rest();
$node->safe_psql('d', q{
	BEGIN; SELECT jq.dispatch('note', '{"t": "kept"}'); PREPARE TRANSACTION 'kept';
	BEGIN; SELECT jq.dispatch('note', '{"t": "later"}'), jq.dispatch('note', '{"t": "fresh"}', queue => 'fresh too'); PREPARE TRANSACTION 'later';
	BEGIN; SELECT jq.dispatch('note', '{"t": "gone"}'); PREPARE TRANSACTION 'gone'});
is($node->safe_psql('d', 'SELECT count(*) FROM jq.jobs'), '0', 'PREPARE TRANSACTION works, its jobs are not there yet');
is($node->safe_psql('d', $traces), $before, 'and wake nobody');
$node->safe_psql('d', "COMMIT PREPARED 'kept'");
wait_for_done($node, 'd', 1, 'COMMIT PREPARED starts its job');
$node->restart;
wait_until($node, 'd', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
is($node->safe_psql('d', 'SELECT count(*) FROM done'), '1', 'a restart starts nothing that is only prepared');
$node->safe_psql('d', "ROLLBACK PREPARED 'gone'");
$node->safe_psql('d', "COMMIT PREPARED 'later'");
wait_for_done($node, 'd', 3, 'COMMIT PREPARED after a restart starts its jobs');
is( $node->safe_psql('d', "SELECT string_agg(payload ->> 't', ',' ORDER BY job) FROM done"),
	'kept,later,fresh', 'each prepared job ran once, but for the one rolled back');
is($node->safe_psql('d', 'SELECT count(*) FROM jq.jobs'), '0', 'ROLLBACK PREPARED leaves nothing');

# ---------------------------------------------------------------------
# Sessions that dispatch and are gone
# ---------------------------------------------------------------------

my $sessions = $long ? 5000 : 500;
$node->safe_psql('d', 'TRUNCATE done');
my $script = join('', map { "SELECT jq.dispatch('note') \\g /dev/null\n\\connect\n" } 1 .. $sessions);
$node->safe_psql('d', $script);
wait_until($node, 'd', "SELECT count(*) >= $sessions FROM done",
	"all $sessions jobs run whose sessions ended with their dispatch");
is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job) FROM done'), "$sessions|$sessions", 'each once');

no_crash($node);
$node->stop;
done_testing();
