// Bad input: a status, a sentence that names the argument, outputs untouched. Also null pointers for every function.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

// Self-attention, batch 2, seqlen_q 5, seqlen_k 7, num_heads 4, num_heads_kv 2, head_dim 8, head_dim_v 6, with lengths.
static problem* padded(void) {
  problem* p = new_problem(2, 5, 7, 4, 2, 8, 6);
  p->desc.has_seqlens_k = 1;
  p->args.seqlens_k = new_tensor(p, POLYHEAD_INT64, 1, (int64_t[]){2});
  ((int64_t*)p->args.seqlens_k.data)[0] = 7;
  ((int64_t*)p->args.seqlens_k.data)[1] = 3;
  return p;
}

static problem* packed(void) {
  problem* p = new_problem(2, 5, 7, 4, 2, 8, 6);
  p->desc.packed = 1;
  p->args.query = new_random_tensor(p, 3, (int64_t[]){5, 4, 8});
  p->args.key = new_random_tensor(p, 3, (int64_t[]){7, 2, 8});
  p->args.value = new_random_tensor(p, 3, (int64_t[]){7, 2, 6});
  p->args.out = new_tensor(p, POLYHEAD_FLOAT32, 3, (int64_t[]){5, 4, 6});
  p->args.logsumexp = new_tensor(p, POLYHEAD_FLOAT32, 2, (int64_t[]){4, 5});
  p->args.cu_seqlens_q = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){3});
  p->args.cu_seqlens_k = new_tensor(p, POLYHEAD_INT32, 1, (int64_t[]){3});
  const int32_t cu_seqlens_q[] = {0, 2, 5}, cu_seqlens_k[] = {0, 4, 7};
  memcpy(p->args.cu_seqlens_q.data, cu_seqlens_q, sizeof cu_seqlens_q);
  memcpy(p->args.cu_seqlens_k.data, cu_seqlens_k, sizeof cu_seqlens_k);
  return p;
}

// Runs a spoiled problem. `words` must stand in the sentence, and no byte of out and logsumexp may change.
static void expect_refused(int line, problem* p, polyhead_status status, const char* words) {
  enum { kMaxBytes = 4096 };
  unsigned char before[2][kMaxBytes];
  void* outputs[2] = {p->arrays[3], p->arrays[4]};  // new_problem's out and logsumexp
  const size_t bytes[2] = {2 * 5 * 4 * 6 * 4, 2 * 4 * 5 * 4};
  for (int i = 0; i < 2; ++i) {
    memset(outputs[i], 0x5a, bytes[i]);
    memcpy(before[i], outputs[i], bytes[i]);
  }
  check_refused(__FILE__, line, words, run_problem(p, NULL, NULL), status, words);
  for (int i = 0; i < 2; ++i) {
    if (memcmp(before[i], outputs[i], bytes[i]) != 0) check_failed(__FILE__, line, words, "an output was touched");
  }
  free_problem(p);
}

#define REFUSED_AS(problem_made, status, words, ...) \
  do {                                               \
    problem* p = problem_made;                       \
    polyhead_attention_desc* desc = &p->desc;        \
    polyhead_forward_args* args = &p->args;          \
    (void)desc, (void)args;                          \
    __VA_ARGS__;                                     \
    expect_refused(__LINE__, p, status, words);      \
  } while (0)
#define REFUSED(words, ...) REFUSED_AS(padded(), POLYHEAD_INVALID_ARGUMENT, words, __VA_ARGS__)
#define REFUSED_PACKED(words, ...) REFUSED_AS(packed(), POLYHEAD_INVALID_ARGUMENT, words, __VA_ARGS__)

