/*-------------------------------------------------------------------------
 *
 * jq.c
 *	  Loads jq: a job queue that lives inside PostgreSQL.
 *
 * src/README tells how it works.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "jq.h"

PG_MODULE_MAGIC;

void		_PG_init(void);

/*
 * Called when the library is loaded: by the postmaster, if it is preloaded,
 * else by the first session that calls one of its functions.
 */
void
_PG_init(void)
{
	jq_define_settings();
	jq_wakeup_init();
	jq_install_hooks();

	if (!process_shared_preload_libraries_in_progress || IsBinaryUpgrade)
		return;

	jq_shmem_init();
	jq_register_launcher();
}
