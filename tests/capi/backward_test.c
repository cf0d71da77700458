// Training through the C interface: gradients against finite differences in float64, a step of gradient descent, keys
// split over two calls and merged.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { B = 2, Sq = 3, Sk = 4, H = 2, G = 1, D = 3, Dv = 2 };
enum { kQuery, kKey, kValue, kBias, kSlopes, kSinks, kNumInputs };
static const char* const kNames[kNumInputs] = {"query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits"};
static const int64_t kDims[kNumInputs][4] = {{B, Sq, H, D}, {B, Sk, G, D}, {B, Sk, G, Dv},
                                             {1, H, 1, Sk}, {H, 1, 1, 1},  {H, 1, 1, 1}};
enum { kMaxElements = B * Sq * H * D, kOut = B * Sq * H * Dv, kRows = B * H * Sq };

// What is computed with, as float64. Loss = sum grad_out * out + sum grad_logsumexp * logsumexp.
typedef struct numbers {
  double input[kNumInputs][kMaxElements];
  double grad_out[kOut], grad_logsumexp[kRows];
} numbers;

typedef struct results {
  double loss;
  double grad[kNumInputs][kMaxElements];
} results;

static int64_t count_of(int input) { return kDims[input][0] * kDims[input][1] * kDims[input][2] * kDims[input][3]; }

static void fill(double* to, int64_t count) {
  static uint32_t state = 1;
  for (int64_t n = 0; n < count; ++n) {
    state = state * 1664525u + 1013904223u;
    to[n] = (double)(float)(state >> 8) / 8388608.0 - 1;
  }
}

static numbers random_numbers(void) {
  numbers x;
  memset(&x, 0, sizeof x);
  for (int n = 0; n < kNumInputs; ++n) fill(x.input[n], count_of(n));
  x.input[kSlopes][0] = 0.5;  // float32 in any problem: exact, with the steps that are taken too
  x.input[kSlopes][1] = 0.25;
  fill(x.grad_out, kOut);
  fill(x.grad_logsumexp, kRows);
  return x;
}

// A tensor of the problem's arena that holds `values`, as float32 or float64; zeros if NULL.
static polyhead_tensor tensor_of(problem* p, int32_t dtype, int32_t ndim, const int64_t* dims, const double* values) {
  const polyhead_tensor t = new_tensor(p, dtype, ndim, dims);
  const int64_t count = num_bytes(&t) / (dtype == POLYHEAD_FLOAT64 ? 8 : 4);
  for (int64_t n = 0; values != NULL && n < count; ++n) {
    if (dtype == POLYHEAD_FLOAT64) ((double*)t.data)[n] = values[n];
    if (dtype == POLYHEAD_FLOAT32) ((float*)t.data)[n] = (float)values[n];
  }
  return t;
}

static double element(const polyhead_tensor* t, int64_t n) {
  return t->dtype == POLYHEAD_FLOAT64 ? ((const double*)t->data)[n] : (double)((const float*)t->data)[n];
}

