// Backward: each gradient is its defining sum, recomputed pair by pair, so nothing is stored but one value a row.
//   dP_ij = f_ij dO_i . V_j            O_i = sum_j P_ij f_ij V_j                  f: dropout's factor
//   dS_ij = P_ij (dP_ij - D_i + dL_i)  P = exp(S - L)                            D_i = dO_i . O_i, or delta
//   dX_ij = dS_ij (1 - tanh^2(X_ij / softcap))   S = softcap tanh(X / softcap) + bias - slope |i + offset - j|
//   dQ_i = scale sum_j dX_ij K_j  dK_j = scale sum_i dX_ij Q_i  dV_j = sum_i P_ij f_ij dO_i         X = scale Q K^T
//   dbias = dS, dslope = -sum_ij dS_ij |i + offset - j|, summed over what broadcasts
//   dsink_h = sum_i exp(sink_h - L_i) (dL_i - D_i)
// With Normalizer::kNone P = S and dS = dP. With a score program, dS is what that passes on.
#include <algorithm>
#include <vector>

#include "contract/attention_operands.h"
#include "contract/program_call.h"
#include "reference/attention.h"
#include "reference/scores.h"

namespace polyhead::reference {
namespace {

// Memory of one call.
template <class T>
struct BackwardScratch {
  T* D;        // [B, H, Sq], packed: [H, rows]
  T* row;      // [max(D, Dv)] a row of dQ or dK; zeros of any row
  T* row_v;    // [Dv] a row of dV
  T* capture;  // the gradient of the largest capture
  void* program;

  static MemorySize count_D(const AttentionDesc& desc) {
    return MemorySize(desc.packed ? 1 : desc.batch) * desc.num_heads * desc.seqlen_q;
  }
  static int64_t count_row(const AttentionDesc& desc) { return std::max(desc.head_dim, desc.head_dim_v); }
  static MemorySize count_capture(const AttentionDesc& desc) {
    MemorySize most = 0;
    for (const CaptureShape& shape : desc.captures) most = std::max(most, num_elements(shape));
    return most;
  }
  static MemorySize bytes(const AttentionDesc& desc) {
    return (count_D(desc) + count_row(desc) + desc.head_dim_v + count_capture(desc)) * sizeof(T) +
           program_bytes<T>(desc);
  }

  BackwardScratch(const AttentionDesc& desc, void* memory) {
    program = memory;
    D = reinterpret_cast<T*>(static_cast<char*>(memory) + program_bytes<T>(desc).value());
    row = D + count_D(desc).value();
    row_v = row + count_row(desc);
    capture = row_v + desc.head_dim_v;
  }
};

// Query, key and value have elements In, grad_out has elements Out.
template <class T, class In, class Out>
class Backward {
 public:
  Backward(const AttentionDesc& desc, const BackwardArgs& args, const Sequences& sequences, BackwardScratch<T> scratch)
      : desc_(desc),
        args_(args),
        sequences_(sequences),
        scores_(desc, args.forward, scratch.program),
        dO_(args.grad_out),
        scratch_(scratch) {}

  void run() const {
    if (scores_.softmax()) rowsum_dO_O();
    if (args_.grad_query.given()) grad_query();
    if (args_.grad_key.given() || args_.grad_value.given()) grad_key_value();
    if (args_.grad_attn_bias.given()) grad_attn_bias();
    if (args_.grad_alibi_slopes.given()) grad_alibi_slopes();
    if (args_.grad_sink_logits.given()) grad_sink_logits();
    for (size_t i = 0; i < args_.grad_captures.size(); ++i) {
      if (args_.grad_captures[i].given()) grad_capture(static_cast<int>(i));
    }
  }

 private:
  struct Pair {
    T P, dropped_P, dS, dX;
  };

  int64_t rows(const Sequence& s) const { return desc_.packed ? s.len_q : desc_.seqlen_q; }
  int64_t keys(const Sequence& s) const { return desc_.packed ? s.len_k : desc_.seqlen_k; }

  const Out* grad_out(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    return static_cast<const Out*>(args_.grad_out.data) + dO_.at(b, s.first_q + i, h);
  }

  T& D(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    const int64_t head = (desc_.packed ? 0 : b) * desc_.num_heads + h;
    return scratch_.D[head * desc_.seqlen_q + s.first_q + i];
  }

