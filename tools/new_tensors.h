// New tensors of a layer's calls, in memory that `buffers` owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "buffer.h"
#include "polyhead/attention.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"
#include "testing/elements.h"
#include "testing/random.h"

namespace polyhead::tools {

Status too_large(double size_bytes);

class NewTensors {
 public:
  explicit NewTensors(std::vector<Buffer>& buffers) : buffers_(buffers) {}

  // A new tensor whose dims lie in memory in the given order, outermost first.
  Status add(DType dtype, std::initializer_list<int64_t> dims, std::initializer_list<int> order, Tensor& tensor);

  // A row-major tensor.
  Status add(DType dtype, std::initializer_list<int64_t> dims, Tensor& tensor);

  // The gradient of what a program captures.
  Status add(const CaptureShape& shape, Tensor& tensor);

 private:
  std::vector<Buffer>& buffers_;
};

template <class Draw>
void fill(const Tensor& tensor, Draw draw) {
  testing::for_each_element(tensor, [&](void* element) { testing::set_element(tensor.dtype, element, draw()); });
}

}  // namespace polyhead::tools
