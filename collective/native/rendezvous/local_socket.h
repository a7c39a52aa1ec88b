// The Unix socket of the rendezvous: its address, its peer check, its messages.
//
// The address is abstract: it has no file, so nothing stays if the job is killed.
// Any user may bind any abstract name, so both ends ask the kernel for the identity
// of the other before they trust a byte.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rendezvous/descriptor.h"
#include "rendezvous/rank_info.h"

namespace collective {

constexpr uint32_t kMagic = 0xC011EC71;  // marks our messages
constexpr uint32_t kVersion = 6;         // of these messages

// The message of a rank when it connects, and the reply once all have connected.
struct JoinRequest {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  int32_t rank, size, local_rank, local_size;
  int32_t pid;  // in the PID namespace of the rank
};
struct JoinReply {
  uint32_t magic = kMagic;
  int32_t size;  // ranks on this host
  // By local rank; previous: the local rank before a reconfiguration.
  int32_t pids[kMaxRanks], ranks[kMaxRanks], previous[kMaxRanks];
  int32_t local_rank;  // of the process that gets this reply
  int32_t generation, reconfigurations;
  int32_t pidfds;          // descriptors after the memory's own
  char refusal[512] = {};  // the reason of a refusal; empty: accepted
};

// Returns "rank 1 of 4", the name of a rank in errors.
std::string ToString(const RankInfo& info);
[[noreturn]] void ThrowSystem(const RankInfo& info, const char* call);

// Opens a pidfd of a process; invalid if the kernel has none.
Descriptor OpenProcess(int pid);
// Returns the process at the other end, as the kernel knows it.
ucred PeerCredentials(int socket);

// Listens; `name` is unique to the rendezvous within the job. Throws
// kFailedPrecondition if another process holds the address.
Descriptor OpenListener(const RankInfo& info, const std::string& name);
// Connects; invalid if nobody listens. Throws kFailedPrecondition if the listener is
// another user's process.
Descriptor Connect(const RankInfo& info, const std::string& name);

// Sends a request, with a descriptor (pidfd) of this process: a rank in another
// PID namespace has no other way to get one.
void SendRequest(int socket, JoinRequest request);
// Never blocks. False if nothing has arrived, or a message that is not a request.
// `process` stays invalid if the kernel of the sender has no pidfds.
bool ReceiveRequest(int socket, JoinRequest* request, Descriptor* process);
// Sends a reply together with `files` (SCM_RIGHTS).
void SendReply(int socket, const JoinReply& reply, const std::vector<int>& files);
// False if the connection ended without a reply.
bool ReceiveReply(int socket, JoinReply* reply, std::vector<int>* files);

}  // namespace collective
