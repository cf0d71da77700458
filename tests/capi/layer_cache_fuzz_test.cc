// Hostile calls of layers and blocks whose keys and values live in a cache, as capi_fuzz_test.cc makes them of attention: a call
// whose tensors are right is refused exactly where a number that it would use is wrong; a refused one writes nothing, and an
// accepted one its out and the slots that it names.
#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fuzz.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kPositions = 12;

struct Question {
  polyhead_layer_desc layer;
  polyhead_attention_desc options;
  polyhead_kv_cache_desc cache;
  polyhead_attention_block_desc block;
  bool is_block = false;

  bool other_tokens() const { return layer.seqlen_new > 0; }
  int64_t num_new() const { return other_tokens() ? layer.seqlen_new : layer.seqlen_q; }
  int64_t num_slots() const { return cache.num_pages * cache.page_size; }
};

bool has_scales(int32_t dtype) { return dtype >= POLYHEAD_INT8; }

Question random_question(Hostile& random) {
  static constexpr int32_t kStored[] = {POLYHEAD_INT8, POLYHEAD_FLOAT8_E4M3, POLYHEAD_FLOAT8_E5M2, POLYHEAD_INT4X2};
  Question q;
  EXPECT_EQ(polyhead_layer_desc_init(&q.layer, sizeof q.layer), POLYHEAD_OK);
  EXPECT_EQ(polyhead_attention_desc_init(&q.options, sizeof q.options), POLYHEAD_OK);
  EXPECT_EQ(polyhead_kv_cache_desc_init(&q.cache, sizeof q.cache), POLYHEAD_OK);
  EXPECT_EQ(polyhead_attention_block_desc_init(&q.block, sizeof q.block), POLYHEAD_OK);
  polyhead_layer_desc& d = q.layer;
  polyhead_kv_cache_desc& c = q.cache;
  q.is_block = random.chance(40);
  d.batch = random.between(random.chance(5) ? 0 : 1, 3);
  d.seqlen_q = random.between(random.chance(5) ? 0 : 1, 4);
  d.num_heads_kv = random.between(1, 2), d.num_heads = d.num_heads_kv * random.between(1, 2);
  d.query_size = d.key_size = d.value_size = d.out_proj_size = random.between(1, 9);
  d.query_proj_size = d.key_proj_size = 2 * random.between(1, 8), d.value_proj_size = 2 * random.between(1, 8);
  d.dtype = static_cast<int32_t>(random.below(3));
  d.query_bias = random.chance(30), d.key_bias = random.chance(30), d.out_bias = random.chance(30);
  d.residual = q.is_block && random.chance(60);
  c.num_pages = random.between(1, 4), c.page_size = random.between(1, 5);
  d.seqlen_k = c.page_size * random.between(0, 4);
  if (random.chance(30)) d.seqlen_new = random.between(1, 5), d.key_size = d.value_size = random.between(1, 9);
  c.num_heads_kv = d.num_heads_kv, c.head_dim = d.key_proj_size, c.head_dim_v = d.value_proj_size;
  c.key_dtype = random.chance(50) ? d.dtype : random.pick(kStored);
  c.value_dtype = random.chance(50) ? d.dtype : random.pick(kStored);
  if (has_scales(c.key_dtype) && c.head_dim == 16 && random.chance(50)) c.key_group = 16;
  if (has_scales(c.value_dtype) && c.head_dim_v == 16 && random.chance(50)) c.value_group = 16;
  if (d.seqlen_new == 0) c.rotary_dim = 2 * random.between(0, c.head_dim / 2);
  c.interleaved = random.chance(50), c.hadamard = (c.head_dim & (c.head_dim - 1)) == 0 && random.chance(30);
  q.options.has_seqlens_k = 1, q.options.has_seqlens_q = random.chance(50);
  if (random.chance(50)) q.options.causal = 1, q.options.align = POLYHEAD_ALIGN_BOTTOM_RIGHT;
  q.block.norm.kind = static_cast<int32_t>(random.below(3)), q.block.norm.pre = random.chance(50);
  q.block.norm.beta = random.chance(50);
  return q;
}

// What a call may be refused for: the rows of integers that it reads, by name.
struct Numbers {
  std::vector<int64_t> seqlens_q, seqlens_k, page_table, slots, positions;
};

