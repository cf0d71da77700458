// The program of a layer's attention for one pair at a time, and the sums that its captures' gradients are.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "polyhead/layer.h"
#include "testing/layer_truth.h"
#include "testing/pair_program.h"
#include "testing/problem.h"

namespace polyhead::testing::truth {

// T's numbers, and beside them the sums of the absolute values of what was added.
template <class T>
struct Sums {
  std::vector<T> value, magnitude;
  explicit Sums(int64_t size = 0) : value(static_cast<size_t>(size)), magnitude(static_cast<size_t>(size)) {}
  void add(int64_t n, T term, T size) {
    value[static_cast<size_t>(n)] += term;
    magnitude[static_cast<size_t>(n)] += size;
  }
  void add(int64_t n, T term) { add(n, term, std::fabs(term)); }
  T operator[](int64_t n) const { return value[static_cast<size_t>(n)]; }
  T size_of(int64_t n) const { return magnitude[static_cast<size_t>(n)]; }
};

// What the program captures, as it reads it.
inline Inputs captures_of(const LayerNumbers& numbers) {
  Inputs in;
  for (const Numbers& capture : numbers.captures) {
    Array& array = in.captures.emplace_back(capture.dtype, capture.dims);
    for (int64_t n = 0; n < capture.size(); ++n) array.set(n, capture.at(n));
  }
  return in;
}

// In arithmetic of T, and of Wide, in which L is computed.
template <class T, class Wide>
class LayerProgram {
 public:
  LayerProgram(const AttentionDesc& desc, const LayerNumbers& numbers)
      : captured_(captures_of(numbers)), program_(desc, captured_), wide_(desc, captured_) {
    for (const Array& a : captured_.captures) sums_.emplace_back(has_gradient(a.dtype) ? a.size() : 0);
  }

  bool has_score() const { return program_.has_score(); }
  bool visible(const reference::PairPlace& at) const { return program_.visible(at); }

  template <class U>
  U score(const reference::PairPlace& at, U S) const {
    if constexpr (std::is_same_v<U, T>) {
      return program_.score(at, S);
    } else {
      return wide_.score(at, S);
    }
  }

  // Behind score<T>() of a pair: from dS, and the size of its terms, of what came out to those of what came in.
  void differentiate(T& dS, T& size_dS) {
    const T slope = program_.differentiate(1);
    for (size_t n = 0; n < sums_.size(); ++n) {
      program_.for_each_gradient(static_cast<int>(n), [&](int64_t at, T gradient) {
        sums_[n].add(at, dS * gradient, size_dS * std::fabs(gradient));
      });
    }
    dS *= slope;
    size_dS *= std::fabs(slope);
  }

  const std::vector<Sums<T>>& gradients() const { return sums_; }  // of each capture; empty: it has none

 private:
  const Inputs captured_;
  const PairProgram<T> program_;
  const PairProgram<Wide> wide_;
  std::vector<Sums<T>> sums_;
};

}  // namespace polyhead::testing::truth
