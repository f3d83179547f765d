# Settings of the database and of the role, and jq's own.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = jq_server('main', 'jq.workers = 2');
jq_database($node, 'd', 'plain');
my $version = $node->safe_psql('postgres', "SELECT current_setting('server_version_num')::integer / 10000");

# ---------------------------------------------------------------------
# The database's settings
# ---------------------------------------------------------------------

my %settings = (
	statement_timeout => '1s',
	lock_timeout => '10ms',
	idle_in_transaction_session_timeout => '500ms',
	idle_session_timeout => '500ms',
	client_connection_check_interval => '100ms',
	default_transaction_read_only => 'on',
	default_transaction_isolation => 'serializable',
	default_transaction_deferrable => 'on',
	search_path => 'nowhere',
	row_security => 'off',
	datestyle => 'SQL, DMY',
	intervalstyle => 'sql_standard',
	timezone => 'Asia/Kathmandu',
	extra_float_digits => '-15',
	bytea_output => 'escape',
	array_nulls => 'off',
	quote_all_identifiers => 'on',
	client_min_messages => 'error',
	log_min_error_statement => 'panic',
	check_function_bodies => 'off',
	standard_conforming_strings => 'off',
	temp_file_limit => '64kB',
	lc_messages => 'C',
	enable_indexscan => 'off',
	enable_seqscan => 'off',
	vacuum_cost_delay => '10ms',
	transaction_timeout => '1s');
delete $settings{transaction_timeout} if $version < 17;

$node->safe_psql('postgres', join('', map { "ALTER DATABASE d SET $_ = "
	. ($_ eq 'search_path' || $_ eq 'datestyle' ? $settings{$_} : "'$settings{$_}'") . ';' } sort keys %settings));
$node->safe_psql('postgres', q{
	CREATE ROLE picky LOGIN;
	ALTER ROLE picky SET statement_timeout = '1s';
	ALTER ROLE picky SET lock_timeout = '10ms';
	ALTER ROLE picky SET idle_in_transaction_session_timeout = '500ms';
	ALTER ROLE picky SET default_transaction_read_only = on;
	ALTER ROLE picky SET default_transaction_isolation = 'repeatable read';
	ALTER ROLE picky SET work_mem = '77MB';
	ALTER ROLE picky SET my.own = 'picky''s';
	ALTER ROLE picky IN DATABASE d SET search_path = picky_schema, "$user";
	CREATE ROLE quiet NOLOGIN;
	ALTER ROLE quiet SET work_mem = '78MB';
	ALTER ROLE quiet SET my.own = 'quiet''s';
	ALTER ROLE quiet IN DATABASE d SET search_path = quiet_schema;
});

# The sessions of this test are to be spared.
my $spare = 'SET default_transaction_read_only = off; SET default_transaction_isolation = "read committed"; SET statement_timeout = 0; SET search_path = public; SET idle_in_transaction_session_timeout = 0;'
  . ($version >= 17 ? 'SET transaction_timeout = 0;' : '');
