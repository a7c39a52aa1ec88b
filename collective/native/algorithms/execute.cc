#include <new>
#include <string>

#include "algorithms/all_reduce.h"
#include "algorithms/collectives.h"
#include "kernels/denormals.h"
#include "recorder/recorder.h"

namespace collective {

void Execute(Communicator& ranks, const Request& request) try {
  if (ranks.job().broken()) ranks.job().Check(ranks.job().rank());
  const KeepDenormals keep;
  const RecordedRun recorded(request, ranks.area(), ranks.CountRun());
  switch (request.kind) {
    case Kind::kAllReduce:
      return AllReduce(ranks, request);
    case Kind::kBroadcast:
      return Broadcast(ranks, request);
    case Kind::kAllGather:
      return AllGather(ranks, request);
    case Kind::kReduceScatter:
      return ReduceScatter(ranks, request);
    case Kind::kAllToAll:
      return AllToAll(ranks, request);
    case Kind::kBarrier:
    case Kind::kJoin:
      return Barrier(ranks, request);
  }
} catch (const std::bad_alloc&) {
  // Every other rank is running it, and would wait for ever.
  ranks.job().Break(Code::kInternal,
                    "rank " + std::to_string(ranks.job().rank()) +
                        ": out of memory in " + request.Describe(),
                    kOutOfMemoryHint);
}

}  // namespace collective
