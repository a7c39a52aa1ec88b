#include "core.h"

#include <algorithm>
#include <future>
#include <numeric>

namespace collective {

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
        std::make_unique<Communicator>(job_, members_, 2 * number_ + which),
        order);
  }
  return *queues_[which];
}

Core::Core(const Place& place, int generation)
    : job_(place, Settings::FromEnvironment(), generation) {
  AddEveryone();
}

Core::Core(Core& former) : job_(former.job_) { AddEveryone(); }

Core::Core(Core& alone, Job::Later later) : job_(alone.job_, later) {
  AddEveryone();
}

void Core::AddEveryone() {
  groups_.reserve(Job::kMostAreas / 2);  // no reference to one ever moves
  std::vector<int> everyone(job_.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  groups_.push_back(std::make_unique<Group>(&job_, std::move(everyone), 0));
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
                  "give different ranks from 0 to " +
                      std::to_string(job_.size() - 1) + ", ascending");
  }
  queue(0, Order::kProgramOrder).Run(request);  // a barrier that compares
  std::lock_guard<std::mutex> lock(mutex_);
  const int number = static_cast<int>(groups_.size());
  if (number >= Job::kMostAreas / 2) {
    throw Failure(Code::kInvalidArgument, "too many process sets",
                  "at most " + std::to_string(Job::kMostAreas / 2 - 1) +
                      " can be made in one job: keep them");
  }
  groups_.push_back(std::make_unique<Group>(&job_, std::move(members), number));
  return groups_.back()->has(job_.rank()) ? number : -1;
}

int64_t Core::Join() {
  const int64_t before = job_.served();
  Request join;
  join.kind = Kind::kJoin;
  std::promise<Failure> outcomes[2];
  for (Order order : {Order::kProgramOrder, Order::kByName}) {
    std::promise<Failure>& outcome = outcomes[static_cast<int>(order)];
    queue(0, order).Submit(join, [&](Code code, const char* message) {
      outcome.set_value(Failure(code, message));
    });
  }
  const Failure in_order = outcomes[0].get_future().get();
  const Failure by_name = outcomes[1].get_future().get();
  for (const Failure& failure : {in_order, by_name}) {
    if (failure.code() != Code::kOk) throw failure;
  }
  return job_.served() - before;
}

Queue& Core::queue(int group, Order order) {
  if (group < 0 || group >= static_cast<int>(groups_.size()) ||
      !groups_[group]->has(job_.rank())) {
    throw Failure(
        Code::kInvalidArgument,
        "rank " + std::to_string(job_.rank()) + " is not in the process set",
        "call it on the members of the set only");
  }
  return groups_[group]->queue(order);
}

}  // namespace collective
