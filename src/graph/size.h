// Sizes of dims, of which some are known only when the model runs: a number times symbols.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace polyhead::graph {

// factor * symbols[0] * symbols[1] * ...; a symbol is a size >= 0.
struct Size {
  int64_t factor = 1;
  std::vector<int> symbols = {};  // sorted

  bool is_constant() const { return symbols.empty(); }
  bool is(int64_t number) const { return symbols.empty() && factor == number; }
  bool operator==(const Size&) const = default;
};

using Sizes = std::vector<Size>;

// All symbols of a model. Sizes that are made in the same way from the same are equal.
class Symbols {
 public:
  Size fresh() { return {1, {next_++}}; }
  Size named(const std::string& name);
  Size product(const Size& a, const Size& b);
  Size product(const Sizes& sizes);
  std::optional<Size> quotient(const Size& a, const Size& b) const;  // if b divides a, whatever the symbols are
  Size sum(const Size& a, const Size& b);
  Size difference(const Size& a, const Size& b);
  // b, not less than nothing, of `sum` that was made of `part` and b.
  std::optional<Size> remainder(const Size& sum, const Size& part) const;
  Size broadcast(const Size& a, const Size& b);
  Size floor_quotient(const Size& a, const Size& b);

 private:
  Size made(const char* how, const Size& a, const Size& b);
  // b of a + b - a, where `a` is less than nothing and `sum` that sum.
  const Size* rest(const Size& sum, const Size& less) const;

  int next_ = 0;
  std::unordered_map<std::string, int> known_;
  std::unordered_map<int, std::pair<Size, Size>> sums_;  // what such a symbol is the sum of
};

}  // namespace polyhead::graph
