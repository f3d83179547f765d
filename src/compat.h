/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  What differs between the majors that jq supports, and nothing else.
 *
 * The code is written for the newest; older servers get the new names here.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#ifndef JQ_COMPAT_H
#define JQ_COMPAT_H

#include "access/genam.h"
#include "access/heapam.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "postmaster/bgworker.h"
#include "storage/latch.h"
#include "utils/acl.h"
#include "utils/backend_status.h"
#include "utils/guc.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

#if PG_VERSION_NUM < 160000

static inline AclResult
object_aclcheck(Oid classid, Oid objectid, Oid roleid, AclMode mode)
{
	if (classid == ProcedureRelationId)
		return pg_proc_aclcheck(objectid, roleid, mode);
	if (classid == NamespaceRelationId)
		return pg_namespace_aclcheck(objectid, roleid, mode);
	Assert(classid == DatabaseRelationId);
	return pg_database_aclcheck(objectid, roleid, mode);
}

static inline bool
object_ownercheck(Oid classid, Oid objectid, Oid roleid)
{
	if (classid == ExtensionRelationId)
		return pg_extension_ownercheck(objectid, roleid);
	Assert(classid == DatabaseRelationId);
	return pg_database_ownercheck(objectid, roleid);
}

#define pgstat_get_local_beentry_by_index(index) \
	pgstat_fetch_stat_local_beentry(index)

#endif							/* < 16 */

#if PG_VERSION_NUM < 170000

/* before 17 a worker cannot connect as a role that may not log in */
#define BGWORKER_BYPASS_ROLELOGINCHECK 0
#define JQ_NEEDS_LOGIN true

static inline uint32
WaitEventExtensionNew(const char *name)
{
	return PG_WAIT_EXTENSION;
}

static inline void
RestrictSearchPath(void)
{
	set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET,
					  PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
}

#else

#define JQ_NEEDS_LOGIN false

#endif							/* < 17 */

static inline IndexScanDesc
index_beginscan_compat(Relation heap, Relation index, Snapshot snapshot,
					   int nkeys)
{
#if PG_VERSION_NUM >= 180000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0);
#else
	return index_beginscan(heap, index, snapshot, nkeys, 0);
#endif
}

/*
 * Returns whether the new version needs index entries.
 */
static inline bool
simple_heap_update_compat(Relation rel, ItemPointer tid, HeapTuple tuple)
{
#if PG_VERSION_NUM >= 160000
	TU_UpdateIndexes update_indexes;

	simple_heap_update(rel, tid, tuple, &update_indexes);
	return update_indexes != TU_None;
#else
	simple_heap_update(rel, tid, tuple);
	return !HeapTupleIsHeapOnly(tuple);
#endif
}

#endif							/* JQ_COMPAT_H */
