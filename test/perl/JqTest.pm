
=pod

=head1 NAME

JqTest - servers, handlers and waiting for the TAP tests of jq

=head1 SYNOPSIS

  use JqTest;

  my $node = jq_server('main', 'jq.workers = 2');
  jq_database($node, 'one');
  $node->safe_psql('one', "SELECT jq.dispatch('note')");
  wait_for_done($node, 'one', 1);
  no_crash($node);

=cut

package JqTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use Time::HiRes qw(usleep);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(
  jq_server
  jq_database
  jq_handlers
  wait_until
  wait_for_done
  wait_for_empty
  wait_for_running
  wait_for_gone
  jq_pids
  log_count
  log_since
  log_size
  no_crash
);

=pod

=over

=item jq_server(name, setting, ...)

A running server that has jq preloaded.

=cut

sub jq_server
{
	my ($name, @settings) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
	$node->append_conf('postgresql.conf', join("\n",
		"shared_preload_libraries = 'jq'",
		"max_worker_processes = 32",
		"max_prepared_transactions = 10",
		"restart_after_crash = on",
		"autovacuum = off",
		"log_line_prefix = '%m [%p] %b %e %q%a '",
		"log_statement = none",
		@settings) . "\n");
	$node->start;
	return $node;
}

=item jq_database(node, name, ...)

Makes databases with the extension and the handlers below.

=cut

sub jq_database
{
	my ($node, @names) = @_;

	foreach my $name (@names)
	{
		$node->safe_psql('postgres', "CREATE DATABASE $name")
		  unless $name eq 'postgres';
		$node->safe_psql($name, 'CREATE EXTENSION jq');
		jq_handlers($node, $name);
	}
	return;
}

=item jq_handlers(node, database)

Makes the table done and handlers that write a row to it for each attempt that
comes to its end: note; slow, which takes "seconds" from its payload; gate,
which waits for advisory lock "gate" of its payload; and shaky, which fails
in attempts up to "failures".

=cut

