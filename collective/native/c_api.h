/* The C interface of the core: what Python (ctypes) and the TensorFlow ops see.
 *
 * Numbers stand for the enumerations in types.h and failure.h. Functions return
 * a Code, 0 for success; collective_error() tells the rest, per thread. */
#ifndef COLLECTIVE_NATIVE_C_API_H_
#define COLLECTIVE_NATIVE_C_API_H_

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
  /* By name. 1: fails, and ends the job, where another request of the same name
   * and ticket is under way: their order is not known. */
  int32_t once;
  /* A part of the name, equal on all ranks: what an earlier request received in
   * `*issued`; or 0. */
  int64_t ticket;
  /* If not NULL, receives a number before the end: the same on all ranks of the
   * group, another for each request. 0 in program order or on one rank. */
  int64_t* issued;
} collective_request;

typedef struct collective_handle collective_handle;
typedef void (*collective_done)(void* argument, int32_t code,
                                const char* message);

/* For the check at load. The layout in bytes of a structure that Python mirrors
 * by hand, as "SIZE: OFFSET OFFSET ...", empty for others; and a digest of the
 * sources of this library. */
COLLECTIVE_EXPORT const char* collective_layout(const char* structure);
COLLECTIVE_EXPORT const char* collective_source(void);

COLLECTIVE_EXPORT int32_t collective_init(int32_t rank, int32_t size,
                                          int32_t local_rank,
                                          int32_t local_size, const char* job);
/* Leaves the job. Ends this rank's unfinished collectives with an error. */
COLLECTIVE_EXPORT int32_t collective_shutdown(void);
COLLECTIVE_EXPORT const char* collective_error(void);
COLLECTIVE_EXPORT const char* collective_kernels(void);
// Where the plug-in for the MPI that launched this process is, or would be; for
// the calling thread, until its next call.
COLLECTIVE_EXPORT const char* collective_plugin(void);

/* Every rank of the job calls it, with the same ascending ranks. *group names
 * the group in this process, and no other before or after it. */
COLLECTIVE_EXPORT int32_t collective_group(const int32_t* ranks, int32_t length,
                                           int32_t* group);

/* How many ranks a group has, and the number of this one among them. */
COLLECTIVE_EXPORT int32_t collective_members(int32_t group, int32_t* size,
                                             int32_t* me);

/* The same for a rank that need not be among them. */
typedef struct {
  int32_t rank; /* of this process among the group's ranks; -1: outside */
  int32_t size;
  int32_t local_rank; /* how many of them on this host are before this rank */
  int32_t local_size;
} collective_ranks;
COLLECTIVE_EXPORT int32_t collective_rank_info(int32_t group,
                                               collective_ranks* info);

/* The rank in the whole job of a group's member. */
COLLECTIVE_EXPORT int32_t collective_rank_of(int32_t group, int32_t member,
                                             int32_t* rank);

/* Blocking; and with a handle, which collective_wait frees; and with a callback
 * from another thread, or, of a few bytes, from this one before it returns, for
 * which the caller waits if the order is that of the program. Tensors must live
 * until the end; the rest is copied. */
COLLECTIVE_EXPORT int32_t collective_run(const collective_request* request);
COLLECTIVE_EXPORT int32_t collective_start(const collective_request* request,
                                           collective_handle** handle);
COLLECTIVE_EXPORT int32_t collective_wait(collective_handle* handle);
COLLECTIVE_EXPORT int32_t collective_finished(collective_handle* handle);
COLLECTIVE_EXPORT int32_t collective_submit(const collective_request* request,
                                            collective_done done,
                                            void* argument);

/* Takes part, with nothing to give, in what other ranks call, until all have
 * joined. *served: in how many of their collectives. */
COLLECTIVE_EXPORT int32_t collective_join(int64_t* served);

/* While a function is traced: it has one more collective, of this name. `plan`
 * is the caller's number of the trace. */
COLLECTIVE_EXPORT void collective_plan(int32_t plan, int32_t group,
                                       const char* function, const char* name);

/* Whether the job is broken because ranks died or left. The others can then go
 * on: all of them call collective_regroup, which makes a job of them, numbered
 * from 0 in their old order, without groups. They may do so where nobody died,
 * too: some have shut down, or others wait to come in. `former`, by rank, is
 * what number it had, or -1: it came in just now; it has room for 128. */
COLLECTIVE_EXPORT int32_t collective_lost(void);
COLLECTIVE_EXPORT int32_t collective_regroup(int32_t* rank, int32_t* size,
                                             int32_t* former);
/* On several hosts, before collective_shutdown: while the others call
 * collective_regroup, who go on without this process. */
