// What dropout asks for: a seed, and counters that fit.
#pragma once

#include <cstdint>
#include <optional>

#include "core/sentence.h"
#include "polyhead/dropout.h"
#include "polyhead/status.h"

namespace polyhead {

// Heads that a batch element counts, of `num_heads` in the call.
constexpr int64_t counted_heads(const DropoutOrigin& origin, int64_t num_heads) {
  return origin.num_heads == 0 ? num_heads : origin.num_heads;
}

// No size is negative.
Status check_dropout_counters(const DropoutOrigin& origin, int64_t batch, int64_t num_heads, int64_t seqlen_q,
                              int64_t seqlen_k);

// `name`: "dropout", of which the sentence names _seed and _p.
inline Status check_dropout_seed(const char* name, double p, const std::optional<uint64_t>& seed) {
  if (p <= 0 || seed) return {};
  return invalid(sentence(name, "_seed is not given, must be where ", name, "_p is ", p));
}

}  // namespace polyhead