class Call {
 public:
  Call(const Question& q, Arena& arena) : q_(q), arena_(arena) {
    EXPECT_EQ(polyhead_layer_forward_args_init(&args, sizeof args), POLYHEAD_OK);
    EXPECT_EQ(polyhead_attention_block_forward_args_init(&of_block, sizeof of_block), POLYHEAD_OK);
    args.weights = &weights;
    of_block.layer = &args;
    add_tokens();
    add_weights();
    add_cache();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void make_right(Hostile& random) {
    for (size_t n = 0; n < operands.size(); ++n) *operands[n].tensor = right_tensor(random, operands[n], n, arena_);
    const bool block_may = q_.is_block && !q_.other_tokens() && random.chance(50);
    if (random.chance(20)) args.key = args.value = args.cache.slots = {};
    if (block_may) args.key = args.value = {};
    write(random);
  }

  // Of what has these shapes and lies in the arena.
  Numbers numbers() const {
    return {read(args.seqlens_q), read(args.seqlens_k), read(args.cache.page_table), read(args.cache.slots),
            read(args.cache.positions)};
  }

  bool right(const Numbers& n) const {
    const int64_t B = q_.layer.batch, Sq = q_.layer.seqlen_q, Sk = q_.layer.seqlen_k, pages = Sk / q_.cache.page_size;
    if (!within(n.seqlens_q, 0, Sq) || !within(n.seqlens_k, 0, Sk)) return false;
    std::set<int64_t> slots;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t p = 0; p * q_.cache.page_size < at(n.seqlens_k, b); ++p) {
        const int64_t page = at(n.page_table, b * pages + p);
        if (page < 0 || page >= q_.cache.num_pages) return false;
      }
      const int64_t queries = n.seqlens_q.empty() ? Sq : at(n.seqlens_q, b);
      for (int64_t t = 0; !n.slots.empty() && t < (q_.other_tokens() ? q_.num_new() : queries); ++t) {
        const int64_t slot = at(n.slots, b * q_.num_new() + t);
        if (slot < -1 || slot >= q_.num_slots() || (slot >= 0 && !slots.insert(slot).second)) return false;
      }
      for (int64_t t = 0; !n.positions.empty() && t < queries; ++t) {
        const int64_t position = at(n.positions, b * Sq + t);
        if (position < 0 || position >= kPositions) return false;
      }
    }
    return true;
  }

  // What an accepted call may write.
  std::vector<Reach> writable(const Numbers& n) const {
    std::vector<Reach> all = {reach(args.out)};
    for (const polyhead_tensor* t :
         {&args.cache.pool.key, &args.cache.pool.value, &args.cache.pool.key_scales, &args.cache.pool.value_scales}) {
      for (const int64_t slot : n.slots) {
        if (t->ndim != 4 || slot < 0 || slot >= q_.num_slots()) continue;
        polyhead_tensor row = *t;
        row.ndim = 2;
        std::copy_n(t->dims + 2, 2, row.dims);
        std::copy_n(t->strides + 2, 2, row.strides);
        const int64_t at = slot / q_.cache.page_size * t->strides[0] + slot % q_.cache.page_size * t->strides[1];
        row.data = moved(t->data, at * element_bytes(t->dtype));
        all.push_back(reach(row));
      }
    }
    return all;
  }

  std::string wrong() const {
    std::vector<Operand> meant = operands;
    for (Operand& each : meant) {  // lengths may have a dim for beams, of which there is one
      const bool length = each.tensor == &args.seqlens_q || each.tensor == &args.seqlens_k;
      if (length && each.shape.dims.size() == 1 && each.tensor->ndim == 2) each.shape.dims.push_back(1);
    }
    std::string names = wrong_ones(meant);
    const bool key = args.key.ndim > 0, slots = args.cache.slots.ndim > 0;
    if (key != (args.value.ndim > 0) || (key && !slots)) names += " key, value and slots";
    const bool of_query = q_.is_block && !q_.other_tokens() && q_.layer.key_size == q_.layer.query_size;
    if (slots && !key && !of_query) names += " slots";
    return names;
  }

  std::vector<Operand> operands;
  polyhead_layer_forward_args args;
  polyhead_attention_block_forward_args of_block;
  polyhead_layer_weights weights = {};

 private:
  void add(const char* name, polyhead_tensor* t, int32_t dtype, std::vector<int64_t> dims, Role role = Role::kInput,
           bool optional = false) {
    operands.push_back({name, t, {dtype, std::move(dims)}, role, optional});
  }

  void add_tokens() {
    const polyhead_layer_desc& d = q_.layer;
    add("query", &args.query, d.dtype, {d.batch, d.seqlen_q, d.query_size});
    add("key", &args.key, d.dtype, {d.batch, q_.num_new(), d.key_size}, Role::kInput, true);
    add("value", &args.value, d.dtype, {d.batch, q_.num_new(), d.value_size}, Role::kInput, true);
    add("out", &args.out, d.dtype, {d.batch, d.seqlen_q, d.out_proj_size}, Role::kOutput);
    const std::vector<int64_t> batch = {d.batch}, none;
    add("seqlens_q", &args.seqlens_q, POLYHEAD_INT64, q_.options.has_seqlens_q ? batch : none, Role::kIntegers);
    add("seqlens_k", &args.seqlens_k, POLYHEAD_INT64, batch, Role::kIntegers);
  }

  void add_weights() {
    const polyhead_layer_desc& d = q_.layer;
    const int64_t q = d.num_heads * d.query_proj_size, k = d.num_heads_kv * d.key_proj_size;
    const int64_t v = d.num_heads_kv * d.value_proj_size;
    polyhead_tensor* const w = weights.tensors;
    add("query weight", &w[0], d.dtype, {d.query_size, q});
    add("key weight", &w[1], d.dtype, {d.key_size, k});
    add("value weight", &w[2], d.dtype, {d.value_size, v});
    add("out weight", &w[3], d.dtype, {d.num_heads * d.value_proj_size, d.out_proj_size});
    const auto bias = [&](const char* name, int kind, int32_t asked, int64_t size) {
      add(name, &w[kind], d.dtype, asked != 0 ? std::vector<int64_t>{size} : std::vector<int64_t>());
    };
    bias("query bias", 4, d.query_bias, q), bias("key bias", 5, d.key_bias, k);
    bias("value bias", 6, d.value_bias, v), bias("out bias", 7, d.out_bias, d.out_proj_size);
    if (!q_.is_block) return;
    const polyhead_norm_desc& norm = q_.block.norm;
    const auto vector = [&](const char* name, polyhead_tensor* t, int32_t asked) {
      const bool has = norm.kind != POLYHEAD_NORM_NONE && asked != 0;
      add(name, t, d.dtype, has ? std::vector<int64_t>{d.query_size} : std::vector<int64_t>());
      operands.back().shape.dtype_or_float32 = true;
    };
    vector("gamma", &of_block.norm.gamma, norm.gamma), vector("beta", &of_block.norm.beta, norm.beta);
  }

  void add_cache() {
    const polyhead_layer_desc& d = q_.layer;
    const polyhead_kv_cache_desc& c = q_.cache;
    polyhead_layer_cache_args& a = args.cache;
    add("page_table", &a.page_table, POLYHEAD_INT64, {d.batch, d.seqlen_k / c.page_size}, Role::kIntegers);
    add("slots", &a.slots, POLYHEAD_INT64, {d.batch, q_.num_new()}, Role::kIntegers, true);
    const bool turns = c.rotary_dim > 0;
    const auto if_turns = [&](std::vector<int64_t> dims) { return turns ? dims : std::vector<int64_t>(); };
    add("positions", &a.positions, POLYHEAD_INT64, if_turns({d.batch, d.seqlen_q}), Role::kIntegers);
    add("cos", &a.cos, POLYHEAD_FLOAT32, if_turns({kPositions, c.rotary_dim / 2}));
    add("sin", &a.sin, POLYHEAD_FLOAT32, if_turns({kPositions, c.rotary_dim / 2}));
    const auto side = [&](const char* name, polyhead_tensor* numbers, polyhead_tensor* scales, int32_t dtype,
                          int64_t dim, int64_t group) {
      const int64_t columns = dtype == POLYHEAD_INT4X2 ? dim / 2 : dim, groups = group > 0 ? dim / group : 1;
      add(name, numbers, dtype, {c.num_pages, c.page_size, c.num_heads_kv, columns}, Role::kOutput);
      const std::vector<int64_t> dims = {c.num_pages, c.page_size, c.num_heads_kv, groups}, none;
      add(name, scales, dtype == POLYHEAD_INT4X2 ? POLYHEAD_FLOAT16 : POLYHEAD_FLOAT32, has_scales(dtype) ? dims : none,
          Role::kOutput);
    };
    side("pool.key", &a.pool.key, &a.pool.key_scales, c.key_dtype, c.head_dim, c.key_group);
    side("pool.value", &a.pool.value, &a.pool.value_scales, c.value_dtype, c.head_dim_v, c.value_group);
  }

  // Lengths, pages, slots and positions, in two calls of five with hostile ones among them.
  void write(Hostile& random) {
    std::vector<int64_t> free(static_cast<size_t>(q_.num_slots()));
    for (size_t n = 0; n < free.size(); ++n) free[n] = static_cast<int64_t>(n);
    for (size_t n = free.size(); n > 1; --n)
      std::swap(free[n - 1], free[static_cast<size_t>(random.below(static_cast<int64_t>(n)))]);
    const int hostile = random.chance(60) ? 0 : 5;
    for (size_t n = 0; n < operands.size(); ++n) {
      const polyhead_tensor& t = *operands[n].tensor;
      if (operands[n].role != Role::kIntegers || t.ndim == 0) continue;
      const int64_t count = t.dims[0] * (t.ndim > 1 ? t.dims[1] : 1);
      for (int64_t i = 0; i < count; ++i) {
        int64_t value = 0;
        if (&t == &args.seqlens_q) value = random.between(0, q_.layer.seqlen_q);
        if (&t == &args.seqlens_k) value = random.between(0, q_.layer.seqlen_k);
        if (&t == &args.cache.page_table) value = random.below(q_.cache.num_pages);
        if (&t == &args.cache.positions) value = random.below(kPositions);
        if (&t == &args.cache.slots) {
          value = free.empty() || random.chance(10) ? -1 : free.back();
          if (value >= 0) free.pop_back();
        }
        if (random.chance(hostile))
          value = random.chance(50) ? random.hostile_integer() : value + random.between(-2, 9);
        if (t.dtype == POLYHEAD_INT32) static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(value);
        if (t.dtype == POLYHEAD_INT64) static_cast<int64_t*>(t.data)[i] = value;
      }
      arena_.accept(n);
    }
  }

  std::vector<int64_t> read(const polyhead_tensor& t) const {
    std::vector<int64_t> values;
    if (t.ndim < 1 || t.ndim > 2 || (t.dtype != POLYHEAD_INT32 && t.dtype != POLYHEAD_INT64)) return values;
    if (t.data == nullptr || reach(t).empty() || !arena_.contains(reach(t))) return values;
    for (int64_t i = 0; i < t.dims[0]; ++i) {
      for (int64_t j = 0; j < (t.ndim > 1 ? t.dims[1] : 1); ++j) {
        const int64_t at = i * t.strides[0] + (t.ndim > 1 ? j * t.strides[1] : 0);
        const void* const from = moved(t.data, at * element_bytes(t.dtype));
        int32_t narrow = 0;
        int64_t value = 0;
        if (t.dtype == POLYHEAD_INT32) std::memcpy(&narrow, from, sizeof narrow), value = narrow;
        if (t.dtype == POLYHEAD_INT64) std::memcpy(&value, from, sizeof value);
        values.push_back(value);
      }
    }
    return values;
  }

  static int64_t at(const std::vector<int64_t>& values, int64_t n) { return values[static_cast<size_t>(n)]; }
  static bool within(const std::vector<int64_t>& values, int64_t least, int64_t most) {
    return std::all_of(values.begin(), values.end(), [&](int64_t n) { return n >= least && n <= most; });
  }

  const Question& q_;
  Arena& arena_;
};

