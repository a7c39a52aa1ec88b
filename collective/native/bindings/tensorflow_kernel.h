// Shared by the files of TensorFlow ops: attributes, statuses, registration.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensorflow_c.h"
#include "c_api.h"
#include "failure.h"
#include "kernels/types.h"

namespace collective::tensorflow {

class Status {
 public:
  Status() : status_(TF_NewStatus()) {}
  ~Status() { TF_DeleteStatus(status_); }
  Status(const Status&) = delete;
  TF_Status* get() { return status_; }
  bool ok() const { return TF_GetCode(status_) == 0; }

 private:
  TF_Status* status_;
};

// Translates the core's codes to TensorFlow's. A lost peer is "aborted", because
// TensorFlow turns "unavailable" of an op inside a function into "internal",
// which means a defect.
inline int CodeOf(int32_t code) {
  constexpr int kCodes[] = {0, 3, 9, 10, 4, 13};
  return code >= 0 && code < 6 ? kCodes[code] : 13;
}

// The core's dtype for TensorFlow's, or -1.
inline int DTypeOf(int dtype) {
  for (int i = 0; i < kDTypes; ++i) {
    if (kDTypeTable[i].tensorflow == dtype) return i;
  }
  return -1;
}

// The attributes, the same for every run of a kernel.
struct Attributes {
  int64_t op = 0, root = 0, algorithm = 0, transport = -1, process_set = 0;
  int64_t in_order = 0, plan = 0;
  std::string name;
  Kind kind;

  void Read(TF_OpKernelConstruction* construction, TF_Status* status) {
    const auto number = [&](const char* attribute, int64_t* value) {
      if (TF_GetCode(status) != 0) return;
      TF_OpKernelConstruction_GetAttrInt64(construction, attribute, value, status);
    };
    if (kind == Kind::kAllReduce || kind == Kind::kReduceScatter) {
      number("reduction", &op);
    }
    if (kind == Kind::kAllReduce) {
      number("algorithm", &algorithm);
      number("transport", &transport);
    }
    if (kind == Kind::kBroadcast) number("root", &root);
    number("process_set", &process_set);
    number("in_order", &in_order);
    number("plan", &plan);
    int32_t length = 0, bytes = 0;
    if (TF_GetCode(status) == 0) {
      TF_OpKernelConstruction_GetAttrSize(construction, "tensor_name", &length, &bytes,
                                          status);
    }
    if (TF_GetCode(status) == 0 && bytes > 0) {
      name.resize(bytes);
      TF_OpKernelConstruction_GetAttrString(construction, "tensor_name", &name[0],
                                            name.size(), status);
    }
  }
};

// Makes a request from the attributes, without tensors.
inline collective_request RequestOf(const Attributes& attributes) {
  collective_request request = {};
  request.kind = static_cast<int32_t>(attributes.kind);
  request.op = static_cast<int32_t>(attributes.op);
  request.root = static_cast<int32_t>(attributes.root);
  request.algorithm = static_cast<int32_t>(attributes.algorithm);
  request.transport = static_cast<int32_t>(attributes.transport);
  request.group = static_cast<int32_t>(attributes.process_set);
  request.order = attributes.in_order ? 0 : 1;
  request.name = attributes.name.c_str();
  request.plan = static_cast<int32_t>(attributes.plan);
  request.once = request.order;
  return request;
}

using Callback = std::function<void()>;

// TensorFlow passes its callback as a pointer to a std::function on the stack of
// its caller, which is gone when compute returns. So it is copied at once, and
// the copy is called.
inline Callback CopyOf(TF_AsyncOpKernelDoneCallback* callback) {
  return *reinterpret_cast<Callback*>(callback);
}

// One run of a kernel, from compute until its collectives have ended. It is made
// by new, and frees itself at its end.
class Run {
 public:
  Run(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback)
      : context_(context), done_(CopyOf(callback)) {}
  virtual ~Run() {
    for (TF_Tensor* tensor : held_) TF_DeleteTensor(tensor);
  }
  Run(const Run&) = delete;

 protected:
  static constexpr int kInt64 = 9;  // TensorFlow's number

  // False: the run has failed, and the caller must finish it.
  bool Check(Status& status) {
    if (!status.ok()) TF_OpKernelContext_Failure(context_, status.get());
    return status.ok();
  }

  // Returns a tensor, held until the end; null, and the run fails, without one.
  TF_Tensor* Hold(TF_Tensor* tensor, Status& status) {
    if (!Check(status)) return nullptr;
    held_.push_back(tensor);
    return tensor;
  }

  TF_Tensor* Input(int index) {
    Status status;
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context_, index, &tensor, status.get());
    return Hold(tensor, status);
  }

  TF_Tensor* Output(int index, int dtype, const std::vector<int64_t>& shape,
                    size_t bytes) {
    Status status;
    return Hold(TF_AllocateOutput(context_, index, dtype, shape.data(),
                                  static_cast<int>(shape.size()), bytes, status.get()),
                status);
  }

