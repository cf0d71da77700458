// Hostile calls of the C interface: every one must end in a status, with a sentence if it failed; a refused call must
// leave all memory as it was, and an accepted one may write its outputs and workspace only. A signal ends the run and
// prints the line that repeats it. More runs: POLYHEAD_FUZZ_RUNS; others: POLYHEAD_FUZZ_SEED.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>

#include "arena.h"
#include "hostile.h"

namespace polyhead::testing {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoll(text, nullptr, 10) : otherwise;
}

// Calls round(random, number) for each number of the run; stops after a few failures.
template <class Round>
void repeat(int64_t default_runs, Round round) {
  const int64_t seed = setting("POLYHEAD_FUZZ_SEED", 1), first = setting("POLYHEAD_FUZZ_FIRST", 0);
  const int64_t runs = setting("POLYHEAD_FUZZ_RUNS", default_runs);
  std::printf("seed %lld, %lld runs\n", static_cast<long long>(seed), static_cast<long long>(runs));
  const std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  for (int64_t n = first; n < first + runs; ++n) {
    const std::string line = "POLYHEAD_FUZZ_SEED=" + std::to_string(seed) +
                             " POLYHEAD_FUZZ_FIRST=" + std::to_string(n) +
                             " POLYHEAD_FUZZ_RUNS=1 capi_fuzz_test --gtest_filter='*." + test + "'";
    set_running(line);
    SCOPED_TRACE(line);
    Hostile random(static_cast<uint64_t>(seed) * 0x100000001b3u ^ static_cast<uint64_t>(n) * 0x9e3779b97f4a7c15u);
    round(random);
    if (::testing::Test::HasFailure()) return;
  }
}

enum class Role { kInput, kOutput, kIntegers };

struct Operand {
  const char* name;
  polyhead_tensor polyhead_forward_args::*tensor;
  Role role;
};

constexpr Operand kOperands[] = {
    {"query", &polyhead_forward_args::query, Role::kInput},
    {"key", &polyhead_forward_args::key, Role::kInput},
    {"value", &polyhead_forward_args::value, Role::kInput},
    {"attn_mask", &polyhead_forward_args::attn_mask, Role::kInput},
    {"attn_bias", &polyhead_forward_args::attn_bias, Role::kInput},
    {"alibi_slopes", &polyhead_forward_args::alibi_slopes, Role::kInput},
    {"seqlens_q", &polyhead_forward_args::seqlens_q, Role::kIntegers},
    {"seqlens_k", &polyhead_forward_args::seqlens_k, Role::kIntegers},
    {"cu_seqlens_q", &polyhead_forward_args::cu_seqlens_q, Role::kIntegers},
    {"cu_seqlens_k", &polyhead_forward_args::cu_seqlens_k, Role::kIntegers},
    {"query_offsets", &polyhead_forward_args::query_offsets, Role::kIntegers},
    {"out", &polyhead_forward_args::out, Role::kOutput},
    {"logsumexp", &polyhead_forward_args::logsumexp, Role::kOutput},
    {"weights", &polyhead_forward_args::weights, Role::kOutput},
    {"column_sums", &polyhead_forward_args::column_sums, Role::kOutput},
};
constexpr size_t kNumOperands = std::size(kOperands);
constexpr size_t kMask = 3, kLogsumexp = 12;

struct Shape {
  int32_t dtype = POLYHEAD_FLOAT32;
  std::vector<int64_t> dims;  // none: not asked for
};

