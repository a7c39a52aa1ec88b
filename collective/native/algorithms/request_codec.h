// A request as bytes, without its tensors' data.
//
// A rank that has joined (join.h) gets the request of another rank in this
// form, so that it can take part.
#pragma once

#include <vector>

#include "kernels/types.h"

namespace collective {

// Only between processes of one machine type and one build: numbers are copied
// as they lie in memory.
std::vector<char> Encode(const Request& request);
Request Decode(const std::vector<char>& bytes);

}  // namespace collective
