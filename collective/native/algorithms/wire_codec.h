// The form in which elements of a reduction travel between ranks: unchanged, or
// float32 narrowed to 16 bits.
//
// It converts while it copies into and out of shared memory, so that a narrow
// transport costs no pass of its own.
#pragma once

#include "algorithms/all_reduce.h"

namespace collective {

class WireCodec {
 public:
  explicit WireCodec(const Reduction& reduction)
      : size_(SizeOf(reduction.dtype)),
        bytes_(SizeOf(reduction.transport)),
        narrow_(reduction.transport != reduction.dtype),
        narrow_type_(reduction.transport == DType::kBFloat16) {}

  // Size of an element on the wire.
  size_t bytes() const { return bytes_; }
  bool narrow() const { return narrow_; }

  const char* Input(const Piece& piece) const {
    return static_cast<const char*>(piece.tensor.input) + piece.offset * size_;
  }
  char* Output(const Piece& piece) const {
    return static_cast<char*>(piece.tensor.output) + piece.offset * size_;
  }
  // Copies from a tensor's input. `stream`: by non-temporal stores (kernels.h).
  void CopyIn(void* to, const Piece& piece, bool stream) const {
    if (narrow_) {
      kernels_.narrow[narrow_type_](to, Input(piece), piece.count, stream);
    } else {
      kernels_.copy(to, Input(piece), piece.count * size_, stream);
    }
  }
  // Copies to its output.
  void CopyOut(const Piece& piece, const void* from, bool stream) const {
    if (narrow_) {
      kernels_.widen[narrow_type_](Output(piece), from, piece.count, stream);
    } else {
      kernels_.copy(Output(piece), from, piece.count * size_, stream);
    }
  }

 private:
  const Kernels& kernels_ = BestKernels();
  const size_t size_;   // bytes of an element of the tensors
  const size_t bytes_;  // and on the wire
  const bool narrow_;
  const bool narrow_type_;  // index of Kernels::narrow: bfloat16
};

}  // namespace collective
