// Kernels for any processor the library was compiled for (SSE2, NEON).
#include "kernels/kernels_loops.h"

namespace collective {

constexpr Kernels kKernelsBaseline = MakeKernels("baseline");

}  // namespace collective
