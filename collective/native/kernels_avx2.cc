// Kernels for AVX2 and F16C; CMake compiles this file alone with those.
#include "kernels_loops.h"

namespace collective {

const Kernels* KernelsAvx2() {
#if defined(__AVX2__) && defined(__F16C__)
  static const Kernels kernels = MakeKernels("avx2");
  return &kernels;
#else
  return nullptr;
#endif
}

}  // namespace collective
