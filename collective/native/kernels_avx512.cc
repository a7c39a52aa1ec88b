// Kernels for AVX-512 (F, BW, DQ, VL); CMake compiles this file alone with
// those.
#include "kernels_loops.h"

namespace collective {

const Kernels* KernelsAvx512() {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  static const Kernels kernels = MakeKernels("avx512");
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace collective
