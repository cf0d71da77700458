#include "program_cache.h"

#include <cstddef>
#include <string>

#include "cache.h"

namespace polyhead::python {

Result<std::shared_ptr<const SharedProgram>> cached_program(std::string_view text) {
  constexpr size_t kMostPrograms = 256;
  using ByText = Cache<std::string, SharedProgram, std::hash<std::string>>;
  static auto* const cache = new ByText(kMostPrograms);  // threads may outlive the interpreter
  return cache->get([&](const std::string& known) { return known == text; }, [&] { return std::string(text); },
                    [&] { return parse_program(text); });
}

}  // namespace polyhead::python
