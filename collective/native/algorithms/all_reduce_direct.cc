// All-reduce through shared memory: a reduce-scatter, then an all-gather.
//
// Each chunk of the tensors is divided into one part for each rank. Each rank
//   1. copies the other ranks' parts into its slot;
//   2. sums its own part, read from its tensor and the other ranks' slots, and
//      writes the sum to its output and to the result slot;
//   3. copies the other ranks' sums from the result slot to its output.
// Steps: 2, because all ranks read at once. Bytes: each rank writes the message once
// to shared memory and reads 2(n-1)/n of it; its own part is never copied
// through shared memory, and the tensors are read and written in place: there
// is no fusion buffer. Each element is summed by one rank, in rank order.
//
// Three chunks are in flight at a time, so that waits overlap with work. Slots
// are written by ordinary or non-temporal stores, whichever are faster
// (slot_stores.h).
#include "algorithms/all_reduce.h"
#include "algorithms/wire_codec.h"

namespace collective {
namespace {

// From this size on, outputs that are not the inputs do not stay in cache anyway,
// and are written by non-temporal stores.
constexpr size_t kStreamOutputBytes = size_t{16} << 20;

class Direct {
 public:
  Direct(Communicator& ranks, const Reduction& reduction)
      : ranks_(ranks),
        stores_(ranks.stores()),
        r_(reduction),
        wire_(reduction),
        stream_out_(!r_.in_place &&
                    r_.tensors.length() * SizeOf(r_.dtype) >= kStreamOutputBytes),
        per_chunk_(Communicator::kChunkBytes / wire_.bytes()),
        first_(ranks.first_chunk()) {}

  void Run(bool verify) {
    const size_t length = r_.tensors.length();
    const uint32_t chunks =
        static_cast<uint32_t>((length + per_chunk_ - 1) / per_chunk_);
    for (uint32_t turn = 0; turn < chunks + 2; ++turn) {
      if (turn < chunks) {
        CopyIn(turn);
        ranks_.Pass(Communicator::kFilled, first_ + turn);
      }
      // Only here, because this rank has to wait anyway: a separate wait took a
      // sixth of the time of 1 MB if ranks share cores. No output has been
      // written yet.
      if (turn == 1 && verify) ranks_.VerifyMatch(r_.request);
      if (turn >= 1 && turn - 1 < chunks) Sum(turn - 1);
      if (turn >= 2) CopyOut(turn - 2);
    }
    ranks_.Finish(chunks);
  }

 private:
  size_t Begin(uint32_t turn) const { return turn * per_chunk_; }
  size_t Length(uint32_t turn) const {
    return std::min(per_chunk_, r_.tensors.length() - Begin(turn));
  }
  // Calls visit(piece) for each piece of a member's part; positions are relative
  // to the chunk.
  template <class Visit>
  void ForPart(uint32_t turn, int member, Visit&& visit) {
    const size_t length = Length(turn), begin = Begin(turn);
    const size_t align = TensorList::kAlign;
    r_.tensors.ForEach(begin + ShareBegin(length, member, ranks_.size(), align),
                       begin + ShareBegin(length, member + 1, ranks_.size(), align),
                       begin, visit);
  }
  // The beginning of a chunk in its slots.
  size_t Offset(uint32_t turn) const {
    return Communicator::SlotOffset(first_ + turn, Length(turn) * wire_.bytes());
  }
  int Other(int i) const { return (ranks_.me() + i) % ranks_.size(); }

  void CopyIn(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    ranks_.AwaitFree(Communicator::kRead, chunk, r_.request);
    stores_.Next(Kind::kAllReduce, r_.tensors.length() * wire_.bytes(),
                 Length(turn) * wire_.bytes(), ranks_.me() == 0, wire_.narrow());
    SlotStores::Timer timer(stores_);
    char* slot = ranks_.Slot(chunk, ranks_.me()) + Offset(turn);
    for (int i = 1; i < ranks_.size(); ++i) {
      ForPart(turn, Other(i), [&](const Piece& piece) {
        wire_.CopyIn(slot + piece.position * wire_.bytes(), piece, stores_.stream());
      });
    }
  }

  void Sum(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    ranks_.AwaitFree(Communicator::kDone, chunk, r_.request);
    ranks_.AwaitAll(Communicator::kFilled, chunk, r_.request);
    SlotStores::Timer timer(stores_);
    const size_t start = Offset(turn);
    const void* sources[kMaxRanks];
    ForPart(turn, ranks_.me(), [&](const Piece& piece) {
      const size_t at = start + piece.position * wire_.bytes();
      for (int member = 0; member < ranks_.size(); ++member) {
        sources[member] = ranks_.Slot(chunk, member) + at;
      }
      sources[ranks_.me()] = wire_.Input(piece);
      r_.kernel({sources, ranks_.size(), ranks_.me(), wire_.Output(piece), piece.count,
                 r_.divisor, ranks_.Result(chunk) + at, stream_out_, stores_.stream()});
    });
    ranks_.Pass(Communicator::kRead, chunk);
  }

  void CopyOut(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    const char* sums = ranks_.Result(chunk) + Offset(turn);
    for (int i = 1; i < ranks_.size(); ++i) {
      const int member = Other(i);
      ranks_.AwaitStage(Communicator::kRead, chunk, member, r_.request);
      SlotStores::Timer timer(stores_);
      ForPart(turn, member, [&](const Piece& piece) {
        wire_.CopyOut(piece, sums + piece.position * wire_.bytes(), stream_out_);
      });
    }
    ranks_.Pass(Communicator::kDone, chunk);
  }

  Communicator& ranks_;
  SlotStores& stores_;
  const Reduction& r_;
  const WireCodec wire_;
  const bool stream_out_;
  const size_t per_chunk_;  // elements
  const uint32_t first_;
};

}  // namespace

void AllReduceDirect(Communicator& ranks, const Reduction& reduction, bool verify) {
  Direct(ranks, reduction).Run(verify);
}

}  // namespace collective