static void test_bad_desc(void) {
  REFUSED("batch is -1", desc->batch = -1);
  REFUSED("seqlen_q is -5", desc->seqlen_q = -5);
  REFUSED("seqlen_k", desc->seqlen_k = INT64_MIN);
  REFUSED("num_heads_kv is 3, must divide num_heads 4", desc->num_heads_kv = 3);
  REFUSED("num_heads_kv is 0", desc->num_heads_kv = 0);
  REFUSED("head_dim", desc->head_dim = INT64_MAX);
  REFUSED("head_dim_v", desc->head_dim_v = -1);
  REFUSED("batch", desc->batch = desc->seqlen_q = desc->seqlen_k = INT64_C(1) << 40);
  REFUSED("dtype is 11", desc->dtype = 11);
  REFUSED("dtype is int8", desc->dtype = POLYHEAD_INT8);
  REFUSED("dtype is -1", desc->dtype = -1);
  REFUSED("dtype is int32", desc->dtype = POLYHEAD_INT32);
  REFUSED("packed is 2", desc->packed = 2);
  REFUSED("has_seqlens_q is -1", desc->has_seqlens_q = -1);
  REFUSED("causal is 255", desc->causal = 255);
  REFUSED("causal", desc->causal = 1);  // and no alignment, where lengths differ
  REFUSED("align is 3", desc->align = 3);
  REFUSED("align", desc->align = POLYHEAD_ALIGN_TOP_LEFT; desc->has_query_offset = 1);
  REFUSED("has_query_offset is 9", desc->has_query_offset = 9);
  REFUSED("query_offset is 4, must be 0 where has_query_offset is 0", desc->query_offset = 4);
  REFUSED("scale is 0.5, must be 0 where has_scale is 0", desc->scale = 0.5);
  REFUSED("scale is nan", desc->has_scale = 1; desc->scale = NAN);
  REFUSED("scale is -inf", desc->has_scale = 1; desc->scale = -INFINITY);
  REFUSED("softcap is -1", desc->softcap = -1);
  REFUSED("softcap is nan", desc->softcap = NAN);
  REFUSED("window_left is -2", desc->window_left = -2);
  REFUSED("window_right is -2", desc->window_right = -2);
  REFUSED("sink_keys is -1, must be at least 0", desc->sink_keys = -1);
  REFUSED("mask_at_end needs attn_mask", desc->mask_at_end = 1);
  REFUSED("attn_mask.given is 2", desc->attn_mask.given = 2);
  REFUSED("attn_mask is float32", desc->attn_mask.given = 1; desc->attn_mask.dtype = POLYHEAD_FLOAT32);
  REFUSED("attn_mask.dtype is 99", desc->attn_mask.given = 1; desc->attn_mask.dtype = 99);
  REFUSED("attn_mask dim 3 is 6", desc->attn_mask.given = 1; desc->attn_mask.dims[3] = 6);
  REFUSED("attn_bias", desc->attn_bias.given = 1; desc->attn_bias.dtype = POLYHEAD_FLOAT64);
  REFUSED("attn_bias dim 0 is -1", desc->attn_bias.given = 1; desc->attn_bias.dims[0] = -1);
  REFUSED("alibi_slopes_ndim is 3", desc->alibi_slopes_ndim = 3);
  REFUSED("dropout_p is 1.5", desc->dropout_p = 1.5);
  REFUSED("dropout_origin.first_key is 4, must be a multiple of 8", desc->dropout_p = 0.5;
          desc->dropout_origin.first_key = 4);
  REFUSED("dropout_p is nan", desc->dropout_p = NAN);
  REFUSED("return_weights is 3", desc->return_weights = 3);
  REFUSED("return_column_sums is 2", desc->return_column_sums = 2);
  REFUSED("has_windows is 2", desc->has_windows = 2);
  REFUSED("has_sink_logits is 2", desc->has_sink_logits = 2);
  REFUSED("normalizer is 2, must be a polyhead_normalizer", desc->normalizer = 2);
  REFUSED("desc.flags is 1", desc->flags = 1);
  REFUSED("desc.struct_size is 0", desc->struct_size = 0);
  REFUSED("newer than the library", desc->struct_size += 8);
  REFUSED("desc.struct_size", desc->struct_size -= 1);
  REFUSED_PACKED("attn_mask", desc->attn_mask.given = 1);
  REFUSED_PACKED("return_weights", desc->return_weights = POLYHEAD_WEIGHTS_MEAN);
  REFUSED_PACKED("seqlens_k", desc->has_seqlens_k = 1);
  REFUSED_PACKED("window_lo", desc->has_windows = 1);
}

// Gives every query a window.
static void windows(problem* p) {
  p->desc.has_windows = 1;
  p->args.window_lo = p->args.window_hi = new_tensor(p, POLYHEAD_INT64, 1, &p->desc.seqlen_q);
}

