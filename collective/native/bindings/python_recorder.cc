// The flight recorder's memory, for collective/recorder.
#include <memory>

#include "bindings/python_call.h"
#include "recorder/recorder.h"

namespace collective {
namespace {

PyObject* DictOf(const Recorder::Entry& entry) {
  return Py_BuildValue("{s:K,s:L,s:L,s:L,s:L,s:i,s:i,s:i,s:i,s:i,s:I,s:i,s:y,s:d}",
                       "number", static_cast<unsigned long long>(entry.number),
                       "announced", static_cast<long long>(entry.announced), "started",
                       static_cast<long long>(entry.started), "ended",
                       static_cast<long long>(entry.ended), "bytes",
                       static_cast<long long>(entry.bytes), "kind", entry.kind, "op",
                       entry.op, "dtype", entry.dtype, "tensors", entry.tensors, "area",
                       entry.area, "sequence", entry.sequence, "failed", entry.failed,
                       "name", entry.name, "at", entry.at);
}

}  // namespace

PyObject* ReadRecorder(PyObject*, PyObject* local_rank) {
  int32_t number;
  if (!ToInt(local_rank, &number)) {
    PyErr_SetString(PyExc_TypeError, "the local rank must be a number");
    return nullptr;
  }
  const auto rank = std::make_unique<Recorder::Rank>();
  int32_t state;
  {
    const WithoutGil released;
    state = collective_recorder_read(number, rank.get());
  }
  Owned entries(PyList_New(0));
  for (const Recorder::Entry& entry : rank->entries) {
    if (!entries || entry.number == 0) continue;
    const Owned dict(DictOf(entry));
    if (!dict || PyList_Append(entries.get(), dict.get()) < 0) return nullptr;
  }
  if (!entries) return nullptr;
  return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:y,s:L,s:d,s:d,s:N}", "state", state,
                       "rank", rank->rank.load(), "pid", rank->pid, "launch_rank",
                       rank->launch_rank, "joined", rank->joined, "stack", rank->stack,
                       "sampled", static_cast<long long>(rank->sampled), "at", rank->at,
                       "since", rank->since, "entries", entries.release());
}

}  // namespace collective
