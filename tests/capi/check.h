// What the C tests share: a failed check prints itself and lets the test go on; main() returns the count.
#ifndef POLYHEAD_TESTS_CAPI_CHECK_H_
#define POLYHEAD_TESTS_CAPI_CHECK_H_

#include <polyhead/polyhead.h>

void check_failed(const char* file, int line, const char* what, const char* detail);
int num_checks_failed(void);

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) check_failed(__FILE__, __LINE__, #condition, ""); \
  } while (0)

#define CHECK_OK(call)                                                                         \
  do {                                                                                         \
    if ((call) != POLYHEAD_OK) check_failed(__FILE__, __LINE__, #call, polyhead_last_error()); \
  } while (0)

// `got` must be `status`, and the last error must contain `words`.
void check_refused(const char* file, int line, const char* call, polyhead_status got, polyhead_status status,
                   const char* words);
#define CHECK_REFUSED(call, status, words) check_refused(__FILE__, __LINE__, #call, call, status, words)

// An attention problem with its arrays. Lives on the heap until free_problem.
typedef struct problem {
  polyhead_attention_desc desc;
  polyhead_forward_args args;
  void* arrays[32];
  int num_arrays;
} problem;

// A float32 problem of these sizes with random inputs, contiguous tensors, an output and a logsumexp.
problem* new_problem(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t num_heads, int64_t num_heads_kv,
                     int64_t head_dim, int64_t head_dim_v);
void free_problem(problem* p);

// Zeroed memory for `tensor`'s elements, freed with the problem; the tensor is contiguous.
polyhead_tensor new_tensor(problem* p, int32_t dtype, int32_t ndim, const int64_t* dims);
// The same, holding random numbers of about -1 to 1 (float32 only).
polyhead_tensor new_random_tensor(problem* p, int32_t ndim, const int64_t* dims);
// 64-byte aligned memory, freed with the problem.
void* new_workspace(problem* p, size_t bytes);

// Runs the problem on `kernel` (NULL: the best) and `executor` (NULL: the library's own).
polyhead_status run_problem(problem* p, const char* kernel, polyhead_executor* executor);

// Whether `kernel` takes problems of float32; if not, it says why.
int takes_float32(const char* kernel);

int64_t num_bytes(const polyhead_tensor* t);

// The tests, by file.
void test_forward(void);   // forward_test.c
void test_backward(void);  // backward_test.c
void test_errors(void);    // errors_test.c
void test_layer(void);     // layer_test.c
void test_block(void);     // block_test.c
void test_cache(void);     // cache_test.c
void test_program(void);   // program_test.c
void test_threads(void);   // threads_test.c

#endif  // POLYHEAD_TESTS_CAPI_CHECK_H_
