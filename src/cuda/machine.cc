#include "cuda/machine.h"

#include <cuda_runtime_api.h>

#include "contract/attention_operands.h"
#include "core/sentence.h"
#include "polyhead/cuda.h"

namespace polyhead {
namespace cuda {
namespace {

// As the runtime says it; nobody's next question is answered with this error.
std::string words_of(cudaError_t error) {
  static_cast<void>(cudaGetLastError());
  return cudaGetErrorString(error);
}

Status failed(const char* what, cudaError_t error) {
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kInternal;
  return {code, sentence(what, ": ", words_of(error))};
}

// 13000: "13.0"
std::string version_text(int version) { return sentence(version / 1000, ".", version % 1000 / 10); }

int driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) static_cast<void>(cudaGetLastError());
  return version;
}

// Why there is no device at all; *count is their number.
std::string why_no_devices(int* count) {
  *count = 0;
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess && *count > 0) return "";
  const std::string words = words_of(error);
  *count = 0;
  const int driver = driver_version();
  if (driver == 0) return "no NVIDIA driver is installed here";
  if (error == cudaErrorInsufficientDriver) {
    return sentence("the NVIDIA driver serves CUDA ", version_text(driver),
                    " at most, these kernels were built with CUDA ", version_text(CUDART_VERSION));
  }
  if (error == cudaErrorNoDevice || error == cudaSuccess) return "the NVIDIA driver finds no GPU here";
  return sentence("CUDA cannot be used here: ", words);
}

struct Capability {
  int major = 0, minor = 0;
};

std::string why_not_capability(const Capability& of) {
  if (of.major >= kLeastMajor) return "";
  return sentence("the GPU's compute capability is ", of.major, ".", of.minor, ", takes ", kLeastMajor, ".0 and up");
}

Result<int> attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, attribute, device);
  if (error == cudaSuccess) return value;
  return failed("CUDA cannot be asked about the GPU", error);
}

CudaDevice described(int number) {
  cudaDeviceProp properties = {};
  const cudaError_t error = cudaGetDeviceProperties(&properties, number);
  CudaDevice device;
  if (error != cudaSuccess) {
    device.why_not = sentence("CUDA cannot be asked about the GPU: ", words_of(error));
    return device;
  }
  device.name = properties.name;
  device.capability_major = properties.major;
  device.capability_minor = properties.minor;
  device.memory_bytes = properties.totalGlobalMem;
  device.why_not = why_not_capability({properties.major, properties.minor});
  return device;
}

Result<int> current_device() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) return device;
  return failed("CUDA has no current device", error);
}

// Asked in each call, since it may be of another device: short beside a launch.
Result<Capability> current_capability() {
  const Result<int> device = current_device();
  if (!device.ok()) return device.status();
  const Result<int> major = attribute_of(cudaDevAttrComputeCapabilityMajor, *device);
  if (!major.ok()) return major.status();
  const Result<int> minor = attribute_of(cudaDevAttrComputeCapabilityMinor, *device);
  if (!minor.ok()) return minor.status();
  return Capability{*major, *minor};
}

Status check_memory(const char* name, const void* data, int device) {
  cudaPointerAttributes found = {};
  if (const cudaError_t error = cudaPointerGetAttributes(&found, data); error != cudaSuccess) {
    return failed(sentence("CUDA cannot tell where ", name, " lies").c_str(), error);
  }
  if (found.type == cudaMemoryTypeDevice) {
    if (found.device == device) return {};
    return invalid(sentence(name, " lies on CUDA device ", found.device, ", this call runs on device ", device));
  }
  if (found.devicePointer == data) return {};  // managed, or the host's and mapped
  return invalid(sentence(name, " lies in the host's memory, must lie on CUDA device ", device));
}

Status check_stream(void* stream, int device) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (queue == nullptr || queue == cudaStreamLegacy || queue == cudaStreamPerThread) return {};
#if CUDART_VERSION >= 12080
  int of = 0;
  if (const cudaError_t error = cudaStreamGetDevice(queue, &of); error != cudaSuccess) {
    return invalid(sentence("stream is not a stream of CUDA here: ", words_of(error)));
  }
  if (of != device) {
    return invalid(sentence("stream is of CUDA device ", of, ", this call runs on device ", device));
  }
#else
  static_cast<void>(device);  // nobody can be asked: the launch itself refuses a stream of another device
#endif
  return {};
}

