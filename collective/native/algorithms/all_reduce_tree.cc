// All-reduce up and down a binomial tree: log2 n steps each way, each with the
// whole message. Few steps, many bytes: for small messages.
#include "transport/flat_buffer.h"

namespace collective {

void AllReduceTree(Communicator& ranks, const Reduction& reduction) {
  Flat flat(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  const size_t all = flat.count();
  int mask = 1;
  for (; mask < n; mask *= 2) {
    if (me & mask) {
      flat.Reduce(me - mask, 0, all, me - mask, 0, 0);
      break;
    }
    if (me + mask < n) flat.Reduce(me + mask, 0, 0, me + mask, 0, all);
  }
  if (me == 0) {
    flat.Scale(0, all);
  } else {
    flat.Replace(me - mask, 0, 0, me - mask, 0, all);
  }
  for (mask /= 2; mask > 0; mask /= 2) {
    if (me + mask < n) flat.Replace(me + mask, 0, all, me + mask, 0, 0);
  }
  flat.Finish();
}

}  // namespace collective
