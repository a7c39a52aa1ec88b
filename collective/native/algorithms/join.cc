#include "algorithms/join.h"

#include <cstring>
#include <vector>

#include "algorithms/identity_elements.h"
#include "algorithms/request_codec.h"
#include "execute.h"
#include "membership/mismatch.h"

namespace collective {
namespace {

constexpr size_t kAlign = 64;

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

// What `caller` calls, without its data.
Request Told(Communicator& ranks, int caller, const Request& mine) {
  std::vector<char> packed;
  if (ranks.me() == caller) packed = Pack(mine);
  uint64_t bytes = packed.size();
  Broadcast(ranks, caller, &bytes, sizeof(bytes));
  packed.resize(bytes);
  Broadcast(ranks, caller, packed.data(), packed.size());
  return Unpack(packed);
}

// The call of the others, by a rank that has nothing to give.
void CallWithNothing(Communicator& ranks, Request request) {
  const bool rows = request.kind == Kind::kAllGather;
  size_t bytes = 0;
  std::vector<size_t> starts;
  for (Tensor& tensor : request.tensors) {
    int64_t count = tensor.count;
    if (rows) {
      tensor.count = request.counts.at(ranks.me());
      count = 0;
      for (int64_t theirs : request.counts) count += theirs;
    }
    starts.push_back(bytes);
    bytes += static_cast<size_t>(count) * SizeOf(tensor.dtype);
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  }
  std::vector<char> outputs(bytes), inputs(rows ? bytes : 0);
  for (size_t i = 0; i < starts.size(); ++i) {
    Tensor& tensor = request.tensors[i];
    tensor.output = outputs.data() + starts[i];
    // Zero rows, where the others ask for their number.
    tensor.input = rows ? inputs.data() + starts[i] : tensor.output;
    if (!rows) FillNeutral(request.op, tensor);
  }
  Execute(ranks, request);
}

}  // namespace

void ExecuteBesideJoined(Communicator& ranks, const Request& request) {
  try {
    return Execute(ranks, request);
  } catch (const SomeHaveJoined& some) {
    Told(ranks, some.caller, request);
    if (!CanBeJoined(request.kind)) {
      throw Failure(
          Code::kFailedPrecondition,
          request.Describe() + ": rank " + some.ranks + " has called join()",
          "until all have, only allreduce and allgather are of use");
    }
  }
  Request again = request;
  again.posted = false;
  Execute(ranks, again);
}

bool JoinOne(Communicator& ranks, const Request& join) {
  try {
    try {
      ranks.Post(join);
      ranks.Agree(join);
      return true;
    } catch (const SomeHaveJoined& some) {
      Request request = Told(ranks, some.caller, join);
      ranks.job().Served();
      if (CanBeJoined(request.kind)) CallWithNothing(ranks, std::move(request));
    }
  } catch (const Failure& failure) {
    // Those that call are told that they do not agree; they may go on.
    const bool theirs = failure.code() == Code::kFailedPrecondition ||
                        failure.code() == Code::kInvalidArgument;
    if (!theirs || ranks.job().broken()) throw;
  }
  return false;
}

Notice NextOfOthers(Communicator& ranks, Notice notice) {
  uint8_t flag = notice.joined;
  std::vector<uint8_t> flags(ranks.size());
  Request ask = RequestFor(Kind::kAllGather, "who has joined", &flag, 1);
  ask.tensors[0].output = flags.data();
  ask.counts.assign(ranks.size(), 1);
  Execute(ranks, ask);
  int caller = 0;
  while (caller < ranks.size() && flags[caller]) ++caller;
  if (caller < ranks.size()) {
    Broadcast(ranks, caller, &notice, sizeof(notice));
  }
  return notice;
}

}  // namespace collective
