// Forward, as the contract says it.
//   Q [B, Sq, H, D]  K [B, Sk, G, D]  V [B, Sk, G, Dv]  S, P [Sk] (one row)  O [Dv] (one row)  m, l, L scalars of a row
#include "reference/attention.h"

#include <algorithm>
#include <vector>

#include "contract/kernel.h"
#include "contract/program_call.h"
#include "reference/scores.h"

namespace polyhead::reference {
namespace {

// Memory of one call.
template <class T>
struct ForwardScratch {
  int64_t* visible;  // [Sk] the keys that a row sees, in order
  T* P;              // [Sk] their weights
  T* column;         // [Sk] sums over the rows of a head, or means over the heads of a row
  T* O;              // [Dv]
  void* program;

  static MemorySize bytes(const AttentionDesc& desc) {
    return MemorySize(desc.seqlen_k) * (sizeof(int64_t) + 2 * sizeof(T)) + MemorySize(desc.head_dim_v) * sizeof(T) +
           program_bytes<T>(desc);
  }

  ForwardScratch(const AttentionDesc& desc, void* memory) {
    program = memory;
    visible = reinterpret_cast<int64_t*>(static_cast<char*>(memory) + program_bytes<T>(desc).value());
    P = reinterpret_cast<T*>(visible + desc.seqlen_k);
    column = P + desc.seqlen_k;
    O = column + desc.seqlen_k;
  }
};

template <class T, class In>
class Forward {
 public:
  Forward(const AttentionDesc& desc, const ForwardArgs& args, const Sequences& sequences, ForwardScratch<T> scratch)
      : desc_(desc),
        args_(args),
        sequences_(sequences),
        scores_(desc, args, scratch.program),
        out_(args.out),
        scratch_(scratch) {}

  void run() const {
    for (int64_t b = 0; b < desc_.batch; ++b) {
      const Sequence s = sequences_[b];
      for (int64_t h = 0; h < desc_.num_heads; ++h) head(s, b, h);
      if (desc_.return_weights == ReturnWeights::kMean) mean_weights(s, b);
    }
    if (desc_.packed) rows_behind_the_end();
  }

 private:
  struct Row {
    int64_t num_visible;
    T L;
  };

  // Fills scratch_.visible and scratch_.P (before dropout) of query i. Without a softmax P is S, and L tells
  // only whether there is one.
  Row weights(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    int64_t* visible = scratch_.visible;
    T* P = scratch_.P;
    int64_t n = 0;
    const KeyRange range = key_range(desc_, args_, s, i);
    for (int64_t j = desc_.sink_keys > 0 ? 0 : range.begin; j < range.end; ++j) {
      if (!sees_key(desc_.sink_keys, range, j) || !scores_.visible(s, b, h, i, j)) continue;
      P[n] = scores_.score(scores_.raw(s, b, h, i, j), s, b, h, i, j);  // S
      if (!scores_.hides(P[n])) visible[n++] = j;
    }
    if (!scores_.softmax()) return {n, n == 0 ? static_cast<T>(-HUGE_VAL) : T(0)};
    const T sink = i < s.len_q ? scores_.sink(h) : static_cast<T>(-HUGE_VAL);  // padding has none
    if (n == 0) return {0, sink};

    T m = sink;
    for (int64_t k = 0; k < n; ++k) {
      if (P[k] > m) m = P[k];
    }
    T l = sink == static_cast<T>(-HUGE_VAL) ? T(0) : std::exp(sink - m);
    for (int64_t k = 0; k < n; ++k) {
      P[k] = std::exp(P[k] - m);  // NaN where S is NaN or inf
      l += P[k];
    }
    for (int64_t k = 0; k < n; ++k) P[k] /= l;
    return {n, m + std::log(l)};
  }

  void head(const Sequence& s, int64_t b, int64_t h) const {
    const int64_t rows = desc_.packed ? s.len_q : desc_.seqlen_q;
    if (desc_.return_column_sums) std::fill_n(scratch_.column, desc_.seqlen_k, T(0));
    for (int64_t i = 0; i < rows; ++i) {
      const Row row = weights(s, b, h, i);
      if (args_.logsumexp.given()) store_logsumexp(b, h, s.first_q + i, row.L);
      if (desc_.return_column_sums) {
        for (int64_t k = 0; k < row.num_visible; ++k) scratch_.column[scratch_.visible[k]] += scratch_.P[k];
      }
      for (int64_t k = 0; k < row.num_visible; ++k) {
        scratch_.P[k] *= scores_.dropout_factor(b, h, i, scratch_.visible[k]);
      }
      if (desc_.return_weights == ReturnWeights::kPerHead) store_weights(b, h, i, row.num_visible);
      weighted_values(s, b, h, row);
      store_out(b, s.first_q + i, h);
    }
    if (desc_.return_column_sums) {
      const Tensor& t = args_.column_sums;
      for (int64_t j = 0; j < desc_.seqlen_k; ++j) {
        store(t, b * t.strides[0] + h * t.strides[1] + j * t.strides[2], scratch_.column[j]);
      }
    }
  }

  // O = sum_k P_k V_k; a sink of NaN makes rows NaN that see no key, too.
  void weighted_values(const Sequence& s, int64_t b, int64_t h, const Row& row) const {
    std::fill_n(scratch_.O, desc_.head_dim_v, std::isnan(row.L) ? row.L : T(0));
    for (int64_t k = 0; k < row.num_visible; ++k) {
      scores_.add_value(scratch_.P[k], s, b, h, scratch_.visible[k], scratch_.O);
    }
  }

