/*
 * objects: what every object of jq owes its users: a comment, nothing for
 * PUBLIC, names instead of OIDs; and the same for the settings.
 */
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET jq.workers = 0;
SET client_min_messages = warning;
CREATE EXTENSION jq;
RESET client_min_messages;

-- everything in the schema belongs to the extension
CREATE VIEW objects_test AS
	SELECT 'relation' AS kind, c.oid::regclass::text AS name, 'pg_class'::regclass::oid AS classid, c.oid AS objid
	FROM pg_class AS c
	WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
	UNION ALL
	SELECT 'routine', p.oid::regprocedure::text, 'pg_proc'::regclass, p.oid
	FROM pg_proc AS p
	WHERE p.pronamespace = 'jq'::regnamespace
	UNION ALL
	SELECT 'type', t.typname, 'pg_type'::regclass, t.oid
	FROM pg_type AS t
	LEFT JOIN pg_class AS c ON c.oid = t.typrelid
	WHERE t.typnamespace = 'jq'::regnamespace AND t.typelem = 0 AND (c.oid IS NULL OR c.relkind = 'c');
SELECT o.kind, o.name
FROM objects_test AS o
WHERE NOT EXISTS (SELECT FROM pg_depend AS d
	WHERE d.classid = o.classid AND d.objid = o.objid AND d.deptype IN ('e', 'i'))
ORDER BY kind, name COLLATE "C";
SELECT kind, count(*) > 0 AS some FROM objects_test GROUP BY kind ORDER BY kind;

-- without a comment: nothing but the sequence of the jobs' ids
SELECT kind, name FROM objects_test
WHERE obj_description(objid, classid::regclass::text) IS NULL
ORDER BY kind, name COLLATE "C";
SELECT obj_description('jq'::regnamespace, 'pg_namespace') IS NOT NULL AS schema_has_one;
SELECT c.oid::regclass AS relation, a.attname
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid
WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'c')
	AND a.attnum > 0 AND NOT a.attisdropped AND coalesce(col_description(c.oid, a.attnum), '') = ''
ORDER BY c.relname COLLATE "C", a.attnum;
-- no blanks around comments
SELECT o.name FROM objects_test AS o
WHERE obj_description(objid, classid::regclass::text) ~ '^\s|\s$'
ORDER BY 1;

-- nothing for PUBLIC
SELECT n.nspname FROM pg_namespace AS n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) AS a
WHERE n.nspname = 'jq' AND a.grantee = 0;
SELECT c.oid::regclass, a.privilege_type
FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner))) AS a
WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f') AND a.grantee = 0
ORDER BY 1;
SELECT p.oid::regprocedure
FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
WHERE p.pronamespace = 'jq'::regnamespace AND a.grantee = 0
ORDER BY p.proname COLLATE "C";
SELECT t.typname
FROM pg_type AS t
JOIN pg_class AS c ON c.oid = t.typrelid AND c.relkind = 'c'
CROSS JOIN aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) AS a
WHERE t.typnamespace = 'jq'::regnamespace AND a.grantee = 0
ORDER BY t.typname COLLATE "C";

-- tables hold no OID that means something else after a restore
SELECT c.relname, a.attname, format_type(a.atttypid, NULL)
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid
WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind IN ('r', 'p', 'm') AND a.attnum > 0
	AND (format_type(a.atttypid, NULL) ~ '^reg' OR a.atttypid IN ('oid'::regtype, 'oidvector'::regtype, 'aclitem'::regtype))
ORDER BY 1, 2;
-- the times of a job are timestamptz, its ids bigint, its text compared bytewise
SELECT c.relname, a.attname, format_type(a.atttypid, NULL)
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid
WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind = 'r' AND a.attnum > 0
	AND (format_type(a.atttypid, NULL) IN ('timestamp without time zone', 'name', 'json')
		OR (a.attname IN ('id', 'stamp', 'token') AND a.atttypid <> 'bigint'::regtype)
		OR (a.attname IN ('role', 'queue', 'name', 'alias') AND a.attcollation <> '"C"'::regcollation))
ORDER BY 1, 2;

-- functions that write are VOLATILE and PARALLEL UNSAFE; the others say what they are
SELECT p.oid::regprocedure AS routine, p.provolatile, p.proparallel
FROM pg_proc AS p
WHERE p.pronamespace = 'jq'::regnamespace AND NOT (p.provolatile = 'v' AND p.proparallel = 'u')
ORDER BY p.oid::regprocedure::text COLLATE "C";
-- SECURITY DEFINER is nowhere; what is not C pins its search path or is a bare expression
SELECT p.oid::regprocedure AS routine, l.lanname, p.prosecdef, p.proconfig
FROM pg_proc AS p
JOIN pg_language AS l ON l.oid = p.prolang
WHERE p.pronamespace = 'jq'::regnamespace AND (p.prosecdef OR l.lanname <> 'c')
ORDER BY p.oid::regprocedure::text COLLATE "C";
-- tables of jobs show each role its own
SELECT c.relname, c.relrowsecurity, p.polname, p.polcmd
FROM pg_class AS c
LEFT JOIN pg_policy AS p ON p.polrelid = c.oid
WHERE c.relnamespace = 'jq'::regnamespace AND (c.relrowsecurity OR p.oid IS NOT NULL)
ORDER BY c.relname;
-- users' data is dumped: every table, and the sequence
SELECT c.relname
FROM pg_class AS c
WHERE c.relnamespace = 'jq'::regnamespace AND c.relkind IN ('r', 'S')
	AND NOT c.oid = ANY ((SELECT extconfig FROM pg_extension WHERE extname = 'jq')::oid[])
ORDER BY c.relname;
-- nothing that a crash empties
SELECT relname, relpersistence FROM pg_class
WHERE relnamespace = 'jq'::regnamespace AND relpersistence <> 'p' ORDER BY 1;
SELECT extversion, extrelocatable, extnamespace::regnamespace FROM pg_extension WHERE extname = 'jq';
SELECT superuser, trusted, relocatable, schema FROM pg_available_extension_versions WHERE name = 'jq' AND version = '1.0';

-- settings
SELECT name, unit, context, vartype, boot_val, min_val, max_val, enumvals
FROM pg_settings WHERE name LIKE 'jq.%' ORDER BY name COLLATE "C";
SELECT name, short_desc FROM pg_settings WHERE name LIKE 'jq.%' AND short_desc !~ '^[A-Z].*\.$' ORDER BY name COLLATE "C";
SELECT name, extra_desc FROM pg_settings WHERE name LIKE 'jq.%' AND extra_desc !~ '\.$' ORDER BY name COLLATE "C";
SET jq.no_such_setting = on;
SET jq.require_handler = maybe;
SET jq.queues = 'a,,b';
SET jq.queues = ' a , b ';
SHOW jq.queues;
SET jq.workers = -1;
SET jq.after_restore = 'drop';
-- users may change what concerns themselves
CREATE ROLE regress_jq_objects;
SET ROLE regress_jq_objects;
SET jq.require_handler = off;
SET jq.workers = 2;
SET jq.queues = 'x';
SET jq.after_restore = 'adopt';
SET jq.commit_wait = off;
SET jq.lease = '1 h';
RESET ROLE;
RESET jq.queues;
RESET jq.require_handler;

DROP ROLE regress_jq_objects;
DROP VIEW objects_test;
DROP EXTENSION jq;
ALTER DATABASE :"db" RESET jq.workers;
