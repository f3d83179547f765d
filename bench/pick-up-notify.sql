WITH sent AS (INSERT INTO bench.hand (stamp, available_at, created_at, origin, priority, max_attempts, role, queue, name, payload) VALUES (1, clock_timestamp(), now(), 1, 0, 3, 'postgres', 'default', 'pick_up', jsonb_build_object('at', extract(epoch FROM clock_timestamp()))) RETURNING id) SELECT pg_notify('hand', '') FROM sent;
\sleep 10 ms
