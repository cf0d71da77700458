// com.microsoft.MultiHeadAttention, as docs/ContribOperators.md of ONNX Runtime says it.
#include <cmath>

#include "cached.h"
#include "core/dtype.h"
#include "core/sentence.h"
#include "node.h"

namespace polyhead::onnxruntime {
namespace {

constexpr size_t kQuery = 0, kKey = 1, kValue = 2, kBias = 3, kPadding = 4, kAttentionBias = 5, kPastKey = 6,
                 kPastValue = 7;
constexpr size_t kPresentKey = 1, kPresentValue = 2;

struct Operands {
  Tensor query, key, value;        // [batch, sequence, heads, dim]
  bool keys_have_no_bias = false;  // they were projected before
};

Status unknown(const Tensor& query, const Tensor& key, const Tensor& value) {
  return invalid(sentence("query is ", words_of(query), ", key ", words_of(key), ", value ", words_of(value),
                          ", which is none of the operator's forms"));
}

// Packed: [B, S, H, n, D], of which one of n.
Tensor one_of(const Tensor& packed, int64_t at) {
  Tensor out = permuted(part(packed, 3, at, 1), {0, 1, 2, 4, 3});
  out.ndim = 4;
  return out;
}

Status read(Call& call, int64_t num_heads, Operands& o) {
  Tensor query, key, value;
  Status status = call.input(kQuery, query);
  if (status.ok()) status = call.input(kKey, key);
  if (status.ok()) status = call.input(kValue, value);
  if (!status.ok()) return status;
  const auto splits = [&](const Tensor& t) { return t.ndim == 3 && t.dims[2] % num_heads == 0; };
  if (query.ndim == 5 && query.dims[2] == num_heads && query.dims[3] == 3 && !key.given() && !value.given()) {
    o = {one_of(query, 0), one_of(query, 1), one_of(query, 2)};
  } else if (splits(query) && key.ndim == 5 && key.dims[2] == num_heads && key.dims[3] == 2 && !value.given()) {
    o = {split_last(query, num_heads), one_of(key, 0), one_of(key, 1)};
  } else if (splits(query) && key.ndim == 4 && value.ndim == 4 && key.dims[1] == num_heads &&
             value.dims[1] == num_heads) {
    o = {split_last(query, num_heads), permuted(key, {0, 2, 1, 3}), permuted(value, {0, 2, 1, 3}), true};
  } else if (splits(query) && splits(key) && splits(value)) {
    o = {split_last(query, num_heads), split_last(key, num_heads), split_last(value, num_heads)};
  } else {
    return unknown(query, key, value);
  }
  const bool same = o.query.dims[0] == o.key.dims[0] && o.key.dims[0] == o.value.dims[0] &&
                    o.query.dims[3] == o.key.dims[3] && o.key.dims[1] == o.value.dims[1] &&
                    o.query.dtype == o.key.dtype && o.key.dtype == o.value.dtype;
  return same ? Status() : unknown(query, key, value);
}

// x [B, S, H, D] + bias[start ...], in memory of the call.
Status add_bias(Call& call, const Tensor& bias, int64_t start, Tensor& x) {
  Tensor sum;
  if (Status status = call.scratch(x.dtype, {x.dims[0], x.dims[1], x.dims[2], x.dims[3]}, sum); !status.ok())
    return status;
  struct Job {
    Tensor x, bias, sum;
    int64_t start, rows;
    int pieces;
  } job{x, bias, sum, start, x.dims[0] * x.dims[1], call.executor().num_threads()};
  const auto run = [](void* self, int piece) {
    const Job& j = *static_cast<const Job*>(self);
    with_element_type(j.x.dtype, [&](auto zero) {
      using E = decltype(zero);
      using T = std::conditional_t<std::is_same_v<E, double>, double, float>;
      const auto* from_start = static_cast<const E*>(j.bias.data) + j.start;
      for (int64_t row = j.rows * piece / j.pieces; row < j.rows * (piece + 1) / j.pieces; ++row) {
        const int64_t b = row / j.x.dims[1], s = row % j.x.dims[1];
        for (int64_t h = 0; h < j.x.dims[2]; ++h) {
          const E* from =
              static_cast<const E*>(j.x.data) + b * j.x.strides[0] + s * j.x.strides[1] + h * j.x.strides[2];
          E* to = static_cast<E*>(j.sum.data) + row * j.sum.strides[1] + h * j.sum.strides[2];
          for (int64_t d = 0; d < j.x.dims[3]; ++d) {
            const T added = widen<T>(from_start[h * j.x.dims[3] + d]);
            to[d] = narrow<E>(widen<T>(from[d * j.x.strides[3]]) + added);
          }
        }
      }
    });
  };
  if (sum.num_elements() > 0) call.executor().parallel_for(job.pieces, run, &job);
  x = sum;
  return {};
}

Status add_biases(Call& call, Operands& o) {
  Tensor bias;
  if (Status status = call.input(kBias, bias); !status.ok() || !bias.given()) return status;
  const int64_t width = o.query.dims[2] * o.query.dims[3], width_v = o.value.dims[2] * o.value.dims[3];
  if (bias.ndim != 1 || bias.dims[0] != 2 * width + width_v || bias.dtype != o.query.dtype) {
    return invalid(
        sentence("bias is ", words_of(bias), ", must be ", dtype_name(o.query.dtype), " [", 2 * width + width_v, "]"));
  }
  Status status = add_bias(call, bias, 0, o.query);
  if (o.keys_have_no_bias) return status;
  if (status.ok()) status = add_bias(call, bias, width, o.key);
  if (status.ok()) status = add_bias(call, bias, 2 * width, o.value);
  return status;
}

// key_padding_mask: 1 = may look; lengths [B] or [3 * B + 2], [B, keys], or [B, queries, keys]. What it hides gets the
// filter's value, as in ONNX Runtime: a row that is hidden as a whole is what it is there.
Status read_padding(Call& call, const AttentionDesc& desc, double filter, Tensor& bias) {
  Tensor mask;
  if (Status status = call.input(kPadding, mask); !status.ok() || !mask.given()) return status;
  const int64_t B = desc.batch, T = desc.seqlen_k;
  const bool lengths = mask.ndim == 1 && (mask.dims[0] == B || mask.dims[0] == 3 * B + 2);
  const bool rows = mask.ndim == 2 && mask.dims[0] == B && mask.dims[1] == T;
  const bool whole = mask.ndim == 3 && mask.dims[0] == B && mask.dims[1] == desc.seqlen_q && mask.dims[2] == T;
  if (mask.dtype != DType::kInt32 || !(lengths || rows || whole)) {
    return invalid(sentence("key_padding_mask is ", words_of(mask), ", must be int32 [", B, "], [", 3 * B + 2, "], [",
                            B, ", ", T, "] or [", B, ", ", desc.seqlen_q, ", ", T, "]"));
  }
  const int64_t num_rows = whole ? desc.seqlen_q : 1;
  const DType dtype = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (Status status = call.scratch(dtype, {B, 1, num_rows, T}, bias); !status.ok()) return status;
  const auto* told = static_cast<const int32_t*>(mask.data);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t at = 0; at < num_rows * T; ++at) {
      const bool visible = lengths ? at < told[b] : told[b * num_rows * T + at] > 0;
      store_element(bias.data, dtype, b * num_rows * T + at, visible ? 0 : filter);
    }
  }
  return {};
}

