// Shared by the files of the Python extension (python.cc).
#pragma once

// Python's stable ABI, of the oldest supported version.
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "c_api.h"

namespace collective {

// A reference that is released at the end of its scope.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// NumPy's "array interface, C-struct access", version 2.
struct ArrayStruct {
  int two;
  int dimensions;
  char kind;
  int itemsize;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;
  void* data;
};

struct Array {
  PyObject* capsule = nullptr;  // keeps the memory alive
  const ArrayStruct* fields = nullptr;
  int32_t dtype = 0;
  int64_t count = 1, bytes = 0;
  const char* begin() const { return static_cast<const char*>(fields->data); }
  const char* end() const { return begin() + bytes; }
};

// Makes the next class ready. False, with an exception set, if it cannot.
bool PrepareCalls(PyObject* new_array, PyObject* ndarray);

// False if it is not a number, or too large; sets no exception.
bool ToInt(PyObject* object, int32_t* value);

// All objects that a request points to.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  ~Call();

  static constexpr Py_ssize_t kArguments = 11;
  // Reads the arguments of `run` (python.cc). False: not the plain case, or, if an
  // exception is set, a failure.
  bool Parse(PyObject* const* arguments);
  // Sets collective_request::order and plan, for `start`.
  bool ParseOrder(PyObject* order, PyObject* plan) {
    return ToInt(order, &request_.order) && ToInt(plan, &request_.plan);
  }
  const collective_request& request() const { return request_; }
  // Returns the outputs for the caller: a new reference.
  PyObject* Result() { return result_.release(); }
  // The objects that must live until the collective has ended.
  std::vector<Array> TakeArrays() {
    inputs_.insert(inputs_.end(), outputs_.begin(), outputs_.end());
    outputs_.clear();
    return std::exchange(inputs_, {});
  }

 private:
  bool ParseGroup(PyObject* process_set);
  bool ParseArrays(bool grouped, PyObject* inputs, PyObject* outputs);
  bool ParseCounts(PyObject* counts);
  bool Take(PyObject* array, std::vector<Array>* to);
  bool AddPair(PyObject* input, PyObject* output, Owned* result);
  bool Overlap() const;

  collective_request request_ = {};
  std::vector<Array> inputs_, outputs_;
  std::vector<collective_tensor> tensors_;
  std::vector<int64_t> counts_;
  Owned result_;
};

// The entries of a rank of this host in its flight recorder, as a dict, and its
// state.
PyObject* ReadRecorder(PyObject*, PyObject* local_rank);

}  // namespace collective
