// Weights of other frameworks: where each source keeps an element, round trips, what is found out of shapes.
#include "polyhead/weights.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "weights_problem.h"

namespace polyhead::testing {
namespace {

using enum WeightKind;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

TEST(Weights, EverySourceRoundTripsBitForBit) {
  for (const WeightSource& source : weight_sources()) {
    SCOPED_TRACE(source.name);
    const LayerDesc d = with_scale(storable(source.name), source);
    for (const DType dtype : kDTypes) {
      const Weights weights(d, dtype, 1);
      Arrays arrays(source.name, d, dtype);
      ASSERT_EQ(export_weights(source.name, d, weights.views(), arrays.tensors(), kPrefix).message(), "");
      const Weights back(d, dtype, 2);
      ASSERT_EQ(import_weights(source.name, d, arrays.tensors(), back.views(), kPrefix).message(), "");
      EXPECT_EQ(back.arrays, weights.arrays);

      // Every element of every array is a weight's: none depends on what was there before.
      Arrays again(source.name, d, dtype, 0xff);
      ASSERT_EQ(export_weights(source.name, d, weights.views(), again.tensors(), kPrefix).message(), "");
      EXPECT_EQ(again.all, arrays.all);
    }
  }
}

TEST(Weights, ShapesTellTheLayer) {
  for (const WeightSource& source : weight_sources()) {
    SCOPED_TRACE(source.name);
    const LayerDesc d = with_scale(storable(source.name), source);
    const Arrays arrays(source.name, d, DType::kFloat32);
    LayerDesc known;
    known.num_heads = d.num_heads;
    known.num_heads_kv = 0;
    if (std::string_view(source.name) == "onnx_attention") {  // nothing but the sum of three sizes
      known.query_proj_size = d.query_proj_size;
      known.num_heads_kv = d.num_heads_kv;
    }
    const Result<LayerDesc> found = layer_desc_of(source.name, arrays.tensors(), known, kPrefix);
    ASSERT_EQ(found.status().message(), "");
    const auto numbers = [](const LayerDesc& l) {
      return std::vector<int64_t>{l.num_heads,       l.num_heads_kv,  l.query_size,      l.key_size,      l.value_size,
                                  l.query_proj_size, l.key_proj_size, l.value_proj_size, l.out_proj_size, l.query_bias,
                                  l.key_bias,        l.value_bias,    l.out_bias};
    };
    EXPECT_EQ(numbers(*found), numbers(d));
    EXPECT_EQ(found->attention.scale.has_value(), source.scale == SourceScale::kOne);
  }
}

// One element of a weight, and where the framework's own code has it.
struct Place {
  const char* source;
  WeightKind kind;
  int64_t e, h, d;  // of a bias: h, d (of out's: e)
  const char* array;
  std::vector<int64_t> index;
};

// Heads of 4, 6 of them (3 of keys where they may differ), head_dim_v 10 where it may differ; inputs 7, 11, 13, out 5.
const Place kPlaces[] = {
    {"polyhead", kKey, 9, 2, 3, "key_weight", {9, 11}},
    {"polyhead", kOut, 4, 5, 9, "out_weight", {59, 4}},
    {"torch", kQuery, 6, 5, 3, "in_proj_weight", {23, 6}},
    {"torch", kKey, 6, 2, 3, "in_proj_weight", {24 + 11, 6}},
    {"torch", kValue, 6, 2, 3, "in_proj_weight", {24 + 12 + 11, 6}},
    {"torch", kValueBias, 0, 1, 2, "in_proj_bias", {24 + 12 + 6}},
    {"torch", kOut, 4, 5, 3, "out_proj.weight", {4, 23}},
    {"torch_kdim_vdim", kKey, 10, 1, 2, "k_proj_weight", {6, 10}},
    {"torch_kdim_vdim", kKeyBias, 0, 1, 2, "in_proj_bias", {24 + 6}},
    {"keras", kValue, 12, 2, 9, "value/kernel", {12, 2, 9}},
    {"keras", kOut, 4, 5, 9, "attention_output/kernel", {5, 9, 4}},
    {"flax", kQueryBias, 0, 5, 3, "query/bias", {5, 3}},
    {"bert_tf", kKey, 10, 5, 3, "self/key/kernel", {10, 23}},
    {"bert", kKey, 10, 5, 3, "self.key.weight", {23, 10}},
    {"bert", kOut, 4, 5, 3, "output.dense.weight", {4, 23}},
    {"gpt2", kValue, 6, 5, 3, "c_attn.weight", {6, 48 + 23}},
    {"gpt2", kKeyBias, 0, 5, 3, "c_attn.bias", {24 + 23}},
    {"gpt2", kOut, 4, 5, 3, "c_proj.weight", {23, 4}},
    {"llama", kValue, 12, 2, 3, "v_proj.weight", {11, 12}},
    {"llama_meta", kQuery, 6, 5, 0, "wq.weight", {20, 6}},  // head_dim 4: pairs (0, 2), (1, 3)
    {"llama_meta", kQuery, 6, 5, 2, "wq.weight", {21, 6}},
    {"llama_meta", kKey, 9, 1, 1, "wk.weight", {6, 9}},
    {"llama_meta", kKey, 9, 1, 3, "wk.weight", {7, 9}},
    {"llama_meta", kValue, 9, 1, 3, "wv.weight", {7, 9}},
    {"t5", kOut, 4, 5, 3, "o.weight", {4, 23}},
    {"gpt_neox", kQuery, 6, 2, 3, "query_key_value.weight", {2 * 12 + 3, 6}},
    {"gpt_neox", kValue, 6, 2, 3, "query_key_value.weight", {2 * 12 + 8 + 3, 6}},
    {"bloom", kKeyBias, 0, 2, 3, "query_key_value.bias", {2 * 12 + 4 + 3}},
    {"timm", kKey, 6, 2, 3, "qkv.weight", {24 + 11, 6}},
    {"flash_attention", kKey, 6, 2, 3, "Wqkv.weight", {24 + 11, 6}},
    {"flash_attention_cross", kValue, 10, 2, 3, "Wkv.weight", {12 + 11, 10}},
    {"paddle_fused", kKey, 6, 2, 3, "qkv_weight", {1, 2, 3, 6}},
    {"paddle_fused", kOut, 4, 2, 3, "linear_weight", {11, 4}},
    {"paddle_fused_wb", kKey, 6, 2, 3, "qkv_weight", {6, 24 + 11}},
    {"paddle", kKey, 10, 2, 3, "k_proj.weight", {10, 11}},
    {"flux", kValue, 12, 2, 9, "v_proj.weight", {12, 29}},
    {"flux_out_in", kValue, 12, 2, 9, "v_proj.weight", {29, 12}},
    {"onnx_attention", kValue, 6, 2, 9, "weights", {6, 48 + 29}},
    {"cudnn", kQuery, 6, 2, 3, "Q_WEIGHTS", {2, 3, 6}},
    {"cudnn", kOut, 4, 2, 9, "O_WEIGHTS", {2, 4, 9}},
    {"cudnn", kOutBias, 4, 0, 0, "O_BIASES", {0, 4, 0}},
};

TEST(Weights, AnElementIsWhereTheFrameworkHasIt) {
  for (const Place& p : kPlaces) {
    SCOPED_TRACE(std::string(p.source) + " " + p.array);
    const LayerDesc d = storable(p.source);
    const auto views = weight_views(p.source, d);
    ASSERT_TRUE(views.ok());
    const auto found = std::find_if(views->begin(), views->end(), [&](const auto& v) { return v.kind == p.kind; });
    ASSERT_NE(found, views->end());
    EXPECT_STREQ(found->array, p.array);
    const Array array(DType::kFloat32, std::vector<int64_t>(found->array_dims, found->array_dims + found->array_ndim));
    const Tensor weight = found->in(view(array));
    std::vector<int64_t> at;  // e, h, d in the view's order, d split in two where the view is
    if (p.kind < kOut) at.push_back(p.e);
    if (p.kind != kOutBias) at.push_back(p.h);
    const bool pairs = weight.ndim == 4;
    if (pairs) at.push_back(p.d / (d.query_proj_size / 2));
    if (p.kind != kOutBias) at.push_back(pairs ? p.d % (d.query_proj_size / 2) : p.d);
    if (p.kind == kOut || p.kind == kOutBias) at.push_back(p.e);
    ASSERT_EQ(static_cast<size_t>(weight.ndim), at.size());
    int64_t offset = static_cast<const float*>(weight.data) - reinterpret_cast<const float*>(array.bytes.data());
    for (size_t i = 0; i < at.size(); ++i) {
      ASSERT_LT(at[i], weight.dims[i]);
      offset += at[i] * weight.strides[i];
    }
    EXPECT_EQ(offset, array.index(p.index));
  }
}

TEST(Weights, EverySourceHasItsPlaceInTheTest) {
  for (const WeightSource& source : weight_sources()) {
    EXPECT_TRUE(std::any_of(std::begin(kPlaces), std::end(kPlaces), [&](const Place& p) {
      return std::string_view(p.source) == source.name;
    })) << source.name;
  }
}

// Copies go block by block: more than one block each way, and pieces of one.
TEST(Weights, EveryElementOfLargerMatrices) {
  for (const char* source : {"llama", "llama_meta", "gpt_neox", "gpt2", "paddle_fused"}) {
    SCOPED_TRACE(source);
    LayerDesc d = storable(source);
    d.query_size = d.key_size = d.value_size = 70, d.out_proj_size = 33;
    d.query_proj_size = d.key_proj_size = d.value_proj_size = 34;
    const Weights weights(d, DType::kFloat64, 1), back(d, DType::kFloat64, 2);
    const Arrays arrays(source, d, DType::kFloat64);
    ASSERT_EQ(export_weights(source, d, weights.views(), arrays.tensors(), kPrefix).message(), "");
    const Result<std::vector<WeightView>> views = weight_views(source, d);
    ASSERT_EQ(views.status().message(), "");
    for (const WeightView& v : *views) {
      const Tensor stored = v.in(view(arrays.all.at("layer." + std::string(v.array))));
      const auto* ours = reinterpret_cast<const uint64_t*>(weights.arrays.at(v.kind).bytes.data());
      int64_t wrong = 0;
      for (int64_t n = 0; n < stored.num_elements(); ++n) {  // both in the order of the indices
        int64_t offset = 0, rest = n;
        for (int i = stored.ndim - 1; i >= 0; --i) {
          offset += rest % stored.dims[i] * stored.strides[i];
          rest /= stored.dims[i];
        }
        wrong += static_cast<const uint64_t*>(stored.data)[offset] != ours[n];
      }
      EXPECT_EQ(wrong, 0) << v.array;
    }
    ASSERT_EQ(import_weights(source, d, arrays.tensors(), back.views(), kPrefix).message(), "");
    EXPECT_EQ(back.arrays, weights.arrays);
  }
}

TEST(Weights, DtypesConvertWithOneRounding) {
  const LayerDesc d = storable("llama");
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      if (from == to) continue;
      Arrays arrays("llama", d, from);
      Random random(7);
      for (auto& [name, array] : arrays.all) {
        for (int64_t n = 0; n < array.size(); ++n) array.set(n, random.normal() * (n % 5 == 0 ? 1e-6 : 1));
      }
      const Weights weights(d, to, 3);
      ASSERT_EQ(import_weights("llama", d, arrays.tensors(), weights.views(), kPrefix).message(), "");
      const Array &stored = arrays.all.at("layer.q_proj.weight"), &got = weights.arrays.at(kQuery);
      Array want(to, {1});
      for (int64_t e = 0; e < d.query_size; ++e) {
        for (int64_t n = 0; n < stored.dims[0]; ++n) {
          want.set(0, stored.at(stored.index({n, e})));
          EXPECT_EQ(got.at(got.index({e, n})), want.at(0)) << dtype_name(from) << " to " << dtype_name(to);
        }
      }
    }
  }
}

