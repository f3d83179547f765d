/*-------------------------------------------------------------------------
 *
 * journal.c
 *	  The crash journal: what workers are running, in memory that outlives the
 *	  restart after a crash.
 *
 * When a process crashes or is killed, the postmaster ends all others and
 * makes the shared memory anew.  What was running then must be known after
 * that, or a job that crashes its worker would do so for ever.  The journal is
 * an anonymous mapping made by the postmaster before any other process exists;
 * all inherit it, and the restart leaves it alone.  There is no file: after
 * the end of the postmaster or of the machine nothing is known and nobody is
 * blamed.
 *
 * An attempt stands in the journal from before its handler is entered until
 * after its outcome has committed.  The postmaster tells the others to quit by
 * SIGQUIT, and a worker that gets it marks its attempt as innocent (worker.c).
 * The attempt of whoever died of something else is not marked, and is charged.
 * If there are several of these, each is charged, and their jobs are suspects:
 * from then on no two suspects run at the same time, so that the next crash
 * tells which of them it is.
 *
 * Attempts of workers that end in other ways are left here as well, until
 * they are settled by who claims the job next.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <sys/mman.h>

#include "miscadmin.h"

#include "jq.h"

JqJournalData *JqJournal = NULL;

/*
 * Make the journal.  Called by the postmaster while it loads the library.
 */
void
jq_journal_init(void)
{
	Size		size = add_size(offsetof(JqJournalData, attempts),
								mul_size(jq_max_workers, sizeof(JqAttempt)));
	void	   *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
							  MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		ereport(FATAL,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("could not map memory for jq's journal: %m")));
	JqJournal = memory;			/* zeroed by the system */
}

/*
 * The attempt that the worker of this slot is making.
 */
JqAttempt *
jq_attempt_of(const JqSlot *slot)
{
	return &JqJournal->attempts[slot - JqSlots];
}

static void
add_suspect(const JqAttempt *attempt)
{
	JqSuspect  *suspect = NULL;

	if (jq_is_suspect(attempt->dboid, attempt->job_id, attempt->job_stamp))
		return;
	for (int i = 0; i < JQ_MAX_SUSPECTS && suspect == NULL; i++)
	{
		if (JqJournal->suspects[i].job_id == 0)
			suspect = &JqJournal->suspects[i];
	}
	if (suspect == NULL)
	{
		suspect = &JqJournal->suspects[JqJournal->next_suspect];
		JqJournal->next_suspect = (JqJournal->next_suspect + 1) % JQ_MAX_SUSPECTS;
		JqJournal->nsuspects--;
	}
	suspect->dboid = attempt->dboid;
	suspect->job_id = attempt->job_id;
	suspect->job_stamp = attempt->job_stamp;
	JqJournal->nsuspects++;
}

/*
 * Who crashed may have left the numbers of entries wrong.
 */
static void
count_entries(void)
{
	JqJournal->nunsettled = 0;
	for (int i = 0; i < JQ_MAX_UNSETTLED; i++)
		JqJournal->nunsettled += JqJournal->unsettled[i].attempt.begun;
	JqJournal->nsuspects = 0;
	for (int i = 0; i < JQ_MAX_SUSPECTS; i++)
		JqJournal->nsuspects += JqJournal->suspects[i].job_id != 0;
}

/*
 * Settle who is to blame for a crash.  Called by the postmaster, alone, when
 * it makes the shared memory, at the first start as well: then nothing is
 * there.
 */
void
jq_journal_recover(void)
{
	int			unmarked = 0;

	count_entries();
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqAttempt  *attempt = &JqJournal->attempts[i];

		if (attempt->begun && !attempt->innocent)
			unmarked++;
	}
	for (int i = 0; i < JqShared->nslots; i++)
	{
		JqAttempt  *attempt = &JqJournal->attempts[i];

		if (attempt->begun && !attempt->innocent)
		{
			jq_leave_unsettled(attempt, JQ_DEATH_CRASH);
			if (unmarked > 1)
				add_suspect(attempt);
		}
		attempt->begun = false;
	}
}

