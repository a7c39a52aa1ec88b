// Element types of the kernels: how 16-bit floats become float32 and back.
//
// Each kernels_*.cc includes it and compiles it with an instruction set of its
// own. So everything is in an unnamed namespace, and no header with inline
// functions may be included here: the linker would keep one copy of them,
// perhaps the one that this processor cannot run.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// For functions of registers, because a call would pass registers in memory.
#define COLLECTIVE_INLINE inline __attribute__((always_inline))

namespace collective {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};

// As wide as the registers: compilers split wider vectors into small steps.
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
// A register of 16-bit floats is two of float32.
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes)));
struct Pair {
  Floats low, high;
};

// A vector at any address. (Not copied by memcpy: compilers turn small vectors
// into integers for that.)
template <class V>
struct __attribute__((packed, may_alias)) Unaligned {
  V value;
};

template <class V>
COLLECTIVE_INLINE V LoadAs(const void* from) {
  return static_cast<const Unaligned<V>*>(from)->value;
}

template <class V>
COLLECTIVE_INLINE void StoreAs(void* to, V value) {
  static_cast<Unaligned<V>*>(to)->value = value;
}

COLLECTIVE_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

COLLECTIVE_INLINE float FloatOf(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// ---- one element -----------------------------------------------------------

COLLECTIVE_INLINE float Widen(BFloat16 value) {
  return FloatOf(static_cast<uint32_t>(value.bits) << 16);
}

COLLECTIVE_INLINE float Widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t exponent = rest & 0x0f800000;
  if (exponent == 0x0f800000) return FloatOf(sign | rest | 0x7f800000);
  if (exponent) return FloatOf(sign | (rest + 0x38000000));
  // Subnormal: rest + 2^-14 is exact, and so is subtracting 2^-14 again.
  return FloatOf(sign | BitsOf(FloatOf(rest + 0x38800000) - 6.103515625e-05f));
}

// Both round to nearest even and keep a NaN a (quiet) NaN.
COLLECTIVE_INLINE void Narrow(float value, BFloat16* result) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    result->bits = static_cast<uint16_t>(bits >> 16 | 0x40);
  } else {
    result->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

COLLECTIVE_INLINE void Narrow(float value, Float16* result) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00 | (rest >> 13 & 0x3ff);
  } else if (rest >= 0x477ff000) {  // it rounds to 65536 or more
    half = 0x7c00;
  } else if (rest < 0x38800000) {  // subnormal: the addition rounds for us
    half = BitsOf(FloatOf(rest) + 0.5f) - 0x3f000000;
  } else {
    half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  }
  result->bits = static_cast<uint16_t>(sign | half);
}

// ---- a register of elements ------------------------------------------------
// The last argument selects the 16-bit type.

COLLECTIVE_INLINE Pair WidenRegister(Shorts halves, BFloat16) {
#if defined(__AVX512F__)
  const __m512i bits = (__m512i)halves;
  const __m512i low =
      _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0,
                       5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi32(16 << 16));
  constexpr __mmask32 kUpper = 0xAAAAAAAA;  // the upper halves; the others are zero
  return {(Floats)_mm512_maskz_permutexvar_epi16(kUpper, low, bits),
          (Floats)_mm512_maskz_permutexvar_epi16(kUpper, high, bits)};
#elif defined(__AVX2__)
  const __m256i none = _mm256_setzero_si256();
  const __m256i bits = _mm256_permute4x64_epi64((__m256i)halves, 0xD8);
  return {(Floats)_mm256_unpacklo_epi16(none, bits),
          (Floats)_mm256_unpackhi_epi16(none, bits)};
#elif defined(__SSE2__)
  const __m128i none = _mm_setzero_si128();
  return {(Floats)_mm_unpacklo_epi16(none, (__m128i)halves),
          (Floats)_mm_unpackhi_epi16(none, (__m128i)halves)};
#else
  Pair result;
  for (int i = 0; i < kFloats; ++i) {
    result.low[i] = Widen(BFloat16{halves[i]});
    result.high[i] = Widen(BFloat16{halves[i + kFloats]});
  }
  return result;
