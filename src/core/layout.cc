#include "core/layout.h"

#include <utility>

namespace polyhead {
namespace {

// The dims of a view with more than one index, smallest stride first, in bytes; negative strides turned round.
struct Steps {
  int count = 0;
  int64_t size[Tensor::kMaxDims];
  int64_t stride[Tensor::kMaxDims];
};

// Only for a view whose memory_range() is known to fit. A view without elements has no steps: its strides mean nothing.
Steps sorted_steps(const Tensor& t) {
  Steps steps;
  if (t.num_elements() == 0) return steps;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.dims[i] <= 1) continue;
    int at = steps.count++;
    const int64_t bytes =
        (t.strides[i] < 0 ? -t.strides[i] : t.strides[i]) * static_cast<int64_t>(dtype_size_bytes(t.dtype));
    for (; at > 0 && steps.stride[at - 1] > bytes; --at) {
      steps.stride[at] = steps.stride[at - 1];
      steps.size[at] = steps.size[at - 1];
    }
    steps.stride[at] = bytes;
    steps.size[at] = t.dims[i];
  }
  return steps;
}

// The bytes that a view touches within a period: [0, width) from its first byte, if it repeats with that period.
// False if some stride is neither a multiple of the period nor part of the window.
bool window_within(const Steps& steps, int64_t element_bytes, int64_t period, int64_t* width) {
  *width = element_bytes;
  for (int i = 0; i < steps.count; ++i) {
    if (steps.stride[i] % period != 0) *width += (steps.size[i] - 1) * steps.stride[i];
  }
  return *width <= period;
}

}  // namespace

bool memory_range(const Tensor& t, MemoryRange* range) {
  *range = {};
  int64_t below = 0, above = 1;  // elements before and from data on
  bool fits = true;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.dims[i] == 1) continue;
    if (t.dims[i] == 0) return true;  // its strides may be any numbers
    int64_t reach = 0;
    if (__builtin_mul_overflow(t.dims[i] - 1, t.strides[i], &reach)) fits = false;
    if (__builtin_add_overflow(below, reach < 0 ? reach : 0, &below)) fits = false;
    if (__builtin_add_overflow(above, reach < 0 ? 0 : reach, &above)) fits = false;
  }
  const auto element_bytes = static_cast<int64_t>(dtype_size_bytes(t.dtype));
  if (__builtin_mul_overflow(below, element_bytes, &below)) fits = false;
  if (__builtin_mul_overflow(above, element_bytes, &above)) fits = false;
  if (!fits) return false;
  const auto base = reinterpret_cast<uintptr_t>(t.data);
  const auto down = static_cast<uintptr_t>(-(below + 1)) + 1;  // -below without overflow
  if (down > base || __builtin_add_overflow(base, static_cast<uintptr_t>(above), &range->end)) return false;
  range->begin = base - down;
  return true;
}

bool overlaps_itself(const Tensor& t) {
  const Steps steps = sorted_steps(t);
  int64_t reach = 0;  // of all smaller strides
  for (int i = 0; i < steps.count; ++i) {
    if (steps.stride[i] <= reach) return true;
    reach += (steps.size[i] - 1) * steps.stride[i];
  }
  return false;
}

bool may_share_memory(const Tensor& a, const Tensor& b) {
  MemoryRange range_a, range_b;
  if (!memory_range(a, &range_a) || !memory_range(b, &range_b)) return true;
  if (!range_a.intersects(range_b)) return false;
  if (range_b.begin < range_a.begin) return may_share_memory(b, a);
  // Interleaved views repeat with a common period and keep apart within it. Every stride is a candidate.
  const Steps steps_a = sorted_steps(a), steps_b = sorted_steps(b);
  for (const Steps* steps : {&steps_a, &steps_b}) {
    for (int i = 0; i < steps->count; ++i) {
      const int64_t period = steps->stride[i];
      int64_t width_a = 0, width_b = 0;
      if (period == 0 || !window_within(steps_a, static_cast<int64_t>(dtype_size_bytes(a.dtype)), period, &width_a) ||
          !window_within(steps_b, static_cast<int64_t>(dtype_size_bytes(b.dtype)), period, &width_b)) {
        continue;
      }
      // b's window starts `lead` bytes after a's, on a circle of `period` bytes.
      const auto lead = static_cast<int64_t>((range_b.begin - range_a.begin) % static_cast<uintptr_t>(period));
      if (lead >= width_a && lead + width_b <= period) return false;
    }
  }
  return true;
}

bool same_view(const Tensor& a, const Tensor& b) {
  if (!a.given() || a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i) {
    if (a.dims[i] != b.dims[i] || (a.dims[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

}  // namespace polyhead
