#include "onnx_session.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>

#include "array.h"
#include "core/sentence.h"
#include "file.h"
#include "onnxruntime/api.h"

namespace polyhead::tools {
namespace {

namespace fs = std::filesystem;
namespace abi = onnxruntime::abi;
using onnxruntime::api;
using onnxruntime::call;
using onnxruntime::Owned;

constexpr int32_t kFatal = 4;  // what ONNX Runtime logs: errors come back as statuses
constexpr const char* kExternalData = "session.model_external_initializers_file_folder_path";

OrtEnv* environment = nullptr;

// Beside the command, in a wheel or where it was installed; else for the loader to find.
std::string our_operators() {
  constexpr const char* kName = "libpolyhead_onnxruntime.so";
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path().parent_path();
  for (const fs::path& at : {folder / kName, folder / "lib" / kName}) {
    if (fs::exists(at, error)) return at.string();
  }
  return kName;
}

bool imports_ours(const std::string& model) {
  const auto parsed = graph::parse_model(model, "");
  return parsed.ok() && std::any_of(parsed->opsets.begin(), parsed->opsets.end(),
                                    [](const graph::OpsetImport& import) { return import.domain == "polyhead"; });
}

// A name that ONNX Runtime allocates.
Status name_of(const abi::Function<OrtStatus*(const OrtSession*, size_t, abi::Allocator*, char**)>& function,
               const OrtSession* session, size_t index, std::string& name) {
  abi::Allocator* allocator = nullptr;
  char* text = nullptr;
  Status status = call(abi::kGetAllocatorWithDefaultOptions, &allocator);
  if (status.ok()) status = call(function, session, index, allocator, &text);
  if (!status.ok()) return status;
  name = text;
  allocator->free(allocator, text);
  return {};
}

Status describe(const OrtTensorTypeAndShapeInfo* info, DType& dtype, std::vector<graph::Dim>& dims) {
  abi::ElementType type = abi::ElementType::kUnknown;
  size_t ndim = 0;
  Status status = call(abi::kGetTensorElementType, info, &type);
  if (status.ok()) status = call(abi::kGetDimensionsCount, info, &ndim);
  std::vector<int64_t> sizes(ndim);
  std::vector<const char*> names(ndim);
  if (status.ok()) status = call(abi::kGetDimensions, info, sizes.data(), ndim);
  if (status.ok()) status = call(abi::kGetSymbolicDimensions, info, names.data(), ndim);
  if (!status.ok()) return status;
  if (!onnxruntime::dtype_of(type, dtype)) {
    return invalid(fmt::format("has element type {}, which is not taken", static_cast<int32_t>(type)));
  }
  dims.clear();
  for (size_t i = 0; i < ndim; ++i) dims.push_back({sizes[i], names[i] == nullptr ? "" : names[i]});
  return {};
}

Status about(const char* what, const std::string& name, const Status& status) {
  return status.ok() ? status : invalid(fmt::format("{} {} {}", what, printable(name), status.message()));
}

using OwnedValue = Owned<abi::kReleaseValue, OrtValue>;

Result<OnnxTensor> tensor_of(OrtValue* value) {
  onnxruntime::OwnedShape shape;
  DType dtype = DType::kFloat32;
  std::vector<graph::Dim> dims;
  void* data = nullptr;
  Status status = call(abi::kGetTensorTypeAndShape, static_cast<const OrtValue*>(value), shape.slot());
  if (status.ok()) status = describe(shape.get(), dtype, dims);
  if (status.ok()) status = call(abi::kGetTensorMutableData, value, &data);
  if (!status.ok()) return status;
  std::vector<int64_t> sizes(dims.size());
  std::transform(dims.begin(), dims.end(), sizes.begin(), [](const graph::Dim& dim) { return dim.size; });
  auto tensor = new_onnx_tensor(dtype, std::move(sizes));
  const auto bytes = tensor.ok() ? static_cast<size_t>(tensor->num_elements()) * dtype_size_bytes(dtype) : 0;
  if (bytes > 0) std::memcpy(tensor->data.get(), data, bytes);
  return tensor;
}

}  // namespace

int64_t OnnxTensor::num_elements() const {
  int64_t count = 1;
  for (int64_t size : dims) count *= size;
  return count;
}

Result<OnnxTensor> new_onnx_tensor(DType dtype, std::vector<int64_t> dims) {
  const auto bytes = checked_size_bytes(dims, dtype_size_bytes(dtype));
  if (!bytes.ok()) return bytes.status();
  OnnxTensor tensor = {dtype, std::move(dims), new_buffer(*bytes)};
  if (tensor.data == nullptr) return Status(StatusCode::kOutOfMemory, fmt::format("{} bytes are too many", *bytes));
  return tensor;
}

Status load_onnxruntime(const std::string& library) {
  void* handle = nullptr;
  for (const char* name : {library.c_str(), "libonnxruntime.so.1", "libonnxruntime.so"}) {
    if (*name != '\0') handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr || !library.empty()) break;
  }
  const char* why = handle == nullptr ? dlerror() : nullptr;
  if (handle == nullptr) {
    return invalid(fmt::format("--check needs ONNX Runtime's library, libonnxruntime.so, which --onnxruntime names: {}",
                               why == nullptr ? "" : why));
  }
  const auto get_base = reinterpret_cast<const abi::ApiBase* (*)()>(dlsym(handle, "OrtGetApiBase"));
  if (get_base == nullptr) return invalid(fmt::format("{} is not ONNX Runtime's library", printable(library)));
  if (!onnxruntime::set_api(get_base(), abi::kOldest)) {
    return invalid(fmt::format("ONNX Runtime is {}, must be 1.{} or later", get_base()->get_version(), abi::kOldest));
  }
  return call(abi::kCreateEnv, kFatal, "polyhead", &environment);
}