sub jq_handlers
{
	my ($node, $database) = @_;

	$node->safe_psql($database, q{
		CREATE TABLE public.done (
			job bigint, attempt integer, queue text, payload jsonb,
			role text DEFAULT current_user, database text DEFAULT current_database(),
			pid integer DEFAULT pg_backend_pid(),
			started_at timestamptz DEFAULT now(),
			at timestamptz DEFAULT clock_timestamp(),
			n bigint GENERATED ALWAYS AS IDENTITY
		);
		GRANT SELECT, INSERT ON public.done TO public;

		CREATE FUNCTION public.note(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.done (job, attempt, queue, payload)
			VALUES (context.id, context.attempt, context.queue, payload);
		END $$;

		CREATE FUNCTION public.slow(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.done (job, attempt, queue, payload)
			VALUES (context.id, context.attempt, context.queue, payload);
			PERFORM pg_sleep((payload ->> 'seconds')::float8);
		END $$;

		CREATE FUNCTION public.gate(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.done (job, attempt, queue, payload)
			VALUES (context.id, context.attempt, context.queue, payload);
			PERFORM pg_advisory_xact_lock_shared((payload ->> 'gate')::bigint);
		END $$;

		CREATE FUNCTION public.shaky(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.done (job, attempt, queue, payload)
			VALUES (context.id, context.attempt, context.queue, payload);
			IF context.attempt <= (payload ->> 'failures')::integer THEN
				RAISE 'attempt % fails as it should', context.attempt;
			END IF;
		END $$;

		SELECT jq.register('public.note(jsonb, jq.context)', backoff => ARRAY[interval '0 s']);
		SELECT jq.register('public.slow(jsonb, jq.context)', backoff => ARRAY[interval '0 s']);
		SELECT jq.register('public.gate(jsonb, jq.context)', backoff => ARRAY[interval '0 s'], timeout => NULL);
		SELECT jq.register('public.shaky(jsonb, jq.context)', backoff => ARRAY[interval '0 s']);
	});
	return;
}

=item wait_until(node, database, query, [name])

Waits until the query says true, and passes as a test if it does in time.
Looks more often than poll_query_until(), and shows the state if it fails.

=cut

sub wait_until
{
	my ($node, $database, $query, $name) = @_;
	my $deadline = time() + ($ENV{JQ_TEST_TIMEOUT} // 60);
	my ($value, $error) = ('', '');

	while (time() < $deadline)
	{
		$node->psql($database, $query, stdout => \$value, stderr => \$error);
		if ($value eq 't')
		{
			pass($name) if defined $name;
			return 1;
		}
		usleep(50_000);
	}

	diag("timed out waiting for: $query\nlast: $value $error");
	$node->psql(
		$database, q{
		SELECT s FROM jq.status AS s;
		SELECT w FROM jq.workers AS w;
		SELECT j FROM (SELECT id, name, role, attempts, available_at FROM jq.jobs ORDER BY id LIMIT 10) AS j;
		SELECT f FROM (SELECT id, name, role, attempts, sqlstate, error FROM jq.failed_jobs ORDER BY id LIMIT 10) AS f},
		stdout => \$value, stderr => \$error);
	diag("$value\n$error");
	if (defined $name)
	{
		fail($name);
		return 0;
	}
	die "timed out waiting for: $query";
}

=item wait_for_done(node, database, count, [name])

Waits until so many rows are in done.

=cut

sub wait_for_done
{
	my ($node, $database, $count, $name) = @_;

	return wait_until($node, $database, "SELECT count(*) >= $count FROM public.done", $name);
}

=item wait_for_empty(node, database, [name])

Waits until no job is left, held ones apart.

=cut

sub wait_for_empty
{
	my ($node, $database, $name) = @_;

	return wait_until($node, $database,
		'SELECT NOT EXISTS (SELECT FROM jq.jobs WHERE origin = (SELECT oid FROM pg_database WHERE datname = current_database()))',
		$name);
}

=item wait_for_running(node, database, count)

Waits until so many jobs are running, and have come as far as the wait in them:
their worker waits for a timer or a lock.

=cut

sub wait_for_running
{
	my ($node, $database, $count) = @_;

	return wait_until($node, $database, qq{
		SELECT count(*) >= $count FROM jq.running AS r
		JOIN pg_stat_activity AS a USING (pid)
		WHERE a.wait_event IN ('PgSleep', 'advisory')});
}

=item wait_for_gone(node, pid, ...)

Waits until none of the processes exists any more.

=cut

sub wait_for_gone
{
	my (@pids) = @_;
	my $deadline = time() + 60;

	while (time() < $deadline)
	{
		return 1 unless grep { kill(0, $_) && !is_zombie($_) } @pids;
		usleep(50_000);
	}
	return 0;
}

sub is_zombie
{
	my ($pid) = @_;

	open(my $stat, '<', "/proc/$pid/stat") or return 1;
	my $line = <$stat>;
	close($stat);
	return !defined $line || $line =~ /\) Z /;
}

=item jq_pids(node, [type])

The processes of jq, or those of one type: 'launcher', 'scheduler', 'worker'.

=cut

sub jq_pids
{
	my ($node, $type) = @_;
	my $pids = $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type LIKE 'jq "
		  . ($type // '%') . "' ORDER BY pid");

	return split(/\n/, $pids);
}

=item log_size(node), log_since(node, offset), log_count(node, pattern, offset)

The server's log: its length, its text from there on, and how many lines of it
match.

=cut

sub log_size
{
	my ($node) = @_;

	return -s $node->logfile;
}

sub log_since
{
	my ($node, $offset) = @_;

	return slurp_file($node->logfile, $offset // 0);
}

sub log_count
{
	my ($node, $pattern, $offset) = @_;
	my @lines = grep { $_ =~ $pattern } split(/\n/, log_since($node, $offset));

	return scalar @lines;
}

=item no_crash(node, [name])

Passes if no process of the server crashed, but for those that the test killed,
and none met an internal error or leaked something.

=cut

sub no_crash
{
	my ($node, $name) = @_;
	my @lines = grep {
		/PANIC:|TRAP:|was terminated by signal (?!9)|exited with exit code (?![01]\b)|\bXX\w{3} |WARNING: .*(leak|not closed|still referenced)/
	} split(/\n/, log_since($node, 0));

	is(join("\n", @lines), '', $name // 'no crash in the log of ' . $node->name);
	return;
}

=back

=cut

1;
