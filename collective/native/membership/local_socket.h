// The socket by which the ranks of a host meet (rendezvous.h): its name, who
// may use it, and what is said.
#ifndef COLLECTIVE_NATIVE_MEMBERSHIP_LOCAL_SOCKET_H_
#define COLLECTIVE_NATIVE_MEMBERSHIP_LOCAL_SOCKET_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "membership/descriptor.h"
#include "membership/rank_info.h"

namespace collective {

constexpr int kMostRanks = 128;
constexpr uint32_t kMagic = 0xC011EC71;
constexpr uint32_t kVersion = 5;

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

// As errors name a rank.
std::string Here(const Place& place);
[[noreturn]] void ThrowSystem(const Place& place, const char* call);

// Who is at the other end, as the kernel knows it.
ucred Peer(int socket);

// Throws kFailedPrecondition where another process has the name.
Descriptor OpenListener(const Place& place, const std::string& meeting);
// Invalid where nobody listens. Throws kFailedPrecondition where the one who
// does is another user's.
Descriptor Connect(const Place& place, const std::string& meeting);

void SendWelcome(int socket, const Welcome& welcome,
                 const std::vector<int>& files);
// False where none came.
bool ReceiveWelcome(int socket, Welcome* welcome, std::vector<int>* files);

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_MEMBERSHIP_LOCAL_SOCKET_H_
