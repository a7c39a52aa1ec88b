// The root writes chunks into its slots and everyone reads them; up to four are
// under way. A few bytes travel within the root's post.
#include "algorithms/broadcast.h"

#include <cstring>

#include "transport/tensor_list.h"

namespace collective {

void Broadcast(Communicator& ranks, const Request& request) {
  if (request.root < 0 || request.root >= ranks.size()) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": there is no such root",
                  "choose one from 0 to " + std::to_string(ranks.size() - 1));
  }
  const bool root = request.root == ranks.me();
  std::vector<Tensor> pieces = request.tensors;  // as bytes
  Span span;
  for (Tensor& piece : pieces) {
    piece.count *= static_cast<int64_t>(SizeOf(piece.dtype));
    span.Add(piece);
    if (root && piece.input != piece.output && piece.count > 0) {
      std::memcpy(piece.output, piece.input, static_cast<size_t>(piece.count));
    }
  }
  const auto copy = [&](size_t begin, size_t end, char* shared, bool stream) {
    span.ForEach(
        begin, end,
        [&](const Tensor& piece, size_t offset, size_t position, size_t count) {
          char* there = shared + (position - begin);
          if (root) {
            ranks.kernels().copy(there,
                                 static_cast<const char*>(piece.input) + offset,
                                 count, stream);
          } else {
            std::memcpy(static_cast<char*>(piece.output) + offset, there,
                        count);
          }
        });
  };

  const size_t bytes = span.length();
  if (bytes <= Communicator::kPostBytes) {
    if (root) copy(0, bytes, ranks.PostData(), false);
    ranks.Post(request);
    ranks.Agree(request);
    if (!root) {
      copy(0, bytes, const_cast<char*>(ranks.PostedBy(request.root)), false);
    }
    return;
  }
  ranks.Post(request);
  const uint32_t first = ranks.first_chunk();
  uint32_t turn = 0;
  SlotStores& stores = ranks.stores();
  const int reader = request.root == 0 ? 1 : 0;
  for (size_t begin = 0; begin < bytes; ++turn) {
    const size_t end = std::min(begin + Communicator::kChunkBytes, bytes);
    const uint32_t chunk = first + turn;
    char* slot = ranks.Slot(chunk, request.root) +
                 Communicator::PlaceOf(chunk, end - begin);
    stores.Next(request.kind, bytes, end - begin, ranks.me() == reader);
    if (root) {
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      copy(begin, end, slot, stores.stream());
      ranks.Pass(Communicator::kFilled, chunk);
      if (turn == 0) ranks.Agree(request);
    } else {
      if (turn == 0) ranks.Agree(request);
      // With the wait: the root writes while this rank reads, and the slower of
      // them counts.
      SlotStores::Work work(stores);
      ranks.AwaitStage(Communicator::kFilled, chunk, request.root, request);
      copy(begin, end, slot, false);
      ranks.Pass(Communicator::kRead, chunk);
    }
    begin = end;
  }
  ranks.Finish(turn);
}

}  // namespace collective
