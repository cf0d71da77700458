// What layers on a cache refuse, before they write anything; and that they allocate nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "count_allocations.h"
#include "polyhead/layer.h"
#include "polyhead/program.h"
#include "testing/guard.h"
#include "through_c.h"

namespace polyhead::testing {
namespace {

// Two sequences with room for 8 tokens, two new ones each.
struct Small {
  LayerDesc desc;
  std::optional<Layer> layer;
  LayerForwardArgs args;
  std::vector<float> floats = std::vector<float>(4000, 0.25f), out = std::vector<float>(2 * 2 * 16, 7);
  std::vector<char> workspace;
  std::optional<GuardedBytes> pool;
  int64_t slots[2][2] = {{4, 5}, {20, -1}}, positions[2][2] = {{0, 1}, {5, 9}}, lengths[2] = {2, 6},
          lengths_q[2] = {2, 2};
  int64_t table[2][2] = {{1, -5}, {5, 0}};

  static LayerDesc good_desc() {
    LayerDesc d;
    d.batch = 2, d.seqlen_q = 2, d.seqlen_k = 8;
    d.num_heads = 4, d.num_heads_kv = 2;
    d.query_size = d.key_size = d.value_size = d.out_proj_size = 16;
    d.query_proj_size = d.key_proj_size = d.value_proj_size = 8;
    d.attention.has_seqlens_q = true;
    d.cache = KvCacheDesc{.num_pages = 6,
                          .page_size = 4,
                          .num_heads_kv = 2,
                          .head_dim = 8,
                          .head_dim_v = 8,
                          .key_dtype = DType::kInt8,
                          .rotary_dim = 4};
    return d;
  }
  explicit Small(const LayerDesc& of = good_desc()) : desc(of) {
    const Result<Layer> made = polyhead::layer(desc);
    EXPECT_TRUE(made.ok()) << made.status().message();
    layer.emplace(*made);
    const Result<KvCache> cache = kv_cache(*desc.cache);
    pool.emplace((cache->bytes() + 63) / 64 * 64, Guard::kEnd, uint8_t{0x11});
    args.cache.pool = cache->tensors(pool->data());
    args.query = args.key = args.value = Tensor(floats.data(), DType::kFloat32, {2, 2, 16});
    args.weights = layer->weights_in(floats.data());
    args.cache.page_table = Tensor(table, DType::kInt64, {2, 2});
    args.cache.slots = Tensor(slots, DType::kInt64, {2, 2});
    args.cache.positions = Tensor(positions, DType::kInt64, {2, 2});
    args.cache.cos = args.cache.sin = Tensor(floats.data(), DType::kFloat32, {10, 2});
    args.seqlens_k = Tensor(lengths, DType::kInt64, {2});
    args.seqlens_q = Tensor(lengths_q, DType::kInt64, {2});
    args.out = Tensor(out.data(), DType::kFloat32, {2, 2, 16});
    workspace.resize(layer->workspace_bytes() + 64);
    args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    args.workspace_bytes = layer->workspace_bytes();
  }
  bool untouched() const {
    const uint8_t* const bytes = pool->data();
    return std::all_of(bytes, bytes + pool->size(), [](uint8_t byte) { return byte == 0x11; }) &&
           out == std::vector<float>(out.size(), 7);
  }
};

TEST(LayerOnCacheErrors, BadCallsTouchNothing) {
  const struct {
    void (*change)(Small& s);
    const char* message;
  } bad_calls[] = {
      {[](Small& s) { s.slots[1][0] = 24; },
       "slots[1, 0] is 24, must be -1 to 23: -1 is nowhere, else a slot of the cache"},
      {[](Small& s) { s.slots[0][1] = -2; },
       "slots[0, 1] is -2, must be -1 to 23: -1 is nowhere, else a slot of the cache"},
      {[](Small& s) { s.slots[1][0] = 5; }, "slots holds 5 twice: a slot takes one token"},
      {[](Small& s) { s.positions[1][1] = 10; }, "positions[1, 1] is 10, must be 0 to 9: the rows of cos"},
      {[](Small& s) { s.positions[0][0] = -1; }, "positions[0, 0] is -1, must be 0 to 9: the rows of cos"},
      {[](Small& s) { s.table[0][0] = 6; },
       "page_table[0, 0] is 6, must be 0 to num_pages - 1 = 5: seqlens_k[0] reaches into it"},
      {[](Small& s) { s.table[1][1] = -1; },
       "page_table[1, 1] is -1, must be 0 to num_pages - 1 = 5: seqlens_k[1] reaches into it"},
      {[](Small& s) { s.lengths[1] = 9; }, "seqlens_k[1] is 9, must be 0 to seqlen_k 8"},
      {[](Small& s) { s.lengths_q[0] = -1; }, "seqlens_q[0] is -1, must be 0 to seqlen_q 2"},
      {[](Small& s) { s.args.seqlens_k = {}; }, "seqlens_k is missing"},
      {[](Small& s) { s.args.cache.page_table = {}; }, "page_table is missing"},
      {[](Small& s) { s.args.cache.page_table.dims[1] = 1; }, "page_table dim 1 is 1, expected seqlen_k / page_size 2"},
      {[](Small& s) { s.args.cache.slots = {}; }, "slots is missing: it tells where key and value go"},
      {[](Small& s) { s.args.key = s.args.value = {}; },
       "key and value are missing: slots is given, which tells where they go"},
      {[](Small& s) { s.args.value = {}; }, "value is missing: give key and value, or neither"},
      {[](Small& s) { s.args.cache.positions = {}; }, "positions is missing"},
      {[](Small& s) { s.args.cache.cos = {}; }, "cos is missing"},
      {[](Small& s) { s.args.cache.sin.dims[0] = 9; }, "sin dim 0 is 9, expected positions 10"},
      {[](Small& s) { s.args.cache.cos.dims[0] = s.args.cache.sin.dims[0] = -2; },
       "cos dim 0 is -2, must not be negative"},
      {[](Small& s) { s.args.cache.pool.key_scales = {}; }, "pool.key_scales is missing"},
      {[](Small& s) { s.args.cache.pool.value_scales = s.args.cache.pool.key_scales; },
       "pool.value_scales is given, but the cache's dtype has no scales"},
      {[](Small& s) { s.args.cache.pool.key.dtype = DType::kFloat8E4M3; }, "pool.key is float8_e4m3, expected int8"},
      {[](Small& s) { s.args.cache.pool.value.data = s.args.cache.pool.key.data; }, "pool.value overlaps pool.key"},
      {[](Small& s) { s.args.key_cache = s.args.query; },
       "key_cache is given, but the pages of desc.cache hold keys and values"},
      {[](Small& s) { s.args.step = 1; }, "step is 1, must be -1: with desc.cache slots tell where new tokens stand"},
      {[](Small& s) { s.args.reserve = s.args.workspace; },
       "reserve is given, but keys and values live in desc.cache: inference alone"},
      {[](Small& s) { --s.args.workspace_bytes; }, "workspace_bytes is "},
  };
  for (const auto& bad : bad_calls) {
    Small s;
    bad.change(s);
    EXPECT_EQ(s.layer->forward(s.args).message().substr(0, std::strlen(bad.message)), bad.message);
    EXPECT_TRUE(s.untouched()) << bad.message;
  }
  Small s;
  LayerBackwardArgs backward;
  backward.forward = s.args;
  EXPECT_EQ(s.layer->backward_data(backward).message(),
            "backward is called, but keys and values live in desc.cache: inference alone");
  EXPECT_EQ(s.layer->forward(s.args).message(), "");
  s.lengths_q[0] = 1, s.slots[0][1] = 99, s.positions[0][1] = 99;  // in padding: not looked at
  EXPECT_EQ(s.layer->forward(s.args).message(), "");
  s.args.cache.slots = s.args.key = s.args.value = {};  // nothing is stored
  EXPECT_EQ(s.layer->forward(s.args).message(), "");
}

TEST(LayerOnCacheErrors, BadDescs) {
  const struct {
    void (*change)(LayerDesc& d);
    const char* message;
  } bad_descs[] = {
      {[](LayerDesc& d) { d.cache->num_heads_kv = 4; }, "cache.num_heads_kv is 4, must be 2: that of the layer"},
      {[](LayerDesc& d) { d.cache->head_dim = 16; }, "cache.head_dim is 16, must be 8: the length of a head of k"},
      {[](LayerDesc& d) { d.cache->head_dim_v = 0; }, "cache.head_dim_v is 0, must be 8: the length of a head of v"},
      {[](LayerDesc& d) { d.cache->rotary_dim = 3; }, "rotary_dim is 3, must be even and at most head_dim 8"},
      {[](LayerDesc& d) { d.cache->value_dtype = DType::kBFloat16; },
       "value_dtype is bfloat16, must be float32 as dtype, or int8, float8_e4m3, float8_e5m2 or int4x2"},
      {[](LayerDesc& d) { d.seqlen_k = 7; }, "seqlen_k is 7, must be a multiple of page_size 4"},
      {[](LayerDesc& d) { d.dtype = DType::kFloat64; }, "dtype is float64, with a cache: float32, bfloat16 or float16"},
      {[](LayerDesc& d) { d.beam = 2; }, "beam is 2, must be 1 with a cache"},
      {[](LayerDesc& d) { d.seqlen_new = 3; }, "cache.rotary_dim is 4, but seqlen_new 3 is of another sequence"},
      {[](LayerDesc& d) { d.seqlen_new = -1; }, "seqlen_new is -1, must not be negative"},
      {[](LayerDesc& d) { d.cache.reset(), d.seqlen_new = 1; }, "seqlen_new is 1, but there is no cache"},
      {[](LayerDesc& d) { d.attention.page_size = 4; },
       "attention.page_size or num_pages is given: the layer's cache tells of pages"},
  };
  for (const auto& bad : bad_descs) {
    LayerDesc desc = Small::good_desc();
    bad.change(desc);
    EXPECT_EQ(layer(desc).status().message().substr(0, std::strlen(bad.message)), bad.message);
  }
  LayerDesc without = Small::good_desc();
  without.cache.reset();
  without.seqlen_k = 2;
  const Result<Layer> made = layer(without);
  Small s;
  s.args.seqlens_k = {};
  EXPECT_EQ(made->forward(s.args).message(), "page_table is given, but the layer has no cache");
  EXPECT_TRUE(s.untouched());
}

TEST(LayerOnCache, TheSameThroughC) {
  Small s, through_c, of_block;
  const LayerThroughC c(s.desc);
  AttentionBlockDesc block_desc;
  block_desc.layer = s.desc, block_desc.norm.kind = NormKind::kNone;
  const AttentionBlockThroughC block(block_desc);
  ASSERT_EQ(c.made.message() + block.made.message(), "");
  EXPECT_EQ(s.layer->forward(s.args).message(), "");
  EXPECT_EQ(c.forward(through_c.args).message(), "");
  of_block.args.key = of_block.args.value = {};  // they are query
  ASSERT_LE(block.workspace_bytes(), of_block.args.workspace_bytes);
  EXPECT_EQ(block.forward({of_block.args, {}}).message(), "");
  EXPECT_FALSE(s.untouched());
  for (const Small* other : {&through_c, &of_block}) {
    EXPECT_EQ(s.out, other->out);
    EXPECT_TRUE(std::equal(s.pool->data(), s.pool->data() + s.pool->size(), other->pool->data()));
  }
  LayerDesc bad = s.desc;
  bad.cache->rotary_dim = 3;
  EXPECT_EQ(LayerThroughC(bad).made.message(), "rotary_dim is 3, must be even and at most head_dim 8");
  through_c.slots[0][0] = 99;
  EXPECT_EQ(c.forward(through_c.args).message(), s.layer->forward(through_c.args).message());
}

// The index of an option that reaches out of its tensor is known before anything is stored, too.
TEST(LayerOnCache, ProgramsAreToldWhereQueriesStand) {
  float slopes[] = {0.5f, 0.25f, 1, 2};
  const Tensor slope(slopes, DType::kFloat32, {4});
  LayerDesc with_option = Small::good_desc();
  with_option.attention.align = Align::kBottomRight;
  with_option.attention.alibi_slopes_ndim = 1;
  LayerDesc with_program = with_option;
  with_program.attention.alibi_slopes_ndim = 0;
  with_program.attention.program = *parse_program("score = score - slope[h] * abs(q + offset - k)");
  with_program.attention.captures = {{DType::kFloat32, 1, {4}}};
  Small option(with_option), program(with_program);
  for (Small* s : {&option, &program}) {
    for (size_t n = 0; n < s->floats.size(); ++n) s->floats[n] = 0.1f * static_cast<float>(n * 7 % 11) - 0.4f;
    std::memset(s->pool->data(), 0x11, s->pool->size());
    s->lengths[1] = 2, s->table[1][0] = 5;  // the new tokens are all there are
  }
  option.args.alibi_slopes = slope;
  program.args.captures = {&slope, 1};
  EXPECT_EQ(option.layer->forward(option.args).message(), "");
  EXPECT_EQ(program.layer->forward(program.args).message(), "");
  for (size_t n = 0; n < option.out.size(); ++n) ASSERT_NEAR(option.out[n], program.out[n], 1e-5) << n;
  EXPECT_NE(option.out[0], 7);

  with_program.attention.program = *parse_program("score = score + slope[k]");
  Small outside(with_program);
  outside.args.captures = {&slope, 1};
  EXPECT_NE(outside.layer->forward(outside.args).message().find("program: element [4] of slope [4]"),
            std::string::npos);
  EXPECT_TRUE(outside.untouched());
}

TEST(LayerOnCache, AllocatesNothing) {
  Small s;
  ASSERT_EQ(s.layer->forward(s.args).message(), "");
  const int64_t before = num_allocations;
  const bool ok = s.layer->forward(s.args).ok();
  EXPECT_EQ(num_allocations, before);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace polyhead::testing
