// The reduction and copy loops.
//
// Written once in GCC's vector extensions, and compiled by each kernels_*.cc
// with an instruction set of its own. See kernels_elements.h for what may be
// included.
#ifndef COLLECTIVE_NATIVE_KERNELS_KERNELS_LOOPS_H_
#define COLLECTIVE_NATIVE_KERNELS_KERNELS_LOOPS_H_

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

// For each element type: the type it is summed in (Scalar), a register (Vector)
// and two registers (Block) of that, and what a block becomes in memory
// (Packed). (Two members, not an array: compilers keep an array in memory if a
// branch fills it.)
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
  static COLLECTIVE_INLINE const Packed& Pack(const Block& block) {
    return block;
  }
  static COLLECTIVE_INLINE void Store(T* to, const Packed& packed,
                                      bool stream) {
    StoreVector(to, packed.low, stream);
    StoreVector(to + kBlock / 2, packed.high, stream);
  }
};

template <class T>
struct Sums : Unconverted<T, T> {
  static COLLECTIVE_INLINE T LoadOne(const T* from) { return *from; }
  static COLLECTIVE_INLINE void StoreOne(T value, T* to) { *to = value; }
};
template <>
struct Sums<Bool> : Unconverted<Bool, uint8_t> {
  static COLLECTIVE_INLINE uint8_t LoadOne(const Bool* from) {
    return from->bits;
  }
  static COLLECTIVE_INLINE void StoreOne(uint8_t value, Bool* to) {
    to->bits = value;
  }
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
    return Widen(*from);
  }
  static COLLECTIVE_INLINE void StoreOne(Scalar value, T* to) {
    Narrow(value, to);
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

struct Add {
  template <class V>
  static V Apply(V a, V b) {
    return a + b;
  }
};
struct Multiply {
  template <class V>
  static V Apply(V a, V b) {
    return a * b;
  }
};
// A NaN wins, as in np.minimum and np.maximum.
struct Min {
  template <class V>
  static V Apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class V>
  static V Apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};
struct Or {
  template <class V>
  static V Apply(V a, V b) {
    return a | b;
  }
};
struct And {
  template <class V>
  static V Apply(V a, V b) {
    return a & b;
  }
};

// T: the type of the tensors; W: of the transport (of slots and of all sources
// but this rank's own). NS: the number of sources if known when compiling, else
// 0.
template <class T, class W, class Operation, bool kDivide, int NS>
void ReduceLoop(const ReduceJob& job) {
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
  const size_t count = job.count;
  T* out = static_cast<T*>(job.out);
  W* slot = static_cast<W*>(job.slot);
  const bool stream_out = job.stream_out && CanStream(out);
  const bool stream_slot = job.stream_slot && CanStream(slot);
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
  size_t i = 0;
  for (; i + Own::kBlock <= count; i += Own::kBlock) {
    Block sums = load(0, i);
    for (int q = 1; q < n; ++q) {
      const Block more = load(q, i);
      sums.low = Operation::template Apply<V>(sums.low, more.low);
      sums.high = Operation::template Apply<V>(sums.high, more.high);
    }
    if (kDivide) {
      sums.low = sums.low / divisor;
      sums.high = sums.high / divisor;
    }
    const auto& packed = WireCodec::Pack(sums);
    if (slot) WireCodec::Store(slot + i, packed, stream_slot);
    if (out) {
      if constexpr (kOneType) {
        Own::Store(out + i, packed, stream_out);
      } else {
        Own::Store(out + i, WireCodec::Unpack(packed), stream_out);
      }
    }
  }
  for (; i < count; ++i) {
    Scalar sum = load_one(0, i);
    for (int q = 1; q < n; ++q) {
      sum = static_cast<Scalar>(
          Operation::template Apply<Scalar>(sum, load_one(q, i)));
    }
    if (kDivide) sum = static_cast<Scalar>(sum / divisor);
    W packed;
    WireCodec::StoreOne(sum, &packed);
    if (slot) slot[i] = packed;
    if (out) Own::StoreOne(WireCodec::LoadOne(&packed), out + i);
  }
  if (stream_out || stream_slot) StreamsDone();
}

template <class T, class W, class Operation, bool kDivide>
void Reduce(const ReduceJob& job) {
  switch (job.nsources) {
    case 2:
      return ReduceLoop<T, W, Operation, kDivide, 2>(job);
    case 4:
      return ReduceLoop<T, W, Operation, kDivide, 4>(job);
    default:
      return ReduceLoop<T, W, Operation, kDivide, 0>(job);
  }
}

// The mean of integers, rounded towards zero; the sum cannot overflow on the
// way (but for int64).
template <class T>
void AverageIntegers(const ReduceJob& job) {
  for (size_t i = 0; i < job.count; ++i) {
    int64_t sum = 0;
    for (int q = 0; q < job.nsources; ++q) {
      sum += static_cast<const T*>(job.sources[q])[i];
    }
    const T mean = static_cast<T>(sum / job.divisor);
    if (job.slot) static_cast<T*>(job.slot)[i] = mean;
    if (job.out) static_cast<T*>(job.out)[i] = mean;
  }
}

void Copy(void* target, const void* source, size_t bytes, bool stream) {
  typedef char Line __attribute__((vector_size(kVectorBytes)));
  constexpr size_t kLine = sizeof(Line);
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  if (!stream || bytes < 256) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  const size_t head = -reinterpret_cast<uintptr_t>(to) & 63;
  __builtin_memcpy(to, from, head);
  size_t i = head;
  for (; i + 4 * kLine <= bytes; i += 4 * kLine) {
    const Line a = LoadAs<Line>(from + i);
    const Line b = LoadAs<Line>(from + i + kLine);
    const Line c = LoadAs<Line>(from + i + 2 * kLine);
    const Line d = LoadAs<Line>(from + i + 3 * kLine);
    Stream(to + i, a);
    Stream(to + i + kLine, b);
    Stream(to + i + 2 * kLine, c);
    Stream(to + i + 3 * kLine, d);
  }
  __builtin_memcpy(to + i, from + i, bytes - i);
  StreamsDone();
}

template <class W>
void NarrowAll(void* target, const void* source, size_t count, bool stream) {
  W* to = static_cast<W*>(target);
  const float* from = static_cast<const float*>(source);
  const bool streams = stream && CanStream(to);
  size_t i = 0;
  for (; i + Sums<W>::kBlock <= count; i += Sums<W>::kBlock) {
    const auto& packed = Sums<W>::Pack(Sums<float>::Load(from + i));
    Sums<W>::Store(to + i, packed, streams);
  }
  for (; i < count; ++i) Narrow(from[i], to + i);
  if (streams) StreamsDone();
}

template <class W>
void WidenAll(void* target, const void* source, size_t count, bool stream) {
  float* to = static_cast<float*>(target);
  const W* from = static_cast<const W*>(source);
  const bool streams = stream && CanStream(to);
  size_t i = 0;
  for (; i + Sums<W>::kBlock <= count; i += Sums<W>::kBlock) {
    Sums<float>::Store(to + i, Sums<W>::Load(from + i), streams);
  }
  for (; i < count; ++i) to[i] = Widen(from[i]);
  if (streams) StreamsDone();
}

template <class T, class W>
constexpr void FillFloats(ReduceKernel* row) {
  row[static_cast<int>(Op::kSum)] = Reduce<T, W, Add, false>;
  row[static_cast<int>(Op::kAverage)] = Reduce<T, W, Add, true>;
  row[static_cast<int>(Op::kMin)] = Reduce<T, W, Min, false>;
  row[static_cast<int>(Op::kMax)] = Reduce<T, W, Max, false>;
  row[static_cast<int>(Op::kProduct)] = Reduce<T, W, Multiply, false>;
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
  const auto row = [&](DType dtype) {
    return kernels.reduce[static_cast<int>(dtype)];
  };
  FillFloats<float, float>(row(DType::kFloat32));
  FillFloats<double, double>(row(DType::kFloat64));
  FillFloats<Float16, Float16>(row(DType::kFloat16));
  FillFloats<BFloat16, BFloat16>(row(DType::kBFloat16));
  FillIntegers<signed char>(row(DType::kInt8));
  FillIntegers<uint8_t>(row(DType::kUInt8));
  FillIntegers<int32_t>(row(DType::kInt32));
  FillIntegers<int64_t>(row(DType::kInt64));
  ReduceKernel* boolean = row(DType::kBool);
  boolean[static_cast<int>(Op::kSum)] = Reduce<Bool, Bool, Or, false>;
  boolean[static_cast<int>(Op::kMax)] = Reduce<Bool, Bool, Or, false>;
  boolean[static_cast<int>(Op::kMin)] = Reduce<Bool, Bool, And, false>;
  boolean[static_cast<int>(Op::kProduct)] = Reduce<Bool, Bool, And, false>;
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

#endif  // COLLECTIVE_NATIVE_KERNELS_KERNELS_LOOPS_H_
