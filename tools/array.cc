#include "array.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "file.h"
#include "npy.h"
#include "safetensors.h"
#include "testing/elements.h"

namespace polyhead::tools {
using namespace testing;
namespace {

bool ends_with(std::string_view text, std::string_view ending) {
  return text.size() >= ending.size() && text.substr(text.size() - ending.size()) == ending;
}

Status unknown_format(const std::string& path) {
  return {StatusCode::kInvalidArgument, printable(path) + " must end in .npy or .safetensors"};
}

}  // namespace

Result<uint64_t> checked_size_bytes(const std::vector<int64_t>& dims, uint64_t element_bytes) {
  // Zero sizes count as one while the product is checked: strides are products of the others.
  int64_t product = static_cast<int64_t>(element_bytes);
  bool empty = false;
  for (int64_t size : dims) {
    empty = empty || size == 0;
    if (size < 0 || __builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product)) {
      return Status(StatusCode::kInvalidArgument, fmt::format("shape {} is too large", dims_text(dims)));
    }
  }
  return empty ? 0 : static_cast<uint64_t>(product);
}

Result<Tensor> view_of(const std::vector<int64_t>& dims, DType dtype, bool column_major) {
  Tensor tensor;
  if (dims.empty() || dims.size() > Tensor::kMaxDims) {
    return Status(StatusCode::kInvalidArgument, fmt::format("shape {} has {} sizes, must have 1 to {}", dims_text(dims),
                                                            dims.size(), Tensor::kMaxDims));
  }
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(dims.size());
  int64_t stride = 1;
  for (int n = 0; n < tensor.ndim; ++n) {
    const int d = column_major ? n : tensor.ndim - 1 - n;
    tensor.dims[d] = dims[static_cast<size_t>(d)];
    tensor.strides[d] = stride;
    stride *= std::max<int64_t>(tensor.dims[d], 1);
  }
  return tensor;
}

Status check_elements(const Array& array) {
  if (array.tensor.dtype != DType::kBool) return {};
  const auto* bytes = reinterpret_cast<const unsigned char*>(array.data.get());
  for (int64_t i = 0; i < array.tensor.num_elements(); ++i) {
    if (bytes[i] > 1) {
      return {StatusCode::kInvalidArgument, fmt::format("boolean element {} is byte {}, must be 0 or 1", i, bytes[i])};
    }
  }
  return {};
}

Status write_elements(OutputFile& file, const Tensor& tensor) {
  constexpr size_t kChunkBytes = 1 << 20;
  const size_t element_bytes = dtype_size_bytes(tensor.dtype);
  std::string chunk;
  chunk.reserve(kChunkBytes);
  Status status;
  for_each_element(tensor, [&](const void* element) {
    chunk.append(static_cast<const char*>(element), element_bytes);
    if (chunk.size() + element_bytes <= kChunkBytes || !status.ok()) return;
    status = file.write(chunk.data(), chunk.size());
    chunk.clear();
  });
  return status.ok() ? file.write(chunk.data(), chunk.size()) : status;
}

std::string dims_text(const std::vector<int64_t>& dims) { return fmt::format("[{}]", fmt::join(dims, ", ")); }

std::string dims_text(const Tensor& tensor) {
  return dims_text(std::vector<int64_t>(tensor.dims, tensor.dims + tensor.ndim));
}

Result<Array> read_array(const std::string& where) {
  if (ends_with(where, ".npy")) return read_npy(where);
  constexpr std::string_view kEnding = ".safetensors";
  const size_t end = where.rfind(kEnding);
  if (end == std::string::npos) return unknown_format(where);
  const std::string path = where.substr(0, end + kEnding.size());
  const std::string name = where.size() > path.size() + 1 ? where.substr(path.size() + 1) : "";
  if (where.size() > path.size() && where[path.size()] != ':') return unknown_format(where);
  const auto file = SafetensorsFile::open(path);
  if (!file.ok()) return file.status();
  if (!name.empty()) return file->read(name);
  if (file->entries().size() == 1) return file->read(file->entries()[0].name);
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} holds {} tensors; name one as FILE:NAME", printable(path), file->entries().size()));
}

Status write_arrays(const std::string& path, const NamedTensors& tensors, bool overwrite) {
  if (ends_with(path, ".safetensors")) return write_safetensors(path, tensors, overwrite);
  if (!ends_with(path, ".npy")) return unknown_format(path);
  if (tensors.size() == 1) return write_npy(path, tensors[0].second, overwrite);
  return {StatusCode::kInvalidArgument,
          fmt::format("{} can hold one tensor, not {}; end it in .safetensors", printable(path), tensors.size())};
}

}  // namespace polyhead::tools
