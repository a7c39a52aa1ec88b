#include "algorithms/p2p_collectives.h"

#include <cstring>
#include <numeric>
#include <vector>

namespace collective {
namespace {

size_t BytesOf(const Tensor& tensor) {
  return static_cast<size_t>(tensor.count) * SizeOf(tensor.dtype);
}

// Sends to one member and receives from another what goes to `target`.
void Transfer(Communicator& ranks, int to, const char* data, size_t send_bytes,
              int from, char* target, size_t receive_bytes,
              const Request& request) {
  ranks.Exchange(to, data, send_bytes, from, receive_bytes, request,
                 [&](const char* piece, size_t offset, size_t bytes) {
                   std::memcpy(target + offset, piece, bytes);
                 });
}

}  // namespace

// Down a binomial tree: log2 n steps.
void BroadcastByMessages(Communicator& ranks, const Request& request) {
  if (request.root < 0 || request.root >= ranks.size()) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": there is no such root",
                  "choose one from 0 to " + std::to_string(ranks.size() - 1));
  }
  ranks.Post(request);
  ranks.Agree(request);
  const int n = ranks.size();
  const int me = (ranks.me() - request.root + n) % n;  // as if the root were 0
  const auto real = [&](int member) { return (member + request.root) % n; };
  for (const Tensor& tensor : request.tensors) {
    const size_t bytes = BytesOf(tensor);
    char* output = static_cast<char*>(tensor.output);
    if (me == 0 && bytes && tensor.input != tensor.output) {
      std::memcpy(output, tensor.input, bytes);
    }
    int mask = 1;
    while (mask < n && !(me & mask)) mask *= 2;
    if (me != 0) {
      Transfer(ranks, real(me - mask), nullptr, 0, real(me - mask), output,
               bytes, request);
    }
    for (mask /= 2; mask > 0; mask /= 2) {
      if (me + mask < n) {
        Transfer(ranks, real(me + mask), output, bytes, real(me + mask),
                 nullptr, 0, request);
      }
    }
  }
}

// Around a ring: n-1 steps, each rank passing on what came last.
void AllGatherByMessages(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.Agree(request);
  const Tensor& tensor = request.tensors[0];
  const int n = ranks.size(), me = ranks.me();
  std::vector<size_t> starts(n + 1, 0);
  for (int i = 0; i < n; ++i) {
    starts[i + 1] = starts[i] + static_cast<size_t>(request.counts[i]) *
                                    SizeOf(tensor.dtype);
  }
  char* output = static_cast<char*>(tensor.output);
  if (BytesOf(tensor) && output + starts[me] != tensor.input) {
    std::memcpy(output + starts[me], tensor.input, BytesOf(tensor));
  }
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me - step + n) % n, in = (me - step - 1 + n) % n;
    Transfer(ranks, (me + 1) % n, output + starts[out],
             starts[out + 1] - starts[out], (me + n - 1) % n,
             output + starts[in], starts[in + 1] - starts[in], request);
  }
}

// Everyone's part straight to everyone; summed in the order of the ranks.
void ReduceScatterByMessages(Communicator& ranks, const Request& request) {
  const ReduceKernel kernel =
      ranks.kernels().reduce[static_cast<int>(request.tensors[0].dtype)]
                            [static_cast<int>(request.op)];
  if (!kernel) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": bool has no average",
                  "reduce with Sum (or), Min (and), or cast to float32");
  }
  ranks.Post(request);
  ranks.Agree(request);
  const Tensor& tensor = request.tensors[0];
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  std::vector<size_t> starts(n + 1, 0);
  for (int i = 0; i < n; ++i) {
    starts[i + 1] = starts[i] + static_cast<size_t>(request.counts[i]) * size;
  }
  const char* input = static_cast<const char*>(tensor.input);
  const size_t mine = starts[me + 1] - starts[me];
  std::vector<char> parts(mine * n);
  std::vector<const void*> sources(n);
  for (int i = 0; i < n; ++i) sources[i] = parts.data() + mine * i;
  sources[me] = input + starts[me];
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me - step + n) % n;
    Transfer(ranks, to, input + starts[to], starts[to + 1] - starts[to], from,
             parts.data() + mine * from, mine, request);
  }
  ReduceJob job = {};
  job.sources = sources.data();
  job.nsources = n;
  job.own = me;
  job.out = tensor.output;
  job.count = mine / size;
  job.divisor = request.op == Op::kAverage ? n : 1;
  kernel(job);
}

// n-1 steps, at each to one partner and from another.
void AllToAllByMessages(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.Agree(request);
  const Tensor& tensor = request.tensors[0];
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  std::vector<size_t> sends(n + 1, 0), receives(n + 1, 0);
  for (int i = 0; i < n; ++i) {
    sends[i + 1] =
        sends[i] + static_cast<size_t>(request.counts[me * n + i]) * size;
    receives[i + 1] =
        receives[i] + static_cast<size_t>(request.counts[i * n + me]) * size;
  }
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  if (const size_t mine = sends[me + 1] - sends[me]) {
    std::memcpy(output + receives[me], input + sends[me], mine);
  }
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me - step + n) % n;
    Transfer(ranks, to, input + sends[to], sends[to + 1] - sends[to], from,
             output + receives[from], receives[from + 1] - receives[from],
             request);
  }
}

}  // namespace collective
