/*
 * notify.c
 *	  A job queue's client the usual way: LISTEN, sleep, fetch by DELETE.
 *
 * usage: notify CONNINFO JOBS
 *
 * Prints "listening" when it does, then, once it has had JOBS jobs, for each
 * of them the microseconds from the time in its payload to its arrival here,
 * which is when a handler could start.  Gives up when nothing comes for ten
 * seconds.  Client and server share a machine, hence a clock.
 *
 * The session does not wait for the flush of its commits, so that the row
 * arrives as soon as it can.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <libpq-fe.h>

#define PATIENCE_MS 10000

static const char *const fetch_sql =
"DELETE FROM bench.hand AS h"
" USING (SELECT id FROM bench.hand"
" WHERE queue = 'default' AND available_at <= clock_timestamp()"
" ORDER BY priority, available_at, id"
" LIMIT 1 FOR UPDATE SKIP LOCKED) AS next"
" WHERE h.id = next.id"
" RETURNING h.payload ->> 'at'";

static void
fail(PGconn *conn)
{
	fprintf(stderr, "notify: %s", PQerrorMessage(conn));
	exit(1);
}

static void
command(PGconn *conn, const char *sql)
{
	PGresult   *res = PQexec(conn, sql);

	if (PQresultStatus(res) != PGRES_COMMAND_OK &&
		PQresultStatus(res) != PGRES_TUPLES_OK)
		fail(conn);
	PQclear(res);
}

/* Fetches a job; false when there is none. */
static int
fetch(PGconn *conn, double *latency)
{
	PGresult   *res = PQexecPrepared(conn, "fetch", 0, NULL, NULL, NULL, 0);
	struct timespec now;
	int			found;

	clock_gettime(CLOCK_REALTIME, &now);
	if (PQresultStatus(res) != PGRES_TUPLES_OK)
		fail(conn);
	found = PQntuples(res) > 0;
	if (found)
		*latency = (now.tv_sec + now.tv_nsec / 1e9 -
					strtod(PQgetvalue(res, 0, 0), NULL)) * 1e6;
	PQclear(res);
	return found;
}

/* Takes the notifications that have been read; true when there were any. */
static int
take_notifications(PGconn *conn)
{
	PGnotify   *notification;
	int			any = 0;

	while ((notification = PQnotifies(conn)) != NULL)
	{
		PQfreemem(notification);
		any = 1;
	}
	return any;
}

/*
 * Sleeps until the server says something; false when it stays silent.  A
 * notification may have come in with the answer to a query: then the socket
 * has nothing more to say about it.
 */
static int
wait_for_notification(PGconn *conn)
{
	struct pollfd fd = {.fd = PQsocket(conn), .events = POLLIN};

	if (take_notifications(conn))
		return 1;
	if (poll(&fd, 1, PATIENCE_MS) <= 0)
		return 0;
	if (!PQconsumeInput(conn))
		fail(conn);
	take_notifications(conn);
	return 1;
}

int
main(int argc, char **argv)
{
	PGconn	   *conn;
	PGresult   *res;
	double	   *latency;
	int			jobs;
	int			done = 0;

	if (argc != 3 || (jobs = atoi(argv[2])) <= 0)
	{
		fprintf(stderr, "usage: notify CONNINFO JOBS\n");
		return 2;
	}
	latency = malloc(jobs * sizeof(double));
	if (latency == NULL)
		return 1;

	conn = PQconnectdb(argv[1]);
	if (PQstatus(conn) != CONNECTION_OK)
		fail(conn);
	command(conn, "SET synchronous_commit = off");
	command(conn, "SET enable_seqscan = off");
	command(conn, "SET enable_bitmapscan = off");
	command(conn, "SET enable_sort = off");
	res = PQprepare(conn, "fetch", fetch_sql, 0, NULL);
	if (PQresultStatus(res) != PGRES_COMMAND_OK)
		fail(conn);
	PQclear(res);
	command(conn, "LISTEN hand");
	printf("listening\n");
	fflush(stdout);

	for (;;)
	{
		while (done < jobs && fetch(conn, &latency[done]))
			done++;
		if (done == jobs)
			break;
		if (!wait_for_notification(conn))
		{
			fprintf(stderr, "notify: only %d of %d jobs came\n", done, jobs);
			return 1;
		}
	}

	for (int i = 0; i < jobs; i++)
		printf("%.1f\n", latency[i]);
	PQfinish(conn);
	free(latency);
	return 0;
}
