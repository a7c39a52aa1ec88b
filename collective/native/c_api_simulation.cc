// Simulated all-reduces, for collective.prediction.
#include "session.h"
#include "simulation/simulate.h"

using namespace collective;

extern "C" {

int32_t collective_simulate(int32_t hosts, int32_t slots, int32_t algorithm,
                            int32_t fold, const int64_t* bytes, int32_t bytes_length,
                            const collective_wire* wires, int32_t wires_length,
                            double* seconds) {
  return Guard([&] {
    std::vector<Wire> converted;
    for (int32_t i = 0; i < wires_length; ++i) {
      converted.push_back({wires[i].bytes_per_second, wires[i].latency,
                           wires[i].per_message, wires[i].per_byte});
    }
    const auto found =
        SimulateAllReduce({hosts, slots}, {bytes, bytes + bytes_length},
                          static_cast<Algorithm>(algorithm), converted, fold != 0);
    for (const auto& row : found) {
      for (double one : row) *seconds++ = one;
    }
  });
}

}  // extern "C"
