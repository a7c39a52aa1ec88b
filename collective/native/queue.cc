#include "queue.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "algorithms/all_reduce.h"
#include "algorithms/join.h"
#include "clock.h"
#include "recorder/recorder.h"

namespace collective {
namespace {

// The key by which ranks match a collective.
uint64_t HashOf(const Request& request) {
  const uint64_t name = std::hash<std::string>()(request.name);
  return name ^ static_cast<uint64_t>(request.ticket) * 0x9E3779B97F4A7C15u;
}

// If ranks run the same function with different names: after so long without a
// submission none is expected. (Another thread could still submit.)
constexpr double kQuietSeconds = 5;
constexpr std::chrono::milliseconds kPollInterval(100);

constexpr char kShutDown[] =
    "shut down before it ran\nHINT: wait for every handle before shutdown()";

thread_local bool in_worker = false;

// Waking the worker takes about as long.
constexpr int64_t kBriefWait = 30'000;  // nanoseconds

// Whether the condition becomes true within that time. If ranks share cores, they
// need the core, so there is no wait.
template <class Condition>
bool AwaitBriefly(bool shared_cores, Condition&& condition) {
  const int64_t end = Now() + kBriefWait;
  while (!condition()) {
    if (shared_cores || Now() > end) return false;
  }
  return true;
}

Announcement AnnouncementOf(const Request& request) {
  Announcement next;
  next.name = HashOf(request);
  next.plan = request.plan;
  next.joined = request.kind == Kind::kJoin;
  std::strncpy(next.text, Printable(request.name).c_str(), sizeof(next.text) - 1);
  return next;
}

}  // namespace

Queue::Queue(std::unique_ptr<Communicator> ranks, Order order)
    : ranks_(std::move(ranks)), order_(order) {
  if (ranks_->size() == ranks_->job().size()) return;
  for (int member = 0; member < ranks_->size(); ++member) {
    among_ +=
        (member ? "," : " among ranks ") + std::to_string(ranks_->rank_of(member));
  }
}

Queue::~Queue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  change_.notify_all();
  if (worker_.joinable()) worker_.join();
  for (std::unique_lock<std::mutex> lock(mutex_); running_;) {
    change_.wait_for(lock, std::chrono::milliseconds(1));
  }
  for (Item& item : items_) {
    item.done(Code::kUnavailable, kShutDown);
  }
}

void Queue::Run(const Request& request) {
  ranks_->job().NoteCaller();
  std::unique_lock<std::mutex> lock(mutex_);
  if (order_ == Order::kProgramOrder && items_.empty() && !running_) {
    running_ = true;
    lock.unlock();
    struct Release {
      Queue* queue;
      ~Release() {
        std::lock_guard<std::mutex> lock(queue->mutex_);
        queue->running_ = false;
        if (!queue->items_.empty()) queue->change_.notify_all();
      }
    } release{this};
    ExecuteWithJoined(*ranks_, request);
    return;
  }
  lock.unlock();
  std::promise<std::pair<Code, std::string>> outcome;
  Submit(request,
         [&](Code code, const char* message) { outcome.set_value({code, message}); });
  auto result = outcome.get_future();
  bool waits = false;
  while (result.wait_for(kPollInterval) == std::future_status::timeout) {
    ranks_->job().SetCallerWaiting(waits = true);
  }
  if (waits) ranks_->job().SetCallerWaiting(false);
  const auto [code, message] = result.get();
  if (code != Code::kOk) throw Failure(code, message);
}

bool Queue::InWorker() { return in_worker; }

void Queue::StartWorker(const Request& request) {
  if (worker_.joinable() || closing_) return;
  try {
    worker_ = std::thread([this] { Work(); });
  } catch (const std::system_error& error) {
    // Every other rank waits for this collective.
    ranks_->job().Break(Code::kInternal,
                        "rank " + std::to_string(ranks_->job().rank()) +
                            " cannot start a thread for " + request.Describe() + ": " +
                            error.what(),
                        "see ulimit -u and ulimit -v, and the limits of the "
                        "container");
  }
}

