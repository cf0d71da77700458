// A problem: a desc, what its numbers look like, how its operands lie in memory, what is asked of a call. One line of
// words says all of it (problem_words.h), so that whatever fails is repeated by `polyhead verify` and that line, on the
// very same operands.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "polyhead/attention.h"
#include "testing/array.h"

namespace polyhead::testing {

// What the numbers of query and key look like.
enum class Fill {
  kNormal,     // N(0, 1)
  kShiftUp,    // the same, and all logits of the problem raised by 130
  kShiftDown,  // lowered by 130: logsumexp far below 0
  kLarge,      // small integers times 16: logits of thousands, and without rounding
  kUnderflow,  // half of the keys 95 below the others: their weights are denormal
  kOutliers,   // N(0, 1) + N(0, 100) in one of a thousand
};

// How an operand lies in memory. [B, S, H, D] in that order unless told.
enum class Layout {
  kBshd,
  kBhsd,
  kSbhd,
  kQkv,         // query, key and value side by side in one row for each token; others, and these where their rows
                // differ in number: such rows of their own, of which they fill a third
  kStrided,     // gaps everywhere, also between neighbours of a row, heads before rows or behind; inputs: backwards too
  kTransposed,  // [B, H, D, S]: innermost stride not 1
  kPadded,      // every dim padded by an odd number of elements
  kJunk,        // dims of size 1 have strides that nobody may use
  kNegative,    // inputs and gradients: all strides negative
  kExpanded,    // inputs: stride 0 wherever the values allow
  kMixed,       // each operand another of these
};
inline constexpr int kNumLayouts = static_cast<int>(Layout::kMixed);

// What random masks look like.
enum class MaskKind {
  kRandom,   // 7 of 8 are true
  kPadding,  // true up to a random key per row
  kBlocks,   // 1 of 2 blocks of 64 x 64 is all false, else as kRandom
};

struct Inputs;
struct Gradients;

// The gradients of a problem: of which operand, and where a call takes them.
struct GradientName {
  const char* operand;  // as --needs names it
  const char* name;
  Array Gradients::*gradient;
  Array Inputs::*input;
  Tensor ForwardArgs::*input_tensor;
  Tensor BackwardArgs::*tensor;
};
inline constexpr int kNumGradients = 6;
extern const GradientName kGradients[kNumGradients];

using GradientSet = unsigned;                                           // bit n stands for kGradients[n]
inline constexpr GradientSet kCapturedGradients = 1U << kNumGradients;  // of all float tensors of the program
inline constexpr GradientSet kAllGradients = (2U << kNumGradients) - 1;

// A tensor that the problem's program reads, and what its elements are drawn from (program_words.h).
struct DrawnCapture {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::string> sizes = {};  // "h", "q+k-1"; none: a single number
  std::optional<std::pair<double, double>> range = {};
  bool rising = false;
};

// The defaults are those of the tests' cases; a line of words has its own (problem_words.h).
struct Problem {
  std::string name = {};
  AttentionDesc desc = {};
  Fill fill = Fill::kNormal;
  Layout layout = Layout::kMixed;
  uint64_t layout_seed = 0;  // which layout each operand gets, its gaps, which end lies at a guard; 0: as `seed`
  // Operands as tests like them: masks and biases that hide places, rows, blocks and tails, slopes of 0, many lengths
  // of 0, windows and offsets that leave the keys. Else as those of models: what mask_kind says, ALiBi's own slopes.
  bool edges = true;
  MaskKind mask_kind = MaskKind::kRandom;
  std::string score_text = {}, mask_text = {};  // of the program; desc.program and desc.captures are made of these,
  std::vector<DrawnCapture> captured = {};      // by complete_program(), which puts these in the program's order
  // Packed: the desc's seqlens count the rows of all sequences, which are cut at random. Else they bound a sequence's
  // length: the lengths are drawn, and problem_desc() has their sum.
  bool cuts_rows = true;
  bool logsumexp = false;             // forward: ask for it; backward: its gradient comes in
  uint64_t seed = 1;                  // of every operand, of the lengths and of dropout
  GradientSet needs = kAllGradients;  // backward: all, or which of them
  bool accumulate = false;            // backward adds to what the gradients hold
  bool delta = false;                 // backward is given the row sums of grad_out * out, and not `out`
  unsigned repeated_grad_out = 0;     // bit n: dim n of grad_out holds one value, which the expanded layout may use
};

// Those of problem.needs that the problem has; an error if it names one that is not there.
Result<GradientSet> needed_gradients(const Problem& problem);
GradientSet gradients_there(const AttentionDesc& desc);
bool has_gradient(DType captured);

// "query,attn_bias"
std::string gradient_names(GradientSet needs);

// The desc to plan with: problem.desc, or when packed with the rows of all sequences together.
AttentionDesc problem_desc(const Problem& problem);

// Plain self-attention of so many queries and keys, heads of `dim`.
Problem problem_of(const char* name, DType dtype, int64_t batch, int64_t heads, int64_t q, int64_t k, int64_t dim);

// Any legal problem: all options mixed, sizes 0 to 130 and now and then more, small enough for naive loops.
Problem random_problem(uint64_t seed);

// Gives `problem` a random program: a mask, a score, or both, of those that models have.
void add_random_program(Problem& problem, uint64_t seed);

// The same keys one after the other, in the query's dtype: what backward takes.
Problem without_cache(const Problem& problem);

// `forward` without a cache, with random wishes for backward: needs, accumulate, logsumexp, delta, repeated_grad_out.
Problem with_random_gradients(const Problem& forward);

}  // namespace polyhead::testing
