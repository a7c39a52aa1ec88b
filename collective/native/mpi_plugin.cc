// MPI for the core: compiled once for each family of MPI by its own compiler
// wrapper, never linked into the core (network.h).
#include "mpi_plugin.h"

#include <mpi.h>

#include <cstdlib>

namespace {

MPI_Comm world = MPI_COMM_NULL;
char last_error[MPI_MAX_ERROR_STRING] = "";
bool given_up = false;

struct Transfer {
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
};

bool Finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized;
}

void Finalize() {
  if (!given_up && !Finalized()) MPI_Finalize();
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
  // One for each job of this process: what is left of a broken job's messages
  // is never taken for the next one's.
  MPI_Comm_dup(MPI_COMM_WORLD, &world);
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  given_up = false;
  MPI_Comm_rank(world, rank);
  MPI_Comm_size(world, size);
  return 0;
}

int Gather(int mine, int* all) {
  return MPI_Allgather(&mine, 1, MPI_INT, all, 1, MPI_INT, world);
}

void* Send(int rank, int tag, const void* data, size_t bytes) {
  auto* transfer = new Transfer;
  transfer->code =
      Finalized() ? MPI_ERR_OTHER
                  : MPI_Isend(const_cast<void*>(data), static_cast<int>(bytes),
                              MPI_BYTE, rank, tag, world, &transfer->request);
  return transfer;
}

void* Receive(int rank, int tag, void* data, size_t bytes) {
  auto* transfer = new Transfer;
  transfer->code = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, rank, tag,
                             world, &transfer->request);
  return transfer;
}

int Done(void* handle) {
  auto* transfer = static_cast<Transfer*>(handle);
  int done = 0;
  if (transfer->code == MPI_SUCCESS) {
    transfer->code = MPI_Test(&transfer->request, &done, MPI_STATUS_IGNORE);
    if (transfer->code == MPI_SUCCESS && !done) return 0;
  }
  const int code = transfer->code;
  delete transfer;
  if (code == MPI_SUCCESS) return 1;
  int length = 0;
  MPI_Error_string(code, last_error, &length);
  return -1;
}

const char* Error() { return last_error; }

int Poll(int tag, void* data, size_t bytes) {
  int there = 0;
  MPI_Status status;
  if (Finalized() ||
      MPI_Iprobe(MPI_ANY_SOURCE, tag, world, &there, &status) != MPI_SUCCESS) {
    return 0;
  }
  return there &&
         MPI_Recv(data, static_cast<int>(bytes), MPI_BYTE, status.MPI_SOURCE,
                  tag, world, MPI_STATUS_IGNORE) == MPI_SUCCESS;
}

void GiveUp() { given_up = true; }

constexpr collective_mpi kPlugin = {Start, Gather, Send, Receive,
                                    Done,  Error,  Poll, GiveUp};

}  // namespace

extern "C" __attribute__((visibility("default"))) const collective_mpi*
collective_mpi_plugin() {
  return &kPlugin;
}
