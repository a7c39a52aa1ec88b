#include "rendezvous/local_socket.h"

#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "failure.h"

namespace collective {
namespace {

// SipHash-2-4 [Aumasson, Bernstein, INDOCRYPT 2012] of a text. A reader of the
// result learns nothing about the key, or about the result for another text.
uint64_t KeyedHash(const uint64_t key[2], const std::string& text) {
  uint64_t v0 = key[0] ^ 0x736f6d6570736575u, v1 = key[1] ^ 0x646f72616e646f6du;
  uint64_t v2 = key[0] ^ 0x6c7967656e657261u, v3 = key[1] ^ 0x7465646279746573u;
  const auto rotate = [](uint64_t& x, int by) { x = x << by | x >> (64 - by); };
  const auto rounds = [&](int count) {
    while (count--) {
      v0 += v1, rotate(v1, 13), v1 ^= v0, rotate(v0, 32);
      v2 += v3, rotate(v3, 16), v3 ^= v2;
      v0 += v3, rotate(v3, 21), v3 ^= v0;
      v2 += v1, rotate(v1, 17), v1 ^= v2, rotate(v2, 32);
    }
  };
  for (size_t at = 0; at <= text.size(); at += 8) {
    uint64_t word = 0;
    for (size_t i = at; i < at + 8 && i < text.size(); ++i) {
      word |= uint64_t{static_cast<unsigned char>(text[i])} << 8 * (i - at);
    }
    if (at + 8 > text.size()) word |= uint64_t{text.size()} << 56;
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

socklen_t SocketAddress(const RankInfo& info, const std::string& name,
                        sockaddr_un* address) {
  // The key is a hash of the job's name (FNV-1a, twice). All users can read the
  // addresses in use; from one address, no other of the job can be derived.
  const std::string whole = info.job + "/" + std::to_string(info.local_size);
  uint64_t key[2] = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
  for (unsigned char letter : whole) {
    for (uint64_t& part : key) part = (part ^ letter) * 0x100000001b3u;
    key[1] ^= key[0] >> 29;
  }
  *address = {};
  address->sun_family = AF_UNIX;
  const int length =
      std::snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1,
                    "collective/%u/%016llx%016llx", static_cast<unsigned>(getuid()),
                    static_cast<unsigned long long>(KeyedHash(key, name + "/0")),
                    static_cast<unsigned long long>(KeyedHash(key, name + "/1")));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

[[noreturn]] void ThrowForeignUser(const RankInfo& info, uid_t user) {
  throw Failure(Code::kFailedPrecondition,
                ToString(info) + ": a process of user " + std::to_string(user) +
                    " holds the name by which the ranks of this job meet",
                "give the job a name that nobody can guess: export "
                "COLLECTIVE_JOB=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')");
}

// One message together with descriptors (SCM_RIGHTS).
void SendWithFiles(int socket, const void* data, size_t bytes,
                   const std::vector<int>& files) {
  iovec part = {const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * (1 + kMaxRanks))] = {};
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
  // The first rank that waits for a dead receiver notices its death.
  (void)!sendmsg(socket, &message, MSG_NOSIGNAL);
}

// Does not block. False if no message of so many bytes has arrived.
bool ReceiveWithFiles(int socket, void* data, size_t bytes, std::vector<int>* files) {
  iovec part = {data, bytes};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * (1 + kMaxRanks)));
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    files->resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(files->data(), CMSG_DATA(header), sizeof(int) * files->size());
  }
  return got == static_cast<ssize_t>(bytes) && !(message.msg_flags & MSG_TRUNC);
}

}  // namespace

std::string ToString(const RankInfo& info) {
  return "rank " + std::to_string(info.rank) + " of " + std::to_string(info.size);
}

void ThrowSystem(const RankInfo& info, const char* call) {
  const int error = errno;
  throw Failure(
      Code::kInternal, ToString(info) + ": " + call + ": " + std::strerror(error),
      error == EFBIG ? "raise the hard limit on the size of files: ulimit -H -f"
                     : "the system refused what shared memory needs; ulimit -n "
                       "and ulimit -v show common limits");
}

ucred PeerCredentials(int socket) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    peer.uid = static_cast<uid_t>(-1);
  }
  return peer;
}

Descriptor OpenListener(const RankInfo& info, const std::string& name) {
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener.valid()) ThrowSystem(info, "socket");
  sockaddr_un address;
  const socklen_t length = SocketAddress(info, name, &address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE) ThrowSystem(info, "bind");
    Connect(info, name);  // throws if the holder is another user
    throw Failure(
        Code::kFailedPrecondition,
        ToString(info) + ": another job of this user calls itself '" + info.job + "'",
        "unset COLLECTIVE_JOB, or give each job a name of its own");
  }
  if (listen(listener.get(), kMaxRanks) != 0) ThrowSystem(info, "listen");
  return listener;
}

Descriptor Connect(const RankInfo& info, const std::string& name) {
  Descriptor caller(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!caller.valid()) ThrowSystem(info, "socket");
  sockaddr_un address;
  const socklen_t length = SocketAddress(info, name, &address);
  if (connect(caller.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return Descriptor();
  }
  const uid_t user = PeerCredentials(caller.get()).uid;
  if (user != getuid()) ThrowForeignUser(info, user);
  return caller;
}

Descriptor OpenProcess(int pid) {
#ifdef SYS_pidfd_open
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  return Descriptor();
#endif
}

void SendRequest(int socket, JoinRequest request) {
  request.pid = getpid();
  const Descriptor process = OpenProcess(request.pid);
  std::vector<int> files;
  if (process.valid()) files.push_back(process.get());
  SendWithFiles(socket, &request, sizeof(request), files);
}

bool ReceiveRequest(int socket, JoinRequest* request, Descriptor* process) {
  std::vector<int> files;
  const bool whole = ReceiveWithFiles(socket, request, sizeof(*request), &files) &&
                     request->magic == kMagic;
  if (whole && files.size() == 1) {
    *process = Descriptor(files[0]);
  } else {
    for (int file : files) close(file);
  }
  return whole;
}

void SendReply(int socket, const JoinReply& reply, const std::vector<int>& files) {
  SendWithFiles(socket, &reply, sizeof(reply), files);
}

bool ReceiveReply(int socket, JoinReply* reply, std::vector<int>* files) {
  if (!ReceiveWithFiles(socket, reply, sizeof(*reply), files) ||
      reply->magic != kMagic) {
    return false;
  }
  reply->refusal[sizeof(reply->refusal) - 1] = 0;
  if (reply->refusal[0]) return true;
  const int size = reply->size;
  return size > 0 && size <= kMaxRanks && reply->local_rank >= 0 &&
         reply->local_rank < size && (reply->pidfds == 0 || reply->pidfds == size);
}

}  // namespace collective
