// The blocks through the C interface: with attention alone for a layer, and identities for weights.
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "check.h"

enum { kBatch = 2, kSeqlen = 5, kSize = 8, kNumbers = kBatch * kSeqlen * kSize };

static const int64_t kRows[] = {kBatch, kSeqlen, kSize};

static void expect_near(const float* got, const float* expected, int count, float tolerance, const char* what) {
  for (int n = 0; n < count; ++n) {
    if (fabsf(got[n] - expected[n]) <= tolerance * (1 + fabsf(expected[n]))) continue;
    check_failed(__FILE__, __LINE__, what, "differs from what plain loops give");
    return;
  }
}

// y = x + attention(norm(x)), of one head without projections.
static polyhead_attention_block* new_attention_block(void) {
  polyhead_attention_block_desc desc;
  polyhead_layer_desc layer;
  polyhead_attention_block* block = NULL;
  CHECK_OK(polyhead_attention_block_desc_init(&desc, sizeof desc));
  CHECK(desc.norm.kind == POLYHEAD_LAYER_NORM && desc.norm.pre == 1 && desc.norm.eps == 1e-5);
  CHECK_OK(polyhead_layer_desc_init(&layer, sizeof layer));
  layer.batch = kBatch;
  layer.seqlen_q = layer.seqlen_k = kSeqlen;
  layer.query_size = layer.key_size = layer.value_size = kSize;
  layer.residual = 1;
  desc.layer = &layer;
  desc.norm.gamma = desc.norm.beta = 0;
  CHECK_OK(polyhead_attention_block_create(&desc, NULL, &block));
  return block;
}

static void norm(const float* x, float* y) {
  for (int row = 0; row < kBatch * kSeqlen; ++row, x += kSize, y += kSize) {
    float mean = 0, variance = 0;
    for (int c = 0; c < kSize; ++c) mean += x[c] / kSize;
    for (int c = 0; c < kSize; ++c) variance += (x[c] - mean) * (x[c] - mean) / kSize;
    for (int c = 0; c < kSize; ++c) y[c] = (x[c] - mean) / sqrtf(variance + 1e-5f);
  }
}

static void test_attention_block(void) {
  polyhead_attention_block* block = new_attention_block();
  const polyhead_layer* layer = polyhead_attention_block_layer(block);
  problem* p = new_problem(kBatch, kSeqlen, kSeqlen, 1, 1, kSize, kSize);
  const polyhead_tensor x = new_random_tensor(p, 3, kRows);
  float expected[kNumbers];
  norm(x.data, p->args.query.data);
  memcpy(p->args.key.data, p->args.query.data, sizeof expected);
  memcpy(p->args.value.data, p->args.query.data, sizeof expected);
  CHECK_OK(run_problem(p, polyhead_layer_kernel_name(layer), NULL));
  for (int n = 0; n < kNumbers; ++n) expected[n] = ((float*)x.data)[n] + ((float*)p->args.out.data)[n];

  polyhead_layer_forward_args tensors;
  polyhead_attention_block_forward_args args;
  CHECK_OK(polyhead_layer_forward_args_init(&tensors, sizeof tensors));
  CHECK_OK(polyhead_attention_block_forward_args_init(&args, sizeof args));
  args.layer = &tensors;
  tensors.query = x;
  tensors.out = new_tensor(p, POLYHEAD_FLOAT32, 3, kRows);
  tensors.reserve_bytes = polyhead_attention_block_reserve_bytes(block);
  tensors.reserve = new_workspace(p, tensors.reserve_bytes);
  tensors.workspace_bytes = polyhead_attention_block_workspace_bytes(block);
  tensors.workspace = new_workspace(p, tensors.workspace_bytes);
  CHECK_OK(polyhead_attention_block_forward(block, &args));
  expect_near(tensors.out.data, expected, kNumbers, 1e-5f, "an attention block's out");

  polyhead_attention_block_backward_args backward;
  CHECK_OK(polyhead_attention_block_backward_args_init(&backward, sizeof backward));
  tensors.workspace_bytes = polyhead_attention_block_backward_workspace_bytes(block);
  tensors.workspace = new_workspace(p, tensors.workspace_bytes);
  backward.forward = &args;
  backward.grad_out = new_random_tensor(p, 3, kRows);
  backward.grad_query = new_tensor(p, POLYHEAD_FLOAT32, 3, kRows);
  CHECK_OK(polyhead_attention_block_backward(block, &backward));

  float* const moved = (float*)x.data + 11;  // the slope along one number, against its gradient
  float losses[2] = {0, 0};
  const float step = 0.01f, middle = *moved;
  tensors.workspace_bytes = polyhead_attention_block_workspace_bytes(block);
  tensors.workspace = new_workspace(p, tensors.workspace_bytes);
  for (int side = 0; side < 2; ++side) {
    *moved = middle + (side == 0 ? -step : step);
    CHECK_OK(polyhead_attention_block_forward(block, &args));
    for (int n = 0; n < kNumbers; ++n)
      losses[side] += ((float*)tensors.out.data)[n] * ((float*)backward.grad_out.data)[n];
  }
  const float slope = (losses[1] - losses[0]) / (2 * step);
  expect_near((float*)backward.grad_query.data + 11, &slope, 1, 0.01f, "the gradient of x");
  free_problem(p);
  polyhead_attention_block_destroy(block);
}

