// Shared by the files of the C interface: the core of this process, and requests.
#pragma once

#include <memory>

#include "c_api.h"
#include "core.h"

namespace collective {

// Throws kFailedPrecondition before init and after shutdown.
std::shared_ptr<Core> CurrentCore();

// Copies a request; throws kInvalidArgument if a number has no meaning.
void Convert(const collective_request& from, Request* to);

// Makes the caught exception this thread's error; returns its code.
int32_t SetErrorFromException();

// Runs `action`; turns its exception into a code and this thread's error.
template <class Action>
int32_t Guard(Action&& action) {
  try {
    action();
    return 0;
  } catch (...) {
    return SetErrorFromException();
  }
}

}  // namespace collective
