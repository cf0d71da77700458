// What layers refuse, in which words, and that they allocate nothing. Results: layer_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <string>
#include <vector>

#include "count_allocations.h"
#include "polyhead/layer.h"

namespace polyhead {
namespace {

LayerDesc good_desc() {
  LayerDesc d;
  d.batch = 2;
  d.seqlen_q = 3, d.seqlen_k = 4;
  d.num_heads = 4, d.num_heads_kv = 2;
  d.query_size = 6, d.key_size = 5, d.value_size = 7;
  d.query_proj_size = d.key_proj_size = 4;
  d.value_proj_size = 3;
  d.out_proj_size = 8;
  d.query_bias = d.out_bias = d.residual = d.has_windows = true;
  d.attention.has_seqlens_k = true;
  d.attention.attn_bias = {true, DType::kFloat32, {1, 4, 3, 4}};
  d.attention.dropout_p = 0.1;
  d.attention.return_weights = ReturnWeights::kMean;
  return d;
}

// A call with everything that the layer takes. Outputs hold 7, and so show when they are touched.
class SmallCall {
 public:
  explicit SmallCall(const Layer& layer) : layer_(layer) {
    const LayerDesc& d = layer.desc();
    LayerForwardArgs& a = args.forward;
    a.query = floats({d.batch, d.seqlen_q, d.query_size}, 1);
    a.key = floats({d.batch, d.seqlen_k, d.key_size}, 1);
    a.value = floats({d.batch, d.seqlen_k, d.value_size}, 1);
    if (d.residual) a.residual = floats({d.batch, d.seqlen_q, d.out_proj_size}, 1);
    a.weights = layer.weights_in(memory(layer.weights_bytes(), 0));
    a.attn_bias = floats({1, 4, d.seqlen_q, d.seqlen_k}, 1);
    a.seqlens_k = integers({4, 2});
    a.window_lo = integers({0, 1, 2});
    a.window_hi = integers({3, 4, 4});
    a.out = output({d.batch, d.seqlen_q, d.out_proj_size});
    a.attn_weights = output({d.batch, d.seqlen_q, d.seqlen_k});
    args.grad_out = floats({d.batch, d.seqlen_q, d.out_proj_size}, 1);
    args.grad_query = output({d.batch, d.seqlen_q, d.query_size});
    args.grad_key = output({d.batch, d.seqlen_k, d.key_size});
    args.grad_attn_bias = output({1, 4, d.seqlen_q, d.seqlen_k});
    args.grad_weights.query = output({d.query_size, 16});
    args.grad_weights.out_bias = output({d.out_proj_size});
    a.dropout_seed = 3;
    a.reserve_bytes = layer.reserve_bytes();
    a.reserve = memory(a.reserve_bytes, 0);
    a.workspace_bytes = std::max(layer.workspace_bytes(), layer.backward_workspace_bytes());
    a.workspace = memory(a.workspace_bytes, 0xff);
  }

  LayerBackwardArgs args;

  Status forward() const { return layer_.forward(args.forward); }
  Status backward_data() const { return layer_.backward_data(args); }
  Status backward_weights() const { return layer_.backward_weights(args); }

  // Without a reserve, one step with caches.
  void make_step(int64_t step) {
    const LayerDesc& d = layer_.desc();
    LayerForwardArgs& a = args.forward;
    a.reserve = nullptr;
    a.step = step;
    a.query = floats({d.batch, 1, d.query_size}, 1);
    a.key = floats({d.batch, 1, d.key_size}, 1);
    a.value = floats({d.batch, 1, d.value_size}, 1);
    a.residual = floats({d.batch, 1, d.out_proj_size}, 1);
    a.out = output({d.batch, 1, d.out_proj_size});
    a.attn_weights = output({d.batch, 1, d.seqlen_k});
    a.key_cache = output({d.batch, d.seqlen_k, 2, 4});
    a.value_cache = output({d.batch, d.seqlen_k, 2, 3});
  }

