// Collectives that wait to run, one after another, on one communicator.
//
// Program order: the order of submission, which must be the same on every rank.
// A blocking call runs in the caller's thread if the queue is empty.
//
// By name: ranks may submit in any order, as TensorFlow does. Member 0 takes
// collectives as they arrive and announces each name; the other members run them
// in that order. An announcement is one store, which the others read while they
// wait anyway: no round trip. Two collectives of one name run in the order of
// submission, or are refused if that order may differ between ranks
// (Request::once). If member 0 has joined, another member announces (join.h).
//
// The number of an announcement, equal on all members, is the ticket of the
// collective: combined with it, the name of a later collective that belongs to
// it (its gradient) is unique, even if both run often.
#pragma once

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
  // Receives the outcome, in the worker thread or, for a small collective,
  // within Submit. Must not throw.
  using Done = std::function<void(Code code, const char* message)>;

  Queue(std::unique_ptr<Communicator> ranks, Order order);
  // The waiting collectives fail. Not called in a worker thread, which could not
  // join itself.
  ~Queue();
  Queue(const Queue&) = delete;

  // Both throw Failure; Submit only if `done` will not be called.
  void Run(const Request& request);
  // `blocks`: the caller is blocked until `done`, as in TensorFlow's eager
  // mode.
  void Submit(Request request, Done done, bool blocks = false);
  Communicator& ranks() { return *ranks_; }
  // The text " among ranks 0,2"; empty if these are all ranks.
  const char* among() const { return among_.c_str(); }
  // Whether the calling thread is the worker of any queue.
  static bool InWorker();

 private:
  struct Item {
    Request request;
    Done done;
    uint64_t name;  // a hash of the name and the ticket
    bool blocks;
  };
  void StartWorker(const Request& request);
  // Announces and posts a small collective in the calling thread. True if the
  // other ranks have posted, too, within the time that it would take to wake
  // the worker; otherwise the worker completes it.
  bool TryInCallersThread(Item& item);
  void Work();
  Item Next(std::unique_lock<std::mutex>& lock);
  std::deque<Item>::iterator Find(uint64_t name);
  // Waits until the announced collective is submitted here.
  std::deque<Item>::iterator AwaitSubmission(std::unique_lock<std::mutex>& lock,
                                             const Announcement& next);
  // Seconds without a submission after which none is expected.
  double Patience(const Announcement& next) const;
  [[noreturn]] void ThrowNotSubmitted(const Announcement& next);
  // Breaks the job: another request of this name has not ended.
  void Refuse(const Item& item);
  // Reports to deadlock detection whether the worker has something to run.
  void SetBusy(bool busy);
  // False if it must run again: not all ranks have joined.
  bool Perform(Item& item);

  std::unique_ptr<Communicator> ranks_;
  const Order order_;
  std::string among_;
  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Item> items_;
  std::unordered_set<uint64_t> once_;  // names of items that have not ended
  bool running_ = false;               // a collective runs, in any thread
  bool busy_ = false;                  // the last report of SetBusy
  bool closing_ = false;
  uint32_t number_ = 0;  // of announcements
  std::thread worker_;
};

}  // namespace collective