// The problem, with the keys [first, first + count) only.
static problem* new_step(const numbers* x, int32_t dtype, int64_t first, int64_t count) {
  problem* p = calloc(1, sizeof *p);
  if (p == NULL) abort();
  polyhead_attention_desc* desc = &p->desc;
  CHECK_OK(polyhead_attention_desc_init(desc, sizeof *desc));
  CHECK_OK(polyhead_forward_args_init(&p->args, sizeof p->args));
  desc->batch = B, desc->seqlen_q = Sq, desc->seqlen_k = count, desc->num_heads = H, desc->num_heads_kv = G;
  desc->head_dim = D, desc->head_dim_v = Dv, desc->dtype = dtype;
  desc->causal = desc->has_query_offset = 1;
  desc->query_offset = 1 - first;
  desc->softcap = 3;
  desc->alibi_slopes_ndim = 1;
  desc->has_sink_logits = first == 0;  // one of the parts has them
  desc->attn_bias.given = 1, desc->attn_bias.dtype = dtype, desc->attn_bias.dims[1] = H;
  desc->attn_bias.dims[3] = count;
  p->args.query = tensor_of(p, dtype, 4, kDims[kQuery], x->input[kQuery]);
  p->args.key = tensor_of(p, dtype, 4, kDims[kKey], x->input[kKey]);
  p->args.value = tensor_of(p, dtype, 4, kDims[kValue], x->input[kValue]);
  p->args.attn_bias = tensor_of(p, dtype, 4, kDims[kBias], x->input[kBias]);
  p->args.alibi_slopes = tensor_of(p, POLYHEAD_FLOAT32, 1, kDims[kSlopes], x->input[kSlopes]);
  if (first == 0) p->args.sink_logits = tensor_of(p, dtype, 1, kDims[kSinks], x->input[kSinks]);
  polyhead_tensor* const sliced[] = {&p->args.key, &p->args.value, &p->args.attn_bias};
  for (int n = 0; n < 3; ++n) {
    const int dim = n == 2 ? 3 : 1;
    const size_t size = dtype == POLYHEAD_FLOAT64 ? 8 : 4;
    sliced[n]->data = (char*)sliced[n]->data + (size_t)(first * sliced[n]->strides[dim]) * size;
    sliced[n]->dims[dim] = count;
  }
  p->args.out = tensor_of(p, dtype, 4, (int64_t[]){B, Sq, H, Dv}, NULL);
  p->args.logsumexp = tensor_of(p, dtype, 3, (int64_t[]){B, H, Sq}, NULL);
  return p;
}

static polyhead_attention_plan* new_plan(problem* p, const char* kernel) {
  polyhead_plan_options options;
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  options.kernel = kernel;
  CHECK_OK(polyhead_attention_plan_create(&p->desc, &options, &plan));
  if (plan == NULL) abort();
  const size_t forward = polyhead_attention_plan_workspace_bytes(plan);
  const size_t backward = polyhead_attention_plan_backward_workspace_bytes(plan);
  p->args.workspace_bytes = forward > backward ? forward : backward;
  p->args.workspace = new_workspace(p, p->args.workspace_bytes);
  return plan;
}

// Backward args that ask for all gradients: views of `like`, zeroed and with memory of their own.
static polyhead_backward_args new_backward_args(problem* p, const numbers* x) {
  polyhead_backward_args args;
  CHECK_OK(polyhead_backward_args_init(&args, sizeof args));
  args.forward = &p->args;
  args.grad_out = tensor_of(p, p->desc.dtype, 4, p->args.out.dims, x->grad_out);
  args.grad_logsumexp = tensor_of(p, p->desc.dtype, 3, p->args.logsumexp.dims, x->grad_logsumexp);
  args.grad_query = new_tensor(p, p->desc.dtype, 4, p->args.query.dims);
  args.grad_key = new_tensor(p, p->desc.dtype, 4, p->args.key.dims);
  args.grad_value = new_tensor(p, p->desc.dtype, 4, p->args.value.dims);
  args.grad_attn_bias = new_tensor(p, p->desc.dtype, 4, p->args.attn_bias.dims);
  args.grad_alibi_slopes = new_tensor(p, POLYHEAD_FLOAT32, 1, p->args.alibi_slopes.dims);
  if (p->desc.has_sink_logits) args.grad_sink_logits = new_tensor(p, p->desc.dtype, 1, kDims[kSinks]);
  return args;
}

static double loss_of(const problem* p, const numbers* x) {
  double loss = 0;
  for (int64_t n = 0; n < kOut; ++n) loss += x->grad_out[n] * element(&p->args.out, n);
  for (int64_t n = 0; n < kRows; ++n) {
    const double L = element(&p->args.logsumexp, n);
    loss += isfinite(L) ? x->grad_logsumexp[n] * L : 0;
  }
  return loss;
}

