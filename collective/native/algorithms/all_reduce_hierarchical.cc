// All-reduce of ranks on several hosts: shared memory within each host,
// messages between hosts.
//
// Each chunk is divided into lanes, as many as the smallest host has ranks. The
// rank with number l on its host carries lane l. Five steps:
//   1. each rank copies its data into its slot;
//   2. the carrier of a lane sums that lane over its host's slots, and sends to
//      its peer on each other host the part that this peer sums;
//   3. it sums its part over all hosts, and sends the sum to its peers;
//   4. it receives the other parts: the sum of the lane is in the result slot;
//   5. each rank copies all lanes to its outputs.
// Bytes: each host sends and receives 2(h-1)/h of the message, which is the
// least possible for h hosts (the bound of Patarasuk and Yuan, J. Parallel
// Distrib. Comput. 69(2), 2009); its ranks share that work and the summing.
// Each element is summed by one rank, in the order of the hosts.
//
// One turn of the loop does the five steps for five successive chunks, so that
// the messages of two chunks are in flight while other chunks are copied and
// summed.
//
// AllReduceExchange is the same with every rank as a host of its own: each part
// goes straight to the rank that sums it, in rank order. 16-bit elements are
// then rounded once, and integers are averaged without overflow. A rank that is
// alone on its host does not need slots: a chunk of one tensor is sent, received
// and summed in place.
#include <optional>
#include <vector>

#include "algorithms/all_reduce.h"
#include "algorithms/wire_codec.h"

namespace collective {
namespace {

class Hierarchical {
 public:
  // `local`: the members on this host. `hosts`: members by host. `lanes`: number
  // of ranks on the host with the fewest.
  Hierarchical(Communicator& ranks, Communicator& local,
               const std::vector<std::vector<int>>& hosts, int my_host, int lanes,
               const Reduction& reduction)
      : ranks_(ranks),
        local_(local),
        members_(hosts),
        my_host_(my_host),
        p2p_(ranks.p2p()),
        r_(reduction),
        codec_(reduction),
        wire_bytes_(codec_.bytes()),
        // The sums of each host are divided before they are sent: a 16-bit sum
        // over all ranks could overflow although the average does not.
        divides_early_(wire_bytes_ == 2 && r_.divisor > 1 &&
                       ranks.size() > static_cast<int>(hosts.size())),
        first_(local_.first_chunk()),
        hosts_(static_cast<int>(hosts.size())),
        lanes_(lanes),
        per_chunk_(Communicator::ChunkBytes(hosts_ * lanes_) / wire_bytes_) {}

  void Run() {
    const size_t length = r_.tensors.length();
    const uint32_t chunks =
        static_cast<uint32_t>((length + per_chunk_ - 1) / per_chunk_);
    for (uint32_t turn = 0; turn < chunks + 4; ++turn) {
      if (turn < chunks) CopyIn(turn);
      // Unsigned: a turn before the first chunk wraps to beyond the last.
      if (turn - 1 < chunks) SumLane(turn - 1);
      if (turn - 2 < chunks) SumHosts(turn - 2);
      if (turn - 3 < chunks) AwaitSums(turn - 3);
      if (turn - 4 < chunks) CopyOut(turn - 4);
    }
    local_.Finish(chunks);
  }

 private:
  // A chunk between steps 2 and 4.
  struct Flight {
    P2pTransport::Transfers in_flight;
    std::vector<char> parts;  // from each of the other hosts
    // This rank's lane of the chunk, as elements on the wire: the sum over this
    // host and, once there is one, over all hosts.
    const char* host_sum;
    char* sum;
  };

  size_t Length(uint32_t turn) const {
    return std::min(per_chunk_, r_.tensors.length() - turn * per_chunk_);
  }
  // The beginning of a lane of a chunk, in elements; and a host's part of this
  // rank's lane.
  size_t LaneBegin(uint32_t turn, int lane) const {
    return ShareBegin(Length(turn), lane, lanes_, TensorList::kAlign);
  }
  size_t HostBegin(uint32_t turn, int host) const {
    const size_t begin = LaneBegin(turn, local_.me());
    return begin + ShareBegin(LaneBegin(turn, local_.me() + 1) - begin, host, hosts_,
                              TensorList::kAlign);
  }
  size_t HostBytes(uint32_t turn, int host) const {
    return (HostBegin(turn, host + 1) - HostBegin(turn, host)) * wire_bytes_;
  }
  char* Result(uint32_t turn, size_t element) {
    return local_.Result(first_ + turn) + element * wire_bytes_;
  }
  // The piece that is all of a chunk, if the chunk does not have to go through
  // slots: this host has nothing to sum, to convert or to divide.
  std::optional<Piece> Whole(uint32_t turn) const {
    std::optional<Piece> whole;
    if (codec_.narrow() || divides_early_ || local_.size() > 1) return whole;
    const size_t begin = turn * per_chunk_;
    r_.tensors.ForEach(begin, begin + Length(turn), begin, [&](const Piece& piece) {
      if (piece.count == Length(turn)) whole.emplace(piece);
    });
    return whole;
  }
  Flight& FlightOf(uint32_t turn) { return flights_[turn % Communicator::kDepth]; }
  bool carries() const { return local_.me() < lanes_; }
  int peer(int host) const { return members_[host][local_.me()]; }
  int OtherHost(int i) const { return (my_host_ + i) % hosts_; }

