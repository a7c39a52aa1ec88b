/* The C interface of the core, for Python and the TensorFlow ops.
 *
 * Numbers stand for the enumerations in types.h and failure.h. Functions return
 * a Code, 0 for success; collective_error() returns the message, per thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLLECTIVE_EXPORT __attribute__((visibility("default")))

typedef struct {
  const void* input;
  void* output;
  int64_t count;
  const int64_t* shape;
  int32_t dimensions;
  int32_t dtype;
} collective_tensor;

typedef struct {
  int32_t kind;
  int32_t op;
  int32_t root; /* within the group */
  int32_t algorithm;
  int32_t transport; /* a dtype, or -1 */
  int32_t group;     /* from collective_group, or 0: all ranks */
  int32_t order;
  int32_t tensors_length;
  const collective_tensor* tensors;
  const int64_t* counts;
  int64_t counts_length;
  const char* name;
  int32_t plan; /* from collective_plan, or 0 */
  /* For order by name. 1: breaks the job if another request of the same name and
   * ticket has not ended: their order could differ between ranks. */
  int32_t once;
  /* Part of the name: the value that an earlier request has received in
   * `*issued`, the same on all ranks; or 0. */
  int64_t ticket;
  /* If not NULL, receives the number of this request before its end: the same
   * on all ranks of the group; 0 in program order or on one rank. */
  int64_t* issued;
} collective_request;

typedef struct collective_handle collective_handle;
typedef void (*collective_done)(void* argument, int32_t code, const char* message);

/* For the check at load: returns a digest of this library's sources. */
COLLECTIVE_EXPORT const char* collective_source(void);

COLLECTIVE_EXPORT int32_t collective_init(int32_t rank, int32_t size,
                                          int32_t local_rank, int32_t local_size,
                                          const char* job);
/* Leaves the job. Ends this rank's unfinished collectives with an error. */
COLLECTIVE_EXPORT int32_t collective_shutdown(void);
COLLECTIVE_EXPORT const char* collective_error(void);
COLLECTIVE_EXPORT const char* collective_kernels(void);

/* Every rank of the job calls it, with the same ascending ranks. *group is
 * unique in this process, also after the next collective_init. */
COLLECTIVE_EXPORT int32_t collective_group(const int32_t* ranks, int32_t length,
                                           int32_t* group);

/* Get the size of a group, and the number of this rank in it. */
COLLECTIVE_EXPORT int32_t collective_members(int32_t group, int32_t* size, int32_t* me);

/* Gets the same for a rank that may be no member. */
typedef struct {
  int32_t rank; /* of this process in the group; -1: not a member */
  int32_t size;
  int32_t local_rank; /* number of members on this host with a lower rank */
  int32_t local_size;
} collective_ranks;
COLLECTIVE_EXPORT int32_t collective_rank_info(int32_t group, collective_ranks* info);

/* Returns the rank in the whole job of a group's member. */
COLLECTIVE_EXPORT int32_t collective_rank_of(int32_t group, int32_t member,
                                             int32_t* rank);

/* Collectives: a blocking one; one with a handle, which collective_wait frees;
 * and one with a callback from another thread or, for a few bytes, from this one
 * before the call returns. In program order the caller of collective_submit must
 * wait for the callback. Tensors must live until the end; the rest is copied. */
COLLECTIVE_EXPORT int32_t collective_run(const collective_request* request);
COLLECTIVE_EXPORT int32_t collective_start(const collective_request* request,
                                           collective_handle** handle);
COLLECTIVE_EXPORT int32_t collective_wait(collective_handle* handle);
COLLECTIVE_EXPORT int32_t collective_finished(collective_handle* handle);
COLLECTIVE_EXPORT int32_t collective_submit(const collective_request* request,
                                            collective_done done, void* argument);

/* Horovod's join(): takes part in the collectives of other ranks, without data,
 * until all have joined. *served: their number. */
COLLECTIVE_EXPORT int32_t collective_join(int64_t* served);

/* While a function is traced: adds a collective of this name to its plan, where
 * `plan` is the caller's number of the trace. */
COLLECTIVE_EXPORT void collective_plan(int32_t plan, int32_t group,
                                       const char* function, const char* name);

/* Whether the job is broken because ranks died or left. If so, all survivors may
 * call collective_reconfigure, which forms a job of them, numbered from 0 in
 * their old order, without groups. It needs no death: ranks may have shut down,
 * or others wait to join. These are taken in if `admits` is not 0 on the first of
 * the survivors; else they wait on. */
COLLECTIVE_EXPORT int32_t collective_lost(void);
COLLECTIVE_EXPORT int32_t collective_reconfigure(int32_t admits, int32_t* rank,
                                                 int32_t* size);
/* On several hosts, before collective_shutdown: lets the other ranks call
 * collective_reconfigure without this one. */