static results run_step(const numbers* x, int32_t dtype, const char* kernel, int32_t accumulate) {
  results r;
  problem* p = new_step(x, dtype, 0, Sk);
  polyhead_attention_plan* plan = new_plan(p, kernel);
  CHECK_OK(polyhead_attention_forward(plan, &p->args));
  polyhead_backward_args args = new_backward_args(p, x);
  CHECK_OK(polyhead_attention_backward(plan, &args));
  if (accumulate) {
    args.accumulate = 1;
    CHECK_OK(polyhead_attention_backward(plan, &args));
  }
  r.loss = loss_of(p, x);
  const polyhead_tensor* const grads[kNumInputs] = {&args.grad_query,        &args.grad_key,
                                                    &args.grad_value,        &args.grad_attn_bias,
                                                    &args.grad_alibi_slopes, &args.grad_sink_logits};
  for (int n = 0; n < kNumInputs; ++n) {
    for (int64_t i = 0; i < count_of(n); ++i) r.grad[n][i] = element(grads[n], i);
  }
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
  return r;
}

static double forward_loss(const numbers* x) {
  problem* p = new_step(x, POLYHEAD_FLOAT64, 0, Sk);
  polyhead_attention_plan* plan = new_plan(p, "reference");
  CHECK_OK(polyhead_attention_forward(plan, &p->args));
  const double loss = loss_of(p, x);
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
  return loss;
}

static void expect_near(double got, double expected, double tolerance, const char* what, const char* kernel,
                        int64_t n) {
  if (fabs(got - expected) <= tolerance) return;
  char where[160];
  snprintf(where, sizeof where, "%s of %s, element %d: got %.9g, expected %.9g", what, kernel, (int)n, got, expected);
  check_failed(__FILE__, __LINE__, "gradient", where);
}

// Whether the kernel takes the problem in float32; if not, what it refuses is printed.
static int takes_step(const numbers* x, const char* kernel) {
  problem* p = new_step(x, POLYHEAD_FLOAT32, 0, Sk);
  polyhead_explanation* told = NULL;
  CHECK_OK(polyhead_attention_explain(&p->desc, NULL, &told));
  const char* reason = "is not explained";
  for (size_t k = 0; k < told->num_kernels; ++k) {
    if (strcmp(told->kernels[k], kernel) == 0) reason = told->reasons[k];
  }
  const int takes = reason[0] == '\0';
  const char* expected = strcmp(kernel, "cpu_amx") == 0           ? "dtype is float32"
                         : strcmp(kernel, "cpu_amx_float32") == 0 ? "has_sink_logits is true"
                         : strncmp(kernel, "cuda_", 5) == 0       ? "computes on "
                                                                  : "nothing: the others take all";
  CHECK(takes || strncmp(reason, expected, strlen(expected)) == 0);
  if (!takes) printf("gradients without %s: %s\n", kernel, reason);
  polyhead_explanation_destroy(told);
  free_problem(p);
  return takes;
}

static void test_gradients(void) {
  numbers x = random_numbers();
  const results exact = run_step(&x, POLYHEAD_FLOAT64, "reference", 0);
  for (int n = 0; n < kNumInputs; ++n) {
    const double step = n == kSlopes ? 1.0 / 65536 : 1e-5;
    for (int64_t i = 0; i < count_of(n); ++i) {
      const double before = x.input[n][i];
      x.input[n][i] = before + step;
      const double up = forward_loss(&x);
      x.input[n][i] = before - step;
      const double down = forward_loss(&x);
      x.input[n][i] = before;
      const double rounding = n == kSlopes ? fabs(exact.grad[n][i]) / 16777216 : 0;  // stored as float32
      expect_near(exact.grad[n][i], (up - down) / (2 * step), 1e-7 + rounding, kNames[n], "reference", i);
    }
  }
  int num_kernels = 0;
  for (const char* const* kernel = polyhead_kernels(); *kernel != NULL; ++kernel) {
    if (!takes_step(&x, *kernel)) continue;
    ++num_kernels;
    const results set = run_step(&x, POLYHEAD_FLOAT32, *kernel, 0);
    const results twice = run_step(&x, POLYHEAD_FLOAT32, *kernel, 1);
    for (int n = 0; n < kNumInputs; ++n) {
      for (int64_t i = 0; i < count_of(n); ++i) {
        expect_near(set.grad[n][i], exact.grad[n][i], 1e-5, kNames[n], *kernel, i);
        expect_near(twice.grad[n][i], 2 * set.grad[n][i], 1e-6, "twice", *kernel, i);
      }
    }
  }
  CHECK(num_kernels > 0);
}

