// All-reduce around a ring: a reduce-scatter, then an all-gather of the sums.
//
// Steps: 2(n-1). Bytes: each rank sends and receives 2(n-1)/n of the message,
// which is the least possible [Patarasuk and Yuan, J. Parallel Distrib. Comput.
// 69(2), 2009].
#include "algorithms/flat_buffer.h"

namespace collective {

void AllReduceRing(Communicator& ranks, const Reduction& reduction) {
  FlatBuffer buffer(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  const int right = (me + 1) % n, left = (me + n - 1) % n;
  const auto begin = [&](int block) {
    return ShareBegin(buffer.count(), block, n, TensorList::kAlign);
  };
  // Block b travels from rank b around to rank b-1 and is summed on its way.
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me - step + n) % n, in = (me - step - 1 + 2 * n) % n;
    buffer.Reduce(right, begin(out), begin(out + 1), left, begin(in), begin(in + 1));
  }
  buffer.Scale(begin(right), begin(right + 1));
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me + 1 - step + n) % n, in = (me - step + n) % n;
    buffer.Replace(right, begin(out), begin(out + 1), left, begin(in), begin(in + 1));
  }
  buffer.Finish();
}

}  // namespace collective
