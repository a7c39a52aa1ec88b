// The reduction and copy loops.
//
// They are written once in GCC's vector extensions, and each kernels_*.cc compiles
// them for an instruction set of its own. kernels_elements.h says which headers
// may be included.
#pragma once

#include "kernels/kernels.h"
#include "kernels/kernels_elements.h"

namespace collective {
namespace {

template <class V>
COLLECTIVE_INLINE void StoreVector(void* to, V value, bool stream) {
  if (stream) {
    Stream(to, value);
  } else {
    StoreAs(to, value);
  }
}

// For each element type: the type of its sums (Scalar), a register (Vector) and
// two registers (Block) of that, and the form of a block in memory (Packed). (Two
// members, not an array: compilers keep an array in memory if a branch fills it.)
template <class T, class S>
struct Unconverted {
  typedef S Scalar;
  typedef S Vector __attribute__((vector_size(kVectorBytes)));
  struct Block {
    Vector low, high;
  };
  static constexpr size_t kBlock = sizeof(Block) / sizeof(T);
  static COLLECTIVE_INLINE Block Load(const T* from) {
    return {LoadAs<Vector>(from), LoadAs<Vector>(from + kBlock / 2)};
  }
  typedef Block Packed;
  // By reference: compilers copy a block word by word.
  static COLLECTIVE_INLINE const Packed& Pack(const Block& block) { return block; }
  static COLLECTIVE_INLINE void Store(T* to, const Packed& packed, bool stream) {
    StoreVector(to, packed.low, stream);
    StoreVector(to + kBlock / 2, packed.high, stream);
  }
};

template <class T>
struct Sums : Unconverted<T, T> {
  static COLLECTIVE_INLINE T LoadOne(const T* from) { return LoadAs<T>(from); }
  static COLLECTIVE_INLINE void StoreOne(T value, T* to) { StoreAs(to, value); }
};
template <>
struct Sums<Bool> : Unconverted<Bool, uint8_t> {
  static COLLECTIVE_INLINE uint8_t LoadOne(const Bool* from) { return from->bits; }
  static COLLECTIVE_INLINE void StoreOne(uint8_t value, Bool* to) { to->bits = value; }
};

template <class T>
struct SixteenBits {
  typedef float Scalar;
  typedef Floats Vector;
  typedef Sums<float>::Block Block;
  static constexpr size_t kBlock = kVectorBytes / sizeof(T);
  typedef Shorts Packed;
  static COLLECTIVE_INLINE Packed Pack(const Block& block) {
    return NarrowRegister(Pair{block.low, block.high}, T{});
  }
  static COLLECTIVE_INLINE Block Unpack(Packed packed) {
    const Pair pair = WidenRegister(packed, T{});
    return {pair.low, pair.high};
  }
  static COLLECTIVE_INLINE Block Load(const T* from) {
    return Unpack(LoadAs<Shorts>(from));
  }
  static COLLECTIVE_INLINE void Store(T* to, Packed packed, bool stream) {
    StoreVector(to, packed, stream);
  }
  static COLLECTIVE_INLINE Scalar LoadOne(const T* from) {
    return Widen(LoadAs<T>(from));
  }
  static COLLECTIVE_INLINE void StoreOne(Scalar value, T* to) {
    T narrow;
    Narrow(value, &narrow);
    StoreAs(to, narrow);
  }
};
template <>
struct Sums<Float16> : SixteenBits<Float16> {};
template <>
struct Sums<BFloat16> : SixteenBits<BFloat16> {};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

enum class Step { kAdd, kMultiply, kMin, kMax, kOr, kAnd };

template <Step kStep, class V>
V Apply(V a, V b) {
  if constexpr (kStep == Step::kAdd) return a + b;
  if constexpr (kStep == Step::kMultiply) return a * b;
  // A NaN wins, as in np.minimum and np.maximum.
  if constexpr (kStep == Step::kMin) return ((a < b) | (a != a)) ? a : b;
  if constexpr (kStep == Step::kMax) return ((a > b) | (a != a)) ? a : b;
  if constexpr (kStep == Step::kOr) return a | b;
  if constexpr (kStep == Step::kAnd) return a & b;
}

constexpr size_t kLine = 64;  // bytes of a cache line

COLLECTIVE_INLINE size_t BytesAfterLine(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % kLine;
}

// Non-temporal stores to memory that does not begin on a cache line. Only whole
// lines are worth streaming, so a buffer that stays in the nearest cache collects
// them.
class LineBuffer {
 public:
  static constexpr size_t kBytes = 1024;

