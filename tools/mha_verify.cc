#include "mha_verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "findings.h"
#include "progress.h"
#include "testing/bounds.h"
#include "testing/elements.h"
#include "testing/judge.h"

namespace polyhead::tools {
namespace {

Numbers numbers_of(const Tensor& tensor) {
  if (!tensor.given()) return {};
  Numbers numbers(tensor.dtype, std::vector<int64_t>(tensor.dims, tensor.dims + tensor.ndim));
  numbers.values = element_values(tensor);
  return numbers;
}

// [batch] as [batch, beams].
Numbers for_beams(const Numbers& of_sequences, int64_t beams) {
  if (!of_sequences.given()) return {};
  Numbers all(of_sequences.dtype, {of_sequences.dims[0], beams});
  for (size_t n = 0; n < all.values.size(); ++n) all.values[n] = of_sequences.values[n / static_cast<size_t>(beams)];
  return all;
}

LayerNumbers layer_numbers(const MhaProblem& problem, const MhaOperands& operands, const MhaResults& before) {
  LayerNumbers numbers;
  for (const InputField& input : kInputFields) numbers.*input.numbers = numbers_of(operands.args.*input.field);
  for (const Tensor& capture : operands.captures) numbers.captures.push_back(numbers_of(capture));
  for (Numbers* of_queries : {&numbers.seqlens_q, &numbers.query_offsets}) {
    *of_queries = for_beams(*of_queries, problem.layer.beam);
  }
  numbers.seqlens_k = for_beams(numbers.seqlens_k, problem.layer.beam_kv);
  numbers.key_is_query = problem.key_is_query;
  numbers.value_is_key = problem.value_is_key;
  for (size_t kind = 0; kind < kNumWeightKinds; ++kind) {
    numbers.weights[kind] = numbers_of(operands.args.weights.*kWeightFields[kind].field);
    if (problem.attention.accumulate) numbers.grad_weights[kind] = numbers_of(before.of[kLayerGradWeights + kind]);
  }
  numbers.dropout_seed = operands.args.dropout_seed.value_or(0);
  numbers.dropout_offset = operands.args.dropout_offset;
  numbers.output_dropout_seed = operands.args.output_dropout_seed.value_or(0);
  numbers.output_dropout_offset = operands.args.output_dropout_offset;
  numbers.grad_out = numbers_of(operands.grad_out);
  return numbers;
}

// What one kernel computes on one number of threads, or why it cannot.
struct Contender {
  std::string kernel;  // "": the best
  const Threads* threads = nullptr;
  std::string refusal = {};
};

Status compute(const MhaProblem& problem, const MhaTruth& truth, Contender& contender, MhaJudge& judge) {
  PlanOptions options;
  options.kernel = contender.kernel;
  options.where.executor = contender.threads->executor;
  const auto made = layer(layer_desc(problem), options);
  if (!made.ok()) {
    contender.refusal = made.status().message();
    return {};
  }
  contender.kernel = made->kernel_name();
  const auto results = new_results(problem, *made);
  if (!results.ok()) return results.status();
  const auto calls = MhaCalls::create(problem, *made, truth.operands, *results);
  if (!calls.ok()) return calls.status();
  if (Status s = calls->run(problem); !s.ok()) return s;
  judge.add(truth.results, *results);
  return {};
}

// Of as many draws of the operands as the judge of so many rows takes.
Result<std::vector<MhaTruth>> mha_truths(const MhaProblem& problem, const Layer& plain) {
  const LayerDesc& desc = problem.layer;
  std::vector<MhaTruth> truths;
  MhaProblem drawn = problem;
  const int64_t rows = desc.batch * desc.beam * desc.num_heads * desc.seqlen_q;
  for (int64_t n = 0; n < num_draws(rows, testing::kLayerRows); ++n) {
    drawn.attention.seed = seed_of_draw(problem.attention.seed, n);
    auto truth = mha_truth(drawn, plain);
    if (!truth.ok()) return truth.status();
    truths.push_back(std::move(*truth));
  }
  return truths;
}

class Verification {
 public:
  Verification(const MhaVerification& how, bool list_all) : how_(how), findings_(list_all) {}

  Status add(const MhaProblem& problem) {
    PlanOptions options;
    options.kernel = "reference";  // which takes every layer
    const auto plain = layer(layer_desc(problem), options);
    if (!plain.ok()) return plain.status();
    const auto truths = mha_truths(problem, *plain);
    if (!truths.ok()) return truths.status();
    const std::string line = mha_line(problem);
    for (const std::string& kernel : how_.kernels) {
      for (const Threads& threads : how_.threads) {
        Contender contender{kernel, &threads};
        MhaJudge judge(problem);
        MhaProblem drawn = problem;  // what gradients are added to comes from the draw's seed too
        for (size_t n = 0; n < truths->size(); ++n) {
          drawn.attention.seed = seed_of_draw(problem.attention.seed, static_cast<int64_t>(n));
          if (Status s = compute(drawn, (*truths)[n], contender, judge); !s.ok()) return s;
        }
        count(line, contender, judge);
      }
    }
    return {};
  }

