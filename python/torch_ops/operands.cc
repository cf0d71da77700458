#include "operands.h"

#include <cstdint>
#include <span>

#include "capture.h"
#include "pages.h"
#include "program_cache.h"

namespace polyhead::torch_ops {
namespace {

constexpr TensorArgument kQuery = {"query", 4, 4, "[batch, seqlen_q, num_heads, head_dim]"};
constexpr TensorArgument kKey = {"key", 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim]", true};
constexpr TensorArgument kValue = {"value", 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim_v]", true};
constexpr TensorArgument kPackedQuery = {"query", 3, 3, "[total_q, num_heads, head_dim] (with cu_seqlens)"};
constexpr TensorArgument kPackedKey = {"key", 3, 3, "[total_k, num_heads_kv, head_dim] (with cu_seqlens)", true};
constexpr TensorArgument kPackedValue = {"value", 3, 3, "[total_k, num_heads_kv, head_dim_v] (with cu_seqlens)", true};
constexpr TensorArgument kPagedKey = {"key", 4, 4, "[num_pages, page_size, num_heads_kv, head_dim]", true};
constexpr TensorArgument kPagedValue = {"value", 4, 4, "[num_pages, page_size, num_heads_kv, head_dim_v]", true};
constexpr const char* kScores = "what broadcasts to [batch, num_heads, seqlen_q, seqlen_k]";
constexpr TensorArgument kBias = {"attn_bias", 0, 4, kScores};
constexpr TensorArgument kMask = {"attn_mask", 0, 4, kScores};

// [batch] or [batch + 1], if given.
Tensor integers(const StableTensor& tensor, const char* name, const char* shape) {
  return tensor.given() ? view_of(tensor, {name, 1, 1, shape}) : Tensor();
}

}  // namespace

Options::Options(ArgumentReader& arguments)
    : causal(arguments.flag()),
      scale(arguments.optional_real()),
      attn_bias(arguments.optional_tensor()),
      attn_mask(arguments.optional_tensor()),
      alibi_slopes(arguments.optional_tensor()),
      dropout_seed(arguments.optional_tensor()),
      dropout_p(arguments.real()),
      dropout_offset(arguments.integer()),
      window_left(arguments.integer()),
      window_right(arguments.integer()),
      align(arguments.integer()),
      query_offset(arguments.optional_integer()),
      query_offsets(arguments.optional_tensor()),
      softcap(arguments.real()),
      seqlens_q(arguments.optional_tensor()),
      seqlens_k(arguments.optional_tensor()),
      cu_seqlens_q(arguments.optional_tensor()),
      cu_seqlens_k(arguments.optional_tensor()),
      kernel(arguments.optional_text()),
      dropout_origin(arguments.optional_tensor()),
      sink_logits(arguments.optional_tensor()),
      normalizer(arguments.integer()),
      sink_keys(arguments.integer()),
      mask_at_end(arguments.flag()) {}

Operands::Operands(const StableTensor& query, const StableTensor& key, const StableTensor& value,
                   const Options& options)
    : place(query) {
  read_operands(query, key, value, options);
  read_options(options);
  read_dropout(options);
  args.where = place.where();
  if (options.kernel) {
    kernel = *options.kernel;
    if (kernel.empty()) bad_value("kernel is \"\", must be a name out of polyhead.kernels()");
  }
  heads_first = options.heads_first;
}

void Operands::read_operands(const StableTensor& query, const StableTensor& key, const StableTensor& value,
                             const Options& options) {
  args.cu_seqlens_q = integers(options.cu_seqlens_q, "cu_seqlens_q", "[batch + 1]");
  args.cu_seqlens_k = integers(options.cu_seqlens_k, "cu_seqlens_k", "[batch + 1]");
  const bool packed = args.cu_seqlens_q.given(), paged = options.page_table.given(), packs_keys = packed && !paged;
  if (paged && args.cu_seqlens_k.given()) {
    bad_value("cu_seqlens_k is given with page_table, which packs keys: give seqlens_k");
  }
  if (!paged && packed != args.cu_seqlens_k.given()) {
    bad_value("cu_seqlens_%s is given without cu_seqlens_%s, packed operands need both", packed ? "q" : "k",
              packed ? "k" : "q");
  }
  if (packed && args.cu_seqlens_q.dims[0] == 0) bad_value("cu_seqlens_q is empty, must be [batch + 1]");
  args.query = view_of(query, packed ? kPackedQuery : kQuery);
  args.key = view_of(key, paged ? kPagedKey : packed ? kPackedKey : kKey);
  args.value = view_of(value, paged ? kPagedValue : packed ? kPackedValue : kValue);
  if (options.heads_first) {
    for (Tensor* view : {&args.query, &args.key, &args.value}) *view = heads_and_rows_swapped(*view);
  }

  const int rows = packed ? 0 : 1, rows_k = packs_keys ? 0 : 1;  // that count tokens; heads and head_dim follow
  desc.packed = packed;
  desc.batch = packed ? args.cu_seqlens_q.dims[0] - 1 : args.query.dims[0];
  desc.seqlen_q = args.query.dims[rows];
  desc.seqlen_k = args.key.dims[rows_k];
  desc.num_heads = args.query.dims[rows + 1];
  desc.num_heads_kv = args.key.dims[rows_k + 1];
  desc.head_dim = args.query.dims[rows + 2];
  desc.head_dim_v = python::row_numbers(args.value);
  desc.dtype = args.query.dtype;
  constexpr const char* kScales = "dims of key or value but the last, and one for each group of a row";
  if (options.key_scales.given()) args.key_scales = view_of(options.key_scales, {"key_scales", 3, 4, kScales});
  if (options.value_scales.given()) args.value_scales = view_of(options.value_scales, {"value_scales", 3, 4, kScales});
  python::set_format(args.key, args.key_scales, desc.key_dtype, desc.key_group);
  python::set_format(args.value, args.value_scales, desc.value_dtype, desc.value_group);
  if (paged) {
    args.page_table = view_of(options.page_table, {"page_table", 2, 2, "[batch, pages of a sequence]"});
    python::set_pages(args.key, args.page_table, desc);
    if (desc.page_size == 0) bad_value("key dim 1 is 0, must be 1 or more: the rows of a page");
  }
  if (options.same_heads && desc.num_heads_kv != desc.num_heads) {
    bad_value("key has %lld heads, must have %lld as query", static_cast<long long>(desc.num_heads_kv),
              static_cast<long long>(desc.num_heads));
  }
}

void Operands::read_options(const Options& options) {
  desc.causal = options.causal;
  desc.scale = options.scale;
  desc.softcap = options.softcap;
  desc.window_left = options.window_left;
  desc.window_right = options.window_right;
  desc.sink_keys = options.sink_keys;
  desc.mask_at_end = options.mask_at_end;
  if (options.align < 0 || options.align > 2) {
    bad_value("align is %lld, must be 0, 1 (top_left) or 2 (bottom_right)", static_cast<long long>(options.align));
  }
  desc.align = static_cast<Align>(options.align);
  desc.query_offset = options.query_offset;
  args.query_offsets = integers(options.query_offsets, "query_offset", "[batch]");
  desc.has_query_offsets = args.query_offsets.given();
  if (options.attn_bias.given()) {
    attn_bias = view_of(options.attn_bias, kBias);
    args.attn_bias = python::widened_to_4d(attn_bias);
    desc.attn_bias = python::broadcast_operand(args.attn_bias);
  }
  if (options.attn_mask.given()) {
    args.attn_mask = python::widened_to_4d(view_of(options.attn_mask, kMask));
    desc.attn_mask = python::broadcast_operand(args.attn_mask);
  }
  if (options.alibi_slopes.given()) {
    args.alibi_slopes = view_of(options.alibi_slopes, {"alibi_slopes", 1, 2, "[num_heads] or [batch, num_heads]"});
  }
  desc.alibi_slopes_ndim = args.alibi_slopes.ndim;
  if (options.sink_logits.given())
    args.sink_logits = view_of(options.sink_logits, {"sink_logits", 1, 1, "[num_heads]"});
  desc.has_sink_logits = args.sink_logits.given();
  if (options.normalizer < 0 || options.normalizer > 1) {
    bad_value("normalizer is %lld, must be 0 (softmax) or 1 (none)", static_cast<long long>(options.normalizer));
  }
  desc.normalizer = static_cast<Normalizer>(options.normalizer);
  args.seqlens_q = integers(options.seqlens_q, "seqlens_q", "[batch]");
  args.seqlens_k = integers(options.seqlens_k, "seqlens_k", "[batch]");
  desc.has_seqlens_q = args.seqlens_q.given();
  desc.has_seqlens_k = args.seqlens_k.given();
}

void Operands::read_dropout(const Options& options) {
  desc.dropout_p = options.dropout_p;
  if (options.dropout_offset < 0 || options.dropout_offset > int64_t{UINT32_MAX}) {
    bad_value("dropout_offset is %lld, must be 0 to 2^32 - 1", static_cast<long long>(options.dropout_offset));
  }
  args.dropout_offset = static_cast<uint32_t>(options.dropout_offset);
  if (options.dropout_origin.given()) {
    constexpr const char* kFour = "four integers: first_head, num_heads, first_query, first_key";
    const Tensor origin =
        view_of(options.dropout_origin, {"dropout_origin", 1, 1, kFour, /*stored=*/false, /*on_cpu=*/true});
    if (origin.dtype != DType::kInt64 || origin.dims[0] != 4) bad_value("dropout_origin must be int64 [4]");
    const auto* const fields = static_cast<const int64_t*>(origin.data);
    const int64_t stride = origin.strides[0];
    desc.dropout_origin = {fields[0], fields[stride], fields[2 * stride], fields[3 * stride]};
  }
  if (options.dropout_seed.given()) {
    const Tensor seed =
        view_of(options.dropout_seed, {"dropout_seed", 0, 0, "an int64 scalar", /*stored=*/false, /*on_cpu=*/true});
    if (seed.dtype != DType::kInt64) bad_value("dropout_seed is %s, must be int64", dtype_name(seed.dtype));
    args.dropout_seed = *static_cast<const uint64_t*>(seed.data);
  } else if (desc.dropout_p > 0) {
    bad_value("dropout_p is %g, so dropout_seed must be given", desc.dropout_p);
  }
}

CapturingProgram::CapturingProgram(ArgumentReader& arguments) : text(arguments.text()) {
  for (StableTensor& capture : captures) capture = arguments.optional_tensor();
}

OperandsOfProgram::OperandsOfProgram(const StableTensor& query, const StableTensor& key, const StableTensor& value,
                                     const Options& options, const CapturingProgram& program)
    : Operands(query, key, value, options) {
  auto parsed = python::cached_program(program.text);
  check(parsed.status());
  desc.program = **parsed;
  size_t count = 0;
  for (; count < captures.size() && program.captures[count].given(); ++count) {
    const std::string name = "capture" + std::to_string(count);
    captures[count] =
        view_of(program.captures[count], {name.c_str(), 0, ProgramStep::kMostOperands, "as the program indexes it"});
    indexed_captures_[count] = python::as_capture(captures[count]);
    desc.captures.push_back(python::capture_shape(indexed_captures_[count]));
  }
  args.captures = std::span<const Tensor>(indexed_captures_.data(), count);
}

}  // namespace polyhead::torch_ops
