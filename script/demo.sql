/*
 * How an application uses jq, from the first table to the first job.
 *
 * script/demo runs this in an empty database, with the webhooks on standard
 * input, one JSON object {"event": ..., "payload": ...} a line.
 */

\set ON_ERROR_STOP on
\set SHOW_CONTEXT never

CREATE EXTENSION jq;

/* ---------------------------------------------------------------------
 * The application's tables
 * --------------------------------------------------------------------- */

CREATE SCHEMA demo;

CREATE TABLE demo.repositories (
	name text PRIMARY KEY,
	events bigint NOT NULL,
	last_sender text
);

-- The primary key would catch a job that ran twice.
CREATE TABLE demo.events (
	job_id bigint PRIMARY KEY,
	event text NOT NULL,
	action text,
	repository text REFERENCES demo.repositories,
	day date NOT NULL,
	dispatched_at timestamptz NOT NULL,
	handled_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE demo.daily_counts (
	day date,
	event text,
	events bigint NOT NULL,
	PRIMARY KEY (day, event)
);

CREATE VIEW demo.speed AS
	SELECT count(*) AS jobs_done,
		max(handled_at) - min(dispatched_at) AS from_first_dispatch_to_last_job,
		round(count(*) / nullif(extract(epoch FROM max(handled_at) - min(dispatched_at)), 0)) AS jobs_per_second
	FROM demo.events;

/* ---------------------------------------------------------------------
 * Handlers
 *
 * A handler is a function that takes the payload and, if it likes, a
 * jq.context, which tells it about its job.  What it writes and the removal
 * of its job are one transaction: both happen or neither.
 * --------------------------------------------------------------------- */

CREATE FUNCTION demo.record_event(payload jsonb, context jq.context) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
	event text := payload ->> 'event';
	body jsonb := payload -> 'payload';
	repository text := body #>> '{repository,full_name}';
	today date;
BEGIN
	-- the day of the newest thing in the webhook, else that of its arrival
	SELECT max((stamp #>> '{}')::timestamptz) AT TIME ZONE 'UTC' INTO today
	FROM jsonb_path_query(body, '$.*.updated_at ? (@ like_regex "^[0-9]{4}-[0-9]{2}-[0-9]{2}T")') AS stamp;
	today := coalesce(today, (context.dispatched_at AT TIME ZONE 'UTC')::date);

	IF repository IS NOT NULL THEN
		INSERT INTO demo.repositories AS r (name, events, last_sender)
		VALUES (repository, 1, body #>> '{sender,login}')
		ON CONFLICT (name) DO UPDATE
		SET events = r.events + 1, last_sender = excluded.last_sender;
	END IF;

	INSERT INTO demo.events (job_id, event, action, repository, day, dispatched_at)
	VALUES (context.id, event, body ->> 'action', repository, today, context.dispatched_at);

	INSERT INTO demo.daily_counts AS c (day, event, events)
	VALUES (today, event, 1)
	ON CONFLICT ON CONSTRAINT daily_counts_pkey DO UPDATE
	SET events = c.events + 1;
END
$$;

-- This one fails on purpose.  Its INSERT is undone each time, it is tried
-- again after a tenth of a second, and then ends up in jq.failed_jobs.
CREATE FUNCTION demo.answer_ping(payload jsonb, context jq.context) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
	INSERT INTO demo.events (job_id, event, day, dispatched_at)
	VALUES (context.id, 'ping', current_date, context.dispatched_at);

	RAISE EXCEPTION 'nobody answers the ping of hook %', payload #>> '{payload,hook_id}'
	USING HINT = 'This handler fails on purpose.';
END
$$;

SELECT jq.register('demo.record_event(jsonb, jq.context)');
SELECT jq.register('demo.answer_ping(jsonb, jq.context)', max_attempts => 2, backoff => '{100 ms}');

/* ---------------------------------------------------------------------
 * The application's role
 *
 * A job runs as the role that dispatched it, so this one needs the rights
 * that its handlers use.
 * --------------------------------------------------------------------- */

CREATE ROLE demo_app LOGIN;
GRANT USAGE ON SCHEMA demo TO demo_app;
GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA demo TO demo_app;
SELECT jq.grant('demo_app', 'dispatch');

/* ---------------------------------------------------------------------
 * The application receives webhooks
 * --------------------------------------------------------------------- */

-- Gives a line as jsonb, or an error that names it.
CREATE FUNCTION demo.parse_webhook(line_number bigint, line text) RETURNS jsonb
LANGUAGE plpgsql
AS $$
DECLARE
	webhook jsonb;
BEGIN
	BEGIN
		webhook := line::jsonb;
	EXCEPTION WHEN OTHERS THEN
		RAISE EXCEPTION 'line % is not a JSON object', line_number
		USING DETAIL = SQLERRM;
	END;
	IF jsonb_typeof(webhook) <> 'object' THEN
		RAISE EXCEPTION 'line % is not a JSON object', line_number
		USING DETAIL = format('It is of type %s.', jsonb_typeof(webhook));
	END IF;
	IF jsonb_typeof(webhook -> 'event') IS DISTINCT FROM 'string'
	   OR jsonb_typeof(webhook -> 'payload') IS DISTINCT FROM 'object' THEN
		RAISE EXCEPTION 'line % is not a webhook', line_number
		USING DETAIL = 'It needs a string "event" and an object "payload".';
	END IF;
	RETURN webhook;
END
$$;

\connect - demo_app

-- One transaction: if a line is wrong, no line was ever dispatched.
BEGIN;

CREATE TEMPORARY TABLE inbox (
	line_number bigint GENERATED ALWAYS AS IDENTITY,
	line text
) ON COMMIT DROP;

\copy inbox (line) FROM pstdin

-- MATERIALIZED: parse each line once
WITH webhook AS MATERIALIZED (
	SELECT demo.parse_webhook(line_number, line) AS body
	FROM inbox
)
SELECT count(jq.dispatch(
	CASE body ->> 'event' WHEN 'ping' THEN 'answer_ping' ELSE 'record_event' END,
	body)) AS dispatched
FROM webhook;

COMMIT;
