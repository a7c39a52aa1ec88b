// Element types of the kernels: how 16-bit floats become float32 and back.
//
// Included by each kernels_*.cc with that file's instruction set; everything is
// in an unnamed namespace, and no header with inline functions of its own may
// be included here: the linker would keep one copy of them, perhaps the one
// that this processor cannot run.
#ifndef COLLECTIVE_NATIVE_KERNELS_ELEMENTS_H_
#define COLLECTIVE_NATIVE_KERNELS_ELEMENTS_H_

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace collective {
namespace {

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};
struct Truth {
  uint8_t bits;
};

// As wide as the registers: of wider ones, compilers make many small steps.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kFloats = kVectorBytes / 4;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

template <class V>
inline V LoadAs(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void StoreAs(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// ---- one element -----------------------------------------------------------

inline float Widen(Brain value) {
  return FloatOf(static_cast<uint32_t>(value.bits) << 16);
}

inline float Widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t exponent = rest & 0x0f800000;
  if (exponent == 0x0f800000) return FloatOf(sign | rest | 0x7f800000);
  if (exponent) return FloatOf(sign | (rest + 0x38000000));
  // Subnormal: rest + 2^-14 is exact, and so is taking 2^-14 away again.
  return FloatOf(sign | BitsOf(FloatOf(rest + 0x38800000) - 6.103515625e-05f));
}

// Both round to nearest even and keep a NaN a (quiet) NaN.
inline void Narrow(float value, Brain* result) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    result->bits = static_cast<uint16_t>(bits >> 16 | 0x40);
  } else {
    result->bits =
        static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

inline void Narrow(float value, Half* result) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00 | (rest >> 13 & 0x3ff);
  } else if (rest >= 0x477ff000) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (rest < 0x38800000) {  // subnormal: the addition rounds for us
    half = BitsOf(FloatOf(rest) + 0.5f) - 0x3f000000;
  } else {
    half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  }
  result->bits = static_cast<uint16_t>(sign | half);
}

// ---- a vector of elements --------------------------------------------------
// The last argument says which 16-bit type it is.

inline Floats WidenBlock(Shorts halves, Brain) {
#if defined(__AVX512F__)
  const __m512i words = _mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
  const __m256i words = _mm256_cvtepu16_epi32((__m128i)halves);
#else
  const Words words = __builtin_convertvector(halves, Words);
#endif
  return (Floats)((Words)words << 16);
}

// Rounds to what bfloat16 can hold; only the upper halves of the result count.
// (AVX-512's own conversion flushes subnormals to zero.)
inline Words RoundToBrain(Floats values) {
  const Words bits = (Words)values;
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words quiet = bits | 0x400000;
#if defined(__AVX512F__)
  return (Words)_mm512_mask_mov_epi32(
      (__m512i)rounded,
      _mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q),
      (__m512i)quiet);
#elif defined(__AVX2__)
  return (Words)_mm256_blendv_ps(
      (__m256)rounded, (__m256)quiet,
      _mm256_cmp_ps((__m256)values, (__m256)values, _CMP_UNORD_Q));
#else
  const Words is_nan = (Words)(values != values);
  return (is_nan & quiet) | (~is_nan & rounded);
#endif
}

inline Shorts NarrowBlock(Floats values, Brain) {
  const Words halves = RoundToBrain(values) >> 16;
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtepi32_epi16((__m512i)halves);
#elif defined(__AVX2__)
  return (Shorts)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)halves),
                                  _mm256_extracti128_si256((__m256i)halves, 1));
#else
  return __builtin_convertvector(halves, Shorts);
#endif
}

// What WidenBlock makes of what NarrowBlock makes of it.
inline Floats RoundBlock(Floats values, Brain) {
  return (Floats)(RoundToBrain(values) & 0xffff0000);
}

#if defined(__AVX512F__)
inline Floats WidenBlock(Shorts halves, Half) {
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
}
inline Shorts NarrowBlock(Floats values, Half) {
  return (Shorts)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__F16C__) && defined(__AVX2__)
inline Floats WidenBlock(Shorts halves, Half) {
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
}
inline Shorts NarrowBlock(Floats values, Half) {
  return (Shorts)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
}
#else
inline Floats WidenBlock(Shorts halves, Half) {
  Floats result;
  for (int i = 0; i < kFloats; ++i) result[i] = Widen(Half{halves[i]});
  return result;
}
inline Shorts NarrowBlock(Floats values, Half) {
  Shorts result;
  for (int i = 0; i < kFloats; ++i) {
    Half half;
    Narrow(values[i], &half);
    result[i] = half.bits;
  }
  return result;
}
#endif

inline Floats RoundBlock(Floats values, Half) {
  return WidenBlock(NarrowBlock(values, Half{}), Half{});
}

// ---- streaming stores ------------------------------------------------------

// Writes a vector around the caches. `to` must be aligned to 16 bytes.
//
// The vector is taken apart in registers. Read as memory, it would be kept in
// memory from the start, also in the loops that never come here: each of their
// stores would have a second one before it, and the queue of stores is what
// they wait for. (4 ranks then took 195 us for 1 MB instead of 160.)
template <class V>
inline void Stream(void* to, V value) {
#if defined(__x86_64__)
  [[maybe_unused]] char* bytes = static_cast<char*>(to);
  [[maybe_unused]] const uintptr_t address = reinterpret_cast<uintptr_t>(to);
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    const __m512i bits = (__m512i)value;
    if (address % 64 == 0) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
    } else {
      Stream(bytes, _mm512_extracti64x4_epi64(bits, 0));
      Stream(bytes + 32, _mm512_extracti64x4_epi64(bits, 1));
    }
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    const __m256i bits = (__m256i)value;
    if (address % 32 == 0) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits);
    } else {
      Stream(bytes, _mm256_extracti128_si256(bits, 0));
      Stream(bytes + 16, _mm256_extracti128_si256(bits, 1));
    }
  }
#endif
  if constexpr (sizeof(V) == 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
  }
  if constexpr (sizeof(V) == 8) {
    _mm_stream_si64(reinterpret_cast<long long*>(to), (long long)value);
  }
#else
  StoreAs(to, value);  // arm64 has no store that pays here
#endif
}

// Makes streamed data visible before whatever is stored next.
inline void StreamsDone() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline bool CanStream(const void* to) {
  return reinterpret_cast<uintptr_t>(to) % 16 == 0;
}

}  // namespace
}  // namespace collective

#endif  // COLLECTIVE_NATIVE_KERNELS_ELEMENTS_H_
