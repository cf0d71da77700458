// The line that a failing test prints: parsed, it is the very same problem, with the same bits of every operand in the
// same places.
#include <gtest/gtest.h>

#include <set>

#include "gradient_cases.h"
#include "testing/judge.h"
#include "testing/problem_words.h"
#include "testing/program_words.h"

namespace polyhead::testing {
namespace {

// FNV-1a, 64 bits.
class Hash {
 public:
  void add(const void* data, size_t num_bytes) {
    for (size_t n = 0; n < num_bytes; ++n) hash_ = (hash_ ^ static_cast<const uint8_t*>(data)[n]) * 0x100000001b3;
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.size());
    add(values.data(), values.size() * sizeof(T));
  }
  void add(uint64_t value) { add(&value, sizeof value); }
  void add(const Array& array) {
    add(static_cast<uint64_t>(array.dtype));
    add(array.dims);
    add(array.bytes);
  }
  // Where it lies: how far from its page's start, and its strides.
  void add(const Tensor& tensor) {
    add(reinterpret_cast<uintptr_t>(tensor.data) % 4096);
    for (int n = 0; n < tensor.ndim; ++n) add(static_cast<uint64_t>(tensor.strides[n]));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

void add_inputs(Hash& hash, const Inputs& in) {
  for (const InputName& input : kInputs) hash.add(in.*input.array);
  for (const Array& a : in.captures) hash.add(a);
  hash.add(in.dropout_seed);
  hash.add(in.dropout_offset);
}

// All that kernels are given in forward: what each operand holds, in every draw, and where it lies.
uint64_t forward_hash(const Problem& problem) {
  const AttentionDesc desc = problem_desc(problem);
  const Inputs in = random_inputs(problem);
  Hash hash;
  add_inputs(hash, in);
  PlacedInputs placed(run_options(problem));
  ForwardArgs args = placed.add(desc, in);
  const PlacedOutputs outputs(desc, run_options(problem), placed);
  outputs.give_to(args);
  for (const InputName& input : kInputs) hash.add(args.*input.tensor);
  for (const Tensor& t : args.captures) hash.add(t);
  for (const Tensor* t : {&args.out, &args.logsumexp, &args.attn_weights, &args.column_sums}) hash.add(*t);
  hash.add(static_cast<uint64_t>(num_draws(desc)));
  return hash.value();
}

uint64_t backward_hash(const Problem& problem) {
  const AttentionDesc desc = problem_desc(problem);
  const BackwardInputs in = random_backward_inputs(problem);
  Hash hash;
  add_inputs(hash, in.forward);
  for (const Array* a : {&in.out, &in.logsumexp, &in.grad_out, &in.grad_logsumexp, &in.delta}) hash.add(*a);
  for (const GradientName& name : kGradients) hash.add(in.before.*name.gradient);
  for (const Array& a : in.before.captures) hash.add(a);
  PlacedInputs placed(run_options(problem));
  BackwardArgs args = placed.add(desc, in);
  const PlacedGradients gradients(desc, args.forward, in, problem.needs, run_options(problem), placed);
  gradients.give_to(args);
  for (const InputName& input : kInputs) hash.add(args.forward.*input.tensor);
  for (const Tensor& t : args.forward.captures) hash.add(t);
  for (const Tensor* t : {&args.forward.out, &args.forward.logsumexp, &args.grad_out, &args.delta}) hash.add(*t);
  for (const GradientName& name : kGradients) hash.add(args.*name.tensor);
  for (const Tensor& t : args.grad_captures) hash.add(t);
  hash.add(static_cast<uint64_t>(problem.accumulate));
  return hash.value();
}

// The problem of "polyhead verify ... --kernel NAME  # name", as the command reads it.
Problem parsed(const std::string& command) {
  std::vector<std::string> words = split_words(command);
  EXPECT_EQ(words[0] + " " + words[1], "polyhead verify");
  words.erase(words.begin(), words.begin() + 2);
  std::vector<std::string> of_problem;
  for (size_t n = 0; n < words.size(); ++n) {
    if (words[n] == "--gradients") continue;
    if (words[n] == "--kernel") {
      ++n;
      continue;
    }
    of_problem.push_back(words[n]);
  }
  const auto problems = parse_problems(of_problem);
  EXPECT_TRUE(problems.ok()) << command << ": " << problems.status().message();
  return problems.ok() && problems->size() == 1 ? problems->front() : Problem();
}

TEST(ProblemLine, ComputesTheVerySameForward) {
  std::set<uint64_t> hashes;
  size_t compared = 0;
  for (const Problem& problem : cases()) {
    if (input_bytes(problem) > 4e6) continue;
    const std::string line = forward_command("reference", problem);
    const uint64_t hash = forward_hash(problem);
    ASSERT_EQ(forward_hash(parsed(line)), hash) << line;
    hashes.insert(hash);
    ++compared;
  }
  EXPECT_GT(compared, 700u);
  EXPECT_EQ(hashes.size(), compared);  // each case has its own
}

TEST(ProblemLine, ComputesTheVerySameBackward) {
  size_t compared = 0;
  for (const Problem& problem : gradient_cases()) {
    const AttentionDesc& d = problem.desc;
    const double pairs = static_cast<double>(d.num_heads * d.seqlen_q) * static_cast<double>(d.batch * d.seqlen_k);
    if (pairs * static_cast<double>(d.head_dim + d.head_dim_v) > 4e6) continue;  // forward is computed, twice
    const std::string line = backward_command("reference", problem);
    ASSERT_EQ(backward_hash(parsed(line)), backward_hash(problem)) << line;
    ++compared;
  }
  EXPECT_GT(compared, 700u);
}

TEST(ProblemLine, ComputesTheVerySameRandomProblem) {
  for (uint64_t seed = 1; seed <= 600; ++seed) {
    Problem problem = random_problem(seed);
    if (seed % 3 == 0) problem.layout_seed = seed * 77;
    ASSERT_EQ(forward_hash(parsed(forward_command("reference", problem))), forward_hash(problem)) << seed;
    if (seed % 5 != 0) continue;
    problem = without_cache(problem);
    ASSERT_EQ(backward_hash(parsed(backward_command("reference", problem))), backward_hash(problem)) << seed;
  }
}

// Whatever a problem can say makes other operands, so that a line that forgot it would be noticed.
TEST(ProblemLine, EveryWordChangesWhatIsComputed) {
  Problem plain = problem_of("plain", DType::kFloat32, 2, 4, 70, 66, 24);
  plain.desc.attn_mask = {true, DType::kBool, {2, 1, 70, 66}};
  plain.desc.attn_bias = {true, DType::kFloat32, {1, 4, 1, 66}};
  plain.desc.has_seqlens_k = true;
  plain.desc.alibi_slopes_ndim = 1;
  plain.desc.query_offset = 3;
  plain.score_text = "score - slope[h] * abs(q - k)";
  plain.mask_text = "doc[k] <= q";
  plain.captured = *parse_captured("slope: f32[h]; doc: i32[k]");
  ASSERT_TRUE(complete_program(plain).ok());
  void (*const changes[])(Problem&) = {
      [](Problem& p) {
        p.captured[0].range = {0, 1};
      },
      [](Problem& p) { p.captured[0].rising = true; },
      [](Problem& p) {
        p.captured[0].dtype = DType::kFloat16;
        static_cast<void>(complete_program(p));
      },
      [](Problem& p) {
        p.captured[1].range = {0, 9};
      },
      [](Problem& p) { p.seed = 2; },
      [](Problem& p) { p.desc.has_sink_logits = true; },
      [](Problem& p) { p.desc.normalizer = Normalizer::kNone; },
      [](Problem& p) { p.desc.window_left = 9; },
      [](Problem& p) { p.desc.window_left = 9, p.desc.sink_keys = 4; },
      [](Problem& p) {
        p.desc.attn_mask = {true, DType::kBool, {1, 1, 1, 3}}, p.desc.mask_at_end = true;
      },
      [](Problem& p) { p.fill = Fill::kShiftUp; },
      [](Problem& p) { p.fill = Fill::kShiftDown; },
      [](Problem& p) { p.fill = Fill::kLarge; },
      [](Problem& p) { p.fill = Fill::kUnderflow; },
      [](Problem& p) { p.fill = Fill::kOutliers; },
      [](Problem& p) { p.layout = Layout::kStrided; },
      [](Problem& p) { p.layout_seed = 5; },
      [](Problem& p) { p.edges = false; },
      [](Problem& p) { p.edges = false, p.mask_kind = MaskKind::kPadding; },
      [](Problem& p) { p.edges = false, p.mask_kind = MaskKind::kBlocks; },
      [](Problem& p) { p.desc.has_windows = true; },
      [](Problem& p) { p.desc.has_seqlens_q = true; },
      [](Problem& p) { p.desc.query_offset.reset(), p.desc.has_query_offsets = true; },
      [](Problem& p) { p.accumulate = true; },
      [](Problem& p) { p.delta = true; },
      [](Problem& p) { p.logsumexp = true; },
      [](Problem& p) { p.repeated_grad_out = 4; },
      [](Problem& p) { p.needs = 2; },
  };
  std::set<uint64_t> hashes = {backward_hash(plain)};
  for (const auto& change : changes) {
    Problem problem = plain;
    change(problem);
    EXPECT_TRUE(hashes.insert(backward_hash(problem)).second) << &change - changes << ": " << problem_line(problem);
  }
}

}  // namespace
}  // namespace polyhead::testing
