// Programs through the C interface: one that tells ALiBi and causal gives what the built-in options give, forward and
// backward, on every kernel; bad input.
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "check.h"

enum { B = 2, S = 37, H = 4, D = 16 };
static const char kText[] = "number: int; score = score - slope[h] * abs(q - k); mask = k <= q + number[]";
static const polyhead_capture_shape kShapes[] = {{POLYHEAD_INT64, 1, {1}}, {POLYHEAD_FLOAT32, 1, {H}}};

typedef struct trained {
  problem* p;
  polyhead_tensor captures[2], grad_captures[2];
  polyhead_backward_args backward;
} trained;

// The problem, its program or the options that mean the same, and its gradients; not yet computed.
static void prepare(trained* t, int by_program) {
  problem* p = t->p = new_problem(B, S, S, H, 2, D, D);
  for (int n = 0; n < B * S * H * D; ++n) ((float*)p->args.query.data)[n] = sinf((float)n);
  for (int n = 0; n < B * S * 2 * D; ++n) ((float*)p->args.key.data)[n] = cosf((float)n);
  for (int n = 0; n < B * S * 2 * D; ++n) ((float*)p->args.value.data)[n] = sinf((float)n * 0.7f);
  const polyhead_tensor slope = new_tensor(p, POLYHEAD_FLOAT32, 1, kShapes[1].dims);
  for (int h = 0; h < H; ++h) ((float*)slope.data)[h] = 0.5f / (float)(h + 1);
  CHECK_OK(polyhead_backward_args_init(&t->backward, sizeof t->backward));
  memset(t->grad_captures, 0, sizeof t->grad_captures);
  t->captures[0] = new_tensor(p, POLYHEAD_INT64, 1, kShapes[0].dims);
  t->captures[1] = slope;
  t->grad_captures[1] = new_tensor(p, POLYHEAD_FLOAT32, 1, kShapes[1].dims);
  t->backward.forward = &p->args;
  t->backward.grad_query = new_tensor(p, POLYHEAD_FLOAT32, 4, p->args.query.dims);
  t->backward.grad_key = new_tensor(p, POLYHEAD_FLOAT32, 4, p->args.key.dims);
  t->backward.grad_out = new_random_tensor(p, 4, p->args.out.dims);
  for (int n = 0; n < B * S * H * D; ++n) ((float*)t->backward.grad_out.data)[n] = cosf((float)n * 0.3f);
  if (by_program) {
    p->desc.program = kText;
    p->desc.captures = kShapes;
    p->desc.num_captures = p->args.num_captures = t->backward.num_grad_captures = 2;
    p->args.captures = t->captures;
    t->backward.grad_captures = t->grad_captures;
  } else {
    p->desc.causal = 1;
    p->desc.alibi_slopes_ndim = 1;
    p->args.alibi_slopes = slope;
    t->backward.grad_alibi_slopes = t->grad_captures[1];
  }
}

static polyhead_status run_backward(trained* t, const char* kernel) {
  polyhead_plan_options options;
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  options.kernel = kernel;
  polyhead_attention_plan* plan = NULL;
  const polyhead_status made = polyhead_attention_plan_create(&t->p->desc, &options, &plan);
  if (made != POLYHEAD_OK) return made;
  t->p->args.workspace_bytes = polyhead_attention_plan_backward_workspace_bytes(plan);
  t->p->args.workspace = new_workspace(t->p, t->p->args.workspace_bytes);
  const polyhead_status status = polyhead_attention_backward(plan, &t->backward);
  polyhead_attention_plan_destroy(plan);
  return status;
}

static void expect_close(const polyhead_tensor* a, const polyhead_tensor* b, const char* what) {
  double worst = 0;
  for (int64_t n = 0; n < num_bytes(a) / 4; ++n) {
    worst = fmax(worst, fabs((double)((const float*)a->data)[n] - (double)((const float*)b->data)[n]));
  }
  if (!(worst < 1e-4)) check_failed(__FILE__, __LINE__, what, "differs from the built-in options'");
}

static void test_means_the_options(void) {
  for (const char* const* kernel = polyhead_kernels(); *kernel != NULL; ++kernel) {
    if (!takes_float32(*kernel)) continue;
    trained program, options;
    prepare(&program, 1);
    prepare(&options, 0);
    CHECK_OK(run_problem(program.p, *kernel, NULL));
    CHECK_OK(run_problem(options.p, *kernel, NULL));
    CHECK_OK(run_backward(&program, *kernel));
    CHECK_OK(run_backward(&options, *kernel));
    expect_close(&program.p->args.out, &options.p->args.out, "out");
    expect_close(&program.p->args.logsumexp, &options.p->args.logsumexp, "logsumexp");
    expect_close(&program.backward.grad_query, &options.backward.grad_query, "grad_query");
    expect_close(&program.backward.grad_key, &options.backward.grad_key, "grad_key");
    expect_close(&program.grad_captures[1], &options.grad_captures[1], "grad of slope");
    CHECK(((const float*)program.grad_captures[1].data)[0] != 0);
    free_problem(program.p);
    free_problem(options.p);
  }
}

