// Devices of the simulated runtime, and whose memory is where.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "runtime.h"

namespace cuda_sim {
namespace {

thread_local int chosen_device = 0;

cudaError_t check_driver() {
  if (runtime().driver_version / 1000 < CUDART_VERSION / 1000) return failed(cudaErrorInsufficientDriver);
  return runtime().devices.empty() ? failed(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t check_device(int device) {
  if (const cudaError_t error = check_driver()) return error;
  const int count = static_cast<int>(runtime().devices.size());
  return device >= 0 && device < count ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

}  // namespace

int current_device() { return chosen_device; }

Runtime::Runtime() {
  const char* const capability = std::getenv("POLYHEAD_SIMULATED_CAPABILITY");
  if (capability == nullptr) return;
  if (std::strcmp(capability, "9.0") != 0) {
    std::fprintf(stderr, "POLYHEAD_SIMULATED_CAPABILITY is %s, must be 9.0 or not given\n", capability);
    std::exit(1);
  }
  devices = {{"simulated", 9, 0}};
  most_shared = 227 * 1024;
}

cudaError_t check_runs_here(const Module& module) {
  if (const cudaError_t error = check_device(chosen_device)) return error;
  const SimulatedDevice& device = runtime().devices[static_cast<size_t>(chosen_device)];
  return runs_on(module, 10 * device.major + device.minor) ? cudaSuccess : failed(cudaErrorNoKernelImageForDevice);
}

void set_devices(std::vector<SimulatedDevice> devices) {
  const Lock lock(runtime().mutex);
  runtime().devices = std::move(devices);
  chosen_device = 0;
}

void set_driver_version(int version) {
  const Lock lock(runtime().mutex);
  runtime().driver_version = version;
}

}  // namespace cuda_sim

using namespace cuda_sim;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  const Lock lock(runtime().mutex);
  *version = runtime().driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const Lock lock(runtime().mutex);
  *count = static_cast<int>(runtime().devices.size());
  return check_driver();
}

cudaError_t cudaGetDevice(int* device) {
  const Lock lock(runtime().mutex);
  *device = chosen_device;
  return check_driver();
}

cudaError_t cudaSetDevice(int device) {
  const Lock lock(runtime().mutex);
  const cudaError_t error = check_device(device);
  if (!error) chosen_device = device;
  return error;
}

// What is asked for.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = check_device(device)) return error;
  const SimulatedDevice& told = runtime().devices[static_cast<size_t>(device)];
  const std::pair<cudaDeviceAttr, int> known[] = {{cudaDevAttrComputeCapabilityMajor, told.major},
                                                  {cudaDevAttrComputeCapabilityMinor, told.minor},
                                                  {cudaDevAttrMultiProcessorCount, 108},
                                                  {cudaDevAttrMaxSharedMemoryPerBlockOptin, runtime().most_shared}};
  for (const auto& [name, its_value] : known) {
    if (name == attribute) return *value = its_value, cudaSuccess;
  }
  return failed(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = check_device(device)) return error;
  const SimulatedDevice& told = runtime().devices[static_cast<size_t>(device)];
  *properties = {};
  std::strncpy(properties->name, told.name.c_str(), sizeof properties->name - 1);
  properties->major = told.major;
  properties->minor = told.minor;
  properties->totalGlobalMem = told.memory_bytes;
  return cudaSuccess;
}

// The host's memory is nobody's, as far as it was not lent.
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = check_driver()) return error;
  *attributes = {};
  attributes->device = -1;
  attributes->hostPointer = const_cast<void*>(pointer);
  const void* const begin = runtime().memory.beginning(pointer);
  if (begin == nullptr) return cudaSuccess;
  const auto found = runtime().elsewhere.find(begin);
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = found == runtime().elsewhere.end() ? 0 : found->second;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = nullptr;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorLaunchFailure: return "the kernel erred";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "no such device";
    case cudaErrorInvalidResourceHandle: return "no such stream, or it is of another device";
    default: return "an argument is wrong";
  }
}

}  // extern "C"
