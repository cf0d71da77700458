// com.microsoft.GroupQueryAttention, as docs/ContribOperators.md of ONNX Runtime says it.
#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/sentence.h"
#include "node.h"
#include "rotary.h"

namespace polyhead::onnxruntime {
namespace {

constexpr size_t kQuery = 0, kKey = 1, kValue = 2, kPastKey = 3, kPastValue = 4, kLengths = 5, kTotal = 6, kBias = 10,
                 kSink = 11;
constexpr size_t kPresentKey = 1, kPresentValue = 2;

struct Operands {
  Tensor query, key, value;  // [batch, sequence, heads, dim]; key and value are what is new
};

Status read(Call& call, int64_t num_heads, int64_t num_heads_kv, Operands& o) {
  Tensor query, key, value;
  Status status = call.input(kQuery, query);
  if (status.ok()) status = call.input(kKey, key);
  if (status.ok()) status = call.input(kValue, value);
  if (!status.ok()) return status;
  const int64_t all_heads = num_heads + 2 * num_heads_kv;
  const auto wrong = [&] {
    return invalid(sentence("query is ", words_of(query), ", key ", words_of(key), ", value ", words_of(value),
                            ", which is none of the operator's forms for ", num_heads, " and ", num_heads_kv,
                            " heads"));
  };
  if (query.ndim == 3 && !key.given() && !value.given() && query.dims[2] % all_heads == 0) {
    const Tensor packed = split_last(query, all_heads);
    o = {part(packed, 2, 0, num_heads), part(packed, 2, num_heads, num_heads_kv),
         part(packed, 2, num_heads + num_heads_kv, num_heads_kv)};
    return {};
  }
  if (query.ndim != 3 || key.ndim != 3 || value.ndim != 3 || query.dims[2] % num_heads != 0 ||
      key.dims[2] % num_heads_kv != 0 || value.dims[2] % num_heads_kv != 0) {
    return wrong();
  }
  o = {split_last(query, num_heads), split_last(key, num_heads_kv), split_last(value, num_heads_kv)};
  const bool same = o.query.dims[0] == o.key.dims[0] && o.key.dims[0] == o.value.dims[0] &&
                    o.query.dims[1] == o.key.dims[1] && o.key.dims[1] == o.value.dims[1] &&
                    o.query.dims[3] == o.key.dims[3] && o.query.dtype == o.key.dtype && o.key.dtype == o.value.dtype;
  return same ? Status() : wrong();
}

// How many keys each sequence has, those of this call included, and how many of them were there before.
struct Lengths {
  Tensor total, before;  // int64 [batch]
  int64_t most = 0;      // as the model says
};

Status read_lengths(Call& call, const Tensor& query, Lengths& lengths) {
  Tensor last, most;
  Status status = call.input(kLengths, last);
  if (status.ok()) status = call.input(kTotal, most);
  const int64_t batch = query.dims[0], fresh = query.dims[1];
  if (status.ok() && (last.dtype != DType::kInt32 || last.num_elements() != batch)) {
    status = invalid(sentence("seqlens_k is ", words_of(last), ", must be int32 [", batch, "]"));
  }
  if (status.ok() && (most.dtype != DType::kInt32 || most.num_elements() != 1)) {
    status = invalid(sentence("total_sequence_length is ", words_of(most), ", must be one int32"));
  }
  if (status.ok()) status = call.scratch(DType::kInt64, {batch}, lengths.total);
  if (status.ok()) status = call.scratch(DType::kInt64, {batch}, lengths.before);
  if (!status.ok()) return status;
  lengths.most = *static_cast<const int32_t*>(most.data);
  if (lengths.most < fresh)
    return invalid(sentence("total_sequence_length is ", lengths.most, ", with ", fresh, " new keys"));
  const bool is_prompt = lengths.most == fresh;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t total = int64_t{static_cast<const int32_t*>(last.data)[b]} + 1;
    if (total < (is_prompt ? 0 : fresh) || total > lengths.most) {
      return invalid(sentence("seqlens_k[", b, "] is ", total - 1, ", must be ", is_prompt ? -1 : fresh - 1, " to ",
                              lengths.most - 1));
    }
    static_cast<int64_t*>(lengths.total.data)[b] = total;
    static_cast<int64_t*>(lengths.before.data)[b] = is_prompt ? 0 : total - fresh;
  }
  return {};
}

// Writes the cache [batch, heads, keys, dim]: what was there, what is new, and zeros behind. A caller may give the same
// memory for past and present: what was there stays where it is.
Status write_cache(Call& call, size_t past_at, size_t present_at, const char* what, const Tensor& fresh,
                   const Lengths& lengths, Tensor& present) {
  Tensor past;
  if (Status status = call.input(past_at, past); !status.ok()) return status;
  const int64_t batch = fresh.dims[0], heads = fresh.dims[2], dim = fresh.dims[3];
  const auto* before = static_cast<const int64_t*>(lengths.before.data);
  const int64_t most_before = *std::max_element(before, before + batch);
  const int64_t room = past.given() && past.ndim == 4 ? past.dims[2] : 0;
  if ((past.given() && (past.ndim != 4 || past.dims[0] != batch || past.dims[1] != heads || past.dims[3] != dim ||
                        past.dtype != fresh.dtype)) ||
      most_before > room) {
    return invalid(sentence(what, " is ", words_of(past), ", must be ", dtype_name(fresh.dtype), " [", batch, ", ",
                            heads, ", ", most_before, " or more, ", dim, "]"));
  }
  const auto* total = static_cast<const int64_t*>(lengths.total.data);
  const int64_t longest = std::max({*std::max_element(total, total + batch), fresh.dims[1], room});
  if (lengths.most > longest) {
    return invalid(sentence("total_sequence_length is ", lengths.most, ", and no sequence or cache has more than ",
                            longest, " keys"));
  }
  const int64_t keys = std::max(lengths.most, room);
  present.dtype = fresh.dtype;
  Status status = call.output(present_at, {batch, heads, keys, dim}, present);
  if (status.ok() && !present.given()) status = call.scratch(fresh.dtype, {batch, heads, keys, dim}, present);
  if (!status.ok()) return status;
  const bool shared = past.given() && past.data == present.data;
  const int64_t count = fresh.dims[1];
  for (int64_t b = 0; b < batch; ++b) {
    const Tensor to = part(present, 0, b, 1);
    if (!shared && before[b] > 0)
      copy(call.executor(), part(part(past, 0, b, 1), 2, 0, before[b]), part(to, 2, 0, before[b]));
    copy(call.executor(), permuted(part(fresh, 0, b, 1), {0, 2, 1, 3}), part(to, 2, before[b], count));
    const int64_t end = before[b] + count;
    for (int64_t h = 0; !shared && h < heads && end < keys; ++h) {
      const Tensor behind = part(part(to, 1, h, 1), 2, end, keys - end);
      std::memset(behind.data, 0, static_cast<size_t>(behind.num_elements()) * dtype_size_bytes(fresh.dtype));
    }
  }
  return {};
}

}  // namespace

