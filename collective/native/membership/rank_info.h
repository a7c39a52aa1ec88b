// Who this process is in its job, as the launcher's environment tells.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_RANK_INFO_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_RANK_INFO_H_

#include <string>

namespace collective {

struct Place {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  // The same on every rank of a job and different between the jobs of a user.
  std::string job;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_RANK_INFO_H_