// A layer or a block of the question.
class Made {
 public:
  Made(const Question& q, const polyhead_plan_options& options) : is_block_(q.is_block) {
    status = is_block_ ? polyhead_attention_block_create(&q.block, &options, &block_)
                       : polyhead_layer_create(&q.layer, &options, &layer_);
  }
  ~Made() {
    polyhead_layer_destroy(layer_);
    polyhead_attention_block_destroy(block_);
  }
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;

  size_t workspace_bytes() const {
    return is_block_ ? polyhead_attention_block_workspace_bytes(block_) : polyhead_layer_workspace_bytes(layer_);
  }
  polyhead_status forward(const Call& call) const {
    return is_block_ ? polyhead_attention_block_forward(block_, &call.of_block)
                     : polyhead_layer_forward(layer_, &call.args);
  }

  polyhead_status status;

 private:
  bool is_block_;
  polyhead_layer* layer_ = nullptr;
  polyhead_attention_block* block_ = nullptr;
};

void call_once(Hostile& random, const Question& q, const Made& made, Surroundings& s) {
  Call call(q, s.arena);
  call.make_right(random);
  const size_t needed = made.workspace_bytes();
  ASSERT_LE(needed, s.workspace.size());
  call.args.workspace_bytes = needed;
  call.args.workspace = s.workspace.data() + s.workspace.size() - (needed + 63) / 64 * 64;
  const int64_t num_spoiled = random.chance(60) ? 0 : random.between(1, 3);
  bool header = false;
  for (int64_t i = 0; i < num_spoiled; ++i) {
    if (random.chance(90)) {
      spoil(random, call.operands, s.arena);
    } else {
      header = true;
      call.args.workspace_bytes = static_cast<size_t>(random.below(static_cast<int64_t>(needed) + 1));
      if (random.chance(30)) call.args.workspace = nullptr;
      if (random.chance(30)) random.spoil_word(&call.args, 16);
    }
  }
  const std::string wrong = call.wrong();
  const Numbers numbers = call.numbers();
  const polyhead_status status = made.forward(call);
  ++s.outcomes[status];
  if (num_spoiled == 0) {
    EXPECT_EQ(status == POLYHEAD_OK, wrong.empty() && call.right(numbers)) << wrong << "; " << polyhead_last_error();
  }
  if (status == POLYHEAD_OK) {
    EXPECT_TRUE(wrong.empty() || header) << "accepted, though these are not as the desc says:" << wrong;
    EXPECT_EQ(s.arena.count_damage(call.writable(numbers)), 0) << "wrote outside of out and its slots";
  } else {
    EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
    EXPECT_STRNE(polyhead_last_error(), "");
    EXPECT_EQ(s.arena.count_damage({}), 0) << "refused, but wrote: " << polyhead_last_error();
  }
}