  explicit LineBuffer(void* to)
      : skew_(BytesAfterLine(to)),
        begin_(skew_),
        line_(static_cast<char*>(to) - skew_) {}
  // The address for the next bytes: kBytes, except the last time.
  char* room() { return buffer_ + skew_; }
  // Writes all full lines; if fewer than kBytes are new, writes all bytes.
  void Flush(size_t bytes) {
    typedef char Line __attribute__((vector_size(kVectorBytes)));
    const size_t end = skew_ + bytes, lines = end / kLine * kLine;
    size_t i = 0;
    if (begin_ && lines) {  // bytes before the target are not ours
      __builtin_memcpy(line_ + begin_, buffer_ + begin_, kLine - begin_);
      begin_ = 0;
      i = kLine;
    }
    for (; i < lines; i += sizeof(Line)) {
      Stream(line_ + i, LoadAs<Line>(buffer_ + i));
    }
    if (bytes == kBytes) {
      __builtin_memcpy(buffer_, buffer_ + lines, end - lines);
      line_ += kBytes;
    } else {
      i = lines ? lines : begin_;
      __builtin_memcpy(line_ + i, buffer_ + i, end - i);
    }
  }

 private:
  const size_t skew_;  // offset of the target within its first line
  size_t begin_;       // offset of the target within this line
  char* line_;
  alignas(kLine) char buffer_[kBytes + kLine];
};

// Calls loop(begin, end, to) for all elements, in pieces; element `begin` goes to
// `to`. Streams the written pieces to `out`.
template <class T, class Loop>
void ToLines(T* out, size_t count, Loop&& loop) {
  constexpr size_t kPiece = LineBuffer::kBytes / sizeof(T);
  LineBuffer lines(out);
  size_t begin = 0;
  for (; begin + kPiece <= count; begin += kPiece) {
    loop(begin, begin + kPiece, reinterpret_cast<T*>(lines.room()));
    lines.Flush(LineBuffer::kBytes);
  }
  loop(begin, count, reinterpret_cast<T*>(lines.room()));
  lines.Flush((count - begin) * sizeof(T));
}

// From here on, peeling pays.
constexpr size_t kPeelBytes = 2048;

// T: the type of the tensors; W: the type on the wire (of slots and of all sources
// except this rank's own). NS: the number of sources if known when compiling, else
// 0. Reduces the elements from `i` to `end`; the first of them goes to `out`.
template <class T, class W, Step kStep, bool kDivide, int NS>
void ReduceLoop(const ReduceJob& job, size_t i, size_t end, T* out, bool stream_out) {
  using Own = Sums<T>;
  using WireCodec = Sums<W>;
  using Block = typename Own::Block;
  using V = typename Own::Vector;
  using Scalar = typename Own::Scalar;
  constexpr bool kOneType = kSame<T, W>;
  const int n = NS ? NS : job.nsources;
  // A local copy, if their number is known: no store can alias it, so it stays
  // in registers.
  const void* known[NS ? NS : 1];
  for (int q = 0; q < NS; ++q) known[q] = job.sources[q];
  const void* const* sources = NS ? known : job.sources;
  const int own = job.own;
  W* slot = job.slot ? static_cast<W*>(job.slot) + i : nullptr;
  const bool stream_slot = job.stream_slot && !BytesAfterLine(slot);
  const Scalar divisor = static_cast<Scalar>(job.divisor);
  const auto load = [&](int q, size_t i) -> Block {
    if (kOneType || q != own) {
      return WireCodec::Load(static_cast<const W*>(sources[q]) + i);
    }
    return Own::Load(static_cast<const T*>(sources[q]) + i);
  };
  const auto load_one = [&](int q, size_t i) -> Scalar {
    if (kOneType || q != own) {
      return WireCodec::LoadOne(static_cast<const W*>(sources[q]) + i);
    }
    return Own::LoadOne(static_cast<const T*>(sources[q]) + i);
  };
  const auto reduce_one = [&] {
    Scalar sum = load_one(0, i);
    for (int q = 1; q < n; ++q) {
      sum = static_cast<Scalar>(Apply<kStep, Scalar>(sum, load_one(q, i)));
    }
    if (kDivide) sum = static_cast<Scalar>(sum / divisor);
    W packed;
    WireCodec::StoreOne(sum, &packed);
    if (slot) *slot++ = packed;
    if (out) Own::StoreOne(WireCodec::LoadOne(&packed), out++);
    ++i;
  };
  // Slots begin on a line. Without a slot, the stores to `out` should: a store
  // across two lines costs two.
  if (!slot && (end - i) * sizeof(T) >= kPeelBytes) {
    while (BytesAfterLine(out) >= sizeof(T)) reduce_one();
  }
  for (; i + Own::kBlock <= end; i += Own::kBlock) {
    Block sums = load(0, i);
    for (int q = 1; q < n; ++q) {
      const Block more = load(q, i);
      sums.low = Apply<kStep, V>(sums.low, more.low);
      sums.high = Apply<kStep, V>(sums.high, more.high);
    }
    if (kDivide) {
      sums.low = sums.low / divisor;
      sums.high = sums.high / divisor;
    }
    const auto& packed = WireCodec::Pack(sums);
    if (slot) {
      WireCodec::Store(slot, packed, stream_slot);
      slot += Own::kBlock;
    }
    if (out) {
      if constexpr (kOneType) {
        Own::Store(out, packed, stream_out);
      } else {
        Own::Store(out, WireCodec::Unpack(packed), stream_out);
      }
      out += Own::kBlock;
    }
  }
  while (i < end) reduce_one();
}

template <class T, class W, Step kStep, bool kDivide, int NS>
void ReduceAll(const ReduceJob& job) {
  T* out = static_cast<T*>(job.out);
  const auto loop = ReduceLoop<T, W, kStep, kDivide, NS>;
  if (out && job.stream_out && BytesAfterLine(out)) {
    ToLines(out, job.count,
            [&](size_t begin, size_t end, T* to) { loop(job, begin, end, to, false); });
  } else {
    loop(job, 0, job.count, out, out && job.stream_out);
  }
  if (job.stream_out || job.stream_slot) StreamsDone();
}

template <class T, class W, Step kStep, bool kDivide>
void Reduce(const ReduceJob& job) {
  switch (job.nsources) {
    case 2:
      return ReduceAll<T, W, kStep, kDivide, 2>(job);
    case 4:
      return ReduceAll<T, W, kStep, kDivide, 4>(job);
    default:
      return ReduceAll<T, W, kStep, kDivide, 0>(job);
  }
}

// The mean of integers, rounded towards zero; the intermediate sum cannot overflow
// (except for int64).
template <class T>
void AverageIntegers(const ReduceJob& job) {
  for (size_t i = 0; i < job.count; ++i) {
    int64_t sum = 0;
    for (int q = 0; q < job.nsources; ++q) {
      sum += LoadAs<T>(static_cast<const T*>(job.sources[q]) + i);
    }
    const T mean = static_cast<T>(sum / job.divisor);
    if (job.slot) static_cast<T*>(job.slot)[i] = mean;
    if (job.out) StoreAs(static_cast<T*>(job.out) + i, mean);
  }
}

// A loop of vectors, even if nothing is streamed: for large sizes glibc's memcpy
// uses `rep movsb`, which takes 2 to 5 times as long on AMD's Zen if the target
// does not begin on a line.
void Copy(void* target, const void* source, size_t bytes, bool stream) {
  typedef char Line __attribute__((vector_size(kVectorBytes)));
  constexpr size_t kStep = sizeof(Line);
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  if (bytes == 0) return;
  if (bytes < (stream ? 256 : 1024)) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  const size_t head = (kLine - BytesAfterLine(to)) % kLine;
  __builtin_memcpy(to, from, head);
  size_t i = head;
  for (; i + 4 * kStep <= bytes; i += 4 * kStep) {
    const Line a = LoadAs<Line>(from + i);
    const Line b = LoadAs<Line>(from + i + kStep);
    const Line c = LoadAs<Line>(from + i + 2 * kStep);
    const Line d = LoadAs<Line>(from + i + 3 * kStep);
    StoreVector(to + i, a, stream);
    StoreVector(to + i + kStep, b, stream);
    StoreVector(to + i + 2 * kStep, c, stream);
    StoreVector(to + i + 3 * kStep, d, stream);
  }
  __builtin_memcpy(to + i, from + i, bytes - i);
  if (stream) StreamsDone();
}

template <class W>
void NarrowAll(void* target, const void* source, size_t count, bool stream) {
  W* to = static_cast<W*>(target);
  const float* from = static_cast<const float*>(source);
  const bool streams = stream && !BytesAfterLine(to);
  size_t i = 0;
  for (; i + Sums<W>::kBlock <= count; i += Sums<W>::kBlock) {
    const auto& packed = Sums<W>::Pack(Sums<float>::Load(from + i));
    Sums<W>::Store(to + i, packed, streams);
  }
  for (; i < count; ++i) {
    Sums<W>::StoreOne(Sums<float>::LoadOne(from + i), to + i);
  }
  if (streams) StreamsDone();
}

template <class W>
void WidenAll(void* target, const void* source, size_t count, bool stream) {
  const W* from = static_cast<const W*>(source);
  float* out = static_cast<float*>(target);
  const auto widen = [from](size_t i, size_t end, float* to, bool streams) {
    for (; i + Sums<W>::kBlock <= end; i += Sums<W>::kBlock) {
      Sums<float>::Store(to, Sums<W>::Load(from + i), streams);
      to += Sums<W>::kBlock;
    }
    for (; i < end; ++i) {
      Sums<float>::StoreOne(Sums<W>::LoadOne(from + i), to++);
    }
  };
  if (stream && BytesAfterLine(out)) {
    ToLines(out, count,
            [&](size_t begin, size_t end, float* to) { widen(begin, end, to, false); });
  } else {
    widen(0, count, out, stream);
  }
  if (stream) StreamsDone();
}

template <class T, class W>
constexpr void FillFloats(ReduceKernel* row) {
  row[static_cast<int>(Op::kSum)] = Reduce<T, W, Step::kAdd, false>;
  row[static_cast<int>(Op::kAverage)] = Reduce<T, W, Step::kAdd, true>;
  row[static_cast<int>(Op::kMin)] = Reduce<T, W, Step::kMin, false>;
  row[static_cast<int>(Op::kMax)] = Reduce<T, W, Step::kMax, false>;
  row[static_cast<int>(Op::kProduct)] = Reduce<T, W, Step::kMultiply, false>;
}

template <class T>
constexpr void FillIntegers(ReduceKernel* row) {
  FillFloats<T, T>(row);
  row[static_cast<int>(Op::kAverage)] = AverageIntegers<T>;
}

[[maybe_unused]] constexpr Kernels MakeKernels(const char* name) {
  Kernels kernels = {};
  kernels.name = name;
  kernels.copy = Copy;
  const auto row = [&](DType dtype) { return kernels.reduce[static_cast<int>(dtype)]; };
  FillFloats<float, float>(row(DType::kFloat32));
  FillFloats<double, double>(row(DType::kFloat64));
  FillFloats<Float16, Float16>(row(DType::kFloat16));
  FillFloats<BFloat16, BFloat16>(row(DType::kBFloat16));
  FillIntegers<signed char>(row(DType::kInt8));
  FillIntegers<uint8_t>(row(DType::kUInt8));
  FillIntegers<int32_t>(row(DType::kInt32));
  FillIntegers<int64_t>(row(DType::kInt64));
  ReduceKernel* boolean = row(DType::kBool);
  boolean[static_cast<int>(Op::kSum)] = Reduce<Bool, Bool, Step::kOr, false>;
  boolean[static_cast<int>(Op::kMax)] = Reduce<Bool, Bool, Step::kOr, false>;
  boolean[static_cast<int>(Op::kMin)] = Reduce<Bool, Bool, Step::kAnd, false>;
  boolean[static_cast<int>(Op::kProduct)] = Reduce<Bool, Bool, Step::kAnd, false>;
  FillFloats<float, Float16>(kernels.reduce_16[0]);
  FillFloats<float, BFloat16>(kernels.reduce_16[1]);
  kernels.narrow[0] = NarrowAll<Float16>;
  kernels.narrow[1] = NarrowAll<BFloat16>;
  kernels.widen[0] = WidenAll<Float16>;
  kernels.widen[1] = WidenAll<BFloat16>;
  return kernels;
}

}  // namespace
}  // namespace collective
