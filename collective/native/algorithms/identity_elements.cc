#include "algorithms/identity_elements.h"

#include <algorithm>
#include <limits>

namespace collective {
namespace {

// Zero, one, the greatest and the least of a type.
template <class T>
struct Numbers {
  T zero, one, greatest, least;
};

template <class T>
constexpr Numbers<T> NumbersOf() {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity) {
    return {0, 1, Limits::infinity(), -Limits::infinity()};
  } else {
    return {0, 1, Limits::max(), Limits::min()};
  }
}

// As bits: infinity is the greatest of a 16-bit float.
constexpr Numbers<uint16_t> kFloat16 = {0, 0x3C00, 0x7C00, 0xFC00};
constexpr Numbers<uint16_t> kBFloat16 = {0, 0x3F80, 0x7F80, 0xFF80};
constexpr Numbers<uint8_t> kBool = {0, 1, 1, 0};

template <class T>
void Fill(Op op, const Tensor& tensor, const Numbers<T>& numbers) {
  const T value = op == Op::kProduct ? numbers.one
                  : op == Op::kMin   ? numbers.greatest
                  : op == Op::kMax   ? numbers.least
                                     : numbers.zero;
  std::fill_n(static_cast<T*>(tensor.output), tensor.count, value);
}

}  // namespace

void FillNeutral(Op op, const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return Fill(op, tensor, NumbersOf<float>());
    case DType::kFloat64:
      return Fill(op, tensor, NumbersOf<double>());
    case DType::kFloat16:
      return Fill(op, tensor, kFloat16);
    case DType::kBFloat16:
      return Fill(op, tensor, kBFloat16);
    case DType::kInt8:
      return Fill(op, tensor, NumbersOf<int8_t>());
    case DType::kUInt8:
      return Fill(op, tensor, NumbersOf<uint8_t>());
    case DType::kInt32:
      return Fill(op, tensor, NumbersOf<int32_t>());
    case DType::kInt64:
      return Fill(op, tensor, NumbersOf<int64_t>());
    case DType::kBool:
      return Fill(op, tensor, kBool);
  }
}

}  // namespace collective
