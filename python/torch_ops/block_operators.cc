// The operators' arguments are those of polyhead/torch/_block_ops.py, in its order: tensors, then numbers.
#include "block_operators.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "blocks.h"
#include "broadcast.h"
#include "call_counts.h"
#include "operands.h"
#include "stable_tensor.h"

namespace polyhead::torch_ops {
namespace {

using python::AttentionBlockCall;
using python::AttentionBlockTensors;
using python::FeedForwardCall;
using python::FeedForwardTensors;

constexpr uint64_t kNumAttentionArguments = 29, kNumFeedForwardArguments = 17;

template <class T>
T checked(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

// Tensors of an operator, the first `Count` arguments; only the first must be given.
template <size_t Count>
std::array<StableTensor, Count> tensors_of(ArgumentReader& arguments) {
  std::array<StableTensor, Count> tensors;
  tensors[0] = arguments.tensor();
  for (size_t i = 1; i < Count; ++i) tensors[i] = arguments.optional_tensor();
  return tensors;
}

Tensor optional_view(const StableTensor& tensor, const char* name, int min_dims, int max_dims, const char* shape) {
  return tensor.given() ? view_of(tensor, {name, min_dims, max_dims, shape}) : Tensor();
}

std::optional<uint64_t> seed_of(const StableTensor& tensor, const char* name) {
  if (!tensor.given()) return std::nullopt;
  const Tensor seed =
      view_of(tensor, {.name = name, .min_dims = 0, .max_dims = 0, .shape = "an int64 scalar", .on_cpu = true});
  if (seed.dtype != DType::kInt64) bad_value("%s is %s, must be int64", name, dtype_name(seed.dtype));
  return *static_cast<const uint64_t*>(seed.data);
}

// [S, B, E] as [B, S, E], and back.
Tensor batch_first(Tensor view, bool already) {
  if (already || view.ndim != 3) return view;
  std::swap(view.dims[0], view.dims[1]);
  std::swap(view.strides[0], view.strides[1]);
  return view;
}

NormDesc norm_desc(int64_t kind, bool pre, double eps) {
  if (kind < 0 || kind > 2) {
    bad_value("norm_kind is %lld, must be 0 (none), 1 (layer norm) or 2 (RMS norm)", static_cast<long long>(kind));
  }
  NormDesc norm;
  norm.kind = static_cast<NormKind>(kind);
  norm.pre = pre;
  norm.eps = eps;
  return norm;
}

// What a gradient is made like, and where its view goes.
struct Gradient {
  const Tensor& input;  // as torch sees it
  Tensor& view;
};

// New gradients of those inputs whose bits are set: contiguous, a matrix that is stored [in, out] like that.
template <size_t Count>
std::array<StableTensor, Count> new_gradients(const std::array<Gradient, Count>& all, int64_t needs) {
  std::array<StableTensor, Count> made;
  for (size_t i = 0; i < Count; ++i) {
    if ((needs >> i & 1) == 0) continue;
    if (!all[i].input.given()) bad_value("needs names input %d, which is not given", static_cast<int>(i));
    Tensor& view = all[i].view = all[i].input;
    made[i] = view.ndim == 2 ? new_tensor_like(view, all[i].input, "a gradient") : new_tensor(view, "a gradient");
  }
  return made;
}

StableTensor new_reserve(int64_t words, Tensor& view) {
  view = Tensor(nullptr, DType::kInt64, {words});
  return new_tensor(view, "the reserve");
}

Tensor reserve_view(const StableTensor& reserve, int64_t words) {
  const Tensor view = view_of(reserve, {"reserve", 1, 1, "what forward returned"});
  check(python::check_reserve(view, words));
  return view;
}

// The arguments of attention_block_forward, and of its backward but for the last.
struct AttentionBlockArguments {
  static constexpr size_t kNumTensors = 16, kNumDifferentiable = 13;

  explicit AttentionBlockArguments(ArgumentReader& arguments)
      : tensors(tensors_of<kNumTensors>(arguments)),
        num_heads(arguments.integer()),
        num_heads_kv(arguments.integer()),
        is_batch_first(arguments.flag()),
        causal(arguments.flag()),
        scale(arguments.optional_real()),
        dropout_p(arguments.real()),
        output_dropout_p(arguments.real()),
        return_weights(arguments.integer()),
        norm_kind(arguments.integer()),
        norm_first(arguments.flag()),
        norm_eps(arguments.real()),
        residual(arguments.flag()) {}

  AttentionBlockCall call() const;

  std::array<StableTensor, kNumTensors> tensors;
  int64_t num_heads, num_heads_kv;
  bool is_batch_first, causal;
  std::optional<double> scale;
  double dropout_p, output_dropout_p;
  int64_t return_weights, norm_kind;
  bool norm_first;
  double norm_eps;
  bool residual;
};

AttentionBlockCall AttentionBlockArguments::call() const {
  constexpr const char* kTokens = "[batch, seqlen, size], or with batch_first=False [seqlen, batch, size]";
  constexpr const char* kScores = "what broadcasts to [batch, num_heads, seqlen_q, seqlen_k]";
  const auto view = [&](size_t i, const char* name, int dims, const char* shape) {
    return optional_view(tensors[i], name, dims, dims, shape);
  };
  AttentionBlockCall call;
  AttentionBlockTensors& in = call.in;
  in.query = batch_first(view(0, "query", 3, kTokens), is_batch_first);
  in.key = batch_first(view(1, "key", 3, kTokens), is_batch_first);
  in.value = batch_first(view(2, "value", 3, kTokens), is_batch_first);
  in.in_proj_weight = view(3, "in_proj_weight", 2, "[(num_heads + 2 * num_heads_kv) * head_dim, query_size]");
  in.q_proj_weight = view(4, "q_proj_weight", 2, "[num_heads * head_dim, query_size]");
  in.k_proj_weight = view(5, "k_proj_weight", 2, "[num_heads_kv * head_dim, key_size]");
  in.v_proj_weight = view(6, "v_proj_weight", 2, "[num_heads_kv * head_dim_v, value_size]");
  in.in_proj_bias = view(7, "in_proj_bias", 1, "a number for each row of q, k and v");
  in.out_proj_weight = view(8, "out_proj_weight", 2, "[out_size, num_heads * head_dim_v]");
  in.out_proj_bias = view(9, "out_proj_bias", 1, "[out_size]");
  in.norm.gamma = view(10, "norm_weight", 1, "[size]");
  in.norm.beta = view(11, "norm_bias", 1, "[size]");
  if (tensors[12].given()) in.attn_bias = python::widened_to_4d(view_of(tensors[12], {"attn_bias", 0, 4, kScores}));
  if (tensors[13].given()) in.attn_mask = python::widened_to_4d(view_of(tensors[13], {"attn_mask", 0, 4, kScores}));
  call.dropout_seed = seed_of(tensors[14], "dropout_seed");
  call.output_dropout_seed = seed_of(tensors[15], "output_dropout_seed");
  call.num_heads = num_heads;
  call.num_heads_kv = num_heads_kv;
  call.causal = causal;
  call.scale = scale;
  call.dropout_p = dropout_p;
  call.output_dropout_p = output_dropout_p;
  if (return_weights < 0 || return_weights > 2) {
    bad_value("return_weights is %lld, must be 0, 1 (per head) or 2 (mean)", static_cast<long long>(return_weights));
  }
  call.return_weights = static_cast<ReturnWeights>(return_weights);
  call.norm = norm_desc(norm_kind, norm_first, norm_eps);
  call.residual = residual;
  return call;
}

void attention_block_forward(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_block_forward", num_inputs, kNumAttentionArguments);
  ArgumentReader reader(stack);
  const AttentionBlockArguments arguments(reader);
  const bool keep = reader.flag();

  const CallPlace place(arguments.tensors[0]);
  const AttentionBlockCall call = arguments.call();
  const AttentionBlockDesc desc = checked(python::block_desc(call));
  const auto block = checked(python::cached_block(desc, place.where()));
  const LayerDesc& d = desc.layer;
  const bool bf = arguments.is_batch_first;
  Tensor out_view(nullptr, d.dtype, {bf ? d.batch : d.seqlen_q, bf ? d.seqlen_q : d.batch, block->layer().out_size()});
  StableTensor out = new_tensor(out_view, "out"), attn_weights, reserve;
  Tensor weights_view = python::weights_shape(desc), reserve_tensor;
  if (weights_view.given()) attn_weights = new_tensor(weights_view, "attn_weights");
  if (python::takes_reserve(call, keep)) reserve = new_reserve(python::reserve_words(desc), reserve_tensor);
  place.run_in_workspace(block->workspace_bytes(), [&](void* workspace) {
    return python::run_forward(*block, call, {place.where(), workspace}, batch_first(out_view, bf), weights_view,
                               reserve_tensor);
  });
  count_call(Counted::kAttentionBlockForward, python::counted_sizes(desc), block->layer().kernel_name());
  stack[0] = result(std::move(out));
  stack[1] = optional_result(std::move(attn_weights));
  stack[2] = optional_result(std::move(reserve));
}

void attention_block_backward(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("attention_block_backward", num_inputs, kNumAttentionArguments + 2);
  ArgumentReader reader(stack);
  const StableTensor grad_out = reader.tensor(), reserve = reader.tensor();
  const int64_t needs = reader.integer();
  const AttentionBlockArguments arguments(reader);

  const CallPlace place(arguments.tensors[0]);
  const AttentionBlockCall call = arguments.call();
  const AttentionBlockDesc desc = checked(python::block_desc(call));
  const auto block = checked(python::cached_block(desc, place.where()));
  const bool bf = arguments.is_batch_first;
  const Tensor grad_out_view = view_of(grad_out, {"grad_out", 3, 3, "the shape of out"});
  const Tensor reserve_tensor = reserve_view(reserve, python::reserve_words(desc));
  AttentionBlockTensors grads;
  const AttentionBlockTensors& in = call.in;
  // Tokens as torch sees them, and the bias with the dims that it has there.
  const Tensor query = batch_first(in.query, bf), key = batch_first(in.key, bf), value = batch_first(in.value, bf);
  const Tensor bias = optional_view(arguments.tensors[12], "attn_bias", 0, 4, "");
  auto made = new_gradients<AttentionBlockArguments::kNumDifferentiable>({{{query, grads.query},
                                                                           {key, grads.key},
                                                                           {value, grads.value},
                                                                           {in.in_proj_weight, grads.in_proj_weight},
                                                                           {in.q_proj_weight, grads.q_proj_weight},
                                                                           {in.k_proj_weight, grads.k_proj_weight},
                                                                           {in.v_proj_weight, grads.v_proj_weight},
                                                                           {in.in_proj_bias, grads.in_proj_bias},
                                                                           {in.out_proj_weight, grads.out_proj_weight},
                                                                           {in.out_proj_bias, grads.out_proj_bias},
                                                                           {in.norm.gamma, grads.norm.gamma},
                                                                           {in.norm.beta, grads.norm.beta},
                                                                           {bias, grads.attn_bias}}},
                                                                         needs);
  for (Tensor* tokens : {&grads.query, &grads.key, &grads.value}) *tokens = batch_first(*tokens, bf);
  if (made[12].given()) grads.attn_bias = python::widened_to_4d(grads.attn_bias);
  if (needs != 0) {
    place.run_in_workspace(block->backward_workspace_bytes(), [&](void* workspace) {
      return python::run_backward(*block, call, {place.where(), workspace}, reserve_tensor,
                                  batch_first(grad_out_view, bf), grads);
    });
    count_call(Counted::kAttentionBlockBackward, python::counted_sizes(desc), block->layer().kernel_name());
  }
  for (size_t i = 0; i < made.size(); ++i) stack[i] = result(std::move(made[i]));
}

// The arguments of feed_forward_block_forward, and of its backward but for the last.
struct FeedForwardArguments {
  static constexpr size_t kNumTensors = 9, kNumDifferentiable = 7;

  explicit FeedForwardArguments(ArgumentReader& arguments)
      : tensors(tensors_of<kNumTensors>(arguments)),
        activation(arguments.integer()),
        inner_dropout_p(arguments.real()),
        output_dropout_p(arguments.real()),
        norm_kind(arguments.integer()),
        norm_first(arguments.flag()),
        norm_eps(arguments.real()),
        residual(arguments.flag()) {}

  FeedForwardCall call() const {
    FeedForwardCall call;
    FeedForwardTensors& in = call.in;
    in.x = view_of(tensors[0], {"x", 3, 3, "[batch, seqlen, size]"});
    in.weight1 = optional_view(tensors[1], "weight1", 2, 2, "[inner_size, size]");
    in.bias1 = optional_view(tensors[2], "bias1", 1, 1, "[inner_size]");
    in.weight2 = optional_view(tensors[3], "weight2", 2, 2, "[size, inner_size]");
    in.bias2 = optional_view(tensors[4], "bias2", 1, 1, "[size]");
    in.norm.gamma = optional_view(tensors[5], "norm_weight", 1, 1, "[size]");
    in.norm.beta = optional_view(tensors[6], "norm_bias", 1, 1, "[size]");
    call.inner_dropout_seed = seed_of(tensors[7], "inner_dropout_seed");
    call.output_dropout_seed = seed_of(tensors[8], "output_dropout_seed");
    if (activation < 0 || activation > 4)
      bad_value("activation is %lld, must be 0 to 4", static_cast<long long>(activation));
    call.activation = static_cast<ActivationKind>(activation);
    call.inner_dropout_p = inner_dropout_p;
    call.output_dropout_p = output_dropout_p;
    call.norm = norm_desc(norm_kind, norm_first, norm_eps);
    call.residual = residual;
    return call;
  }

  std::array<StableTensor, kNumTensors> tensors;
  int64_t activation;
  double inner_dropout_p, output_dropout_p;
  int64_t norm_kind;
  bool norm_first;
  double norm_eps;
  bool residual;
};

void feed_forward_block_forward(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("feed_forward_block_forward", num_inputs, kNumFeedForwardArguments);
  ArgumentReader reader(stack);
  const FeedForwardArguments arguments(reader);
  const bool keep = reader.flag();

  const CallPlace place(arguments.tensors[0]);
  const FeedForwardCall call = arguments.call();
  const FeedForwardBlockDesc desc = checked(python::block_desc(call));
  const auto block = checked(python::cached_block(desc, place.where()));
  Tensor out_view = call.in.x, reserve_tensor;
  StableTensor out = new_tensor(out_view, "out"), reserve;
  if (python::takes_reserve(call, keep)) reserve = new_reserve(python::reserve_words(desc), reserve_tensor);
  place.run_in_workspace(block->workspace_bytes(), [&](void* workspace) {
    return python::run_forward(*block, call, {place.where(), workspace}, out_view, reserve_tensor);
  });
  count_call(Counted::kFeedForwardBlockForward, python::counted_sizes(desc), block->kernel_name());
  stack[0] = result(std::move(out));
  stack[1] = optional_result(std::move(reserve));
}

void feed_forward_block_backward(StableIValue* stack, uint64_t num_inputs, uint64_t /*num_outputs*/) {
  check_counts("feed_forward_block_backward", num_inputs, kNumFeedForwardArguments + 2);
  ArgumentReader reader(stack);
  const StableTensor grad_out = reader.tensor(), reserve = reader.tensor();
  const int64_t needs = reader.integer();
  const FeedForwardArguments arguments(reader);

  const CallPlace place(arguments.tensors[0]);
  const FeedForwardCall call = arguments.call();
  const FeedForwardBlockDesc desc = checked(python::block_desc(call));
  const auto block = checked(python::cached_block(desc, place.where()));
  const Tensor grad_out_view = view_of(grad_out, {"grad_out", 3, 3, "the shape of out"});
  const Tensor reserve_tensor = reserve_view(reserve, python::reserve_words(desc));
  FeedForwardTensors grads;
  const FeedForwardTensors& in = call.in;
  auto made = new_gradients<FeedForwardArguments::kNumDifferentiable>({{{in.x, grads.x},
                                                                        {in.weight1, grads.weight1},
                                                                        {in.bias1, grads.bias1},
                                                                        {in.weight2, grads.weight2},
                                                                        {in.bias2, grads.bias2},
                                                                        {in.norm.gamma, grads.norm.gamma},
                                                                        {in.norm.beta, grads.norm.beta}}},
                                                                      needs);
  if (needs != 0) {
    place.run_in_workspace(block->backward_workspace_bytes(), [&](void* workspace) {
      return python::run_backward(*block, call, {place.where(), workspace}, reserve_tensor, grad_out_view, grads);
    });
    count_call(Counted::kFeedForwardBlockBackward, python::counted_sizes(desc), block->kernel_name());
  }
  for (size_t i = 0; i < made.size(); ++i) stack[i] = result(std::move(made[i]));
}

}  // namespace

std::span<const OperatorKernel> block_kernels() {
  static constexpr OperatorKernel kKernels[] = {
      {"attention_block_forward", attention_block_forward},
      {"attention_block_backward", attention_block_backward},
      {"feed_forward_block_forward", feed_forward_block_forward},
      {"feed_forward_block_backward", feed_forward_block_backward},
  };
  return kKernels;
}

}  // namespace polyhead::torch_ops
