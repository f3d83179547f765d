# Random programs of dispatch, chain, batch, unique job, group, cancel, retry and
# rollback, run by several sessions beside workers, against a model of what must
# have become of each job.  JQ_TEST_SEED repeats one.
#
# Each job has a tag and a fate in its payload.  What was dispatched stands in
# tables that are written in the dispatching transaction, so that the model
# knows what was rolled back as the queue does.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../test/perl";
use IPC::Run;
use JqTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $seed = $ENV{JQ_TEST_SEED} // time ^ $$;
my $steps = $ENV{JQ_TEST_LONG} ? 6000 : 300;
my $sessions = 3;
srand($seed);
note("JQ_TEST_SEED=$seed repeats the programs");

my $node = jq_server('main', 'jq.workers = 4', 'fsync = off', 'max_connections = 40', "log_min_messages = fatal");
jq_database($node, 'd');
$node->safe_psql('d', q{
	CREATE TABLE sent (tag text PRIMARY KEY, job bigint, fate text, chain text, link integer, links integer, has_catch boolean,
		batch bigint, uniq text, grp text, free boolean NOT NULL DEFAULT false);
	COMMENT ON COLUMN sent.free IS 'cancelled, or in a batch that may be: it may have ended in any way';
	CREATE TABLE ran (tag text, job bigint, batch bigint, began timestamptz, ended timestamptz, n bigint GENERATED ALWAYS AS IDENTITY);
	CREATE TABLE mercy ();
	CREATE FUNCTION act(payload jsonb, context jq.context) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz := clock_timestamp();
	BEGIN
		CASE payload ->> 'fate'
			WHEN 'fail' THEN
				IF NOT EXISTS (SELECT FROM mercy) THEN PERFORM jq.fail('as told'); END IF;
			WHEN 'again' THEN
				IF context.attempt = 1 THEN RAISE 'once'; END IF;
			WHEN 'release' THEN
				IF began < context.dispatched_at + interval '50 ms' THEN PERFORM jq.release(); END IF;
			WHEN 'skip' THEN
				PERFORM jq.skip();
			ELSE
				NULL;
		END CASE;
		PERFORM pg_sleep(random() * 0.003);
		INSERT INTO public.ran VALUES (payload ->> 'tag', context.id, context.batch_id, began, clock_timestamp());
	END $$;
	CREATE FUNCTION j(tag text, fate text, grp text DEFAULT NULL) RETURNS jq.job_spec LANGUAGE sql
	AS $$SELECT jq.job('act', jsonb_build_object('tag', tag, 'fate', fate), group_key => grp)$$;
	SELECT jq.register('act(jsonb, jq.context)', max_attempts => 2, backoff => '{0 s}')});

# ---------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------

my $tags = 0;

sub pick { return $_[ int(rand(@_)) ]; }

sub fate { return pick(qw(done done done done again release skip fail)); }

# A chain's spec, and the rows of the model for it.
sub make_chain
{
	my ($batch) = @_;
	my $links = 2 + int(rand(4));
	my $catch = rand() < 0.3 ? 'true' : 'false';
	my $name = 'c' . ++$tags;
	my (@specs, @rows);

	foreach my $link (1 .. $links)
	{
		my ($tag, $fate) = ('t' . ++$tags, fate());

		push @specs, "j('$tag', '$fate')";
		push @rows, "('$tag', '$fate', '$name', $link, $links, $catch, $batch)";
	}
	my $spec = 'jq.chain(ARRAY[' . join(', ', @specs) . '], ' . ($catch eq 'true' ? "j('$name', 'done')" : 'NULL') . ')';
	return ($spec, 'INSERT INTO sent (tag, fate, chain, link, links, has_catch, batch) VALUES ' . join(', ', @rows));
}

