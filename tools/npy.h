// NumPy's .npy files, versions 1 to 3:
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
// The header is a Python literal; it is parsed here by hand and never evaluated. Nothing in the file is trusted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::tools {

constexpr uint64_t kMaxNpyHeaderBytes = 64 * 1024;  // magic, version and length included

struct NpyHeader {
  DType dtype = DType::kFloat32;
  bool is_void16 = false;
  bool fortran_order = false;
  std::vector<int64_t> dims;
  uint64_t data_offset = 0, data_bytes = 0;
};

// `start`: the file's first kMaxNpyHeaderBytes, or the whole file if it is shorter.
Result<NpyHeader> parse_npy_header(std::string_view start, uint64_t file_bytes);

Result<Array> read_npy(const std::string& path);
Status write_npy(const std::string& path, const Tensor& tensor, bool overwrite);

}  // namespace polyhead::tools