  void mean_weights(const Sequence& s, int64_t b) const {
    const Tensor& t = args_.attn_weights;
    for (int64_t i = 0; i < desc_.seqlen_q; ++i) {
      std::fill_n(scratch_.column, desc_.seqlen_k, T(0));
      for (int64_t h = 0; h < desc_.num_heads; ++h) {
        const Row row = weights(s, b, h, i);
        for (int64_t k = 0; k < row.num_visible; ++k) {
          const int64_t j = scratch_.visible[k];
          scratch_.column[j] += scratch_.P[k] * scores_.dropout_factor(b, h, i, j);
        }
      }
      const T num_heads = static_cast<T>(std::max<int64_t>(desc_.num_heads, 1));
      for (int64_t j = 0; j < desc_.seqlen_k; ++j) {
        store(t, b * t.strides[0] + i * t.strides[1] + j * t.strides[2], scratch_.column[j] / num_heads);
      }
    }
  }

  void store_weights(int64_t b, int64_t h, int64_t i, int64_t num_visible) const {
    const Tensor& t = args_.attn_weights;
    const int64_t at = b * t.strides[0] + h * t.strides[1] + i * t.strides[2];
    for (int64_t j = 0; j < desc_.seqlen_k; ++j) store(t, at + j * t.strides[3], T(0));
    for (int64_t k = 0; k < num_visible; ++k) store(t, at + scratch_.visible[k] * t.strides[3], scratch_.P[k]);
  }

  void rows_behind_the_end() const {
    std::fill_n(scratch_.O, desc_.head_dim_v, T(0));
    for (int64_t i = sequences_.end_q(); i < desc_.seqlen_q; ++i) {
      for (int64_t h = 0; h < desc_.num_heads; ++h) {
        store_out(0, i, h);
        if (args_.logsumexp.given()) store_logsumexp(0, h, i, static_cast<T>(-HUGE_VAL));
      }
    }
  }

  void store_out(int64_t b, int64_t row, int64_t h) const {
    for (int64_t d = 0; d < desc_.head_dim_v; ++d) store(args_.out, out_.at(b, row, h) + d * out_.dim, scratch_.O[d]);
  }

  void store_logsumexp(int64_t b, int64_t h, int64_t row, T L) const {
    store(args_.logsumexp, statistic_at(args_.logsumexp, b, h, row), L);
  }

  static void store(const Tensor& t, int64_t at, T value) {
    store_element(t.data, t.dtype, at, static_cast<double>(value));
  }

  const AttentionDesc& desc_;
  const ForwardArgs& args_;
  const Sequences& sequences_;
  Scores<T, In> scores_;
  Operand out_;
  ForwardScratch<T> scratch_;
};

}  // namespace

template <class T>
MemorySize workspace_bytes(const AttentionDesc& desc) {
  return Sequences::table_bytes(desc) + ForwardScratch<T>::bytes(desc).rounded_up(64);
}

template <class T>
Status forward_checked(const AttentionDesc& desc, const ForwardArgs& given, void* workspace) {
  ForwardArgs args = given;
  Sequences sequences;
  if (Status status = sequences.read(desc, args, workspace); !status.ok()) return status;
  if (Status status = check_program_indices(desc, args, sequences); !status.ok()) return status;
  sequences.replace_arrays(&args);
  const ForwardScratch<T> scratch(desc, static_cast<char*>(workspace) + Sequences::table_bytes(desc).value());
  with_element_type(desc.dtype, [&]<class In>(In) { Forward<T, In>(desc, args, sequences, scratch).run(); });
  return {};
}

template <class T>
void forward(const AttentionDesc& desc, const ForwardArgs& args) {
  std::vector<int64_t> own;
  void* memory = args.workspace;
  if (const size_t needed = workspace_bytes<T>(desc).value(); args.workspace_bytes < needed) {
    own.resize(needed / sizeof(int64_t));
    memory = own.data();
  }
  static_cast<void>(forward_checked<T>(desc, args, memory));
}

template MemorySize workspace_bytes<double>(const AttentionDesc&);
template MemorySize workspace_bytes<float>(const AttentionDesc&);
template void forward<double>(const AttentionDesc&, const ForwardArgs&);
template void forward<float>(const AttentionDesc&, const ForwardArgs&);
template Status forward_checked<double>(const AttentionDesc&, const ForwardArgs&, void*);
template Status forward_checked<float>(const AttentionDesc&, const ForwardArgs&, void*);

}  // namespace polyhead::reference

namespace polyhead {

const Kernel kReference = {
    "reference",
    Device::kCpu,
    [](const AttentionDesc&) { return std::string(); },
    [](const AttentionDesc& desc, int) { return reference::workspace_bytes<double>(desc); },
    [](const AttentionDesc& desc, int) { return reference::backward_workspace_bytes<double>(desc); },
    [](const AttentionDesc& desc, const ForwardArgs& args, const Run&) {
      return reference::forward_checked<double>(desc, args, args.workspace);
    },
    [](const AttentionDesc& desc, const BackwardArgs& args, const Run&) {
      return reference::backward_checked<double>(desc, args, args.forward.workspace);
    },
};

}  // namespace polyhead
