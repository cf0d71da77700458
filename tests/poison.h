// NaN in places that nobody may look at, and in places that somebody must see.
#pragma once

#include <string>
#include <vector>

#include "testing/call.h"

namespace polyhead::testing {

// The same inputs with NaN, inf and huge numbers in every key, value, query and bias that no result may depend on.
Inputs poison_hidden(const AttentionDesc& desc, const Inputs& in, uint64_t seed);

// One NaN (or +inf, in a bias) in a place that somebody sees.
enum class Poke { kQuery, kKey, kValue, kBias };
struct Poked {
  bool done = false;  // false: the problem has no such place
  Inputs inputs;
  std::string where;
};
Poked poke_visible(const AttentionDesc& desc, const Inputs& in, Poke poke, uint64_t seed);

// "" if `got`, of the poked inputs, is NaN in exactly the places that see a NaN and has the bits of `clean` elsewhere.
std::string poke_mismatch(const AttentionDesc& desc, const Inputs& in, const Outputs& clean, const Outputs& got);

}  // namespace polyhead::testing
