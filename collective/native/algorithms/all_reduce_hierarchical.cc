// All-reduce of ranks on several hosts: shared memory within each host,
// messages between hosts.
//
// A chunk is shared out among the lanes: as many as every host has ranks. Lane
// number l is carried by rank number l of each host. 1. Each rank copies its
// data into its slot. 2. The rank of a lane sums its part of the slots, and
// sends each other host the part of it which that host's rank of the lane sums.
// 3. It sums what has come from the other hosts, and sends them the sum. 4. The
// sums of all hosts are in the result slot; 5. everyone copies them out.
//
// Each host sends 2(h-1)/h of the message, which is the least possible for h
// hosts, whatever the number of its ranks; and they share that work, and the
// summing. Every element is summed by one rank, in the order of the hosts.
//
// The five steps are done for five chunks in one turn, so that messages of two
// chunks are on their way while others are copied and summed.
//
// With every rank taken for a host of its own, this is the exchange: each part
// goes straight to the rank that sums it, in the order of the ranks. 16-bit
// elements are then rounded once, and integers averaged without overflow. A
// rank alone on its host needs no slots: a chunk of one tensor is sent,
// received and summed where it lies.
#include <vector>

#include "algorithms/all_reduce.h"
#include "transport/wire_codec.h"

namespace collective {
namespace {

class Hierarchical {
 public:
  // `here`: the members on this host. `hosts`: members by host.
  Hierarchical(Communicator& ranks, Communicator& here,
               const std::vector<std::vector<int>>& hosts, int my_host,
               const Reduction& reduction)
      : ranks_(ranks),
        here_(here),
        members_(hosts),
        my_host_(my_host),
        messages_(ranks.messages()),
        r_(reduction),
        path_(reduction),
        wire_(path_.bytes()),
        // Sums of 16 bits are divided before they are sent: an average shall
        // not overflow on its way.
        early_(wire_ == 2 && ranks.size() > static_cast<int>(hosts.size())),
        per_chunk_(Communicator::kChunkBytes / wire_),
        first_(here_.first_chunk()),
        hosts_(static_cast<int>(hosts.size())),
        lanes_(Lanes(hosts)) {}

  void Run() {
    const size_t length = r_.span.length();
    const uint32_t chunks =
        static_cast<uint32_t>((length + per_chunk_ - 1) / per_chunk_);
    for (uint32_t turn = 0; turn < chunks + 4; ++turn) {
      if (turn < chunks) CopyIn(turn);
      // Unsigned: before the first chunk is beyond the last.
      if (turn - 1 < chunks) SumHere(turn - 1);
      if (turn - 2 < chunks) SumHosts(turn - 2);
      if (turn - 3 < chunks) Settle(turn - 3);
      if (turn - 4 < chunks) CopyOut(turn - 4);
    }
    here_.Finish(chunks);
  }

 private:
  // Of a chunk between steps 2 and 4.
  struct Flight {
    Remote::Transfers under_way;
    std::vector<char> parts;  // from each other host
    // Where the chunk of a lane is, as its elements travel: this host's sum of
    // it and, once there is one, that of all hosts.
    const char* sum_here;
    char* sum;
  };

  static int Lanes(const std::vector<std::vector<int>>& hosts) {
    size_t least = hosts[0].size();
    for (const std::vector<int>& host : hosts) {
      least = std::min(least, host.size());
    }
    return static_cast<int>(least);
  }

  size_t Length(uint32_t turn) const {
    return std::min(per_chunk_, r_.span.length() - turn * per_chunk_);
  }
  // Where a lane's part of a chunk begins, in elements; and a host's of that.
  size_t LaneBegin(uint32_t turn, int lane) const {
    return ShareBegin(Length(turn), lane, lanes_, Span::kAlign);
  }
  size_t HostBegin(uint32_t turn, int host) const {
    const size_t begin = LaneBegin(turn, here_.me());
    return begin + ShareBegin(LaneBegin(turn, here_.me() + 1) - begin, host,
                              hosts_, Span::kAlign);
  }
  size_t HostBytes(uint32_t turn, int host) const {
    return (HostBegin(turn, host + 1) - HostBegin(turn, host)) * wire_;
  }
  char* Result(uint32_t turn, size_t element) {
    return here_.Result(first_ + turn) + element * wire_;
  }
  // The tensor that holds the whole of a chunk, if it need not go through
  // slots.
  const Tensor* Whole(uint32_t turn, size_t* offset) const {
    const Tensor* whole = nullptr;
    if (path_.narrow() || here_.size() > 1) return whole;
    const size_t begin = turn * per_chunk_;
    r_.span.ForEach(begin, begin + Length(turn),
                    [&](const Tensor& tensor, size_t at, size_t, size_t count) {
                      if (count == Length(turn)) whole = &tensor;
                      *offset = at;
                    });
    return whole;
  }
  Flight& FlightOf(uint32_t turn) {
    return flights_[turn % Communicator::kDepth];
  }
  bool carries() const { return here_.me() < lanes_; }
  int peer(int host) const { return members_[host][here_.me()]; }
  int OtherHost(int i) const { return (my_host_ + i) % hosts_; }

  // Calls visit(tensor, offset, offset in the chunk, count) for a lane's part.
  template <class Visit>
  void ForLane(uint32_t turn, int lane, Visit&& visit) {
    const size_t begin = turn * per_chunk_;
    r_.span.ForEach(
        begin + LaneBegin(turn, lane), begin + LaneBegin(turn, lane + 1),
        [&](const Tensor& tensor, size_t offset, size_t position,
            size_t count) { visit(tensor, offset, position - begin, count); });
  }

