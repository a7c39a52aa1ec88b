#include "rendezvous/rendezvous.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "clock.h"
#include "failure.h"
#include "rendezvous/local_socket.h"

namespace collective {
namespace {

// How often a coordinator checks whether a survivor has died.
constexpr int kLookMilliseconds = 10;
// A connection that sends no request within this time is dropped.
constexpr double kRequestSeconds = 2;
// Other ranks wait a little longer than the coordinator, because its error names
// the missing ranks.
constexpr double kExtraSeconds = 1;
constexpr int kMaxPauseMilliseconds = 20;  // between two attempts to connect
constexpr double kForever = 1e6;           // seconds

constexpr char kSlowStartHint[] =
    "a slow start is given more time by COLLECTIVE_START_TIMEOUT=seconds";
constexpr char kLauncherHint[] = "start every rank by the same launcher";
constexpr char kDiedHint[] = "look for its own error message above";

// For a process without a pidfd: whether it is gone, or a zombie.
bool HasExited(int pid) {
  if (pid == 0) return false;  // in another PID namespace: it cannot be known
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

// The limit for poll, so that the deadline is polled often enough.
int PauseBefore(Deadline* deadline) {
  const int64_t left = std::max<int64_t>(0, deadline->Left()) / kMillisecond + 1;
  return static_cast<int>(std::min<int64_t>(left, kLongestPauseMilliseconds));
}

// Waits until a connection can be read, or has failed; false at the deadline.
bool AwaitReadable(int connection, Deadline* deadline) {
  for (;;) {
    pollfd one = {connection, POLLIN, 0};
    const int ready = poll(&one, 1, PauseBefore(deadline));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (ready == 0 && deadline->Passed()) return false;
  }
}

// The process that has sent a request. Without a pidfd, its number shows whether
// it is alive: the number in this PID namespace, 0 if it is in another.
Process ProcessOf(Descriptor pidfd, int pid, int connection, int rank, int previous) {
  if (!pidfd.valid()) pid = PeerCredentials(connection).pid;
  return {std::move(pidfd), pid, rank, previous};
}

void CheckCount(int local_size) {
  if (local_size <= kMaxRanks) return;
  throw Failure(Code::kInvalidArgument,
                std::to_string(local_size) +
                    " ranks on one host, and the core allows " +
                    std::to_string(kMaxRanks),
                "start fewer ranks on each host");
}

void SendRefusal(int socket, const std::string& what, const std::string& hint) {
  JoinReply reply;
  std::snprintf(reply.refusal, sizeof(reply.refusal), "%s\nHINT: %s", what.c_str(),
                hint.c_str());
  SendReply(socket, reply, {});
}

// The coordinator's side: collects the connections of the other ranks, and
// sends each of them the memory and the processes.
class Coordinator {
 public:
  // `gone` is empty in the first rendezvous, which every rank must join.
  Coordinator(const RankInfo& info, const std::string& name, const Deadline& deadline,
              const GoneFunction& gone)
      : info_(info), deadline_(deadline), gone_(gone), peers_(info.local_size) {
    // A rank that is alone on its host waits for nobody.
    if (info.local_size > 1) listener_ = OpenListener(info, name);
    peers_[info.local_rank].process = {OpenProcess(getpid()), getpid(), info.rank,
                                       info.local_rank};
  }

  // `reply` holds the generation; `listener` may be null.
  Rendezvous Run(size_t bytes, JoinReply reply, JoinListener* listener) {
    for (std::string missing; !(missing = Missing()).empty();) {
      AwaitConnection(missing);
    }
    RemoveGone();
    if (listener) AddNewcomers(listener);
    found_.memory = CreateMemory(bytes);
    found_.generation = reply.generation;
    found_.reconfigurations = reply.reconfigurations;
    SendReplies(&reply);
    for (Peer& peer : peers_) {
      found_.processes.push_back(std::move(peer.process));
    }
    return std::move(found_);
  }

 private:
  struct Peer {
    Process process;
    Descriptor connection;  // invalid: it has not connected, or is this process
  };

  // " 1 3": the local ranks that have not connected and are not gone.
  std::string Missing() const {
    std::string missing;
    for (int i = 0; i < info_.local_size; ++i) {
      if (i == info_.local_rank || peers_[i].connection.valid()) continue;
      if (!gone_ || !gone_(i)) missing += " " + std::to_string(i);
    }
    return missing;
  }

  [[noreturn]] void Refuse(Code code, const std::string& what,
                           const std::string& hint) {
    for (const Peer& peer : peers_) {
      if (peer.connection.valid()) {
        SendRefusal(peer.connection.get(), what, hint);
      }
    }
    throw Failure(code, what, hint);
  }

  // Waits until a rank connects or hangs up; with `gone`, not for long.
  void AwaitConnection(const std::string& missing) {
    std::vector<pollfd> watched = {{listener_.get(), POLLIN, 0}};
    for (const Peer& peer : peers_) {
      if (!peer.connection.valid()) continue;
      watched.push_back({peer.connection.get(), POLLIN, 0});
    }
    const int pause = PauseBefore(&deadline_);
    const int ready = poll(watched.data(), watched.size(),
                           gone_ ? std::min(pause, kLookMilliseconds) : pause);
    if (ready < 0 && errno == EINTR) return;
    if (ready == 0 && !deadline_.Passed()) return;
    if (ready == 0) {
      Refuse(Code::kDeadlineExceeded, "local ranks did not come to init:" + missing,
             std::string("see whether they failed before; ") + kSlowStartHint);
    }
    DropDisconnected();
    if (watched[0].revents & POLLIN) Accept();
  }

  // A rank sends nothing after its request: if its socket is readable, the rank
  // has hung up.
  void DropDisconnected() {
    for (int i = 0; i < info_.local_size; ++i) {
      if (!peers_[i].connection.valid()) continue;
      pollfd one = {peers_[i].connection.get(), POLLIN, 0};
      if (poll(&one, 1, 0) <= 0) continue;
      peers_[i] = Peer();
      if (gone_) continue;
      Refuse(Code::kUnavailable,
             "local rank " + std::to_string(i) + " died during init", kDiedHint);
    }
  }

  void Accept() {
    Descriptor caller(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!caller.valid()) return;
    Deadline deadline(kRequestSeconds);
    JoinRequest request = {};
    Descriptor pidfd;
    if (PeerCredentials(caller.get()).uid != getuid() ||
        !AwaitReadable(caller.get(), &deadline) ||
        !ReceiveRequest(caller.get(), &request, &pidfd)) {
      return;  // a stranger, or a rank that died at once
    }
    const int i = request.local_rank;
    if (request.version != kVersion || request.size != info_.size ||
        request.local_size != info_.local_size || i < 0 || i == info_.local_rank ||
        i >= info_.local_size || peers_[i].connection.valid()) {
      const std::string what =
          "a process came to init as local rank " + std::to_string(i) + " of " +
          std::to_string(request.local_size) + " (rank " +
          std::to_string(request.rank) + " of " + std::to_string(request.size) +
          ", protocol " + std::to_string(request.version) + "), which does not fit " +
          ToString(info_) + " with " + std::to_string(info_.local_size) +
          " on this host";
      SendRefusal(caller.get(), what, kLauncherHint);
      Refuse(Code::kFailedPrecondition, what, kLauncherHint);
    }
    peers_[i].process =
        ProcessOf(std::move(pidfd), request.pid, caller.get(), request.rank, i);
    peers_[i].connection = std::move(caller);
  }

  void RemoveGone() {
    const auto gone = [this](const Peer& peer) {
      return peer.process.pid != getpid() && !peer.connection.valid();
    };
    peers_.erase(std::remove_if(peers_.begin(), peers_.end(), gone), peers_.end());
  }

  void AddNewcomers(JoinListener* listener) {
    for (PendingJoin& newcomer : listener->TakePending()) {
      if (peers_.size() == kMaxRanks) return;
      Peer peer;
      peer.process = ProcessOf(std::move(newcomer.process), newcomer.pid,
                               newcomer.connection.get(), kNewcomer, kNewcomer);
      peer.connection = std::move(newcomer.connection);
      peers_.push_back(std::move(peer));
    }
  }

  Descriptor CreateMemory(size_t bytes) {
    Descriptor memory(
        static_cast<int>(syscall(SYS_memfd_create, "collective", MFD_CLOEXEC)));
    if (!memory.valid()) ThrowSystem(info_, "memfd_create");
    // The memory is a file with a large hole, and the hole counts against the limit
    // on the size of files. The soft limit is not meant for that.
    rlimit limit = {};
    getrlimit(RLIMIT_FSIZE, &limit);
    const rlimit raised = {limit.rlim_max, limit.rlim_max};
    setrlimit(RLIMIT_FSIZE, &raised);
    const int failed = ftruncate(memory.get(), static_cast<off_t>(bytes)) ? errno : 0;
    setrlimit(RLIMIT_FSIZE, &limit);
    errno = failed;
    if (failed) ThrowSystem(info_, "ftruncate");
    return memory;
  }

  void SendReplies(JoinReply* reply) {
    reply->size = static_cast<int32_t>(peers_.size());
    // All pidfds or none: their order alone identifies them.
    const bool complete =
        std::all_of(peers_.begin(), peers_.end(),
                    [](const Peer& peer) { return peer.process.pidfd.valid(); });
    reply->pidfds = complete ? reply->size : 0;
    std::vector<int> files = {found_.memory.get()};
    for (int i = 0; i < reply->size; ++i) {
      const Process& process = peers_[i].process;
      reply->pids[i] = process.pid;
      reply->ranks[i] = process.rank;
      reply->previous[i] = process.previous;
      if (complete) files.push_back(process.pidfd.get());
    }
    for (int i = 0; i < reply->size; ++i) {
      reply->local_rank = i;
      if (peers_[i].connection.valid()) {
        SendReply(peers_[i].connection.get(), *reply, files);
      } else {
        found_.local_rank = i;
      }
    }
  }

  const RankInfo& info_;
  Deadline deadline_;
  const GoneFunction& gone_;
  Descriptor listener_;
  std::vector<Peer> peers_;  // by local rank, then newcomers
  Rendezvous found_;
};

// ---- the other ranks' side -------------------------------------------------

// Connects to the coordinator; invalid if it is gone.
Descriptor ConnectTo(const RankInfo& info, int coordinator, const std::string& name,
                     Deadline* deadline, const GoneFunction& gone) {
  for (int pause_ms = 1;; pause_ms = std::min(2 * pause_ms, kMaxPauseMilliseconds)) {
    Descriptor connection = Connect(info, name);
    if (connection.valid() || (gone && gone(coordinator))) return connection;
    if (deadline->Passed()) {
      throw Failure(Code::kDeadlineExceeded,
                    ToString(info) + ": local rank " + std::to_string(coordinator) +
                        " did not come to init",
                    std::string("see whether it failed before; ") + kSlowStartHint);
    }
    SleepFor(pause_ms * kMillisecond);
  }
}

void AwaitReply(const RankInfo& info, int connection, Deadline* deadline) {
  const int64_t left = std::max<int64_t>(0, deadline->Left());
  Deadline later(static_cast<double>(left) * 1e-9 + kExtraSeconds);
  if (AwaitReadable(connection, &later)) return;
  throw Failure(Code::kDeadlineExceeded,
                ToString(info) + ": not every local rank came to init",
                std::string("see whether one failed before; ") + kSlowStartHint);
}

// Takes the descriptors in `files` over.
Rendezvous FromReply(const JoinReply& reply, const std::vector<int>& files) {
  Rendezvous found;
  found.memory = Descriptor(files[0]);
  for (int i = 0; i < reply.size; ++i) {
    found.processes.push_back({Descriptor(reply.pidfds ? files[1 + i] : -1),
                               reply.pids[i], reply.ranks[i], reply.previous[i]});
  }
  found.local_rank = reply.local_rank;
  found.generation = reply.generation;
  found.reconfigurations = reply.reconfigurations;
  return found;
}

// False if the coordinator is gone, or gave up this rendezvous.
bool TryJoin(const RankInfo& info, int coordinator, const std::string& name,
             Deadline* deadline, const GoneFunction& gone, Rendezvous* found) {
  const Descriptor connection = ConnectTo(info, coordinator, name, deadline, gone);
  if (!connection.valid()) return false;
  JoinRequest request = {};
  request.rank = info.rank;
  request.size = info.size;
  request.local_rank = info.local_rank;
  request.local_size = info.local_size;
  SendRequest(connection.get(), request);

  AwaitReply(info, connection.get(), deadline);
  JoinReply reply = {};
  std::vector<int> files;
  if (!ReceiveReply(connection.get(), &reply, &files)) {
    if (gone) return false;
    throw Failure(Code::kUnavailable,
                  ToString(info) + ": local rank 0 died during init", kDiedHint);
  }
  if (reply.refusal[0]) {
    throw Failure(Code::kFailedPrecondition, ToString(info) + ": " + reply.refusal);
  }
  if (static_cast<int>(files.size()) != 1 + reply.pidfds) {
    for (int file : files) close(file);
    throw Failure(Code::kInternal, ToString(info) + ": too many open files",
                  "raise the limit: ulimit -n 4096");
  }
  *found = FromReply(reply, files);
  return true;
}

}  // namespace

int Rendezvous::Find(int rank) const {
  const auto found =
      std::find_if(processes.begin(), processes.end(),
                   [rank](const Process& process) { return process.rank == rank; });
  return static_cast<int>(found - processes.begin());
}

std::string Rendezvous::NameOf(int local_rank) const {
  const Process& process = processes[local_rank];
  return "rank " + std::to_string(process.rank) + " (process " +
         std::to_string(process.pid) + ")";
}

bool Rendezvous::Dead(int which) const {
  if (which == local_rank) return false;
  const Process& process = processes[which];
  if (!process.pidfd.valid()) return HasExited(process.pid);
  pollfd one = {process.pidfd.get(), POLLIN, 0};
  return poll(&one, 1, 0) > 0;
}

bool Rendezvous::Kill(int local_rank) const {
#ifdef SYS_pidfd_send_signal
  const Descriptor& pidfd = processes[local_rank].pidfd;
  return pidfd.valid() &&
         syscall(SYS_pidfd_send_signal, pidfd.get(), SIGKILL, nullptr, 0) == 0;
#else
  return false;
#endif
}

Rendezvous Rendezvous::Copy() const {
  const auto duplicate = [](const Descriptor& file) {
    return Descriptor(file.valid() ? fcntl(file.get(), F_DUPFD_CLOEXEC, 0) : -1);
  };
  Rendezvous copy = {duplicate(memory), {}, local_rank, generation, reconfigurations};
  for (const Process& process : processes) {
    copy.processes.push_back(
        {duplicate(process.pidfd), process.pid, process.rank, process.previous});
  }
  return copy;
}

Rendezvous JoinRendezvous(const RankInfo& info, int generation, size_t bytes,
                          double seconds) {
  return JoinSurvivors(info, std::to_string(generation), bytes, seconds, {});
}

Rendezvous JoinSurvivors(const RankInfo& info, const std::string& name, size_t bytes,
                         double seconds, const GoneFunction& gone) {
  CheckCount(info.local_size);
  Deadline deadline(seconds);
  if (info.local_rank == 0) {
    return Coordinator(info, name, deadline, gone).Run(bytes, {}, nullptr);
  }
  Rendezvous found;
  TryJoin(info, 0, name, &deadline, gone, &found);
  return found;
}

Rendezvous Reconfigure(const RankInfo& info, int generation, int reconfigurations,
                       size_t bytes, double seconds, const GoneFunction& gone,
                       const MeetingFunction& meeting, JoinListener* listener) {
  CheckCount(info.local_size);
  JoinReply reply = {};
  reply.generation = generation;
  reply.reconfigurations = reconfigurations;
  Deadline deadline(seconds);
  const int me = info.local_rank;
  for (Rendezvous found;;) {
    int coordinator = 0;
    while (coordinator < me && gone(coordinator)) ++coordinator;
    const std::string name = meeting(coordinator);
    if (coordinator == me) {
      return Coordinator(info, name, deadline, gone).Run(bytes, reply, listener);
    }
    if (TryJoin(info, coordinator, name, &deadline, gone, &found)) return found;
  }
}

Rendezvous RequestJoin(const std::string& job) {
  const RankInfo info = JoinListenerInfo(job);
  const GoneFunction never = [](int) { return false; };
  Deadline deadline(kForever);
  Rendezvous found;
  while (!TryJoin(info, kNewcomer, kJoinListenerName, &deadline, never, &found)) {
  }
  return found;
}

}  // namespace collective
