// The one job of this process and its groups.
#ifndef COLLECTIVE_NATIVE_CORE_H_
#define COLLECTIVE_NATIVE_CORE_H_

#include <memory>
#include <mutex>
#include <vector>

#include "queue.h"

namespace collective {

// Some ranks of the job, with a queue for each order. The two have
// communicators of their own, so that TensorFlow's collectives and those of the
// program never stand in each other's way.
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
  Core(const Place& place, int generation);
  // Of those that are left of a broken job; without its groups.
  explicit Core(Core& former);
  // That leaves a job of its own for one that was there before.
  Core(Core& alone, Job::Later later);
  ~Core();
  Job& job() { return job_; }
  const Job& job() const { return job_; }
  // Collective over all ranks. Returns the group's number, also on a rank that
  // is not a member. No other job of this process has a group of that number.
  int AddGroup(std::vector<int> members);
  // By rank of the job, ascending. Throws kInvalidArgument where there is none.
  const std::vector<int>& members(int group);
  // Of a group's number, the part that is the same on every rank.
  static int IndexOf(int group) { return group & (Job::kMostAreas / 2 - 1); }
  // Takes part in what the other ranks call, until all ranks have joined, and
  // returns in how many collectives it did so.
  int64_t Join();
  // Throws kInvalidArgument where there is none.
  Queue& queue(int group, Order order);

 private:
  void AddEveryone();
  Group& Find(int group);

  Job job_;
  const int number_;  // of the job in this process, from 1
  std::mutex mutex_;
  std::vector<std::unique_ptr<Group>> groups_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_CORE_H_
