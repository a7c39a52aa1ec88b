#include "transport/slot_stores.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "clock.h"

namespace collective {
namespace {

// Twice around all slots to move them into the caches or out of them, and the same
// again to measure.
constexpr size_t kWindowBytes = size_t{8} << 20;
constexpr int64_t kMeasuredEvery = 8;
// The distance between two tries of the other mode.
constexpr double kFewestWindows = 16, kMostWindows = 4096;
constexpr double kPartOfTime = 0.01;
// The other mode replaces this one if its time is below this factor; it is
// tried at once if this mode has become slower by this factor.
constexpr double kFaster = 0.95, kSlower = 1.3;

}  // namespace

SlotStores::SlotStores() {
  const char* choice = std::getenv("COLLECTIVE_STORES");
  if (choice && std::strcmp(choice, "streaming") == 0) override_ = kStream;
  if (choice && std::strcmp(choice, "ordinary") == 0) override_ = kOrdinary;
}

int SlotStores::SizeClassOf(size_t total) {
  return total < size_t{256} << 10 ? 0 : total < size_t{8} << 20 ? 1 : 2;
}

bool SlotStores::Measured(const State& state) const {
  return Tries(state) || state.window + 1 == state.next ||
         state.window % kMeasuredEvery == 0;
}

void SlotStores::Advance(size_t chunk) {
  State& state = states_[class_];
  if (state.position >= kWindowBytes) EndWindow(state);
  const size_t half = kWindowBytes / 2;
  measuring_ = state.position >= half && Measured(state);
  if (measuring_) {
    part_ = static_cast<int>((state.position - half) * kParts / half);
    part_ = std::min(part_, kParts - 1);
    state.bytes[part_] += static_cast<double>(chunk);
  }
  state.position += chunk;
}

void SlotStores::Add(int64_t nanoseconds) {
  states_[class_].nanoseconds[part_] += static_cast<double>(nanoseconds);
}

void SlotStores::EndWindow(State& state) {
  const bool tried = Tries(state);
  const uint32_t other = 1 - state.mode;
  // The fastest part counts: in another part, a rank may have lost its core.
  double rate = 0;
  for (int part = 0; part < kParts; ++part) {
    if (state.bytes[part] == 0) continue;
    const double one = state.nanoseconds[part] / state.bytes[part];
    if (rate == 0 || one < rate) rate = one;
    state.nanoseconds[part] = state.bytes[part] = 0;
  }
  state.position = 0;
  ++state.window;
  if (tried) {
    state.rates[other] = rate;
    if (rate < kFaster * state.rates[state.mode]) state.mode = other;
    const double loss = std::abs(state.rates[0] - state.rates[1]) /
                        std::max(1e-9, std::min(state.rates[0], state.rates[1]));
    const double windows = std::clamp(loss / kPartOfTime, kFewestWindows, kMostWindows);
    state.next = state.window + static_cast<int64_t>(windows);
  } else if (rate > 0) {
    const double before = state.rates[state.mode];
    state.rates[state.mode] = rate;
    if (before > 0 && rate > kSlower * before && rate > kFaster * state.rates[other]) {
      state.next = state.window;
    }
  }
  choices_->modes[class_] = Tries(state) ? 1 - state.mode : state.mode;
}

}  // namespace collective
