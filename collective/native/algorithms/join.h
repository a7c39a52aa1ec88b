// Ranks that have no more data, while others have.
//
// A rank that joins posts that it has joined wherever the others post a
// collective. So ranks do not agree, as after a mistake, and tell each other
// what they want. Who then sees that some have joined lets the first that has
// not tell them its call, and all make it again: those that have joined with
// values that change no result. While nobody has joined, nothing is asked.
#ifndef COLLECTIVE_NATIVE_ALGORITHMS_JOIN_H_
#define COLLECTIVE_NATIVE_ALGORITHMS_JOIN_H_

#include "communicator.h"

namespace collective {

// Runs a collective, also where some of the ranks have joined. Throws
// kFailedPrecondition where they cannot take part: theirs are all-reduce and
// all-gather, to which they give no rows.
void ExecuteBesideJoined(Communicator& ranks, const Request& request);

// This rank has joined: takes part in one collective of the others. True once
// all have joined.
bool JoinOne(Communicator& ranks, const Request& join);

// In order by name, after the first member has said that it has joined: what
// the first of the others wants next, or that all have joined. `mine`: what
// this rank wants.
Notice NextOfOthers(Communicator& ranks, Notice mine);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_ALGORITHMS_JOIN_H_
