// The C interface, used as a C99 program uses it. Prints what failed; no test framework.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static int num_failed = 0;

void check_failed(const char* file, int line, const char* what, const char* detail) {
  ++num_failed;
  fprintf(stderr, "%s:%d: failed: %s %s\n", file, line, what, detail);
}

int num_checks_failed(void) { return num_failed; }

void check_refused(const char* file, int line, const char* call, polyhead_status got, polyhead_status status,
                   const char* words) {
  const char* sentence = polyhead_last_error();
  if (got == status && strstr(sentence, words) != NULL) return;
  ++num_failed;
  fprintf(stderr, "%s:%d: failed: %s\n  expected %s: ...%s...\n  got      %s: %s\n", file, line, call,
          polyhead_status_name(status), words, polyhead_status_name(got), got == POLYHEAD_OK ? "" : sentence);
}

static void* keep(problem* p, void* array) {
  if (array == NULL || p->num_arrays == (int)(sizeof p->arrays / sizeof p->arrays[0])) abort();
  p->arrays[p->num_arrays++] = array;
  return array;
}

int takes_float32(const char* kernel) {
  problem* p = new_problem(1, 1, 1, 1, 1, 1, 1);
  const int takes = run_problem(p, kernel, NULL) != POLYHEAD_UNSUPPORTED;
  if (!takes) printf("left out, 1 times: %s\n", polyhead_last_error());
  free_problem(p);
  return takes;
}

int64_t num_bytes(const polyhead_tensor* t) {
  static const int64_t kSizes[] = {4, 2, 2, 8, 1, 4, 8};
  int64_t bytes = kSizes[t->dtype];
  for (int i = 0; i < t->ndim; ++i) bytes *= t->dims[i];
  return bytes;
}

polyhead_tensor new_tensor(problem* p, int32_t dtype, int32_t ndim, const int64_t* dims) {
  polyhead_tensor t = polyhead_tensor_contiguous(NULL, dtype, ndim, dims);
  t.data = keep(p, calloc((size_t)num_bytes(&t) + 1, 1));
  return t;
}

polyhead_tensor new_random_tensor(problem* p, int32_t ndim, const int64_t* dims) {
  static uint32_t state = 12345;
  polyhead_tensor t = new_tensor(p, POLYHEAD_FLOAT32, ndim, dims);
  float* values = t.data;
  for (int64_t i = 0; i < num_bytes(&t) / 4; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
  return t;
}

void* new_workspace(problem* p, size_t bytes) {
  char* raw = keep(p, malloc(bytes + 64));
  return raw + (64 - (uintptr_t)raw % 64) % 64;
}

problem* new_problem(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t num_heads, int64_t num_heads_kv,
                     int64_t head_dim, int64_t head_dim_v) {
  problem* p = calloc(1, sizeof *p);
  if (p == NULL) abort();
  CHECK_OK(polyhead_attention_desc_init(&p->desc, sizeof p->desc));
  CHECK_OK(polyhead_forward_args_init(&p->args, sizeof p->args));
  p->desc.batch = batch;
  p->desc.seqlen_q = seqlen_q;
  p->desc.seqlen_k = seqlen_k;
  p->desc.num_heads = num_heads;
  p->desc.num_heads_kv = num_heads_kv;
  p->desc.head_dim = head_dim;
  p->desc.head_dim_v = head_dim_v;
  p->args.query = new_random_tensor(p, 4, (int64_t[]){batch, seqlen_q, num_heads, head_dim});
  p->args.key = new_random_tensor(p, 4, (int64_t[]){batch, seqlen_k, num_heads_kv, head_dim});
  p->args.value = new_random_tensor(p, 4, (int64_t[]){batch, seqlen_k, num_heads_kv, head_dim_v});
  p->args.out = new_tensor(p, POLYHEAD_FLOAT32, 4, (int64_t[]){batch, seqlen_q, num_heads, head_dim_v});
  p->args.logsumexp = new_tensor(p, POLYHEAD_FLOAT32, 3, (int64_t[]){batch, num_heads, seqlen_q});
  return p;
}

void free_problem(problem* p) {
  for (int i = 0; i < p->num_arrays; ++i) free(p->arrays[i]);
  free(p);
}

polyhead_status run_problem(problem* p, const char* kernel, polyhead_executor* executor) {
  polyhead_plan_options options;
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  options.kernel = kernel;
  options.executor = executor;
  polyhead_status status = polyhead_attention_plan_create(&p->desc, &options, &plan);
  if (status != POLYHEAD_OK) {
    CHECK(plan == NULL);
    return status;
  }
  if (kernel != NULL) CHECK(strcmp(polyhead_attention_plan_kernel_name(plan), kernel) == 0);
  char* raw = malloc(polyhead_attention_plan_workspace_bytes(plan) + 64);
  if (raw == NULL) abort();
  p->args.workspace = raw + (64 - (uintptr_t)raw % 64) % 64;
  p->args.workspace_bytes = polyhead_attention_plan_workspace_bytes(plan);
  status = polyhead_attention_forward(plan, &p->args);
  free(raw);
  polyhead_attention_plan_destroy(plan);
  return status;
}

int main(void) {
  CHECK_OK(polyhead_check_abi(POLYHEAD_ABI_VERSION));
  CHECK(polyhead_abi_version() == POLYHEAD_ABI_VERSION);
  CHECK_REFUSED(polyhead_check_abi(POLYHEAD_ABI_VERSION + 1), POLYHEAD_UNSUPPORTED, "ABI version");
  printf("polyhead %s, ABI %d, CPU features: %s\n", polyhead_version(), polyhead_abi_version(),
         polyhead_cpu_features());
  test_forward();
  test_backward();
  test_errors();
  test_layer();
  test_block();
  test_cache();
  test_program();
  test_threads();
  if (num_failed > 0) fprintf(stderr, "%d checks failed\n", num_failed);
  return num_failed > 0;
}
