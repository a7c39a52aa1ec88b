#include "transport/messages.h"

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "failure.h"

namespace collective {
namespace {

constexpr int kNewsTag = 1 << 14;  // beyond those of all communicators
constexpr std::chrono::milliseconds kTellTime(200);
constexpr std::chrono::microseconds kNap(200);

// MPI is one for all jobs of a process, and asked for one thread at a time.
std::mutex mpi_mutex;

// The directory of this library, with the slash.
std::string Home() {
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(&Home), &info);
  const std::string path = info.dli_fname ? info.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1);
}

// PMIx does not tell of which family MPI is: then it is the one that a plug-in
// was built for.
const char* Family() {
  if (std::getenv("OMPI_COMM_WORLD_RANK")) return "openmpi";
  const std::string openmpi = Home() + "libcollective_openmpi.so";
  const bool by_pmix = std::getenv("PMIX_NAMESPACE");
  return by_pmix && access(openmpi.c_str(), R_OK) == 0 ? "openmpi" : "mpich";
}

// MPI waits without a deadline for every rank to start it, and nothing can end
// that wait but the end of the process.
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
  std::thread thread_;  // the last: it uses the others
};

}  // namespace

std::string Plugin() { return Home() + "libcollective_" + Family() + ".so"; }

Network::Network(const Place& place, double seconds) {
  const std::string who = "rank " + std::to_string(place.rank) + " of " +
                          std::to_string(place.size) + " (" +
                          std::to_string(place.local_size) + " on this host): ";
  const std::string path = Plugin();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    throw Failure(Code::kFailedPrecondition,
                  who + "no MPI to reach the other hosts: " + dlerror(),
                  std::string("install ") + Family() +
                      " with its mpicxx, then: pip install -e . (or start "
                      "every rank on one host)");
  }
  mpi_ = reinterpret_cast<collective_mpi_plugin_function>(
      dlsym(library, "collective_mpi_plugin"))();
  {
    const StartDeadline deadline(who, seconds);
    world_ = mpi_->start(&rank_, &size_);
  }
  if (!world_ || rank_ != place.rank || size_ != place.size) {
    throw Failure(Code::kFailedPrecondition,
                  who + "MPI sees rank " + std::to_string(rank_) + " of " +
                      std::to_string(size_),
                  "start the job by the mpirun of the MPI it was built with");
  }
  survives_ = mpi_->survives();
}

Network::Network(const Network& former, bool whole, double seconds)
    : mpi_(former.mpi_), survives_(true), former_(former.size_) {
  // Nobody waits without a deadline in what MPI does next.
  bool parted = former.Agree(whole, seconds);
  if (parted) {
    std::unique_lock<std::mutex> lock(mpi_mutex);
    const int code = mpi_->split(former.world_, true, &world_, &rank_, &size_,
                                 former_.data());
    lock.unlock();
    parted = former.Agree(code == 0, seconds);
  }
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (!parted) {
    mpi_->revoke(former.world_);
    world_ = mpi_->shrink(former.world_, &rank_, &size_, former_.data());
  }
  if (!world_) {
    throw Failure(Code::kInternal, "MPIX_Comm_shrink failed",
                  "see what MPI said above");
  }
  former_.resize(size_);
}

std::vector<int> Network::Gather(int mine) {
  std::vector<int> all(size_);
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (mpi_->gather(world_, mine, all.data()) != 0) {
    throw Failure(Code::kUnavailable, "MPI_Allgather failed",
                  "see what MPI said above");
  }
  return all;
}

void* Network::Send(int rank, int tag, const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ++pending_;
  return mpi_->send(world_, rank, tag, data, bytes);
}

void* Network::Receive(int rank, int tag, void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ++pending_;
  return mpi_->receive(world_, rank, tag, data, bytes);
}

int Network::Done(void* transfer) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  const int done = mpi_->done(transfer);
  if (done) --pending_;
  return done;
}

std::string Network::Error() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  return mpi_->error();
}

void Network::Progress() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  News news = {};
  if (mpi_->poll(world_, kNewsTag, &news, sizeof(news))) heard_.push_back(news);
}

bool Network::Hear(News* news) {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  if (heard_.empty()) return mpi_->poll(world_, kNewsTag, news, sizeof(*news));
  *news = heard_.front();
  heard_.pop_front();
  return true;
}

void Network::Tell(const std::vector<int>& ranks, const News& news) {
  // Copies that outlive this call: nobody may be left to take them.
  const News* copy = new News(news);
  std::deque<void*> sends;
  for (int rank : ranks) {
    sends.push_back(Send(rank, kNewsTag, copy, sizeof(*copy)));
  }
  const auto deadline = std::chrono::steady_clock::now() + kTellTime;
  while (!sends.empty() && std::chrono::steady_clock::now() < deadline) {
    if (Done(sends.front())) {
      sends.pop_front();
    } else {
      std::this_thread::yield();
    }
  }
  if (sends.empty()) delete copy;
}

void Network::Leave(double seconds) {
  if (Agree(true, seconds)) {
    std::unique_lock<std::mutex> lock(mpi_mutex);
    collective_world* left = nullptr;
    const int code =
        mpi_->split(world_, false, &left, nullptr, nullptr, nullptr);
    lock.unlock();
    Agree(code == 0, seconds);
  }
  GiveUp();
}

void Network::GiveUp() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  mpi_->give_up();
}

std::vector<int> Network::Dead() {
  std::vector<int> ranks(size_);
  std::lock_guard<std::mutex> lock(mpi_mutex);
  ranks.resize(mpi_->dead(world_, ranks.data()));
  return ranks;
}

bool Network::Revoked() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  return mpi_->revoked(world_);
}

void Network::Revoke() {
  std::lock_guard<std::mutex> lock(mpi_mutex);
  mpi_->revoke(world_);
}

bool Network::Agree(bool yes, double seconds) const {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::unique_lock<std::mutex> lock(mpi_mutex);
  void* agreement = mpi_->agree(world_, yes);
  for (;;) {
    const int done = mpi_->done(agreement);
    if (done) return done > 0;
    if (std::chrono::steady_clock::now() > deadline) break;
    lock.unlock();
    std::this_thread::sleep_for(kNap);
    lock.lock();
  }
  throw Failure(Code::kDeadlineExceeded,
                "rank " + std::to_string(rank_) + " of " +
                    std::to_string(size_) +
                    ": not every rank that lives has come to go on",
                "a rank that is only slow is given more time by "
                "COLLECTIVE_TIMEOUT=seconds");
}

}  // namespace collective
