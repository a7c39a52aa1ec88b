// The functions of the MPI that the process has loaded, found by their names.
#pragma once

#include <dlfcn.h>
#include <sys/types.h>

#include <string>

#include "failure.h"

namespace collective {

// A function of the loaded MPI; it converts to the type of its variable.
struct Symbol {
  template <typename Function>
  operator Function*() const {
    return reinterpret_cast<Function*>(address);
  }
  void* address;
};

inline Symbol Find(const char* name) { return {dlsym(RTLD_DEFAULT, name)}; }

inline Symbol Require(const char* name) {
  const Symbol symbol = Find(name);
  if (symbol.address) return symbol;
  throw Failure(Code::kFailedPrecondition,
                std::string("the loaded MPI library has no ") + name,
                "name the library of the mpirun that starts the job: "
                "COLLECTIVE_LIBMPI=/path/to/libmpi.so");
}

// The MPI that the process has loaded with RTLD_GLOBAL, so that every symbol is
// visible: its numbers, and its functions that the core calls. Handles of all
// kinds have one type.
template <typename Abi>
struct Mpi : Abi {
  using Handle = typename Abi::Handle;
  using Status = typename Abi::Status;

  int (*Allgather)(const void*, int, Handle, void*, int, Handle,
                   Handle) = Require("MPI_Allgather");
  int (*Comm_dup)(Handle, Handle*) = Require("MPI_Comm_dup");
  int (*Comm_get_attr)(Handle, int, void*, int*) = Require("MPI_Comm_get_attr");
  int (*Comm_group)(Handle, Handle*) = Require("MPI_Comm_group");
  int (*Comm_rank)(Handle, int*) = Require("MPI_Comm_rank");
  int (*Comm_set_errhandler)(Handle, Handle) = Require("MPI_Comm_set_errhandler");
  int (*Comm_size)(Handle, int*) = Require("MPI_Comm_size");
  int (*Comm_split)(Handle, int, int, Handle*) = Require("MPI_Comm_split");
  int (*Error_string)(int, char*, int*) = Require("MPI_Error_string");
  int (*Finalize)() = Require("MPI_Finalize");
  int (*Finalized)(int*) = Require("MPI_Finalized");
  int (*Group_free)(Handle*) = Require("MPI_Group_free");
  int (*Group_size)(Handle, int*) = Require("MPI_Group_size");
  int (*Group_translate_ranks)(Handle, int, const int*, Handle,
                               int*) = Require("MPI_Group_translate_ranks");
  int (*Init_thread)(int*, char***, int, int*) = Require("MPI_Init_thread");
  int (*Initialized)(int*) = Require("MPI_Initialized");
  int (*Iprobe)(int, int, Handle, int*, Status*) = Require("MPI_Iprobe");
  int (*Irecv)(void*, int, Handle, int, int, Handle, Handle*) = Require("MPI_Irecv");
  int (*Isend)(const void*, int, Handle, int, int, Handle,
               Handle*) = Require("MPI_Isend");
  int (*Query_thread)(int*) = Require("MPI_Query_thread");
  int (*Recv)(void*, int, Handle, int, int, Handle, Status*) = Require("MPI_Recv");
  int (*Test)(Handle*, int*, Status*) = Require("MPI_Test");

  // ULFM's: null if the library was built without it.
  int (*Comm_failure_ack)(Handle) = Find("MPIX_Comm_failure_ack");
  int (*Comm_get_failed)(Handle, Handle*) = Find("MPIX_Comm_get_failed");
  int (*Comm_iagree)(Handle, int*, Handle*) = Find("MPIX_Comm_iagree");
  int (*Comm_is_revoked)(Handle, int*) = Find("MPIX_Comm_is_revoked");
  int (*Comm_revoke)(Handle) = Find("MPIX_Comm_revoke");
  int (*Comm_shrink)(Handle, Handle*) = Find("MPIX_Comm_shrink");

  std::string error;  // error of the last failed transfer
  bool skip_finalize = false;
  pid_t started_in = 0;  // a fork of this process must not finalize MPI

  bool IsFinalized() const {
    int finalized = 0;
    Finalized(&finalized);
    return finalized;
  }
};

// Always the same object, which lives until the process ends.
template <typename Abi>
Mpi<Abi>& Loaded() {
  static auto* const loaded = new Mpi<Abi>;
  return *loaded;
}

}  // namespace collective
