/*-------------------------------------------------------------------------
 *
 * jq.h
 *	  What the rooms of jq share: constants, settings, and the functions each
 *	  room offers to the others, under the name of its file.
 *
 * Copyright (c) 2026, the jq developers
 *
 *-------------------------------------------------------------------------
 */
#ifndef JQ_H
#define JQ_H

#include "access/attnum.h"
#include "access/skey.h"
#include "catalog.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "nodes/execnodes.h"
#include "nodes/pg_list.h"
#include "shmem.h"
#include "storage/itemptr.h"
#include "storage/lock.h"
#include "utils/array.h"
#include "utils/relcache.h"

/* Version of the SQL objects that this library serves. */
#define JQ_EXTVERSION "1.0"

/* A handler's name, or a queue's, has 1 to this many bytes. */
#define JQ_NAME_MAX 59

/* Longest text kept of each part of a job's error, in bytes. */
#define JQ_ERROR_MAX 8192

/* SQLSTATEs of jq's own */
#define ERRCODE_JQ_FAILED MAKE_SQLSTATE('J','Q','0','0','1')
#define ERRCODE_JQ_RELEASED MAKE_SQLSTATE('J','Q','0','0','2')
#define ERRCODE_JQ_SKIPPED MAKE_SQLSTATE('J','Q','0','0','3')
#define ERRCODE_JQ_CANCELLED MAKE_SQLSTATE('J','Q','0','0','4')
#define ERRCODE_JQ_EXPIRED MAKE_SQLSTATE('J','Q','0','0','5')

/* What ends the claim of a unique job on its key. */
typedef enum JqUniqueUntil
{
	JQ_UNTIL_DONE,
	JQ_UNTIL_START,
	JQ_UNTIL_EXPIRY
} JqUniqueUntil;

/* What becomes of the second job that wants a key. */
typedef enum JqOnConflict
{
	JQ_CONFLICT_KEEP,
	JQ_CONFLICT_REPLACE,
	JQ_CONFLICT_DEBOUNCE,
	JQ_CONFLICT_ERROR
} JqOnConflict;

/* A place behind a limit, or what a job waits for there. */
typedef struct JqGate
{
	const char *kind;			/* as in jq.held */
	char	   *scope;
	char	   *key;
	int32		places;
	int32		place;			/* taken by the job */
	Interval	every;			/* of a rate */
	TimestampTz wake_at;		/* DT_NOEND: when another job leaves */
} JqGate;

#define JQ_MAX_GATES 4

/* Greatest max_running. */
#define JQ_MAX_PLACES 10000

/* A job's row, copied out of jq.jobs so that it outlives buffers and rows. */
typedef struct JqJob
{
	int64		id;
	int64		stamp;
	TimestampTz available_at;
	TimestampTz created_at;
	TimestampTz counts_from;	/* when retry_for and expires began to count */
	int32		priority;
	int32		attempts;		/* spent before this one */
	int32		max_attempts;
	int32		exceptions;		/* attempts that ended with an error */
	char	   *role;
	char	   *queue;
	char	   *name;
	Datum		payload;		/* jsonb, detoasted */
	Datum		meta;			/* the same; 0: none */
	Datum		failure;		/* the same, of the job that this one follows */
	int64		chain_id;		/* 0: none */
	Datum		chain;			/* jsonb, what follows; 0: nothing */
	Datum		previous;		/* jsonb, result of the link before */
	char	   *last_error;		/* of the attempts before; NULL: none */
	int64		batch_id;		/* 0: none */
	int64		callback_of;	/* 0: none */
	char	   *unique_key;		/* NULL: not unique */
	Interval	unique_for;		/* zero: no limit */
	JqUniqueUntil unique_until;
	JqOnConflict on_conflict;	/* not stored */
	char	   *group_key;		/* NULL: none */
	int64		token;			/* of the lease in the row; 0: none */
	ItemPointerData tid;		/* of the row, while we have it locked */

	/* the places behind limits that it has */
	int			ngates;
	JqGate		gates[JQ_MAX_GATES];
	bool		admitted;		/* by what is asked once, not at each try */

	/* the attempt, once it has begun; the one that a lease in the row is for */
	pid_t		pid;
	TimestampTz started_at;
} JqJob;

