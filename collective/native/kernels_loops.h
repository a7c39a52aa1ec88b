// The reduction and copy loops, written once and compiled by each kernels_*.cc
// with its own instruction set. See kernels_elements.h for what may be
// included.
#ifndef COLLECTIVE_NATIVE_KERNELS_LOOPS_H_
#define COLLECTIVE_NATIVE_KERNELS_LOOPS_H_

#include "kernels.h"
#include "kernels_elements.h"

namespace collective {
namespace {

// Handled at a time: two cache lines, where there are registers for them.
constexpr int kVectors = kVectorBytes == 16 ? 4 : 128 / kVectorBytes;

// What a type is summed in, the vector of that, and what one such vector
// becomes in memory.
template <class T>
struct Sums {
  typedef T Scalar;
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef Vector Packed;
  static constexpr size_t kLanes = kVectorBytes / sizeof(T);
  static Vector Load(const T* from) { return LoadAs<Vector>(from); }
  static Packed Pack(Vector value) { return value; }
  static Scalar LoadOne(const T* from) { return *from; }
  static void StoreOne(Scalar value, T* to) { *to = value; }
};

template <class T>
struct SixteenBits {
  typedef float Scalar;
  typedef Floats Vector;
  typedef Shorts Packed;
  static constexpr size_t kLanes = kFloats;
  static Vector Load(const T* from) {
    return WidenBlock(LoadAs<Shorts>(from), T{});
  }
  static Packed Pack(Vector value) { return NarrowBlock(value, T{}); }
  static Vector Round(Vector value) { return RoundBlock(value, T{}); }
  static Scalar LoadOne(const T* from) { return Widen(*from); }
  static void StoreOne(Scalar value, T* to) { Narrow(value, to); }
};
template <>
struct Sums<Half> : SixteenBits<Half> {};
template <>
struct Sums<Brain> : SixteenBits<Brain> {};

template <>
struct Sums<Truth> {
  typedef uint8_t Scalar;
  typedef uint8_t Vector __attribute__((vector_size(kVectorBytes)));
  typedef Vector Packed;
  static constexpr size_t kLanes = kVectorBytes;
  static Vector Load(const Truth* from) { return LoadAs<Vector>(from); }
  static Packed Pack(Vector value) { return value; }
  static Scalar LoadOne(const Truth* from) { return from->bits; }
  static void StoreOne(Scalar value, Truth* to) { to->bits = value; }
};

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
struct Least {
  template <class V>
  static V Apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Greatest {
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

template <class V>
inline void Put(void* to, V value, bool stream) {
  if (stream) {
    Stream(to, value);
  } else {
    StoreAs(to, value);
  }
}

// T: the tensors' type; W: the transport's (slots and the others' sources).
// NS: number of sources where it is known when compiling, else 0.
template <class T, class W, class Operation, bool kDivide, int NS>
void ReduceLoop(const ReduceJob& job) {
  using Ours = Sums<T>;
  using Theirs = Sums<W>;
  using V = typename Ours::Vector;
  using Scalar = typename Ours::Scalar;
  constexpr bool kOneType = kSame<T, W>;
  constexpr size_t kLanes = Ours::kLanes;
  const int n = NS ? NS : job.nsources;
  // Copied where their number is known: whatever is stored, they stay the same,
  // in registers.
  const void* known[NS ? NS : 1];
  for (int q = 0; q < NS; ++q) known[q] = job.sources[q];
  const void* const* sources = NS ? known : job.sources;
  const int own = job.own;
  T* out = static_cast<T*>(job.out);
  W* slot = static_cast<W*>(job.slot);
  const bool stream_out = job.stream_out && CanStream(out);
  const bool stream_slot = job.stream_slot && CanStream(slot);
  const Scalar divisor = static_cast<Scalar>(job.divisor);
  const auto load = [&](int q, size_t i) -> V {
    if (kOneType || q != own) {
      return Theirs::Load(static_cast<const W*>(sources[q]) + i);
    }
    return Ours::Load(static_cast<const T*>(sources[q]) + i);
  };
  const auto load_one = [&](int q, size_t i) -> Scalar {
    if (kOneType || q != own) {
      return Theirs::LoadOne(static_cast<const W*>(sources[q]) + i);
    }
    return Ours::LoadOne(static_cast<const T*>(sources[q]) + i);
  };
  size_t i = 0;
  for (; i + kVectors * kLanes <= job.count; i += kVectors * kLanes) {
    V sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load(0, i + v * kLanes);
    for (int q = 1; q < n; ++q) {
      for (int v = 0; v < kVectors; ++v) {
        sums[v] =
            Operation::template Apply<V>(sums[v], load(q, i + v * kLanes));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      if (kDivide) sums[v] = sums[v] / divisor;
      const auto packed = Theirs::Pack(sums[v]);
      if (slot) Put(slot + i + v * kLanes, packed, stream_slot);
      if (out) {
        if constexpr (kOneType) {
          Put(out + i + v * kLanes, packed, stream_out);
        } else {
          Put(out + i + v * kLanes, Theirs::Round(sums[v]), stream_out);
        }
      }
    }
  }
  for (; i < job.count; ++i) {
    Scalar sum = load_one(0, i);
    for (int q = 1; q < n; ++q) {
      sum = static_cast<Scalar>(
          Operation::template Apply<Scalar>(sum, load_one(q, i)));
    }
    if (kDivide) sum = static_cast<Scalar>(sum / divisor);
    W packed;
    Theirs::StoreOne(sum, &packed);
    if (slot) slot[i] = packed;
    if (out) Ours::StoreOne(Theirs::LoadOne(&packed), out + i);
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
  for (; i + kFloats <= count; i += kFloats) {
    Put(to + i, Sums<W>::Pack(LoadAs<Floats>(from + i)), streams);
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
  for (; i + kFloats <= count; i += kFloats) {
    Put(to + i, Sums<W>::Load(from + i), streams);
  }
  for (; i < count; ++i) to[i] = Widen(from[i]);
  if (streams) StreamsDone();
}

template <class T, class W>
constexpr void FillFloats(ReduceKernel* row) {
  row[static_cast<int>(Op::kSum)] = Reduce<T, W, Add, false>;
  row[static_cast<int>(Op::kAverage)] = Reduce<T, W, Add, true>;
  row[static_cast<int>(Op::kMin)] = Reduce<T, W, Least, false>;
  row[static_cast<int>(Op::kMax)] = Reduce<T, W, Greatest, false>;
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
  FillFloats<Half, Half>(row(DType::kFloat16));
  FillFloats<Brain, Brain>(row(DType::kBFloat16));
  FillIntegers<signed char>(row(DType::kInt8));
  FillIntegers<uint8_t>(row(DType::kUInt8));
  FillIntegers<int32_t>(row(DType::kInt32));
  FillIntegers<int64_t>(row(DType::kInt64));
  ReduceKernel* truth = row(DType::kBool);
  truth[static_cast<int>(Op::kSum)] = Reduce<Truth, Truth, Or, false>;
  truth[static_cast<int>(Op::kMax)] = Reduce<Truth, Truth, Or, false>;
  truth[static_cast<int>(Op::kMin)] = Reduce<Truth, Truth, And, false>;
  truth[static_cast<int>(Op::kProduct)] = Reduce<Truth, Truth, And, false>;
  FillFloats<float, Half>(kernels.reduce_16[0]);
  FillFloats<float, Brain>(kernels.reduce_16[1]);
  kernels.narrow[0] = NarrowAll<Half>;
  kernels.narrow[1] = NarrowAll<Brain>;
  kernels.widen[0] = WidenAll<Half>;
  kernels.widen[1] = WidenAll<Brain>;
  return kernels;
}

}  // namespace
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_KERNELS_LOOPS_H_