// y = x + W2 (W1 x), which is 2 x.
static polyhead_feed_forward_block* new_feed_forward_block(double dropout_p) {
  polyhead_feed_forward_block_desc desc;
  polyhead_feed_forward_block* block = NULL;
  CHECK_OK(polyhead_feed_forward_block_desc_init(&desc, sizeof desc));
  CHECK(desc.activation == POLYHEAD_GELU && desc.bias1 == 1 && desc.bias2 == 1 && desc.residual == 1);
  desc.batch = kBatch;
  desc.seqlen = kSeqlen;
  desc.size = desc.inner_size = kSize;
  desc.activation = POLYHEAD_ACTIVATION_NONE;
  desc.norm.kind = POLYHEAD_NORM_NONE;
  desc.inner_dropout_p = desc.output_dropout_p = dropout_p;
  CHECK_OK(polyhead_feed_forward_block_create(&desc, NULL, &block));
  return block;
}

static void test_feed_forward_block(void) {
  polyhead_feed_forward_block* block = new_feed_forward_block(0);
  problem* p = new_problem(1, 1, 1, 1, 1, 1, 1);  // for its memory
  const int64_t matrix[] = {kSize, kSize}, vector[] = {kSize};
  polyhead_feed_forward_weights weights = {0}, gradients = {0};
  weights.weight1 = new_tensor(p, POLYHEAD_FLOAT32, 2, matrix);
  for (int n = 0; n < kSize; ++n) ((float*)weights.weight1.data)[n * (kSize + 1)] = 1;
  weights.weight2 = weights.weight1;
  weights.bias1 = weights.bias2 = new_tensor(p, POLYHEAD_FLOAT32, 1, vector);
  CHECK(polyhead_feed_forward_block_kernel_name(block)[0] != '\0');

  polyhead_feed_forward_block_forward_args args;
  CHECK_OK(polyhead_feed_forward_block_forward_args_init(&args, sizeof args));
  args.x = new_random_tensor(p, 3, kRows);
  args.weights = &weights;
  args.out = new_tensor(p, POLYHEAD_FLOAT32, 3, kRows);
  args.workspace_bytes = polyhead_feed_forward_block_workspace_bytes(block);
  args.workspace = new_workspace(p, args.workspace_bytes);
  args.reserve_bytes = polyhead_feed_forward_block_reserve_bytes(block);
  args.reserve = new_workspace(p, args.reserve_bytes);
  float twice[kNumbers];
  for (int n = 0; n < kNumbers; ++n) twice[n] = 2 * ((float*)args.x.data)[n];
  CHECK_OK(polyhead_feed_forward_block_forward(block, &args));
  expect_near(args.out.data, twice, kNumbers, 1e-6f, "a feed-forward block's out");

  polyhead_feed_forward_block_forward_args packed = args;
  packed.prepacked_weights_bytes = polyhead_feed_forward_block_prepacked_weights_bytes(block);
  void* memory = new_workspace(p, packed.prepacked_weights_bytes);
  CHECK_OK(polyhead_feed_forward_block_prepack_weights(block, &weights, memory, packed.prepacked_weights_bytes));
  CHECK_REFUSED(polyhead_feed_forward_block_prepack_weights(block, &weights, memory, 1), POLYHEAD_INVALID_ARGUMENT,
                "prepacked_weights_bytes is 1, needs ");
  packed.prepacked_weights = memory;
  packed.out = new_tensor(p, POLYHEAD_FLOAT32, 3, kRows);
  CHECK_OK(polyhead_feed_forward_block_forward(block, &packed));
  CHECK(memcmp(packed.out.data, args.out.data, sizeof twice) == 0);

  packed.stream = p;
  CHECK_REFUSED(polyhead_feed_forward_block_forward(block, &packed), POLYHEAD_INVALID_ARGUMENT,
                "stream is given, but the CPU has no streams");
  packed.stream = NULL;

  // Two dropouts that draw the same bits.
  polyhead_feed_forward_block* dropping = new_feed_forward_block(0.5);
  packed.reserve_bytes = polyhead_feed_forward_block_reserve_bytes(dropping);
  packed.reserve = new_workspace(p, packed.reserve_bytes);
  CHECK_REFUSED(polyhead_feed_forward_block_forward(dropping, &packed), POLYHEAD_INVALID_ARGUMENT,
                "output_dropout_seed is 0 and output_dropout_offset 0, with which inner_dropout draws too");
  CHECK(memcmp(packed.out.data, args.out.data, sizeof twice) == 0);
  packed.output_dropout_offset = 1;
  CHECK_OK(polyhead_feed_forward_block_forward(dropping, &packed));
  polyhead_feed_forward_block_destroy(dropping);

  polyhead_feed_forward_block_backward_args backward;
  CHECK_OK(polyhead_feed_forward_block_backward_args_init(&backward, sizeof backward));
  args.workspace_bytes = polyhead_feed_forward_block_backward_workspace_bytes(block);
  args.workspace = new_workspace(p, args.workspace_bytes);
  backward.forward = &args;
  backward.grad_out = new_random_tensor(p, 3, kRows);
  backward.grad_x = new_tensor(p, POLYHEAD_FLOAT32, 3, kRows);
  gradients.bias2 = new_tensor(p, POLYHEAD_FLOAT32, 1, vector);
  backward.grad_weights = &gradients;
  CHECK_OK(polyhead_feed_forward_block_backward(block, &backward));
  float sums[kSize] = {0};
  for (int n = 0; n < kNumbers; ++n) {
    twice[n] = 2 * ((float*)backward.grad_out.data)[n];
    sums[n % kSize] += ((float*)backward.grad_out.data)[n];
  }
  expect_near(backward.grad_x.data, twice, kNumbers, 1e-6f, "the gradient of x");
  expect_near(gradients.bias2.data, sums, kSize, 1e-5f, "the gradient of bias2");
  free_problem(p);
  polyhead_feed_forward_block_destroy(block);
}

