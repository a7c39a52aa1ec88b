// A group of ranks and the shared memory through which they work.
//
// Where its ranks are on several hosts there is no such memory: posts carry no
// data, there are no slots, and mail goes by messages (p2p_transport.h). Such a
// group knows its hosts, and has a communicator of its members on this one.
//
// One communicator runs one collective at a time; whoever calls it sees to that
// (queue.h). All algorithms are written against this class:
//
//   posts     Every collective begins with each rank posting what it is about
//   to
//             do (a hash), small data along with it, and seeing everyone's
//             post: no collective runs unless all ranks make the same call.
//             Posts are double: whoever posts number k+2 has seen everyone's
//             k+1, so everyone is done with its k.
//   slots     A ring of kDepth chunks, each with room for every rank's data and
//             for the result. Chunks are numbered on from one collective to the
//             next; three counters a rank say how far it is: it has filled its
//             slot, it is done reading slots, it is done reading the result.
//   mailboxes From each rank to each, for the algorithms that send messages.
#ifndef COLLECTIVE_NATIVE_COMMUNICATOR_H_
#define COLLECTIVE_NATIVE_COMMUNICATOR_H_

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "membership/job.h"
#include "transport/p2p_transport.h"
#include "transport/slot_stores.h"

namespace collective {

class Communicator {
 public:
  static constexpr uint32_t kDepth = 4;
  static constexpr size_t kChunkBytes = size_t{512} << 10;
  static constexpr size_t kPostBytes = 64 << 10;  // most data in a post
  static constexpr uint32_t kMailDepth = 2;
  static constexpr size_t kMailBytes = size_t{128} << 10;
  static constexpr int kPrivate = -1;

  // `members`: ranks of the job, ascending, this one among them. `area`: of the
  // job's shared memory, or kPrivate for this rank's own.
  Communicator(Job* job, std::vector<int> members, int area);
  Communicator(const Communicator&) = delete;

  int size() const { return size_; }
  int me() const { return me_; }
  int rank_of(int member) const { return members_[member]; }
  Job& job() const { return *job_; }
  const Kernels& kernels() const { return kernels_; }
  // Its number among the job's, and that of its next collective.
  int area() const { return area_; }
  uint32_t CountRun() { return ++runs_; }
  // Whether there are messages only: no posts' data, no slots.
  bool remote() const { return remote_ != nullptr; }

  // ---- groups that span hosts ----------------------------------------------

  Remote& messages() { return *remote_; }
  // Members by host; hosts and members ascend.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int my_host() const { return my_host_; }
  // Of the members on this host, numbered from 0 as in hosts()[my_host()].
  Communicator& here() { return *here_; }
  // Of this rank only.
  Communicator& alone();

  // ---- posts ---------------------------------------------------------------

  // Where the data of the next post goes; fill it before Post.
  char* PostData() { return DataOf(sequence_ + 1, me_); }
  // Tells the others what this rank is about to do.
  void Post(const Request& request);
  // Waits for everyone's post. Throws kFailedPrecondition on every rank where
  // they differ, telling what each passed; the communicator stays usable, even
  // if ranks have filled slots of up to kDepth chunks before.
  void Agree(const Request& request);
  // Whether Agree would not have to wait. Not for those that are remote.
  bool AllPosted();
  // After Agree: what a member posted.
  const char* PostedBy(int member) { return DataOf(sequence_, member); }

  // ---- slots ---------------------------------------------------------------

  enum Stage { kFilled = 0, kRead = 1, kDone = 2 };
  // Number of the first chunk of this collective.
  uint32_t first_chunk() const { return chunk_; }
  char* Slot(uint32_t chunk, int member) {
    return slots_ + ((chunk % kDepth) * (size_ + 1) + member) * kChunkBytes;
  }
  char* Result(uint32_t chunk) { return Slot(chunk, size_); }
  // Where in its slot, or in a room of it, a chunk of so many bytes goes. Small
  // ones go round, too: a line that has left the cache of the core that read it
  // is faster to write.
  static size_t PlaceOf(uint32_t chunk, size_t bytes,
                        size_t room = kChunkBytes) {
    constexpr size_t kPage = 4096;
    const size_t pages = (bytes + kPage - 1) / kPage;
    if (pages == 0 || pages > room / kPage) return 0;
    return chunk / kDepth % (room / kPage / pages) * pages * kPage;
  }
  SlotStores& stores() { return stores_; }
  // This rank has passed a stage for all chunks up to and including this one.
  void Pass(Stage stage, uint32_t chunk) {
    FlagOf(stage, me_).Raise(chunk + 1);
  }
  // Waits until a member has passed a stage for this chunk.
  void AwaitStage(Stage stage, uint32_t chunk, int member,
                  const Request& request) {
    job_->Await(FlagOf(stage, member), chunk + 1, members_[member], request);
  }
  // Waits until everyone has passed a stage for the chunk that was last in the
  // place of this one.
  void AwaitFree(Stage stage, uint32_t chunk, const Request& request) {
    AwaitAll(stage, chunk - kDepth, request);
  }
  void AwaitAll(Stage stage, uint32_t chunk, const Request& request);
  // Ends a collective that used so many chunks: all stages passed.
  void Finish(uint32_t chunks);

