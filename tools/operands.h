// The tensors of a problem, drawn from its seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "polyhead/attention.h"
#include "problem.h"

namespace polyhead::tools {

// The desc to plan with: problem.desc, or when packed with the rows of all sequences together.
AttentionDesc problem_desc(const Problem& problem);

// The random lengths of the sequences (--lengths, --packed): up to seqlen_q and seqlen_k. Where these are equal, query
// and key have the same lengths.
enum class Side { kQuery, kKey };
std::vector<int64_t> random_lengths(const Problem& problem, Side side);

struct Inputs {
  AttentionDesc desc;
  ForwardArgs args;  // without outputs and workspace
  std::vector<Buffer> buffers;
};

// Draws every input that `preset` does not already hold; preset's memory must outlive the result.
Result<Inputs> random_inputs(const Problem& problem, const ForwardArgs& preset = {});

struct Outputs {
  Tensor out, logsumexp, weights, column_sums;
  std::vector<Buffer> buffers;

  void give_to(ForwardArgs& args) const;
};

// Outputs that `desc` and `logsumexp` ask for, every element NaN: in the dtypes of desc, or all in float64.
enum class Precision { kOfDesc, kFloat64 };
Result<Outputs> new_outputs(const AttentionDesc& desc, bool logsumexp, Layout layout, uint64_t seed,
                            Precision precision = Precision::kOfDesc);

// A scratch buffer for args, of plan.workspace_bytes().
Result<Buffer> give_workspace(size_t size_bytes, ForwardArgs& args);

// (query, key) pairs of all sequences and query heads that lengths, causal and window leave visible.
double visible_pairs(const Inputs& inputs);

// Bytes of all elements of the tensors given in `args`, inputs and outputs.
double traffic_bytes(const ForwardArgs& args);

}  // namespace polyhead::tools
