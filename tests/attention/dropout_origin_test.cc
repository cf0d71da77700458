// A shard with its dropout origin drops what the whole drops, on every kernel and path, forward and backward.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "contract/kernel.h"
#include "polyhead/dropout.h"

namespace polyhead {
namespace {

constexpr double kP = 0.4;
constexpr uint64_t kSeed = 0x123456789abcdef0;
constexpr uint32_t kOffset = 5;

// What is kept of [batch, heads, seqlen_q, seqlen_k], counted from an origin.
struct Kept {
  int64_t dims[4];
  std::vector<char> bytes = std::vector<char>(static_cast<size_t>(dims[0] * dims[1] * dims[2] * dims[3]), 7);

  explicit Kept(int64_t b, int64_t h, int64_t i, int64_t j, const DropoutOrigin& origin) : dims{b, h, i, j} {
    const Tensor t(bytes.data(), DType::kBool, {b, h, i, j});
    EXPECT_TRUE(dropout_mask(kP, kSeed, kOffset, t, origin).ok());
  }
  bool at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return bytes[static_cast<size_t>(((b * dims[1] + h) * dims[2] + i) * dims[3] + j)] == 1;
  }
};

// A part of a whole of 3 batch elements, 5 heads, 200 queries and 1200 keys.
struct Shard {
  const char* name;
  int64_t b, h, i, j;  // where it begins
  int64_t batch, heads, seqlen_q, seqlen_k;

  friend std::ostream& operator<<(std::ostream& out, const Shard& shard) { return out << shard.name; }
};
constexpr int64_t kHeads = 5;
constexpr Shard kShards[] = {
    {"batch", 1, 0, 0, 0, 2, 5, 70, 40},     {"heads", 0, 2, 0, 0, 3, 3, 70, 40},
    {"queries", 0, 0, 130, 0, 1, 5, 70, 40}, {"keys", 0, 0, 0, 1160, 1, 5, 70, 40},
    {"all", 1, 2, 100, 24, 2, 2, 65, 24},    {"tiny", 1, 1, 16, 8, 2, 3, 9, 8},
    {"decode", 1, 1, 199, 8, 2, 3, 1, 1030}, {"decode_few", 2, 3, 64, 512, 1, 2, 3, 520},
};

DropoutOrigin origin_of(const Shard& s) { return {s.b * kHeads + s.h, kHeads, s.i, s.j}; }

class Origin : public testing::TestWithParam<Shard> {
 protected:
  const Shard& s_ = GetParam();
  Kept whole_{3, kHeads, 200, 1200, {}};

