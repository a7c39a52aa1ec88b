// All-reduce by recursive halving and doubling.
//
// 2 log2 n steps and 2(n-1)/n of the message sent by each rank, where n is a
// power of two [Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput.
// Appl. 19(1), 2005]. Otherwise the ranks beyond the last power of two hand
// their data to a partner first and receive the result at the end.
#include <utility>
#include <vector>

#include "transport/flat_buffer.h"

namespace collective {

void AllReduceHalvingDoubling(Communicator& ranks, const Reduction& reduction) {
  Flat flat(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  int power = 1;
  while (power * 2 <= n) power *= 2;
  const size_t all = flat.count();
  if (me >= power) {
    const int partner = me - power;
    flat.Reduce(partner, 0, all, partner, 0, 0);
    flat.Replace(partner, 0, 0, partner, 0, all);
    return flat.Finish();
  }
  const int extra = me + power;
  if (extra < n) flat.Reduce(extra, 0, 0, extra, 0, all);

  size_t begin = 0, end = all;
  std::vector<std::pair<size_t, size_t>> given;  // by step
  for (int mask = power / 2; mask > 0; mask /= 2) {
    const int partner = me ^ mask;
    const size_t middle = begin + ShareBegin(end - begin, 1, 2, Span::kAlign);
    if (me & mask) {
      given.emplace_back(begin, middle);
      flat.Reduce(partner, begin, middle, partner, middle, end);
      begin = middle;
    } else {
      given.emplace_back(middle, end);
      flat.Reduce(partner, middle, end, partner, begin, middle);
      end = middle;
    }
  }
  flat.Scale(begin, end);
  for (int mask = 1; mask < power; mask *= 2) {
    const int partner = me ^ mask;
    const auto [from, to] = given.back();
    given.pop_back();
    flat.Replace(partner, begin, end, partner, from, to);
    begin = std::min(begin, from);
    end = std::max(end, to);
  }

  if (extra < n) flat.Replace(extra, 0, all, extra, 0, 0);
  flat.Finish();
}

}  // namespace collective
