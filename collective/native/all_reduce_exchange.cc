// All-reduce between hosts: every rank sums one part, sent to it by all.
//
// n-1 messages of a part to whom it belongs, then the sums around a ring:
// 2(n-1)/n of the message sent by each rank, as little as a ring of sums. Other
// than there, parts are summed once, in the order of the ranks, so that 16-bit
// elements are rounded once, integers averaged without overflow, and elements
// can be 16 bits on the way while sums are float32.
#include <cstring>
#include <vector>

#include "flat.h"

namespace collective {

void AllReduceExchange(Communicator& ranks, const Reduction& reduction) {
  Flat flat(ranks, reduction);
  const int n = ranks.size(), me = ranks.me();
  const bool narrow = reduction.transport != reduction.dtype;
  const bool half = reduction.transport == DType::kBFloat16;
  const size_t size = SizeOf(reduction.transport);
  const auto begin = [&](int member) {
    return ShareBegin(flat.count(), member, n, Span::kAlign);
  };
  // What travels: the array itself or, narrowed, a copy of it.
  std::vector<char> narrowed(narrow ? flat.count() * size : 0);
  if (narrow && flat.count()) {
    ranks.kernels().narrow[half](narrowed.data(), flat.at(0), flat.count(),
                                 false);
  }
  char* wire = narrow ? narrowed.data() : flat.at(0);
  const auto move = [&](int to, size_t first, size_t last, int from,
                        char* target, size_t bytes) {
    ranks.Exchange(to, wire + first * size, (last - first) * size, from, bytes,
                   reduction.request,
                   [&](const char* piece, size_t offset, size_t length) {
                     std::memcpy(target + offset, piece, length);
                   });
  };

  const size_t mine = begin(me + 1) - begin(me);
  std::vector<char> parts(mine * size * n);
  const void* sources[128];
  for (int i = 0; i < n; ++i) sources[i] = parts.data() + mine * size * i;
  for (int step = 1; step < n; ++step) {
    const int to = (me + step) % n, from = (me - step + n) % n;
    move(to, begin(to), begin(to + 1), from, parts.data() + mine * size * from,
         mine * size);
  }
  sources[me] = flat.at(begin(me));
  ReduceJob job = {};
  job.sources = sources;
  job.nsources = n;
  job.own = me;
  job.out = flat.at(begin(me));
  job.slot = narrow ? wire + begin(me) * size : nullptr;
  job.count = mine;
  job.divisor = reduction.divisor;
  reduction.kernel(job);

  const int right = (me + 1) % n, left = (me + n - 1) % n;
  for (int step = 0; step < n - 1; ++step) {
    const int out = (me - step + n) % n, in = (me - step - 1 + n) % n;
    move(right, begin(out), begin(out + 1), left, wire + begin(in) * size,
         (begin(in + 1) - begin(in)) * size);
  }
  for (int member = 0; narrow && member < n; ++member) {
    if (member == me) continue;
    ranks.kernels().widen[half](flat.at(begin(member)),
                                wire + begin(member) * size,
                                begin(member + 1) - begin(member), false);
  }
  flat.Finish();
}

}  // namespace collective
