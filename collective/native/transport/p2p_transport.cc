#include "transport/p2p_transport.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "clock.h"
#include "kernels/kernels.h"
#include "membership/mismatch.h"

namespace collective {
namespace {

// Long messages go in pieces, several at a time in each direction: while one is
// summed, the next ones arrive. The size is just below the 64 KB from which MPI's
// TCP transports use a rendezvous protocol: 16 MB at 1 Gb/s take 143.6 ms, and 157
// ms with pieces of 256 KB.
constexpr size_t kPiece = size_t{60} << 10;
constexpr size_t kInFlight = 16;
constexpr size_t kTextBytes = 2048;
// MPI is polled without a pause for so long: longer than a piece takes at 10 Gb/s,
// so that a rank never sleeps while a busy link delivers.
constexpr int64_t kPollNanoseconds = 100'000;
constexpr int kPollsPerYield = 16;
constexpr int64_t kNap = 50'000;
// Wait before a lost connection is blamed on the rank at its other end.
constexpr int kDeathPolls = 10;
constexpr int64_t kDeathPollInterval = 10 * kMillisecond;

}  // namespace

P2pTransport::P2pTransport(Job* job, const std::vector<int>& members, int me, int tag)
    : job_(job), network_(*job->network()), members_(members), me_(me), tag_(2 * tag) {}

bool P2pTransport::Test(void* transfer, int member) {
  const int done = network_.Test(transfer);
  if (done >= 0) return done;
  // The peer may have ended because another rank died. The ranks of that rank's
  // host know it, and get time to report it: then Check throws.
  for (int i = 0; i < kDeathPolls; ++i) {
    if (job_->Check(members_[member])) job_->BreakForLeft(members_[member]);
    SleepFor(kDeathPollInterval);
  }
  const std::string rank = std::to_string(members_[member]);
  job_->Break(Code::kUnavailable,
              "rank " + std::to_string(job_->rank()) +
                  " has lost its connection to rank " + rank + ": " + network_.Error(),
              "look for the error message of rank " + rank);
}

void P2pTransport::Await(void* transfer, int member, const Request& request) {
  int64_t start = 0;
  for (int i = 1;; ++i) {
    if (Test(transfer, member)) return;
    if (i % kPollsPerYield != 0) continue;
    std::this_thread::yield();
    if (start == 0) start = Now();
    if (Now() - start > kPollNanoseconds) break;
  }
  Job::LongWait wait(job_, members_[member], request);
  while (!Test(transfer, member)) {
    wait.Poll();
    SleepFor(kNap);
  }
}

void P2pTransport::Send(int to, const char* data, size_t bytes, Transfers* in_flight) {
  for (size_t at = 0; at < bytes; at += kPiece) {
    in_flight->push_back(
        {network_.Send(members_[to], tag_, data + at, std::min(kPiece, bytes - at)),
         to});
  }
}

void P2pTransport::Receive(int from, char* target, size_t bytes, Transfers* in_flight) {
  for (size_t at = 0; at < bytes; at += kPiece) {
    in_flight->push_back({network_.Receive(members_[from], tag_, target + at,
                                           std::min(kPiece, bytes - at)),
                          from});
  }
}

void P2pTransport::AwaitAll(Transfers* in_flight, const Request& request) {
  while (!in_flight->empty()) {
    const Transfer first = in_flight->front();
    Await(first.handle, first.member, request);
    in_flight->pop_front();
  }
}

void P2pTransport::SendReceive(int to, const void* data, int from, void* target,
                               size_t bytes, const Request& request) {
  void* received = network_.Receive(members_[from], tag_, target, bytes);
  void* sent = network_.Send(members_[to], tag_, data, bytes);
  Await(received, from, request);
  Await(sent, to, request);
}

void P2pTransport::VerifyMatch(uint64_t signature, const Request& request) {
  // All-reduce of the minimum and the maximum. If n is not a power of two, some
  // values arrive twice, which changes neither.
  const int n = static_cast<int>(members_.size());
  uint64_t mine[2] = {signature, signature};
  for (int distance = 1; distance < n; distance *= 2) {
    uint64_t theirs[2];
    SendReceive((me_ + distance) % n, mine, (me_ - distance + n) % n, theirs,
                sizeof(mine), request);
    mine[0] = std::min(mine[0], theirs[0]);
    mine[1] = std::max(mine[1], theirs[1]);
  }
  if (mine[0] != mine[1]) ThrowMismatched(signature, request);
}

void P2pTransport::ThrowMismatched(uint64_t signature, const Request& request) {
  // Every member gets the same minimum and maximum, so every member reaches this line.
  struct Call {
    uint64_t signature;
    char text[kTextBytes];
  };
  const int n = static_cast<int>(members_.size());
  std::vector<Call> calls(n);
  calls[me_].signature = signature;
  std::snprintf(calls[me_].text, kTextBytes, "%s", request.Describe().c_str());
  for (int step = 1; step < n; ++step) {
    const int to = (me_ + step) % n, from = (me_ - step + n) % n;
    SendReceive(to, &calls[me_], from, &calls[from], sizeof(Call), request);
  }
  std::vector<std::string> texts;
  std::vector<uint64_t> signatures;
  for (const Call& call : calls) {
    signatures.push_back(call.signature);
    texts.push_back(call.text);
  }
  ThrowIfJoined(members_, signatures);
  ThrowMismatch(members_, texts);
}

void P2pTransport::Exchange(int to, const char* data, size_t send_bytes, int from,
                            size_t receive_bytes, const Request& request,
                            const Consume& consume) {
  if (buffers_.empty()) buffers_.resize(kInFlight * kPiece);
  std::deque<void*> sends, receives;
  size_t sent = 0, requested = 0, received = 0;
  while (received < receive_bytes || sent < send_bytes || !sends.empty()) {
    while (requested < receive_bytes && receives.size() < kInFlight) {
      const size_t bytes = std::min(kPiece, receive_bytes - requested);
      char* buffer = &buffers_[requested / kPiece % kInFlight * kPiece];
      receives.push_back(network_.Receive(members_[from], tag_, buffer, bytes));
      requested += bytes;
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
      consume(&buffers_[received / kPiece % kInFlight * kPiece], received, bytes);
      received += bytes;
      while (!sends.empty() && Test(sends.front(), to)) {
        sends.pop_front();
      }
    } else if (!sends.empty()) {
      Await(sends.front(), to, request);
      sends.pop_front();
    }
  }
}

void P2pTransport::Exchange(int to, const char* data, size_t send_bytes, int from,
                            char* target, size_t receive_bytes,
                            const Request& request) {
  Exchange(to, data, send_bytes, from, receive_bytes, request,
           [target](const char* piece, size_t offset, size_t bytes) {
             CopyBytes(target + offset, piece, bytes);
           });
}

void P2pTransport::Announce(const Announcement& announcement) {
  int bit = 1;
  while (bit < static_cast<int>(members_.size())) bit *= 2;
  PassOn(announcement, bit);
}

Announcement P2pTransport::Announced(const Request& request) {
  const int bit = me_ & -me_;  // the lowest bit, which the parent's number lacks
  Announcement announcement;
  const int parent = me_ - bit;
  Await(
      network_.Receive(members_[parent], tag_ + 1, &announcement, sizeof(announcement)),
      parent, request);
  PassOn(announcement, bit);
  return announcement;
}

void P2pTransport::PassOn(const Announcement& announcement, int bit) {
  Transfers sends;
  while (bit /= 2) {
    const int child = me_ + bit;
    if (child >= static_cast<int>(members_.size())) continue;
    sends.push_back(
        {network_.Send(members_[child], tag_ + 1, &announcement, sizeof(announcement)),
         child});
  }
  AwaitAll(&sends, Request());
}

}  // namespace collective
