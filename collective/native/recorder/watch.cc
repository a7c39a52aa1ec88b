// The watching thread of a rank, and the signals that must wait for it.
//
// A launcher terminates all ranks as soon as one has died, before they could
// report what they have seen. So a rank that knows of a death, or is in a wait,
// defers SIGTERM and SIGHUP until the dump is written. A handler that the program
// has installed itself stays.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "recorder/recorder.h"

namespace collective {
namespace {

constexpr int kPollMilliseconds = 100;
// If a rank has waited so long when it is terminated, it reports the wait.
constexpr int64_t kLongWait = kSecond;

}  // namespace

Recorder::Event Recorder::Watch(int milliseconds) {
  watching_ = true;
  const int64_t until = Now() + milliseconds * kMillisecond;
  do {
    std::vector<pollfd> watched = {{wake_.get(), POLLIN, 0}};
    for (int i = 0; i < info_.local_size; ++i) {
      const int process = local_.processes[i].pidfd.get();
      // While another rank writes, a death that it will report would end every
      // poll at once.
      const bool ignored = known_dead_[i] || i == info_.local_rank || DumpInProgress();
      if (!ignored && process >= 0) watched.push_back({process, POLLIN, 0});
    }
    poll(watched.data(), watched.size(), kPollMilliseconds);
    uint64_t wakes;
    (void)!read(wake_.get(), &wakes, sizeof(wakes));
    if (closing_) return kClosed;
    if (pending_.exchange(false)) return kDump;
    if (ClaimDeath() || ClaimStall()) return kDump;
    if (header_->asked != mine_->answered) return kSample;
    if (terminated_ && !DumpInProgress()) {
      if (!ClaimTermination()) TerminateBy(terminated_);
      return kDump;
    }
  } while (Now() < until);
  return kSample;
}

void Recorder::Sample(const char* stack) {
  const size_t length = strnlen(stack, sizeof(mine_->stack) - 1);
  std::memcpy(mine_->stack, stack, length);
  mine_->stack[length] = 0;
  mine_->sampled = Now();
  mine_->answered = header_->asked.load();
}

void Recorder::RequestSamples(int milliseconds) {
  const uint32_t asked = ++header_->asked;
  mine_->answered = asked;
  const int64_t until = Now() + milliseconds * kMillisecond;
  for (int i = 0; i < info_.local_size; ++i) {
    while (ranks_[i].pid && !ranks_[i].left && !local_.Dead(i) &&
           ranks_[i].answered != asked && Now() < until) {
      SleepFor(2 * kMillisecond);
    }
  }
}

// ---- signals ----------------------------------------------------------------

__attribute__((no_sanitize_thread)) bool Recorder::WaitsLong() const {
  const Entry& last = mine_->entries[mine_->last % kEntries];
  return last.number && last.kind < kOtherKind && last.started && !last.ended &&
         Now() - last.started > kLongWait;
}

void Recorder::InstallSignalHandlers() {
  for (int number : {SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_DFL) continue;
    action = {};
    action.sa_handler = &Recorder::OnTermination;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

void Recorder::OnTermination(int number) {
  const int error = errno;
  if (Recorder* recorder = Current()) {
    bool defers = recorder->DumpInProgress() || recorder->WaitsLong();
    for (int i = 0; i < recorder->info_.local_size && !defers; ++i) {
      defers = recorder->local_.processes[i].pidfd.valid() &&
               recorder->HasUnreportedDeath(i);
    }
    if (defers && recorder->watching_ && !recorder->closing_ &&
        !recorder->terminated_.exchange(number)) {
      recorder->Wake();
      errno = error;
      return;
    }
    recorder->mine_->left = -number;
  }
  signal(number, SIG_DFL);
  raise(number);  // delivered when this returns
  errno = error;
}

void Recorder::TerminateBy(int number) {
  mine_->left = -number;
  signal(number, SIG_DFL);
  kill(getpid(), number);
  for (;;) pause();
}

}  // namespace collective
