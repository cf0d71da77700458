#include "core/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "polyhead/dropout.h"

namespace polyhead {
namespace {

using Words = std::array<uint32_t, 4>;

// kat_vectors of Random123 1.14, "philox4x32 10".
static_assert(philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
static_assert(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
              Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
static_assert(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
              Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});

TEST(Philox, RunTimeGivesWhatCompileTimeGives) {
  volatile uint32_t zero = 0;  // keeps the compiler from folding the call
  const uint32_t z = zero;
  EXPECT_EQ(philox4x32({z, z, z, z}, {z, z}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

struct Kept {
  int64_t batch, num_heads, seqlen_q, seqlen_k;
  std::vector<char> bytes = std::vector<char>(static_cast<size_t>(batch * num_heads * seqlen_q * seqlen_k), 7);
  Tensor tensor() { return Tensor(bytes.data(), DType::kBool, {batch, num_heads, seqlen_q, seqlen_k}); }
  char at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return bytes[static_cast<size_t>(((b * num_heads + h) * seqlen_q + i) * seqlen_k + j)];
  }
};

TEST(Dropout, EveryElementIsAsTheContractSays) {
  constexpr uint64_t kSeed = 0x0123456789abcdef;
  constexpr uint32_t kOffset = 0xfedcba98;
  constexpr double kP = 0.37;
  Kept kept{2, 3, 5, 21};
  ASSERT_TRUE(dropout_mask(kP, kSeed, kOffset, kept.tensor()).ok());
  const auto threshold = static_cast<uint32_t>(std::floor(kP * 65536 + 0.5));
  for (uint32_t b = 0; b < 2; ++b) {
    for (uint32_t h = 0; h < 3; ++h) {
      for (uint32_t i = 0; i < 5; ++i) {
        for (uint32_t j = 0; j < 21; ++j) {
          const Words words = philox4x32({b * 3 + h, i, j / 8, kOffset}, {0x89abcdef, 0x01234567});
          const uint32_t word = words[j % 8 / 2];
          const uint32_t bits = j % 2 == 0 ? word % 65536 : word / 65536;
          EXPECT_EQ(kept.at(b, h, i, j), bits >= threshold) << b << " " << h << " " << i << " " << j;
          EXPECT_EQ(dropout_bits(kSeed, kOffset, b * 3 + h, i, j), bits);
        }
      }
    }
  }
}

TEST(Dropout, AnyOutputStrides) {
  Kept plain{2, 3, 5, 9};
  ASSERT_TRUE(dropout_mask(0.5, 11, 0, plain.tensor()).ok());
  std::vector<char> turned(2 * 3 * 5 * 9 * 2, 7);  // [Sk, Sq, H, B] with a gap behind each element
  Tensor view(turned.data(), DType::kBool, {2, 3, 5, 9});
  view.strides[0] = 2;
  view.strides[1] = 2 * 2;
  view.strides[2] = 2 * 2 * 3;
  view.strides[3] = 2 * 2 * 3 * 5;
  ASSERT_TRUE(dropout_mask(0.5, 11, 0, view).ok());
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t i = 0; i < 5; ++i) {
        for (int64_t j = 0; j < 9; ++j) {
          const int64_t at = b * 2 + h * 4 + i * 12 + j * 60;
          EXPECT_EQ(turned[static_cast<size_t>(at)], plain.at(b, h, i, j));
          EXPECT_EQ(turned[static_cast<size_t>(at) + 1], 7);
        }
      }
    }
  }
}

TEST(Dropout, KeepRateIsBinomial) {
  for (const double p : {1e-4, 0.1, 0.25, 0.5, 0.9, 0.9999}) {
    Kept kept{2, 4, 128, 1024};
    ASSERT_TRUE(dropout_mask(p, 42, 0, kept.tensor()).ok());
    double count = 0;
    for (const char k : kept.bytes) count += k;
    const auto n = static_cast<double>(kept.bytes.size());
    const double dropped = std::floor(p * 65536 + 0.5) / 65536;
    const double sigma = std::sqrt(n * dropped * (1 - dropped));
    EXPECT_NEAR(count, n * (1 - dropped), 5 * sigma) << "p " << p;
  }
}

TEST(Dropout, ZeroAndOneAreExact) {
  Kept kept{1, 2, 64, 512};
  ASSERT_TRUE(dropout_mask(0, 3, 0, kept.tensor()).ok());
  for (const char k : kept.bytes) ASSERT_EQ(k, 1);
  ASSERT_TRUE(dropout_mask(1, 3, 0, kept.tensor()).ok());
  for (const char k : kept.bytes) ASSERT_EQ(k, 0);
}

TEST(Dropout, NeighboursDrawDifferentBits) {
  std::set<Words> rows;
  for (uint32_t head = 0; head < 8; ++head) {
    for (uint32_t i = 0; i < 32; ++i) {
      for (uint32_t block = 0; block < 32; ++block) {
        for (uint32_t offset = 0; offset < 2; ++offset) {
          for (uint32_t seed = 0; seed < 2; ++seed) rows.insert(philox4x32({head, i, block, offset}, {seed, 0}));
        }
      }
    }
  }
  EXPECT_EQ(rows.size(), 8u * 32 * 32 * 2 * 2);
}

TEST(Dropout, EmptySizesAreLegal) {
  for (int empty = 0; empty < 4; ++empty) {
    Tensor none(nullptr, DType::kBool, {2, 2, 2, 2});
    none.dims[empty] = 0;
    EXPECT_TRUE(dropout_mask(0.5, 1, 0, none).ok());
  }
}

TEST(Dropout, BadInputIsNamedAndNothingIsWritten) {
  Kept kept{1, 2, 3, 4};
  const Tensor good = kept.tensor();
  auto message = [&](double p, const Tensor& t) { return dropout_mask(p, 1, 0, t).message(); };
  EXPECT_EQ(message(-0.1, good), "dropout_p is -0.1, must be 0 to 1");
  EXPECT_EQ(message(1.5, good), "dropout_p is 1.5, must be 0 to 1");
  EXPECT_EQ(message(std::numeric_limits<double>::quiet_NaN(), good), "dropout_p is nan, must be 0 to 1");
  Tensor bad = good;
  bad.dtype = DType::kInt32;
  EXPECT_EQ(message(0.5, bad), "kept is int32, expected bool");
  bad = good;
  bad.device = Device::kCuda;
  EXPECT_EQ(message(0.5, bad), "kept is not on the CPU");
  bad = good;
  bad.ndim = 3;
  EXPECT_EQ(message(0.5, bad), "kept has 3 dims, expected 4");
  bad = good;
  bad.dims[2] = -3;
  EXPECT_EQ(message(0.5, bad), "kept dim 2 is -3, must not be negative");
  bad = good;
  bad.data = nullptr;
  EXPECT_EQ(message(0.5, bad), "kept is null");
  bad = good;
  bad.strides[3] = -1;
  EXPECT_EQ(message(0.5, bad), "kept has stride -1 in dim 3, an output's must not be negative");
  bad = good;
  bad.strides[1] = 0;
  EXPECT_EQ(message(0.5, bad), "kept overlaps itself: two indices name one element");
  bad = good;
  bad.strides[1] = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(message(0.5, bad), "kept reaches beyond the address space");
  bad = good;
  bad.dims[1] = bad.dims[0] = int64_t{1} << 40;
  bad.strides[1] = bad.strides[0] = 0;
  EXPECT_EQ(message(0.5, bad), "kept overlaps itself: two indices name one element");
  for (const char k : kept.bytes) EXPECT_EQ(k, 7);
}

}  // namespace
}  // namespace polyhead
