// Sizes in words: "1,8x16/4x128..1024x64".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "polyhead/status.h"

namespace polyhead::testing {

// Values of both sides of a '/', which are equal where there is none.
using SizePair = std::pair<int64_t, int64_t>;

// batch; num_heads / num_heads_kv; seqlen_q / seqlen_k; head_dim / head_dim_v: all values of each.
using Sizes = std::array<std::vector<SizePair>, 4>;

constexpr size_t kMaxProblems = 100000;  // that one command line may name

// Whether a word of the command line is meant as sizes.
bool names_sizes(std::string_view word);

Status parse_sizes(const std::string& text, Sizes& sizes);

}  // namespace polyhead::testing
