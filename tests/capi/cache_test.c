// Caches of keys and values through the C interface: tokens in, copied and out again; pages shared; bad input.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { kTokens = 3, kPages = 4, kPageSize = 2, kHeads = 2, kDim = 4 };

static polyhead_tensor tensor_of(const void* data, int32_t dtype, int32_t ndim, int64_t a, int64_t b, int64_t c) {
  const int64_t dims[3] = {a, b, c};
  return polyhead_tensor_contiguous(data, dtype, ndim, dims);
}

static void test_tokens(void) {
  polyhead_kv_cache_desc desc;
  CHECK_OK(polyhead_kv_cache_desc_init(&desc, sizeof desc));
  desc.num_pages = kPages, desc.page_size = kPageSize, desc.num_heads_kv = kHeads;
  desc.head_dim = desc.head_dim_v = kDim, desc.rotary_dim = 2;
  polyhead_kv_cache* cache = NULL;
  CHECK_OK(polyhead_kv_cache_create(&desc, &cache));
  CHECK(polyhead_kv_cache_bytes(cache) == 2 * kPages * kPageSize * kHeads * kDim * sizeof(float));
  char* const allocated = malloc(polyhead_kv_cache_bytes(cache) + 64);
  void* const memory = allocated + (64 - (uintptr_t)allocated % 64);
  polyhead_kv_tensors pool;
  CHECK_OK(polyhead_kv_cache_tensors(cache, memory, &pool));
  CHECK(pool.key.data == memory && pool.value.dims[1] == kPageSize);

  float key[kTokens * kHeads * kDim], value[kTokens * kHeads * kDim], back[kTokens * kHeads * kDim];
  for (int n = 0; n < kTokens * kHeads * kDim; ++n) key[n] = (float)n, value[n] = (float)-n;
  const int64_t slots[kTokens] = {5, -1, 0}, stored[2] = {5, 0}, moved[2] = {0, 7};
  const int32_t positions[kTokens] = {0, 1, 1};
  const float cos[2] = {1, 0}, sin[2] = {0, 1};  // position 1 turns by a right angle
  polyhead_kv_append_args args;
  CHECK_OK(polyhead_kv_append_args_init(&args, sizeof args));
  args.key = tensor_of(key, POLYHEAD_FLOAT32, 3, kTokens, kHeads, kDim);
  args.value = tensor_of(value, POLYHEAD_FLOAT32, 3, kTokens, kHeads, kDim);
  args.slots = tensor_of(slots, POLYHEAD_INT64, 1, kTokens, 0, 0);
  args.positions = tensor_of(positions, POLYHEAD_INT32, 1, kTokens, 0, 0);
  args.cos = tensor_of(cos, POLYHEAD_FLOAT32, 2, 2, 1, 0);
  args.sin = tensor_of(sin, POLYHEAD_FLOAT32, 2, 2, 1, 0);
  CHECK_OK(polyhead_kv_cache_append(cache, &pool, &args));

  const polyhead_tensor read = tensor_of(stored, POLYHEAD_INT64, 1, 2, 0, 0);
  const polyhead_tensor to = tensor_of(back, POLYHEAD_FLOAT32, 3, 2, kHeads, kDim);
  CHECK_OK(polyhead_kv_cache_read(cache, &pool, &read, &to, NULL, NULL));
  CHECK(memcmp(back, key, sizeof(float) * kHeads * kDim) == 0);
  CHECK(back[8] == -key[17] && back[9] == key[16] && back[10] == key[18]);
  const polyhead_tensor moves = tensor_of(moved, POLYHEAD_INT64, 1, 2, 0, 0);
  CHECK_OK(polyhead_kv_cache_copy(cache, &pool, &read, &moves, NULL));
  CHECK_OK(polyhead_kv_cache_read(cache, &pool, &moves, NULL, &to, NULL));
  CHECK(memcmp(back, value, sizeof(float) * kHeads * kDim) == 0 && back[8] == value[16]);

  CHECK_REFUSED(polyhead_kv_cache_append(cache, NULL, &args), POLYHEAD_INVALID_ARGUMENT, "pool is a null pointer");
  args.stream = &args;
  CHECK_REFUSED(polyhead_kv_cache_append(cache, &pool, &args), POLYHEAD_INVALID_ARGUMENT, "the CPU has no streams");
  args.stream = NULL;
  args.key.dtype = 99;
  CHECK_REFUSED(polyhead_kv_cache_append(cache, &pool, &args), POLYHEAD_INVALID_ARGUMENT, "key.dtype is 99");
  CHECK_REFUSED(polyhead_kv_cache_copy(cache, &pool, &read, NULL, NULL), POLYHEAD_INVALID_ARGUMENT, "to is missing");
  CHECK_REFUSED(polyhead_kv_cache_copy(cache, &pool, &read, &moves, &args), POLYHEAD_INVALID_ARGUMENT,
                "the CPU has no streams");
  CHECK_REFUSED(polyhead_kv_cache_read(cache, &pool, &moves, &to, NULL, &args), POLYHEAD_INVALID_ARGUMENT,
                "the CPU has no streams");
  polyhead_kv_cache_destroy(cache);
  free(allocated);
  desc.interleaved = 2;
  CHECK_REFUSED(polyhead_kv_cache_create(&desc, &cache), POLYHEAD_INVALID_ARGUMENT, "interleaved is 2, must be 0 or 1");
  CHECK(cache == NULL && polyhead_kv_cache_bytes(NULL) == 0);
}