TEST(LayerCacheFuzz, Calls) {
  Surroundings s;
  repeat("layer_cache_fuzz_test", 3000, [&](Hostile& random) {
    Question q = random_question(random);
    polyhead_plan_options options;
    ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
    options.kernel = s.kernels[static_cast<size_t>(random.below(static_cast<int64_t>(s.kernels.size())))];
    options.executor = s.executors[static_cast<size_t>(random.below(static_cast<int64_t>(s.executors.size())))];
    q.block.layer = &q.layer, q.layer.attention = &q.options, q.layer.cache = &q.cache;
    const bool spoiled = random.chance(20);
    Question asked = q;
    if (spoiled && random.chance(50))
      random.spoil_word(&q.cache, sizeof q.cache);
    else if (spoiled)
      random.spoil_word(&q.layer, offsetof(polyhead_layer_desc, attention));
    const Made made(q, options);
    if (made.status != POLYHEAD_OK) {
      EXPECT_TRUE(made.status == POLYHEAD_INVALID_ARGUMENT || made.status == POLYHEAD_UNSUPPORTED);
      EXPECT_STRNE(polyhead_last_error(), "");
      return;
    }
    const bool same = std::memcmp(&q.cache, &asked.cache, sizeof q.cache) == 0 &&
                      std::memcmp(&q.layer, &asked.layer, sizeof q.layer) == 0;
    for (int calls = 0; calls < 4 && same; ++calls) call_once(random, q, made, s);
  });
  expect_balanced("layer on a cache", s);
}

}  // namespace
}  // namespace polyhead::testing
