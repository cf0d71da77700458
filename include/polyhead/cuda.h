// CUDA for those who are handed pointers and streams and have no CUDA runtime of their own: front ends in other
// languages, programs that ask what is there. A library that was built without CUDA kernels answers with its reason.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/status.h"

namespace polyhead {

/// A GPU, as CUDA describes it.
struct CudaDevice {
  std::string name;          ///< "NVIDIA H100 80GB HBM3"
  int capability_major = 0;  ///< of 9.0: 9
  int capability_minor = 0;  ///< of 9.0: 0
  size_t memory_bytes = 0;
  std::string why_not;  ///< why no kernel of this build can run on it; "" if one can
};

/// What CUDA kernels find on this machine.
struct CudaMachine {
  std::string why_not;              ///< why there is no device to compute on; "" if there is one at least
  int driver_version = 0;           ///< the newest CUDA that the driver serves, 13000 for 13.0; 0: there is no driver
  int runtime_version = 0;          ///< the CUDA that this library was built with; 0: it has no CUDA kernels
  std::vector<CudaDevice> devices;  ///< in the order of CUDA's numbers
};

/// Asks driver and devices. Not fast.
POLYHEAD_API CudaMachine cuda_machine();

/// The number of the device whose memory holds `pointer`.
POLYHEAD_API Result<int> cuda_device_of(const void* pointer);

/// Makes `device` the calling thread's current one, for which plans are made and where calls run. Returns the one before.
POLYHEAD_API Result<int> set_cuda_device(int device);

/// Memory of the current device, out of the driver's pool, for work that is put on `stream` from here on. Never waits.
POLYHEAD_API Result<void*> allocate_cuda(size_t bytes, void* stream);

/// Gives it back, once what is on `stream` now has run. Never waits.
POLYHEAD_API Status free_cuda(void* memory, void* stream);

/// What is put on `stream` from here on runs after all that is on `before` now. Never waits.
POLYHEAD_API Status order_cuda_streams(void* before, void* stream);

}  // namespace polyhead
