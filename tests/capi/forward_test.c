// Forward against naive loops written here, from the contract: no code of the library decides what is right.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static const char* case_name;  // for what a failing check prints

static double at(const polyhead_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t index[4] = {a, b, c, d};
  int64_t offset = 0;
  for (int i = 0; i < t->ndim; ++i) offset += (t->dims[i] == 1 ? 0 : index[i]) * t->strides[i];
  switch (t->dtype) {
    case POLYHEAD_FLOAT32: return ((const float*)t->data)[offset];
    case POLYHEAD_FLOAT64: return ((const double*)t->data)[offset];
    case POLYHEAD_BOOL: return ((const uint8_t*)t->data)[offset];
    case POLYHEAD_INT32: return ((const int32_t*)t->data)[offset];
    case POLYHEAD_INT64: return (double)((const int64_t*)t->data)[offset];
    default: abort();
  }
}

// Element of query, key, value or out: packed operands have no batch dim.
static double row_at(const problem* p, const polyhead_tensor* t, int64_t b, int64_t row, int64_t head, int64_t d) {
  return p->desc.packed ? at(t, row, head, d, 0) : at(t, b, row, head, d);
}

static void expect_near(double got, double expected, const char* what, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (got == expected || fabs(got - expected) <= 2e-5) return;  // also equal infinities
  char where[160];
  snprintf(where, sizeof where, "%s at (%d, %d, %d, %d): got %.9g, expected %.9g", what, (int)b, (int)h, (int)i, (int)j,
           got, expected);
  check_failed(__FILE__, __LINE__, case_name, where);
}

typedef struct sequence {
  int64_t first_q, first_k, len_q, len_k, offset;
} sequence;

static sequence sequence_of(const problem* p, int64_t b) {
  const polyhead_attention_desc* desc = &p->desc;
  const polyhead_forward_args* args = &p->args;
  sequence s = {0, 0, desc->seqlen_q, desc->seqlen_k, 0};
  if (desc->packed) {
    s.first_q = (int64_t)at(&args->cu_seqlens_q, b, 0, 0, 0);
    s.first_k = (int64_t)at(&args->cu_seqlens_k, b, 0, 0, 0);
    s.len_q = (int64_t)at(&args->cu_seqlens_q, b + 1, 0, 0, 0) - s.first_q;
    s.len_k = (int64_t)at(&args->cu_seqlens_k, b + 1, 0, 0, 0) - s.first_k;
  }
  if (desc->has_seqlens_q) s.len_q = (int64_t)at(&args->seqlens_q, b, 0, 0, 0);
  if (desc->has_seqlens_k) s.len_k = (int64_t)at(&args->seqlens_k, b, 0, 0, 0);
  if (desc->align == POLYHEAD_ALIGN_BOTTOM_RIGHT) s.offset = s.len_k - s.len_q;
  if (desc->has_query_offset) s.offset = desc->query_offset;
  if (desc->has_query_offsets) s.offset = (int64_t)at(&args->query_offsets, b, 0, 0, 0);
  return s;
}

// -INFINITY where hidden.
static double score(const problem* p, const sequence* s, int64_t b, int64_t h, int64_t i, int64_t j) {
  const polyhead_attention_desc* desc = &p->desc;
  const polyhead_forward_args* args = &p->args;
  const int64_t distance = i + s->offset - j, g = h / (desc->num_heads / desc->num_heads_kv);
  if (i >= s->len_q || j >= s->len_k) return -INFINITY;
  if (desc->causal && distance < 0) return -INFINITY;
  if (desc->window_left >= 0 && distance > desc->window_left && j >= desc->sink_keys) return -INFINITY;
  if (desc->window_right >= 0 && -distance > desc->window_right) return -INFINITY;
  if (desc->has_windows && (double)j < at(&args->window_lo, i, 0, 0, 0) && j >= desc->sink_keys) return -INFINITY;
  if (desc->has_windows && (double)j >= at(&args->window_hi, i, 0, 0, 0)) return -INFINITY;
  const int64_t column = desc->mask_at_end ? j - (s->len_k - desc->attn_mask.dims[3]) : j;
  if (desc->attn_mask.given && column >= 0 && at(&args->attn_mask, b, h, i, column) == 0) return -INFINITY;
  double dot = 0;
  for (int64_t d = 0; d < desc->head_dim; ++d) {
    dot += row_at(p, &args->query, b, s->first_q + i, h, d) * row_at(p, &args->key, b, s->first_k + j, g, d);
  }
  dot *= desc->has_scale ? desc->scale : 1 / sqrt((double)desc->head_dim);
  if (desc->softcap > 0) dot = desc->softcap * tanh(dot / desc->softcap);
  if (desc->attn_bias.given) dot += at(&args->attn_bias, b, h, i, j);
  if (desc->alibi_slopes_ndim == 1) dot -= at(&args->alibi_slopes, h, 0, 0, 0) * (double)llabs(distance);
  if (desc->alibi_slopes_ndim == 2) dot -= at(&args->alibi_slopes, b, h, 0, 0) * (double)llabs(distance);
  return dot;
}

