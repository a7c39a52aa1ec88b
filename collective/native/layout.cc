// Lets Python check that it fits this library: the layout of the structures
// that Python mirrors, and a digest of the compiled sources.
#include <cstddef>
#include <cstring>
#include <string>

#include "c_api.h"
#include "recorder/recorder.h"
#include "source_digest.h"  // written by cmake/source_digest.cmake

namespace {

using Entry = collective::Recorder::Entry;
using Rank = collective::Recorder::Rank;

// "SIZE: OFFSET OFFSET ...", in bytes, in the order of declaration.
template <size_t... offsets>
const char* Layout(size_t size) {
  static const std::string text =
      std::to_string(size) + ":" + ((" " + std::to_string(offsets)) + ...);
  return text.c_str();
}

}  // namespace

#define AT(field) offsetof(TYPE, field)

const char* collective_layout(const char* structure) {
#define TYPE collective_tensor
  if (!std::strcmp(structure, "collective_tensor")) {
    return Layout<AT(input), AT(output), AT(count), AT(shape), AT(dimensions),
                  AT(dtype)>(sizeof(TYPE));
  }
#undef TYPE
#define TYPE collective_request
  if (!std::strcmp(structure, "collective_request")) {
    return Layout<AT(kind), AT(op), AT(root), AT(algorithm), AT(transport),
                  AT(group), AT(order), AT(tensors_length), AT(tensors),
                  AT(counts), AT(counts_length), AT(name), AT(plan), AT(once),
                  AT(ticket), AT(issued)>(sizeof(TYPE));
  }
#undef TYPE
#define TYPE Entry
  if (!std::strcmp(structure, "Recorder::Entry")) {
    return Layout<AT(number), AT(announced), AT(started), AT(ended), AT(bytes),
                  AT(kind), AT(op), AT(dtype), AT(tensors), AT(area),
                  AT(sequence), AT(failed), AT(name), AT(at)>(sizeof(TYPE));
  }
#undef TYPE
#define TYPE Rank
  if (!std::strcmp(structure, "Recorder::Rank")) {
    return Layout<AT(rank), AT(pid), AT(launch_rank), AT(joined), AT(left),
                  AT(death_reported), AT(answered), AT(stack), AT(sampled),
                  AT(at), AT(since), AT(last), AT(entries)>(sizeof(TYPE));
  }
#undef TYPE
  return "";
}

const char* collective_source(void) { return NATIVE_SOURCE_DIGEST; }
