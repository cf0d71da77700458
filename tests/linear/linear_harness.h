// Runs the operations of src/linear in guarded memory and judges what they wrote by the yardstick of error.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "contract/linear.h"
#include "testing/call.h"
#include "testing/guard.h"
#include "testing/operands.h"

namespace polyhead::testing {

// The kernels of this build, or the one that POLYHEAD_TEST_KERNEL names.
std::vector<const linear::Kernel*> linear_kernels_to_test();

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

using Arrays = std::map<std::string, Array>;

// What one call wrote, densely stored, and what it must not have done.
struct CallResult {
  Arrays arrays;
  std::vector<std::string> faults;
};
std::string difference(const CallResult& a, const CallResult& b);  // "" if all has the same bits

struct CallOptions {
  int threads = 1;  // 0: one thread, tasks in reverse order
  Layout layout = Layout::kBshd;
  uint64_t layout_seed = 1;  // which layout each operand gets of Layout::kMixed
  Guard guard = Guard::kEnd;
  bool weights_transposed = false;  // B of a product lies along K, as torch's weights do, whatever `layout` says
};

// The matrices of one call, each in guarded memory of its own.
class Operands {
 public:
  explicit Operands(const CallOptions& options) : options_(options), random_(options.layout_seed) {}

  // The first `row_dims` dims of an array are the rows. An array that is not given makes a matrix that is not.
  linear::Matrix input(const char* name, const Array& array, size_t row_dims);
  linear::Matrix output(const char* name, DType dtype, const std::vector<int64_t>& dims, size_t row_dims);
  linear::Matrix updated(const char* name, const Array& array, size_t row_dims);  // read and written
  void* vector(const char* name, DType dtype, int64_t size);                      // an output without gaps
  const void* vector(const char* name, const Array& array);
  void* workspace(size_t bytes);

  CallResult written();  // once, after the call

 private:
  struct Place {
    std::string name;
    bool output;
    Placed placed;
  };
  Layout next_layout();
  linear::Matrix add(const char* name, bool output, Placed placed, size_t row_dims);

  CallOptions options_;
  Random random_;
  std::vector<Place> places_;
  std::vector<GuardedBytes> workspace_;
};

Array random_array(DType dtype, const std::vector<int64_t>& dims, uint64_t seed, double scale = 1);
Array widened(const Array& array);     // float64
Array magnitudes(const Array& array);  // the absolute values, float64

// What the definition gives for the numbers of one draw.
struct ExpectedArrays {
  Arrays exact, naive, magnitude;
  Arrays cut = {};  // what tensor cores shift results by (testing/bounds.h), if that was computed
};

// The draws of one problem, as many as the sizes tell. The definition is computed once for all kernels.
class Draws {
 public:
  using Definition = std::function<ExpectedArrays(uint64_t seed)>;
  Draws(uint64_t seed, Definition definition) : seed_(seed), definition_(std::move(definition)) {}

  // "" if what `run` writes for the numbers of each seed is good, judged as one. Where only memory counts: of the first.
  // cut: sums were tensor cores'.
  std::string judge(const std::function<CallResult(uint64_t seed)>& run, bool cut = false);

 private:
  const ExpectedArrays& expected(size_t n);

  uint64_t seed_;
  Definition definition_;
  std::vector<ExpectedArrays> draws_;
};

// The dims of one axis, for random problems: their product is near an edge of some tile.
std::vector<int64_t> random_axis(Random& random, int64_t most, size_t most_dims);

}  // namespace polyhead::testing
