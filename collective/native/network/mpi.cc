#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>

#include "clock.h"
#include "failure.h"
#include "network/mpi_abi.h"
#include "network/mpi_functions.h"
#include "network/network.h"
#include "rendezvous/launcher_files.h"

namespace collective {
namespace {

// How long control messages may take to leave before they are abandoned.
constexpr int64_t kSendTimeout = 200 * kMillisecond;
constexpr int64_t kPollInterval = 200'000;  // nanoseconds
constexpr int kSuccess = 0;
constexpr int kMaxErrorString = 512;  // the largest of the three ABIs

// All jobs of a process share one MPI. MPI_THREAD_SERIALIZED is requested, which
// allows one call at a time.
std::mutex mpi_mutex;
using Lock = std::unique_lock<std::mutex>;

std::string HostName() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

// MPI_Init and the first collective wait without a deadline for every rank, and
// only the end of the process ends that wait. Hosts of one name are a cause: their
// ranks disagree on who shares memory with whom, and wait for each other.
class StartDeadline {
 public:
  StartDeadline(const std::string& who, double seconds)
      : thread_([who, seconds, started = started_.get_future()] {
          constexpr std::chrono::milliseconds kPause(kLongestPauseMilliseconds);
          for (Deadline deadline(seconds); !deadline.Passed();) {
            if (started.wait_for(kPause) == std::future_status::ready) return;
          }
          std::fprintf(stderr,
                       "collective: %son a host of the name %s: MPI did not "
                       "connect all ranks within %.0f s\nHINT: see whether a "
                       "rank failed before, and whether each host has a name of "
                       "its own (hostname), by which MPI tells them apart; a slow "
                       "start is given more time by "
                       "COLLECTIVE_START_TIMEOUT=seconds\n",
                       who.c_str(), HostName().c_str(), seconds);
          _exit(1);
        }) {}
  ~StartDeadline() {
    started_.set_value();
    thread_.join();
  }

 private:
  std::promise<void> started_;
  std::thread thread_;  // declared last, because it uses the promise
};

[[noreturn]] void ThrowNoStart(const std::string& who, const char* reason) {
  throw Failure(Code::kFailedPrecondition, who + reason,
                "where the program itself starts MPI, do it before init() and "
                "by MPI_Init_thread with MPI_THREAD_MULTIPLE (mpi4py's "
                "default), and finalize it after shutdown()");
}

template <typename Abi>
class MpiNetwork final : public Network {
 public:
  using Handle = typename Abi::Handle;

  MpiNetwork(const std::string& who, double seconds) : who_(who), seconds_(seconds) {
    const StartDeadline deadline(who, seconds);
    int initialized = 0;
    mpi_.Initialized(&initialized);
    if (mpi_.IsFinalized()) {
      ThrowNoStart(who, "the program has already finalized MPI");
    }
    if (!initialized) Initialize(who);
    CheckThreads(who);
    if (mpi_.Comm_dup(mpi_.comm_world, &comm_) != kSuccess) {
      ThrowNoStart(who, "MPI_Comm_dup failed");
    }
    mpi_.skip_finalize = false;
    int* enabled = nullptr;
    int found = 0;
    if (Abi::kFaultTolerance >= 0 && mpi_.Comm_revoke) {
      mpi_.Comm_get_attr(mpi_.comm_world, Abi::kFaultTolerance, &enabled, &found);
    }
    fault_tolerant_ = found && *enabled;
    SetUp();
  }

  std::vector<int> Gather(int mine) override {
    std::vector<int> all(size_);
    const StartDeadline deadline(who_, seconds_);
    Lock lock(mpi_mutex);
    if (mpi_.Allgather(&mine, 1, mpi_.integer, all.data(), 1, mpi_.integer, comm_) !=
        kSuccess) {
      throw Failure(Code::kUnavailable, "MPI_Allgather failed",
                    "see what MPI said above");
    }
    return all;
  }