/* ---------------------------------------------------------------------
 * Unsettled attempts
 *
 * In all of these the caller holds the lock, or is alone.
 * --------------------------------------------------------------------- */

/*
 * Leave the attempt of a dead worker to whoever claims the job next.
 */
void
jq_leave_unsettled(const JqAttempt *attempt, JqDeath death)
{
	JqUnsettled *unsettled = NULL;

	for (int i = 0; i < JQ_MAX_UNSETTLED && unsettled == NULL; i++)
	{
		if (!JqJournal->unsettled[i].attempt.begun)
			unsettled = &JqJournal->unsettled[i];
	}
	if (unsettled == NULL)
	{
		/* all in use: the oldest entries are of jobs that were removed */
		unsettled = &JqJournal->unsettled[JqJournal->next_unsettled];
		JqJournal->next_unsettled =
			(JqJournal->next_unsettled + 1) % JQ_MAX_UNSETTLED;
		JqJournal->nunsettled--;
	}
	unsettled->attempt = *attempt;
	unsettled->death = death;
	JqJournal->nunsettled++;
}

/*
 * The unsettled attempt of a job, or NULL.
 */
JqUnsettled *
jq_find_unsettled(Oid dboid, int64 job_id, int64 stamp)
{
	for (int i = 0; i < JQ_MAX_UNSETTLED; i++)
	{
		JqUnsettled *unsettled = &JqJournal->unsettled[i];

		if (unsettled->attempt.begun &&
			unsettled->attempt.job_id == job_id &&
			unsettled->attempt.job_stamp == stamp &&
			unsettled->attempt.dboid == dboid)
			return unsettled;
	}
	return NULL;
}

/*
 * The attempt has been recorded.
 */
void
jq_settle(JqUnsettled *unsettled)
{
	Assert(unsettled->attempt.begun);
	unsettled->attempt.begun = false;
	JqJournal->nunsettled--;
}

/* ---------------------------------------------------------------------
 * Suspects
 * --------------------------------------------------------------------- */

static JqSuspect *
find_suspect(Oid dboid, int64 job_id, int64 stamp)
{
	for (int i = 0; i < JQ_MAX_SUSPECTS && JqJournal->nsuspects > 0; i++)
	{
		JqSuspect  *suspect = &JqJournal->suspects[i];

		if (suspect->job_id == job_id && suspect->job_stamp == stamp &&
			suspect->dboid == dboid)
			return suspect;
	}
	return NULL;
}

/*
 * Whether the job must not run beside another suspect.
 */
bool
jq_is_suspect(Oid dboid, int64 job_id, int64 stamp)
{
	return find_suspect(dboid, job_id, stamp) != NULL;
}

/*
 * The job has come to an end without a crash, or is gone.
 */
void
jq_clear_suspect(Oid dboid, int64 job_id, int64 stamp)
{
	JqSuspect  *suspect = find_suspect(dboid, job_id, stamp);

	if (suspect == NULL)
		return;
	suspect->job_id = 0;
	JqJournal->nsuspects--;
}

/*
 * Forget what is remembered of a database that is gone.
 */
void
jq_journal_forget_database(Oid dboid)
{
	for (int i = 0; i < JQ_MAX_UNSETTLED; i++)
	{
		JqUnsettled *unsettled = &JqJournal->unsettled[i];

		if (unsettled->attempt.begun && unsettled->attempt.dboid == dboid)
			jq_settle(unsettled);
	}
	for (int i = 0; i < JQ_MAX_SUSPECTS; i++)
	{
		JqSuspect  *suspect = &JqJournal->suspects[i];

		if (suspect->job_id != 0 && suspect->dboid == dboid)
		{
			suspect->job_id = 0;
			JqJournal->nsuspects--;
		}
	}
}
