// MPI for the core: compiled once for each family of MPI by its own compiler
// wrapper, never linked into the core (network.h).
#include "mpi_plugin.h"

#include <mpi.h>

#include <cstdlib>

namespace {

MPI_Comm world = MPI_COMM_NULL;

void Finalize() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Finalize();
}

int Start(int* rank, int* size) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    int provided = 0;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) !=
            MPI_SUCCESS ||
        provided < MPI_THREAD_SERIALIZED) {
      return 1;
    }
    // MPI cannot be started twice: it ends with the process, not with the job.
    std::atexit(Finalize);
  }
  if (world == MPI_COMM_NULL) MPI_Comm_dup(MPI_COMM_WORLD, &world);
  MPI_Comm_rank(world, rank);
  MPI_Comm_size(world, size);
  return 0;
}

void* Send(int rank, int tag, const void* data, size_t bytes) {
  auto* request = new MPI_Request;
  MPI_Isend(const_cast<void*>(data), static_cast<int>(bytes), MPI_BYTE, rank,
            tag, world, request);
  return request;
}

void* Receive(int rank, int tag, void* data, size_t bytes) {
  auto* request = new MPI_Request;
  MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, rank, tag, world, request);
  return request;
}

int Done(void* transfer) {
  auto* request = static_cast<MPI_Request*>(transfer);
  int done = 0;
  MPI_Test(request, &done, MPI_STATUS_IGNORE);
  if (done) delete request;
  return done;
}

void Abort(int code) { MPI_Abort(world, code); }

constexpr collective_mpi kPlugin = {Start, Send, Receive, Done, Abort};

}  // namespace

extern "C" __attribute__((visibility("default"))) const collective_mpi*
collective_mpi_plugin() {
  return &kPlugin;
}