  int num_failed() const { return findings_.num_failed(); }

  Result<int> finish(int64_t count, const std::string& seeds) {
    if (!seeds.empty()) findings_.add_fact("seeds", seeds);
    return findings_.finish(fmt::format("{} layer{}", count, count == 1 ? "" : "s"), how_.format);
  }

 private:
  void count(const std::string& line, const Contender& contender, const MhaJudge& judge) {
    const int threads = contender.threads->count;
    if (!contender.refusal.empty()) return findings_.add_refused(line, contender.kernel, threads, contender.refusal);
    findings_.add(line, contender.kernel, threads, judge.verdicts(),
                  fmt::format("polyhead mha --verify {} --kernel {} --threads {}", line, contender.kernel, threads));
  }

  const MhaVerification& how_;
  Findings findings_;
};

}  // namespace

Result<MhaTruth> mha_truth(const MhaProblem& problem, const Layer& layer) {
  auto operands = random_operands(problem, layer);
  if (!operands.ok()) return operands.status();
  const auto before = new_results(problem, layer);
  if (!before.ok()) return before.status();
  MhaTruth truth;
  truth.operands = std::move(*operands);
  truth.numbers = layer_numbers(problem, truth.operands, *before);
  LayerDesc desc = layer_desc(problem);
  if (!problem.training) desc.attention.dropout_p = desc.output_dropout_p = 0;
  truth.results = layer_truth(desc, truth.numbers);
  return truth;
}

MhaJudge::MhaJudge(const MhaProblem& problem) {
  const LayerDesc& desc = problem.layer;
  rows_ = static_cast<double>(std::max<int64_t>(desc.batch * desc.beam * desc.seqlen_q * desc.num_heads, 1));
  const bool no_query = desc.query_proj_size > 0 && desc.query_size == 0 && !desc.query_bias;
  const bool no_key = desc.key_proj_size > 0 && desc.key_size == 0 && !desc.key_bias;
  one_rounding_ = problem.attention.desc.dtype == DType::kBFloat16 &&
                  (no_query || no_key || has_equal_weights(problem.attention.desc));
}

void MhaJudge::add(const LayerTruth& truth, const MhaResults& got) {
  for (size_t n = 0; n < kNumLayerResults; ++n) {
    const Tensor& tensor = got.of[n];
    if (!tensor.given()) continue;
    const char* name = kLayerResultNames[n];
    auto known = std::find_if(judged_.begin(), judged_.end(), [&](const Errors& e) { return e.name() == name; });
    if (known == judged_.end()) {
      const auto elements = static_cast<double>(tensor.num_elements());
      Bound bound = layer_bound(name);
      if (n >= kLayerGradQuery && one_rounding_) bound = layer_bound(name, elements);
      // Few rows give to all elements of a weight's gradient, and each errs once, by its L and its sum of dO * O.
      const bool of_weight = n >= kLayerGradWeights && n < kLayerGradCaptures;
      if (of_weight && elements / rows_ > bound.dependent) bound = layer_bound(name, elements / rows_);
      judged_.emplace_back(name, bound);
      known = judged_.end() - 1;
    }
    const std::vector<double> values = element_values(tensor);
    known->add({tensor.dtype,
                {tensor.dims, static_cast<size_t>(tensor.ndim)},
                values,
                truth.exact[n].values,
                truth.yardstick[n].values,
                truth.magnitude[n].values});
  }
}

std::vector<Verdict> MhaJudge::verdicts() const {
  std::vector<Verdict> verdicts;
  for (const Errors& errors : judged_) verdicts.push_back(verdict_of(errors));
  return verdicts;
}

Result<int> verify_mha(const MhaProblem& problem, const MhaVerification& how) {
  Verification verification(how, /*list_all=*/true);
  if (Status s = verification.add(problem); !s.ok()) return s;
  return verification.finish(1, "");
}

Result<int> verify_random_mha(uint64_t seed, int64_t count, const MhaVerification& how) {
  constexpr int kMaxFailures = 20;
  Verification verification(how, /*list_all=*/false);
  Progress progress(count);
  int64_t done = 0;
  for (; done < count && verification.num_failed() < kMaxFailures; ++done) {
    const MhaProblem problem = random_mha(seed + static_cast<uint64_t>(done));
    progress.show(done, mha_line(problem));
    if (Status s = verification.add(problem); !s.ok()) {
      return Status(s.code(), fmt::format("random layer '{}': {}", mha_line(problem), s.message()));
    }
  }
  progress.hide();
  if (done < count) fmt::print(stderr, "stopped after {} failures\n", verification.num_failed());
  return verification.finish(done, fmt::format("{}..{}", seed, seed + static_cast<uint64_t>(done) - 1));
}

}  // namespace polyhead::tools
