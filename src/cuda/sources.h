// The files of the kernels, as text: cmake/cuda.cmake makes it of them.
#pragma once

#include "cuda/nvrtc.h"

namespace polyhead::cuda {

extern const std::span<const Source> kSources;

}  // namespace polyhead::cuda
