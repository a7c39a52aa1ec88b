// Arithmetic that keeps denormals in every thread.
//
// TensorFlow's threads flush denormals to zero, and a thread inherits that from
// its creator. Without this, ranks whose sums ran in different threads would end
// with different bits.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace collective {

// While it lives, this thread keeps denormals and rounds to nearest.
class KeepDenormals {
 public:
  KeepDenormals() : before_(Read()) {
    if (before_ & kChanges) Write(before_ & ~kChanges);
  }
  ~KeepDenormals() {
    if (before_ & kChanges) Write(before_);
  }
  KeepDenormals(const KeepDenormals&) = delete;

 private:
  // The bits for flushing results and operands, and the rounding mode.
#if defined(__x86_64__)
  using Mode = unsigned;
  static constexpr Mode kChanges = 0x8000 | 0x0040 | 0x6000;
  static Mode Read() { return _mm_getcsr(); }
  static void Write(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kChanges = Mode{1} << 24 | Mode{3} << 22;
  static Mode Read() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Write(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Mode = unsigned;
  static constexpr Mode kChanges = 0;
  static Mode Read() { return 0; }
  static void Write(Mode) {}
#endif

  const Mode before_;
};

}  // namespace collective