static void test_bad_tensors(void) {
  REFUSED("query is missing", args->query.ndim = 0);
  REFUSED("query.ndim is 6", args->query.ndim = 6);
  REFUSED("key.ndim is -1", args->key.ndim = -1);
  REFUSED("value has 3 dims, expected 4", args->value.ndim = 3);
  REFUSED("query.dtype is 50", args->query.dtype = 50);
  REFUSED("key is float16, expected float32", args->key.dtype = POLYHEAD_FLOAT16);
  REFUSED("value.device is 2", args->value.device = 2);
  REFUSED("value is not on the CPU", args->value.device = POLYHEAD_CUDA);
  REFUSED("out.reserved is 1", args->out.reserved = 1);
  REFUSED("query is null", args->query.data = NULL);
  REFUSED("out is null", args->out.data = NULL);
  REFUSED("out is missing", args->out.ndim = 0);
  REFUSED("key dim 1 is 8, expected seqlen_k 7", args->key.dims[1] = 8);
  REFUSED("value dim 3", args->value.dims[3] = INT64_MAX);
  REFUSED("logsumexp dim 2 is -5", args->logsumexp.dims[2] = -5);
  REFUSED("query is not aligned", args->query.data = (char*)args->query.data + 1);
  REFUSED("key", args->key.strides[0] = INT64_MAX);
  REFUSED("out has stride -24", args->out.strides[1] *= -1);
  REFUSED("out overlaps itself", args->out.strides[0] = 0);
  REFUSED("out overlaps query", args->out.data = args->query.data);
  REFUSED("logsumexp overlaps out", args->logsumexp.data = args->out.data);
  REFUSED("attn_weights", args->attn_weights = args->out);
  REFUSED("attn_mask", args->attn_mask = args->out);
  REFUSED("seqlens_k is missing", args->seqlens_k.ndim = 0);
  REFUSED("seqlens_k is float32, expected int32 or int64", args->seqlens_k.dtype = POLYHEAD_FLOAT32);
  REFUSED("seqlens_k[1] is 8", ((int64_t*)args->seqlens_k.data)[1] = 8);
  REFUSED("seqlens_k[0] is -1", ((int64_t*)args->seqlens_k.data)[0] = -1);
  REFUSED("window_lo is missing", desc->has_windows = 1);
  REFUSED("window_hi is given", args->window_hi = args->seqlens_k);
  REFUSED("window_hi dim 0 is 2, expected seqlen_q 5", windows(p); args->window_hi = args->seqlens_k);
  REFUSED("window_lo is float32, expected int32 or int64", windows(p); args->window_lo.dtype = POLYHEAD_FLOAT32);
  // A program whose header had no windows in one of the two.
  REFUSED("window_lo is missing", windows(p); args->struct_size = offsetof(polyhead_forward_args, window_lo));
  REFUSED("window_lo is given", windows(p); desc->struct_size = offsetof(polyhead_attention_desc, has_windows));
  REFUSED("args.flags is 2", args->flags = 2);
  REFUSED("args.reserved is 5", args->reserved = 5);
  REFUSED("args.struct_size is 7", args->struct_size = 7);
  REFUSED("newer than the library", args->struct_size *= 2);
  REFUSED_PACKED("cu_seqlens_q", args->cu_seqlens_q.ndim = 0);
  REFUSED_PACKED("cu_seqlens_q[0] is 1", ((int32_t*)args->cu_seqlens_q.data)[0] = 1);
  REFUSED_PACKED("cu_seqlens_q[2]", ((int32_t*)args->cu_seqlens_q.data)[1] = 6);
  REFUSED_PACKED("cu_seqlens_k ends at 8", ((int32_t*)args->cu_seqlens_k.data)[2] = 8);
  REFUSED_PACKED("cu_seqlens_k dim 0 is 2", args->cu_seqlens_k.dims[0] = 2);
}

static void test_bad_workspace(void) {
  problem* p = padded();
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_attention_plan_create(&p->desc, NULL, &plan));
  const size_t needed = polyhead_attention_plan_workspace_bytes(plan);
  if (needed > 0) {
    char* workspace = new_workspace(p, needed + 64);
    p->args.workspace_bytes = needed;
    CHECK_REFUSED(polyhead_attention_forward(plan, &p->args), POLYHEAD_INVALID_ARGUMENT, "workspace is null");
    p->args.workspace = workspace + 4;
    CHECK_REFUSED(polyhead_attention_forward(plan, &p->args), POLYHEAD_INVALID_ARGUMENT, "workspace is not aligned");
    p->args.workspace = workspace;
    p->args.workspace_bytes = needed - 1;
    CHECK_REFUSED(polyhead_attention_forward(plan, &p->args), POLYHEAD_INVALID_ARGUMENT, "workspace_bytes is");
    p->args.workspace_bytes = needed;
    CHECK_OK(polyhead_attention_forward(plan, &p->args));
  }
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
}

