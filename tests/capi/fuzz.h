// What hostile calls are made of: random descs and tensors, right ones and spoiled ones, and the judgement of what a
// call did.
#pragma once

#include <gtest/gtest.h>
#include <polyhead/polyhead.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "arena.h"
#include "hostile.h"

namespace polyhead::testing {

enum class Role { kInput, kOutput, kIntegers };

struct Shape {
  int32_t dtype = POLYHEAD_FLOAT32;
  std::vector<int64_t> dims;  // none: not asked for
  bool any_width = false;     // float32, bfloat16 and float16 alike
  bool dtype_or_float32 = false;
};

inline bool takes(const Shape& shape, Role role, int32_t dtype) {
  if (role == Role::kIntegers) return dtype == POLYHEAD_INT32 || dtype == POLYHEAD_INT64;
  if (shape.dtype_or_float32 && dtype == POLYHEAD_FLOAT32) return true;
  return shape.any_width ? dtype >= POLYHEAD_FLOAT32 && dtype <= POLYHEAD_FLOAT16 : dtype == shape.dtype;
}

// An operand of a call: where its tensor is, and what the header says of it. The n-th has the n-th buffer of the arena.
struct Operand {
  const char* name;
  polyhead_tensor* tensor;
  Shape shape;
  Role role = Role::kInput;
  bool optional = false;
};

// The shapes of a desc's tensors, by name.
struct Shapes {
  Shape query, key, value, attn_mask, attn_bias, alibi_slopes, sink_logits, seqlens_q, seqlens_k, cu_seqlens,
      query_offsets, window, page_table, key_scales, value_scales;
  Shape out, logsumexp, attn_weights, column_sums;
  Shape grad_query, grad_key, grad_value;

