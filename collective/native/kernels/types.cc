#include "kernels/types.h"

#include <cstdio>
#include <utility>

namespace collective {

size_t SizeOf(DType dtype) { return kDTypeTable[static_cast<int>(dtype)].bytes; }

const char* NameOf(DType dtype) { return kDTypeTable[static_cast<int>(dtype)].name; }

const char* NameOf(Op op) {
  constexpr const char* kNames[kOps] = {"sum", "average", "min", "max", "product"};
  return kNames[static_cast<int>(op)];
}

const char* NameOf(Kind kind) {
  constexpr const char* kNames[] = {
      "all-reduce", "broadcast", "all-gather", "reduce-scatter",
      "all-to-all", "barrier",   "join"};
  return kNames[static_cast<int>(kind)];
}

const char* NameOf(Algorithm algorithm) {
  constexpr const char* kNames[] = {"auto", "direct", "one-shot", "halving-doubling",
                                    "hierarchical"};
  return kNames[static_cast<int>(algorithm)];
}

std::string Printable(const std::string& text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(text.c_str()[i + 1]);
    const bool c1 = byte == 0xC2 && next >= 0x80 && next < 0xA0;  // as UTF-8
    if (byte >= 0x20 && byte != 0x7F && !c1) {
      shown += text[i];
      continue;
    }
    char code[8];
    std::snprintf(code, sizeof(code), "\\x%02x", c1 ? next : byte);
    shown += code;
    i += c1;
  }
  return shown;
}

std::string ListByText(const std::vector<int>& ranks,
                       const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> groups;  // text, ranks
  for (size_t i = 0; i < ranks.size(); ++i) {
    auto same = groups.begin();
    while (same != groups.end() && same->first != texts[i]) ++same;
    if (same == groups.end()) same = groups.insert(same, {texts[i], ""});
    same->second += (same->second.empty() ? "" : ",") + std::to_string(ranks[i]);
  }
  std::string list;
  for (const auto& [text, callers] : groups) {
    list += "; rank " + callers + ": " + text;
  }
  return list;
}

namespace {

bool Reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

// These kinds have different lengths on each rank; `counts` lists them all.
bool ShapesMayDiffer(Kind kind) {
  return kind == Kind::kAllGather || kind == Kind::kAllToAll;
}

struct Hash {
  uint64_t value = 0x9E3779B97F4A7C15u;
  void Add(uint64_t word) {
    value = (value ^ word) * 0xFF51AFD7ED558CCDu;
    value ^= value >> 32;
  }
};

}  // namespace

size_t Tensor::bytes() const { return static_cast<size_t>(count) * SizeOf(dtype); }

size_t Request::bytes() const {
  size_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.bytes();
  return bytes;
}

uint64_t Request::Signature() const {
  Hash hash;
  hash.Add(static_cast<uint64_t>(kind) | static_cast<uint64_t>(algorithm) << 8 |
           static_cast<uint64_t>(Reduces(kind) ? op : Op::kSum) << 16 |
           static_cast<uint64_t>(has_transport) << 24 |
           static_cast<uint64_t>(transport) << 25 | static_cast<uint64_t>(root) << 32);
  for (unsigned char letter : name) hash.Add(letter);
  hash.Add(tensors.size());
  for (const Tensor& tensor : tensors) {
    hash.Add(static_cast<uint64_t>(tensor.dtype));
    if (ShapesMayDiffer(kind)) continue;
    hash.Add(static_cast<uint64_t>(tensor.count));
    hash.Add(tensor.shape.size());
    for (int64_t dimension : tensor.shape) {
      hash.Add(static_cast<uint64_t>(dimension));
    }
  }
  for (int64_t count : counts) hash.Add(static_cast<uint64_t>(count));
  return hash.value;
}

std::string Request::Describe() const {
  constexpr size_t kMostTensors = 6;
  std::string text = NameOf(kind);
  if (!name.empty()) text += " '" + Printable(name) + "'";
  if (Reduces(kind)) text += std::string(" ") + NameOf(op);
  if (kind == Kind::kBroadcast) text += " root=" + std::to_string(root);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i == kMostTensors) {
      text += " and " + std::to_string(tensors.size() - i) + " more";
      break;
    }
    text += std::string(" ") + NameOf(tensors[i].dtype) + "[";
    const std::vector<int64_t>& shape = tensors[i].shape;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      text += (axis ? "," : "") + std::to_string(shape[axis]);
    }
    text += "]";
  }
  if (algorithm != Algorithm::kAuto) {
    text += std::string(" algorithm=") + NameOf(algorithm);
  }
  if (has_transport) text += std::string(" transport=") + NameOf(transport);
  if (kind == Kind::kReduceScatter) {
    for (size_t i = 0; i < counts.size(); ++i) {
      text += (i ? "," : " elements for each rank ") + std::to_string(counts[i]);
    }
  }
  return text + among;
}

}  // namespace collective