// What the header says of operand n.
Shape shape_of(const polyhead_attention_desc& d, size_t n) {
  const int32_t sums = d.dtype == POLYHEAD_FLOAT64 ? POLYHEAD_FLOAT64 : POLYHEAD_FLOAT32;
  const int64_t B = d.batch, Sq = d.seqlen_q, Sk = d.seqlen_k, H = d.num_heads, G = d.num_heads_kv;
  const auto rows = [&](int64_t rows_of_one, int64_t heads, int64_t dim) -> Shape {
    if (d.packed) return {d.dtype, {rows_of_one, heads, dim}};
    return {d.dtype, {B, rows_of_one, heads, dim}};
  };
  const auto broadcast = [](const polyhead_broadcast_operand& o) -> Shape {
    return o.given ? Shape{o.dtype, {o.dims[0], o.dims[1], o.dims[2], o.dims[3]}} : Shape{};
  };
  const auto integers = [](bool asked, int64_t count) -> Shape {
    return asked ? Shape{POLYHEAD_INT64, {count}} : Shape{};
  };
  switch (n) {
    case 0: return rows(Sq, H, d.head_dim);
    case 1: return rows(Sk, G, d.head_dim);
    case 2: return rows(Sk, G, d.head_dim_v);
    case 3: return broadcast(d.attn_mask);
    case 4: return broadcast(d.attn_bias);
    case 5:
      if (d.alibi_slopes_ndim == 0) return {};
      return d.alibi_slopes_ndim == 1 ? Shape{POLYHEAD_FLOAT32, {H}} : Shape{POLYHEAD_FLOAT32, {B, H}};
    case 6: return integers(d.has_seqlens_q, B);
    case 7: return integers(d.has_seqlens_k, B);
    case 8: return integers(d.packed, B < INT64_MAX ? B + 1 : B);
    case 9: return integers(d.packed, B < INT64_MAX ? B + 1 : B);
    case 10: return integers(d.has_query_offsets, B);
    case 11: return rows(Sq, H, d.head_dim_v);
    case 12: return d.packed ? Shape{sums, {H, Sq}} : Shape{sums, {B, H, Sq}};
    case 13:
      if (d.return_weights == POLYHEAD_WEIGHTS_NONE) return {};
      return d.return_weights == POLYHEAD_WEIGHTS_MEAN ? Shape{d.dtype, {B, Sq, Sk}} : Shape{d.dtype, {B, H, Sq, Sk}};
    default: return d.return_column_sums ? Shape{sums, {B, H, Sk}} : Shape{};
  }
}

bool fits(const polyhead_tensor& t, const Shape& shape, Role role) {
  if (t.ndim == 0) return shape.dims.empty();
  if (t.ndim != static_cast<int32_t>(shape.dims.size())) return false;
  const bool same_type =
      role == Role::kIntegers ? t.dtype == POLYHEAD_INT32 || t.dtype == POLYHEAD_INT64 : t.dtype == shape.dtype;
  return same_type && t.device == POLYHEAD_CPU && std::equal(shape.dims.begin(), shape.dims.end(), t.dims);
}

