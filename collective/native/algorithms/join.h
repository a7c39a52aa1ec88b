// Horovod's join(): ranks that have run out of data while other ranks have not.
//
// A rank that has joined posts Kind::kJoin wherever the other ranks post a
// collective. The posts do not match, so every rank looks at all of them. If
// joined ranks are the reason, the lowest rank that has not joined broadcasts
// its request, and all ranks run it: the joined ones with identity elements. As
// long as no rank has joined, this costs nothing.
#pragma once

#include "communicator.h"

namespace collective {

// Runs a collective, some of whose ranks may have joined. Throws
// kFailedPrecondition if these cannot take part. They can take part in an
// all-reduce, and in an all-gather, to which they add zero rows.
void ExecuteWithJoined(Communicator& ranks, const Request& request);

// For a rank that has joined: takes part in one collective of the other ranks.
// True once all ranks have joined.
bool ServeJoined(Communicator& ranks, const Request& join);

// Order by name, after the first member has announced that it has joined: the
// announcement of the lowest member that has not joined, or the news that all
// have. `mine`: the announcement of this rank.
Announcement AgreeOnNext(Communicator& ranks, Announcement mine);

}  // namespace collective
