// The Python extension: collectives on all objects with NumPy's __array_struct__.
//
// Written by hand against Python's stable ABI, so that one binary serves every
// Written by hand against Python's stable ABI, so that one binary serves every
// Python from 3.10 (docs/explanation/architecture.md). It takes only the plain
// case: C-contiguous arrays in this machine's byte order, of known dtypes, that
// do not overlap. Otherwise `run` and `start` do nothing and return None;
// collective/operations then converts the arguments or explains the error.
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python_call.h"
#include "source_digest.h"  // written by cmake/source_digest.cmake

namespace {

using collective::Array;
using collective::Call;
using collective::Owned;
using collective::ToInt;
using collective::WithoutGil;

PyObject* failed;  // failed(code, message) of library.py raises the exception
PyObject* running_type;

bool CheckLength(Py_ssize_t length, Py_ssize_t wanted) {
  if (length == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", length, wanted);
  return false;
}

PyObject* NotPlain() {
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// Raises the exception of a code of the core.
PyObject* Raise(int32_t code, const std::string& message) {
  const Owned nothing(PyObject_CallFunction(failed, "is", code, message.c_str()));
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, message.c_str());
  return nullptr;
}

PyObject* Run(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  if (!CheckLength(length, Call::kArguments)) return nullptr;
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

// A running collective.
struct State {
  std::mutex mutex;  // serializes callers of wait
  collective_handle* handle = nullptr;
  int32_t code = 0;
  std::string message;
  std::vector<Array> arrays;
};

struct Running {
  PyObject_HEAD State* state;
};

State& StateOf(PyObject* self) { return *reinterpret_cast<Running*>(self)->state; }

void ReleaseArrays(State& state) {
  for (const Array& array : std::exchange(state.arrays, {})) {
    Py_DECREF(array.capsule);
  }
}

// Two more arguments, order and plan, select the order by name.
PyObject* Start(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  const bool named = length == Call::kArguments + 2;
  if (!named && !CheckLength(length, Call::kArguments)) return nullptr;
  Call call;
  if (!call.Parse(arguments) ||
      (named && !call.ParseOrder(arguments[Call::kArguments],
                                 arguments[Call::kArguments + 1]))) {
    return NotPlain();
  }
  const auto allocate = reinterpret_cast<allocfunc>(
      PyType_GetSlot(reinterpret_cast<PyTypeObject*>(running_type), Py_tp_alloc));
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
  return PyBool_FromLong(lock && (!state.handle || collective_finished(state.handle)));
}

// The core still reads and writes the arrays, so they must outlive it.
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
PyType_Spec running_spec = {"collective_python.Running", sizeof(Running), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                            running_slots};

// time(arguments of run..., repetitions, inner, seconds): for collective.bench.
PyObject* Time(PyObject*, PyObject* const* arguments, Py_ssize_t length) {
  if (!CheckLength(length, Call::kArguments + 2)) return nullptr;
  Call call;
  int32_t repetitions, inner;
  if (!call.Parse(arguments) || !ToInt(arguments[Call::kArguments], &repetitions) ||
      !ToInt(arguments[Call::kArguments + 1], &inner)) {
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
  Py_INCREF(arguments[0]);
  failed = arguments[0];
  if (!collective::PrepareCalls(arguments[1], arguments[2])) return nullptr;
  Py_RETURN_NONE;
}

constexpr char kDocs[] =
    "(kind, grouped, inputs, outputs, op, name, process_set, algorithm, "
    "transport, root, counts), numbers being those of native/c_api.h; or "
    "\"auto\", "
    "and the name of a transport, or None. Inputs: "
    "an array, or a list of arrays if grouped. Outputs: likewise; None for new "
    "ones (all-reduce and broadcast). Returns None if an argument is not "
    "plain; otherwise ";
const std::string run_docs = std::string(kDocs) + "the outputs.";
const std::string start_docs = std::string(kDocs) + "a Running, and the outputs.";
const std::string time_docs =
    std::string(kDocs) + "seconds; then come repetitions and inner ones.";

template <class Function>
PyMethodDef Method(const char* name, Function function, const char* docs) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)),
          METH_FASTCALL, docs};
}

}  // namespace

PyMODINIT_FUNC PyInit_collective_python() {
  static PyMethodDef methods[] = {
      Method("prepare", Prepare, "(failed, numpy.empty, numpy.ndarray)"),
      Method("run", Run, run_docs.c_str()),
      Method("start", Start, start_docs.c_str()),
      Method("time", Time, time_docs.c_str()),
      {"read_recorder", collective::ReadRecorder, METH_O,
       "What a rank of this host has written into its flight recorder."},
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
    PyErr_SetString(PyExc_ImportError, "libcollective.so was built from other sources");
    return nullptr;
  }
  running_type = PyType_FromSpec(&running_spec);
  if (!running_type) return nullptr;
  return PyModule_Create(&module);
}
