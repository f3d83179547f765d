# Handlers in other procedural languages: what they say of their job's end is
# heeded, though some of them pass on an error's message without its SQLSTATE.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = jq_server('main', 'jq.workers = 2', 'fsync = off');
jq_database($node, 'd');

# the same function in each: run the statement given, noting it before
my %body = (
	plpgsql => q{
		BEGIN
			INSERT INTO public.done (job) VALUES ((jq.current_job()).id);
			BEGIN
				EXECUTE payload ->> 'sql';
			EXCEPTION WHEN OTHERS THEN
				IF NOT payload ? 'trap' THEN RAISE; END IF;
				IF payload ? 'then' THEN RAISE 'another error'; END IF;
			END;
			RETURN '{"ended": "well"}';
		END},
	plperl => q{
		my ($sql) = $_[0] =~ /"sql": "([^"]*)"/;
		spi_exec_query('INSERT INTO public.done (job) VALUES ((jq.current_job()).id)');
		if ($_[0] =~ /"trap"/)
		{
			eval { spi_exec_query($sql) };
			die "another error\n" if $_[0] =~ /"then"/;
		}
		else
		{
			spi_exec_query($sql);
		}
		return '{"ended": "well"}';},
	plpython3u => q{
import json
given = json.loads(payload)
plpy.execute("INSERT INTO public.done (job) VALUES ((jq.current_job()).id)")
try:
    plpy.execute(given["sql"])
except plpy.SPIError as e:
    if "trap" not in given:
        raise
    if "then" in given:
        raise Exception("another error")
return '{"ended": "well"}'
},
	pltcl => q{
		spi_exec "INSERT INTO public.done (job) VALUES ((jq.current_job()).id)"
		regexp {"sql": "([^"]*)"} $1 all sql
		if {[string match {*"trap"*} $1]} {
			catch {spi_exec $sql}
			if {[string match {*"then"*} $1]} {error "another error"}
		} else {
			spi_exec $sql
		}
		return {{"ended": "well"}}
	});

sub run
{
	my ($language, $payload) = @_;

	my $id = $node->safe_psql('d', "TRUNCATE done; SELECT jq.dispatch('act_$language', '$payload')");
	return ($id, $node->safe_psql('d', "CALL jq.wait_for($id, '20 s')"));
}

foreach my $language (sort keys %body)
{
  SKIP:
	{
		my ($status) = $node->psql('d', $language eq 'plpgsql' ? 'SELECT 1' : "CREATE EXTENSION $language");
		skip "$language is not installed", 7 if $status != 0;
		$node->safe_psql('d', "CREATE FUNCTION act_$language(payload jsonb) RETURNS jsonb LANGUAGE $language AS \$jq\$$body{$language}\$jq\$");
		$node->safe_psql('d', "SELECT jq.register('act_$language(jsonb)', max_attempts => 2, backoff => '{0 s}', keep_result => '1 h')");

		my ($id, $state) = run($language, q{{"sql": "SELECT 1"}});
		is("$state " . $node->safe_psql('d', "SELECT jq.result($id), count(*) FROM done"), 'done {"ended": "well"}|1', "$language: it runs");

		($id, $state) = run($language, q{{"sql": "SELECT jq.fail(''given up'')"}});
		is("$state " . $node->safe_psql('d', "SELECT attempts, sqlstate, error, (SELECT count(*) FROM done) FROM jq.failed_jobs WHERE id = $id"),
			'failed 1|JQ001|given up|0', "$language: jq.fail() is final, its effects are undone");

		($id, $state) = run($language, q{{"sql": "SELECT jq.skip(''no need'')"}});
		is("$state " . $node->safe_psql('d', "SELECT jq.result($id) IS NULL, (SELECT count(*) FROM done)"), 'done t|0', "$language: jq.skip() ends as done, its effects are undone");

		($id, $state) = run($language, q{{"sql": "SELECT CASE WHEN (nextval(''once'')) = 1 THEN jq.release(''10 ms'') END"}})
		  if defined $node->safe_psql('d', 'DROP SEQUENCE IF EXISTS once; CREATE SEQUENCE once');
		is("$state " . $node->safe_psql('d', "SELECT jq.result($id), (SELECT count(*) FROM done), last_value FROM once"),
			'done {"ended": "well"}|1|2', "$language: jq.release() runs it again");

		($id, $state) = run($language, q{{"trap": 1, "sql": "SELECT jq.fail(''given up'')"}});
		is("$state " . $node->safe_psql('d', "SELECT jq.result($id), (SELECT count(*) FROM done)"), 'done {"ended": "well"}|1', "$language: a verdict that is trapped does not count");

		($id, $state) = run($language, q{{"trap": 1, "then": 1, "sql": "SELECT jq.skip()"}});
		like("$state " . $node->safe_psql('d', "SELECT attempts, sqlstate, error FROM jq.failed_jobs WHERE id = $id"),
			qr/^failed 2\|(P0001|38000|XX000)\|.*another error/, "$language: nor does it for an error that comes after it");

		($id, $state) = run($language, q{{"sql": "SELECT 1 / 0"}});
		like("$state " . $node->safe_psql('d', "SELECT attempts, sqlstate, error FROM jq.failed_jobs WHERE id = $id"),
			qr/^failed 2\|(22012|38000)\|.*division by zero/, "$language: an error is one");
	}
}

no_crash($node);
$node->stop;
done_testing();
