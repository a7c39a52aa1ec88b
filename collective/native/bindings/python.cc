// The Python extension: collectives on whatever has NumPy's __array_struct__.
//
// Written by hand against Python's stable ABI, so that one binary serves every
// Python from 3.10 (docs/explanation/architecture.md). It takes the plain case
// only: C-contiguous arrays in this machine's byte order, of known dtypes, that
// do not overlap. For all else `run` and `start` return None and have done
// nothing; collective/operations then converts the arguments or explains what
// is wrong with them.
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c_api.h"
#include "kernels/types.h"
#include "source_digest.h"  // written by cmake/source_digest.cmake

namespace {

using collective::DType;
using collective::Kind;

// From collective/library.py, by `prepare`; never freed.
PyObject* failed;       // failed(code, message) raises the exception
PyObject* new_array;    // numpy.empty
PyTypeObject* ndarray;  // numpy.ndarray
PyObject* bfloat16;     // its dtype, once there was such an array
PyObject* array_struct_name;
PyObject* dtype_name;
PyObject* group_name;
PyObject* shape_name;
PyObject* running_type;

// A reference that is given back at the end of its scope.
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
constexpr int kContiguous = 0x1, kNative = 0x200, kWritable = 0x400;

struct Array {
  PyObject* capsule = nullptr;  // keeps the memory alive
  const ArrayStruct* fields = nullptr;
  int32_t dtype = 0;
  int64_t count = 1, bytes = 0;
  const char* begin() const { return static_cast<const char*>(fields->data); }
  const char* end() const { return begin() + bytes; }
};

// Types that NumPy does not know have one kind in common.
bool IsBFloat16(PyObject* array) {
  const Owned dtype(PyObject_GetAttr(array, dtype_name));
  if (dtype && dtype.get() == bfloat16) return true;
  const Owned name(dtype ? PyObject_GetAttrString(dtype.get(), "name")
                         : nullptr);
  PyErr_Clear();
  if (!name || !PyUnicode_Check(name.get()) ||
      PyUnicode_CompareWithASCIIString(name.get(), "bfloat16") != 0) {
    return false;
  }
  if (!bfloat16) {
    Py_INCREF(dtype.get());
    bfloat16 = dtype.get();
  }
  return true;
}

// The dtype of an array, or -1.
int32_t DTypeOf(PyObject* array, const ArrayStruct& fields) {
  const auto dtype = [&] {
    switch (fields.kind << 8 | fields.itemsize) {
      case 'f' << 8 | 2:
        return DType::kFloat16;
      case 'f' << 8 | 4:
        return DType::kFloat32;
      case 'f' << 8 | 8:
        return DType::kFloat64;
      case 'i' << 8 | 1:
        return DType::kInt8;
      case 'i' << 8 | 4:
        return DType::kInt32;
      case 'i' << 8 | 8:
        return DType::kInt64;
      case 'u' << 8 | 1:
        return DType::kUInt8;
      case 'b' << 8 | 1:
        return DType::kBool;
      case 'V' << 8 | 2:
        if (IsBFloat16(array)) return DType::kBFloat16;
    }
    return static_cast<DType>(-1);
  };
  return static_cast<int32_t>(dtype());
}

// Everything that a request points to.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  ~Call() {
    for (const Array& array : inputs_) Py_XDECREF(array.capsule);
    for (const Array& array : outputs_) Py_XDECREF(array.capsule);
  }

  // From the arguments of `run` (kDocs). False: not the plain case, or, if an
  // exception is set, a failure.
  bool Parse(PyObject* const* arguments);
  const collective_request& request() const { return request_; }
  // The outputs, as the caller gets them: a new reference.
  PyObject* Result() { return result_.release(); }
  // What must live until the collective has ended.
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

bool ToInt(PyObject* object, int32_t* value) {
  if (!PyLong_Check(object)) return false;
  const long number = PyLong_AsLong(object);
  *value = static_cast<int32_t>(number);
  if (number != *value) PyErr_Clear();
  return number == *value;
}

bool Call::ParseGroup(PyObject* process_set) {
  if (process_set == Py_None) return true;
  const Owned group(PyObject_GetAttr(process_set, group_name));
  if (!group) PyErr_Clear();
  return group && ToInt(group.get(), &request_.group) && request_.group >= 0;
}