typedef enum JqEnd
{
	JQ_END_FAILED,
	JQ_END_RELEASED,			/* jq.release() */
	JQ_END_SKIPPED,				/* jq.skip() */
	JQ_END_CANCELLED,			/* jq.cancel() */
	JQ_END_DROPPED,				/* its batch was cancelled */
	JQ_END_HELD,				/* not started: it waits at a gate now */
	JQ_END_LOST					/* not started: somebody else has it */
} JqEnd;

/* How an attempt ended, when it did not end well. */
typedef struct JqFailure
{
	JqEnd		end;
	int			sqlerrcode;
	char	   *message;
	char	   *detail;
	char	   *hint;
	char	   *context;
	char	   *log;			/* of the attempt */
	bool		permanent;		/* not to be tried again */
	bool		unspent;		/* the attempt does not count, or was none */
	bool		exception;		/* it counts for max_exceptions */
	bool		timed_out;
	bool		durable;		/* its record must outlive a crash right after */
	bool		at_once;		/* the next attempt need not wait */
	Interval	delay;			/* of a release */
	JqGate		gate;			/* where it is held */
} JqFailure;

/* Where a key comes from: a jsonpath, or a function. */
typedef struct JqKeySource
{
	char	   *text;			/* as registered; NULL: there is none */
	Datum		path;			/* 0: it is a function */
} JqKeySource;

/* A handler as jq.register() left it, with the function found. */
typedef struct JqHandler
{
	char		name[JQ_NAME_MAX + 1];
	char	   *signature;		/* for messages */
	char		queue[JQ_NAME_MAX + 1];
	int32		priority;
	int32		max_attempts;
	int64		timeout_us;		/* 0: none */
	int			nbackoff;
	Interval   *backoff;
	Interval	retry_for;		/* zero: max_attempts counts */
	Interval	expires;		/* zero: never */
	bool		fail_on_timeout;
	int32		max_exceptions; /* 0: no limit */
	int			npermanent;
	int		   *permanent;		/* SQLSTATEs, or classes (ERRCODE_TO_CATEGORY) */
	char		on_failed[JQ_NAME_MAX + 1]; /* '': none */
	Interval	keep_result;	/* zero: not */
	bool		unique;
	JqKeySource unique_key;
	Interval	unique_for;		/* zero: no limit */
	JqUniqueUntil unique_until;
	JqOnConflict on_conflict;
	Interval	debounce_max;	/* zero: no limit */
	bool		limited;		/* has one of what follows */
	JqKeySource overlap_key;
	Interval	overlap_wait;	/* zero: until it is free */
	int32		max_running;	/* -1: no limit */
	JqKeySource running_key;
	JqKeySource rate_key;
	int32		rate_max;		/* -1: no limit */
	Interval	rate_per;
	int32		rate_burst;		/* 0: a fixed window */
	char		limit_scope[JQ_NAME_MAX + 1];
	JqKeySource group_key;
	int			nmiddleware;
	char	  **middleware;		/* signatures */
	Oid			function;		/* InvalidOid: there is none of that name */
	Oid			schema;			/* that it is in */
	bool		takes_context;
	bool		returns_jsonb;
	bool		definer;		/* SECURITY DEFINER */
	bool		superuser_owned;
} JqHandler;

/* What a handler gave back. */
typedef struct JqCallResult
{
	Datum		value;
	bool		isnull;
	int			synchronous_commit; /* as the handler left it */
} JqCallResult;

/* What the scheduler tells a worker that it starts, in bgw_extra. */
typedef struct JqWorkerArgs
{
	uint32		generation;		/* of the slot, whose number is the argument */
	bool		borrow;			/* connect as superuser, act as the role */
	char		database[NAMEDATALEN];
} JqWorkerArgs;

