// Makes a request of the C interface from Python's arguments.
#include "bindings/python_call.h"

#include <algorithm>

#include "kernels/types.h"

namespace collective {
namespace {

// From collective/library.py; never freed.
PyObject* new_array;    // numpy.empty
PyTypeObject* ndarray;  // numpy.ndarray
PyObject* bfloat16;     // its dtype, after the first such array
PyObject* array_struct_name;
PyObject* dtype_name;
PyObject* group_name;
PyObject* shape_name;

// The flags of ArrayStruct.
constexpr int kContiguous = 0x1, kNative = 0x200, kWritable = 0x400;

// All types that NumPy does not know share one kind.
bool IsBFloat16(PyObject* array) {
  const Owned dtype(PyObject_GetAttr(array, dtype_name));
  if (dtype && dtype.get() == bfloat16) return true;
  const Owned name(dtype ? PyObject_GetAttrString(dtype.get(), "name") : nullptr);
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
  for (int32_t i = 0; i < kDTypes; ++i) {
    const DTypeRow& row = kDTypeTable[i];
    if (row.numpy != fields.kind || row.bytes != fields.itemsize) continue;
    return row.numpy != 'V' || IsBFloat16(array) ? i : -1;
  }
  return -1;
}

bool Is(PyObject* object, const char* text) {
  return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

// Reads a number, or the default's name.
bool ToAlgorithm(PyObject* object, int32_t* value) {
  *value = static_cast<int32_t>(Algorithm::kAuto);
  return Is(object, "auto") || (ToInt(object, value) && *value >= 0);
}

// Reads a number, a name, or None.
bool ToTransport(PyObject* object, int32_t* value) {
  if (object == Py_None) {
    *value = -1;
  } else if (Is(object, "float16")) {
    *value = static_cast<int32_t>(DType::kFloat16);
  } else if (Is(object, "bfloat16")) {
    *value = static_cast<int32_t>(DType::kBFloat16);
  } else {
    return ToInt(object, value);
  }
  return true;
}

}  // namespace

bool PrepareCalls(PyObject* numpy_empty, PyObject* numpy_ndarray) {
  Py_INCREF(numpy_empty);
  Py_INCREF(numpy_ndarray);
  new_array = numpy_empty;
  ndarray = reinterpret_cast<PyTypeObject*>(numpy_ndarray);
  array_struct_name = PyUnicode_InternFromString("__array_struct__");
  dtype_name = PyUnicode_InternFromString("dtype");
  group_name = PyUnicode_InternFromString("group");
  shape_name = PyUnicode_InternFromString("shape");
  return array_struct_name && dtype_name && group_name && shape_name;
}

bool ToInt(PyObject* object, int32_t* value) {
  const long number = PyLong_AsLong(object);
  PyErr_Clear();
  *value = static_cast<int32_t>(number);
  return number == *value && (number != -1 || PyIndex_Check(object));
}

Call::~Call() {
  for (const Array& array : inputs_) Py_XDECREF(array.capsule);
  for (const Array& array : outputs_) Py_XDECREF(array.capsule);
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
  array.fields =
      static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.get(), nullptr));
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
    output = PyObject_CallFunctionObjArgs(new_array, shape.get(), dtype.get(), nullptr);
    if (!output) return false;
  } else {
    Py_INCREF(output);
  }
  *result = Owned(output);
  if (output == input && PyObject_TypeCheck(output, ndarray)) {
    outputs_.push_back(inputs_.back());
    Py_INCREF(outputs_.back().capsule);
  } else if (!PyObject_TypeCheck(output, ndarray) || !Take(output, &outputs_)) {
    return false;  // the memory of a scalar is a copy
  }
  const Array &from = inputs_.back(), &to = outputs_.back();
  if (!(to.fields->flags & kWritable) || from.dtype != to.dtype) return false;
  if (same_shape &&
      (from.fields->dimensions != to.fields->dimensions ||
       !std::equal(from.fields->shape, from.fields->shape + from.fields->dimensions,
                   to.fields->shape))) {
    return false;
  }
  return true;
}

// Whether an output shares memory with another output or with the input of
// another tensor. Its own input must be apart or have the same memory.
bool Call::Overlap() const {
  if (inputs_.size() == 1) {  // without allocating memory
    const Array &input = inputs_[0], &output = outputs_[0];
    return input.begin() != output.begin() && input.begin() < output.end() &&
           output.begin() < input.end();
  }
  struct Extent {
    const char *begin, *end;
  };
  std::vector<Extent> ends;
  ends.reserve(outputs_.size());
  for (const Array& output : outputs_) {
    if (output.bytes > 0) ends.push_back({output.begin(), output.end()});
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
  if ((kind == Kind::kAllReduce || kind == Kind::kBroadcast) && outputs != Py_None &&
      Overlap()) {
    return false;
  }
  static_assert(sizeof(Py_intptr_t) == sizeof(int64_t));
  tensors_.resize(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const ArrayStruct& from = *inputs_[i].fields;
    tensors_[i] = {from.data,        outputs_[i].fields->data,
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
    if (!PyUnicode_Check(name)) {
      PyErr_SetString(PyExc_TypeError, "name must be a str");
      return false;
    }
    request_.name = PyUnicode_AsUTF8AndSize(name, nullptr);
    if (!request_.name) return false;
  }
  return ToInt(arguments[0], &request_.kind) && ToInt(arguments[4], &request_.op) &&
         request_.op >= 0 && request_.op < kOps && ParseGroup(arguments[6]) &&
         ToAlgorithm(arguments[7], &request_.algorithm) &&
         ToTransport(arguments[8], &request_.transport) &&
         ToInt(arguments[9], &request_.root) && ParseCounts(arguments[10]) &&
         ParseArrays(arguments[1] == Py_True, arguments[2], arguments[3]);
}

}  // namespace collective
