# Who is charged when a process crashes or is killed: what src/README says of
# each cause, and that a job which crashes its worker is stopped.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes;

my $node = jq_server('main', 'jq.workers = 4', "jq.keep_attempts = '1 h'", 'fsync = off');
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE held (gate integer PRIMARY KEY);
	-- waits in a way that outlives the crash of the session that shut the gate
	CREATE FUNCTION wait_at(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO public.done (job, attempt, queue, payload) VALUES (context.id, context.attempt, context.queue, payload);
		WHILE EXISTS (SELECT FROM public.held WHERE gate = (payload ->> 'gate')::integer) LOOP
			PERFORM pg_sleep(0.02);
		END LOOP;
	END $$;
	SELECT jq.register('public.wait_at(jsonb, jq.context)', backoff => '{0 s}', timeout => NULL);
	CREATE SEQUENCE starts;
	CREATE FUNCTION poison(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM jq.log('attempt ' || context.attempt);
		EXECUTE format('COPY (SELECT) TO PROGRAM %L', 'kill -' || (payload ->> 'signal') || ' $PPID');
		PERFORM pg_sleep(60);
	END $$;
	SELECT jq.register('public.poison(jsonb, jq.context)', backoff => '{0 s}', max_attempts => 2);
	CREATE FUNCTION poison_later() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		COPY (SELECT) TO PROGRAM 'kill -9 $PPID';
		PERFORM pg_sleep(60);
		RETURN NULL;
	END $$;
	CREATE TABLE late (job bigint);
	CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION poison_later();
	CREATE FUNCTION commits_badly(payload jsonb, context jq.context) RETURNS void LANGUAGE sql
		AS 'INSERT INTO public.late VALUES (context.id)';
	SELECT jq.register('public.commits_badly(jsonb, jq.context)', backoff => '{0 s}', max_attempts => 1)});

