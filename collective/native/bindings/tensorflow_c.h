// The part of TensorFlow's C API that the ops use, declared here.
//
// It is a stable interface, the same since TensorFlow 2.16 at least. Since it is
// declared and not included, the ops can be built without an installed
// TensorFlow, as in pip's build environment, and one library serves all versions.
// (tests/collective/test_tensorflow.py would detect a change.)
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

struct TF_AsyncOpKernelDoneCallback;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;

// TensorFlow has C enumerations for status codes and dtypes: ints.
int TF_GetCode(const TF_Status*);
const char* TF_Message(const TF_Status*);
TF_Status* TF_NewStatus();
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, int code, const char* message);

int TF_TensorType(const TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int axis);
void* TF_TensorData(const TF_Tensor*);
int64_t TF_TensorElementCount(const TF_Tensor*);
void TF_DeleteTensor(TF_Tensor*);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderSetIsStateful(TF_OpDefinitionBuilder*, bool);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(
    TF_OpDefinitionBuilder*, void (*infer)(TF_ShapeInferenceContext*, TF_Status*));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);

TF_ShapeHandle* TF_NewShapeHandle();
void TF_DeleteShapeHandle(TF_ShapeHandle*);
int64_t TF_ShapeInferenceContextNumInputs(TF_ShapeInferenceContext*);
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*,
                                      TF_Status*);
TF_ShapeHandle* TF_ShapeInferenceContextScalar(TF_ShapeInferenceContext*);
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*,
                                       TF_Status*);

TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device,
                                      void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*),
                                      void (*destroy)(void*));
TF_KernelBuilder* TF_NewAsyncKernelBuilder(
    const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
    void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),
    void (*destroy)(void*));
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);

void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction*, const char* name,
                                         int32_t* length, int32_t* bytes, TF_Status*);
void TF_OpKernelConstruction_GetAttrString(TF_OpKernelConstruction*, const char* name,
                                           char* value, size_t bytes, TF_Status*);
void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char* name,
                                          int64_t* value, TF_Status*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);

int TF_NumInputs(TF_OpKernelContext*);
void TF_GetInput(TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* candidates,
                                           int length, int output, const int64_t* shape,
                                           int dimensions, int* forwarded, TF_Status*);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int index, int dtype,
                             const int64_t* shape, int dimensions, size_t bytes,
                             TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);

}  // extern "C"
