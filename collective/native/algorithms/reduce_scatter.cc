// Each slot is divided among the ranks: a rank writes to each its next piece,
// and sums what the others wrote for it, in the order of the ranks.
#include "algorithms/reduce_scatter.h"

#include <algorithm>
#include <cstring>

namespace collective {

void ReduceScatter(Communicator& ranks, const Request& request) {
  const Tensor& tensor = request.tensors.at(0);
  const int n = ranks.size(), me = ranks.me();
  const size_t size = SizeOf(tensor.dtype);
  std::vector<size_t> starts(n + 1, 0);
  for (size_t i = 0; i < request.counts.size() && i < starts.size() - 1; ++i) {
    starts[i + 1] = starts[i] + static_cast<size_t>(request.counts[i]);
  }
  if (request.counts.size() != static_cast<size_t>(n) ||
      starts[n] != static_cast<size_t>(tensor.count)) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": wrong list of counts",
                  "give every rank's part; they add up to the tensor");
  }
  const ReduceKernel kernel =
      ranks.kernels()
          .reduce[static_cast<int>(tensor.dtype)][static_cast<int>(request.op)];
  if (!kernel) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": bool has no average",
                  "reduce with Sum (or), Min (and), or cast to float32");
  }
  const char* input = static_cast<const char*>(tensor.input);
  char* output = static_cast<char*>(tensor.output);
  const void* sources[128];
  ReduceJob job = {};
  job.sources = sources;
  job.nsources = n;
  job.own = me;
  job.divisor = request.op == Op::kAverage ? n : 1;

  const size_t bytes = starts[n] * size;
  if (bytes <= Communicator::kPostBytes) {
    if (bytes) std::memcpy(ranks.PostData(), input, bytes);
    ranks.Post(request);
    ranks.Agree(request);
    for (int member = 0; member < n; ++member) {
      sources[member] = ranks.PostedBy(member) + starts[me] * size;
    }
    job.out = output;
    job.count = starts[me + 1] - starts[me];
    return kernel(job);
  }

  ranks.Post(request);
  const size_t room = Communicator::kChunkBytes / n / 128 * 128;  // bytes
  const size_t step = room / size;
  const size_t most = static_cast<size_t>(
      *std::max_element(request.counts.begin(), request.counts.end()));
  const uint32_t chunks = static_cast<uint32_t>((most + step - 1) / step);
  const uint32_t first = ranks.first_chunk();
  const auto length = [&](int member, size_t begin) {
    const size_t count = starts[member + 1] - starts[member];
    return begin < count ? std::min(step, count - begin) : 0;
  };
  const auto slot = [&](uint32_t chunk, int from, int to, size_t count) {
    return ranks.Slot(chunk, from) + to * room +
           Communicator::PlaceOf(chunk, count * size, room);
  };
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * step;
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, most * size * n,
                  std::min(step, most - begin) * size * n, me == 0);
      SlotStores::Work work(stores);
      for (int i = 1; i < n; ++i) {
        const int member = (me + i) % n;
        const size_t count = length(member, begin);
        ranks.kernels().copy(slot(chunk, me, member, count),
                             input + (starts[member] + begin) * size,
                             count * size, stores.stream());
      }
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == 0) continue;
    if (turn == 1) ranks.Agree(request);
    const uint32_t chunk = first + turn - 1;
    const size_t begin = (turn - 1) * step;
    ranks.AwaitAll(Communicator::kFilled, chunk, request);
    job.count = length(me, begin);
    for (int member = 0; member < n; ++member) {
      sources[member] = slot(chunk, member, me, job.count);
    }
    sources[me] = input + (starts[me] + begin) * size;
    job.out = output + begin * size;
    {
      SlotStores::Work work(stores);
      kernel(job);
    }
    ranks.Pass(Communicator::kRead, chunk);
  }
  ranks.Finish(chunks);
}

}  // namespace collective