static void test_bad_options(void) {
  problem* p = padded();
  polyhead_plan_options options;
  polyhead_attention_plan* plan = (polyhead_attention_plan*)p;  // must become NULL
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  options.kernel = "cpu_z80";
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT, "cpu_z80");
  CHECK(plan == NULL);
  char endless[5000];
  memset(endless, 'k', sizeof endless);
  endless[sizeof endless - 1] = '\0';
  options.kernel = endless;
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT, "kkk");
  CHECK(strlen(polyhead_last_error()) == 2047 && strcmp(polyhead_last_error() + 2044, "...") == 0);
  options.kernel = polyhead_last_error();  // a sentence that is built from itself
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT, "kkk");
  options.kernel = "";
  options.flags = UINT64_C(1) << 63;
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT, "options.flags");
  options.flags = 0;
  options.struct_size = 16;
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT,
                "options.struct_size is 16");
  free_problem(p);
}

static void test_bad_places(void) {
  problem* p = padded();
  polyhead_plan_options options;
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  CHECK(options.device == POLYHEAD_CPU && options.stream == NULL);
  options.device = POLYHEAD_CUDA;
  p->desc.dtype = POLYHEAD_FLOAT64;  // which no kernel for it takes
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_UNSUPPORTED, POLYHEAD_NO_CUDA);
  p->desc.dtype = POLYHEAD_FLOAT32;
  options.device = 2;
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT,
                "device is 2, must be a polyhead_device: 0 to 1");
  options.device = POLYHEAD_CPU;
  options.reserved = 1;
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT, "reserved is 1");
  options.reserved = 0;
  options.stream = p;
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, &options, &plan), POLYHEAD_INVALID_ARGUMENT,
                "stream is given, but the CPU has no streams");
  // A program whose header had neither.
  options.struct_size = offsetof(polyhead_plan_options, device);
  CHECK_OK(polyhead_attention_plan_create(&p->desc, &options, &plan));
  p->args.stream = p;
  CHECK_REFUSED(polyhead_attention_forward(plan, &p->args), POLYHEAD_INVALID_ARGUMENT,
                "stream is given, but the CPU has no streams");
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
}

static void test_null_pointers(void) {
  problem* p = padded();
  polyhead_attention_plan* plan = NULL;
  polyhead_explanation* explanation = NULL;
  polyhead_executor* executor = NULL;
  CHECK_REFUSED(polyhead_attention_desc_init(NULL, sizeof p->desc), POLYHEAD_INVALID_ARGUMENT,
                "desc is a null pointer");
  CHECK_REFUSED(polyhead_forward_args_init(NULL, 8), POLYHEAD_INVALID_ARGUMENT, "args is a null pointer");
  CHECK_REFUSED(polyhead_plan_options_init(NULL, 8), POLYHEAD_INVALID_ARGUMENT, "options is a null pointer");
  CHECK_REFUSED(polyhead_attention_desc_init(&p->desc, 8), POLYHEAD_INVALID_ARGUMENT, "desc.struct_size is 8");
  CHECK_REFUSED(polyhead_attention_desc_init(&p->desc, SIZE_MAX), POLYHEAD_INVALID_ARGUMENT, "desc.struct_size");
  CHECK_REFUSED(polyhead_attention_plan_create(NULL, NULL, &plan), POLYHEAD_INVALID_ARGUMENT, "desc is a null pointer");
  CHECK_REFUSED(polyhead_attention_plan_create(&p->desc, NULL, NULL), POLYHEAD_INVALID_ARGUMENT,
                "plan is a null pointer");
  CHECK_REFUSED(polyhead_attention_forward(NULL, &p->args), POLYHEAD_INVALID_ARGUMENT, "plan is a null pointer");
  CHECK_OK(polyhead_attention_plan_create(&p->desc, NULL, &plan));
  CHECK_REFUSED(polyhead_attention_forward(plan, NULL), POLYHEAD_INVALID_ARGUMENT, "args is a null pointer");
  polyhead_attention_plan_destroy(plan);
  CHECK_REFUSED(polyhead_attention_explain(NULL, NULL, &explanation), POLYHEAD_INVALID_ARGUMENT,
                "desc is a null pointer");
  CHECK_REFUSED(polyhead_attention_explain(&p->desc, NULL, NULL), POLYHEAD_INVALID_ARGUMENT,
                "explanation is a null pointer");
  CHECK_REFUSED(polyhead_dropout_mask(0.5, 1, 2, NULL), POLYHEAD_INVALID_ARGUMENT, "kept is a null pointer");
  CHECK_REFUSED(polyhead_executor_create(1, NULL), POLYHEAD_INVALID_ARGUMENT, "executor is a null pointer");
  CHECK_REFUSED(polyhead_executor_create_host(1, NULL, NULL, &executor), POLYHEAD_INVALID_ARGUMENT,
                "parallel_for is a null pointer");
  CHECK(polyhead_attention_plan_workspace_bytes(NULL) == 0);
  CHECK(strstr(polyhead_last_error(), "plan is a null pointer") != NULL);
  CHECK(polyhead_attention_plan_kernel_name(NULL)[0] == '\0');
  polyhead_attention_plan_destroy(NULL);
  polyhead_executor_destroy(NULL);
  polyhead_explanation_destroy(NULL);
  free_problem(p);
}

