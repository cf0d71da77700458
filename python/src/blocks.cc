#include "blocks.h"

#include <cstddef>
#include <string>
#include <utility>

#include "broadcast.h"
#include "cache.h"

namespace polyhead::python {
namespace {

constexpr size_t kMostBlocks = 256;

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

std::string number(int64_t value) { return std::to_string(value); }

// A weight [out, in] as y = x W wants it.
Tensor transposed(const Tensor& t) {
  Tensor view = t;
  if (t.ndim != 2) return view;
  std::swap(view.dims[0], view.dims[1]);
  std::swap(view.strides[0], view.strides[1]);
  return view;
}

Tensor rows_of(const Tensor& t, int64_t first, int64_t count) {
  if (!t.given()) return {};
  Tensor rows = t;
  rows.dims[0] = count;
  if (t.num_elements() > 0) {
    rows.data = static_cast<char*>(t.data) + first * t.strides[0] * static_cast<int64_t>(dtype_size_bytes(t.dtype));
  }
  return rows;
}

Status check_dims(const char* name, const Tensor& t, int ndim, const char* shape) {
  if (t.ndim == ndim) return {};
  return invalid(std::string(name) + " has " + number(t.ndim) + " dimensions, must have " + number(ndim) + ": " +
                 shape);
}

// dim: the rows of a weight that each of its heads has.
Status divide_rows(const char* name, const Tensor& t, int64_t heads, int64_t* dim) {
  if (Status status = check_dims(name, t, 2, "[rows of all heads, size of the input]"); !status.ok()) return status;
  *dim = t.dims[0] / heads;
  if (t.dims[0] > 0 && t.dims[0] % heads == 0) return {};
  return invalid(std::string(name) + " has " + number(t.dims[0]) + " rows, must have a multiple of its " +
                 number(heads) + " heads");
}

// By the names that they have here: the layer's are others.
Status check_dtypes(const AttentionBlockTensors& in) {
  const DType dtype = in.query.dtype;
  if (dtype == DType::kBool || dtype == DType::kInt32 || dtype == DType::kInt64) {
    return invalid(std::string("query is ") + dtype_name(dtype) + ", must be float32, bfloat16, float16 or float64");
  }
  const struct {
    const char* name;
    const Tensor& tensor;
  } all[] = {{"in_proj_weight", in.in_proj_weight}, {"q_proj_weight", in.q_proj_weight},
             {"k_proj_weight", in.k_proj_weight},   {"v_proj_weight", in.v_proj_weight},
             {"in_proj_bias", in.in_proj_bias},     {"out_proj_weight", in.out_proj_weight},
             {"out_proj_bias", in.out_proj_bias}};
  for (const auto& each : all) {
    if (!each.tensor.given() || each.tensor.dtype == dtype) continue;
    return invalid(std::string(each.name) + " is " + dtype_name(each.tensor.dtype) + ", must be " + dtype_name(dtype) +
                   " as query");
  }
  return {};
}

Status read_heads(const AttentionBlockCall& call, LayerDesc* d) {
  const AttentionBlockTensors& in = call.in;
  const int64_t heads = call.num_heads, groups = call.num_heads_kv;
  if (heads < 1 || groups < 1 || heads % groups != 0 || heads > INT64_MAX / 4) {
    return invalid("num_heads_kv is " + number(groups) + ", must divide num_heads " + number(heads));
  }
  const int separate = int{in.q_proj_weight.given()} + int{in.k_proj_weight.given()} + int{in.v_proj_weight.given()};
  if (separate != (in.in_proj_weight.given() ? 0 : 3)) {
    return invalid("in_proj_weight is " + std::string(in.in_proj_weight.given() ? "given" : "not given") +
                   ", with it there must be none of q_proj_weight, k_proj_weight and v_proj_weight, else all");
  }
  Status status;
  if (in.in_proj_weight.given()) {
    int64_t dim = 0;
    status = divide_rows("in_proj_weight", in.in_proj_weight, heads + 2 * groups, &dim);
    d->query_proj_size = d->key_proj_size = d->value_proj_size = dim;
  } else {
    status = divide_rows("q_proj_weight", in.q_proj_weight, heads, &d->query_proj_size);
    if (status.ok()) status = divide_rows("k_proj_weight", in.k_proj_weight, groups, &d->key_proj_size);
    if (status.ok()) status = divide_rows("v_proj_weight", in.v_proj_weight, groups, &d->value_proj_size);
  }
  if (!status.ok()) return status;
  d->num_heads = heads;
  d->num_heads_kv = groups;
  d->query_bias = d->key_bias = d->value_bias = in.in_proj_bias.given();
  if (!in.in_proj_bias.given()) return {};
  const int64_t rows = heads * d->query_proj_size + groups * (d->key_proj_size + d->value_proj_size);
  if (in.in_proj_bias.ndim == 1 && in.in_proj_bias.dims[0] == rows) return {};
  return invalid("in_proj_bias must be [" + number(rows) + "], a number for each row of q, k and v");
}

// The weights, or their gradients, as the layer takes them.
LayerWeights layer_weights(const LayerDesc& d, const AttentionBlockTensors& t) {
  const int64_t q = d.num_heads * d.query_proj_size, k = d.num_heads_kv * d.key_proj_size;
  const int64_t v = d.num_heads_kv * d.value_proj_size;
  LayerWeights w;
  const bool joined = t.in_proj_weight.given();
  w.query = transposed(joined ? rows_of(t.in_proj_weight, 0, q) : t.q_proj_weight);
  w.key = transposed(joined ? rows_of(t.in_proj_weight, q, k) : t.k_proj_weight);
  w.value = transposed(joined ? rows_of(t.in_proj_weight, q + k, v) : t.v_proj_weight);
  w.query_bias = rows_of(t.in_proj_bias, 0, q);
  w.key_bias = rows_of(t.in_proj_bias, q, k);
  w.value_bias = rows_of(t.in_proj_bias, q + k, v);
  w.out = transposed(t.out_proj_weight);
  w.out_bias = t.out_proj_bias;
  return w;
}

AttentionBlockForwardArgs forward_args(const AttentionBlock& block, const AttentionBlockCall& call,
                                       const BlockMemory& memory, const Tensor& reserve) {
  const AttentionBlockTensors& in = call.in;
  AttentionBlockForwardArgs args;
  args.layer.query = in.query;
  args.layer.key = in.key;
  args.layer.value = in.value.given() ? in.value : in.key;
  args.layer.weights = layer_weights(block.desc().layer, in);
  args.layer.attn_mask = in.attn_mask;
  args.layer.attn_bias = in.attn_bias;
  args.layer.dropout_seed = call.dropout_seed;
  args.layer.output_dropout_seed = call.output_dropout_seed;
  args.layer.output_dropout_offset = kOutputDropoutOffset;
  args.layer.reserve = reserve.data;
  args.layer.reserve_bytes = static_cast<size_t>(reserve.num_elements()) * sizeof(int64_t);
  args.layer.where = memory.where;
  args.layer.workspace = memory.workspace;
  args.norm = in.norm;
  return args;
}

FeedForwardWeights inner_weights(const FeedForwardTensors& t) {
  FeedForwardWeights w;
  w.weight1 = transposed(t.weight1);
  w.bias1 = t.bias1;
  w.weight2 = transposed(t.weight2);
  w.bias2 = t.bias2;
  w.norm = t.norm;
  return w;
}

FeedForwardBlockForwardArgs forward_args(const FeedForwardCall& call, const BlockMemory& memory,
                                         const Tensor& reserve) {
  FeedForwardBlockForwardArgs args;
  args.x = call.in.x;
  args.weights = inner_weights(call.in);
  args.inner_dropout_seed = call.inner_dropout_seed;
  args.output_dropout_seed = call.output_dropout_seed;
  args.output_dropout_offset = kOutputDropoutOffset;
  args.reserve = reserve.data;
  args.reserve_bytes = static_cast<size_t>(reserve.num_elements()) * sizeof(int64_t);
  args.where = memory.where;
  args.workspace = memory.workspace;
  return args;
}

// What tells most calls apart; operator== of the descs tells the rest.
uint64_t hash_of(const LayerDesc& d) {
  return hash_words({d.batch, d.seqlen_q, d.seqlen_k, d.num_heads, d.query_size, d.query_proj_size, d.out_proj_size,
                     static_cast<int64_t>(d.dtype), int64_t{d.attention.causal}});
}
uint64_t hash_of(const AttentionBlockDesc& d) { return hash_of(d.layer); }
uint64_t hash_of(const FeedForwardBlockDesc& d) {
  return hash_words({d.batch, d.seqlen, d.size, d.inner_size, static_cast<int64_t>(d.dtype)});
}

template <class Desc>
struct Key {
  Desc desc;
  Executor* executor = nullptr;
  Device device = Device::kCpu;
  std::string kernel;
  bool operator==(const Key&) const = default;
};

template <class Desc>
struct Hash {
  size_t operator()(const Key<Desc>& key) const { return hash_of(key.desc); }
};

template <class Made, class Desc, class Make>
Result<std::shared_ptr<const Made>> cached(const Desc& desc, const Where& where, std::string_view kernel, Make make) {
  static auto* const cache =
      new Cache<Key<Desc>, Made, Hash<Desc>>(kMostBlocks);  // threads may outlive the interpreter
  const Where planned = {.device = where.device.value_or(Device::kCpu), .executor = where.executor, .stream = nullptr};
  return cache->get(
      [&](const Key<Desc>& last) {
        return last.desc == desc && last.executor == planned.executor && last.device == *planned.device &&
               last.kernel == kernel;
      },
      [&] {
        return Key<Desc>{desc, planned.executor, *planned.device, std::string(kernel)};
      },
      [&] { return make(desc, PlanOptions{.kernel = kernel, .where = planned}); });
}

int64_t words(DType dtype, int64_t elements, int64_t statistics) {
  constexpr int64_t kGaps = 128;  // each part starts at a multiple of 64 bytes, and there are headers
  const int64_t statistic_bytes = dtype == DType::kFloat64 ? 8 : 4;
  const int64_t bytes = elements * static_cast<int64_t>(dtype_size_bytes(dtype)) + statistics * statistic_bytes;
  return (bytes + 7) / 8 + kGaps;
}

}  // namespace

Result<AttentionBlockDesc> block_desc(const AttentionBlockCall& call) {
  const AttentionBlockTensors& in = call.in;
  if (in.value.given() && !in.key.given()) return invalid("value is given without key");
  const Tensor &key = in.key.given() ? in.key : in.query, &value = in.value.given() ? in.value : key;
  Status status = check_dims("query", in.query, 3, "[batch, seqlen_q, query_size]");
  if (status.ok()) status = check_dims("key", key, 3, "[batch, seqlen_k, key_size]");
  if (status.ok()) status = check_dims("value", value, 3, "[batch, seqlen_k, value_size]");
  AttentionBlockDesc desc;
  LayerDesc& d = desc.layer;
  if (status.ok()) status = check_dtypes(in);
  if (status.ok()) status = read_heads(call, &d);
  if (status.ok() && in.out_proj_weight.given()) {
    status = check_dims("out_proj_weight", in.out_proj_weight, 2, "[out_size, num_heads * head_dim_v]");
  }
  if (!status.ok()) return status;
  d.batch = in.query.dims[0];
  d.seqlen_q = in.query.dims[1];
  d.seqlen_k = key.dims[1];
  d.query_size = in.query.dims[2];
  d.key_size = key.dims[2];
  d.value_size = value.dims[2];
  d.out_proj_size = in.out_proj_weight.given() ? in.out_proj_weight.dims[0] : 0;
  d.out_bias = in.out_proj_bias.given();
  d.residual = call.residual;
  d.output_dropout_p = call.output_dropout_p;
  d.dtype = in.query.dtype;
  AttentionDesc& a = d.attention;
  a.causal = call.causal;
  if (call.causal) a.align = Align::kTopLeft;
  a.scale = call.scale;
  a.dropout_p = call.dropout_p;
  a.return_weights = call.return_weights;
  if (in.attn_mask.given()) a.attn_mask = broadcast_operand(in.attn_mask);
  if (in.attn_bias.given()) a.attn_bias = broadcast_operand(in.attn_bias);
  desc.norm = call.norm;
  desc.norm.gamma = in.norm.gamma.given();
  desc.norm.beta = in.norm.beta.given();
  return desc;
}

Result<FeedForwardBlockDesc> block_desc(const FeedForwardCall& call) {
  const FeedForwardTensors& in = call.in;
  Status status = check_dims("x", in.x, 3, "[batch, seqlen, size]");
  if (status.ok()) status = check_dims("weight1", in.weight1, 2, "[inner_size, size]");
  if (status.ok()) status = check_dims("weight2", in.weight2, 2, "[size, inner_size]");
  if (!status.ok()) return status;
  FeedForwardBlockDesc d;
  d.batch = in.x.dims[0];
  d.seqlen = in.x.dims[1];
  d.size = in.x.dims[2];
  d.inner_size = in.weight1.dims[0];
  d.activation = call.activation;
  d.bias1 = in.bias1.given();
  d.bias2 = in.bias2.given();
  d.inner_dropout_p = call.inner_dropout_p;
  d.output_dropout_p = call.output_dropout_p;
  d.residual = call.residual;
  d.norm = call.norm;
  d.norm.gamma = in.norm.gamma.given();
  d.norm.beta = in.norm.beta.given();
  d.dtype = in.x.dtype;
  return d;
}

Result<std::shared_ptr<const AttentionBlock>> cached_block(const AttentionBlockDesc& desc, const Where& where,
                                                           std::string_view kernel) {
  return cached<AttentionBlock>(desc, where, kernel, attention_block);
}

Result<std::shared_ptr<const FeedForwardBlock>> cached_block(const FeedForwardBlockDesc& desc, const Where& where) {
  return cached<FeedForwardBlock>(desc, where, {}, feed_forward_block);
}

Result<std::shared_ptr<const Layer>> cached_layer(const LayerDesc& desc, const Where& where, std::string_view kernel) {
  return cached<Layer>(desc, where, kernel, layer);
}

Status run_forward(const AttentionBlock& block, const AttentionBlockCall& call, const BlockMemory& memory,
                   const Tensor& out, const Tensor& attn_weights, const Tensor& reserve) {
  AttentionBlockForwardArgs args = forward_args(block, call, memory, reserve);
  args.layer.out = out;
  args.layer.attn_weights = attn_weights;
  args.layer.workspace_bytes = block.workspace_bytes();
  return block.forward(args);
}

Status run_backward(const AttentionBlock& block, const AttentionBlockCall& call, const BlockMemory& memory,
                    const Tensor& reserve, const Tensor& grad_out, const AttentionBlockTensors& gradients) {
  AttentionBlockBackwardArgs args;
  args.forward = forward_args(block, call, memory, reserve);
  args.forward.layer.workspace_bytes = block.backward_workspace_bytes();
  args.grad_out = grad_out;
  args.grad_query = gradients.query;
  args.grad_key = gradients.key;
  args.grad_value = call.in.value.given() ? gradients.value : gradients.key;
  args.grad_attn_bias = gradients.attn_bias;
  args.grad_weights = layer_weights(block.desc().layer, gradients);
  args.grad_norm = gradients.norm;
  return block.backward(args);
}

Status run_forward(const FeedForwardBlock& block, const FeedForwardCall& call, const BlockMemory& memory,
                   const Tensor& out, const Tensor& reserve) {
  FeedForwardBlockForwardArgs args = forward_args(call, memory, reserve);
  args.out = out;
  args.workspace_bytes = block.workspace_bytes();
  return block.forward(args);
}

Status run_backward(const FeedForwardBlock& block, const FeedForwardCall& call, const BlockMemory& memory,
                    const Tensor& reserve, const Tensor& grad_out, const FeedForwardTensors& gradients) {
  FeedForwardBlockBackwardArgs args;
  args.forward = forward_args(call, memory, reserve);
  args.forward.workspace_bytes = block.backward_workspace_bytes();
  args.grad_out = grad_out;
  args.grad_x = gradients.x;
  args.grad_weights = inner_weights(gradients);
  return block.backward(args);
}

int64_t reserve_words(const AttentionBlockDesc& desc) {
  const LayerDesc& d = desc.layer;
  const int64_t heads_size = d.num_heads * d.value_proj_size;
  const int64_t out_size = d.out_proj_size > 0 ? d.out_proj_size : heads_size;
  const bool normed = desc.norm.kind != NormKind::kNone;
  const int64_t sum_size = normed && !desc.norm.pre ? out_size : 0;  // what is normed last; before, it is query
  const int64_t of_query = d.num_heads * d.query_proj_size + heads_size + sum_size;
  const int64_t of_key = d.num_heads_kv * (d.key_proj_size + d.value_proj_size);
  return words(d.dtype, d.batch * (d.seqlen_q * of_query + d.seqlen_k * of_key),
               d.batch * d.seqlen_q * (d.num_heads + (normed ? 2 : 0)));
}

int64_t reserve_words(const FeedForwardBlockDesc& d) {
  const bool normed = d.norm.kind != NormKind::kNone;
  return words(d.dtype, d.batch * d.seqlen * (d.inner_size + (normed && !d.norm.pre ? d.size : 0)),
               d.batch * d.seqlen * (normed ? 2 : 0));
}

bool takes_reserve(const AttentionBlockCall& call, bool keep) {
  return keep || call.dropout_p > 0 || call.output_dropout_p > 0;
}

bool takes_reserve(const FeedForwardCall& call, bool keep) {
  return keep || call.inner_dropout_p > 0 || call.output_dropout_p > 0;
}

Status check_reserve(const Tensor& view, int64_t words) {
  if (view.dtype == DType::kInt64 && view.dims[0] == words && (words <= 1 || view.strides[0] == 1)) return {};
  return {StatusCode::kInvalidArgument,
          "reserve is not what forward returned: " + std::to_string(words) + " contiguous int64"};
}

Tensor weights_shape(const AttentionBlockDesc& desc) {
  const LayerDesc& d = desc.layer;
  switch (d.attention.return_weights) {
    case ReturnWeights::kNone: return {};
    case ReturnWeights::kMean: return Tensor(nullptr, d.dtype, {d.batch, d.seqlen_q, d.seqlen_k});
    case ReturnWeights::kPerHead: break;
  }
  return Tensor(nullptr, d.dtype, {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k});
}

AttentionDesc counted_sizes(const AttentionBlockDesc& desc) {
  const LayerDesc& d = desc.layer;
  AttentionDesc sizes;
  sizes.batch = d.batch;
  sizes.seqlen_q = d.seqlen_q;
  sizes.seqlen_k = d.seqlen_k;
  sizes.num_heads = d.num_heads;
  sizes.num_heads_kv = d.num_heads_kv;
  sizes.head_dim = d.query_proj_size;
  sizes.head_dim_v = d.value_proj_size;
  sizes.dtype = d.dtype;
  return sizes;
}

AttentionDesc counted_sizes(const FeedForwardBlockDesc& d) {
  AttentionDesc sizes;
  sizes.batch = d.batch;
  sizes.seqlen_q = sizes.seqlen_k = d.seqlen;
  sizes.head_dim = d.size;
  sizes.head_dim_v = d.inner_size;
  sizes.dtype = d.dtype;
  return sizes;
}

}  // namespace polyhead::python