// One query of 16 on three keys of int8, and on what these stand for.
static void attend(const polyhead_kv_tensors* pool, int stored, float* out) {
  polyhead_attention_desc desc;
  polyhead_forward_args args;
  CHECK_OK(polyhead_attention_desc_init(&desc, sizeof desc));
  CHECK_OK(polyhead_forward_args_init(&args, sizeof args));
  desc.seqlen_q = 1, desc.seqlen_k = 3, desc.head_dim = desc.head_dim_v = 16;
  desc.has_key_dtype = desc.has_value_dtype = stored;
  desc.key_dtype = desc.value_dtype = stored ? POLYHEAD_INT8 : 0;
  float query[16];
  for (int n = 0; n < 16; ++n) query[n] = (float)(n % 3) - 1;
  const int64_t dims[4] = {1, 1, 1, 16};
  args.query = polyhead_tensor_contiguous(query, POLYHEAD_FLOAT32, 4, dims);
  args.key = pool->key, args.value = pool->value;
  args.key_scales = pool->key_scales, args.value_scales = pool->value_scales;
  args.out = polyhead_tensor_contiguous(out, POLYHEAD_FLOAT32, 4, dims);
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_attention_plan_create(&desc, NULL, &plan));
  args.workspace_bytes = polyhead_attention_plan_workspace_bytes(plan);
  char* const allocated = malloc(args.workspace_bytes + 64);
  args.workspace = allocated + (64 - (uintptr_t)allocated % 64);
  CHECK_OK(polyhead_attention_forward(plan, &args));
  polyhead_attention_plan_destroy(plan);
  free(allocated);
}