typedef enum JqCommitWait
{
	JQ_COMMIT_WAIT_AUTO,
	JQ_COMMIT_WAIT_ON,
	JQ_COMMIT_WAIT_OFF
} JqCommitWait;

typedef enum JqAfterRestore
{
	JQ_AFTER_RESTORE_HOLD,
	JQ_AFTER_RESTORE_ADOPT
} JqAfterRestore;

/* "guc.c" */
extern bool jq_enabled;
extern char *jq_databases;
extern int	jq_max_workers;
extern int	jq_max_lanes;
extern int	jq_workers;
extern char *jq_queues;
extern int	jq_commit_wait;
extern int	jq_lease;
extern bool jq_require_handler;
extern int	jq_after_restore;
extern int	jq_shutdown_grace;
extern int	jq_cancel_grace;
extern bool jq_notify_failed;
extern int	jq_keep_attempts;
extern int	jq_keep_batches;

extern void jq_define_settings(void);
extern List *jq_split_names(const char *value);

/* "catalog.c" */
extern const JqCatalog *jq_catalog(void);
extern const JqCatalog *jq_catalog_if_any(void);
extern uint64 jq_catalog_epoch(void);
extern uint64 jq_configuration_epoch(void);
extern bool jq_follow_configuration(void);
extern Datum jq_copy_jsonb(TupleTableSlot *row, int column);
extern void jq_set_text(Datum *values, bool *nulls, int column,
						const char *text);

/* "name.c" */
extern void jq_check_name(const char *name, int len, const char *what);

/* "handler.c" */
extern const JqHandler *jq_find_handler(const char *name);
extern JqHandler *jq_copy_handler(const JqHandler *handler);
extern void jq_check_function_rights(const JqHandler *handler, Oid roleid);
extern void jq_check_handler_rights(const JqHandler *handler, Oid roleid);
extern void jq_report_unregistered(const char *name);
extern int64 jq_interval_us(const Interval *interval);
extern void jq_check_span(const Interval *interval, const char *what);
extern void jq_check_number(FunctionCallInfo fcinfo, int n, int least,
							int most, const char *what);
extern bool jq_interval_is_zero(const Interval *interval);
extern TimestampTz jq_time_after(TimestampTz time, const Interval *interval);
extern TimestampTz jq_deadline(const JqHandler *handler, const JqJob *job);

/* "privilege.c" */
extern void jq_require_dispatch(Oid roleid, const char *queue);
extern void jq_require_administer(void);
extern bool jq_may_administer(Oid roleid);
extern bool jq_may_handle_role(Oid userid, const char *role);
extern bool jq_may_see_role(const char *role);
extern void jq_require_own_job(int64 id, const char *role);

/* "key.c" */
extern char *jq_stored_key(const char *key, int len);
extern char *jq_check_key_source(text *source, const char *what);
extern void jq_read_key_source(JqKeySource *source, Datum value, bool isnull);
extern void jq_copy_key_source(JqKeySource *copy, const JqKeySource *source);
extern char *jq_evaluate_key(const JqKeySource *source, Datum payload);
extern Oid	jq_function_of_signature(const char *signature);

/* "unique.c" */
typedef enum JqOutcome
{
	JQ_CREATED,
	JQ_KEPT,
	JQ_REPLACED
} JqOutcome;

extern JqUniqueUntil jq_parse_unique_until(Datum value);
extern JqOnConflict jq_parse_on_conflict(Datum value);
extern const char *jq_unique_until_name(JqUniqueUntil until);
extern const char *jq_on_conflict_name(JqOnConflict conflict);
extern JqOutcome jq_claim_key(JqJob *job);
extern int64 jq_reclaim_key(const JqJob *job);
extern void jq_release_key(const JqJob *job);

