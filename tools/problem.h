// Problems in words: "8x16/4x512/640x64/80 --dtype bf16 --causal" <-> Problem. The command line, the suites of the
// bench and the tests read and print them alike; any failure is repeated by one such line.
//
//   BxHxSxD             batch, num_heads, seqlen, head_dim
//   BxH/GxSQ/SKxD/DV    refined: num_heads / num_heads_kv, seqlen_q / seqlen_k, head_dim / head_dim_v
//   1,8x16x128..1024x64 lists (a,b) and ranges (a..b doubles, a..b..step steps) give the cross product, as lists in
//                       the options' values do (--dtype f32,bf16); values that hold commas themselves (--window,
//                       --mask, --bias, --needs) are listed with '+' (--window 64,0+256,0)
#pragma once

#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/attention.h"

namespace polyhead::tools {

// Where the elements of the operands lie.
enum class Layout {
  kBshd,     // [batch, seqlen, heads, dim], contiguous
  kBhsd,     // memory [batch, heads, seqlen, dim]
  kSbhd,     // memory [seqlen, batch, heads, dim]; not when packed
  kQkv,      // query, key and value side by side in one row per token; seqlen_q == seqlen_k
  kStrided,  // gaps everywhere, also between neighbours of a row; each operand its own
};

// What random masks look like.
enum class MaskKind {
  kRandom,   // 7 of 8 are true
  kPadding,  // true up to a random key per row
  kBlocks,   // 1 of 2 blocks of 64 x 64 is all false, else as kRandom
};

// The gradients of a problem: of which operand, and where a call takes them.
struct GradientName {
  const char* operand;  // as --needs names it
  const char* name;
  Tensor ForwardArgs::*input;
  Tensor BackwardArgs::*gradient;
};
inline constexpr GradientName kGradients[] = {
    {"query", "grad_query", &ForwardArgs::query, &BackwardArgs::grad_query},
    {"key", "grad_key", &ForwardArgs::key, &BackwardArgs::grad_key},
    {"value", "grad_value", &ForwardArgs::value, &BackwardArgs::grad_value},
    {"attn_bias", "grad_attn_bias", &ForwardArgs::attn_bias, &BackwardArgs::grad_attn_bias},
    {"alibi_slopes", "grad_alibi_slopes", &ForwardArgs::alibi_slopes, &BackwardArgs::grad_alibi_slopes}};
inline constexpr size_t kNumGradients = std::size(kGradients);

using GradientSet = unsigned;  // bit n stands for kGradients[n]
inline constexpr GradientSet kAllGradients = (1U << kNumGradients) - 1;

// What to compute and how to draw the operands.
struct Problem {
  // When packed, seqlen_q and seqlen_k bound a sequence's length; operands.h draws the lengths.
  AttentionDesc desc;
  Layout layout = Layout::kBshd;
  MaskKind mask_kind = MaskKind::kRandom;
  bool logsumexp = false;             // ask for it; backward: its gradient comes in
  uint64_t seed = 1;                  // of every operand, of the lengths and of dropout
  GradientSet needs = kAllGradients;  // backward: all, or which of them
  bool accumulate = false;            // backward adds to what the gradients hold
};

// Those of problem.needs that the problem has; an error if it names one that is not there.
Result<GradientSet> needed_gradients(const Problem& problem);

// One option of a problem, as help texts list it.
struct ProblemOption {
  const char* name;   // "--causal"
  const char* value;  // "L,R"; "" for a switch; "[=...]" for a switch that takes a value too
  const char* text;
};
std::span<const ProblemOption> problem_options();

// The problems that `words` name: at least one "BxHxSxD", and options for all of them, as "--causal", "--dtype bf16"
// (two words) or "--dtype=bf16". An option given twice: the last one counts.
Result<std::vector<Problem>> parse_problems(std::span<const std::string> words);

// A line's words, split at blanks; '#' begins a comment.
std::vector<std::string> split_words(std::string_view line);

// The line that parses back to `problem`, and its options alone, each with a blank before it.
std::string problem_line(const Problem& problem);
std::string options_line(const Problem& problem);

// Sets one of problem_options() to one value, no list. Letters in the dims of --mask and --bias wait for
// complete_operands(), once the sizes are known.
Status set_problem_option(std::string_view option, std::string_view value, Problem& problem);
void complete_operands(Problem& problem);

// "f32", "bf16", "f16", "f64", or a NumPy name ("float32").
Result<DType> parse_dtype(std::string_view text);
const char* short_dtype_name(DType dtype);

}  // namespace polyhead::tools
