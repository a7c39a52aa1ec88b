// Checks whether network/mpi_abi.h agrees with an MPI's own header. test_mpis.py
// compiles this with each: -DABI=OpenMpi -DHEADER='<mpi.h>'. It returns 0 if so.
#include "network/mpi_abi.h"

#include HEADER
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

using Abi = collective::mpi_abi::ABI;
using Status = Abi::Status;

template <typename Handle>
bool Is(Abi::Handle ours, Handle theirs) {
  static_assert(sizeof(Abi::Handle) == sizeof(Handle), "a handle");
  return ours && ours == (Abi::Handle)theirs;
}

static_assert(sizeof(Status) == sizeof(MPI_Status), "MPI_Status");
static_assert(offsetof(Status, MPI_SOURCE) == offsetof(MPI_Status, MPI_SOURCE),
              "MPI_SOURCE");
static_assert(Abi::kAnySource == MPI_ANY_SOURCE, "MPI_ANY_SOURCE");
static_assert(Abi::kUndefined == MPI_UNDEFINED, "MPI_UNDEFINED");
static_assert(Abi::kErrOther == MPI_ERR_OTHER, "MPI_ERR_OTHER");
static_assert(Abi::kThreadSerialized == MPI_THREAD_SERIALIZED, "threads");
static_assert(Abi::kThreadMultiple == MPI_THREAD_MULTIPLE, "threads");
static_assert(MPI_SUCCESS == 0 && MPI_MAX_ERROR_STRING <= 512, "errors");
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
static_assert(Abi::kFaultTolerance == MPIX_FT, "MPIX_FT");
#endif

int main() {
  const Abi abi;
  const bool same = Is(abi.comm_world, MPI_COMM_WORLD) &&
                    Is(abi.comm_self, MPI_COMM_SELF) &&
                    Is(abi.comm_null, MPI_COMM_NULL) &&
                    Is(abi.group_empty, MPI_GROUP_EMPTY) &&
                    Is(abi.errors_return, MPI_ERRORS_RETURN) &&
                    Is(abi.request_null, MPI_REQUEST_NULL) &&
                    Is(abi.byte, MPI_BYTE) && Is(abi.integer, MPI_INT) &&
                    abi.status_ignore == (Status*)MPI_STATUS_IGNORE;
  return same ? 0 : 1;
}
