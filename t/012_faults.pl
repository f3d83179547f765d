# Faults at random, while dispatchers and workers are busy: workers, clients,
# scheduler, launcher and postmaster are killed or terminated, the server is
# restarted, and some jobs kill their own workers.  At the end a ledger, which
# the dispatchers wrote in the same transactions as their jobs, tells what has
# to be there.
#
# JQ_TEST_SEED repeats a run: the same faults in the same order, and the same
# jobs, though not to the same microsecond.  With JQ_TEST_LONG there is more
# of everything.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use IPC::Run;
use JqTest;
use List::Util qw(shuffle);
use POSIX qw(_exit :sys_wait_h);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);

my $kills = $ENV{JQ_TEST_LONG} ? 40 : 10;
my $jobs = $ENV{JQ_TEST_LONG} ? 20_000 : 5_000;
my $poisons = 2;
my $dispatchers = 3;

my $seed = $ENV{JQ_TEST_SEED} // (int(time() * 1000) ^ $$) & 0x7fffffff;
note("JQ_TEST_SEED=$seed repeats this run");
srand($seed);

# With the history of attempts there is more to check, but it is not what most
# servers have.
my $history = rand() < 0.5;

# ---------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------

my @deck = (
	(['kill', 'worker']) x 3,
	['kill two', 'worker'],
	['terminate', 'worker'],
	['kill', 'client backend'],
	['kill', 'scheduler'],
	['terminate', 'scheduler'],
	['kill', 'launcher'],
	['terminate', 'launcher'],
	['restart', 'fast'],
	['restart', 'immediate'],
	['restart', 'killed postmaster']);
my @plan;
while (@plan < $kills)
{
	push(@plan, map { { what => $_, after => 0.2 + rand(1.6), choice => rand() } } shuffle(@deck));
}
splice(@plan, $kills);
my %poison_before;
$poison_before{ int(rand($kills)) }++ foreach 1 .. $poisons;

# ---------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------

# poison jobs end by themselves, so a server may crash while it is started
$ENV{PGCTLTIMEOUT} = 180;
$ENV{PGCONNECT_TIMEOUT} = 30;

my $node = jq_server('main', 'jq.workers = 4', 'jq.shutdown_grace = 1s',
	'jq.keep_attempts = ' . ($history ? '1d' : '0'));
my $marks = $node->basedir . '/marks';
my $files = $node->basedir . '/dispatchers';
mkdir($marks) or die "$marks: $!";
mkdir($files) or die "$files: $!";