  static std::vector<int64_t> ShapeOf(const TF_Tensor* tensor) {
    std::vector<int64_t> shape(TF_NumDims(tensor));
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      shape[axis] = TF_Dim(tensor, static_cast<int>(axis));
    }
    return shape;
  }

  // Every op's last input is the ticket of the op whose gradient it is, or 0;
  // its last output is its own ticket (c_api.h). In eager mode the op's name
  // follows the ticket, padded with zeros (naming.py says why).
  bool HasTickets(int input, int output) {
    TF_Tensor* theirs = Input(input);
    TF_Tensor* mine = theirs ? Output(output, kInt64, {}, sizeof(int64_t)) : nullptr;
    if (!mine) return false;
    const auto* words = static_cast<const int64_t*>(TF_TensorData(theirs));
    ticket_ = words[0];
    const size_t bytes = (TF_TensorElementCount(theirs) - 1) * sizeof(int64_t);
    const auto* name = reinterpret_cast<const char*>(words + 1);
    name_.assign(name, strnlen(name, bytes));
    issued_ = static_cast<int64_t*>(TF_TensorData(mine));
    *issued_ = 0;
    return true;
  }

  // The request with the tickets.
  collective_request RequestOf(const Attributes& attributes) const {
    collective_request request = tensorflow::RequestOf(attributes);
    if (!name_.empty()) request.name = name_.c_str();
    request.ticket = ticket_;
    request.issued = issued_;
    return request;
  }

  // Ends the run, as a failure if the code is not 0.
  void End(int32_t code, const char* message) {
    if (code != 0) {
      Status status;
      TF_SetStatus(status.get(), CodeOf(code), message);
      TF_OpKernelContext_Failure(context_, status.get());
    }
    Finish();
  }

  // Frees the run before TensorFlow learns of its end and may reuse the context.
  void Finish() {
    const Callback done = std::move(done_);
    delete this;
    done();
  }

  TF_OpKernelContext* context_;
  std::vector<TF_Tensor*> held_;  // released at the end

  std::string name_;  // if it is not an attribute

 private:
  Callback done_;
  int64_t ticket_ = 0;
  int64_t* issued_ = nullptr;
};

template <Kind kKind>
void* Create(TF_OpKernelConstruction* construction) {
  auto attributes = std::make_unique<Attributes>();
  attributes->kind = kKind;
  Status status;
  attributes->Read(construction, status.get());
  if (!status.ok()) {
    TF_OpKernelConstruction_Failure(construction, status.get());
  }
  return attributes.release();
}

inline void Destroy(void* kernel) { delete static_cast<Attributes*>(kernel); }

using Texts = std::vector<const char*>;
using Shapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// For shape inference: declares an output as a scalar.
inline void SetScalar(TF_ShapeInferenceContext* context, int output,
                      TF_Status* status) {
  TF_ShapeHandle* scalar = TF_ShapeInferenceContextScalar(context);
  TF_ShapeInferenceContextSetOutput(context, output, scalar, status);
  TF_DeleteShapeHandle(scalar);
}

// Registers an op and its kernel. Attributes, inputs and outputs are written as in
// TensorFlow's op definitions.
inline void RegisterOp(const char* name, const Texts& attributes, const Texts& inputs,
                       const Texts& outputs, Shapes shapes, TF_KernelBuilder* kernel) {
  Status status;
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  for (const char* one : attributes) TF_OpDefinitionBuilderAddAttr(op, one);
  for (const char* one : inputs) TF_OpDefinitionBuilderAddInput(op, one);
  for (const char* one : outputs) TF_OpDefinitionBuilderAddOutput(op, one);
  // Otherwise TensorFlow merges equal ops, folds them into constants, and drops
  // those whose result is unused, perhaps on this rank only.
  TF_OpDefinitionBuilderSetIsStateful(op, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, shapes);
  TF_RegisterOpDefinition(op, status.get());
  if (status.ok()) TF_RegisterKernelBuilder(name, kernel, status.get());
  if (!status.ok()) {
    std::fprintf(stderr, "collective: cannot register %s: %s\n", name,
                 TF_Message(status.get()));
  }
}

// Registers the op of a collective, with the attributes that all of them have.
template <Kind kKind>
void Register(const char* name, Texts attributes, Texts inputs, Texts outputs,
              Shapes shapes,
              void (*compute)(void*, TF_OpKernelContext*,
                              TF_AsyncOpKernelDoneCallback*)) {
  for (const char* one : {"process_set: int = 0", "in_order: int = 0", "plan: int = 0",
                          "tensor_name: string = ''"}) {
    attributes.push_back(one);
  }
  inputs.push_back("ticket: int64");
  outputs.push_back("issued: int64");
  RegisterOp(name, attributes, inputs, outputs, shapes,
             TF_NewAsyncKernelBuilder(name, "CPU", &Create<kKind>, compute, &Destroy));
}

}  // namespace collective::tensorflow
