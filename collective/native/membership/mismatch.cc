#include "membership/mismatch.h"

#include <utility>

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
      joined.ranks +=
          (joined.ranks.empty() ? "" : ",") + std::to_string(ranks[i]);
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
  std::vector<std::pair<std::string, std::string>> calls;  // text, ranks
  for (size_t i = 0; i < ranks.size(); ++i) {
    auto same = calls.begin();
    while (same != calls.end() && same->first != texts[i]) ++same;
    if (same == calls.end()) same = calls.insert(same, {texts[i], ""});
    same->second +=
        (same->second.empty() ? "" : ",") + std::to_string(ranks[i]);
  }
  std::string what = "ranks do not agree on a collective";
  for (const auto& [text, callers] : calls) {
    what += "; rank " + callers + ": " + text;
  }
  RequestDump(what);
  throw Failure(Code::kFailedPrecondition, what,
                "make the same calls, with the same name, shape, dtype and "
                "operation, in the same order on every rank");
}

}  // namespace collective
