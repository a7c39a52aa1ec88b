#include "communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>

#include "membership/mismatch.h"

namespace collective {
namespace {

constexpr size_t kTextBytes = 2048;
constexpr size_t kNotices = 8;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

// The counter, the hash and up to 48 bytes of data travel in one cache line.
struct Communicator::PostBox {
  Word sequence;
  uint64_t signature;
};

struct Communicator::TextBox {
  Flag sequence;
  char text[kTextBytes];
};

struct alignas(64) Communicator::NoticeBox {
  Word number;
  Notice notice;
};

namespace {
constexpr size_t kPostHeader = 16;
// Not a power of two: posts of the ranks shall not compete for a cache set.
constexpr size_t kPostStride =
    (kPostHeader + Communicator::kPostBytes + 127) / 128 * 128 + 128;
}  // namespace

Communicator::Communicator(Job* job, std::vector<int> members, int area)
    : job_(job),
      area_(area),
      members_(std::move(members)),
      size_(static_cast<int>(members_.size())),
      kernels_(BestKernels()),
      sent_(size_, 0),
      received_(size_, 0) {
  static_assert(sizeof(PostBox) == kPostHeader, "see DataOf");
  me_ = static_cast<int>(
      std::find(members_.begin(), members_.end(), job->rank()) -
      members_.begin());
  std::map<int, std::vector<int>> by_host;
  for (int member = 0; member < size_; ++member) {
    by_host[job->host_of(members_[member])].push_back(member);
  }
  if (by_host.size() > 1) {
    std::vector<int> ranks_here;
    for (auto& [host, on_it] : by_host) {
      if (host == job->host_of(job->rank())) {
        my_host_ = static_cast<int>(hosts_.size());
        for (int member : on_it) ranks_here.push_back(members_[member]);
      }
      hosts_.push_back(std::move(on_it));
    }
    remote_ = std::make_unique<Remote>(job, members_, me_, area);
    here_ = std::make_unique<Communicator>(job, ranks_here, area);
    return;
  }
  const size_t n = size_;
  size_t bytes = 0;
  const auto take = [&](size_t more) {
    const size_t at = bytes;
    bytes += RoundUp(more, 4096);
    return at;
  };
  const size_t posts = take(2 * n * kPostStride);
  const size_t texts = take(2 * n * sizeof(TextBox));
  const size_t notices = take(kNotices * sizeof(NoticeBox));
  const size_t flags = take(3 * n * sizeof(Flag));
  const size_t mail_flags = take(2 * n * n * sizeof(Flag));
  const size_t told = take(sizeof(SlotStores::Told));
  bytes = RoundUp(bytes, size_t{2} << 20);
  const size_t slots = take(kDepth * (n + 1) * kChunkBytes);
  const size_t mail = take(n * n * kMailDepth * kMailBytes);
  if (area == kPrivate) {
    private_.reset(static_cast<char*>(std::aligned_alloc(4096, bytes)));
    if (!private_) throw std::bad_alloc();
    std::memset(private_.get(), 0, slots);
  }
  char* base = private_ ? private_.get() : job->MapArea(area, bytes);
  posts_ = base + posts;
  texts_ = base + texts;
  notices_ = reinterpret_cast<NoticeBox*>(base + notices);
  flags_ = reinterpret_cast<Flag*>(base + flags);
  mail_flags_ = reinterpret_cast<Flag*>(base + mail_flags);
  slots_ = base + slots;
  mail_ = base + mail;
  stores_.Open(reinterpret_cast<SlotStores::Told*>(base + told));
  for (Stage stage : {kFilled, kRead, kDone}) {
    FlagOf(stage, me_).Raise(chunk_);
  }
}

Communicator& Communicator::alone() {
  if (hosts_[my_host_].size() == 1) return *here_;
  if (!alone_) {
    alone_ = std::make_unique<Communicator>(
        job_, std::vector<int>{job_->rank()}, kPrivate);
  }
  return *alone_;
}

Communicator::PostBox& Communicator::PostOf(uint32_t sequence, int member) {
  return *reinterpret_cast<PostBox*>(
      posts_ + ((sequence & 1) * size_ + member) * kPostStride);
}

char* Communicator::DataOf(uint32_t sequence, int member) {
  return reinterpret_cast<char*>(&PostOf(sequence, member)) + kPostHeader;
}

void Communicator::Post(const Request& request) {
  job_->Begins(area_);
  if (remote_) {
    signature_ = request.Signature();
    return;
  }
  ++sequence_;
  PostBox& mine = PostOf(sequence_, me_);
  mine.signature = request.Signature();
  if (job_->shared_cores()) job_->OnThisCore();
  mine.sequence.Raise(sequence_);
}

void Communicator::Agree(const Request& request) {
  if (remote_) return remote_->Agree(signature_, request);
  const uint64_t signature = PostOf(sequence_, me_).signature;
  if (job_->shared_cores()) AwaitPostsOnFewCores(request);
  bool agreed = true;
  for (int i = 1; i < size_; ++i) {
    const int member = me_ + i < size_ ? me_ + i : me_ + i - size_;
    PostBox& theirs = PostOf(sequence_, member);
    job_->Await(theirs.sequence, sequence_, members_[member], request);
    agreed = agreed && theirs.signature == signature;
  }
  if (!agreed) ThrowDisagreement(request);
}

void Communicator::AwaitPostsOnFewCores(const Request& request) {
  // With two ranks on each core, one hand-over for each collective will do:
  // whoever is handed the core ends the one that is under way and begins the
  // next. That takes ranks that run at the same time to wait for one another,
  // rather than to hand their cores over at once.
  const auto missing = [&](bool elsewhere, auto&& await) {
    for (int i = 1; i < size_; ++i) {
      const int member = (me_ + i) % size_;
      Word& post = PostOf(sequence_, member).sequence;
      if (post.Reached(sequence_)) continue;
      if (job_->Elsewhere(members_[member]) == elsewhere) await(post, member);
    }
  };
  missing(false, [&](Word& post, int member) {
    job_->Await(post, sequence_, members_[member], request);
  });
  missing(true, [&](Word& post, int) { Job::Look(post, sequence_); });
}

bool Communicator::AllPosted() {
  for (int member = 0; member < size_; ++member) {
    if (!PostOf(sequence_, member).sequence.Reached(sequence_)) return false;
  }
  return true;
}

void Communicator::ThrowDisagreement(const Request& request) {
  // Everyone has seen that the hashes differ, so everyone comes here; some with
  // slots filled for what will not be.
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
  collective::ThrowDisagreement(members_, texts);
}

void Communicator::AwaitAll(Stage stage, uint32_t chunk,
                            const Request& request) {
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

void Communicator::Announce(uint32_t number, const Notice& notice) {
  if (remote_) return remote_->Announce(notice);
  // The notice before the last has been obeyed by all, or this rank would not
  // have come to the end of it: there is always room.
  NoticeBox& box = notices_[number % kNotices];
  box.notice = notice;
  box.number.Raise(number);
}

Notice Communicator::Announced(uint32_t number, const Request& request) {
  job_->AwaitsNext(area_);
  if (remote_) return remote_->Announced(request);
  NoticeBox& box = notices_[number % kNotices];
  job_->Await(box.number, number, members_[0], request);
  return box.notice;
}

bool Communicator::HasAnnounced(uint32_t number, Notice* notice) {
  NoticeBox& box = notices_[number % kNotices];
  if (!box.number.Reached(number)) return false;
  *notice = box.notice;
  return true;
}

}  // namespace collective
