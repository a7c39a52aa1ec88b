#include "kernels.h"

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
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

const Kernels* Choose() {
  const char* wish = std::getenv("COLLECTIVE_SIMD");
  const std::string most = wish ? wish : "avx512";
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (most == "avx512" && KernelsAvx512() && HasAvx512()) {
    return KernelsAvx512();
  }
  if (most != "baseline" && KernelsAvx2() && HasAvx2()) return KernelsAvx2();
#endif
  return KernelsBaseline();
}

}  // namespace

const Kernels& BestKernels() {
  static const Kernels* const best = Choose();
  return *best;
}

}  // namespace collective
