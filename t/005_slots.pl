# Too few slots, and roles that cannot be served: everybody else is, and the
# log is not flooded.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Wait until the scheduler of the database has been through so many rounds: it
# reports its state in each.
sub scheduler_rounds
{
	my ($node, $database, $rounds) = @_;
	my $query = "SELECT state_change FROM pg_stat_activity WHERE backend_type = 'jq scheduler' AND datname = '$database'";

	foreach (1 .. $rounds)
	{
		my $state = $node->safe_psql('postgres', $query);
		wait_until($node, 'postgres', "SELECT ($query) > '$state'");
	}
	return;
}

# ---------------------------------------------------------------------
# max_worker_processes
# ---------------------------------------------------------------------

# launcher, two schedulers, and no place for a worker or a third scheduler
my $node = jq_server('small', 'max_worker_processes = 3', 'max_logical_replication_workers = 0');
jq_database($node, 'one', 'two', 'three');
wait_until($node, 'postgres', "SELECT count(*) = 2 FROM pg_stat_activity WHERE backend_type = 'jq scheduler'",
	'as many schedulers as there is room for');
my ($served, $unserved) = split(/\n/, $node->safe_psql('postgres', q{
	SELECT datname FROM pg_database WHERE datname IN ('one', 'two', 'three')
	ORDER BY datname NOT IN (SELECT datname FROM pg_stat_activity WHERE backend_type = 'jq scheduler'), datname = 'one' DESC}));
$unserved = $node->safe_psql('postgres', q{
	SELECT datname FROM pg_database WHERE datname IN ('one', 'two', 'three')
	AND datname NOT IN (SELECT datname FROM pg_stat_activity WHERE backend_type = 'jq scheduler')});

my $offset = 0;
$node->safe_psql($served, "SELECT jq.dispatch('note')");
wait_until($node, $served, "SELECT note LIKE '%no free slot%' FROM jq.status", 'jq.status tells that there is no slot for a worker');
wait_until($node, $unserved, 'SELECT note IS NOT NULL FROM jq.status', 'and that there is none for a scheduler');

# dispatches by the dozen call the scheduler, or not; it retries after a while
foreach (1 .. 20)
{
	$node->safe_psql($served, "SELECT jq.dispatch('note', queue => 'q$_')");
}
scheduler_rounds($node, $served, 2);
is(log_count($node, qr/could not start a jq worker for database "$served": no free slot/), 1, 'one line in the log for the workers');
# "postgres" and template databases are looked into, too, and need a slot
my $lines = log_count($node, qr/could not start the jq scheduler for database .*: no free slot/);
cmp_ok($lines, '>=', 1, 'it is told that a scheduler could not be started');
cmp_ok($lines, '<=', 3, 'and not each time');
is(log_count($node, qr/registering background worker|too many background workers/), 0, 'none of the server itself');

# a slot becomes free
my ($other) = grep { $_ ne $served && $_ ne $unserved } qw(one two three);
$node->safe_psql('postgres', "DROP DATABASE $unserved");
$node->safe_psql('postgres', "DROP DATABASE $other");
wait_for_done($node, $served, 21, 'the jobs run when a slot is freed');
is(log_count($node, qr/jq workers for database "$served" can be started again/), 1, 'which is told, too');
wait_until($node, $served, 'SELECT note IS NULL FROM jq.status', 'jq.status is content');
no_crash($node);
$node->stop;

# launcher, scheduler and one worker, though more are asked for
$node = jq_server('one_worker', 'max_worker_processes = 3', 'max_logical_replication_workers = 0', 'jq.workers = 8');
jq_database($node, 'one');
foreach (1 .. 10)
{
	$node->safe_psql('one', "SELECT count(jq.dispatch('note')) FROM generate_series(1, 20)");
}
wait_for_done($node, 'one', 200, 'with room for one worker of eight, all jobs run on it');
is($node->safe_psql('one', 'SELECT count(DISTINCT pid) FROM done'), '1', 'on that one');
cmp_ok(log_count($node, qr/no free slot/), '<=', 1, 'and one line in the log at most');
no_crash($node);
$node->stop;

