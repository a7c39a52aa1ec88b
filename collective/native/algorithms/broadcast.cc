// Broadcast.
//
// Through shared memory, the root writes chunks into its slots and every other
// rank reads them, with up to four chunks in flight. Steps: 1. Bytes: the root
// writes the message once, and each other rank reads it once. A few bytes
// travel within the root's post. By messages: a binomial tree, ceil(log2 n)
// steps.

#include "algorithms/collectives.h"
#include "transport/tensor_list.h"

namespace collective {
namespace {

// The tensors of a request as bytes, copied between them and shared memory.
class Bytes {
 public:
  Bytes(Communicator& ranks, const Request& request)
      : ranks_(ranks), is_root_(request.root == ranks.me()), tensors_(request.tensors) {
    for (Tensor& tensor : tensors_) {
      tensor.count *= static_cast<int64_t>(SizeOf(tensor.dtype));
      list_.Add(tensor);
    }
  }
  size_t size() const { return list_.length(); }

  // On the root: copies them to its own outputs.
  void CopyToOutputs() {
    for (const Tensor& tensor : tensors_) {
      if (tensor.input != tensor.output && tensor.count > 0) {
        CopyBytes(tensor.output, tensor.input, static_cast<size_t>(tensor.count));
      }
    }
  }
  // Copies [begin, end) to shared memory on the root, from it on all others.
  void Copy(size_t begin, size_t end, char* shared, bool stream) {
    list_.ForEach(begin, end, begin, [&](const Piece& piece) {
      char* at = shared + piece.position;
      const auto* input = static_cast<const char*>(piece.tensor.input);
      auto* output = static_cast<char*>(piece.tensor.output);
      if (is_root_) {
        ranks_.kernels().copy(at, input + piece.offset, piece.count, stream);
      } else {
        CopyBytes(output + piece.offset, at, piece.count);
      }
    });
  }

 private:
  Communicator& ranks_;
  const bool is_root_;
  std::vector<Tensor> tensors_;  // with counts in bytes
  TensorList list_;
};

void BroadcastBySlots(Communicator& ranks, const Request& request, Bytes& bytes) {
  const bool root = request.root == ranks.me();
  const uint32_t first = ranks.first_chunk();
  uint32_t turn = 0;
  SlotStores& stores = ranks.stores();
  const int reader = request.root == 0 ? 1 : 0;  // the member that measures
  for (size_t begin = 0; begin < bytes.size(); ++turn) {
    const size_t end = std::min(begin + Communicator::kChunkBytes, bytes.size());
    const uint32_t chunk = first + turn;
    char* slot =
        ranks.Slot(chunk, request.root) + Communicator::SlotOffset(chunk, end - begin);
    stores.Next(request.kind, bytes.size(), end - begin, ranks.me() == reader);
    if (root) {
      ranks.AwaitFree(Communicator::kRead, chunk, request);
      bytes.Copy(begin, end, slot, stores.stream());
      ranks.Pass(Communicator::kFilled, chunk);
      if (turn == 0) ranks.VerifyMatch(request);
    } else {
      if (turn == 0) ranks.VerifyMatch(request);
      // The measurement includes the wait: the root writes while this rank reads,
      // and the slower of the two matters.
      SlotStores::Timer timer(stores);
      ranks.AwaitStage(Communicator::kFilled, chunk, request.root, request);
      bytes.Copy(begin, end, slot, false);
      ranks.Pass(Communicator::kRead, chunk);
    }
    begin = end;
  }
  ranks.Finish(turn);
}

// Runs after the root has copied its inputs to its outputs.
void BroadcastByMessages(Communicator& ranks, const Request& request) {
  const int n = ranks.size();
  const int me = (ranks.me() - request.root + n) % n;  // relative to the root
  const auto absolute = [&](int member) { return (member + request.root) % n; };
  for (const Tensor& tensor : request.tensors) {
    char* output = static_cast<char*>(tensor.output);
    int mask = 1;
    while (mask < n && !(me & mask)) mask *= 2;
    if (me != 0) {
      const int parent = absolute(me - mask);
      ranks.p2p().Exchange(parent, nullptr, 0, parent, output, tensor.bytes(), request);
    }
    for (mask /= 2; mask > 0; mask /= 2) {
      if (me + mask >= n) continue;
      const int child = absolute(me + mask);
      ranks.p2p().Exchange(child, output, tensor.bytes(), child, nullptr, 0, request);
    }
  }
}

}  // namespace

void Broadcast(Communicator& ranks, const Request& request) {
  if (request.root < 0 || request.root >= ranks.size()) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": there is no such root",
                  "choose one from 0 to " + std::to_string(ranks.size() - 1));
  }
  const bool root = request.root == ranks.me();
  Bytes bytes(ranks, request);
  if (ranks.spans_hosts()) {
    ranks.Post(request);
    ranks.VerifyMatch(request);
    if (root) bytes.CopyToOutputs();
    return BroadcastByMessages(ranks, request);
  }
  if (root) bytes.CopyToOutputs();
  if (bytes.size() > Communicator::kPostBytes) {
    ranks.Post(request);
    return BroadcastBySlots(ranks, request, bytes);
  }
  if (root) bytes.Copy(0, bytes.size(), ranks.PostData(), false);
  ranks.Post(request);
  ranks.VerifyMatch(request);
  if (!root) {
    bytes.Copy(0, bytes.size(), const_cast<char*>(ranks.PostedBy(request.root)), false);
  }
}

}  // namespace collective