// Against the gradient the loss falls as fast as the gradient says.
static void test_descent(void) {
  numbers x = random_numbers();
  const double rate = 1e-3, before = forward_loss(&x);
  const results r = run_step(&x, POLYHEAD_FLOAT32, NULL, 0);
  double square = 0;
  for (int n = 0; n < kNumInputs; ++n) {
    for (int64_t i = 0; i < count_of(n); ++i) {
      x.input[n][i] -= rate * r.grad[n][i];
      square += r.grad[n][i] * r.grad[n][i];
    }
  }
  const double fallen = before - forward_loss(&x);
  CHECK(square > 1 && fabs(fallen - rate * square) < 0.05 * rate * square);
}

// Keys 0 and 1..3 in calls of their own.
static void test_merge(void) {
  const numbers x = random_numbers();
  const results whole = run_step(&x, POLYHEAD_FLOAT64, NULL, 0);
  const int64_t first[] = {0, 1}, count[] = {1, 3};
  problem* halves[2];
  polyhead_attention_plan* plans[2];
  polyhead_partial parts[2], grads[2];
  for (int n = 0; n < 2; ++n) {
    halves[n] = new_step(&x, POLYHEAD_FLOAT64, first[n], count[n]);
    plans[n] = new_plan(halves[n], NULL);
    CHECK_OK(polyhead_attention_forward(plans[n], &halves[n]->args));
    parts[n].out = halves[n]->args.out;
    parts[n].logsumexp = halves[n]->args.logsumexp;
  }
  problem* p = halves[0];
  polyhead_partial merged = {new_tensor(p, POLYHEAD_FLOAT64, 4, parts[0].out.dims),
                             new_tensor(p, POLYHEAD_FLOAT64, 3, parts[0].logsumexp.dims)};
  polyhead_partial grad_merged = {tensor_of(p, POLYHEAD_FLOAT64, 4, parts[0].out.dims, x.grad_out),
                                  tensor_of(p, POLYHEAD_FLOAT64, 3, parts[0].logsumexp.dims, x.grad_logsumexp)};
  for (int n = 0; n < 2; ++n) {
    grads[n].out = new_tensor(halves[n], POLYHEAD_FLOAT64, 4, parts[0].out.dims);
    grads[n].logsumexp = new_tensor(halves[n], POLYHEAD_FLOAT64, 3, parts[0].logsumexp.dims);
  }
  polyhead_executor* executor = NULL;
  CHECK_OK(polyhead_executor_create(2, &executor));
  CHECK_OK(polyhead_merge(parts, 2, &merged, executor));
  CHECK_OK(polyhead_merge_backward(parts, 2, &merged, &grad_merged, grads, NULL));
  polyhead_executor_destroy(executor);

  const polyhead_tensor grad_query = new_tensor(p, POLYHEAD_FLOAT64, 4, kDims[kQuery]);
  double loss = 0;
  for (int n = 0; n < 2; ++n) {  // each part on its own results; what both have is added
    polyhead_backward_args args = new_backward_args(halves[n], &x);
    args.grad_out = grads[n].out;
    args.grad_logsumexp = grads[n].logsumexp;
    args.grad_query = grad_query;
    args.accumulate = 1;
    CHECK_OK(polyhead_attention_backward(plans[n], &args));
    for (int64_t i = 0; i < B * count[n] * G * D; ++i) {
      const int64_t at = (i / (count[n] * G * D) * Sk + first[n]) * G * D + i % (count[n] * G * D);
      expect_near(element(&args.grad_key, i), whole.grad[kKey][at], 1e-12, "key", "a part", i);
    }
  }
  for (int64_t i = 0; i < count_of(kQuery); ++i) {
    expect_near(element(&grad_query, i), whole.grad[kQuery][i], 1e-12, "query", "both parts", i);
  }
  CHECK_OK(polyhead_merge(parts, 2, &parts[1], NULL));  // in place
  CHECK(memcmp(parts[1].out.data, merged.out.data, (size_t)num_bytes(&merged.out)) == 0);
  for (int64_t n = 0; n < kOut; ++n) loss += x.grad_out[n] * element(&merged.out, n);
  for (int64_t n = 0; n < kRows; ++n) loss += x.grad_logsumexp[n] * element(&parts[1].logsumexp, n);
  expect_near(loss, whole.loss, 1e-12, "loss", "the merged result", 0);
  for (int n = 0; n < 2; ++n) {
    polyhead_attention_plan_destroy(plans[n]);
    free_problem(halves[n]);
  }
}

