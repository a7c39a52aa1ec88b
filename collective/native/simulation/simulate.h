// The time of all-reduces on many hosts: their programs recorded, then replayed.
#pragma once

#include <vector>

#include "simulation/replay.h"

namespace collective {

// Seconds of the all-reduces of so many bytes of float32: by size, then by wire. Throws
// kInvalidArgument for a layout or sizes that cannot be simulated.
std::vector<std::vector<double>> SimulateAllReduce(const Layout& layout,
                                                   const std::vector<int64_t>& bytes,
                                                   Algorithm algorithm,
                                                   const std::vector<Wire>& wires,
                                                   bool fold = true);

}  // namespace collective