  // ---- mailboxes -----------------------------------------------------------

  // Sends and receives at once, in pieces; either may be empty (null, 0). With
  // `reduce`, what is received is handed over piece by piece instead of copied:
  // reduce(source, offset in bytes, bytes).
  template <class Receive>
  void Exchange(int to, const void* data, size_t send_bytes, int from,
                size_t receive_bytes, const Request& request,
                Receive&& receive);

  // ---- order by name (queue.h) ---------------------------------------------

  // The first member writes, the others read, what comes next.
  void Announce(uint32_t number, const Notice& notice);
  Notice Announced(uint32_t number, const Request& request);
  // The same without a wait: false where it has not come. Not for those that
  // are remote.
  bool HasAnnounced(uint32_t number, Notice* notice);

 private:
  struct PostBox;
  struct TextBox;
  struct NoticeBox;
  PostBox& PostOf(uint32_t sequence, int member);
  char* DataOf(uint32_t sequence, int member);
  Flag& FlagOf(Stage stage, int member) {
    return flags_[stage * size_ + member];
  }
  void AwaitPostsOnFewCores(const Request& request);
  [[noreturn]] void ThrowDisagreement(const Request& request);

  Flag& Mailed(int from, int to) { return mail_flags_[from * size_ + to]; }
  Flag& Fetched(int from, int to) {
    return mail_flags_[(size_ + from) * size_ + to];
  }
  char* Mail(int from, int to, uint32_t number) {
    return mail_ + ((from * static_cast<size_t>(size_) + to) * kMailDepth +
                    number % kMailDepth) *
                       kMailBytes;
  }

  Job* job_;
  const int area_;
  uint32_t runs_ = 0;
  std::unique_ptr<Remote> remote_;
  std::vector<std::vector<int>> hosts_;
  int my_host_ = 0;
  std::unique_ptr<Communicator> here_, alone_;
  uint64_t signature_ = 0;  // of the last post, without shared memory
  std::vector<int> members_;
  int size_;
  int me_ = 0;
  const Kernels& kernels_;
  uint32_t sequence_ = 0;
  uint32_t chunk_ = kDepth;  // counters start as if kDepth chunks were done
  std::vector<uint32_t> sent_, received_;  // mail to and from each member
  std::unique_ptr<char, decltype(&std::free)> private_{nullptr, std::free};
  char* posts_;
  char* texts_;
  NoticeBox* notices_;
  Flag* flags_;
  Flag* mail_flags_;
  char* slots_;
  char* mail_;
  SlotStores stores_;
};

template <class Receive>
void Communicator::Exchange(int to, const void* data, size_t send_bytes,
                            int from, size_t receive_bytes,
                            const Request& request, Receive&& receive) {
  const char* source = static_cast<const char*>(data);
  if (remote_) {
    return remote_->Exchange(to, source, send_bytes, from, receive_bytes,
                             request, receive);
  }
  size_t sent = 0, received = 0;
  while (sent < send_bytes || received < receive_bytes) {
    if (sent < send_bytes) {
      const uint32_t number = sent_[to]++;
      const size_t bytes =
          send_bytes - sent < kMailBytes ? send_bytes - sent : kMailBytes;
      job_->Await(Fetched(me_, to), number + 1 - kMailDepth, members_[to],
                  request);
      kernels_.copy(Mail(me_, to, number), source + sent, bytes, true);
      Mailed(me_, to).Raise(number + 1);
      sent += bytes;
    }
    if (received < receive_bytes) {
      const uint32_t number = received_[from]++;
      const size_t bytes = receive_bytes - received < kMailBytes
                               ? receive_bytes - received
                               : kMailBytes;
      job_->Await(Mailed(from, me_), number + 1, members_[from], request);
      receive(Mail(from, me_, number), received, bytes);
      Fetched(from, me_).Raise(number + 1);
      received += bytes;
    }
  }
}

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_COMMUNICATOR_H_
