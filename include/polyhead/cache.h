// A cache of keys and values, in pages: written token by token or many at once, with rotary positions on the way in. The
// caller owns the memory.
//   pool      key [num_pages, page_size, G, D], value [num_pages, page_size, G, Dv]   G key/value heads
//   slot s    row s % page_size of page s / page_size
// Where a page is as long as a sequence's capacity, page b is sequence b of a batch, as ForwardArgs take it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "polyhead/api.h"
#include "polyhead/executor.h"
#include "polyhead/status.h"
#include "polyhead/tensor.h"

namespace polyhead {

/// What a cache holds. Plain data, checked once, by kv_cache().
struct KvCacheDesc {
  int64_t num_pages = 0;
  int64_t page_size = 0;  ///< tokens of a page, 1 or more
  int64_t num_heads_kv = 1;
  int64_t head_dim = 0;    ///< of key
  int64_t head_dim_v = 0;  ///< of value

  /// What keys and what values are stored in: float32, bfloat16 or float16, or int8, float8_e4m3, float8_e5m2 or int4x2 with
  /// scales: each group of a head's numbers is divided by its largest magnitude over the dtype's (127, 448, 57344, 7) and
  /// rounded to nearest even, whatever other tokens are; where one is NaN or inf, its scale is NaN. Scales are float32, of
  /// int4x2 float16: it takes magnitudes up to 458752.
  DType key_dtype = DType::kFloat32;
  DType value_dtype = DType::kFloat32;
  int64_t key_group = 0;  ///< elements of a head that share a scale: 0 (all) or a multiple of 16 that divides head_dim
  int64_t value_group = 0;  ///< likewise of head_dim_v

  /// Rotary positions (Su et al. 2021, arXiv:2104.09864): the first rotary_dim elements of each head of key and query turn,
  /// pair p by the angle whose cosine and sine the caller's tables have. Even, at most head_dim; 0: nothing turns.
  int64_t rotary_dim = 0;
  bool interleaved = false;  ///< which elements are pair p: 2 p and 2 p + 1, or (false) p and p + rotary_dim / 2

  /// After that, key and query are multiplied by the orthogonal Hadamard matrix (Sylvester's, divided by sqrt(head_dim),
  /// a power of 2): scores stay what they are, and what is large in few elements is spread over all.
  bool hadamard = false;

  bool operator==(const KvCacheDesc&) const = default;
};

/// A cache's pool, any strides.
struct KvTensors {
  Tensor key = {};           ///< [num_pages, page_size, G, D], in key_dtype; of int4x2 [..., D / 2]
  Tensor value = {};         ///< [num_pages, page_size, G, Dv], in value_dtype; likewise
  Tensor key_scales = {};    ///< [num_pages, page_size, G, 1 or D / key_group], if key_dtype has scales
  Tensor value_scales = {};  ///< [num_pages, page_size, G, 1 or Dv / value_group], if value_dtype has scales
};

/// New tokens. Every input may be float32, bfloat16 or float16, whatever the cache's dtypes are, with any strides.
struct KvAppendArgs {
  Tensor key = {};               ///< [tokens, G, D]
  Tensor value = {};             ///< [tokens, G, Dv]
  Tensor slots = {};             ///< [tokens], int32 or int64: where each goes; -1: nowhere. No slot twice
  Tensor positions = {};         ///< [tokens], int32 or int64: rows of cos and sin. Given if desc.rotary_dim > 0
  Tensor cos = {};               ///< [positions, rotary_dim / 2], float32. Given likewise
  Tensor sin = {};               ///< the same of the sines
  Tensor query = {};             ///< optional: [tokens, H, D], turned as the keys are
  Tensor query_out = {};         ///< [tokens, H, D], given if query is: any float dtype; may be query itself
  Executor* executor = nullptr;  ///< null: default_executor()
  void* stream = nullptr;        ///< where the pool lies on a GPU: the queue that the work is put on
};

/// A checked KvCacheDesc. Immutable; calls on slots that differ may run at once, and beside attention on other slots.
class POLYHEAD_API KvCache {
 public:
  const KvCacheDesc& desc() const { return desc_; }