  void* Send(int rank, int tag, const void* data, size_t bytes) override {
    Lock lock(mpi_mutex);
    ++pending_;
    auto* transfer = new Transfer;
    transfer->code = mpi_.IsFinalized()
                         ? Abi::kErrOther
                         : mpi_.Isend(data, static_cast<int>(bytes), mpi_.byte, rank,
                                      tag, comm_, &transfer->request);
    return transfer;
  }

  void* Receive(int rank, int tag, void* data, size_t bytes) override {
    Lock lock(mpi_mutex);
    ++pending_;
    auto* transfer = new Transfer;
    transfer->code = mpi_.Irecv(data, static_cast<int>(bytes), mpi_.byte, rank, tag,
                                comm_, &transfer->request);
    return transfer;
  }

  int Test(void* transfer) override {
    Lock lock(mpi_mutex);
    const int done = TestLocked(static_cast<Transfer*>(transfer));
    if (done) --pending_;
    return done;
  }

  std::string Error() override {
    Lock lock(mpi_mutex);
    return mpi_.error;
  }

  void Progress() override {
    Lock lock(mpi_mutex);
    ControlMessage control = {};
    if (Poll(&control)) received_.push_back(control);
  }

  bool ReceiveControl(ControlMessage* control) override {
    Lock lock(mpi_mutex);
    if (received_.empty()) return Poll(control);
    *control = received_.front();
    received_.pop_front();
    return true;
  }

  void SkipFinalize() override {
    Lock lock(mpi_mutex);
    mpi_.skip_finalize = true;
  }

  std::vector<int> FailedRanks() override {
    std::vector<int> ranks;
    Handle everyone, failed;
    int count = 0;
    Lock lock(mpi_mutex);
    if (mpi_.IsFinalized() || mpi_.Comm_get_failed(comm_, &failed) != kSuccess) {
      return ranks;
    }
    mpi_.Group_size(failed, &count);
    if (count) {
      mpi_.Comm_group(comm_, &everyone);
      ranks = Translate(failed, count, everyone);
      mpi_.Group_free(&everyone);
      // After this, MPI_ANY_SOURCE receives from the live ranks again.
      mpi_.Comm_failure_ack(comm_);
    }
    if (failed != mpi_.group_empty) mpi_.Group_free(&failed);
    return ranks;
  }

  bool Revoked() override {
    Lock lock(mpi_mutex);
    return RevokedLocked();
  }

  void Revoke() override {
    Lock lock(mpi_mutex);
    if (!RevokedLocked()) mpi_.Comm_revoke(comm_);
  }

  bool Agree(bool yes, double seconds) override {
    Deadline deadline(seconds);
    Lock lock(mpi_mutex);
    auto* agreement = new Transfer;
    agreement->yes = yes;
    agreement->code = mpi_.Comm_iagree(comm_, &agreement->yes, &agreement->request);
    for (;;) {
      const int done = TestLocked(agreement);
      if (done) return done > 0;
      if (deadline.Passed()) break;
      lock.unlock();
      SleepFor(kPollInterval);
      lock.lock();
    }
    throw Failure(Code::kDeadlineExceeded,
                  "rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                      ": not every live rank came to reconfigure",
                  "a rank that is only slow is given more time by "
                  "COLLECTIVE_TIMEOUT=seconds");
  }

  std::unique_ptr<Network> Reconfigure(bool nobody_died, double seconds) override {
    const ReportedWait wait;
    Handle next = mpi_.comm_null;
    const bool split = SplitIfAllAgree(nobody_died, 0, seconds, &next);
    if (!split) Revoke();
    Lock lock(mpi_mutex);
    if (!split && mpi_.Comm_shrink(comm_, &next) != kSuccess) {
      throw Failure(Code::kInternal, "MPIX_Comm_shrink failed",
                    "see what MPI said above");
    }
    return std::unique_ptr<Network>(new MpiNetwork(next, *this));
  }