sub make_step
{
	my $what = pick(qw(plain plain plain chain chain batch open unique unique group group group cancel cancel_batch retry));
	my ($tag, $fate) = ('t' . ++$tags, fate());

	if ($what eq 'plain')
	{
		return "INSERT INTO sent (tag, fate, job) SELECT '$tag', '$fate', jq.dispatch(j('$tag', '$fate'))";
	}
	if ($what eq 'group')
	{
		my $group = 'g' . int(rand(4));

		return "INSERT INTO sent (tag, fate, grp, job) SELECT '$tag', '$fate', '$group', jq.dispatch(j('$tag', '$fate', '$group'))";
	}
	if ($what eq 'chain')
	{
		my ($spec, $rows) = make_chain('NULL');

		return "SELECT jq.dispatch($spec); $rows";
	}
	if ($what eq 'unique')
	{
		my $key = 'u' . int(rand(3));
		my $conflict = pick(qw(keep keep replace));

		# the one that is replaced is not to be expected any more
		return "WITH d AS (SELECT * FROM jq.dispatch_unique('act', '{\"tag\": \"$tag\", \"fate\": \"done\"}', unique_key => '$key', on_conflict => '$conflict', delay => '20 ms')),
			gone AS (DELETE FROM sent WHERE job = (SELECT id FROM d WHERE outcome = 'replaced'))
			INSERT INTO sent (tag, fate, uniq, job) SELECT '$tag', 'done', '$key', id FROM d WHERE outcome <> 'kept'";
	}
	if ($what eq 'batch')
	{
		my $allow = pick('true', 'true', 'false');
		my (@specs, @rows);

		foreach (0 .. int(rand(5)))
		{
			if (rand() < 0.3)
			{
				my ($spec, $rows) = make_chain('currval($$jq.batches_id_seq$$)');

				push @specs, $spec;
				push @rows, $rows;
			}
			else
			{
				my ($member, $its_fate) = ('t' . ++$tags, fate());

				push @specs, "j('$member', '$its_fate')";
				push @rows, "INSERT INTO sent (tag, fate, batch) VALUES ('$member', '$its_fate', currval('jq.batches_id_seq'))";
			}
		}
		return "SELECT jq.dispatch_batch(ARRAY[" . join(', ', @specs) . "], 'b', j('then', 'done'), j('catch', 'done'), j('finally', 'done'), $allow); "
		  . join('; ', @rows);
	}
	if ($what eq 'open')
	{
		my $count = int(rand(6));

		return "SELECT jq.open_batch('o', j('then', 'done'), j('catch', 'done'), j('finally', 'done'), true);
			INSERT INTO sent (tag, fate, batch, job) SELECT '$tag-' || i, '$fate', currval('jq.batches_id_seq'), jq.dispatch('act', jsonb_build_object('tag', '$tag-' || i, 'fate', '$fate'), batch_id => currval('jq.batches_id_seq')) FROM generate_series(1, $count) AS i;
			SELECT jq.close_batch(currval('jq.batches_id_seq'))";
	}
	if ($what eq 'cancel')
	{
		return "WITH c AS (SELECT job FROM sent WHERE job IS NOT NULL AND batch IS NULL ORDER BY random() LIMIT 1), d AS (UPDATE sent SET free = true FROM c WHERE sent.job = c.job)
			SELECT jq.cancel(job) FROM c";
	}
	if ($what eq 'cancel_batch')
	{
		return 'SELECT jq.cancel_batch(id) FROM (SELECT id FROM jq.batches ORDER BY random() LIMIT 1) AS b';
	}
	return 'SELECT jq.retry(id) FROM (SELECT id FROM jq.failed_jobs ORDER BY random() LIMIT 2) AS f';
}

sub make_program
{
	my ($count) = @_;
	my $program = '';

	foreach (1 .. $count)
	{
		my $step = make_step();
		my $end = pick(('COMMIT') x 6, 'ROLLBACK', 'savepoint');

		$program .= $end eq 'savepoint' ? "BEGIN; SAVEPOINT s; $step; ROLLBACK TO s; COMMIT;\n" : "BEGIN; $step; $end;\n";
	}
	return $program;
}