static void test_block_errors(void) {
  const polyhead_status kInvalid = POLYHEAD_INVALID_ARGUMENT;
  polyhead_attention_block_desc attention;
  polyhead_attention_block_forward_args attend;
  polyhead_attention_block_backward_args attend_backward;
  polyhead_feed_forward_block_desc desc;
  polyhead_feed_forward_block_forward_args args;
  polyhead_feed_forward_block_backward_args backward;
  polyhead_attention_block* attention_block = NULL;
  polyhead_feed_forward_block* block = NULL;
  CHECK_REFUSED(polyhead_attention_block_desc_init(&attention, 8), kInvalid, "desc.struct_size is 8");
  CHECK_OK(polyhead_attention_block_desc_init(&attention, sizeof attention));
  CHECK_REFUSED(polyhead_attention_block_create(&attention, NULL, &attention_block), kInvalid,
                "desc.layer is a null pointer");
  CHECK_REFUSED(polyhead_attention_block_create(NULL, NULL, &attention_block), kInvalid, "desc is a null pointer");
  CHECK(polyhead_attention_block_layer(NULL) == NULL);
  CHECK(polyhead_attention_block_reserve_bytes(NULL) == 0);
  CHECK(strstr(polyhead_last_error(), "block is a null pointer") != NULL);
  polyhead_attention_block_destroy(NULL);
  polyhead_feed_forward_block_destroy(NULL);

  CHECK_OK(polyhead_feed_forward_block_desc_init(&desc, sizeof desc));
  desc.activation = 5;
  CHECK_REFUSED(polyhead_feed_forward_block_create(&desc, NULL, &block), kInvalid,
                "activation is 5, must be a polyhead_activation_kind: 0 to 4");
  desc.activation = POLYHEAD_SILU;
  polyhead_plan_options options;
  CHECK_OK(polyhead_plan_options_init(&options, sizeof options));
  options.device = POLYHEAD_CUDA;
  desc.dtype = POLYHEAD_FLOAT64;
  CHECK_REFUSED(polyhead_feed_forward_block_create(&desc, &options, &block), POLYHEAD_UNSUPPORTED, POLYHEAD_NO_CUDA);
  desc.dtype = POLYHEAD_FLOAT32;
  desc.norm.kind = 3;
  CHECK_REFUSED(polyhead_feed_forward_block_create(&desc, NULL, &block), kInvalid, "norm.kind is 3, must be a");
  desc.norm.kind = POLYHEAD_RMS_NORM;
  desc.norm.pre = 2;
  CHECK_REFUSED(polyhead_feed_forward_block_create(&desc, NULL, &block), kInvalid, "norm.pre is 2, must be 0 or 1");
  desc.norm.pre = 1;
  desc.inner_dropout_p = 2;
  CHECK_REFUSED(polyhead_feed_forward_block_create(&desc, NULL, &block), kInvalid, "inner_dropout_p is 2, must be");
  desc.reserved = 1;
  CHECK_REFUSED(polyhead_feed_forward_block_create(&desc, NULL, &block), kInvalid, "reserved is 1, must be 0");
  CHECK(block == NULL && polyhead_feed_forward_block_kernel_name(NULL)[0] == '\0');

  attention_block = new_attention_block();
  CHECK_OK(polyhead_attention_block_forward_args_init(&attend, sizeof attend));
  CHECK_OK(polyhead_attention_block_backward_args_init(&attend_backward, sizeof attend_backward));
  CHECK_REFUSED(polyhead_attention_block_forward(attention_block, &attend), kInvalid, "args.layer is a null pointer");
  CHECK_REFUSED(polyhead_attention_block_forward(NULL, &attend), kInvalid, "block is a null pointer");
  CHECK_REFUSED(polyhead_attention_block_backward(attention_block, &attend_backward), kInvalid,
                "args.forward is a null pointer");
  polyhead_attention_block_destroy(attention_block);
  block = new_feed_forward_block(0);
  CHECK_OK(polyhead_feed_forward_block_forward_args_init(&args, sizeof args));
  CHECK_OK(polyhead_feed_forward_block_backward_args_init(&backward, sizeof backward));
  CHECK_REFUSED(polyhead_feed_forward_block_forward(block, &args), kInvalid, "x is missing");
  CHECK_REFUSED(polyhead_feed_forward_block_forward(block, NULL), kInvalid, "args is a null pointer");
  CHECK_REFUSED(polyhead_feed_forward_block_backward(block, &backward), kInvalid, "args.forward is a null pointer");
  CHECK_REFUSED(polyhead_feed_forward_block_prepack_weights(block, NULL, NULL, 0), kInvalid,
                "weights is a null pointer");
  args.flags = 1;
  CHECK_REFUSED(polyhead_feed_forward_block_forward(block, &args), kInvalid, "args.flags is 1");
  polyhead_feed_forward_block_destroy(block);
}

void test_block(void) {
  test_attention_block();
  test_feed_forward_block();
  test_block_errors();
}
