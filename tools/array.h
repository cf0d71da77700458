// An array read from a file, and the files that hold arrays: .npy (one) and .safetensors (many, named).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::tools {

class OutputFile;

struct Array {
  Tensor tensor;  // a view of `data`
  Buffer data;
  bool is_void16 = false;  // NumPy's 2-byte void, which is how it saves bfloat16 (tensor.dtype says kBFloat16)
};

// Elements and bytes of an array with these sizes, or an error that names them; no product overflows.
Result<uint64_t> checked_size_bytes(const std::vector<int64_t>& dims, uint64_t element_bytes);

// A tensor of `dims` without data: row-major, or column-major. At most Tensor::kMaxDims dims.
Result<Tensor> view_of(const std::vector<int64_t>& dims, DType dtype, bool column_major);

// An error if a boolean array holds other bytes than 0 and 1.
Status check_elements(const Array& array);

// Appends the elements in row-major order.
Status write_elements(OutputFile& file, const Tensor& tensor);

std::string dims_text(const std::vector<int64_t>& dims);
std::string dims_text(const Tensor& tensor);

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// "FILE", or "FILE:NAME" for one tensor of a .safetensors.
Result<Array> read_array(const std::string& where);

// By the path's ending: .npy (exactly one tensor) or .safetensors.
Status write_arrays(const std::string& path, const NamedTensors& tensors, bool overwrite);

}  // namespace polyhead::tools
