// Rotary positions (arXiv:2104.09864): the first numbers of a head turn, two by two, by the angles of its position.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"

namespace polyhead {

// Cosines or sines of one position, [pairs].
template <class E>
struct Angles {
  const E* first = nullptr;
  int64_t stride = 1;

  E operator[](int64_t p) const { return first[p * stride]; }
};

// y [2 * pairs], which may be x: pair p is 2 p and 2 p + 1 if interleaved, else p and p + pairs. Computed in float (double if
// the elements are), rounded once.
template <class E, class A>
void rotate(int64_t pairs, bool interleaved, Angles<A> cos, Angles<A> sin, const E* x, E* y) {
  using T = std::conditional_t<std::is_same_v<E, double>, double, float>;
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int64_t p = 0; p < pairs; ++p) {
    const T c = widen<T>(cos[p]), s = widen<T>(sin[p]);
    const T first = widen<T>(x[p * step]), second = widen<T>(x[p * step + apart]);
    y[p * step] = narrow<E>(first * c - second * s);
    y[p * step + apart] = narrow<E>(first * s + second * c);
  }
}

}  // namespace polyhead
