/*-------------------------------------------------------------------------
 *
 * privilege.c
 *	  Rights: jq.grant(), jq.revoke(), and the checks of what they gave.
 *
 * A right is a row in jq.grants.  The SQL privileges that a role needs to
 * reach jq's functions and views at all are the same for each right, and go
 * with the first and last of its rows; what the role may do with a function
 * is checked in the function.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/value.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "compat.h"
#include "jq.h"

typedef struct GrantEntry
{
	Oid			roleid;
	bool		administer;		/* else dispatch */
	char		queue[JQ_NAME_MAX + 1]; /* '': all */
} GrantEntry;

static MemoryContext cache_cxt = NULL;
static List *grants = NIL;
static uint64 grants_epoch = 0;

static void change_sql_privileges(const char *role, bool grant);

PG_FUNCTION_INFO_V1(jq_grant);
PG_FUNCTION_INFO_V1(jq_revoke);
PG_FUNCTION_INFO_V1(jq_may_see);

/* ---------------------------------------------------------------------
 * Checks
 * --------------------------------------------------------------------- */

static void
load_grants(void)
{
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;
	uint64		epoch;

	if (grants_epoch == jq_configuration_epoch())
		return;
	epoch = jq_configuration_epoch();
	if (cache_cxt == NULL)
		cache_cxt = AllocSetContextCreate(TopMemoryContext, "jq grants",
										  ALLOCSET_SMALL_SIZES);
	MemoryContextReset(cache_cxt);
	grants = NIL;

	rel = table_open(jq_catalog()->grants, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		TupleDesc	desc = RelationGetDescr(rel);
		MemoryContext oldcxt;
		GrantEntry *entry;
		bool		isnull;
		char	   *role;
		char	   *privilege;
		Datum		queue;
		Oid			roleid;

		role = TextDatumGetCString(heap_getattr(tuple, GRANTS_ROLE, desc, &isnull));
		roleid = get_role_oid(role, true);
		if (!OidIsValid(roleid))
			continue;
		privilege = TextDatumGetCString(heap_getattr(tuple, GRANTS_PRIVILEGE,
													 desc, &isnull));
		queue = heap_getattr(tuple, GRANTS_QUEUE, desc, &isnull);

		oldcxt = MemoryContextSwitchTo(cache_cxt);
		entry = palloc0(sizeof(GrantEntry));
		entry->roleid = roleid;
		entry->administer = strcmp(privilege, "administer") == 0;
		if (!isnull)
			text_to_cstring_buffer(DatumGetTextPP(queue), entry->queue,
								   sizeof(entry->queue));
		grants = lappend(grants, entry);
		MemoryContextSwitchTo(oldcxt);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	grants_epoch = epoch;
}

static bool
has_grant(Oid roleid, bool administer, const char *queue)
{
	ListCell   *lc;

	if (has_privs_of_role(roleid, jq_catalog()->owner))
		return true;

	load_grants();
	foreach(lc, grants)
	{
		GrantEntry *entry = lfirst(lc);

		if (entry->administer == administer &&
			(entry->queue[0] == '\0' || strcmp(entry->queue, queue) == 0) &&
			has_privs_of_role(roleid, entry->roleid))
			return true;
	}
	return false;
}

/*
 * Raise an error unless the role may dispatch to the queue.
 */
void
jq_require_dispatch(Oid roleid, const char *queue)
{
	static Oid	last_roleid = InvalidOid;
	static uint64 last_epoch = 0;
	static char last_queue[JQ_NAME_MAX + 1];

	if (roleid == last_roleid && last_epoch == jq_configuration_epoch() &&
		strcmp(queue, last_queue) == 0)
		return;

	if (!has_grant(roleid, false, queue))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for queue \"%s\"", queue),
				 errdetail("Role \"%s\" has not the right to dispatch to it.",
						   GetUserNameFromId(roleid, false)),
				 errhint("The extension's owner gives it with jq.grant().")));

	last_roleid = roleid;
	last_epoch = jq_configuration_epoch();
	strlcpy(last_queue, queue, sizeof(last_queue));
}

