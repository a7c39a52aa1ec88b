// A list of tensors of one type, seen as one long array.
//
// In this way many small tensors are reduced as one message, without a copy into a
// fusion buffer.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/types.h"

namespace collective {

// A part of a tensor, in elements.
struct Piece {
  const Tensor& tensor;
  size_t offset;    // offset in the tensor
  size_t position;  // offset in the long array
  size_t count;
};

// Each tensor begins on a multiple of kAlign elements of the long array, so that it
// begins on a cache line of shared memory after any number of others.
class TensorList {
 public:
  static constexpr size_t kAlign = 64;

  void Add(const Tensor& tensor) {
    if (tensor.count == 0) return;
    tensors_.push_back(&tensor);
    starts_.push_back(length_);
    length_ += (static_cast<size_t>(tensor.count) + kAlign - 1) / kAlign * kAlign;
    end_ = starts_.back() + static_cast<size_t>(tensor.count);
  }

  // Number of elements, including the gaps between tensors.
  size_t length() const { return end_; }

  // Calls visit(piece) for every part of a tensor in [begin, end). The pieces'
  // positions are counted from `origin`.
  template <class Visit>
  void ForEach(size_t begin, size_t end, size_t origin, Visit&& visit) const {
    size_t i =
        std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin();
    for (i = i ? i - 1 : 0; i < starts_.size() && starts_[i] < end; ++i) {
      const size_t count = static_cast<size_t>(tensors_[i]->count);
      const size_t from = begin > starts_[i] ? begin - starts_[i] : 0;
      const size_t to = std::min(end - starts_[i], count);
      if (from >= to) continue;
      visit(Piece{*tensors_[i], from, starts_[i] + from - origin, to - from});
    }
  }

 private:
  std::vector<const Tensor*> tensors_;
  std::vector<size_t> starts_;
  size_t length_ = 0;  // up to the beginning of the next tensor
  size_t end_ = 0;
};

// The beginning of the part of `member` if `count` elements are divided among
// `size` ranks in multiples of `align`.
inline size_t ShareBegin(size_t count, int member, int size, size_t align) {
  const size_t lines = (count + align - 1) / align;
  return std::min(count, (lines * member + size - 1) / size * align);
}

}  // namespace collective
