// Problems in words: "8x16/4x512/640x64/80 --dtype bf16 --causal" <-> Problem. The command line, the suites of the
// bench and the tests read and print them alike; any failure is repeated by one such line.
//
//   BxHxSxD             batch, num_heads, seqlen, head_dim
//   BxH/GxSQ/SKxD/DV    refined: num_heads / num_heads_kv, seqlen_q / seqlen_k, head_dim / head_dim_v
//   1,8x16x128..1024x64 lists (a,b) and ranges (a..b doubles, a..b..step steps) give the cross product, as lists in
//                       the options' values do (--dtype f32,bf16); values that hold commas themselves (--window,
//                       --mask, --bias, --needs) are listed with '+' (--window 64,0+256,0); programs are no lists
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "testing/problem.h"

namespace polyhead::testing {

// One option of a problem, as help texts list it.
struct ProblemOption {
  const char* name;   // "--causal"
  const char* value;  // "L,R"; "" for a switch; "[=...]" for a switch that takes a value too
  const char* text;
};
std::span<const ProblemOption> problem_options();

// What a line without options says: Layout::kBshd, operands as those of models, lengths of sequences where packed.
Problem plain_problem();

// The problems that `words` name: at least one "BxHxSxD", and options for all of them, as "--causal", "--dtype bf16"
// (two words) or "--dtype=bf16". An option given twice: the last one counts.
Result<std::vector<Problem>> parse_problems(std::span<const std::string> words);

// A line's words, split at blanks outside of quotes ('...' or "...", which are left out); '#' begins a comment there.
std::vector<std::string> split_words(std::string_view line);

// The line that parses back to `problem`, and its options alone, each with a blank before it.
std::string problem_line(const Problem& problem);
std::string options_line(const Problem& problem);

// The commands that judge a kernel on this problem, with the problem's name behind.
std::string forward_command(const std::string& kernel, const Problem& problem);
std::string backward_command(const std::string& kernel, const Problem& problem);

// Sets one of problem_options() to one value, no list. Letters in the dims of --mask and --bias, and programs, wait for
// complete_operands(), once the sizes are known.
Status set_problem_option(std::string_view option, std::string_view value, Problem& problem);
Status complete_operands(Problem& problem);

// "f32", "bf16", "f16", "f64", or a NumPy name ("float32").
Result<DType> parse_dtype(std::string_view text);
const char* short_dtype_name(DType dtype);

const char* layout_name(Layout layout);
const char* fill_name(Fill fill);

}  // namespace polyhead::testing
