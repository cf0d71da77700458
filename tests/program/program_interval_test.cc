// What is told of whole blocks without looking at their pairs: sound for every named mask, and telling enough.
#include <gtest/gtest.h>

#include <map>

#include "contract/program_call.h"
#include "contract/sequences.h"
#include "polyhead/program_explanation.h"
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

// What is counted of a call's blocks, against every pair of them.
TEST(ProgramBlocks, AreCountedAsTheDenseMaskHasThem) {
  const char* const masks[] = {
      "mask = k <= q",      "mask = q // 100 == k // 100",       "doc: int; mask = doc[q] == doc[k]",
      "mask = k < 200 * h", "mask = b == 1 and abs(q - k) < 70", ""};
  int counted = 0;
  for (const char* const text : masks) {
    for (int band_number = 0; band_number < 5; ++band_number) {
      AttentionDesc d;
      d.batch = 2, d.num_heads = 3, d.num_heads_kv = 1;
      d.seqlen_q = 300, d.seqlen_k = 500, d.head_dim = d.head_dim_v = 8;
      d.align = Align::kTopLeft;
      if (band_number == 1) d.causal = true;
      if (band_number == 2) d.window_left = 40, d.window_right = 90, d.has_seqlens_k = true;
      if (band_number == 3) d.has_windows = true;
      if (band_number == 4) d.causal = true, d.window_left = 40, d.sink_keys = 70;
      if (*text != 0) d.program = *parse_program(text);
      Array doc(DType::kInt32, {500}), lengths(DType::kInt64, {2}), lo(DType::kInt32, {300}), hi(DType::kInt32, {300});
      for (int64_t n = 0; n < 500; ++n) doc.set(n, static_cast<double>(n / 90));
      lengths.set(0, 500), lengths.set(1, 131);
      for (int64_t n = 0; n < 300; ++n) lo.set(n, static_cast<double>(n % 70)), hi.set(n, n < 64 ? 500 : 250);
      const Tensor captures[] = {view(doc)};
      ForwardArgs args;
      if (d.program != nullptr && !d.program->captures().empty()) {
        d.captures = {{DType::kInt32, 1, {500}}};
        args.captures = captures;
      }
      if (d.has_seqlens_k) args.seqlens_k = view(lengths);
      if (d.has_windows) args.window_lo = view(lo), args.window_hi = view(hi);
      MaskBlocks want;
      const program::Call call = program_call(d, args);
      for (int64_t b = 0; b < d.batch; ++b) {
        const Sequence s = sequence(d, args, b);
        for (int64_t block = 0; block < 3 * 5 * ((s.len_k + 127) / 128); ++block) {
          const int64_t h = block % 3, q = block / 3 % 5 * 64, k = block / 15 * 128;
          int64_t shown = 0, all = 0;
          for (int64_t i = q; i < std::min(q + 64, s.len_q); ++i) {
            const KeyRange range = key_range(d, args, s, i);
            for (int64_t j = k; j < std::min(k + 128, s.len_k); ++j, ++all) {
              const bool in_band = (j >= range.begin || j < d.sink_keys) && j < range.end;
              shown += in_band && program::shows(call, {b, h, s.offset, i, j, i - j}) ? 1 : 0;
            }
          }
          ++(shown == 0 ? want.none : shown == all ? want.all : want.some);
        }
      }
      const auto got = count_mask_blocks(d, args);
      ASSERT_TRUE(got.ok()) << got.status().message();
      EXPECT_EQ(got->none + got->some + got->all, want.none + want.some + want.all) << text;
      // These masks are told exactly; together with a band a block may be hidden by both, and by neither alone.
      EXPECT_EQ(got->all, want.all) << text << ", band " << band_number;
      EXPECT_LE(got->none, want.none) << text << ", band " << band_number;
      EXPECT_TRUE(got->none == want.none || (band_number > 0 && *text != 0)) << text << ", band " << band_number;
      ++counted;
    }
  }
  EXPECT_EQ(counted, 30);
  AttentionDesc d;
  d.seqlen_q = d.seqlen_k = 8, d.head_dim = d.head_dim_v = 8;
  d.program = *parse_program("doc: int; mask = doc[q] == doc[k]");
  d.captures = {{DType::kInt32, 1, {8}}};
  EXPECT_EQ(count_mask_blocks(d, {}).status().message(), "doc is missing");
}

TEST(ProgramValues, TellWhatTheyDependOn) {
  const auto told = [](const char* text) {
    std::string values;
    for (const ProgramValue& value : explain_program(**parse_program(text))) {
      values += value.expression + " | " + value.depends_on + "\n";
    }
    return values;
  };
  EXPECT_EQ(told("score = score - slope[h] * abs(q - k); mask = k <= q"),
            "mask = k <= q | q - k\n"
            "slope[h] | nothing\n"
            "slope[h] * float(abs(q - k)) | q - k\n"
            "score = score - (slope[h] * float(abs(q - k))) | q, k\n");
  EXPECT_EQ(told("doc: int; d = doc[q]; mask = d == doc[k] and d > 3"),
            "_1 = doc[q] | q\n"
            "doc[k] | k\n"
            "3 < _1 | q\n"
            "mask = (_1 == doc[k]) and (3 < _1) | q, k\n");
}

}  // namespace
}  // namespace polyhead::testing