bool Call::Take(PyObject* object, std::vector<Array>* to) {
  Owned capsule(PyObject_GetAttr(object, array_struct_name));
  if (!capsule || !PyCapsule_IsValid(capsule.get(), nullptr)) {
    PyErr_Clear();
    return false;
  }
  Array array;
  array.fields = static_cast<const ArrayStruct*>(
      PyCapsule_GetPointer(capsule.get(), nullptr));
  const int wanted = kContiguous | kNative;
  if (array.fields->two != 2 || (array.fields->flags & wanted) != wanted) {
    return false;
  }
  array.dtype = DTypeOf(object, *array.fields);
  if (array.dtype < 0) return false;
  for (int i = 0; i < array.fields->dimensions; ++i) {
    array.count *= array.fields->shape[i];
  }
  array.bytes = array.count * array.fields->itemsize;
  array.capsule = capsule.release();
  to->push_back(array);
  return true;
}

// All-reduces and broadcasts keep the shape, so here they get their outputs.
bool Call::AddPair(PyObject* input, PyObject* output, Owned* result) {
  const auto kind = static_cast<Kind>(request_.kind);
  const bool same_shape = kind == Kind::kAllReduce || kind == Kind::kBroadcast;
  if (!Take(input, &inputs_)) return false;
  const bool fresh = output == Py_None;
  if (fresh) {
    if (!same_shape) return false;
    const Owned shape(PyObject_GetAttr(input, shape_name));
    const Owned dtype(PyObject_GetAttr(input, dtype_name));
    if (!shape || !dtype) {
      PyErr_Clear();
      return false;
    }
    output = PyObject_CallFunctionObjArgs(new_array, shape.get(), dtype.get(),
                                          nullptr);
    if (!output) return false;
  } else {
    Py_INCREF(output);
  }
  *result = Owned(output);
  if (output == input && PyObject_TypeCheck(output, ndarray)) {
    outputs_.push_back(inputs_.back());
    Py_INCREF(outputs_.back().capsule);
  } else if (!PyObject_TypeCheck(output, ndarray) || !Take(output, &outputs_)) {
    return false;  // a scalar's memory would be a copy
  }
  const Array &from = inputs_.back(), &to = outputs_.back();
  if (!(to.fields->flags & kWritable) || from.dtype != to.dtype) return false;
  if (same_shape && (from.fields->dimensions != to.fields->dimensions ||
                     !std::equal(from.fields->shape,
                                 from.fields->shape + from.fields->dimensions,
                                 to.fields->shape))) {
    return false;
  }
  return true;
}

// Whether an output shares memory with another output, or with an input other
// than its own; its own input must be apart or have the same memory.
bool Call::Overlap() const {
  struct Extent {
    const char *begin, *end;
    size_t index;
  };
  std::vector<Extent> ends;
  ends.reserve(outputs_.size());
  for (size_t i = 0; i < outputs_.size(); ++i) {
    if (outputs_[i].bytes == 0) continue;
    ends.push_back({outputs_[i].begin(), outputs_[i].end(), i});
  }
  const auto before = [](const Extent& a, const Extent& b) {
    return a.begin < b.begin;
  };
  if (!std::is_sorted(ends.begin(), ends.end(), before)) {
    std::sort(ends.begin(), ends.end(), before);
  }
  for (size_t i = 1; i < ends.size(); ++i) {
    if (ends[i].begin < ends[i - 1].end) return true;
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Array& input = inputs_[i];
    if (input.bytes == 0 || input.begin() == outputs_[i].begin()) continue;
    // Outputs are apart, so the last that begins before its end ends last.
    auto next = std::lower_bound(
        ends.begin(), ends.end(), input.end(),
        [](const Extent& a, const char* end) { return a.begin < end; });
    if (next != ends.begin() && (--next)->end > input.begin()) return true;
  }
  return false;
}

