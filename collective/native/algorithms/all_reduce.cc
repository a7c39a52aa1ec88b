#include "algorithms/all_reduce.h"

#include <cstring>

namespace collective {
namespace {

// Up to here one look at everyone's post is faster than two stages, with near
// and with far cores; and where ranks share cores, which have to change hands
// for each stage.
constexpr size_t kOneShotBytes = size_t{2} << 10;
constexpr size_t kOneShotBytesOnSharedCores = size_t{16} << 10;

// Between hosts, up to here few messages matter more than few bytes.
constexpr size_t kFewMessagesBytes = size_t{64} << 10;

size_t TotalBytes(const Request& request) {
  size_t bytes = 0;
  for (const Tensor& tensor : request.tensors) {
    bytes += static_cast<size_t>(tensor.count) * SizeOf(tensor.dtype);
  }
  return bytes;
}

bool AveragesBools(const Request& request) {
  for (const Tensor& tensor : request.tensors) {
    if (tensor.dtype == DType::kBool && request.op == Op::kAverage) return true;
  }
  return false;
}

ReduceKernel KernelFor(const Kernels& kernels, const Request& request,
                       DType dtype) {
  const int op = static_cast<int>(request.op);
  if (!request.has_transport || request.transport == dtype) {
    return kernels.reduce[static_cast<int>(dtype)][op];
  }
  return kernels.reduce_16[request.transport == DType::kBFloat16][op];
}

bool SeveralOnAHost(const Communicator& ranks) {
  return ranks.size() > static_cast<int>(ranks.hosts().size());
}

// On one host: of messages there are only those that are asked for.
Algorithm OnOneHost(const Communicator& ranks, Algorithm algorithm,
                    size_t bytes, bool narrowed) {
  if (algorithm == Algorithm::kHierarchical) return Algorithm::kDirect;
  if (algorithm != Algorithm::kAuto) return algorithm;
  const size_t most =
      ranks.job().shared_cores() ? kOneShotBytesOnSharedCores : kOneShotBytes;
  return bytes <= most && !narrowed ? Algorithm::kOneShot : Algorithm::kDirect;
}

// Between hosts there are no slots: kDirect stands for AllReduceExchange.
Algorithm BetweenHosts(const Communicator& ranks, Algorithm algorithm,
                       size_t bytes) {
  if (algorithm >= Algorithm::kRing) return algorithm;
  if (algorithm != Algorithm::kAuto) return Algorithm::kDirect;
  if (bytes <= kFewMessagesBytes) return Algorithm::kHalvingDoubling;
  return SeveralOnAHost(ranks) ? Algorithm::kHierarchical : Algorithm::kDirect;
}

void CopyThrough(const Request& request) {
  for (const Tensor& tensor : request.tensors) {
    if (tensor.input != tensor.output && tensor.count > 0) {
      std::memcpy(tensor.output, tensor.input,
                  static_cast<size_t>(tensor.count) * SizeOf(tensor.dtype));
    }
  }
}

}  // namespace

bool IsOneShot(const Communicator& ranks, const Request& request) {
  return request.kind == Kind::kAllReduce && ranks.size() > 1 &&
         !ranks.remote() && !request.has_transport && FitsOneShot(request) &&
         !AveragesBools(request) &&
         OnOneHost(ranks, request.algorithm, TotalBytes(request), false) ==
             Algorithm::kOneShot;
}

void AllReduce(Communicator& ranks, const Request& request) {
  if (AveragesBools(request)) {
    throw Failure(Code::kInvalidArgument,
                  request.Describe() + ": bool has no average",
                  "reduce with Sum (or), Min (and), or cast to float32");
  }
  if (ranks.size() == 1) return CopyThrough(request);
  if (IsOneShot(ranks, request)) return AllReduceOneShot(ranks, request);

  const size_t bytes = TotalBytes(request);
  const Algorithm algorithm =
      ranks.remote()
          ? BetweenHosts(ranks, request.algorithm, bytes)
          : OnOneHost(ranks, request.algorithm, bytes, request.has_transport);
  ranks.Post(request);
  bool agree = true;
  for (int i = 0; i < kDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    Span span;
    bool in_place = true;
    for (const Tensor& tensor : request.tensors) {
      if (tensor.dtype != dtype) continue;
      span.Add(tensor);
      in_place = in_place && tensor.input == tensor.output;
    }
    if (span.length() == 0) continue;
    const bool narrowed = request.has_transport && dtype == DType::kFloat32;
    const Reduction reduction = {
        request,
        span,
        dtype,
        narrowed ? request.transport : dtype,
        narrowed ? KernelFor(ranks.kernels(), request, dtype)
                 : ranks.kernels().reduce[i][static_cast<int>(request.op)],
        request.op == Op::kAverage ? ranks.size() : 1,
        in_place};
    // Without a wish, 16-bit sums are rounded once, however few they are.
    const bool exact = ranks.remote() &&
                       request.algorithm == Algorithm::kAuto &&
                       SizeOf(dtype) == 2;
    // Sums on the way are kept in the tensors' type, in which the average of
    // integers could overflow.
    const bool partial =
        request.op != Op::kAverage || dtype <= DType::kBFloat16;
    switch (exact || !partial ? Algorithm::kDirect : algorithm) {
      case Algorithm::kHierarchical:
        if (agree) ranks.Agree(request);
        AllReduceHierarchical(ranks, reduction);
        break;
      case Algorithm::kRing:
      case Algorithm::kHalvingDoubling:
      case Algorithm::kTree:
        if (!narrowed) {  // 16-bit transport is made for slots
          if (agree) ranks.Agree(request);
          if (algorithm == Algorithm::kRing) {
            AllReduceRing(ranks, reduction);
          } else if (algorithm == Algorithm::kTree) {
            AllReduceTree(ranks, reduction);
          } else {
            AllReduceHalvingDoubling(ranks, reduction);
          }
          break;
        }
        [[fallthrough]];
      default:
        if (ranks.remote()) {
          if (agree) ranks.Agree(request);
          AllReduceExchange(ranks, reduction);
          break;
        }
        AllReduceDirect(ranks, reduction, agree);
    }
    agree = false;
  }
  if (agree) ranks.Agree(request);  // nothing but empty tensors
}

}  // namespace collective
