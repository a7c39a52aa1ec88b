#include "algorithms/join.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "algorithms/collectives.h"
#include "membership/mismatch.h"

namespace collective {
namespace {

constexpr size_t kAlign = 64;  // a cache line, which is fast for the kernels

bool CanBeJoined(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kAllGather;
}

// A request for one tensor of bytes.
Request RequestFor(Kind kind, const char* name, void* data, size_t bytes) {
  Request request;
  request.kind = kind;
  request.name = name;
  request.tensors.resize(1);
  Tensor& tensor = request.tensors[0];
  tensor.input = tensor.output = data;
  tensor.count = static_cast<int64_t>(bytes);
  tensor.dtype = DType::kUInt8;
  tensor.shape = {tensor.count};
  return request;
}

void Broadcast(Communicator& ranks, int root, void* data, size_t bytes) {
  Request request =
      RequestFor(Kind::kBroadcast, "for ranks that have joined", data, bytes);
  request.root = root;
  Execute(ranks, request);
}

// Copies a request to bytes or from them, without its tensors' data. Works only
// between processes of one machine type and one build: numbers are copied as they
// lie in memory.
struct RequestCodec {
  std::vector<char>& bytes;
  const bool reads;
  size_t at = 0;

  template <class T>
  void operator()(T& value) {
    if (!reads) bytes.resize(at + sizeof(T));
    void* const target = reads ? static_cast<void*>(&value) : &bytes[at];
    std::memcpy(target, reads ? static_cast<void*>(&bytes[at]) : &value, sizeof(T));
    at += sizeof(T);
  }
  template <class List>
  void Each(List& list) {
    size_t size = list.size();
    (*this)(size);
    list.resize(size);
    for (auto& one : list) (*this)(one);
  }
  void operator()(Tensor& tensor) {
    (*this)(tensor.count);
    (*this)(tensor.dtype);
    Each(tensor.shape);
  }
  void operator()(Request& request) {
    (*this)(request.kind);
    (*this)(request.op);
    (*this)(request.root);
    (*this)(request.algorithm);
    (*this)(request.has_transport);
    (*this)(request.transport);
    Each(request.name);
    Each(request.counts);
    Each(request.tensors);
  }
};

// The request of `caller`, without its data.
Request ReceiveRequest(Communicator& ranks, int caller, Request request) {
  std::vector<char> bytes;
  if (ranks.me() == caller) RequestCodec{bytes, false}(request);
  uint64_t size = bytes.size();
  Broadcast(ranks, caller, &size, sizeof(size));
  bytes.resize(size);
  Broadcast(ranks, caller, bytes.data(), bytes.size());
  Request received;
  RequestCodec{bytes, true}(received);
  return received;
}

// ---- identity elements: values that change no result ------------------------

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

// Fills the output: 0 for a sum or an average, 1 for a product, the greatest
// value of the type for a minimum and the least for a maximum.
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

// Runs the call of the other ranks with identity elements, or zero rows.
void RunWithIdentity(Communicator& ranks, Request request) {
  const bool rows = request.kind == Kind::kAllGather;
  size_t bytes = 0;
  std::vector<size_t> starts;
  for (Tensor& tensor : request.tensors) {
    int64_t count = tensor.count;
    if (rows) {
      tensor.count = request.counts.at(ranks.me());
      count = 0;
      for (int64_t each : request.counts) count += each;
    }
    starts.push_back(bytes);
    bytes += static_cast<size_t>(count) * SizeOf(tensor.dtype);
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  }
  std::vector<char> outputs(bytes), inputs(rows ? bytes : 0);
  for (size_t i = 0; i < starts.size(); ++i) {
    Tensor& tensor = request.tensors[i];
    tensor.output = outputs.data() + starts[i];
    // If the other ranks gather their numbers of rows, this rank's is zero.
    tensor.input = rows ? inputs.data() + starts[i] : tensor.output;
    if (!rows) FillIdentity(request.op, tensor);
  }
  Execute(ranks, request);
}

}  // namespace

void ExecuteWithJoined(Communicator& ranks, const Request& request) {
  try {
    return Execute(ranks, request);
  } catch (const RanksHaveJoined& joined) {
    ReceiveRequest(ranks, joined.caller, request);
    if (!CanBeJoined(request.kind)) {
      throw Failure(
          Code::kFailedPrecondition,
          request.Describe() + ": rank " + joined.ranks + " has called join()",
          "until all have, only allreduce and allgather are of use");
    }
  }
  Request again = request;
  again.posted_at = 0;
  Execute(ranks, again);
}

bool ServeJoined(Communicator& ranks, const Request& join) {
  try {
    try {
      ranks.Post(join);
      ranks.VerifyMatch(join);
      return true;
    } catch (const RanksHaveJoined& joined) {
      Request request = ReceiveRequest(ranks, joined.caller, join);
      ranks.job().CountServed();
      if (CanBeJoined(request.kind)) RunWithIdentity(ranks, std::move(request));
    }
  } catch (const Failure& failure) {
    // The calling ranks made a mistake: they get the error and may continue.
    const bool not_ours = failure.code() == Code::kFailedPrecondition ||
                          failure.code() == Code::kInvalidArgument;
    if (!not_ours || ranks.job().broken()) throw;
  }
  return false;
}

Announcement AgreeOnNext(Communicator& ranks, Announcement announcement) {
  uint8_t flag = announcement.joined;
  std::vector<uint8_t> flags(ranks.size());
  Request gather = RequestFor(Kind::kAllGather, "which ranks have joined", &flag, 1);
  gather.tensors[0].output = flags.data();
  gather.counts.assign(ranks.size(), 1);
  Execute(ranks, gather);
  int caller = 0;
  while (caller < ranks.size() && flags[caller]) ++caller;
  if (caller < ranks.size()) {
    Broadcast(ranks, caller, &announcement, sizeof(announcement));
  }
  return announcement;
}

}  // namespace collective