/* "enqueue.c" */
extern JqOutcome jq_enqueue(JqJob *job, Oid roleid);
extern void jq_check_may_dispatch(void);
extern int64 jq_dispatch_array(ArrayType *jobs, int64 batch_id,
							   ReturnSetInfo *result);
extern TimestampTz jq_due_time(const Datum *values, const bool *nulls,
							   TimestampTz now);
extern void jq_resolve_spec(const Datum *values, const bool *nulls,
							JqJob *job);
extern void jq_read_unique(const Datum *values, const bool *nulls,
						   JqJob *job);
extern void jq_deform_spec(Datum spec, Datum *values, bool *nulls);
extern void jq_dispatch_follow_up(JqJob *follow, Oid roleid);

/* "chain.c" */
extern Datum jq_resolve_chain(Datum chain, int first);
extern Datum jq_resolve_callback(Datum spec);
extern void jq_make_callback(Datum callback, JqJob *job);
extern int	jq_queue_next_link(const JqJob *job, Oid roleid, Datum previous);
extern bool jq_make_catch_job(const JqJob *job, JqJob *catch_job);
extern int	jq_chain_length(const JqJob *job);

/* "batch.c" */
extern void jq_join_batch(int64 batch_id, bool may_be_closed);
extern void jq_count_links(const JqJob *job, int links);
extern void jq_add_to_total(int64 batch_id, int64 count);
extern bool jq_batch_is_cancelled(int64 batch_id);
extern bool jq_batch_goes_on(int64 batch_id);
extern void jq_count_ended(const JqJob *job, int jobs);
extern void jq_count_cancelled(const JqJob *job);
extern void jq_count_failed(const JqJob *job, const JqFailure *failure,
							int32 attempts);
extern bool jq_count_retried(const JqJob *job);
extern bool jq_consider_batch(int64 batch_id);
extern int	jq_unfinished_batches(int64 **ids);
extern int64 jq_settle_cancelled(int64 batch_id, int64 after, bool *settled);
extern void jq_write_batch_totals(void);
extern void jq_batches_at_subxact_end(bool commit);
extern void jq_batches_at_xact_end(bool commit);

/* "limit.c" */
#define JQ_GATE_GROUP "group"
#define JQ_GATE_QUEUE "queue"
#define JQ_GATE_OVERLAP "overlap"
#define JQ_GATE_RUNNING "running"
#define JQ_GATE_RATE "rate"

/* The place that stands for a batch's lock, which is none of a gate. */
#define JQ_PLACE_BATCH PG_UINT16_MAX

extern void jq_set_locktag(LOCKTAG *tag, uint64 id, uint16 place);
extern bool jq_needs_admission(const JqJob *job, const JqHandler *handler);
extern bool jq_enter_limits(JqJob *job, const JqHandler *handler,
							JqGate *blocked);
extern bool jq_gate_is_open(JqGate *gate, int64 job_id);
extern int	jq_count_free_places(JqGate *gate, int most);
extern void jq_gate_scan_keys(const JqGate *gate, ScanKey keys);
extern void jq_mark_places(const JqJob *job);
extern void jq_unmark_places(const JqJob *job);
extern void jq_join_group(const JqJob *job);
extern void jq_leave_group(const JqJob *job);
extern bool jq_take_token(const JqJob *job, const JqHandler *handler,
						  JqGate *gate, bool *taken);
extern void jq_return_token(const JqGate *gate);
extern JqFailure *jq_middleware_verdict(const JqJob *job,
										const JqHandler *handler,
										MemoryContext cxt);
extern void jq_excuse_middleware(JqFailure *failure);

/* "held.c" */
extern JqFailure *jq_hold_at_gate(JqJob *job, Oid roleid,
								  const JqHandler *handler,
								  const JqGate *gate);
extern void jq_leave_gates(const JqJob *job);
extern void jq_look_at_gate_again(JqGate *gate, int64 job_id, bool anyway);
extern void jq_retry_held(const char *scope, bool queue);
extern TimestampTz jq_look_at_held(bool all);

