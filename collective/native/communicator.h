// A group of ranks and the shared memory through which they work.
//
// All algorithms are written against this class, so that none of them knows
// about processes, futexes or memory layout. It offers
//
//   posts      Every collective begins with each rank posting a hash of its
//              call and perhaps a little data, and then reading every other
//              post: no collective runs unless all ranks make the same call.
//              Posts are double-buffered: a rank that posts number k+2 has seen
//              every post k+1, so every rank is done with posts k.
//   slots      A ring of kDepth chunks, each with room for every rank's data
//              and the result. Chunks are numbered across collectives; three
//              counters of each rank count its stages: it has filled its slot,
//              read the slots, read the result.
//
// If the ranks are on several hosts there is no such memory: posts carry no
// data, there are no slots, and ranks send messages (P2pTransport). Such a
// group knows its hosts, and has a communicator of its members on this host.
//
// A communicator runs one collective at a time; its queue ensures that
// (queue.h).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "membership/job.h"
#include "transport/p2p_transport.h"
#include "transport/slot_stores.h"

namespace collective {

class Communicator {
 public:
  // Chunks in flight: the direct algorithm works on three at a time.
  static constexpr uint32_t kDepth = 4;
  // Size of one rank's slot. 128 and 256 KB were slower by 2 to 15 %
  // (docs/explanation/algorithms.md).
  static constexpr size_t kChunkBytes = size_t{512} << 10;
  // Size of a chunk that is divided among hosts and lanes into so many parts. Each
  // part is a message: chunks grow with the parts, so that a message is not
  // mostly overhead, up to the limit of shared memory of all ranks of a host.
  static size_t ChunkBytes(int parts) {
    constexpr size_t kPartBytes = size_t{32} << 10, kMostBytes = size_t{8} << 20;
    return std::clamp(parts * kPartBytes, kChunkBytes, kMostBytes);
  }
  static constexpr size_t kPostBytes = 64 << 10;  // most data in a post
  static constexpr int kPrivate = -1;             // stands for an area

  // `members`: ranks of the job, ascending, including this one. `area`: number in
  // the job's shared memory, or kPrivate for memory of this rank alone.
  // `slot_bytes`: room for the largest chunk of one rank.
  Communicator(Job* job, std::vector<int> members, int area,
               size_t slot_bytes = kChunkBytes);
  Communicator(const Communicator&) = delete;

  int size() const { return size_; }
  int me() const { return me_; }
  int rank_of(int member) const { return members_[member]; }
  Job& job() const { return *job_; }
  const Kernels& kernels() const { return kernels_; }
  // The number of this communicator in the job, and of its next collective.
  int area() const { return area_; }
  uint32_t CountRun() { return ++runs_; }
  // If true, there are messages only: posts have no data, and there are no slots.
  bool spans_hosts() const { return p2p_ != nullptr; }

  // ---- groups that span hosts ----------------------------------------------

  P2pTransport& p2p() { return *p2p_; }
  // Members by host; hosts and members ascend.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int my_host() const { return my_host_; }
  // The least number of ranks on a host: so many can share its messages.
  int lanes() const { return lanes_; }
  // The members on this host, numbered from 0 as in hosts()[my_host()].
  Communicator& local() { return *local_; }
  // This rank only, as MPI_COMM_SELF.
  Communicator& self();

  // ---- posts ---------------------------------------------------------------

  // Memory for the data of the next post; fill it before Post.
  char* PostData() { return DataOf(sequence_ + 1, me_); }
  // Publishes the call that this rank is about to make.
  void Post(const Request& request);
  // Waits for every post. If they differ, throws kFailedPrecondition on every
  // rank, with each rank's call. The communicator stays usable, even if ranks
  // have already filled slots of up to kDepth chunks.
  void VerifyMatch(const Request& request);
  // Whether VerifyMatch would return without a wait. Only on one host.
  bool AllPosted();
  // The data that a member posted; call it after VerifyMatch.
  const char* PostedBy(int member) { return DataOf(sequence_, member); }

  // ---- slots ---------------------------------------------------------------