polyhead_attention_desc random_desc(Hostile& random) {
  polyhead_attention_desc d;
  EXPECT_EQ(polyhead_attention_desc_init(&d, sizeof d), POLYHEAD_OK);
  const bool longer = random.chance(10);
  d.batch = random.between(random.chance(5) ? 0 : 1, longer ? 1 : 3);
  d.num_heads_kv = random.between(1, longer ? 1 : 2);
  d.num_heads = d.num_heads_kv * random.between(1, 2);
  d.seqlen_q = random.between(random.chance(5) ? 0 : 1, longer ? 60 : 9);
  d.seqlen_k = random.chance(40) ? d.seqlen_q : random.between(random.chance(5) ? 0 : 1, longer ? 60 : 9);
  d.head_dim = random.between(random.chance(5) ? 0 : 1, 20);
  d.head_dim_v = random.between(random.chance(5) ? 0 : 1, 20);
  d.dtype = static_cast<int32_t>(random.below(4));
  d.packed = random.chance(20);
  if (random.chance(30)) d.has_scale = 1, d.scale = static_cast<double>(random.between(-8, 8)) / 4;
  if (random.chance(20)) d.softcap = static_cast<double>(random.between(1, 50));
  d.causal = random.chance(40);
  if (random.chance(20)) d.window_left = random.between(-1, 6);
  if (random.chance(20)) d.window_right = random.between(-1, 6);
  switch (random.below(5)) {
    case 0: d.has_query_offset = 1, d.query_offset = random.between(-10, 10); break;
    case 1: d.has_query_offsets = 1; break;
    case 2: break;
    default: d.align = static_cast<int32_t>(random.between(1, 2));
  }
  d.alibi_slopes_ndim = random.chance(30) ? static_cast<int32_t>(random.between(1, 2)) : 0;
  d.dropout_p = random.chance(20) ? static_cast<double>(random.between(0, 10)) / 10 : 0;
  if (d.packed) return d;
  d.has_seqlens_q = random.chance(30);
  d.has_seqlens_k = random.chance(30);
  const int64_t full[4] = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  for (polyhead_broadcast_operand* o : {&d.attn_mask, &d.attn_bias}) {
    o->given = random.chance(30);
    for (int i = 0; i < 4; ++i) o->dims[i] = random.chance(50) ? full[i] : 1;
  }
  d.attn_bias.dtype = static_cast<int32_t>(random.below(d.dtype == POLYHEAD_FLOAT64 ? 4 : 3));
  d.return_weights = random.chance(20) ? static_cast<int32_t>(random.between(1, 2)) : 0;
  d.return_column_sums = random.chance(20);
  return d;
}

// What a single repeated round asks for, so that its failure can be made a case.
void print(const polyhead_attention_desc& d, const polyhead_plan_options& options) {
  const auto number = [](const char* name, auto value) { std::printf(" %s=%s", name, std::to_string(value).c_str()); };
  std::printf("kernel=%s threads=%d", options.kernel == nullptr ? "" : options.kernel,
              polyhead_executor_num_threads(options.executor));
  number("batch", d.batch), number("seqlen_q", d.seqlen_q), number("seqlen_k", d.seqlen_k);
  number("num_heads", d.num_heads), number("num_heads_kv", d.num_heads_kv);
  number("head_dim", d.head_dim), number("head_dim_v", d.head_dim_v), number("dtype", d.dtype);
  number("packed", d.packed), number("has_seqlens_q", d.has_seqlens_q), number("has_seqlens_k", d.has_seqlens_k);
  number("has_scale", d.has_scale), std::printf(" scale=%.17g softcap=%.17g", d.scale, d.softcap);
  number("causal", d.causal), number("window_left", d.window_left), number("window_right", d.window_right);
  number("align", d.align), number("has_query_offset", d.has_query_offset), number("query_offset", d.query_offset);
  number("has_query_offsets", d.has_query_offsets), number("alibi_slopes_ndim", d.alibi_slopes_ndim);
  number("mask", d.attn_mask.given), number("bias", d.attn_bias.given), std::printf(" dropout_p=%.17g", d.dropout_p);
  number("return_weights", d.return_weights), number("return_column_sums", d.return_column_sums);
  std::printf("\n");
  std::fflush(stdout);
}

// Pools and kernels that the rounds choose from.
struct Surroundings {
  Arena arena{kNumOperands, 7};
  GuardedBytes workspace{size_t{1} << 22, Guard::kEnd, 0xff};
  std::vector<polyhead_executor*> executors{nullptr};
  std::vector<const char*> kernels{nullptr, "", "no such kernel"};
  std::map<int, int64_t> outcomes;

  Surroundings() {
    for (int threads : {1, 3}) {
      executors.push_back(nullptr);
      EXPECT_EQ(polyhead_executor_create(threads, &executors.back()), POLYHEAD_OK);
    }
    for (const char* const* name = polyhead_kernels(); *name != nullptr; ++name) {
      for (int weight = 0; weight < 4; ++weight) kernels.push_back(*name);
    }
    uint8_t* mask = arena.place(kMask, 0, false);  // a bool is 0 or 1
    for (size_t i = 0; i < Arena::kBufferBytes; ++i) mask[i] &= 1;
    arena.accept(kMask);
  }
  ~Surroundings() {
    for (polyhead_executor* executor : executors) polyhead_executor_destroy(executor);
  }
};

