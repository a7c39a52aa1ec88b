// A TensorFlow op for this process' rank and the number of ranks, in the job or
// in a process set, at the time when the graph runs. A number that Python reads
// while a function is traced would not change when ranks leave or join.
#include "bindings/tensorflow_kernel.h"

namespace {

using namespace collective::tensorflow;

constexpr int kOutputs = 4;

void* CreateRankInfo(TF_OpKernelConstruction* construction) {
  auto group = std::make_unique<int64_t>(0);
  Status status;
  TF_OpKernelConstruction_GetAttrInt64(construction, "process_set", group.get(),
                                       status.get());
  if (!status.ok()) {
    TF_OpKernelConstruction_Failure(construction, status.get());
  }
  return group.release();
}

void DestroyRankInfo(void* kernel) { delete static_cast<int64_t*>(kernel); }

void ComputeRankInfo(void* kernel, TF_OpKernelContext* context) {
  Status status;
  collective_ranks info = {};
  const int32_t code =
      collective_rank_info(static_cast<int32_t>(*static_cast<int64_t*>(kernel)), &info);
  if (code != 0) {
    TF_SetStatus(status.get(), CodeOf(code), collective_error());
    return TF_OpKernelContext_Failure(context, status.get());
  }
  const int kInt32 =
      collective::kDTypeTable[static_cast<int>(collective::DType::kInt32)].tensorflow;
  const int32_t values[kOutputs] = {info.rank, info.size, info.local_rank,
                                    info.local_size};
  for (int i = 0; i < kOutputs; ++i) {
    TF_Tensor* output = TF_AllocateOutput(context, i, kInt32, nullptr, 0,
                                          sizeof(int32_t), status.get());
    if (!status.ok()) {
      return TF_OpKernelContext_Failure(context, status.get());
    }
    *static_cast<int32_t*>(TF_TensorData(output)) = values[i];
    TF_DeleteTensor(output);
  }
}

void Scalars(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < kOutputs; ++i) SetScalar(context, i, status);
}

// Runs when tf.load_op_library loads this file.
const bool registered = [] {
  const char* name = "CollectiveRankInfo";
  RegisterOp(name, {"process_set: int = 0"}, {},
             {"rank: int32", "size: int32", "local_rank: int32", "local_size: int32"},
             &Scalars,
             TF_NewKernelBuilder(name, "CPU", &CreateRankInfo, &ComputeRankInfo,
                                 &DestroyRankInfo));
  return true;
}();

}  // namespace
