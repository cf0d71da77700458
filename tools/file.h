// Files: reading parts of one, and writing one so that it appears whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "polyhead/status.h"

namespace polyhead::tools {

// In quotes, with everything that a terminal could interpret escaped; long texts are cut.
std::string printable(std::string_view text);

class InputFile {
 public:
  // Regular files only: a pipe or device could block or never end.
  static Result<InputFile> open(const std::string& path);

  InputFile(InputFile&& other) noexcept;
  ~InputFile();

  uint64_t size_bytes() const { return size_bytes_; }
  // Reads [offset, offset + count), which must lie inside the file.
  Status read_at(uint64_t offset, void* out, size_t count) const;

 private:
  InputFile() = default;
  int descriptor_ = -1;
  uint64_t size_bytes_ = 0;
};

// An error if `path` exists and may not be replaced: to be asked before long work.
Status check_may_write(const std::string& path, bool overwrite);

// Written under another name in the same folder, which commit() changes to `path`. Without commit() nothing remains.
class OutputFile {
 public:
  static Result<OutputFile> create(const std::string& path, bool overwrite);

  OutputFile(OutputFile&& other) noexcept;
  ~OutputFile();

  Status write(const void* data, size_t count);
  Status commit();

 private:
  OutputFile() = default;
  std::string path_, temporary_;
  bool overwrite_ = false;
  int descriptor_ = -1;
};

}  // namespace polyhead::tools
