// x [D] one head of one token
#include "cache/append.h"

#include <algorithm>
#include <cmath>

#include "contract/sequences.h"
#include "core/memory_size.h"
#include "core/rotary.h"
#include "core/sentence.h"

namespace polyhead {
namespace {

// What is done to each head of key and query.
class Turn {
 public:
  Turn(const KvCacheDesc& desc, const NewTokens& tokens) : desc_(desc), tokens_(tokens) {}

  void operator()(int64_t token, float* x) const {
    if (tokens_.positions != nullptr && tokens_.positions[token] >= 0) rotate(tokens_.positions[token], x);
    if (desc_.hadamard) hadamard(x);
  }

 private:
  void rotate(int64_t position, float* x) const {
    const auto angles = [&](const Tensor& t) {
      return Angles<float>{static_cast<const float*>(t.data) + position * t.strides[0], t.strides[1]};
    };
    polyhead::rotate(desc_.rotary_dim / 2, desc_.interleaved, angles(*tokens_.cos), angles(*tokens_.sin), x, x);
  }

  // The fast Walsh-Hadamard transform.
  void hadamard(float* x) const {
    const int64_t dim = desc_.head_dim;
    for (int64_t half = 1; half < dim; half *= 2) {
      for (int64_t block = 0; block < dim; block += 2 * half) {
        for (int64_t d = block; d < block + half; ++d) {
          const float a = x[d], b = x[d + half];
          x[d] = a + b;
          x[d + half] = a - b;
        }
      }
    }
    const float scale = 1 / std::sqrt(static_cast<float>(dim));
    for (int64_t d = 0; d < dim; ++d) x[d] *= scale;
  }

  const KvCacheDesc& desc_;
  const NewTokens& tokens_;
};

}  // namespace

NumberRange slot_range(const KvCacheDesc& desc) {
  return {-1, desc.num_pages * desc.page_size - 1, "-1 is nowhere, else a slot of the cache"};
}

NumberRange position_range(const Tensor& cos) { return {0, cos.dims[0] - 1, "the rows of cos"}; }

Status read_numbers(const char* name, int64_t row, const Tensor& t, int64_t count, const NumberRange& range,
                    int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = integer_at(t, i);
    if (out[i] >= range.least && out[i] <= range.most) continue;
    return invalid(sentence(name, "[", row >= 0 ? sentence(row, ", ") : "", i, "] is ", out[i], ", must be ",
                            range.least, " to ", range.most, ": ", range.of_what));
  }
  return {};
}

Status check_distinct(const char* name, int64_t* slots, int64_t count) {
  std::sort(slots, slots + count);
  const int64_t* const end = slots + count;
  const int64_t* const twice = std::adjacent_find(std::upper_bound(slots, slots + count, int64_t{-1}), slots + count);
  if (twice == end) return {};
  return invalid(sentence(name, " holds ", *twice, " twice: a slot takes one token"));
}

void append(const KvCacheDesc& desc, const KvTensors& pool, const NewTokens& tokens, float* memory, const Run& run) {
  constexpr int64_t kTokens = 16;  // of a task
  const Turn turn(desc, tokens);
  const Heads key = keys_of(desc, pool), value = values_of(desc, pool);
  const int64_t num_heads = tokens.query != nullptr ? tokens.query->heads() : 0, dim = longest_head(desc);
  const auto write = [&](int64_t token, float* x) {
    for (int64_t h = 0; h < num_heads; ++h) {
      load(*tokens.query, token, h, x);
      turn(token, x);
      store(x, *tokens.query_out, token, h);
    }
    const int64_t slot = tokens.slots != nullptr ? tokens.slots[token] : -1;
    for (int64_t h = 0; h < desc.num_heads_kv && slot >= 0; ++h) {
      load(*tokens.key, token, h, x);
      turn(token, x);
      store(x, key, slot, h);
      load(*tokens.value, token, h, x);
      store(x, value, slot, h);
    }
  };
  run_tasks(run, pieces(tokens.count, kTokens), [&](int64_t task, int lane) {
    const int64_t end = std::min(tokens.count, (task + 1) * kTokens);
    for (int64_t token = task * kTokens; token < end; ++token) write(token, memory + lane * dim);
  });
}

}  // namespace polyhead