bool Call::ParseArrays(bool grouped, PyObject* inputs, PyObject* outputs) {
  if (!grouped) {
    if (!AddPair(inputs, outputs, &result_)) return false;
  } else {
    if (!PyList_Check(inputs)) return false;
    const Py_ssize_t length = PyList_Size(inputs);
    const bool fresh = outputs == Py_None;
    if (!fresh && (!PyList_Check(outputs) || PyList_Size(outputs) != length)) {
      return false;
    }
    inputs_.reserve(length);
    outputs_.reserve(length);
    result_ = Owned(PyList_New(length));
    if (!result_) return false;
    for (Py_ssize_t i = 0; i < length; ++i) {
      Owned result;
      if (!AddPair(PyList_GetItem(inputs, i),
                   fresh ? Py_None : PyList_GetItem(outputs, i), &result)) {
        return false;
      }
      PyList_SetItem(result_.get(), i, result.release());
    }
  }
  const auto kind = static_cast<Kind>(request_.kind);
  if ((kind == Kind::kAllReduce || kind == Kind::kBroadcast) &&
      outputs != Py_None && Overlap()) {
    return false;
  }
  static_assert(sizeof(Py_intptr_t) == sizeof(int64_t));
  tensors_.resize(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const ArrayStruct& from = *inputs_[i].fields;
    tensors_[i] = {
        from.data,        outputs_[i].fields->data,
        inputs_[i].count, reinterpret_cast<const int64_t*>(from.shape),
        from.dimensions,  inputs_[i].dtype};
  }
  request_.tensors = tensors_.data();
  request_.tensors_length = static_cast<int32_t>(tensors_.size());
  return true;
}

bool Call::ParseCounts(PyObject* counts) {
  if (counts == Py_None) return true;
  if (!PyList_Check(counts)) return false;
  counts_.resize(PyList_Size(counts));
  for (size_t i = 0; i < counts_.size(); ++i) {
    counts_[i] = PyLong_AsLongLong(PyList_GetItem(counts, i));
  }
  request_.counts = counts_.data();
  request_.counts_length = static_cast<int64_t>(counts_.size());
  return !PyErr_Occurred();
}

bool Call::Parse(PyObject* const* arguments) {
  PyObject* name = arguments[5];
  if (name != Py_None) {
    if (!PyUnicode_Check(name)) return false;
    request_.name = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (!request_.name) return false;
  }
  return ToInt(arguments[0], &request_.kind) &&
         ToInt(arguments[4], &request_.op) && request_.op >= 0 &&
         request_.op < collective::kOps && ParseGroup(arguments[6]) &&
         ToInt(arguments[7], &request_.algorithm) && request_.algorithm >= 0 &&
         ToInt(arguments[8], &request_.transport) &&
         ToInt(arguments[9], &request_.root) && ParseCounts(arguments[10]) &&
         ParseArrays(arguments[1] == Py_True, arguments[2], arguments[3]);
}

constexpr Py_ssize_t kArguments = 11;

bool CheckLength(Py_ssize_t length, Py_ssize_t wanted) {
  if (length == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", length, wanted);
  return false;
}

PyObject* NotPlain() {
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// Raises what belongs to a code of the core.
PyObject* Raise(int32_t code, const std::string& message) {
  const Owned nothing(
      PyObject_CallFunction(failed, "is", code, message.c_str()));
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, message.c_str());
  return nullptr;
}

PyObject* Run(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  if (!CheckLength(length, kArguments)) return nullptr;
  Call call;
  if (!call.Parse(arguments)) return NotPlain();
  int32_t code;
  {
    const WithoutGil released;
    code = collective_run(&call.request());
  }
  if (code) return Raise(code, collective_error());
  return call.Result();
}

// A collective under way.
struct State {
  std::mutex mutex;  // of who waits
  collective_handle* handle = nullptr;
  int32_t code = 0;
  std::string message;
  std::vector<Array> arrays;
};

struct Running {
  PyObject_HEAD State* state;
};

State& StateOf(PyObject* self) {
  return *reinterpret_cast<Running*>(self)->state;
}

void ReleaseArrays(State& state) {
  for (const Array& array : std::exchange(state.arrays, {})) {
    Py_DECREF(array.capsule);
  }
}

PyObject* Start(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  if (!CheckLength(length, kArguments)) return nullptr;
  Call call;
  if (!call.Parse(arguments)) return NotPlain();
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(
      reinterpret_cast<PyTypeObject*>(running_type), Py_tp_alloc));
  Owned running(allocate(reinterpret_cast<PyTypeObject*>(running_type), 0));
  if (!running) return nullptr;
  reinterpret_cast<Running*>(running.get())->state = new State;
  State& state = StateOf(running.get());
  int32_t code;
  {
    const WithoutGil released;
    code = collective_start(&call.request(), &state.handle);
  }
  if (code) return Raise(code, collective_error());
  state.arrays = call.TakeArrays();
  const Owned result(call.Result());
  return PyTuple_Pack(2, running.get(), result.get());
}

