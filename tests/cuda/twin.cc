// The simulated runtime in words that Python's ctypes knows: part of libpolyhead_cuda_twin.so, which tests/python/cuda_test.py
// puts in the place of the package's own library.
#include <string>

#include "sim/cudart.h"

extern "C" {

// What the last kernel that erred did wrong, since this was last asked; "" if none.
const char* cuda_twin_take_fault() {
  static std::string fault;
  fault = cuda_sim::take_fault();
  return fault.c_str();
}

// So many devices of a compute capability.
void cuda_twin_set_devices(int count, int major, int minor) {
  cuda_sim::SimulatedDevice device;
  device.major = major, device.minor = minor;
  cuda_sim::set_devices(std::vector<cuda_sim::SimulatedDevice>(static_cast<size_t>(count), device));
}

void cuda_twin_set_driver_version(int version) { cuda_sim::set_driver_version(version); }

// Whether all of it was written.
int cuda_twin_is_written(const void* pointer, size_t bytes) { return cuda_sim::is_written(pointer, bytes); }

// Allocations that nobody has given back.
int cuda_twin_num_allocations() { return cuda_sim::num_allocations(); }

}  // extern "C"
