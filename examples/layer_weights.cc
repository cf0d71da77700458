// A layer of self-attention: where its weights lie in one buffer, weights of torch used where they are, a training step.
#include <polyhead/layer.h>
#include <polyhead/weights.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

constexpr int64_t kBatch = 2, kTokens = 16, kSize = 32, kHeads = 4;

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};
static std::unique_ptr<void, Freed> aligned_bytes(size_t bytes) {  // to 64, which workspace and reserve need
  return std::unique_ptr<void, Freed>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
}
static polyhead::Tensor vectors(std::vector<float>& x) {
  return {x.data(), polyhead::DType::kFloat32, {kBatch, kTokens, kSize}};
}
static int failed(const polyhead::Status& status) { return std::fprintf(stderr, "%s\n", status.message().c_str()), 1; }

int main() {
  // [what to compute]
  polyhead::LayerDesc desc;
  desc.batch = kBatch;
  desc.seqlen_q = desc.seqlen_k = kTokens;
  desc.num_heads = desc.num_heads_kv = kHeads;
  desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = kSize;
  desc.query_proj_size = desc.key_proj_size = desc.value_proj_size = kSize / kHeads;
  desc.attention.causal = true;
  const auto layer = polyhead::layer(desc);
  if (!layer.ok()) return failed(layer.status());

  // [torch's arrays] as nn.MultiheadAttention keeps them: rows are outputs, q, k and v one above the other.
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.2f);
  std::vector<float> in_proj(3 * kSize * kSize), out_proj(kSize * kSize), x(kBatch * kTokens * kSize);
  for (auto* numbers : {&in_proj, &out_proj, &x}) {
    for (float& number : *numbers) number = normal(random);
  }
  const std::vector<polyhead::NamedTensor> arrays = {
      {"in_proj_weight", {in_proj.data(), desc.dtype, {3 * kSize, kSize}}},
      {"out_proj.weight", {out_proj.data(), desc.dtype, {kSize, kSize}}}};

  // [in one buffer] copied into the layer's own layout, y = x W; the key's matrix lies where weight_layout tells.
  std::vector<float> buffer(layer->weights_bytes() / sizeof(float));
  const polyhead::LayerWeights own = layer->weights_in(buffer.data());
  if (auto status = polyhead::import_weights("torch", desc, arrays, own); !status.ok()) return failed(status);
  const polyhead::WeightLayout key = layer->weight_layout(polyhead::WeightKind::kKey);
  const float in_ours = buffer[key.offset + 3 * key.strides[0] + 5 * key.strides[1]];  // input 3, output 5
  if (in_ours != in_proj[(kSize + 5) * kSize + 3]) return 1;

  // [forward] with a reserve: what backward needs.
  std::vector<float> y(x.size()), grad_y(x.size()), gradients(buffer.size());
  const size_t bytes = std::max(layer->workspace_bytes(), layer->backward_workspace_bytes());
  const auto workspace = aligned_bytes(bytes), reserve = aligned_bytes(layer->reserve_bytes());
  polyhead::LayerBackwardArgs args;
  polyhead::LayerForwardArgs& forward = args.forward;
  forward.query = forward.key = forward.value = vectors(x);
  forward.weights = own;
  forward.out = vectors(y);
  forward.workspace = workspace.get(), forward.workspace_bytes = bytes;
  forward.reserve = reserve.get(), forward.reserve_bytes = layer->reserve_bytes();

  // [training] towards y = 0: the loss is y^2 / 2, whose gradient is y.
  args.grad_out = vectors(grad_y);
  args.grad_weights = layer->weights_in(gradients.data());
  double first = 0, loss = 0;
  for (int step = 0; step < 50; ++step) {
    if (auto status = layer->forward(forward); !status.ok()) return failed(status);
    grad_y = y;
    loss = 0;
    for (const float each : y) loss += each * each / 2;
    if (step == 0) first = loss;
    if (auto status = layer->backward_data(args); !status.ok()) return failed(status);
    if (auto status = layer->backward_weights(args); !status.ok()) return failed(status);
    for (size_t i = 0; i < buffer.size(); ++i) buffer[i] -= 0.01f * gradients[i];
  }
  std::printf("loss %.3g, after 50 steps %.3g\n", first, loss);
  if (!(loss < first / 2)) return 1;

  // [in place] torch's arrays bound as they are: nothing is copied, forward reads them by their strides.
  const auto bound = polyhead::bind_weights("torch", desc, arrays);
  if (!bound.ok()) return failed(bound.status());
  forward.weights = *bound;
  if (auto status = layer->forward(forward); !status.ok()) return failed(status);
  double again = 0;
  for (const float each : y) again += each * each / 2;
  std::printf("%s: with the first weights again %.3g\n", layer->kernel_name(), again);
  return std::fabs(again - first) < 1e-4 * first ? 0 : 1;
}
