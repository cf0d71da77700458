#include "node.h"

#include <random>

#include "core/dtype.h"
#include "core/sentence.h"

namespace polyhead::onnxruntime {
namespace {

Status refused(std::string why) { return {StatusCode::kUnsupported, std::move(why)}; }

constexpr struct {
  Operator op;
  bool is_output;
  int at;
  const char* why;
} kRefused[] = {
    {Operator::kMultiHead, false, 8, "past_sequence_length, a cache that is written in place, is not taken"},
    {Operator::kMultiHead, false, 9, "cache_indirection, of beam search, is not taken"},
    {Operator::kMultiHead, true, 3, "qk, the scores, is an output that is not computed"},
    {Operator::kGroupQuery, false, 12, "k_scale, of quantised caches, is not taken"},
    {Operator::kGroupQuery, false, 13, "v_scale, of quantised caches, is not taken"},
    {Operator::kGroupQuery, false, 14, "q_norm_weight is not taken"},
    {Operator::kGroupQuery, false, 15, "k_norm_weight is not taken"},
    {Operator::kGroupQuery, true, 3, "output_qk, the scores, is an output that is not computed"},
};

// Attributes that must have one value.
constexpr struct {
  Operator op;
  const char* name;
  int64_t must_be;
} kFixed[] = {
    {Operator::kGroupQuery, "kv_cache_bit_width", 0},
    {Operator::kGroupQuery, "qk_output", 0},
};

}  // namespace

Result<Node> Node::make(const NodeFacts& facts, const Attributes& attributes) {
  for (const auto& each : kRefused) {
    if (each.op == facts.op && (each.is_output ? facts.wants(each.at) : facts.gives(each.at))) return refused(each.why);
  }
  for (const auto& each : kFixed) {
    const int64_t value = attributes.integer(each.name).value_or(each.must_be);
    // -1 is how the attribute of a later version says that it is off.
    if (each.op == facts.op && value != each.must_be && value != -1) {
      return refused(sentence(each.name, " is ", value, ", must be ", each.must_be));
    }
  }
  const bool is_attention = facts.op == Operator::kAttention || facts.op == Operator::kAttentionGrad;
  Node node;
  node.op_ = facts.op;
  if (facts.op == Operator::kLinear) {
    const auto linear = Linear::make(facts, attributes);
    if (!linear.ok()) return linear.status();
    node.linear_ = *linear;
    return node;
  }
  const auto integer = [&](const char* name, int64_t otherwise) {
    return attributes.integer(name).value_or(otherwise);
  };
  if (const auto scale = attributes.number("scale"); scale && (is_attention || *scale != 0)) node.scale_ = *scale;
  node.softcap_ = attributes.number("softcap").value_or(0);
  node.num_heads_ = integer(is_attention ? "q_num_heads" : "num_heads", 0);
  node.num_heads_kv_ = integer("kv_num_heads", 0);
  if (facts.op == Operator::kMultiHead) node.num_heads_kv_ = node.num_heads_;
  if (!is_attention && node.num_heads_ < 1) return invalid(sentence("num_heads is ", node.num_heads_));
  if (facts.op == Operator::kGroupQuery && node.num_heads_kv_ < 1) {
    return invalid(sentence("kv_num_heads is ", node.num_heads_kv_));
  }
  switch (facts.op) {
    case Operator::kAttention:
    case Operator::kAttentionGrad:
      node.dropout_p_ = attributes.number("dropout_p").value_or(0);
      if (!(node.dropout_p_ >= 0 && node.dropout_p_ < 1)) return invalid(sentence("dropout_p is ", node.dropout_p_));
      node.seed_ = static_cast<uint64_t>(attributes.integer("seed").value_or(std::random_device()()));
      node.causal_ = integer("is_causal", 0) != 0;
      node.mask_broadcasts_ = integer("mask_broadcasts", 0) != 0;
      node.window_left_ = integer("left_window_size", -1);
      node.window_right_ = integer("right_window_size", -1);
      if (const auto score = attributes.text("score")) {
        const Result<SharedProgram> program = parse_program(*score);
        if (!program.ok()) return program.status();
        node.program_ = *program;
      }
      if (facts.op == Operator::kAttention && facts.wants(3)) {
        const int64_t mode = integer("qk_matmul_output_mode", 0);
        if (mode < 0 || mode > 3) return invalid(sentence("qk_matmul_output_mode is ", mode, ", must be 0 to 3"));
        if (mode == 3) {
          node.returns_weights_ = true;
        } else if (node.program_ != nullptr) {
          return refused("the scores are asked for beside a program, which gives the weights alone");
        } else {
          node.scores_ = Scores{mode};
        }
      }
      break;
    case Operator::kMultiHead:
      node.causal_ = integer("unidirectional", 0) != 0;
      node.mask_filter_value_ = attributes.number("mask_filter_value").value_or(-10000.0f);
      break;
    case Operator::kGroupQuery:
      node.causal_ = integer("causal", 1) != 0;
      // -1 and 0: it is off.
      node.sink_of_zero_ = integer("smooth_softmax", 0) > 0;
      node.rotary_ = integer("do_rotary", 0) != 0;
      node.rotary_interleaved_ = integer("rotary_interleaved", 0) != 0;
      // So many keys, the query's own among them.
      if (const int64_t keys = integer("local_window_size", -1); keys > 0) node.window_left_ = keys - 1;
      break;
    case Operator::kLinear: break;
  }
  return node;
}

Status Node::run(Call& call, Plans& plans) const {
  switch (op_) {
    case Operator::kAttention: return run_attention(call, plans);
    case Operator::kAttentionGrad: return run_attention_grad(call, plans);
    case Operator::kMultiHead: return run_multi_head(call, plans);
    case Operator::kGroupQuery: return run_group_query(call, plans);
    case Operator::kLinear: return linear_->run(call);
  }
  return {};
}

// Of operands [batch, sequence, heads, dim].
AttentionDesc Node::desc_of(const Tensor& query, const Tensor& key, const Tensor& value) const {
  AttentionDesc desc;
  desc.batch = query.dims[0];
  desc.seqlen_q = query.dims[1];
  desc.seqlen_k = key.dims[1];
  desc.num_heads = query.dims[2];
  desc.num_heads_kv = key.dims[2];
  desc.head_dim = query.dims[3];
  desc.head_dim_v = value.dims[3];
  desc.dtype = query.dtype;
  desc.scale = scale_;
  desc.softcap = softcap_;
  desc.causal = causal_;
  desc.dropout_p = dropout_p_;
  desc.window_left = window_left_;
  desc.window_right = window_right_;
  return desc;
}

Status make_flat_out(Call& call, const AttentionDesc& desc, Tensor& out) {
  out.dtype = desc.dtype;
  const Status status = call.output(0, {desc.batch, desc.seqlen_q, desc.num_heads * desc.head_dim_v}, out);
  if (status.ok()) out = split_last(out, desc.num_heads);
  return status;
}

Status add_mask(const char* what, const Tensor& mask, AttentionDesc& desc, ForwardArgs& args) {
  const bool is_bool = mask.dtype == DType::kBool;
  if (mask.ndim > 4 || mask.dtype == DType::kInt32 || mask.dtype == DType::kInt64) {
    return invalid(sentence(what, " is ", words_of(mask), ", must be bool or float, of at most 4 dims"));
  }
  const Tensor full = with_leading_ones(mask, 4);
  const int64_t sizes[4] = {desc.batch, desc.num_heads, desc.seqlen_q, desc.seqlen_k};
  BroadcastOperand& operand = is_bool ? desc.attn_mask : desc.attn_bias;
  operand.given = true;
  operand.dtype = mask.dtype;
  for (int i = 0; i < 4; ++i) {
    operand.dims[i] = full.dims[i];
    if (full.dims[i] != 1 && full.dims[i] != sizes[i]) {
      return invalid(sentence(what, " is ", words_of(mask), ", does not broadcast to [", sizes[0], ", ", sizes[1], ", ",
                              sizes[2], ", ", sizes[3], "]"));
    }
  }
  (is_bool ? args.attn_mask : args.attn_bias) = full;
  return {};
}

Status add_sinks(Call& call, const SinkInput& input, AttentionDesc& desc, ForwardArgs& args) {
  Tensor given;
  Status status = call.input(input.index, given);
  if (!status.ok() || (!given.given() && !input.zero_if_missing)) return status;
  const bool fits = given.num_elements() == desc.num_heads && (input.any_dims || given.ndim == 1);
  if (given.given() && (!fits || given.dtype > DType::kFloat64)) {
    return invalid(sentence(input.name, " is ", words_of(given), ", must be float [", desc.num_heads, "]"));
  }
  desc.has_sink_logits = true;
  const DType dtype = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  status = call.scratch(dtype, {desc.num_heads}, args.sink_logits);
  for (int64_t h = 0; status.ok() && h < desc.num_heads; ++h) {
    store_element(args.sink_logits.data, dtype, h, given.given() ? load_element(given.data, given.dtype, h) : 0);
  }
  return status;
}

}  // namespace polyhead::onnxruntime
