// TensorFlow ops for the collectives that move rows, one tensor each:
// all-gather, reduce-scatter and all-to-all.
//
// How many rows come in is known only when the other ranks have told, so
// all-gather and all-to-all are two collectives: the numbers, then, with the
// output allocated, the rows. Between them the kernel waits for nobody; the
// core calls it back.
#include <cstring>
#include <numeric>

#include "bindings/tensorflow_kernel.h"

namespace {

using namespace collective::tensorflow;
using collective::Kind;

class RunOnRows : public Run {
 public:
  RunOnRows(const Attributes& attributes, TF_OpKernelContext* context,
            TF_AsyncOpKernelDoneCallback* callback)
      : Run(context, callback), attributes_(attributes) {}

  void Start() {
    int32_t code = collective_members(
        static_cast<int32_t>(attributes_.process_set), &size_, &me_);
    if (code != 0) return End(code, collective_error());
    input_ = Input(0);
    if (!input_) return Finish();
    const int dimensions = TF_NumDims(input_);
    for (int axis = 0; axis < dimensions; ++axis) {
      shape_.push_back(TF_Dim(input_, axis));
    }
    if (shape_.empty()) {
      return End(kInvalid, "a scalar has no rows\nHINT: reshape it to [1]");
    }
    row_ = std::accumulate(shape_.begin() + 1, shape_.end(), int64_t{1},
                           [](int64_t a, int64_t b) { return a * b; });
    switch (attributes_.kind) {
      case Kind::kAllGather:
        mine_ = {shape_[0]};
        return ExchangeNumbers();
      case Kind::kAllToAll:
        if (ReadSplits()) ExchangeNumbers();
        return;
      default:
        for (int i = 0; i < size_; ++i) {
          counts_.push_back((shape_[0] / size_ + (i < shape_[0] % size_)) *
                            row_);
        }
        return MoveRows(row_ ? counts_[me_] / row_
                             : shape_[0] / size_ + (me_ < shape_[0] % size_));
    }
  }

 private:
  static constexpr int32_t kInvalid =
      static_cast<int32_t>(collective::Code::kInvalidArgument);

  TF_Tensor* Input(int index) {
    Status status;
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context_, index, &tensor, status.get());
    if (!status.ok()) {
      TF_OpKernelContext_Failure(context_, status.get());
      return nullptr;
    }
    held_.push_back(tensor);
    return tensor;
  }

  TF_Tensor* Output(int index, int dtype, const std::vector<int64_t>& shape,
                    size_t bytes) {
    Status status;
    TF_Tensor* tensor =
        TF_AllocateOutput(context_, index, dtype, shape.data(),
                          static_cast<int>(shape.size()), bytes, status.get());
    if (!status.ok()) {
      TF_OpKernelContext_Failure(context_, status.get());
      return nullptr;
    }
    held_.push_back(tensor);
    return tensor;
  }

  bool ReadSplits() {
    TF_Tensor* splits = Input(1);
    if (!splits) {
      Finish();
      return false;
    }
    const int64_t* values = static_cast<int64_t*>(TF_TensorData(splits));
    mine_.assign(values, values + TF_TensorElementCount(splits));
    bool fits = static_cast<int>(mine_.size()) == size_;
    for (int64_t rows : mine_) fits = fits && rows >= 0;
    if (!fits ||
        std::accumulate(mine_.begin(), mine_.end(), int64_t{0}) != shape_[0]) {
      End(kInvalid,
          "the splits do not fit the tensor\nHINT: give each rank its number "
          "of rows, adding up to the first axis");
      return false;
    }
    return true;
  }

