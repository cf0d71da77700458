// The layer through the C interface. With identities for weights it is attention, which the other tests know.
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { kBatch = 2, kSeqlen = 5, kHeads = 2, kDim = 4, kSize = kHeads * kDim };

// Causal, or with a program.
static polyhead_layer* new_layer(const char* program) {
  polyhead_layer_desc desc;
  polyhead_attention_desc options;
  polyhead_layer* layer = NULL;
  CHECK_OK(polyhead_layer_desc_init(&desc, sizeof desc));
  CHECK_OK(polyhead_attention_desc_init(&options, sizeof options));
  options.causal = program == NULL;
  options.program = program;
  desc.batch = kBatch;
  desc.seqlen_q = desc.seqlen_k = kSeqlen;
  desc.num_heads = desc.num_heads_kv = kHeads;
  desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = kSize;
  desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = kDim;
  desc.query_bias = desc.key_bias = desc.value_bias = desc.out_bias = 1;
  desc.attention = &options;
  CHECK_OK(polyhead_layer_create(&desc, NULL, &layer));
  return layer;
}

// Identities and zeros in a buffer of the layer's.
static polyhead_layer_weights identities(problem* p, const polyhead_layer* layer) {
  polyhead_layer_weights weights;
  const size_t bytes = polyhead_layer_weights_bytes(layer);
  float* buffer = new_workspace(p, bytes);
  memset(buffer, 0, bytes);
  CHECK_OK(polyhead_layer_weights_in(layer, buffer, bytes, &weights));
  for (int kind = POLYHEAD_QUERY_WEIGHT; kind <= POLYHEAD_OUT_WEIGHT; ++kind) {
    polyhead_weight_layout layout;
    CHECK_OK(polyhead_layer_weight_layout(layer, kind, &layout));
    CHECK(layout.present && layout.ndim == 2 && layout.dims[0] == kSize && layout.dims[1] == kSize);
    CHECK((float*)weights.tensors[kind].data == buffer + layout.offset);
    for (int n = 0; n < kSize; ++n) buffer[layout.offset + n * (layout.strides[0] + layout.strides[1])] = 1;
  }
  return weights;
}

static void expect_same(const polyhead_tensor* got, const float* expected, const char* what) {
  const float* values = got->data;
  for (int64_t n = 0; n < num_bytes(got) / 4; ++n) {
    if (fabsf(values[n] - expected[n]) <= 1e-5f * (1 + fabsf(expected[n]))) continue;
    check_failed(__FILE__, __LINE__, what, "differs from attention's");
    return;
  }
}