void Queue::Submit(Request request, Done done, bool blocks) {
  // A callback continues the work of the calling thread.
  if (!in_worker) ranks_->job().NoteCaller();
  const uint64_t name = HashOf(request);
  std::unique_lock<std::mutex> lock(mutex_);
  // It is first, so that nothing was queued, recorded or posted if it fails.
  StartWorker(request);
  ranks_->job().CountSubmission();
  blocks = blocks && (in_worker || ranks_->job().IsCaller());
  Recorder* recorder = Recorder::Current();
  if (recorder && request.kind != Kind::kJoin) {
    request.recorded = recorder->Announce(request, Now());
  }
  Item item{std::move(request), std::move(done), name, blocks};
  if (item.request.once && ranks_->size() > 1 && !once_.insert(name).second) {
    lock.unlock();
    return Refuse(item);
  }
  const bool free = !running_ && !closing_ && items_.empty();
  if (free && order_ == Order::kByName && IsOneShot(*ranks_, item.request) &&
      !ranks_->job().broken()) {
    running_ = true;
    lock.unlock();
    if (TryInCallersThread(item)) {
      Perform(item);
      return;
    }
    lock.lock();
    running_ = false;
  }
  if (blocks) ranks_->job().SetCallerBlocked(true);
  const bool posted = item.request.posted_at != 0;
  items_.insert(posted ? items_.begin() : items_.end(), std::move(item));
  SetBusy(true);
  lock.unlock();
  change_.notify_all();
}

bool Queue::TryInCallersThread(Item& item) {
  const bool shared = ranks_->job().shared_cores();
  if (ranks_->me() == 0) {
    ranks_->Announce(++number_, AnnouncementOf(item.request));
  } else {
    Announcement next;
    const auto announced = [&] { return ranks_->HasAnnounced(number_ + 1, &next); };
    if (!AwaitBriefly(shared, announced) || next.joined || next.name != item.name) {
      return false;
    }
    ++number_;
  }
  if (item.request.issued) *item.request.issued = number_;
  const int64_t posted_at = Now();
  PostOneShot(*ranks_, item.request);
  item.request.posted_at = posted_at;
  return AwaitBriefly(shared, [&] { return ranks_->AllPosted(); });
}

void Queue::Refuse(const Item& item) {
  try {
    ranks_->job().Break(
        Code::kFailedPrecondition,
        "rank " + std::to_string(ranks_->job().rank()) + " has begun " +
            item.request.Describe() +
            " twice at the same time, from several threads: which of the two "
            "matches which on the other ranks is unknown",
        "give the collectives of each thread names (name=...) or a process "
        "set of their own, or let one thread call the function");
  } catch (const Failure& failure) {
    item.done(failure.code(), failure.what());
  }
}

void Queue::Work() {
  in_worker = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    SetBusy(!items_.empty());
    change_.wait(lock, [this] { return closing_ || (!items_.empty() && !running_); });
    if (closing_) return;
    running_ = true;
    Item item;
    try {
      item = Next(lock);
    } catch (const Failure& failure) {
      // The job cannot continue: all items fail.
      std::deque<Item> failed;
      failed.swap(items_);
      once_.clear();
      running_ = false;
      lock.unlock();
      for (Item& one : failed) one.done(failure.code(), failure.what());
      lock.lock();
      continue;
    }
    lock.unlock();
    const bool over = Perform(item);
    lock.lock();
    if (!over) items_.push_back(std::move(item));
  }
}

void Queue::SetBusy(bool busy) {
  // By name, AwaitSubmission notices a missing submission.
  if (order_ == Order::kByName || busy == busy_) return;
  busy_ = busy;
  ranks_->job().CountBusyQueues(busy ? 1 : -1);
}

