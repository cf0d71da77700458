// Plain data that the kernels of attention and of products share.
#pragma once

#include <cstdint>

#include "polyhead/tensor.h"

namespace polyhead::cpu {

constexpr int kTileQueries = 64;  // queries are cut into tiles of this many

// Bytes of an element. Static, so that the objects of an instruction set give it to nobody.
static inline int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt4x2: return 1;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  __builtin_unreachable();  // arguments are checked, and the compiler tells of a dtype without a case
}

// Bytes of what multiplies numbers of a dtype that has scales.
static inline int64_t scale_bytes(DType dtype) { return dtype == DType::kInt4x2 ? 2 : 4; }

// Bytes of a row of so many numbers that follow each other.
static inline int64_t numbers_bytes(DType dtype, int64_t numbers) {
  return dtype == DType::kInt4x2 ? numbers / 2 : numbers * element_bytes(dtype);
}

// [batch, seqlen, heads, dim] by strides in elements. Packed operands have stride_b = 0: rows start at first_q, first_k.
// Paged keys and values are [pages, page_size, heads, dim]: stride_b leads from page to page.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride_b = 0, stride_s = 0, stride_h = 0, stride_d = 0;

  const int64_t* page_table = nullptr;  // [batch][pages_per_sequence]; null: not paged
  int64_t pages_per_sequence = 0, page_size = 1;

  // Of stored keys or values that are multiplied by scales (float32, of kInt4x2 float16) for each `group` of a row's
  // elements; null: of none.
  const void* scales = nullptr;
  int64_t group = 1;
  int64_t scale_stride_b = 0, scale_stride_s = 0, scale_stride_h = 0, scale_stride_d = 0;
};

struct Dropout {
  uint32_t threshold = 0;  // an element is kept if its 16 bits are >= this; 0 = no dropout
  uint32_t offset = 0;
  uint64_t seed = 0;
  float scale = 1;  // 1 / (1 - p); 0 for p = 1

  // The origin of attention's counters (polyhead/dropout.h). Head b * num_heads + h of the call is counted as
  // first_head + b * (num_heads + other_heads) + h.
  uint32_t first_head = 0, num_heads = 1, other_heads = 0, first_query = 0, first_key_group = 0;
};

}  // namespace polyhead::cpu
