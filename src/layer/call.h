// One call's tensors with all their dims, and where its results on the way lie.
#pragma once

#include "layer/state.h"

namespace polyhead {

// The arguments with a beam dim everywhere: [batch, beam, time, vector]; lengths and offsets [batch, beam].
LayerForwardArgs with_beams(const LayerDesc& desc, const LayerForwardArgs& args);
LayerBackwardArgs with_beams(const LayerDesc& desc, const LayerBackwardArgs& args);
Tensor with_beam(const Tensor& t, int ndim);  // of a tensor that should have `ndim` dims

// Beam n of a tensor without its dim 1; of the only beam there is, where all share it.
Tensor beam_of(const Tensor& t, int64_t n);

// [batch, beam, time, heads * dim] as [batch, beam, time, heads, dim].
Tensor split_heads(const Tensor& t, int64_t heads, int64_t dim);

// What the two dropouts of a call draw.
DropoutStreams dropouts_of(const LayerDesc& desc, const LayerForwardArgs& args);

inline bool is_step(const LayerForwardArgs& args) { return args.step >= 0; }

// Lengths and offsets of beam n, as attention takes them: those tensors alone.
ForwardArgs sequence_args(const LayerForwardArgs& args, int64_t n);

// A checked call on its way.
class Call {
 public:
  // `args` as with_beams gives them; both must outlive this. `activations` start at `memory`.
  Call(const LayerState& state, const LayerForwardArgs& args, const Activations& activations, void* memory);

  const LayerState& state;
  const LayerForwardArgs& args;
  const bool training;

  // Query, key or value as it came.
  const Tensor& input(int i) const { return i == kQuery ? args.query : i == kKey ? args.key : args.value; }
  // Where its projection goes (or a copy of it), [B, N, S, heads, dim]; not given: nowhere.
  Tensor projected(int i) const;
  // What attention reads, likewise.
  Tensor attended(int i) const;
  Tensor attention_out() const;  // [B, N, Sq, H, Dv]
  // Of q, k or v; when training.
  Tensor gradient(int i) const;
  char* gradient_memory() const;  // what state.gradients counts from

  // The call of attention on beam n, without a workspace.
  ForwardArgs attention(int64_t n) const;

 private:
  int64_t steps(int i) const { return is_step(args) ? 1 : state.projections[i].steps; }
  Tensor in_memory(char* memory, const Projected& at, int i) const;
  const Tensor& cache(int i) const { return i == kKey ? args.key_cache : args.value_cache; }

  const Activations& activations_;
  char* memory_;
};

}  // namespace polyhead