COLLECTIVE_EXPORT int32_t collective_depart(void);

/* By rank: the first rank on its host; and, after collective_reconfigure or
 * collective_late_join, its former rank, or -1 if it has just joined. */
COLLECTIVE_EXPORT int32_t collective_hosts(int32_t* hosts, int32_t* former);
/* On rank 0: the number of processes that wait to join; elsewhere 0. */
COLLECTIVE_EXPORT int32_t collective_pending_joins(void);
/* For a process that is a job of its own: waits until the running job of that
 * name takes it in. Results as of collective_reconfigure. */
COLLECTIVE_EXPORT int32_t collective_late_join(int32_t* rank, int32_t* size);

/* Breaks the job: collectives of all ranks fail with this message. */
COLLECTIVE_EXPORT void collective_abort(const char* message);

/* Writes a Chrome trace of this process' collectives, of `limit` bytes at most, into
 * `file`, a descriptor of an empty file that the core closes. */
COLLECTIVE_EXPORT void collective_timeline_start(int32_t file, int64_t limit,
                                                 int32_t process);
COLLECTIVE_EXPORT void collective_timeline_stop(void);
/* Begins or ends to keep a record of each collective in memory. */
COLLECTIVE_EXPORT void collective_timeline_keep(int32_t on);
/* Takes the kept records, the oldest first: three int64 each, begin and end in
 * nanoseconds of the monotonic clock, and bytes. Returns their number. */
COLLECTIVE_EXPORT int32_t collective_timeline_take(void* events, int32_t most);

/* ---- the flight recorder (recorder.h), for collective/recorder ---- */

COLLECTIVE_EXPORT int32_t collective_recorder_open(int32_t rank, int32_t size,
                                                   int32_t local_rank,
                                                   int32_t local_size, const char* job,
                                                   int32_t launch_rank);
/* Before either of the next two: waits until deaths have been dumped. */
COLLECTIVE_EXPORT void collective_recorder_await_dumps(void);
/* After a reconfiguration or a late join, when the former recorder is closed.
 */
COLLECTIVE_EXPORT int32_t collective_recorder_reopen(int32_t launch_rank,
                                                     int32_t joined);
/* For a job outside of the core, after ranks have left or died. */
COLLECTIVE_EXPORT void collective_recorder_renumber(int32_t rank);
/* Starts an entry; returns its number, or 0 if there is no recorder. */
COLLECTIVE_EXPORT uint64_t collective_recorder_begin(int32_t kind, const char* name,
                                                     int64_t bytes);
COLLECTIVE_EXPORT void collective_recorder_end(uint64_t number, int32_t failed);
/* Returns the memory for Rank::at and Rank::since (recorder.h) until it is
 * closed; or null. */
COLLECTIVE_EXPORT double* collective_recorder_position(void);
COLLECTIVE_EXPORT void collective_recorder_request_dump(const char* reason);
/* For the watching thread: see recorder.h. Returns an Event. */
COLLECTIVE_EXPORT int32_t collective_recorder_watch(int32_t milliseconds);
COLLECTIVE_EXPORT void collective_recorder_sample(const char* stack);
COLLECTIVE_EXPORT void collective_recorder_request_samples(int32_t milliseconds);
COLLECTIVE_EXPORT int32_t collective_recorder_local_size(void);
COLLECTIVE_EXPORT int32_t collective_recorder_read(int32_t local_rank, void* rank);
COLLECTIVE_EXPORT const char* collective_recorder_reason(void);
COLLECTIVE_EXPORT void collective_recorder_finish_dump(void);
COLLECTIVE_EXPORT void collective_recorder_close(void);

/* ---- for collective.bench (c_api_timing.cc) ---- */

/* Measures the seconds of each of `repetitions` on this rank, a barrier before
 * each. */
COLLECTIVE_EXPORT int32_t collective_time(const collective_request* request,
                                          int32_t repetitions, int32_t inner,
                                          double* seconds);
/* Measures the same for MPI_Allreduce, given as a pointer, with its handles. */
COLLECTIVE_EXPORT int32_t collective_time_mpi(void* allreduce, const void* input,
                                              void* output, int32_t count,
                                              void* datatype, void* op,
                                              void* communicator, int32_t repetitions,
                                              int32_t inner, double* seconds);
/* Measures a cache line between ranks 0 and 1 (others wait), in ns one way. */
COLLECTIVE_EXPORT int32_t collective_probe(double* nanoseconds);
/* Measures bytes per second of this rank alone. 0: a = b = a + b, reads and
 * writes counted; 1: non-temporal writes; 2: c = a + b, one array counted. */
COLLECTIVE_EXPORT int32_t collective_bandwidth(int32_t kernel, int64_t bytes,
                                               double* rate);

#ifdef __cplusplus
}
#endif
