// Layers as each source can store them, and their weights, to test with.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "polyhead/weights.h"
#include "testing/operands.h"

namespace polyhead::testing {

// Sizes that all differ, where a source allows it.
struct Shape {
  int64_t heads = 6, heads_kv = 3, dim = 4, dim_v = 10, query = 7, key = 11, value = 13, out = 5;
};

inline LayerDesc desc_of(const Shape& s, bool bias = true) {
  LayerDesc d;
  d.num_heads = s.heads, d.num_heads_kv = s.heads_kv;
  d.query_proj_size = d.key_proj_size = s.dim, d.value_proj_size = s.dim_v;
  d.query_size = s.query, d.key_size = s.key, d.value_size = s.value, d.out_proj_size = s.out;
  d.query_bias = d.key_bias = d.value_bias = d.out_bias = bias;
  return d;
}

// The nearest that `source` can store: fewer freedoms, until it takes the layer.
inline LayerDesc storable(std::string_view source) {
  Shape s;
  for (int step = 0; step < 64; ++step) {
    s = {};
    if (step & 1) s.heads_kv = s.heads;
    if (step & 2) s.dim_v = s.dim;
    if (step & 4) s.value = s.key;
    if (step & 8) s.value = s.key = s.query;
    LayerDesc d = desc_of(s, (step & 16) == 0);
    if (step & 32) d.out_proj_size = 0, d.out_bias = false;
    if (weight_views(source, d).ok()) return d;
  }
  ADD_FAILURE() << source << " stores no layer at all: " << weight_views(source, desc_of(s)).status().message();
  return {};
}

inline std::vector<int64_t> dims_of(const LayerDesc& d, WeightKind kind) {
  const int64_t q = d.num_heads * d.query_proj_size, k = d.num_heads_kv * d.key_proj_size;
  const int64_t v = d.num_heads_kv * d.value_proj_size, o = d.num_heads * d.value_proj_size;
  switch (kind) {
    case WeightKind::kQuery: return {d.query_size, q};
    case WeightKind::kKey: return {d.key_size, k};
    case WeightKind::kValue: return {d.value_size, v};
    case WeightKind::kOut: return {o, d.out_proj_size};
    case WeightKind::kQueryBias: return {q};
    case WeightKind::kKeyBias: return {k};
    case WeightKind::kValueBias: return {v};
    default: return {d.out_proj_size};
  }
}

// A layer's weights of random bits, NaN among them.
struct Weights {
  std::map<WeightKind, Array> arrays;

  Weights(const LayerDesc& d, DType dtype, uint64_t seed) {
    Random random(seed);
    for (int k = 0; k < kNumWeightKinds; ++k) {
      const auto kind = static_cast<WeightKind>(k);
      const bool has[] = {true, true, true, d.out_proj_size > 0, d.query_bias, d.key_bias, d.value_bias, d.out_bias};
      if (!has[k]) continue;
      Array& a = arrays[kind] = Array(dtype, dims_of(d, kind));
      for (uint8_t& byte : a.bytes) byte = static_cast<uint8_t>(random.bits());
    }
  }

  LayerWeights views() const {
    LayerWeights w;
    Tensor* const tensors[] = {&w.query,      &w.key,      &w.value,      &w.out,
                               &w.query_bias, &w.key_bias, &w.value_bias, &w.out_bias};
    for (const auto& [kind, array] : arrays) *tensors[static_cast<int>(kind)] = view(array);
    return w;
  }
};

// The arrays of a source, filled with `byte`.
struct Arrays {
  std::map<std::string, Array> all;

  Arrays(std::string_view source, const LayerDesc& d, DType dtype, uint8_t byte = 0) {
    const auto views = weight_views(source, d);
    if (!views.ok()) throw std::runtime_error(views.status().message());
    for (const WeightView& v : *views) {
      Array& a = all["layer." + std::string(v.array)] =
          Array(dtype, std::vector<int64_t>(v.array_dims, v.array_dims + v.array_ndim));
      std::fill(a.bytes.begin(), a.bytes.end(), byte);
    }
  }

  std::vector<NamedTensor> tensors() const {
    std::vector<NamedTensor> named{{"another.array", {}}};
    for (const auto& [name, array] : all) named.push_back({name, view(array)});
    return named;
  }
};

inline constexpr std::string_view kPrefix = "layer.";

inline LayerDesc with_scale(LayerDesc d, const WeightSource& source) {
  if (source.scale == SourceScale::kOne || source.scale == SourceScale::kAsked) d.attention.scale = 1;
  return d;
}

}  // namespace polyhead::testing