  size_t bytes() const { return bytes_; }  ///< of a buffer for tensors()
  KvTensors tensors(void* buffer) const;   ///< contiguous, in a buffer aligned to 64 bytes

  /// Key and query are turned in float32, then multiplied by the Hadamard matrix, then rounded once. Tokens one by one give
  /// the bits of all at once. On an error nothing has been written.
  /// A pool on a GPU (pool.key.device) takes tokens, slots and tables there, on the calling thread's current device; head dims
  /// up to 1024. The work is put on args.stream, and the host looks at nothing there: a slot outside of the cache counts as -1,
  /// a position outside of the tables as the nearest, and a slot that comes twice holds some numbers of either token.
  Status append(const KvTensors& pool, const KvAppendArgs& args) const;

  /// Copies whole tokens from from[i] to to[i], both [n] of int32 or int64: all are read before one is written, so that
  /// they may overlap. No slot twice in `to`. For accepting a branch of a tree, and for copy on write.
  /// A pool on a GPU takes both there, in one call at most 50688 tokens, on `stream`, and the host looks at nothing: what is
  /// no slot of the cache, or goes to none, is not copied, and a slot that comes twice in `to` holds some of either token.
  Status copy(const KvTensors& pool, const Tensor& from, const Tensor& to, void* stream = nullptr) const;

  /// The tokens at `slots` [n], as they are stored (turned), to key [n, G, D] and value [n, G, Dv], of any float dtype; one
  /// of both may be left out. A pool on a GPU takes all of it there, on `stream`: the tokens of what is no slot are 0.
  Status read(const KvTensors& pool, const Tensor& slots, const Tensor& key, const Tensor& value,
              void* stream = nullptr) const;

 private:
  friend POLYHEAD_API Result<KvCache> kv_cache(const KvCacheDesc&);
  explicit KvCache(const KvCacheDesc& desc) : desc_(desc) {}
  KvCacheDesc desc_;
  size_t bytes_ = 0, at_[4] = {};  // where the buffer holds each of the KvTensors
};

/// Checks `desc`: the error names the field.
POLYHEAD_API Result<KvCache> kv_cache(const KvCacheDesc& desc);

/// Which page holds what: pages are handed out, shared by sequences that have a beginning in common, and taken back when
/// nobody holds them. Not thread-safe. It touches no cache: what must be copied it tells.
class POLYHEAD_API PageTable {
 public:
  ~PageTable();
  PageTable(PageTable&&) noexcept;
  PageTable& operator=(PageTable&&) noexcept;

  struct Copy {
    int64_t from = -1, to = -1;  ///< pages; -1: nothing is to be copied
  };

  int64_t num_free() const;                ///< pages that nobody holds
  Result<int64_t> add();                   ///< a new sequence, of length 0: its number
  Result<int64_t> fork(int64_t sequence);  ///< a new sequence with the same tokens, in the same pages
  Status remove(int64_t sequence);         ///< gives up a sequence and the pages that it alone held

  /// Makes `length` tokens of a sequence: takes pages, or gives up those behind. Where its last page is shared and tokens
  /// are to be written there, the sequence gets a page of its own in its place, and `*copy` tells which page holds what is
  /// to be copied (KvCache::copy). Out of pages: an error, and nothing has changed.
  Status resize(int64_t sequence, int64_t length, Copy* copy);

  int64_t length(int64_t sequence) const;                  ///< -1: there is no such sequence
  std::span<const int64_t> pages(int64_t sequence) const;  ///< in order
  int64_t slot(int64_t sequence, int64_t token) const;     ///< where a token lies; -1: nowhere
  int64_t num_holders(int64_t page) const;                 ///< how many sequences have it; of a page that is none 0

 private:
  friend POLYHEAD_API Result<PageTable> page_table(int64_t num_pages, int64_t page_size);
  struct State;
  explicit PageTable(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Of a cache of so many pages, none of which anybody holds.
POLYHEAD_API Result<PageTable> page_table(int64_t num_pages, int64_t page_size);

}  // namespace polyhead
