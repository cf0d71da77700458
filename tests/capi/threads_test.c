// Errors of one thread stay its own; a plan serves many threads; every executor gives the same bits.
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { kThreads = 4, kRounds = 200 };

static void* provoke_errors(void* argument) {
  const int number = *(const int*)argument;
  char expected[40];
  intptr_t num_wrong = 0;
  snprintf(expected, sizeof expected, "num_threads is %d,", -number);
  if (polyhead_last_error()[0] != '\0') ++num_wrong;  // a new thread has seen no error
  for (int round = 0; round < kRounds; ++round) {
    polyhead_executor* executor = NULL;
    if (polyhead_executor_create(-number, &executor) != POLYHEAD_INVALID_ARGUMENT) ++num_wrong;
    if (strncmp(polyhead_last_error(), expected, strlen(expected)) != 0) ++num_wrong;
  }
  return (void*)num_wrong;
}

static void test_last_error_isolation(void) {
  pthread_t threads[kThreads];
  int numbers[kThreads];
  CHECK_REFUSED(polyhead_check_abi(-42), POLYHEAD_UNSUPPORTED, "-42");
  for (int t = 0; t < kThreads; ++t) {
    numbers[t] = t + 1;
    if (pthread_create(&threads[t], NULL, provoke_errors, &numbers[t]) != 0) abort();
  }
  for (int t = 0; t < kThreads; ++t) {
    void* num_wrong = NULL;
    pthread_join(threads[t], &num_wrong);
    CHECK(num_wrong == NULL);
  }
  CHECK(strstr(polyhead_last_error(), "-42") != NULL);
}

static problem* big_enough_to_be_cut(void) { return new_problem(2, 150, 150, 3, 3, 64, 64); }

// Runs a plan on outputs and a workspace of this thread's own.
typedef struct caller {
  const polyhead_attention_plan* plan;
  const problem* shared;
  const void* expected;
  int num_wrong;
} caller;

static void* call_forward(void* argument) {
  caller* self = argument;
  polyhead_forward_args args = self->shared->args;
  const size_t bytes = (size_t)num_bytes(&args.out), workspace = polyhead_attention_plan_workspace_bytes(self->plan);
  char* raw = malloc(workspace + 64);
  args.out.data = malloc(bytes);
  args.logsumexp.ndim = 0;
  if (raw == NULL || args.out.data == NULL) abort();
  args.workspace = raw + (64 - (uintptr_t)raw % 64) % 64;
  args.workspace_bytes = workspace;
  for (int round = 0; round < 5; ++round) {
    memset(args.out.data, 0xff, bytes);
    if (polyhead_attention_forward(self->plan, &args) != POLYHEAD_OK) ++self->num_wrong;
    if (memcmp(args.out.data, self->expected, bytes) != 0) ++self->num_wrong;
  }
  free(args.out.data);
  free(raw);
  return NULL;
}

static void test_one_plan_many_threads(void) {
  problem* p = big_enough_to_be_cut();
  CHECK_OK(run_problem(p, NULL, NULL));
  polyhead_attention_plan* plan = NULL;
  CHECK_OK(polyhead_attention_plan_create(&p->desc, NULL, &plan));
  pthread_t threads[kThreads];
  caller callers[kThreads];
  for (int t = 0; t < kThreads; ++t) {
    callers[t] = (caller){plan, p, p->args.out.data, 0};
    if (pthread_create(&threads[t], NULL, call_forward, &callers[t]) != 0) abort();
  }
  for (int t = 0; t < kThreads; ++t) {
    pthread_join(threads[t], NULL);
    CHECK(callers[t].num_wrong == 0);
  }
  polyhead_attention_plan_destroy(plan);
  free_problem(p);
}

// A host that runs everything on the calling thread, the last index first.
typedef struct host {
  int num_threads, num_calls, num_bodies, largest_count;
} host;

static void run_backwards(void* host_pointer, int count, void (*body)(void* context, int index), void* context) {
  host* h = host_pointer;
  ++h->num_calls;
  if (count > h->largest_count) h->largest_count = count;
  for (int i = count - 1; i >= 0; --i) {
    body(context, i);
    ++h->num_bodies;
  }
}

static void test_executors(void) {
  problem* p = big_enough_to_be_cut();
  polyhead_executor* executor = NULL;
  const size_t bytes = (size_t)num_bytes(&p->args.out);
  CHECK_OK(run_problem(p, NULL, NULL));
  void* expected = malloc(bytes);
  if (expected == NULL) abort();
  memcpy(expected, p->args.out.data, bytes);

  const int counts[] = {1, 2, 3, 7};
  for (int n = 0; n < 4; ++n) {
    CHECK_OK(polyhead_executor_create(counts[n], &executor));
    CHECK(polyhead_executor_num_threads(executor) == counts[n]);
    memset(p->args.out.data, 0xff, bytes);
    CHECK_OK(run_problem(p, NULL, executor));
    CHECK(memcmp(p->args.out.data, expected, bytes) == 0);
    polyhead_executor_destroy(executor);
  }

  host h = {3, 0, 0, 0};
  CHECK_OK(polyhead_executor_create_host(h.num_threads, run_backwards, &h, &executor));
  CHECK(polyhead_executor_num_threads(executor) == 3);
  memset(p->args.out.data, 0xff, bytes);
  CHECK_OK(run_problem(p, NULL, executor));
  CHECK(memcmp(p->args.out.data, expected, bytes) == 0);
  CHECK(h.largest_count <= 3 && h.num_bodies >= h.num_calls);
  printf("host executor: %d calls, %d bodies\n", h.num_calls, h.num_bodies);

  // One call's own threads.
  h.num_calls = 0;
  p->args.executor = executor;
  memset(p->args.out.data, 0xff, bytes);
  CHECK_OK(run_problem(p, NULL, NULL));
  CHECK(memcmp(p->args.out.data, expected, bytes) == 0);
  CHECK(h.num_calls > 0 || polyhead_executor_num_threads(NULL) == 1);
  // A program whose header had no field for them.
  const int before = h.num_calls;
  p->args.struct_size = offsetof(polyhead_forward_args, executor);
  CHECK_OK(run_problem(p, NULL, NULL));
  CHECK(h.num_calls == before);
  polyhead_executor_destroy(executor);
  CHECK(polyhead_executor_num_threads(NULL) >= 1);
  free(expected);
  free_problem(p);
}

void test_threads(void) {
  test_last_error_isolation();
  test_one_plan_many_threads();
  test_executors();
}
