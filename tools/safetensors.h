// safetensors files: 8 bytes of header length, a JSON header, the tensors' bytes without gaps.
// https://huggingface.co/docs/safetensors. Nothing in the file is trusted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "file.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead::tools {

constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype_name;      // as the file says: "BF16"
  std::optional<DType> dtype;  // none: a type that nothing here computes with
  std::vector<int64_t> dims;
  uint64_t begin = 0, end = 0;  // bytes, counted from the end of the header
};

// `json`: the header; `data_bytes`: how many bytes follow it. Entries come in the order of their bytes.
Result<std::vector<SafetensorsEntry>> parse_safetensors_header(std::string_view json, uint64_t data_bytes);

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  Result<Array> read(std::string_view name) const;

 private:
  SafetensorsFile(std::string path, InputFile file) : path_(std::move(path)), file_(std::move(file)) {}
  Status read_header();
  Status in_file(const Status& status) const;

  std::string path_;
  InputFile file_;
  uint64_t data_offset_ = 0;
  std::vector<SafetensorsEntry> entries_;
};

Status write_safetensors(const std::string& path, const NamedTensors& tensors, bool overwrite);

}  // namespace polyhead::tools