  void Depart(double seconds) override {
    Handle none = mpi_.comm_null;
    SplitIfAllAgree(true, Abi::kUndefined, seconds, &none);
    SkipFinalize();
  }

 private:
  struct Transfer {
    Handle request = Loaded<Abi>().request_null;
    int code = kSuccess;
    // For an agreement: this rank's value, and at the end the value of all.
    int yes = 1;
  };

  // After a reconfiguration the process must end without MPI_Finalize: in Open MPI
  // 5.0.11 that waits for ever if all ranks of a host are dead.
  MpiNetwork(Handle comm, const MpiNetwork& former) : comm_(comm) {
    fault_tolerant_ = true;
    mpi_.skip_finalize = true;
    SetUp();
    Handle before, now;
    mpi_.Comm_group(former.comm_, &before);
    mpi_.Comm_group(comm_, &now);
    previous_ranks_ = Translate(now, size_, before);
    mpi_.Group_free(&before);
    mpi_.Group_free(&now);
  }

  void SetUp() {
    mpi_.Comm_set_errhandler(comm_, mpi_.errors_return);
    mpi_.Comm_rank(comm_, &rank_);
    mpi_.Comm_size(comm_, &size_);
  }

  // Starts MPI for a process that has not started it.
  void Initialize(const std::string& who) {
    int provided = 0;
    if (mpi_.Init_thread(nullptr, nullptr, Abi::kThreadSerialized, &provided) !=
        kSuccess) {
      ThrowNoStart(who, "MPI_Init_thread failed");
    }
    // MPI cannot be started twice, so it ends with the process, not with the job.
    mpi_.started_in = getpid();
    std::atexit([] {
      Mpi<Abi>& mpi = Loaded<Abi>();
      if (!mpi.skip_finalize && getpid() == mpi.started_in && !mpi.IsFinalized()) {
        mpi.Finalize();
      }
    });
    mpi_.Comm_set_errhandler(mpi_.comm_world, mpi_.errors_return);
    mpi_.Comm_set_errhandler(mpi_.comm_self, mpi_.errors_return);
  }

  // Whether the core's threads can call MPI. The core's lock covers only the
  // core's own calls: if the program has started MPI, as mpi4py does, it may call
  // MPI at the same time, which needs MPI_THREAD_MULTIPLE.
  void CheckThreads(const std::string& who) {
    int provided = 0;
    mpi_.Query_thread(&provided);
    if (mpi_.started_in == getpid()) {
      if (provided >= Abi::kThreadSerialized) return;
      ThrowNoStart(who, "this MPI was built without support for threads");
    }
    if (provided >= Abi::kThreadMultiple) return;
    ThrowNoStart(who,
                 "the program has started MPI without MPI_THREAD_MULTIPLE, and the "
                 "core calls MPI from threads of its own");
  }

  int TestLocked(Transfer* transfer) {
    int done = 0;
    if (transfer->code == kSuccess) {
      transfer->code = mpi_.Test(&transfer->request, &done, mpi_.status_ignore);
      if (transfer->code == kSuccess && !done) return 0;
    }
    const int code = transfer->code;
    const bool yes = transfer->yes;
    delete transfer;
    if (code == kSuccess) return yes ? 1 : -1;
    char text[kMaxErrorString] = "";
    int length = 0;
    mpi_.Error_string(code, text, &length);
    mpi_.error = text;
    return -1;
  }

  // Progresses transfers. Receives a control message if one has arrived.
  bool Poll(ControlMessage* control) {
    int arrived = 0;
    typename Abi::Status status = {};
    if (mpi_.IsFinalized() || mpi_.Iprobe(Abi::kAnySource, kControlTag, comm_, &arrived,
                                          &status) != kSuccess) {
      return false;
    }
    return arrived && mpi_.Recv(control, static_cast<int>(sizeof(*control)), mpi_.byte,
                                status.MPI_SOURCE, kControlTag, comm_,
                                mpi_.status_ignore) == kSuccess;
  }

