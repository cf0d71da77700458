// The language: what a text means, its canonical form, the sentences about what makes no sense; the same by expressions.
#include <gtest/gtest.h>

#include "programs.h"

namespace polyhead::testing {
namespace {

std::string canonical(const std::string& text) {
  const Result<SharedProgram> program = parse_program(text);
  return program.ok() ? (*program)->text() : program.status().message();
}

TEST(ProgramText, HasOneForm) {
  EXPECT_EQ(canonical("score = score - slope[h] * abs(q - k); mask = k <= q"),
            "slope: float; mask = k <= q; score = score - (slope[h] * float(abs(q - k)))");
  EXPECT_EQ(canonical("w: int\n d = q - k\n mask = 0 <= d < w[h] and d != 3"),
            "w: int; _1 = q - k; mask = ((0 <= _1) and (_1 < w[h])) and (not (_1 == 3))");
  EXPECT_EQ(canonical("score = -score ** 2 + 7 // 2 - -3"), "score = ((-pow(score, 2.0)) + float(7 // 2)) - -3.0");
  EXPECT_EQ(canonical("mask = not q & 1 or k >> 2 | 1 == 5"),
            "mask = (not (not ((q & 1) == 0))) or (((k >> 2) | 1) == 5)");
  EXPECT_EQ(canonical("score = min(score, 1, x[]) + clamp(score, 0, 1e3)"),
            "x: float; score = min(min(score, 1.0), x[]) + min(max(score, 0.0), 1000.0)");
  EXPECT_EQ(canonical("a: bool; mask = ~a[q] ^ (k > 3)"),
            "a: bool; mask = not ((where(not a[q], 1, 0) ^ where(3 < k, 1, 0)) == 0)");
  EXPECT_EQ(canonical("mask = -9223372036854775808 < q"), "mask = -9223372036854775808 < q");
}

TEST(ProgramText, IsReadAsItIsWritten) {
  for (const NamedProgram& program : named_programs()) {
    const Result<SharedProgram> once = parse_program(program.text);
    ASSERT_TRUE(once.ok()) << program.name << ": " << once.status().message();
    const Result<SharedProgram> again = parse_program((*once)->text());
    ASSERT_TRUE(again.ok()) << (*once)->text() << ": " << again.status().message();
    EXPECT_EQ(*once, *again) << "the same object: " << (*once)->text();
  }
}

TEST(ProgramText, SaysWhatMakesNoSense) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "the program has neither score nor mask"},
      {"x = 1", "the program has neither score nor mask"},
      {"mask = score > 1", "the mask reads score, which only a score can"},
      {"score = foo", "program: \"foo\" at 8 is no value: an element of a tensor is foo[...]"},
      {"score = foo(1)", "program: there is no function \"foo\""},
      {"score = abs(1, 2)", "program: abs takes 1 value, is given 2"},
      {"score = bias[1.5]", "index 0 of tensor bias is a float, takes an int"},
      {"score = t[q] + t[q, k]", "tensor t has 1 dims, is given 2 indices"},
      {"score = t[q, q, q, q, q]", "tensor t is given 5 indices, takes 4 at most"},
      {"score = score // 2", "\"//\" is given a float, takes ints"},
      {"mask = score", "a float stands where a bool is expected"},
      {"mask = q + ", "program: expected a value at 11, there is the end"},
      {"mask = (q", "program: expected \")\" at 9, there is the end"},
      {"mask = q $ k", "program: expected \";\" or an operator at 9, there is \"$\""},
      {"q = 1; mask = q", "program: \"q\" cannot be assigned to"},
      {"x = 1; x = 2; mask = q > x", "program: \"x\" is given twice"},
      {"score = 1; score = 2", "program: \"score\" is given twice"},
      {"t: string; score = t[q]", "program: expected float, int or bool at 3, there is \"string\""},
      {"t: int; score = score", "tensor t is captured, but neither score nor mask read it"},
      {"score = 99999999999999999999", "program: \"99999999999999999999\" does not fit an int64"},
  };
  for (const auto& [text, sentence] : wrong) EXPECT_EQ(canonical(text), sentence) << text;
  EXPECT_NE(canonical("mask = " + std::string(100000, '(')).find("nest deeper than 200"), std::string::npos);
  std::string many = "score = score";
  for (int i = 0; i < 300; ++i) many += " + " + std::to_string(i) + ".5";
  EXPECT_EQ(canonical(many), "the program has more than 128 steps");
  // Wherever that is noticed, also while a bool becomes a number and the first step is a bool.
  int too_long = 0, programs = 0;
  for (int terms = 52; terms < 66; ++terms) {
    for (int more = 0; more < 4; ++more, ++programs) {
      std::string text = "on: bool; score = where(on[], score, 0.5)";
      for (int n = 2; n < terms; ++n) text += " + " + std::to_string(n) + ".5";
      for (int n = 0; n < more; ++n) text += " + score";
      const std::string got = canonical(text + " + (on[] or q < 2)");
      too_long += got == "the program has more than 128 steps";
      EXPECT_TRUE(got == "the program has more than 128 steps" || got.find("on: bool; ") == 0) << got;
    }
  }
  EXPECT_TRUE(too_long > 8 && too_long < programs - 8) << too_long;
}

TEST(ProgramExpressions, MakeTheSamePrograms) {
  ProgramBuilder p;
  const CapturedTensor slope = p.capture("slope", ValueType::kFloat, 1);
  const Result<SharedProgram> alibi =
      p.build(p.score() - slope(p.head()) * abs(p.query() - p.key()), (p.key() <= p.query()) & !(p.key() == 3));
  ASSERT_TRUE(alibi.ok()) << alibi.status().message();
  EXPECT_EQ((*alibi)->text(), canonical("score = score - slope[h] * abs(q - k); mask = k <= q and k != 3"));
  EXPECT_EQ(*alibi, *parse_program((*alibi)->text()));

  ProgramBuilder capped;
  const Expression s = capped.score();
  EXPECT_EQ((*capped.build(30.0 * tanh(s / 30)))->text(), "score = 30.0 * tanh(score / 30.0)");

  ProgramBuilder other, wrong;
  EXPECT_EQ(wrong.build(wrong.score() + other.query()).status().message(), "an operand belongs to another builder");
}

}  // namespace
}  // namespace polyhead::testing