# Jobs that run until the gate is opened; returns their ids.
sub start_waiting
{
	my ($count, $gate, $more) = @_;

	$gate //= 1;
	$node->safe_psql('d', "INSERT INTO held VALUES ($gate) ON CONFLICT DO NOTHING");
	my $ids = $node->safe_psql('d',
		"SELECT jq.dispatch('wait_at', '{\"gate\": $gate}'" . ($more // '') . ") FROM generate_series(1, $count)");
	$ids =~ tr/\n/,/;
	wait_until($node, 'd', "SELECT count(*) = $count FROM jq.running WHERE id IN ($ids)");
	return split(/,/, $ids);
}

sub open_gate
{
	my ($gate) = @_;

	$node->safe_psql('d', 'DELETE FROM held' . ($gate ? " WHERE gate = $gate" : ''));
	return;
}

sub worker_of
{
	return $node->safe_psql('d', "SELECT pid FROM jq.running WHERE id = $_[0]");
}

# Kill with this signal, and wait until the server is back.
sub crash
{
	my ($signal, @pids) = @_;
	my $offset = log_size($node);

	kill($signal, @pids);
	$node->wait_for_log(qr/all server processes terminated; reinitializing/, $offset);
	back();
	return;
}

sub back
{
	$node->poll_query_until('postgres', 'SELECT true') or die 'the server does not come back';
	wait_until($node, 'd', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
	return;
}

sub attempts_of
{
	return $node->safe_psql('d', "SELECT string_agg(attempts::text, ',' ORDER BY id) FROM jq.jobs WHERE id IN (" . join(',', @_) . ')');
}

sub failed
{
	return $node->safe_psql('d', "SELECT attempts, sqlstate, error FROM jq.failed_jobs WHERE id = $_[0]");
}

# ---------------------------------------------------------------------
# One of several is killed
# ---------------------------------------------------------------------

foreach my $signal ('KILL', 'SEGV', 'ABRT')
{
	my @ids = start_waiting(3);
	my $victim = splice(@ids, 1, 1);

	crash($signal, worker_of($victim));
	wait_until($node, 'd', 'SELECT count(*) = 3 FROM jq.running', "SIG$signal: all jobs run again");
	is(attempts_of($victim), '1', "SIG$signal: the job whose worker was killed is charged");
	is(attempts_of(@ids), '0,0', "SIG$signal: those beside it are not");
	open_gate();
	wait_for_empty($node, 'd');
	is( $node->safe_psql('d', 'SELECT count(*), count(DISTINCT job), sum(attempt) FROM done'),
		'3|3|4', "SIG$signal: each has its effect once");
	$node->safe_psql('d', 'TRUNCATE done');
}
like($node->safe_psql('d', "SELECT string_agg(DISTINCT regexp_replace(error, '\\d+', 'N'), ';'), count(*), count(pid), count(started_at) FROM jq.attempts WHERE outcome = 'failed'"),
	qr/^worker process with PID N crashed or was killed while it ran the job\|3\|3\|3$/, 'the history has these attempts');

# the last attempt
my ($id) = start_waiting(1, 1, ', max_attempts => 1');
my $pid = worker_of($id);
crash('KILL', $pid);
wait_for_empty($node, 'd', 'after its last attempt the job is not run again');
is(failed($id), "1|57P02|worker process with PID $pid crashed or was killed while it ran the job", 'jq.failed_jobs tells why');
open_gate();

# ---------------------------------------------------------------------
# Others are killed
# ---------------------------------------------------------------------

{
	my @ids = start_waiting(3);
	my $session = $node->background_psql('postgres', on_error_stop => 0);

	crash('KILL', $session->query_safe('SELECT pg_backend_pid()'));
	eval { $session->quit };
	wait_until($node, 'd', 'SELECT count(*) = 3 FROM jq.running');
	is(attempts_of(@ids), '0,0,0', 'a session is killed: nobody is charged');
	crash('KILL', jq_pids($node, 'scheduler'));
	wait_until($node, 'd', 'SELECT count(*) = 3 FROM jq.running');
	is(attempts_of(@ids), '0,0,0', 'the scheduler is killed: nobody is charged');
	crash('KILL', $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'"));
	wait_until($node, 'd', 'SELECT count(*) = 3 FROM jq.running');
	is(attempts_of(@ids), '0,0,0', 'the checkpointer is killed: nobody is charged');

	# a SIGQUIT that is not the postmaster's says nothing of innocence
	crash('QUIT', worker_of($ids[0]));
	wait_until($node, 'd', 'SELECT count(*) = 3 FROM jq.running');
	is(attempts_of(@ids), '1,0,0', "a worker that quits at somebody else's word is charged");
	open_gate();
	wait_for_empty($node, 'd');
	is($node->safe_psql('d', 'SELECT count(*), count(DISTINCT job) FROM done'), '3|3', 'each has its effect once');
	$node->safe_psql('d', 'TRUNCATE done');
}

# ---------------------------------------------------------------------
# A job that kills its worker each time, among others
# ---------------------------------------------------------------------

foreach my $signal (9, 11)
{
	my $offset = log_size($node);
	my @ids = start_waiting(2);

	$id = $node->safe_psql('d', qq{
		SELECT count(jq.dispatch('note')) FROM generate_series(1, 20);
		SELECT jq.dispatch('poison', '{"signal": $signal}')});
	$id =~ s/.*\n//;
	$node->poll_query_until('d', "SELECT count(*) = 1 FROM jq.failed_jobs WHERE id = $id") or die 'not stopped';
	back();
	like(failed($id), qr/^2\|57P02\|worker process with PID \d+ crashed/, "signal $signal: the poison job is stopped");
	is($node->safe_psql('d', "SELECT log FROM jq.failed_jobs WHERE id = $id"), 'attempt 2', 'its log has survived the crash');
	is(log_count($node, qr/was terminated by signal $signal/, $offset), 2, 'there were as many crashes as attempts');
	open_gate();
	wait_for_empty($node, 'd');
	is( $node->safe_psql('d', 'SELECT count(*), count(DISTINCT job), max(attempt) FROM done'),
		'22|22|1', 'the others ran once, and are not blamed');
	$node->safe_psql('d', 'TRUNCATE done');
}

# in what it left to the commit
$id = $node->safe_psql('d', "SELECT jq.dispatch('commits_badly')");
$node->poll_query_until('d', "SELECT count(*) = 1 FROM jq.failed_jobs WHERE id = $id") or die 'not stopped';
back();
like(failed($id), qr/^1\|57P02\|/, 'a crash in a deferred trigger is charged, too');

# ---------------------------------------------------------------------
# Several at once
# ---------------------------------------------------------------------

# most jobs that run at one time, seen for a while
sub most_running
{
	my (@ids) = @_;
	my $most = 0;

	foreach (1 .. 40)
	{
		my $n = $node->safe_psql('d', 'SELECT count(*) FROM jq.running WHERE id IN (' . join(',', @ids) . ')');
		$most = $n if $n > $most;
		Time::HiRes::usleep(20_000);
	}
	return $most;
}

{
	my @ids = start_waiting(2);
	my ($beside) = start_waiting(1, 2);

	crash('KILL', map { worker_of($_) } @ids);
	wait_until($node, 'd', "SELECT count(*) = 2 FROM jq.running");
	is(attempts_of(@ids), '1,1', 'two workers killed at once: both jobs are charged');
	is(attempts_of($beside), '0', 'the one beside them is not');
	is(most_running(@ids), 1, 'the two run one at a time from then on');
	is(most_running(@ids, $beside), 2, 'beside others');
	is($node->safe_psql('d', 'SELECT ready FROM jq.status'), '1', 'the other one waits');
	open_gate();
	wait_for_empty($node, 'd', 'both come to their end');
	@ids = start_waiting(2);
	is(most_running(@ids), 2, 'new jobs run at the same time');
	open_gate();
	wait_for_empty($node, 'd');
	$node->safe_psql('d', 'TRUNCATE done');
}

# one of the suspects is the culprit
{
	my @ids = start_waiting(2, 1, ', max_attempts => 5');

	crash('KILL', map { worker_of($_) } @ids);
	# the second one turns bad
	$node->safe_psql('d', qq{
		CREATE OR REPLACE FUNCTION wait_at(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
		BEGIN
			IF context.id = $ids[1] THEN
				COPY (SELECT) TO PROGRAM 'kill -9 \$PPID';
				PERFORM pg_sleep(60);
			END IF;
			INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
		END \$\$});
	crash('KILL', worker_of($ids[0])) if $node->safe_psql('d', "SELECT count(*) FROM jq.running WHERE id = $ids[0]");
	$node->poll_query_until('d', "SELECT count(*) = 1 FROM jq.failed_jobs WHERE id = $ids[1]") or die 'not stopped';
	back();
	wait_for_empty($node, 'd');
	like(failed($ids[1]), qr/^5\|57P02\|/, 'the bad one of two suspects is charged to its end');
	is($node->safe_psql('d', "SELECT count(*), max(attempt) <= 3 FROM done WHERE job = $ids[0]"), '1|t', 'the good one gets through');
}

# ---------------------------------------------------------------------
# A session that drains
# ---------------------------------------------------------------------

$node->safe_psql('d', q{
	ALTER SYSTEM SET jq.enabled = off; SELECT pg_reload_conf();});
wait_until($node, 'd', 'SELECT scheduler_pid IS NULL AND workers = 0 FROM jq.status');
$id = $node->safe_psql('d', q{SELECT jq.dispatch('poison', '{"signal": 9}')});
foreach my $attempt (1, 2)
{
	my $offset = log_size($node);

	$node->psql('d', 'CALL jq.drain()');
	$node->wait_for_log(qr/all server processes terminated; reinitializing/, $offset);
	$node->poll_query_until('postgres', 'SELECT true');
	is($node->safe_psql('d', "SELECT attempts FROM jq.jobs WHERE id = $id"), $attempt, "attempt $attempt of a drained job that crashes is counted");
}
$node->safe_psql('d', 'CALL jq.drain()');
like(failed($id), qr/^2\|57000\|session that ran the attempt did not record its end/, 'and it is stopped');

is( join("\n", grep { !/was terminated by signal (9|11|6|3)\b|exited with exit code 2/ } grep { /PANIC:|TRAP:|was terminated by signal|exited with exit code [^01]/ } split(/\n/, log_since($node, 0))),
	'', 'no other crash');
$node->stop;
done_testing();
