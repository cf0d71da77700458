// An attention problem to test with: a desc, what its numbers look like, and how its operands lie in memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "polyhead/attention.h"

namespace polyhead::testing {

// Random numbers, the same with every compiler and library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  int64_t integer(int64_t first, int64_t last);  // both ends included
  double uniform();                              // [0, 1)
  double normal();
  bool chance(double p) { return uniform() < p; }

 private:
  uint64_t state_;
};

// A dense row-major array.
struct Array {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> dims;  // empty: not given
  std::vector<uint8_t> bytes;

  Array() = default;
  Array(DType type, std::vector<int64_t> sizes);  // zeros
  bool given() const { return !dims.empty(); }
  int64_t size() const;
  int64_t index(const std::vector<int64_t>& at) const;
  double at(int64_t n) const;
  void set(int64_t n, double value);
  bool operator==(const Array&) const = default;  // bit for bit
};

// Rows [first, last) of dim 0.
Array rows(const Array& a, int64_t first, int64_t last);

// A contiguous view.
Tensor view(const Array& array);

// What the numbers of query, key and value look like.
enum class Fill {
  kNormal,     // N(0, 1)
  kShiftUp,    // the same, and all logits of the problem raised by 130
  kShiftDown,  // lowered by 130: logsumexp far below 0
  kLarge,      // small integers times 16: logits of thousands, and without rounding
  kUnderflow,  // half of the keys 95 below the others: their weights are denormal
  kOutliers,   // N(0, 1) + N(0, 100) in one of a thousand
};

// How an operand lies in memory. [B, S, H, D] in that order unless told.
enum class Layout {
  kBshd,
  kBhsd,
  kSbhd,
  kQkv,         // rows between the rows of two other operands
  kTransposed,  // [B, H, D, S]: innermost stride not 1
  kPadded,      // every dim padded by an odd number of elements
  kJunk,        // dims of size 1 have strides that nobody may use
  kNegative,    // inputs and gradients: all strides negative
  kExpanded,    // inputs: stride 0 wherever the values allow
  kMixed,       // each operand another of these
};
inline constexpr int kNumLayouts = static_cast<int>(Layout::kMixed);
const char* layout_name(Layout layout);

struct Problem {
  std::string name;
  AttentionDesc desc;
  Fill fill = Fill::kNormal;
  Layout layout = Layout::kMixed;
  uint64_t seed = 1;
};

// The inputs of one forward call, densely stored.
struct Inputs {
  Array query, key, value, attn_mask, attn_bias, alibi_slopes;
  Array seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, query_offsets;
  uint64_t dropout_seed = 0;
  uint32_t dropout_offset = 0;
};

// Plain self-attention of so many queries and keys, heads of `dim`.
Problem problem_of(const char* name, DType dtype, int64_t batch, int64_t heads, int64_t q, int64_t k, int64_t dim);

Inputs random_inputs(const Problem& problem);

// Any legal problem, all options mixed, sizes 0..130 and now and then more.
Problem random_problem(uint64_t seed);

// The command that computes this problem again: "polyhead verify 8x16/4x512/640x64/80 --causal ...".
std::string problem_line(const std::string& kernel, const Problem& problem);

// One sequence of the batch, read from the inputs by code that shares nothing with src/contract/sequences.h.
struct Span {
  int64_t first_q = 0, first_k = 0, len_q = 0, len_k = 0, offset = 0;
};
Span span_of(const AttentionDesc& desc, const Inputs& in, int64_t b);

// Whether query i of sequence b, which is `s`, may look at key j, likewise.
bool visible(const AttentionDesc& desc, const Inputs& in, const Span& s, int64_t b, int64_t h, int64_t i, int64_t j);

// The sequences [first, last) of a problem alone.
struct Slice {
  AttentionDesc desc;
  Inputs inputs;
};
Slice slice_batch(const AttentionDesc& desc, const Inputs& in, int64_t first, int64_t last);

}  // namespace polyhead::testing
