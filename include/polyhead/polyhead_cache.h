// polyhead for C: caches of keys and values in pages. Part of polyhead.h, which includes it; the rules there hold here.
//
//   pool      key [num_pages, page_size, G, D], value [num_pages, page_size, G, Dv]   G key/value heads
//   slot s    row s % page_size of page s / page_size
//
// The full definition stands in polyhead/cache.h, under the same names.
#pragma once

#include "polyhead/polyhead_core.h"

#ifdef __cplusplus
extern "C" {
#endif

/// What a cache holds.
typedef struct polyhead_kv_cache_desc {
  size_t struct_size;  ///< sizeof(polyhead_kv_cache_desc), by polyhead_kv_cache_desc_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  int64_t num_pages;     ///< default 0
  int64_t page_size;     ///< tokens of a page, 1 or more; default 0
  int64_t num_heads_kv;  ///< default 1
  int64_t head_dim;      ///< of key; default 0
  int64_t head_dim_v;    ///< of value; default 0
  /// polyhead_dtype that keys are stored in: float32 (default), bfloat16 or float16, or int8, float8_e4m3, float8_e5m2 or
  /// int4x2 with scales: each group of a head's numbers is divided by its largest magnitude over the dtype's (127, 448, 57344,
  /// 7) and rounded to nearest even, whatever other tokens are; where one is NaN or inf, its scale is NaN. Scales are float32,
  /// of int4x2 float16: it takes magnitudes up to 458752.
  int32_t key_dtype;
  int32_t value_dtype;  ///< what values are stored in, likewise
  int64_t rotary_dim;   ///< the first elements of each head of key and query, which turn; even; 0 (default): none
  int32_t interleaved;  ///< boolean: pair p is 2 p and 2 p + 1; 0 (default): p and p + rotary_dim / 2
  int32_t hadamard;     ///< boolean: key and query times the orthogonal Hadamard matrix; head_dim a power of 2
  int64_t
      key_group;  ///< numbers of a head that share a scale: 0 (default): all; or a multiple of 16 that divides head_dim
  int64_t value_group;  ///< likewise of head_dim_v
} polyhead_kv_cache_desc;

/// Sets the defaults. `struct_size` is sizeof *desc.
POLYHEAD_API polyhead_status polyhead_kv_cache_desc_init(polyhead_kv_cache_desc* desc, size_t struct_size);

/// A cache's pool, any strides. Its layout is frozen.
typedef struct polyhead_kv_tensors {
  polyhead_tensor key;           ///< [num_pages, page_size, G, D], in key_dtype; of int4x2 [..., D / 2]
  polyhead_tensor value;         ///< [num_pages, page_size, G, Dv], in value_dtype; likewise
  polyhead_tensor key_scales;    ///< [num_pages, page_size, G, 1 or D / key_group], if key_dtype has scales; else all 0
  polyhead_tensor value_scales;  ///< [num_pages, page_size, G, 1 or Dv / value_group], likewise
} polyhead_kv_tensors;

/// New tokens: float32, bfloat16 or float16, whatever the cache's dtypes are, any strides. All default to "not given".
typedef struct polyhead_kv_append_args {
  size_t struct_size;  ///< sizeof(polyhead_kv_append_args), by polyhead_kv_append_args_init
  uint64_t flags;      ///< 0: none is defined yet, and unknown ones are refused

  polyhead_tensor key;          ///< [tokens, G, D]
  polyhead_tensor value;        ///< [tokens, G, Dv]
  polyhead_tensor slots;        ///< [tokens], int32 or int64: where each goes; -1: nowhere. No slot twice
  polyhead_tensor positions;    ///< [tokens], int32 or int64: rows of cos and sin; if desc.rotary_dim > 0
  polyhead_tensor cos;          ///< [positions, rotary_dim / 2], float32; likewise
  polyhead_tensor sin;          ///< the same of the sines
  polyhead_tensor query;        ///< optional: [tokens, H, D], turned as the keys are
  polyhead_tensor query_out;    ///< [tokens, H, D], if query is given: any float dtype; may be query itself
  polyhead_executor* executor;  ///< NULL (default): the library's own threads

  void* stream;  ///< where the pool lies on a GPU: the queue that the work is put on; NULL (default): the default one
} polyhead_kv_append_args;

/// Makes every tensor "not given". `struct_size` is sizeof *args.
POLYHEAD_API polyhead_status polyhead_kv_append_args_init(polyhead_kv_append_args* args, size_t struct_size);

/// A checked desc. Immutable; it owns no memory of the cache's. Calls on slots that differ may run at once.
typedef struct polyhead_kv_cache polyhead_kv_cache;

/// POLYHEAD_INVALID_ARGUMENT names the field and the numbers that disagree.
POLYHEAD_API polyhead_status polyhead_kv_cache_create(const polyhead_kv_cache_desc* desc, polyhead_kv_cache** cache);
POLYHEAD_API void polyhead_kv_cache_destroy(polyhead_kv_cache* cache);  ///< NULL is fine

POLYHEAD_API size_t polyhead_kv_cache_bytes(const polyhead_kv_cache* cache);  ///< of a buffer; 0 for NULL

/// Contiguous tensors in a buffer of polyhead_kv_cache_bytes(), aligned to 64 bytes.
POLYHEAD_API polyhead_status polyhead_kv_cache_tensors(const polyhead_kv_cache* cache, void* buffer,
                                                       polyhead_kv_tensors* tensors);

/// Key and query are turned in float32, then multiplied by the Hadamard matrix, then rounded once. On an error nothing has
/// been written. Of a pool on a GPU (its tensors' device) all else lies there, and nobody checks slots and positions: see
/// polyhead/cache.h.
POLYHEAD_API polyhead_status polyhead_kv_cache_append(const polyhead_kv_cache* cache, const polyhead_kv_tensors* pool,
                                                      const polyhead_kv_append_args* args);

/// Whole tokens from from[i] to to[i], both [n] of int32 or int64: all are read before one is written. No slot twice in `to`.
/// Of a pool on a GPU both lie there, and nobody checks them: see polyhead/cache.h. `stream`: NULL, or of that GPU the queue
/// that the work is put on.
POLYHEAD_API polyhead_status polyhead_kv_cache_copy(const polyhead_kv_cache* cache, const polyhead_kv_tensors* pool,
                                                    const polyhead_tensor* from, const polyhead_tensor* to,
                                                    void* stream);

/// The tokens at `slots` [n], as they are stored, to key [n, G, D] and value [n, G, Dv], of any float dtype; one of
/// both may be NULL. On a GPU as polyhead_kv_cache_copy().
POLYHEAD_API polyhead_status polyhead_kv_cache_read(const polyhead_kv_cache* cache, const polyhead_kv_tensors* pool,
                                                    const polyhead_tensor* slots, const polyhead_tensor* key,
                                                    const polyhead_tensor* value, void* stream);

/// Which page holds what: pages are handed out, shared by sequences with a beginning in common, and taken back when nobody
/// holds them. Not thread-safe. It touches no cache.
typedef struct polyhead_page_table polyhead_page_table;

POLYHEAD_API polyhead_status polyhead_page_table_create(int64_t num_pages, int64_t page_size,
                                                        polyhead_page_table** table);
POLYHEAD_API void polyhead_page_table_destroy(polyhead_page_table* table);  ///< NULL is fine

POLYHEAD_API int64_t polyhead_page_table_num_free(const polyhead_page_table* table);  ///< -1 for NULL

/// A new sequence of length 0, or (fork) with the tokens of `parent`, in the same pages.
POLYHEAD_API polyhead_status polyhead_page_table_add(polyhead_page_table* table, int64_t* sequence);
POLYHEAD_API polyhead_status polyhead_page_table_fork(polyhead_page_table* table, int64_t parent, int64_t* sequence);
/// Gives up a sequence and the pages that it alone held.
POLYHEAD_API polyhead_status polyhead_page_table_remove(polyhead_page_table* table, int64_t sequence);

/// Makes `length` tokens of a sequence: takes pages, or gives up those behind. Where it gets a page of its own in the place of
/// a shared one, *copy_from and *copy_to are the pages to copy between; else -1. Out of pages: an error, and nothing has
/// changed.
POLYHEAD_API polyhead_status polyhead_page_table_resize(polyhead_page_table* table, int64_t sequence, int64_t length,
                                                        int64_t* copy_from, int64_t* copy_to);

POLYHEAD_API int64_t polyhead_page_table_length(const polyhead_page_table* table, int64_t sequence);  ///< -1: none such
/// A sequence's pages, in order, until the next call that changes the table; NULL and 0 where there are none.
POLYHEAD_API const int64_t* polyhead_page_table_pages(const polyhead_page_table* table, int64_t sequence,
                                                      size_t* num_pages);
/// Where a token lies; -1: nowhere.
POLYHEAD_API int64_t polyhead_page_table_slot(const polyhead_page_table* table, int64_t sequence, int64_t token);
/// How many sequences have a page; 0: nobody, or it is none.
POLYHEAD_API int64_t polyhead_page_table_num_holders(const polyhead_page_table* table, int64_t page);

#ifdef __cplusplus
}
#endif
