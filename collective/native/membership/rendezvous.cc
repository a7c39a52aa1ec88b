#include "membership/rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "failure.h"
#include "membership/local_socket.h"

namespace collective {
namespace {

using Clock = std::chrono::steady_clock;
// By local rank; empty at the first meeting, to which everyone has to come.
using GoneFunction = std::function<bool(int)>;
constexpr int kLookMilliseconds = 10;  // whether one of them has gone

constexpr double kForEver = 1e6;  // seconds

// For a process that cannot be watched by descriptor: gone, or a zombie.
bool Gone(int pid) {
  if (kill(pid, 0) != 0) return true;
  char path[32], line[512];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (!file) return false;
  const size_t length = std::fread(line, 1, sizeof(line) - 1, file);
  std::fclose(file);
  line[length] = 0;
  const char* end_of_name = std::strrchr(line, ')');
  return end_of_name && end_of_name[1] && end_of_name[2] == 'Z';
}

int MillisecondsUntil(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                        deadline - Clock::now())
                        .count();
  return left < 0 ? 0 : static_cast<int>(left) + 1;
}

Gathering Listen(const Place& place, const std::string& meeting, size_t bytes,
                 Clock::time_point deadline, const GoneFunction& gone,
                 Welcome welcome = {}, Door* door = nullptr) {
  Descriptor listener;  // who is alone on its host waits for nobody
  if (place.local_size > 1) listener = OpenListener(place, meeting);
  const int me = place.local_rank;
  Gathering all;
  all.processes.resize(place.local_size);
  all.pids.assign(place.local_size, 0);
  all.ranks.assign(place.local_size, place.rank);
  std::vector<Descriptor> callers(place.local_size);
  const auto open_process = [&](int local_rank, int pid) {
    all.pids[local_rank] = pid;
#ifdef SYS_pidfd_open
    all.processes[local_rank] =
        Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#endif
  };
  open_process(me, getpid());
  const auto refuse = [&](Code code, const std::string& what,
                          const std::string& hint) {
    Welcome no;
    std::snprintf(no.refusal, sizeof(no.refusal), "%s\nHINT: %s", what.c_str(),
                  hint.c_str());
    for (const Descriptor& caller : callers) {
      if (caller.valid()) SendWelcome(caller.get(), no, {});
    }
    throw Failure(code, what, hint);
  };

  for (;;) {
    std::string absent;
    for (int i = 0; i < place.local_size; ++i) {
      if (i == me || callers[i].valid() || (gone && gone(i))) continue;
      absent += " " + std::to_string(i);
    }
    if (absent.empty()) break;
    std::vector<pollfd> watched = {{listener.get(), POLLIN, 0}};
    for (const Descriptor& caller : callers) {
      if (caller.valid()) watched.push_back({caller.get(), POLLIN, 0});
    }
    const int left = MillisecondsUntil(deadline);
    const int ready = poll(watched.data(), watched.size(),
                           gone ? std::min(left, kLookMilliseconds) : left);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0 && Clock::now() < deadline) continue;
    if (ready == 0) {
      refuse(Code::kDeadlineExceeded,
             "local ranks did not come to init:" + absent,
             "see whether they failed before; a slow start is given more time "
             "by COLLECTIVE_START_TIMEOUT=seconds");
    }
    for (int i = 0; i < place.local_size; ++i) {
      if (!callers[i].valid()) continue;
      pollfd one = {callers[i].get(), POLLIN, 0};
      if (poll(&one, 1, 0) <= 0) continue;
      // Nothing is due from it: it hung up.
      callers[i] = Descriptor();
      if (gone) continue;
      refuse(Code::kUnavailable,
             "local rank " + std::to_string(i) + " died during init",
             "look for its own error message above");
    }
    if (!(watched[0].revents & POLLIN)) continue;
    Descriptor caller(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.valid()) continue;
    const ucred peer = Peer(caller.get());
    pollfd one = {caller.get(), POLLIN, 0};
    Hello hello = {};
    if (peer.uid != getuid() || poll(&one, 1, 2000) <= 0 ||
        recv(caller.get(), &hello, sizeof(hello), 0) != sizeof(hello) ||
        hello.magic != kMagic) {
      continue;  // a stranger, or one that died at once
    }
    const int i = hello.local_rank;
    if (hello.version != kVersion || hello.size != place.size ||
        hello.local_size != place.local_size || i < 0 || i == me ||
        i >= place.local_size || callers[i].valid()) {
      const std::string what =
          "a process came to init as local rank " + std::to_string(i) + " of " +
          std::to_string(hello.local_size) + " (rank " +
          std::to_string(hello.rank) + " of " + std::to_string(hello.size) +
          ", protocol " + std::to_string(hello.version) +
          "), which does not fit " + Here(place) + " with " +
          std::to_string(place.local_size) + " on this host";
      Welcome no;
      std::snprintf(no.refusal, sizeof(no.refusal), "%s\nHINT: %s",
                    what.c_str(), "start every rank by the same launcher");
      SendWelcome(caller.get(), no, {});
      refuse(Code::kFailedPrecondition, what,
             "start every rank by the same launcher");
    }
    open_process(i, peer.pid);
    all.ranks[i] = hello.rank;
    callers[i] = std::move(caller);
  }
  for (int i = place.local_size - 1; i >= 0; --i) {
    if (i == me || callers[i].valid()) {
      all.former.insert(all.former.begin(), i);
      continue;
    }
    all.processes.erase(all.processes.begin() + i);
    all.pids.erase(all.pids.begin() + i);
    all.ranks.erase(all.ranks.begin() + i);
  }
  if (door) {
    for (Descriptor& newcomer : door->Take()) {
      if (all.pids.size() == kMostRanks) break;
      const size_t i = all.pids.size();
      all.processes.emplace_back();
      all.pids.push_back(0);
      all.ranks.push_back(kNewcomer);
      all.former.push_back(kNewcomer);
      open_process(static_cast<int>(i), Peer(newcomer.get()).pid);
      callers.push_back(std::move(newcomer));
    }
  }

