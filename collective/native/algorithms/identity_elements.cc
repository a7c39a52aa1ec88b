#include "algorithms/identity_elements.h"

#include <algorithm>
#include <limits>

namespace collective {
namespace {

template <class T>
struct Values {
  T zero, one, greatest, least;
};

template <class T>
constexpr Values<T> ValuesOf() {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity) {
    return {0, 1, Limits::infinity(), -Limits::infinity()};
  } else {
    return {0, 1, Limits::max(), Limits::min()};
  }
}

// 16-bit floats as bits. Infinity is their greatest value.
constexpr Values<uint16_t> kFloat16 = {0, 0x3C00, 0x7C00, 0xFC00};
constexpr Values<uint16_t> kBFloat16 = {0, 0x3F80, 0x7F80, 0xFF80};
constexpr Values<uint8_t> kBool = {0, 1, 1, 0};

template <class T>
void Fill(Op op, const Tensor& tensor, const Values<T>& values) {
  const T value = op == Op::kProduct ? values.one
                  : op == Op::kMin   ? values.greatest
                  : op == Op::kMax   ? values.least
                                     : values.zero;
  std::fill_n(static_cast<T*>(tensor.output), tensor.count, value);
}

}  // namespace

void FillIdentity(Op op, const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return Fill(op, tensor, ValuesOf<float>());
    case DType::kFloat64:
      return Fill(op, tensor, ValuesOf<double>());
    case DType::kFloat16:
      return Fill(op, tensor, kFloat16);
    case DType::kBFloat16:
      return Fill(op, tensor, kBFloat16);
    case DType::kInt8:
      return Fill(op, tensor, ValuesOf<int8_t>());
    case DType::kUInt8:
      return Fill(op, tensor, ValuesOf<uint8_t>());
    case DType::kInt32:
      return Fill(op, tensor, ValuesOf<int32_t>());
    case DType::kInt64:
      return Fill(op, tensor, ValuesOf<int64_t>());
    case DType::kBool:
      return Fill(op, tensor, kBool);
  }
}

}  // namespace collective
