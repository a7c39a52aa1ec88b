// The binary interfaces of MPI: what mpi.h of each would say, as far as mpi.cc
// uses it.
//
// Each is frozen by those who make it, so declaring it is as safe as building
// with one version's mpi.h, and one built core works with all of them.
// tests/hosts/mpi_abi.cc compares these numbers with the headers themselves.
#ifndef COLLECTIVE_NATIVE_TRANSPORT_MPI_ABI_H_
#define COLLECTIVE_NATIVE_TRANSPORT_MPI_ABI_H_

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
  static Handle CommWorld() {
    static void* const a = Find("ompi_mpi_comm_world");
    return a;
  }
  static Handle CommSelf() {
    static void* const a = Find("ompi_mpi_comm_self");
    return a;
  }
  static Handle CommNull() {
    static void* const a = Find("ompi_mpi_comm_null");
    return a;
  }
  static Handle GroupEmpty() {
    static void* const a = Find("ompi_mpi_group_empty");
    return a;
  }
  static Handle ErrorsReturn() {
    static void* const a = Find("ompi_mpi_errors_return");
    return a;
  }
  static Handle RequestNull() {
    static void* const a = Find("ompi_request_null");
    return a;
  }
  static Handle Byte() {
    static void* const a = Find("ompi_mpi_byte");
    return a;
  }
  static Handle Int() {
    static void* const a = Find("ompi_mpi_int");
    return a;
  }
  static Status* StatusIgnore() { return nullptr; }

 private:
  static void* Find(const char* name) { return dlsym(RTLD_DEFAULT, name); }
};

// MPICH, and what is compatible with it since 2013 (Intel MPI, MVAPICH, Cray
// MPICH): libmpi.so.12.
struct Mpich {
  using Handle = int;
  struct Status {
    int count_low, count_high_and_cancelled, MPI_SOURCE, MPI_TAG, MPI_ERROR;
  };
  static constexpr int kAnySource = -2, kUndefined = -32766, kErrOther = 15;
  static constexpr int kThreadSerialized = 2, kThreadMultiple = 3;
  static constexpr int kFaultTolerance = -1;  // none
  static Handle CommWorld() { return 0x44000000; }
  static Handle CommSelf() { return 0x44000001; }
  static Handle CommNull() { return 0x04000000; }
  static Handle GroupEmpty() { return 0x48000000; }
  static Handle ErrorsReturn() { return 0x54000001; }
  static Handle RequestNull() { return 0x2c000000; }
  static Handle Byte() { return 0x4c00010d; }
  static Handle Int() { return 0x4c000405; }
  static Status* StatusIgnore() { return reinterpret_cast<Status*>(1); }
};

// The standard one of MPI 5: libmpi_abi.so.
struct Standard {
  using Handle = void*;
  struct Status {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR, internal[5];
  };
  static constexpr int kAnySource = -1, kUndefined = -32766, kErrOther = 16;
  static constexpr int kThreadSerialized = 2048, kThreadMultiple = 4096;
  static constexpr int kFaultTolerance = -1;  // none
  static Handle CommWorld() { return Number(0x101); }
  static Handle CommSelf() { return Number(0x102); }
  static Handle CommNull() { return Number(0x100); }
  static Handle GroupEmpty() { return Number(0x109); }
  static Handle ErrorsReturn() { return Number(0x143); }
  static Handle RequestNull() { return Number(0x180); }
  static Handle Byte() { return Number(0x247); }
  static Handle Int() { return Number(0x209); }
  static Status* StatusIgnore() { return nullptr; }

 private:
  static Handle Number(uintptr_t number) {
    return reinterpret_cast<Handle>(number);
  }
};

}  // namespace collective::mpi_abi

#endif  // COLLECTIVE_NATIVE_TRANSPORT_MPI_ABI_H_