// Values of the lengths: mostly as they should be.
void write_integers(Hostile& random, const polyhead_attention_desc& d, size_t n, const polyhead_tensor& t) {
  const int64_t limit = std::clamp<int64_t>(n == 6 || n == 8 ? d.seqlen_q : d.seqlen_k, 0, 100);
  int64_t last = 0;
  for (int64_t b = 0; b < t.dims[0]; ++b) {
    int64_t value = random.between(0, limit);
    if (n == 8 || n == 9) value = b == 0 ? 0 : last = random.between(last, limit);
    if (n == 10) value = random.between(-10, 10);
    if (random.chance(2)) value = random.hostile_integer();
    if (t.dtype == POLYHEAD_INT32) static_cast<int32_t*>(t.data)[b] = static_cast<int32_t>(value);
    if (t.dtype == POLYHEAD_INT64) static_cast<int64_t*>(t.data)[b] = value;
  }
}

// The tensor that operand n should be, contiguous, against one of its guards; of small dims if the desc asks for more
// than fits.
polyhead_tensor right_tensor(Hostile& random, const polyhead_attention_desc& d, size_t n, Arena& arena) {
  Shape shape = shape_of(d, n);
  if (shape.dims.empty() || (n == kLogsumexp && random.chance(20))) return {};
  for (int64_t& dim : shape.dims) dim = std::clamp<int64_t>(dim, 0, 61);
  if (kOperands[n].role == Role::kIntegers && random.chance(50)) shape.dtype = POLYHEAD_INT32;
  const auto ndim = static_cast<int32_t>(shape.dims.size());
  polyhead_tensor t = polyhead_tensor_contiguous(nullptr, shape.dtype, ndim, shape.dims.data());
  int64_t bytes = element_bytes(shape.dtype);
  for (int64_t dim : shape.dims) bytes *= dim;
  if (bytes > static_cast<int64_t>(Arena::kBufferBytes)) {
    const int64_t small[5] = {1, 1, 1, 1, 1};
    t = polyhead_tensor_contiguous(nullptr, shape.dtype, ndim, small);
    bytes = element_bytes(shape.dtype);
  }
  t.data = arena.place(n, bytes, random.chance(50));
  if (kOperands[n].role == Role::kIntegers) {
    write_integers(random, d, n, t);
    arena.accept(n);
  }
  return t;
}

void* moved(void* pointer, int64_t bytes) {  // null too
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<uint64_t>(bytes));
}

void spoil_tensor(Hostile& random, polyhead_forward_args& args, polyhead_tensor& t, const Arena& arena) {
  const auto dim = static_cast<size_t>(random.below(POLYHEAD_MAX_DIMS));
  const auto other = static_cast<size_t>(random.below(kNumOperands));
  switch (random.below(9)) {
    case 0: t.data = nullptr; break;
    case 1: t.data = moved(t.data, random.between(-9, 9)); break;
    case 2: t.data = arena.place(other, random.below(200), random.chance(50)); break;
    case 3: t = args.*kOperands[other].tensor; break;
    case 4: t.dims[dim] = random.hostile_integer(); break;
    case 5: t.strides[dim] = random.hostile_integer(); break;
    case 6: t.strides[dim] = random.between(-70, 70); break;
    case 7: t.ndim = static_cast<int32_t>(random.chance(50) ? random.between(-1, 6) : random.hostile_integer()); break;
    case 8:
      (&t.dtype)[random.below(2)] =
          static_cast<int32_t>(random.chance(50) ? random.between(-1, 7) : random.hostile_integer());
  }
}

