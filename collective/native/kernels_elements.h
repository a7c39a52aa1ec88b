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

// 16 floats and the like: wider than the registers where those are narrow; the
// compiler then takes several.
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));

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

// ---- 16 elements -----------------------------------------------------------

inline Floats WidenBlock(const Brain* from) {
  const Words words = __builtin_convertvector(LoadAs<Shorts>(from), Words)
                      << 16;
  return LoadAs<Floats>(&words);
}

inline void NarrowBlock(Floats values, Brain* to) {
  const Words bits = LoadAs<Words>(&values);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words quiet = bits >> 16 | 0x40;
  const Words is_nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
  const Words chosen = (is_nan & quiet) | (~is_nan & rounded);
  StoreAs(to, __builtin_convertvector(chosen, Shorts));
}

#if defined(__AVX512F__)
inline Floats WidenBlock(const Half* from) {
  return (Floats)_mm512_cvtph_ps(LoadAs<__m256i>(from));
}
inline void NarrowBlock(Floats values, Half* to) {
  StoreAs(to, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
inline Floats WidenBlock(const Half* from) {
  Floats result;
  char* bytes = reinterpret_cast<char*>(&result);
  for (int i = 0; i < 2; ++i) {
    StoreAs(bytes + 32 * i, _mm256_cvtph_ps(LoadAs<__m128i>(from + 8 * i)));
  }
  return result;
}
inline void NarrowBlock(Floats values, Half* to) {
  const char* bytes = reinterpret_cast<const char*>(&values);
  for (int i = 0; i < 2; ++i) {
    StoreAs(to + 8 * i, _mm256_cvtps_ph(LoadAs<__m256>(bytes + 32 * i),
                                        _MM_FROUND_TO_NEAREST_INT));
  }
}
#else
inline Floats WidenBlock(const Half* from) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = Widen(from[i]);
  return result;
}
inline void NarrowBlock(Floats values, Half* to) {
  for (int i = 0; i < 16; ++i) Narrow(values[i], to + i);
}
#endif

// ---- streaming stores ------------------------------------------------------

// Writes a vector around the caches. `to` must be aligned to 16 bytes.
template <class V>
inline void Stream(void* to, V value) {
#if defined(__AVX512F__)
  if (sizeof(V) == 64 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to),
                        LoadAs<__m512i>(&value));
    return;
  }
#endif
#if defined(__AVX2__)
  if (sizeof(V) >= 32 && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    const char* bytes = reinterpret_cast<const char*>(&value);
    for (size_t i = 0; i < sizeof(V); i += 32) {
      _mm256_stream_si256(
          reinterpret_cast<__m256i*>(static_cast<char*>(to) + i),
          LoadAs<__m256i>(bytes + i));
    }
    return;
  }
#endif
#if defined(__x86_64__)
  const char* bytes = reinterpret_cast<const char*>(&value);
  for (size_t i = 0; i < sizeof(V); i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i),
                     LoadAs<__m128i>(bytes + i));
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
