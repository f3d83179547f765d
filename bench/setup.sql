/*
 * bench/setup.sql
 *
 * What the measurements need in their database: handlers, a table to leave
 * results in, and the hand-written counterparts that jq is compared with.
 */

CREATE EXTENSION jq;
CREATE SCHEMA bench;

-- about 200 bytes, as text and as jsonb
CREATE FUNCTION bench.payload() RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT '{"order": 1048576, "customer": "c-20481024", "action": "send confirmation",
		"mail": "somebody@example.org",
		"note": "leave it with the neighbours on the second floor"}'::jsonb
$$;

/* ---------------------------------------------------------------------
 * Handlers
 * --------------------------------------------------------------------- */

CREATE TABLE bench.results (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	note text NOT NULL,
	done_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE bench.picked_up (
	sent float8 NOT NULL,
	started float8 NOT NULL
);

CREATE FUNCTION bench.noop(payload jsonb) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
END
$$;

CREATE FUNCTION bench.one_row(payload jsonb) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO bench.results (note) VALUES (payload ->> 'customer');
END
$$;

-- started: before anything else the handler does
CREATE FUNCTION bench.pick_up(payload jsonb) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	started timestamptz := clock_timestamp();
BEGIN
	INSERT INTO bench.picked_up (sent, started)
	VALUES ((payload ->> 'at')::float8, extract(epoch FROM started));
END
$$;

-- sleeps until the session that measures releases its lock
CREATE FUNCTION bench.sleeper(payload jsonb) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	PERFORM pg_advisory_xact_lock_shared(1);
END
$$;

SELECT jq.register('bench.noop(jsonb)');
SELECT jq.register('bench.one_row(jsonb)');
SELECT jq.register('bench.pick_up(jsonb)');
SELECT jq.register('bench.sleeper(jsonb)', timeout => NULL);
SELECT jq.register('bench.sleeper(jsonb)', 'sleeper_alone', timeout => NULL, overlap_key => '$');

/* ---------------------------------------------------------------------
 * Counterparts
 *
 * bench.plain is jq.jobs without its trigger, for the plain INSERT.
 * bench.hand has, in place of the index that serves jq's search, the one
 * that serves the search of the hand-written worker.
 * --------------------------------------------------------------------- */

CREATE TABLE bench.plain (LIKE jq.jobs INCLUDING ALL);
CREATE TABLE bench.hand (LIKE jq.jobs INCLUDING ALL);

-- LIKE copies every index and no storage parameter
DO $$
DECLARE
	options text;
	twin text;
	index regclass;
BEGIN
	SELECT array_to_string(reloptions, ', ') INTO options
	FROM pg_class WHERE oid = 'jq.jobs'::regclass;

	FOREACH twin IN ARRAY ARRAY['bench.plain', 'bench.hand'] LOOP
		IF options IS NOT NULL THEN
			EXECUTE format('ALTER TABLE %s SET (%s)', twin, options);
		END IF;
	END LOOP;

	FOR index IN
		SELECT indexrelid FROM pg_index
		WHERE indrelid = 'bench.hand'::regclass AND NOT indisprimary
	LOOP
		EXECUTE format('DROP INDEX %s', index);
	END LOOP;
END
$$;

CREATE INDEX hand_due ON bench.hand (queue, priority, available_at, id);

-- The worker one writes by hand: a transaction a job, which takes the next
-- row, calls the handler and commits.  One procedure a handler, so that the
-- call is static.  The plan is pinned to what serves the search best: one made
-- while the table was empty would only make the comparison easier for jq.
DO $do$
DECLARE
	handler text;
BEGIN
	FOREACH handler IN ARRAY ARRAY['noop', 'one_row'] LOOP
		EXECUTE format($format$
			CREATE PROCEDURE bench.work_%1$s(
				run_for interval,
				INOUT ran bigint DEFAULT 0,
				INOUT started_at float8 DEFAULT NULL,
				INOUT ended_at float8 DEFAULT NULL
			)
			LANGUAGE plpgsql
			AS $procedure$
			DECLARE
				job jsonb;
				deadline timestamptz := clock_timestamp() + run_for;
			BEGIN
				started_at := extract(epoch FROM clock_timestamp());
				PERFORM set_config('enable_seqscan', 'off', false),
					set_config('enable_bitmapscan', 'off', false),
					set_config('enable_sort', 'off', false);
				LOOP
					DELETE FROM bench.hand AS h
					USING (
						SELECT id FROM bench.hand
						WHERE queue = 'default' AND available_at <= clock_timestamp()
						ORDER BY priority, available_at, id
						LIMIT 1
						FOR UPDATE SKIP LOCKED
					) AS next
					WHERE h.id = next.id
					RETURNING h.payload INTO job;
					EXIT WHEN NOT FOUND;
					PERFORM bench.%1$s(job);
					COMMIT;
					ran := ran + 1;
					EXIT WHEN clock_timestamp() >= deadline;
				END LOOP;
				ended_at := extract(epoch FROM clock_timestamp());
			END
			$procedure$
		$format$, handler);
	END LOOP;
END
$do$;
