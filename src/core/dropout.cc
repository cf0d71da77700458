#include "core/dropout.h"

#include <cstdint>
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
  return {};
}

// One row of keys, [Sk]: eight keys share a counter.
void fill_row(uint32_t threshold, uint64_t seed, const std::array<uint32_t, 2>& head_and_query, uint32_t offset,
              int64_t first_group, bool* kept, int64_t seqlen_k, int64_t stride) {
  for (int64_t j = 0; j < seqlen_k; j += 8) {
    const auto words =
        philox4x32({head_and_query[0], head_and_query[1], static_cast<uint32_t>(first_group + j / 8), offset},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    for (int64_t i = 0; i < 8 && j + i < seqlen_k; ++i) {
      const uint32_t word = words[static_cast<size_t>(i / 2)];
      kept[(j + i) * stride] = (i % 2 == 0 ? word & 0xffff : word >> 16) >= threshold;
    }
  }
}

}  // namespace

Status check_dropout_counters(const DropoutOrigin& origin, int64_t batch, int64_t num_heads, int64_t seqlen_q,
                              int64_t seqlen_k) {
  const struct {
    const char* field;
    int64_t value;
  } fields[] = {{"first_head", origin.first_head},
                {"num_heads", origin.num_heads},
                {"first_query", origin.first_query},
                {"first_key", origin.first_key}};
  for (const auto& field : fields) {
    if (field.value < 0) {
      return invalid(sentence("dropout_origin.", field.field, " is ", field.value, ", must not be negative"));
    }
  }
  if (origin.num_heads != 0 && origin.num_heads < num_heads) {
    return invalid(
        sentence("dropout_origin.num_heads is ", origin.num_heads, ", must be 0 or at least the call's ", num_heads));
  }
  if (origin.first_key % 8 != 0) {
    return invalid(sentence("dropout_origin.first_key is ", origin.first_key,
                            ", must be a multiple of 8: eight keys share a counter of dropout"));
  }
  __extension__ using Wide = __int128;
  constexpr Wide kWords = Wide{1} << 32;
  const Wide last_head = Wide{batch - 1} * counted_heads(origin, num_heads) + num_heads;
  const struct {
    const char* what;
    int64_t first;
    Wide size;
  } counters[] = {{"batch * num_heads", origin.first_head, last_head},
                  {"seqlen_q", origin.first_query, seqlen_q},
                  {"seqlen_k / 8", origin.first_key / 8, seqlen_k / 8}};
  for (const auto& counter : counters) {
    const Wide end = counter.first + counter.size;
    if (end <= kWords) continue;
    return invalid(sentence(counter.what, counter.first == 0 ? " is " : " ends, counted from dropout_origin, at ",
                            end > INT64_MAX ? INT64_MAX : static_cast<int64_t>(end), ", dropout counts it in 32 bits"));
  }
  return {};
}

Status dropout_mask(double dropout_p, uint64_t seed, uint32_t offset, const Tensor& kept,
                    const DropoutOrigin& dropout_origin) try {
  if (!(dropout_p >= 0 && dropout_p <= 1)) return invalid(sentence("dropout_p is ", dropout_p, ", must be 0 to 1"));
  if (Status status = check_kept(kept); !status.ok()) return status;
  const int64_t batch = kept.dims[0], num_heads = kept.dims[1], seqlen_q = kept.dims[2], seqlen_k = kept.dims[3];
  Status counters = check_dropout_counters(dropout_origin, batch, num_heads, seqlen_q, seqlen_k);
  if (!counters.ok()) return counters;
  if (batch == 0 || num_heads == 0 || seqlen_q == 0 || seqlen_k == 0) return {};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < num_heads; ++h) {
      for (int64_t i = 0; i < seqlen_q; ++i) {
        bool* row = static_cast<bool*>(kept.data) + b * kept.strides[0] + h * kept.strides[1] + i * kept.strides[2];
        const int64_t head_index = dropout_origin.first_head + b * counted_heads(dropout_origin, num_heads) + h;
        fill_row(dropout_threshold(dropout_p), seed,
                 {static_cast<uint32_t>(head_index), static_cast<uint32_t>(dropout_origin.first_query + i)}, offset,
                 dropout_origin.first_key / 8, row, seqlen_k, kept.strides[3]);
      }
    }
  }
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

}  // namespace polyhead
