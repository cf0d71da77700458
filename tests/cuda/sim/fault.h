// What is wrong with a kernel, or with a launch: one sentence, with the place in the source, block, warp and lane.
#pragma once

#include <stdexcept>
#include <string>

namespace cuda_sim {

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace cuda_sim
