#include "block_call.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "blocks.h"
#include "call.h"
#include "scalars.h"
#include "threads.h"

namespace polyhead::python {
namespace {

// Arguments one after the other.
class Reader {
 public:
  explicit Reader(PyObject* const* arguments) : arguments_(arguments) {}

  PyObject* next() { return arguments_[at_++]; }

  // Not given: None.
  Tensor array(const char* name, int min_dims, int max_dims, const char* shape) {
    PyObject* object = next();
    if (object == Py_None) return {};
    return view_of(object, {name, kFloats, min_dims, max_dims, shape}, held_[num_held_++]);
  }
  Tensor scores(const char* name, const char* dtypes) {
    PyObject* object = next();
    if (object == Py_None) return {};
    constexpr const char* kShape = "what broadcasts to [batch, num_heads, seqlen_q, seqlen_k]";
    return widened_to_4d(view_of(object, {name, dtypes, 0, 4, kShape}, held_[num_held_++]));
  }
  std::optional<uint64_t> seed() {
    PyObject* object = next();
    return object == Py_None ? std::nullopt : std::optional(seed_argument(object));
  }
  int64_t integer(const char* name) { return int64_argument(next(), name); }
  int64_t number_of(const char* name, int64_t last) {
    const int64_t number = integer(name);
    if (number < 0 || number > last) {
      bad_value("%s is %lld, must be 0 to %lld", name, static_cast<long long>(number), static_cast<long long>(last));
    }
    return number;
  }
  bool flag(const char* name) { return flag_argument(next(), name); }
  double real(const char* name) { return real_argument(next(), name); }
  std::optional<double> optional_real(const char* name) {
    PyObject* object = next();
    return object == Py_None ? std::nullopt : std::optional(real_argument(object, name));
  }
  NormDesc norm() {
    NormDesc norm;
    norm.kind = static_cast<NormKind>(number_of("norm_kind", 2));
    norm.pre = flag("norm_first");
    norm.eps = real("norm_eps");
    return norm;
  }