/*
 * Whether the role has the right 'administer'.
 */
bool
jq_may_administer(Oid roleid)
{
	return has_grant(roleid, true, "");
}

/*
 * Raise an error unless the current role has the right 'administer'.
 */
void
jq_require_administer(void)
{
	if (!jq_may_administer(GetUserId()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for extension \"jq\""),
				 errdetail("Role \"%s\" has not the right to administer it.",
						   GetUserNameFromId(GetUserId(), false)),
				 errhint("The extension's owner gives it with jq.grant().")));
}

/*
 * Whether that user may see and handle jobs of that role: has its rights, or
 * the right 'administer'.
 */
bool
jq_may_handle_role(Oid userid, const char *role)
{
	Oid			roleid = get_role_oid(role, true);

	if (OidIsValid(roleid) && has_privs_of_role(userid, roleid))
		return true;
	return jq_may_administer(userid);
}

/*
 * The same of the current role.
 */
bool
jq_may_see_role(const char *role)
{
	return jq_may_handle_role(GetUserId(), role);
}

/*
 * Raise an error unless the current role may handle a job of that role.
 */
void
jq_require_own_job(int64 id, const char *role)
{
	if (!jq_may_handle_role(GetUserId(), role))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for job " INT64_FORMAT, id),
				 errdetail("It belongs to role \"%s\".", role)));
}

/*
 * jq.may_see(role)
 */
Datum
jq_may_see(PG_FUNCTION_ARGS)
{
	static uint64 last_epoch = 0;
	static Oid	last_userid = InvalidOid;
	static char last_role[NAMEDATALEN];
	static bool last_result;
	text	   *arg = PG_GETARG_TEXT_PP(0);
	char		role[NAMEDATALEN];

	/* asked row by row, mostly about the same role */
	text_to_cstring_buffer(arg, role, sizeof(role));
	if (last_epoch != jq_configuration_epoch() || last_userid != GetUserId() ||
		strcmp(role, last_role) != 0)
	{
		last_epoch = 0;
		last_result = jq_may_see_role(role);
		strlcpy(last_role, role, sizeof(last_role));
		last_userid = GetUserId();
		last_epoch = jq_configuration_epoch();
	}
	PG_RETURN_BOOL(last_result);
}

/* ---------------------------------------------------------------------
 * Granting
 * --------------------------------------------------------------------- */

static void
require_owner(void)
{
	if (!object_ownercheck(ExtensionRelationId, jq_catalog()->extension,
						   GetUserId()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be owner of extension \"jq\" to grant rights in it")));
}

/*
 * Check the arguments (role, privilege, queue) and make them parameters.
 */
static void
grant_arguments(FunctionCallInfo fcinfo, Datum *values, char *nulls)
{
	char	   *privilege;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("role and privilege must not be NULL")));
	privilege = text_to_cstring(PG_GETARG_TEXT_PP(1));
	if (strcmp(privilege, "dispatch") != 0 &&
		strcmp(privilege, "administer") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("unrecognized privilege: \"%s\"", privilege),
				 errhint("Privileges are \"dispatch\" and \"administer\".")));

	values[0] = PG_GETARG_DATUM(0);
	values[1] = PG_GETARG_DATUM(1);
	values[2] = PG_GETARG_DATUM(2);
	strcpy(nulls, PG_ARGISNULL(2) ? "  n" : "   ");
	if (!PG_ARGISNULL(2))
	{
		text	   *queue = PG_GETARG_TEXT_PP(2);

		jq_check_name(VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue), "queue");
		if (strcmp(privilege, "administer") == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("privilege \"administer\" cannot be limited to a queue")));
	}
}

/*
 * jq.grant(role, privilege, queue)
 */
