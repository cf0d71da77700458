// A CUDA runtime that runs kernels by executing their PTX on the CPU: what an object that nvcc compiled links with in
// place of libcudart_static. Only what is defined in cudart.cc is there; device pointers are the host's own.
//
// Launches and asynchronous copies wait in their stream until somebody synchronises it, in the order in which they
// were given: what a program reads too early has not been computed. A kernel that errs gives cudaErrorLaunchFailure
// there and its sentence here, and the rest of the stream is dropped.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "run.h"

namespace cuda_sim {

// What the last kernel that erred did wrong, since this was last asked; "" if none.
std::string take_fault();

// Instructions, banks and sectors of all kernels since this was last asked.
Counters take_counters();

// The same of each kernel, by its mangled name, since this was last asked.
std::map<std::string, Counters> take_counters_of_kernels();

// Memory of the host that kernels may use as if cudaMalloc had given it. `written`: it holds something.
void lend(void* pointer, size_t bytes, bool written);
void take_back(void* pointer);

// Allocations and loans that there are.
int num_allocations();

// Whether kernels have written, or it was lent as written, all of it.
bool is_written(const void* pointer, size_t bytes);

// Bytes of shared memory that a block may ask for.
void set_most_shared(int bytes);

// What the runtime tells of a device; at first there is one, an A100, or an H100 where POLYHEAD_SIMULATED_CAPABILITY is 9.0. All
// run alike what is compiled for them.
struct SimulatedDevice {
  std::string name = "simulated";
  int major = 8, minor = 0;
  size_t memory_bytes = size_t{80} << 30;
};
void set_devices(std::vector<SimulatedDevice> devices);

// The newest CUDA that the driver serves, 13000 for 13.0; 0: there is no driver.
void set_driver_version(int version);

// The PTX of a fatbin: of objects compiled with -gencode arch=compute_80,code=[...,compute_80] -no-compress. Throws
// Fault.
std::string ptx_of(const void* fatbin);

}  // namespace cuda_sim
