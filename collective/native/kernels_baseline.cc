// Kernels for any processor the library was compiled for (SSE2, NEON).
#include "kernels_loops.h"

namespace collective {

const Kernels* KernelsBaseline() {
  static const Kernels kernels = MakeKernels("baseline");
  return &kernels;
}

}  // namespace collective
