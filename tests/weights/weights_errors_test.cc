// Weights of other frameworks: what is refused, in which words, and hostile shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "core/layout.h"
#include "polyhead/weights.h"
#include "weights_problem.h"

namespace polyhead::testing {
namespace {

struct Refusal {
  const char* words;
  const char* source;
  LayerDesc desc;
};

TEST(Weights, ALayerThatASourceCannotStore) {
  const auto with = [](const char* source, auto change) {
    LayerDesc d = storable(source);
    change(d);
    return d;
  };
  const Refusal refusals[] = {
      {"source is \"gpt3\", must be one of polyhead, torch, ", "gpt3", {}},
      {"gpt2 keeps num_heads_kv equal to num_heads, not 3 and 6", "gpt2",
       with("gpt2", [](LayerDesc& d) { d.num_heads_kv = 3; })},
      {"llama keeps head_dim_v equal to head_dim, not 5 and 4", "llama",
       with("llama", [](LayerDesc& d) { d.value_proj_size = 5; })},
      {"num_heads_kv is 4, must divide num_heads 6", "llama", with("llama", [](LayerDesc& d) { d.num_heads_kv = 4; })},
      {"in_proj_weight holds several weights: key_size is 8, must be query_size 7", "torch",
       with("torch", [](LayerDesc& d) { d.key_size = 8; })},
      {"in_proj_bias of torch holds several weights, the layer has no key bias", "torch",
       with("torch", [](LayerDesc& d) { d.key_bias = false; })},
      {"t5 has no query bias", "t5", with("t5", [](LayerDesc& d) { d.query_bias = true; })},
      {"onnx_attention has no out weight", "onnx_attention",
       with("onnx_attention", [](LayerDesc& d) { d.out_proj_size = 5; })},
      {"bert always has the out weight, the layer has none", "bert",
       with("bert", [](LayerDesc& d) { d.out_proj_size = 0, d.out_bias = false; })},
      {"a head of q has 4 elements, one of k has 5", "llama", with("llama", [](LayerDesc& d) { d.key_proj_size = 5; })},
      {"value_size is -1, must not be negative", "llama", with("llama", [](LayerDesc& d) { d.value_size = -1; })},
      {"head_dim is 3, must be even", "llama_meta",
       with("llama_meta", [](LayerDesc& d) { d.query_proj_size = d.key_proj_size = d.value_proj_size = 3; })},
      {"would have more than 2^63 elements", "llama", with("llama", [](LayerDesc& d) { d.query_size = INT64_MAX; })},
      {"the layer has no projection for its query bias", "cudnn",
       with("cudnn", [](LayerDesc& d) { d.query_proj_size = 0, d.query_size = d.key_proj_size; })},
  };
  for (const Refusal& r : refusals) {
    const auto views = weight_views(r.source, r.desc);
    ASSERT_FALSE(views.ok()) << r.words;
    EXPECT_NE(views.status().message().find(r.words), std::string::npos) << views.status().message();
  }
}

// Whatever is wrong, it is said by name, and the weights are as they were.
TEST(Weights, WrongArraysAreNamedAndNothingIsWritten) {
  const LayerDesc d = storable("llama");
  Arrays good("llama", d, DType::kFloat32);
  const auto error = [&](const std::vector<NamedTensor>& arrays, const LayerWeights* into = nullptr) {
    const Weights weights(d, DType::kFloat32, 1), before(d, DType::kFloat32, 1);
    const Status status = import_weights("llama", d, arrays, into != nullptr ? *into : weights.views(), kPrefix);
    EXPECT_TRUE(status.ok() || weights.arrays == before.arrays);
    return status.message();
  };
  const auto changed = [&](const char* name, auto change) {
    std::vector<NamedTensor> arrays = good.tensors();
    for (NamedTensor& each : arrays) {
      if (each.name == name) change(each);
    }
    return error(arrays);
  };
  EXPECT_EQ(error(good.tensors()), "");
  EXPECT_EQ(changed("layer.q_proj.weight", [](NamedTensor& a) { a.tensor.dims[0] = 25; }),
            "layer.q_proj.weight is [25, 7], expected [24, 7]: [num_heads * head_dim, query_size]");
  EXPECT_EQ(changed("layer.o_proj.weight", [](NamedTensor& a) { a.tensor.ndim = 1; }),
            "layer.o_proj.weight is [5], expected [5, 24]: [out_proj_size, num_heads * head_dim_v]");
  EXPECT_EQ(changed("layer.k_proj.bias", [](NamedTensor& a) { a.tensor.dtype = DType::kInt32; }),
            "layer.k_proj.bias is int32, takes float32, bfloat16, float16 or float64");
  EXPECT_EQ(changed("layer.k_proj.bias", [](NamedTensor& a) { a.tensor.data = nullptr; }),
            "layer.k_proj.bias is null, has 12 elements");
  EXPECT_EQ(changed("layer.k_proj.bias", [](NamedTensor& a) { a.tensor.device = Device::kCuda; }),
            "layer.k_proj.bias is not on the CPU");
  EXPECT_EQ(changed("layer.k_proj.bias", [](NamedTensor& a) { a.tensor.strides[0] = INT64_MAX / 4; }),
            "layer.k_proj.bias reaches beyond the address space, by its strides");
  EXPECT_EQ(changed("layer.v_proj.bias", [](NamedTensor& a) { a.name = "layer.k_proj.bias"; }),
            "array \"layer.k_proj.bias\" is given twice");
  EXPECT_NE(changed("layer.v_proj.weight", [](NamedTensor& a) { a.name = "model.v_proj.weight"; })
                .find("array \"layer.v_proj.weight\" of llama is missing; with prefix \"model.\" there is one"),
            std::string::npos);
  EXPECT_NE(changed("layer.k_proj.weight", [](NamedTensor& a) { a.name = "\x1b[2J"; }).find("\"?[2J\""),
            std::string::npos);
  LayerWeights into = Weights(d, DType::kFloat32, 1).views();
  into.key = into.value;
  EXPECT_NE(error(good.tensors(), &into).find("weights.key is [13, 12], expected [11, 12]"), std::string::npos);
  const Weights target(d, DType::kFloat32, 1);
  into = target.views();
  into.query_bias.strides[0] = 0;
  EXPECT_EQ(error(good.tensors(), &into), "weights.query_bias overlaps itself: two indices name one element");
  into = target.views();
  into.value_bias.data = into.key_bias.data;
  EXPECT_EQ(error(good.tensors(), &into), "weights.value_bias overlaps weights.key_bias");
  into = target.views();
  into.out_bias.data = good.all.at("layer.q_proj.weight").bytes.data();
  EXPECT_EQ(error(good.tensors(), &into), "weights.out_bias overlaps layer.q_proj.weight");
}

TEST(Weights, NamesOfAnotherSourceAreRecognised) {
  const LayerDesc d = storable("torch_kdim_vdim");
  const Arrays arrays("torch_kdim_vdim", d, DType::kFloat32);
  const auto found = layer_desc_of("torch", arrays.tensors(), d, kPrefix);
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.status().message(),
            "array \"layer.in_proj_weight\" of torch is missing; the arrays have the names of torch_kdim_vdim");
}

TEST(Weights, ShapesThatCannotBe) {
  const auto error = [](std::vector<NamedTensor> arrays, int64_t num_heads, int64_t num_heads_kv = 0,
                        const char* source = "llama") {
    LayerDesc known;
    known.num_heads = num_heads, known.num_heads_kv = num_heads_kv;
    return layer_desc_of(source, arrays, known).status().message();
  };
  std::vector<float> memory(1 << 12);
  const auto array = [&](std::initializer_list<int64_t> dims) { return Tensor(memory.data(), DType::kFloat32, dims); };
  std::vector<NamedTensor> llama = {{"q_proj.weight", array({32, 8})},
                                    {"k_proj.weight", array({16, 8})},
                                    {"v_proj.weight", array({16, 8})},
                                    {"o_proj.weight", array({8, 32})}};
  EXPECT_EQ(error(llama, 8), "");
  EXPECT_EQ(error(llama, 8, 4), "");
  EXPECT_EQ(error(llama, 0), "num_heads is 0, must be at least 1");
  EXPECT_EQ(error(llama, 7),
            "q_proj.weight is [32, 8], expected [num_heads * head_dim, query_size], where num_heads is 7");
  EXPECT_EQ(error(llama, 8, 2), "k_proj.weight is [16, 8], expected [8, 8]: [num_heads_kv * head_dim, key_size]");
  EXPECT_EQ(error(llama, 8, -1), "num_heads_kv is -1, must not be negative");
  llama[2].tensor = array({20, 8});
  EXPECT_EQ(error(llama, 8), "v_proj.weight is [20, 8], expected [16, 8]: [num_heads_kv * head_dim_v, value_size]");
  llama[2].tensor = array({16, 8});
  llama.push_back({"q_norm.weight", array({4})});
  EXPECT_NE(error(llama, 8).find("q_norm.weight is there: it changes what llama computes"), std::string::npos);
  EXPECT_EQ(error({{"self.query.weight", array({32, 8})},
                   {"self.key.weight", array({16, 8})},
                   {"self.value.weight", array({16, 8})},
                   {"output.dense.weight", array({8, 32})}},
                  8, 0, "bert"),
            "self.key.weight is [16, 8], expected [32, 8]: [num_heads_kv * head_dim, key_size]");
  EXPECT_NE(error({}, 8).find("array \"q_proj.weight\" of llama is missing; there is none"), std::string::npos);
  EXPECT_NE(error({}, 8, 0, "cudnn").find("none of the arrays of cudnn is there"), std::string::npos);
}

TEST(Weights, ScalesOfTheirOwn) {
  const LayerDesc d = storable("t5");
  const Weights weights(d, DType::kFloat32, 1);
  const Arrays arrays("t5", d, DType::kFloat32);
  EXPECT_EQ(import_weights("t5", d, arrays.tensors(), weights.views(), kPrefix).message(),
            "t5 has scale 1, the layer 1 / sqrt(head_dim): set attention.scale");
  EXPECT_EQ(export_weights("t5", d, weights.views(), arrays.tensors(), kPrefix).message(),
            "the scale is 0.5, that of t5 is 1: multiply the query weight and bias by 0.5 first");
  LayerDesc scaled = storable("bert");
  scaled.attention.scale = 1;
  EXPECT_EQ(export_weights("bert", scaled, Weights(scaled, DType::kFloat32, 1).views(),
                           Arrays("bert", scaled, DType::kFloat32).tensors(), kPrefix)
                .message(),
            "the scale is 1, that of bert is 0.5: multiply the query weight and bias by 2 first");
  const LayerDesc cudnn = storable("cudnn");
  EXPECT_EQ(import_weights("cudnn", cudnn, Arrays("cudnn", cudnn, DType::kFloat32).tensors(),
                           Weights(cudnn, DType::kFloat32, 1).views(), kPrefix)
                .message(),
            "cudnn has its caller's scale, the layer 1 / sqrt(head_dim): set attention.scale");
}

// Whether the elements of all lie in the memory that their tensors name.
bool all_within(const std::vector<NamedTensor>& arrays, const std::vector<uint8_t>& memory) {
  return std::all_of(arrays.begin(), arrays.end(), [&](const NamedTensor& each) {
    MemoryRange range;
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    return memory_range(each.tensor, &range) && range.begin >= begin && range.end <= begin + memory.size();
  });
}

// Any names, dims, strides and types: an answer, never a crash. POLYHEAD_TEST_COUNT tries more.
TEST(Weights, HostileShapes) {
  const char* told = std::getenv("POLYHEAD_TEST_COUNT");
  const int count = told != nullptr ? std::atoi(told) : 3000;
  Random random(5);
  std::vector<uint8_t> memory(1 << 16);
  constexpr int64_t kNumbers[] = {0, 1, 2, 3, 4, 6, 8, 12, 24, 1 << 16, INT64_MAX, INT64_MIN, -1, int64_t{1} << 40};
  const auto number = [&](int64_t small) {
    return random.chance(0.9) ? random.integer(1, small) : kNumbers[random.integer(0, std::ssize(kNumbers) - 1)];
  };
  int accepted = 0, imported = 0;
  for (int i = 0; i < count; ++i) {
    const auto sources = weight_sources();
    const WeightSource& source = sources[static_cast<size_t>(random.integer(0, std::ssize(sources) - 1))];
    LayerDesc known;
    known.num_heads = number(4), known.num_heads_kv = random.chance(0.5) ? 0 : number(4);
    std::vector<NamedTensor> arrays;
    const LayerDesc like = storable(source.name);
    const auto views = weight_views(source.name, like);
    for (const WeightView& v : *views) {
      if (random.chance(0.05) || (!arrays.empty() && arrays.back().name == v.array)) continue;
      Tensor t;
      t.data = memory.data(), t.dtype = static_cast<DType>(random.integer(0, random.chance(0.9) ? 3 : 7));
      t.ndim = random.chance(0.95) ? v.array_ndim : static_cast<int32_t>(random.integer(0, 7));
      int64_t stride = 1;
      for (int n = std::min(t.ndim, 5) - 1; n >= 0; --n) {
        t.dims[n] = random.chance(0.9) ? v.array_dims[n] : number(30);
        t.strides[n] = random.chance(0.95) ? stride : number(30);
        if (__builtin_mul_overflow(stride, t.dims[n], &stride)) stride = 1;
      }
      arrays.push_back({v.array, t});
    }
    if (random.chance(0.7)) known.num_heads = like.num_heads;
    const auto desc = layer_desc_of(source.name, arrays, known);
    if (!desc.ok()) {
      EXPECT_FALSE(desc.status().message().empty());
      continue;
    }
    ++accepted;
    const auto found = weight_views(source.name, *desc);
    ASSERT_TRUE(found.ok()) << found.status().message();  // what was found is a layer that the source can store
    (void)bind_weights(source.name, *desc, arrays).ok();
    if (!all_within(arrays, memory)) continue;
    const Weights weights(*desc, DType::kFloat16, 1);
    LayerDesc scaled = *desc;
    scaled.attention.scale = 1;
    imported += import_weights(source.name, scaled, arrays, weights.views()).ok();
  }
  EXPECT_GT(accepted, count / 20);
  EXPECT_GT(imported, count / 30);
}

}  // namespace
}  // namespace polyhead::testing