Datum
jq_grant(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, TEXTOID, TEXTOID};
	Datum		values[3];
	char		nulls[4];
	char	   *role;

	require_owner();
	grant_arguments(fcinfo, values, nulls);
	role = text_to_cstring(PG_GETARG_TEXT_PP(0));
	(void) get_role_oid(role, false);

	/* what a former role of that name had, which was dropped with DROP OWNED */
	jq_owner_execute("DELETE FROM jq.grants WHERE role = $1 AND NOT EXISTS"
					 " (SELECT FROM pg_catalog.pg_namespace AS n"
					 " CROSS JOIN pg_catalog.aclexplode(n.nspacl) AS a"
					 " JOIN pg_catalog.pg_roles AS r ON r.oid = a.grantee"
					 " WHERE n.nspname = 'jq' AND r.rolname = $1)",
					 1, types, values, nulls, NULL);
	jq_owner_execute("INSERT INTO jq.grants (role, privilege, queue)"
					 " VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
					 3, types, values, nulls, NULL);
	change_sql_privileges(role, true);
	PG_RETURN_VOID();
}

/*
 * jq.revoke(role, privilege, queue)
 */
Datum
jq_revoke(PG_FUNCTION_ARGS)
{
	Oid			types[] = {TEXTOID, TEXTOID, TEXTOID};
	Datum		values[3];
	char		nulls[4];
	char	   *role;
	int64		left;

	require_owner();
	grant_arguments(fcinfo, values, nulls);
	role = text_to_cstring(PG_GETARG_TEXT_PP(0));

	if (jq_owner_execute("DELETE FROM jq.grants WHERE role = $1 AND privilege = $2"
						 " AND queue IS NOT DISTINCT FROM $3",
						 3, types, values, nulls, NULL) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role \"%s\" has not been granted this right", role),
				 errhint("The table jq.grants lists the rights.")));
	jq_owner_execute("SELECT count(*) FROM jq.grants WHERE role = $1",
					 1, types, values, nulls, &left);

	/* the role itself may be gone already */
	if (left == 0 && OidIsValid(get_role_oid(role, true)))
		change_sql_privileges(role, false);
	PG_RETURN_VOID();
}

static void
execute_grant(const char *role, bool grant, GrantTargetType targtype,
			  ObjectType objtype, List *objects, const char *privilege)
{
	GrantStmt  *stmt = makeNode(GrantStmt);
	RoleSpec   *grantee = makeNode(RoleSpec);
	AccessPriv *priv = makeNode(AccessPriv);

	grantee->roletype = ROLESPEC_CSTRING;
	grantee->rolename = pstrdup(role);
	priv->priv_name = pstrdup(privilege);

	stmt->is_grant = grant;
	stmt->targtype = targtype;
	stmt->objtype = objtype;
	stmt->objects = objects;
	stmt->privileges = list_make1(priv);
	stmt->grantees = list_make1(grantee);
	stmt->behavior = DROP_RESTRICT;
	ExecuteGrantStmt(stmt);
}

/*
 * Give or take the SQL privileges on jq's schema and what is in it.
 */
static void
change_sql_privileges(const char *role, bool grant)
{
	static const char *const readable[] = {
		"jobs", "failed_jobs", "attempts", "pauses", "status", "queue_stats",
		"workers", "running", "batch_status", "limits"
	};
	List	   *schema = list_make1(makeString("jq"));
	List	   *relations = NIL;
	List	   *types;
	JqOwnerSection section;

	for (int i = 0; i < lengthof(readable); i++)
		relations = lappend(relations,
							makeRangeVar("jq", pstrdup(readable[i]), -1));
	types = list_make2(list_make2(makeString("jq"), makeString("context")),
					   list_make2(makeString("jq"), makeString("job_spec")));

	jq_enter_owner(&section);
	execute_grant(role, grant, ACL_TARGET_OBJECT, OBJECT_SCHEMA, schema, "usage");
	execute_grant(role, grant, ACL_TARGET_ALL_IN_SCHEMA, OBJECT_ROUTINE, schema, "execute");
	execute_grant(role, grant, ACL_TARGET_OBJECT, OBJECT_TABLE, relations, "select");
	execute_grant(role, grant, ACL_TARGET_OBJECT, OBJECT_TYPE, types, "usage");
	CommandCounterIncrement();
	jq_leave_owner(&section);
}
