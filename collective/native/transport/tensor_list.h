// A list of tensors of one type seen as one long array, without copying it.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_TENSOR_LIST_H_
#define COLLECTIVE_NATIVE_TRANSPORT_TENSOR_LIST_H_

#include <algorithm>
#include <vector>

#include "kernels/types.h"

namespace collective {

// Each tensor begins on a multiple of kAlign elements of the long array, so
// that its place in shared memory is on a cache line whatever lies before it.
class Span {
 public:
  static constexpr size_t kAlign = 64;

  void Add(const Tensor& tensor) {
    if (tensor.count == 0) return;
    tensors_.push_back(&tensor);
    starts_.push_back(length_);
    length_ +=
        (static_cast<size_t>(tensor.count) + kAlign - 1) / kAlign * kAlign;
    end_ = starts_.back() + static_cast<size_t>(tensor.count);
  }

  // Elements, gaps included.
  size_t length() const { return end_; }

  // Calls visit(tensor, offset in it, position in the long array, count) for
  // all that lies in [begin, end).
  template <class Visit>
  void ForEach(size_t begin, size_t end, Visit&& visit) const {
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), begin) -
               starts_.begin();
    for (i = i ? i - 1 : 0; i < starts_.size() && starts_[i] < end; ++i) {
      const size_t count = static_cast<size_t>(tensors_[i]->count);
      const size_t from = begin > starts_[i] ? begin - starts_[i] : 0;
      const size_t to = std::min(end - starts_[i], count);
      if (from < to) visit(*tensors_[i], from, starts_[i] + from, to - from);
    }
  }

 private:
  std::vector<const Tensor*> tensors_;
  std::vector<size_t> starts_;
  size_t length_ = 0;  // up to where the next tensor begins
  size_t end_ = 0;
};

// Where the part of `member` begins when `count` elements are shared out among
// `size` ranks in multiples of `align`.
inline size_t ShareBegin(size_t count, int member, int size, size_t align) {
  const size_t lines = (count + align - 1) / align;
  return std::min(count, (lines * member + size - 1) / size * align);
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_TENSOR_LIST_H_
