// The cases for gradients: those of cases.h, each with a variation of its own, and what gradients alone have: sums over
// queries, over heads of a group and over the dims that a bias broadcasts, across chunks of 1024 keys.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cases.h"
#include "testing/operands.h"

namespace polyhead::testing {

class GradientCaseList : private CaseList {
 public:
  static std::vector<Problem> make() {
    std::vector<Problem> all;
    for (const Problem& problem : cases()) {
      const bool cached = problem.desc.page_size > 0 || problem.desc.key_dtype || problem.desc.value_dtype;
      if (cached || of_another_turn(problem)) continue;  // caches have no gradients
      all.push_back(with_random_gradients(problem));
    }
    GradientCaseList list;
    list.broadcast_bias();
    list.slopes();
    list.groups();
    list.chunks();
    list.many_queries();
    list.dropout();
    list.rows_of_others();
    list.sink_sums();
    list.weights_of_scores();
    list.diagonal_tiles();
    for (const Problem& problem : list.cases_) all.push_back(with_random_gradients(problem));
    list.call_options(all);
    list.equal_shares(all);
    return all;
  }

 private:
  // Backward has no path of its own for few queries, and to compute what many keys should have takes long: of a case of
  // decoding that stands there once for each dtype, the gradients are computed in one of them.
  static bool of_another_turn(const Problem& problem) {
    const std::string& name = problem.name;
    if (name.find("decode") == std::string::npos) return false;
    for (const TypeName& type : kHalfAndSingle) {
      const size_t at = name.find(std::string("_").append(type.name));
      if (at != std::string::npos) return problem.desc.dtype != kHalfAndSingle[at % 3].dtype;
    }
    return false;
  }

  static std::string numbered(const char* name, int64_t n) { return std::string(name).append(num(n)); }

  template <class Change>
  void each(const std::string& name, const AttentionDesc& desc, Change change) {
    add_in_each_dtype(std::string("gradient_").append(name), desc, change);
  }

  // Biases of two key chunks and two query tiles, of which a sum over each dim has several partial sums.
  void broadcast_bias() {
    for (int dims = 0; dims < 16; ++dims) {
      each(numbered("bias_", dims), sizes(2, 2, 1, 66, 1030, 8), [&](auto& d) {
        operand(d.attn_bias, d, dims, DType::kFloat32);
        if (dims % 2 == 1) d.causal = true, d.align = Align::kBottomRight;
      });
    }
    for (const int dims : {kKey, kQuery}) {
      each(numbered("bias_few_", dims), sizes(2, 1, 1, 66, 65, 8), [&](auto& d) {
        operand(d.attn_bias, d, dims, DType::kFloat32);
        d.softcap = 3, d.alibi_slopes_ndim = 1, d.align = Align::kTopLeft;
      });
    }
    for (const TypeName& type : kHalfAndSingle) {
      each(std::string("bias_of_") + type.name, sizes(3, 4, 2, 130, 70, 16, 24), [&](auto& d) {
        operand(d.attn_bias, d, kHead | kQuery | kKey, type.dtype);
        d.has_seqlens_q = d.has_seqlens_k = true;
        d.softcap = 3;
      });
      each(std::string("bias_by_key_of_") + type.name, sizes(4, 6, 3, 65, 129, 8), [&](auto& d) {
        operand(d.attn_bias, d, kBatch | kKey, type.dtype);
        d.dropout_p = 0.3;
      });
    }
  }

  void slopes() {
    for (int ndim : {1, 2}) {
      each(numbered("slopes_", ndim), sizes(3, 4, 2, 66, 1030, 8),
           [&](auto& d) { d.alibi_slopes_ndim = ndim, d.align = Align::kBottomRight; });
      each(numbered("slopes_causal_", ndim), sizes(3, 4, 4, 130, 130, 16), [&](auto& d) {
        d.alibi_slopes_ndim = ndim, d.causal = true, d.has_query_offsets = true, d.has_seqlens_k = true;
      });
      each(numbered("slopes_packed_", ndim), sizes(5, 4, 2, 200, 300, 16), [&](auto& d) {
        d.alibi_slopes_ndim = ndim, d.packed = true, d.align = Align::kTopLeft, d.window_left = 40;
      });
    }
  }

