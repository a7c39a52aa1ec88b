#include "core.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <numeric>

namespace collective {

static_assert((Job::kMaxAreas & (Job::kMaxAreas - 1)) == 0, "Core::IndexOf masks");

Group::Group(Job* job, std::vector<int> members, int number)
    : job_(job), members_(std::move(members)), number_(number) {}

bool Group::has(int rank) const {
  return std::find(members_.begin(), members_.end(), rank) != members_.end();
}

Queue& Group::queue(Order order) {
  const int which = static_cast<int>(order);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!queues_[which]) {
    queues_[which] = std::make_unique<Queue>(
        std::make_unique<Communicator>(job_, members_, 2 * number_ + which), order);
  }
  return *queues_[which];
}

int Core::NextNumber() {
  static std::atomic<int> number{0};
  return ++number;
}

void Core::AddWorldGroup() {
  groups_.reserve(Job::kMaxAreas / 2);  // so that references stay valid
  std::vector<int> ranks(job_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  groups_.push_back(std::make_unique<Group>(&job_, std::move(ranks), 0));
}

Core::~Core() {
  job_.Leave();
  groups_.clear();
}

int Core::AddGroup(std::vector<int> members) {
  Request request;
  request.name = "process set of ranks";
  for (int member : members) {
    request.name += " " + std::to_string(member);
    request.counts.push_back(member);
  }
  if (members.empty() || members.front() < 0 || members.back() >= job_.size() ||
      !std::is_sorted(members.begin(), members.end()) ||
      std::adjacent_find(members.begin(), members.end()) != members.end()) {
    throw Failure(Code::kInvalidArgument, request.name + ": not in this job",
                  "give different ranks from 0 to " + std::to_string(job_.size() - 1) +
                      ", ascending");
  }
  queue(0, Order::kProgramOrder).Run(request);  // a barrier that compares the lists
  std::lock_guard<std::mutex> lock(mutex_);
  const int index = static_cast<int>(groups_.size());
  if (index >= Job::kMaxAreas / 2) {
    throw Failure(Code::kInvalidArgument, "too many process sets",
                  "at most " + std::to_string(Job::kMaxAreas / 2 - 1) +
                      " can be made in one job: keep them");
  }
  groups_.push_back(std::make_unique<Group>(&job_, std::move(members), index));
  return number_ * (Job::kMaxAreas / 2) + index;
}

int64_t Core::Join() {
  const int64_t before = job_.served();
  Request join;
  join.kind = Kind::kJoin;
  std::vector<std::future<Failure>> outcomes;
  for (Order order : {Order::kProgramOrder, Order::kByName}) {
    // Shared, because if the second Submit throws, the first still ends later.
    const auto outcome = std::make_shared<std::promise<Failure>>();
    outcomes.push_back(outcome->get_future());
    queue(0, order).Submit(join, [outcome](Code code, const char* message) {
      outcome->set_value(Failure(code, message));
    });
  }
  const Failure in_order = outcomes[0].get(), by_name = outcomes[1].get();
  for (const Failure& failure : {in_order, by_name}) {
    if (failure.code() != Code::kOk) throw failure;
  }
  return job_.served() - before;
}

Group& Core::Find(int group) {
  const int index = IndexOf(group);
  if (group != 0 && group != number_ * (Job::kMaxAreas / 2) + index) {
    throw Failure(Code::kInvalidArgument,
                  "rank " + std::to_string(job_.rank()) +
                      ": this process set belongs to a former job",
                  "process sets end with shutdown(), and where ranks leave or "
                  "join: make it again afterwards, on every rank");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (index >= static_cast<int>(groups_.size())) {
    throw Failure(Code::kInvalidArgument,
                  "rank " + std::to_string(job_.rank()) + ": there is no process set " +
                      std::to_string(group),
                  "make it with ProcessSet(ranks), on every rank");
  }
  return *groups_[index];
}

const std::vector<int>& Core::members(int group) { return Find(group).members(); }

Queue& Core::queue(int group, Order order) {
  Group& found = Find(group);
  if (!found.has(job_.rank())) {
    throw Failure(Code::kInvalidArgument,
                  "rank " + std::to_string(job_.rank()) + " is not in the process set",
                  "call it on the members of the set only");
  }
  return found.queue(order);
}

}  // namespace collective
