// Layers in words: "--batch 8 --heads 16 --seqlen-q 384 --q-size 1024 --causal" <-> MhaProblem, as problem.h has it for
// attention alone. Any failure of `polyhead mha --verify` is repeated by one such line.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "polyhead/layer.h"
#include "problem.h"

namespace polyhead::tools {

// A layer, and how to draw and call it.
struct MhaProblem {
  LayerDesc layer;  // sizes, heads, biases, residual, output dropout, windows; layer_desc() adds the rest
  // The attention inside: sizes, dtype, and what problem_options() lists. `accumulate` is that of
  // backward_weights; packed, column sums, logsumexp, needs and layout stay as they are.
  Problem attention = plain_problem();
  std::string data_layout = "nbtv";           // the order in memory, outermost first: t time, n batch, b beam, v vector
  bool key_is_query = false;                  // one tensor for both, which has one gradient; needs value_is_key
  bool value_is_key = false;                  // likewise
  std::vector<int64_t> seqlens_q, seqlens_k;  // of each sequence; empty: none, or random if attention has them
  bool prepacked_weights = false;             // prepacked once, before the calls
  bool training = true;  // forward with a reserve, and both backward calls; else forward alone, without dropout
  bool sweep = false;    // forward time step by time step; not when training
};

// What the layer is made of.
LayerDesc layer_desc(const MhaProblem& problem);

// All options, as the help text lists them: the layer's own, then those of attention.
std::vector<ProblemOption> mha_options();

// Options alone, "--causal", "--heads 8" (two words) or "--heads=8"; the last one counts. No lists.
// small: of the four leading sizes the defaults are those of --verify.
Result<MhaProblem> parse_mha(std::span<const std::string> words, bool small = false);

// The line that parses back to `problem`.
std::string mha_line(const MhaProblem& problem);

// Any legal layer: the attention of random_problem(), with heads and vectors that are small mostly, and everything a
// layer can have around it.
MhaProblem random_mha(uint64_t seed);

}  // namespace polyhead::tools
