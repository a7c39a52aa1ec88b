// Kernels for AVX-512 (F, BW, DQ, VL); CMake compiles this file alone with
// those.
#include "kernels/kernels_loops.h"

namespace collective {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr Kernels kKernelsAvx512 = MakeKernels("avx512");
#else
constexpr Kernels kKernelsAvx512 = {};
#endif

}  // namespace collective
