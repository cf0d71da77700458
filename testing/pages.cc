#include "testing/pages.h"

#include <algorithm>
#include <numeric>

#include "core/memory_size.h"

namespace polyhead::testing {

int64_t enough_pages(const AttentionDesc& d) { return d.batch * (d.seqlen_k / d.page_size) + 3; }

Pages in_pages(const AttentionDesc& d, const Inputs& in, uint64_t seed) {
  Random random(seed, streams::kPages);
  const int64_t per_sequence = d.seqlen_k / d.page_size;
  std::vector<int64_t> free(static_cast<size_t>(d.num_pages));
  std::iota(free.begin(), free.end(), 0);
  for (size_t n = free.size(); n > 1; --n)
    std::swap(free[n - 1], free[static_cast<size_t>(random.integer(0, static_cast<int64_t>(n) - 1))]);
  Pages pages;
  const std::pair<const Array*, Array*> pools[] = {{&in.key, &pages.key},
                                                   {&in.value, &pages.value},
                                                   {&in.key_scales, &pages.key_scales},
                                                   {&in.value_scales, &pages.value_scales}};
  for (const auto& [from, to] : pools) {
    if (!from->given()) continue;
    *to = Array(from->dtype, {d.num_pages, d.page_size, d.num_heads_kv, from->dims[3]});
    std::fill(to->bytes.begin(), to->bytes.end(), uint8_t{0xff});  // NaN; of integers it is in the scales
  }
  pages.table = Array(random.chance(0.5) ? DType::kInt32 : DType::kInt64, {d.batch, per_sequence});
  for (int64_t b = 0; b < d.batch; ++b) {
    const int64_t used = pieces(static_cast<int64_t>(in.seqlens_k.at(b)), d.page_size);
    for (int64_t p = 0; p < per_sequence; ++p) {
      if (p >= used) {
        pages.table.set(b * per_sequence + p, random.chance(0.5) ? -7 : 1e9);
        continue;
      }
      const int64_t page = free.back();
      free.pop_back();
      pages.table.set(b * per_sequence + p, static_cast<double>(page));
      for (const auto& [from, to] : pools) {
        if (d.seqlen_k == 0 || from->bytes.empty()) continue;
        const size_t row = from->bytes.size() / static_cast<size_t>(d.batch * d.seqlen_k);
        const size_t bytes = row * static_cast<size_t>(d.page_size);
        std::copy_n(
            from->bytes.begin() + static_cast<std::ptrdiff_t>((b * per_sequence + p) * static_cast<int64_t>(bytes)),
            bytes, to->bytes.begin() + static_cast<std::ptrdiff_t>(page * static_cast<int64_t>(bytes)));
      }
    }
  }
  return pages;
}

}  // namespace polyhead::testing
