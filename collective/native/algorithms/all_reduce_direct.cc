// All-reduce through shared memory, each rank summing one part.
//
// A chunk is shared out among the ranks. Each rank copies the parts of the
// others into its slot, sums its own part straight from its tensor and the
// others' slots, writes the sum to its output and to the result slot, and
// copies the others' sums from there. It never copies its own part through
// shared memory, and there is no fusion buffer: the tensors are read and
// written where they are.
//
// Three chunks are under way at a time, so that waits overlap with work. Slots
// are written around the caches or through them, whichever is faster
// (slot_stores.h).
#include "algorithms/all_reduce.h"
#include "transport/wire_codec.h"

namespace collective {
namespace {

// Out of place and out of cache, outputs too are written around the caches.
constexpr size_t kStreamOutputBytes = size_t{16} << 20;

class Direct {
 public:
  Direct(Communicator& ranks, const Reduction& reduction)
      : ranks_(ranks),
        stores_(ranks.stores()),
        r_(reduction),
        wire_(reduction),
        stream_out_(!r_.in_place &&
                    r_.span.length() * SizeOf(r_.dtype) >= kStreamOutputBytes),
        per_chunk_(Communicator::kChunkBytes / wire_.bytes()),
        first_(ranks.first_chunk()) {}

  void Run(bool agree) {
    const size_t length = r_.span.length();
    const uint32_t chunks =
        static_cast<uint32_t>((length + per_chunk_ - 1) / per_chunk_);
    for (uint32_t turn = 0; turn < chunks + 2; ++turn) {
      if (turn < chunks) {
        CopyIn(turn);
        ranks_.Pass(Communicator::kFilled, first_ + turn);
      }
      // Late, where this rank waits for the others anyhow: a wait of its own
      // took a sixth of the time of 1 MB, where ranks share cores. No output
      // has been written yet.
      if (turn == 1 && agree) ranks_.Agree(r_.request);
      if (turn >= 1 && turn - 1 < chunks) Sum(turn - 1);
      if (turn >= 2) CopyOut(turn - 2);
    }
    ranks_.Finish(chunks);
  }

 private:
  size_t Begin(uint32_t turn) const { return turn * per_chunk_; }
  size_t Length(uint32_t turn) const {
    return std::min(per_chunk_, r_.span.length() - Begin(turn));
  }
  // Calls visit(tensor, offset, offset in the chunk, count) for a member's
  // part.
  template <class Visit>
  void ForPart(uint32_t turn, int member, Visit&& visit) {
    const size_t length = Length(turn), begin = Begin(turn);
    const size_t align = Span::kAlign;
    r_.span.ForEach(
        begin + ShareBegin(length, member, ranks_.size(), align),
        begin + ShareBegin(length, member + 1, ranks_.size(), align),
        [&](const Tensor& tensor, size_t offset, size_t position,
            size_t count) { visit(tensor, offset, position - begin, count); });
  }
  // Where a chunk lies in its slots.
  size_t PlaceOf(uint32_t turn) const {
    return Communicator::PlaceOf(first_ + turn, Length(turn) * wire_.bytes());
  }
  int Other(int i) const { return (ranks_.me() + i) % ranks_.size(); }

  void CopyIn(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    ranks_.AwaitFree(Communicator::kRead, chunk, r_.request);
    stores_.Next(Kind::kAllReduce, r_.span.length() * wire_.bytes(),
                 Length(turn) * wire_.bytes(), ranks_.me() == 0,
                 wire_.narrow());
    SlotStores::Work work(stores_);
    char* slot = ranks_.Slot(chunk, ranks_.me()) + PlaceOf(turn);
    for (int i = 1; i < ranks_.size(); ++i) {
      ForPart(turn, Other(i),
              [&](const Tensor& tensor, size_t offset, size_t position,
                  size_t count) {
                wire_.CopyIn(slot + position * wire_.bytes(), tensor, offset,
                             count, stores_.stream());
              });
    }
  }

  void Sum(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    ranks_.AwaitFree(Communicator::kDone, chunk, r_.request);
    ranks_.AwaitAll(Communicator::kFilled, chunk, r_.request);
    SlotStores::Work work(stores_);
    const size_t place = PlaceOf(turn);
    const void* sources[128];
    ReduceJob job = {};
    job.sources = sources;
    job.nsources = ranks_.size();
    job.own = ranks_.me();
    job.divisor = r_.divisor;
    job.stream_out = stream_out_;
    job.stream_slot = stores_.stream();
    ForPart(turn, ranks_.me(),
            [&](const Tensor& tensor, size_t offset, size_t position,
                size_t count) {
              for (int member = 0; member < ranks_.size(); ++member) {
                sources[member] = ranks_.Slot(chunk, member) + place +
                                  position * wire_.bytes();
              }
              sources[ranks_.me()] = wire_.Input(tensor, offset);
              job.out = wire_.Output(tensor, offset);
              job.slot =
                  ranks_.Result(chunk) + place + position * wire_.bytes();
              job.count = count;
              r_.kernel(job);
            });
    ranks_.Pass(Communicator::kRead, chunk);
  }

  void CopyOut(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    const char* sums = ranks_.Result(chunk) + PlaceOf(turn);
    for (int i = 1; i < ranks_.size(); ++i) {
      const int member = Other(i);
      ranks_.AwaitStage(Communicator::kRead, chunk, member, r_.request);
      SlotStores::Work work(stores_);
      ForPart(turn, member,
              [&](const Tensor& tensor, size_t offset, size_t position,
                  size_t count) {
                wire_.CopyOut(tensor, offset, sums + position * wire_.bytes(),
                              count, stream_out_);
              });
    }
    ranks_.Pass(Communicator::kDone, chunk);
  }

  Communicator& ranks_;
  SlotStores& stores_;
  const Reduction& r_;
  const Wire wire_;
  const bool stream_out_;
  const size_t per_chunk_;  // elements
  const uint32_t first_;
};

}  // namespace

void AllReduceDirect(Communicator& ranks, const Reduction& reduction,
                     bool agree) {
  Direct(ranks, reduction).Run(agree);
}

}  // namespace collective
