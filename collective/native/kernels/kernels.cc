// Chooses the kernels that this processor can run.
#include "kernels/kernels.h"

#include <cstdlib>
#include <string>

namespace collective {
namespace {

#if defined(__x86_64__)
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels& Choose() {
  const char* limit = std::getenv("COLLECTIVE_SIMD");
  const std::string most = limit && *limit ? limit : "avx512";
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (kKernelsAvx512.name && most == "avx512" && HasAvx512()) {
    return kKernelsAvx512;
  }
  if (kKernelsAvx2.name && most != "baseline" && HasAvx2()) return kKernelsAvx2;
#endif
  return kKernelsBaseline;
}

}  // namespace

const Kernels& BestKernels() {
  static const Kernels& best = Choose();
  return best;
}

void CopyBytes(void* to, const void* from, size_t bytes) {
  BestKernels().copy(to, from, bytes, false);
}

}  // namespace collective
