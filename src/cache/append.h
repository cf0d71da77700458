// Tokens on their way into a cache, and their queries: turned by their positions, rounded, stored. Allocates nothing: for
// KvCache, and for layers whose keys and values live in one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cache/heads.h"
#include "contract/operands.h"
#include "core/threads.h"
#include "polyhead/cache.h"

namespace polyhead {

// The tensors of a pool; one without dims the desc does not have.
struct PoolOperand {
  const char* name = "";
  Tensor KvTensors::*tensor = nullptr;
  OperandShape shape;
};
std::array<PoolOperand, 4> pool_operands(const KvCacheDesc& desc);
inline constexpr const char* kNoScales = "the cache's dtype has no scales";

// What the numbers of a call must be: slots, or positions.
struct NumberRange {
  int64_t least, most;
  const char* of_what;
};
NumberRange slot_range(const KvCacheDesc& desc);  // -1 too
NumberRange position_range(const Tensor& cos);

// Reads the first `count` numbers of t [n], once, and says which is out of range: name[i], or name[row, i] if row >= 0.
Status read_numbers(const char* name, int64_t row, const Tensor& t, int64_t count, const NumberRange& range,
                    int64_t* out);

// Whether no slot but -1 comes twice. Sorts them.
Status check_distinct(const char* name, int64_t* slots, int64_t count);

struct NewTokens {
  int64_t count = 0;
  const int64_t* slots = nullptr;      // [count]; -1: not stored; null: none is
  const int64_t* positions = nullptr;  // [count], rows of cos and sin; -1: not rotated; null: none is
  const Tensor* cos = nullptr;         // [positions, rotary_dim / 2]
  const Tensor* sin = nullptr;
  const Heads* key = nullptr;    // of each token, if slots are given
  const Heads* value = nullptr;  // likewise
  const Heads* query = nullptr;  // null: none
  const Heads* query_out = nullptr;
};

// Elements of the longest head: append() works in as many floats for each thread.
inline int64_t longest_head(const KvCacheDesc& desc) { return std::max(desc.head_dim, desc.head_dim_v); }

// All has been checked. `memory`: run.num_threads * longest_head(desc).
void append(const KvCacheDesc& desc, const KvTensors& pool, const NewTokens& tokens, float* memory, const Run& run);

// The pool, where append() writes.
inline Heads keys_of(const KvCacheDesc& desc, const KvTensors& pool) {
  return {pool.key, desc.page_size, pool.key_scales.given() ? &pool.key_scales : nullptr};
}
inline Heads values_of(const KvCacheDesc& desc, const KvTensors& pool) {
  return {pool.value, desc.page_size, pool.value_scales.given() ? &pool.value_scales : nullptr};
}

}  // namespace polyhead
