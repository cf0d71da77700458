#include "call_place.h"

#include <dlfcn.h>

#include "stable_abi.h"
#include "torch_executor.h"

namespace polyhead::torch_ops {
namespace {

thread_local const CallPlace* current_place = nullptr;

// Before 2.13 a library of torch tells the stream that `import torch` loads only where torch is for CUDA.
void* current_stream_before_2_13(int32_t device) {
  static const auto tell = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* const found = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<AOTITorchError (*)(int32_t device_index, void** stream)>(found);
  }();
  void* stream = nullptr;
  if (tell == nullptr) failure("this torch does not tell its CUDA streams, 2.13 and later do");
  if (tell(device, &stream) != 0) failure("torch has no current stream on cuda:%d", device);
  return stream;
}

// The stream on which torch puts this thread's work.
void* current_stream(int32_t device) {
  if (torch_stream_native_handle == nullptr) return current_stream_before_2_13(device);
  StreamHandle stream = nullptr;
  void* handle = nullptr;
  if (aoti_torch_get_current_stream(device, &stream) != 0) failure("torch has no current stream on cuda:%d", device);
  const bool told = torch_stream_native_handle(stream, &handle) == 0;
  aoti_torch_delete_stream(stream);
  if (!told) failure("torch's current stream on cuda:%d has no handle", device);
  return handle;
}

}  // namespace

CallPlace::CallPlace(const StableTensor& query) : before_(current_place) {
  int32_t type = 0;
  if (aoti_torch_get_device_type(query.get(), &type) != 0) failure("query has no device");
  if (type == aoti_torch_device_type_cuda()) {
    device_ = Device::kCuda;
    if (aoti_torch_get_device_index(query.get(), &index_) != 0) failure("query's device has no number");
    stream_ = current_stream(index_);
    check(on_device_.emplace(index_).status());
  }
  current_place = this;
}

CallPlace::~CallPlace() { current_place = before_; }

const CallPlace* CallPlace::current() { return current_place; }

int32_t CallPlace::torch_type() const {
  return device_ == Device::kCuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
}

Where CallPlace::where() const {
  if (device_ == Device::kCuda) return {.device = device_, .executor = nullptr, .stream = stream_};
  return {.device = device_, .executor = &current_executor(), .stream = nullptr};
}

StableTensor CallPlace::new_workspace(size_t bytes, void** memory) {
  if (bytes == 0) return {};
  Tensor view(nullptr, DType::kInt4x2, {static_cast<int64_t>(bytes)});  // a byte an element
  StableTensor tensor = new_tensor(view, "a workspace");
  *memory = view.data;
  return tensor;
}

void CallPlace::forward(const Plan& plan, ForwardArgs& args) const {
  args.workspace_bytes = plan.workspace_bytes();
  run_in_workspace(args.workspace_bytes, [&](void* workspace) {
    args.workspace = workspace;
    return plan.forward(args);
  });
}

void CallPlace::backward(const Plan& plan, BackwardArgs& args) const {
  args.forward.workspace_bytes = plan.backward_workspace_bytes();
  run_in_workspace(args.forward.workspace_bytes, [&](void* workspace) {
    args.forward.workspace = workspace;
    return plan.backward(args);
  });
}

}  // namespace polyhead::torch_ops