// Whether no library could tell that the tensor's memory is not there.
bool undetectable_lie(const polyhead_tensor& t, const Shape& shape, Role role, const Arena& arena) {
  if (!fits(t, shape, role)) return false;
  const Reach r = reach(t);
  if (r.empty() || t.data == nullptr || arena.contains(r)) return false;
  return r.begin >= 0 && r.end <= (static_cast<__int128>(1) << 64);
}

// One forward call with mostly right, sometimes hostile arguments.
void call_forward(Hostile& random, const polyhead_attention_plan* plan, const polyhead_attention_desc& d,
                  Surroundings& s) {
  const size_t needed = polyhead_attention_plan_workspace_bytes(plan);
  polyhead_forward_args args;
  ASSERT_EQ(polyhead_forward_args_init(&args, sizeof args), POLYHEAD_OK);
  for (size_t n = 0; n < kNumOperands; ++n) args.*kOperands[n].tensor = right_tensor(random, d, n, s.arena);
  args.dropout_seed = random.next();
  args.dropout_offset = static_cast<uint32_t>(random.next());
  args.workspace_bytes = std::min(needed, s.workspace.size());
  args.workspace = s.workspace.data() + s.workspace.size() - (args.workspace_bytes + 63) / 64 * 64;

  const int64_t num_spoiled = random.chance(40) ? 0 : random.between(1, 3);
  for (int64_t i = 0; i < num_spoiled; ++i) {
    if (random.chance(85)) {
      const size_t n = static_cast<size_t>(random.below(kNumOperands));
      polyhead_tensor& t = args.*kOperands[n].tensor;
      const polyhead_tensor before = t;
      spoil_tensor(random, args, t, s.arena);
      if (undetectable_lie(t, shape_of(d, n), kOperands[n].role, s.arena)) t = before;
      continue;
    }
    switch (random.below(5)) {
      case 0: args.workspace = nullptr; break;
      case 1: args.workspace = moved(args.workspace, -random.between(1, 63)); break;
      case 2: args.workspace_bytes = static_cast<size_t>(random.below(static_cast<int64_t>(needed) + 1)); break;
      case 3: random.spoil_word(&args, 16); break;
      case 4: args.reserved = static_cast<uint32_t>(random.below(2)); break;
    }
  }
  std::string wrong;
  if (args.struct_size != sizeof args || args.flags != 0 || args.reserved != 0) wrong += " header";
  if (args.workspace_bytes < needed) wrong += " workspace_bytes";
  if (needed > 0 && reinterpret_cast<uintptr_t>(args.workspace) % 64 != 0) wrong += " workspace";
  if (needed > 0 && args.workspace == nullptr) wrong += " workspace";
  std::vector<Reach> writable;
  for (size_t n = 0; n < kNumOperands; ++n) {
    const polyhead_tensor& t = args.*kOperands[n].tensor;
    if (kOperands[n].role == Role::kOutput) writable.push_back(reach(t));
    if (n == kLogsumexp && t.ndim == 0) continue;
    if (!fits(t, shape_of(d, n), kOperands[n].role)) wrong += std::string(" ") + kOperands[n].name;
  }

  const polyhead_status status = polyhead_attention_forward(plan, &args);
  ++s.outcomes[status];
  if (status == POLYHEAD_OK) {
    EXPECT_EQ(wrong, "") << "accepted, though these are not as the desc says";
    EXPECT_EQ(s.arena.count_damage(writable), 0) << "wrote outside the outputs";
  } else {
    EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
    EXPECT_STRNE(polyhead_last_error(), "");
    EXPECT_EQ(s.arena.count_damage({}), 0) << "refused, but wrote: " << polyhead_last_error();
  }
}

// Whether a forward call of this desc ends within the patience of a test.
bool small(const polyhead_attention_desc& d) {
  const double rows = static_cast<double>(d.batch) * static_cast<double>(d.num_heads);
  return rows * (static_cast<double>(d.seqlen_q) + 1) * (static_cast<double>(d.seqlen_k) + 1) < 1e6 &&
         d.batch <= 4096 && d.seqlen_q <= 4096 && d.num_heads <= 4096 && d.seqlen_k <= 65536;
}

