// The binary interfaces of MPI: the parts of each mpi.h that mpi.cc uses.
//
// The makers of each MPI have frozen its interface, so declaring it is as safe as
// building with one version's mpi.h, and one built core works with all of them.
// tests/hosts/mpi_abi.cc compares these numbers with the headers themselves.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

namespace collective::mpi_abi {

// Open MPI 4 and 5: libmpi.so.40. Handles are addresses inside the library.
struct OpenMpi {
  using Handle = void*;
  struct Status {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR, cancelled;
    size_t count;
  };
  static constexpr int kAnySource = -1, kUndefined = -32766, kErrOther = 16;
  static constexpr int kThreadSerialized = 2, kThreadMultiple = 3;
  static constexpr int kFaultTolerance = 12;  // the attribute MPIX_FT
  static Handle Find(const char* name) { return dlsym(RTLD_DEFAULT, name); }
  const Handle comm_world = Find("ompi_mpi_comm_world");
  const Handle comm_self = Find("ompi_mpi_comm_self");
  const Handle comm_null = Find("ompi_mpi_comm_null");
  const Handle group_empty = Find("ompi_mpi_group_empty");
  const Handle errors_return = Find("ompi_mpi_errors_return");
  const Handle request_null = Find("ompi_request_null");
  const Handle byte = Find("ompi_mpi_byte");
  const Handle integer = Find("ompi_mpi_int");
  Status* const status_ignore = nullptr;
};

// MPICH, and the MPIs compatible with it since 2013 (Intel MPI, MVAPICH, Cray
// MPICH): libmpi.so.12.
struct Mpich {
  using Handle = int;
  struct Status {
    int count_low, count_high_and_cancelled, MPI_SOURCE, MPI_TAG, MPI_ERROR;
  };
  static constexpr int kAnySource = -2, kUndefined = -32766, kErrOther = 15;
  static constexpr int kThreadSerialized = 2, kThreadMultiple = 3;
  static constexpr int kFaultTolerance = -1;  // none
  const Handle comm_world = 0x44000000;
  const Handle comm_self = 0x44000001;
  const Handle comm_null = 0x04000000;
  const Handle group_empty = 0x48000000;
  const Handle errors_return = 0x54000001;
  const Handle request_null = 0x2c000000;
  const Handle byte = 0x4c00010d;
  const Handle integer = 0x4c000405;
  Status* const status_ignore = reinterpret_cast<Status*>(1);
};

// The standard interface of MPI 5: libmpi_abi.so.
struct Standard {
  using Handle = void*;
  struct Status {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR, internal[5];
  };
  static constexpr int kAnySource = -1, kUndefined = -32766, kErrOther = 16;
  static constexpr int kThreadSerialized = 2048, kThreadMultiple = 4096;
  static constexpr int kFaultTolerance = -1;  // none
  static Handle Number(uintptr_t n) { return reinterpret_cast<Handle>(n); }
  const Handle comm_world = Number(0x101);
  const Handle comm_self = Number(0x102);
  const Handle comm_null = Number(0x100);
  const Handle group_empty = Number(0x109);
  const Handle errors_return = Number(0x143);
  const Handle request_null = Number(0x180);
  const Handle byte = Number(0x247);
  const Handle integer = Number(0x209);
  Status* const status_ignore = nullptr;
};

}  // namespace collective::mpi_abi