// Philox4x32-10 and the rule of polyhead/dropout.h.
static int kept_by_dropout(const problem* p, int64_t b, int64_t h, int64_t i, int64_t j) {
  uint32_t key[2] = {(uint32_t)p->args.dropout_seed, (uint32_t)(p->args.dropout_seed >> 32)};
  uint32_t c[4] = {(uint32_t)(b * p->desc.num_heads + h), (uint32_t)i, (uint32_t)(j / 8), p->args.dropout_offset};
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = (uint64_t)0xD2511F53 * c[0], product1 = (uint64_t)0xCD9E8D57 * c[2];
    c[0] = (uint32_t)(product1 >> 32) ^ c[1] ^ key[0], c[1] = (uint32_t)product1;
    c[2] = (uint32_t)(product0 >> 32) ^ c[3] ^ key[1], c[3] = (uint32_t)product0;
    key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
  }
  const uint32_t word = c[j % 8 / 2], bits = j % 2 == 0 ? word & 0xffff : word >> 16;
  return bits >= (uint32_t)floor(p->desc.dropout_p * 65536 + 0.5);
}

// Checks every output of row (b, h, i); adds the row's share to column_sums and mean_weights, where asked for.
static void expect_row(const problem* p, int64_t b, int64_t h, int64_t i, double* column_sums, double* mean_weights) {
  const polyhead_attention_desc* desc = &p->desc;
  const sequence s = sequence_of(p, b);
  const int64_t g = h / (desc->num_heads / desc->num_heads_kv), keys = desc->packed ? s.len_k : desc->seqlen_k;
  double* weights = calloc((size_t)keys + 1, sizeof *weights);
  if (weights == NULL) abort();
  const int softmax = desc->normalizer == POLYHEAD_NORMALIZER_SOFTMAX;
  const double sink = desc->has_sink_logits && i < s.len_q ? at(&p->args.sink_logits, h, 0, 0, 0) : -INFINITY;
  double max = sink, sum = 0;
  for (int64_t j = 0; j < keys; ++j) max = fmax(max, score(p, &s, b, h, i, j));
  for (int64_t j = 0; j < keys; ++j) {
    const double S = score(p, &s, b, h, i, j);
    weights[j] = S > -INFINITY ? (softmax ? exp(S - max) : S) : 0;
    sum += weights[j];
  }
  if (sink > -INFINITY) sum += exp(sink - max);
  for (int64_t j = 0; j < keys; ++j) {
    if (softmax && sum > 0) weights[j] /= sum;
    if (column_sums != NULL) column_sums[(b * desc->num_heads + h) * keys + j] += weights[j];
    if (desc->dropout_p > 0) weights[j] *= kept_by_dropout(p, b, h, i, j) / (1 - desc->dropout_p);
    if (mean_weights != NULL) mean_weights[(b * desc->seqlen_q + i) * keys + j] += weights[j] / (double)desc->num_heads;
    if (desc->return_weights == POLYHEAD_WEIGHTS_PER_HEAD) {
      expect_near(at(&p->args.attn_weights, b, h, i, j), weights[j], "attn_weights", b, h, i, j);
    }
  }
  if (softmax) {
    const double L = desc->packed ? at(&p->args.logsumexp, h, s.first_q + i, 0, 0) : at(&p->args.logsumexp, b, h, i, 0);
    expect_near(L, sum > 0 ? max + log(sum) : -INFINITY, "logsumexp", b, h, i, 0);
  }
  for (int64_t d = 0; d < desc->head_dim_v; ++d) {
    double out = 0;
    for (int64_t j = 0; j < s.len_k; ++j) out += weights[j] * row_at(p, &p->args.value, b, s.first_k + j, g, d);
    expect_near(row_at(p, &p->args.out, b, s.first_q + i, h, d), out, "out", b, h, i, d);
  }
  free(weights);
}

