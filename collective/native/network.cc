#include "network.h"

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "failure.h"

namespace collective {
namespace {

constexpr int kNewsTag = 1 << 14;  // beyond those of all communicators
constexpr std::chrono::milliseconds kTellTime(200);

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

}  // namespace

std::string Plugin() { return Home() + "libcollective_" + Family() + ".so"; }

Network::Network(const Place& place) : size_(place.size) {
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
  int rank = -1, size = -1;
  if (mpi_->start(&rank, &size) != 0 || rank != place.rank ||
      size != place.size) {
    throw Failure(Code::kFailedPrecondition,
                  who + "MPI sees rank " + std::to_string(rank) + " of " +
                      std::to_string(size),
                  "start the job by the mpirun of the MPI it was built with");
  }
}

std::vector<int> Network::Gather(int mine) {
  std::vector<int> all(size_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (mpi_->gather(mine, all.data()) != 0) {
    throw Failure(Code::kUnavailable, "MPI_Allgather failed",
                  "see what MPI said above");
  }
  return all;
}

void* Network::Send(int rank, int tag, const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++pending_;
  return mpi_->send(rank, tag, data, bytes);
}

void* Network::Receive(int rank, int tag, void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++pending_;
  return mpi_->receive(rank, tag, data, bytes);
}

int Network::Done(void* transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int done = mpi_->done(transfer);
  if (done) --pending_;
  return done;
}

std::string Network::Error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return mpi_->error();
}

void Network::Progress() {
  std::lock_guard<std::mutex> lock(mutex_);
  News news;
  if (mpi_->poll(kNewsTag, &news, sizeof(news))) heard_.push_back(news);
}

bool Network::Hear(News* news) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (heard_.empty()) return mpi_->poll(kNewsTag, news, sizeof(*news));
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

void Network::GiveUp() {
  std::lock_guard<std::mutex> lock(mutex_);
  mpi_->give_up();
}

}  // namespace collective