# ---------------------------------------------------------------------
# jq.max_workers
# ---------------------------------------------------------------------

$node = jq_server('shared', 'jq.max_workers = 1', 'jq.workers = 4');
jq_database($node, 'one', 'two');
$node->safe_psql('postgres', 'CREATE ROLE alice LOGIN; CREATE ROLE bob LOGIN');
foreach my $database ('one', 'two')
{
	$node->safe_psql($database, "SELECT jq.grant('alice', 'dispatch'), jq.grant('bob', 'dispatch')");
}
foreach my $round (1 .. 3)
{
	foreach my $role ('alice', 'bob')
	{
		$node->safe_psql('one', "SET ROLE $role; SELECT count(jq.dispatch('note')) FROM generate_series(1, 10)");
	}
}
wait_for_done($node, 'one', 60, 'one worker for two roles: both are served');

# a role that always has work does not keep the place for ever
$node->safe_psql('one', q{
	TRUNCATE done;
	CREATE FUNCTION endless(payload jsonb) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_sleep(0.05), jq.dispatch('endless') ;
	END $$;
	SELECT jq.register('endless(jsonb)');
	SET ROLE alice; SELECT jq.dispatch('endless'); RESET ROLE;
	SET ROLE bob; SELECT jq.dispatch('note'); RESET ROLE});
wait_for_done($node, 'one', 1, 'nor does a role that always has work keep it from the other');
$node->safe_psql('one', 'SELECT jq.unregister($$endless$$, force => true)');
wait_for_empty($node, 'one');

$ENV{JQ_TEST_TIMEOUT} = 20;

# the worker of "one" sleeps; those of "two" need its place
foreach my $role ('alice', 'bob')
{
	$node->safe_psql('two', "SET ROLE $role; SELECT count(jq.dispatch('note')) FROM generate_series(1, 10)");
}
wait_for_done($node, 'two', 20, 'one worker for two databases: an idle one gives way');
$node->safe_psql('one', "TRUNCATE done; SET ROLE bob; SELECT jq.dispatch('note')");
wait_for_done($node, 'one', 1, 'there and back');

# neither may one database's endless work keep the other waiting
$node->safe_psql('one', "TRUNCATE done; SELECT jq.register('endless(jsonb)'); SET ROLE alice; SELECT jq.dispatch('endless')");
wait_until($node, 'one', 'SELECT workers = 1 FROM jq.status', 'the other one is served again');
$node->safe_psql('two', "TRUNCATE done; SET ROLE bob; SELECT jq.dispatch('note')");
wait_for_done($node, 'two', 1, 'a busy one gives way, too');
delete $ENV{JQ_TEST_TIMEOUT};
cmp_ok(log_count($node, qr/no free slot/), '<=', 6, 'the log is not flooded');
no_crash($node);
$node->stop;

# ---------------------------------------------------------------------
# Roles
# ---------------------------------------------------------------------

$node = jq_server('roles', 'jq.workers = 2');
jq_database($node, 'one');
$node->safe_psql('one', q{
	REVOKE CONNECT ON DATABASE one FROM PUBLIC;
	CREATE ROLE fine LOGIN;
	CREATE ROLE locked_out LOGIN;
	CREATE ROLE no_login NOLOGIN;
	CREATE ROLE gone LOGIN;
	CREATE ROLE limited LOGIN CONNECTION LIMIT 0;
	GRANT CONNECT ON DATABASE one TO fine, no_login, gone, limited;
	SELECT jq.grant(r, 'dispatch') FROM unnest('{fine,locked_out,no_login,gone,limited}'::text[]) AS r});

sub dispatch_as
{
	my ($role) = @_;

	$node->safe_psql('one', "SET ROLE $role; SELECT count(jq.dispatch('note')) FROM generate_series(1, 3)");
	return;
}

