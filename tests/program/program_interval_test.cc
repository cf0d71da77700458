// What is told of whole blocks without looking at their pairs: sound for every named mask, and telling enough.
#include <gtest/gtest.h>

#include <map>

#include "contract/program_call.h"
#include "programs.h"

namespace polyhead::testing {
namespace {

struct Count {
  int blocks = 0, missed = 0;  // missed: all or nothing, and called "some"
};

Count count_blocks(const NamedProgram& program, const Sizes4& sizes, uint64_t seed) {
  Random random(seed);
  AttentionDesc desc;
  desc.batch = sizes.batch, desc.num_heads = desc.num_heads_kv = sizes.heads;
  desc.seqlen_q = sizes.seqlen_q, desc.seqlen_k = sizes.seqlen_k;
  desc.program = *parse_program(program.text);
  Arrays captures;
  std::vector<Tensor> tensors;
  for (const CaptureOf& capture : program.captures(sizes)) {
    Array a(capture.dtype, capture.dims);
    for (int64_t n = 0; n < a.size(); ++n) a.set(n, capture.element(n, random));
    captures.push_back(std::move(a));
  }
  for (const Array& a : captures) tensors.push_back(view(a));
  ForwardArgs args;
  args.captures = tensors;
  const program::Call call = program_call(desc, args);
  Count count;
  for (int64_t b = 0; b < sizes.batch; ++b) {
    for (int64_t h = 0; h < sizes.heads; ++h) {
      for (int64_t q = 0; q < sizes.seqlen_q; q += 64) {
        for (int64_t k = 0; k < sizes.seqlen_k; k += 128) {
          const int64_t last_q = std::min(q + 64, sizes.seqlen_q) - 1, last_k = std::min(k + 128, sizes.seqlen_k) - 1;
          const program::Seen told = program::seen(call, {{b, b}, {h, h}, {q, last_q}, {k, last_k}, {0, 0}});
          bool any = false, all = true;
          for (int64_t i = q; i <= last_q; ++i) {
            for (int64_t j = k; j <= last_k; ++j) {
              const bool shown = program.mask({0, b, h, i, j}, captures);
              EXPECT_EQ(program::shows(call, {b, h, 0, i, j, i - j}), shown)
                  << program.name << " at " << i << ", " << j;
              any = any || shown;
              all = all && shown;
            }
          }
          EXPECT_FALSE(told == program::Seen::kNone && any) << program.name << " from " << q << ", " << k;
          EXPECT_FALSE(told == program::Seen::kAll && !all) << program.name << " from " << q << ", " << k;
          ++count.blocks;
          count.missed += told == program::Seen::kSome && (all || !any);
        }
      }
    }
  }
  return count;
}

TEST(ProgramBlocks, AreToldSoundly) {
  std::map<std::string, double> missed;
  for (const NamedProgram& program : named_programs()) {
    if (!program.mask) continue;
    const Count count = count_blocks(program, {1, 2, 300, 500}, 11);
    if (count.missed > 0) missed[program.name] = static_cast<double>(count.missed) / count.blocks;
  }
  // What the bounds of a range cannot tell: bits of interleaved coordinates, the products of a hash, a remainder.
  for (const auto& [name, share] : missed) {
    EXPECT_TRUE(name == "morton" || name == "hash" || name == "natten_2d") << name << ": " << share << " of the blocks";
  }
}

}  // namespace
}  // namespace polyhead::testing
