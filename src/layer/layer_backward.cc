// The forward's lines, backwards. g = dropout's factors and scale of the output.
//   out = g (O Wo + bo) + residual    dY = g grad_out    dO = dY Wo^T    dWo = O^T dY    dbo = sum over tokens of dY
//   O = attention(q, k, v)            dq, dk, dv: Plan::backward
//   q = query Wq + bq                 dquery = dq Wq^T    dWq = query^T dq    dbq = sum over tokens of dq
#include <algorithm>
#include <cstring>
#include <new>

#include "contract/sequences.h"
#include "core/dtype.h"
#include "core/threads.h"
#include "layer/call.h"
#include "layer/checks_args.h"
#include "linear/product.h"

namespace polyhead {
namespace {

// Copies [B, N, S, vector] to rows without gaps: zeros where a sequence has ended, whatever stands there. With both of
// its lengths, as query and as key, the longer one counts.
void copy_without_padding(const Tensor& from, const Tensor& lengths_q, const Tensor& lengths_k, void* rows,
                          Executor& executor) {
  const int64_t beams = from.dims[1], steps = from.dims[2], size = from.dims[3];
  const size_t element = dtype_size_bytes(from.dtype);
  run_tasks(executor, from.dims[0] * beams, [&](int64_t sequence, int) {
    const int64_t b = sequence / beams, n = sequence % beams;
    int64_t length = 0;
    for (const Tensor* lengths : {&lengths_q, &lengths_k}) {
      if (lengths->given()) length = std::max(length, integer_at(beam_of(*lengths, n), b));
    }
    for (int64_t t = 0; t < steps; ++t) {
      char* to = static_cast<char*>(rows) + static_cast<size_t>((sequence * steps + t) * size) * element;
      if (t >= length) {
        std::memset(to, 0, static_cast<size_t>(size) * element);
        continue;
      }
      const int64_t at = b * from.strides[0] + n * from.strides[1] + t * from.strides[2];
      const char* row = static_cast<const char*>(from.data) + at * static_cast<int64_t>(element);
      const int64_t step = size > 1 ? from.strides[3] * static_cast<int64_t>(element) : 0;
      for (int64_t c = 0; c < size; ++c) std::memcpy(to + static_cast<size_t>(c) * element, row + c * step, element);
    }
  });
}

// to[B, N, S, dim] = (+=) sum over heads of from[B, N, S, heads, dim].
void sum_heads(const Tensor& from, const Tensor& to, bool accumulate, Executor& executor) {
  const int64_t beams = to.dims[1], steps = to.dims[2];
  with_element_type(to.dtype, [&]<class E>(E) {
    run_tasks(executor, to.dims[0] * beams * steps, [&](int64_t token, int) {
      const int64_t t = token % steps, n = token / steps % beams, b = token / steps / beams;
      const E* in = static_cast<const E*>(from.data) + b * from.strides[0] + n * from.strides[1] + t * from.strides[2];
      E* out = static_cast<E*>(to.data) + b * to.strides[0] + n * to.strides[1] + t * to.strides[2];
      for (int64_t d = 0; d < to.dims[3]; ++d) {
        double sum = accumulate ? widen<double>(out[d * to.strides[3]]) : 0;
        for (int64_t h = 0; h < from.dims[3]; ++h) {
          sum += widen<double>(in[h * from.strides[3] + d * from.strides[4]]);
        }
        out[d * to.strides[3]] = narrow<E>(sum);
      }
    });
  });
}

class Backward {
 public:
  Backward(const LayerState& state, const LayerBackwardArgs& args)
      : s_(state),
        args_(args),
        forward_(args.forward),
        workspace_(static_cast<char*>(args.forward.workspace)),
        call_(state, args.forward, state.reserve, args.forward.reserve) {}

  Status data() const {
    const Tensor dY = s_.desc.output_dropout_p > 0 ? dropped_grad_out(args_.grad_out, {}) : args_.grad_out;
    Tensor dO = split_heads(dY, s_.desc.num_heads, s_.projections[kValue].dim);
    if (s_.out_projected()) {
      dO = call_.attention_out();
      dO.data = workspace_ + s_.backward.grad_attention;
      multiply(token_matrix(dY), weight_matrix(forward_.weights.out).transposed(), token_matrix(dO), false, false);
    }
    if (Status status = attend(dO); !status.ok()) return status;
    input_gradients();
    if (!s_.gradients.in_workspace) {  // a block calls backward_weights itself, and leaves its reserve as it is
      static_cast<ReserveHeader*>(forward_.reserve)->stage = ReserveHeader::kBackwardDataDone;
    }
    return {};
  }