static void test_identities(void) {
  polyhead_layer* layer = new_layer(NULL);
  problem* p = new_problem(kBatch, kSeqlen, kSeqlen, kHeads, kHeads, kDim, kDim);
  const int64_t rows[] = {kBatch, kSeqlen, kSize};
  p->desc.causal = 1;
  CHECK_OK(run_problem(p, polyhead_layer_kernel_name(layer), NULL));

  polyhead_layer_forward_args args;
  CHECK_OK(polyhead_layer_forward_args_init(&args, sizeof args));
  polyhead_layer_weights weights = identities(p, layer);
  args.query = polyhead_tensor_contiguous(p->args.query.data, POLYHEAD_FLOAT32, 3, rows);
  args.key = polyhead_tensor_contiguous(p->args.key.data, POLYHEAD_FLOAT32, 3, rows);
  args.value = polyhead_tensor_contiguous(p->args.value.data, POLYHEAD_FLOAT32, 3, rows);
  args.weights = &weights;
  args.out = new_tensor(p, POLYHEAD_FLOAT32, 3, rows);
  args.reserve_bytes = polyhead_layer_reserve_bytes(layer);
  args.reserve = new_workspace(p, args.reserve_bytes);
  args.workspace_bytes = polyhead_layer_workspace_bytes(layer);
  args.workspace = new_workspace(p, args.workspace_bytes);
  CHECK_OK(polyhead_layer_forward(layer, &args));
  expect_same(&args.out, p->args.out.data, "out");

  polyhead_layer_forward_args packed = args;
  packed.prepacked_weights_bytes = polyhead_layer_prepacked_weights_bytes(layer);
  void* memory = new_workspace(p, packed.prepacked_weights_bytes);
  packed.prepacked_weights = memory;
  CHECK_REFUSED(polyhead_layer_prepack_weights(layer, NULL, memory, packed.prepacked_weights_bytes),
                POLYHEAD_INVALID_ARGUMENT, "weights is a null pointer");
  CHECK_OK(polyhead_layer_prepack_weights(layer, &weights, memory, packed.prepacked_weights_bytes));
  packed.out = new_tensor(p, POLYHEAD_FLOAT32, 3, rows);
  CHECK_OK(polyhead_layer_forward(layer, &packed));
  CHECK(memcmp(packed.out.data, args.out.data, (size_t)num_bytes(&args.out)) == 0);

  // On threads that are lent for this call, and on the stream that the CPU has not.
  polyhead_layer_forward_args lent = args;
  CHECK_OK(polyhead_executor_create(2, &lent.executor));
  lent.out = new_tensor(p, POLYHEAD_FLOAT32, 3, rows);
  CHECK_OK(polyhead_layer_forward(layer, &lent));
  CHECK(memcmp(lent.out.data, args.out.data, (size_t)num_bytes(&args.out)) == 0);
  polyhead_executor_destroy(lent.executor);
  lent.executor = NULL;
  lent.stream = p;
  CHECK_REFUSED(polyhead_layer_forward(layer, &lent), POLYHEAD_INVALID_ARGUMENT,
                "stream is given, but the CPU has no streams");
  // A program whose header had neither.
  lent.struct_size = offsetof(polyhead_layer_forward_args, executor);
  CHECK_OK(polyhead_layer_forward(layer, &lent));

  packed.prepacked_weights_bytes = 64;
  CHECK_REFUSED(polyhead_layer_forward(layer, &packed), POLYHEAD_INVALID_ARGUMENT,
                "prepacked_weights_bytes is 64, needs ");

  polyhead_layer_backward_args backward;
  CHECK_OK(polyhead_layer_backward_args_init(&backward, sizeof backward));
  args.workspace_bytes = polyhead_layer_backward_workspace_bytes(layer);
  args.workspace = new_workspace(p, args.workspace_bytes);
  backward.forward = &args;
  backward.grad_out = new_random_tensor(p, 3, rows);
  backward.grad_query = new_tensor(p, POLYHEAD_FLOAT32, 3, rows);
  CHECK_REFUSED(polyhead_layer_backward_weights(layer, &backward), POLYHEAD_INVALID_ARGUMENT, "no gradient is asked");
  CHECK_OK(polyhead_layer_backward_data(layer, &backward));

  polyhead_layer_weights gradients = {0};
  gradients.tensors[POLYHEAD_OUT_BIAS] = new_tensor(p, POLYHEAD_FLOAT32, 1, (int64_t[]){kSize});
  gradients.tensors[POLYHEAD_QUERY_BIAS] = new_tensor(p, POLYHEAD_FLOAT32, 1, (int64_t[]){kSize});
  backward.grad_weights = &gradients;
  CHECK_OK(polyhead_layer_backward_weights(layer, &backward));
  float out_bias[kSize] = {0}, query_bias[kSize] = {0};  // sums over tokens
  for (int n = 0; n < kBatch * kSeqlen * kSize; ++n) {
    out_bias[n % kSize] += ((const float*)backward.grad_out.data)[n];
    query_bias[n % kSize] += ((const float*)backward.grad_query.data)[n];
  }
  expect_same(&gradients.tensors[POLYHEAD_OUT_BIAS], out_bias, "gradient of the output's bias");
  expect_same(&gradients.tensors[POLYHEAD_QUERY_BIAS], query_bias, "gradient of the query's bias");
  backward.accumulate = 1;
  CHECK_OK(polyhead_layer_backward_weights(layer, &backward));
  for (int n = 0; n < kSize; ++n) out_bias[n] *= 2;
  expect_same(&gradients.tensors[POLYHEAD_OUT_BIAS], out_bias, "gradient of the output's bias, added");
  free_problem(p);
  polyhead_layer_destroy(layer);
}

// Time step `step` of [batch, time, size].
static polyhead_tensor time_step(polyhead_tensor t, int64_t step) {
  t.data = (float*)t.data + step * t.strides[1];
  t.dims[1] = 1;
  return t;
}

// One step of decoding after the other, where a program asks for the number of the step.
static void test_steps(void) {
  polyhead_layer* layer = new_layer("mask = k <= q and q - k < 3");
  problem* p = new_problem(kBatch, kSeqlen, kSeqlen, kHeads, kHeads, kDim, kDim);
  const int64_t rows[] = {kBatch, kSeqlen, kSize}, cache[] = {kBatch, kSeqlen, kHeads, kDim};
  p->desc.causal = 1;
  p->desc.window_left = 2;
  CHECK_OK(run_problem(p, polyhead_layer_kernel_name(layer), NULL));

  polyhead_layer_forward_args args;
  CHECK_OK(polyhead_layer_forward_args_init(&args, sizeof args));
  polyhead_layer_weights weights = identities(p, layer);
  const polyhead_tensor query = polyhead_tensor_contiguous(p->args.query.data, POLYHEAD_FLOAT32, 3, rows);
  const polyhead_tensor key = polyhead_tensor_contiguous(p->args.key.data, POLYHEAD_FLOAT32, 3, rows);
  const polyhead_tensor value = polyhead_tensor_contiguous(p->args.value.data, POLYHEAD_FLOAT32, 3, rows);
  const polyhead_tensor out = new_tensor(p, POLYHEAD_FLOAT32, 3, rows);
  args.weights = &weights;
  args.key_cache = new_tensor(p, POLYHEAD_FLOAT32, 4, cache);
  args.value_cache = new_tensor(p, POLYHEAD_FLOAT32, 4, cache);
  args.workspace_bytes = polyhead_layer_workspace_bytes(layer);
  args.workspace = new_workspace(p, args.workspace_bytes);
  for (args.step = 0; args.step < kSeqlen; ++args.step) {
    args.query = time_step(query, args.step);
    args.key = time_step(key, args.step);
    args.value = time_step(value, args.step);
    args.out = time_step(out, args.step);
    CHECK_OK(polyhead_layer_forward(layer, &args));
  }
  expect_same(&out, p->args.out.data, "out of single steps");
  free_problem(p);
  polyhead_layer_destroy(layer);
}

