// The calls of polyhead.KvCache, and polyhead.PageTable.
#pragma once

#include <optional>

#include "arrays.h"
#include "polyhead/cache.h"

namespace polyhead::python {

// What every call is given first: the arrays of the cache, those of scales or None, and what is done to keys.
enum CachePosition : int {
  kPoolKey,
  kPoolValue,
  kPoolKeyScales,
  kPoolValueScales,
  kRotaryDim,
  kInterleaved,
  kHadamard,
  kNumCacheShared,
  // append
  kNewKey = kNumCacheShared,
  kNewValue,
  kSlots,
  kPositions,
  kCos,
  kSin,
  kNewQuery,
  kNumCacheAppend,
  // copy
  kFrom = kNumCacheShared,
  kTo,
  kNumCacheCopy,
  // read
  kReadSlots = kNumCacheShared,
  kNumCacheRead,
};

constexpr ArrayArgument kCosTable = {"cos", "float32", 2, 2, "[positions, rotary_dim / 2]"};
constexpr ArrayArgument kSinTable = {"sin", "float32", 2, 2, "[positions, rotary_dim / 2]"};

// The arrays of a cache, and what the library knows of them: kNumCacheShared arguments, and others behind them.
class CacheArrays {
 public:
  explicit CacheArrays(PyObject* const* arguments);

  const KvCache& cache() const { return *cache_; }

  // An array among the other arguments, or none.
  Tensor view(int position, const ArrayArgument& argument, Held& held) const;

  KvTensors pool;

 private:
  PyObject* const* arguments_;
  Held held_[4];
  std::optional<KvCache> cache_;
};

nb::object cache_check(PyObject* const* arguments);   // kNumCacheShared of them -> None
nb::object cache_append(PyObject* const* arguments);  // -> the turned query, or None
nb::object cache_copy(PyObject* const* arguments);    // -> None
nb::object cache_read(PyObject* const* arguments);    // -> (key, value) in float32, of the kind of the cache's

void add_page_table(nb::module_& module);

}  // namespace polyhead::python
