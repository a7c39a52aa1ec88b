#include "rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "failure.h"

namespace collective {
namespace {

constexpr uint32_t kMagic = 0xC011EC71;
constexpr uint32_t kVersion = 5;
using Clock = std::chrono::steady_clock;
// By local rank; empty at the first meeting, to which everyone has to come.
using GoneFunction = std::function<bool(int)>;
constexpr int kLookMilliseconds = 10;  // whether one of them has gone

// What a rank says when it connects, and what it hears when all are there.
struct Hello {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank, size, local_rank, local_size;
};
struct Welcome {
  uint32_t magic = kMagic;
  int32_t size;  // ranks on this host
  int32_t pids[128], ranks[128], former[128];
  int32_t you, generation, meeting;
  int32_t processes;       // pidfds that follow the memory's descriptor
  char refusal[512] = {};  // empty: welcome
};
constexpr int kMostRanks = 128;
constexpr int kNewcomer = -1;     // the number of one that has none yet
constexpr double kForEver = 1e6;  // seconds

std::string Here(const Place& place) {
  return "rank " + std::to_string(place.rank) + " of " +
         std::to_string(place.size);
}

[[noreturn]] void ThrowSystem(const Place& place, const char* call) {
  throw Failure(Code::kInternal,
                Here(place) + ": " + call + ": " + std::strerror(errno),
                "the system refused what shared memory needs; ulimit -n and "
                "ulimit -v show common limits");
}

socklen_t Address(const Place& place, const std::string& meeting,
                  sockaddr_un* address) {
  // Hashed, because a name may hold 107 bytes and a job's may be longer.
  std::string whole = place.job + "/" + std::to_string(place.local_size);
  if (place.local_size != place.size) {
    char host[256] = {};
    gethostname(host, sizeof(host) - 1);
    whole += std::string("/") + host;
  }
  uint64_t hash[2] = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
  for (unsigned char letter : whole) {
    for (uint64_t& part : hash) part = (part ^ letter) * 0x100000001b3u;
    hash[1] ^= hash[0] >> 29;
  }
  *address = {};
  address->sun_family = AF_UNIX;
  const int length = std::snprintf(
      address->sun_path + 1, sizeof(address->sun_path) - 1,
      "collective/%u/%016llx%016llx/%s", static_cast<unsigned>(getuid()),
      static_cast<unsigned long long>(hash[0]),
      static_cast<unsigned long long>(hash[1]), meeting.c_str());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// Who is at the other end, as the kernel knows it.
ucred Peer(int socket) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    peer.uid = static_cast<uid_t>(-1);
  }
  return peer;
}

[[noreturn]] void ThrowForeign(const Place& place, uid_t user) {
  throw Failure(Code::kFailedPrecondition,
                Here(place) + ": a process of user " + std::to_string(user) +
                    " holds the name by which the ranks of this job meet",
                "give the job a name that nobody can guess: export "
                "COLLECTIVE_JOB=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')");
}

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

void Send(int socket, const Welcome& welcome, const std::vector<int>& files) {
  iovec part = {const_cast<Welcome*>(&welcome), sizeof(welcome)};
  alignas(
      cmsghdr) char control[CMSG_SPACE(sizeof(int) * (1 + kMostRanks))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
    std::memcpy(CMSG_DATA(header), files.data(), sizeof(int) * files.size());
  }
  // A receiver that is gone is noticed by whoever waits for it later.
  (void)!sendmsg(socket, &message, MSG_NOSIGNAL);
}

Descriptor OpenListener(const Place& place, const std::string& meeting) {
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener.valid()) ThrowSystem(place, "socket");
  sockaddr_un address;
  const socklen_t length = Address(place, meeting, &address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) !=
      0) {
    if (errno != EADDRINUSE) ThrowSystem(place, "bind");
    const Descriptor caller(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (connect(caller.get(), reinterpret_cast<sockaddr*>(&address), length) ==
        0) {
      const uid_t user = Peer(caller.get()).uid;
      if (user != getuid()) ThrowForeign(place, user);
    }
    throw Failure(Code::kFailedPrecondition,
                  Here(place) + ": another job of this user calls itself '" +
                      place.job + "'",
                  "unset COLLECTIVE_JOB, or give each job a name of its own");
  }
  if (listen(listener.get(), kMostRanks) != 0) ThrowSystem(place, "listen");
  return listener;
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
      if (caller.valid()) Send(caller.get(), no, {});
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
      Send(caller.get(), no, {});
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
    Send(callers[caller].get(), welcome, files);
  }
  all.generation = welcome.generation;
  all.meeting = welcome.meeting;
  return all;
}