  T L(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    const Tensor& t = args_.forward.logsumexp;
    return load(t, statistic_at(t, b, h, s.first_q + i));
  }
  T dL(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    const Tensor& t = args_.grad_logsumexp;
    return t.given() ? load(t, statistic_at(t, b, h, s.first_q + i)) : T(0);
  }

  void rowsum_dO_O() const {
    const Operand O(args_.forward.out);
    const Tensor& delta = args_.delta;
    for (int64_t b = 0; b < desc_.batch; ++b) {
      const Sequence s = sequences_[b];
      for (int64_t h = 0; h < desc_.num_heads; ++h) {
        for (int64_t i = 0; i < rows(s); ++i) {
          if (delta.given()) {
            D(s, b, h, i) = load(delta, statistic_at(delta, b, h, s.first_q + i));
            continue;
          }
          T sum = 0;
          for (int64_t d = 0; d < desc_.head_dim_v; ++d) {
            sum += widen<T>(grad_out(s, b, h, i)[d * dO_.dim]) * load(O.tensor, O.at(b, s.first_q + i, h) + d * O.dim);
          }
          D(s, b, h, i) = sum;
        }
      }
    }
  }

  bool visible(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const KeyRange range = key_range(desc_, args_.forward, s, i);
    if (!sees_key(desc_.sink_keys, range, j) || !scores_.visible(s, b, h, i, j)) return false;
    return !scores_.program || !scores_.hides(scores_.score(scores_.raw(s, b, h, i, j), s, b, h, i, j));
  }

  Pair pair(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const T f = scores_.dropout_factor(b, h, i, j);
    const T X = scores_.raw(s, b, h, i, j);

    Pair p;
    const T S = scores_.score(X, s, b, h, i, j);
    p.P = scores_.softmax() ? std::exp(S - L(s, b, h, i)) : S;
    p.dropped_P = p.P * f;
    const T dP = f * dot<T>(grad_out(s, b, h, i), dO_.dim, scores_.value(s, b, h, j), scores_.V.dim, desc_.head_dim_v);
    p.dS = scores_.softmax() ? p.P * (dP - D(s, b, h, i) + dL(s, b, h, i)) : dP;
    if (scores_.program) p.dS = scores_.program->differentiate(p.dS);
    p.dX = p.dS;
    if (scores_.softcap > 0) {
      const T t = std::tanh(X / scores_.softcap);
      p.dX *= 1 - t * t;
    }
    return p;
  }

  // sum[d] += weight * x[d]
  template <class E>
  static void add(T* sum, T weight, const E* x, int64_t stride, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight * widen<T>(x[d * stride]);
  }

  void grad_query() const {
    const Operand dQ(args_.grad_query);
    const int64_t dim = desc_.head_dim;
    for (int64_t b = 0; b < desc_.batch; ++b) {
      const Sequence s = sequences_[b];
      for (int64_t h = 0; h < desc_.num_heads; ++h) {
        for (int64_t i = 0; i < rows(s); ++i) {
          std::fill_n(scratch_.row, BackwardScratch<T>::count_row(desc_), T(0));
          for (int64_t j = 0; j < keys(s); ++j) {
            if (visible(s, b, h, i, j))
              add(scratch_.row, pair(s, b, h, i, j).dX, scores_.key(s, b, h, j), scores_.K.dim, dim);
          }
          store_row(dQ, b, s.first_q + i, h, scratch_.row, scores_.scale, dim);
        }
      }
    }
    if (desc_.packed) rows_behind_the_end(dQ, sequences_.end_q(), desc_.seqlen_q, desc_.num_heads, dim);
  }

  void grad_key_value() const {
    const Operand dK(args_.grad_key), dV(args_.grad_value);
    for (int64_t b = 0; b < desc_.batch; ++b) {
      const Sequence s = sequences_[b];
      for (int64_t g = 0; g < desc_.num_heads_kv; ++g) {
        for (int64_t j = 0; j < keys(s); ++j) {
          sum_over_queries(s, b, g, j);
          if (dK.tensor.given()) store_row(dK, b, s.first_k + j, g, scratch_.row, scores_.scale, desc_.head_dim);
          if (dV.tensor.given()) store_row(dV, b, s.first_k + j, g, scratch_.row_v, T(1), desc_.head_dim_v);
        }
      }
    }
    if (!desc_.packed) return;
    const int64_t end = sequences_.end_k();
    if (dK.tensor.given()) rows_behind_the_end(dK, end, desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim);
    if (dV.tensor.given()) rows_behind_the_end(dV, end, desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim_v);
  }