Status Node::run_group_query(Call& call, Plans& plans) const {
  Operands o;
  Lengths lengths;
  Tensor keys, values, bias;
  Status status = read(call, num_heads_, num_heads_kv_, o);
  if (!status.ok()) return status;
  if (o.query.dims[0] == 0) return invalid(sentence("query is ", words_of(o.query), ", must have a sequence at least"));
  status = read_lengths(call, o.query, lengths);
  if (status.ok() && rotary_) {
    Rotary rotary{.interleaved = rotary_interleaved_};
    status = read_rotary(call, o.query, lengths.before, rotary);
    if (status.ok()) status = turn(call, rotary, o.query);
    if (status.ok()) status = turn(call, rotary, o.key);
  }
  if (status.ok()) status = write_cache(call, kPastKey, kPresentKey, "past_key", o.key, lengths, keys);
  if (status.ok()) status = write_cache(call, kPastValue, kPresentValue, "past_value", o.value, lengths, values);
  if (status.ok()) status = call.input(kBias, bias);
  if (!status.ok()) return status;
  const Tensor key = permuted(part(keys, 2, 0, lengths.most), {0, 2, 1, 3});
  const Tensor value = permuted(part(values, 2, 0, lengths.most), {0, 2, 1, 3});
  AttentionDesc desc = desc_of(o.query, key, value);
  desc.has_seqlens_k = desc.has_query_offsets = true;
  ForwardArgs args;
  if (bias.given()) status = add_mask("attention_bias", bias, desc, args);
  if (!status.ok()) return status;
  if (status = add_sinks(call, {kSink, "head_sink", false, sink_of_zero_}, desc, args); !status.ok()) return status;
  args.query = o.query;
  args.key = key;
  args.value = value;
  args.seqlens_k = lengths.total;
  args.query_offsets = lengths.before;
  status = make_flat_out(call, desc, args.out);
  return status.ok() ? plans.forward(call, desc, args) : status;
}

}  // namespace polyhead::onnxruntime