$node->safe_psql('postgres', 'CREATE DATABASE d');
$node->safe_psql('d', qq{
	CREATE EXTENSION jq;
	CREATE ROLE app LOGIN;
	SELECT jq.grant('app', 'dispatch');

	CREATE TABLE sent (key text PRIMARY KEY, kind text NOT NULL, job bigint NOT NULL);
	CREATE TABLE effects (key text, job bigint, attempt integer, pid integer DEFAULT pg_backend_pid());
	GRANT INSERT, SELECT ON sent, effects TO app;

	CREATE TABLE acknowledged (key text);
	CREATE TABLE undone (key text);
	CREATE TABLE cancelled (key text, answer text);
	CREATE TABLE marks (key text);
	CREATE TABLE kills (pid integer, how text);

	-- leaves a file, which stays whatever becomes of the transaction; tells
	-- whether it was there before
	CREATE FUNCTION mark(key text) RETURNS boolean LANGUAGE plpgsql AS \$\$
	BEGIN
		IF (pg_stat_file('$marks/' || key, true)).size IS NOT NULL THEN
			RETURN true;
		END IF;
		EXECUTE format('COPY (SELECT 1) TO %L', '$marks/' || key);
		RETURN false;
	END \$\$;

	CREATE FUNCTION take_effect(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM pg_sleep(coalesce((payload ->> 'ms')::float8 / 2000, 0));
		INSERT INTO effects (key, job, attempt) VALUES (payload ->> 'key', context.id, context.attempt);
		PERFORM pg_sleep(coalesce((payload ->> 'ms')::float8 / 2000, 0));
	END \$\$;

	CREATE FUNCTION plain(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
	END \$\$;

	CREATE FUNCTION error(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
		RAISE EXCEPTION USING ERRCODE = 'FT001', MESSAGE = 'no luck with ' || (payload ->> 'key');
	END \$\$;

	CREATE FUNCTION once(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
		IF context.attempt = 1 THEN
			RAISE EXCEPTION USING ERRCODE = 'FT002', MESSAGE = 'not yet';
		END IF;
	END \$\$;

	CREATE FUNCTION fail(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
		PERFORM jq.fail('never mind ' || (payload ->> 'key'));
	END \$\$;

	CREATE FUNCTION skip(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
		PERFORM mark(payload ->> 'key');
		PERFORM jq.skip('as told');
	END \$\$;

	CREATE FUNCTION release(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
		IF NOT mark(payload ->> 'key') THEN
			PERFORM jq.release('100 ms');
		END IF;
	END \$\$;

	-- the parent of the shell is the worker; each start adds a line to the file
	CREATE FUNCTION poison(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
	BEGIN
		PERFORM take_effect(payload, context);
		EXECUTE format('COPY (SELECT 1) TO PROGRAM %L',
			'echo \$PPID >>"$marks/' || (payload ->> 'key') || '"; kill -9 \$PPID');
		PERFORM pg_sleep(30);
	END \$\$;

	SELECT jq.register(f::regprocedure, max_attempts => n, backoff => '{0 s}')
	FROM (VALUES ('plain', 100), ('once', 100), ('fail', 100), ('skip', 100), ('release', 100),
		('error', 2), ('poison', 2)) AS r (name, n), format('public.%s(jsonb, jq.context)', name) AS f});

# Ask until there is an answer: at any time a poison job may take the server
# away for a moment.
sub ask
{
	my ($query, $database) = @_;
	my $deadline = time() + 120;
	my ($value, $error);

	while (time() < $deadline)
	{
		return $value
		  if $node->psql($database // 'd', $query, stdout => \$value, stderr => \$error) == 0;
		die "$query: $error" if $error =~ /ERROR:/;
		usleep(50_000);
	}
	die "server does not answer: $error";
}

# ---------------------------------------------------------------------
# Dispatchers
#
# Each runs one psql after the other, whose output is its notes: "ack KEY..."
# after a commit that it knows of, "undone KEY..." for what was rolled back,
# and "cancel KEY ANSWER".  All have come to so many jobs, then they wait for
# the next fault.
# ---------------------------------------------------------------------

my ($me, $serial, $as_app);

sub dispatch
{
	my ($keys, $kind, %more) = @_;
	my $key = "$me-" . ++$serial;
	my $handler = $kind =~ /^(cancel|withdrawn)$/ ? 'plain' : $kind;
	my $ms = $kind eq 'cancel' ? int(rand(300)) : rand() < 0.4 ? 0 : int(rand(30));

	push(@$keys, $key);
	$more{queue} //= rand() < 0.3 ? "'queue " . int(rand(5)) . "'" : 'NULL';
	$more{priority} //= rand() < 0.2 ? int(rand(3)) - 1 : 'NULL';
	$more{delay} //= rand() < 0.1 ? "'" . int(rand(400)) . " ms'" : 'NULL';
	return qq{INSERT INTO sent SELECT '$key', '$kind', jq.dispatch('$handler', '{"key": "$key", "ms": $ms}', }
	  . join(', ', map { "$_ => $more{$_}" } sort keys %more) . ')';
}

sub any_kind
{
	my $n = rand();

	# the others write files
	return $n < 0.72 ? 'plain' : $n < 0.82 ? 'error' : $n < 0.92 ? 'once' : 'fail' if $as_app;
	return
	    $n < 0.72 ? 'plain'
	  : $n < 0.79 ? 'error'
	  : $n < 0.86 ? 'once'
	  : $n < 0.91 ? 'fail'
	  : $n < 0.95 ? 'skip'
	  :             'release';
}

sub some
{
	my ($keys, $max) = @_;

	return join('', map { dispatch($keys, any_kind()) . ";\n" } 1 .. 1 + int(rand($max)));
}

sub pause
{
	return rand() < 0.6 ? 'SELECT pg_sleep(' . rand(0.04) . ") \\g /dev/null\n" : '';
}

# One transaction, and what is to be noted of it.
sub transaction
{
	my $n = rand();
	my (@keys, @lost);
	my $script;

	if ($n < 0.20)
	{
		$script = dispatch(\@keys, any_kind()) . ";\n";
	}
	elsif ($n < 0.45)
	{
		$script = "BEGIN;\n" . some(\@keys, 6) . pause() . "COMMIT;\n";
	}
	elsif ($n < 0.52)
	{
		$script = "BEGIN;\n" . some(\@lost, 6) . pause() . "ROLLBACK;\n";
	}
	elsif ($n < 0.64)
	{
		$script = "BEGIN;\n" . some(\@keys, 2) . "SAVEPOINT s;\n" . some(\@lost, 3) . pause()
		  . "ROLLBACK TO s;\n" . some(\@keys, 2) . "RELEASE s;\n" . some(\@keys, 2) . "COMMIT;\n";
	}
	elsif ($n < 0.70)
	{
		$script = "DO \$\$ BEGIN\n" . some(\@keys, 2) . "BEGIN\n" . some(\@lost, 2)
		  . "RAISE division_by_zero;\nEXCEPTION WHEN division_by_zero THEN\n" . some(\@keys, 1)
		  . "END; END \$\$;\n";
	}
	elsif ($n < 0.78)
	{
		my @array = map { "$me-" . ++$serial } 1 .. 2 + int(rand(8));

		push(@keys, @array);
		$script = "INSERT INTO sent SELECT (ARRAY['" . join("','", @array)
		  . "'])[n], 'plain', id FROM jq.dispatch(ARRAY["
		  . join(', ', map { qq{jq.job('plain', '{"key": "$_"}')} } @array)
		  . "]) WITH ORDINALITY AS d (id, n);\n";
	}
	elsif ($n < 0.82)
	{
		my $first = $serial + 1;

		$serial += 5 + int(rand(20));
		push(@keys, map { "$me-$_" } $first .. $serial);
		$script = "INSERT INTO sent SELECT k, 'plain', jq.dispatch('plain', jsonb_build_object('key', k, 'ms', i % 10))"
		  . " FROM generate_series($first, $serial) AS i, concat('$me-', i) AS k;\n";
	}
	elsif ($n < 0.86 && !$as_app)
	{
		$script = "BEGIN;\n" . some(\@keys, 4) . "PREPARE TRANSACTION '$keys[0]';\n" . pause()
		  . "COMMIT PREPARED '$keys[0]';\n";
	}
	elsif ($n < 0.88)
	{
		$script = "BEGIN;\n" . dispatch(\@keys, 'withdrawn') . " RETURNING job \\gset\n"
		  . "SELECT jq.cancel(:job) \\g /dev/null\n" . pause() . "COMMIT;\n";
	}
	else
	{
		$script = "BEGIN;\n" . some(\@keys, 3) . dispatch(\@keys, 'cancel', priority => int(rand(3)) - 2)
		  . " RETURNING job \\gset\nCOMMIT;\n" . pause() . pause() . pause()
		  . "SELECT 'cancel $keys[-1] ' || coalesce(jq.cancel(:job, 'on second thoughts'), 'gone');\n";
	}

	$script .= "\\echo ack @keys\n" if @keys;
	$script .= "\\echo undone @lost\n" if @lost;
	return $script . pause();
}

# How many jobs a dispatcher may have acknowledged by now.
sub quota
{
	my ($value) = @_;

	if (defined $value)
	{
		append_to_file("$files/quota.new", $value);
		rename("$files/quota.new", "$files/quota") or die "$files/quota: $!";
	}
	return slurp_file("$files/quota");
}

# For each psql other random numbers, so that what was cut off before does not
# change what comes later.
sub dispatcher
{
	my ($n, $parent, $share) = @_;
	my $acknowledged = 0;

	for (my $round = 1; $acknowledged < $share; $round++)
	{
		my ($out, $err) = ('', '');

		while ($acknowledged >= quota())
		{
			return 1 if getppid() != $parent;
			usleep(20_000);
		}
		srand($seed + 1_000_000 * $n + $round);
		$me = "d$n-$round";
		$serial = 0;
		$as_app = rand() < 0.15;

		my $script = qq{
			\\set ON_ERROR_STOP on
			SELECT format('COMMIT PREPARED %L', gid) FROM pg_prepared_xacts WHERE gid LIKE 'd$n-%' \\gexec
		} . ($as_app ? "SET ROLE app;\n" : '');
		$script .= transaction() foreach 1 .. 20;
		# one that has lost its server may be gone before it has read all
		eval
		{
			IPC::Run::run([ 'psql', '-XAtq', '-d', $node->connstr('d') ], '<', \$script, '>', \$out, '2>', \$err,
				IPC::Run::timeout(180));
		};
		die $@ if $@ && $@ !~ /Broken pipe/;
		append_to_file("$files/notes.$n", $out);
		append_to_file("$files/errors.$n", $err);
		$acknowledged += split(' ') - 1 foreach grep { /^ack / } split(/\n/, $out);
		usleep(50_000) if $err ne '';
	}
	return 0;
}

my %dispatcher;

sub start_dispatchers
{
	my $parent = $$;

	foreach my $n (1 .. $dispatchers)
	{
		my $pid = fork();

		die "fork: $!" unless defined $pid;
		if ($pid == 0)
		{
			my $status = eval { dispatcher($n, $parent, $jobs / $dispatchers) } // 2;

			append_to_file("$files/errors.$n", "ERROR: $@") if $status == 2;
			_exit($status);
		}
		$dispatcher{$pid} = $n;
	}
	return;
}

sub reap_dispatchers
{
	my $deadline = time() + 180;
	my $good = 0;

	while (%dispatcher && time() < $deadline)
	{
		foreach my $pid (keys %dispatcher)
		{
			next if waitpid($pid, WNOHANG) == 0;
			$good++ if $? == 0;
			delete $dispatcher{$pid};
		}
		usleep(50_000);
	}
	is($good, $dispatchers, 'dispatchers came through');
	return;
}

END
{
	local $?;
	kill('TERM', keys %dispatcher);
}

# ---------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------

my @killed;			# [pid, kill or terminate] of workers
my %done;			# faults by name

sub postmaster
{
	return (slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/)[0];
}

# Parent of a living process; 0: there is none.
sub parent_of
{
	my ($pid) = @_;

	open(my $stat, '<', "/proc/$pid/stat") or return 0;
	my $line = <$stat> // '';
	close($stat);
	return $line =~ /\) [^ZX] (\d+) / ? $1 : 0;
}

sub children
{
	my ($parent) = @_;

	opendir(my $proc, '/proc') or die "/proc: $!";
	return grep { /^\d+$/ && parent_of($_) == $parent } readdir($proc);
}

# Choose victims: [pid, what it does], ...
sub victims
{
	my ($type, $number, $choice) = @_;
	my $deadline = time() + 20;

	$type = "jq $type" unless $type =~ / /;
	while (time() < $deadline)
	{
		my @found = map { [ split(/\|/, $_, 2) ] } split(/\n/, ask(qq{
			SELECT pid, state || ' ' || left(split_part(query, E'\n', 1), 60) FROM pg_stat_activity
			WHERE backend_type = '$type' AND pid <> pg_backend_pid() ORDER BY pid}));

		if (@found >= $number)
		{
			push(@found, splice(@found, 0, int($choice * @found)));
			return @found[ 0 .. $number - 1 ];
		}
		usleep(20_000);
	}
	return;
}

# The postmaster has seen that a process died, and has begun anew.
sub wait_for_crash
{
	my ($offset) = @_;
	my $deadline = time() + 60;

	while (time() < $deadline)
	{
		return 1 if log_since($node, $offset) =~ /all server processes terminated; reinitializing/;
		usleep(20_000);
	}
	return 0;
}

# until a dead postmaster has been reaped, its pid is taken for a living one
sub wait_for_end
{
	my (@pids) = @_;
	my $deadline = time() + 120;

	usleep(50_000) while (time() < $deadline && grep { kill(0, $_) } @pids);
	return;
}

sub start_server
{
	foreach (1 .. 10)
	{
		return if $node->start(fail_ok => 1);
		usleep(1_000_000);
	}
	BAIL_OUT('server does not start');
	return;
}

sub fault
{
	my ($fault) = @_;
	my ($how, $whom) = @{ $fault->{what} };
	my $postmaster = postmaster();
	my @victims;

	if ($how eq 'restart')
	{
		if ($whom eq 'killed postmaster')
		{
			my @children = children($postmaster);

			$node->kill9;
			wait_for_end($postmaster, @children);
		}
		else
		{
			$node->stop($whom);
		}
		start_server();
	}
	else
	{
		# dispatchers that have done their share for now have no backends
		quota(quota() + 40) if $whom eq 'client backend';

		# one that has just ended does not count
		for (my $try = 0; !@victims && $try < 4; $try++)
		{
			my $offset = log_size($node);
			my @found = victims($whom, $how eq 'kill two' ? 2 : 1, $fault->{choice});

			if ($how eq 'terminate')
			{
				@victims = grep { ask("SELECT pg_terminate_backend($_->[0])", 'postgres') eq 't' } @found;
				wait_for_gone(map { $_->[0] } @victims);
			}
			else
			{
				@victims = grep { parent_of($_->[0]) == $postmaster && kill('KILL', $_->[0]) } @found;
				wait_for_crash($offset) or diag("no restart after $how $whom") if @victims;
			}
		}
		fail("found nobody to $how: $whom") unless @victims;
		push(@killed, map { [ $_->[0], $how =~ /^kill/ ? 'kill' : 'terminate' ] } @victims)
		  if $whom eq 'worker';
	}
	ask('SELECT 1', 'postgres');
	$done{"$how $whom"}++;
	note(sprintf('%.1f s: %s: %s %s', time() - $^T, $how, $whom,
		join(', ', map { "$_->[0] (" . ($_->[1] // '') . ')' } @victims)));
	return;
}

sub send_poison
{
	my ($key) = @_;

	ask(qq{INSERT INTO sent SELECT '$key', 'poison', jq.dispatch('poison', '{"key": "$key"}')
		WHERE NOT EXISTS (SELECT FROM sent WHERE key = '$key')});
	return;
}

# On a slow machine the dispatchers may not have come far; but they must come
# on.
sub wait_for_progress
{
	my ($number) = @_;
	my $deadline = time() + 120;

	while (time() < $deadline)
	{
		return if ask('SELECT count(*) FROM sent') >= $number;
		usleep(100_000);
	}
	fail('dispatchers dispatch');
	return;
}

my $poison = 0;
my $share = $jobs / $dispatchers;

quota($share / ($kills + 1));
start_dispatchers();
for (my $i = 0; $i < $kills; $i++)
{
	send_poison('poison-' . ++$poison) foreach 1 .. $poison_before{$i} // 0;
	usleep(1_000_000 * $plan[$i]{after});
	wait_for_progress(0.8 * $jobs * $i / ($kills + 1));
	fault($plan[$i]);
	quota(int($share * ($i + 2) / ($kills + 1)) + 1);
}
reap_dispatchers();

# ---------------------------------------------------------------------
# The end
# ---------------------------------------------------------------------

# of dispatchers whose last psql was cut off
ask("SELECT format('COMMIT PREPARED %L', gid) FROM pg_prepared_xacts \\gexec");

my $begin = time();
{
	local $ENV{JQ_TEST_TIMEOUT} = $ENV{JQ_TEST_LONG} ? 120 : 60;
	wait_until($node, 'd', 'SELECT NOT EXISTS (SELECT FROM jq.jobs)', 'all jobs end');
}
note(sprintf('%.1f s: all jobs ended, %.1f s after the last dispatch', time() - $^T, time() - $begin));
wait_until($node, 'd', 'SELECT NOT EXISTS (SELECT FROM jq.cancellations)', 'no wish to cancel is left');
wait_until($node, 'd', 'SELECT launcher AND scheduler_pid IS NOT NULL AND running = 0 AND workers <= 4 FROM jq.status',
	'all processes are in their places');
{
	# not only by the full look once a minute
	local $ENV{JQ_TEST_TIMEOUT} = 30;

	ask(q{INSERT INTO sent SELECT k, 'plain', jq.dispatch('plain', jsonb_build_object('key', k))
		FROM generate_series(1, 20) AS i, concat('last-', i) AS k});
	wait_until($node, 'd', q{SELECT count(*) = 20 FROM effects WHERE key LIKE 'last-%'}, 'new jobs run');
}

# Make what the dispatchers noted, and what we did, tables.
sub load
{
	my ($table, @rows) = @_;

	return unless @rows;
	$node->safe_psql('d', "INSERT INTO $table VALUES " . join(', ', map { "('" . join("', '", @$_) . "')" } @rows));
	return;
}

my (@acknowledged, @undone, @cancelled, @errors);
foreach my $n (1 .. $dispatchers)
{
	foreach my $line (split(/\n/, slurp_file("$files/notes.$n")))
	{
		my ($word, @rest) = split(' ', $line);

		push(@acknowledged, map { [$_] } @rest) if $word eq 'ack';
		push(@undone, map { [$_] } @rest) if $word eq 'undone';
		push(@cancelled, \@rest) if $word eq 'cancel';
	}
	# what they met but the loss of their server
	push(@errors, grep { /ERROR:/ } split(/\n/, slurp_file("$files/errors.$n")));
}
load('acknowledged', @acknowledged);
load('undone', @undone);
load('cancelled', @cancelled);
load('kills', @killed);
$node->safe_psql('d', "INSERT INTO marks SELECT pg_ls_dir('$marks')");

# The postmaster kills whom it has asked to quit and who is still there after
# 5 s; on a machine that stood still that may be anybody.
my $impatient = log_count($node, qr/issuing SIGKILL to recalcitrant children/);
note("the postmaster lost its patience $impatient times") if $impatient;

$node->safe_psql('d', q{
	CREATE VIEW outcome AS
	SELECT s.key, s.kind, s.job, coalesce(e.n, 0) AS effects, e.attempt,
		(f.id IS NOT NULL)::integer AS failures, f.attempts, f.sqlstate, f.error,
		f.payload ->> 'key' IS DISTINCT FROM s.key AS mixed_up,
		-- the worker was killed or terminated by us
		EXISTS (SELECT FROM kills AS k WHERE
			k.how = 'kill' AND f.sqlstate = '57P02' AND
			f.error = format('worker process with PID %s crashed or was killed while it ran the job', k.pid) OR
			k.how = 'terminate' AND f.sqlstate = '57000' AND
			f.error = format('worker process with PID %s ended while it ran the job', k.pid)) } . ($impatient ? 'OR true' : '') . q{ AS explained
	FROM sent AS s
	LEFT JOIN (SELECT key, job, count(*) AS n, max(attempt) AS attempt FROM effects GROUP BY key, job) AS e USING (key, job)
	LEFT JOIN jq.failed_jobs AS f ON f.id = s.job});

# Passes if the query finds nothing.
sub none
{
	my ($name, $query) = @_;

	is($node->safe_psql('d', "SELECT x FROM ($query) AS x LIMIT 10"), '', $name);
	return;
}

# -- what ended, and how often

my ($sent) = $node->safe_psql('d', 'SELECT count(*) FROM sent');
cmp_ok($sent, '>=', $jobs, 'as many jobs as there should be');
is(join("\n", @errors), '', 'no dispatcher met an error');
none('every commit that was acknowledged is there',
	'SELECT key FROM acknowledged EXCEPT SELECT key FROM sent');
none('nothing of what was rolled back is there',
	q{SELECT key FROM undone INTERSECT (SELECT key FROM sent UNION SELECT key FROM effects UNION SELECT payload ->> 'key' FROM jq.failed_jobs)});
none('no two jobs have one id', 'SELECT job FROM sent GROUP BY job HAVING count(*) > 1');
none('no effect but of what was sent',
	'SELECT key, job FROM effects EXCEPT SELECT key, job FROM sent');
none('no failure but of what was sent',
	q{SELECT payload ->> 'key', id FROM jq.failed_jobs EXCEPT SELECT key, job FROM sent});
none('no effect twice', 'SELECT * FROM outcome WHERE effects > 1');
none('no job is both done and failed', 'SELECT * FROM outcome WHERE effects > 0 AND failures > 0');
none('no job was lost', q{SELECT * FROM outcome AS o WHERE effects = 0 AND failures = 0
	AND NOT (kind = 'skip' AND EXISTS (SELECT FROM marks AS m WHERE m.key = o.key))});
none('no job is left', 'SELECT id FROM jq.jobs');

# -- each by its kind

none('plain jobs were done', q{SELECT * FROM outcome WHERE kind = 'plain' AND effects <> 1});
none('jobs that failed at first were done later',
	q{SELECT * FROM outcome WHERE kind = 'once' AND (effects <> 1 OR attempt < 2)});
none('released jobs were done later',
	q{SELECT * FROM outcome AS o WHERE kind = 'release' AND (effects <> 1
		OR NOT EXISTS (SELECT FROM marks AS m WHERE m.key = o.key))});
none('skipped jobs have no effect, and did not fail',
	q{SELECT * FROM outcome WHERE kind = 'skip' AND (effects > 0 OR failures > 0)});
none('jobs with an error failed of it, after all their attempts',
	q{SELECT * FROM outcome WHERE kind = 'error'
		AND (failures, attempts, sqlstate, error) IS DISTINCT FROM (1, 2, 'FT001', 'no luck with ' || key)
		AND NOT (failures = 1 AND attempts = 2 AND explained)});
none('jq.fail() made jobs fail',
	q{SELECT * FROM outcome WHERE kind = 'fail'
		AND (failures, sqlstate, error) IS DISTINCT FROM (1, 'JQ001', 'never mind ' || key)});
none('jobs that kill their worker failed of that, after all their attempts',
	q{SELECT * FROM outcome WHERE kind = 'poison'
		AND NOT (failures = 1 AND attempts = 2 AND
			(sqlstate = '57P02' AND error ~ '^worker process with PID \d+ crashed or was killed while it ran the job$' OR explained))});
none('cancelled jobs were cancelled or done',
	q{SELECT * FROM outcome WHERE kind = 'cancel' AND NOT (effects = 1 AND failures = 0
		OR effects = 0 AND failures = 1 AND sqlstate = 'JQ004' AND error ~ '^cancelled by role ".*": on second thoughts$')});
none('and jq.cancel() told the truth',
	q{SELECT * FROM outcome JOIN cancelled AS c USING (key)
		WHERE c.answer = 'waiting' AND failures <> 1 OR c.answer = 'gone' AND effects <> 1
		OR c.answer NOT IN ('waiting', 'running', 'gone')});
none('nothing else was cancelled',
	q{SELECT * FROM outcome WHERE sqlstate = 'JQ004' AND kind NOT IN ('cancel', 'withdrawn')});
none('what was cancelled as it was dispatched did not run',
	q{SELECT * FROM outcome WHERE kind = 'withdrawn' AND (failures, sqlstate) IS DISTINCT FROM (1, 'JQ004')});
none('reasons are those of the job itself', 'SELECT * FROM outcome WHERE failures = 1 AND mixed_up');

# -- attempts of jobs that kill their workers.  The end of the postmaster lets
# -- it forget one, and what we kill ourselves may be begun in vain.

sub starts
{
	my ($key) = @_;

	return -e "$marks/$key" ? scalar(split(/\n/, slurp_file("$marks/$key"))) : 0;
}
cmp_ok(starts("poison-$_"), '<=', 2 + $kills, "poison-$_ is not started again and again") foreach 1 .. $poisons;

# -- attempts: each that was spent on nothing is a worker that we killed

my $spent = $node->safe_psql('d', q{
	SELECT coalesce(sum(CASE
		WHEN kind = 'once' THEN greatest(attempt - 2, 0)
		WHEN kind = 'error' THEN (sqlstate <> 'FT001')::integer
		WHEN failures = 1 THEN greatest(attempts - 1, 0)
		ELSE attempt - 1 END), 0)
	FROM outcome WHERE kind NOT IN ('poison', 'skip')});
cmp_ok($spent, '<=', @killed + 4 * $impatient, 'no more attempts than killed workers explain');

SKIP:
{
	skip('without a history of attempts', 3) unless $history;
	none('each attempt that ended with its worker is one that somebody killed',
		q{SELECT a.* FROM jq.attempts AS a JOIN sent AS s ON s.job = a.id
			WHERE a.sqlstate IN ('57P02', '57000')
			AND NOT EXISTS (SELECT FROM kills AS k WHERE k.pid = a.pid AND (k.how = 'kill') = (a.sqlstate = '57P02'))
			AND NOT (s.kind = 'poison' AND a.sqlstate = '57P02')} . ($impatient ? ' AND false' : ''));
	none('and nobody else was killed by it',
		q{SELECT pid FROM jq.attempts WHERE sqlstate IN ('57P02', '57000') GROUP BY pid HAVING count(*) > 1});
	none('the history has each effect',
		q{(SELECT job, attempt FROM effects EXCEPT ALL SELECT id, attempt FROM jq.attempts WHERE outcome = 'done')
		UNION ALL (SELECT id, attempt FROM jq.attempts WHERE outcome = 'done' EXCEPT ALL SELECT job, attempt FROM effects)});
}

# ---------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------

note("$sent jobs sent, ", scalar(@acknowledged), ' acknowledged, ', scalar(@undone), ' rolled back; ',
	'history of attempts ', $history ? 'on' : 'off');
note('faults: ', join(', ', map { "$_ $done{$_}" } sort keys %done));
note(scalar(@killed), " workers killed, which cost $spent attempts of others than poison");
note('restarts after a crash: ', log_count($node, qr/all server processes terminated; reinitializing/));
note($node->safe_psql('d', q{
	SELECT format('%s: %s, %s done, %s failed (%s), attempts up to %s', kind, count(*), sum(effects), sum(failures),
		string_agg(DISTINCT sqlstate, ', '), max(coalesce(attempt, attempts)))
	FROM outcome GROUP BY kind ORDER BY kind}));
note('jq.cancel() said: ', $node->safe_psql('d',
	q{SELECT string_agg(answer || ' ' || n, ', ') FROM (SELECT answer, count(*) AS n FROM cancelled GROUP BY answer ORDER BY answer) AS a}));
note('poison jobs were started so often: ', join(', ', map { starts("poison-$_") } 1 .. $poisons));

# ---------------------------------------------------------------------
# Poison on an idle server: nobody else writes, so nothing reaches the disk by
# chance before the next crash; nor by the end of a page of WAL, with a whole
# one before us
# ---------------------------------------------------------------------

ask('SELECT pg_switch_wal()');
send_poison('poison-alone');
my $ended = wait_until($node, 'd', 'SELECT NOT EXISTS (SELECT FROM jq.jobs)', 'a job that kills its worker is stopped on an idle server, too');
is(starts('poison-alone'), 2, 'it was started as often as it may');
is( ask(q{SELECT attempts, sqlstate FROM jq.failed_jobs WHERE payload ->> 'key' = 'poison-alone'}),
	'2|57P02', 'and failed of that')
  if $ended;

no_crash($node);
$node->stop($ended ? 'fast' : 'immediate');
done_testing();
