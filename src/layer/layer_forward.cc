// q, k, v = inputs times weights     O = attention     out = dropout(O Wo + bo) + residual
#include <algorithm>
#include <new>

#include "contract/sequences.h"
#include "layer/call.h"
#include "layer/checks_args.h"
#include "layer/packed.h"
#include "linear/product.h"

namespace polyhead {
namespace {

const Tensor& bias(const LayerForwardArgs& args, int i) {
  return weight_of(args.weights, static_cast<WeightKind>(i + static_cast<int>(WeightKind::kQueryBias)));
}

class Forward {
 public:
  Forward(const LayerState& state, const LayerForwardArgs& args)
      : s_(state),
        args_(args),
        workspace_(static_cast<char*>(args.workspace)),
        call_(state, args, args.reserve != nullptr ? state.reserve : state.forward.activations,
              args.reserve != nullptr ? args.reserve : args.workspace) {}

  Status run() const {
    if (call_.training) begin_reserve(args_.reserve, s_.fingerprint, dropouts_of(s_.desc, args_));
    project();
    if (Status status = attend(); !status.ok()) return status;
    if (s_.out_projected()) {
      const linear::Matrix out = token_matrix(args_.out);
      multiply({token_matrix(call_.attention_out()), matrix_of(WeightKind::kOut), weight_matrix(args_.weights.out_bias),
                out, 0, packed(WeightKind::kOut)},
               after_output());
    } else if (call_.training || !s_.attention_writes_out()) {
      linear::PointwiseArgs pointwise;
      pointwise.x = token_matrix(call_.attention_out());
      pointwise.y = token_matrix(args_.out);
      pointwise.epilogue = after_output();
      s_.linear->pointwise(pointwise, *s_.executor);
    }
    return {};
  }

 private:
  // The weight as it lies, or packed: one of them.
  linear::Matrix matrix_of(WeightKind kind) const {
    return args_.packed_weights == nullptr ? weight_matrix(weight_of(args_.weights, kind)) : linear::Matrix();
  }
  PackedMatrix packed(WeightKind kind) const {
    return packed_matrix(s_.packed, static_cast<int>(kind), args_.packed_weights);
  }

  void multiply(const Product& product, linear::Epilogue epilogue) const {
    epilogue.bias = product.bias;
    linear::GemmArgs args;
    args.a = product.x;
    args.b = product.w;
    args.packed = product.packed.data;
    args.c = product.y;
    args.epilogue = epilogue;
    args.workspace = workspace_ + s_.forward.shared;
    polyhead::multiply(*s_.linear, args, false, *s_.executor);
  }

  void project() const {
    Products products;
    for (int i = kQuery; i <= kValue; ++i) {
      const Tensor to = call_.projected(i);
      if (!to.given() || !call_.input(i).given()) continue;
      const linear::Matrix x = token_matrix(call_.input(i)), y = token_matrix(to);
      if (s_.projections[i].on) {
        const auto kind = static_cast<WeightKind>(i);
        products.add({x, matrix_of(kind), weight_matrix(bias(args_, i)), y, 1u << i, packed(kind)});
      } else {
        linear::PointwiseArgs copy;
        copy.x = x;
        copy.y = y;
        s_.linear->pointwise(copy, *s_.executor);
      }
    }
    for (const Product& product : products) multiply(product, {});
  }

  linear::Epilogue after_output() const {
    linear::Epilogue epilogue;
    if (call_.training) {
      epilogue.dropout = {s_.desc.output_dropout_p, args_.output_dropout_seed.value_or(0), args_.output_dropout_offset};
    }
    if (s_.desc.residual) epilogue.residual = token_matrix(args_.residual);
    return epilogue;
  }

  Status attend() const {
    const Plan& plan = is_step(args_) ? *s_.step : call_.training ? *s_.train : *s_.infer;
    for (int64_t n = 0; n < s_.desc.beam; ++n) {
      ForwardArgs one = call_.attention(n);
      if (is_step(args_)) stand_at_step(&one);
      one.workspace = workspace_ + s_.forward.shared;
      one.workspace_bytes = plan.workspace_bytes();
      if (Status status = plan.forward(one); !status.ok()) return status;
    }
    return {};
  }

  // The one query is number `step` of its sequence: how many keys it may see, and where it stands among them.
  void stand_at_step(ForwardArgs* one) const {
    const int64_t batch = s_.desc.batch;
    auto* lengths = reinterpret_cast<int64_t*>(workspace_ + s_.forward.step_lengths);
    int64_t* offsets = lengths + batch;
    for (int64_t b = 0; b < batch; ++b) {
      const Sequence sequence = polyhead::sequence(s_.asked, *one, b);
      const int64_t cached = args_.key.given() ? args_.step + 1 : sequence.len_k;
      lengths[b] = args_.step < sequence.len_q ? std::min(sequence.len_k, cached) : 0;
      if (__builtin_add_overflow(sequence.offset, args_.step, &offsets[b])) offsets[b] = INT64_MAX;
    }
    one->seqlens_q = {};
    one->seqlens_k = Tensor(lengths, DType::kInt64, {batch});
    one->query_offsets = s_.step->desc().has_query_offsets ? Tensor(offsets, DType::kInt64, {batch}) : Tensor();
  }

  const LayerState& s_;
  const LayerForwardArgs& args_;
  char* workspace_;
  Call call_;
};

}  // namespace

Status Layer::forward(const LayerForwardArgs& given) const try {
  const LayerForwardArgs args = with_beams(state_->desc, given);
  if (Status status = check_forward(*state_, args); !status.ok()) return status;
  return Forward(*state_, args).run();
} catch (const std::bad_alloc&) {
  return {StatusCode::kOutOfMemory, "out of memory"};
}

}  // namespace polyhead