static void expect_outputs(const problem* p) {
  const polyhead_attention_desc* desc = &p->desc;
  const size_t columns = (size_t)(desc->batch * desc->num_heads * desc->seqlen_k);
  const size_t cells = (size_t)(desc->batch * desc->seqlen_q * desc->seqlen_k);
  double* column_sums = desc->return_column_sums ? calloc(columns, sizeof(double)) : NULL;
  double* mean = desc->return_weights == POLYHEAD_WEIGHTS_MEAN ? calloc(cells, sizeof(double)) : NULL;
  for (int64_t b = 0; b < desc->batch; ++b) {
    const int64_t rows = desc->packed ? sequence_of(p, b).len_q : desc->seqlen_q;
    for (int64_t h = 0; h < desc->num_heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) expect_row(p, b, h, i, column_sums, mean);
    }
  }
  for (size_t n = 0; column_sums != NULL && n < columns; ++n) {
    expect_near(((const float*)p->args.column_sums.data)[n], column_sums[n], "column_sums", 0, 0, 0, (int64_t)n);
  }
  for (size_t n = 0; mean != NULL && n < cells; ++n) {
    expect_near(((const float*)p->args.attn_weights.data)[n], mean[n], "mean weights", 0, 0, 0, (int64_t)n);
  }
  free(column_sums);
  free(mean);
}

static problem* plain(void) { return new_problem(2, 5, 7, 4, 2, 8, 6); }

static problem* causal_bottom_right(void) {
  problem* p = new_problem(1, 70, 40, 4, 1, 64, 64);  // queries 0..29 see no key
  p->desc.causal = 1;
  p->desc.align = POLYHEAD_ALIGN_BOTTOM_RIGHT;
  return p;
}

static problem* window_softcap_scale_alibi(void) {
  problem* p = new_problem(2, 33, 33, 2, 2, 16, 24);
  p->desc.window_left = 5;
  p->desc.window_right = 3, p->desc.sink_keys = 2;
  p->desc.align = POLYHEAD_ALIGN_TOP_LEFT;
  p->desc.softcap = 2.5;
  p->desc.has_scale = 1;
  p->desc.scale = 0.75;
  p->desc.alibi_slopes_ndim = 1;
  p->args.alibi_slopes = new_random_tensor(p, 1, (int64_t[]){2});
  return p;
}

static problem* mask_and_bias(void) {
  problem* p = new_problem(2, 9, 19, 2, 1, 40, 40);
  p->desc.attn_mask.given = 1, p->desc.attn_mask.dims[0] = 2, p->desc.attn_mask.dims[3] = 19;
  p->args.attn_mask = new_tensor(p, POLYHEAD_BOOL, 4, p->desc.attn_mask.dims);
  for (int j = 0; j < 38; ++j) ((uint8_t*)p->args.attn_mask.data)[j] = j % 3 != 1;
  p->desc.attn_bias.given = 1;
  p->desc.attn_bias.dims[1] = 2, p->desc.attn_bias.dims[2] = 9, p->desc.attn_bias.dims[3] = 19;
  p->args.attn_bias = new_random_tensor(p, 4, p->desc.attn_bias.dims);
  ((float*)p->args.attn_bias.data)[3] = -INFINITY;
  return p;
}

static problem* lengths_and_offsets(void) {
  problem* p = new_problem(3, 6, 11, 2, 2, 32, 32);
  p->desc.has_seqlens_q = p->desc.has_seqlens_k = p->desc.has_query_offsets = p->desc.causal = 1;
  p->desc.attn_mask.given = p->desc.mask_at_end = 1, p->desc.attn_mask.dims[3] = 4;
  p->args.attn_mask = new_tensor(p, POLYHEAD_BOOL, 4, p->desc.attn_mask.dims);
  memcpy(p->args.attn_mask.data, (uint8_t[]){0, 1, 0, 1}, 4);
  p->args.seqlens_q = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){3});
  p->args.seqlens_k = new_tensor(p, POLYHEAD_INT64, 1, (int64_t[]){3});
  p->args.query_offsets = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){3});
  const int32_t seqlens_q[] = {6, 0, 4}, offsets[] = {2, 0, -1};
  const int64_t seqlens_k[] = {11, 5, 3};
  memcpy(p->args.seqlens_q.data, seqlens_q, sizeof seqlens_q);
  memcpy(p->args.seqlens_k.data, seqlens_k, sizeof seqlens_k);
  memcpy(p->args.query_offsets.data, offsets, sizeof offsets);
  return p;
}

