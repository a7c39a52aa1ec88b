#include "queue.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <chrono>
#include <future>
#include <utility>

#include "execute.h"

namespace collective {
namespace {

uint64_t HashOf(const std::string& name) {
  return std::hash<std::string>()(name);
}

}  // namespace

Queue::Queue(std::unique_ptr<Communicator> ranks, Order order)
    : ranks_(std::move(ranks)), order_(order) {}

Queue::~Queue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  change_.notify_all();
  if (worker_.joinable()) worker_.join();
  for (Item& item : items_) {
    item.done(Code::kUnavailable,
              "shut down before it ran\nHINT: wait for every handle before "
              "shutdown()");
  }
}

void Queue::Run(const Request& request) {
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
    Execute(*ranks_, request);
    return;
  }
  lock.unlock();
  std::promise<std::pair<Code, std::string>> outcome;
  Submit(request, [&](Code code, const char* message) {
    outcome.set_value({code, message});
  });
  const auto [code, message] = outcome.get_future().get();
  if (code != Code::kOk) throw Failure(code, message);
}

void Queue::Submit(Request request, Done done) {
  const uint64_t name = HashOf(request.name);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back({std::move(request), std::move(done), name});
    if (!worker_.joinable()) worker_ = std::thread([this] { Work(); });
  }
  change_.notify_all();
}

void Queue::Work() {
#if defined(__x86_64__)
  // A thread inherits the rounding of its creator, and TensorFlow's threads
  // flush denormals to zero: sums must not depend on who asked first.
  _mm_setcsr(0x1f80);
#endif
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
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
      busy_ = false;
      lock.unlock();
      for (Item& one : failed) one.done(failure.code(), failure.what());
      lock.lock();
      continue;
    }
    lock.unlock();
    Perform(item);
    lock.lock();
  }
}

void Queue::Perform(Item& item) {
  Code code = Code::kOk;
  std::string message;
  try {
    Execute(*ranks_, item.request);
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
  }
  item.done(code, message.c_str());
}

std::deque<Queue::Item>::iterator Queue::Find(uint64_t name) {
  auto item = items_.begin();
  while (item != items_.end() && item->name != name) ++item;
  return item;
}

Queue::Item Queue::Next(std::unique_lock<std::mutex>& lock) {
  auto found = items_.begin();
  if (order_ == Order::kByName && ranks_->size() > 1) {
    ++number_;
    if (ranks_->me() == 0) {
      ranks_->Announce(number_, found->name);
    } else {
      const Request waiting = found->request;
      lock.unlock();
      uint64_t name = 0;
      try {
        name = ranks_->Announced(number_, waiting);
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
      const auto start = std::chrono::steady_clock::now();
      const Settings& settings = ranks_->job().settings();
      while ((found = Find(name)) == items_.end()) {
        change_.wait_for(lock, std::chrono::milliseconds(100));
        ranks_->job().Check(ranks_->rank_of(0));
        if (closing_) {
          throw Failure(Code::kUnavailable,
                        "shut down before it ran\nHINT: wait for every handle "
                        "before shutdown()");
        }
        const std::chrono::duration<double> waited =
            std::chrono::steady_clock::now() - start;
        if (waited.count() > settings.stall_seconds && !items_.empty()) {
          ranks_->job().Break(
              Code::kFailedPrecondition,
              "ranks do not agree on a collective: rank " +
                  std::to_string(ranks_->job().rank()) + " has " +
                  items_.front().request.Describe() + "; rank " +
                  std::to_string(ranks_->rank_of(0)) +
                  " began one of another name, which did not come here in " +
                  std::to_string(static_cast<int>(waited.count())) + " s\n" +
                  ranks_->job().WhoWaits(),
              "give the same collectives the same names on every rank");
        }
      }
    }
  }
  Item item = std::move(*found);
  items_.erase(found);
  return item;
}

}  // namespace collective
