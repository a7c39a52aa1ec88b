#include "network.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "failure.h"

namespace collective {
namespace {

// The directory of this library, with the slash.
std::string Home() {
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(&Home), &info);
  const std::string path = info.dli_fname ? info.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1);
}

const char* Family() {
  return std::getenv("OMPI_COMM_WORLD_RANK") ? "openmpi" : "mpich";
}

}  // namespace

Network::Network(const Place& place) {
  const std::string who = "rank " + std::to_string(place.rank) + " of " +
                          std::to_string(place.size) + " (" +
                          std::to_string(place.local_size) + " on this host): ";
  const std::string path = Home() + "libcollective_" + Family() + ".so";
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

void* Network::Send(int rank, int tag, const void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return mpi_->send(rank, tag, data, bytes);
}

void* Network::Receive(int rank, int tag, void* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return mpi_->receive(rank, tag, data, bytes);
}

bool Network::Done(void* transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  return mpi_->done(transfer) != 0;
}

void Network::Abort(int code) { mpi_->abort(code); }

}  // namespace collective
