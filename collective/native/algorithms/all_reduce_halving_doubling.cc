// All-reduce by recursive halving (reduce-scatter) and doubling (all-gather).
//
// Steps: 2 log2 n, and bytes: each rank sends 2(n-1)/n of the message, if n is
// a power of two [Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput.
// Appl. 19(1), 2005]. Otherwise each rank beyond the last power of two sends
// its data to a partner first and receives the result at the end: two more
// steps, each with the whole message.
#include <utility>
#include <vector>

#include "algorithms/flat_buffer.h"

namespace collective {

void AllReduceHalvingDoubling(Communicator& ranks, const Reduction& reduction) {
  FlatBuffer buffer(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  int power = 1;
  while (power * 2 <= n) power *= 2;
  const size_t all = buffer.count();
  if (me >= power) {
    const int partner = me - power;
    buffer.Reduce(partner, 0, all, partner, 0, 0);
    buffer.Replace(partner, 0, 0, partner, 0, all);
    return buffer.Finish();
  }
  const int extra = me + power;
  if (extra < n) buffer.Reduce(extra, 0, 0, extra, 0, all);

  size_t begin = 0, end = all;
  std::vector<std::pair<size_t, size_t>> sent;  // by step
  for (int mask = power / 2; mask > 0; mask /= 2) {
    const int partner = me ^ mask;
    const size_t middle = begin + ShareBegin(end - begin, 1, 2, TensorList::kAlign);
    if (me & mask) {
      sent.emplace_back(begin, middle);
      buffer.Reduce(partner, begin, middle, partner, middle, end);
      begin = middle;
    } else {
      sent.emplace_back(middle, end);
      buffer.Reduce(partner, middle, end, partner, begin, middle);
      end = middle;
    }
  }
  buffer.Scale(begin, end);
  for (int mask = 1; mask < power; mask *= 2) {
    const int partner = me ^ mask;
    const auto [from, to] = sent.back();
    sent.pop_back();
    buffer.Replace(partner, begin, end, partner, from, to);
    begin = std::min(begin, from);
    end = std::max(end, to);
  }

  if (extra < n) buffer.Replace(extra, 0, all, extra, 0, 0);
  buffer.Finish();
}

}  // namespace collective
