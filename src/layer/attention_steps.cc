#include "layer/attention_steps.h"

#include <algorithm>

#include "attention/unchecked.h"
#include "contract/decoding.h"
#include "contract/program_call.h"
#include "contract/sequences.h"
#include "core/sentence.h"
#include "layer/arguments.h"

namespace polyhead {
namespace {

// Those of the program, or their gradients, among the arguments.
std::span<const Tensor> captures_of(const AttentionDesc& desc, const Call& call, int first_argument) {
  return {call.tensors + first_argument, desc.captures.size()};
}

// The call of attention on beam n that forward and backward have in common, without a workspace.
template <class AnyStep>
ForwardArgs beam_args(const AnyStep& step, const Call& call, int64_t n) {
  const auto beam_at = [&](const Place& place) { return beam_of(tensor_at(call, place), n); };
  const auto of_queries = [&](int argument, int dim) {
    const Tensor& t = call.tensors[argument];
    return call.step >= 0 ? index_of(t, dim, call.step) : t;
  };
  ForwardArgs one = sequence_args(call, n);
  one.where = call.where;
  one.captures = captures_of(step.plan->desc(), call, kArgCaptures);
  one.query = beam_at(step.query);
  one.key = beam_at(step.key);
  one.value = beam_at(step.value);
  one.attn_mask = of_queries(kArgMask, 2);
  one.attn_bias = of_queries(kArgBias, 2);
  one.window_lo = of_queries(kArgWindowLo, 0);
  one.window_hi = of_queries(kArgWindowHi, 0);
  one.alibi_slopes = call.tensors[kArgSlopes];
  one.sink_logits = call.tensors[kArgSinks];
  one.out = beam_at(step.out);
  one.dropout_seed = call.dropouts[0].seed;
  one.dropout_offset = call.dropouts[0].offset + static_cast<uint32_t>(n);
  // [N, B, H, Sq]: of each beam, without gaps.
  one.logsumexp = index_of(tensor_at(call, step.logsumexp), 0, n);
  if (one.logsumexp.given())
    one.logsumexp = Tensor(one.logsumexp.data, one.logsumexp.dtype,
                           {one.logsumexp.dims[1], one.logsumexp.dims[2], one.logsumexp.dims[3]});
  return one;
}

// What the program of forward captures: of one step of decoding, its number too, if the program asks (layer.cc).
struct Captured {
  Tensor tensors[Program::kMostCaptures];