  // Of the whole, where the shard's element (b, h, i, j) stands.
  bool kept(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return whole_.at(s_.b + b, s_.h + h, s_.i + i, s_.j + j);
  }
};
INSTANTIATE_TEST_SUITE_P(Shards, Origin, testing::ValuesIn(kShards), [](const auto& row) { return row.param.name; });

TEST_P(Origin, TheMaskIsASliceOfTheWholes) {
  const Kept part(s_.batch, s_.heads, s_.seqlen_q, s_.seqlen_k, origin_of(s_));
  for (int64_t b = 0; b < s_.batch; ++b) {
    for (int64_t h = 0; h < s_.heads; ++h) {
      for (int64_t i = 0; i < s_.seqlen_q; ++i) {
        for (int64_t j = 0; j < s_.seqlen_k; ++j) ASSERT_EQ(part.at(b, h, i, j), kept(b, h, i, j));
      }
    }
  }
}

// Queries of 0 give every key the same weight, and a value row for each key shows it: out[i, j] is P_ij, and with an
// identity as grad_out, grad_value[j, i] is too. Head dims of value are taken in slices of kWide keys.
TEST_P(Origin, EveryKernelDropsIt) {
  constexpr int64_t kWide = 40;
  AttentionDesc desc;
  desc.batch = s_.batch, desc.seqlen_q = s_.seqlen_q, desc.seqlen_k = s_.seqlen_k;
  desc.num_heads = desc.num_heads_kv = s_.heads;
  desc.head_dim = 4, desc.head_dim_v = s_.seqlen_k < kWide ? s_.seqlen_k : kWide;
  desc.dropout_p = kP;
  desc.dropout_origin = origin_of(s_);
  const int64_t dim_v = desc.head_dim_v, heads = s_.heads;
  const auto floats = [](int64_t n) { return std::vector<float>(static_cast<size_t>(n)); };
  std::vector<float> query = floats(s_.batch * s_.seqlen_q * heads * 4),
                     key = floats(s_.batch * s_.seqlen_k * heads * 4);
  std::vector<float> out = floats(s_.batch * s_.seqlen_q * heads * dim_v), grad_out = out;
  std::vector<float> logsumexp = floats(s_.batch * heads * s_.seqlen_q);
  std::vector<float> value = floats(s_.batch * s_.seqlen_k * heads * dim_v), grad_value = value;
  const auto tensor = [&](std::vector<float>& data, int64_t length, int64_t dim) {
    return Tensor(data.data(), DType::kFloat32, {s_.batch, length, heads, dim});
  };
  const auto at = [&](int64_t b, int64_t row, int64_t h, int64_t d, int64_t length) {
    return static_cast<size_t>(((b * length + row) * heads + h) * dim_v + d);
  };
  int kernels = 0;
  for (const Kernel* kernel : kernel_list()) {
    if (!kernel->why_not(desc).empty()) continue;
    ++kernels;
    const Result<Plan> plan = polyhead::plan(desc, {.kernel = kernel->name});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const size_t bytes = std::max(plan->workspace_bytes(), plan->backward_workspace_bytes());
    std::vector<char> memory(bytes + 64);
    BackwardArgs args;
    ForwardArgs& in = args.forward;
    in.query = tensor(query, s_.seqlen_q, 4), in.key = tensor(key, s_.seqlen_k, 4);
    in.value = tensor(value, s_.seqlen_k, dim_v), in.out = tensor(out, s_.seqlen_q, dim_v);
    in.logsumexp = Tensor(logsumexp.data(), DType::kFloat32, {s_.batch, heads, s_.seqlen_q});
    in.dropout_seed = kSeed, in.dropout_offset = kOffset;
    in.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    in.workspace_bytes = bytes;
    args.grad_out = tensor(grad_out, s_.seqlen_q, dim_v), args.grad_value = tensor(grad_value, s_.seqlen_k, dim_v);
    for (int64_t first = 0; first < s_.seqlen_k; first += dim_v) {
      const int64_t shown = std::min(dim_v, s_.seqlen_k - first);
      std::fill(value.begin(), value.end(), 0.0f);
      for (int64_t b = 0; b < s_.batch; ++b) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t d = 0; d < shown; ++d) value[at(b, first + d, h, d, s_.seqlen_k)] = 1;
        }
      }
      ASSERT_TRUE(plan->forward(in).ok());
      for (int64_t b = 0; b < s_.batch; ++b) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t i = 0; i < s_.seqlen_q; ++i) {
            for (int64_t d = 0; d < shown; ++d) {
              ASSERT_EQ(out[at(b, i, h, d, s_.seqlen_q)] != 0, kept(b, h, i, first + d))
                  << kernel->name << " batch " << b << " head " << h << " query " << i << " key " << first + d;
            }
          }
        }
      }
    }
    for (int64_t b = 0; b < s_.batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < std::min(s_.seqlen_q, dim_v); ++i) grad_out[at(b, i, h, i, s_.seqlen_q)] = 1;
      }
    }
    ASSERT_TRUE(plan->backward(args).ok());
    for (int64_t b = 0; b < s_.batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < std::min(s_.seqlen_q, dim_v); ++i) {
          for (int64_t j = 0; j < s_.seqlen_k; ++j) {
            ASSERT_EQ(grad_value[at(b, j, h, i, s_.seqlen_k)] != 0, kept(b, h, i, j))
                << kernel->name << " backward, batch " << b << " head " << h << " query " << i << " key " << j;
          }
        }
      }
    }
  }
  EXPECT_GE(kernels, 2);  // cpu_generic and the reference at least
}

TEST(OriginErrors, EachNamesTheField) {
  constexpr int64_t kMax = INT64_MAX;
  const struct {
    DropoutOrigin origin;
    const char* message;
  } rows[] = {
      {{-1, 0, 0, 0}, "dropout_origin.first_head is -1, must not be negative"},
      {{0, 0, -2, 0}, "dropout_origin.first_query is -2, must not be negative"},
      {{0, 2, 0, 0}, "dropout_origin.num_heads is 2, must be 0 or at least the call's 3"},
      {{0, 0, 0, 12}, "dropout_origin.first_key is 12, must be a multiple of 8: eight keys share a counter of dropout"},
      {{kMax, kMax, 0, 0},
       "batch * num_heads ends, counted from dropout_origin, at 9223372036854775807, dropout counts it in 32 bits"},
      {{0, 0, int64_t{1} << 32, 0},
       "seqlen_q ends, counted from dropout_origin, at 4294967300, dropout counts it in 32 bits"},
      {{0, 0, 0, int64_t{1} << 35},
       "seqlen_k / 8 ends, counted from dropout_origin, at 4294967297, dropout counts it in 32 bits"},
  };
  AttentionDesc desc;
  desc.batch = 2, desc.num_heads = desc.num_heads_kv = 3, desc.seqlen_q = 4, desc.seqlen_k = 8;
  desc.head_dim = desc.head_dim_v = 8, desc.dropout_p = 0.5;
  for (const auto& row : rows) {
    desc.dropout_origin = row.origin;
    EXPECT_EQ(plan(desc).status().message(), row.message);
  }
  const int64_t last_head = (int64_t{1} << 32) - 6;
  desc.dropout_origin = {last_head, 0, 0, (int64_t{1} << 35) - 8};
  EXPECT_TRUE(plan(desc).ok());
}

}  // namespace
}  // namespace polyhead
