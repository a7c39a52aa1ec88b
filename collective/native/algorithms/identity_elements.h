// The identity elements of the reductions: values that change no result.
//
// A rank that has joined (join.h) contributes them to the reductions of the
// other ranks.
#pragma once

#include "kernels/types.h"

namespace collective {

// Fills the output: 0 for a sum or an average, 1 for a product, the greatest
// value of the type for a minimum and the least for a maximum.
void FillIdentity(Op op, const Tensor& tensor);

}  // namespace collective
