// Who this process is in its job.
//
// The launcher's environment gives the numbers (OMPI_COMM_WORLD_RANK, PMI_RANK,
// ...); Python reads it and passes them in, so that the core needs no knowledge
// of launchers.
#pragma once

#include <string>

namespace collective {

// The most ranks of a host: one message of a Unix socket carries 253
// descriptors, one of them that of the memory. Arrays in shared memory and on
// the stack have room for as many.
constexpr int kMaxRanks = 250;

struct RankInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  // The same on every rank of a host, and different between the jobs of a user
  // and between hosts, also if these are containers of one machine.
  std::string job;
};

}  // namespace collective