// cuDNN reports [H, P, S] with strides [P, 1, H * P]: x W has its W in rows. Nothing of that is assumed.
TEST(Weights, CudnnByReportedStrides) {
  LayerDesc d = storable("cudnn");
  d.attention.scale = 0.5;
  const Weights weights(d, DType::kFloat32, 1);
  Arrays arrays("cudnn", d, DType::kFloat32);
  std::vector<NamedTensor> reported = arrays.tensors();
  for (NamedTensor& each : reported) {
    if (!each.tensor.given() || each.tensor.dims[2] == 1) continue;
    const int64_t H = each.tensor.dims[0], P = each.tensor.dims[1], S = each.tensor.dims[2];
    const bool out = each.name == "layer.O_WEIGHTS";  // dims [H, oP, vP], strides [oP * vP, 1, oP]
    const int64_t strides[] = {out ? P * S : P, 1, out ? P : H * P};
    std::copy(strides, strides + 3, each.tensor.strides);
  }
  ASSERT_EQ(export_weights("cudnn", d, weights.views(), reported, kPrefix).message(), "");
  // Seen on a device: W_Q is the row-major matrix [S][H * P], W_O the row-major matrix [H * vP][oP].
  EXPECT_EQ(arrays.all.at("layer.Q_WEIGHTS").bytes, weights.arrays.at(kQuery).bytes);
  EXPECT_EQ(arrays.all.at("layer.O_WEIGHTS").bytes, weights.arrays.at(kOut).bytes);
  const Weights back(d, DType::kFloat32, 2);
  ASSERT_EQ(import_weights("cudnn", d, reported, back.views(), kPrefix).message(), "");
  EXPECT_EQ(back.arrays, weights.arrays);
  const Result<LayerWeights> bound = bind_weights("cudnn", d, reported, kPrefix);
  ASSERT_EQ(bound.status().message(), "");
  EXPECT_EQ(bound->out.strides[0], d.out_proj_size);
}

