#include "algorithms/join.h"

#include <cstring>
#include <vector>

#include "algorithms/identity_elements.h"
#include "algorithms/request_codec.h"
#include "execute.h"
#include "membership/mismatch.h"

namespace collective {
namespace {

constexpr size_t kAlign = 64;  // a cache line, as the kernels like it

bool CanBeJoined(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kAllGather;
}

// One tensor of bytes.
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

// The request of `caller`, without its data.
Request ReceiveRequest(Communicator& ranks, int caller, const Request& mine) {
  std::vector<char> bytes;
  if (ranks.me() == caller) bytes = Encode(mine);
  uint64_t size = bytes.size();
  Broadcast(ranks, caller, &size, sizeof(size));
  bytes.resize(size);
  Broadcast(ranks, caller, bytes.data(), bytes.size());
  return Decode(bytes);
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
  again.posted = false;
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
    // A mistake of the ranks that call: they get the error and may continue.
    const bool not_ours = failure.code() == Code::kFailedPrecondition ||
                          failure.code() == Code::kInvalidArgument;
    if (!not_ours || ranks.job().broken()) throw;
  }
  return false;
}

Announcement AgreeOnNext(Communicator& ranks, Announcement announcement) {
  uint8_t flag = announcement.joined;
  std::vector<uint8_t> flags(ranks.size());
  Request gather =
      RequestFor(Kind::kAllGather, "which ranks have joined", &flag, 1);
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
