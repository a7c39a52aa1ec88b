// TensorFlow ops for the collectives that move rows, one tensor each:
// all-gather, reduce-scatter and all-to-all.
//
// The number of received rows depends on the other ranks, so all-gather and
// all-to-all are two collectives: the first sends the numbers of rows, and values
// that must be the same on every rank; then the output is allocated, and the
// second sends the rows. The kernel does not wait between them; the core calls it
// back.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "bindings/tensorflow_kernel.h"
#include "plan.h"

namespace {

using namespace collective::tensorflow;
using collective::Kind;

class RunOnRows : public Run {
 public:
  RunOnRows(const Attributes& attributes, TF_OpKernelContext* context,
            TF_AsyncOpKernelDoneCallback* callback)
      : Run(context, callback), attributes_(attributes) {}

  void Start() {
    int32_t code =
        collective_members(static_cast<int32_t>(attributes_.process_set), &size_, &me_);
    if (code != 0) return End(code, collective_error());
    input_ = Input(0);
    if (!input_) return Finish();
    shape_ = ShapeOf(input_);
    for (size_t axis = 1; axis < shape_.size(); ++axis) row_ *= shape_[axis];
    const bool all_to_all = attributes_.kind == Kind::kAllToAll;
    if (!HasTickets(TF_NumInputs(context_) - 1, all_to_all ? 2 : 1)) {
      return Finish();
    }
    if (name_.empty()) name_ = attributes_.name;
    switch (attributes_.kind) {
      case Kind::kAllGather:
        rows_ = {shape_.empty() ? 0 : shape_[0]};
        return ExchangeNumbers();
      case Kind::kAllToAll:
        if (ReadSplits()) ExchangeNumbers();
        return;
      default:
        if (shape_.empty()) {
          return End(kInvalid, "a scalar has no rows\nHINT: reshape it to [1]");
        }
        for (int i = 0; i < size_; ++i) {
          counts_.push_back((shape_[0] / size_ + (i < shape_[0] % size_)) * row_);
        }
        return MoveRows(row_ ? counts_[me_] / row_
                             : shape_[0] / size_ + (me_ < shape_[0] % size_));
    }
  }

 private:
  static constexpr int32_t kInvalid =
      static_cast<int32_t>(collective::Code::kInvalidArgument);
  static constexpr int32_t kDisagree =
      static_cast<int32_t>(collective::Code::kFailedPrecondition);

  // A rank sends this before its rows: values that must be the same on every rank,
  // and then the numbers of its rows. All zeros: it has joined.
  struct Header {
    int64_t hash = 0;  // hash of the text
    int64_t misfit = 0;
    char text[112] = {};  // the text or its beginning
  };
  static constexpr size_t kHeader = sizeof(Header) / sizeof(int64_t);

  Header HeaderOf() const {
    const int dtype = DTypeOf(TF_TensorType(input_));
    std::string text = collective::kDTypeTable[dtype].name;
    text += shape_.empty() ? "[" : "[?";
    for (size_t axis = 1; axis < shape_.size(); ++axis) {
      text += "," + std::to_string(shape_[axis]);
    }
    text += misfit_ ? "], whose splits do not fit it" : "]";
    Header header;
    header.hash = static_cast<int64_t>(std::hash<std::string>()(text) | 1);
    header.misfit = misfit_;
    std::snprintf(header.text, sizeof(header.text), "%s", text.c_str());
    return header;
  }

  // If the splits do not fit, every rank reports it.
  bool ReadSplits() {
    TF_Tensor* splits = Input(1);
    if (!splits) {
      Finish();
      return false;
    }
    const int64_t* values = static_cast<int64_t*>(TF_TensorData(splits));
    rows_.assign(values, values + TF_TensorElementCount(splits));
    misfit_ = static_cast<int>(rows_.size()) != size_;
    for (int64_t rows : rows_) misfit_ = misfit_ || rows < 0;
    misfit_ = misfit_ || shape_.empty() ||
              std::accumulate(rows_.begin(), rows_.end(), int64_t{0}) != shape_[0];
    rows_.resize(size_);
    return true;
  }

  void ExchangeNumbers() {
    const Header header = HeaderOf();
    const auto* words = reinterpret_cast<const int64_t*>(&header);
    mine_.assign(words, words + kHeader);
    mine_.insert(mine_.end(), rows_.begin(), rows_.end());
    all_.resize(mine_.size() * size_);
    counts_.assign(size_, static_cast<int64_t>(mine_.size()));
    step_name_ = name_ + collective::kRowsStep;
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

  // All ranks compare the same headers, so all of them fail or none does.
  bool AllFit() {
    const Header mine = HeaderOf();
    bool same = true, misfit = false;
    std::vector<int> ranks;
    std::vector<std::string> texts;
    std::string call = collective::NameOf(attributes_.kind);
    if (!name_.empty()) call += " '" + name_ + "'";
    for (int member = 0; member < size_; ++member) {
      Header theirs;
      std::memcpy(static_cast<void*>(&theirs), &all_[member * mine_.size()],
                  sizeof(theirs));
      if (theirs.hash == 0) continue;
      same = same && theirs.hash == mine.hash;
      misfit = misfit || theirs.misfit;
      int32_t rank = member;
      collective_rank_of(static_cast<int32_t>(attributes_.process_set), member, &rank);
      ranks.push_back(rank);
      texts.push_back(call + " " + theirs.text);
    }
    if (!misfit && shape_.empty()) {
      End(kInvalid, "a scalar has no rows\nHINT: reshape it to [1]");
      return false;
    }
    if (same && !misfit) return true;
    const std::string what = (misfit ? "the splits do not fit the tensor"
                                     : "ranks do not agree on a collective") +
                             collective::ListByText(ranks, texts);
    End(misfit ? kInvalid : kDisagree,
        (what + (misfit ? "\nHINT: give each rank its number of rows, adding up "
                          "to the first axis"
                        : "\nHINT: give tensors of the same dtype and shape, but "
                          "for the first axis, on every rank"))
            .c_str());
    return false;
  }

  void HaveNumbers() {
    if (!AllFit()) return;
    // Row by row the numbers that each rank sent, without the headers.
    const size_t length = mine_.size() - kHeader;
    for (int member = 0; member < size_; ++member) {
      std::copy_n(&all_[member * mine_.size() + kHeader], length,
                  &all_[member * length]);
    }
    all_.resize(length * size_);
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
      TF_Tensor* output = Output(1, kInt64, {size_}, received.size() * sizeof(int64_t));
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

  const Attributes attributes_;  // a copy, because the run may outlive the kernel
  int32_t size_ = 1, me_ = 0;
  TF_Tensor* input_ = nullptr;
  std::vector<int64_t> shape_;
  int64_t row_ = 1;  // elements of a row
  std::string step_name_;
  bool misfit_ = false;  // whether the splits do not fit
  std::vector<int64_t> rows_, mine_, all_, counts_;
  collective_tensor tensor_ = {};
};

void Compute(void* kernel, TF_OpKernelContext* context,
             TF_AsyncOpKernelDoneCallback* callback) {
  (new RunOnRows(*static_cast<Attributes*>(kernel), context, callback))->Start();
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
  Register<Kind::kAllToAll>("CollectiveAllToAll", {type},
                            {"tensor: T", "splits: int64"},
                            {"output: T", "received: int64"}, &UnknownShapes, &Compute);
  return true;
}();

}  // namespace
