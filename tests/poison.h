// NaN in places that nobody may look at, and in places that somebody must see.
#pragma once

#include <string>
#include <vector>

#include "harness.h"

namespace polyhead::testing {

// Which places (b, h, i, j) of a problem are visible; i and j count within the row's own sequence.
class Visibility {
 public:
  Visibility(const AttentionDesc& desc, const Inputs& in);
  bool at(int64_t b, int64_t h, int64_t i, int64_t j) const;
  bool any_key(int64_t b, int64_t h, int64_t i) const;  // that query i sees

  // Calls visit(b, h, i, j) for every visible place.
  template <class Visit>
  void for_each(Visit visit) const {
    size_t n = 0;
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t i = 0; i < queries_; ++i) {
          for (int64_t j = 0; j < keys_; ++j) {
            if (seen_[n++]) visit(b, h, i, j);
          }
        }
      }
    }
  }

 private:
  int64_t batch_, heads_, queries_, keys_;
  std::vector<uint8_t> seen_;
};

// What some visible pair reads: rows of query (and of out), rows of key and value, elements of the bias, heads [B, H].
struct VisibleParts {
  std::vector<uint8_t> query, key, bias, heads;
  VisibleParts(const AttentionDesc& desc, const Inputs& in, const Visibility& seen);
};

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