// False where the listener has gone, or gave this meeting up.
bool Join(const Place& place, int listener, const std::string& meeting,
          Clock::time_point deadline, const GoneFunction& gone,
          Gathering* gathering) {
  sockaddr_un address;
  const socklen_t length = Address(place, meeting, &address);
  Descriptor caller;
  for (int pause_ms = 1;; pause_ms = pause_ms < 20 ? pause_ms * 2 : 20) {
    caller = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (!caller.valid()) ThrowSystem(place, "socket");
    if (connect(caller.get(), reinterpret_cast<sockaddr*>(&address), length) ==
        0) {
      const uid_t user = Peer(caller.get()).uid;
      if (user != getuid()) ThrowForeign(place, user);
      break;
    }
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

  Welcome welcome = {};
  iovec part = {&welcome, sizeof(welcome)};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * (1 + kMostRanks)));
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
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
  const ssize_t got = recvmsg(caller.get(), &message, MSG_CMSG_CLOEXEC);
  if (got != static_cast<ssize_t>(sizeof(welcome)) || welcome.magic != kMagic) {
    if (gone) return false;
    throw Failure(Code::kUnavailable,
                  Here(place) + ": local rank 0 died during init",
                  "look for its own error message above");
  }
  if (welcome.refusal[0]) {
    throw Failure(Code::kFailedPrecondition,
                  Here(place) + ": " + welcome.refusal);
  }
  std::vector<int> files;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_type != SCM_RIGHTS) continue;
    files.resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(files.data(), CMSG_DATA(header), sizeof(int) * files.size());
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

// Of the job, however many ranks it has.
Place PlaceOfDoor(const std::string& job) {
  Place place;
  place.rank = place.local_rank = kNewcomer;
  place.size = place.local_size = 0;
  place.job = job;
  return place;
}

}  // namespace

Door::Door(const Place& place)
    : listener_(OpenListener(PlaceOfDoor(place.job), "door")) {
  const int flags = fcntl(listener_.get(), F_GETFL);
  fcntl(listener_.get(), F_SETFL, flags | O_NONBLOCK);
}

int Door::Waiting() {
  for (;;) {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.valid()) break;
    if (Peer(caller.get()).uid != getuid()) continue;
    callers_.push_back({std::move(caller)});
  }
  int waiting = 0;
  for (size_t i = callers_.size(); i-- > 0;) {
    Caller& caller = callers_[i];
    pollfd one = {caller.connection.get(), POLLIN, 0};
    if (poll(&one, 1, 0) > 0) {
      // From one that has knocked nothing is due: it hung up.
      Hello hello = {};
      const ssize_t got =
          recv(caller.connection.get(), &hello, sizeof(hello), MSG_DONTWAIT);
      if (caller.knocked || got != sizeof(hello) || hello.magic != kMagic ||
          hello.version != kVersion) {
        callers_.erase(callers_.begin() + i);
        continue;
      }
      caller.knocked = true;
    }
    waiting += caller.knocked;
  }
  return waiting;
}

std::vector<Descriptor> Door::Take() {
  Waiting();
  std::vector<Descriptor> taken;
  std::vector<Caller> others;
  for (Caller& caller : callers_) {
    if (caller.knocked) {
      taken.push_back(std::move(caller.connection));
    } else {
      others.push_back(std::move(caller));
    }
  }
  callers_ = std::move(others);
  return taken;
}

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
  while (!Join(PlaceOfDoor(job), kNewcomer, "door", deadline, never, &all)) {
  }
  return all;
}

}  // namespace collective