  void weights() const {
    if (args_.grad_weights.out.given() || args_.grad_weights.out_bias.given()) out_weights();
    Products products;
    for (int i = kQuery; i <= kValue; ++i) {
      const Tensor &w = grad_weight(i), &bias = grad_bias(i);
      if (!w.given() && !bias.given()) continue;
      products.add(
          {token_matrix(call_.input(i)), weight_matrix(w), weight_matrix(bias), token_matrix(gradient(i)), 1u << i});
    }
    for (const Product& product : products) {
      if (product.w.given()) {
        const linear::Matrix x = without_padding(product);
        multiply(x.transposed(), product.y, product.w, true, args_.accumulate);
      }
      if (product.bias.given()) sum_rows(product.y, {}, {}, product.bias);
    }
  }

 private:
  const Tensor& grad_weight(int i) const { return weight_of(args_.grad_weights, static_cast<WeightKind>(i)); }
  const Tensor& grad_bias(int i) const {
    return weight_of(args_.grad_weights, static_cast<WeightKind>(i + static_cast<int>(WeightKind::kQueryBias)));
  }
  const Tensor& grad_input(int i) const {
    return i == kQuery ? args_.grad_query : i == kKey ? args_.grad_key : args_.grad_value;
  }
  Tensor gradient(int i) const { return call_.gradient(i); }

  // C = A B.
  void multiply(const linear::Matrix& a, const linear::Matrix& b, const linear::Matrix& c, bool split_k,
                bool accumulate) const {
    linear::GemmArgs args;
    args.a = a;
    args.b = b;
    args.c = c;
    args.accumulate = accumulate;
    args.workspace = workspace_ + s_.backward.shared;
    polyhead::multiply(*s_.linear, args, split_k, *s_.executor);
  }

  // y = epilogue(x), and the sums over its rows, each if given.
  void sum_rows(const linear::Matrix& x, const linear::Matrix& y, const linear::Epilogue& epilogue,
                const linear::Matrix& sums) const {
    linear::PointwiseArgs pointwise;
    pointwise.x = x;
    pointwise.y = y;
    pointwise.epilogue = epilogue;
    pointwise.sums = sums;
    pointwise.accumulate_sums = args_.accumulate;
    pointwise.workspace = workspace_ + s_.backward.shared;
    s_.linear->pointwise(pointwise, *s_.executor);
  }

  // A tensor like `like` in the workspace.
  Tensor row_copy(const Tensor& like) const {
    return Tensor(workspace_ + s_.backward.rows, like.dtype, {like.dims[0], like.dims[1], like.dims[2], like.dims[3]});
  }

  // dY, a copy, and its sums.
  Tensor dropped_grad_out(const Tensor& from, const linear::Matrix& sums) const {
    const Tensor copy = row_copy(args_.grad_out);
    linear::Epilogue epilogue;
    epilogue.gradient = true;
    epilogue.dropout = {s_.desc.output_dropout_p, forward_.output_dropout_seed.value_or(0),
                        forward_.output_dropout_offset};
    sum_rows(token_matrix(from), token_matrix(copy), epilogue, sums);
    return copy;
  }

  // Whether somebody wants the gradient of q, k or v.
  bool wanted(int i) const { return s_.projections[i].on || grad_input(i).given(); }

  // With several beams, what they share adds up: gradients of k, v, bias and slopes.
  Status attend(const Tensor& dO) const {
    const bool any = wanted(kQuery) || wanted(kKey) || wanted(kValue) || args_.grad_attn_bias.given() ||
                     args_.grad_alibi_slopes.given();
    if (!any) return {};
    if (s_.desc.beam > 1) {
      std::memset(call_.gradient_memory() + s_.gradients.begin, 0, s_.gradients.end - s_.gradients.begin);
    }
    for (int64_t n = 0; n < s_.desc.beam; ++n) {
      BackwardArgs one;
      one.forward = call_.attention(n);
      one.forward.weights = {};
      one.forward.workspace = workspace_ + s_.backward.shared;
      one.forward.workspace_bytes = s_.train->backward_workspace_bytes();
      one.grad_out = beam_of(dO, n);
      if (wanted(kQuery)) one.grad_query = beam_of(gradient(kQuery), n);
      if (wanted(kKey)) one.grad_key = beam_of(gradient(kKey), n);
      if (wanted(kValue)) one.grad_value = beam_of(gradient(kValue), n);
      one.grad_attn_bias = args_.grad_attn_bias;
      one.grad_alibi_slopes = args_.grad_alibi_slopes;
      one.accumulate = n > 0;
      if (Status status = s_.train->backward(one); !status.ok()) return status;
    }
    return {};
  }

