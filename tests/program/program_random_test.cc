// Random programs on random problems: value and gradients on a kernel against the definition in float64, the same bits on
// another number of threads, and what is told of blocks against all of their pairs.
//
// POLYHEAD_FUZZ_RUNS=50000 program_random_test runs more of them, POLYHEAD_FUZZ_FIRST=N begins with the N-th: what a
// failure prints.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "calls.h"
#include "contract/program_call.h"
#include "kernels_to_test.h"
#include "random_program.h"
#include "reference/attention.h"
#include "sanitizer.h"
#include "setting.h"

namespace polyhead::testing {
namespace {

Shape random_shape(Random& random) {
  Shape shape;
  shape.heads_kv = random.integer(1, 2);
  shape.sizes.heads = shape.heads_kv * random.integer(1, 2);
  shape.sizes.batch = random.integer(1, 2);
  const auto length = [&] {
    static constexpr int64_t kEdges[] = {1, 7, 8, 63, 64, 65, 127, 128, 129};
    return random.chance(0.3) ? kEdges[random.below(9)] : random.integer(1, random.chance(0.1) ? 150 : 30);
  };
  shape.sizes.seqlen_q = length(), shape.sizes.seqlen_k = length();
  if (random.chance(0.02)) {  // decoding, in several chunks of keys
    shape.sizes.seqlen_q = random.integer(1, 3), shape.sizes.seqlen_k = random.integer(500, 1100);
  }
  if (shape.sizes.seqlen_q * shape.sizes.seqlen_k > 4000) shape.sizes.batch = shape.sizes.heads = shape.heads_kv = 1;
  static constexpr int64_t kDims[] = {3, 8, 16, 20};
  shape.dim = kDims[random.below(4)];
  static constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat32, DType::kFloat32, DType::kBFloat16,
                                      DType::kFloat16};
  shape.dtype = kDTypes[random.below(5)];
  shape.with_options = shape.sizes.seqlen_q == shape.sizes.seqlen_k && random.chance(0.2);
  return shape;
}

// By how much the results in float64 move when every number that comes in is off by its last bit in float32: what no
// arithmetic in float32 can be better than.
std::vector<double> sensitivity(const ProgramCall& call, const ProgramResults& exact, Random& random) {
  std::vector<double> moved(exact.all().size());
  ProgramCall other = in_double(call);
  const auto move = [&](Array& a) {
    if (!a.given() || !is_float_dtype(a.dtype)) return;
    for (int64_t i = 0; i < a.size(); ++i) a.set(i, a.at(i) * (1 + 0x1p-23 * random.normal()));
  };
  for (Array* a : {&other.in.query, &other.in.key, &other.in.value, &other.grad_out}) move(*a);
  for (Array& a : other.captures) move(a);
  const ProgramResults results = by_kernel(other, "reference", executor(1));
  for (size_t i = 0; i < moved.size(); ++i) moved[i] = largest_difference(*results.all()[i], *exact.all()[i]);
  return moved;
}

void judge(const ProgramCall& call, const ProgramResults& got, Random& random) {
  const ProgramResults exact = by_kernel(in_double(call), "reference", executor(1)), naive = in_float(call);
  std::vector<double> moved = sensitivity(call, exact, random);
  const std::vector<double> terms = largest_terms(call);
  const auto g = got.all(), e = exact.all(), n = naive.all();
  for (size_t i = 0; i < g.size(); ++i) {
    double magnitude = 0;
    const double error = largest_difference(*g[i], *e[i], &magnitude), by_naive = largest_difference(*n[i], *e[i]);
    const auto bound = [&] {
      const double by_chance = 8 * moved[i] + 4 * epsilon(DType::kFloat32) * terms[i];
      return (i < 2 ? 2 : 3) * by_naive + 4 * epsilon(g[i]->dtype) * std::max(magnitude, 1e-3) + by_chance;
    };
    // Gradients jump where a score is as large as what it is compared with: not every draw goes to the other side.
    for (int draw = 0; draw < 15 && error > bound(); ++draw) {
      const std::vector<double> more = sensitivity(call, exact, random);
      for (size_t k = 0; k < moved.size(); ++k) moved[k] = std::max(moved[k], more[k]);
    }
    EXPECT_LE(error, bound()) << ProgramResults::name(i) << ", the naive formula errs by " << by_naive
                              << ", what comes in by " << moved[i];
  }
}

// What bounds tell of random blocks.
void expect_sound_blocks(const ProgramCall& call, Random& random) {
  if (call.desc.program->mask() < 0) return;
  const AttentionDesc& d = call.desc;
  std::vector<Tensor> tensors;
  for (const Array& a : call.captures) tensors.push_back(view(a));
  ForwardArgs args;
  args.captures = tensors;
  const program::Call of = program_call(d, args);
  for (int n = 0; n < 6; ++n) {
    const int64_t b = random.below(d.batch), h = random.below(d.num_heads);
    const int64_t q = random.below(d.seqlen_q), k = random.below(d.seqlen_k);
    const int64_t last_q = std::min(q + random.below(64), d.seqlen_q - 1);
    const int64_t last_k = std::min(k + random.below(128), d.seqlen_k - 1);
    const program::Seen told = program::seen(of, {{b, b}, {h, h}, {q, last_q}, {k, last_k}, {0, 0}});
    int64_t shown = 0;
    for (int64_t i = q; i <= last_q; ++i) {
      for (int64_t j = k; j <= last_k; ++j) shown += program::shows(of, {b, h, 0, i, j, i - j}) ? 1 : 0;
    }
    EXPECT_FALSE(told == program::Seen::kNone && shown > 0) << "queries from " << q << ", keys from " << k;
    EXPECT_FALSE(told == program::Seen::kAll && shown < (last_q - q + 1) * (last_k - k + 1))
        << "queries from " << q << ", keys from " << k;
  }
}

const Kernel* random_kernel(Random& random, const AttentionDesc& desc) {
  const auto kernels = kernels_to_test();
  for (int tries = 0; tries < 100; ++tries) {
    const Kernel* kernel = kernels[static_cast<size_t>(random.below(static_cast<int64_t>(kernels.size())))];
    if (kernel != &kReference && kernel->why_not(desc).empty()) return kernel;
  }
  return nullptr;
}

// Longer than programs may be, or with a tensor in a value that nothing uses: rightly refused, another is drawn.
bool is_too_much(const Result<SharedProgram>& parsed) {
  const std::string sentence = parsed.status().message();
  return sentence.find("the program has more than") == 0 ||
         sentence.find(", but neither score nor mask read it") < 200 ||
         sentence.find("the program and its gradients have") == 0;
}

void run_one(int64_t number) {
  Random random(static_cast<uint64_t>(number), 77);
  const Shape shape = random_shape(random);
  NamedProgram program = random_program(random, shape.sizes);
  Result<SharedProgram> parsed = parse_program(program.text);
  while (is_too_much(parsed)) {
    program = random_program(random, shape.sizes);
    parsed = parse_program(program.text);
  }
  ASSERT_TRUE(parsed.ok()) << parsed.status().message() << "\n" << program.text;
  ProgramCall call = make_call(program, shape, static_cast<uint64_t>(number));
  if (setting("POLYHEAD_FUZZ_RUNS", 0) == 1) std::printf("%s\n", program.text.c_str()), std::fflush(stdout);
  const Kernel* kernel = random_kernel(random, call.desc);
  ASSERT_NE(kernel, nullptr);
  SCOPED_TRACE("POLYHEAD_FUZZ_RUNS=1 POLYHEAD_FUZZ_FIRST=" + std::to_string(number) + " program_random_test: " +
               kernel->name + ", " + std::to_string(shape.sizes.batch) + "x" + std::to_string(shape.sizes.heads) + "x" +
               std::to_string(shape.sizes.seqlen_q) + "x" + std::to_string(shape.sizes.seqlen_k) + "x" +
               std::to_string(shape.dim) + ", dtype " + std::to_string(static_cast<int>(shape.dtype)) +
               (shape.with_options ? ", with options" : "") + "\n" + program.text);
  expect_sound_blocks(call, random);
  const auto again = parse_program((*parsed)->text());
  EXPECT_TRUE(again.ok() && *again == *parsed) << "its canonical text is another program: " << (*parsed)->text();
  if (!memory_alone()) give_exact_out(call);
  const ProgramResults got = by_kernel(call, kernel->name, executor(1));
  const ProgramResults on_three = by_kernel(call, kernel->name, executor(3));
  for (size_t i = 0; i < got.all().size(); ++i) {
    EXPECT_EQ(difference(ProgramResults::name(i).c_str(), *got.all()[i], *on_three.all()[i]), "") << "on 3 threads";
  }
  if (memory_alone()) return;
  judge(call, got, random);
}

class RandomPrograms : public ::testing::TestWithParam<int> {};
constexpr int kParts = 4;  // which ctest runs beside each other

TEST_P(RandomPrograms, AgreeWithTheDefinition) {
  const int64_t all = setting("POLYHEAD_FUZZ_RUNS", memory_alone() ? 160 : 2000);
  const int64_t first = setting("POLYHEAD_FUZZ_FIRST", 0) + all * GetParam() / kParts;
  const int64_t runs = all * (GetParam() + 1) / kParts - all * GetParam() / kParts;
  for (int64_t n = first; n < first + runs && !HasFatalFailure(); ++n) {
    run_one(n);
    if (runs > 10000 && (n - first) % 1000 == 999) std::printf("%lld\n", static_cast<long long>(n + 1 - first));
  }
}

INSTANTIATE_TEST_SUITE_P(Part, RandomPrograms, ::testing::Range(0, kParts));

}  // namespace
}  // namespace polyhead::testing