static void test_formats(void) {
  polyhead_kv_cache_desc desc;
  CHECK_OK(polyhead_kv_cache_desc_init(&desc, sizeof desc));
  desc.num_pages = 1, desc.page_size = 3, desc.head_dim = desc.head_dim_v = 16;
  desc.key_dtype = desc.value_dtype = POLYHEAD_INT8;
  polyhead_kv_cache* cache = NULL;
  CHECK_OK(polyhead_kv_cache_create(&desc, &cache));
  char* const allocated = malloc(polyhead_kv_cache_bytes(cache) + 64);
  polyhead_kv_tensors pool, meant;
  CHECK_OK(polyhead_kv_cache_tensors(cache, allocated + (64 - (uintptr_t)allocated % 64), &pool));
  CHECK(pool.key_scales.dtype == POLYHEAD_FLOAT32 && pool.key_scales.dims[3] == 1);

  float numbers[48], key[48], value[48], out[16], expected[16];
  for (int n = 0; n < 48; ++n) numbers[n] = (float)(n * 7 % 11) - 5;
  const int64_t slots[3] = {0, 1, 2};
  polyhead_kv_append_args args;
  CHECK_OK(polyhead_kv_append_args_init(&args, sizeof args));
  args.key = args.value = tensor_of(numbers, POLYHEAD_FLOAT32, 3, 3, 1, 16);
  args.slots = tensor_of(slots, POLYHEAD_INT64, 1, 3, 0, 0);
  CHECK_OK(polyhead_kv_cache_append(cache, &pool, &args));
  const polyhead_tensor to_key = tensor_of(key, POLYHEAD_FLOAT32, 3, 3, 1, 16);
  const polyhead_tensor to_value = tensor_of(value, POLYHEAD_FLOAT32, 3, 3, 1, 16);
  CHECK_OK(polyhead_kv_cache_read(cache, &pool, &args.slots, &to_key, &to_value, NULL));
  attend(&pool, 1, out);
  memset(&meant, 0, sizeof meant);
  const int64_t dims[4] = {1, 3, 1, 16};
  meant.key = polyhead_tensor_contiguous(key, POLYHEAD_FLOAT32, 4, dims);
  meant.value = polyhead_tensor_contiguous(value, POLYHEAD_FLOAT32, 4, dims);
  attend(&meant, 0, expected);
  for (int n = 0; n < 16; ++n) {
    CHECK(out[n] - expected[n] < 1e-5f && expected[n] - out[n] < 1e-5f);
    CHECK(key[n] - numbers[n] < 0.03f && numbers[n] - key[n] < 0.03f);
  }
  args.key.dtype = POLYHEAD_INT8;
  CHECK_REFUSED(polyhead_kv_cache_append(cache, &pool, &args), POLYHEAD_INVALID_ARGUMENT, "key is int8");
  polyhead_kv_cache_destroy(cache);
  free(allocated);
}

static void test_pages(void) {
  polyhead_page_table* table = NULL;
  CHECK_OK(polyhead_page_table_create(4, 2, &table));
  int64_t first = -1, fork = -1, from = 0, to = 0;
  CHECK_OK(polyhead_page_table_add(table, &first));
  CHECK_OK(polyhead_page_table_resize(table, first, 3, &from, &to));
  CHECK(from == -1 && to == -1 && polyhead_page_table_num_free(table) == 2);
  CHECK_OK(polyhead_page_table_fork(table, first, &fork));
  CHECK_OK(polyhead_page_table_resize(table, fork, 4, &from, &to));
  size_t count = 0;
  const int64_t* const pages = polyhead_page_table_pages(table, fork, &count);
  CHECK(count == 2 && pages[1] == to && from == polyhead_page_table_pages(table, first, NULL)[1]);
  CHECK(polyhead_page_table_slot(table, fork, 3) == 2 * to + 1);
  CHECK(polyhead_page_table_num_holders(table, pages[0]) == 2 && polyhead_page_table_num_holders(table, to) == 1);
  CHECK(polyhead_page_table_num_holders(table, 4) == 0 && polyhead_page_table_num_holders(table, -1) == 0);
  CHECK(polyhead_page_table_length(table, first) == 3 && polyhead_page_table_length(table, 9) == -1);
  CHECK_REFUSED(polyhead_page_table_resize(table, first, 9, &from, &to), POLYHEAD_INVALID_ARGUMENT, "1 are free");
  CHECK_OK(polyhead_page_table_remove(table, first));
  CHECK(polyhead_page_table_num_free(table) == 2);
  CHECK_REFUSED(polyhead_page_table_add(NULL, &first), POLYHEAD_INVALID_ARGUMENT, "table is a null pointer");
  polyhead_page_table_destroy(table);
  CHECK_REFUSED(polyhead_page_table_create(-1, 2, &table), POLYHEAD_INVALID_ARGUMENT, "num_pages is -1");
}

void test_cache(void) {
  test_tokens();
  test_formats();
  test_pages();
}
