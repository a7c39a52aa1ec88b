// The loop of the collectives that go through slots chunk by chunk: a rank
// writes the next chunk while it reads the previous one.
#pragma once

#include <algorithm>

#include "communicator.h"

namespace collective {

// The size of the part of `all` in the chunk that begins at `begin`.
inline size_t PieceOf(size_t all, size_t begin, size_t step) {
  return begin < all ? std::min(step, all - begin) : 0;
}

// Calls fill(chunk, begin) and, when this rank has filled the next one, too,
// read(chunk, begin) for each chunk of `step` units, until `longest`, the most
// that any rank has. `scale`: bytes that a unit takes in a slot. `read` waits
// for the other ranks, and is called after VerifyMatch.
template <class Fill, class Read>
void ForChunks(Communicator& ranks, const Request& request, size_t longest, size_t step,
               size_t scale, Fill&& fill, Read&& read) {
  const auto chunks = static_cast<uint32_t>((longest + step - 1) / step);
  const uint32_t first = ranks.first_chunk();
  SlotStores& stores = ranks.stores();
  for (uint32_t turn = 0; turn < chunks + 1; ++turn) {
    if (turn < chunks) {
      const uint32_t chunk = first + turn;
      const size_t begin = turn * step;
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      stores.Next(request.kind, longest * scale,
                  std::min(step, longest - begin) * scale, ranks.me() == 0);
      SlotStores::Timer timer(stores);
      fill(chunk, begin);
      ranks.Pass(Communicator::kFilled, chunk);
    }
    if (turn == std::min(1u, chunks)) ranks.VerifyMatch(request);
    if (turn == 0) continue;
    read(first + turn - 1, (turn - 1) * step);
    ranks.Pass(Communicator::kRead, first + turn - 1);
  }
  ranks.Finish(chunks);
}

}  // namespace collective
