#include "parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "polyhead/weights.h"
#include "testing/random.h"

namespace polyhead::demo {
namespace {

constexpr int64_t kAlignedFloats = 16;  // a cache line

std::string layer_name(int64_t layer, const char* name) { return fmt::format("h.{}.{}", layer, name); }

bool ends_with(const std::string& text, std::string_view end) { return std::string_view(text).ends_with(end); }

}  // namespace

Tensor Parameter::in(float* memory) const {
  if (dims.size() == 2) return Tensor(memory + offset, DType::kFloat32, {dims[0], dims[1]});
  return Tensor(memory + offset, DType::kFloat32, {dims[0]});
}

Parameters::Parameters(const ModelDesc& desc) : num_layers_(desc.num_layers) {
  const int64_t size = desc.size, inner = desc.inner_size;
  add("wte.weight", {kNumBytes, size});
  add("wpe.weight", {desc.context, size});
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    add(layer_name(layer, "attn.c_attn.weight"), {size, 3 * size});
    add(layer_name(layer, "attn.c_proj.weight"), {size, size});
    add(layer_name(layer, "mlp.c_fc.weight"), {size, inner});
    add(layer_name(layer, "mlp.c_proj.weight"), {inner, size});
  }
  num_decaying_ = size_;
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    add(layer_name(layer, "ln_1.weight"), {size});
    add(layer_name(layer, "ln_1.bias"), {size});
    add(layer_name(layer, "attn.c_attn.bias"), {3 * size});
    add(layer_name(layer, "attn.c_proj.bias"), {size});
    add(layer_name(layer, "ln_2.weight"), {size});
    add(layer_name(layer, "ln_2.bias"), {size});
    add(layer_name(layer, "mlp.c_fc.bias"), {inner});
    add(layer_name(layer, "mlp.c_proj.bias"), {size});
  }
  add("ln_f.weight", {size});
  add("ln_f.bias", {size});
}

void Parameters::add(std::string name, std::vector<int64_t> dims) {
  all_.push_back({std::move(name), size_, std::move(dims)});
  size_ += (all_.back().size() + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats;
}

void Parameters::initialize(uint64_t seed, float* memory) const {
  std::fill_n(memory, size_, 0.0f);
  for (size_t i = 0; i < all_.size(); ++i) {
    const Parameter& parameter = all_[i];
    float* const to = memory + parameter.offset;
    if (parameter.dims.size() == 1) {
      const bool factor = ends_with(parameter.name, ".weight");  // of a norm
      std::fill_n(to, parameter.size(), factor ? 1.0f : 0.0f);
      continue;
    }
    testing::Random random(seed, i);
    const bool adds_to_x = ends_with(parameter.name, "c_proj.weight");
    const double deviation = adds_to_x ? 0.02 / std::sqrt(2 * static_cast<double>(num_layers_)) : 0.02;
    for (int64_t n = 0; n < parameter.size(); ++n) to[n] = static_cast<float>(deviation * random.normal());
  }
}

Result<ModelParameters> bind(const ModelDesc& desc, const Parameters& parameters, float* memory) {
  std::vector<NamedTensor> arrays;
  for (const Parameter& parameter : parameters.all()) arrays.push_back({parameter.name, parameter.in(memory)});
  const auto find = [&](const std::string& name) {
    const auto found =
        std::find_if(arrays.begin(), arrays.end(), [&](const auto& array) { return array.name == name; });
    return found != arrays.end() ? found->tensor : Tensor();
  };
  ModelParameters bound;
  bound.byte_vectors = static_cast<float*>(find("wte.weight").data);
  bound.position_vectors = static_cast<float*>(find("wpe.weight").data);
  for (int64_t i = 0; i < desc.num_layers; ++i) {
    LayerParameters& to = bound.layers.emplace_back();
    Result<LayerWeights> attention = bind_weights("gpt2", layer_desc(desc, desc.batch), arrays, layer_name(i, "attn."));
    if (!attention.ok()) return attention.status();
    to.attention = *attention;
    to.attention_norm = {find(layer_name(i, "ln_1.weight")), find(layer_name(i, "ln_1.bias"))};
    to.feed_forward.weight1 = find(layer_name(i, "mlp.c_fc.weight"));
    to.feed_forward.bias1 = find(layer_name(i, "mlp.c_fc.bias"));
    to.feed_forward.weight2 = find(layer_name(i, "mlp.c_proj.weight"));
    to.feed_forward.bias2 = find(layer_name(i, "mlp.c_proj.bias"));
    to.feed_forward.norm = {find(layer_name(i, "ln_2.weight")), find(layer_name(i, "ln_2.bias"))};
  }
  bound.norm = {find("ln_f.weight"), find("ln_f.bias")};
  return bound;
}

}  // namespace polyhead::demo
