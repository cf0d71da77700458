// Each instruction on random operands, by the interpreter and by a GPU: so that what the interpreter says of the kernels is
// what a GPU does. Where there is none the interpreter's half runs, and POLYHEAD_PTX=folder gets the texts, for ptxas.
// Built by name; bench/cuda.sh runs it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <random>
#include <set>

#include "agreement.h"
#include "device_kernel.h"
#include "group_products.h"
#include "instruction_rows.h"
#include "matrix_bodies.h"
#include "one_kernel.h"
#include "statement.h"

namespace cuda_sim {
namespace {

using Words = OneKernel::Words;

constexpr size_t kBlocks = 32, kOperands = 32 * kBlocks;

std::vector<std::string> statements() {
  std::vector<std::string> all;
  for (const auto* rows : {&kIntegerRows, &kFloatRows, &kConvertRows, &kSingleRows}) {
    for (const Row& row : *rows) all.emplace_back(row.statement);
  }
  for (const Row& row : kSingleRows) {
    std::string flushed = row.statement;
    all.push_back(flushed.insert(flushed.find(".f32"), ".ftz"));
  }
  for (const std::string type : {"s16", "u16", "s32", "u32", "s64", "u64", "f32", "f64"}) {
    for (const char* name : {"eq", "ne", "lt", "le", "gt", "ge"}) {
      all.push_back("setp." + std::string(name) + "." + type + (type.ends_with("64") ? " p|q, A, B" : " p|q, a, b"));
    }
  }
  std::set<std::string> seen;
  std::erase_if(all, [&](const std::string& each) { return !seen.insert(each).second; });
  return all;
}

// A word whose low half is such a number too: half of them of ordinary size, half any bits.
uint64_t random_word(std::mt19937_64& random, const std::string& type, bool ordinary) {
  const uint64_t bits = random();
  if (!ordinary && bits >> 63 != 0) return bits;
  const double x = std::ldexp(static_cast<double>(static_cast<int64_t>(random())), -60);  // -8 to 8
  if (type == "f64") return std::bit_cast<uint64_t>(x);
  if (type == "f32") return f(static_cast<float>(x));
  if (type == "f16" || type == "f16x2") return bits & 0xbfffbfff & ~0x40004000u;  // below 2 in magnitude
  if (type == "bf16" || type == "bf16x2") return (bits & 0x80ff80ff) | 0x3f003f00;
  return bits;
}

Words operands_of(const std::string& statement, unsigned seed) {
  std::mt19937_64 random(seed);
  const std::vector<std::string> types = types_of(statement);
  const bool converts = statement.starts_with("cvt");
  const std::string& type = converts && types.size() > 1 ? types[1] : types.front();
  const bool divides = statement.starts_with("div.") || statement.starts_with("rem.");
  const bool ordinary =
      has(statement, "sin.") || has(statement, "cos.") || has(statement, "div.approx") || has(statement, "div.full");
  Words words(3 * kOperands);
  for (size_t n = 0; n < words.size(); ++n) {
    words[n] = random_word(random, type, ordinary);
    // Division by 0, and of the least number by -1, is nothing that the ISA defines.
    if (divides && n % 3 == 1 && type[0] != 'f') words[n] = 1 + random() % 1000;
    // Nor are bits from a place, or as many bits, as 8 bits do not tell.
    if (has(statement, "bfe.") && n % 3 != 0) words[n] &= 0xff;
  }
  return words;
}

// Of one kernel; buffers after both have run. Whether the GPU has run too.
template <class Kernel>
std::vector<Words> run(const std::string& body, std::vector<Words> buffers, unsigned blocks) {
  Kernel kernel(kernel_text(body, static_cast<int>(buffers.size())));
  kernel.run(buffers, {{blocks, 1, 1}, {32, 1, 1}, 0});
  return buffers;
}

void write(const std::string& name, const std::string& body, int num_buffers) {
  const char* const folder = std::getenv("POLYHEAD_PTX");
  if (folder == nullptr) return;
  std::ofstream(std::string(folder) + "/" + name + ".ptx") << kernel_text(body, num_buffers);
}

// Of approximations, whose errors may all go one way.
void print_errors(const std::string& statement, const Words& ours, const Words& theirs) {
  if (allowed(statement, 1) == 0) return;
  double sum = 0, largest = 0, count = 0;
  for (size_t n = 0; n < ours.size(); n += 2) {
    const Float x = as_float(ours[n], "f32"), y = as_float(theirs[n], "f32");
    if (x.nan || !std::isfinite(x.value) || !std::isfinite(y.value) || std::abs(x.value) < 0x1p-126) continue;
    const double error = (y.value - x.value) / std::abs(x.value) * 0x1p24;
    sum += error, largest = std::max(largest, std::abs(error)), ++count;
  }
  std::printf("%s: of the interpreter's, the GPU's is %.2f 2^-24 more on average, at most %.2f off\n",
              statement.c_str(), sum / count, largest);
}

TEST(RandomInstructions, AgreeWithAGpu) {
  const std::string why_not = Driver::why_not();
  const std::vector<std::string> all = statements();
  unsigned number = 0;
  for (const std::string& statement : all) {
    SCOPED_TRACE(statement);
    const std::string body = body_of(statement, true);
    write("statement" + std::to_string(number), body, 2);
    const std::vector<Words> buffers = {operands_of(statement, ++number), Words(2 * kOperands)};
    const std::vector<Words> ours = run<OneKernel>(body, buffers, kBlocks);
    if (!why_not.empty()) continue;
    const std::vector<Words> theirs = run<DeviceKernel>(body, buffers, kBlocks);
    int wrong = 0;
    print_errors(statement, ours[1], theirs[1]);
    for (size_t n = 0; n < ours[1].size(); ++n) {
      if (agree(statement, ours[1][n], theirs[1][n]) || ++wrong > 3) continue;
      const Words& given = buffers[0];
      const size_t at = n / 2 * 3;
      ADD_FAILURE() << std::hex << "of " << given[at] << ", " << given[at + 1] << ", " << given[at + 2]
                    << ": interpreter " << ours[1][n] << ", GPU " << theirs[1][n];
    }
    EXPECT_EQ(wrong, 0) << "of " << ours[1].size();
  }
  std::printf("%zu instructions, %zu random operands each\n", all.size(), kOperands);
  if (!why_not.empty())
    GTEST_SKIP() << why_not << ": " << all.size() << " instructions were computed by the interpreter alone";
}

// What weights are made of: how much too large they are on average, by how large the exponent is, tells what all of them share.
TEST(RandomInstructions, PowersOfTwoErrByTheirExponents) {
  const std::string statement = "ex2.approx.ftz.f32 d, a", why_not = Driver::why_not();
  std::mt19937_64 random(1);
  for (const double most : {-16.0, -8.0, -4.0, -2.0, -1.0, -0.5, -0.25, -0.0625, -0x1p-12, 0x1p-12, 0.5, 2.0, 8.0}) {
    std::vector<Words> buffers = {Words(3 * kOperands), Words(2 * kOperands)};
    std::uniform_real_distribution<double> between(std::min(most, most / 2), std::max(most, most / 2));
    for (size_t n = 0; n < buffers[0].size(); n += 3) buffers[0][n] = f(static_cast<float>(between(random)));
    double means[2] = {};
    for (const bool gpu : {false, true}) {
      if (gpu && !why_not.empty()) continue;
      const std::string body = body_of(statement, true);
      const std::vector<Words> after =
          gpu ? run<DeviceKernel>(body, buffers, kBlocks) : run<OneKernel>(body, buffers, kBlocks);
      for (size_t n = 0; n < kOperands; ++n) {
        const double exact = std::exp2(as_float(buffers[0][3 * n], "f32").value);
        means[gpu] += (as_float(after[1][2 * n], "f32").value / exact - 1) * 0x1p24 / static_cast<double>(kOperands);
      }
    }
    std::printf("2^x, x from %g to %g: the interpreter's is %.2f 2^-24 too large on average, the GPU's %.2f\n",
                most / 2, most, means[0], means[1]);
  }
  if (!why_not.empty()) GTEST_SKIP() << why_not << ": computed by the interpreter alone";
}

// Sums of tensor cores are rounded in a way of their own, which the interpreter has from an H100; others' are near.
TEST(RandomInstructions, MatricesAgreeWithAGpu) {
  const std::string why_not = Driver::why_not();
  const bool is_hopper = why_not.empty() && Driver::get().capability == 90;
  for (const MatrixProduct& product : matrix_products()) {
    SCOPED_TRACE(product.name);
    write(product.name, product.body, 3);
    std::mt19937_64 random(1);
    std::vector<Words> buffers = {Words(static_cast<size_t>(product.words) * 16 * kBlocks), Words(64 * kBlocks),
                                  Words(64 * kBlocks)};
    for (uint64_t& word : buffers[0]) word = product.random_word(random);
    for (uint64_t& word : buffers[1]) word = random_floats(random);
    const std::vector<Words> ours = run<OneKernel>(product.body, buffers, kBlocks);
    if (!why_not.empty()) continue;
    const std::vector<Words> theirs = run<DeviceKernel>(product.body, buffers, kBlocks);
    size_t others = 0;
    for (size_t n = 0; n < ours[2].size(); ++n) {
      for (const int shift : {0, 32}) {
        const Float x = as_float(ours[2][n] >> shift, "f32"), y = as_float(theirs[2][n] >> shift, "f32");
        ASSERT_NEAR(x.value, y.value, product.bound) << n;
        others += x.value != y.value;
      }
    }
    std::printf("%s: %zu of %zu sums are other numbers than the GPU's\n", product.name.c_str(), others,
                2 * ours[2].size());
    if (is_hopper) {
      EXPECT_EQ(others, 0u);
    }
  }
  if (!why_not.empty()) GTEST_SKIP() << why_not << ": computed by the interpreter alone";
}

// Likewise of a warpgroup, two products one after the other.
TEST(RandomInstructions, ProductsOfGroupsAgreeWithAGpu) {
  const std::string why_not = Driver::why_not();
  if (!why_not.empty() || Driver::get().capability != 90) GTEST_SKIP() << "no GPU of compute capability 9.0";
  for (const std::string type : {"bf16", "f16"}) {
    for (const bool in_registers : {false, true}) {
      GroupProduct p;
      p.type = type, p.in_registers = in_registers;
      p.columns = p.b.rows = 128;
      SCOPED_TRACE(p.name());
      std::mt19937_64 random(1);
      std::vector<Words> buffers = {Words(static_cast<size_t>(p.a.bytes() + p.b.bytes()) / 8), Words(64 * 64),
                                    Words(512)};
      for (const size_t n : {0, 2}) {
        for (uint64_t& word : buffers[n]) word = type == "f16" ? random_float16s(random) : random_bfloat16s(random);
      }
      for (uint64_t& word : buffers[1]) word = random_floats(random);
      const Shape shape = {{1, 1, 1}, {128, 1, 1}, 0};
      const std::string text = kernel_text(body_of(p), 3, "sm_90a");
      std::vector<Words> ours = buffers, theirs = buffers;
      OneKernel(text).run(ours, shape);
      DeviceKernel(text).run(theirs, shape);
      size_t others = 0;
      for (size_t n = 0; n < ours[1].size(); ++n) {
        for (const int shift : {0, 32})
          others += (ours[1][n] >> shift & 0xffffffff) != (theirs[1][n] >> shift & 0xffffffff);
      }
      EXPECT_EQ(others, 0u) << "of " << 2 * ours[1].size() << " sums are other numbers than the GPU's";
    }
  }
}

}  // namespace
}  // namespace cuda_sim