#endif
}

// Rounds to the values of bfloat16; only the upper halves of the result count.
// (AVX-512's own conversion flushes subnormals to zero, and is not faster.)
COLLECTIVE_INLINE Words RoundToBFloat16(Floats values) {
  const Words bits = (Words)values;
#if defined(__AVX512F__)
  const __mmask16 odd =
      _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(1 << 16));
  const __mmask16 nan =
      _mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q);
  __m512i rounded = (__m512i)(bits + 0x7fff);
  rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
  return (Words)_mm512_mask_or_epi32(rounded, nan, (__m512i)bits,
                                     _mm512_set1_epi32(0x400000));
#else
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  const Words quiet = bits | 0x400000;
#if defined(__AVX2__)
  return (Words)_mm256_blendv_ps(
      (__m256)rounded, (__m256)quiet,
      _mm256_cmp_ps((__m256)values, (__m256)values, _CMP_UNORD_Q));
#else
  const Words is_nan = (Words)(values != values);
  return (is_nan & quiet) | (~is_nan & rounded);
#endif
#endif
}

COLLECTIVE_INLINE Shorts NarrowRegister(Pair values, BFloat16) {
  const Words low = RoundToBFloat16(values.low), high = RoundToBFloat16(values.high);
#if defined(__AVX512F__)
  const __m512i odd =
      _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,
                       31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (Shorts)_mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high);
#elif defined(__AVX2__)
  const __m256i halves =
      _mm256_packus_epi32((__m256i)(low >> 16), (__m256i)(high >> 16));
  return (Shorts)_mm256_permute4x64_epi64(halves, 0xD8);
#elif defined(__SSE2__)
  // Packs with signs; packing without signs needs SSE4.1.
  return (Shorts)_mm_packs_epi32(_mm_srai_epi32((__m128i)low, 16),
                                 _mm_srai_epi32((__m128i)high, 16));
#else
  Shorts result;
  for (int i = 0; i < kFloats; ++i) {
    result[i] = static_cast<uint16_t>(low[i] >> 16);
    result[i + kFloats] = static_cast<uint16_t>(high[i] >> 16);
  }
  return result;
#endif
}

COLLECTIVE_INLINE Pair WidenRegister(Shorts halves, Float16) {
#if defined(__AVX512F__)
  const __m512i bits = (__m512i)halves;
  return {(Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(bits)),
          (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
#elif defined(__F16C__) && defined(__AVX2__)
  const __m256i bits = (__m256i)halves;
  return {(Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(bits)),
          (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
#else
  Pair result;
  for (int i = 0; i < kFloats; ++i) {
    result.low[i] = Widen(Float16{halves[i]});
    result.high[i] = Widen(Float16{halves[i + kFloats]});
  }
  return result;
#endif
}

COLLECTIVE_INLINE Shorts NarrowRegister(Pair values, Float16) {
#if defined(__AVX512F__)
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  return (Shorts)_mm512_inserti64x4(
      _mm512_castsi256_si512(_mm512_cvtps_ph((__m512)values.low, kNearest)),
      _mm512_cvtps_ph((__m512)values.high, kNearest), 1);
#elif defined(__F16C__) && defined(__AVX2__)
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  return (Shorts)_mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm256_cvtps_ph((__m256)values.low, kNearest)),
      _mm256_cvtps_ph((__m256)values.high, kNearest), 1);
#else
  Shorts result;
  for (int i = 0; i < kFloats; ++i) {
    Float16 low, high;
    Narrow(values.low[i], &low);
    Narrow(values.high[i], &high);
    result[i] = low.bits;
    result[i + kFloats] = high.bits;
  }
  return result;
#endif
}

// ---- streaming stores ------------------------------------------------------

// Writes a vector by a non-temporal store, to a multiple of its size.
template <class V>
COLLECTIVE_INLINE void Stream(void* to, V value) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
#else
  StoreAs(to, value);  // no store of arm64 pays here
#endif
}

// Orders streamed data before all later stores: non-temporal stores are weakly
// ordered, and the release of a counter would not cover them.
COLLECTIVE_INLINE void StreamsDone() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace collective
