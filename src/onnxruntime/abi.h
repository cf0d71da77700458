// The part of ONNX Runtime's C interface that we use, declared anew: so none of its headers, which its Python package
// does not have, is needed to build, and one library serves every version from 1.19 on (the execution provider: 1.23).
// The interface is a table of functions that only ever grows at its end: a function is the number of its place.
// abi_check.cc holds these against ONNX Runtime's own headers, where there are some. Reason: docs/decisions/0016.
#pragma once

#include <cstddef>
#include <cstdint>

#include "polyhead/graph.h"

struct OrtApi;
struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;
struct OrtMemoryInfo;
struct OrtLogger;
struct OrtGraph;
struct OrtNode;
struct OrtValueInfo;
struct OrtHardwareDevice;
struct OrtKeyValuePairs;
struct OrtEpDevice;
struct OrtEpGraphSupportInfo;
struct OrtNodeComputeContext;
struct OrtEpApi;

namespace polyhead::onnxruntime {

namespace abi {

constexpr uint32_t kOldest = 19;               // the version of the table that custom operators ask for
constexpr uint32_t kOldestWithProviders = 23;  // and an execution provider
constexpr uint32_t kOldestWithShapesInPlace = 24;

struct ApiBase {
  const OrtApi* (*get_api)(uint32_t version);  // null: older than that
  const char* (*get_version)();
};

using graph::ElementType;  // ONNX's numbers

enum Code : int32_t { kFail = 1, kInvalidArgument = 2, kRuntimeException = 6, kNotImplemented = 9 };
enum AttributeType : int32_t { kInt = 1, kInts = 2, kFloat = 3, kFloats = 4, kString = 5 };
enum Presence : int32_t { kRequired = 0, kOptional = 1 };
constexpr int32_t kDefaultMemory = 0;   // OrtMemTypeDefault
constexpr int32_t kArenaAllocator = 1;  // OrtArenaAllocator

struct Allocator {
  uint32_t version;
  void* (*alloc)(Allocator*, size_t bytes);
  void (*free)(Allocator*, void* memory);
};

// An operator of ours, as ONNX Runtime asks for it. Null: as if it were not said.
struct CustomOp {
  uint32_t version;
  void* create_kernel;  // before 1.16
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider)(const CustomOp*);
  ElementType (*get_input_type)(const CustomOp*, size_t index);
  size_t (*get_input_count)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, size_t index);
  size_t (*get_output_count)(const CustomOp*);
  void* compute;  // before 1.16
  void (*destroy)(void* kernel);
  Presence (*get_input_presence)(const CustomOp*, size_t index);
  Presence (*get_output_presence)(const CustomOp*, size_t index);
  int32_t (*get_input_memory)(const CustomOp*, size_t index);
  void* variadic[4];  // arity and homogeneity of lists of inputs and outputs
  OrtStatus* (*create)(const CustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*run)(void* kernel, OrtKernelContext*);
  OrtStatus* (*infer_shapes)(const CustomOp*, OrtShapeInferContext*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  void* aliases[4];  // which outputs may take an input's memory
};

struct FusionOptions {
  uint32_t version;
  bool drop_constants;  // a group keeps what it needs of them: they are no inputs
};

// What runs in the place of a group of nodes.
struct NodeComputeInfo {
  uint32_t version;
  OrtStatus* (*create_state)(NodeComputeInfo*, OrtNodeComputeContext*, void** state);
  OrtStatus* (*compute)(NodeComputeInfo*, void* state, OrtKernelContext*);
  void (*release_state)(NodeComputeInfo*, void* state);
};

// An execution provider of one session. Null: what is usual.
struct Provider {
  uint32_t version;
  const char* (*get_name)(const Provider*);
  OrtStatus* (*get_capability)(Provider*, const OrtGraph*, OrtEpGraphSupportInfo*);
  OrtStatus* (*compile)(Provider*, const OrtGraph** groups, const OrtNode** nodes, size_t count,
                        NodeComputeInfo** infos, OrtNode** context_nodes);
  void (*release_compute_infos)(Provider*, NodeComputeInfo** infos, size_t count);
  void* others[8];  // layouts, dynamic options, starts and ends of runs, allocators, streams, compatibility
};

struct ProviderFactory {
  uint32_t version;
  const char* (*get_name)(const ProviderFactory*);
  const char* (*get_vendor)(const ProviderFactory*);
  OrtStatus* (*get_supported_devices)(ProviderFactory*, const OrtHardwareDevice* const* devices, size_t count,
                                      OrtEpDevice** ours, size_t most, size_t* num_ours);
  OrtStatus* (*create)(ProviderFactory*, const OrtHardwareDevice* const* devices, const OrtKeyValuePairs* const* told,
                       size_t count, const OrtSessionOptions*, const OrtLogger*, Provider**);
  void (*release)(ProviderFactory*, Provider*);
  uint32_t (*get_vendor_id)(const ProviderFactory*);
  const char* (*get_version)(const ProviderFactory*);
  void* validate_compatibility;
  OrtStatus* (*create_allocator)(ProviderFactory*, const OrtMemoryInfo*, const OrtKeyValuePairs*, Allocator**);
  void (*release_allocator)(ProviderFactory*, Allocator*);
  OrtStatus* (*create_data_transfer)(ProviderFactory*, void** transfer);
  bool (*is_stream_aware)(const ProviderFactory*);
  void* create_stream;
};

// A function of the table.
template <class Signature>
struct Function;
template <class R, class... A>
struct Function<R(A...)> {
  size_t place;
  R operator()(const void* table, A... arguments) const {
    return reinterpret_cast<R (*const*)(A...)>(table)[place](arguments...);
  }
};

using Failure = OrtStatus*;  // null: success

constexpr Function<Failure(Code, const char* message)> kCreateStatus{0};
constexpr Function<const char*(const OrtStatus*)> kGetErrorMessage{2};
constexpr Function<Failure(const char* domain, OrtCustomOpDomain**)> kCreateCustomOpDomain{26};
constexpr Function<Failure(OrtCustomOpDomain*, const CustomOp*)> kCustomOpDomain_Add{27};
constexpr Function<Failure(OrtSessionOptions*, OrtCustomOpDomain*)> kAddCustomOpDomain{28};
constexpr Function<Failure(OrtValue*, void** data)> kGetTensorMutableData{51};
constexpr Function<Failure(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)> kCastTypeInfoToTensorInfo{55};
constexpr Function<Failure(OrtTensorTypeAndShapeInfo**)> kCreateTensorTypeAndShapeInfo{57};
constexpr Function<Failure(OrtTensorTypeAndShapeInfo*, ElementType)> kSetTensorElementType{58};
constexpr Function<Failure(OrtTensorTypeAndShapeInfo*, const int64_t* dims, size_t count)> kSetDimensions{59};
constexpr Function<Failure(const OrtTensorTypeAndShapeInfo*, ElementType*)> kGetTensorElementType{60};
constexpr Function<Failure(const OrtTensorTypeAndShapeInfo*, size_t*)> kGetDimensionsCount{61};
constexpr Function<Failure(const OrtTensorTypeAndShapeInfo*, int64_t* dims, size_t count)> kGetDimensions{62};
constexpr Function<Failure(const OrtTensorTypeAndShapeInfo*, const char** names, size_t)> kGetSymbolicDimensions{63};
constexpr Function<Failure(const OrtValue*, OrtTensorTypeAndShapeInfo**)> kGetTensorTypeAndShape{65};
constexpr Function<Failure(int32_t allocator, int32_t memory, OrtMemoryInfo**)> kCreateCpuMemoryInfo{69};
constexpr Function<Failure(const OrtKernelInfo*, const char* name, float*)> kKernelInfoGetAttribute_float{85};
constexpr Function<Failure(const OrtKernelInfo*, const char* name, int64_t*)> kKernelInfoGetAttribute_int64{86};
constexpr Function<Failure(const OrtKernelInfo*, const char* name, char* text, size_t* bytes)>
    kKernelInfoGetAttribute_string{87};
constexpr Function<Failure(const OrtKernelContext*, size_t*)> kKernelContext_GetInputCount{88};
constexpr Function<Failure(const OrtKernelContext*, size_t*)> kKernelContext_GetOutputCount{89};
constexpr Function<Failure(const OrtKernelContext*, size_t index, const OrtValue**)> kKernelContext_GetInput{90};
constexpr Function<Failure(OrtKernelContext*, size_t index, const int64_t* dims, size_t count, OrtValue**)>
    kKernelContext_GetOutput{91};
constexpr Function<void(OrtStatus*)> kReleaseStatus{93};
constexpr Function<void(OrtTypeInfo*)> kReleaseTypeInfo{98};
constexpr Function<void(OrtTensorTypeAndShapeInfo*)> kReleaseTensorTypeAndShapeInfo{99};
constexpr Function<void(Allocator*)> kReleaseAllocator{132};
constexpr Function<Failure(const OrtKernelInfo*, size_t*)> kKernelInfo_GetInputCount{230};
constexpr Function<Failure(const OrtKernelInfo*, size_t*)> kKernelInfo_GetOutputCount{231};
constexpr Function<Failure(const OrtKernelInfo*, size_t index, char* name, size_t* bytes)> kKernelInfo_GetInputName{
    232};
constexpr Function<Failure(const OrtKernelInfo*, size_t index, char* name, size_t* bytes)> kKernelInfo_GetOutputName{
    233};
constexpr Function<Failure(const OrtKernelInfo*, size_t index, OrtTypeInfo**)> kKernelInfo_GetInputTypeInfo{234};
constexpr Function<Failure(const OrtSessionOptions*, const char* key, char* value, size_t* bytes)>
    kGetSessionConfigEntry{238};
constexpr Function<Failure(const OrtKernelInfo*, char* name, size_t* bytes)> kKernelInfo_GetNodeName{244};
constexpr Function<Failure(const OrtKernelInfo*, size_t index, int* is_constant, const OrtValue**)>
    kKernelInfoGetConstantInput_tensor{249};
constexpr Function<Failure(const OrtKernelContext*, const OrtMemoryInfo*, Allocator**)> kKernelContext_GetAllocator{
    253};
constexpr Function<Failure(const OrtShapeInferContext*, size_t*)> kShapeInferContext_GetInputCount{267};
constexpr Function<Failure(const OrtShapeInferContext*, size_t index, OrtTensorTypeAndShapeInfo**)>
    kShapeInferContext_GetInputTypeShape{268};
constexpr Function<Failure(const OrtShapeInferContext*, const char* name, const OrtOpAttr**)>
    kShapeInferContext_GetAttribute{269};
constexpr Function<Failure(const OrtShapeInferContext*, size_t index, const OrtTensorTypeAndShapeInfo*)>
    kShapeInferContext_SetOutputTypeShape{270};
constexpr Function<Failure(OrtTensorTypeAndShapeInfo*, const char* const* names, size_t)> kSetSymbolicDimensions{271};
constexpr Function<Failure(const OrtOpAttr*, AttributeType, void* data, size_t bytes, size_t* needed)> kReadOpAttr{272};
constexpr Function<Failure(const OrtKernelContext*, void (*body)(void*, size_t), size_t count, size_t batches, void*)>
    kKernelContext_ParallelFor{274};

// From kOldestWithShapesInPlace on: the shape where the value has it.
constexpr Function<Failure(const OrtValue*, ElementType*, const int64_t** dims, size_t* count)>
    kGetTensorElementTypeAndShapeDataReference{414};

// Of an execution provider.
constexpr Function<Failure(const OrtLogger*, int32_t severity, const char* text, const char* file, int line,
                           const char*)>
    kLogger_LogMessage{247};
constexpr Function<Failure(const OrtValueInfo*, const char**)> kGetValueInfoName{289};
constexpr Function<Failure(const OrtValueInfo*, const OrtTypeInfo**)> kGetValueInfoTypeInfo{290};
constexpr Function<int32_t(const OrtHardwareDevice*)> kHardwareDevice_Type{307};
constexpr Function<const OrtEpApi*()> kGetEpApi{317};
constexpr Function<Failure(const OrtValueInfo*, const OrtValue**)> kValueInfo_GetInitializerValue{326};
constexpr Function<Failure(const OrtValueInfo*, bool*)> kValueInfo_IsConstantInitializer{331};
constexpr Function<Failure(const OrtGraph*, size_t*)> kGraph_GetNumOperatorSets{336};
constexpr Function<Failure(const OrtGraph*, const char** domains, int64_t* versions, size_t)> kGraph_GetOperatorSets{
    337};
constexpr Function<Failure(const OrtGraph*, size_t*)> kGraph_GetNumOutputs{340};
constexpr Function<Failure(const OrtGraph*, const OrtValueInfo**, size_t)> kGraph_GetOutputs{341};
constexpr Function<Failure(const OrtGraph*, size_t*)> kGraph_GetNumNodes{344};
constexpr Function<Failure(const OrtGraph*, const OrtNode**, size_t)> kGraph_GetNodes{345};
constexpr Function<Failure(const OrtNode*, const char**)> kNode_GetName{349};
constexpr Function<Failure(const OrtNode*, const char**)> kNode_GetOperatorType{350};
constexpr Function<Failure(const OrtNode*, const char**)> kNode_GetDomain{351};
constexpr Function<Failure(const OrtNode*, int*)> kNode_GetSinceVersion{352};
constexpr Function<Failure(const OrtNode*, size_t*)> kNode_GetNumInputs{353};
constexpr Function<Failure(const OrtNode*, const OrtValueInfo**, size_t)> kNode_GetInputs{354};
constexpr Function<Failure(const OrtNode*, size_t*)> kNode_GetNumOutputs{355};
constexpr Function<Failure(const OrtNode*, const OrtValueInfo**, size_t)> kNode_GetOutputs{356};
constexpr Function<Failure(const OrtNode*, size_t*)> kNode_GetNumImplicitInputs{357};
constexpr Function<Failure(const OrtNode*, const OrtValueInfo**, size_t)> kNode_GetImplicitInputs{358};
constexpr Function<Failure(const OrtNode*, size_t*)> kNode_GetNumAttributes{359};
constexpr Function<Failure(const OrtNode*, const OrtOpAttr**, size_t)> kNode_GetAttributes{360};
constexpr Function<Failure(const OrtOpAttr*, AttributeType*)> kOpAttr_GetType{363};
constexpr Function<Failure(const OrtOpAttr*, const char**)> kOpAttr_GetName{364};

// Of sessions, which the command makes.
constexpr Function<Failure(int32_t severity, const char* name, OrtEnv**)> kCreateEnv{3};
constexpr Function<Failure(const OrtEnv*, const void* model, size_t bytes, const OrtSessionOptions*, OrtSession**)>
    kCreateSessionFromArray{8};
constexpr Function<Failure(OrtSession*, const OrtRunOptions*, const char* const* names, const OrtValue* const* inputs,
                           size_t num_inputs, const char* const* output_names, size_t num_outputs, OrtValue** outputs)>
    kRun{9};
constexpr Function<Failure(OrtSessionOptions**)> kCreateSessionOptions{10};
constexpr Function<Failure(OrtSessionOptions*, int32_t severity)> kSetSessionLogSeverityLevel{22};
constexpr Function<Failure(const OrtSession*, size_t*)> kSessionGetInputCount{30};
constexpr Function<Failure(const OrtSession*, size_t*)> kSessionGetOutputCount{31};
constexpr Function<Failure(const OrtSession*, size_t index, OrtTypeInfo**)> kSessionGetInputTypeInfo{33};
constexpr Function<Failure(const OrtSession*, size_t index, Allocator*, char** name)> kSessionGetInputName{36};
constexpr Function<Failure(const OrtSession*, size_t index, Allocator*, char** name)> kSessionGetOutputName{37};
constexpr Function<Failure(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* dims, size_t count,
                           ElementType, OrtValue**)>
    kCreateTensorWithDataAsOrtValue{49};
constexpr Function<Failure(Allocator**)> kGetAllocatorWithDefaultOptions{78};
constexpr Function<void(OrtMemoryInfo*)> kReleaseMemoryInfo{94};
constexpr Function<void(OrtSession*)> kReleaseSession{95};
constexpr Function<void(OrtValue*)> kReleaseValue{96};
constexpr Function<void(OrtSessionOptions*)> kReleaseSessionOptions{100};
constexpr Function<Failure(OrtSessionOptions*, const char* key, const char* value)> kAddSessionConfigEntry{130};
constexpr Function<Failure(OrtSessionOptions*, const char* library)> kRegisterCustomOpsLibrary_V2{228};

// Of the table of an execution provider's own functions.
constexpr Function<Failure(ProviderFactory*, const OrtHardwareDevice*, const OrtKeyValuePairs*, const OrtKeyValuePairs*,
                           OrtEpDevice**)>
    kCreateEpDevice{0};
constexpr Function<Failure(OrtEpGraphSupportInfo*, const OrtNode* const*, size_t count, const FusionOptions*)>
    kEpGraphSupportInfo_AddNodesToFuse{2};

}  // namespace abi

}  // namespace polyhead::onnxruntime
