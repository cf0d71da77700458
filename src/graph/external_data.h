// Tensors that a model keeps in files beside it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "polyhead/status.h"

namespace polyhead::graph {

struct ExternalPlace {
  std::string location, problem;
  uint64_t offset = 0;
  std::optional<uint64_t> length = {};
};

// One entry of a TensorProto's external_data.
void add_entry(ExternalPlace& place, std::string_view entry);

// Checks that `size` bytes are there: inside `folder`, in a regular file that is reached without symbolic links. They are
// read if there are few of them; else the result is empty.
Result<std::string> read_external(const ExternalPlace& place, const std::string& folder, uint64_t size);

// All bytes of a regular file of at most 2 GiB.
Result<std::string> read_file(const std::string& path);

}  // namespace polyhead::graph