TEST(Weights, BoundInPlace) {
  int bound_sources = 0;
  for (const WeightSource& source : weight_sources()) {
    SCOPED_TRACE(source.name);
    const LayerDesc d = with_scale(storable(source.name), source);
    const Weights weights(d, DType::kFloat32, 1);
    const Arrays arrays(source.name, d, DType::kFloat32);
    ASSERT_EQ(export_weights(source.name, d, weights.views(), arrays.tensors(), kPrefix).message(), "");
    const Result<LayerWeights> bound = bind_weights(source.name, d, arrays.tensors(), kPrefix);
    const std::string_view name = source.name;
    if (name == "llama_meta" || name == "gpt_neox" || name == "bloom" || name == "cudnn") {
      ASSERT_FALSE(bound.ok());
      EXPECT_NE(bound.status().message().find("import it"), std::string::npos);
      continue;
    }
    ASSERT_EQ(bound.status().message(), "");
    ++bound_sources;
    // What is bound has the weights' elements: exported to the layer's own form, it is the weights.
    Arrays copied("polyhead", d, DType::kFloat32);
    ASSERT_EQ(export_weights("polyhead", d, *bound, copied.tensors(), kPrefix).message(), "");
    EXPECT_EQ(copied.all.at("layer.query_weight"), weights.arrays.at(kQuery));
    EXPECT_EQ(copied.all.at("layer.value_weight"), weights.arrays.at(kValue));
    if (d.out_proj_size > 0) {
      EXPECT_EQ(copied.all.at("layer.out_weight"), weights.arrays.at(kOut));
    }
  }
  EXPECT_GE(bound_sources, 18);
}

