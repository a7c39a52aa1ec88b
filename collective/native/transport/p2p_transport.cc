#include "transport/p2p_transport.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "membership/job_memory.h"
#include "membership/mismatch.h"

namespace collective {
namespace {

// Long messages go in pieces, several at a time each way: while one is summed
// the next ones arrive. Just below the 64 KB at which MPI's TCP transports
// begin to ask before they send: 143.6 ms for 16 MB at 1 Gb/s, where 256 KB
// pieces take 157.
constexpr size_t kPiece = size_t{60} << 10;
constexpr size_t kInFlight = 16;
constexpr size_t kTextBytes = 2048;
// MPI is polled so long before the core is given away for a moment each time:
// longer than a piece takes at 10 Gb/s, for then it never is.
constexpr int64_t kPollNanoseconds = 100'000;
constexpr std::chrono::microseconds kNap(50);
// Before a lost connection is blamed on the rank at its other end.
constexpr int kListens = 10;
constexpr std::chrono::milliseconds kListen(10);

}  // namespace

Remote::Remote(Job* job, const std::vector<int>& members, int me, int tag)
    : job_(job),
      network_(*job->network()),
      members_(members),
      me_(me),
      tag_(2 * tag) {}

bool Remote::Done(void* transfer, int member) {
  const int done = network_.Done(transfer);
  if (done >= 0) return done;
  // It may be gone because of another one that died: who knows better, as the
  // ranks of that one's host do, is given time to tell. Throws what it hears.
  for (int i = 0; i < kListens; ++i) {
    job_->Check(members_[member]);
    std::this_thread::sleep_for(kListen);
  }
  const std::string rank = std::to_string(members_[member]);
  job_->Break(Code::kUnavailable,
              "rank " + std::to_string(job_->rank()) +
                  " has lost its connection to rank " + rank + ": " +
                  network_.Error(),
              "look for the error message of rank " + rank);
}

void Remote::Await(void* transfer, int member, const Request& request) {
  int64_t start = 0;
  for (int i = 1;; ++i) {
    if (Done(transfer, member)) return;
    if (i % 16 != 0) continue;
    std::this_thread::yield();
    if (start == 0) start = Now();
    if (Now() - start > kPollNanoseconds) break;
  }
  Job::LongWait wait(job_, members_[member], request);
  while (!Done(transfer, member)) {
    wait.Look();
    std::this_thread::sleep_for(kNap);
  }
}

void Remote::Send(int to, const char* data, size_t bytes,
                  Transfers* under_way) {
  for (size_t at = 0; at < bytes; at += kPiece) {
    under_way->push_back({network_.Send(members_[to], tag_, data + at,
                                        std::min(kPiece, bytes - at)),
                          to});
  }
}

void Remote::Receive(int from, char* target, size_t bytes,
                     Transfers* under_way) {
  for (size_t at = 0; at < bytes; at += kPiece) {
    under_way->push_back({network_.Receive(members_[from], tag_, target + at,
                                           std::min(kPiece, bytes - at)),
                          from});
  }
}

void Remote::AwaitAll(Transfers* under_way, const Request& request) {
  while (!under_way->empty()) {
    const Transfer first = under_way->front();
    Await(first.handle, first.member, request);
    under_way->pop_front();
  }
}

void Remote::Swap(int to, const void* data, int from, void* target,
                  size_t bytes, const Request& request) {
  void* received = network_.Receive(members_[from], tag_, target, bytes);
  void* sent = network_.Send(members_[to], tag_, data, bytes);
  Await(received, from, request);
  Await(sent, to, request);
}

void Remote::Agree(uint64_t signature, const Request& request) {
  // The least and the greatest of all, in log2 n rounds: whom one hears from
  // twice changes neither.
  const int n = static_cast<int>(members_.size());
  uint64_t mine[2] = {signature, signature};
  for (int distance = 1; distance < n; distance *= 2) {
    uint64_t theirs[2];
    Swap((me_ + distance) % n, mine, (me_ - distance + n) % n, theirs,
         sizeof(mine), request);
    mine[0] = std::min(mine[0], theirs[0]);
    mine[1] = std::max(mine[1], theirs[1]);
  }
  if (mine[0] == mine[1]) return;

  struct Passed {
    uint64_t signature;
    char text[kTextBytes];
  };
  std::vector<Passed> passed(n);
  passed[me_].signature = signature;
  std::snprintf(passed[me_].text, kTextBytes, "%s", request.Describe().c_str());
  std::vector<std::string> texts;
  std::vector<uint64_t> signatures;
  for (int step = 1; step < n; ++step) {
    const int to = (me_ + step) % n, from = (me_ - step + n) % n;
    Swap(to, &passed[me_], from, &passed[from], sizeof(Passed), request);
  }
  for (const Passed& one : passed) {
    signatures.push_back(one.signature);
    texts.push_back(one.text);
  }
  ThrowIfJoined(members_, signatures);
  ThrowDisagreement(members_, texts);
}

void Remote::Exchange(int to, const char* data, size_t send_bytes, int from,
                      size_t receive_bytes, const Request& request,
                      const Take& take) {
  if (buffers_.empty()) buffers_.resize(kInFlight * kPiece);
  std::deque<void*> sends, receives;
  size_t sent = 0, asked = 0, received = 0;
  while (received < receive_bytes || sent < send_bytes || !sends.empty()) {
    while (asked < receive_bytes && receives.size() < kInFlight) {
      const size_t bytes = std::min(kPiece, receive_bytes - asked);
      char* buffer = &buffers_[asked / kPiece % kInFlight * kPiece];
      receives.push_back(network_.Receive(members_[from], tag_, buffer, bytes));
      asked += bytes;
    }
    while (sent < send_bytes && sends.size() < kInFlight) {
      const size_t bytes = std::min(kPiece, send_bytes - sent);
      sends.push_back(network_.Send(members_[to], tag_, data + sent, bytes));
      sent += bytes;
    }
    if (!receives.empty()) {
      Await(receives.front(), from, request);
      receives.pop_front();
      const size_t bytes = std::min(kPiece, receive_bytes - received);
      take(&buffers_[received / kPiece % kInFlight * kPiece], received, bytes);
      received += bytes;
      while (!sends.empty() && Done(sends.front(), to)) {
        sends.pop_front();
      }
    } else if (!sends.empty()) {
      Await(sends.front(), to, request);
      sends.pop_front();
    }
  }
}

void Remote::Announce(const Notice& notice) {
  const Request request;
  std::vector<void*> sends;
  for (size_t i = 1; i < members_.size(); ++i) {
    sends.push_back(
        network_.Send(members_[i], tag_ + 1, &notice, sizeof(notice)));
  }
  for (size_t i = 1; i < members_.size(); ++i) {
    Await(sends[i - 1], static_cast<int>(i), request);
  }
}

Notice Remote::Announced(const Request& request) {
  Notice notice;
  Await(network_.Receive(members_[0], tag_ + 1, &notice, sizeof(notice)), 0,
        request);
  return notice;
}

}  // namespace collective
