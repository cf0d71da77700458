// A layer's call as files: the tensors as safetensors, the problem as JSON.
#pragma once

#include <string>
#include <vector>

#include "array.h"
#include "buffer.h"
#include "mha_operands.h"
#include "mha_problem.h"

namespace polyhead::tools {

// Sizes and options in one line of JSON, nothing left to a default.
std::string mha_json(const MhaProblem& problem, const Layer& layer);

NamedTensors weight_tensors(const LayerWeights& weights);

// Which elements dropout keeps, boolean: of P [batch, beam, heads, seqlen_q, seqlen_k], and of out. Not given
// where there is no dropout.
struct KeptByDropout {
  Tensor weights, out;
  std::vector<Buffer> buffers;
};
Result<KeptByDropout> kept_by_dropout(const MhaProblem& problem, const Layer& layer, const MhaOperands& operands);

// All inputs but the weights: grad_out too, and what dropout keeps.
NamedTensors input_tensors(const MhaOperands& operands, const KeptByDropout& kept);

// An error if write_dump() may not write there: to be asked before long work.
Status check_may_dump(const std::string& folder, bool overwrite);

// Writes problem.json, inputs.safetensors, weights.safetensors and results.safetensors into `folder`, which is made if
// it is not there; the folder above it must be. What gradients of weights were added to is before.NAME of the inputs.
Status write_dump(const std::string& folder, bool overwrite, const MhaProblem& problem, const Layer& layer,
                  const MhaOperands& operands, const MhaResults& results);

}  // namespace polyhead::tools