  void CopyIn(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    here_.AwaitFree(Communicator::kRead, chunk, r_.request);
    char* slot = here_.Slot(chunk, here_.me());
    for (int lane = 0; lane < lanes_; ++lane) {
      if (lane == here_.me()) continue;
      ForLane(turn, lane,
              [&](const Tensor& tensor, size_t offset, size_t position,
                  size_t count) {
                path_.CopyIn(slot + position * wire_, tensor, offset, count,
                             true);
              });
    }
    here_.Pass(Communicator::kFilled, chunk);
  }

  void SumHere(uint32_t turn) {
    if (!carries()) return;
    Flight& flight = FlightOf(turn);
    size_t offset = 0;
    if (const Tensor* whole = Whole(turn, &offset)) {
      flight.sum_here = path_.Input(*whole, offset);
      flight.sum = path_.Output(*whole, offset);
    } else {
      SumSlots(turn);
      flight.sum_here = flight.sum = Result(turn, 0);
    }
    const size_t mine = HostBytes(turn, my_host_);
    flight.parts.resize(mine * (hosts_ - 1));
    for (int i = 1; i < hosts_; ++i) {
      messages_.Receive(peer(OtherHost(i)), &flight.parts[mine * (i - 1)], mine,
                        &flight.under_way);
    }
    for (int i = 1; i < hosts_; ++i) {
      const int host = OtherHost(i);
      messages_.Send(peer(host),
                     flight.sum_here + HostBegin(turn, host) * wire_,
                     HostBytes(turn, host), &flight.under_way);
    }
  }

  void SumSlots(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    here_.AwaitFree(Communicator::kDone, chunk, r_.request);
    here_.AwaitAll(Communicator::kFilled, chunk, r_.request);
    std::vector<const void*> sources(here_.size());
    ReduceJob job = {};
    job.sources = sources.data();
    job.nsources = here_.size();
    job.own = here_.me();
    job.divisor = early_ ? r_.divisor : 1;
    ForLane(turn, here_.me(),
            [&](const Tensor& tensor, size_t offset, size_t position,
                size_t count) {
              for (int i = 0; i < here_.size(); ++i) {
                sources[i] = here_.Slot(chunk, i) + position * wire_;
              }
              sources[here_.me()] = path_.Input(tensor, offset);
              job.slot = Result(turn, position);
              job.count = count;
              r_.kernel(job);
            });
  }

  void SumHosts(uint32_t turn) {
    if (!carries()) return;
    Flight& flight = FlightOf(turn);
    messages_.AwaitAll(&flight.under_way, r_.request);
    const size_t mine = HostBytes(turn, my_host_);
    const size_t at = HostBegin(turn, my_host_) * wire_;
    std::vector<const void*> sources(hosts_, flight.sum_here + at);
    for (int i = 1; i < hosts_; ++i) {
      sources[OtherHost(i)] = &flight.parts[mine * (i - 1)];
    }
    ReduceJob job = {};
    job.sources = sources.data();
    job.nsources = hosts_;
    job.own = -1;  // all as they travel
    job.slot = flight.sum + at;
    job.count = mine / wire_;
    job.divisor = early_ ? 1 : r_.divisor;
    r_.kernel(job);
    for (int i = 1; i < hosts_; ++i) {
      const int host = OtherHost(i);
      messages_.Receive(peer(host), flight.sum + HostBegin(turn, host) * wire_,
                        HostBytes(turn, host), &flight.under_way);
    }
    for (int i = 1; i < hosts_; ++i) {
      messages_.Send(peer(OtherHost(i)), flight.sum + at, mine,
                     &flight.under_way);
    }
  }

  void Settle(uint32_t turn) {
    if (carries()) {
      messages_.AwaitAll(&FlightOf(turn).under_way, r_.request);
    }
    here_.Pass(Communicator::kRead, first_ + turn);
  }

  void CopyOut(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    size_t offset = 0;
    const int lanes = Whole(turn, &offset) ? 0 : lanes_;
    for (int i = 0; i < lanes; ++i) {
      const int lane = (here_.me() + i) % lanes_;
      if (lane != here_.me()) {
        here_.AwaitStage(Communicator::kRead, chunk, lane, r_.request);
      }
      ForLane(turn, lane,
              [&](const Tensor& tensor, size_t offset, size_t position,
                  size_t count) {
                path_.CopyOut(tensor, offset, Result(turn, position), count,
                              false);
              });
    }
    here_.Pass(Communicator::kDone, chunk);
  }

  Communicator& ranks_;
  Communicator& here_;
  const std::vector<std::vector<int>>& members_;  // by host
  const int my_host_;
  Remote& messages_;
  const Reduction& r_;
  const Wire path_;
  const size_t wire_;  // bytes of an element on it
  const bool early_;
  const size_t per_chunk_;  // elements
  const uint32_t first_;
  const int hosts_;
  const int lanes_;
  Flight flights_[Communicator::kDepth];
};

}  // namespace

void AllReduceHierarchical(Communicator& ranks, const Reduction& reduction) {
  Hierarchical(ranks, ranks.here(), ranks.hosts(), ranks.my_host(), reduction)
      .Run();
}

void AllReduceExchange(Communicator& ranks, const Reduction& reduction) {
  std::vector<std::vector<int>> alone;
  for (int member = 0; member < ranks.size(); ++member) {
    alone.push_back({member});
  }
  Hierarchical(ranks, ranks.alone(), alone, ranks.me(), reduction).Run();
}

}  // namespace collective
