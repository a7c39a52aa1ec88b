#include "queue.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <string>
#include <utility>

#include "algorithms/all_reduce.h"
#include "algorithms/join.h"
#include "recorder/recorder.h"
#include "recorder/timeline.h"

namespace collective {
namespace {

// What ranks match a collective by.
uint64_t NameOf(const Request& request) {
  const uint64_t name = std::hash<std::string>()(request.name);
  return name ^ static_cast<uint64_t>(request.ticket) * 0x9E3779B97F4A7C15u;
}

// Where ranks run the same function with different names: the time without any
// new collective here after which no more are thought to come. A thread of its
// own could still bring one.
constexpr double kQuietSeconds = 5;
constexpr std::chrono::milliseconds kLook(100);

// Whether this thread is a queue's.
thread_local bool works = false;

// A thread inherits the rounding of its creator, and TensorFlow's threads flush
// denormals to zero: sums must not depend on who asked first.
class DenormalsKept {
 public:
#if defined(__x86_64__)
  DenormalsKept() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DenormalsKept() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#elif defined(__aarch64__)
  DenormalsKept() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DenormalsKept() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#endif
};

// Waking the worker takes about as long.
constexpr auto kShortly = std::chrono::microseconds(30);

// Whether it comes true within that time, which is not waited for where ranks
// need the core.
template <class Condition>
bool Shortly(bool shared_cores, Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + kShortly;
  while (!condition()) {
    if (shared_cores || std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

Notice NoticeOf(const Request& request) {
  Notice notice;
  notice.name = NameOf(request);
  notice.plan = request.plan;
  notice.joined = request.kind == Kind::kJoin;
  std::strncpy(notice.text, Printable(request.name).c_str(),
               sizeof(notice.text) - 1);
  return notice;
}

}  // namespace

Queue::Queue(std::unique_ptr<Communicator> ranks, Order order)
    : ranks_(std::move(ranks)), order_(order) {
  if (ranks_->size() == ranks_->job().size()) return;
  for (int member = 0; member < ranks_->size(); ++member) {
    among_ += (member ? "," : " among ranks ") +
              std::to_string(ranks_->rank_of(member));
  }
}

Queue::~Queue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  change_.notify_all();
  if (worker_.joinable()) worker_.join();
  for (std::unique_lock<std::mutex> lock(mutex_); busy_;) {
    change_.wait_for(lock, std::chrono::milliseconds(1));
  }
  for (Item& item : items_) {
    item.done(Code::kUnavailable,
              "shut down before it ran\nHINT: wait for every handle before "
              "shutdown()");
  }
}

void Queue::Run(const Request& request) {
  ranks_->job().NoteCaller();
  std::unique_lock<std::mutex> lock(mutex_);
  if (order_ == Order::kProgramOrder && items_.empty() && !busy_) {
    busy_ = true;
    lock.unlock();
    struct Release {
      Queue* queue;
      ~Release() {
        std::lock_guard<std::mutex> lock(queue->mutex_);
        queue->busy_ = false;
        if (!queue->items_.empty()) queue->change_.notify_all();
      }
    } release{this};
    ExecuteWithJoined(*ranks_, request);
    return;
  }
  lock.unlock();
  std::promise<std::pair<Code, std::string>> outcome;
  Submit(request, [&](Code code, const char* message) {
    outcome.set_value({code, message});
  });
  auto told = outcome.get_future();
  bool held = false;
  while (told.wait_for(kLook) == std::future_status::timeout) {
    ranks_->job().SetCallerWaiting(held = true);
  }
  if (held) ranks_->job().SetCallerWaiting(false);
  const auto [code, message] = told.get();
  if (code != Code::kOk) throw Failure(code, message);
}

void Queue::Submit(Request request, Done done, bool blocks) {
  // What follows from a collective's end is asked for by whoever asked for
  // that.
  if (!works) ranks_->job().NoteCaller();
  ranks_->job().CountSubmission();
  blocks = blocks && (works || ranks_->job().IsCaller());
  const uint64_t name = NameOf(request);
  Recorder* recorder = Recorder::Current();
  if (recorder && request.kind != Kind::kJoin) {
    request.recorded = recorder->Announce(request, false);
  }
  Item item{std::move(request), std::move(done), name, blocks};
  std::unique_lock<std::mutex> lock(mutex_);
  if (item.request.once && ranks_->size() > 1 && !once_.insert(name).second) {
    lock.unlock();
    return Refuse(item);
  }
  const bool free = !busy_ && !closing_ && items_.empty();
  if (free && order_ == Order::kByName && IsOneShot(*ranks_, item.request) &&
      !ranks_->job().broken()) {
    busy_ = true;
    lock.unlock();
    if (BeginsWithOthers(item)) {
      Perform(item);
      return;
    }
    lock.lock();
    busy_ = false;
  }
  if (blocks) ranks_->job().SetCallerBlocked(true);
  const bool begun = item.request.posted;
  items_.insert(begun ? items_.begin() : items_.end(), std::move(item));
  if (!worker_.joinable() && !closing_) {
    worker_ = std::thread([this] { Work(); });
  }
  Working(true);
  lock.unlock();
  change_.notify_all();
}

bool Queue::BeginsWithOthers(Item& item) {
  const bool shared = ranks_->job().shared_cores();
  if (ranks_->me() == 0) {
    ranks_->Announce(++number_, NoticeOf(item.request));
  } else {
    Notice notice;
    const auto announced = [&] {
      return ranks_->HasAnnounced(number_ + 1, &notice);
    };
    if (!Shortly(shared, announced) || notice.joined ||
        notice.name != item.name) {
      return false;
    }
    ++number_;
  }
  if (item.request.issued) *item.request.issued = number_;
  item.request.posted_at = TimelineNow();
  PostOneShot(*ranks_, item.request);
  item.request.posted = true;
  return Shortly(shared, [&] { return ranks_->AllPosted(); });
}

void Queue::Refuse(const Item& item) {
  try {
    ranks_->job().Break(
        Code::kFailedPrecondition,
        "rank " + std::to_string(ranks_->job().rank()) + " has begun " +
            item.request.Describe() +
            " twice at a time, from several threads: which of the two meets "
            "which on the other ranks is not known",
        "give the collectives of each thread names (name=...) or a process "
        "set of their own, or let one thread call the function");
  } catch (const Failure& failure) {
    item.done(failure.code(), failure.what());
  }
}

void Queue::Work() {
  works = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    Working(!items_.empty());
    change_.wait(lock,
                 [this] { return closing_ || (!items_.empty() && !busy_); });
    if (closing_) return;
    busy_ = true;
    Item item;
    try {
      item = Next(lock);
    } catch (const Failure& failure) {
      // The job cannot go on; tell everyone who waits here.
      std::deque<Item> failed;
      failed.swap(items_);
      once_.clear();
      busy_ = false;
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

void Queue::Working(bool works) {
  // By name, Await and the rank that it waits for tell what does not come.
  if (order_ == Order::kByName || works == working_) return;
  working_ = works;
  ranks_->job().CountBusyQueues(works ? 1 : -1);
}

bool Queue::Perform(Item& item) {
  Code code = Code::kOk;
  std::string message;
  bool over = true;
  try {
    const DenormalsKept kept;
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
    // Free before it is told: whoever hears it may call Run at once.
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
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
  const bool begun = found->request.posted;
  if (order_ == Order::kByName && ranks_->size() > 1 && !begun) {
    ++number_;
    const bool first = ranks_->me() == 0;
    Notice notice;
    if (first) {
      notice = NoticeOf(found->request);
      ranks_->Announce(number_, notice);
    }
    if (!first || notice.joined) {
      const Request waiting = found->request;
      lock.unlock();
      try {
        if (!first) notice = ranks_->Announced(number_, waiting);
        if (notice.joined) notice = AgreeOnNext(*ranks_, NoticeOf(waiting));
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
      found = Await(lock, notice);
    }
    if (found->request.issued) *found->request.issued = number_;
  }
  Item item = std::move(*found);
  items_.erase(found);
  return item;
}

std::deque<Queue::Item>::iterator Queue::Await(
    std::unique_lock<std::mutex>& lock, const Notice& notice) {
  auto found = Find(notice.name);
  if (found != items_.end()) return found;
  // Told to the others; nothing is taken from the queue meanwhile.
  Job::LongWait wait(&ranks_->job(), ranks_->rank_of(0),
                     items_.front().request);
  size_t submitted = items_.size();
  auto last = std::chrono::steady_clock::now();
  while (found == items_.end()) {
    change_.wait_for(lock, kLook);
    wait.Poll();
    if (closing_) {
      throw Failure(Code::kUnavailable,
                    "shut down before it ran\nHINT: wait for every handle "
                    "before shutdown()");
    }
    const auto now = std::chrono::steady_clock::now();
    if (items_.size() != submitted) last = now;  // still more come
    submitted = items_.size();
    const std::chrono::duration<double> quiet = now - last;
    if (quiet.count() > Patience(notice)) ThrowNoneOfThatName(notice);
    found = Find(notice.name);
  }
  return found;
}

double Queue::Patience(const Notice& notice) const {
  const double stall = ranks_->job().settings().stall_seconds;
  double patience = stall;
  for (const Item& item : items_) {
    const Plan& mine = item.request.plan;
    if (mine.function == 0 || mine.function != notice.plan.function) continue;
    // The same plan: it comes when it is computed, however long that takes. The
    // first rank, which waits for it, has the deadline.
    if (mine.names == notice.plan.names) {
      return std::numeric_limits<double>::infinity();
    }
    patience = std::min(stall, kQuietSeconds);
  }
  return patience;
}

void Queue::ThrowNoneOfThatName(const Notice& notice) {
  const std::string me = std::to_string(ranks_->job().rank());
  ranks_->job().Break(
      Code::kFailedPrecondition,
      "ranks do not agree on a collective: rank " + me + " has " +
          items_.front().request.Describe() + "; rank " +
          std::to_string(ranks_->rank_of(0)) + " has begun '" + notice.text +
          "', which does not come on rank " + me + "\n" +
          ranks_->job().DescribeWaits(),
      "give the same collectives the same names on every rank, also within a "
      "tf.function");
}

}  // namespace collective
