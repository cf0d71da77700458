// Keys and values as caches store them: rounded to a format with scales, and read again, by code that shares nothing with
// the library's.
#pragma once

#include <vector>

#include "testing/array.h"

namespace polyhead::testing {

// A [..., dim] array in `format`, of kInt4x2 [..., dim / 2], and what multiplies it: [..., groups of a row].
struct Stored {
  Array numbers, scales;
};

// Each group of `group` numbers of a row (0: all of it) is divided by its largest magnitude over the format's, and rounded to
// nearest even. A group that holds NaN or inf is NaN.
Stored stored(const Array& x, DType format, int64_t group);

// The numbers that these stand for, [..., dim] in row-major order, as T; without scales, those of the array.
template <class T>
std::vector<T> stored_numbers(const Array& numbers, const Array& scales);

}  // namespace polyhead::testing