  // scratch_.row = sum dX_ij Q_i, row_v = sum P_ij f_ij dO_i over the queries of the heads that read g.
  void sum_over_queries(const Sequence& s, int64_t b, int64_t g, int64_t j) const {
    std::fill_n(scratch_.row, BackwardScratch<T>::count_row(desc_), T(0));
    std::fill_n(scratch_.row_v, desc_.head_dim_v, T(0));
    const int64_t group_size = desc_.num_heads / desc_.num_heads_kv;
    for (int64_t h = g * group_size; h < (g + 1) * group_size; ++h) {
      for (int64_t i = 0; i < rows(s); ++i) {
        if (!visible(s, b, h, i, j)) continue;
        const Pair p = pair(s, b, h, i, j);
        add(scratch_.row, p.dX, scores_.query(s, b, h, i), scores_.Q.dim, desc_.head_dim);
        add(scratch_.row_v, p.dropped_P, grad_out(s, b, h, i), dO_.dim, desc_.head_dim_v);
      }
    }
  }

  void grad_attn_bias() const {
    const Tensor& dbias = args_.grad_attn_bias;
    const int64_t* dims = dbias.dims;
    const int64_t full[4] = {desc_.batch, desc_.num_heads, desc_.seqlen_q, desc_.seqlen_k};
    auto summed = [&](int n) { return dims[n] == 1 ? full[n] : 1; };  // elements that share one of the bias
    for (int64_t b = 0; b < dims[0]; ++b) {
      for (int64_t h = 0; h < dims[1]; ++h) {
        for (int64_t i = 0; i < dims[2]; ++i) {
          for (int64_t j = 0; j < dims[3]; ++j) {
            T sum = 0;
            for (int64_t b2 = b; b2 < b + summed(0); ++b2) {
              const Sequence s = sequences_[b2];
              for (int64_t h2 = h; h2 < h + summed(1); ++h2) {
                for (int64_t i2 = i; i2 < i + summed(2); ++i2) {
                  for (int64_t j2 = j; j2 < j + summed(3); ++j2) {
                    if (visible(s, b2, h2, i2, j2)) sum += pair(s, b2, h2, i2, j2).dS;
                  }
                }
              }
            }
            store(dbias, broadcast_at(dbias, b, h, i, j), sum);
          }
        }
      }
    }
  }

  void grad_alibi_slopes() const {
    const Tensor& t = args_.grad_alibi_slopes;
    const int64_t batches = t.ndim == 2 ? 1 : desc_.batch;  // that share a slope
    for (int64_t first = 0; first < (t.ndim == 2 ? desc_.batch : 1); ++first) {
      for (int64_t h = 0; h < desc_.num_heads; ++h) {
        T sum = 0;
        for (int64_t b = first; b < first + batches; ++b) {
          const Sequence s = sequences_[b];
          for (int64_t i = 0; i < rows(s); ++i) {
            for (int64_t j = 0; j < keys(s); ++j) {
              if (visible(s, b, h, i, j)) sum -= pair(s, b, h, i, j).dS * scores_.distance(s, i, j);
            }
          }
        }
        store(t, t.ndim == 2 ? first * t.strides[0] + h * t.strides[1] : h * t.strides[0], sum);
      }
    }
  }

  // Of all queries, also those that see no key: their L is the sink.
  void grad_sink_logits() const {
    const Tensor& t = args_.grad_sink_logits;
    for (int64_t h = 0; h < desc_.num_heads; ++h) {
      const T sink = scores_.sink(h);
      T sum = 0;
      for (int64_t b = 0; b < desc_.batch && sink != static_cast<T>(-HUGE_VAL); ++b) {
        const Sequence s = sequences_[b];
        for (int64_t i = 0; i < s.len_q; ++i) {
          sum += std::exp(sink - L(s, b, h, i)) * (dL(s, b, h, i) - D_of_sink(s, b, h, i));
        }
      }
      store(t, h * t.strides[0], sum);
    }
  }

  // D, which is 0 where all of O is: so that a grad_out that no value came to, if it is NaN, does not reach the sink.
  T D_of_sink(const Sequence& s, int64_t b, int64_t h, int64_t i) const {
    if (args_.delta.given()) return D(s, b, h, i);
    const Operand O(args_.forward.out);
    for (int64_t d = 0; d < desc_.head_dim_v; ++d) {
      if (load(O.tensor, O.at(b, s.first_q + i, h) + d * O.dim) != 0) return D(s, b, h, i);
    }
    return 0;
  }

