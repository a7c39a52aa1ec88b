#include "transport/mpi.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <numeric>
#include <vector>

#include "failure.h"
#include "transport/mpi_abi.h"

namespace collective {
namespace {

// A function of the loaded MPI, of whatever type it is assigned to.
struct Symbol {
  template <typename Function>
  operator Function*() const {
    return reinterpret_cast<Function*>(address);
  }
  void* address;
};

Symbol Find(const char* name) { return {dlsym(RTLD_DEFAULT, name)}; }

Symbol Require(const char* name) {
  const Symbol symbol = Find(name);
  if (symbol.address) return symbol;
  throw Failure(Code::kFailedPrecondition,
                std::string("the loaded MPI library has no ") + name,
                "name the library of the mpirun that starts the job: "
                "COLLECTIVE_LIBMPI=/path/to/libmpi.so");
}

// The functions of MPI that are called here. Handles of all kinds have one
// type.
template <typename Abi>
struct Functions {
  using Handle = typename Abi::Handle;
  using Status = typename Abi::Status;

  int (*Allgather)(const void*, int, Handle, void*, int, Handle,
                   Handle) = Require("MPI_Allgather");
  int (*Comm_dup)(Handle, Handle*) = Require("MPI_Comm_dup");
  int (*Comm_get_attr)(Handle, int, void*, int*) = Require("MPI_Comm_get_attr");
  int (*Comm_group)(Handle, Handle*) = Require("MPI_Comm_group");
  int (*Comm_rank)(Handle, int*) = Require("MPI_Comm_rank");
  int (*Comm_set_errhandler)(Handle,
                             Handle) = Require("MPI_Comm_set_errhandler");
  int (*Comm_size)(Handle, int*) = Require("MPI_Comm_size");
  int (*Comm_split)(Handle, int, int, Handle*) = Require("MPI_Comm_split");
  int (*Error_string)(int, char*, int*) = Require("MPI_Error_string");
  int (*Finalize)() = Require("MPI_Finalize");
  int (*Finalized)(int*) = Require("MPI_Finalized");
  int (*Group_free)(Handle*) = Require("MPI_Group_free");
  int (*Group_size)(Handle, int*) = Require("MPI_Group_size");
  int (*Group_translate_ranks)(Handle, int, const int*, Handle,
                               int*) = Require("MPI_Group_translate_ranks");
  int (*Init_thread)(int*, char***, int, int*) = Require("MPI_Init_thread");
  int (*Initialized)(int*) = Require("MPI_Initialized");
  int (*Iprobe)(int, int, Handle, int*, Status*) = Require("MPI_Iprobe");
  int (*Irecv)(void*, int, Handle, int, int, Handle,
               Handle*) = Require("MPI_Irecv");
  int (*Isend)(const void*, int, Handle, int, int, Handle,
               Handle*) = Require("MPI_Isend");
  int (*Query_thread)(int*) = Require("MPI_Query_thread");
  int (*Recv)(void*, int, Handle, int, int, Handle,
              Status*) = Require("MPI_Recv");
  int (*Test)(Handle*, int*, Status*) = Require("MPI_Test");

  // ULFM's: null where the library was built without it.
  int (*Comm_failure_ack)(Handle) = Find("MPIX_Comm_failure_ack");
  int (*Comm_get_failed)(Handle, Handle*) = Find("MPIX_Comm_get_failed");
  int (*Comm_iagree)(Handle, int*, Handle*) = Find("MPIX_Comm_iagree");
  int (*Comm_is_revoked)(Handle, int*) = Find("MPIX_Comm_is_revoked");
  int (*Comm_revoke)(Handle) = Find("MPIX_Comm_revoke");
  int (*Comm_shrink)(Handle, Handle*) = Find("MPIX_Comm_shrink");
};

template <typename Abi>
class MpiOf final : public Mpi {
 public:
  MpiWorld* Start(int* rank, int* size) override {
    int initialized = 0;
    mpi_.Initialized(&initialized);
    if (Finalized()) {
      error_ = "the program has already finalized MPI";
      return nullptr;
    }
    if ((!initialized && !Initialize()) || !ThreadsSuffice()) return nullptr;
    // A duplicate for each job of this process: neither a message of the
    // program itself nor one that a broken job has left behind is taken for one
    // of ours.
    Handle comm;
    if (mpi_.Comm_dup(Abi::CommWorld(), &comm) != kSuccess) {
      error_ = "MPI_Comm_dup failed";
      return nullptr;
    }
    skip_finalize_ = false;
    return NewWorld(comm, rank, size);
  }