  void ExchangeNumbers() {
    all_.resize(mine_.size() * size_);
    counts_.assign(size_, static_cast<int64_t>(mine_.size()));
    // The rest of the shape goes into the name: ranks must agree on it.
    step_name_ = attributes_.name + " (rows of dtype " +
                 std::to_string(DTypeOf(TF_TensorType(input_))) + "[?";
    for (size_t axis = 1; axis < shape_.size(); ++axis) {
      step_name_ += "," + std::to_string(shape_[axis]);
    }
    step_name_ += "])";
    tensor_ = {};
    tensor_.input = mine_.data();
    tensor_.output = all_.data();
    tensor_.count = static_cast<int64_t>(mine_.size());
    tensor_.dtype = static_cast<int32_t>(collective::DType::kInt64);
    collective_request request = RequestOf(attributes_);
    request.kind = static_cast<int32_t>(Kind::kAllGather);
    request.name = step_name_.c_str();
    Submit(request, [](void* argument, int32_t code, const char* message) {
      RunOnRows* run = static_cast<RunOnRows*>(argument);
      if (code != 0) return run->End(code, message);
      run->HaveNumbers();
    });
  }

  void HaveNumbers() {
    counts_.clear();
    for (int64_t rows : all_) counts_.push_back(rows * row_);
    int64_t rows = 0;
    if (attributes_.kind == Kind::kAllGather) {
      rows = std::accumulate(all_.begin(), all_.end(), int64_t{0});
    } else {
      std::vector<int64_t> received(size_);
      for (int i = 0; i < size_; ++i) {
        received[i] = all_[static_cast<size_t>(i) * size_ + me_];
        rows += received[i];
      }
      constexpr int kTensorFlowInt64 = 9;
      TF_Tensor* output = Output(1, kTensorFlowInt64, {size_},
                                 received.size() * sizeof(int64_t));
      if (!output) return Finish();
      std::memcpy(TF_TensorData(output), received.data(),
                  received.size() * sizeof(int64_t));
    }
    MoveRows(rows);
  }

  void MoveRows(int64_t rows) {
    const int dtype = DTypeOf(TF_TensorType(input_));
    std::vector<int64_t> shape = shape_;
    shape[0] = rows;
    TF_Tensor* output =
        Output(0, TF_TensorType(input_), shape,
               static_cast<size_t>(rows * row_) *
                   collective::SizeOf(static_cast<collective::DType>(dtype)));
    if (!output) return Finish();
    tensor_ = {};
    tensor_.input = TF_TensorData(input_);
    tensor_.output = TF_TensorData(output);
    tensor_.count = shape_[0] * row_;
    tensor_.shape = shape_.data();
    tensor_.dimensions = static_cast<int32_t>(shape_.size());
    tensor_.dtype = dtype;
    Submit(RequestOf(attributes_),
           [](void* argument, int32_t code, const char* message) {
             static_cast<RunOnRows*>(argument)->End(code, message);
           });
  }

  void Submit(collective_request request, collective_done done) {
    request.tensors = &tensor_;
    request.tensors_length = 1;
    request.counts = counts_.data();
    request.counts_length = static_cast<int64_t>(counts_.size());
    const int32_t code = collective_submit(&request, done, this);
    if (code != 0) End(code, collective_error());
  }

  const Attributes
      attributes_;  // a copy: the kernel may be gone before the run
  int32_t size_ = 1, me_ = 0;
  TF_Tensor* input_ = nullptr;
  std::vector<int64_t> shape_;
  int64_t row_ = 1;  // elements
  std::string step_name_;
  std::vector<int64_t> mine_, all_, counts_;
  collective_tensor tensor_ = {};
};

void Compute(void* kernel, TF_OpKernelContext* context,
             TF_AsyncOpKernelDoneCallback* callback) {
  (new RunOnRows(*static_cast<Attributes*>(kernel), context, callback))
      ->Start();
}

void UnknownShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

// Runs when tf.load_op_library loads this file.
const bool registered = [] {
  const char* type =
      "T: {float, double, half, bfloat16, int8, uint8, int32, int64, bool}";
  Register<Kind::kAllGather>("CollectiveAllGather", {type}, {"tensor: T"},
                             {"output: T"}, &UnknownShapes, &Compute);
  Register<Kind::kReduceScatter>("CollectiveReduceScatter",
                                 {type, "reduction: int = 0"}, {"tensor: T"},
                                 {"output: T"}, &UnknownShapes, &Compute);
  Register<Kind::kAllToAll>(
      "CollectiveAllToAll", {type}, {"tensor: T", "splits: int64"},
      {"output: T", "received: int64"}, &UnknownShapes, &Compute);
  return true;
}();

}  // namespace
