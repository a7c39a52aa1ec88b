// Timed loops and the limits of the machine, for collective.bench. They are in C,
// because a call through Python takes longer than a small all-reduce.
#include <algorithm>
#include <vector>

#include "clock.h"
#include "session.h"

namespace collective {
namespace {

Request NamedBarrier(const char* name) {
  Request request;
  request.name = name;
  return request;
}

// Measures the seconds of each repetition of `inner` calls, with a barrier before each.
template <class Call>
void TimeEach(Queue& queue, int repetitions, int inner, double* seconds, Call&& call) {
  const Request barrier = NamedBarrier("bench");
  for (int i = 0; i < repetitions; ++i) {
    queue.Run(barrier);
    const int64_t start = Now();
    for (int j = 0; j < inner; ++j) call();
    seconds[i] = SecondsSince(start) / inner;
  }
}

}  // namespace
}  // namespace collective

using namespace collective;

extern "C" {

int32_t collective_time(const collective_request* request, int32_t repetitions,
                        int32_t inner, double* seconds) {
  return Guard([&] {
    const auto core = CurrentCore();
    Request converted;
    Convert(*request, &converted);
    Queue& queue = core->queue(request->group, Order::kProgramOrder);
    TimeEach(queue, repetitions, inner, seconds, [&] { queue.Run(converted); });
  });
}

int32_t collective_time_mpi(void* allreduce, const void* input, void* output,
                            int32_t count, void* datatype, void* op, void* communicator,
                            int32_t repetitions, int32_t inner, double* seconds) {
  // Handles are pointers (Open MPI) or ints (MPICH). Either travels in a whole
  // register here, and the callee reads its part of it.
  using Allreduce = int (*)(const void*, void*, int, void*, void*, void*);
  const auto call = reinterpret_cast<Allreduce>(allreduce);
  return Guard([&] {
    const auto core = CurrentCore();
    TimeEach(core->queue(0, Order::kProgramOrder), repetitions, inner, seconds,
             [&] { call(input, output, count, datatype, op, communicator); });
  });
}

int32_t collective_probe(double* nanoseconds) {
  return Guard([&] {
    const auto core = CurrentCore();
    const Request barrier = NamedBarrier("probe");
    Queue& queue = core->queue(0, Order::kProgramOrder);
    queue.Run(barrier);
    *nanoseconds = 0;
    if (core->job().size() < 2) return;
    core->job().PingPong(nanoseconds);
    queue.Run(barrier);
  });
}

int32_t collective_bandwidth(int32_t kernel, int64_t bytes, double* rate) {
  const size_t count = static_cast<size_t>(bytes) / sizeof(float);
  std::vector<float> a(count + 16, 1.0f), b(count + 16, 2.0f),
      c(kernel == 2 ? count + 16 : 0, 0.0f);
  const auto aligned = [](std::vector<float>& array) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(array.data()) + 63) /
                                    64 * 64);
  };
  float *x = aligned(a), *y = aligned(b);
  const void* sources[2] = {x, y};
  void* const out = kernel == 2 ? aligned(c) : x;
  void* const slot = kernel == 0 ? y : nullptr;
  const ReduceJob job = {sources, 2, 0, out, count, 1, slot};
  const Kernels& kernels = BestKernels();
  std::vector<char> line(bytes > (1 << 18) ? 1 << 18 : bytes, 1);
  const auto once = [&] {
    if (kernel == 1) {
      for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(line.size())) {
        kernels.copy(reinterpret_cast<char*>(x) + at, line.data(),
                     std::min<int64_t>(line.size(), bytes - at), true);
      }
    } else {
      kernels.reduce[0][0](job);
    }
  };
  once();
  // The average over a time in which all ranks are at work, except at its ends: the
  // best single pass would show one core while the others rest.
  constexpr int64_t kStart = 10 * kMillisecond, kEnd = 50 * kMillisecond;
  const int64_t traffic = kernel == 0 ? 4 * bytes : bytes;
  const int64_t begin = Now();
  int64_t from = 0, now = begin;
  int64_t passes = 0;
  while (now < begin + kEnd || passes == 0) {  // at least one on busy cores
    once();
    now = Now();
    if (from == 0 && now > begin + kStart) {
      from = now;
    } else if (from != 0) {
      ++passes;
    }
  }
  *rate = static_cast<double>(traffic * passes) * 1e9 / static_cast<double>(now - from);
  return 0;
}

}  // extern "C"
