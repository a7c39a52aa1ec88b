#include "membership/local_socket.h"

#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "failure.h"

namespace collective {
namespace {

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

[[noreturn]] void ThrowForeign(const Place& place, uid_t user) {
  throw Failure(Code::kFailedPrecondition,
                Here(place) + ": a process of user " + std::to_string(user) +
                    " holds the name by which the ranks of this job meet",
                "give the job a name that nobody can guess: export "
                "COLLECTIVE_JOB=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')");
}

}  // namespace

std::string Here(const Place& place) {
  return "rank " + std::to_string(place.rank) + " of " +
         std::to_string(place.size);
}

void ThrowSystem(const Place& place, const char* call) {
  throw Failure(Code::kInternal,
                Here(place) + ": " + call + ": " + std::strerror(errno),
                "the system refused what shared memory needs; ulimit -n and "
                "ulimit -v show common limits");
}

ucred Peer(int socket) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    peer.uid = static_cast<uid_t>(-1);
  }
  return peer;
}

Descriptor OpenListener(const Place& place, const std::string& meeting) {
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!listener.valid()) ThrowSystem(place, "socket");
  sockaddr_un address;
  const socklen_t length = Address(place, meeting, &address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) !=
      0) {
    if (errno != EADDRINUSE) ThrowSystem(place, "bind");
    Connect(place, meeting);
    throw Failure(Code::kFailedPrecondition,
                  Here(place) + ": another job of this user calls itself '" +
                      place.job + "'",
                  "unset COLLECTIVE_JOB, or give each job a name of its own");
  }
  if (listen(listener.get(), kMostRanks) != 0) ThrowSystem(place, "listen");
  return listener;
}

Descriptor Connect(const Place& place, const std::string& meeting) {
  Descriptor caller(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!caller.valid()) ThrowSystem(place, "socket");
  sockaddr_un address;
  const socklen_t length = Address(place, meeting, &address);
  if (connect(caller.get(), reinterpret_cast<sockaddr*>(&address), length) !=
      0) {
    return Descriptor();
  }
  const uid_t user = Peer(caller.get()).uid;
  if (user != getuid()) ThrowForeign(place, user);
  return caller;
}

void SendWelcome(int socket, const Welcome& welcome,
                 const std::vector<int>& files) {
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

bool ReceiveWelcome(int socket, Welcome* welcome, std::vector<int>* files) {
  iovec part = {welcome, sizeof(*welcome)};
  std::vector<char> control(CMSG_SPACE(sizeof(int) * (1 + kMostRanks)));
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got != static_cast<ssize_t>(sizeof(*welcome)) ||
      welcome->magic != kMagic) {
    return false;
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_type != SCM_RIGHTS) continue;
    files->resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(files->data(), CMSG_DATA(header), sizeof(int) * files->size());
  }
  return true;
}

}  // namespace collective