void expect_explained(const polyhead_attention_desc& d, const polyhead_plan_options& options, polyhead_status status,
                      const std::string& sentence) {
  polyhead_explanation* e = nullptr;
  ASSERT_EQ(polyhead_attention_explain(&d, &options, &e), POLYHEAD_OK) << polyhead_last_error();
  EXPECT_EQ(e->status, status);
  EXPECT_EQ(e->message, status == POLYHEAD_OK ? "" : sentence);
  polyhead_explanation_destroy(e);
}

TEST(CapiFuzz, Attention) {
  Surroundings s;
  repeat(20000, [&](Hostile& random) {
    polyhead_attention_desc d = random_desc(random);
    polyhead_plan_options options;
    ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
    options.kernel = s.kernels[static_cast<size_t>(random.below(static_cast<int64_t>(s.kernels.size())))];
    options.executor = s.executors[static_cast<size_t>(random.below(static_cast<int64_t>(s.executors.size())))];
    const int64_t num_spoiled = random.chance(60) ? 0 : random.between(1, 3);
    for (int64_t i = 0; i < num_spoiled; ++i) random.spoil_word(&d, sizeof d);
    if (random.chance(2)) random.spoil_word(&options, 16);

    if (setting("POLYHEAD_FUZZ_RUNS", 0) == 1) print(d, options);

    polyhead_attention_plan* plan = nullptr;
    const polyhead_status status = polyhead_attention_plan_create(&d, &options, &plan);
    const std::string sentence = polyhead_last_error();
    ASSERT_EQ(plan != nullptr, status == POLYHEAD_OK);
    if (random.chance(10)) expect_explained(d, options, status, sentence);
    if (status != POLYHEAD_OK) {
      EXPECT_TRUE(status == POLYHEAD_INVALID_ARGUMENT || status == POLYHEAD_UNSUPPORTED) << sentence;
      EXPECT_NE(sentence, "");
      return;
    }
    if (small(d)) {
      for (int calls = 0; calls < 2; ++calls) call_forward(random, plan, d, s);
    }
    polyhead_attention_plan_destroy(plan);
  });
  std::printf("forward calls: %lld accepted, %lld refused\n", static_cast<long long>(s.outcomes[POLYHEAD_OK]),
              static_cast<long long>(s.outcomes[POLYHEAD_INVALID_ARGUMENT]));
  if (setting("POLYHEAD_FUZZ_RUNS", 20000) < 1000) return;
  EXPECT_GT(s.outcomes[POLYHEAD_OK], s.outcomes[POLYHEAD_INVALID_ARGUMENT] / 4) << "the fuzz tests refusals only";
  EXPECT_GT(s.outcomes[POLYHEAD_INVALID_ARGUMENT], s.outcomes[POLYHEAD_OK] / 4) << "the fuzz is not hostile";
}