// `forward` is part of `args`, which is either direction's.
template <class Args>
Status check_all(const AttentionDesc& desc, const Args& args, const ForwardArgs& forward, size_t workspace_bytes,
                 void* stream) {
  const Result<int> device = current_device();
  if (!device.ok()) return device.status();
  if (Status status = check_stream(stream, *device); !status.ok()) return status;
  for (const AttentionOperand& row : attention_operands()) {
    const Tensor& t = row.of(args);
    if (t.num_elements() == 0) continue;
    if (Status status = check_memory(row.name, t.data, *device); !status.ok()) return status;
  }
  for (size_t n = 0; n < forward.captures.size(); ++n) {
    const char* const name = desc.program->captures()[n].name.c_str();
    if (forward.captures[n].num_elements() == 0) continue;
    if (Status status = check_memory(name, forward.captures[n].data, *device); !status.ok()) return status;
  }
  return workspace_bytes == 0 ? Status() : check_memory("workspace", forward.workspace, *device);
}

}  // namespace

std::string why_no_device() {
  int count = 0;
  if (std::string reason = why_no_devices(&count); !reason.empty()) return reason;
  const Result<Capability> capability = current_capability();
  return capability.ok() ? why_not_capability(*capability) : capability.status().message();
}

bool has_warpgroup_products() {
  const Result<Capability> capability = current_capability();
  return capability.ok() && capability->major == 9 && capability->minor == 0;
}

Result<int> shared_bytes_of_block() {
  Result<int> device = current_device();
  if (!device.ok()) return device;
  return attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, *device);
}

Status check_place(const AttentionDesc& desc, const ForwardArgs& args, size_t workspace_bytes, void* stream) {
  return check_all(desc, args, args, workspace_bytes, stream);
}

Status check_place(const AttentionDesc& desc, const BackwardArgs& args, size_t workspace_bytes, void* stream) {
  for (const Tensor& gradient : args.grad_captures) {
    if (gradient.num_elements() == 0) continue;
    const Result<int> device = current_device();
    if (!device.ok()) return device.status();
    if (Status status = check_memory("a captured tensor's gradient", gradient.data, *device); !status.ok())
      return status;
  }
  return check_all(desc, args, args.forward, workspace_bytes, stream);
}

Status check_place(std::span<const linear::NamedMemory> memory, void* stream) {
  const Result<int> device = current_device();
  if (!device.ok()) return device.status();
  if (Status status = check_stream(stream, *device); !status.ok()) return status;
  for (const auto& [name, data] : memory) {
    if (Status status = check_memory(name, data, *device); !status.ok()) return status;
  }
  return {};
}

}  // namespace cuda

CudaMachine cuda_machine() {
  CudaMachine machine;
  machine.runtime_version = CUDART_VERSION;
  machine.driver_version = cuda::driver_version();
  int count = 0;
  machine.why_not = cuda::why_no_devices(&count);
  for (int number = 0; number < count; ++number) machine.devices.push_back(cuda::described(number));
  bool can = false;
  for (const CudaDevice& device : machine.devices) can = can || device.why_not.empty();
  if (!can && machine.why_not.empty()) machine.why_not = machine.devices.front().why_not;
  return machine;
}

Result<int> cuda_device_of(const void* pointer) {
  cudaPointerAttributes found = {};
  if (const cudaError_t error = cudaPointerGetAttributes(&found, pointer); error != cudaSuccess) {
    return cuda::failed("CUDA cannot tell where a pointer leads", error);
  }
  if (found.type == cudaMemoryTypeUnregistered) return invalid("the pointer leads to no memory of CUDA");
  return found.device;
}

Result<int> set_cuda_device(int device) {
  Result<int> before = cuda::current_device();
  if (!before.ok() || *before == device) return before;
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) {
    return invalid(sentence("CUDA device ", device, " cannot be used: ", cuda::words_of(error)));
  }
  return before;
}

Result<void*> allocate_cuda(size_t bytes, void* stream) {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return memory;
  return cuda::failed(sentence("no memory on the GPU for ", bytes, " bytes").c_str(), error);
}

Status free_cuda(void* memory, void* stream) {
  const cudaError_t error = cudaFreeAsync(memory, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status() : cuda::failed("memory on the GPU was not given back", error);
}

Status order_cuda_streams(void* before, void* stream) {
  const auto of = [](void* handle) {
    return handle == static_cast<void*>(cudaStreamLegacy) ? nullptr : static_cast<cudaStream_t>(handle);
  };
  const Result<int> device = cuda::current_device();
  if (!device.ok()) return device.status();
  if (Status status = cuda::check_stream(stream, *device); !status.ok()) return status;
  if (of(before) == of(stream)) return {};
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error != cudaSuccess) return cuda::failed("streams cannot be ordered", error);
  error = cudaEventRecord(event, of(before));
  if (error == cudaSuccess) error = cudaStreamWaitEvent(of(stream), event, 0);
  static_cast<void>(cudaEventDestroy(event));  // once it has been waited for
  return error == cudaSuccess ? Status() : cuda::failed("streams cannot be ordered", error);
}

}  // namespace polyhead
