#include "cudart.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>
#include <vector>

#include "runtime.h"

namespace cuda_sim {

// Never destroyed: binaries register before globals are made, and say good-bye after they are gone.
Runtime& runtime() {
  static Runtime& made = *new Runtime;
  return made;
}

cudaError_t failed(cudaError_t error) { return runtime().error = error; }

cudaError_t failed(const Fault& fault) {
  runtime().fault = fault.what();
  return failed(cudaErrorLaunchFailure);
}

}  // namespace cuda_sim

namespace {

using namespace cuda_sim;

Module& module_of(Binary& binary) {
  if (!binary.parsed) binary.module = parse(ptx_of(binary.fatbin));
  binary.parsed = true;
  return binary.module;
}

void launch(const Entry& entry, const Shape& shape, const std::vector<unsigned char>& parameters) {
  Runtime& r = runtime();
  const Module& module = module_of(*entry.binary);
  Counters counters;
  count_if_replaced(entry);
  run(module, module.kernels.at(entry.name), shape, parameters, r.memory, counters);
  r.counters += counters;
  r.of_kernels[entry.name] += counters;
}

// Of the host's function; null: there is none.
Entry* find_entry(const void* host) {
  const auto found = runtime().entries.find(host);
  if (found == runtime().entries.end()) return nullptr;
  replace(found->second);
  return &found->second;
}

// Which end of a copy is the device's is told by the kind, and must be so.
cudaError_t check_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  DeviceMemory& memory = runtime().memory;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) return cudaSuccess;
  if (memory.contains(to, bytes) != to_device && bytes > 0) return failed(cudaErrorInvalidValue);
  if (memory.contains(from, bytes) != from_device && bytes > 0) return failed(cudaErrorInvalidValue);
  return cudaSuccess;
}

bool release(void* pointer) {
  runtime().elsewhere.erase(pointer);
  return runtime().memory.release(pointer);
}

void copy(void* to, const void* from, size_t bytes) {
  DeviceMemory& memory = runtime().memory;
  if (memory.contains(from, bytes) && !memory.is_written(from, bytes)) {
    throw Fault("global memory is copied before it was written");
  }
  std::memcpy(to, from, bytes);
  if (memory.contains(to, bytes)) memory.set_written(to, bytes);
}

}  // namespace

namespace cuda_sim {

std::string take_fault() {
  const Lock lock(runtime().mutex);
  return std::exchange(runtime().fault, "");
}

Counters take_counters() {
  const Lock lock(runtime().mutex);
  return std::exchange(runtime().counters, {});
}

std::map<std::string, Counters> take_counters_of_kernels() {
  const Lock lock(runtime().mutex);
  return std::exchange(runtime().of_kernels, {});
}

void lend(void* pointer, size_t bytes, bool written) {
  const Lock lock(runtime().mutex);
  runtime().memory.lend(pointer, bytes, written);
}

void take_back(void* pointer) {
  const Lock lock(runtime().mutex);
  runtime().memory.take_back(pointer);
}

int num_allocations() {
  const Lock lock(runtime().mutex);
  return runtime().memory.num_buffers();
}

bool is_written(const void* pointer, size_t bytes) {
  const Lock lock(runtime().mutex);
  return runtime().memory.is_written(pointer, bytes);
}

void set_most_shared(int bytes) {
  const Lock lock(runtime().mutex);
  runtime().most_shared = bytes;
}

// The container: a magic number, version and size of its head, bytes; then parts: kind (1: PTX), version, size of its
// head, bytes. (fatbinary_section.h has the wrapper; the parts as nvcc 13 writes them.)
std::string ptx_of(const void* fatbin) {
  const auto* at = static_cast<const unsigned char*>(fatbin);
  const auto word = [&](size_t offset, auto value) {
    std::memcpy(&value, at + offset, sizeof value);
    return value;
  };
  if (word(0, uint32_t{}) != 0xba55ed50) throw Fault("what is registered is no fatbin");
  const unsigned char* const end = at + word(6, uint16_t{}) + word(8, uint64_t{});
  at += word(6, uint16_t{});
  while (at < end) {
    const uint32_t head = word(4, uint32_t{});
    const uint64_t bytes = word(8, uint64_t{});
    if (word(0, uint16_t{}) == 1) {
      const std::string text(reinterpret_cast<const char*>(at + head), bytes);
      if (text.find(".version") == std::string::npos)
        throw Fault("the fatbin's PTX is compressed: compile with -no-compress");
      return text.substr(0, text.find('\0'));
    }
    at += head + bytes;
  }
  throw Fault("the fatbin has no PTX: compile with code=[...,compute_80]");
}

}  // namespace cuda_sim

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  const Lock lock(runtime().mutex);
  const void* fatbin = nullptr;
  std::memcpy(&fatbin, static_cast<const char*>(wrapper) + 8, sizeof fatbin);
  runtime().binaries.push_back(std::make_unique<Binary>());
  runtime().binaries.back()->fatbin = fatbin;
  return reinterpret_cast<void**>(runtime().binaries.back().get());
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** binary, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  const Lock lock(runtime().mutex);
  runtime().entries[host] = {reinterpret_cast<Binary*>(binary), name};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  runtime().configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Lock lock(runtime().mutex);
  if (runtime().configurations.empty()) return failed(cudaErrorMissingConfiguration);
  const Configuration last = runtime().configurations.back();
  runtime().configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

