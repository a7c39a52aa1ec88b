// MPI for the core, behind mpi_plugin.h.
//
// Compiled once for each family of MPI by its own compiler wrapper, and never
// linked into the core: messages.cc loads the one that launched the job.
#include "transport/mpi_plugin.h"

#include <mpi.h>
#include <unistd.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

struct collective_world {
  MPI_Comm comm = MPI_COMM_NULL;
};

namespace {

char last_error[MPI_MAX_ERROR_STRING] = "";
bool skip_finalize = false;
pid_t started_in = 0;  // a fork of this process must not finalize MPI

struct Transfer {
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
  // Of an agreement: what this rank says, and once done what all have said.
  int yes = 1;
};

void SetError(const char* text) {
  std::snprintf(last_error, sizeof(last_error), "%s", text);
}

bool Finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized;
}

void Finalize() {
  if (!skip_finalize && getpid() == started_in && !Finalized()) MPI_Finalize();
}

collective_world* NewWorld(MPI_Comm comm, int* rank, int* size) {
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm, rank);
  MPI_Comm_size(comm, size);
  return new collective_world{comm};
}

// Starts MPI for a process that has not.
bool Initialize() {
  int provided = MPI_THREAD_SINGLE;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) !=
      MPI_SUCCESS) {
    SetError("MPI_Init_thread failed");
    return false;
  }
  // MPI cannot be started twice: it ends with the process, not with the job.
  started_in = getpid();
  std::atexit(Finalize);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  return true;
}

// Whether MPI can be called from the core's threads. The core's lock covers
// only the core's own calls: if the program has started MPI, as mpi4py does, it
// may call MPI at the same time, which takes MPI_THREAD_MULTIPLE.
bool ThreadsSuffice() {
  int provided = MPI_THREAD_SINGLE;
  MPI_Query_thread(&provided);
  if (started_in == getpid()) {
    if (provided >= MPI_THREAD_SERIALIZED) return true;
    SetError("this MPI was built without support for threads");
  } else {
    if (provided >= MPI_THREAD_MULTIPLE) return true;
    SetError(
        "the program has started MPI without MPI_THREAD_MULTIPLE, and the core "
        "calls MPI from threads of its own");
  }
  return false;
}

collective_world* Start(int* rank, int* size) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (Finalized()) {
    SetError("the program has already finalized MPI");
    return nullptr;
  }
  if ((!initialized && !Initialize()) || !ThreadsSuffice()) return nullptr;
  // A duplicate for each job of this process: neither a message of the program
  // itself nor one that a broken job has left behind is taken for one of ours.
  MPI_Comm comm;
  if (MPI_Comm_dup(MPI_COMM_WORLD, &comm) != MPI_SUCCESS) {
    SetError("MPI_Comm_dup failed");
    return nullptr;
  }
  skip_finalize = false;
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

int Test(void* handle) {
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
  int arrived = 0;
  MPI_Status status;
  if (Finalized() || MPI_Iprobe(MPI_ANY_SOURCE, tag, world->comm, &arrived,
                                &status) != MPI_SUCCESS) {
    return 0;
  }
  return arrived &&
         MPI_Recv(data, static_cast<int>(bytes), MPI_BYTE, status.MPI_SOURCE,
                  tag, world->comm, MPI_STATUS_IGNORE) == MPI_SUCCESS;
}

void SkipFinalize() { skip_finalize = true; }

#if defined(OMPI_HAVE_MPI_EXT_FTMPI)

int FaultTolerant() {
  int* enabled = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPIX_FT, &enabled, &found);
  return found && *enabled;
}

int Revoked(collective_world* world) {
  int revoked = 0;
  if (!Finalized()) MPIX_Comm_is_revoked(world->comm, &revoked);
  return revoked;
}

int FailedRanks(collective_world* world, int* ranks) {
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
    // Acknowledged, MPI_ANY_SOURCE still receives from the live ranks.
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

collective_world* NextWorld(collective_world* world, MPI_Comm survivors,
                            int* rank, int* size, int* previous) {
  collective_world* next = NewWorld(survivors, rank, size);
  skip_finalize = true;
  std::vector<int> ranks(*size);
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group before, now;
  MPI_Comm_group(world->comm, &before);
  MPI_Comm_group(survivors, &now);
  MPI_Group_translate_ranks(now, *size, ranks.data(), before, previous);
  MPI_Group_free(&before);
  MPI_Group_free(&now);
  return next;
}

collective_world* Shrink(collective_world* world, int* rank, int* size,
                         int* previous) {
  MPI_Comm survivors;
  if (MPIX_Comm_shrink(world->comm, &survivors) != MPI_SUCCESS) return nullptr;
  return NextWorld(world, survivors, rank, size, previous);
}

int Split(collective_world* world, int stays, collective_world** next,
          int* rank, int* size, int* previous) {
  MPI_Comm comm = MPI_COMM_NULL;
  int me = 0;
  MPI_Comm_rank(world->comm, &me);
  const int code =
      MPI_Comm_split(world->comm, stays ? 0 : MPI_UNDEFINED, me, &comm);
  if (code == MPI_SUCCESS && stays) {
    *next = NextWorld(world, comm, rank, size, previous);
  }
  return code;
}

#else

int FaultTolerant() { return 0; }
int FailedRanks(collective_world*, int*) { return 0; }
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

constexpr collective_mpi kPlugin = {
    Start,   Gather, Send,         Receive,       Test,
    Error,   Poll,   SkipFinalize, FaultTolerant, FailedRanks,
    Revoked, Revoke, Agree,        Shrink,        Split};

}  // namespace

extern "C" __attribute__((visibility("default"))) const collective_mpi*
collective_mpi_plugin() {
  return &kPlugin;
}
