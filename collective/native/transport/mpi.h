// MPI for messages.cc, whichever implementation of it the process has loaded.
//
// Nothing of MPI is needed to build this: mpi_abi.h has the three binary
// interfaces that exist, and mpi.cc finds the functions when a job starts.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_MPI_H_
#define COLLECTIVE_NATIVE_TRANSPORT_MPI_H_

#include <cstddef>
#include <string>

namespace collective {

// A job's communicator, a duplicate of MPI_COMM_WORLD: its messages never mix
// with those of another job or of the program's own MPI calls.
struct MpiWorld;

// One thread at a time calls these functions (messages.cc holds a lock).
class Mpi {
 public:
  // The MPI that the process has loaded, where every symbol is visible
  // (RTLD_GLOBAL). Null if there is none; throws kFailedPrecondition if it
  // lacks a function. The same object each time: it lives until the process
  // ends.
  static Mpi* Loaded();

  virtual ~Mpi() = default;
  // Starts MPI unless it runs already; and a job. Null if it cannot: Error().
  virtual MpiWorld* Start(int* rank, int* size) = 0;
  // All-gather of one number, by rank. 0 for success.
  virtual int Gather(MpiWorld* world, int mine, int* all) = 0;
  virtual void* Send(MpiWorld* world, int rank, int tag, const void* data,
                     size_t bytes) = 0;
  virtual void* Receive(MpiWorld* world, int rank, int tag, void* data,
                        size_t bytes) = 0;
  // 0: in flight. 1: done; -1: failed, see Error(). Both free it.
  virtual int Test(void* transfer) = 0;
  // The text of the last failure.
  virtual const std::string& Error() const = 0;
  // Progresses transfers. Receives a message of this tag, from any rank, if one
  // has arrived.
  virtual bool Poll(MpiWorld* world, int tag, void* data, size_t bytes) = 0;
  // The job is broken: the process is to end without MPI_Finalize, which would
  // wait for ranks that may have died.
  virtual void SkipFinalize() = 0;

  // ---- surviving the death of ranks: MPI's ULFM ----

  // Whether MPI survives the death of processes. The rest is for MPIs that do.
  virtual bool FaultTolerant() = 0;
  // The ranks of the job that are known to have died; returns how many.
  virtual int FailedRanks(MpiWorld* world, int* ranks) = 0;
  // Whether any rank has called Revoke.
  virtual bool Revoked(MpiWorld* world) = 0;
  // Ends the job's transfers, on every rank: none writes to memory any more.
  virtual void Revoke(MpiWorld* world) = 0;
  // Ends when all live ranks have called it; with success if none had died
  // before and all have said yes. The same outcome on all.
  virtual void* Agree(MpiWorld* world, bool yes) = 0;
  // A job of the live ranks, which all of them call at about the same time.
  // `previous`, by rank: its number in `world`. Null if MPI cannot. After this
  // the process is to end without MPI_Finalize: that of Open MPI 5.0.11 waits
  // for ever if all ranks of a host are dead.
  virtual MpiWorld* Shrink(MpiWorld* world, int* rank, int* size,
                           int* previous) = 0;
  // The same without those that do not stay, if all live and all call it.
  // `next` is null for a rank that does not stay. 0 for success; if a rank dies
  // meanwhile, perhaps on some ranks only.
  virtual int Split(MpiWorld* world, bool stays, MpiWorld** next, int* rank,
                    int* size, int* previous) = 0;
};

}  // namespace collective

#endif  // COLLECTIVE_NATIVE_TRANSPORT_MPI_H_