  int Gather(MpiWorld* world, int mine, int* all) override {
    return mpi_.Allgather(&mine, 1, Abi::Int(), all, 1, Abi::Int(),
                          Comm(world));
  }

  void* Send(MpiWorld* world, int rank, int tag, const void* data,
             size_t bytes) override {
    auto* transfer = new Transfer;
    transfer->code =
        Finalized() ? Abi::kErrOther
                    : mpi_.Isend(data, static_cast<int>(bytes), Abi::Byte(),
                                 rank, tag, Comm(world), &transfer->request);
    return transfer;
  }

  void* Receive(MpiWorld* world, int rank, int tag, void* data,
                size_t bytes) override {
    auto* transfer = new Transfer;
    transfer->code = mpi_.Irecv(data, static_cast<int>(bytes), Abi::Byte(),
                                rank, tag, Comm(world), &transfer->request);
    return transfer;
  }

  int Test(void* handle) override {
    auto* transfer = static_cast<Transfer*>(handle);
    int done = 0;
    if (transfer->code == kSuccess) {
      transfer->code =
          mpi_.Test(&transfer->request, &done, Abi::StatusIgnore());
      if (transfer->code == kSuccess && !done) return 0;
    }
    const int code = transfer->code;
    const bool yes = transfer->yes;
    delete transfer;
    if (code == kSuccess) return yes ? 1 : -1;
    char text[kMaxErrorString] = "";
    int length = 0;
    mpi_.Error_string(code, text, &length);
    error_ = text;
    return -1;
  }

  const std::string& Error() const override { return error_; }

  bool Poll(MpiWorld* world, int tag, void* data, size_t bytes) override {
    int arrived = 0;
    typename Abi::Status status = {};
    if (Finalized() || mpi_.Iprobe(Abi::kAnySource, tag, Comm(world), &arrived,
                                   &status) != kSuccess) {
      return false;
    }
    return arrived && mpi_.Recv(data, static_cast<int>(bytes), Abi::Byte(),
                                status.MPI_SOURCE, tag, Comm(world),
                                Abi::StatusIgnore()) == kSuccess;
  }

  void SkipFinalize() override { skip_finalize_ = true; }

  bool FaultTolerant() override {
    int* enabled = nullptr;
    int found = 0;
    if (Abi::kFaultTolerance < 0 || !mpi_.Comm_revoke) return false;
    mpi_.Comm_get_attr(Abi::CommWorld(), Abi::kFaultTolerance, &enabled,
                       &found);
    return found && *enabled;
  }

  int FailedRanks(MpiWorld* world, int* ranks) override {
    Handle everyone, failed;
    int count = 0;
    if (Finalized() || mpi_.Comm_get_failed(Comm(world), &failed) != kSuccess) {
      return 0;
    }
    mpi_.Group_size(failed, &count);
    if (count) {
      std::vector<int> numbers(count);
      std::iota(numbers.begin(), numbers.end(), 0);
      mpi_.Comm_group(Comm(world), &everyone);
      mpi_.Group_translate_ranks(failed, count, numbers.data(), everyone,
                                 ranks);
      mpi_.Group_free(&everyone);
      // Acknowledged, MPI_ANY_SOURCE still receives from the live ranks.
      mpi_.Comm_failure_ack(Comm(world));
    }
    if (failed != Abi::GroupEmpty()) mpi_.Group_free(&failed);
    return count;
  }

  bool Revoked(MpiWorld* world) override {
    int revoked = 0;
    if (!Finalized()) mpi_.Comm_is_revoked(Comm(world), &revoked);
    return revoked;
  }

  void Revoke(MpiWorld* world) override {
    if (!Revoked(world)) mpi_.Comm_revoke(Comm(world));
  }

  void* Agree(MpiWorld* world, bool yes) override {
    auto* transfer = new Transfer;
    transfer->yes = yes;
    transfer->code =
        mpi_.Comm_iagree(Comm(world), &transfer->yes, &transfer->request);
    return transfer;
  }

  MpiWorld* Shrink(MpiWorld* world, int* rank, int* size,
                   int* previous) override {
    Handle survivors;
    if (mpi_.Comm_shrink(Comm(world), &survivors) != kSuccess) return nullptr;
    return NextWorld(world, survivors, rank, size, previous);
  }

