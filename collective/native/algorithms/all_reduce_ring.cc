// All-reduce around a ring: n-1 steps that sum, n-1 steps that pass the sums
// on.
//
// Each rank sends and receives 2(n-1)/n of the message, which is the least
// possible [Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009].
#include "transport/flat_buffer.h"

namespace collective {

void AllReduceRing(Communicator& ranks, const Reduction& reduction) {
  Flat flat(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  const int right = (me + 1) % n, left = (me + n - 1) % n;
  const auto begin = [&](int block) {
    return ShareBegin(flat.count(), block, n, Span::kAlign);
  };
  // Block b is summed on its way from rank b to rank b-1, which ends with it.
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me - step + n) % n, in = (me - step - 1 + 2 * n) % n;
    flat.Reduce(right, begin(out), begin(out + 1), left, begin(in),
                begin(in + 1));
  }
  flat.Scale(begin(right), begin(right + 1));
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me + 1 - step + n) % n, in = (me - step + n) % n;
    flat.Replace(right, begin(out), begin(out + 1), left, begin(in),
                 begin(in + 1));
  }
  flat.Finish();
}

}  // namespace collective
