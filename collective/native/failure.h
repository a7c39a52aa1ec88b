// The one exception of the core: a failure in words and as a code.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace collective {

// Part of the C ABI; they set TensorFlow's codes of the same names.
enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument = 1,     // this rank's request is impossible
  kFailedPrecondition = 2,  // ranks do not agree; nothing was summed
  kUnavailable = 3,         // a peer died or left: the job cannot continue
  kDeadlineExceeded = 4,    // a peer was too late
  kInternal = 5,            // the operating system refused something
};

inline constexpr char kOutOfMemoryHint[] =
    "give each rank more memory: fewer ranks on a host, or smaller batches "
    "(see ulimit -v, free -g and dmesg)";

// The last line of the message is "HINT: ...".
class Failure : public std::runtime_error {
 public:
  Failure(Code code, const std::string& what, const std::string& hint)
      : std::runtime_error(what + "\nHINT: " + hint), code_(code) {}
  // A message that already has its hint.
  Failure(Code code, const std::string& message)
      : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace collective
