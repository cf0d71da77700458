// The calls of polyhead.KvCache, and polyhead.PageTable.
#pragma once

#include "arrays.h"

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

nb::object cache_check(PyObject* const* arguments);   // kNumCacheShared of them -> None
nb::object cache_append(PyObject* const* arguments);  // -> the turned query, or None
nb::object cache_copy(PyObject* const* arguments);    // -> None
nb::object cache_read(PyObject* const* arguments);    // -> (key, value) in float32, of the kind of the cache's

void add_page_table(nb::module_& module);

}  // namespace polyhead::python
