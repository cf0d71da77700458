// ONNX's Attention: https://onnx.ai/onnx/operators/onnx__Attention.html
#include <algorithm>
#include <vector>

#include "cached.h"
#include "core/dtype.h"
#include "core/sentence.h"
#include "node.h"
#include "operators.h"

namespace polyhead::onnxruntime {
namespace {

constexpr size_t kQuery = 0, kKey = 1, kValue = 2, kMask = 3, kPastKey = 4, kPastValue = 5, kLengths = 6, kSinks = 7,
                 kCaptures = 8;  // of ours
constexpr size_t kOut = 0, kPresentKey = 1, kPresentValue = 2, kWeights = 3;
// Of the gradients, behind query, key and value.
constexpr size_t kGivenOut = 3, kGivenLogsumexp = 4, kGradOut = 5, kGivenMask = 6, kGivenDropout = 7, kGivenSinks = 8,
                 kGivenCaptures = 9;
constexpr size_t kGradMask = 3, kGradSinks = 4, kGradCaptures = 5;

struct Operands {
  Tensor query, key, value;  // [batch, sequence, heads, dim]
  bool flat = false;         // they came as [batch, sequence, heads * dim]
};

// [B, H, S, D] or [B, S, H * D] -> [B, S, H, D]
Status heads_apart(Call& call, size_t index, const char* what, int64_t num_heads, Tensor& tensor,
                   bool* is_flat = nullptr) {
  if (Status status = call.input(index, tensor); !status.ok()) return status;
  if (is_flat != nullptr) *is_flat = tensor.ndim == 3;
  if (tensor.ndim == 4) {
    tensor = permuted(tensor, {0, 2, 1, 3});
    return {};
  }
  if (tensor.ndim != 3) return invalid(sentence(what, " is ", words_of(tensor), ", must have 3 or 4 dims"));
  if (num_heads < 1 || tensor.dims[2] % num_heads != 0) {
    return invalid(sentence(what, " is ", words_of(tensor), ", whose last dim is not ", num_heads, " heads"));
  }
  tensor = split_last(tensor, num_heads);
  return {};
}

Status read(Call& call, int64_t num_heads, int64_t num_heads_kv, Operands& o) {
  Status status = heads_apart(call, kQuery, "Q", num_heads, o.query, &o.flat);
  if (status.ok()) status = heads_apart(call, kKey, "K", num_heads_kv, o.key);
  if (status.ok()) status = heads_apart(call, kValue, "V", num_heads_kv, o.value);
  if (!status.ok()) return status;
  const auto same = [&](const Tensor& other, const char* what, std::initializer_list<int> dims) -> Status {
    for (int i : dims) {
      if (other.dims[i] != o.key.dims[i]) return invalid(sentence("K and ", what, " differ: ", words_of(other)));
    }
    return {};
  };
  if (status.ok()) status = same(o.value, "V", {0, 1, 2});
  if (status.ok()) status = same(o.query, "Q", {0, 3});
  for (const Tensor* other : {&o.key, &o.value}) {
    if (status.ok() && other->dtype != o.query.dtype) {
      status = invalid(sentence("Q is ", dtype_name(o.query.dtype), ", K or V ", dtype_name(other->dtype)));
    }
  }
  return status;
}

// nonpad_kv_seqlen, cut off at `most`, and where that leaves each sequence's last query.
Status add_lengths(Call& call, const Tensor& lengths, int64_t most, AttentionDesc& desc, ForwardArgs& args) {
  if (lengths.dtype != DType::kInt64 || lengths.ndim != 1 || lengths.dims[0] != desc.batch) {
    return invalid(sentence("nonpad_kv_seqlen is ", words_of(lengths), ", must be int64 [", desc.batch, "]"));
  }
  desc.has_seqlens_k = desc.has_query_offsets = true;
  Status status = call.scratch(DType::kInt64, {desc.batch}, args.seqlens_k);
  if (status.ok()) status = call.scratch(DType::kInt64, {desc.batch}, args.query_offsets);
  if (!status.ok()) return status;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const int64_t length = static_cast<const int64_t*>(lengths.data)[b];
    if (length < 0 || length > most) {
      return invalid(sentence("nonpad_kv_seqlen[", b, "] is ", length, ", must be 0 to ", most));
    }
    static_cast<int64_t*>(args.seqlens_k.data)[b] = std::min(length, desc.seqlen_k);
    static_cast<int64_t*>(args.query_offsets.data)[b] = length - desc.seqlen_q;
  }
  return {};
}

// The tensors of a program, in its order, from input `first` on; none without one.
Status read_captures(Call& call, size_t first, const SharedProgram& program, AttentionDesc& desc,
                     std::vector<Tensor>& captures) {
  desc.program = program;
  for (size_t i = 0; program != nullptr && i < program->captures().size(); ++i) {
    Tensor tensor;
    if (Status status = call.input(first + i, tensor); !status.ok()) return status;
    const int ndim = std::max(program->captures()[i].ndim, 1);
    if (!tensor.given() || tensor.ndim != ndim) {
      return invalid(sentence("\"", program->captures()[i].name, "\" of the score program is ",
                              tensor.given() ? words_of(tensor) : "not given", ", must have ", ndim, " dims"));
    }
    CaptureShape shape = {tensor.dtype, ndim};
    std::copy_n(tensor.dims, ndim, shape.dims);
    desc.captures.push_back(shape);
    captures.push_back(tensor);
  }
  return {};
}

// The output of the weights [B, H, Sq, total]; columns behind the mask's end are 0.
Status make_weights(Call& call, const AttentionDesc& desc, int64_t total, Tensor& weights) {
  weights.dtype = desc.dtype;
  const Status status = call.output(kWeights, {desc.batch, desc.num_heads, desc.seqlen_q, total}, weights);
  if (!status.ok() || total == desc.seqlen_k) return status;
  std::fill_n(static_cast<char*>(weights.data),
              static_cast<size_t>(weights.num_elements()) * dtype_size_bytes(desc.dtype), '\0');
  weights = part(weights, 3, 0, desc.seqlen_k);
  return status;
}

// The seed and offset of dropout's mask, told to the backward.
Status draw(Call& call, uint64_t seed, uint32_t offset, ForwardArgs& args) {
  args.dropout_seed = seed;
  args.dropout_offset = offset;
  Tensor drawn;
  drawn.dtype = DType::kInt64;
  const Status status = call.output(kDropout, {2}, drawn);
  if (!status.ok() || !drawn.given()) return status;
  static_cast<int64_t*>(drawn.data)[0] = static_cast<int64_t>(seed);
  static_cast<int64_t*>(drawn.data)[1] = offset;
  return {};
}

// A gradient in the dims of its operand [B, S, H, D], which came flat or as [B, H, S, D].
Status make_gradient(Call& call, size_t index, const Tensor& like, bool flat, Tensor& gradient) {
  gradient.dtype = like.dtype;
  const int64_t *dims = like.dims, heads = dims[2];
  if (flat) {
    const Status status = call.output(index, {dims[0], dims[1], heads * dims[3]}, gradient);
    if (status.ok() && gradient.given()) gradient = split_last(gradient, heads);
    return status;
  }
  const Status status = call.output(index, {dims[0], heads, dims[1], dims[3]}, gradient);
  if (status.ok() && gradient.given()) gradient = permuted(gradient, {0, 2, 1, 3});
  return status;
}

// In the dims of the mask that came.
Status make_mask_gradient(Call& call, const Tensor& mask, Tensor& gradient) {
  if (!call.wants(kGradMask)) return {};
  if (!mask.given() || mask.dtype == DType::kBool || (mask.ndim != 2 && mask.ndim != 4)) {
    return invalid("a gradient of attn_mask is asked for, which is none of floats with 2 or 4 dims");
  }
  gradient.dtype = mask.dtype;
  const int64_t* dims = mask.dims;
  const Status status = mask.ndim == 2 ? call.output(kGradMask, {dims[0], dims[1]}, gradient)
                                       : call.output(kGradMask, {dims[0], dims[1], dims[2], dims[3]}, gradient);
  if (status.ok()) gradient = with_leading_ones(gradient, 4);
  return status;
}

// Of what a program reads, in the dims that it came in; null where nobody asks.
Status make_capture_gradients(Call& call, const std::vector<Tensor>& captures, std::vector<Tensor>& gradients) {
  for (size_t i = 0; i < captures.size(); ++i) {
    Tensor gradient;
    gradient.dtype = captures[i].dtype;
    const std::span<const int64_t> dims(captures[i].dims, static_cast<size_t>(captures[i].ndim));
    if (Status status = call.output(kGradCaptures + i, dims, gradient); !status.ok()) return status;
    gradients.push_back(gradient);
  }
  return {};
}

// A logit's gradient for each head, in the dims and the dtype that the sinks came in.
Status write_sink_gradients(Call& call, const Tensor& sums) {
  Tensor given, gradient;
  Status status = call.input(kGivenSinks, given);
  gradient.dtype = given.dtype;
  if (status.ok())
    status = call.output(kGradSinks, std::span<const int64_t>(given.dims, static_cast<size_t>(given.ndim)), gradient);
  for (int64_t h = 0; status.ok() && gradient.given() && h < sums.num_elements(); ++h) {
    store_element(gradient.data, gradient.dtype, h, load_element(sums.data, sums.dtype, h));
  }
  return status;
}

// Output 0, [batch, heads, sequence, dim], seen as the call's [batch, sequence, heads, dim].
Status make_stacked_out(Call& call, const AttentionDesc& desc, Tensor& out) {
  out.dtype = desc.dtype;
  const Status status = call.output(kOut, {desc.batch, desc.num_heads, desc.seqlen_q, desc.head_dim_v}, out);
  if (status.ok()) out = permuted(out, {0, 2, 1, 3});
  return status;
}

}  // namespace

