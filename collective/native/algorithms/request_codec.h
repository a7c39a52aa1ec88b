// A request as bytes, without its data: for a rank that has joined.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_REQUEST_CODEC_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_REQUEST_CODEC_H_

#include <vector>

#include "kernels/types.h"

namespace collective {

// Between processes of one machine type and one build only.
std::vector<char> Pack(const Request& request);
Request Unpack(const std::vector<char>& bytes);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_REQUEST_CODEC_H_
