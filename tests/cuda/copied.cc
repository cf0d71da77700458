#include <cuda_runtime_api.h>

#include "lent.h"
#include "reach.h"

namespace polyhead {
namespace {

std::string& fault() {
  static std::string words;
  return words;
}

void check(cudaError_t error) {
  if (error != cudaSuccess) fault() = cudaGetErrorString(error);
}

// A copy or a memset may still be on its way when the call for it returns, and the calls under test may be on a stream that
// does not wait for that.
void wait() { check(cudaDeviceSynchronize()); }

}  // namespace

Lent::~Lent() {
  for (const Part& part : parts_) check(cudaMemcpy(part.host, part.device, part.bytes, cudaMemcpyDeviceToHost));
  for (void* each : allocations_) check(cudaFree(each));
}

// Elements lie there as they do here, whatever the strides are. They are copied whether they hold something or not.
void Lent::lend(Tensor& t, bool /*written*/) {
  t.device = Device::kCuda;
  if (!t.given() || t.num_elements() == 0) return;
  const Reach reach = reach_of(t);
  const std::vector<Reach> parts = parts_of(t);
  void* memory = nullptr;
  // Of managed memory, what nobody touches is addresses alone: parts may be further apart than the device has memory.
  check(parts.size() == 1 ? cudaMalloc(&memory, reach.bytes() + 256) : cudaMallocManaged(&memory, reach.bytes() + 256));
  if (memory == nullptr) return;  // the call refuses the host's memory
  allocations_.push_back(memory);
  char* const host = static_cast<char*>(t.data);
  // As misaligned to 16 bytes as it is here.
  char* const data =
      static_cast<char*>(memory) + 16 + (reinterpret_cast<uintptr_t>(t.data) + reach.first) % 16 - reach.first;
  for (const Reach& part : parts) {
    parts_.push_back({host + part.first, data + part.first, part.bytes()});
    check(cudaMemcpy(parts_.back().device, parts_.back().host, part.bytes(), cudaMemcpyHostToDevice));
  }
  wait();
  t.data = data;
}

// The host's contents are of no use to anybody.
void Lent::lend(void*& pointer, size_t bytes) {
  if (bytes == 0) return;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes));
  if (memory == nullptr) return;
  check(cudaMemset(memory, 0xff, bytes));
  wait();
  allocations_.push_back(memory);
  pointer = memory;
}

std::string take_fault() {
  const std::string words = fault();
  fault().clear();
  return words;
}

}  // namespace polyhead