Status Node::run_attention(Call& call, Plans& plans) const {
  Call::Plain plain;
  const bool is_plain = dropout_p_ == 0 && call.is_plain();
  if (is_plain) {
    if (Status status = call.read(plain); !status.ok()) return status;
    if (const auto ready = plans.ready_for(plain)) return ready->run(call, plain);
  }
  Operands o;
  Cached keys, values;
  Tensor mask, lengths;
  Status status = read(call, num_heads_, num_heads_kv_, o);
  if (status.ok()) status = call.input(kMask, mask);
  if (status.ok()) status = call.input(kLengths, lengths);
  if (status.ok()) status = read_cached(call, kPastKey, kPresentKey, "past_key", o.key, keys);
  if (status.ok()) status = read_cached(call, kPastValue, kPresentValue, "past_value", o.value, values);
  if (!status.ok()) return status;
  const int64_t before = keys.before();
  if (before != values.before() || (before > 0 && lengths.given())) {
    return invalid(
        sentence("past_key has ", before, " keys; past_value must have as many, and nonpad_kv_seqlen none beside"));
  }

  // A mask may be shorter than the keys: those behind its end are hidden, so they are not looked at.
  Tensor key = keys.all, value = values.all;
  const int64_t total = key.dims[1];
  const int64_t told = mask.given() ? mask.dims[mask.ndim - 1] : total;
  if (!(mask_broadcasts_ && told == 1)) {
    if (told > total) return invalid(sentence("attn_mask is ", words_of(mask), ", for ", total, " keys"));
    key = part(key, 1, 0, told);
    value = part(value, 1, 0, told);
  }
  AttentionDesc desc = desc_of(o.query, key, value);
  ForwardArgs args;
  if (mask.given()) status = add_mask("attn_mask", mask, desc, args);
  if (status.ok() && lengths.given()) status = add_lengths(call, lengths, total, desc, args);
  if (!lengths.given()) desc.query_offset = before;
  if (status.ok()) status = add_sinks(call, {kSinks, "sink_logits", true, false}, desc, args);
  if (status.ok() && returns_weights_) {
    desc.return_weights = ReturnWeights::kPerHead;
    status = make_weights(call, desc, total, args.attn_weights);
  }
  if (!status.ok()) return status;
  std::vector<Tensor> captures;
  status = read_captures(call, kCaptures, program_, desc, captures);
  if (!status.ok()) return status;
  args.captures = captures;
  args.query = o.query;
  args.key = key;
  args.value = value;
  args.logsumexp.dtype = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  status = call.output(kLogsumexp, {desc.batch, desc.num_heads, desc.seqlen_q}, args.logsumexp);
  if (status.ok() && dropout_p_ > 0) status = draw(call, seed_, plans.next_draw(), args);
  if (!status.ok()) return status;
  if (scores_) {
    Tensor scores;
    scores.dtype = desc.dtype;
    status = call.output(kWeights, {desc.batch, desc.num_heads, desc.seqlen_q, total}, scores);
    append(call.executor(), keys);
    if (status.ok()) status = write_scores(call, *scores_, desc, args, keys.all, scores);
    if (!status.ok()) return status;
  }
  status = o.flat ? make_flat_out(call, desc, args.out) : make_stacked_out(call, desc, args.out);
  if (status.ok()) status = append_and_attend(call, plans, desc, args, keys, values);
  if (!status.ok() || !is_plain) return status;
  const std::vector<int64_t> dims = o.flat ? std::vector{desc.batch, desc.seqlen_q, desc.num_heads * desc.head_dim_v}
                                           : std::vector{desc.batch, desc.num_heads, desc.seqlen_q, desc.head_dim_v};
  plans.keep(plain, desc, args, call.dims_asked_for(kOut, dims));
  return status;
}