sub run_programs
{
	my (@runs, @errors);

	foreach my $n (1 .. $sessions)
	{
		my $file = PostgreSQL::Test::Utils::tempdir() . "/program$n.sql";

		append_to_file($file, make_program($steps / $sessions));
		$errors[$n] = '';
		push @runs, IPC::Run::start([ 'psql', '-XqAt', '-d', $node->connstr('d'), '-f', $file ], '>', '/dev/null', '2>', \$errors[$n]);
	}
	$_->finish foreach @runs;

	# two may want the same job at the same moment
	is(join('', grep { /ERROR/ && !/is locked by another session|deadlock detected|current transaction is aborted/ } map { split /^/ } @errors[ 1 .. $sessions ]),
		'', 'the programs run without errors');
	cmp_ok($node->safe_psql('d', 'SELECT count(*) FROM sent'), '>', $steps / 2, 'and do something');
	return;
}

# ---------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------

sub settle
{
	wait_until($node, 'd', 'SELECT NOT EXISTS (SELECT FROM jq.jobs) AND NOT EXISTS (SELECT FROM jq.batches WHERE finished_at IS NULL)');
	return;
}

sub none
{
	my ($message, $query) = @_;

	is($node->safe_psql('d', "SELECT * FROM ($query) AS wrong LIMIT 3"), '', $message);
	return;
}

# What must be true whatever was cancelled.
sub check_always
{
	# but for a catch_job, which comes again if the retried link fails again
	none('no job was done twice', q{SELECT tag FROM ran WHERE tag NOT IN ('then', 'catch', 'finally') AND tag NOT LIKE 'c%' GROUP BY tag HAVING count(*) > 1});
	none('nothing ran that was rolled back', q{SELECT tag FROM ran WHERE tag NOT IN ('then', 'catch', 'finally') AND tag NOT LIKE 'c%' AND tag NOT IN (SELECT tag FROM sent)});
	none('nothing failed that was rolled back', q{SELECT payload FROM jq.failed_jobs WHERE payload ->> 'tag' NOT IN (SELECT tag FROM sent)});
	none('links run in order, one after the other', q{
		SELECT a.chain FROM sent AS a JOIN sent AS b ON b.chain = a.chain AND b.link > a.link
		JOIN ran AS x ON x.tag = a.tag JOIN ran AS y ON y.tag = b.tag WHERE y.began < x.ended});
	none('so do jobs of a group, by their ids', q{
		SELECT a.grp FROM sent AS a JOIN sent AS b ON b.grp = a.grp AND b.job > a.job
		JOIN ran AS x ON x.tag = a.tag JOIN ran AS y ON y.tag = b.tag
		WHERE y.began < x.ended AND NOT (x.ended < y.ended AND x.began < y.began) AND x.began < y.ended});
	none('jobs with the same key do not run at a time', q{
		SELECT a.uniq FROM sent AS a JOIN sent AS b ON b.uniq = a.uniq AND b.job > a.job
		JOIN ran AS x ON x.tag = a.tag JOIN ran AS y ON y.tag = b.tag WHERE y.began < x.ended AND x.began < y.ended});
	none('the numbers of batches add up', q{
		SELECT s.id, s.total, s.pending, s.failed, s.cancelled, (SELECT count(*) FROM sent AS m WHERE m.batch = s.id)
		FROM jq.batch_status AS s
		WHERE s.pending <> 0 OR s.total <> (SELECT count(*) FROM sent AS m WHERE m.batch = s.id)
			OR s.failed <> (SELECT count(*) FROM jq.failed_jobs AS f WHERE f.batch_id = s.id)
			OR s.total < s.failed + s.cancelled + (SELECT count(*) FROM ran AS r JOIN sent AS m USING (tag) WHERE m.batch = s.id)});
	none('callbacks come once, and the last one always', q{
		SELECT b.id, b.cancelled_at, s.failed, s.cancelled, r FROM jq.batches AS b JOIN jq.batch_status AS s USING (id) CROSS JOIN LATERAL (
			SELECT count(*) FILTER (WHERE tag = 'then') AS thens, count(*) FILTER (WHERE tag = 'catch') AS catches, count(*) FILTER (WHERE tag = 'finally') AS finals
			FROM ran WHERE ran.batch = b.id) AS r
		WHERE r.finals <> 1 OR r.thens > 1 OR r.catches > 1
			OR (r.thens = 0 AND s.failed = 0 AND s.cancelled = 0 AND b.cancelled_at IS NULL)
			OR (r.thens = 1 AND (s.failed > 0 OR s.cancelled > 0))
			OR (r.catches = 0 AND s.failed > 0)});
	is( $node->safe_psql('d', q{
			SELECT (SELECT count(*) FROM jq.held), (SELECT count(*) FROM jq.holders), (SELECT count(*) FROM jq.group_members), (SELECT count(*) FROM jq.claims)}),
		'0|0|0|0', 'nothing is left behind');
	return;
}

