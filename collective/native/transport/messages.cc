#include "transport/messages.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "failure.h"
#include "membership/reported_wait.h"

namespace collective {
namespace {

constexpr int kControlTag = 1 << 14;  // above the tags of all communicators
// How long control messages may take to leave before they are abandoned.
constexpr std::chrono::milliseconds kSendTimeout(200);
constexpr std::chrono::microseconds kPollInterval(200);

// All jobs of a process share one MPI, which is asked for
// MPI_THREAD_SERIALIZED: one call at a time.
std::mutex mpi_mutex;

// MPI_Init waits without a deadline for every rank, and only the end of the
// process ends that wait.
class StartDeadline {
 public:
  StartDeadline(std::string who, double seconds)
      : thread_([this, who = std::move(who), seconds] {
          std::unique_lock<std::mutex> lock(mutex_);
          const std::chrono::duration<double> most(seconds);
          if (started_.wait_for(lock, most, [this] { return is_started_; })) {
            return;
          }
          std::fprintf(stderr,
                       "collective: %snot every rank came to MPI_Init within "
                       "%.0f s\nHINT: see whether one failed before; a slow "
                       "start is given more time by "
                       "COLLECTIVE_START_TIMEOUT=seconds\n",
                       who.c_str(), seconds);
          _exit(1);
        }) {}
  ~StartDeadline() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_started_ = true;
    }
    started_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable started_;
  bool is_started_ = false;
  std::thread thread_;  // declared last: it uses the other members
};

}  // namespace

Network::Network(const RankInfo& info, double seconds) {
  const std::string who = "rank " + std::to_string(info.rank) + " of " +
                          std::to_string(info.size) + " (" +
                          std::to_string(info.local_size) + " on this host): ";
  mpi_ = Mpi::Loaded();
  if (!mpi_) {
    throw Failure(Code::kFailedPrecondition,
                  who + "no MPI is loaded to reach the other hosts",
                  "start the job by mpirun, or all ranks on one host");
  }
  {
    const StartDeadline deadline(who, seconds);
    world_ = mpi_->Start(&rank_, &size_);
  }
  if (!world_) {
    throw Failure(
        Code::kFailedPrecondition, who + mpi_->Error(),
        "where the program itself starts MPI, do it before init() and "
        "by MPI_Init_thread with MPI_THREAD_MULTIPLE (mpi4py's "
        "default), and finalize it after shutdown()");
  }
  if (rank_ != info.rank || size_ != info.size) {
    throw Failure(Code::kFailedPrecondition,
                  who + "MPI sees rank " + std::to_string(rank_) + " of " +
                      std::to_string(size_),
                  "start the job by the mpirun of the MPI it was built with");
  }
  fault_tolerant_ = mpi_->FaultTolerant();
}

Network::Network(const Network& former, bool nobody_died, double seconds)
    : mpi_(former.mpi_), fault_tolerant_(true), previous_ranks_(former.size_) {
  const ReportedWait wait;
  // MPI_Comm_split has no deadline: it is called only if all ranks are here.
  bool split = former.Agree(nobody_died, seconds);
  if (split) {
    std::unique_lock<std::mutex> lock(mpi_mutex);
    const int code = mpi_->Split(former.world_, true, &world_, &rank_, &size_,
                                 previous_ranks_.data());
    lock.unlock();
    split = former.Agree(code == 0, seconds);
  }
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (!split) {
    mpi_->Revoke(former.world_);
    world_ =
        mpi_->Shrink(former.world_, &rank_, &size_, previous_ranks_.data());
  }
  if (!world_) {
    throw Failure(Code::kInternal, "MPIX_Comm_shrink failed",
                  "see what MPI said above");
  }
  previous_ranks_.resize(size_);
}

std::vector<int> Network::Gather(int mine) {
  std::vector<int> all(size_);
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (mpi_->Gather(world_, mine, all.data()) != 0) {
    throw Failure(Code::kUnavailable, "MPI_Allgather failed",
                  "see what MPI said above");
  }
  return all;
}

void* Network::Send(int rank, int tag, const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ++pending_;
  return mpi_->Send(world_, rank, tag, data, bytes);
}

void* Network::Receive(int rank, int tag, void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ++pending_;
  return mpi_->Receive(world_, rank, tag, data, bytes);
}

int Network::Test(void* transfer) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  const int done = mpi_->Test(transfer);
  if (done) --pending_;
  return done;
}

std::string Network::Error() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  return mpi_->Error();
}

void Network::Progress() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ControlMessage control = {};
  if (mpi_->Poll(world_, kControlTag, &control, sizeof(control)))
    received_.push_back(control);
}

bool Network::ReceiveControl(ControlMessage* control) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (received_.empty())
    return mpi_->Poll(world_, kControlTag, control, sizeof(*control));
  *control = received_.front();
  received_.pop_front();
  return true;
}

void Network::SendControl(const std::vector<int>& ranks,
                          const ControlMessage& control) {
  // A copy that outlives this call if a receiver never takes the message.
  const ControlMessage* copy = new ControlMessage(control);
  std::deque<void*> sends;
  for (int rank : ranks) {
    sends.push_back(Send(rank, kControlTag, copy, sizeof(*copy)));
  }
  const auto deadline = std::chrono::steady_clock::now() + kSendTimeout;
  while (!sends.empty() && std::chrono::steady_clock::now() < deadline) {
    if (Test(sends.front())) {
      sends.pop_front();
    } else {
      std::this_thread::yield();
    }
  }
  if (sends.empty()) delete copy;
}

void Network::Depart(double seconds) {
  if (Agree(true, seconds)) {
    std::unique_lock<std::mutex> lock(mpi_mutex);
    MpiWorld* left = nullptr;
    const int code =
        mpi_->Split(world_, false, &left, nullptr, nullptr, nullptr);
    lock.unlock();
    Agree(code == 0, seconds);
  }
  SkipFinalize();
}

void Network::SkipFinalize() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  mpi_->SkipFinalize();
}

std::vector<int> Network::FailedRanks() {
  std::vector<int> ranks(size_);
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ranks.resize(mpi_->FailedRanks(world_, ranks.data()));
  return ranks;
}

bool Network::Revoked() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  return mpi_->Revoked(world_);
}

void Network::Revoke() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  mpi_->Revoke(world_);
}

bool Network::Agree(bool yes, double seconds) const {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::unique_lock<std::mutex> lock(mpi_mutex);
  void* agreement = mpi_->Agree(world_, yes);
  for (;;) {
    const int done = mpi_->Test(agreement);
    if (done) return done > 0;
    if (std::chrono::steady_clock::now() > deadline) break;
    lock.unlock();
    std::this_thread::sleep_for(kPollInterval);
    lock.lock();
  }
  throw Failure(Code::kDeadlineExceeded,
                "rank " + std::to_string(rank_) + " of " +
                    std::to_string(size_) +
                    ": not every live rank came to reconfigure",
                "a rank that is only slow is given more time by "
                "COLLECTIVE_TIMEOUT=seconds");
}

}  // namespace collective