  all.memory = Descriptor(
      static_cast<int>(syscall(SYS_memfd_create, "collective", MFD_CLOEXEC)));
  if (!all.memory.valid()) ThrowSystem(place, "memfd_create");
  if (ftruncate(all.memory.get(), static_cast<off_t>(bytes)) != 0) {
    ThrowSystem(place, "ftruncate");
  }
  std::vector<int> files = {all.memory.get()};
  bool complete = true;
  for (const Descriptor& process : all.processes) {
    complete = complete && process.valid();
  }
  welcome.size = static_cast<int32_t>(all.pids.size());
  for (int i = 0; i < welcome.size; ++i) {
    welcome.pids[i] = all.pids[i];
    welcome.ranks[i] = all.ranks[i];
    welcome.former[i] = all.former[i];
    if (complete) files.push_back(all.processes[i].get());
  }
  welcome.processes = complete ? welcome.size : 0;
  int newcomers = 0;
  for (int i = 0; i < welcome.size; ++i) {
    const bool known = all.former[i] != kNewcomer;
    const int caller = known ? all.former[i] : place.local_size + newcomers++;
    if (caller == me) {
      all.me = i;
      continue;
    }
    welcome.you = i;
    SendWelcome(callers[caller].get(), welcome, files);
  }
  all.generation = welcome.generation;
  all.meeting = welcome.meeting;
  return all;
}

