// Axes of matrices with dims joined.
#include <gtest/gtest.h>

#include "contract/linear.h"

namespace polyhead::linear {
namespace {

void expect_collapsed(const Axis& axis, const Axis& want) {
  const Axis got = collapsed(axis);
  for (int d = 0; d < 3; ++d) {
    EXPECT_EQ(got.sizes[d], want.sizes[d]) << d;
    EXPECT_EQ(got.strides[d], want.strides[d]) << d;
  }
  for (int64_t i = 0; i < axis.size(); ++i) EXPECT_EQ(got.offset(i), axis.offset(i)) << i;
}

TEST(Axis, JoinsDimsThatContinueEachOther) {
  expect_collapsed({{2, 3, 4}, {12, 4, 1}}, {{1, 1, 24}, {0, 0, 1}});
  expect_collapsed({{2, 3, 4}, {-24, -8, -2}}, {{1, 1, 24}, {0, 0, -2}});
  expect_collapsed({{2, 3, 4}, {99, 4, 1}}, {{1, 2, 12}, {0, 99, 1}});
  expect_collapsed({{2, 3, 4}, {30, 10, 1}}, {{1, 6, 4}, {0, 10, 1}});
  expect_collapsed({{2, 3, 4}, {99, 10, 1}}, {{2, 3, 4}, {99, 10, 1}});
  expect_collapsed({{2, 3, 4}, {0, 0, 0}}, {{1, 1, 24}, {0, 0, 0}});
}

TEST(Axis, LosesDimsOfOneIndex) {
  expect_collapsed({{2, 1, 4}, {4, 77, 1}}, {{1, 1, 8}, {0, 0, 1}});
  expect_collapsed({{2, 3, 1}, {99, 5, 77}}, {{1, 2, 3}, {0, 99, 5}});
  expect_collapsed({{1, 1, 1}, {7, 7, 7}}, {{1, 1, 1}, {0, 0, 1}});
}

TEST(Axis, IsEmptyInOneDim) { expect_collapsed({{2, 0, 4}, {9, 9, 9}}, {{1, 1, 0}, {0, 0, 0}}); }

}  // namespace
}  // namespace polyhead::linear