TEST(CapiFuzz, DropoutMask) {
  Arena arena(2, 3);
  repeat(20000, [&](Hostile& random) {
    int64_t dims[4];
    for (int64_t& dim : dims) dim = random.between(random.chance(5) ? 0 : 1, 10);
    polyhead_tensor kept = polyhead_tensor_contiguous(nullptr, POLYHEAD_BOOL, 4, dims);
    kept.data = arena.place(0, dims[0] * dims[1] * dims[2] * dims[3], random.chance(50));
    polyhead_forward_args others;
    ASSERT_EQ(polyhead_forward_args_init(&others, sizeof others), POLYHEAD_OK);
    const polyhead_tensor before = kept;
    for (int64_t i = random.chance(50) ? 0 : random.between(1, 3); i > 0; --i) {
      const int64_t which = random.below(4);
      if (which == 0) kept.data = moved(kept.data, random.between(-3, 3));
      if (which == 1) kept.data = nullptr;
      if (which > 1) random.spoil_word(&kept.dtype, sizeof kept - sizeof kept.data);
    }
    const Shape own{POLYHEAD_BOOL, {kept.dims[0], kept.dims[1], kept.dims[2], kept.dims[3]}};
    if (undetectable_lie(kept, own, Role::kOutput, arena)) kept = before;
    const double p = random.chance(20) ? random.hostile_number() : 0.4;
    const auto offset = static_cast<uint32_t>(random.next());
    const polyhead_status status = polyhead_dropout_mask(p, random.next(), offset, &kept);
    if (status == POLYHEAD_OK) {
      EXPECT_TRUE(p >= 0 && p <= 1);
      EXPECT_EQ(arena.count_damage({reach(kept)}), 0);
    } else {
      EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
      EXPECT_EQ(arena.count_damage({}), 0) << polyhead_last_error();
    }
  });
}

// Every combination of sizes 0, 1 and 3: legal unless the heads do not go together, and without queries' keys O = 0 and
// L = -inf.
TEST(CapiFuzz, ZeroSizes) {
  Surroundings s;
  Hostile random(5);
  for (const char* const* kernel = polyhead_kernels(); *kernel != nullptr; ++kernel) {
    for (int code = 0; code < 2187; ++code) {
      polyhead_attention_desc d;
      polyhead_plan_options options;
      polyhead_forward_args args;
      ASSERT_EQ(polyhead_attention_desc_init(&d, sizeof d), POLYHEAD_OK);
      ASSERT_EQ(polyhead_plan_options_init(&options, sizeof options), POLYHEAD_OK);
      ASSERT_EQ(polyhead_forward_args_init(&args, sizeof args), POLYHEAD_OK);
      int rest = code;
      for (int64_t* size :
           {&d.batch, &d.seqlen_q, &d.seqlen_k, &d.num_heads, &d.num_heads_kv, &d.head_dim, &d.head_dim_v}) {
        *size = rest % 3 == 2 ? 3 : rest % 3;
        rest /= 3;
      }
      options.kernel = *kernel;
      const std::string line = std::string(*kernel) + ", sizes code " + std::to_string(code);
      set_running(line);
      SCOPED_TRACE(line);
      polyhead_attention_plan* plan = nullptr;
      const polyhead_status status = polyhead_attention_plan_create(&d, &options, &plan);
      const bool legal = d.num_heads == 0 || (d.num_heads_kv > 0 && d.num_heads % d.num_heads_kv == 0);
      ASSERT_EQ(status, legal ? POLYHEAD_OK : POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
      if (!legal) continue;
      for (size_t n = 0; n < kNumOperands; ++n) args.*kOperands[n].tensor = right_tensor(random, d, n, s.arena);
      args.workspace_bytes = polyhead_attention_plan_workspace_bytes(plan);
      ASSERT_LE(args.workspace_bytes, s.workspace.size());
      args.workspace = s.workspace.data() + s.workspace.size() - (args.workspace_bytes + 63) / 64 * 64;
      ASSERT_EQ(polyhead_attention_forward(plan, &args), POLYHEAD_OK) << polyhead_last_error();
      if (d.seqlen_k == 0) {
        const int64_t rows = d.batch * d.seqlen_q * d.num_heads;
        for (int64_t i = 0; i < rows * d.head_dim_v; ++i) EXPECT_EQ(static_cast<float*>(args.out.data)[i], 0);
        for (int64_t i = 0; i < rows && args.logsumexp.ndim > 0; ++i) {
          EXPECT_EQ(static_cast<float*>(args.logsumexp.data)[i], -INFINITY);
        }
      }
      EXPECT_EQ(s.arena.count_damage({reach(args.out), reach(args.logsumexp)}), 0);
      polyhead_attention_plan_destroy(plan);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