run_programs();
settle();
check_always();

# jobs that nobody could have cancelled ended as they were told to
my $plain = q{sent AS s WHERE s.chain IS NULL AND NOT s.free AND (s.batch IS NULL OR EXISTS
	(SELECT FROM jq.batches AS b WHERE b.id = s.batch AND b.cancelled_at IS NULL AND b.allow_failures))};
none('those that are to be done are', qq{SELECT s.tag, s.fate FROM $plain AND s.fate IN ('done', 'again', 'release') AND s.tag NOT IN (SELECT tag FROM ran)});
none('those that are to fail do', qq{SELECT s.tag FROM $plain AND s.fate = 'fail' AND s.tag NOT IN (SELECT payload ->> 'tag' FROM jq.failed_jobs)});
none('those that are to be skipped are', qq{SELECT s.tag FROM $plain AND s.fate = 'skip' AND (s.tag IN (SELECT tag FROM ran) OR s.tag IN (SELECT payload ->> 'tag' FROM jq.failed_jobs))});

# chains outside of batches go as far as their first failure
my $links = q{SELECT s.*, min(s.link) FILTER (WHERE s.fate = 'fail') OVER (PARTITION BY s.chain) AS stop FROM sent AS s WHERE s.chain IS NOT NULL AND s.batch IS NULL};
none('links before a failure are done', qq{SELECT l.tag FROM ($links) AS l WHERE (l.stop IS NULL OR l.link < l.stop) AND l.fate <> 'skip' AND l.tag NOT IN (SELECT tag FROM ran)});
none('those behind it are not', qq{SELECT l.tag FROM ($links) AS l WHERE l.link >= l.stop AND l.tag IN (SELECT tag FROM ran)});
none('but wait with the failed one', qq{
	SELECT l.tag FROM ($links) AS l WHERE l.link = l.stop AND NOT EXISTS
		(SELECT FROM jq.failed_jobs AS f WHERE f.payload ->> 'tag' = l.tag AND coalesce(jsonb_array_length(f.chain -> 'links'), 0) = l.links - l.link)});
none('and the catch_job has run', qq{SELECT l.chain FROM ($links) AS l WHERE l.has_catch AND (l.stop IS NOT NULL) <> (l.chain IN (SELECT tag FROM ran))});

# ---------------------------------------------------------------------
# With mercy
# ---------------------------------------------------------------------

$node->safe_psql('d', q{INSERT INTO mercy DEFAULT VALUES; DELETE FROM ran WHERE tag LIKE 'c%' AND tag <> 'catch'; SELECT jq.retry_all()});
settle();
check_always();
none('all that could be retried is done', q{
	SELECT f.payload FROM jq.failed_jobs AS f LEFT JOIN jq.batches AS b ON b.id = f.batch_id WHERE b.cancelled_by IS NULL AND f.superseded_by IS NULL});
none('chains are done to their ends', qq{SELECT l.tag FROM ($links) AS l WHERE l.fate <> 'skip' AND l.tag NOT IN (SELECT tag FROM ran)});

no_crash($node);
$node->stop;
done_testing();