/* "insert.c" */
extern void jq_update_job(Relation rel, ItemPointer tid, HeapTuple tuple);
extern void jq_insert_job(const JqJob *job, Oid roleid);
extern int64 jq_next_job_id(void);
extern int64 jq_random_stamp(void);
extern void jq_close_insertion(void);
extern void jq_forget_insertion(void);

/* "wakeup.c" */
extern void jq_wakeup_init(void);
extern void jq_note_due(Oid roleid, const char *queue, int32 priority,
						JqKey key);
extern void jq_note_full_look(void);
extern void jq_note_launcher(void);
extern void jq_note_pauses(void);
extern void jq_note_batch(int64 batch_id);
extern void jq_note_cancelled_batch(int64 batch_id);
extern void jq_note_held(TimestampTz at);
extern void jq_note_configuration(void);
extern void jq_note_restart(void);
extern void jq_note_cancel(int64 job_id, int64 stamp);

/* "pause.c" */
extern uint32 jq_load_pauses(void);
extern TimestampTz jq_paused_until(const char *queue);

/* "claim.c" */
typedef void (*JqLaneCallback) (const char *role, const char *queue,
								int32 priority, JqKey first, void *arg);

extern TimestampTz jq_lanes_due(const JqLaneSet *set, List *queues);
extern bool jq_claim_next(JqLaneSet *set, List *queues, JqJob *job);
extern void jq_scan_lanes(const char *role, JqLaneCallback callback,
						  void *arg);

extern void jq_read_job(TupleTableSlot *row, JqJob *job);

/* "execute.c" */
extern void jq_call_handler(const JqHandler *handler, const JqJob *job,
							FmgrInfo *flinfo, bool settle,
							JqCallResult *result);
extern void jq_set_local_synchronous_commit(int value);
extern JqFailure *jq_capture_failure(MemoryContext cxt);
extern JqFailure *jq_make_failure(int sqlerrcode, char *message);
extern JqFailure *jq_failure_before_start(JqJob *job,
										  const JqHandler *handler);
extern bool jq_try_again(const JqFailure *failure, int tries);
extern char *jq_attempt_text(const JqJob *job);
extern char *jq_last_error_detail(const JqJob *job);

/* "current_job.c" */
typedef struct JqVerdict
{
	int			sqlerrcode;		/* 0: none */
	char		message[JQ_ERROR_MAX + 1];
	Interval	delay;
} JqVerdict;

extern const JqVerdict *jq_last_verdict(void);
extern void jq_set_current_job(const JqHandler *handler, const JqJob *job);
extern void jq_return_to_job(const JqHandler *handler, const JqJob *job);
extern const JqJob *jq_current(const JqHandler **handler);
extern const char *jq_current_log(void);
extern void jq_note_chain_written(void);
extern bool jq_chain_was_written(void);
extern Datum jq_make_context(const JqHandler *handler, const JqJob *job);

/* "record.c" */
extern bool jq_record_done(JqJob *job, Oid roleid, const JqHandler *handler,
						   const JqCallResult *result);
extern Datum jq_lock_chain(const JqJob *job);
extern void jq_write_chain(const JqJob *job, Datum chain);
extern bool jq_record_failure(const JqJob *job, Oid roleid,
							  const JqHandler *handler,
							  const JqFailure *failure, bool *gone);
extern bool jq_lock_job(JqJob *job);
extern void jq_replace_job(const JqJob *former, JqJob *job);
extern void jq_dispatch_follower(JqJob *follow, Oid roleid);
extern Datum jq_failure_as_jsonb(const JqJob *job, const JqFailure *failure,
								 int32 attempts);
extern void jq_move_job(const JqJob *job, Oid roleid);
extern void jq_start_lease(JqJob *job, const JqHandler *handler);
typedef enum JqFreeing
{
	JQ_HELD_FREED,
	JQ_HELD_VOID,				/* it does not wait there */
	JQ_HELD_BUSY				/* somebody has its row */
} JqFreeing;

