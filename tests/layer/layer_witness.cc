#include "layer_witness.h"

#include "testing/layer_truth.h"

namespace polyhead::testing {
namespace {

truth::Numbers to_numbers(const Array& array) {
  truth::Numbers numbers(array.dtype, array.dims);
  for (int64_t n = 0; n < array.size(); ++n) numbers.values[static_cast<size_t>(n)] = array.at(n);
  return numbers;
}

Array to_array(const truth::Numbers& numbers) {
  if (!numbers.given()) return {};
  Array array(numbers.dtype, numbers.dims);
  for (int64_t n = 0; n < array.size(); ++n) array.set(n, numbers.at(n));
  return array;
}

LayerResults results(const truth::LayerResults& all) {
  LayerResults to;
  to.out = to_array(all[truth::kLayerOut]);
  to.attn_weights = to_array(all[truth::kLayerAttnWeights]);
  for (size_t i = 0; i < 3; ++i) to.grad_inputs[i] = to_array(all[truth::kLayerGradQuery + i]);
  to.grad_attn_bias = to_array(all[truth::kLayerGradAttnBias]);
  to.grad_alibi_slopes = to_array(all[truth::kLayerGradAlibiSlopes]);
  to.grad_sink_logits = to_array(all[truth::kLayerGradSinkLogits]);
  for (size_t n = 0; n < kNumWeightKinds; ++n) to.grad_weights[n] = to_array(all[truth::kLayerGradWeights + n]);
  return to;
}

}  // namespace

std::vector<NamedResult> named(const LayerResults& r) {
  std::vector<NamedResult> all = {{"out", &r.out},
                                  {"attn_weights", &r.attn_weights},
                                  {"grad_query", &r.grad_inputs[0]},
                                  {"grad_key", &r.grad_inputs[1]},
                                  {"grad_value", &r.grad_inputs[2]},
                                  {"grad_attn_bias", &r.grad_attn_bias},
                                  {"grad_alibi_slopes", &r.grad_alibi_slopes},
                                  {"grad_sink_logits", &r.grad_sink_logits}};
  constexpr const char* kWeights[] = {"grad Wq", "grad Wk", "grad Wv", "grad Wo",
                                      "grad bq", "grad bk", "grad bv", "grad bo"};
  for (size_t n = 0; n < kNumWeightKinds; ++n) all.push_back({kWeights[n], &r.grad_weights[n]});
  return all;
}

ExpectedLayer expected(const LayerProblem& problem, const LayerInputs& in) {
  truth::LayerNumbers from;
  from.query = to_numbers(in.query);
  from.key = to_numbers(in.key);
  from.value = to_numbers(in.value);
  from.residual = to_numbers(in.residual);
  from.key_is_query = problem.key_is_query;
  from.value_is_key = problem.value_is_key;
  for (size_t n = 0; n < kNumWeightKinds; ++n) from.weights[n] = to_numbers(in.weights[n]);
  from.attn_mask = to_numbers(in.attn_mask);
  from.attn_bias = to_numbers(in.attn_bias);
  from.alibi_slopes = to_numbers(in.alibi_slopes);
  from.sink_logits = to_numbers(in.sink_logits);
  from.seqlens_q = to_numbers(in.seqlens_q);
  from.seqlens_k = to_numbers(in.seqlens_k);
  from.query_offsets = to_numbers(in.query_offsets);
  from.window_lo = to_numbers(in.window_lo);
  from.window_hi = to_numbers(in.window_hi);
  from.dropout_seed = in.dropout_seed;
  from.output_dropout_seed = in.output_dropout_seed;
  from.dropout_offset = in.dropout_offset;
  from.output_dropout_offset = in.output_dropout_offset;
  from.grad_out = to_numbers(in.grad_out);
  const truth::LayerTruth truth = truth::layer_truth(problem.desc, from);
  return {results(truth.exact), results(truth.yardstick), results(truth.magnitude)};
}

}  // namespace polyhead::testing