 private:
  PyObject* const* arguments_;
  int at_ = 0;
  std::array<Held, 18> held_;
  size_t num_held_ = 0;
};

AttentionBlockCall read_attention_block(Reader& reader) {
  AttentionBlockCall call;
  AttentionBlockTensors& in = call.in;
  in.query = reader.array("query", 3, 3, "[batch, seqlen_q, query_size]");
  in.key = reader.array("key", 3, 3, "[batch, seqlen_k, key_size]");
  in.value = reader.array("value", 3, 3, "[batch, seqlen_k, value_size]");
  in.in_proj_weight = reader.array("in_proj_weight", 2, 2, "[(num_heads + 2 * num_heads_kv) * head_dim, query_size]");
  in.q_proj_weight = reader.array("q_proj_weight", 2, 2, "[num_heads * head_dim, query_size]");
  in.k_proj_weight = reader.array("k_proj_weight", 2, 2, "[num_heads_kv * head_dim, key_size]");
  in.v_proj_weight = reader.array("v_proj_weight", 2, 2, "[num_heads_kv * head_dim_v, value_size]");
  in.in_proj_bias = reader.array("in_proj_bias", 1, 1, "a number for each row of q, k and v");
  in.out_proj_weight = reader.array("out_proj_weight", 2, 2, "[out_size, num_heads * head_dim_v]");
  in.out_proj_bias = reader.array("out_proj_bias", 1, 1, "[out_size]");
  in.norm.gamma = reader.array("norm_weight", 1, 1, "[size]");
  in.norm.beta = reader.array("norm_bias", 1, 1, "[size]");
  in.attn_bias = reader.scores("attn_bias", kFloats);
  in.attn_mask = reader.scores("attn_mask", "bool");
  call.dropout_seed = reader.seed();
  call.output_dropout_seed = reader.seed();
  call.num_heads = reader.integer("num_heads");
  call.num_heads_kv = reader.integer("num_heads_kv");
  call.causal = reader.flag("causal");
  call.scale = reader.optional_real("scale");
  call.dropout_p = reader.real("dropout_p");
  call.output_dropout_p = reader.real("output_dropout_p");
  call.return_weights = static_cast<ReturnWeights>(reader.number_of("return_weights", 2));
  call.norm = reader.norm();
  call.residual = reader.flag("residual");
  return call;
}

FeedForwardCall read_feed_forward(Reader& reader) {
  FeedForwardCall call;
  FeedForwardTensors& in = call.in;
  in.x = reader.array("x", 3, 3, "[batch, seqlen, size]");
  in.weight1 = reader.array("weight1", 2, 2, "[inner_size, size]");
  in.bias1 = reader.array("bias1", 1, 1, "[inner_size]");
  in.weight2 = reader.array("weight2", 2, 2, "[size, inner_size]");
  in.bias2 = reader.array("bias2", 1, 1, "[size]");
  in.norm.gamma = reader.array("norm_weight", 1, 1, "[size]");
  in.norm.beta = reader.array("norm_bias", 1, 1, "[size]");
  call.inner_dropout_seed = reader.seed();
  call.output_dropout_seed = reader.seed();
  call.activation = static_cast<ActivationKind>(reader.number_of("activation", 4));
  call.inner_dropout_p = reader.real("inner_dropout_p");
  call.output_dropout_p = reader.real("output_dropout_p");
  call.norm = reader.norm();
  call.residual = reader.flag("residual");
  return call;
}

nb::object new_reserve(Results& results, int64_t words, Tensor& view) {
  view = Tensor(nullptr, DType::kInt64, {words});
  return results.make(view);
}

Tensor reserve_view(PyObject* object, int64_t words, Held& held) {
  const Tensor view = view_of(object, {"reserve", "int64", 1, 1, "what forward returned"}, held);
  check(check_reserve(view, words));
  return view;
}

// What a gradient is made like, and where its view goes.
struct Gradient {
  const char* name;
  const Tensor& input;
  Tensor& view;
};

// A tuple of new gradients of those inputs, the first arguments, whose bits are set; None for the others.
template <size_t Count>
nb::object new_gradients(const std::array<Gradient, Count>& all, PyObject* const* inputs, int64_t needs) {
  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(Count)));
  if (!made.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < Count; ++i) {
    nb::object gradient = nb::none();
    if ((needs >> i & 1) != 0) {
      if (!all[i].input.given()) bad_value("needs names %s, which is not given", all[i].name);
      all[i].view = all[i].input;
      gradient = Results(all[i].name, inputs[i], all[i].input.dtype).make(all[i].view);
    }
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), gradient.release().ptr());
  }
  return made;
}

}  // namespace

nb::object attention_block_arrays(PyObject* const* arguments) {
  const Place place(arguments[0], Py_None);
  const Where where = place.where(chosen_executor());
  Reader reader(arguments);
  const AttentionBlockCall call = read_attention_block(reader);
  const bool keep = reader.flag("keep");
  const AttentionBlockDesc desc = checked(block_desc(call));
  const auto block = checked(cached_block(desc, where));
  const LayerDesc& d = desc.layer;
  Results results("query", arguments[0], d.dtype);
  Tensor out(nullptr, d.dtype, {d.batch, d.seqlen_q, block->layer().out_size()}), reserve;
  Tensor weights = weights_shape(desc);
  nb::object out_array = results.make(out), weights_array = nb::none(), reserve_array = nb::none();
  if (weights.given()) weights_array = results.make(weights);
  if (takes_reserve(call, keep)) reserve_array = new_reserve(results, reserve_words(desc), reserve);
  place.run_in_workspace(block->workspace_bytes(), [&](void* workspace) {
    return run_forward(*block, call, {where, workspace}, out, weights, reserve);
  });
  return nb::make_tuple(out_array, weights_array, reserve_array, block->layer().kernel_name());
}

