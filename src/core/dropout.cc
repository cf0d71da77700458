#include "polyhead/dropout.h"

#include <new>

#include "core/layout.h"
#include "core/philox.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

Status check_kept(const Tensor& kept) {
  if (kept.device != Device::kCpu) return invalid("kept is not on the CPU");
  if (kept.dtype != DType::kBool) return invalid(sentence("kept is ", dtype_name(kept.dtype), ", expected bool"));
  if (kept.ndim != 4) return invalid(sentence("kept has ", kept.ndim, " dims, expected 4"));
  bool empty = false;
  for (int i = 0; i < 4; ++i) {
    if (kept.dims[i] < 0) return invalid(sentence("kept dim ", i, " is ", kept.dims[i], ", must not be negative"));
    empty = empty || kept.dims[i] == 0;
  }
  if (empty) return {};
  MemoryRange range;
  for (int i = 0; i < 4; ++i) {
    if (kept.dims[i] > 1 && kept.strides[i] < 0) {
      return invalid(
          sentence("kept has stride ", kept.strides[i], " in dim ", i, ", an output's must not be negative"));
    }
  }
  if (!memory_range(kept, &range)) return invalid("kept reaches beyond the address space");
  if (kept.data == nullptr) return invalid("kept is null");
  if (overlaps_itself(kept)) return invalid("kept overlaps itself: two indices name one element");
  constexpr int64_t kWords = int64_t{1} << 32;
  int64_t num_heads = 0;
  if (__builtin_mul_overflow(kept.dims[0], kept.dims[1], &num_heads) || num_heads > kWords || kept.dims[2] > kWords ||
      kept.dims[3] / 8 > kWords) {
    return invalid("kept is too large: dropout counts batch * num_heads, seqlen_q and seqlen_k / 8 in 32 bits each");
  }
  return {};
}

// One row of keys, [Sk]: eight keys share a counter.
void fill_row(uint32_t threshold, uint64_t seed, const std::array<uint32_t, 2>& head_and_query, uint32_t offset,
              bool* kept, int64_t seqlen_k, int64_t stride) {
  for (int64_t j = 0; j < seqlen_k; j += 8) {
    const auto words = philox4x32({head_and_query[0], head_and_query[1], static_cast<uint32_t>(j / 8), offset},
                                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    for (int64_t i = 0; i < 8 && j + i < seqlen_k; ++i) {
      const uint32_t word = words[static_cast<size_t>(i / 2)];
      kept[(j + i) * stride] = (i % 2 == 0 ? word & 0xffff : word >> 16) >= threshold;
    }
  }
}

}  // namespace

Status dropout_mask(double dropout_p, uint64_t seed, uint32_t offset, const Tensor& kept) try {
  if (!(dropout_p >= 0 && dropout_p <= 1)) return invalid(sentence("dropout_p is ", dropout_p, ", must be 0 to 1"));
  if (Status status = check_kept(kept); !status.ok()) return status;
  const int64_t batch = kept.dims[0], num_heads = kept.dims[1], seqlen_q = kept.dims[2], seqlen_k = kept.dims[3];
  if (batch == 0 || num_heads == 0 || seqlen_q == 0 || seqlen_k == 0) return {};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < num_heads; ++h) {
      for (int64_t i = 0; i < seqlen_q; ++i) {
        bool* row = static_cast<bool*>(kept.data) + b * kept.strides[0] + h * kept.strides[1] + i * kept.strides[2];
        fill_row(dropout_threshold(dropout_p), seed,
                 {static_cast<uint32_t>(b * num_heads + h), static_cast<uint32_t>(i)}, offset, row, seqlen_k,
                 kept.strides[3]);
      }
    }
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