  bool RevokedLocked() {
    int revoked = 0;
    if (!mpi_.IsFinalized()) mpi_.Comm_is_revoked(comm_, &revoked);
    return revoked;
  }

  // The numbers of the ranks 0, 1, ... of one group in another.
  static std::vector<int> Translate(Handle from, int count, Handle to) {
    std::vector<int> numbers(count), ranks(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    Loaded<Abi>().Group_translate_ranks(from, count, numbers.data(), to, ranks.data());
    return ranks;
  }

  // MPI_Comm_split has no deadline: it is called only if all ranks are present. If
  // a rank dies during the call, it may succeed on some ranks only.
  bool SplitIfAllAgree(bool yes, int color, double seconds, Handle* next) {
    if (!Agree(yes, seconds)) return false;
    Lock lock(mpi_mutex);
    const int code = mpi_.Comm_split(comm_, color, rank_, next);
    lock.unlock();
    return Agree(code == kSuccess, seconds);
  }

  Mpi<Abi>& mpi_ = Loaded<Abi>();
  const std::string who_;  // names this rank in an error of the start
  const double seconds_ = 0;
  Handle comm_;
  std::deque<ControlMessage> received_;
};

template <typename Abi>
std::unique_ptr<Network> StartMpi(const std::string& who, double seconds) {
  return std::make_unique<MpiNetwork<Abi>>(who, seconds);
}

// Asks the library, because its name is not enough: Open MPI 1.10 was
// libmpi.so.12, too, and MPICH may be built with the standard interface only.
// Null if no MPI is loaded.
std::unique_ptr<Network> StartLoaded(const std::string& who, double seconds) {
  if (!Find("MPI_Get_library_version").address) return nullptr;
  int (*version)(int*, int*) = Find("MPI_Abi_get_version");
  int major = -1, minor = -1;
  if (version && version(&major, &minor) == 0 && major > 0) {
    return StartMpi<mpi_abi::Standard>(who, seconds);
  }
  if (Find("ompi_mpi_comm_world").address) {
    return StartMpi<mpi_abi::OpenMpi>(who, seconds);
  }
  return StartMpi<mpi_abi::Mpich>(who, seconds);
}

}  // namespace

std::unique_ptr<Network> Network::Start(const RankInfo& info, double seconds) {
  const std::string who = "rank " + std::to_string(info.rank) + " of " +
                          std::to_string(info.size) + " (" +
                          std::to_string(info.local_size) + " on this host): ";
  std::unique_ptr<Network> network = StartLoaded(who, seconds);
  if (!network) {
    throw Failure(Code::kFailedPrecondition,
                  who + "no MPI is loaded to reach the other hosts",
                  "start the job by mpirun, or all ranks on one host");
  }
  if (network->rank_ != info.rank || network->size_ != info.size) {
    throw Failure(Code::kFailedPrecondition,
                  who + "MPI sees rank " + std::to_string(network->rank_) + " of " +
                      std::to_string(network->size_),
                  "start the job by the mpirun of the MPI it was built with");
  }
  return network;
}

void Network::SendControl(const std::vector<int>& ranks,
                          const ControlMessage& control) {
  // A copy that outlives this call if a receiver never takes the message.
  const ControlMessage* copy = new ControlMessage(control);
  std::deque<void*> sends;
  for (int rank : ranks) {
    sends.push_back(Send(rank, kControlTag, copy, sizeof(*copy)));
  }
  const int64_t deadline = Now() + kSendTimeout;
  while (!sends.empty() && Now() < deadline) {
    if (Test(sends.front())) {
      sends.pop_front();
    } else {
      std::this_thread::yield();
    }
  }
  if (sends.empty()) delete copy;
}

}  // namespace collective
