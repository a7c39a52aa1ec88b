// TensorFlow ops for the collectives whose outputs are shaped like their
// inputs: all-reduce and broadcast, list in and list out.
//
// The kernels are asynchronous: they hand the tensors to the core's queue and
// return, so no thread of TensorFlow ever waits for another rank. Tensors are
// read and written in TensorFlow's own memory, and in place if TensorFlow lets an
// input become the output.
#include "bindings/tensorflow_kernel.h"

namespace {

using namespace collective::tensorflow;
using collective::Kind;

class RunOnList : public Run {
 public:
  using Run::Run;

  void Start(const Attributes& attributes) {
    const int tickets = TF_NumInputs(context_) - 1;
    if (!Prepare(tickets) || !HasTickets(tickets, tickets)) return Finish();
    collective_request request = RequestOf(attributes);
    request.tensors = tensors_.data();
    request.tensors_length = static_cast<int32_t>(tensors_.size());
    const int32_t code = collective_submit(
        &request,
        [](void* argument, int32_t code, const char* message) {
          static_cast<RunOnList*>(argument)->End(code, message);
        },
        this);
    if (code != 0) End(code, collective_error());
  }

 private:
  bool Prepare(int length) {
    tensors_.resize(length);
    shapes_.resize(length);
    for (int i = 0; i < length; ++i) {
      Status status;
      TF_Tensor* input = nullptr;
      TF_GetInput(context_, i, &input, status.get());
      if (!Check(status)) return false;
      collective_tensor& tensor = tensors_[i];
      shapes_[i] = ShapeOf(input);
      tensor.shape = shapes_[i].data();
      tensor.dimensions = static_cast<int32_t>(shapes_[i].size());
      tensor.count = TF_TensorElementCount(input);
      tensor.dtype = DTypeOf(TF_TensorType(input));
      // An input can become the output only while nobody else holds it.
      TF_DeleteTensor(input);
      int forwarded = -1;
      TF_Tensor* output =
          TF_ForwardInputOrAllocateOutput(context_, &i, 1, i, tensor.shape,
                                          tensor.dimensions, &forwarded, status.get());
      if (!Hold(output, status)) return false;
      tensor.input = tensor.output = TF_TensorData(output);
      if (forwarded == i) continue;
      if (!(input = Input(i))) return false;
      tensor.input = TF_TensorData(input);
    }
    return true;
  }

  std::vector<collective_tensor> tensors_;
  std::vector<std::vector<int64_t>> shapes_;
};

void Compute(void* kernel, TF_OpKernelContext* context,
             TF_AsyncOpKernelDoneCallback* callback) {
  (new RunOnList(context, callback))->Start(*static_cast<Attributes*>(kernel));
}

void SameShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const auto length = static_cast<int>(TF_ShapeInferenceContextNumInputs(context) - 1);
  for (int i = 0; i < length; ++i) {
    TF_ShapeHandle* shape = TF_NewShapeHandle();
    TF_ShapeInferenceContextGetInput(context, i, shape, status);
    TF_ShapeInferenceContextSetOutput(context, i, shape, status);
    TF_DeleteShapeHandle(shape);
  }
  SetScalar(context, length, status);  // the ticket
}

// Runs when tf.load_op_library loads this file.
const bool registered = [] {
  const std::vector<const char*> inputs = {"tensors: T"};
  const std::vector<const char*> outputs = {"outputs: T"};
  const char* types =
      "T: list({float, double, half, bfloat16, int8, uint8, int32, int64, "
      "bool}) >= 1";
  Register<Kind::kAllReduce>(
      "CollectiveAllReduce",
      {types, "reduction: int = 0", "algorithm: int = 0", "transport: int = -1"},
      inputs, outputs, &SameShapes, &Compute);
  Register<Kind::kBroadcast>("CollectiveBroadcast", {types, "root: int = 0"}, inputs,
                             outputs, &SameShapes, &Compute);
  return true;
}();

}  // namespace