  void sink_sums() {
    each("sinks", sizes(3, 4, 2, 130, 70, 16, 24),
         [](auto& d) { d.has_sink_logits = true, d.has_seqlens_q = d.has_seqlens_k = true, d.dropout_p = 0.3; });
    each("sinks_blind_rows", sizes(2, 2, 1, 300, 100, 16),
         [](auto& d) { d.has_sink_logits = true, d.causal = true, d.align = Align::kBottomRight; });
  }

  // Without a softmax: chunks of keys, and queries that are not there.
  void weights_of_scores() {
    each("none", sizes(3, 4, 2, 130, 70, 16, 24), [](auto& d) {
      d.normalizer = Normalizer::kNone, d.has_seqlens_q = d.has_seqlens_k = true, d.dropout_p = 0.3;
    });
    each("none_keys_1025", sizes(1, 2, 1, 67, 1025, 16), [](auto& d) {
      operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kFloat32);
      d.normalizer = Normalizer::kNone, d.causal = true, d.query_offset = 990;
    });
  }

  void groups() {
    for (int64_t group = 2; group <= 8; ++group) {
      each(numbered("group_", group), sizes(2, 2 * group, 2, 65, 67, 24), [](auto&) {});
      each(numbered("group_decode_", group), sizes(2, group, 1, 3, 530, 16),
           [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
      each(numbered("group_tiny_", group), sizes(3, 3 * group, 3, 9, 13, 8), [](auto&) {});
    }
  }

  // Several tiles of 64 queries and keys, of which the diagonal cuts some.
  void diagonal_tiles() {
    for (const int64_t head_dim : {64, 128}) {
      each(numbered("diagonal_", head_dim), sizes(1, 2, 1, 140, 190, head_dim, head_dim - 16),
           [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
    }
  }

  void chunks() {
    for (int64_t keys : {1023, 1024, 1025, 2049, 3000}) {
      const AttentionDesc base = sizes(1, 2, 1, 66, keys, 16);
      const std::string name = numbered("keys_", keys);
      each(name, base, [](auto&) {});
      each(name + "_causal", base, [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
      each(name + "_top_left", base, [](auto& d) { d.causal = true, d.align = Align::kTopLeft; });
      each(name + "_offset", base, [](auto& d) { d.causal = true, d.query_offset = 990; });
      each(name + "_window", base,
           [](auto& d) { d.window_left = 40, d.window_right = 30, d.query_offset = 1000, d.softcap = 10; });
      each(name + "_lengths", sizes(3, 2, 2, 40, keys, 16), [](auto& d) { d.has_seqlens_q = d.has_seqlens_k = true; });
    }
    each("keys_packed", sizes(4, 2, 1, 150, 4000, 16),
         [](auto& d) { d.packed = true, d.causal = true, d.align = Align::kBottomRight; });
    each("keys_square", sizes(1, 1, 1, 1100, 1100, 8), [](auto& d) { d.causal = true; });
    each("keys_square_window", sizes(1, 2, 1, 1100, 1100, 8), [](auto& d) { d.causal = true, d.window_left = 100; });
    each("keys_masked", sizes(1, 2, 2, 70, 1100, 16), [](auto& d) {
      operand(d.attn_mask, d, kQuery | kKey, DType::kBool);
      operand(d.attn_bias, d, kHead | kKey, DType::kFloat32);
    });
  }

  void many_queries() {
    // More than are computed together where keys are cut into chunks.
    each("queries_4609_group", sizes(1, 2, 1, 4609, 140, 8), [](auto&) {});
    each("queries_4609_lengths", sizes(2, 1, 1, 4609, 140, 8),
         [](auto& d) { d.has_seqlens_q = d.has_seqlens_k = d.causal = true, d.align = Align::kBottomRight; });
    for (int64_t queries : {1024, 1025, 2049}) {
      each(numbered("queries_", queries), sizes(1, 2, 1, queries, 66, 16), [](auto&) {});
      each(numbered("queries_", queries) + "_few_keys", sizes(2, 4, 2, queries, 3, 20, 12),
           [](auto& d) { d.causal = true, d.query_offset = -600; });
    }
  }

  void dropout() {
    for (double p : {0.1, 0.5, 1.0}) {
      const std::string name = numbered("dropout_", static_cast<int64_t>(p * 10));
      each(name, sizes(2, 2, 1, 66, 1030, 16), [&](auto& d) { d.dropout_p = p; });
      each(name + "_packed", sizes(4, 4, 2, 150, 150, 24), [&](auto& d) { d.dropout_p = p, d.packed = true; });
      each(name + "_tiny", sizes(4, 8, 8, 12, 16, 8), [&](auto& d) { d.dropout_p = p; });
      each(name + "_bias", sizes(2, 2, 2, 65, 70, 8), [&](auto& d) {
        operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kFloat32);
        d.dropout_p = p, d.softcap = 2, d.alibi_slopes_ndim = 1, d.align = Align::kTopLeft;
      });
    }
  }

  // Whole tiles of queries and of keys that nobody sees, or that see nothing.
  void rows_of_others() {
    each("blind_rows", sizes(2, 2, 1, 300, 100, 16), [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
    each("unseen_keys", sizes(2, 2, 1, 100, 300, 16), [](auto& d) { d.causal = true, d.align = Align::kTopLeft; });
    each("one_key_seen", sizes(1, 2, 1, 130, 200, 16),
         [](auto& d) { d.causal = true, d.window_left = 0, d.align = Align::kTopLeft, d.scale = -1; });
    each("nothing_seen", sizes(2, 2, 1, 70, 130, 16), [](auto& d) { d.causal = true, d.query_offset = -70; });
  }

  // How grad_out lies, with what else comes in, and what is done with the result.
  void call_options(std::vector<Problem>& all) {
    cases_.clear();
    each("call", sizes(2, 4, 2, 70, 130, 24, 32), [](auto& d) {
      operand(d.attn_bias, d, kHead | kKey, DType::kFloat32);
      d.alibi_slopes_ndim = 1, d.align = Align::kBottomRight, d.has_sink_logits = true;
    });
    each("call_decode", sizes(2, 4, 2, 5, 600, 24), [](auto&) {});
    each("call_tiny", sizes(5, 6, 6, 11, 14, 16, 7), [](auto& d) { d.has_sink_logits = true; });
    for (const Problem& problem : cases_) {
      for (unsigned n = 0; n < 16; ++n) {
        Problem p;
        p = problem;
        p.name += numbered("_", n);
        p.accumulate = n & 1;
        p.logsumexp = n & 2;
        p.delta = n & 4;
        if (n & 8) p.repeated_grad_out = n == 8 ? 15 : n;
        all.push_back(p);
      }
    }
  }

  // Weights of many keys that are all too large by the same share, as those of an exponential with a rounded log2 e: what is
  // summed with one grad_out shows it as a mean error.
  void equal_shares(std::vector<Problem>& all) {
    cases_.clear();
    each("equal_shares", sizes(2, 4, 2, 70, 1300, 24, 32), [](auto&) {});
    // Float32 gradients of float16, in which these weights and what dS is are subnormal.
    add("gradient_equal_shares_wide_f16", sizes(1, 4, 1, 129, 129, 1),
        [](auto& d) { d.dtype = DType::kFloat16, d.grad_dtype = DType::kFloat32, d.scale = 0.01; });
    for (const Problem& problem : cases_) {
      all.push_back(problem);
      all.back().repeated_grad_out = 15;
    }
  }
};

inline const std::vector<Problem>& gradient_cases() {
  static const std::vector<Problem> list = GradientCaseList::make();
  return list;
}

}  // namespace polyhead::testing
