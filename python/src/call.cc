#include "call.h"

#include "pages.h"
#include "scalars.h"
#include "threads.h"

namespace polyhead::python {
namespace {

constexpr const char* kIntegers = "int32 or int64";

constexpr ArrayArgument kQueryArray = {"query", kFloats, 4, 4, "[batch, seqlen_q, num_heads, head_dim]"};
constexpr const char* kStored = "as query, or with scales int8, float8_e4m3fn, float8_e5m2 or uint8 (pairs of int4)";
constexpr ArrayArgument kKeyArray = {"key", kStored, 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim]", true};
constexpr ArrayArgument kValueArray = {"value", kStored, 4, 4, "[batch, seqlen_k, num_heads_kv, head_dim_v]", true};
constexpr ArrayArgument kPackedQuery = {"query", kFloats, 3, 3, "[total_q, num_heads, head_dim] (with cu_seqlens)"};
constexpr ArrayArgument kPackedKey = {"key", kStored, 3, 3, "[total_k, num_heads_kv, head_dim] (with cu_seqlens)",
                                      true};
constexpr ArrayArgument kPackedValue = {"value", kStored, 3, 3, "[total_k, num_heads_kv, head_dim_v] (with cu_seqlens)",
                                        true};
constexpr ArrayArgument kPagedKey = {"key", kStored, 4, 4, "[num_pages, page_size, num_heads_kv, head_dim]", true};
constexpr ArrayArgument kPagedValue = {"value", kStored, 4, 4, "[num_pages, page_size, num_heads_kv, head_dim_v]",
                                       true};
constexpr const char* kScaleTypes = "float32 (float16 of pairs of int4)";
constexpr const char* kScaleShape = "dims of key or value but the last, and one for each group of a row";
constexpr ArrayArgument kKeyScalesArray = {"key_scales", kScaleTypes, 3, 4, kScaleShape};
constexpr ArrayArgument kValueScalesArray = {"value_scales", kScaleTypes, 3, 4, kScaleShape};
constexpr ArrayArgument kPageTableArray = {"page_table", kIntegers, 2, 2, "[batch, pages of a sequence]"};
constexpr const char* kScores = "what broadcasts to [batch, num_heads, seqlen_q, seqlen_k]";
constexpr ArrayArgument kBiasArray = {"attn_bias", kFloats, 0, 4, kScores};
constexpr ArrayArgument kMaskArray = {"attn_mask", "bool", 0, 4, kScores};
constexpr ArrayArgument kSlopesArray = {"alibi_slopes", "float32", 1, 2, "[num_heads] or [batch, num_heads]"};
constexpr ArrayArgument kSinksArray = {"sink_logits", "float32 (float64 if query is)", 1, 1, "[num_heads]"};
constexpr ArrayArgument kOffsetsArray = {"query_offset", kIntegers, 1, 1, "[batch]"};
constexpr ArrayArgument kSeqlensQArray = {"seqlens_q", kIntegers, 1, 1, "[batch]"};
constexpr ArrayArgument kSeqlensKArray = {"seqlens_k", kIntegers, 1, 1, "[batch]"};
constexpr ArrayArgument kCuSeqlensQArray = {"cu_seqlens_q", kIntegers, 1, 1, "[batch + 1]"};
constexpr ArrayArgument kCuSeqlensKArray = {"cu_seqlens_k", kIntegers, 1, 1, "[batch + 1]"};

}  // namespace

Call::Call(PyObject* const* arguments, PyObject* const* cache)
    : Options(arguments), place_(arguments[kQuery], arguments[kStream]) {
  read_operands(cache);
  read_options();
  compute_at(place_);
}

void Options::compute_at(const Place& place) {
  if (!place.on_cuda()) return;
  if (!args_.where.device) args_.where.device = Device::kCuda;
  args_.where.stream = place.stream();
}

void Options::read_options() {
  read_positions();
  read_scores();
  captures_.read(arguments_[kProgram], arguments_[kCaptured], desc_, args_);
  read_lengths();
  if (PyObject* kernel = arguments_[kKernel]; kernel != Py_None) {
    kernel_ = text_argument(kernel, "kernel", "a name out of polyhead.kernels()");
    if (kernel_.empty()) bad_value("kernel is \"\", must be a name out of polyhead.kernels()");
  }
  read_where();
}

void Options::read_where() {
  args_.where.executor = chosen_executor();
  if (PyObject* device = arguments_[kDevice]; device != Py_None) {
    constexpr const char* kTakes = "\"cpu\" or \"cuda\"";
    const std::string_view name = text_argument(device, "device", kTakes);
    for (const Device each : {Device::kCpu, Device::kCuda}) {
      if (name == device_name(each)) args_.where.device = each;
    }
    if (!args_.where.device) bad_value("device is \"%s\", must be %s", text_of(device).c_str(), kTakes);
  }
  if (arguments_[kStream] != Py_None) args_.where.stream = handle_argument(arguments_[kStream], "stream");
}

Tensor Options::optional_array(Position position, const ArrayArgument& argument) {
  if (arguments_[position] == Py_None) return {};
  return view_of(arguments_[position], argument, held_[position]);
}

void Call::check_packing(bool paged) const {
  const bool packs_q = args_.cu_seqlens_q.given(), packs_k = args_.cu_seqlens_k.given();
  if (paged && packs_k) bad_value("cu_seqlens_k is given with page_table, which packs keys: give seqlens_k");
  if (!paged && packs_q != packs_k) {
    bad_value("cu_seqlens_%s is given without cu_seqlens_%s, packed operands need both", packs_q ? "q" : "k",
              packs_q ? "k" : "q");
  }
  if (packs_q && args_.cu_seqlens_q.dims[0] == 0) bad_value("cu_seqlens_q is empty, must be [batch + 1]");
}

void Call::read_operands(PyObject* const* cache) {
  const auto given = [&](int n) { return cache != nullptr && cache[n] != Py_None; };
  const bool paged = given(0);
  args_.cu_seqlens_q = optional_array(kCuSeqlensQ, kCuSeqlensQArray);
  args_.cu_seqlens_k = optional_array(kCuSeqlensK, kCuSeqlensKArray);
  check_packing(paged);
  const bool packed = desc_.packed = args_.cu_seqlens_q.given(), packs_keys = packed && !paged;
  args_.query = view_of(arguments_[kQuery], packed ? kPackedQuery : kQueryArray, held_[kQuery]);
  args_.key = view_of(arguments_[kKey], paged ? kPagedKey : packed ? kPackedKey : kKeyArray, held_[kKey]);
  args_.value = view_of(arguments_[kValue], paged ? kPagedValue : packed ? kPackedValue : kValueArray, held_[kValue]);
  if (paged) args_.page_table = view_of(cache[0], kPageTableArray, held_page_table_);
  if (given(1)) args_.key_scales = view_of(cache[1], kKeyScalesArray, held_key_scales_);
  if (given(2)) args_.value_scales = view_of(cache[2], kValueScalesArray, held_value_scales_);

  // The dimension that counts tokens; heads and head_dim follow.
  const int rows = packed ? 0 : 1, rows_k = packs_keys ? 0 : 1;
  desc_.batch = packed ? args_.cu_seqlens_q.dims[0] - 1 : args_.query.dims[0];
  desc_.seqlen_q = args_.query.dims[rows];
  desc_.seqlen_k = args_.key.dims[rows_k];
  desc_.num_heads = args_.query.dims[rows + 1];
  desc_.num_heads_kv = args_.key.dims[rows_k + 1];
  desc_.head_dim = args_.query.dims[rows + 2];
  desc_.head_dim_v = row_numbers(args_.value);
  desc_.dtype = args_.query.dtype;
  set_format(args_.key, args_.key_scales, desc_.key_dtype, desc_.key_group);
  set_format(args_.value, args_.value_scales, desc_.value_dtype, desc_.value_group);
  if (!paged) return;
  set_pages(args_.key, args_.page_table, desc_);
  if (desc_.page_size == 0) bad_value("key dim 1 is 0, must be 1 or more: the rows of a page");
}

Tensor Options::broadcast_operand(Position position, const ArrayArgument& argument, BroadcastOperand& operand) {
  const Tensor given = view_of(arguments_[position], argument, held_[position]);
  const Tensor view = widened_to_4d(given);
  operand = python::broadcast_operand(view);
  if (position == kAttnBias) attn_bias_ndim_ = given.ndim;
  return view;
}

Tensor Options::given_attn_bias() const {
  Tensor given = args_.attn_bias;
  given.ndim = attn_bias_ndim_;
  for (int i = 0; i < attn_bias_ndim_; ++i) given.dims[i] = args_.attn_bias.dims[4 - attn_bias_ndim_ + i];
  return given;
}

void Options::read_positions() {
  desc_.causal = flag_argument(arguments_[kCausal], "causal");
  if (PyObject* window = arguments_[kWindow]; window != Py_None) {
    const nb::object pair = sequence_argument(window, "window", 2, "a pair of integers (left, right)");
    desc_.window_left = int64_argument(PySequence_Fast_GET_ITEM(pair.ptr(), 0), "window[0]");
    desc_.window_right = int64_argument(PySequence_Fast_GET_ITEM(pair.ptr(), 1), "window[1]");
  }
  desc_.sink_keys = int64_argument(arguments_[kSinkKeys], "sink_keys");
  if (PyObject* align = arguments_[kAlign]; align != Py_None) {
    constexpr const char* kTakes = "\"top_left\" or \"bottom_right\"";
    const std::string_view name = text_argument(align, "align", kTakes);
    if (name == "top_left") {
      desc_.align = Align::kTopLeft;
    } else if (name == "bottom_right") {
      desc_.align = Align::kBottomRight;
    } else {
      bad_value("align is \"%s\", must be %s", text_of(align).c_str(), kTakes);
    }
  }
  if (PyObject* offset = arguments_[kQueryOffset]; offset != Py_None) {
    if (!PyLong_Check(offset) && is_array(offset) && PyObject_HasAttrString(offset, "ndim") &&
        nb::cast<int>(nb::handle(offset).attr("ndim")) != 0) {
      args_.query_offsets = view_of(offset, kOffsetsArray, held_[kQueryOffset]);
      desc_.has_query_offsets = true;
    } else {
      desc_.query_offset = int64_argument(offset, "query_offset", "an integer or an integer array [batch]");
    }
  }
}

void Options::read_scores() {
  if (arguments_[kAttnBias] != Py_None) {
    args_.attn_bias = broadcast_operand(kAttnBias, kBiasArray, desc_.attn_bias);
  }
  if (arguments_[kAttnMask] != Py_None) {
    args_.attn_mask = broadcast_operand(kAttnMask, kMaskArray, desc_.attn_mask);
  }
  if (arguments_[kScale] != Py_None) desc_.scale = real_argument(arguments_[kScale], "scale");
  desc_.mask_at_end = flag_argument(arguments_[kMaskAtEnd], "mask_at_end");
  desc_.softcap = real_argument(arguments_[kSoftcap], "softcap");
  args_.alibi_slopes = optional_array(kAlibiSlopes, kSlopesArray);
  desc_.alibi_slopes_ndim = args_.alibi_slopes.ndim;
  args_.sink_logits = optional_array(kSinkLogits, kSinksArray);
  desc_.has_sink_logits = args_.sink_logits.given();
  constexpr const char* kTakes = "\"softmax\" or \"none\"";
  const std::string_view normalizer = text_argument(arguments_[kNormalizer], "normalizer", kTakes);
  if (normalizer == "none") {
    desc_.normalizer = Normalizer::kNone;
  } else if (normalizer != "softmax") {
    bad_value("normalizer is \"%s\", must be %s", text_of(arguments_[kNormalizer]).c_str(), kTakes);
  }

  desc_.dropout_p = real_argument(arguments_[kDropoutP], "dropout_p");
  if (arguments_[kDropoutSeed] != Py_None) {
    args_.dropout_seed = seed_argument(arguments_[kDropoutSeed]);
  } else if (desc_.dropout_p > 0) {
    bad_value("dropout_p is %s, so dropout_seed must be given: 0 to 2^64 - 1", text_of(arguments_[kDropoutP]).c_str());
  }
  args_.dropout_offset = dropout_offset_argument(arguments_[kDropoutOffset]);
  desc_.dropout_origin = dropout_origin_argument(arguments_[kDropoutOrigin]);
}

void Options::read_lengths() {
  args_.seqlens_q = optional_array(kSeqlensQ, kSeqlensQArray);
  args_.seqlens_k = optional_array(kSeqlensK, kSeqlensKArray);
  desc_.has_seqlens_q = args_.seqlens_q.given();
  desc_.has_seqlens_k = args_.seqlens_k.given();
}

}  // namespace polyhead::python