static problem* one_offset(void) {
  problem* p = new_problem(1, 4, 50, 3, 3, 64, 80);
  p->desc.causal = p->desc.has_query_offset = 1;
  p->desc.query_offset = 17;
  return p;
}

static problem* packed(void) {
  problem* p = new_problem(3, 20, 26, 2, 1, 32, 16);
  p->desc.packed = p->desc.causal = 1;
  p->desc.align = POLYHEAD_ALIGN_BOTTOM_RIGHT;
  p->desc.alibi_slopes_ndim = 2;
  p->args.alibi_slopes = new_random_tensor(p, 2, (int64_t[]){3, 2});
  p->args.query = new_random_tensor(p, 3, (int64_t[]){20, 2, 32});
  p->args.key = new_random_tensor(p, 3, (int64_t[]){26, 1, 32});
  p->args.value = new_random_tensor(p, 3, (int64_t[]){26, 1, 16});
  p->args.out = new_tensor(p, POLYHEAD_FLOAT32, 3, (int64_t[]){20, 2, 16});
  p->args.logsumexp = new_tensor(p, POLYHEAD_FLOAT32, 2, (int64_t[]){2, 20});
  p->args.cu_seqlens_q = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){4});
  p->args.cu_seqlens_k = new_tensor(p, POLYHEAD_INT64, 1, (int64_t[]){4});
  const int32_t cu_seqlens_q[] = {0, 7, 7, 20};
  const int64_t cu_seqlens_k[] = {0, 9, 15, 26};
  memcpy(p->args.cu_seqlens_q.data, cu_seqlens_q, sizeof cu_seqlens_q);
  memcpy(p->args.cu_seqlens_k.data, cu_seqlens_k, sizeof cu_seqlens_k);
  return p;
}

static problem* dropout_and_weights(void) {
  problem* p = new_problem(2, 12, 21, 2, 2, 16, 16);
  p->desc.dropout_p = 0.3;
  p->desc.return_weights = POLYHEAD_WEIGHTS_PER_HEAD;
  p->desc.return_column_sums = 1;
  p->args.dropout_seed = UINT64_C(0x123456789abcdef0);
  p->args.dropout_offset = 77;
  p->args.attn_weights = new_tensor(p, POLYHEAD_FLOAT32, 4, (int64_t[]){2, 2, 12, 21});
  p->args.column_sums = new_tensor(p, POLYHEAD_FLOAT32, 3, (int64_t[]){2, 2, 21});
  return p;
}

// Those of queries 3 and 4 are empty, those of 5 and 6 leave the keys.
static problem* windows_of_queries(void) {
  static const int32_t lo[] = {0, 2, 4, 6, 9, -8, 7}, hi[] = {1, 9, 6, 6, 2, 3, 99};
  problem* p = new_problem(2, 7, 9, 4, 2, 16, 12);
  p->desc.has_windows = p->desc.has_sink_logits = 1;
  p->args.sink_logits = new_random_tensor(p, 1, (int64_t[]){4});
  p->args.window_lo = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){7});
  p->args.window_hi = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){7});
  memcpy(p->args.window_lo.data, lo, sizeof lo);
  memcpy(p->args.window_hi.data, hi, sizeof hi);
  return p;
}

static problem* scores_as_weights(void) {
  problem* p = new_problem(2, 9, 21, 4, 2, 16, 12);
  p->desc.normalizer = POLYHEAD_NORMALIZER_NONE;
  p->desc.causal = 1, p->desc.align = POLYHEAD_ALIGN_BOTTOM_RIGHT;
  memset(&p->args.logsumexp, 0, sizeof p->args.logsumexp);
  return p;
}

