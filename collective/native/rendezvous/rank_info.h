// The identity of this process in its job.
//
// The launcher's environment has the numbers (OMPI_COMM_WORLD_RANK, PMI_RANK,
// ...). Python reads it and passes them in, so that the core does not need to know
// any launcher.
#pragma once

#include <string>

namespace collective {

// The most ranks of a host: one message of a Unix socket carries 253 descriptors,
// one of which is for the memory. Arrays in shared memory and on the stack have
// room for as many.
constexpr int kMaxRanks = 250;

struct RankInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  // The same on every rank of a host, and different between the jobs of a user and
  // between hosts, even if these are containers of one machine.
  std::string job;
};

}  // namespace collective