nb::object attention_block_gradients(PyObject* const* arguments) {
  const Place place(arguments[0], Py_None);
  const Where where = place.where(chosen_executor());
  Reader reader(arguments);
  const AttentionBlockCall call = read_attention_block(reader);
  const AttentionBlockDesc desc = checked(block_desc(call));
  const auto block = checked(cached_block(desc, where));
  const Tensor grad_out = reader.array("grad_out", 3, 3, "the shape of out");
  Held held[2];
  const Tensor reserve = reserve_view(reader.next(), reserve_words(desc), held[0]);
  const int64_t needs = reader.integer("needs");
  const AttentionBlockTensors& in = call.in;
  Tensor attn_bias;  // with the dims that it came with
  if (arguments[12] != Py_None) attn_bias = view_of(arguments[12], {"attn_bias", kFloats, 0, 4, ""}, held[1]);
  AttentionBlockTensors grads;
  nb::object made = new_gradients<13>({{{"query", in.query, grads.query},
                                        {"key", in.key, grads.key},
                                        {"value", in.value, grads.value},
                                        {"in_proj_weight", in.in_proj_weight, grads.in_proj_weight},
                                        {"q_proj_weight", in.q_proj_weight, grads.q_proj_weight},
                                        {"k_proj_weight", in.k_proj_weight, grads.k_proj_weight},
                                        {"v_proj_weight", in.v_proj_weight, grads.v_proj_weight},
                                        {"in_proj_bias", in.in_proj_bias, grads.in_proj_bias},
                                        {"out_proj_weight", in.out_proj_weight, grads.out_proj_weight},
                                        {"out_proj_bias", in.out_proj_bias, grads.out_proj_bias},
                                        {"norm_weight", in.norm.gamma, grads.norm.gamma},
                                        {"norm_bias", in.norm.beta, grads.norm.beta},
                                        {"attn_bias", attn_bias, grads.attn_bias}}},
                                      arguments, needs);
  if ((needs >> 12 & 1) != 0) grads.attn_bias = widened_to_4d(grads.attn_bias);
  if (needs != 0) {
    place.run_in_workspace(block->backward_workspace_bytes(), [&](void* workspace) {
      return run_backward(*block, call, {where, workspace}, reserve, grad_out, grads);
    });
  }
  return nb::make_tuple(made, block->layer().kernel_name());
}

nb::object feed_forward_arrays(PyObject* const* arguments) {
  const Place place(arguments[0], Py_None);
  const Where where = place.where(chosen_executor());
  Reader reader(arguments);
  const FeedForwardCall call = read_feed_forward(reader);
  const bool keep = reader.flag("keep");
  const FeedForwardBlockDesc desc = checked(block_desc(call));
  const auto block = checked(cached_block(desc, where));
  Results results("x", arguments[0], desc.dtype);
  Tensor out = call.in.x, reserve;
  nb::object out_array = results.make(out), reserve_array = nb::none();
  if (takes_reserve(call, keep)) reserve_array = new_reserve(results, reserve_words(desc), reserve);
  place.run_in_workspace(block->workspace_bytes(), [&](void* workspace) {
    return run_forward(*block, call, {where, workspace}, out, reserve);
  });
  return nb::make_tuple(out_array, reserve_array, block->kernel_name());
}

nb::object feed_forward_gradients(PyObject* const* arguments) {
  const Place place(arguments[0], Py_None);
  const Where where = place.where(chosen_executor());
  Reader reader(arguments);
  const FeedForwardCall call = read_feed_forward(reader);
  const FeedForwardBlockDesc desc = checked(block_desc(call));
  const auto block = checked(cached_block(desc, where));
  const Tensor grad_out = reader.array("grad_out", 3, 3, "the shape of out");
  Held held;
  const Tensor reserve = reserve_view(reader.next(), reserve_words(desc), held);
  const int64_t needs = reader.integer("needs");
  const FeedForwardTensors& in = call.in;
  FeedForwardTensors grads;
  nb::object made = new_gradients<7>({{{"x", in.x, grads.x},
                                       {"weight1", in.weight1, grads.weight1},
                                       {"bias1", in.bias1, grads.bias1},
                                       {"weight2", in.weight2, grads.weight2},
                                       {"bias2", in.bias2, grads.bias2},
                                       {"norm_weight", in.norm.gamma, grads.norm.gamma},
                                       {"norm_bias", in.norm.beta, grads.norm.beta}}},
                                     arguments, needs);
  if (needs != 0) {
    place.run_in_workspace(block->backward_workspace_bytes(), [&](void* workspace) {
      return run_backward(*block, call, {where, workspace}, reserve, grad_out, grads);
    });
  }
  return nb::make_tuple(made, block->kernel_name());
}

}  // namespace polyhead::python