  enum Stage { kFilled = 0, kRead = 1, kDone = 2 };
  // The number of this collective's first chunk.
  uint32_t first_chunk() const { return chunk_; }
  char* Slot(uint32_t chunk, int member) {
    return slots_ + ((chunk % kDepth) * (size_ + 1) + member) * slot_bytes_;
  }
  char* Result(uint32_t chunk) { return Slot(chunk, size_); }
  // The beginning of a chunk of so many bytes in its slot, or in a part of the
  // slot of `room` bytes. Small chunks rotate through the slot: a line that has
  // left the cache of the core that read it is faster to write.
  static size_t SlotOffset(uint32_t chunk, size_t bytes, size_t room = kChunkBytes) {
    constexpr size_t kPage = 4096;
    const size_t pages = (bytes + kPage - 1) / kPage;
    if (pages == 0 || pages > room / kPage) return 0;
    return chunk / kDepth % (room / kPage / pages) * pages * kPage;
  }
  // The same in one of `parts` equal parts of a slot, each of PartBytes(parts),
  // which are whole pairs of cache lines.
  static size_t PartBytes(int parts) { return kChunkBytes / parts / 128 * 128; }
  char* Part(uint32_t chunk, int member, int part, int parts, size_t bytes) {
    const size_t room = PartBytes(parts);
    return Slot(chunk, member) + part * room + SlotOffset(chunk, bytes, room);
  }
  SlotStores& stores() { return stores_; }
  // This rank has passed a stage for all chunks up to and including this one.
  void Pass(Stage stage, uint32_t chunk) { FlagOf(stage, me_).Raise(chunk + 1); }
  // Waits until a member has passed a stage for this chunk.
  void AwaitStage(Stage stage, uint32_t chunk, int member, const Request& request) {
    job_->Await(FlagOf(stage, member), chunk + 1, members_[member], request);
  }
  // Waits until every rank has passed a stage for the chunk whose memory this
  // one reuses.
  void AwaitFree(Stage stage, uint32_t chunk, const Request& request) {
    AwaitAll(stage, chunk - kDepth, request);
  }
  void AwaitAll(Stage stage, uint32_t chunk, const Request& request);
  // Ends a collective that used so many chunks: passes all their stages.
  void Finish(uint32_t chunks);

  // ---- order by name (queue.h) ---------------------------------------------

  // The first member announces the next collective; every other member reads it.
  void Announce(uint32_t number, const Announcement& announcement);
  Announcement Announced(uint32_t number, const Request& request);
  // The same without a wait: false if it has not arrived. Only on one host.
  bool HasAnnounced(uint32_t number, Announcement* announcement);

 private:
  struct PostBox;
  struct TextBox;
  struct AnnouncementBox;
  PostBox& PostOf(uint32_t sequence, int member);
  char* DataOf(uint32_t sequence, int member);
  Flag& FlagOf(Stage stage, int member) { return flags_[stage * size_ + member]; }
  void ConnectHosts(const std::map<int, std::vector<int>>& by_host);
  void LayOutMemory();
  void AwaitPostsOnSharedCores(const Request& request);
  [[noreturn]] void ThrowMismatched(const Request& request);

  Job* job_;
  const int area_;
  const size_t slot_bytes_;
  uint32_t runs_ = 0;
  std::unique_ptr<P2pTransport> p2p_;
  std::vector<std::vector<int>> hosts_;
  int my_host_ = 0, lanes_ = 0;
  std::unique_ptr<Communicator> local_, self_;
  uint64_t signature_ = 0;  // signature of the last post, without shared memory
  std::vector<int> members_;
  int size_;
  int me_ = 0;
  const Kernels& kernels_;
  uint32_t sequence_ = 0;
  uint32_t chunk_ = kDepth;  // so that AwaitFree treats the first as any other
  std::unique_ptr<char, decltype(&std::free)> private_{nullptr, std::free};
  // Null if the group spans hosts.
  char* posts_ = nullptr;
  char* texts_ = nullptr;
  AnnouncementBox* announcements_ = nullptr;
  Flag* flags_ = nullptr;
  char* slots_ = nullptr;
  SlotStores stores_;
};

}  // namespace collective
