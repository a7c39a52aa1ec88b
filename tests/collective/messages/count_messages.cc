// Runs the core's algorithms on many ranks, as threads of this process, and counts what
// each rank sends: count_messages HOSTS SLOTS BYTES ALGORITHM. Prints, of the rank with
// the most: its messages and bytes to other hosts in one all-reduce, its messages in a
// barrier and in an announcement; and whether all ranks have the same, right sum.
//
// The network is memory: a message is in the receiver's mailbox when it is sent. All
// else is the core as it is: jobs, rendezvous and shared memory of each host among it.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "algorithms/collectives.h"
#include "network/network.h"

namespace collective {
namespace {

struct Transfer {
  char* target = nullptr;
  bool done = true;
};

class Mailbox {
 public:
  void Put(int from, int tag, const void* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    Line& line = lines_[{from, tag}];
    const auto* begin = static_cast<const char*>(data);
    if (line.wanted.empty()) {
      line.arrived.emplace_back(begin, begin + bytes);
      return;
    }
    std::memcpy(line.wanted.front()->target, data, bytes);
    line.wanted.front()->done = true;
    line.wanted.pop_front();
    changed_.notify_one();
  }
  Transfer* Get(int from, int tag, void* target) {
    std::lock_guard<std::mutex> lock(mutex_);
    Line& line = lines_[{from, tag}];
    auto* transfer = new Transfer{static_cast<char*>(target), false};
    if (line.arrived.empty()) {
      line.wanted.push_back(transfer);
    } else {
      std::memcpy(target, line.arrived.front().data(), line.arrived.front().size());
      line.arrived.pop_front();
      transfer->done = true;
    }
    return transfer;
  }
  // Waits a while: thousands of threads that poll would not leave time for work.
  bool Test(Transfer* transfer) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(5), [&] { return transfer->done; });
    return transfer->done;
  }

 private:
  struct Line {
    std::deque<std::vector<char>> arrived;
    std::deque<Transfer*> wanted;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, Line> lines_;
};

struct Count {
  long messages = 0, bytes = 0;
};

// The state that the threads share.
struct World {
  World(int hosts, int slots) : slots(slots), mailboxes(hosts * slots) {}
  int size() const { return static_cast<int>(mailboxes.size()); }
  const int slots;
  std::vector<Mailbox> mailboxes;
  std::mutex mutex;
  std::condition_variable all_here;
  int here = 0, turn = 0;
  // Returns when all ranks have called it; of all that are there, to all.
  std::vector<int> Meet(int rank, int value) {
    std::unique_lock<std::mutex> lock(mutex);
    values.resize(size());
    values[rank] = value;
    const int mine = turn;
    if (++here == size()) {
      here = 0;
      ++turn;
      met = values;
      all_here.notify_all();
    }
    all_here.wait(lock, [&] { return turn != mine; });
    return met;
  }
  std::vector<int> values, met;
};

class CountingNetwork final : public Network {
 public:
  CountingNetwork(World* world, int rank) : world_(world) {
    rank_ = rank;
    size_ = world->size();
  }
  std::vector<int> Gather(int mine) override { return world_->Meet(rank_, mine); }
  void* Send(int rank, int tag, const void* data, size_t bytes) override {
    if (tag < kControlTag) world_->mailboxes[rank].Put(rank_, tag, data, bytes);
    ++all.messages;
    if (rank / world_->slots != rank_ / world_->slots) {
      ++away.messages;
      away.bytes += static_cast<long>(bytes);
    }
    return new Transfer;
  }
  void* Receive(int rank, int tag, void* data, size_t) override {
    return world_->mailboxes[rank_].Get(rank, tag, data);
  }
  int Test(void* transfer) override {
    auto* const one = static_cast<Transfer*>(transfer);
    if (!one->done && !world_->mailboxes[rank_].Test(one)) return 0;
    delete one;
    return 1;
  }
  // No rank fails, and nothing is in flight.
  std::string Error() override { return ""; }
  void Progress() override {}
  bool ReceiveControl(ControlMessage*) override { return false; }
  void SkipFinalize() override {}
  std::vector<int> FailedRanks() override { return {}; }
  bool Revoked() override { return false; }
  void Revoke() override {}
  bool Agree(bool, double) override { return false; }
  std::unique_ptr<Network> Reconfigure(bool, double) override { return nullptr; }
  void Depart(double) override {}

