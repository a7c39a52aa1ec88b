// How a group writes its slots: with ordinary stores or with non-temporal ones.
//
// An ordinary store first fetches the line from the core that had it last.
// Between far cores that takes ten times as long as a non-temporal one, which
// goes straight to memory. But where cores share a cache that the slots fit
// into, lines go from core to core through it, and memory is not touched: there
// ordinary stores can be twice as fast. Which it is depends on the processor
// and on where the ranks run, which changes while they do.
//
// So it is measured, by one member, in the collectives themselves: what copying
// and summing takes, without the waits (but see broadcast.cc). Now and then a
// window of chunks is written the other way; the more that costs, the more
// seldom, so that it is a hundredth of the time at most. All members write in
// the way that this one tells. Sums do not depend on it.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_SLOT_STORES_H_
#define COLLECTIVE_NATIVE_TRANSPORT_SLOT_STORES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/types.h"

namespace collective {

class SlotStores {
 public:
  // By kind, and by what may be in cache; all-reduce of what is narrowed on its
  // way is one more kind.
  static constexpr int kSizes = 3, kClasses = kSizes * (kKinds + 1);
  struct alignas(128) Told {
    std::atomic<uint32_t> ways[kClasses];  // zero at first
  };

  SlotStores();
  // `told`: shared by the members.
  void Open(Told* told) { told_ = told; }

  // Before a chunk of so many bytes, of a collective of `total` bytes. One
  // member `decides`.
  void Next(Kind kind, size_t total, size_t chunk, bool decides,
            bool narrow = false) {
    const int row = narrow ? kKinds : static_cast<int>(kind);
    class_ = row * kSizes + SizeClassOf(total);
    measuring_ = false;
    if (decides && !wish_) Advance(chunk);
    way_ = wish_.value_or(told_->ways[class_].load(std::memory_order_relaxed));
  }
  // Whether slots are written around the caches.
  bool stream() const { return way_ == kStream; }

  // Lives while slots are read or written: what is measured.
  class Work {
   public:
    explicit Work(SlotStores& stores)
        : stores_(stores), start_(stores.measuring_ ? Clock() : 0) {}
    ~Work() {
      if (start_) stores_.Add(Clock() - start_);
    }
    Work(const Work&) = delete;

   private:
    SlotStores& stores_;
    const int64_t start_;
  };

 private:
  static constexpr uint32_t kStream = 0, kOrdinary = 1;
  static constexpr int kParts = 4;  // of the measured half of a window
  struct State {
    size_t position = 0;     // bytes in this window
    int64_t window = 0;      // its number
    int64_t next = 1;        // the next one that is written the other way
    uint32_t way = kStream;  // in the others
    double rates[2] = {};    // what either took last, in nanoseconds a byte
    double nanoseconds[kParts] = {}, bytes[kParts] = {};  // in this window
  };

  static int SizeClassOf(size_t total);
  static int64_t Clock();
  void Advance(size_t chunk);
  void EndWindow(State& state);
  void Add(int64_t nanoseconds);
  bool Tries(const State& state) const { return state.window == state.next; }
  bool Measured(const State& state) const;

  Told* told_ = nullptr;
  bool measuring_ = false;
  std::optional<uint32_t> wish_;  // of COLLECTIVE_STORES
  uint32_t way_ = kStream;
  int class_ = 0;
  int part_ = 0;
  State states_[kClasses];
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_SLOT_STORES_H_
