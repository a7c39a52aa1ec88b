#include "membership/mismatch.h"

#include "failure.h"
#include "kernels/types.h"
#include "recorder/recorder.h"

namespace collective {

void ThrowIfJoined(const std::vector<int>& ranks,
                   const std::vector<uint64_t>& signatures) {
  static const uint64_t kJoined = [] {
    Request join;
    join.kind = Kind::kJoin;
    return join.Signature();
  }();
  RanksHaveJoined joined = {-1, ""};
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (signatures[i] == kJoined) {
      joined.ranks += (joined.ranks.empty() ? "" : ",") + std::to_string(ranks[i]);
    } else if (joined.caller < 0) {
      joined.caller = static_cast<int>(i);
    } else if (signatures[i] != signatures[joined.caller]) {
      return;
    }
  }
  if (!joined.ranks.empty()) throw joined;
}

void ThrowMismatch(const std::vector<int>& ranks,
                   const std::vector<std::string>& texts) {
  const std::string what =
      "ranks do not agree on a collective" + ListByText(ranks, texts);
  RequestDump(what);
  throw Failure(Code::kFailedPrecondition, what,
                "make the same calls, with the same name, shape, dtype and "
                "operation, in the same order on every rank");
}

}  // namespace collective
