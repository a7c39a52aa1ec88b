// The job of this process, and its groups of ranks.
//
// The C API and the TensorFlow ops work on it. A reconfiguration makes a new Core,
// so that handles and process sets of the former job are refused, and cannot be
// mixed up with new ones.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "queue.h"

namespace collective {

// Some ranks of the job, with a queue for each order. Each queue has its own
// communicator, so that the collectives of TensorFlow and of the program never
// block each other.
class Group {
 public:
  Group(Job* job, std::vector<int> members, int number);
  bool has(int rank) const;
  const std::vector<int>& members() const { return members_; }
  Queue& queue(Order order);

 private:
  Job* job_;
  std::vector<int> members_;
  int number_;
  std::mutex mutex_;
  std::unique_ptr<Queue> queues_[2];
};

class Core {
 public:
  // Makes the job from these arguments (job.h).
  template <class... Arguments>
  explicit Core(std::in_place_t, Arguments&&... arguments)
      : job_(std::forward<Arguments>(arguments)...), number_(NextNumber()) {
    AddWorldGroup();
  }
  ~Core();
  Job& job() { return job_; }
  const Job& job() const { return job_; }
  // Collective over all ranks of the job. Returns the group's number, also on a
  // rank that is not a member. No other job of this process uses that number.
  // Throws kInvalidArgument for ranks that are not ascending and in the job.
  int AddGroup(std::vector<int> members);
  // Ranks of the job, ascending. Throws kInvalidArgument for an unknown group.
  const std::vector<int>& members(int group);
  // The part of a group's number that is the same on every rank.
  static int IndexOf(int group) { return group & (Job::kMaxAreas / 2 - 1); }
  // Takes part in the collectives of the other ranks until all ranks have called
  // Join. Returns their number.
  int64_t Join();
  // Throws kInvalidArgument for an unknown group, and on a rank that is not a
  // member.
  Queue& queue(int group, Order order);

 private:
  static int NextNumber();
  void AddWorldGroup();
  Group& Find(int group);

  Job job_;
  const int number_;  // number of the job in this process, from 1
  std::mutex mutex_;
  std::vector<std::unique_ptr<Group>> groups_;
};

}  // namespace collective
