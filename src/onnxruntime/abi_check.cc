// Compiles only if abi.h says of ONNX Runtime's tables and structs what its own headers say.
#include <onnxruntime_c_api.h>

#include "abi.h"

namespace polyhead::onnxruntime::abi {

#define SAME(name) static_assert(k##name.place * sizeof(void*) == offsetof(OrtApi, name))
SAME(CreateStatus);
SAME(GetErrorMessage);
SAME(CreateCustomOpDomain);
SAME(CustomOpDomain_Add);
SAME(AddCustomOpDomain);
SAME(GetTensorMutableData);
SAME(CastTypeInfoToTensorInfo);
SAME(CreateTensorTypeAndShapeInfo);
SAME(SetTensorElementType);
SAME(SetDimensions);
SAME(GetTensorElementType);
SAME(GetDimensionsCount);
SAME(GetDimensions);
SAME(GetSymbolicDimensions);
SAME(GetTensorTypeAndShape);
SAME(CreateCpuMemoryInfo);
SAME(KernelInfoGetAttribute_float);
SAME(KernelInfoGetAttribute_int64);
SAME(KernelInfoGetAttribute_string);
SAME(KernelContext_GetInputCount);
SAME(KernelContext_GetOutputCount);
SAME(KernelContext_GetInput);
SAME(KernelContext_GetOutput);
SAME(ReleaseStatus);
SAME(ReleaseTypeInfo);
SAME(ReleaseTensorTypeAndShapeInfo);
SAME(ReleaseAllocator);
SAME(KernelInfo_GetInputCount);
SAME(KernelInfo_GetOutputCount);
SAME(KernelInfo_GetInputName);
SAME(KernelInfo_GetOutputName);
SAME(KernelInfo_GetInputTypeInfo);
SAME(GetSessionConfigEntry);
SAME(KernelInfo_GetNodeName);
SAME(KernelInfoGetConstantInput_tensor);
SAME(KernelContext_GetAllocator);
SAME(ShapeInferContext_GetInputCount);
SAME(ShapeInferContext_GetInputTypeShape);
SAME(ShapeInferContext_GetAttribute);
SAME(ShapeInferContext_SetOutputTypeShape);
SAME(SetSymbolicDimensions);
SAME(ReadOpAttr);
SAME(KernelContext_ParallelFor);
#if ORT_API_VERSION >= 24
SAME(GetTensorElementTypeAndShapeDataReference);
#endif
SAME(Logger_LogMessage);
SAME(GetValueInfoName);
SAME(GetValueInfoTypeInfo);
SAME(HardwareDevice_Type);
SAME(GetEpApi);
SAME(ValueInfo_GetInitializerValue);
SAME(ValueInfo_IsConstantInitializer);
SAME(Graph_GetNumOperatorSets);
SAME(Graph_GetOperatorSets);
SAME(Graph_GetNumOutputs);
SAME(Graph_GetOutputs);
SAME(Graph_GetNumNodes);
SAME(Graph_GetNodes);
SAME(Node_GetName);
SAME(Node_GetOperatorType);
SAME(Node_GetDomain);
SAME(Node_GetSinceVersion);
SAME(Node_GetNumInputs);
SAME(Node_GetInputs);
SAME(Node_GetNumOutputs);
SAME(Node_GetOutputs);
SAME(Node_GetNumImplicitInputs);
SAME(Node_GetImplicitInputs);
SAME(Node_GetNumAttributes);
SAME(Node_GetAttributes);
SAME(OpAttr_GetType);
SAME(OpAttr_GetName);
SAME(CreateEnv);
SAME(CreateSessionFromArray);
SAME(Run);
SAME(CreateSessionOptions);
SAME(SetSessionLogSeverityLevel);
SAME(SessionGetInputCount);
SAME(SessionGetOutputCount);
SAME(SessionGetInputTypeInfo);
SAME(SessionGetInputName);
SAME(SessionGetOutputName);
SAME(CreateTensorWithDataAsOrtValue);
SAME(GetAllocatorWithDefaultOptions);
SAME(ReleaseMemoryInfo);
SAME(ReleaseSession);
SAME(ReleaseValue);
SAME(ReleaseSessionOptions);
SAME(AddSessionConfigEntry);
SAME(RegisterCustomOpsLibrary_V2);
static_assert(kCreateEpDevice.place * sizeof(void*) == offsetof(OrtEpApi, CreateEpDevice));
static_assert(kEpGraphSupportInfo_AddNodesToFuse.place * sizeof(void*) ==
              offsetof(OrtEpApi, EpGraphSupportInfo_AddNodesToFuse));

#define SAME_FIELD(ours, field, theirs, name) static_assert(offsetof(ours, field) == offsetof(theirs, name))
SAME_FIELD(ApiBase, get_version, OrtApiBase, GetVersionString);
SAME_FIELD(Allocator, alloc, OrtAllocator, Alloc);
SAME_FIELD(Allocator, free, OrtAllocator, Free);
SAME_FIELD(CustomOp, get_name, OrtCustomOp, GetName);
SAME_FIELD(CustomOp, get_input_type, OrtCustomOp, GetInputType);
SAME_FIELD(CustomOp, get_output_count, OrtCustomOp, GetOutputTypeCount);
SAME_FIELD(CustomOp, destroy, OrtCustomOp, KernelDestroy);
SAME_FIELD(CustomOp, get_input_memory, OrtCustomOp, GetInputMemoryType);
SAME_FIELD(CustomOp, create, OrtCustomOp, CreateKernelV2);
SAME_FIELD(CustomOp, run, OrtCustomOp, KernelComputeV2);
SAME_FIELD(CustomOp, infer_shapes, OrtCustomOp, InferOutputShapeFn);
SAME_FIELD(CustomOp, get_end_version, OrtCustomOp, GetEndVersion);
SAME_FIELD(FusionOptions, drop_constants, OrtNodeFusionOptions, drop_constant_initializers);
SAME_FIELD(NodeComputeInfo, release_state, OrtNodeComputeInfo, ReleaseState);
SAME_FIELD(Provider, get_capability, OrtEp, GetCapability);
SAME_FIELD(Provider, compile, OrtEp, Compile);
SAME_FIELD(Provider, release_compute_infos, OrtEp, ReleaseNodeComputeInfos);
SAME_FIELD(ProviderFactory, get_supported_devices, OrtEpFactory, GetSupportedDevices);
SAME_FIELD(ProviderFactory, create, OrtEpFactory, CreateEp);
SAME_FIELD(ProviderFactory, release, OrtEpFactory, ReleaseEp);
SAME_FIELD(ProviderFactory, get_version, OrtEpFactory, GetVersion);
SAME_FIELD(ProviderFactory, create_allocator, OrtEpFactory, CreateAllocator);
SAME_FIELD(ProviderFactory, is_stream_aware, OrtEpFactory, IsStreamAware);
static_assert(sizeof(CustomOp) == sizeof(OrtCustomOp));

static_assert(static_cast<int>(ElementType::kFloat32) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
static_assert(static_cast<int>(ElementType::kInt32) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
static_assert(static_cast<int>(ElementType::kInt64) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
static_assert(static_cast<int>(ElementType::kBool) == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL);
static_assert(static_cast<int>(ElementType::kFloat16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
static_assert(static_cast<int>(ElementType::kFloat64) == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE);
static_assert(static_cast<int>(ElementType::kBFloat16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
static_assert(int{kInvalidArgument} == ORT_INVALID_ARGUMENT && int{kNotImplemented} == ORT_NOT_IMPLEMENTED);
static_assert(int{kInt} == ORT_OP_ATTR_INT && int{kFloats} == ORT_OP_ATTR_FLOATS && int{kString} == ORT_OP_ATTR_STRING);
static_assert(int{kOptional} == INPUT_OUTPUT_OPTIONAL);
static_assert(kDefaultMemory == OrtMemTypeDefault && kArenaAllocator == OrtArenaAllocator);

}  // namespace polyhead::onnxruntime::abi
