#include "graph/size.h"

#include <algorithm>
#include <iterator>

#include "core/sentence.h"

namespace polyhead::graph {
namespace {

constexpr size_t kMostSymbols = 16;  // of one product; a longer one becomes a symbol of its own

std::string text_of(const Size& size) {
  std::string text = std::to_string(size.factor);
  for (int symbol : size.symbols) text += sentence("*", symbol);
  return text;
}

}  // namespace

Size Symbols::named(const std::string& name) {
  const auto [at, is_new] = known_.try_emplace("name " + name, next_);
  next_ += is_new;
  return {1, {at->second}};
}

Size Symbols::made(const char* how, const Size& a, const Size& b) {
  const auto [at, is_new] = known_.try_emplace(sentence(how, " ", text_of(a), " ", text_of(b)), next_);
  next_ += is_new;
  return {1, {at->second}};
}

Size Symbols::product(const Size& a, const Size& b) {
  Size result;
  if (a.is(0) || b.is(0)) return {0, {}};
  if (__builtin_mul_overflow(a.factor, b.factor, &result.factor)) return fresh();
  if (a.symbols.size() + b.symbols.size() > kMostSymbols) return fresh();
  std::merge(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end(),
             std::back_inserter(result.symbols));
  return result;
}

Size Symbols::product(const Sizes& sizes) {
  Size result;
  for (const Size& size : sizes) result = product(result, size);
  return result;
}

std::optional<Size> Symbols::quotient(const Size& a, const Size& b) const {
  if (b.factor == 0 || a.factor % b.factor != 0) return std::nullopt;
  if (!std::includes(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end())) return std::nullopt;
  Size result = {b.factor == -1 ? 0 - a.factor : a.factor / b.factor, {}};
  std::set_difference(a.symbols.begin(), a.symbols.end(), b.symbols.begin(), b.symbols.end(),
                      std::back_inserter(result.symbols));
  return result;
}

Size Symbols::sum(const Size& a, const Size& b) {
  Size result = {0, a.symbols};
  if (a.is(0)) return b;
  if (b.is(0)) return a;
  if (a.symbols == b.symbols) {
    if (__builtin_add_overflow(a.factor, b.factor, &result.factor)) return fresh();
    return result.factor == 0 ? Size{0, {}} : result;
  }
  for (const Size* left : {rest(a, b), rest(b, a)}) {
    if (left != nullptr) return *left;
  }
  result = text_of(a) < text_of(b) ? made("sum", a, b) : made("sum", b, a);
  sums_.try_emplace(result.symbols.front(), a, b);
  return result;
}

const Size* Symbols::rest(const Size& sum, const Size& less) const {
  const auto found = sum.symbols.size() == 1 && sum.factor == 1 ? sums_.find(sum.symbols.front()) : sums_.end();
  if (found == sums_.end()) return nullptr;
  const auto cancels = [&](const Size& a) { return a.symbols == less.symbols && a.factor == -less.factor; };
  const auto& [a, b] = found->second;
  return cancels(a) ? &b : cancels(b) ? &a : nullptr;
}

Size Symbols::difference(const Size& a, const Size& b) {
  return b.factor == INT64_MIN ? fresh() : sum(a, {-b.factor, b.symbols});
}

std::optional<Size> Symbols::remainder(const Size& sum, const Size& part) const {
  const Size* found = part.factor == INT64_MIN ? nullptr : rest(sum, {-part.factor, part.symbols});
  return found == nullptr || found->factor < 0 ? std::nullopt : std::optional(*found);
}

Size Symbols::broadcast(const Size& a, const Size& b) {
  if (a == b || b.is(1)) return a;
  if (a.is(1)) return b;
  if (a.is_constant()) return a;  // the other is that, or 1
  if (b.is_constant()) return b;
  return text_of(a) < text_of(b) ? made("broadcast", a, b) : made("broadcast", b, a);
}

Size Symbols::floor_quotient(const Size& a, const Size& b) {
  if (const auto exact = quotient(a, b)) return *exact;
  if (a.is_constant() && b.is_constant() && a.factor >= 0 && b.factor > 0) return {a.factor / b.factor, {}};
  return made("quotient", a, b);
}

}  // namespace polyhead::graph
