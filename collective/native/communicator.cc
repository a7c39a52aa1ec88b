#include "communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>

#include "membership/mismatch.h"

namespace collective {
namespace {

constexpr size_t kTextBytes = 2048;  // most bytes of a call in an error
constexpr size_t kAnnouncements = 8;
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

// The counter, the hash and up to 48 bytes of data travel in one cache line.
struct Communicator::PostBox {
  FutexWord sequence;
  uint64_t signature;
};

struct Communicator::TextBox {
  Flag sequence;
  char text[kTextBytes];
};

struct alignas(64) Communicator::AnnouncementBox {
  FutexWord number;
  Announcement announcement;
};

namespace {
constexpr size_t kPostHeader = 16;
// Not a power of two, so that the posts of different ranks do not compete for a
// cache set.
constexpr size_t kPostStride =
    (kPostHeader + Communicator::kPostBytes + 127) / 128 * 128 + 128;
}  // namespace

Communicator::Communicator(Job* job, std::vector<int> members, int area,
                           size_t slot_bytes)
    : job_(job),
      area_(area),
      slot_bytes_(slot_bytes),
      members_(std::move(members)),
      size_(static_cast<int>(members_.size())),
      kernels_(BestKernels()) {
  me_ = static_cast<int>(std::find(members_.begin(), members_.end(), job->rank()) -
                         members_.begin());
  std::map<int, std::vector<int>> by_host;
  for (int member = 0; member < size_; ++member) {
    by_host[job->host_of(members_[member])].push_back(member);
  }
  if (by_host.size() > 1) {
    ConnectHosts(by_host);
  } else {
    LayOutMemory();
  }
}

void Communicator::ConnectHosts(const std::map<int, std::vector<int>>& by_host) {
  std::vector<int> local_ranks;
  for (const auto& [host, host_members] : by_host) {
    if (host == job_->host_of(job_->rank())) {
      my_host_ = static_cast<int>(hosts_.size());
      for (int member : host_members) local_ranks.push_back(members_[member]);
    }
    hosts_.push_back(host_members);
    const auto here = static_cast<int>(host_members.size());
    lanes_ = lanes_ ? std::min(lanes_, here) : here;
  }
  p2p_ = std::make_unique<P2pTransport>(job_, members_, me_, area_);
  // A rank that is alone on its host shares its memory with self().
  const int parts = static_cast<int>(hosts_.size()) * lanes_;
  local_ = std::make_unique<Communicator>(
      job_, local_ranks, area_, ChunkBytes(local_ranks.size() == 1 ? size_ : parts));
}

void Communicator::LayOutMemory() {
  static_assert(sizeof(PostBox) == kPostHeader, "see DataOf");
  const size_t n = size_;
  size_t bytes = 0;
  const auto reserve = [&](size_t more) {
    const size_t offset = bytes;
    bytes += RoundUp(more, kPage);
    return offset;
  };
  const size_t posts = reserve(2 * n * kPostStride);
  const size_t texts = reserve(2 * n * sizeof(TextBox));
  const size_t announcements = reserve(kAnnouncements * sizeof(AnnouncementBox));
  const size_t flags = reserve(3 * n * sizeof(Flag));
  const size_t choices = reserve(sizeof(SlotStores::Choices));
  bytes = RoundUp(bytes, kHugePage);
  const size_t slots = reserve(kDepth * (n + 1) * slot_bytes_);
  if (area_ == kPrivate) {
    private_.reset(static_cast<char*>(std::aligned_alloc(kPage, bytes)));
    if (!private_) throw std::bad_alloc();
    std::memset(private_.get(), 0, slots);
  }
  char* base = private_ ? private_.get() : job_->MapArea(area_, bytes);
  posts_ = base + posts;
  texts_ = base + texts;
  announcements_ = reinterpret_cast<AnnouncementBox*>(base + announcements);
  flags_ = reinterpret_cast<Flag*>(base + flags);
  slots_ = base + slots;
  stores_.Open(reinterpret_cast<SlotStores::Choices*>(base + choices));
  for (Stage stage : {kFilled, kRead, kDone}) {
    FlagOf(stage, me_).Raise(chunk_);
  }
}

Communicator& Communicator::self() {
  if (hosts_[my_host_].size() == 1) return *local_;
  if (!self_) {
    self_ = std::make_unique<Communicator>(job_, std::vector<int>{job_->rank()},
                                           kPrivate, ChunkBytes(size_));
  }
  return *self_;
}

Communicator::PostBox& Communicator::PostOf(uint32_t sequence, int member) {
  return *reinterpret_cast<PostBox*>(posts_ +
                                     ((sequence & 1) * size_ + member) * kPostStride);
}

char* Communicator::DataOf(uint32_t sequence, int member) {
  return reinterpret_cast<char*>(&PostOf(sequence, member)) + kPostHeader;
}

void Communicator::Post(const Request& request) {
  job_->NoteBegin(area_);
  if (p2p_) {
    signature_ = request.Signature();
    return;
  }
  ++sequence_;
  PostBox& mine = PostOf(sequence_, me_);
  mine.signature = request.Signature();
  if (job_->shared_cores()) job_->RecordCore();
  mine.sequence.Raise(sequence_);
}

void Communicator::VerifyMatch(const Request& request) {
  if (p2p_) return p2p_->VerifyMatch(signature_, request);
  const uint64_t signature = PostOf(sequence_, me_).signature;
  if (job_->shared_cores()) AwaitPostsOnSharedCores(request);
  bool same = true;
  for (int i = 1; i < size_; ++i) {
    const int member = me_ + i < size_ ? me_ + i : me_ + i - size_;
    PostBox& theirs = PostOf(sequence_, member);
    job_->Await(theirs.sequence, sequence_, members_[member], request);
    same = same && theirs.signature == signature;
  }
  if (!same) ThrowMismatched(request);
}

void Communicator::AwaitPostsOnSharedCores(const Request& request) {
  // With two ranks on each core, one switch for each collective is enough: the
  // rank that gets the core ends the current collective and begins the next. It
  // requires that ranks which run at the same time wait for each other, and do
  // not yield their cores at once.
  const auto missing = [&](bool on_other_core, auto&& await) {
    for (int i = 1; i < size_; ++i) {
      const int member = (me_ + i) % size_;
      FutexWord& post = PostOf(sequence_, member).sequence;
      if (post.Reached(sequence_)) continue;
      if (job_->RunsOnOtherCore(members_[member]) == on_other_core) await(post, member);
    }
  };
  missing(false, [&](FutexWord& post, int member) {
    job_->Await(post, sequence_, members_[member], request);
  });
  missing(true, [&](FutexWord& post, int) { Job::SpinBriefly(post, sequence_); });
}

bool Communicator::AllPosted() {
  for (int member = 0; member < size_; ++member) {
    if (!PostOf(sequence_, member).sequence.Reached(sequence_)) return false;
  }
  return true;
}

void Communicator::ThrowMismatched(const Request& request) {
  // Every rank has seen that the hashes differ, so every rank reaches this line,
  // some with filled slots. Finish skips these chunks.
  Finish(kDepth);
  std::vector<uint64_t> signatures;
  for (int member = 0; member < size_; ++member) {
    signatures.push_back(PostOf(sequence_, member).signature);
  }
  ThrowIfJoined(members_, signatures);
  TextBox* boxes = reinterpret_cast<TextBox*>(texts_) + (sequence_ & 1) * size_;
  std::snprintf(boxes[me_].text, kTextBytes, "%s", request.Describe().c_str());
  boxes[me_].sequence.Raise(sequence_);
  std::vector<std::string> texts;
  for (int member = 0; member < size_; ++member) {
    job_->Await(boxes[member].sequence, sequence_, members_[member], request);
    texts.push_back(boxes[member].text);
  }
  ThrowMismatch(members_, texts);
}

void Communicator::AwaitAll(Stage stage, uint32_t chunk, const Request& request) {
  for (int i = 1; i < size_; ++i) {
    AwaitStage(stage, chunk, (me_ + i) % size_, request);
  }
}

void Communicator::Finish(uint32_t chunks) {
  chunk_ += chunks;
  for (Stage stage : {kFilled, kRead, kDone}) {
    Flag& flag = FlagOf(stage, me_);
    if (flag.value.load(std::memory_order_relaxed) != chunk_) {
      flag.Raise(chunk_);
    }
  }
}

void Communicator::Announce(uint32_t number, const Announcement& announcement) {
  if (p2p_) return p2p_->Announce(announcement);
  // There is always room: every rank has run the collective before the last one,
  // or this rank could not have ended the last one.
  AnnouncementBox& box = announcements_[number % kAnnouncements];
  box.announcement = announcement;
  box.number.Raise(number);
}

Announcement Communicator::Announced(uint32_t number, const Request& request) {
  job_->NoteAwaitNext(area_);
  if (p2p_) return p2p_->Announced(request);
  AnnouncementBox& box = announcements_[number % kAnnouncements];
  job_->Await(box.number, number, members_[0], request);
  return box.announcement;
}

bool Communicator::HasAnnounced(uint32_t number, Announcement* announcement) {
  AnnouncementBox& box = announcements_[number % kAnnouncements];
  if (!box.number.Reached(number)) return false;
  *announcement = box.announcement;
  return true;
}

}  // namespace collective