  explicit Shapes(const polyhead_attention_desc& d) {
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
    query = rows(Sq, H, d.head_dim);
    const auto stored = [&](bool other, int32_t dtype, int64_t dim, int64_t group, Shape* numbers, Shape* scales) {
      const bool pairs = other && dtype == POLYHEAD_INT4X2;
      *numbers = rows(Sk, G, pairs ? dim / 2 : dim);
      if (d.page_size > 0) numbers->dims = {d.num_pages, d.page_size, G, pairs ? dim / 2 : dim};
      if (!other) return;
      numbers->dtype = dtype;
      if (dtype < POLYHEAD_INT8) return;
      *scales = {pairs ? int32_t{POLYHEAD_FLOAT16} : int32_t{POLYHEAD_FLOAT32}, numbers->dims};
      scales->dims.back() = group > 0 ? dim / group : 1;
    };
    stored(d.has_key_dtype, d.key_dtype, d.head_dim, d.key_group, &key, &key_scales);
    stored(d.has_value_dtype, d.value_dtype, d.head_dim_v, d.value_group, &value, &value_scales);
    if (d.page_size > 0) page_table = {POLYHEAD_INT64, {B, Sk / d.page_size}};
    attn_mask = broadcast(d.attn_mask);
    attn_bias = broadcast(d.attn_bias);
    if (d.alibi_slopes_ndim == 1) alibi_slopes = {POLYHEAD_FLOAT32, {H}};
    if (d.alibi_slopes_ndim == 2) alibi_slopes = {POLYHEAD_FLOAT32, {B, H}};
    if (d.has_sink_logits) sink_logits = {sums, {H}};
    seqlens_q = integers(d.has_seqlens_q, B);
    seqlens_k = integers(d.has_seqlens_k, B);
    cu_seqlens = integers(d.packed, B < INT64_MAX ? B + 1 : B);
    query_offsets = integers(d.has_query_offsets, B);
    window = integers(d.has_windows, Sq);
    out = rows(Sq, H, d.head_dim_v);
    if (d.has_out_dtype) out.dtype = d.out_dtype;
    grad_query = query, grad_key = rows(Sk, G, d.head_dim), grad_value = rows(Sk, G, d.head_dim_v);
    for (Shape* gradient : {&grad_query, &grad_key, &grad_value}) {
      if (d.has_grad_dtype) gradient->dtype = d.grad_dtype;
    }
    if (d.normalizer == POLYHEAD_NORMALIZER_SOFTMAX) {
      logsumexp = d.packed ? Shape{sums, {H, Sq}} : Shape{sums, {B, H, Sq}};
    }
    if (d.return_weights == POLYHEAD_WEIGHTS_PER_HEAD) attn_weights = {d.dtype, {B, H, Sq, Sk}};
    if (d.return_weights == POLYHEAD_WEIGHTS_MEAN) attn_weights = {d.dtype, {B, Sq, Sk}};
    if (d.return_column_sums) column_sums = {sums, {B, H, Sk}};
  }
};

constexpr size_t kMask = 3, kSeqlensQ = 6, kCuSeqlensQ = 8, kCuSeqlensK = 9, kQueryOffsets = 10, kWindowLo = 11,
                 kWindowHi = 12, kPageTable = 14;  // of input_operands

// The inputs of a forward call, which backward has too.
inline std::vector<Operand> input_operands(const Shapes& shapes, polyhead_forward_args& args) {
  return {
      {"query", &args.query, shapes.query},
      {"key", &args.key, shapes.key},
      {"value", &args.value, shapes.value},
      {"attn_mask", &args.attn_mask, shapes.attn_mask},
      {"attn_bias", &args.attn_bias, shapes.attn_bias},
      {"alibi_slopes", &args.alibi_slopes, shapes.alibi_slopes},
      {"seqlens_q", &args.seqlens_q, shapes.seqlens_q, Role::kIntegers},
      {"seqlens_k", &args.seqlens_k, shapes.seqlens_k, Role::kIntegers},
      {"cu_seqlens_q", &args.cu_seqlens_q, shapes.cu_seqlens, Role::kIntegers},
      {"cu_seqlens_k", &args.cu_seqlens_k, shapes.cu_seqlens, Role::kIntegers},
      {"query_offsets", &args.query_offsets, shapes.query_offsets, Role::kIntegers},
      {"window_lo", &args.window_lo, shapes.window, Role::kIntegers},
      {"window_hi", &args.window_hi, shapes.window, Role::kIntegers},
      {"sink_logits", &args.sink_logits, shapes.sink_logits},
      {"page_table", &args.page_table, shapes.page_table, Role::kIntegers},
      {"key_scales", &args.key_scales, shapes.key_scales},
      {"value_scales", &args.value_scales, shapes.value_scales},
  };
}

inline bool fits(const polyhead_tensor& t, const Shape& shape, Role role) {
  if (t.ndim == 0) return shape.dims.empty();
  if (t.ndim != static_cast<int32_t>(shape.dims.size())) return false;
  return takes(shape, role, t.dtype) && t.device == POLYHEAD_CPU &&
         std::equal(shape.dims.begin(), shape.dims.end(), t.dims);
}

// The names of those that are not as the desc says.
inline std::string wrong_ones(const std::vector<Operand>& operands) {
  std::string names;
  for (const Operand& operand : operands) {
    if (operand.optional && operand.tensor->ndim == 0) continue;
    if (!fits(*operand.tensor, operand.shape, operand.role)) names += std::string(" ") + operand.name;
  }
  return names;
}

// Keys and values in pages, or in formats with scales, in one desc of five each.
inline void keep_in_cache(Hostile& random, polyhead_attention_desc* d) {
  if (random.chance(20)) {
    d->page_size = random.between(1, 4), d->num_pages = random.between(0, 6);
    d->seqlen_k = d->page_size * random.between(0, 5), d->has_seqlens_k = 1;
  }
  if (random.chance(80)) return;
  for (int64_t* dim : {&d->head_dim, &d->head_dim_v}) *dim = random.chance(50) ? 16 : *dim / 2 * 2;
  d->has_key_dtype = random.chance(70), d->key_dtype = static_cast<int32_t>(random.between(7, 10));
  d->has_value_dtype = random.chance(70), d->value_dtype = static_cast<int32_t>(random.between(7, 10));
  if (d->has_key_dtype && d->head_dim == 16 && random.chance(50)) d->key_group = 16;
  if (d->has_value_dtype && d->head_dim_v == 16 && random.chance(50)) d->value_group = 16;
}

// Which has no gradients.
inline bool kept_in_cache(const polyhead_attention_desc& d) {
  const auto has_scales = [](bool given, int32_t dtype) { return given && dtype >= POLYHEAD_INT8; };
  return d.page_size > 0 || has_scales(d.has_key_dtype, d.key_dtype) || has_scales(d.has_value_dtype, d.value_dtype);
}

inline polyhead_attention_desc random_desc(Hostile& random) {
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
  const bool widens = d.dtype == POLYHEAD_BFLOAT16 || d.dtype == POLYHEAD_FLOAT16;
  if (random.chance(30)) d.has_out_dtype = 1, d.out_dtype = widens ? int32_t{POLYHEAD_FLOAT32} : d.dtype;
  if (random.chance(30)) d.has_grad_dtype = 1, d.grad_dtype = widens ? int32_t{POLYHEAD_FLOAT32} : d.dtype;
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
  if (random.chance(20)) d.sink_keys = random.between(0, 9);
  d.normalizer = random.chance(10) ? POLYHEAD_NORMALIZER_NONE : POLYHEAD_NORMALIZER_SOFTMAX;
  d.has_sink_logits = random.chance(20);  // refused without a softmax
  d.dropout_p = random.chance(20) ? static_cast<double>(random.between(0, 10)) / 10 : 0;
  if (random.chance(20)) {  // the last two are refused
    static constexpr const char* kPrograms[] = {"mask = (q - k) % 3 != 1", "score = 5 * tanh(score / 5)",
                                                "score = where(k <= q, score * 0.5, -inf); mask = h + b < 3",
                                                "score = t[h]", "mask = q["};
    d.program = kPrograms[random.below(5)];
  }
  if (d.packed) return d;
  d.has_seqlens_q = random.chance(30);
  d.has_seqlens_k = random.chance(30);
  keep_in_cache(random, &d);
  const int64_t full[4] = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
  for (polyhead_broadcast_operand* o : {&d.attn_mask, &d.attn_bias}) {
    o->given = random.chance(30);
    for (int i = 0; i < 4; ++i) o->dims[i] = random.chance(50) ? full[i] : 1;
  }
  if (random.chance(d.attn_mask.given ? 30 : 2)) {  // refused without a mask
    d.mask_at_end = 1, d.attn_mask.dims[3] = random.between(0, d.seqlen_k);
  }
  d.attn_bias.dtype = static_cast<int32_t>(random.below(d.dtype == POLYHEAD_FLOAT64 ? 4 : 3));
  d.return_weights = random.chance(20) ? static_cast<int32_t>(random.between(1, 2)) : 0;
  d.return_column_sums = random.chance(20);
  d.has_windows = random.chance(20);
  return d;
}

// What a single repeated round asks for, so that its failure can be made a case.
inline void print(const polyhead_attention_desc& d, const polyhead_plan_options& options) {
  const auto number = [](const char* name, auto value) { std::printf(" %s=%s", name, std::to_string(value).c_str()); };
  std::printf("kernel=%s threads=%d", options.kernel == nullptr ? "" : options.kernel,
              polyhead_executor_num_threads(options.executor));
  number("batch", d.batch), number("seqlen_q", d.seqlen_q), number("seqlen_k", d.seqlen_k);
  number("num_heads", d.num_heads), number("num_heads_kv", d.num_heads_kv);
  number("head_dim", d.head_dim), number("head_dim_v", d.head_dim_v), number("dtype", d.dtype);
  number("has_out_dtype", d.has_out_dtype), number("out_dtype", d.out_dtype);
  number("has_grad_dtype", d.has_grad_dtype), number("grad_dtype", d.grad_dtype);
  number("packed", d.packed), number("has_seqlens_q", d.has_seqlens_q), number("has_seqlens_k", d.has_seqlens_k);
  number("has_scale", d.has_scale), std::printf(" scale=%.17g softcap=%.17g", d.scale, d.softcap);
  number("causal", d.causal), number("window_left", d.window_left), number("window_right", d.window_right);
  number("align", d.align), number("has_query_offset", d.has_query_offset), number("query_offset", d.query_offset);
  number("has_query_offsets", d.has_query_offsets), number("alibi_slopes_ndim", d.alibi_slopes_ndim);
  number("mask", d.attn_mask.given), number("bias", d.attn_bias.given), std::printf(" dropout_p=%.17g", d.dropout_p);
  number("return_weights", d.return_weights), number("return_column_sums", d.return_column_sums);
  number("has_windows", d.has_windows), number("has_sink_logits", d.has_sink_logits);
  number("normalizer", d.normalizer), number("sink_keys", d.sink_keys), number("mask_at_end", d.mask_at_end);
  number("page_size", d.page_size), number("num_pages", d.num_pages);
  number("has_key_dtype", d.has_key_dtype), number("key_dtype", d.key_dtype), number("key_group", d.key_group);
  number("has_value_dtype", d.has_value_dtype), number("value_dtype", d.value_dtype);
  number("value_group", d.value_group);
  std::printf(" program=%s", d.program != nullptr ? d.program : "none");
  std::printf("\n");
  std::fflush(stdout);
}

// Pools and kernels that the rounds choose from.
struct Surroundings {
  Arena arena{32, 7};  // as many operands as a backward call has
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
inline void write_integers(Hostile& random, const polyhead_attention_desc& d, size_t n, const polyhead_tensor& t) {
  const int64_t limit = std::clamp<int64_t>(n == kSeqlensQ || n == kCuSeqlensQ ? d.seqlen_q : d.seqlen_k, 0, 100);
  int64_t last = 0;
  for (int64_t b = 0; b < t.dims[0] * (n == kPageTable ? t.dims[1] : 1); ++b) {
    int64_t value = random.between(0, limit);
    if (n == kPageTable) value = random.between(0, std::clamp<int64_t>(d.num_pages - 1, 0, 100));
    if (n == kCuSeqlensQ || n == kCuSeqlensK) value = b == 0 ? 0 : last = random.between(last, limit);
    if (n == kQueryOffsets) value = random.between(-10, 10);
    if (n == kWindowLo || n == kWindowHi) value = random.between(-3, limit + 3);
    if (random.chance(2)) value = random.hostile_integer();
    if (t.dtype == POLYHEAD_INT32) static_cast<int32_t*>(t.data)[b] = static_cast<int32_t>(value);
    if (t.dtype == POLYHEAD_INT64) static_cast<int64_t*>(t.data)[b] = value;
  }
}

// The tensor that an operand should be, contiguous, in buffer n against one of its guards; of small dims if the desc
// asks for more than fits.
inline polyhead_tensor right_tensor(Hostile& random, const Operand& operand, size_t n, Arena& arena) {
  Shape shape = operand.shape;
  if (shape.dims.empty() || (operand.optional && random.chance(20))) return {};
  for (int64_t& dim : shape.dims) dim = std::clamp<int64_t>(dim, 0, 61);
  if (operand.role == Role::kIntegers && random.chance(50)) shape.dtype = POLYHEAD_INT32;
  if (shape.any_width && random.chance(50)) shape.dtype = static_cast<int32_t>(random.below(3));
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
  return t;
}

inline void make_right(Hostile& random, const polyhead_attention_desc& d, const std::vector<Operand>& operands,
                       Arena& arena) {
  for (size_t n = 0; n < operands.size(); ++n) {
    polyhead_tensor& t = *operands[n].tensor;
    t = right_tensor(random, operands[n], n, arena);
    if (operands[n].role != Role::kIntegers || t.ndim == 0) continue;
    write_integers(random, d, n, t);
    arena.accept(n);
  }
}

inline void* moved(void* pointer, int64_t bytes) {  // null too
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<uint64_t>(bytes));
}

// Whether no library could tell that the tensor's memory is not there.
inline bool undetectable_lie(const polyhead_tensor& t, const Shape& shape, Role role, const Arena& arena) {
  if (!fits(t, shape, role)) return false;
  const Reach r = reach(t);
  if (r.empty() || t.data == nullptr || arena.contains(r)) return false;
  return r.begin >= 0 && r.end <= (static_cast<__int128>(1) << 64);
}

// Spoils one operand in one way.
inline void spoil(Hostile& random, const std::vector<Operand>& operands, const Arena& arena) {
  const auto count = static_cast<int64_t>(operands.size());
  const Operand& operand = operands[static_cast<size_t>(random.below(count))];
  polyhead_tensor& t = *operand.tensor;
  const polyhead_tensor before = t;
  const auto dim = static_cast<size_t>(random.below(POLYHEAD_MAX_DIMS));
  const auto other = static_cast<size_t>(random.below(count));
  switch (random.below(9)) {
    case 0: t.data = nullptr; break;
    case 1: t.data = moved(t.data, random.between(-9, 9)); break;
    case 2: t.data = arena.place(other, random.below(200), random.chance(50)); break;
    case 3: t = *operands[other].tensor; break;
    case 4: t.dims[dim] = random.hostile_integer(); break;
    case 5: t.strides[dim] = random.hostile_integer(); break;
    case 6: t.strides[dim] = random.between(-70, 70); break;
    case 7: t.ndim = static_cast<int32_t>(random.chance(50) ? random.between(-1, 6) : random.hostile_integer()); break;
    case 8:
      (&t.dtype)[random.below(2)] =
          static_cast<int32_t>(random.chance(50) ? random.between(-1, 7) : random.hostile_integer());
  }
  if (undetectable_lie(t, operand.shape, operand.role, arena)) t = before;
}

// The workspace of a call, at the end of what there is.
inline void give_workspace(const GuardedBytes& memory, size_t needed, polyhead_forward_args* args) {
  args->workspace_bytes = std::min(needed, memory.size());
  args->workspace = memory.data() + memory.size() - (args->workspace_bytes + 63) / 64 * 64;
}

// A struct_size of an older header is right: what stands behind it counts as not given.
inline std::string wrong_header(const polyhead_forward_args& args, size_t needed) {
  constexpr size_t kFirstSize = offsetof(polyhead_forward_args, executor);
  const bool right_size =
      args.struct_size >= kFirstSize && args.struct_size <= sizeof args && args.struct_size % 8 == 0;
  std::string wrong;
  if (!right_size || args.flags != 0 || args.reserved != 0) wrong += " header";
  if (args.workspace_bytes < needed) wrong += " workspace_bytes";
  if (needed > 0 && reinterpret_cast<uintptr_t>(args.workspace) % 64 != 0) wrong += " workspace";
  if (needed > 0 && args.workspace == nullptr) wrong += " workspace";
  return wrong;
}

inline void spoil_header(Hostile& random, size_t needed, polyhead_forward_args* args) {
  switch (random.below(5)) {
    case 0: args->workspace = nullptr; break;
    case 1: args->workspace = moved(args->workspace, -random.between(1, 63)); break;
    case 2: args->workspace_bytes = static_cast<size_t>(random.below(static_cast<int64_t>(needed) + 1)); break;
    case 3: random.spoil_word(args, 16); break;
    case 4: args->reserved = static_cast<uint32_t>(random.below(2)); break;
  }
}

// What a call may do: with right arguments write its outputs, refuse the others and write nothing.
inline void judge(polyhead_status status, const std::string& wrong, const std::vector<Operand>& operands,
                  Surroundings* s) {
  std::vector<Reach> writable;
  for (const Operand& operand : operands) {
    if (operand.role == Role::kOutput) writable.push_back(reach(*operand.tensor));
  }
  ++s->outcomes[status];
  if (status == POLYHEAD_OK) {
    EXPECT_EQ(wrong, "") << "accepted, though these are not as the desc says";
    EXPECT_EQ(s->arena.count_damage(writable), 0) << "wrote outside the outputs";
  } else {
    EXPECT_EQ(status, POLYHEAD_INVALID_ARGUMENT) << polyhead_last_error();
    EXPECT_STRNE(polyhead_last_error(), "");
    EXPECT_EQ(s->arena.count_damage({}), 0) << "refused, but wrote: " << polyhead_last_error();
  }
}

// Both kinds of calls must be frequent, or the fuzz shows nothing.
inline void expect_balanced(const char* what, Surroundings& s) {
  const int64_t accepted = s.outcomes[POLYHEAD_OK], refused = s.outcomes[POLYHEAD_INVALID_ARGUMENT];
  std::printf("%s calls: %lld accepted, %lld refused\n", what, static_cast<long long>(accepted),
              static_cast<long long>(refused));
  if (setting("POLYHEAD_FUZZ_RUNS", 20000) < 1000) return;
  EXPECT_GT(accepted, refused / 4) << "the fuzz tests refusals only";
  EXPECT_GT(refused, accepted / 4) << "the fuzz is not hostile";
}

// Whether a call of this desc ends within the patience of a test.
inline bool small(const polyhead_attention_desc& d) {
  const double rows = static_cast<double>(d.batch) * static_cast<double>(d.num_heads);
  return rows * (static_cast<double>(d.seqlen_q) + 1) * (static_cast<double>(d.seqlen_k) + 1) < 1e6 &&
         d.batch <= 4096 && d.seqlen_q <= 4096 && d.num_heads <= 4096 && d.seqlen_k <= 65536;
}

// A desc and options, right or spoiled in some of their words; the reproduction of a single round prints them.
inline void random_question(Hostile& random, const Surroundings& s, polyhead_attention_desc* d,
                            polyhead_plan_options* options) {
  *d = random_desc(random);
  ASSERT_EQ(polyhead_plan_options_init(options, sizeof *options), POLYHEAD_OK);
  options->kernel = s.kernels[static_cast<size_t>(random.below(static_cast<int64_t>(s.kernels.size())))];
  options->executor = s.executors[static_cast<size_t>(random.below(static_cast<int64_t>(s.executors.size())))];
  const int64_t num_spoiled = random.chance(60) ? 0 : random.between(1, 3);
  for (int64_t i = 0; i < num_spoiled; ++i) random.spoil_word(d, offsetof(polyhead_attention_desc, program));
  if (random.chance(2)) random.spoil_word(options, 16);
  if (setting("POLYHEAD_FUZZ_RUNS", 0) == 1) print(*d, *options);
}

}  // namespace polyhead::testing
