/* What a plug-in for one family of MPI gives the core: collective_mpi_plugin().
 *
 * A table of C functions, because the families of MPI have incompatible ABIs:
 * the core is built without mpi.h. One thread at a time calls these functions
 * (messages.cc holds a lock). */
#ifndef COLLECTIVE_NATIVE_TRANSPORT_MPI_PLUGIN_H_
#define COLLECTIVE_NATIVE_TRANSPORT_MPI_PLUGIN_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A job's communicator, a duplicate of MPI_COMM_WORLD: its messages never mix
 * with those of another job or of the program's own MPI calls. */
typedef struct collective_world collective_world;

typedef struct {
  /* Starts MPI unless it runs already; and a job. Null if it cannot: error().
   */
  collective_world* (*start)(int* rank, int* size);
  /* All-gather of one number, by rank. 0 for success. */
  int (*gather)(collective_world* world, int mine, int* all);
  void* (*send)(collective_world* world, int rank, int tag, const void* data,
                size_t bytes);
  void* (*receive)(collective_world* world, int rank, int tag, void* data,
                   size_t bytes);
  /* 0: in flight. 1: done; -1: failed, see error(). Both free it. */
  int (*test)(void* transfer);
  /* The text of the last failure. */
  const char* (*error)(void);
  /* Progresses transfers. Receives a message of this tag, from any rank, if one
   * has arrived: 1, else 0. */
  int (*poll)(collective_world* world, int tag, void* data, size_t bytes);
  /* The job is broken: the process is to end without MPI_Finalize, which would
   * wait for ranks that may have died. */
  void (*skip_finalize)(void);

  /* ---- surviving the death of ranks: MPI's ULFM ---- */

  /* Whether MPI survives the death of processes. The rest is for MPIs that
   * do. */
  int (*fault_tolerant)(void);
  /* The ranks of the job that are known to have died; returns how many. */
  int (*failed_ranks)(collective_world* world, int* ranks);
  /* Whether any rank has called revoke. */
  int (*revoked)(collective_world* world);
  /* Ends the job's transfers, on every rank: none writes to memory any more. */
  void (*revoke)(collective_world* world);
  /* Ends when all live ranks have called it; with success if none had died
   * before and all have said yes. The same outcome on all. */
  void* (*agree)(collective_world* world, int yes);
  /* A job of the live ranks, which all of them call at about the same time.
   * `previous`, by rank: its number in `world`. Null if MPI cannot. After this
   * the process is to end without MPI_Finalize: that of Open MPI 5.0.11 waits
   * for ever if all ranks of a host are dead. */
  collective_world* (*shrink)(collective_world* world, int* rank, int* size,
                              int* previous);
  /* The same without those that do not stay, if all live and all call it.
   * `next` is null for a rank that does not stay. 0 for success; if a rank dies
   * meanwhile, perhaps on some ranks only. */
  int (*split)(collective_world* world, int stays, collective_world** next,
               int* rank, int* size, int* previous);
} collective_mpi;

typedef const collective_mpi* (*collective_mpi_plugin_function)(void);

#ifdef __cplusplus
}
#endif

#endif /* COLLECTIVE_NATIVE_TRANSPORT_MPI_PLUGIN_H_ */