extern void jq_note_if_freed(const JqJob *job, Oid roleid);
extern JqFreeing jq_free_held_job(int64 id, TimestampTz due_at);
extern void jq_put_off(const JqJob *job, TimestampTz at);
extern void jq_release_until(const JqJob *job, Oid roleid, TimestampTz at);
extern bool jq_job_exists(int64 id);
extern bool jq_lease_is_valid(int64 job_id, int64 token);
extern bool jq_holder_lives(int32 pid, TimestampTz started);

/* "failed.c" */
extern void jq_insert_failed(const JqJob *job, int32 attempts,
							 const JqFailure *failure);

/* "control.c" */
extern int64 jq_id_argument(FunctionCallInfo fcinfo, const char *function);

/* "cancel.c" */
extern bool jq_take_waiting_job(int64 id, JqJob *job);
extern bool jq_drop_waiting_job(int64 id);
extern void jq_describe_cancellation(const JqJob *job, JqFailure *failure);
extern void jq_remove_cancellation(const JqJob *job);
extern bool jq_process_cancellations(void);

/* "result.c" */
extern void jq_keep_result(const JqJob *job, const JqHandler *handler,
						   const JqCallResult *result);

/* "history.c" */
extern void jq_keep_attempt(const JqJob *job, const char *outcome,
							const JqFailure *failure);
extern int64 jq_prune_kept(void);

/* "owner.c" */
typedef struct JqOwnerSection
{
	Oid			save_userid;
	int			save_sec_context;
	int			guc_level;
} JqOwnerSection;

extern void jq_enter_owner(JqOwnerSection *section);
extern void jq_leave_owner(JqOwnerSection *section);
extern void jq_insist_on_indexes(void);
extern uint64 jq_owner_fetch_ids(const char *query, int nargs,
								 Oid *argtypes, Datum *values, int64 **ids);
extern uint64 jq_owner_execute(const char *command, int nargs, Oid *argtypes,
							   Datum *values, const char *nulls,
							   int64 *result);

/* "slots.c" */
extern bool jq_slot_reserve(Oid dboid, Oid roleid, int *slotno,
							uint32 *generation);
extern void jq_slot_release(int slotno, uint32 generation);
extern void jq_slot_attach(int slotno, uint32 generation);
extern void jq_slot_begin_job(JqJob *job);
extern void jq_slot_settle_at_commit(bool settles);
extern void jq_slot_let_go(void);
extern void jq_slot_end_job(void);
extern void jq_slot_drop_job(void);
extern void jq_slot_interrupt(JqSlot *slot, TimestampTz now);
extern bool jq_scheduler_is_there(Oid dboid);
extern void jq_slot_end_worker(JqSlot *slot, bool innocent);
extern bool jq_suspect_runs(void);
extern JqSlot *jq_slot_of_job(int64 job_id, int64 stamp);
extern bool jq_slot_try_idle(const JqLaneSet *set, List *queues,
							 uint32 pauses_seen);
extern void jq_slot_set_busy(void);
extern void jq_slot_wake_next(void);
extern bool jq_is_unsettled(const JqJob *job, JqUnsettled *unsettled);
extern void jq_forget_unsettled(const JqJob *job, bool gone);

/* "worker.c" */
extern void jq_set_signal_handler(int signo,
								  void (*handler) (int, siginfo_t *, void *));

/* "database.c" */
extern void jq_install_hooks(void);

/* "launcher.c", "scheduler.c", "worker.c" */
extern void jq_register_launcher(void);
extern bool jq_database_is_served(const char *name);
extern PGDLLEXPORT void jq_launcher_main(Datum main_arg);
extern PGDLLEXPORT void jq_scheduler_main(Datum main_arg);
extern PGDLLEXPORT void jq_worker_main(Datum main_arg);

#endif							/* JQ_H */