  void grad_capture(int capture) const {
    const Tensor& t = args_.grad_captures[static_cast<size_t>(capture)];
    std::fill_n(scratch_.capture, t.num_elements(), T(0));
    for (int64_t b = 0; b < desc_.batch; ++b) {
      const Sequence s = sequences_[b];
      for (int64_t h = 0; h < desc_.num_heads; ++h) {
        for (int64_t i = 0; i < rows(s); ++i) {
          for (int64_t j = 0; j < keys(s); ++j) {
            if (!visible(s, b, h, i, j) || !scores_.program->has_score()) continue;
            pair(s, b, h, i, j);
            scores_.program->for_each_gradient(capture,
                                               [&](int64_t at, T gradient) { scratch_.capture[at] += gradient; });
          }
        }
      }
    }
    for (int64_t n = 0; n < t.num_elements(); ++n) {
      int64_t at = 0;
      for (int64_t i = t.ndim - 1, rest = n; i >= 0; rest /= t.dims[i--]) at += rest % t.dims[i] * t.strides[i];
      store(t, at, scratch_.capture[n]);
    }
  }

  void rows_behind_the_end(const Operand& to, int64_t first, int64_t num_rows, int64_t heads, int64_t dim) const {
    std::fill_n(scratch_.row, BackwardScratch<T>::count_row(desc_), T(0));
    for (int64_t i = first; i < num_rows; ++i) {
      for (int64_t h = 0; h < heads; ++h) store_row(to, 0, i, h, scratch_.row, T(1), dim);
    }
  }

  static T load(const Tensor& t, int64_t at) { return static_cast<T>(load_element(t.data, t.dtype, at)); }

  void store(const Tensor& t, int64_t at, T value) const {
    if (args_.accumulate) value += load(t, at);
    store_element(t.data, t.dtype, at, static_cast<double>(value));
  }

  void store_row(const Operand& to, int64_t b, int64_t row, int64_t h, const T* sum, T factor, int64_t dim) const {
    for (int64_t d = 0; d < dim; ++d) {
      store(to.tensor, to.at(b, row, h) + d * to.dim, factor * sum[d] + T(0));  // +0 where a negative scale makes -0
    }
  }

  const AttentionDesc& desc_;
  const BackwardArgs& args_;
  const Sequences& sequences_;
  Scores<T, In> scores_;
  Operand dO_;
  BackwardScratch<T> scratch_;
};

}  // namespace

template <class T>
MemorySize backward_workspace_bytes(const AttentionDesc& desc) {
  return Sequences::table_bytes(desc) + BackwardScratch<T>::bytes(desc).rounded_up(64);
}

template <class T>
Status backward_checked(const AttentionDesc& desc, const BackwardArgs& given, void* workspace) {
  BackwardArgs args = given;
  Sequences sequences;
  if (Status status = sequences.read(desc, args.forward, workspace); !status.ok()) return status;
  if (Status status = check_program_indices(desc, args.forward, sequences); !status.ok()) return status;
  sequences.replace_arrays(&args.forward);
  const BackwardScratch<T> scratch(desc, static_cast<char*>(workspace) + Sequences::table_bytes(desc).value());
  with_element_type(desc.dtype, [&]<class In>(In) {
    if (out_dtype(desc) == desc.dtype) {
      Backward<T, In, In>(desc, args, sequences, scratch).run();
    } else {
      Backward<T, In, float>(desc, args, sequences, scratch).run();
    }
  });
  return {};
}

template <class T>
void backward(const AttentionDesc& desc, const BackwardArgs& args) {
  std::vector<int64_t> own;
  void* memory = args.forward.workspace;
  if (const size_t needed = backward_workspace_bytes<T>(desc).value(); args.forward.workspace_bytes < needed) {
    own.resize(needed / sizeof(int64_t));
    memory = own.data();
  }
  static_cast<void>(backward_checked<T>(desc, args, memory));
}

template MemorySize backward_workspace_bytes<double>(const AttentionDesc&);
template MemorySize backward_workspace_bytes<float>(const AttentionDesc&);
template void backward<double>(const AttentionDesc&, const BackwardArgs&);
template void backward<float>(const AttentionDesc&, const BackwardArgs&);
template Status backward_checked<double>(const AttentionDesc&, const BackwardArgs&, void*);
template Status backward_checked<float>(const AttentionDesc&, const BackwardArgs&, void*);

}  // namespace polyhead::reference
