#include "testing/sizes.h"

#include <algorithm>
#include <string_view>

#include "testing/words.h"

namespace polyhead::testing {
namespace {

// "8", "2..16" (doubles), "128..1024..128" (steps).
Status append_range(std::string_view text, std::string_view shape, std::vector<int64_t>& sizes) {
  std::vector<int64_t> numbers;
  std::string_view rest = text;
  while (true) {
    const size_t dots = rest.find("..");
    const auto number = parse_number<int64_t>(rest.substr(0, dots));
    if (!number || *number < 0 || numbers.size() == 3) {
      return invalid("problem " + quoted(shape) + ": " + quoted(text) +
                     " is not a size, first..last or first..last..step");
    }
    numbers.push_back(*number);
    if (dots == std::string_view::npos) break;
    rest = rest.substr(dots + 2);
  }
  const int64_t last = numbers.size() > 1 ? numbers[1] : numbers[0];
  const int64_t step = numbers.size() > 2 ? numbers[2] : 0;
  if (last < numbers[0] || (numbers.size() == 3 && step < 1) || (numbers.size() == 2 && numbers[0] == 0 && last > 0)) {
    return invalid("problem " + quoted(shape) + ": range " + quoted(text) +
                   " does not lead from its first to its last size");
  }
  for (int64_t size = numbers[0]; size <= last;) {
    sizes.push_back(size);
    if (sizes.size() > kMaxProblems)
      return invalid("problem " + quoted(shape) + ": range " + quoted(text) + " is too long");
    const int64_t add = step > 0 ? step : std::max<int64_t>(size, 1);
    if (__builtin_add_overflow(size, add, &size)) break;
  }
  return {};
}

// "16/4,16": pairs (16, 4), (16, 16); each side may be a range.
Status append_pairs(std::string_view text, std::string_view shape, bool may_split, std::vector<SizePair>& pairs) {
  for (const std::string& entry : split(text, ',')) {
    const std::vector<std::string> sides = split(entry, '/');
    if (sides.size() > 2 || (sides.size() == 2 && !may_split)) {
      return invalid("problem " + quoted(shape) + ": " + quoted(entry) +
                     " has too many '/'; BxH/GxSQ/SKxD/DV is the form");
    }
    std::vector<int64_t> first, second;
    if (Status s = append_range(sides[0], shape, first); !s.ok()) return s;
    if (sides.size() == 2) {
      if (Status s = append_range(sides[1], shape, second); !s.ok()) return s;
    }
    for (int64_t a : first) {
      if (second.empty()) pairs.emplace_back(a, a);
      for (int64_t b : second) pairs.emplace_back(a, b);
    }
  }
  return {};
}

}  // namespace

bool names_sizes(std::string_view word) {
  return !word.empty() && word[0] >= '0' && word[0] <= '9' && word.find('x') != std::string_view::npos;
}

Status parse_sizes(const std::string& text, Sizes& sizes) {
  const std::vector<std::string> fields = split(text, 'x');
  if (fields.size() != 4) {
    return invalid("problem " + quoted(text) + " has " + std::to_string(fields.size()) +
                   " sizes, must have 4: BxHxSxD, as 8x16x512x64, or BxH/GxSQ/SKxD/DV");
  }
  for (size_t i = 0; i < 4; ++i) {
    if (Status s = append_pairs(fields[i], text, i > 0, sizes[i]); !s.ok()) return s;
  }
  return {};
}

}  // namespace polyhead::testing
