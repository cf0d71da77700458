// Lays tensors out in new memory, as a problem's --layout says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "buffer.h"
#include "elements.h"
#include "polyhead/attention.h"
#include "problem.h"
#include "random.h"

namespace polyhead::tools {

// Independent streams of a problem's seed.
enum Stream : uint64_t {
  kQueryData = 1,
  kKeyData,
  kValueData,
  kMask,
  kBias,
  kSlopes,
  kOffsets,
  kLengthsQ,
  kLengthsK,
  kIndexDType,
  kGaps,
  kGradOutData,
  kGradLogsumexpData,
  kGradientsData,      // and one for each of kGradients
  kResidualData = 32,  // of layers
  kWindows,
  kWeightsData = 48,     // and one for each WeightKind
  kGradWeightsData = 64  // likewise
};

Status too_large(double size_bytes);

class Layouter {
 public:
  Layouter(Layout layout, uint64_t seed, std::vector<Buffer>& buffers)
      : layout_(layout), gaps_(seed, kGaps), buffers_(buffers) {}

  // A new tensor whose dims lie in memory in the given order, outermost first. With gaps between its elements it may
  // also run backwards, unless it is `forwards`.
  Status add(DType dtype, std::initializer_list<int64_t> dims, std::initializer_list<int> order, Tensor& tensor,
             bool forwards = false);

  // A row-major tensor.
  Status add(DType dtype, std::initializer_list<int64_t> dims, Tensor& tensor);

  // [batch, seqlen, heads, dim], or [rows, heads, dim] when packed.
  Status add_heads(const AttentionDesc& desc, int64_t seqlen, int64_t heads, int64_t dim, Tensor& tensor,
                   bool forwards = false);

  // logsumexp and its gradient: [batch, heads, seqlen_q], or [heads, rows] when packed.
  Status add_statistics(const AttentionDesc& desc, DType dtype, Tensor& tensor, bool forwards = false);

  // Query, key and value as parts of one row per token.
  Status add_qkv(const AttentionDesc& desc, Tensor& query, Tensor& key, Tensor& value);

 private:
  Status allocate(size_t size_bytes, Tensor& tensor);
  void reverse_some(Tensor& tensor);

  Layout layout_;
  Random gaps_;
  std::vector<Buffer>& buffers_;
};

template <class Draw>
void fill(const Tensor& tensor, Draw draw) {
  for_each_element(tensor, [&](void* element) { set_element(tensor.dtype, element, draw()); });
}

// N(0, 1)
void fill_normal(const Tensor& tensor, uint64_t seed, Stream stream);

}  // namespace polyhead::tools
