// What the C interface's files share: the core of this process, and requests.
#pragma once

#include <memory>

#include "c_api.h"
#include "core.h"

namespace collective {

// Throws kFailedPrecondition before init and after shutdown.
std::shared_ptr<Core> CurrentCore();

// Copies a request; throws kInvalidArgument where a number means nothing.
void Convert(const collective_request& from, Request* to);

}  // namespace collective
