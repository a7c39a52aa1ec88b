// Whether a group writes its slots by ordinary or by non-temporal stores.
//
// An ordinary store first fetches the line from the core that had it last. Between
// far cores that takes ten times as long as a non-temporal store, which goes
// straight to memory. But if cores share a cache that holds the slots, lines move
// from core to core through it, and ordinary stores can be twice as fast. The
// better choice depends on the processor and on the cores of the ranks, which may
// change at any time.
//
// So one member measures it in the collectives themselves: the time of copying and
// summing, without the waits (but see broadcast.cc). Now and then a window of
// chunks is written the other way; the more this costs, the rarer it is, so that
// it takes at most a hundredth of the time. All members follow that member's
// choice. Sums do not depend on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "clock.h"
#include "kernels/types.h"

namespace collective {

class SlotStores {
 public:
  // By kind, and by what fits into caches; all-reduce with a 16-bit transport is
  // one more kind.
  static constexpr int kSizes = 3, kClasses = kSizes * (kKinds + 1);
  struct alignas(128) Choices {
    std::atomic<uint32_t> modes[kClasses];  // zero at first
  };

  SlotStores();
  // `choices` is in memory that the members share.
  void Open(Choices* choices) { choices_ = choices; }

  // Called before a chunk of so many bytes, in a collective of `total` bytes.
  // Exactly one member `decides`.
  void Next(Kind kind, size_t total, size_t chunk, bool decides, bool narrow = false) {
    const int row = narrow ? kKinds : static_cast<int>(kind);
    class_ = row * kSizes + SizeClassOf(total);
    measuring_ = false;
    if (decides && !override_) Advance(chunk);
    mode_ = override_.value_or(choices_->modes[class_].load(std::memory_order_relaxed));
  }
  // Whether slots are written by non-temporal stores.
  bool stream() const { return mode_ == kStream; }

  // Measures the time in which slots are read or written, by its own lifetime.
  class Timer {
   public:
    explicit Timer(SlotStores& stores)
        : stores_(stores), start_(stores.measuring_ ? Now() : 0) {}
    ~Timer() {
      if (start_) stores_.Add(Now() - start_);
    }
    Timer(const Timer&) = delete;

   private:
    SlotStores& stores_;
    const int64_t start_;
  };

 private:
  static constexpr uint32_t kStream = 0, kOrdinary = 1;
  static constexpr int kParts = 4;  // parts of the measured half of a window
  struct State {
    size_t position = 0;      // bytes in this window
    int64_t window = 0;       // its number
    int64_t next = 1;         // the next window that tries the other mode
    uint32_t mode = kStream;  // in all other windows
    double rates[2] = {};     // last measured, in nanoseconds per byte
    double nanoseconds[kParts] = {}, bytes[kParts] = {};  // in this window
  };

  static int SizeClassOf(size_t total);
  void Advance(size_t chunk);
  void EndWindow(State& state);
  void Add(int64_t nanoseconds);
  bool Tries(const State& state) const { return state.window == state.next; }
  bool Measured(const State& state) const;

  Choices* choices_ = nullptr;
  bool measuring_ = false;
  std::optional<uint32_t> override_;  // from COLLECTIVE_STORES
  uint32_t mode_ = kStream;
  int class_ = 0;
  int part_ = 0;
  State states_[kClasses];
};

}  // namespace collective