// False where the listener has gone, or gave this meeting up.
bool Join(const Place& place, int listener, const std::string& meeting,
          Clock::time_point deadline, const GoneFunction& gone,
          Gathering* gathering) {
  Descriptor caller;
  for (int pause_ms = 1;; pause_ms = pause_ms < 20 ? pause_ms * 2 : 20) {
    caller = Connect(place, meeting);
    if (caller.valid()) break;
    if (gone && gone(listener)) return false;
    if (Clock::now() > deadline) {
      throw Failure(Code::kDeadlineExceeded,
                    Here(place) + ": local rank " + std::to_string(listener) +
                        " did not come to init",
                    "see whether it failed before; a slow start is given more "
                    "time by COLLECTIVE_START_TIMEOUT=seconds");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
  }
  Hello hello;
  hello.rank = place.rank;
  hello.size = place.size;
  hello.local_rank = place.local_rank;
  hello.local_size = place.local_size;
  (void)!send(caller.get(), &hello, sizeof(hello), MSG_NOSIGNAL);

  for (;;) {
    pollfd one = {caller.get(), POLLIN, 0};
    // A little longer than rank 0 waits: its error is the better one.
    const int ready = poll(&one, 1, MillisecondsUntil(deadline) + 1000);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      throw Failure(Code::kDeadlineExceeded,
                    Here(place) + ": not every local rank came to init",
                    "see whether one failed before; a slow start is given more "
                    "time by COLLECTIVE_START_TIMEOUT=seconds");
    }
    break;
  }
  Welcome welcome = {};
  std::vector<int> files;
  if (!ReceiveWelcome(caller.get(), &welcome, &files)) {
    if (gone) return false;
    throw Failure(Code::kUnavailable,
                  Here(place) + ": local rank 0 died during init",
                  "look for its own error message above");
  }
  if (welcome.refusal[0]) {
    throw Failure(Code::kFailedPrecondition,
                  Here(place) + ": " + welcome.refusal);
  }
  if (static_cast<int>(files.size()) != 1 + welcome.processes) {
    for (int file : files) close(file);
    throw Failure(Code::kInternal, Here(place) + ": too many open files",
                  "raise the limit: ulimit -n 4096");
  }
  Gathering all;
  all.memory = Descriptor(files[0]);
  all.processes.resize(welcome.size);
  for (int i = 0; i < welcome.size; ++i) {
    all.pids.push_back(welcome.pids[i]);
    all.ranks.push_back(welcome.ranks[i]);
    all.former.push_back(welcome.former[i]);
    if (welcome.processes) all.processes[i] = Descriptor(files[1 + i]);
  }
  all.me = welcome.you;
  all.generation = welcome.generation;
  all.meeting = welcome.meeting;
  *gathering = std::move(all);
  return true;
}

Clock::time_point DeadlineIn(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(seconds));
}

}  // namespace

bool Gathering::Dead(int local_rank) const {
  const Descriptor& process = processes[local_rank];
  if (!process.valid()) return Gone(pids[local_rank]);
  pollfd one = {process.get(), POLLIN, 0};
  return poll(&one, 1, 0) > 0;
}

Gathering Gathering::Copy() const {
  const auto again = [](const Descriptor& file) {
    return Descriptor(file.valid() ? fcntl(file.get(), F_DUPFD_CLOEXEC, 0)
                                   : -1);
  };
  Gathering copy;
  copy.memory = again(memory);
  for (const Descriptor& process : processes) {
    copy.processes.push_back(again(process));
  }
  copy.pids = pids;
  copy.ranks = ranks;
  copy.former = former;
  copy.me = me;
  copy.generation = generation;
  copy.meeting = meeting;
  return copy;
}

Gathering Meet(const Place& place, int generation, size_t bytes,
               double seconds) {
  if (place.local_size > kMostRanks) {
    throw Failure(Code::kInvalidArgument,
                  std::to_string(place.local_size) + " ranks on one host",
                  "the core allows " + std::to_string(kMostRanks));
  }
  const std::string meeting = std::to_string(generation);
  const auto deadline = DeadlineIn(seconds);
  if (place.local_rank == 0) return Listen(place, meeting, bytes, deadline, {});
  Gathering all;
  Join(place, 0, meeting, deadline, {}, &all);
  return all;
}

Gathering MeetOnce(const Place& place, const std::string& name, size_t bytes,
                   double seconds, const std::function<bool(int)>& gone) {
  const auto deadline = DeadlineIn(seconds);
  if (place.local_rank == 0) return Listen(place, name, bytes, deadline, gone);
  Gathering all;
  Join(place, 0, name, deadline, gone, &all);
  return all;
}

Gathering MeetAgain(const Place& place, int generation, int meeting,
                    size_t bytes, double seconds,
                    const std::function<bool(int)>& gone, Door* door) {
  Welcome welcome = {};
  welcome.generation = generation;
  welcome.meeting = meeting;
  const auto deadline = DeadlineIn(seconds);
  const int me = place.local_rank;
  for (Gathering all;;) {
    int listener = 0;
    while (listener < me && gone(listener)) ++listener;
    const std::string name = std::to_string(generation) + "." +
                             std::to_string(meeting) + "." +
                             std::to_string(listener);
    if (listener == me) {
      return Listen(place, name, bytes, deadline, gone, welcome, door);
    }
    if (Join(place, listener, name, deadline, gone, &all)) return all;
  }
}

Gathering Knock(const std::string& job) {
  const auto never = [](int) { return false; };
  const auto deadline = DeadlineIn(kForEver);
  Gathering all;
  while (!Join(PlaceOfDoor(job), kNewcomer, kDoor, deadline, never, &all)) {
  }
  return all;
}

}  // namespace collective
