// Where the intermediate results of a layer lie.
#include <algorithm>

#include "layer/fingerprint.h"
#include "layer/state.h"

namespace polyhead {
namespace {

size_t statistic_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// q | k | v in one matrix if `joined`, else q, and k | v; `all`: also of projections that are off.
Projected take_projected(const LayerState& s, bool all, MemoryMap& map) {
  Projected at;
  const size_t element = dtype_size_bytes(s.desc.dtype);
  int64_t columns[3];
  for (int i = 0; i < 3; ++i) columns[i] = all || s.projections[i].on ? s.projections[i].columns() : 0;
  const auto take = [&](int first, int last) {
    int64_t row = 0;
    for (int i = first; i <= last; ++i) row += columns[i];
    const Projection& p = s.projections[first];
    size_t offset = map.take({s.desc.batch, p.beams, p.steps, row}, element);
    for (int i = first; i <= last; ++i) {
      at.offset[i] = offset;
      at.row_stride[i] = row;
      offset += static_cast<size_t>(columns[i]) * element;
    }
  };
  if (s.joined) {
    take(kQuery, kValue);
  } else {
    take(kQuery, kQuery);
    take(kKey, kValue);
  }
  return at;
}

Activations take_activations(const LayerState& s, bool training, MemoryMap& map) {
  Activations at;
  const LayerDesc& desc = s.desc;
  const size_t element = dtype_size_bytes(desc.dtype);
  if (training) at.header = map.take_bytes(sizeof(ReserveHeader));
  at.projected = take_projected(s, false, map);
  if (training || !s.attention_writes_out()) {
    at.attention_out = map.take({s.tokens_q(), s.heads_size}, element);
  }
  if (training) {
    at.logsumexp = map.take({s.tokens_q(), desc.num_heads}, statistic_bytes(desc.dtype));
  }
  at.bytes = map.bytes();
  return at;
}

void take_gradients(LayerState& s, MemoryMap& map) {
  s.gradients.begin = map.bytes();
  s.gradients.projected = take_projected(s, true, map);
  s.gradients.end = map.bytes();
}

// What products and sums need at once, over the ways in which neighbouring projections of one input may be joined.
class SharedBytes {
 public:
  explicit SharedBytes(const LayerState& s) : s_(s) {}
  size_t bytes() const { return bytes_; }

  void add(size_t bytes) { bytes_ = std::max(bytes_, bytes); }
  void add_product(int64_t m, int64_t n, int64_t k, bool split_k) {
    linear::GemmDesc desc;
    desc.m = m, desc.n = n, desc.k = k, desc.dtype = s_.desc.dtype, desc.split_k = split_k;
    add(s_.linear->gemm_workspace_bytes(desc, s_.executor->num_threads()));
  }
  void add_sums(int64_t m, int64_t n) { add(s_.linear->sums_workspace_bytes(m, n, s_.desc.dtype)); }

  // visit(tokens, size of x, columns of y) for each run of projections that are on.
  template <class Visit>
  void for_each_run(Visit visit) const {
    for (int first = kQuery; first <= kValue; ++first) {
      int64_t columns = 0;
      for (int last = first; last <= kValue && s_.projections[last].on; ++last) {
        columns += s_.projections[last].columns();
        for (const int64_t steps : {int64_t{1}, s_.projections[first].steps}) {
          visit(s_.desc.batch * s_.projections[first].beams * steps, s_.projections[first].size, columns);
        }
      }
    }
  }