static problem* mean_weights_and_strides(void) {
  problem* p = new_problem(2, 10, 10, 4, 4, 24, 24);
  p->desc.return_weights = POLYHEAD_WEIGHTS_MEAN;
  p->args.attn_weights = new_tensor(p, POLYHEAD_FLOAT32, 3, (int64_t[]){2, 10, 10});
  // Query, key and value side by side in one array [batch, seqlen, 3, head, dim]; key rows from the last to the first.
  const polyhead_tensor qkv = new_random_tensor(p, 5, (int64_t[]){2, 10, 3, 4, 24});
  polyhead_tensor* const parts[] = {&p->args.query, &p->args.key, &p->args.value};
  for (int part = 0; part < 3; ++part) {
    parts[part]->data = (float*)qkv.data + part * 96;
    parts[part]->strides[0] = qkv.strides[0];
    parts[part]->strides[1] = qkv.strides[1];
  }
  p->args.key.data = (float*)p->args.key.data + 9 * qkv.strides[1];
  p->args.key.strides[1] = -qkv.strides[1];
  return p;
}

static void test_against_naive_loops(void) {
  static const struct {
    const char* name;
    problem* (*make)(void);
  } kCases[] = {
      {"plain", plain},
      {"causal_bottom_right", causal_bottom_right},
      {"window_softcap_scale_alibi", window_softcap_scale_alibi},
      {"mask_and_bias", mask_and_bias},
      {"lengths_and_offsets", lengths_and_offsets},
      {"one_offset", one_offset},
      {"packed", packed},
      {"dropout_and_weights", dropout_and_weights},
      {"windows_of_queries", windows_of_queries},
      {"scores_as_weights", scores_as_weights},
      {"mean_weights_and_strides", mean_weights_and_strides},
  };
  int num_run = 0;
  for (size_t c = 0; c < sizeof kCases / sizeof kCases[0]; ++c) {
    for (const char* const* kernel = polyhead_kernels(); *kernel != NULL; ++kernel) {
      char name[120];
      snprintf(name, sizeof name, "%s on %s", kCases[c].name, *kernel);
      case_name = name;
      problem* p = kCases[c].make();
      const polyhead_status status = run_problem(p, *kernel, NULL);
      if (status == POLYHEAD_OK) {
        expect_outputs(p);
        ++num_run;
      } else if (status == POLYHEAD_UNSUPPORTED) {
        printf("skipped: %s: %s\n", name, polyhead_last_error());
        CHECK(strcmp(*kernel, "reference") != 0);
      } else {
        check_failed(__FILE__, __LINE__, name, polyhead_last_error());
      }
      free_problem(p);
    }
  }
  printf("forward: %d runs against naive loops\n", num_run);
  CHECK(num_run > 0);
}

// With one key, out is the value: shows that each dtype means itself.
static void test_dtypes(void) {
  static const struct {
    int32_t dtype;
    size_t size;
    uint64_t one_and_a_half;
  } kTypes[] = {
      {POLYHEAD_FLOAT32, 4, 0x3fc00000},
      {POLYHEAD_BFLOAT16, 2, 0x3fc0},
      {POLYHEAD_FLOAT16, 2, 0x3e00},
      {POLYHEAD_FLOAT64, 8, UINT64_C(0x3ff8000000000000)},
  };
  for (size_t n = 0; n < sizeof kTypes / sizeof kTypes[0]; ++n) {
    problem* p = new_problem(1, 1, 1, 1, 1, 1, 1);
    uint64_t value = kTypes[n].one_and_a_half, out = 0;
    const int64_t one[] = {1, 1, 1, 1};
    p->desc.dtype = kTypes[n].dtype;
    p->args.query = p->args.key = p->args.value = polyhead_tensor_contiguous(&value, kTypes[n].dtype, 4, one);
    p->args.out = polyhead_tensor_contiguous(&out, kTypes[n].dtype, 4, one);
    p->args.logsumexp.ndim = 0;
    CHECK_OK(run_problem(p, NULL, NULL));
    CHECK(memcmp(&out, &value, kTypes[n].size) == 0);
    free_problem(p);
  }
}