Status Node::run_attention_grad(Call& call, Plans& plans) const {
  Operands o;
  Tensor mask, dropout;
  BackwardArgs args;
  Status status = read(call, num_heads_, num_heads_kv_, o);
  if (status.ok()) status = heads_apart(call, kGivenOut, "Y", num_heads_, args.forward.out);
  if (status.ok()) status = heads_apart(call, kGradOut, "dY", num_heads_, args.grad_out);
  if (status.ok()) status = call.input(kGivenLogsumexp, args.forward.logsumexp);
  if (status.ok()) status = call.input(kGivenMask, mask);
  if (status.ok()) status = call.input(kGivenDropout, dropout);
  if (!status.ok()) return status;
  AttentionDesc desc = desc_of(o.query, o.key, o.value);
  if (mask.given()) status = add_mask("attn_mask", mask, desc, args.forward);
  if (dropout_p_ > 0) {
    if (dropout.dtype != DType::kInt64 || dropout.num_elements() != 2) {
      return invalid(sentence("dropout is ", words_of(dropout), ", must be int64 [2]"));
    }
    args.forward.dropout_seed = static_cast<uint64_t>(static_cast<const int64_t*>(dropout.data)[0]);
    args.forward.dropout_offset = static_cast<uint32_t>(static_cast<const int64_t*>(dropout.data)[1]);
  }
  if (status.ok()) status = add_sinks(call, {kGivenSinks, "sink_logits", true, false}, desc, args.forward);
  std::vector<Tensor> captures, grad_captures;
  if (status.ok()) status = read_captures(call, kGivenCaptures, program_, desc, captures);
  if (!status.ok()) return status;
  args.forward.captures = captures;
  args.forward.query = o.query;
  args.forward.key = o.key;
  args.forward.value = o.value;
  if (status.ok()) status = make_gradient(call, 0, o.query, o.flat, args.grad_query);
  if (status.ok()) status = make_gradient(call, 1, o.key, o.flat, args.grad_key);
  if (status.ok()) status = make_gradient(call, 2, o.value, o.flat, args.grad_value);
  if (status.ok()) status = make_mask_gradient(call, mask, args.grad_attn_bias);
  if (status.ok()) status = make_capture_gradients(call, captures, grad_captures);
  args.grad_captures = grad_captures;
  const bool asks_for_sinks = desc.has_sink_logits && call.wants(kGradSinks);
  if (asks_for_sinks && status.ok())
    status = call.scratch(args.forward.sink_logits.dtype, {desc.num_heads}, args.grad_sink_logits);
  if (status.ok()) status = plans.backward(call, desc, args);
  return status.ok() && asks_for_sinks ? write_sink_gradients(call, args.grad_sink_logits) : status;
}

}  // namespace polyhead::onnxruntime