// Bad input: a sentence that names the argument, and no gradient touched.
static void test_bad_backward(void) {
  const numbers x = random_numbers();
  problem* p = new_step(&x, POLYHEAD_FLOAT32, 0, Sk);
  polyhead_attention_plan* plan = new_plan(p, NULL);
  CHECK_OK(polyhead_attention_forward(plan, &p->args));
  const polyhead_backward_args good = new_backward_args(p, &x);
  const polyhead_forward_args good_forward = p->args;
#define REFUSED(words, ...)                                                                    \
  do {                                                                                         \
    polyhead_backward_args args = good;                                                        \
    polyhead_forward_args* forward = &p->args;                                                 \
    (void)forward;                                                                             \
    __VA_ARGS__;                                                                               \
    CHECK_REFUSED(polyhead_attention_backward(plan, &args), POLYHEAD_INVALID_ARGUMENT, words); \
    p->args = good_forward;                                                                    \
    for (int64_t i = 0; i < count_of(kQuery); ++i) CHECK(element(&good.grad_query, i) == 0);   \
  } while (0)
  REFUSED("args.struct_size is 0", args.struct_size = 0);
  REFUSED("newer than the library", args.struct_size += 8);
  REFUSED("args.flags is 1", args.flags = 1);
  REFUSED("args.reserved is 1", args.reserved = 1);
  REFUSED("args.accumulate is 2, must be 0 or 1", args.accumulate = 2);
  REFUSED("args.forward is a null pointer", args.forward = NULL);
  REFUSED("args.forward.flags is 4", forward->flags = 4);
  REFUSED("args.forward.struct_size is 16", forward->struct_size = 16);
  REFUSED("args.forward.reserved is 1", forward->reserved = 1);
  REFUSED("query is missing", forward->query.ndim = 0);
  REFUSED("logsumexp is missing", forward->logsumexp.ndim = 0);
  REFUSED("out is missing", forward->out.ndim = 0);
  REFUSED("attn_weights is given to backward", forward->attn_weights = forward->out);
  REFUSED("workspace", forward->workspace = NULL; forward->workspace_bytes = 0);
  REFUSED("grad_out is missing", args.grad_out.ndim = 0);
  REFUSED("grad_out.dtype is 11", args.grad_out.dtype = 11);
  REFUSED("delta.ndim is 7", args.delta.ndim = 7);
  REFUSED("grad_key dim 1 is 5, expected seqlen_k 4", args.grad_key.dims[1] = 5);
  REFUSED("grad_value overlaps value", args.grad_value.data = forward->value.data);
  REFUSED("no gradient is asked for", args.grad_query.ndim = args.grad_key.ndim = args.grad_value.ndim =
                                          args.grad_attn_bias.ndim = args.grad_alibi_slopes.ndim =
                                              args.grad_sink_logits.ndim = 0);
#undef REFUSED
  polyhead_backward_args args = good;
  CHECK_REFUSED(polyhead_backward_args_init(NULL, sizeof args), POLYHEAD_INVALID_ARGUMENT, "args is a null pointer");
  CHECK_REFUSED(polyhead_backward_args_init(&args, 8), POLYHEAD_INVALID_ARGUMENT, "args.struct_size is 8");
  CHECK_REFUSED(polyhead_attention_backward(NULL, &args), POLYHEAD_INVALID_ARGUMENT, "plan is a null pointer");
  CHECK_REFUSED(polyhead_attention_backward(plan, NULL), POLYHEAD_INVALID_ARGUMENT, "args is a null pointer");
  CHECK(polyhead_attention_plan_backward_workspace_bytes(NULL) == 0);
  CHECK(strstr(polyhead_last_error(), "plan is a null pointer") != NULL);
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
}

