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
  SomeHaveJoined some = {-1, ""};
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (signatures[i] == kJoined) {
      some.ranks += (some.ranks.empty() ? "" : ",") + std::to_string(ranks[i]);
    } else if (some.caller < 0) {
      some.caller = static_cast<int>(i);
    } else if (signatures[i] != signatures[some.caller]) {
      return;
    }
  }
  if (!some.ranks.empty()) throw some;
}

void ThrowDisagreement(const std::vector<int>& ranks,
                       const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> told;  // text, who
  for (size_t i = 0; i < ranks.size(); ++i) {
    auto same = told.begin();
    while (same != told.end() && same->first != texts[i]) ++same;
    if (same == told.end()) same = told.insert(same, {texts[i], ""});
    same->second +=
        (same->second.empty() ? "" : ",") + std::to_string(ranks[i]);
  }
  std::string what = "ranks do not agree on a collective";
  for (const auto& [text, who] : told) {
    what += "; rank " + who + ": " + text;
  }
  TellRecorder(what);
  throw Failure(Code::kFailedPrecondition, what,
                "make the same calls, with the same name, shape, dtype and "
                "operation, in the same order on every rank");
}

}  // namespace collective