  bool outputs_untouched() const {
    for (const Tensor& t : outputs_) {
      for (int64_t n = 0; n < t.num_elements(); ++n) {
        if (static_cast<const float*>(t.data)[n] != 7) return false;
      }
    }
    return true;
  }

  Tensor floats(std::initializer_list<int64_t> dims, float value) {
    Tensor t(nullptr, DType::kFloat32, dims);
    floats_.emplace_back(static_cast<size_t>(t.num_elements()), value);
    t.data = floats_.back().data();
    return t;
  }
  Tensor output(std::initializer_list<int64_t> dims) {
    outputs_.push_back(floats(dims, 7));
    return outputs_.back();
  }
  Tensor integers(std::initializer_list<int64_t> values) {
    integers_.emplace_back(values);
    return Tensor(integers_.back().data(), DType::kInt64, {static_cast<int64_t>(values.size())});
  }

 private:
  void* memory(size_t bytes, int fill) {
    memory_.emplace_back(bytes + 64);
    char* start = memory_.back().data();
    start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
    std::memset(start, fill, bytes);
    return start;
  }

  const Layer& layer_;
  std::deque<std::vector<float>> floats_;
  std::deque<std::vector<int64_t>> integers_;
  std::deque<std::vector<char>> memory_;
  std::vector<Tensor> outputs_;
};

void set(const Tensor& t, int64_t n, int64_t value) { static_cast<int64_t*>(t.data)[n] = value; }

struct BadDesc {
  void (*change)(LayerDesc& d);
  std::string message;
};

const BadDesc kBadDescs[] = {
    {[](auto& d) { d.beam = -1; }, "beam is -1, must not be negative"},
    {[](auto& d) { d.value_proj_size = -4; }, "value_proj_size is -4, must not be negative"},
    {[](auto& d) { d.beam = 0; }, "beam is 0, must be at least 1"},
    {[](auto& d) { d.beam = 3, d.beam_kv = 2; }, "beam_kv is 2, must be 1 (shared by all beams) or beam 3"},
    {[](auto& d) { d.num_heads_kv = 3; }, "num_heads_kv is 3, must divide num_heads 4"},
    {[](auto& d) { d.key_proj_size = 5; },
     "heads of query and key must be as long: query_proj_size is 4, key_proj_size is 5"},
    {[](auto& d) { d.query_proj_size = 0, d.query_bias = false; },
     "heads of query and key must be as long: query_size is 6, key_proj_size is 4"},
    {[](auto& d) { d.out_proj_size = 0; },
     "out_bias is asked for, but out_proj_size is 0: there is no such projection"},
    {[](auto& d) { d.output_dropout_p = 1.5; }, "output_dropout_p is 1.5, must be 0 to 1"},
    {[](auto& d) { d.output_dropout_p = NAN; }, "output_dropout_p is nan, must be 0 to 1"},
    {[](auto& d) { d.attention.dropout_p = -1; }, "dropout_p is -1, must be 0 to 1"},
    {[](auto& d) { d.attention.seqlen_q = 3; }, "attention.seqlen_q is 3, must be left at 0: the layer sets it"},
    {[](auto& d) { d.attention.packed = true; }, "attention.packed is true, a layer takes no packed sequences"},
    {[](auto& d) { d.attention.return_column_sums = true; },
     "attention.return_column_sums is true, a layer returns none"},
    {[](auto& d) { d.attention.dtype = DType::kFloat16; },
     "attention.dtype is float16, must be left at float32: the layer's dtype counts"},
    {[](auto& d) { d.attention.out_dtype = DType::kFloat32; },
     "attention.out_dtype is given, a layer's results have its dtype"},
    {[](auto& d) { d.attention.grad_dtype = DType::kFloat32; },
     "attention.grad_dtype is given, a layer's results have its dtype"},
    {[](auto& d) { d.attention.attn_bias.dims[1] = 3; }, "attn_bias dim 1 is 3, must be 1 or num_heads 4"},
    {[](auto& d) { d.dtype = DType::kInt32; }, "dtype is int32, takes float32, bfloat16, float16 or float64"},
    {[](auto& d) { d.query_size = int64_t{1} << 61; },
     "query is too large: batch 2 * beam 1 * time steps 3 * size 2305843009213693952 elements pass the address space"},
    {[](auto& d) { d.query_size = int64_t{1} << 57; }, "the layer is too large: its memory passes the address space"},
};

TEST(LayerErrors, BadDescs) {
  for (const BadDesc& bad : kBadDescs) {
    LayerDesc desc = good_desc();
    bad.change(desc);
    const Result<Layer> made = layer(desc);
    ASSERT_FALSE(made.ok()) << bad.message;
    EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(made.status().message(), bad.message);
  }
  EXPECT_EQ(layer(good_desc(), {.kernel = "fast"}).status().code(), StatusCode::kInvalidArgument);
}

struct BadCall {
  void (*change)(SmallCall& call);
  std::string message;
};

const BadCall kBadForwards[] = {
    {[](auto& c) { c.args.forward.query = {}; }, "query is missing"},
    {[](auto& c) { c.args.forward.query.dims[1] = 2; }, "query dim 2 is 2, expected seqlen_q 3"},
    {[](auto& c) { c.args.forward.key = c.args.forward.value; }, "key dim 3 is 7, expected key_size 5"},
    {[](auto& c) { c.args.forward.value.ndim = 1; },
     "value has 1 dims, expected 4: [batch, beam_kv, seqlen_k, value_size]"},
    {[](auto& c) { c.args.forward.query.dtype = DType::kFloat16; }, "query is float16, expected float32"},
    {[](auto& c) { c.args.forward.residual = {}; }, "residual is missing"},
    {[](auto& c) { c.args.forward.weights.key = {}; }, "weights.key is missing"},
    {[](auto& c) { c.args.forward.weights.key_bias = c.args.forward.weights.query_bias; },
     "weights.key_bias is given, but the layer has none"},
    {[](auto& c) { c.args.forward.weights.out.dims[0] = 11; }, "weights.out dim 0 is 11, expected in 12"},
    {[](auto& c) { c.args.forward.attn_mask = c.args.forward.attn_bias; },
     "attn_mask is given, but the plan was made without"},
    {[](auto& c) { c.args.forward.attn_bias.dims[1] = 1; }, "attn_bias dim 1 (num_heads) is 1, the plan's is 4"},
    {[](auto& c) { c.args.forward.seqlens_k = {}; }, "seqlens_k is missing"},
    {[](auto& c) { set(c.args.forward.seqlens_k, 1, 5); }, "seqlens_k[1] is 5, must be 0 to seqlen_k 4"},
    {[](auto& c) { c.args.forward.window_hi = {}; }, "window_hi is missing"},
    {[](auto& c) { c.args.forward.window_lo.dtype = DType::kFloat32; },
     "window_lo is float32, expected int32 or int64"},
    {[](auto& c) { c.args.forward.out = {}; }, "out is missing"},
    {[](auto& c) { c.args.forward.out.data = c.args.forward.residual.data; }, "out overlaps residual"},
    {[](auto& c) { c.args.forward.attn_weights = {}; }, "attn_weights is missing"},
    {[](auto& c) { --c.args.forward.reserve_bytes; }, "reserve_bytes is "},
    {[](auto& c) { c.args.forward.reserve = static_cast<char*>(c.args.forward.reserve) + 4; },
     "reserve is not aligned to 64 bytes"},
    {[](auto& c) { c.args.forward.workspace = nullptr; }, "workspace is null, needs "},
    {[](auto& c) { c.args.forward.workspace_bytes = 63; }, "workspace_bytes is 63, needs "},
    {[](auto& c) { c.args.forward.workspace = c.args.forward.reserve; }, "workspace overlaps "},
    {[](auto& c) {
       c.args.forward.key_cache = c.output({2, 4, 2, 4});
     },
     "key_cache and a reserve are given: caches are for inference"},
    {[](auto& c) { c.args.forward.step = 0; }, "step and a reserve are given: a step is inference"},
    {[](auto& c) { c.args.forward.dropout_seed = {}; }, "dropout_seed is not given, must be where dropout_p is 0.1"},
    {[](auto& c) { c.make_step(3); }, "step is 3, must be less than seqlen_q 3"},
    {[](auto& c) { c.make_step(-2); }, "step is -2, must be -1 (all steps) or at least 0"},
    {[](auto& c) { c.make_step(0), c.args.forward.value = {}; },
     "value is missing: a step takes key and value, or neither"},
    {[](auto& c) { c.make_step(0), c.args.forward.key_cache = {}; }, "key_cache is missing: a step needs it"},
    {[](auto& c) { c.make_step(0), c.args.forward.key.dims[1] = 2; }, "key dim 2 is 2, expected one step, 1"},
    {[](auto& c) { c.make_step(0), c.args.forward.value_cache.dims[3] = 4; }, "value_cache dim 4 is 4, expected dim 3"},
};

// What ends in a space goes on with a number of bytes, or with whichever neighbour comes first.
void expect_message(const Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << message;
  const bool whole = message.back() != ' ';
  EXPECT_EQ(whole ? status.message() : status.message().substr(0, message.size()), message);
}

TEST(LayerErrors, BadForwardsTouchNothing) {
  const Result<Layer> made = layer(good_desc());
  ASSERT_TRUE(made.ok()) << made.status().message();
  for (const BadCall& bad : kBadForwards) {
    SmallCall call(*made);
    bad.change(call);
    expect_message(call.forward(), bad.message);
    EXPECT_TRUE(call.outputs_untouched()) << bad.message;
  }
  SmallCall good(*made), step(*made);
  EXPECT_EQ(good.forward().message(), "");
  step.make_step(2);
  EXPECT_EQ(step.forward().message(), "");
}

const BadCall kBadBackwards[] = {
    {[](auto& c) { c.args.forward.reserve = nullptr; }, "reserve is null: backward needs what forward wrote there"},
    {[](auto& c) { c.args.forward.step = 1; }, "step is 1, backward takes all steps: -1"},
    {[](auto& c) { c.args.grad_out = {}; }, "grad_out is missing"},
    {[](auto& c) { std::memset(c.args.forward.reserve, 0, 64); },
     "reserve holds no forward call: forward with this reserve comes first"},
    {[](auto& c) { ++c.args.forward.dropout_offset; }, "dropout_offset is 1, that of the forward call was 0"},
    {[](auto& c) { c.args.forward.workspace_bytes = 64; }, "workspace_bytes is 64, needs "},
};

TEST(LayerErrors, BadBackwardsTouchNothing) {
  const Result<Layer> made = layer(good_desc());
  ASSERT_TRUE(made.ok());
  const BadCall bad_data[] = {
      {[](auto& c) { c.args.grad_query.dims[1] = 1; }, "grad_query dim 2 is 1, expected seqlen_q 3"},
      {[](auto& c) { c.args.grad_key.data = c.args.grad_query.data; }, "grad_key overlaps grad_query"},
      {[](auto& c) { c.args.grad_alibi_slopes = c.output({4}); },
       "grad_alibi_slopes is given, but the plan was made without"},
      {[](auto& c) { c.args.grad_sink_logits = c.output({4}); },
       "grad_sink_logits is given, but the plan was made without"},
  };
  const BadCall bad_weights[] = {
      {[](auto& c) { c.args.grad_weights = {}; }, "no gradient is asked for: give one of grad_weights"},
      {[](auto& c) { c.args.grad_weights.key_bias = c.output({8}); },
       "grad_weights.key_bias is given, but the layer has none"},
      {[](auto& c) { c.args.grad_weights.query.strides[0] = 1; },
       "grad_weights.query overlaps itself: two indices name one element"},
  };
  const auto check = [&](const BadCall& bad, bool weights) {
    SmallCall call(*made);
    LayerForwardArgs forward = call.args.forward;
    forward.out = call.floats({2, 3, 8}, 0), forward.attn_weights = call.floats({2, 3, 4}, 0);
    ASSERT_EQ(made->forward(forward).message(), "");
    if (weights) {
      LayerBackwardArgs data;
      data.forward = call.args.forward;
      data.grad_out = call.args.grad_out;
      ASSERT_EQ(made->backward_data(data).message(), "");
    }
    bad.change(call);
    expect_message(weights ? call.backward_weights() : call.backward_data(), bad.message);
    EXPECT_TRUE(call.outputs_untouched()) << bad.message;
  };
  for (const BadCall& bad : kBadBackwards) check(bad, false), check(bad, true);
  for (const BadCall& bad : bad_data) check(bad, false);
  for (const BadCall& bad : bad_weights) check(bad, true);
}

TEST(LayerErrors, DropoutsDrawDifferentBits) {
  LayerDesc desc;
  desc.batch = 1, desc.beam = 3, desc.seqlen_q = desc.seqlen_k = 2;
  desc.query_size = desc.key_size = desc.value_size = 4;
  desc.attention.dropout_p = desc.output_dropout_p = 0.5;
  const Result<Layer> made = layer(desc);
  ASSERT_TRUE(made.ok()) << made.status().message();
  std::vector<float> x(24, 1), out(24, 7);
  std::vector<char> memory(made->workspace_bytes() + made->reserve_bytes() + 64);
  LayerForwardArgs args;
  args.query = Tensor(x.data(), DType::kFloat32, {1, 3, 2, 4});
  args.key = args.value = Tensor(x.data(), DType::kFloat32, {1, 1, 2, 4});
  args.out = Tensor(out.data(), DType::kFloat32, {1, 3, 2, 4});
  args.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  args.workspace_bytes = made->workspace_bytes();
  args.reserve_bytes = made->reserve_bytes();
  args.reserve = static_cast<char*>(args.workspace) + args.workspace_bytes;
  args.dropout_seed = 0;
  EXPECT_EQ(made->forward(args).message(), "output_dropout_seed is not given, must be where output_dropout_p is 0.5");
  args.dropout_seed = args.output_dropout_seed = 9;
  args.dropout_offset = UINT32_MAX;  // the beams draw with this, 0 and 1
  for (const uint32_t offset : {UINT32_MAX, 0U, 1U}) {
    args.output_dropout_offset = offset;
    EXPECT_EQ(made->forward(args).message(),
              "output_dropout_seed is 9 and output_dropout_offset " + std::to_string(offset) +
                  ", with which dropout draws too: both would drop the same places, give another seed or offset");
    EXPECT_EQ(out, std::vector<float>(24, 7));
  }
  for (const uint32_t offset : {UINT32_MAX - 1, 2U}) {
    args.output_dropout_offset = offset;
    EXPECT_EQ(made->forward(args).message(), "");
  }
  args.output_dropout_offset = 0;
  args.reserve = nullptr;  // inference drops nothing
  EXPECT_EQ(made->forward(args).message(), "");
}

TEST(LayerErrors, CallsOutOfOrder) {
  const Result<Layer> made = layer(good_desc());
  LayerDesc other_desc = good_desc();
  other_desc.attention.scale = 0.5;
  LayerDesc shard_desc = good_desc();
  shard_desc.attention.dropout_origin.first_query = 64;  // draws another mask than forward did
  const Result<Layer> other = layer(other_desc), shard = layer(shard_desc), again = layer(good_desc());
  ASSERT_TRUE(made.ok() && other.ok() && shard.ok() && again.ok());
  SmallCall call(*made);
  EXPECT_EQ(call.backward_data().message(), "reserve holds no forward call: forward with this reserve comes first");
  ASSERT_EQ(call.forward().message(), "");
  EXPECT_EQ(call.backward_weights().message(),
            "backward_weights comes after backward_data: call that with this reserve first");
  for (const Layer* filled_by_another : {&*other, &*shard}) {
    EXPECT_EQ(filled_by_another->backward_data(call.args).message(), "reserve was filled by another layer's forward");
  }
  EXPECT_EQ(again->backward_data(call.args).message(), "");
  EXPECT_EQ(call.backward_weights().message(), "");
  ASSERT_EQ(call.forward().message(), "");
  EXPECT_NE(call.backward_weights().message(), "");
}

TEST(Layer, AllocatesNothing) {
  const Result<Layer> made = layer(good_desc());
  ASSERT_TRUE(made.ok());
  SmallCall call(*made), step(*made);
  step.make_step(1);
  const auto all = [&] {
    return call.forward().ok() && call.backward_data().ok() && call.backward_weights().ok() && step.forward().ok();
  };
  ASSERT_TRUE(all());
  const int64_t before = num_allocations;
  const bool ok = all();
  EXPECT_EQ(num_allocations, before);
  EXPECT_TRUE(ok);
}

TEST(Layer, MemoryThatRunsOutIsAnError) {
  for (int64_t n = 0;; ++n) {
    failing_allocation = num_allocations + n;
    const Result<Layer> made = layer(good_desc());
    failing_allocation = -1;
    if (made.ok()) break;
    EXPECT_EQ(made.status().code(), StatusCode::kOutOfMemory);
    ASSERT_LT(n, 1000);
  }
}

TEST(Layer, WeightLayout) {
  LayerDesc d = good_desc();
  d.query_size = d.key_size = d.value_size = 6;
  d.value_bias = true;
  const Result<Layer> made = layer(d);
  ASSERT_TRUE(made.ok());
  const auto expect = [&](WeightKind kind, int64_t offset, std::vector<int64_t> dims, std::vector<int64_t> strides) {
    const WeightLayout told = made->weight_layout(kind);
    ASSERT_TRUE(told.present);
    EXPECT_EQ(told.offset, offset);
    ASSERT_EQ(told.ndim, static_cast<int32_t>(dims.size()));
    for (size_t i = 0; i < dims.size(); ++i) {
      EXPECT_EQ(told.dims[i], dims[i]);
      EXPECT_EQ(told.strides[i], strides[i]);
    }
  };
  // Wq [6, 16] | Wk [6, 8] | Wv [6, 6] in rows of 30, then Wo [12, 8], bq | bv, bo: each block at a multiple of 64 bytes.
  expect(WeightKind::kQuery, 0, {6, 16}, {30, 1});
  expect(WeightKind::kKey, 16, {6, 8}, {30, 1});
  expect(WeightKind::kValue, 24, {6, 6}, {30, 1});
  expect(WeightKind::kOut, 192, {12, 8}, {8, 1});
  expect(WeightKind::kQueryBias, 288, {16}, {1});
  expect(WeightKind::kValueBias, 304, {6}, {1});
  expect(WeightKind::kOutBias, 320, {8}, {1});
  EXPECT_EQ(made->weights_bytes(), 336 * sizeof(float));
  const WeightLayout absent = made->weight_layout(WeightKind::kKeyBias);
  EXPECT_FALSE(absent.present);
  EXPECT_EQ(absent.offset + absent.ndim + absent.dims[0] + absent.strides[0], 0);
  EXPECT_FALSE(made->weight_layout(static_cast<WeightKind>(99)).present);
  float buffer[336];
  const LayerWeights weights = made->weights_in(buffer);
  EXPECT_EQ(weights.value.data, buffer + 24);
  EXPECT_FALSE(weights.key_bias.given());
}

}  // namespace
}  // namespace polyhead
