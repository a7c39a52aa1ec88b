// The collectives by messages, for ranks on several hosts.
#include <vector>

#include "algorithms/arguments.h"
#include "algorithms/collectives.h"

namespace collective {
namespace {

// Sends to one member while receiving from another into `target`.
void Transfer(Communicator& ranks, int to, const char* data, size_t send_bytes,
              int from, char* target, size_t receive_bytes,
              const Request& request) {
  ranks.Exchange(to, data, send_bytes, from, receive_bytes, request,
                 [&](const char* piece, size_t offset, size_t bytes) {
                   CopyBytes(target + offset, piece, bytes);
                 });
}

}  // namespace

void P2pBroadcast(Communicator& ranks, const Request& request) {
  CheckRoot(ranks, request);
  ranks.Post(request);
  ranks.VerifyMatch(request);
  const int n = ranks.size();
  const int me = (ranks.me() - request.root + n) % n;  // relative to the root
  const auto absolute = [&](int member) { return (member + request.root) % n; };
  for (const Tensor& tensor : request.tensors) {
    const size_t bytes = BytesOf(tensor);
    char* output = static_cast<char*>(tensor.output);
    if (me == 0 && bytes && tensor.input != tensor.output) {
      CopyBytes(output, tensor.input, bytes);
    }
    int mask = 1;
    while (mask < n && !(me & mask)) mask *= 2;
    if (me != 0) {
      Transfer(ranks, absolute(me - mask), nullptr, 0, absolute(me - mask),
               output, bytes, request);
    }
    for (mask /= 2; mask > 0; mask /= 2) {
      if (me + mask < n) {
        Transfer(ranks, absolute(me + mask), output, bytes, absolute(me + mask),
                 nullptr, 0, request);
      }
    }
  }
}

void P2pAllGather(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.VerifyMatch(request);
  const Tensor& tensor = request.tensors[0];
  const int n = ranks.size(), me = ranks.me();
  const std::vector<size_t> starts =
      OffsetsOf(request.counts, SizeOf(tensor.dtype));
  char* output = static_cast<char*>(tensor.output);
  if (BytesOf(tensor) && output + starts[me] != tensor.input) {
    CopyBytes(output + starts[me], tensor.input, BytesOf(tensor));
  }
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me - step + n) % n, in = (me - step - 1 + n) % n;
    Transfer(ranks, (me + 1) % n, output + starts[out],
             starts[out + 1] - starts[out], (me + n - 1) % n,
             output + starts[in], starts[in + 1] - starts[in], request);
  }
}

void P2pReduceScatter(Communicator& ranks, const Request& request) {
  const ReduceKernel kernel =
      KernelOf(ranks, request, request.tensors[0].dtype);
  ranks.Post(request);
  ranks.VerifyMatch(request);
  const Tensor& tensor = request.tensors[0];
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  const std::vector<size_t> starts = OffsetsOf(request.counts, size);
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

void P2pAllToAll(Communicator& ranks, const Request& request) {
  ranks.Post(request);
  ranks.VerifyMatch(request);
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
    CopyBytes(output + receives[me], input + sends[me], mine);
  }
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me - step + n) % n;
    Transfer(ranks, to, input + sends[to], sends[to + 1] - sends[to], from,
             output + receives[from], receives[from + 1] - receives[from],
             request);
  }
}

}  // namespace collective
