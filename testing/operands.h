// The operands of a problem's calls, drawn from its seed and densely stored.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "polyhead/attention.h"
#include "testing/array.h"
#include "testing/problem.h"
#include "testing/random.h"

namespace polyhead::testing {

// The inputs of one forward call. Of paged keys, key and value are [batch, seqlen_k, heads, dim] here: in pages they lie
// when they are placed (pages.h).
struct Inputs {
  Array query, key, value, key_scales, value_scales, attn_mask, attn_bias, alibi_slopes, sink_logits;
  Array seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, query_offsets, window_lo, window_hi;
  std::vector<Array> captures;  // of the program, in its order
  uint64_t dropout_seed = 0;
  uint32_t dropout_offset = 0;
};

struct InputName {
  const char* name;
  Array Inputs::*array;
  Tensor ForwardArgs::*tensor;
};
inline constexpr InputName kInputs[] = {
    {"query", &Inputs::query, &ForwardArgs::query},
    {"key", &Inputs::key, &ForwardArgs::key},
    {"value", &Inputs::value, &ForwardArgs::value},
    {"key_scales", &Inputs::key_scales, &ForwardArgs::key_scales},
    {"value_scales", &Inputs::value_scales, &ForwardArgs::value_scales},
    {"attn_mask", &Inputs::attn_mask, &ForwardArgs::attn_mask},
    {"attn_bias", &Inputs::attn_bias, &ForwardArgs::attn_bias},
    {"alibi_slopes", &Inputs::alibi_slopes, &ForwardArgs::alibi_slopes},
    {"sink_logits", &Inputs::sink_logits, &ForwardArgs::sink_logits},
    {"seqlens_q", &Inputs::seqlens_q, &ForwardArgs::seqlens_q},
    {"seqlens_k", &Inputs::seqlens_k, &ForwardArgs::seqlens_k},
    {"cu_seqlens_q", &Inputs::cu_seqlens_q, &ForwardArgs::cu_seqlens_q},
    {"cu_seqlens_k", &Inputs::cu_seqlens_k, &ForwardArgs::cu_seqlens_k},
    {"query_offsets", &Inputs::query_offsets, &ForwardArgs::query_offsets},
    {"window_lo", &Inputs::window_lo, &ForwardArgs::window_lo},
    {"window_hi", &Inputs::window_hi, &ForwardArgs::window_hi},
};

// Draws every input but those that `given` has already. The same numbers in every layout but kExpanded and kMixed,
// which make some repeat, so that there are strides of 0 to use.
Inputs random_inputs(const Problem& problem, const ForwardArgs& given = {});

// The random lengths of the sequences (seqlens, or packed without cuts_rows): up to seqlen_q and seqlen_k. Where these
// are equal, query and key have the same lengths.
enum class Side { kQuery, kKey };
std::vector<int64_t> random_lengths(const Problem& problem, Side side);

// Bytes of all inputs that would be drawn; as a double, which no size overflows.
double input_bytes(const Problem& problem);

// One sequence of the batch, read from the inputs by code that shares nothing with src/contract/sequences.h.
struct Span {
  int64_t first_q = 0, first_k = 0, len_q = 0, len_k = 0, offset = 0;
};
Span span_of(const AttentionDesc& desc, const Inputs& in, int64_t b);

// Whether query i of sequence b, which is `s`, may look at key j, likewise; a program is not asked.
bool visible(const AttentionDesc& desc, const Inputs& in, const Span& s, int64_t b, int64_t h, int64_t i, int64_t j);

// The row of query and out, and that of key and value, which query i and key j of sequence b and head h have; packed
// operands have all rows in one.
inline int64_t query_row(const AttentionDesc& d, const Span& s, int64_t b, int64_t h, int64_t i) {
  return ((d.packed ? s.first_q : b * d.seqlen_q) + i) * d.num_heads + h;
}
inline bool packs_keys(const AttentionDesc& d) { return d.packed && d.page_size == 0; }
inline int64_t key_row(const AttentionDesc& d, const Span& s, int64_t b, int64_t h, int64_t j) {
  return ((packs_keys(d) ? s.first_k : b * d.seqlen_k) + j) * d.num_heads_kv + h / (d.num_heads / d.num_heads_kv);
}

// The element of a mask or bias, which broadcasts.
inline int64_t broadcast_index(const Array& a, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t at[4] = {b, h, i, j};
  int64_t index = 0;
  for (size_t n = 0; n < 4; ++n) index = index * a.dims[n] + (a.dims[n] == 1 ? 0 : at[n]);
  return index;
}

// Which places (b, h, i, j) of a problem are visible; i and j count within the row's own sequence.
class Visibility {
 public:
  Visibility(const AttentionDesc& desc, const Inputs& in);
  bool at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return seen_[static_cast<size_t>(((b * heads_ + h) * queries_ + i) * keys_ + j)] != 0;
  }
  bool any_key(int64_t b, int64_t h, int64_t i) const;  // that query i sees

  // Calls visit(b, h, i, j) for every visible place.
  template <class Visit>
  void for_each(Visit visit) const {
    size_t n = 0;
    for (int64_t b = 0; b < batch_; ++b) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t i = 0; i < queries_; ++i) {
          for (int64_t j = 0; j < keys_; ++j) {
            if (seen_[n++]) visit(b, h, i, j);
          }
        }
      }
    }
  }

 private:
  int64_t batch_, heads_, queries_, keys_;
  std::vector<uint8_t> seen_;
};

// What some visible pair reads: rows of query (and of out), rows of key and value, elements of the bias, heads [B, H].
struct VisibleParts {
  std::vector<uint8_t> query, key, bias, heads;
  VisibleParts() = default;
  VisibleParts(const AttentionDesc& desc, const Inputs& in, const Visibility& seen);
};

// The sequences [first, last) of a problem alone.
struct Slice {
  AttentionDesc desc;
  Inputs inputs;
};
Slice slice_batch(const AttentionDesc& desc, const Inputs& in, int64_t first, int64_t last);

// What gradient n of kGradients is stored in, whose input has this dtype.
inline DType gradient_dtype(const AttentionDesc& desc, int n, DType input) { return n < 3 ? grad_dtype(desc) : input; }

struct Gradients {
  Array query, key, value, attn_bias, alibi_slopes, sink_logits;
  std::vector<Array> captures;      // empty, or one for each of the program's; not given of those that are no floats
  std::vector<std::string> faults;  // elements not written, gaps or inputs written
};

// The inputs of one backward call. `out` and `logsumexp` are the definition's, rounded to their dtypes.
struct BackwardInputs {
  Inputs forward;
  Array out, logsumexp, grad_out, grad_logsumexp, delta;
  bool repeated_grad_out = false;  // so that the expanded layout has strides of 0
  bool accumulate = false;
  Gradients before;  // what the gradients hold, if accumulate
};
BackwardInputs random_backward_inputs(const Problem& problem);

// All but what forward gives: `in.forward` is there, out, logsumexp and delta are the caller's.
void draw_incoming(const Problem& problem, const AttentionDesc& desc, BackwardInputs& in);

// Sets `out`, `logsumexp` and `delta` anew, as `forward` and `grad_out` tell.
void compute_forward(const AttentionDesc& desc, BackwardInputs& in);

struct BackwardSlice {
  AttentionDesc desc;
  BackwardInputs inputs;
};
BackwardSlice slice_batch(const AttentionDesc& desc, const BackwardInputs& in, int64_t first, int64_t last);

}  // namespace polyhead::testing
