# What doc/database-life.md says of commands on databases, the extension, roles,
# functions and settings while jobs run and wait: one subtest for each row.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $node = jq_server('main', 'jq.workers = 3', 'jq.max_workers = 12', 'fsync = off');
my $gate = $node->basedir . '/gate';
my $limit = "SET lock_timeout = '20s'; SET statement_timeout = '40s';";
$node->safe_psql('postgres', 'CREATE ROLE r LOGIN; GRANT pg_read_server_files TO r');

# A database in which a job runs, waits and is delayed; returns their ids.  The
# one that runs waits for the gate; the others' queue is paused.
sub scene
{
	my ($database, %more) = @_;
	my $role = $more{role} ? "SET ROLE $more{role};" : '';

	append_to_file($gate, 'shut');
	jq_database($node, $database);
	$node->safe_psql($database, qq{
		CREATE FUNCTION wait_at_gate(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
		BEGIN
			INSERT INTO public.done (job, attempt, queue) VALUES (context.id, context.attempt, context.queue);
			WHILE (pg_stat_file('$gate', true)).size > 0 LOOP
				PERFORM pg_sleep(0.02);
			END LOOP;
		END \$\$;
		GRANT EXECUTE ON FUNCTION pg_stat_file(text, boolean) TO r;
		SELECT jq.register('wait_at_gate(jsonb, jq.context)', timeout => NULL, backoff => '{0 s}');
		SELECT jq.grant('r', 'dispatch');
		SELECT jq.pause('waits')});
	my $ids = $node->safe_psql($database, qq{$role
		SELECT jq.dispatch('wait_at_gate'), jq.dispatch('note', queue => 'waits'), jq.dispatch('note', queue => 'waits', delay => '100 ms')});
	my ($runs, @wait) = split(/\|/, $ids);
	wait_until($node, $database, "SELECT count(*) = 1 FROM jq.running WHERE id = $runs");
	return ($runs, @wait);
}

sub command
{
	my ($database, $command) = @_;
	my ($status, $stdout, $stderr) = $node->psql($database, "$limit\n$command", on_error_stop => 1);

	return $status == 0 ? '' : $stderr;
}

# Open the gate and let all jobs run; each must have its effect once, in its
# first attempt.
sub all_run
{
	my ($database, $name, $count) = @_;

	unlink($gate);
	$node->safe_psql($database, "SELECT jq.resume('waits')");
	wait_until($node, $database, 'SELECT count(*) = 0 FROM jq.jobs', "$name: all jobs end");
	is($node->safe_psql($database, 'SELECT count(*), count(DISTINCT job), max(attempt) FROM done'), ($count // 3) . '|' . ($count // 3) . '|1',
		"$name: each once, in its first attempt");
	is($node->safe_psql($database, 'SELECT count(*) FROM jq.failed_jobs'), '0', "$name: none failed");
	return;
}

sub drop
{
	unlink($gate);
	is(command('postgres', "DROP DATABASE IF EXISTS $_"), '', "$_ can be dropped") foreach @_;
	return;
}

sub interrupted
{
	my ($database, $id, $name) = @_;

	wait_until($node, $database, "SELECT count(*) = 1 FROM jq.running WHERE id = $id", "$name: the interrupted job runs again");
	is($node->safe_psql($database, "SELECT attempt FROM jq.running WHERE id = $id"), '1', "$name: and has not spent its attempt");
	return;
}

sub row
{
	my ($name, $test) = @_;

	subtest $name => $test;
	unlink($gate);
	return;
}

# ---------------------------------------------------------------------
# Databases
# ---------------------------------------------------------------------

foreach my $force ('', ' WITH (FORCE)')
{
	row "DROP DATABASE$force" => sub {
		scene('a');
		is(command('postgres', "DROP DATABASE a$force"), '', 'succeeds');
		is($node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE datname = 'a'"), '0', 'nobody is left there');
	};
}

foreach my $strategy ('wal_log', 'file_copy')
{
	row "CREATE DATABASE TEMPLATE, $strategy" => sub {
		my ($runs) = scene('a');
		my $offset = log_size($node);

		is(command('postgres', "CREATE DATABASE copy TEMPLATE a STRATEGY $strategy"), '', 'succeeds');
		interrupted('a', $runs, 'in the template');
		$node->wait_for_log(qr/3 jobs in database "copy" were not dispatched there and are held/, $offset);
		is($node->safe_psql('copy', 'SELECT held, ready, running FROM jq.status'), '3|0|0', 'in the copy all are held');
		all_run('a', 'in the template');
		usleep(300_000);
		is($node->safe_psql('copy', 'SELECT count(*), (SELECT count(*) FROM done) FROM jq.jobs'), '3|0', 'and stay so');
		is($node->safe_psql('copy', 'SELECT jq.adopt()'), '3', 'until they are adopted');
		all_run('copy', 'in the copy');
		drop('a', 'copy');
	};
}

row 'CREATE DATABASE TEMPLATE, refused' => sub {
	my ($runs) = scene('a');
	my $pid = $node->safe_psql('a', "SELECT pid FROM jq.running WHERE id = $runs");

	$node->safe_psql('postgres', 'ALTER ROLE r CREATEDB');
	like(command('postgres', "SET ROLE r;\nCREATE DATABASE copy TEMPLATE a"), qr/permission denied to copy database "a"/, 'who may not copy it');
	is($node->safe_psql('a', "SELECT pid FROM jq.running WHERE id = $runs"), $pid, 'interrupts no job');
	$node->safe_psql('postgres', 'ALTER ROLE r NOCREATEDB');
	all_run('a', 'as before');
	drop('a');
};

row 'ALTER DATABASE RENAME' => sub {
	my ($runs) = scene('a');

	is(command('postgres', 'ALTER DATABASE a RENAME TO b'), '', 'succeeds');
	interrupted('b', $runs, 'renamed');
	all_run('b', 'renamed');
	drop('b');
};

row 'ALTER DATABASE SET TABLESPACE' => sub {
	my ($runs) = scene('a');

	$node->safe_psql('postgres', "SET allow_in_place_tablespaces = on; CREATE TABLESPACE other LOCATION ''");
	is(command('postgres', 'ALTER DATABASE a SET TABLESPACE other'), '', 'succeeds');
	interrupted('a', $runs, 'moved');
	all_run('a', 'moved');
	drop('a');
	$node->safe_psql('postgres', 'DROP TABLESPACE other');
};

row 'ALTER DATABASE ALLOW_CONNECTIONS' => sub {
	my ($runs) = scene('a');

	is(command('postgres', 'ALTER DATABASE a ALLOW_CONNECTIONS false'), '', 'succeeds');
	wait_until($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'a'", 'all leave');
	usleep(500_000);
	is($node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE datname = 'a'"), '0', 'and nobody comes back');
	is(command('postgres', 'ALTER DATABASE a ALLOW_CONNECTIONS true'), '', 'and back');
	interrupted('a', $runs, 'allowed again');
	all_run('a', 'allowed again');
	drop('a');
};

row 'ALTER DATABASE CONNECTION LIMIT' => sub {
	my ($runs) = scene('a', role => 'r');

	is(command('postgres', 'ALTER DATABASE a CONNECTION LIMIT 0'), '', 'succeeds');
	is($node->safe_psql('a', "SELECT attempt FROM jq.running WHERE id = $runs"), '1', 'the running job goes on');
	all_run('a', 'limited');
	$node->safe_psql('a', 'SELECT jq.restart_workers()');
	wait_until($node, 'a', "SELECT count(*) = 0 FROM jq.workers");
	$node->safe_psql('a', "TRUNCATE done; SET ROLE r; SELECT jq.dispatch('note')");
	wait_for_done($node, 'a', 1, 'new workers start');
	drop('a');
};

# ---------------------------------------------------------------------
# The extension
# ---------------------------------------------------------------------

row 'ALTER EXTENSION SET SCHEMA' => sub {
	my ($runs) = scene('a');

	like(command('a', 'ALTER EXTENSION jq SET SCHEMA public'), qr/ERROR: +extension "jq" does not support SET SCHEMA/, 'is refused');
	is($node->safe_psql('a', "SELECT attempt FROM jq.running WHERE id = $runs"), '1', 'the running job goes on');
	all_run('a', 'as before');
	drop('a');
};

row 'ALTER EXTENSION UPDATE' => sub {
	my ($runs) = scene('a');

	is(command('a', 'ALTER EXTENSION jq UPDATE'), '', 'succeeds');
	interrupted('a', $runs, 'updated');
	all_run('a', 'updated');
	drop('a');
};

row 'DROP EXTENSION' => sub {
	scene('a');
	is(command('a', 'DROP EXTENSION jq CASCADE'), '', 'succeeds');
	wait_until($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'a'", 'all leave');
	unlink($gate);
	my $offset = log_size($node);
	is(command('a', 'CREATE EXTENSION jq'), '', 'it can be created again');
	$node->wait_for_log(qr/jq scheduler for database "a" started/, $offset);
	$node->safe_psql('a', q{
		CREATE TABLE again (job bigint);
		CREATE FUNCTION again(payload jsonb, context jq.context) RETURNS void LANGUAGE sql AS 'INSERT INTO public.again VALUES (context.id)';
		SELECT jq.register('again(jsonb, jq.context)');
		SELECT jq.dispatch('again')});
	wait_until($node, 'a', 'SELECT count(*) = 1 FROM again', 'and runs jobs');
	drop('a');
};

row 'DROP SCHEMA' => sub {
	scene('a');
	is(command('a', 'DROP SCHEMA jq CASCADE'), '', 'succeeds');
	wait_until($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'a'", 'all leave');
	drop('a');
};

row 'DROP EXTENSION, rolled back' => sub {
	my ($runs) = scene('a');

	is(command('a', 'BEGIN; DROP EXTENSION jq CASCADE; SELECT pg_sleep(0.3); ROLLBACK'), '', 'succeeds');
	interrupted('a', $runs, 'rolled back');
	all_run('a', 'rolled back');
	drop('a');
};

row 'by a job of its own' => sub {
	jq_database($node, 'a');
	$node->safe_psql('a', q{
		CREATE FUNCTION runs(payload jsonb) RETURNS void LANGUAGE plpgsql AS 'BEGIN EXECUTE payload #>> ''{}''; END';
		SELECT jq.register('runs(jsonb)', max_attempts => 1);
		SELECT jq.dispatch('runs', to_jsonb(c)) FROM unnest(ARRAY['ALTER DATABASE a ALLOW_CONNECTIONS false',
			'DROP EXTENSION jq CASCADE', 'ALTER EXTENSION jq UPDATE', 'DROP SCHEMA jq CASCADE']) AS c;
		SELECT jq.dispatch('note')});
	wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs', 'all jobs end');
	is($node->safe_psql('a', 'SELECT count(*), min(attempts), min(sqlstate), max(sqlstate), (SELECT count(*) FROM done) FROM jq.failed_jobs'),
		'4|1|55006|55006|1', 'it fails, and holds up nobody');
	drop('a');
};

# ---------------------------------------------------------------------
# Roles
# ---------------------------------------------------------------------

row 'DROP ROLE' => sub {
	$node->safe_psql('postgres', 'CREATE ROLE leaves LOGIN; GRANT pg_read_server_files TO leaves');
	my ($runs) = do
	{
		jq_database($node, 'a');
		append_to_file($gate, 'shut');
		$node->safe_psql('a', qq{
			CREATE FUNCTION wait_at_gate(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS \$\$
			BEGIN
				INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt);
				WHILE (pg_stat_file('$gate', true)).size > 0 LOOP PERFORM pg_sleep(0.02); END LOOP;
			END \$\$;
			GRANT EXECUTE ON FUNCTION pg_stat_file(text, boolean) TO leaves;
			SELECT jq.register('wait_at_gate(jsonb, jq.context)', timeout => NULL, backoff => '{0 s}');
			SELECT jq.grant('leaves', 'dispatch'), jq.pause('waits');
			SET ROLE leaves;
			SELECT jq.dispatch('wait_at_gate'), jq.dispatch('note', queue => 'waits'), jq.dispatch('note', queue => 'waits')});
		wait_until($node, 'a', 'SELECT count(*) = 1 FROM jq.running');
		$node->safe_psql('a', 'SELECT id FROM jq.running');
	};
	my $offset = log_size($node);
	$node->safe_psql('a', 'REVOKE EXECUTE ON FUNCTION pg_stat_file(text, boolean) FROM leaves');
	like(command('a', 'DROP ROLE leaves'), qr/role "leaves" cannot be dropped because some objects depend on it/, 'is refused while it has rights in jq');
	is(command('a', "SELECT jq.revoke('leaves', 'dispatch'); DROP ROLE leaves"), '', 'and succeeds without them');
	unlink($gate);
	wait_until($node, 'a', "SELECT count(*) = 1 FROM done WHERE job = $runs", 'a running job comes to its end');
	$node->safe_psql('a', "SELECT jq.resume('waits'), jq.restart_workers()");
	$node->wait_for_log(qr/jobs of role "leaves" in database "a" wait: the role does not exist/, $offset);
	usleep(300_000);
	is($node->safe_psql('a', 'SELECT note FROM jq.status'), 'jobs of role "leaves" are not run: the role does not exist', 'jq.status says so');
	is($node->safe_psql('a', 'SELECT count(*), max(attempts) FROM jq.jobs'), '2|0', 'waiting ones wait');
	$node->safe_psql('a', 'CREATE ROLE leaves; SELECT jq.restart_workers()');
	wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs', 'they run when a role of that name is there again');
	is($node->safe_psql('a', 'SELECT count(*), max(role), max(attempt) FROM done'), '3|leaves|1', 'as that role');
	drop('a');
	$node->safe_psql('postgres', 'DROP ROLE leaves');
};

row 'DROP ROLE with an idle worker' => sub {
	jq_database($node, 'a');
	$node->safe_psql('postgres', 'CREATE ROLE leaves LOGIN');
	$node->safe_psql('a', "SELECT jq.grant('leaves', 'administer'), jq.grant('leaves', 'dispatch'); SET ROLE leaves; SELECT jq.dispatch('note'), jq.dispatch('note', delay => '2 s'), jq.dispatch('note', delay => '2.1 s')");
	wait_until($node, 'a', "SELECT count(*) >= 1 FROM jq.workers WHERE role = 'leaves' AND state = 'idle'");
	my $offset = log_size($node);
	is(command('a', 'DROP OWNED BY leaves; DROP ROLE leaves'), '', 'succeeds');
	usleep(3_000_000);
	is($node->safe_psql('a', 'SELECT count(*), max(attempts), (SELECT count(*) FROM jq.workers) FROM jq.jobs'), '2|0|0', 'its worker leaves, its jobs wait');
	is(log_count($node, qr/invalid role OID|role ""/, $offset), 0, 'without a stumble');
	$node->safe_psql('a', "CREATE ROLE leaves; SELECT jq.grant('leaves', 'dispatch'); SELECT jq.restart_workers()");
	wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs', 'they run when a role of that name is there again');
	is($node->safe_psql('a', 'SELECT note IS NULL FROM jq.status'), 't', 'and nothing is said of the former one');
	my ($status, $stdout, $stderr) = $node->psql('a', 'SET ROLE leaves; SELECT jq.pause()');
	like($stderr, qr/permission denied for extension "jq"/, 'whose rights the new one has not got');
	$node->safe_psql('a', "SELECT jq.revoke('leaves', 'dispatch')");
	drop('a');
	$node->safe_psql('postgres', 'DROP ROLE leaves');
};

row 'ALTER ROLE RENAME' => sub {
	$node->safe_psql('postgres', 'CREATE ROLE web LOGIN; GRANT pg_read_server_files TO web');
	my ($runs) = scene('a', role => 'r');
	$node->safe_psql('a', q{
		GRANT EXECUTE ON FUNCTION pg_stat_file(text, boolean) TO web;
		SELECT jq.grant('web', 'dispatch', 'waits'), jq.grant('web', 'dispatch', 'gates');
		SET ROLE web;
		SELECT jq.dispatch('wait_at_gate', queue => 'gates'), jq.dispatch('note', queue => 'waits'), jq.dispatch('note', queue => 'waits')});
	wait_until($node, 'a', 'SELECT count(*) = 2 FROM jq.running');

	my $offset = log_size($node);
	is(command('a', 'ALTER ROLE web RENAME TO site'), '', 'succeeds');
	is($node->safe_psql('a', 'SELECT role, attempt FROM jq.running ORDER BY role'), "r|1\nsite|1", 'the running job goes on');
	unlink($gate);
	$node->safe_psql('a', "SELECT jq.resume('waits'), jq.restart_workers()");
	wait_until($node, 'a', 'SELECT count(*) = 4 FROM done', 'to its end');
	$node->wait_for_log(qr/jobs of role "web" in database "a" wait: the role does not exist/, $offset);
	usleep(300_000);
	is($node->safe_psql('a', 'SELECT note FROM jq.status'), 'jobs of role "web" are not run: the role does not exist', 'jq.status says so');
	is($node->safe_psql('a', 'SELECT count(*), min(role), max(attempts) FROM jq.jobs'), '2|web|0', 'waiting ones wait');
	like(command('a', "SET ROLE site;\nSELECT jq.dispatch('note', queue => 'waits')"), qr/permission denied for queue "waits"/, 'its rights are not under the new name');

	# what the page says
	is( command('a', join('', map { "UPDATE jq.$_ SET role = 'site' WHERE role = 'web';" } qw(grants jobs failed_jobs results attempts))),
		'', 'the rows can be moved');
	wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs', 'then they run');
	is($node->safe_psql('a', "SELECT count(*), max(attempt) FROM done WHERE role = 'site'"), '2|1', 'as that role');
	is(command('a', "SET ROLE site;\nSELECT jq.dispatch('note', queue => 'waits')"), '', 'and it has its rights again');
	wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs');
	is(command('a', "SELECT jq.revoke('site', 'dispatch', 'waits'), jq.revoke('site', 'dispatch', 'gates'); DROP OWNED BY site; DROP ROLE site"), '', 'which can be taken');
	drop('a');
};

row 'ALTER ROLE NOLOGIN' => sub {
	my ($runs) = scene('a', role => 'r');

	is(command('a', 'ALTER ROLE r NOLOGIN'), '', 'succeeds');
	is($node->safe_psql('a', "SELECT attempt FROM jq.running WHERE id = $runs"), '1', 'the running job goes on');
	$node->safe_psql('a', 'SELECT jq.restart_workers()');
	all_run('a', 'without login');
	is($node->safe_psql('a', 'SELECT DISTINCT role FROM done'), 'r', 'as that role');
	$node->safe_psql('a', 'ALTER ROLE r LOGIN');
	drop('a');
};

row 'REVOKE CONNECT' => sub {
	my ($runs) = scene('a', role => 'r');
	my $offset = log_size($node);

	is(command('a', 'REVOKE CONNECT ON DATABASE a FROM PUBLIC'), '', 'succeeds');
	is($node->safe_psql('a', "SELECT attempt FROM jq.running WHERE id = $runs"), '1', 'the running job goes on');
	$node->safe_psql('a', 'SELECT jq.restart_workers()');
	unlink($gate);
	wait_until($node, 'a', "SELECT count(*) = 1 FROM done WHERE job = $runs", 'to its end');
	$node->safe_psql('a', "SELECT jq.resume('waits')");
	$node->wait_for_log(qr/jobs of role "r" are not run: the role lacks CONNECT on the database/, $offset);
	wait_until($node, 'a', q{SELECT note = 'jobs of role "r" are not run: the role lacks CONNECT on the database' FROM jq.status}, 'jq.status says so');
	is($node->safe_psql('a', 'SELECT count(*), max(attempts) FROM jq.jobs'), '2|0', 'waiting ones wait');
	$node->safe_psql('a', 'GRANT CONNECT ON DATABASE a TO PUBLIC; SELECT jq.restart_workers()');
	all_run('a', 'granted again');
	drop('a');
};

row 'ALTER ROLE CONNECTION LIMIT' => sub {
	my ($runs) = scene('a', role => 'r');

	is(command('a', "ALTER ROLE r CONNECTION LIMIT $_; SELECT jq.restart_workers()"), '', "$_ succeeds") foreach 0, 1;
	is($node->safe_psql('a', "SELECT attempt FROM jq.running WHERE id = $runs"), '1', 'the running job goes on');
	all_run('a', 'limited');
	$node->safe_psql('a', 'ALTER ROLE r CONNECTION LIMIT -1');
	drop('a');
};

row 'REVOKE EXECUTE' => sub {
	my ($runs) = scene('a', role => 'r');

	is(command('a', 'REVOKE EXECUTE ON FUNCTION note(jsonb, jq.context), wait_at_gate(jsonb, jq.context) FROM PUBLIC'), '', 'succeeds');
	all_fail('a', $runs, '42501|permission denied for handler "note"');
	drop('a');
};

# The job that runs comes to its end, the others fail so.
sub all_fail
{
	my ($database, $runs, $reason, $attempts) = @_;

	is($node->safe_psql($database, "SELECT attempt FROM jq.running WHERE id = $runs"), '1', 'the running job goes on');
	unlink($gate);
	$node->safe_psql($database, "SELECT jq.resume('waits')");
	wait_until($node, $database, 'SELECT count(*) = 0 FROM jq.jobs', 'all jobs end');
	is($node->safe_psql($database, 'SELECT job, attempt FROM done'), "$runs|1", 'it has its effect');
	is( $node->safe_psql($database, 'SELECT DISTINCT attempts, sqlstate, error FROM jq.failed_jobs'),
		($attempts // 3) . "|$reason", 'the others fail, with the reason');
	is($node->safe_psql($database, 'SELECT count(*) FROM jq.failed_jobs'), '2', 'all of them');
	return;
}

# ---------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------

row 'DROP FUNCTION' => sub {
	my ($runs) = scene('a');

	is(command('a', 'DROP FUNCTION note(jsonb, jq.context), wait_at_gate(jsonb, jq.context)'), '', 'succeeds');
	all_fail('a', $runs, '42883|function public.note(pg_catalog.jsonb,jq.context) of handler "note" does not exist');
	drop('a');
};

row 'DROP FUNCTION and CREATE FUNCTION' => sub {
	scene('a');
	$node->safe_psql('a', "SELECT jq.register('note(jsonb, jq.context)', backoff => '{0.5 s}')");
	is(command('a', 'DROP FUNCTION note(jsonb, jq.context)'), '', 'succeeds');
	unlink($gate);
	$node->safe_psql('a', "SELECT jq.resume('waits')");
	wait_until($node, 'a', 'SELECT count(*) = 2 AND min(attempts) = 1 FROM jq.jobs', 'jobs fail as attempts');
	$node->safe_psql('a', q{CREATE FUNCTION note(payload jsonb, context jq.context) RETURNS void LANGUAGE sql AS
		'INSERT INTO public.done (job, attempt) VALUES (context.id, context.attempt)'});
	wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs', 'and run when it is there again');
	is($node->safe_psql('a', 'SELECT count(*), max(attempt) <= 3 FROM done'), '3|t', 'in a later attempt');
	drop('a');
};

row 'CREATE OR REPLACE FUNCTION' => sub {
	my ($runs) = scene('a');

	is(command('a', q{CREATE OR REPLACE FUNCTION note(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS
		$$BEGIN INSERT INTO public.done (job, attempt, queue) VALUES (context.id, context.attempt, 'replaced'); END$$}), '', 'succeeds');
	all_run('a', 'replaced');
	is($node->safe_psql('a', "SELECT count(*) FROM done WHERE queue = 'replaced'"), '2', 'by the new function');
	drop('a');
};

row 'jq.unregister' => sub {
	my ($runs) = scene('a');

	is(command('a', "SELECT jq.unregister('note', force => true), jq.unregister('wait_at_gate', force => true)"), '', 'succeeds');
	all_fail('a', $runs, '42704|handler "note" is not registered', 1);
	drop('a');
};

# ---------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------

my %settings = (
	default_transaction_read_only => 'on',
	default_transaction_isolation => 'serializable',
	default_transaction_deferrable => 'on',
	statement_timeout => '100ms',
	lock_timeout => '100ms',
	idle_in_transaction_session_timeout => '100ms',
	idle_session_timeout => '100ms');
$settings{transaction_timeout} = '100ms' if $node->safe_psql('postgres', "SELECT count(*) FROM pg_settings WHERE name = 'transaction_timeout'");

foreach my $whose ('DATABASE a', 'ROLE r')
{
	row "settings of $whose" => sub {
		scene('a', role => 'r');
		$node->safe_psql('postgres', join('', map { "ALTER $whose SET $_ = '$settings{$_}';" } sort keys %settings)
			  . "ALTER $whose SET search_path = elsewhere");
		$node->safe_psql('a', "BEGIN READ WRITE; SELECT jq.restart_workers(); COMMIT");
		unlink($gate);
		$node->safe_psql('a', q{BEGIN READ WRITE;
			SET LOCAL statement_timeout = 0;
			CREATE FUNCTION public.tells(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
			BEGIN
				PERFORM pg_sleep(0.4);
				INSERT INTO public.done (job, attempt, payload) VALUES (context.id, context.attempt, jsonb_build_object(
					'isolation', current_setting('transaction_isolation'), 'read_only', current_setting('transaction_read_only'),
					'path', current_setting('search_path')));
			END $$;
			SELECT jq.register('public.tells(jsonb, jq.context)'), jq.resume('waits');
			SET LOCAL ROLE r;
			SELECT jq.dispatch('tells');
			COMMIT});
		wait_until($node, 'a', 'SELECT count(*) = 0 FROM jq.jobs', 'all jobs end');
		is($node->safe_psql('a', 'SELECT count(*), max(attempt) FROM public.done'), '4|1', 'each once, in its first attempt');
		is( $node->safe_psql('a', 'SELECT payload FROM public.done WHERE payload ? $$path$$'),
			'{"path": "elsewhere", "isolation": "read committed", "read_only": "off"}', 'as they should be');
		$node->safe_psql('postgres', "ALTER $whose RESET ALL");
		drop('a');
	};
}

no_crash($node);
$node->stop;
done_testing();
