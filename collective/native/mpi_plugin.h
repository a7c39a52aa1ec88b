/* What a plug-in for one family of MPI gives the core: collective_mpi_plugin().
 *
 * One thread at a time calls these functions (network.h sees to it). */
#ifndef COLLECTIVE_NATIVE_MPI_PLUGIN_H_
#define COLLECTIVE_NATIVE_MPI_PLUGIN_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  /* Starts MPI unless it runs already; and a job. 0 for success. */
  int (*start)(int* rank, int* size);
  /* Every rank's number to every rank, by rank. 0 for success. */
  int (*gather)(int mine, int* all);
  void* (*send)(int rank, int tag, const void* data, size_t bytes);
  void* (*receive)(int rank, int tag, void* data, size_t bytes);
  /* 0: under way. 1: ended; -1: failed, see error(). Both free it. */
  int (*done)(void* transfer);
  /* What MPI says about the last failure. */
  const char* (*error)(void);
  /* Moves transfers on. Where a message of this tag is there, from whomever,
   * receives it: 1, else 0. */
  int (*poll)(int tag, void* data, size_t bytes);
  /* The job is broken: the process shall end without MPI_Finalize, which would
   * wait for ranks that may not live any more. */
  void (*give_up)(void);
} collective_mpi;

typedef const collective_mpi* (*collective_mpi_plugin_function)(void);

#ifdef __cplusplus
}
#endif

#endif /* COLLECTIVE_NATIVE_MPI_PLUGIN_H_ */