COLLECTIVE_EXPORT int32_t collective_part(void);

/* This process' number in the job, and the number of ranks: of those that came,
 * where others had ended before. */
COLLECTIVE_EXPORT int32_t collective_place(int32_t* rank, int32_t* size);
/* By rank: the first rank on its host. */
COLLECTIVE_EXPORT int32_t collective_hosts(int32_t* hosts);
/* On rank 0: how many processes wait to come in; elsewhere 0. */
COLLECTIVE_EXPORT int32_t collective_waiting(void);
/* Of a process that was a job of its own: waits until the job of that name
 * takes it in. The rest as for collective_regroup. */
COLLECTIVE_EXPORT int32_t collective_enter(int32_t* rank, int32_t* size,
                                           int32_t* former);

/* Ends the job on every rank: their collectives fail with this message. */
COLLECTIVE_EXPORT void collective_abort(const char* message);

/* A Chrome trace of this process' collectives, of `limit` bytes at most. */
COLLECTIVE_EXPORT int32_t collective_timeline_start(const char* path,
                                                    int64_t limit,
                                                    int32_t process);
COLLECTIVE_EXPORT void collective_timeline_stop(void);

/* ---- the flight recorder (recorder.h), for collective/recorder ---- */

COLLECTIVE_EXPORT int32_t collective_recorder_open(int32_t rank, int32_t size,
                                                   int32_t local_rank,
                                                   int32_t local_size,
                                                   const char* job,
                                                   int32_t called);
/* Before either of the next: waits for the account of those that have died. */
COLLECTIVE_EXPORT void collective_recorder_settle(void);
/* After a regroup, or an enter, and closed: goes on among the ranks of the job
 * that this process is in now. */
COLLECTIVE_EXPORT int32_t collective_recorder_follow(int32_t called,
                                                     int32_t joined);
/* Where the core has no job, and some ranks are gone. */
COLLECTIVE_EXPORT void collective_recorder_renumber(int32_t rank);
/* The number of what begins now, for its end; 0 where nothing is recorded. */
COLLECTIVE_EXPORT uint64_t collective_recorder_begin(int32_t kind,
                                                     const char* name,
                                                     int64_t bytes);
COLLECTIVE_EXPORT void collective_recorder_end(uint64_t number, int32_t failed);
/* Two numbers, at and since, to be stored into until it is closed: see
 * recorder.h. Null where nothing is recorded. */
COLLECTIVE_EXPORT double* collective_recorder_position(void);
COLLECTIVE_EXPORT void collective_recorder_incident(const char* what);
/* Once opened: an Event; what the caller is to do then is told in recorder.h.
 */
COLLECTIVE_EXPORT int32_t collective_recorder_watch(int32_t milliseconds);
COLLECTIVE_EXPORT void collective_recorder_sample(const char* stack);
COLLECTIVE_EXPORT void collective_recorder_gather(int32_t milliseconds);
/* How many ranks of this host there are to be read. */
COLLECTIVE_EXPORT int32_t collective_recorder_places(void);
COLLECTIVE_EXPORT int32_t collective_recorder_read(int32_t local_rank,
                                                   void* rank);
COLLECTIVE_EXPORT const char* collective_recorder_reason(void);
COLLECTIVE_EXPORT void collective_recorder_done(void);
COLLECTIVE_EXPORT void collective_recorder_close(void);

/* ---- for collective.bench (timing.cc) ---- */

/* Seconds each of `repetitions` took on this rank, a barrier before each. */
COLLECTIVE_EXPORT int32_t collective_time(const collective_request* request,
                                          int32_t repetitions, int32_t inner,
                                          double* seconds);
/* The same for MPI_Allreduce given as a pointer, with its handles. */
COLLECTIVE_EXPORT int32_t collective_time_mpi(void* allreduce,
                                              const void* input, void* output,
                                              int32_t count, void* datatype,
                                              void* op, void* communicator,
                                              int32_t repetitions,
                                              int32_t inner, double* seconds);
/* One-way nanoseconds of a cache line between ranks 0 and 1 (others wait). */
COLLECTIVE_EXPORT int32_t collective_probe(double* nanoseconds);
/* Bytes per second of this rank alone: 0 a = b = a + b, read and write counted;
 * 1 non-temporal writes; 2 c = a + b, one array counted. */
COLLECTIVE_EXPORT int32_t collective_bandwidth(int32_t kernel, int64_t bytes,
                                               double* rate);

#ifdef __cplusplus
}
#endif

#endif /* COLLECTIVE_NATIVE_C_API_H_ */