PyObject* Wait(PyObject* self, PyObject*) {
  State& state = StateOf(self);
  int32_t code;
  std::string message;
  {
    const WithoutGil released;
    std::lock_guard<std::mutex> lock(state.mutex);
    if (collective_handle* handle = std::exchange(state.handle, nullptr)) {
      state.code = collective_wait(handle);
      if (state.code) state.message = collective_error();
    }
    code = state.code;
    message = state.message;
  }
  ReleaseArrays(state);
  if (code) return Raise(code, message);
  Py_RETURN_NONE;
}

PyObject* Done(PyObject* self, PyObject*) {
  State& state = StateOf(self);
  const std::unique_lock<std::mutex> lock(state.mutex, std::try_to_lock);
  return PyBool_FromLong(lock &&
                         (!state.handle || collective_finished(state.handle)));
}

// The core still reads and writes the arrays: they must outlive it.
void Free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if (State* state = reinterpret_cast<Running*>(self)->state) {
    if (state->handle) {
      const WithoutGil released;
      collective_wait(state->handle);
    }
    ReleaseArrays(*state);
    delete state;
  }
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyMethodDef running_methods[] = {
    {"wait", Wait, METH_NOARGS, "Waits for the end; raises what failed."},
    {"done", Done, METH_NOARGS, "Whether wait() would return at once."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot running_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(Free)},
                               {Py_tp_methods, running_methods},
                               {0, nullptr}};
PyType_Spec running_spec = {
    "collective_python.Running", sizeof(Running), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, running_slots};

// time(arguments of run..., repetitions, inner, seconds): for collective.bench.
PyObject* Time(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  if (!CheckLength(length, kArguments + 2)) return nullptr;
  Call call;
  int32_t repetitions, inner;
  if (!call.Parse(arguments) || !ToInt(arguments[kArguments], &repetitions) ||
      !ToInt(arguments[kArguments + 1], &inner)) {
    return NotPlain();
  }
  std::vector<double> seconds(repetitions);
  int32_t code;
  {
    const WithoutGil released;
    code = collective_time(&call.request(), repetitions, inner, seconds.data());
  }
  if (code) return Raise(code, collective_error());
  Owned list(PyList_New(repetitions));
  if (!list) return nullptr;
  for (int32_t i = 0; i < repetitions; ++i) {
    PyList_SetItem(list.get(), i, PyFloat_FromDouble(seconds[i]));
  }
  return list.release();
}

PyObject* Prepare(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  if (!CheckLength(length, 3)) return nullptr;
  for (Py_ssize_t i = 0; i < length; ++i) Py_INCREF(arguments[i]);
  failed = arguments[0];
  new_array = arguments[1];
  ndarray = reinterpret_cast<PyTypeObject*>(arguments[2]);
  Py_RETURN_NONE;
}

constexpr char kDocs[] =
    "(kind, grouped, inputs, outputs, op, name, process_set, algorithm, "
    "transport, root, counts), numbers being those of native/c_api.h. Inputs: "
    "an array, or a list of arrays if grouped. Outputs: likewise; None for new "
    "ones (all-reduce and broadcast). Returns None if an argument is not "
    "plain; otherwise ";
const std::string run_docs = std::string(kDocs) + "the outputs.";
const std::string start_docs =
    std::string(kDocs) + "a Running, and the outputs.";
const std::string time_docs =
    std::string(kDocs) + "seconds; then come repetitions and inner ones.";

template <class Function>
PyMethodDef Method(const char* name, Function function, const char* docs) {
  return {name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)),
          METH_FASTCALL, docs};
}

}  // namespace

PyMODINIT_FUNC PyInit_collective_python() {
  static PyMethodDef methods[] = {
      Method("prepare", Prepare, "(failed, numpy.empty, numpy.ndarray)"),
      Method("run", Run, run_docs.c_str()),
      Method("start", Start, start_docs.c_str()),
      Method("time", Time, time_docs.c_str()),
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "collective_python",
                               "Collectives on plain arrays.",
                               -1,
                               methods,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  if (std::strcmp(collective_source(), NATIVE_SOURCE_DIGEST) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "libcollective.so was built from other sources");
    return nullptr;
  }
  array_struct_name = PyUnicode_InternFromString("__array_struct__");
  dtype_name = PyUnicode_InternFromString("dtype");
  group_name = PyUnicode_InternFromString("group");
  shape_name = PyUnicode_InternFromString("shape");
  running_type = PyType_FromSpec(&running_spec);
  if (!running_type) return nullptr;
  return PyModule_Create(&module);
}
