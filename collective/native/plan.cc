#include "plan.h"

#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace collective {
namespace {

std::mutex mutex;

// Plans outlive jobs: a function traced before shutdown() may run after the
// next init().
std::map<std::pair<int, int>, Plan>& Plans() {
  static auto* plans = new std::map<std::pair<int, int>, Plan>;
  return *plans;
}

}  // namespace

void AddToPlan(int number, int group, const std::string& function,
               const std::string& name) {
  const std::hash<std::string> hash;
  std::lock_guard<std::mutex> lock(mutex);
  Plan& plan = Plans()[{number, group}];
  plan.function = hash(function) | 1;  // never 0
  plan.names += hash(name);
}

Plan PlanOf(int number, int group) {
  if (number == 0) return {};
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = Plans().find({number, group});
  return found == Plans().end() ? Plan() : found->second;
}

}  // namespace collective