$node->safe_psql('d', $spare . q{
	CREATE TABLE seen (job bigint, role text, settings jsonb);
	GRANT SELECT, INSERT ON seen TO public;
	CREATE FUNCTION look(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_sleep((payload ->> 'seconds')::float8);
		INSERT INTO public.seen
		SELECT context.id, current_user, jsonb_object_agg(name, current_setting(name, true))
		FROM unnest('{transaction_isolation,transaction_read_only,statement_timeout,lock_timeout,
			idle_in_transaction_session_timeout,transaction_timeout,search_path,work_mem,my.own,
			timezone,row_security,role,session_authorization}'::text[]) AS name;
	END $$;
	SELECT jq.register('look(jsonb, jq.context)', max_attempts => 1);
	SELECT jq.grant('picky', 'dispatch'), jq.grant('quiet', 'dispatch');
});

# processes that start with these settings
$node->restart;
foreach my $role ('current_user', 'picky', 'quiet')
{
	$node->safe_psql('d', $spare . ($role eq 'current_user' ? '' : "SET ROLE $role;")
		. q{SELECT jq.dispatch('look', '{"seconds": 2.5}')});
}
sub wait_d
{
	my ($query, $name) = @_;
	return wait_until($node, 'plain', "SELECT 1 = 1") && wait_until($node, 'd', $query, $name);
}
wait_d('SELECT count(*) = 3 FROM public.seen', "jobs run longer than the database's and the roles' limits for sessions");
is($node->safe_psql('d', 'SELECT count(*) FROM jq.failed_jobs'), '0', 'none failed');

sub seen
{
	my ($role, @names) = @_;

	return $node->safe_psql('d', "SELECT concat_ws('|', " . join(', ', map { "settings ->> '$_'" } @names)
		. ") FROM public.seen WHERE role = '$role'");
}
my $superuser = $node->safe_psql('d', 'SELECT current_user');
foreach my $role ($superuser, 'picky', 'quiet')
{
	is(seen($role, qw(transaction_isolation transaction_read_only statement_timeout lock_timeout idle_in_transaction_session_timeout row_security)),
		'read committed|off|0|0|0|on', "jobs of $role run read-write, read committed, without limits of the session");
	is(seen($role, 'timezone'), 'Asia/Kathmandu', "otherwise with the database's settings");
}
is(seen('picky', qw(search_path work_mem my.own)), q{picky_schema, "$user"|77MB|picky's}, "and with the role's");
is(seen('quiet', qw(search_path work_mem my.own)), q{quiet_schema|78MB|quiet's}, 'also of a role that cannot log in');

# the bookkeeping of failures, retries and late jobs under these settings
$node->safe_psql('d', $spare . q{
	TRUNCATE done;
	SELECT jq.dispatch('shaky', '{"failures": 2}'), jq.dispatch('shaky', '{"failures": 9}'),
		jq.dispatch('note', delay => '1 s'), jq.dispatch('missing', '{}') FROM set_config('jq.require_handler', 'off', false)});
wait_d('SELECT count(*) = 0 FROM jq.jobs', 'retries, failures and delays work under them');
is( $node->safe_psql('d', 'SELECT string_agg(concat_ws($$:$$, name, attempts, sqlstate), $$ $$ ORDER BY id) FROM jq.failed_jobs'),
	'shaky:3:P0001 missing:1:42704', 'failures are recorded');
is($node->safe_psql('d', 'SELECT count(*) FROM public.done'), '2', 'the others are done');

# and the by-hand ways
$node->safe_psql('d', $spare . 'SELECT jq.retry(id) FROM jq.failed_jobs; SELECT jq.flush(); SELECT * FROM jq.status; SELECT * FROM jq.queue_stats');
wait_d('SELECT count(*) = 0 FROM jq.jobs');
is(log_count($node, qr/jq (scheduler|worker|launcher) (?!57P01|P0001|42704)\w+ (ERROR|FATAL)/), 0, 'no process stumbles over the settings');

# ---------------------------------------------------------------------
# jq.enabled, jq.databases
# ---------------------------------------------------------------------

sub set_and_reload
{
	my ($name, $value) = @_;

	$node->safe_psql('postgres', "ALTER SYSTEM SET $name = $value");
	$node->reload;
	return;
}

$node->safe_psql('plain', "TRUNCATE done; SELECT jq.dispatch('slow', '{\"seconds\": 2}'), jq.dispatch('note', delay => '500 ms')");
wait_for_running($node, 'plain', 1);
set_and_reload('jq.enabled', 'off');
wait_until($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type IN ('jq scheduler', 'jq worker')",
	'jq.enabled = off sends schedulers and workers home');
is( $node->safe_psql('plain', "SELECT count(*) FROM done WHERE payload ? 'seconds' AND attempt = 1"),
	'1', 'after the job that was running');
like($node->safe_psql('plain', 'SELECT note FROM jq.status'), qr/jq\.enabled is off/, 'jq.status tells');
$node->safe_psql('plain', "SELECT jq.dispatch('note')");
set_and_reload('jq.enabled', 'on');
wait_for_done($node, 'plain', 3, 'jq.enabled = on brings them back');

set_and_reload('jq.databases', "'d, nowhere'");
wait_until($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type LIKE 'jq%' AND datname = 'plain'",
	'a database that is not in jq.databases is left');
wait_until($node, 'plain', "SELECT note LIKE '%jq.databases%' FROM jq.status", 'jq.status tells');
$node->safe_psql('d', $spare . "TRUNCATE done; SELECT jq.dispatch('note')");
wait_d('SELECT count(*) = 1 FROM public.done', 'one that is listed is served');
$node->safe_psql('plain', "TRUNCATE done; SELECT jq.dispatch('note')");
set_and_reload('jq.databases', "''");
wait_for_done($node, 'plain', 1, 'listed no more, all are');

set_and_reload('jq.queues', "'urgent, other'");
$node->safe_psql('plain', "TRUNCATE done; SELECT jq.restart_workers()");
wait_until($node, 'plain', 'SELECT workers = 0 AND scheduler_pid IS NOT NULL FROM jq.status');
$node->safe_psql('plain', "SELECT jq.dispatch('note'), jq.dispatch('note', priority => 1)");
is($node->safe_psql('plain', 'SELECT note FROM jq.status'), 'jobs of queue "default" are not run: jq.queues leaves it out', 'jq.status tells of a queue that is not served');
set_and_reload('jq.queues', "'other, default'");
wait_for_done($node, 'plain', 2, 'listed, it is served, also if there was no worker');
set_and_reload('jq.queues', "''");
is($node->safe_psql('plain', 'SELECT note IS NULL FROM jq.status'), 't', 'and jq.status is content');

# ---------------------------------------------------------------------
# jq.commit_wait
# ---------------------------------------------------------------------

my ($status, $stdout, $stderr) = $node->psql('plain', "SET jq.commit_wait = 'maybe'");
isnt($status, 0, 'other values are refused');
foreach my $value ('off', 'auto', 'on')
{
	set_and_reload('jq.enabled', 'on');
	set_and_reload('jq.commit_wait', $value);
	wait_until($node, 'plain', 'SELECT scheduler_pid IS NOT NULL FROM jq.status');
	$node->safe_psql('plain', "TRUNCATE done; CREATE TABLE sent_$value AS SELECT jq.dispatch('note') AS id FROM generate_series(1, 20000)");
	wait_for_done($node, 'plain', 200);
	# not read before the next start, when nothing is to run at first
	$node->safe_psql('postgres', 'ALTER SYSTEM SET jq.enabled = off');
	$node->stop('immediate');
	$node->start;
	is( $node->safe_psql('plain', qq{
			SELECT count(*) FROM sent_$value AS s
			LEFT JOIN jq.jobs AS j USING (id)
			LEFT JOIN done AS d ON d.job = s.id
			WHERE (j.id IS NULL) = (d.job IS NULL)}),
		'0', "jq.commit_wait = $value: after a crash each job is either there or done");
	my $left = $node->safe_psql('plain', 'SELECT count(*) FROM jq.jobs');
	note("$left of 20000 jobs were left");
	set_and_reload('jq.enabled', 'on');
	wait_for_empty($node, 'plain');
	is($node->safe_psql('plain', 'SELECT count(*), count(DISTINCT job), max(attempt) FROM done'),
		'20000|20000|1', 'and in the end all are done, once');
}

no_crash($node);
$node->stop;
done_testing();
