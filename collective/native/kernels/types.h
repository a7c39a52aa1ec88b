// The parts of a collective: element types, operations, kinds, tensors.
//
// The numbers are part of the C ABI (c_api.h) and of the Python module that
// mirrors it, so new ones go at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan.h"

namespace collective {

enum class DType : int32_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt8 = 4,
  kUInt8 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 8,
};
constexpr int kDTypes = 9;

// The properties of dtypes, by DType.
struct DTypeRow {
  const char* name;
  int bytes;
  char numpy;      // NumPy's kind; 'V': NumPy does not know it
  int tensorflow;  // TensorFlow's number
};
constexpr DTypeRow kDTypeTable[kDTypes] = {
    {"float32", 4, 'f', 1},   {"float64", 8, 'f', 2}, {"float16", 2, 'f', 19},
    {"bfloat16", 2, 'V', 14}, {"int8", 1, 'i', 6},    {"uint8", 1, 'u', 4},
    {"int32", 4, 'i', 3},     {"int64", 8, 'i', 9},   {"bool", 1, 'b', 10}};

enum class Op : int32_t {
  kSum = 0,
  kAverage = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
};
constexpr int kOps = 5;

enum class Kind : int32_t {
  kAllReduce = 0,
  kBroadcast = 1,
  kAllGather = 2,
  kReduceScatter = 3,
  kAllToAll = 4,
  kBarrier = 5,
  kJoin = 6,  // posted by a joined rank for other ranks' calls (join.h)
};
constexpr int kKinds = 7;

enum class Algorithm : int32_t {
  kAuto = 0,
  kDirect = 1,
  kOneShot = 2,
  kHalvingDoubling = 3,
  kHierarchical = 4,
};

// kByName: ranks may submit in different orders; the first rank of the group
// decides. kProgramOrder: every rank submits in the same order, as in MPI.
enum class Order : int32_t { kProgramOrder = 0, kByName = 1 };

size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);
const char* NameOf(Op op);
const char* NameOf(Kind kind);
const char* NameOf(Algorithm algorithm);

// Escapes control characters of a terminal, because a name may have any origin.
std::string Printable(const std::string& text);

// "; rank 0,2: ...; rank 1: ...": says which ranks have the same text. Both lists
// are by member.
std::string ListByText(const std::vector<int>& ranks,
                       const std::vector<std::string>& texts);

// One tensor of a collective. `input` may equal `output`; they must not overlap
// in any other way.
struct Tensor {
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;  // elements of the input
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // only compared, and shown in errors

  size_t bytes() const;  // bytes of the input
};

// One collective call on one rank.
//
// counts: elements per rank (all-gather, reduce-scatter: `size` entries) or the
// whole matrix from sender to receiver, row by row (all-to-all: `size` squared).
struct Request {
  Kind kind = Kind::kBarrier;
  Op op = Op::kSum;
  int root = 0;
  Algorithm algorithm = Algorithm::kAuto;
  // The type of the elements on the wire. It differs from the tensors' type
  // only in a float32 all-reduce, by kFloat16 or kBFloat16.
  bool has_transport = false;
  DType transport = DType::kFloat32;
  std::string name;
  std::vector<Tensor> tensors;
  std::vector<int64_t> counts;
  Plan plan;                  // may differ between ranks
  bool once = false;          // no other of this name runs here
  int64_t ticket = 0;         // ranks match it by name and ticket
  int64_t* issued = nullptr;  // receives its own ticket (c_api.h)
  const char* among = "";     // which ranks, for Describe
  uint64_t recorded = 0;      // its number in the recorder (recorder.h), if any
  int64_t posted_at = 0;      // Now() if PostOneShot has posted it already

  size_t bytes() const;  // bytes of all tensors
  // Equal on two ranks if and only if (apart from hash collisions) they call the
  // same collective.
  uint64_t Signature() const;
  // Returns one line: "all-reduce 'grad' sum float32[3,4] ...".
  std::string Describe() const;
};

}  // namespace collective