// attention_bias [1 or B, 1 or H, queries, keys].
Status read_bias(Call& call, const AttentionDesc& desc, Tensor& bias) {
  Status status = call.input(kAttentionBias, bias);
  if (!status.ok() || !bias.given()) return status;
  const bool fits = bias.ndim == 4 && (bias.dims[0] == 1 || bias.dims[0] == desc.batch) &&
                    (bias.dims[1] == 1 || bias.dims[1] == desc.num_heads) && bias.dims[2] == desc.seqlen_q &&
                    bias.dims[3] == desc.seqlen_k && bias.dtype <= DType::kFloat64;
  if (fits) return {};
  return invalid(sentence("attention_bias is ", words_of(bias), ", must be float [1 or ", desc.batch, ", 1 or ",
                          desc.num_heads, ", ", desc.seqlen_q, ", ", desc.seqlen_k, "]"));
}

// bias + padding [B, 1, 1 or queries, keys], in memory of the call.
Status add_to(Call& call, const Tensor& padding, Tensor& bias, const AttentionDesc& desc) {
  Tensor sum;
  const int64_t H = bias.dims[1];
  if (Status status = call.scratch(padding.dtype, {desc.batch, H, desc.seqlen_q, desc.seqlen_k}, sum); !status.ok()) {
    return status;
  }
  int64_t to = 0;
  for (int64_t b = 0; b < desc.batch; ++b) {
    for (int64_t row = 0; row < H * desc.seqlen_q; ++row) {
      const int64_t i = padding.dims[2] == 1 ? 0 : row % desc.seqlen_q;
      const int64_t from = (bias.dims[0] == 1 ? 0 : b) * bias.strides[0] + row * desc.seqlen_k;
      for (int64_t j = 0; j < desc.seqlen_k; ++j, ++to) {
        const double hidden = load_element(padding.data, padding.dtype, (b * padding.dims[2] + i) * desc.seqlen_k + j);
        store_element(sum.data, sum.dtype, to, hidden + load_element(bias.data, bias.dtype, from + j));
      }
    }
  }
  bias = sum;
  return {};
}

}  // namespace

Status Node::run_multi_head(Call& call, Plans& plans) const {
  Operands o;
  Cached keys, values;
  Status status = read(call, num_heads_, o);
  if (status.ok()) status = add_biases(call, o);
  if (status.ok()) status = read_cached(call, kPastKey, kPresentKey, "past_key", o.key, keys);
  if (status.ok()) status = read_cached(call, kPastValue, kPresentValue, "past_value", o.value, values);
  if (!status.ok()) return status;
  if (keys.all.dims[1] != values.all.dims[1]) return invalid("past_key and past_value have different lengths");

  AttentionDesc desc = desc_of(o.query, keys.all, values.all);
  desc.query_offset = desc.seqlen_k - desc.seqlen_q;
  ForwardArgs args;
  Tensor padding, bias;
  status = read_padding(call, desc, mask_filter_value_, padding);
  if (status.ok()) status = read_bias(call, desc, bias);
  if (status.ok() && padding.given() && bias.given()) status = add_to(call, padding, bias, desc);
  if (status.ok() && bias.given()) status = add_mask("attention_bias", bias, desc, args);
  if (status.ok() && padding.given() && !bias.given()) status = add_mask("key_padding_mask", padding, desc, args);
  if (!status.ok()) return status;
  args.query = o.query;
  args.key = keys.all;
  args.value = values.all;
  status = make_flat_out(call, desc, args.out);
  return status.ok() ? append_and_attend(call, plans, desc, args, keys, values) : status;
}

}  // namespace polyhead::onnxruntime