  // Calls visit(piece) for each piece of a lane; positions are relative to
  // the chunk.
  template <class Visit>
  void ForLane(uint32_t turn, int lane, Visit&& visit) {
    const size_t begin = turn * per_chunk_;
    r_.tensors.ForEach(begin + LaneBegin(turn, lane), begin + LaneBegin(turn, lane + 1),
                       begin, visit);
  }

  void CopyIn(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    local_.AwaitFree(Communicator::kRead, chunk, r_.request);
    char* slot = local_.Slot(chunk, local_.me());
    for (int lane = 0; lane < lanes_; ++lane) {
      if (lane == local_.me()) continue;
      ForLane(turn, lane, [&](const Piece& piece) {
        codec_.CopyIn(slot + piece.position * wire_bytes_, piece, true);
      });
    }
    local_.Pass(Communicator::kFilled, chunk);
  }

  void SumLane(uint32_t turn) {
    if (!carries()) return;
    Flight& flight = FlightOf(turn);
    if (const std::optional<Piece> whole = Whole(turn)) {
      flight.host_sum = codec_.Input(*whole);
      flight.sum = codec_.Output(*whole);
    } else {
      SumSlots(turn);
      flight.host_sum = flight.sum = Result(turn, 0);
    }
    const size_t mine = HostBytes(turn, my_host_);
    flight.parts.resize(mine * (hosts_ - 1));
    for (int i = 1; i < hosts_; ++i) {
      p2p_.Receive(peer(OtherHost(i)), &flight.parts[mine * (i - 1)], mine,
                   &flight.in_flight);
    }
    for (int i = 1; i < hosts_; ++i) {
      const int host = OtherHost(i);
      p2p_.Send(peer(host), flight.host_sum + HostBegin(turn, host) * wire_bytes_,
                HostBytes(turn, host), &flight.in_flight);
    }
  }

  void SumSlots(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    local_.AwaitFree(Communicator::kDone, chunk, r_.request);
    local_.AwaitAll(Communicator::kFilled, chunk, r_.request);
    std::vector<const void*> sources(local_.size());
    const int divisor = divides_early_ ? r_.divisor : 1;
    ForLane(turn, local_.me(), [&](const Piece& piece) {
      for (int i = 0; i < local_.size(); ++i) {
        sources[i] = local_.Slot(chunk, i) + piece.position * wire_bytes_;
      }
      sources[local_.me()] = codec_.Input(piece);
      r_.kernel({sources.data(), local_.size(), local_.me(), nullptr, piece.count,
                 divisor, Result(turn, piece.position)});
    });
  }

  void SumHosts(uint32_t turn) {
    if (!carries()) return;
    Flight& flight = FlightOf(turn);
    p2p_.AwaitAll(&flight.in_flight, r_.request);
    const size_t mine = HostBytes(turn, my_host_);
    const size_t at = HostBegin(turn, my_host_) * wire_bytes_;
    std::vector<const void*> sources(hosts_, flight.host_sum + at);
    for (int i = 1; i < hosts_; ++i) {
      sources[OtherHost(i)] = &flight.parts[mine * (i - 1)];
    }
    constexpr int kNone = -1;  // all sources are of the wire's type
    r_.kernel({sources.data(), hosts_, kNone, nullptr, mine / wire_bytes_,
               divides_early_ ? 1 : r_.divisor, flight.sum + at});
    for (int i = 1; i < hosts_; ++i) {
      const int host = OtherHost(i);
      p2p_.Receive(peer(host), flight.sum + HostBegin(turn, host) * wire_bytes_,
                   HostBytes(turn, host), &flight.in_flight);
    }
    for (int i = 1; i < hosts_; ++i) {
      p2p_.Send(peer(OtherHost(i)), flight.sum + at, mine, &flight.in_flight);
    }
  }

  void AwaitSums(uint32_t turn) {
    if (carries()) {
      p2p_.AwaitAll(&FlightOf(turn).in_flight, r_.request);
    }
    local_.Pass(Communicator::kRead, first_ + turn);
  }

  void CopyOut(uint32_t turn) {
    const uint32_t chunk = first_ + turn;
    const int lanes = Whole(turn) ? 0 : lanes_;
    for (int i = 0; i < lanes; ++i) {
      const int lane = (local_.me() + i) % lanes_;
      if (lane != local_.me()) {
        local_.AwaitStage(Communicator::kRead, chunk, lane, r_.request);
      }
      ForLane(turn, lane, [&](const Piece& piece) {
        codec_.CopyOut(piece, Result(turn, piece.position), false);
      });
    }
    local_.Pass(Communicator::kDone, chunk);
  }

  Communicator& ranks_;
  Communicator& local_;
  const std::vector<std::vector<int>>& members_;  // by host
  const int my_host_;
  P2pTransport& p2p_;
  const Reduction& r_;
  const WireCodec codec_;
  const size_t wire_bytes_;   // size of an element on the wire
  const bool divides_early_;  // in step 2; otherwise in step 3
  const uint32_t first_;
  const int hosts_;
  const int lanes_;
  const size_t per_chunk_;  // elements
  Flight flights_[Communicator::kDepth];
};

}  // namespace

void AllReduceHierarchical(Communicator& ranks, const Reduction& reduction) {
  Hierarchical(ranks, ranks.local(), ranks.hosts(), ranks.my_host(), ranks.lanes(),
               reduction)
      .Run();
}

void AllReduceExchange(Communicator& ranks, const Reduction& reduction) {
  std::vector<std::vector<int>> hosts;
  for (int member = 0; member < ranks.size(); ++member) {
    hosts.push_back({member});
  }
  Hierarchical(ranks, ranks.self(), hosts, ranks.me(), 1, reduction).Run();
}

}  // namespace collective