static void test_layer_errors(void) {
  const polyhead_status kInvalid = POLYHEAD_INVALID_ARGUMENT;
  polyhead_layer* layer = NULL;
  polyhead_layer_desc desc;
  polyhead_layer_forward_args args;
  polyhead_layer_backward_args backward;
  polyhead_layer_weights weights;
  polyhead_weight_layout layout;
  float buffer[4];
  CHECK_REFUSED(polyhead_layer_desc_init(NULL, sizeof desc), kInvalid, "desc is a null pointer");
  CHECK_REFUSED(polyhead_layer_desc_init(&desc, 8), kInvalid, "desc.struct_size is 8");
  CHECK_OK(polyhead_layer_desc_init(&desc, sizeof desc));
  desc.residual = 2;
  CHECK_REFUSED(polyhead_layer_create(&desc, NULL, &layer), kInvalid, "residual is 2, must be 0 or 1");
  CHECK(layer == NULL);
  desc.residual = 0;
  desc.dtype = 77;
  CHECK_REFUSED(polyhead_layer_create(&desc, NULL, &layer), kInvalid, "dtype is 77, must be a polyhead_dtype");
  desc.dtype = 0;
  desc.reserved = 1;
  CHECK_REFUSED(polyhead_layer_create(&desc, NULL, &layer), kInvalid, "reserved is 1, must be 0");
  desc.reserved = 0;
  polyhead_plan_options options;
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  options.device = POLYHEAD_CUDA;
  desc.dtype = POLYHEAD_FLOAT64;  // which no kernel for it takes
  CHECK_REFUSED(polyhead_layer_create(&desc, &options, &layer), POLYHEAD_UNSUPPORTED, POLYHEAD_NO_CUDA);
  desc.dtype = POLYHEAD_FLOAT32;
  desc.beam = -1;
  CHECK_REFUSED(polyhead_layer_create(&desc, NULL, &layer), kInvalid, "beam is -1");
  CHECK_REFUSED(polyhead_layer_create(NULL, NULL, &layer), kInvalid, "desc is a null pointer");
  CHECK_REFUSED(polyhead_layer_create(&desc, NULL, NULL), kInvalid, "layer is a null pointer");
  CHECK(polyhead_layer_workspace_bytes(NULL) == 0 && strstr(polyhead_last_error(), "layer is a null pointer") != NULL);
  CHECK(polyhead_layer_kernel_name(NULL)[0] == '\0');
  polyhead_layer_destroy(NULL);

  layer = new_layer(NULL);
  CHECK_REFUSED(polyhead_layer_weight_layout(layer, 8, &layout), kInvalid, "kind is 8, must be a polyhead_weight_kind");
  CHECK_REFUSED(polyhead_layer_weight_layout(layer, 0, NULL), kInvalid, "layout is a null pointer");
  CHECK_REFUSED(polyhead_layer_weights_in(layer, buffer, sizeof buffer, &weights), kInvalid, "bytes is 16, needs ");
  CHECK_REFUSED(polyhead_layer_weights_in(layer, NULL, 0, &weights), kInvalid, "buffer is a null pointer");
  CHECK_OK(polyhead_layer_forward_args_init(&args, sizeof args));
  CHECK_OK(polyhead_layer_backward_args_init(&backward, sizeof backward));
  CHECK(args.step == -1);
  CHECK_REFUSED(polyhead_layer_forward(layer, NULL), kInvalid, "args is a null pointer");
  CHECK_REFUSED(polyhead_layer_forward(NULL, &args), kInvalid, "layer is a null pointer");
  CHECK_REFUSED(polyhead_layer_forward(layer, &args), kInvalid, "query is missing");
  CHECK_REFUSED(polyhead_layer_backward_data(layer, &backward), kInvalid, "args.forward is a null pointer");
  args.query.ndim = 9;
  CHECK_REFUSED(polyhead_layer_forward(layer, &args), kInvalid, "query.ndim is 9");
  args.flags = 1;
  CHECK_REFUSED(polyhead_layer_forward(layer, &args), kInvalid, "args.flags is 1");
  polyhead_layer_destroy(layer);
}

void test_layer(void) {
  test_identities();
  test_steps();
  test_layer_errors();
}
