// The inner loops: copying, and reducing several arrays into one.
//
// They are compiled once for each instruction set and chosen once at run time,
// so that one library runs everywhere and fast; the rest of the core sees only
// this interface.
#pragma once

#include <cstddef>

#include "kernels/types.h"

namespace collective {

// Reduces `count` elements of `nsources` arrays, in the given order, so that every
// rank gets the same bits.
//
// "stream" asks for non-temporal stores. They do not first fetch the line from
// the core that read it last: 1.5 times (near cores) to 10 times (far cores) as
// fast into memory that other ranks read. But they must never follow a read of
// the same line, and on private memory they pay only if it is out of cache.
struct ReduceJob {
  const void* const* sources;
  int nsources;
  int own;    // index of the source of the tensor's own type; the others are of
              // the transport type (often the same)
  void* out;  // user memory, tensor's type; may be null or equal a source;
              // like the sources, at any address
  size_t count;
  int divisor;           // 1, or the number of ranks for an average
  void* slot = nullptr;  // shared memory, transport type; may be null
  bool stream_out = false, stream_slot = false;
};

using ReduceKernel = void (*)(const ReduceJob& job);
using ConvertKernel = void (*)(void* target, const void* source, size_t count,
                               bool stream);

struct Kernels {
  const char* name;
  void (*copy)(void* target, const void* source, size_t bytes, bool stream);
  // Indexed by dtype and by Op; kAverage is kSum with a divisor. Null: not
  // defined.
  ReduceKernel reduce[kDTypes][kOps];
  // float32 tensors on a 16-bit transport: [0] float16, [1] bfloat16.
  ReduceKernel reduce_16[2][kOps];
  ConvertKernel narrow[2];
  ConvertKernel widen[2];
};

// The best kernels that this processor can run. For tests,
// COLLECTIVE_SIMD=baseline|avx2|avx512 limits the choice.
const Kernels& BestKernels();

// A memcpy at full speed from and to any address (kernels_loops.h).
void CopyBytes(void* to, const void* from, size_t bytes);

// Constants, because a function that returned one would itself be compiled for an
// instruction set that the processor may lack. A null name: not compiled in.
extern const Kernels kKernelsBaseline;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;

}  // namespace collective
