#include "simulation/record.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>

#include "algorithms/collectives.h"
#include "network/undisturbed.h"

namespace collective {
namespace {

class RecordingNetwork final : public UndisturbedNetwork {
 public:
  RecordingNetwork(const Layout& layout, int rank) : layout_(layout) {
    rank_ = rank;
    size_ = layout.size();
  }
  void StartProgram(Program* program) { program_ = program; }

  std::vector<int> Gather(int) override {
    std::vector<int> first(size_);
    for (int i = 0; i < size_; ++i) first[i] = i / layout_.slots * layout_.slots;
    return first;
  }
  void* Send(int rank, int tag, const void* data, size_t bytes) override {
    if (bytes <= kEchoBytes) {
      const auto* begin = static_cast<const char*>(data);
      sent_[tag].assign(begin, begin + bytes);
    }
    if (program_) {
      program_->operations.push_back(
          {Operation::kSend, rank, static_cast<int64_t>(bytes)});
    }
    return new Transfer;
  }
  void* Receive(int rank, int tag, void* data, size_t bytes) override {
    auto* transfer = new Transfer{static_cast<char*>(data), bytes, tag};
    if (program_) {
      transfer->number = static_cast<int64_t>(program_->receives.size());
      program_->receives.push_back({rank, static_cast<int64_t>(bytes)});
    }
    return transfer;
  }
  // Every rank makes the same call, so what arrives where calls are compared is what
  // this rank has sent.
  int Test(void* handle) override {
    const std::unique_ptr<Transfer> transfer(static_cast<Transfer*>(handle));
    const std::vector<char>& echo = sent_[transfer->tag];
    if (transfer->target && transfer->bytes == echo.size()) {
      std::memcpy(transfer->target, echo.data(), echo.size());
    }
    if (program_ && transfer->number >= 0) {
      program_->operations.push_back({Operation::kAwait, 0, transfer->number});
    }
    return 1;
  }

 private:
  static constexpr size_t kEchoBytes = 64;
  struct Transfer {
    char* target = nullptr;
    size_t bytes = 0;
    int tag = 0;
    int64_t number = -1;
  };
  const Layout layout_;
  Program* program_ = nullptr;
  std::map<int, std::vector<char>> sent_;  // by tag: the last
};

// The programs of one rank, by size.
std::vector<Program> RecordRank(const Layout& layout, int rank, const std::string& job,
                                const std::vector<int64_t>& bytes,
                                Algorithm algorithm) {
  RankInfo info;
  info.rank = rank;
  info.size = layout.size();
  info.local_rank = rank % layout.slots;
  info.local_size = layout.slots;
  info.job = job;
  RecordingNetwork* network = nullptr;
  Job made(info, Settings(), 0, [&](const RankInfo&, double) {
    auto one = std::make_unique<RecordingNetwork>(layout, rank);
    network = one.get();
    return one;
  });
  std::vector<int> members(layout.size());
  std::iota(members.begin(), members.end(), 0);
  Communicator ranks(&made, members, 0);
  std::vector<float> data(*std::max_element(bytes.begin(), bytes.end()) /
                          sizeof(float));
  std::vector<Program> programs(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    Request request;
    request.kind = Kind::kAllReduce;
    request.algorithm = algorithm;
    request.tensors.resize(1);
    request.tensors[0].input = request.tensors[0].output = data.data();
    request.tensors[0].count = bytes[i] / static_cast<int64_t>(sizeof(float));
    network->StartProgram(&programs[i]);
    Execute(ranks, request);
    network->StartProgram(nullptr);
  }
  made.Retire();
  return programs;
}

}  // namespace

std::vector<std::vector<Program>> RecordHost(const Layout& layout, int host,
                                             const std::vector<int64_t>& bytes,
                                             Algorithm algorithm) {
  static std::atomic<int> jobs{0};
  const std::string job = "simulation " + std::to_string(getpid()) + " " +
                          std::to_string(jobs.fetch_add(1));
  std::vector<std::vector<Program>> by_slot(layout.slots);
  std::vector<std::exception_ptr> failures(layout.slots);
  std::vector<std::thread> threads;
  for (int slot = 0; slot < layout.slots; ++slot) {
    threads.emplace_back([&, slot] {
      try {
        by_slot[slot] =
            RecordRank(layout, host * layout.slots + slot, job, bytes, algorithm);
      } catch (...) {
        failures[slot] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  std::vector<std::vector<Program>> programs(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (auto& one : by_slot) programs[i].push_back(std::move(one[i]));
  }
  return programs;
}

}  // namespace collective
