// MPI for the core: compiled once for each family of MPI by its own compiler
// wrapper, never linked into the core (messages.h).
#include "transport/mpi_plugin.h"

#include <mpi.h>
#include <unistd.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <cstdlib>
#include <numeric>
#include <vector>

struct collective_world {
  MPI_Comm comm = MPI_COMM_NULL;
};

namespace {

char last_error[MPI_MAX_ERROR_STRING] = "";
bool given_up = false;
pid_t started_in = 0;  // a fork of it does not end MPI

// Of an agreement, `yes` is what this rank says and then what all have said.
struct Transfer {
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
  int yes = 1;
};

bool Finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized;
}

void Finalize() {
  if (!given_up && getpid() == started_in && !Finalized()) MPI_Finalize();
}

collective_world* NewWorld(MPI_Comm comm, int* rank, int* size) {
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm, rank);
  MPI_Comm_size(comm, size);
  return new collective_world{comm};
}

collective_world* Start(int* rank, int* size) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    int provided = 0;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) !=
            MPI_SUCCESS ||
        provided < MPI_THREAD_SERIALIZED) {
      return nullptr;
    }
    // MPI cannot be started twice: it ends with the process, not with the job.
    started_in = getpid();
    std::atexit(Finalize);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  }
  // One for each job of this process: what is left of a broken job's messages
  // is never taken for the next one's.
  MPI_Comm comm;
  if (MPI_Comm_dup(MPI_COMM_WORLD, &comm) != MPI_SUCCESS) return nullptr;
  given_up = false;
  return NewWorld(comm, rank, size);
}

int Gather(collective_world* world, int mine, int* all) {
  return MPI_Allgather(&mine, 1, MPI_INT, all, 1, MPI_INT, world->comm);
}

void* Send(collective_world* world, int rank, int tag, const void* data,
           size_t bytes) {
  auto* transfer = new Transfer;
  transfer->code =
      Finalized()
          ? MPI_ERR_OTHER
          : MPI_Isend(const_cast<void*>(data), static_cast<int>(bytes),
                      MPI_BYTE, rank, tag, world->comm, &transfer->request);
  return transfer;
}

void* Receive(collective_world* world, int rank, int tag, void* data,
              size_t bytes) {
  auto* transfer = new Transfer;
  transfer->code = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, rank, tag,
                             world->comm, &transfer->request);
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
  const bool yes = transfer->yes;
  delete transfer;
  if (code == MPI_SUCCESS) return yes ? 1 : -1;
  int length = 0;
  MPI_Error_string(code, last_error, &length);
  return -1;
}

const char* Error() { return last_error; }

int Poll(collective_world* world, int tag, void* data, size_t bytes) {
  int there = 0;
  MPI_Status status;
  if (Finalized() || MPI_Iprobe(MPI_ANY_SOURCE, tag, world->comm, &there,
                                &status) != MPI_SUCCESS) {
    return 0;
  }
  return there &&
         MPI_Recv(data, static_cast<int>(bytes), MPI_BYTE, status.MPI_SOURCE,
                  tag, world->comm, MPI_STATUS_IGNORE) == MPI_SUCCESS;
}

void GiveUp() { given_up = true; }

#if defined(OMPI_HAVE_MPI_EXT_FTMPI)

int Survives() {
  int* enabled = nullptr;
  int there = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPIX_FT, &enabled, &there);
  return there && *enabled;
}

int Revoked(collective_world* world) {
  int revoked = 0;
  if (!Finalized()) MPIX_Comm_is_revoked(world->comm, &revoked);
  return revoked;
}

int Dead(collective_world* world, int* ranks) {
  MPI_Group everyone, failed;
  int count = 0;
  if (Finalized() ||
      MPIX_Comm_get_failed(world->comm, &failed) != MPI_SUCCESS) {
    return 0;
  }
  MPI_Group_size(failed, &count);
  if (count) {
    std::vector<int> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    MPI_Comm_group(world->comm, &everyone);
    MPI_Group_translate_ranks(failed, count, numbers.data(), everyone, ranks);
    MPI_Group_free(&everyone);
    // So that what others send is still heard.
    MPIX_Comm_failure_ack(world->comm);
  }
  if (failed != MPI_GROUP_EMPTY) MPI_Group_free(&failed);
  return count;
}

void Revoke(collective_world* world) {
  if (!Revoked(world)) MPIX_Comm_revoke(world->comm);
}

void* Agree(collective_world* world, int yes) {
  auto* transfer = new Transfer;
  transfer->yes = yes;
  transfer->code =
      MPIX_Comm_iagree(world->comm, &transfer->yes, &transfer->request);
  return transfer;
}

collective_world* OfThoseLeft(collective_world* world, MPI_Comm left, int* rank,
                              int* size, int* former) {
  collective_world* next = NewWorld(left, rank, size);
  given_up = true;
  std::vector<int> ranks(*size);
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group before, now;
  MPI_Comm_group(world->comm, &before);
  MPI_Comm_group(left, &now);
  MPI_Group_translate_ranks(now, *size, ranks.data(), before, former);
  MPI_Group_free(&before);
  MPI_Group_free(&now);
  return next;
}

collective_world* Shrink(collective_world* world, int* rank, int* size,
                         int* former) {
  MPI_Comm left;
  if (MPIX_Comm_shrink(world->comm, &left) != MPI_SUCCESS) return nullptr;
  return OfThoseLeft(world, left, rank, size, former);
}

int Split(collective_world* world, int stays, collective_world** left,
          int* rank, int* size, int* former) {
  MPI_Comm comm = MPI_COMM_NULL;
  int me = 0;
  MPI_Comm_rank(world->comm, &me);
  const int code =
      MPI_Comm_split(world->comm, stays ? 0 : MPI_UNDEFINED, me, &comm);
  if (code == MPI_SUCCESS && stays) {
    *left = OfThoseLeft(world, comm, rank, size, former);
  }
  return code;
}

#else

int Survives() { return 0; }
int Dead(collective_world*, int*) { return 0; }
int Revoked(collective_world*) { return 0; }
void Revoke(collective_world*) {}
void* Agree(collective_world*, int) { return nullptr; }
collective_world* Shrink(collective_world*, int*, int*, int*) {
  return nullptr;
}
int Split(collective_world*, int, collective_world**, int*, int*, int*) {
  return MPI_ERR_OTHER;
}

#endif

constexpr collective_mpi kPlugin = {Start,   Gather, Send,   Receive,  Done,
                                    Error,   Poll,   GiveUp, Survives, Dead,
                                    Revoked, Revoke, Agree,  Shrink,   Split};

}  // namespace

extern "C" __attribute__((visibility("default"))) const collective_mpi*
collective_mpi_plugin() {
  return &kPlugin;
}