static void test_bad_merge(void) {
  float values[6][12] = {{0}};
  const int64_t out_dims[] = {1, 2, 3, 2}, dims[] = {1, 3, 2};
  polyhead_partial p[6];
  for (int n = 0; n < 6; ++n) {
    p[n].out = polyhead_tensor_contiguous(values[n], POLYHEAD_FLOAT32, 4, out_dims);
    p[n].logsumexp = polyhead_tensor_contiguous(values[n], POLYHEAD_FLOAT32, 3, dims);
  }
  const polyhead_status invalid = POLYHEAD_INVALID_ARGUMENT;
  CHECK_REFUSED(polyhead_merge(p, 2, &p[2], NULL), invalid, "merged.logsumexp overlaps merged.out");
  p[2].logsumexp.ndim = 0;
  CHECK_OK(polyhead_merge(p, 2, &p[2], NULL));
  CHECK_REFUSED(polyhead_merge(NULL, 2, &p[2], NULL), invalid, "parts is a null pointer");
  CHECK_REFUSED(polyhead_merge(p, 2, NULL, NULL), invalid, "merged is a null pointer");
  CHECK_REFUSED(polyhead_merge(p, 0, &p[2], NULL), invalid, "num_parts is 0, takes 1 to 65536");
  CHECK_REFUSED(polyhead_merge(p, (size_t)-1, &p[2], NULL), invalid, "num_parts is 18446744073709551615");
  p[1].logsumexp.reserved = 3;
  CHECK_REFUSED(polyhead_merge(p, 2, &p[2], NULL), invalid, "parts[1].logsumexp.reserved is 3");
  p[1].logsumexp.reserved = 0;
  p[1].out.ndim = 6;
  CHECK_REFUSED(polyhead_merge(p, 2, &p[2], NULL), invalid, "parts[1].out.ndim is 6");
  p[1].out.ndim = 4;
  CHECK_REFUSED(polyhead_merge_backward(p, 2, &p[2], &p[3], &p[4], NULL), invalid, "merged.logsumexp is missing");
  p[2].logsumexp = p[0].logsumexp;
  CHECK_REFUSED(polyhead_merge_backward(p, 2, &p[2], &p[3], NULL, NULL), invalid, "grad_parts is a null pointer");
  CHECK_REFUSED(polyhead_merge_backward(p, 2, &p[2], NULL, &p[4], NULL), invalid, "grad_merged is a null pointer");
  CHECK_REFUSED(polyhead_merge_backward(p, 2, &p[2], &p[3], &p[4], NULL), invalid,
                "grad_parts[0].out overlaps grad_parts[0].logsumexp");
  p[4].out.ndim = p[5].logsumexp.ndim = 0;
  CHECK_OK(polyhead_merge_backward(p, 2, &p[2], &p[3], &p[4], NULL));
  p[4].logsumexp.ndim = p[5].out.ndim = 0;
  CHECK_REFUSED(polyhead_merge_backward(p, 2, &p[2], &p[3], &p[4], NULL), invalid, "no gradient is asked for");
}

void test_backward(void) {
  test_gradients();
  test_descent();
  test_merge();
  test_bad_backward();
  test_bad_merge();
}
