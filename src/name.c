/*-------------------------------------------------------------------------
 *
 * name.c
 *	  The grammar of the names of handlers and queues.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"

#include "jq.h"

/*
 * Raise an error unless the name has 1 to JQ_NAME_MAX bytes, no control
 * characters, and no space at either end.  "what" is "handler" or "queue".
 */
void
jq_check_name(const char *name, int len, const char *what)
{
	if (len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of a %s must not be empty", what)));
	if (len > JQ_NAME_MAX)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of a %s is too long: \"%.*s...\"", what,
						pg_mbcliplen(name, len, 40), name),
				 errdetail("It has %d bytes, the limit is %d.",
						   len, JQ_NAME_MAX)));
	if (name[0] == ' ' || name[len - 1] == ' ')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of a %s must not begin or end with a space: \"%.*s\"",
						what, len, name)));
	for (int i = 0; i < len; i++)
	{
		unsigned char c = name[i];

		if (c < ' ' || c == 0x7f)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("name of a %s must not contain control characters",
							what),
					 errdetail("Byte %d has the value %d.", i + 1, c)));
	}
}