// A bound weight of another dtype, and arrays that lie transposed, backwards, or with gaps.
TEST(Weights, AnyStrides) {
  const LayerDesc d = storable("llama");
  const Weights weights(d, DType::kBFloat16, 1);
  Arrays arrays("llama", d, DType::kBFloat16);
  std::vector<Array> memory;
  memory.reserve(arrays.all.size() + 1);
  std::vector<NamedTensor> named;
  int way = 0;
  for (const auto& [name, array] : arrays.all) {
    Tensor t = view(array);
    memory.emplace_back(DType::kBFloat16, std::vector<int64_t>{3 * array.size() + 8});
    auto* data = reinterpret_cast<uint16_t*>(memory.back().bytes.data());
    if (t.ndim == 2 && way % 3 == 0) t.strides[0] = 1, t.strides[1] = t.dims[0];
    if (way % 3 == 1) {
      for (int i = 0; i < t.ndim; ++i) data += (t.dims[i] - 1) * t.strides[i], t.strides[i] = -t.strides[i];
    }
    if (way % 3 == 2) {
      for (int i = 0; i < t.ndim; ++i) t.strides[i] *= 3;
    }
    ++way;
    t.data = data;
    named.push_back({name, t});
  }
  ASSERT_EQ(export_weights("llama", d, weights.views(), named, kPrefix).message(), "");
  const Weights back(d, DType::kBFloat16, 2);
  ASSERT_EQ(import_weights("llama", d, named, back.views(), kPrefix).message(), "");
  EXPECT_EQ(back.arrays, weights.arrays);
}

}  // namespace
}  // namespace polyhead::testing