  int Split(MpiWorld* world, bool stays, MpiWorld** next, int* rank, int* size,
            int* previous) override {
    Handle comm = Abi::CommNull();
    int me = 0;
    mpi_.Comm_rank(Comm(world), &me);
    const int code =
        mpi_.Comm_split(Comm(world), stays ? 0 : Abi::kUndefined, me, &comm);
    if (code == kSuccess && stays) {
      *next = NextWorld(world, comm, rank, size, previous);
    }
    return code;
  }

 private:
  using Handle = typename Abi::Handle;
  static constexpr int kSuccess = 0;
  static constexpr int kMaxErrorString = 512;  // the largest of the three

  struct Transfer {
    Handle request = Abi::RequestNull();
    int code = kSuccess;
    // Of an agreement: what this rank says, and once done what all have said.
    int yes = 1;
  };

  // A world is the handle of its communicator, on the heap.
  static Handle& Comm(MpiWorld* world) {
    return *reinterpret_cast<Handle*>(world);
  }

  MpiWorld* NewWorld(Handle comm, int* rank, int* size) {
    mpi_.Comm_set_errhandler(comm, Abi::ErrorsReturn());
    mpi_.Comm_rank(comm, rank);
    mpi_.Comm_size(comm, size);
    return reinterpret_cast<MpiWorld*>(new Handle(comm));
  }

  MpiWorld* NextWorld(MpiWorld* world, Handle survivors, int* rank, int* size,
                      int* previous) {
    MpiWorld* next = NewWorld(survivors, rank, size);
    skip_finalize_ = true;
    std::vector<int> ranks(*size);
    std::iota(ranks.begin(), ranks.end(), 0);
    Handle before, now;
    mpi_.Comm_group(Comm(world), &before);
    mpi_.Comm_group(survivors, &now);
    mpi_.Group_translate_ranks(now, *size, ranks.data(), before, previous);
    mpi_.Group_free(&before);
    mpi_.Group_free(&now);
    return next;
  }

  bool Finalized() const {
    int finalized = 0;
    mpi_.Finalized(&finalized);
    return finalized;
  }

  // Starts MPI for a process that has not.
  bool Initialize() {
    int provided = 0;
    if (mpi_.Init_thread(nullptr, nullptr, Abi::kThreadSerialized, &provided) !=
        kSuccess) {
      error_ = "MPI_Init_thread failed";
      return false;
    }
    // MPI cannot be started twice: it ends with the process, not with the job.
    started_in_ = getpid();
    std::atexit([] { static_cast<MpiOf*>(Loaded())->Finalize(); });
    mpi_.Comm_set_errhandler(Abi::CommWorld(), Abi::ErrorsReturn());
    mpi_.Comm_set_errhandler(Abi::CommSelf(), Abi::ErrorsReturn());
    return true;
  }

  void Finalize() {
    if (!skip_finalize_ && getpid() == started_in_ && !Finalized()) {
      mpi_.Finalize();
    }
  }

  // Whether MPI can be called from the core's threads. The core's lock covers
  // only the core's own calls: if the program has started MPI, as mpi4py does,
  // it may call MPI at the same time, which takes MPI_THREAD_MULTIPLE.
  bool ThreadsSuffice() {
    int provided = 0;
    mpi_.Query_thread(&provided);
    if (started_in_ == getpid()) {
      if (provided >= Abi::kThreadSerialized) return true;
      error_ = "this MPI was built without support for threads";
    } else {
      if (provided >= Abi::kThreadMultiple) return true;
      error_ =
          "the program has started MPI without MPI_THREAD_MULTIPLE, and the "
          "core calls MPI from threads of its own";
    }
    return false;
  }

  Functions<Abi> mpi_;
  std::string error_;
  bool skip_finalize_ = false;
  pid_t started_in_ = 0;  // a fork of this process must not finalize MPI
};

// Asks the library, as its name does not always say: that of Open MPI 1.10 was
// libmpi.so.12, too, and MPICH may be built to have the standard interface
// only.
Mpi* Choose() {
  if (!Find("MPI_Get_library_version").address) return nullptr;
  int (*version)(int*, int*) = Find("MPI_Abi_get_version");
  int major = -1, minor = -1;
  if (version && version(&major, &minor) == 0 && major > 0) {
    return new MpiOf<mpi_abi::Standard>;
  }
  if (Find("ompi_mpi_comm_world").address) return new MpiOf<mpi_abi::OpenMpi>;
  return new MpiOf<mpi_abi::Mpich>;
}

}  // namespace

Mpi* Mpi::Loaded() {
  static Mpi* loaded = nullptr;  // looked for again where there was none
  if (!loaded) loaded = Choose();
  return loaded;
}

}  // namespace collective