 private:
  const LayerState& s_;
  size_t bytes_ = 0;
};

size_t forward_shared_bytes(const LayerState& s) {
  SharedBytes shared(s);
  for (const auto* plan : {&s.train, &s.infer, &s.step}) {
    if (plan->has_value()) shared.add((*plan)->workspace_bytes());
  }
  shared.for_each_run(
      [&](int64_t tokens, int64_t size, int64_t columns) { shared.add_product(tokens, columns, size, false); });
  if (s.out_projected()) {
    for (const int64_t steps : {int64_t{1}, s.desc.seqlen_q}) {
      shared.add_product(s.desc.batch * s.desc.beam * steps, s.out_size, s.heads_size, false);
    }
  }
  return shared.bytes();
}

size_t backward_shared_bytes(const LayerState& s) {
  SharedBytes shared(s);
  shared.add(s.train->backward_workspace_bytes());
  shared.for_each_run([&](int64_t tokens, int64_t size, int64_t columns) {
    shared.add_product(tokens, size, columns, false);
    shared.add_product(size, columns, tokens, true);
    shared.add_sums(tokens, columns);
  });
  if (s.out_projected()) {
    shared.add_product(s.tokens_q(), s.heads_size, s.out_size, false);
    shared.add_product(s.heads_size, s.out_size, s.tokens_q(), true);
    shared.add_sums(s.tokens_q(), s.out_size);
  }
  return shared.bytes();
}

}  // namespace

size_t MemoryMap::take(std::initializer_list<int64_t> sizes, size_t element_bytes) {
  const size_t offset = bytes_;
  size_t bytes = element_bytes;
  bool beyond = false, empty = false;
  for (const int64_t size : sizes) {
    if (size == 0) empty = true;
    beyond |= __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
  }
  if (empty) return offset;
  beyond |= __builtin_add_overflow(bytes, size_t{63}, &bytes);
  beyond |= __builtin_add_overflow(bytes_, bytes / 64 * 64, &bytes_);
  fits_ = fits_ && !beyond && bytes_ <= size_t{PTRDIFF_MAX};
  return offset;
}

bool lay_out_memory(LayerState& s) {
  const size_t element = dtype_size_bytes(s.desc.dtype);
  MemoryMap reserve, forward, backward;
  s.reserve = take_activations(s, true, reserve);
  if (!s.gradients.in_workspace) take_gradients(s, reserve);
  s.reserve.bytes = reserve.bytes();

  s.forward.activations = take_activations(s, false, forward);
  s.forward.step_lengths = forward.take({2, s.desc.batch}, sizeof(int64_t));
  if (!reserve.fits() || !forward.fits()) return false;  // before products of such sizes are asked about
  s.forward.shared = forward.take_bytes(forward_shared_bytes(s));
  s.forward.bytes = forward.bytes();

  // Inputs are copied where their padding must not be seen, grad_out also where the output was dropped.
  const bool padded_q = s.asked.has_seqlens_q, padded_k = s.asked.has_seqlens_k;
  const int64_t query_row =
      std::max(padded_q ? s.desc.query_size : 0, padded_q || s.desc.output_dropout_p > 0 ? s.out_size : 0);
  const int64_t key_row = padded_k ? std::max(s.desc.key_size, s.desc.value_size) : 0;
  MemoryMap query_rows, key_rows;
  query_rows.take({s.tokens_q(), query_row}, element);
  key_rows.take({s.tokens_k(), key_row}, element);
  s.backward.rows = backward.take_bytes(std::max(query_rows.bytes(), key_rows.bytes()));
  s.backward.grad_attention = backward.take({s.out_projected() ? s.tokens_q() : 0, s.heads_size}, element);
  if (s.gradients.in_workspace) take_gradients(s, backward);
  if (!query_rows.fits() || !key_rows.fits() || !backward.fits()) return false;
  s.backward.shared = backward.take_bytes(backward_shared_bytes(s));
  s.backward.bytes = backward.bytes();
  return forward.fits() && backward.fits();
}

uint64_t fingerprint_of(const LayerDesc& desc) {
  Fingerprint print;
  for (const int64_t number :
       {desc.batch, desc.beam, desc.beam_kv, desc.seqlen_q, desc.seqlen_k, desc.num_heads, desc.num_heads_kv,
        desc.query_size, desc.key_size, desc.value_size, desc.query_proj_size, desc.key_proj_size, desc.value_proj_size,
        desc.out_proj_size, static_cast<int64_t>(desc.dtype)}) {
    print.add(number);
  }
  for (const bool flag :
       {desc.query_bias, desc.key_bias, desc.value_bias, desc.out_bias, desc.residual, desc.has_windows}) {
    print.add(flag);
  }
  print.add(desc.output_dropout_p);
  const AttentionDesc& a = desc.attention;
  for (const bool flag : {a.has_seqlens_q, a.has_seqlens_k, a.causal, a.has_query_offsets, a.scale.has_value(),
                          a.query_offset.has_value()}) {
    print.add(flag);
  }
  for (const double number : {a.scale.value_or(0), a.softcap, a.dropout_p}) print.add(number);
  for (const int64_t number : {a.window_left, a.window_right, static_cast<int64_t>(a.align), a.query_offset.value_or(0),
                               int64_t{a.alibi_slopes_ndim}, static_cast<int64_t>(a.return_weights)}) {
    print.add(number);
  }
  print.add(a.attn_mask);
  print.add(a.attn_bias);
  return print.value();
}

}  // namespace polyhead