bool Queue::Perform(Item& item) {
  Code code = Code::kOk;
  std::string message;
  bool over = true;
  try {
    if (item.request.kind == Kind::kJoin) {
      over = ServeJoined(*ranks_, item.request);
    } else {
      ExecuteWithJoined(*ranks_, item.request);
    }
  } catch (const Failure& failure) {
    code = failure.code();
    message = failure.what();
  } catch (const std::exception& error) {
    code = Code::kInternal;
    message = error.what();
  }
  {
    // Before `done`, because its caller may call Run at once.
    std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    if (over && item.request.once) once_.erase(item.name);
    if (!items_.empty()) change_.notify_all();
  }
  if (over && item.blocks) ranks_->job().SetCallerBlocked(false);
  if (over) item.done(code, message.c_str());
  return over;
}

std::deque<Queue::Item>::iterator Queue::Find(uint64_t name) {
  auto item = items_.begin();
  while (item != items_.end() && item->name != name) ++item;
  // A rank that has joined takes part in everything.
  if (item == items_.end() && !items_.empty() &&
      items_.front().request.kind == Kind::kJoin) {
    return items_.begin();
  }
  return item;
}

Queue::Item Queue::Next(std::unique_lock<std::mutex>& lock) {
  auto found = items_.begin();
  const bool posted = found->request.posted_at != 0;
  if (order_ == Order::kByName && ranks_->size() > 1 && !posted) {
    ++number_;
    const bool announces = ranks_->me() == 0;
    Announcement next;
    if (announces) {
      next = AnnouncementOf(found->request);
      ranks_->Announce(number_, next);
    }
    if (!announces || next.joined) {
      const Request waiting = found->request;
      lock.unlock();
      try {
        if (!announces) next = ranks_->Announced(number_, waiting);
        if (next.joined) next = AgreeOnNext(*ranks_, AnnouncementOf(waiting));
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
      found = AwaitSubmission(lock, next);
    }
    if (found->request.issued) *found->request.issued = number_;
  }
  Item item = std::move(*found);
  items_.erase(found);
  return item;
}

std::deque<Queue::Item>::iterator Queue::AwaitSubmission(
    std::unique_lock<std::mutex>& lock, const Announcement& next) {
  auto found = Find(next.name);
  if (found != items_.end()) return found;
  // The wait takes nothing from the queue, so its front stays.
  Job::LongWait wait(&ranks_->job(), ranks_->rank_of(0), items_.front().request);
  size_t submitted = items_.size();
  RunningTime quiet;  // since the last submission
  while (found == items_.end()) {
    change_.wait_for(lock, kPollInterval);
    wait.Poll();
    if (closing_) {
      throw Failure(Code::kUnavailable, kShutDown);
    }
    if (items_.size() != submitted) quiet = RunningTime();  // submissions continue
    submitted = items_.size();
    if (quiet.Seconds() > Patience(next)) ThrowNotSubmitted(next);
    found = Find(next.name);
  }
  return found;
}

double Queue::Patience(const Announcement& next) const {
  const double stall = ranks_->job().settings().stall_seconds;
  double patience = stall;
  for (const Item& item : items_) {
    const Plan& mine = item.request.plan;
    if (mine.function == 0 || mine.function != next.plan.function) continue;
    // The plans are equal: the collective is submitted once it is computed, after
    // any time. Member 0, which waits for it, has the deadline.
    if (mine.names == next.plan.names) {
      return std::numeric_limits<double>::infinity();
    }
    patience = std::min(stall, kQuietSeconds);
  }
  return patience;
}

void Queue::ThrowNotSubmitted(const Announcement& next) {
  const std::string me = std::to_string(ranks_->job().rank());
  ranks_->job().Break(
      Code::kFailedPrecondition,
      "ranks do not agree on a collective: rank " + me + " has " +
          items_.front().request.Describe() + "; rank " +
          std::to_string(ranks_->rank_of(0)) + " has begun '" + next.text +
          "', which rank " + me + " does not submit\n" + ranks_->job().DescribeWaits(),
      "give the same collectives the same names on every rank, also within a "
      "tf.function");
}

}  // namespace collective