// 1.5 and the mean of 1.5 and 2 are bfloat16 numbers; that of 1 and 1 + 1/128 is not.
static void test_float32_beside_bfloat16(void) {
  problem* p = new_problem(1, 1, 2, 1, 1, 1, 1);
  const uint16_t zeros[2] = {0, 0}, values[2] = {0x3f80, 0x3f81};
  float out = 0;
  p->desc.dtype = POLYHEAD_BFLOAT16;
  p->desc.has_out_dtype = 1;
  p->desc.out_dtype = POLYHEAD_FLOAT32;
  p->args.query = polyhead_tensor_contiguous(zeros, POLYHEAD_BFLOAT16, 4, (int64_t[]){1, 1, 1, 1});
  p->args.key = polyhead_tensor_contiguous(zeros, POLYHEAD_BFLOAT16, 4, (int64_t[]){1, 2, 1, 1});
  p->args.value = polyhead_tensor_contiguous(values, POLYHEAD_BFLOAT16, 4, (int64_t[]){1, 2, 1, 1});
  p->args.out = polyhead_tensor_contiguous(&out, POLYHEAD_FLOAT32, 4, (int64_t[]){1, 1, 1, 1});
  p->args.logsumexp.ndim = 0;
  CHECK_OK(run_problem(p, NULL, NULL));
  CHECK(out == 1.00390625f);
  p->desc.out_dtype = POLYHEAD_FLOAT16;
  CHECK_REFUSED(run_problem(p, NULL, NULL), POLYHEAD_INVALID_ARGUMENT,
                "out_dtype is float16, must be bfloat16 as dtype, or float32");
  p->desc.out_dtype = 77;
  CHECK_REFUSED(run_problem(p, NULL, NULL), POLYHEAD_INVALID_ARGUMENT, "out_dtype is 77, must be a polyhead_dtype");
  p->desc.out_dtype = POLYHEAD_FLOAT16;
  p->desc.has_out_dtype = 0;
  CHECK_REFUSED(run_problem(p, NULL, NULL), POLYHEAD_INVALID_ARGUMENT, "must be 0 where has_out_dtype is 0");
  p->desc.out_dtype = 0;
  p->desc.has_grad_dtype = 1;
  p->desc.grad_dtype = POLYHEAD_FLOAT64;
  CHECK_REFUSED(run_problem(p, NULL, NULL), POLYHEAD_INVALID_ARGUMENT, "grad_dtype is float64");
  free_problem(p);
}

// A shard of [3, 5, 7, 48]: batch 1 and 2, heads 2 to 4, queries 3 to 6, keys from 8 on.
static void test_shard_dropout_mask(void) {
  static uint8_t whole[3][5][7][48], shard[2][3][4][40];
  const polyhead_tensor all = polyhead_tensor_contiguous(whole, POLYHEAD_BOOL, 4, (int64_t[]){3, 5, 7, 48});
  const polyhead_tensor some = polyhead_tensor_contiguous(shard, POLYHEAD_BOOL, 4, (int64_t[]){2, 3, 4, 40});
  polyhead_dropout_origin origin = {1 * 5 + 2, 5, 3, 8};
  CHECK_OK(polyhead_dropout_mask(0.5, 7, 9, &all));
  CHECK_OK(polyhead_shard_dropout_mask(0.5, 7, 9, &origin, &some));
  int num_wrong = 0;
  for (int n = 0; n < 2 * 3 * 4 * 40; ++n) {
    const int b = n / 480, h = n / 160 % 3, i = n / 40 % 4, j = n % 40;
    num_wrong += shard[b][h][i][j] != whole[1 + b][2 + h][3 + i][8 + j];
  }
  CHECK(num_wrong == 0);
  origin.first_key = 4;
  CHECK_REFUSED(polyhead_shard_dropout_mask(0.5, 7, 9, &origin, &some), POLYHEAD_INVALID_ARGUMENT,
                "dropout_origin.first_key is 4, must be a multiple of 8");
  CHECK_REFUSED(polyhead_shard_dropout_mask(0.5, 7, 9, NULL, NULL), POLYHEAD_INVALID_ARGUMENT,
                "kept is a null pointer");
}

static void test_dropout_mask(void) {
  problem* p = new_problem(2, 3, 40, 2, 2, 1, 1);
  polyhead_tensor kept = new_tensor(p, POLYHEAD_BOOL, 4, (int64_t[]){2, 2, 3, 40});
  p->desc.dropout_p = 0.5;
  p->args.dropout_seed = UINT64_C(0xfedcba9876543210);
  p->args.dropout_offset = 9;
  CHECK_OK(polyhead_dropout_mask(0.5, p->args.dropout_seed, 9, &kept));
  int num_wrong = 0;
  for (int64_t n = 0; n < 480; ++n) {
    const int64_t h = n / 120 % 2, b = n / 240, i = n / 40 % 3, j = n % 40;
    num_wrong += ((const uint8_t*)kept.data)[n] != kept_by_dropout(p, b, h, i, j);
  }
  CHECK(num_wrong == 0);
  free_problem(p);
}

