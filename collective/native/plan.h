// The collectives of a traced function, as one rank knows them.
//
// A tf.function is traced before it runs, so a rank knows the names of all its
// collectives when the first of them runs. Ranks that run the same function
// with different names would wait for each other for ever. Hashes of their
// plans travel with each announced name (queue.h), and distinguish such ranks
// from ranks that only compute longer.
#pragma once

#include <cstdint>
#include <string>

namespace collective {

// Hashes. Zero: the collective is outside of every traced function.
struct Plan {
  uint64_t function = 0;  // hash of its name
  uint64_t names = 0;     // hash of its collectives in one group, in any order
  int number = 0;         // this rank's number of the trace
  int group = 0;
};

// The collective that member 0 of a group runs next.
struct Announcement {
  uint64_t name = 0;  // a hash
  Plan plan;
  char text[96] = {};   // the name itself, or its beginning
  bool joined = false;  // no collective: this member has joined (join.h)
};

// Follows the name of a collective of rows, for the first step, which exchanges
// their numbers.
constexpr char kRowsStep[] = " (rows)";

// While a function is traced: adds one more collective. `number` is this rank's
// number of the trace, and not 0.
void AddToPlan(int number, int group, const std::string& function,
               const std::string& name);

// The plan when the collective runs; empty for number 0 and unknown numbers.
Plan PlanOf(int number, int group);
// Whether it has a collective of that name, given as a hash, in another group.
bool PlanHas(int number, int group, uint64_t name);

}  // namespace collective