  std::span<const Tensor> of(const AttentionStep& step, const Call& call, const int64_t* number) {
    const size_t given = step.asked->captures.size(), read = step.plan->desc().captures.size();
    std::copy_n(call.tensors + kArgCaptures, given, tensors);
    if (read > given) tensors[given] = Tensor(number, DType::kInt64, {1});
    return {tensors, read};
  }
};

// The forward call of attention on beam n, of one step of decoding or of all, without a workspace. Where one query stands
// stand(desc, args) tells, which may leave it to the device.
template <class Stand>
Status forward_args(const AttentionStep& step, const Call& call, int64_t n, Captured& captured, const Stand& stand,
                    ForwardArgs* args) {
  ForwardArgs& one = *args = beam_args(step, call, n);
  if (!step.key.somewhere()) {
    one.key = call.tensors[kArgPoolKey];
    one.value = call.tensors[kArgPoolValue];
    one.key_scales = call.tensors[kArgPoolKeyScales];
    one.value_scales = call.tensors[kArgPoolValueScales];
  }
  if (step.asked == nullptr) return {};
  StepArgs place = {one.seqlens_q, one.seqlens_k, one.query_offsets, call.step, call.tensors[kArgKey].given()};
  place.to = static_cast<int64_t*>(tensor_at(call, step.lengths).data);
  const int64_t batch = step.asked->batch;
  one.seqlens_q = {};
  one.seqlens_k = Tensor(place.to, DType::kInt64, {batch});
  one.query_offsets = step.plan->desc().has_query_offsets ? Tensor(place.to + batch, DType::kInt64, {batch}) : Tensor();
  one.captures = captured.of(step, call, place.to + 2 * batch);
  return stand(*step.asked, place);
}

// memory: for the table of sequences, where the steps will work later, and attention has one too.
Status check_indices(const AttentionDesc& desc, const ForwardArgs& args, void* memory) {
  Sequences sequences;
  Status status = sequences.read(desc, args, memory);
  return status.ok() ? check_program_indices(desc, args, sequences) : status;
}

// Of one step of decoding.
Status check_indices_of_step(const StepList& list, const Call& call, int64_t beams) {
  for (const Step& each : list.steps) {
    const auto* const step = std::get_if<AttentionStep>(&each);
    for (int64_t n = 0; step != nullptr && n < beams; ++n) {
      Captured captured;
      ForwardArgs one;
      const auto stand = [](const AttentionDesc& asked, const StepArgs& args) {
        stand_at_step(asked, args);
        return Status();
      };
      Status status = forward_args(*step, call, n, captured, stand, &one);
      if (status.ok()) status = check_indices(step->plan->desc(), one, call.workspace + list.scratch);
      if (!status.ok()) return status;
    }
  }
  return {};
}

char* start_of(const Call& call, Place::Room room) {
  return room == Place::Room::kReserve ? call.reserve : call.workspace;
}

// Without queries no beam has anything to compute, however many there are.
bool has_queries(const Plan& plan) {
  const AttentionDesc& desc = plan.desc();
  return desc.batch > 0 && desc.num_heads > 0 && desc.seqlen_q > 0;
}

}  // namespace

ForwardArgs sequence_args(const Call& call, int64_t n) {
  ForwardArgs one;
  one.seqlens_q = beam_of(call.tensors[kArgLengthsQ], n);
  one.seqlens_k = beam_of(call.tensors[kArgLengthsK], n);
  one.query_offsets = beam_of(call.tensors[kArgOffsets], n);
  one.page_table = call.tensors[kArgPageTable];
  return one;
}

Status check_program(const AttentionDesc& asked, const StepList& list, const Call& call, int64_t beams) {
  const size_t captures = asked.captures.size();
  if (call.num_captures > captures || call.num_grad_captures > captures) {
    const bool gradients = call.num_captures <= captures;
    return invalid(sentence(gradients ? "grad_captures" : "captures", " has ",
                            gradients ? call.num_grad_captures : call.num_captures, " tensors, the program captures ",
                            captures));
  }
  if (asked.program == nullptr || asked.batch == 0) return {};
  if (call.step >= 0) return check_indices_of_step(list, call, beams);
  for (int64_t n = 0; n < beams; ++n) {
    ForwardArgs one = sequence_args(call, n);
    one.attn_mask = call.tensors[kArgMask];
    one.attn_bias = call.tensors[kArgBias];
    one.window_lo = call.tensors[kArgWindowLo];
    one.window_hi = call.tensors[kArgWindowHi];
    one.captures = captures_of(asked, call, kArgCaptures);
    if (Status status = check_indices(asked, one, call.workspace); !status.ok()) return status;
  }
  return {};
}

Status attend(const AttentionStep& step, const Machine& machine, const Call& call, char* scratch) {
  const auto stand = [&](const AttentionDesc& asked, const StepArgs& args) {
    if (machine.linear->stand_at_step != nullptr) return machine.linear->stand_at_step(asked, args, machine.run);
    stand_at_step(asked, args);
    return Status();
  };
  for (int64_t n = 0, beams = has_queries(*step.plan) ? step.beams : 0; n < beams; ++n) {
    Captured captured;
    ForwardArgs one;
    if (Status status = forward_args(step, call, n, captured, stand, &one); !status.ok()) return status;
    one.attn_weights = beam_of(call.tensors[kArgProbabilities], n);
    one.workspace = scratch;
    one.workspace_bytes = step.plan->workspace_bytes();
    if (Status status = forward_unchecked(*step.plan, one); !status.ok()) return status;
  }
  return {};
}

Status attend_backward(const AttentionBackwardStep& step, const Machine& machine, const Call& call, char* scratch,
                       const AddTensors& add) {
  Tensor grads[3];
  for (int i = 0; i < 3; ++i) {
    const bool unwanted = step.wanted[i].somewhere() && !tensor_at(call, step.wanted[i]).given();
    if (!unwanted) grads[i] = tensor_at(call, step.grads[i]);
  }
  const Tensor &grad_bias = call.tensors[kArgGradBias], &grad_slopes = call.tensors[kArgGradSlopes],
               &grad_sinks = call.tensors[kArgGradSinks];
  const std::span<const Tensor> grad_captures = captures_of(step.plan->desc(), call, kArgGradCaptures);
  const auto given = [](const Tensor& t) { return t.given(); };
  if (!given(grads[0]) && !given(grads[1]) && !given(grads[2]) && !given(grad_bias) && !given(grad_slopes) &&
      !given(grad_sinks) && std::none_of(grad_captures.begin(), grad_captures.end(), given)) {
    return {};
  }
  const auto clear = [&](void* data, size_t bytes) { return machine.linear->clear(data, bytes, machine.run); };
  Status status;
  if (step.beams > 1) status = clear(start_of(call, step.room) + step.begin, step.end - step.begin);
  const Tensor shared = tensor_at(call, step.shared), sums = tensor_at(call, step.shared_sums);
  const size_t shared_bytes = static_cast<size_t>(shared.num_elements()) * dtype_size_bytes(shared.dtype);
  const int64_t beams = has_queries(*step.plan) ? step.beams : 1;  // one clears what all share
  for (int64_t n = 0; n < beams && status.ok(); ++n) {
    if (n > 0 && shared_bytes > 0) status = clear(shared.data, shared_bytes);
    if (!status.ok()) return status;
    BackwardArgs one;
    one.forward = beam_args(step, call, n);
    one.forward.workspace = scratch;
    one.forward.workspace_bytes = step.plan->backward_workspace_bytes();
    one.grad_out = beam_of(tensor_at(call, step.grad_out), n);
    one.grad_query = beam_of(grads[0], n);
    one.grad_key = beam_of(grads[1], n);
    one.grad_value = beam_of(grads[2], n);
    one.grad_attn_bias = grad_bias;
    one.grad_alibi_slopes = grad_slopes;
    one.grad_sink_logits = grad_sinks;
    one.grad_captures = grad_captures;
    one.accumulate = n > 0;
    status = backward_unchecked(*step.plan, one);
    if (status.ok() && shared_bytes > 0) status = add(shared, sums, n > 0);
  }
  return status.ok() && shared_bytes > 0 ? add(sums, shared, false) : status;
}

}  // namespace polyhead