static void test_explain(void) {
  problem* p = new_problem(1, 16, 16, 2, 2, 64, 64);
  polyhead_explanation* e = NULL;
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_attention_plan_create(&p->desc, NULL, &plan));
  CHECK_OK(polyhead_attention_explain(&p->desc, NULL, &e));
  CHECK(e->struct_size == sizeof *e && e->status == POLYHEAD_OK && e->message[0] == '\0');
  CHECK(strcmp(e->kernel, polyhead_attention_plan_kernel_name(plan)) == 0);
  CHECK(e->workspace_bytes == polyhead_attention_plan_workspace_bytes(plan));
  CHECK(e->flops == 4.0 * 2 * 16 * 16 * 64 && e->backward_flops == 2.5 * e->flops);
  CHECK(e->backward_workspace_bytes == polyhead_attention_plan_backward_workspace_bytes(plan));
  CHECK(e->measured[0] == '\0' || strncmp(e->measured, "measured: ", 10) == 0);
  CHECK(e->num_kernels >= 1 && strcmp(e->kernels[e->num_kernels - 1], "reference") == 0);
  for (size_t k = 0; k < e->num_kernels; ++k) {
    if (strcmp(e->kernels[k], e->kernel) == 0) CHECK(e->reasons[k][0] == '\0');
  }
  polyhead_explanation_destroy(e);

  p->desc.num_heads_kv = 3;  // does not divide 2
  CHECK_OK(polyhead_attention_explain(&p->desc, NULL, &e));
  CHECK(e->status == POLYHEAD_INVALID_ARGUMENT && strstr(e->message, "num_heads_kv") != NULL);
  CHECK(e->kernel[0] == '\0');
  polyhead_explanation_destroy(e);

  p->desc.packed = 7;  // not a boolean: found before the library's own checks
  CHECK_OK(polyhead_attention_explain(&p->desc, NULL, &e));
  CHECK(e->status == POLYHEAD_INVALID_ARGUMENT && strstr(e->message, "packed is 7") != NULL && e->num_kernels == 0);
  polyhead_explanation_destroy(e);
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
}

// Offsets and windows at the ends of int64 are legal, with all that looks at the diagonal.
static void test_extreme_offsets(const char* kernel) {
  const int64_t offsets[] = {INT64_MAX, INT64_MAX - 1, INT64_MIN, INT64_MIN + 1};
  for (int n = 0; n < 16; ++n) {
    problem* p = new_problem(1, 3, 70, 1, 1, 4, 4);
    p->desc.has_query_offset = 1;
    p->desc.query_offset = offsets[n % 4];
    p->desc.causal = n / 4 % 2;
    p->desc.window_left = n / 8 == 0 ? INT64_MAX : -1;
    p->desc.window_right = n / 8 == 0 ? INT64_MAX : 0;
    p->desc.alibi_slopes_ndim = 1;
    p->args.alibi_slopes = new_random_tensor(p, 1, (int64_t[]){1});
    CHECK_OK(run_problem(p, kernel, NULL));
    free_problem(p);
  }
}

// The stride of a dim of size 1 means nothing, whatever it is.
static void test_junk_strides(const char* kernel) {
  const int64_t junk[] = {INT64_MAX, INT64_MIN, INT64_MAX / 3, 0};
  problem* p = new_problem(1, 1, 1, 1, 1, 1, 1);
  const float* out = p->args.out.data;
  const float* value = p->args.value.data;
  for (int n = 0; n < 4; ++n) {
    polyhead_tensor* const tensors[] = {&p->args.query, &p->args.key, &p->args.value};
    for (int t = 0; t < 3; ++t) {
      for (int i = 0; i < 4; ++i) tensors[t]->strides[i] = junk[(i + n) % 4];
    }
    CHECK_OK(run_problem(p, kernel, NULL));
    CHECK(out[0] == value[0]);
  }
  free_problem(p);
}

void test_forward(void) {
  test_against_naive_loops();
  for (const char* const* kernel = polyhead_kernels(); *kernel != NULL; ++kernel) {
    if (!takes_float32(*kernel)) continue;
    test_extreme_offsets(*kernel);
    test_junk_strides(*kernel);
  }
  test_dtypes();
  test_dropout_mask();
  test_shard_dropout_mask();
  test_float32_beside_bfloat16();
  test_explain();
}
