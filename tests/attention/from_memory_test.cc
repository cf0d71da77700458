// Decoding reads keys and values that no cache holds in other ways than those of a call that caches hold: with the same bits,
// whatever hides.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "every_kernel.h"
#include "poison.h"
#include "testing/call.h"
#include "testing/problem_words.h"

namespace polyhead::testing {
namespace {

// Each reads 32 MiB and more; its sequences, one by one, do not.
constexpr const char* kLines[] = {
    "70x1x1/500x128 --logsumexp",
    "70x1x1/500x128 --dropout 0.2 --softcap 3 --alibi --causal --align bottom_right",
    "9x8/4x1/1100x128 --lengths=k",
    "6x8x2/1500x128 --dtype bf16 --window 700,0 --align bottom_right --sink-keys 3",
    "8x16x1/1040x64 --dtype bf16 --lengths=k",
    "11x4x1/1100x200 --dtype f16 --mask b,1,q,k:blocks",
    "9x8x1/1030x80/48 --mask b,1,1,k",
    "3x9x1/1000x256 --bias 1,h,q,k",
    "9x16/4x1/1100x128",
    "70x1x1/500x100 --dtype bf16 --normalizer none",
};

class FromMemory : public ::testing::TestWithParam<const char*> {};

Problem problem_of(const std::string& line) {
  std::vector<std::string> words;
  for (size_t begin = 0, end; begin < line.size(); begin = end + 1) {
    end = std::min(line.find(' ', begin), line.size());
    words.push_back(line.substr(begin, end - begin));
  }
  return parse_problems(words)->front();
}

TEST_P(FromMemory, HasTheBitsOfEachSequenceAlone) {
  const Problem problem = problem_of(GetParam());
  const AttentionDesc& desc = problem.desc;
  const Inputs in = random_inputs(problem), poisoned = poison_hidden(desc, in, problem.seed);
  for_every_kernel(desc, [&](const Kernel& kernel) {
    const auto running = forward_command(kernel.name, problem);
    set_running(running);
    const Outputs rows_apart = run(kernel, desc, poisoned, {.threads = 2});
    Outputs parts;
    for (int64_t b = 0; b < desc.batch; ++b) {
      const Slice slice = slice_batch(desc, poisoned, b, b + 1);
      const Outputs part = run(kernel, slice.desc, slice.inputs);
      parts.out = b == 0 ? part.out : joined(parts.out, part.out);
      parts.logsumexp = b == 0 ? part.logsumexp : joined(parts.logsumexp, part.logsumexp);
    }
    for (const Inputs* of : {&in, &poisoned}) {
      const Outputs in_line = run(kernel, desc, *of, {.threads = 2, .layout = Layout::kBhsd});
      EXPECT_EQ(difference(in_line, parts), "") << running;
    }
    EXPECT_EQ(difference(rows_apart, parts), "") << running;
  });
}

INSTANTIATE_TEST_SUITE_P(Decoding, FromMemory, ::testing::ValuesIn(kLines));

}  // namespace
}  // namespace polyhead::testing