  // Inputs that are one tensor may have one gradient, to which each adds.
  void input_gradients() const {
    Products products;
    for (int i = kQuery; i <= kValue; ++i) {
      if (!s_.projections[i].on || !grad_input(i).given()) continue;
      const Tensor& w = weight_of(forward_.weights, static_cast<WeightKind>(i));
      products.add({token_matrix(grad_input(i)), weight_matrix(w), {}, token_matrix(gradient(i)), 1u << i});
    }
    for (const Product& product : products) {
      bool again = false;
      for (const Product* earlier = products.begin(); earlier != &product; ++earlier) {
        again = again || same_matrix(earlier->x, product.x);
      }
      multiply(product.y, product.w.transposed(), product.x, false, again);
    }
    for (int i = kQuery; i <= kValue; ++i) {
      if (s_.projections[i].on || !grad_input(i).given() || grad_input(i).num_elements() == 0) continue;
      bool again = false;
      for (int k = kQuery; k <= kValue; ++k) {
        again = again || ((s_.projections[k].on || k < i) && same_view(grad_input(i), grad_input(k)));
      }
      sum_heads(gradient(i), grad_input(i), again, *s_.executor);
    }
  }

  void out_weights() const {
    const linear::Matrix sums = weight_matrix(args_.grad_weights.out_bias);
    Tensor dY = args_.grad_out;
    const bool padded = s_.asked.has_seqlens_q && dY.num_elements() > 0, dropped = s_.desc.output_dropout_p > 0;
    if (padded) {
      dY = row_copy(args_.grad_out);
      copy_without_padding(args_.grad_out, forward_.seqlens_q, {}, dY.data, *s_.executor);
    }
    if (dropped) {
      dY = dropped_grad_out(dY, sums);
    } else if (sums.given()) {
      sum_rows(token_matrix(dY), {}, {}, sums);
    }
    if (args_.grad_weights.out.given()) {
      multiply(token_matrix(call_.attention_out()).transposed(), token_matrix(dY),
               weight_matrix(args_.grad_weights.out), true, args_.accumulate);
    }
  }

  // The tokens of a product's input; a copy, if some lie in padding for all projections that it stands for.
  linear::Matrix without_padding(const Product& product) const {
    const bool of_query = (product.inputs & 1u << kQuery) != 0, of_keys = (product.inputs & ~(1u << kQuery)) != 0;
    if ((of_query && !s_.asked.has_seqlens_q) || (of_keys && !s_.asked.has_seqlens_k) || !product.x.given()) {
      return product.x;
    }
    const Tensor& input = of_query                             ? forward_.query
                          : (product.inputs & 1u << kKey) != 0 ? forward_.key
                                                               : forward_.value;
    const Tensor copy = row_copy(input);
    copy_without_padding(input, of_query ? forward_.seqlens_q : Tensor(), of_keys ? forward_.seqlens_k : Tensor(),
                         copy.data, *s_.executor);
    return token_matrix(copy);
  }

  const LayerState& s_;
  const LayerBackwardArgs& args_;
  const LayerForwardArgs& forward_;
  char* workspace_;
  Call call_;
};

}  // namespace

Status Layer::backward_data(const LayerBackwardArgs& given) const try {
  const LayerBackwardArgs args = with_beams(state_->desc, given);
  if (Status status = check_backward_data(*state_, args); !status.ok()) return status;
  return Backward(*state_, args).data();
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

Status Layer::backward_weights(const LayerBackwardArgs& given) const try {
  const LayerBackwardArgs args = with_beams(state_->desc, given);
  const auto stage = state_->gradients.in_workspace ? ReserveHeader::kForwardDone : ReserveHeader::kBackwardDataDone;
  if (Status status = check_backward_weights(*state_, args, stage); !status.ok()) return status;
  Backward(*state_, args).weights();
  return {};
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

}  // namespace polyhead
