#include "algorithms/flat_buffer.h"

namespace collective {

FlatBuffer::FlatBuffer(Communicator& ranks, const Reduction& reduction)
    : ranks_(ranks),
      reduction_(reduction),
      size_(SizeOf(reduction.dtype)),
      count_(reduction.tensors.length()) {
  const Op op = reduction.request.op == Op::kAverage ? Op::kSum : reduction.request.op;
  combine_ =
      ranks.kernels().reduce[static_cast<int>(reduction.dtype)][static_cast<int>(op)];
  reduction.tensors.ForEach(0, count_, 0, [&](const Piece& piece) {
    if (piece.count != count_) return;
    const Tensor& tensor = piece.tensor;
    packed_ = false;
    data_ = static_cast<char*>(tensor.output);
    if (tensor.input != tensor.output) {
      CopyBytes(tensor.output, tensor.input, bytes(piece.count));
    }
  });
  if (!packed_) return;
  buffer_.assign(bytes(count_), 0);
  data_ = buffer_.data();
  reduction.tensors.ForEach(0, count_, 0, [&](const Piece& piece) {
    const auto* input = static_cast<const char*>(piece.tensor.input);
    CopyBytes(at(piece.position), input + bytes(piece.offset), bytes(piece.count));
  });
}

void FlatBuffer::Finish() {
  if (!packed_) return;
  reduction_.tensors.ForEach(0, count_, 0, [&](const Piece& piece) {
    auto* output = static_cast<char*>(piece.tensor.output);
    CopyBytes(output + bytes(piece.offset), at(piece.position), bytes(piece.count));
  });
}

void FlatBuffer::Reduce(int to, size_t send_begin, size_t send_end, int from,
                        size_t begin, size_t end) {
  ranks_.p2p().Exchange(to, at(send_begin), bytes(send_end - send_begin), from,
                        bytes(end - begin), reduction_.request,
                        [&](const char* received, size_t offset, size_t length) {
                          char* mine = at(begin) + offset;
                          const void* sources[2] = {received, mine};
                          combine_({sources, 2, 1, mine, length / size_, 1});
                        });
}

void FlatBuffer::Replace(int to, size_t send_begin, size_t send_end, int from,
                         size_t begin, size_t end) {
  ranks_.p2p().Exchange(to, at(send_begin), bytes(send_end - send_begin), from,
                        at(begin), bytes(end - begin), reduction_.request);
}

void FlatBuffer::Scale(size_t begin, size_t end) {
  if (reduction_.divisor == 1 || begin == end) return;
  const void* sources[1] = {at(begin)};
  reduction_.kernel({sources, 1, 0, at(begin), end - begin, reduction_.divisor});
}

}  // namespace collective