Result<OnnxSession> OnnxSession::open(const std::string& model, const std::string& folder) {
  Owned<abi::kReleaseSessionOptions, OrtSessionOptions> options;
  OnnxSession opened;
  Status status = call(abi::kCreateSessionOptions, options.slot());
  if (status.ok()) status = call(abi::kSetSessionLogSeverityLevel, options.get(), kFatal);
  if (status.ok()) status = call(abi::kAddSessionConfigEntry, options.get(), kExternalData, folder.c_str());
  if (status.ok() && imports_ours(model)) {
    status = call(abi::kRegisterCustomOpsLibrary_V2, options.get(), our_operators().c_str());
  }
  if (status.ok()) {
    const OrtSessionOptions* told = options.get();
    const void* bytes = model.data();
    status = call(abi::kCreateSessionFromArray, static_cast<const OrtEnv*>(environment), bytes, model.size(), told,
                  &opened.session_);
  }
  if (status.ok()) status = opened.read_signature();
  if (!status.ok()) return status;
  return opened;
}

OnnxSession::OnnxSession(OnnxSession&& other) noexcept
    : session_(std::exchange(other.session_, nullptr)),
      inputs_(std::move(other.inputs_)),
      outputs_(std::move(other.outputs_)) {}

OnnxSession::~OnnxSession() {
  if (session_ != nullptr) abi::kReleaseSession(api(), session_);
}

Status OnnxSession::read_signature() {
  const OrtSession* session = session_;
  size_t num_inputs = 0, num_outputs = 0;
  Status status = call(abi::kSessionGetInputCount, session, &num_inputs);
  if (status.ok()) status = call(abi::kSessionGetOutputCount, session, &num_outputs);
  inputs_.resize(num_inputs);
  outputs_.resize(num_outputs);
  for (size_t i = 0; status.ok() && i < num_inputs; ++i) {
    onnxruntime::OwnedType type;
    const OrtTensorTypeAndShapeInfo* info = nullptr;
    status = name_of(abi::kSessionGetInputName, session, i, inputs_[i].name);
    if (status.ok()) status = call(abi::kSessionGetInputTypeInfo, session, i, type.slot());
    if (status.ok()) status = call(abi::kCastTypeInfoToTensorInfo, static_cast<const OrtTypeInfo*>(type.get()), &info);
    if (!status.ok()) break;
    status = info == nullptr ? invalid("is no tensor") : describe(info, inputs_[i].dtype, inputs_[i].dims);
    status = about("input", inputs_[i].name, status);
  }
  for (size_t i = 0; status.ok() && i < num_outputs; ++i) {
    status = name_of(abi::kSessionGetOutputName, session, i, outputs_[i]);
  }
  return status;
}

Result<std::vector<OnnxTensor>> OnnxSession::run(const std::vector<OnnxTensor>& given) const {
  Owned<abi::kReleaseMemoryInfo, OrtMemoryInfo> memory;
  Status status = call(abi::kCreateCpuMemoryInfo, abi::kArenaAllocator, abi::kDefaultMemory, memory.slot());
  std::vector<OwnedValue> values(given.size()), results(outputs_.size());
  std::vector<const OrtValue*> in(given.size());
  std::vector<OrtValue*> out(outputs_.size());
  std::vector<const char*> in_names(given.size()), out_names(outputs_.size());
  for (size_t i = 0; status.ok() && i < given.size(); ++i) {
    const OnnxTensor& tensor = given[i];
    const size_t bytes = static_cast<size_t>(tensor.num_elements()) * dtype_size_bytes(tensor.dtype);
    const OrtMemoryInfo* where = memory.get();
    status = call(abi::kCreateTensorWithDataAsOrtValue, where, static_cast<void*>(tensor.data.get()), bytes,
                  tensor.dims.data(), tensor.dims.size(), onnxruntime::type_of(tensor.dtype), values[i].slot());
    in[i] = values[i].get();
    in_names[i] = inputs_[i].name.c_str();
  }
  for (size_t i = 0; i < outputs_.size(); ++i) out_names[i] = outputs_[i].c_str();
  if (status.ok()) {
    const OrtRunOptions* no_options = nullptr;
    status = call(abi::kRun, session_, no_options, static_cast<const char* const*>(in_names.data()),
                  static_cast<const OrtValue* const*>(in.data()), in.size(),
                  static_cast<const char* const*>(out_names.data()), out_names.size(), out.data());
  }
  for (size_t i = 0; i < out.size(); ++i) *results[i].slot() = out[i];
  std::vector<OnnxTensor> tensors;
  for (size_t i = 0; status.ok() && i < out.size(); ++i) {
    auto tensor = tensor_of(out[i]);
    status = about("output", outputs_[i], tensor.status());
    if (status.ok()) tensors.push_back(std::move(*tensor));
  }
  if (!status.ok()) return status;
  return tensors;
}

}  // namespace polyhead::tools
