// Chooses the algorithm of an all-reduce, type by type.
#include "algorithms/all_reduce.h"

#include "algorithms/arguments.h"

namespace collective {
namespace {

// Up to this size, one step that reads every post is faster than the two steps of
// the direct algorithm, between near and between far cores; also if ranks share
// cores, which then have to switch between ranks in each step.
constexpr size_t kOneShotBytes = size_t{2} << 10;
constexpr size_t kOneShotBytesOnSharedCores = size_t{16} << 10;

// Between hosts, fewer messages matter more than fewer bytes up to this size.
constexpr size_t kLatencyBoundBytes = size_t{64} << 10;

bool AveragesBools(const Request& request) {
  for (const Tensor& tensor : request.tensors) {
    if (tensor.dtype == DType::kBool && request.op == Op::kAverage) return true;
  }
  return false;
}

bool HostsHaveSeveralRanks(const Communicator& ranks) {
  return ranks.size() > static_cast<int>(ranks.hosts().size());
}

// On one host, where ranks do not send messages: these need one more copy.
Algorithm OnOneHost(const Communicator& ranks, const Request& request, size_t bytes) {
  if (request.algorithm >= Algorithm::kHalvingDoubling) return Algorithm::kDirect;
  if (request.algorithm != Algorithm::kAuto) return request.algorithm;
  const size_t most =
      ranks.job().shared_cores() ? kOneShotBytesOnSharedCores : kOneShotBytes;
  return bytes <= most && !request.has_transport ? Algorithm::kOneShot
                                                 : Algorithm::kDirect;
}

// Between hosts: there are no slots, so kDirect stands for AllReduceExchange.
Algorithm BetweenHosts(const Communicator& ranks, const Request& request,
                       size_t bytes) {
  if (request.algorithm >= Algorithm::kHalvingDoubling) return request.algorithm;
  if (request.algorithm != Algorithm::kAuto) return Algorithm::kDirect;
  if (bytes <= kLatencyBoundBytes) return Algorithm::kHalvingDoubling;
  return HostsHaveSeveralRanks(ranks) ? Algorithm::kHierarchical : Algorithm::kDirect;
}

// The algorithm for the tensors of one type, if the request asks for
// `algorithm`.
Algorithm ForType(const Communicator& ranks, const Reduction& reduction,
                  Algorithm algorithm) {
  const Request& request = reduction.request;
  // If the user names no algorithm, 16-bit sums are rounded once, at any size.
  const bool round_once = ranks.spans_hosts() &&
                          request.algorithm == Algorithm::kAuto &&
                          SizeOf(reduction.dtype) == 2;
  // Partial sums are kept in the tensors' type, in which a sum of integers that
  // is averaged later could overflow.
  const bool overflows =
      request.op == Op::kAverage && reduction.dtype > DType::kBFloat16;
  if (round_once || overflows) return Algorithm::kDirect;
  if (algorithm == Algorithm::kHierarchical) return algorithm;
  // Only slots convert to a 16-bit transport.
  const bool narrowed = request.has_transport && reduction.dtype == DType::kFloat32;
  const bool by_messages = algorithm == Algorithm::kHalvingDoubling && !narrowed;
  return by_messages ? algorithm : Algorithm::kDirect;
}

void ReduceType(Communicator& ranks, const Reduction& reduction, Algorithm algorithm,
                bool verify) {
  algorithm = ForType(ranks, reduction, algorithm);
  if (algorithm == Algorithm::kDirect && !ranks.spans_hosts()) {
    return AllReduceDirect(ranks, reduction, verify);
  }
  if (verify) ranks.VerifyMatch(reduction.request);
  switch (algorithm) {
    case Algorithm::kHalvingDoubling:
      return AllReduceHalvingDoubling(ranks, reduction);
    case Algorithm::kHierarchical:
      return AllReduceHierarchical(ranks, reduction);
    default:
      return AllReduceExchange(ranks, reduction);
  }
}

Reduction ReductionOf(const Communicator& ranks, const Request& request,
                      const TensorList& tensors, DType dtype, bool in_place) {
  const int op = static_cast<int>(request.op);
  const bool narrowed =
      request.has_transport && dtype == DType::kFloat32 && request.transport != dtype;
  return {
      request,
      tensors,
      dtype,
      narrowed ? request.transport : dtype,
      narrowed ? ranks.kernels().reduce_16[request.transport == DType::kBFloat16][op]
               : ranks.kernels().reduce[static_cast<int>(dtype)][op],
      DivisorOf(ranks, request),
      in_place,
  };
}

void CopyInputs(const Request& request) {
  for (const Tensor& tensor : request.tensors) {
    if (tensor.input != tensor.output && tensor.count > 0) {
      CopyBytes(tensor.output, tensor.input, tensor.bytes());
    }
  }
}

}  // namespace

bool IsOneShot(const Communicator& ranks, const Request& request) {
  return request.kind == Kind::kAllReduce && ranks.size() > 1 && !ranks.spans_hosts() &&
         !request.has_transport && FitsOneShot(request) && !AveragesBools(request) &&
         OnOneHost(ranks, request, request.bytes()) == Algorithm::kOneShot;
}

void AllReduce(Communicator& ranks, const Request& request) {
  if (AveragesBools(request)) ThrowNoBoolAverage(request);
  if (ranks.size() == 1) return CopyInputs(request);
  if (IsOneShot(ranks, request)) return AllReduceOneShot(ranks, request);

  const size_t bytes = request.bytes();
  const Algorithm algorithm = ranks.spans_hosts() ? BetweenHosts(ranks, request, bytes)
                                                  : OnOneHost(ranks, request, bytes);
  ranks.Post(request);
  bool verify = true;
  for (int i = 0; i < kDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    TensorList tensors;
    bool in_place = true;
    for (const Tensor& tensor : request.tensors) {
      if (tensor.dtype != dtype) continue;
      tensors.Add(tensor);
      in_place = in_place && tensor.input == tensor.output;
    }
    if (tensors.length() == 0) continue;
    ReduceType(ranks, ReductionOf(ranks, request, tensors, dtype, in_place), algorithm,
               verify);
    verify = false;
  }
  if (verify) ranks.VerifyMatch(request);  // all tensors are empty
}

}  // namespace collective