#define REFUSED(words, ...)                                                              \
  do {                                                                                   \
    trained t;                                                                           \
    prepare(&t, 1);                                                                      \
    polyhead_capture_shape shapes[2] = {kShapes[0], kShapes[1]};                         \
    t.p->desc.captures = shapes;                                                         \
    __VA_ARGS__;                                                                         \
    CHECK_REFUSED(run_problem(t.p, NULL, NULL), POLYHEAD_INVALID_ARGUMENT, words);       \
    for (int n = 0; n < B * S * H * D; ++n) CHECK(((float*)t.p->args.out.data)[n] == 0); \
    free_problem(t.p);                                                                   \
  } while (0)

static void test_refused(void) {
  REFUSED("program: expected a value at 8, there is the end", t.p->desc.program = "score = ");
  REFUSED("num_captures is 2, must be 0 where program is NULL", t.p->desc.program = NULL);
  REFUSED("num_captures is 9, takes 0 to 8", t.p->desc.num_captures = 9);
  REFUSED("desc.captures is a null pointer", t.p->desc.captures = NULL);
  REFUSED("captures describes 1 tensors, the program captures 2", t.p->desc.num_captures = 1);
  REFUSED("captures[0].dtype is 11", shapes[0].dtype = 11);
  REFUSED("captures[1].ndim is 5, takes 1 to 4", shapes[1].ndim = 5);
  REFUSED("captures[1].ndim is 0, takes 1 to 4", shapes[1].ndim = 0);
  REFUSED("number is float32, the program takes int32 or int64", shapes[0].dtype = POLYHEAD_FLOAT32);
  REFUSED("slope has 2 dims, the program takes 1", shapes[1].ndim = 2);
  REFUSED("captures is a null pointer", t.p->args.captures = NULL);
  REFUSED("num_captures is 9, takes 0 to 8", t.p->args.num_captures = 9);
  REFUSED("slope", t.p->args.num_captures = 1);
  REFUSED("captures[1].ndim is 6", t.captures[1].ndim = 6);
  REFUSED("slope", t.captures[1].dims[0] = 3);
  REFUSED("slope [3] is asked for at", shapes[1].dims[0] = t.captures[1].dims[0] = 3);
  REFUSED("captures are given, but the plan was made without a program",
          t.p->desc.struct_size = offsetof(polyhead_attention_desc, program));
}

static void test_refused_backward(void) {
  trained t;
  prepare(&t, 1);
  CHECK_OK(run_problem(t.p, NULL, NULL));
  t.backward.grad_captures = NULL;
  CHECK_REFUSED(run_backward(&t, NULL), POLYHEAD_INVALID_ARGUMENT, "grad_captures is a null pointer");
  t.backward.grad_captures = t.grad_captures;
  t.grad_captures[0] = t.captures[0];
  CHECK_REFUSED(run_backward(&t, NULL), POLYHEAD_INVALID_ARGUMENT,
                "grad_captures[0] is given, but that capture holds no floats");
  free_problem(t.p);
}

static void test_explained(void) {
  trained t;
  prepare(&t, 1);
  polyhead_explanation* e = NULL;
  CHECK_OK(polyhead_attention_explain(&t.p->desc, NULL, &e));
  CHECK(e->num_program_values == 5);
  CHECK(strcmp(e->program_values[e->num_program_values - 1], "score = score - (slope[h] * float(abs(q - k)))") == 0);
  CHECK(strcmp(e->depends_on[e->num_program_values - 1], "q, k") == 0);
  polyhead_explanation_destroy(e);
  polyhead_mask_blocks blocks = {-1, -1, -1};
  CHECK_OK(polyhead_attention_count_mask_blocks(&t.p->desc, &t.p->args, &blocks));
  CHECK(blocks.none == 0 && blocks.some == B * H && blocks.all == 0);
  CHECK_REFUSED(polyhead_attention_count_mask_blocks(&t.p->desc, &t.p->args, NULL), POLYHEAD_INVALID_ARGUMENT,
                "blocks");
  t.p->args.num_captures = 0;
  CHECK_REFUSED(polyhead_attention_count_mask_blocks(&t.p->desc, &t.p->args, &blocks), POLYHEAD_INVALID_ARGUMENT,
                "number is missing");
  free_problem(t.p);
}

void test_program(void) {
  test_explained();
  test_means_the_options();
  test_refused();
  test_refused_backward();
}
