// Collectives waiting to be run, one after the other, on one communicator.
//
// Program order: the order of submission, which must be the same on every rank.
// A blocking call runs in the caller's thread when nothing is before it.
//
// By name: ranks may submit in any order, as TensorFlow does. The first member
// takes them as they come and announces each name; the others run them in that
// order. One store, which the others see while they wait anyway: no round trip.
// The same name twice at a time is run in the order of submission; refused
// where that order is no rank's choice (Request::once). Where the first member
// has joined, another chooses (join.h).
//
// The number of an announcement, equal on all members, is the ticket of the
// collective: with it, a later one that belongs to it gets a name that no other
// has, however often both are run.
#ifndef COLLECTIVE_NATIVE_QUEUE_H_
#define COLLECTIVE_NATIVE_QUEUE_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>

#include "communicator.h"

namespace collective {

class Queue {
 public:
  // Told the outcome; called from the queue's thread, or, of a few bytes,
  // within Submit. Must not throw.
  using Done = std::function<void(Code code, const char* message)>;

  Queue(std::unique_ptr<Communicator> ranks, Order order);
  // Runs no more; what is waiting fails.
  ~Queue();
  Queue(const Queue&) = delete;

  void Run(const Request& request);  // throws Failure
  // `blocks`: the caller is blocked until `done`, as in TensorFlow's eager
  // mode.
  void Submit(Request request, Done done, bool blocks = false);
  Communicator& ranks() { return *ranks_; }
  // " among ranks 0,2", or nothing where these are all.
  const char* among() const { return among_.c_str(); }

 private:
  struct Item {
    Request request;
    Done done;
    uint64_t name;  // a hash, of the ticket, too
    bool blocks;
  };
  // Of a few bytes, in the thread that asks for them: announces and posts, and
  // tells whether the others are there, too, or come within the time that it
  // would take to wake the worker. If not, the worker goes on with it.
  bool BeginsWithOthers(Item& item);
  void Work();
  Item Next(std::unique_lock<std::mutex>& lock);
  std::deque<Item>::iterator Find(uint64_t name);
  // Waits until what was announced is submitted here.
  std::deque<Item>::iterator Await(std::unique_lock<std::mutex>& lock,
                                   const Notice& notice);
  // Seconds without a submission after which it is thought not to come.
  double Patience(const Notice& notice) const;
  [[noreturn]] void ThrowNoneOfThatName(const Notice& notice);
  // Ends the job: another request of this name is under way.
  void Refuse(const Item& item);
  // Tells the job whether the worker has something to run.
  void Working(bool works);
  // False where it has to be done again: not all ranks have joined.
  bool Perform(Item& item);

  std::unique_ptr<Communicator> ranks_;
  const Order order_;
  std::string among_;
  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Item> items_;
  std::unordered_set<uint64_t> once_;  // names under way
  bool busy_ = false;
  bool working_ = false;
  bool closing_ = false;
  uint32_t number_ = 0;  // of announcements
  std::thread worker_;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_QUEUE_H_
