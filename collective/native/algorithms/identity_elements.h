// Values that change no result of a reduction.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_IDENTITY_ELEMENTS_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_IDENTITY_ELEMENTS_H_

#include "kernels/types.h"

namespace collective {

// Fills the output: 0 for a sum or an average, 1 for a product, and the
// greatest or least number for a minimum or maximum.
void FillNeutral(Op op, const Tensor& tensor);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_IDENTITY_ELEMENTS_H_