static void test_bad_rest(void) {
  const int64_t dims[] = {2, 3, INT64_MAX, 4};
  polyhead_executor* executor = NULL;
  CHECK_REFUSED(polyhead_executor_create(0, &executor), POLYHEAD_INVALID_ARGUMENT, "num_threads is 0");
  CHECK_REFUSED(polyhead_executor_create(1025, &executor), POLYHEAD_INVALID_ARGUMENT, "num_threads is 1025");
  CHECK(polyhead_tensor_contiguous(NULL, POLYHEAD_INT32, 0, dims).ndim == -1);
  CHECK(strstr(polyhead_last_error(), "ndim is 0") != NULL);
  CHECK(polyhead_tensor_contiguous(NULL, POLYHEAD_INT32, 6, dims).ndim == -1);
  CHECK(polyhead_tensor_contiguous(NULL, POLYHEAD_INT32, 2, NULL).ndim == -1);
  CHECK(polyhead_tensor_contiguous(NULL, POLYHEAD_INT32, 4, dims).ndim == -1);
  CHECK(strstr(polyhead_last_error(), "dims[2]") != NULL);
  const polyhead_tensor t = polyhead_tensor_contiguous(dims, POLYHEAD_INT64, 2, dims);
  CHECK((const int64_t*)t.data == dims && t.ndim == 2 && t.dims[1] == 3 && t.strides[0] == 3 && t.strides[1] == 1);

  unsigned char bytes[6] = {9, 9, 9, 9, 9, 9};
  polyhead_tensor kept = polyhead_tensor_contiguous(bytes, POLYHEAD_BOOL, 4, (int64_t[]){1, 1, 2, 3});
  CHECK_REFUSED(polyhead_dropout_mask(-0.1, 0, 0, &kept), POLYHEAD_INVALID_ARGUMENT, "dropout_p is -0.1");
  CHECK_REFUSED(polyhead_dropout_mask(NAN, 0, 0, &kept), POLYHEAD_INVALID_ARGUMENT, "dropout_p is nan");
  kept.dtype = POLYHEAD_INT32;
  CHECK_REFUSED(polyhead_dropout_mask(0.5, 0, 0, &kept), POLYHEAD_INVALID_ARGUMENT, "kept is int32");
  kept.dtype = POLYHEAD_BOOL;
  kept.ndim = 0;
  CHECK_REFUSED(polyhead_dropout_mask(0.5, 0, 0, &kept), POLYHEAD_INVALID_ARGUMENT, "kept");
  CHECK(bytes[0] == 9 && bytes[5] == 9);
  CHECK(strcmp(polyhead_status_name(POLYHEAD_OUT_OF_MEMORY), "out of memory") == 0);
  CHECK(strcmp(polyhead_status_name(-3), "unknown") == 0);
}

void test_errors(void) {
  test_bad_desc();
  test_bad_tensors();
  test_bad_workspace();
  test_bad_options();
  test_bad_places();
  test_null_pointers();
  test_bad_rest();
}
