// Kernels for AVX2 and F16C; CMake compiles this file alone with those.
#include "kernels/kernels_loops.h"

namespace collective {

#if defined(__AVX2__) && defined(__F16C__)
constexpr Kernels kKernelsAvx2 = MakeKernels("avx2");
#else
constexpr Kernels kKernelsAvx2 = {};
#endif

}  // namespace collective
