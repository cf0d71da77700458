// merge and merge_backward on numbers of their own: the formula, the laws, what they refuse. Parts that attention
// computed: merge_attention_test.cc.
#include "polyhead/merge.h"

#include <gtest/gtest.h>

#include <cmath>

#include "testing/call.h"
#include "testing/guard.h"

namespace polyhead::testing {
namespace {

const double kInf = HUGE_VAL, kNan = std::nan("");

struct Arrays {
  Array out, logsumexp;
};

Partial views(const Arrays& a) { return {view(a.out), view(a.logsumexp)}; }

std::vector<Partial> views(const std::vector<Arrays>& all) {
  std::vector<Partial> partials;
  for (const Arrays& a : all) partials.push_back(views(a));
  return partials;
}

struct Sizes {
  int64_t batch, seqlen_q, num_heads, head_dim_v;
  bool packed = false;

  std::vector<int64_t> out() const {
    if (packed) return {seqlen_q, num_heads, head_dim_v};
    return {batch, seqlen_q, num_heads, head_dim_v};
  }
  std::vector<int64_t> logsumexp() const {
    if (packed) return {num_heads, seqlen_q};
    return {batch, num_heads, seqlen_q};
  }
  // Element of logsumexp that belongs to element n of out.
  int64_t row(int64_t n) const {
    const int64_t h = n / head_dim_v % num_heads, i = n / head_dim_v / num_heads % seqlen_q;
    return (n / head_dim_v / num_heads / seqlen_q * num_heads + h) * seqlen_q + i;
  }
};
constexpr Sizes kSizes{2, 7, 3, 10};

DType sums_of(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

Arrays empty(const Sizes& s, DType dtype) { return {Array(dtype, s.out()), Array(sums_of(dtype), s.logsumexp())}; }

Arrays random_part(const Sizes& s, DType dtype, uint64_t seed) {
  Arrays a = empty(s, dtype);
  Random random(seed);
  for (int64_t n = 0; n < a.out.size(); ++n) a.out.set(n, random.normal());
  for (int64_t n = 0; n < a.logsumexp.size(); ++n) a.logsumexp.set(n, 3 * random.normal());
  return a;
}

// Row r of a part sees no key; its out is filled with `value`.
void blind(Arrays* a, const Sizes& s, int64_t r, double value) {
  a->logsumexp.set(r, -kInf);
  for (int64_t n = 0; n < a->out.size(); ++n) {
    if (s.row(n) == r) a->out.set(n, value);
  }
}

// Random parts, of whose rows every third is blind in each part, and the first one in all.
std::vector<Arrays> random_parts(const Sizes& s, DType dtype, size_t count, uint64_t seed) {
  std::vector<Arrays> parts;
  for (size_t k = 0; k < count; ++k) {
    parts.push_back(random_part(s, dtype, seed + k));
    for (int64_t r = 0; r < parts[k].logsumexp.size(); ++r) {
      if (r == 0 || (static_cast<size_t>(r) + k) % 3 == 0) blind(&parts[k], s, r, kNan);
    }
  }
  return parts;
}

Arrays merged(const std::vector<Arrays>& parts, const Sizes& s, int threads = 1) {
  Arrays m = empty(s, parts[0].out.dtype);
  std::fill(m.out.bytes.begin(), m.out.bytes.end(), uint8_t{0xff});
  std::fill(m.logsumexp.bytes.begin(), m.logsumexp.bytes.end(), uint8_t{0xff});
  EXPECT_EQ(merge(views(parts), views(m), &executor(threads)).message(), "");
  return m;
}

// The formula, element by element, in float64.
Arrays formula(const std::vector<Arrays>& parts, const Sizes& s) {
  Arrays m = empty(s, DType::kFloat64);
  for (int64_t r = 0; r < m.logsumexp.size(); ++r) {
    double sum = 0;
    for (const Arrays& part : parts) sum += std::exp(part.logsumexp.at(r));
    m.logsumexp.set(r, std::log(sum));
  }
  for (int64_t n = 0; n < m.out.size(); ++n) {
    double sum = 0;
    for (const Arrays& part : parts) {
      const double L_i = part.logsumexp.at(s.row(n));
      if (L_i != -kInf) sum += std::exp(L_i - m.logsumexp.at(s.row(n))) * part.out.at(n);
    }
    m.out.set(n, sum);
  }
  return m;
}

void expect_near(const Array& got, const Array& want, double tolerance, const char* name) {
  ASSERT_EQ(got.dims, want.dims);
  for (int64_t n = 0; n < got.size(); ++n) {
    if (got.at(n) == want.at(n)) continue;  // -inf too
    ASSERT_NEAR(got.at(n), want.at(n), tolerance * (1 + std::fabs(want.at(n)))) << name << " element " << n;
  }
}

// Roundings of the result and of the sums.
double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 1e-15;
    case DType::kFloat32: return 5e-7;
    case DType::kFloat16: return 0x1p-11 + 5e-7;
    default: return 0x1p-8 + 5e-7;
  }
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

TEST(Merge, IsTheFormula) {
  for (const DType dtype : kDTypes) {
    for (const Sizes& s : {kSizes, Sizes{1, 9, 4, 600}, Sizes{1, 11, 5, 3, true}, Sizes{1, 1, 1, 1}}) {
      for (const size_t count : {1, 2, 3, 8}) {
        const std::vector<Arrays> parts = random_parts(s, dtype, count, 1 + count);
        const Arrays got = merged(parts, s), want = formula(parts, s);
        expect_near(got.out, want.out, tolerance_of(dtype), "out");
        expect_near(got.logsumexp, want.logsumexp, tolerance_of(sums_of(dtype)), "logsumexp");
      }
    }
  }
}

TEST(Merge, AnEmptyPartIsTheIdentity) {
  for (const DType dtype : kDTypes) {
    std::vector<Arrays> parts = random_parts(kSizes, dtype, 3, 5);
    const Arrays want = merged(parts, kSizes);
    Arrays nothing = empty(kSizes, dtype);
    for (int64_t r = 0; r < nothing.logsumexp.size(); ++r) blind(&nothing, kSizes, r, r % 2 == 0 ? kNan : kInf);
    for (const size_t at : {3, 1, 0}) parts.insert(parts.begin() + static_cast<ptrdiff_t>(at), nothing);
    const Arrays got = merged(parts, kSizes);
    EXPECT_EQ(difference("out", got.out, want.out), "");
    EXPECT_EQ(difference("logsumexp", got.logsumexp, want.logsumexp), "");

    const Arrays one = random_part(kSizes, dtype, 9);
    EXPECT_EQ(difference("out", merged({nothing, one}, kSizes).out, one.out), "");
    EXPECT_EQ(difference("logsumexp", merged({one, nothing}, kSizes).logsumexp, one.logsumexp), "");

    const Arrays none = merged({nothing, nothing}, kSizes), zeros = empty(kSizes, dtype);
    EXPECT_EQ(difference("out", none.out, zeros.out), "");  // +0
    for (int64_t r = 0; r < none.logsumexp.size(); ++r) EXPECT_EQ(none.logsumexp.at(r), -kInf);
  }
}

TEST(Merge, VisibleNanShows) {
  for (const DType dtype : kDTypes) {
    std::vector<Arrays> parts{random_part(kSizes, dtype, 1), random_part(kSizes, dtype, 2)};
    constexpr int64_t kElement = 34, kRow = 3;
    ASSERT_NE(kSizes.row(kElement), kRow);
    const Arrays clean = merged(parts, kSizes);
    parts[1].out.set(kElement, kNan);
    parts[1].logsumexp.set(kSizes.row(kElement), -300);  // its weight underflows
    parts[0].logsumexp.set(kRow, kNan);
    constexpr int64_t kAlone = 9;  // NaN where no other part sees a key
    ASSERT_NE(kSizes.row(kElement), kAlone);
    parts[1].logsumexp.set(kAlone, kNan);
    blind(&parts[0], kSizes, kAlone, 0);
    const Arrays got = merged(parts, kSizes);
    for (int64_t n = 0; n < got.out.size(); ++n) {
      const bool poisoned = n == kElement || kSizes.row(n) == kRow || kSizes.row(n) == kAlone;
      EXPECT_EQ(std::isnan(got.out.at(n)), poisoned) << n;
      const bool unchanged = !poisoned && kSizes.row(n) != kSizes.row(kElement);
      EXPECT_TRUE(!unchanged || got.out.at(n) == clean.out.at(n)) << n;
    }
    for (int64_t r = 0; r < got.logsumexp.size(); ++r) {
      EXPECT_EQ(std::isnan(got.logsumexp.at(r)), r == kRow || r == kAlone);
    }
  }
}

TEST(Merge, LogsumexpFarFromZero) {
  const Sizes s{1, 1, 1, 1};
  for (const double shift : {-1e5, -200.0, 200.0, 1e5}) {  // exp(L) is 0 or inf in either precision
    std::vector<Arrays> parts{random_part(s, DType::kFloat64, 1), random_part(s, DType::kFloat64, 2)};
    for (const int part : {0, 1}) {
      parts[part].out.set(0, part);
      parts[part].logsumexp.set(0, shift + part);
    }
    const Arrays m = merged(parts, s);
    EXPECT_NEAR(m.out.at(0), 1 / (1 + std::exp(-1)), 1e-15);
    EXPECT_NEAR(m.logsumexp.at(0), shift + std::log(1 + std::exp(1)), 1e-15 * std::fabs(shift));
  }
}

TEST(Merge, IsAssociative) {
  for (const DType dtype : kDTypes) {
    const std::vector<Arrays> p = random_parts(kSizes, dtype, 4, 20);
    const Arrays want = merged(p, kSizes);
    const Arrays left = merged({merged({merged({p[0], p[1]}, kSizes), p[2]}, kSizes), p[3]}, kSizes);
    const Arrays right = merged({p[0], merged({p[1], merged({p[2], p[3]}, kSizes)}, kSizes)}, kSizes);
    const Arrays tree = merged({merged({p[3], p[1]}, kSizes), merged({p[2], p[0]}, kSizes)}, kSizes);
    for (const Arrays* got : {&left, &right, &tree}) {
      expect_near(got->out, want.out, 3 * tolerance_of(dtype), "out");  // each step rounds to the dtype
      expect_near(got->logsumexp, want.logsumexp, 3 * tolerance_of(sums_of(dtype)), "logsumexp");
    }
  }
}

// Random layouts in guarded memory, in place or not, with any number of threads: the same bits.
TEST(Merge, LayoutThreadsAndPlaceChangeNoBit) {
  for (const DType dtype : kDTypes) {
    for (const bool packed : {false, true}) {
      const Sizes s{packed ? 1 : 3, 41, 6, 34, packed};
      const std::vector<Arrays> parts = random_parts(s, dtype, 3, 30);
      const Arrays want = merged(parts, s);
      for (const int threads : {0, 1, 2, 3, 7}) {
        for (int in_place = -1; in_place < 3; ++in_place) {
          for (const Guard guard : {Guard::kStart, Guard::kEnd}) {
            const RunOptions options{
                .layout = Layout::kMixed, .layout_seed = static_cast<uint64_t>(threads + 9), .guard = guard};
            PlacedInputs inputs(options);
            std::vector<Partial> views;
            std::vector<std::string> faults;
            const auto output = [&](const Array& like, bool filled) {
              return filled ? Placed::accumulator(like, inputs.next_layout(), guard)
                            : Placed::output(like.dtype, like.dims, inputs.next_layout(), guard);
            };
            const Arrays& like = parts[in_place < 0 ? 0 : static_cast<size_t>(in_place)];
            const Placed out = output(like.out, in_place >= 0), logsumexp = output(like.logsumexp, in_place >= 0);
            const Partial merged{out.tensor(), logsumexp.tensor()};
            for (int k = 0; k < 3; ++k) {
              const Arrays& part = parts[static_cast<size_t>(k)];
              views.push_back(k == in_place ? merged
                                            : Partial{inputs.add("out", part.out), inputs.add("lse", part.logsumexp)});
            }
            ASSERT_EQ(merge(views, merged, &executor(threads)).message(), "");
            EXPECT_EQ(difference("out", out.result("out", &faults), want.out), "");
            EXPECT_EQ(difference("logsumexp", logsumexp.result("logsumexp", &faults), want.logsumexp), "");
            inputs.check_unchanged(&faults);
            EXPECT_EQ(faults, std::vector<std::string>());
          }
        }
      }
    }
  }
}

TEST(Merge, WithoutLogsumexpAndOfNothing) {
  const std::vector<Arrays> parts = random_parts(kSizes, DType::kFloat32, 2, 3);
  const Arrays want = merged(parts, kSizes);
  const Array out(DType::kFloat32, kSizes.out());
  EXPECT_EQ(merge(views(parts), {view(out), {}}).message(), "");
  EXPECT_EQ(difference("out", out, want.out), "");
  for (int zero = 0; zero < 8; ++zero) {
    for (const bool packed : {false, true}) {
      const Sizes s{packed ? 1 : 2, zero & 1 ? 0 : 3, zero & 2 ? 0 : 2, zero & 4 ? 0 : 5, packed};
      const std::vector<Arrays> none = random_parts(s, DType::kBFloat16, 2, 4);
      const Arrays m = merged(none, s);
      for (int64_t r = 0; r < m.logsumexp.size(); ++r) EXPECT_FALSE(std::isnan(m.logsumexp.at(r)));
      const std::vector<Arrays> grads(2, empty(s, DType::kBFloat16));
      EXPECT_EQ(merge_backward(views(none), views(m), views(m), views(grads)).message(), "");
    }
  }
}

// Loss = <out, g> + <logsumexp, h>.
double loss(const std::vector<Arrays>& parts, const Arrays& grad) {
  const Arrays m = merged(parts, kSizes);
  double sum = 0;
  for (int64_t n = 0; n < m.out.size(); ++n) sum += m.out.at(n) * grad.out.at(n);
  for (int64_t r = 0; r < m.logsumexp.size(); ++r) {
    if (m.logsumexp.at(r) != -kInf) sum += m.logsumexp.at(r) * grad.logsumexp.at(r);
  }
  return sum;
}

std::vector<Arrays> backward(const std::vector<Arrays>& parts, const Arrays& merged, const Partial& grad,
                             int threads = 1) {
  std::vector<Arrays> grads = parts;
  for (Arrays& a : grads) {
    std::fill(a.out.bytes.begin(), a.out.bytes.end(), uint8_t{0xff});
    std::fill(a.logsumexp.bytes.begin(), a.logsumexp.bytes.end(), uint8_t{0xff});
  }
  EXPECT_EQ(merge_backward(views(parts), views(merged), grad, views(grads), &executor(threads)).message(), "");
  return grads;
}

TEST(MergeBackward, MatchesFiniteDifferences) {
  std::vector<Arrays> parts = random_parts(kSizes, DType::kFloat64, 3, 40);
  const Arrays grad = random_part(kSizes, DType::kFloat64, 50);
  const std::vector<Arrays> got = backward(parts, merged(parts, kSizes), views(grad));
  constexpr double kStep = 1e-5;
  int64_t hidden = 0;
  for (size_t k = 0; k < parts.size(); ++k) {
    for (const auto& [field, name] : {std::pair(&Arrays::out, "out"), std::pair(&Arrays::logsumexp, "logsumexp")}) {
      Array& x = parts[k].*field;
      for (int64_t n = 0; n < x.size(); ++n) {
        const int64_t row = field == &Arrays::out ? kSizes.row(n) : n;
        const double before = x.at(n);
        if (parts[k].logsumexp.at(row) == -kInf) {
          EXPECT_EQ((got[k].*field).at(n), 0);
          EXPECT_FALSE(std::signbit((got[k].*field).at(n)));
          ++hidden;
          continue;
        }
        x.set(n, before + kStep);
        const double up = loss(parts, grad);
        x.set(n, before - kStep);
        const double down = loss(parts, grad);
        x.set(n, before);
        ASSERT_NEAR((got[k].*field).at(n), (up - down) / (2 * kStep), 1e-8) << "part " << k << " " << name << " " << n;
      }
    }
  }
  EXPECT_GT(hidden, 100);
}

TEST(MergeBackward, AMissingGradientOfLogsumexpIsZero) {
  for (const DType dtype : kDTypes) {
    const std::vector<Arrays> parts = random_parts(kSizes, dtype, 3, 60);
    const Arrays m = merged(parts, kSizes);
    Arrays grad = random_part(kSizes, dtype, 61);
    const std::vector<Arrays> got = backward(parts, m, {view(grad.out), {}});
    grad.logsumexp = Array(grad.logsumexp.dtype, grad.logsumexp.dims);
    const std::vector<Arrays> want = backward(parts, m, views(grad));
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(difference("out", got[k].out, want[k].out), "");
      EXPECT_EQ(difference("logsumexp", got[k].logsumexp, want[k].logsumexp), "");
    }
  }
}

// Any subset of the gradients, of any subset of the parts, with any number of threads and in any layout: the same bits.
TEST(MergeBackward, SubsetsThreadsAndLayoutChangeNoBit) {
  const Sizes s{2, 23, 3, 33};
  for (const DType dtype : kDTypes) {
    const std::vector<Arrays> parts = random_parts(s, dtype, 3, 70);
    const Arrays m = merged(parts, s), grad = random_part(s, dtype, 71);
    const std::vector<Arrays> want = backward(parts, m, views(grad));
    for (unsigned subset = 1; subset < 64; ++subset) {
      const int threads = std::vector{0, 1, 2, 3, 7}[subset % 5];
      const RunOptions options{.layout = Layout::kMixed, .layout_seed = subset};
      PlacedInputs inputs(options);
      std::vector<Placed> placed;
      std::vector<Partial> views, grads;
      for (size_t k = 0; k < 3; ++k) {
        if (subset >> 2 * k & 3) views.push_back({inputs.add("O", parts[k].out), inputs.add("L", parts[k].logsumexp)});
        for (const Array* like : {&want[k].out, &want[k].logsumexp}) {
          const bool asked = subset >> (2 * k + (like == &want[k].logsumexp)) & 1;
          placed.push_back(Placed::output(like->dtype, asked ? like->dims : std::vector<int64_t>(),
                                          inputs.next_layout(), options.guard));
        }
        if (subset >> 2 * k & 3) grads.push_back({placed[2 * k].tensor(), placed[2 * k + 1].tensor()});
      }
      const Partial merged{inputs.add("O", m.out), inputs.add("L", m.logsumexp)};
      const Partial grad_merged{inputs.add("dO", grad.out), inputs.add("dL", grad.logsumexp)};
      ASSERT_EQ(merge_backward(views, merged, grad_merged, grads, &executor(threads)).message(), "");
      std::vector<std::string> faults;
      for (size_t k = 0; k < 3; ++k) {
        const Array out = placed[2 * k].result("out", &faults), sums = placed[2 * k + 1].result("lse", &faults);
        EXPECT_EQ(out.given() ? difference("out", out, want[k].out) : "", "") << subset;
        EXPECT_EQ(sums.given() ? difference("logsumexp", sums, want[k].logsumexp) : "", "") << subset;
      }
      inputs.check_unchanged(&faults);
      EXPECT_EQ(faults, std::vector<std::string>());
    }
  }
}

struct Tensors {
  std::vector<Partial> parts;
  Partial merged, grad_merged;
  std::vector<Partial> grad_parts;
};

struct BadCall {
  void (*change)(Tensors& t);
  const char* message;
};

constexpr char kReach[] = "parts[1].logsumexp reaches beyond the address space, by its strides";

const BadCall kBadMerges[] = {
    {[](auto& t) { t.parts.clear(); }, "parts is empty, takes one or more"},
    {[](auto& t) { t.parts[0].out = {}; }, "parts[0].out is missing"},
    {[](auto& t) { t.parts[0].out.dtype = DType::kInt32; },
     "parts[0].out is int32, takes float32, bfloat16, float16 or float64"},
    {[](auto& t) { t.parts[0].out.ndim = 2; },
     "parts[0].out has 2 dims, expected 4: [batch, seqlen_q, num_heads, head_dim_v], or 3: [total_q, num_heads, "
     "head_dim_v]"},
    {[](auto& t) { t.parts[0].out.dims[2] = -3; }, "parts[0].out dim 2 is -3, must not be negative"},
    {[](auto& t) { t.parts[0].logsumexp = {}; }, "parts[0].logsumexp is missing"},
    {[](auto& t) { t.parts[2].out = {}; }, "parts[2].out is missing"},
    {[](auto& t) { t.parts[1].out.dtype = DType::kFloat64; }, "parts[1].out is float64, expected float32"},
    {[](auto& t) { t.parts[1].out.dims[1] = 8; }, "parts[1].out dim 1 is 8, expected seqlen_q 7"},
    {[](auto& t) { t.parts[1].out.device = Device::kCuda; },
     "parts[1].out is not on the CPU, where this call computes"},
    {[](auto& t) { t.parts[1].out.ndim = 3; },
     "parts[1].out has 3 dims, expected 4: [batch, seqlen_q, num_heads, head_dim_v]"},
    {[](auto& t) { t.parts[1].out.data = nullptr; }, "parts[1].out is null, has 420 elements"},
    {[](auto& t) { t.parts[1].logsumexp.dtype = DType::kFloat64; }, "parts[1].logsumexp is float64, expected float32"},
    {[](auto& t) { t.parts[1].logsumexp.dims[1] = 2; }, "parts[1].logsumexp dim 1 is 2, expected num_heads 3"},
    {[](auto& t) { t.parts[1].logsumexp.strides[0] = INT64_MAX; }, kReach},
    {[](auto& t) { t.merged.out = {}; }, "merged.out is missing"},
    {[](auto& t) { t.merged.out.dims[3] = 9; }, "merged.out dim 3 is 9, expected head_dim_v 10"},
    {[](auto& t) { t.merged.logsumexp.ndim = 2; },
     "merged.logsumexp has 2 dims, expected 3: [batch, num_heads, seqlen_q]"},
    {[](auto& t) { t.merged.out.data = static_cast<char*>(t.merged.out.data) + 2; },
     "merged.out is not aligned to its elements of 4 bytes"},
    {[](auto& t) { t.merged.out.strides[1] = -30; },
     "merged.out has stride -30 in dim 1, an output's must not be negative"},
    {[](auto& t) { t.merged.logsumexp.strides[2] = 0; },
     "merged.logsumexp overlaps itself: two indices name one element"},
    {[](auto& t) { t.merged.logsumexp.data = t.merged.out.data; }, "merged.logsumexp overlaps merged.out"},
    {[](auto& t) { t.merged.out.data = static_cast<float*>(t.parts[2].out.data) + 1; },
     "merged.out overlaps parts[2].out"},
    {[](auto& t) {
       t.merged.out.data = t.parts[1].out.data;
       std::swap(t.merged.out.strides[1], t.merged.out.strides[2]);
       t.merged.out.strides[2] = 70;
     },
     "merged.out overlaps parts[1].out"},
    {[](auto& t) { t.parts[1].logsumexp.data = t.merged.out.data; }, "merged.out overlaps parts[1].logsumexp"},
    {[](auto& t) { t.merged.logsumexp.data = t.parts[0].out.data; }, "merged.logsumexp overlaps parts[0].out"},
};

const BadCall kBadBackwards[] = {
    {[](auto& t) { t.parts.clear(); }, "parts is empty, takes one or more"},
    {[](auto& t) { t.grad_parts.pop_back(); }, "grad_parts has 2 elements, expected as many as parts: 3"},
    {[](auto& t) { t.parts[2].out = {}; }, "parts[2].out is missing"},
    {[](auto& t) { t.merged.out = {}; }, "merged.out is missing"},
    {[](auto& t) { t.merged.logsumexp = {}; }, "merged.logsumexp is missing"},
    {[](auto& t) { t.grad_merged.out = {}; }, "grad_merged.out is missing"},
    {[](auto& t) { t.grad_merged.out.dtype = DType::kFloat64; }, "grad_merged.out is float64, expected float32"},
    {[](auto& t) { t.grad_merged.logsumexp.dims[0] = 1; }, "grad_merged.logsumexp dim 0 is 1, expected batch 2"},
    {[](auto& t) { t.grad_parts[1].out.dims[0] = 1; }, "grad_parts[1].out dim 0 is 1, expected batch 2"},
    {[](auto& t) { t.grad_parts[1].logsumexp.dtype = DType::kBool; },
     "grad_parts[1].logsumexp is bool, expected float32"},
    {[](auto& t) { t.grad_parts[1].out.strides[3] = 0; },
     "grad_parts[1].out overlaps itself: two indices name one element"},
    {[](auto& t) { t.grad_parts[1].out.data = t.parts[1].out.data; }, "grad_parts[1].out overlaps parts[1].out"},
    {[](auto& t) { t.grad_parts[1].out.data = t.merged.out.data; }, "grad_parts[1].out overlaps merged.out"},
    {[](auto& t) { t.grad_parts[0].out.data = t.grad_merged.out.data; }, "grad_parts[0].out overlaps grad_merged.out"},
    {[](auto& t) { t.grad_parts[2].logsumexp.data = t.grad_parts[0].out.data; },
     "grad_parts[2].logsumexp overlaps grad_parts[0].out"},
    {[](auto& t) { t.grad_parts[1].logsumexp.data = t.grad_parts[1].out.data; },
     "grad_parts[1].out overlaps grad_parts[1].logsumexp"},
    {[](auto& t) { t.grad_parts.assign(3, {}); },
     "no gradient is asked for: give the out or logsumexp of one of grad_parts"},
};

TEST(MergeErrors, EachNamesTheArgumentAndNoOutputIsTouched) {
  const std::vector<Arrays> parts = random_parts(kSizes, DType::kFloat32, 3, 80);
  const Arrays m = merged(parts, kSizes), grad = random_part(kSizes, DType::kFloat32, 81);
  const auto expect = [&](const BadCall& bad, bool is_backward) {
    // Copies, so that what a wrong call writes shows.
    std::vector<Arrays> arrays = parts;
    arrays.insert(arrays.end(), {m, grad, parts[0], parts[1], parts[2]});
    const std::vector<Arrays> before = arrays;
    const std::vector<Partial> all = views(arrays);
    Tensors t{{all.begin(), all.begin() + 3}, all[3], all[4], {all.begin() + 5, all.end()}};
    bad.change(t);
    const Status status =
        is_backward ? merge_backward(t.parts, t.merged, t.grad_merged, t.grad_parts) : merge(t.parts, t.merged);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(status.message(), bad.message);
    for (size_t k = 0; k < arrays.size(); ++k) {
      EXPECT_EQ(arrays[k].out, before[k].out) << bad.message;
      EXPECT_EQ(arrays[k].logsumexp, before[k].logsumexp) << bad.message;
    }
  };
  for (const BadCall& bad : kBadMerges) expect(bad, false);
  for (const BadCall& bad : kBadBackwards) expect(bad, true);
}

}  // namespace
}  // namespace polyhead::testing