  Count all, away;  // messages to any rank; to ranks of other hosts

 private:
  World* const world_;
};

struct Outcome {
  Count reduced;
  long verified, announced;
  bool right;
};

// Sums other values on each rank, in so many tensors. Whether the sums are right.
bool Reduce(Communicator& ranks, Request* request, std::vector<float>* data,
            int tensors) {
  const auto n = static_cast<size_t>(ranks.size());
  for (size_t i = 0; i < data->size(); ++i) {
    (*data)[i] = static_cast<float>(ranks.me() + i % 7);
  }
  request->tensors.resize(tensors);
  size_t begin = 0;
  for (int i = 0; i < tensors; ++i) {
    const size_t end = i + 1 < tensors ? data->size() * (i + 1) / 5 : data->size();
    Tensor& tensor = request->tensors[i];
    tensor.input = tensor.output = data->data() + begin;
    tensor.count = static_cast<int64_t>(end - begin);
    begin = end;
  }
  Execute(ranks, *request);
  for (size_t i = 0; i < data->size(); ++i) {
    if ((*data)[i] != static_cast<float>(n * (n - 1) / 2 + n * (i % 7))) return false;
  }
  return true;
}

Outcome RunRank(World* world, int rank, size_t bytes, Algorithm algorithm) {
  RankInfo info;
  info.rank = rank;
  info.size = world->size();
  info.local_size = world->slots;
  info.local_rank = rank % world->slots;
  info.job =
      "count " + std::to_string(getpid()) + " " + std::to_string(rank / world->slots);
  CountingNetwork* network = nullptr;
  Job job(info, Settings(), 0, [&](const RankInfo&, double) {
    auto made = std::make_unique<CountingNetwork>(world, rank);
    network = made.get();
    return made;
  });
  std::vector<int> members(world->size());
  for (int i = 0; i < world->size(); ++i) members[i] = i;
  Communicator ranks(&job, members, 0);

  Request barrier;
  Execute(ranks, barrier);
  const long verified = network->all.messages;

  // One tensor, which is summed in place; then several, which go through slots.
  std::vector<float> data(bytes / sizeof(float));
  Request request;
  request.kind = Kind::kAllReduce;
  request.algorithm = algorithm;
  const Count before = network->away;
  const bool right = Reduce(ranks, &request, &data, 1);
  Outcome outcome = {network->away, verified, 0, true};
  outcome.reduced.messages -= before.messages;
  outcome.reduced.bytes -= before.bytes;
  outcome.right = Reduce(ranks, &request, &data, 3) && right;

  const long until = network->all.messages;
  Announcement next = {};
  if (rank == 0) next.name = 17;
  if (rank == 0) {
    ranks.Announce(1, next);
  } else {
    outcome.right = outcome.right && ranks.Announced(1, request).name == 17;
  }
  outcome.announced = network->all.messages - until;
  world->Meet(rank, 0);
  job.Retire();
  return outcome;
}

int Main(int hosts, int slots, size_t bytes, const char* name) {
  Algorithm algorithm = Algorithm::kAuto;
  for (int i = 0; i <= static_cast<int>(Algorithm::kHierarchical); ++i) {
    const auto one = static_cast<Algorithm>(i);
    if (std::strcmp(NameOf(one), name) == 0) algorithm = one;
  }
  World world(hosts, slots);
  std::vector<Outcome> outcomes(world.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { outcomes[rank] = RunRank(&world, rank, bytes, algorithm); });
  }
  for (std::thread& thread : threads) thread.join();
  Outcome most = outcomes[0];
  for (const Outcome& one : outcomes) {
    most.reduced.messages = std::max(most.reduced.messages, one.reduced.messages);
    most.reduced.bytes = std::max(most.reduced.bytes, one.reduced.bytes);
    most.verified = std::max(most.verified, one.verified);
    most.announced = std::max(most.announced, one.announced);
    most.right = most.right && one.right;
  }
  std::printf("%ld %ld %ld %ld %s\n", most.reduced.messages, most.reduced.bytes,
              most.verified, most.announced, most.right ? "right" : "wrong");
  return 0;
}

}  // namespace
}  // namespace collective

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  return collective::Main(std::atoi(argv[1]), std::atoi(argv[2]),
                          static_cast<size_t>(std::atol(argv[3])), argv[4]);
}
