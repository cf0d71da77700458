// NaN in places that no gradient may depend on, and in places that gradients must show.
#pragma once

#include "poison.h"
#include "testing/judge.h"

namespace polyhead::testing {

// The same inputs with NaN, inf and huge numbers also in the rows of out, grad_out, grad_logsumexp and delta that see no
// key. Their logsumexp stays -inf.
BackwardInputs poison_hidden(const AttentionDesc& desc, const BackwardInputs& in, uint64_t seed);

// One NaN (or +inf, in a bias) in a place that somebody sees. out and logsumexp are now and then those of the poked
// inputs, else those of the clean ones: both are legal.
enum class GradientPoke { kQuery, kKey, kValue, kBias, kGradOut, kGradLogsumexp };
inline constexpr int kNumGradientPokes = 6;
struct PokedBackward {
  bool done = false;  // false: the problem has no such place
  BackwardInputs inputs;
  std::string where;
  Gradients defined;  // what the definition gives for them, float64
};
PokedBackward poke_visible(const AttentionDesc& desc, const BackwardInputs& in, GradientPoke poke, uint64_t seed);

// "" if `got`, of the poked inputs, is NaN exactly where the definition is and has the bits of `clean` elsewhere.
std::string poke_mismatch(const PokedBackward& poked, const Gradients& clean, const Gradients& got);

}  // namespace polyhead::testing
