#include "attention/words.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "contract/where.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

std::string dims_text(const BroadcastOperand& operand, const AttentionDesc& desc) {
  const int64_t full[4] = {desc.batch, desc.num_heads, desc.seqlen_q, desc.seqlen_k};
  std::string text;
  for (int i = 0; i < 4; ++i) {
    if (i > 0) text += ',';
    if (operand.dims[i] == full[i] && operand.dims[i] != 1) {
      text += "bhqk"[i];
    } else {
      append(text, operand.dims[i]);
    }
  }
  return text;
}

std::string pair_text(int64_t first, int64_t second) {
  return second == first ? sentence(first) : sentence(first, "/", second);
}

}  // namespace

std::string number_word(double value) {
  std::array<char, 32> text{};
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), result.ptr};
}

std::string sizes_in_words(const AttentionDesc& desc) {
  return sentence(desc.batch, "x", pair_text(desc.num_heads, desc.num_heads_kv), "x",
                  pair_text(desc.seqlen_q, desc.seqlen_k), "x", pair_text(desc.head_dim, desc.head_dim_v));
}

std::string options_in_words(const AttentionDesc& desc, std::string_view mask_kind, bool packed_rows) {
  std::string line;
  const auto add = [&](const auto&... parts) { line += sentence(" ", parts...); };
  if (desc.dtype != DType::kFloat32) add("--dtype ", word_of(kDTypeWords, desc.dtype));
  if (desc.out_dtype) add("--out-dtype ", word_of(kDTypeWords, *desc.out_dtype));
  if (desc.grad_dtype) add("--grad-dtype ", word_of(kDTypeWords, *desc.grad_dtype));
  if (key_dtype(desc) != desc.dtype) add("--key-dtype ", word_of(kStoredDTypeWords, *desc.key_dtype));
  if (desc.key_group != 0) add("--key-group ", desc.key_group);
  if (value_dtype(desc) != desc.dtype) add("--value-dtype ", word_of(kStoredDTypeWords, *desc.value_dtype));
  if (desc.value_group != 0) add("--value-group ", desc.value_group);
  if (desc.causal) add("--causal");
  if (desc.window_left != -1 || desc.window_right != -1) add("--window ", desc.window_left, ",", desc.window_right);
  if (desc.sink_keys != 0) add("--sink-keys ", desc.sink_keys);
  if (desc.align != Align::kUnset) add("--align ", word_of(kAlignWords, desc.align));
  if (desc.query_offset) add("--query-offset ", *desc.query_offset);
  if (desc.has_query_offsets) add("--query-offset random");
  if (desc.scale) add("--scale ", number_word(*desc.scale));
  if (desc.softcap != 0) add("--softcap ", number_word(desc.softcap));
  if (desc.alibi_slopes_ndim == 1) add("--alibi");
  if (desc.alibi_slopes_ndim == 2) add("--alibi=batch");
  if (desc.has_sink_logits) add("--sinks");
  if (desc.normalizer != Normalizer::kSoftmax) add("--normalizer ", word_of(kNormalizerWords, desc.normalizer));
  if (desc.attn_mask.given) add("--mask ", dims_text(desc.attn_mask, desc), mask_kind);
  if (desc.mask_at_end) add("--mask-at-end");
  if (desc.attn_bias.given) add("--bias ", dims_text(desc.attn_bias, desc));
  if (desc.attn_bias.dtype != DType::kFloat32) add("--bias-dtype ", word_of(kDTypeWords, desc.attn_bias.dtype));
  if (desc.has_seqlens_q || desc.has_seqlens_k) {
    add(!desc.has_seqlens_k ? "--lengths=q" : !desc.has_seqlens_q ? "--lengths=k" : "--lengths");
  }
  if (desc.page_size > 0) add("--page-size ", desc.page_size);
  if (desc.has_windows) add("--windows");
  if (desc.packed) add(packed_rows ? "--packed=rows" : "--packed");
  if (desc.dropout_p != 0) add("--dropout ", number_word(desc.dropout_p));
  if (const DropoutOrigin& o = desc.dropout_origin; o != DropoutOrigin()) {
    add("--dropout-origin ", o.first_head, ",", o.num_heads, ",", o.first_query, ",", o.first_key);
  }
  if (desc.return_weights != ReturnWeights::kNone) add("--weights ", word_of(kReturnWeightsWords, desc.return_weights));
  if (desc.return_column_sums) add("--column-sums");
  return line;
}

std::string program_in_words(const Program& program) {
  return sentence(program.score() >= 0 ? " --score '" : " --mask '", program.text(), "'");
}

std::string program_in_words(const AttentionDesc& desc) {
  if (desc.program == nullptr) return "";
  std::string tensors;
  for (size_t n = 0; n < desc.captures.size(); ++n) {
    const Capture& capture = desc.program->captures()[n];
    const CaptureShape& shape = desc.captures[n];
    tensors += sentence(n == 0 ? "" : "; ", capture.name, ": ", word_of(kCaptureDTypeWords, shape.dtype), "[");
    for (int i = 0; i < capture.ndim; ++i) tensors += sentence(i == 0 ? "" : ", ", shape.dims[i]);
    tensors += "]";
  }
  return program_in_words(*desc.program) + (tensors.empty() ? "" : sentence(" --captured '", tensors, "'"));
}

std::string run_in_words(const char* kernel, const Where& where) {
  return sentence(" --kernel ", kernel, " --threads ", std::max(1, where.executor->num_threads()));
}

}  // namespace polyhead