dispatch_as('locked_out');
wait_until($node, 'one', q{SELECT note LIKE '%"locked_out"%CONNECT%' FROM jq.status}, 'jq.status tells of a role without CONNECT');
dispatch_as($_) foreach qw(fine no_login limited);
wait_until($node, 'one', "SELECT count(*) = 3 FROM done WHERE role = 'fine'", 'other roles are served');
wait_until($node, 'one', "SELECT count(*) = 3 FROM done WHERE role = 'no_login'", 'so is one that cannot log in, as itself');
wait_until($node, 'one', q{
	SELECT (SELECT count(*) = 3 FROM done WHERE role = 'limited')
	OR (SELECT note LIKE '%"limited"%' FROM jq.status)}, 'one without connections is served, or is told of');

# its jobs outlive a role
$node->safe_psql('one', q{
	BEGIN;
	SET LOCAL ROLE gone; SELECT jq.dispatch('note'); RESET ROLE;
	SELECT jq.revoke('gone', 'dispatch');
	REVOKE CONNECT ON DATABASE one FROM gone;
	DROP ROLE gone;
	COMMIT});
dispatch_as('fine');
wait_until($node, 'one', "SELECT count(*) = 6 FROM done WHERE role = 'fine'", 'a dropped role keeps nobody from work');
{
	local $ENV{JQ_TEST_TIMEOUT} = 20;
	wait_until($node, 'one', q{SELECT note LIKE '%"gone"%' FROM jq.status}, 'jq.status tells of jobs whose role is gone');
}
is($node->safe_psql('one', 'SELECT count(*) FROM jq.status, regexp_matches(note, $$"gone" are not run: the role does not exist$$, $$g$$)'), '1', 'once');
is($node->safe_psql('one', q{SET ROLE fine; SELECT coalesce(note, '') NOT LIKE '%gone%' FROM jq.status}), 't', 'but not who may not see them');

# the refused one is tried again less and less often: no flood
scheduler_rounds($node, 'one', 1);
dispatch_as('locked_out') foreach 1 .. 10;
dispatch_as('fine') foreach 1 .. 10;
wait_until($node, 'one', "SELECT count(*) = 36 FROM done WHERE role = 'fine'");
is(log_count($node, qr/jobs of role "locked_out" are not run/), 1, 'one line in the log for a refused role');
cmp_ok(log_count($node, qr/jq (worker|scheduler) \w+ (ERROR|FATAL)/), '<=', 2, 'no flood of processes that fail');

$node->safe_psql('one', 'GRANT CONNECT ON DATABASE one TO locked_out');
wait_until($node, 'one', "SELECT count(*) = 33 FROM done WHERE role = 'locked_out'", 'its jobs run when it gets CONNECT');
wait_until($node, 'one', "SELECT coalesce(note, '') NOT LIKE '%locked_out%' FROM jq.status", 'jq.status has forgotten it');

# it loses CONNECT while its worker sleeps
$node->safe_psql('one', 'REVOKE CONNECT ON DATABASE one FROM locked_out');

no_crash($node);
$node->stop;

# ---------------------------------------------------------------------
# An idle worker gives its place to another role that has more work
# ---------------------------------------------------------------------

$node = jq_server('idle', 'jq.workers = 2');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE ROLE a LOGIN; CREATE ROLE b LOGIN;
	SELECT jq.grant('a', 'dispatch'), jq.grant('b', 'dispatch');
	SET ROLE a; SELECT jq.dispatch('note')});
wait_until($node, 'd', "SELECT count(*) >= 1 FROM jq.workers WHERE role = 'a' AND state = 'idle'");
$node->safe_psql('d', q{SET ROLE b; SELECT jq.dispatch('slow', '{"seconds": 30}')});
wait_for_running($node, 'd', 1);
$node->safe_psql('d', q{SET ROLE b; SELECT jq.dispatch('note')});
{
	local $ENV{JQ_TEST_TIMEOUT} = 15;
	wait_until($node, 'd', "SELECT count(*) = 1 FROM done WHERE role = 'b' AND payload = '{}'", 'an idle worker of another role gives up its place');
}
no_crash($node);
$node->stop('immediate');
done_testing();