// Of PTX.
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  const Lock lock(runtime().mutex);
  auto binary = std::make_unique<Binary>();
  try {
    binary->module = parse(static_cast<const char*>(code));
  } catch (const Fault& fault) {
    failed(fault);
    return failed(cudaErrorInvalidPtx);
  }
  binary->parsed = true;
  *library = reinterpret_cast<cudaLibrary_t>(binary.get());
  runtime().binaries.push_back(std::move(binary));
  return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  const Lock lock(runtime().mutex);
  auto* const binary = reinterpret_cast<Binary*>(library);
  const auto& kernels = binary->module.kernels;
  if (kernels.size() != 1 || kernels.begin()->first != name) return failed(cudaErrorSymbolNotFound);
  runtime().entries[binary] = {binary, name};
  *kernel = reinterpret_cast<cudaKernel_t>(binary);
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  const Lock lock(runtime().mutex);
  Entry* const entry = find_entry(host);
  if (entry == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(entry);
  return cudaSuccess;
}

// Arguments are read now; the kernel runs when its stream is waited for.
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared,
                               cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  const Entry& entry = *reinterpret_cast<const Entry*>(kernel);
  if (static_cast<int64_t>(shared) > entry.most_dynamic_shared) return failed(cudaErrorInvalidValue);
  int device = 0;
  if (const cudaError_t error = cudaStreamGetDevice(stream, &device)) return error;
  if (stream && device != current_device()) return failed(cudaErrorInvalidResourceHandle);
  try {
    const Module& module = module_of(*entry.binary);
    if (const cudaError_t error = check_runs_here(module)) return error;
    const Kernel& code = module.kernels.at(entry.name);
    std::vector<unsigned char> parameters(static_cast<size_t>(code.parameter_bytes));
    for (size_t n = 0; n < code.parameters.size(); ++n) {
      const Parameter& p = code.parameters[n];
      std::memcpy(&parameters[static_cast<size_t>(p.offset)], args[n], static_cast<size_t>(p.bytes));
    }
    const Shape shape{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, static_cast<int>(shared)};
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
        block.x * block.y * block.z > 1024) {
      return failed(cudaErrorInvalidConfiguration);
    }
    return give(stream, [&entry, shape, parameters] { launch(entry, shape, parameters); });
  } catch (const Fault& fault) {
    return failed(fault);
  }
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  Entry* const entry = find_entry(function);
  if (entry == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  return __cudaLaunchKernel(reinterpret_cast<cudaKernel_t>(entry), grid, block, args, shared, stream);
}

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  const Lock lock(runtime().mutex);
  Entry* const entry = find_entry(host);
  if (entry == nullptr) return failed(cudaErrorInvalidDeviceFunction);
  try {
    if (const cudaError_t error = check_runs_here(module_of(*entry->binary))) return error;
  } catch (const Fault& fault) {
    return failed(fault);
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > runtime().most_shared) {
    return failed(cudaErrorInvalidValue);
  }
  entry->most_dynamic_shared = value;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const Lock lock(runtime().mutex);
  *pointer = runtime().memory.allocate(bytes);
  if (*pointer && current_device() != 0) runtime().elsewhere[*pointer] = current_device();
  return *pointer || bytes == 0 ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* pointer) {
  const Lock lock(runtime().mutex);
  const cudaError_t error = drain_all();  // it synchronises the device
  if (pointer && !release(pointer)) return failed(cudaErrorInvalidValue);
  return error;
}

// Memory is there at once, and goes in its turn.
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t error = give(stream, [] {})) return error;
  return cudaMalloc(pointer, bytes);
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return give(stream, [=] {
    if (!release(pointer)) throw Fault("cudaFreeAsync of what was not allocated");
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = check_copy(to, from, bytes, kind)) return error;
  return give(stream, [=] { copy(to, from, bytes); });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const Lock lock(runtime().mutex);
  if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return error;
  return drain(nullptr, UINT64_MAX);
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  if (!runtime().memory.contains(pointer, bytes)) return failed(cudaErrorInvalidValue);
  return give(stream, [=] {
    std::memset(pointer, value, bytes);
    runtime().memory.set_written(pointer, bytes);
  });
}

cudaError_t cudaGetLastError() {
  const Lock lock(runtime().mutex);
  return std::exchange(runtime().error, cudaSuccess);
}

}  // extern "C"
