/* What a plug-in for one family of MPI gives the core: collective_mpi_plugin().
 */
#ifndef COLLECTIVE_NATIVE_MPI_PLUGIN_H_
#define COLLECTIVE_NATIVE_MPI_PLUGIN_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  /* Starts MPI unless it runs already. 0 for success. */
  int (*start)(int* rank, int* size);
  void* (*send)(int rank, int tag, const void* data, size_t bytes);
  void* (*receive)(int rank, int tag, void* data, size_t bytes);
  int (*done)(void* transfer); /* 1: ended and freed */
  void (*abort)(int code);
} collective_mpi;

typedef const collective_mpi* (*collective_mpi_plugin_function)(void);

#ifdef __cplusplus
}
#endif

#endif /* COLLECTIVE_NATIVE_MPI_PLUGIN_H_ */
