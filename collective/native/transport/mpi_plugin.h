/* What a plug-in for one family of MPI gives the core: collective_mpi_plugin().
 *
 * One thread at a time calls these functions (messages.h sees to it). */
#ifndef COLLECTIVE_NATIVE_TRANSPORT_MPI_PLUGIN_H_
#define COLLECTIVE_NATIVE_TRANSPORT_MPI_PLUGIN_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A job's communicator: a message never crosses from one to the next. */
typedef struct collective_world collective_world;

typedef struct {
  /* Starts MPI unless it runs already; and a job. Null where it cannot. */
  collective_world* (*start)(int* rank, int* size);
  /* Every rank's number to every rank, by rank. 0 for success. */
  int (*gather)(collective_world* world, int mine, int* all);
  void* (*send)(collective_world* world, int rank, int tag, const void* data,
                size_t bytes);
  void* (*receive)(collective_world* world, int rank, int tag, void* data,
                   size_t bytes);
  /* 0: under way. 1: ended; -1: failed, see error(). Both free it. */
  int (*done)(void* transfer);
  /* What MPI says about the last failure. */
  const char* (*error)(void);
  /* Moves transfers on. Where a message of this tag is there, from whomever,
   * receives it: 1, else 0. */
  int (*poll)(collective_world* world, int tag, void* data, size_t bytes);
  /* The job is broken: the process shall end without MPI_Finalize, which would
   * wait for ranks that may not live any more. */
  void (*give_up)(void);

  /* ---- going on without ranks that die: MPI's ULFM ---- */

  /* Whether MPI lives on when processes die. The rest is for where it does. */
  int (*survives)(void);
  /* The ranks of the job that are known to have died; returns how many. */
  int (*dead)(collective_world* world, int* ranks);
  /* Whether some rank has called revoke. */
  int (*revoked)(collective_world* world);
  /* Ends the job's transfers, on every rank: none writes to memory any more. */
  void (*revoke)(collective_world* world);
  /* Ends when all that live have called it; well where none has died before,
   * and all have said yes. The same for all of them. */
  void* (*agree)(collective_world* world, int yes);
  /* A job of those that live, which all of them call at about the same time.
   * `former`, by rank: what number it had. Null where MPI cannot. Then, too,
   * the process shall end without MPI_Finalize: that of Open MPI 5.0.11 waits
   * for ever where all ranks of a host are dead. */
  collective_world* (*shrink)(collective_world* world, int* rank, int* size,
                              int* former);
  /* The same, of those that stay, where all live and all call it. `left` is
   * null for the others. 0 for success; where a rank dies meanwhile, maybe not
   * for all of them. */
  int (*split)(collective_world* world, int stays, collective_world** left,
               int* rank, int* size, int* former);
} collective_mpi;

typedef const collective_mpi* (*collective_mpi_plugin_function)(void);

#ifdef __cplusplus
}
#endif

#endif /* COLLECTIVE_NATIVE_TRANSPORT_MPI_PLUGIN_H_ */
