// All-reduce up and down a binomial tree: a reduce to rank 0, then a broadcast.
//
// Steps: 2 ceil(log2 n). Bytes: the whole message in each step, so this is for
// small messages [Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput.
// Appl. 19(1), 2005].
#include "algorithms/flat_buffer.h"

namespace collective {

void AllReduceTree(Communicator& ranks, const Reduction& reduction) {
  FlatBuffer buffer(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  const size_t all = buffer.count();
  int mask = 1;
  for (; mask < n; mask *= 2) {
    if (me & mask) {
      buffer.Reduce(me - mask, 0, all, me - mask, 0, 0);
      break;
    }
    if (me + mask < n) buffer.Reduce(me + mask, 0, 0, me + mask, 0, all);
  }
  if (me == 0) {
    buffer.Scale(0, all);
  } else {
    buffer.Replace(me - mask, 0, 0, me - mask, 0, all);
  }
  for (mask /= 2; mask > 0; mask /= 2) {
    if (me + mask < n) buffer.Replace(me + mask, 0, all, me + mask, 0, 0);
  }
  buffer.Finish();
}

}  // namespace collective
