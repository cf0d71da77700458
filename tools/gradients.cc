#include "gradients.h"

#include <cmath>

#include "layouter.h"

namespace polyhead::tools {
namespace {

// `value` as `dtype` holds it.
double rounded(double value, DType dtype) {
  double element = 0;
  set_element(dtype, &element, value);
  return element_value(dtype, &element);
}

class Drawing {
 public:
  Drawing(const Problem& problem, const AttentionDesc& desc, GradientSet needs, Precision precision,
          Gradients& gradients)
      : problem_(problem),
        desc_(desc),
        needs_(needs),
        precision_(precision),
        gradients_(gradients),
        layouter_(problem.layout, problem.seed + 2, gradients.buffers) {}

  Status draw() {
    if (Status s = lay_out(); !s.ok()) return s;
    const DType dtypes[] = {desc_.dtype, desc_.dtype, desc_.dtype, desc_.attn_bias.dtype, DType::kFloat32};
    for (size_t n = 0; n < kNumGradients; ++n) {
      if (!gradients_.of[n].given()) continue;
      Random random(problem_.seed, kGradientsData + n);
      fill(gradients_.of[n], [&] { return problem_.accumulate ? rounded(random.normal(), dtypes[n]) : NAN; });
    }
    return {};
  }

 private:
  Status lay_out() {
    Tensor &query = gradients_.of[0], &key = gradients_.of[1], &value = gradients_.of[2];
    AttentionDesc wide = desc_;
    const bool is_wide = precision_ == Precision::kFloat64;
    if (is_wide) wide.dtype = DType::kFloat64;
    Status s;
    constexpr GradientSet kQkv = 7;
    if (problem_.layout == Layout::kQkv && (needs_ & kQkv) == kQkv) {
      s = layouter_.add_qkv(wide, query, key, value);
    } else {
      const auto add = [&](size_t n, int64_t seqlen, int64_t heads, int64_t dim) {
        if (s.ok() && (needs_ >> n & 1)) s = layouter_.add_heads(wide, seqlen, heads, dim, gradients_.of[n], true);
      };
      add(0, desc_.seqlen_q, desc_.num_heads, desc_.head_dim);
      add(1, desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim);
      add(2, desc_.seqlen_k, desc_.num_heads_kv, desc_.head_dim_v);
    }
    if (s.ok() && (needs_ >> 3 & 1)) {
      const int64_t* n = desc_.attn_bias.dims;
      s = layouter_.add(is_wide ? DType::kFloat64 : desc_.attn_bias.dtype, {n[0], n[1], n[2], n[3]}, {0, 1, 2, 3},
                        gradients_.of[3], true);
    }
    if (s.ok() && (needs_ >> 4 & 1)) {
      const DType dtype = is_wide ? DType::kFloat64 : DType::kFloat32;
      s = desc_.alibi_slopes_ndim == 1
              ? layouter_.add(dtype, {desc_.num_heads}, {0}, gradients_.of[4], true)
              : layouter_.add(dtype, {desc_.batch, desc_.num_heads}, {0, 1}, gradients_.of[4], true);
    }
    return s;
  }

  const Problem& problem_;
  const AttentionDesc& desc_;
  GradientSet needs_;
  Precision precision_;
  Gradients& gradients_;
  Layouter layouter_;
};

}  // namespace

Result<Incoming> random_incoming(const Problem& problem, const AttentionDesc& desc, const BackwardArgs& preset) {
  Incoming incoming;
  incoming.grad_out = preset.grad_out;
  incoming.grad_logsumexp = preset.grad_logsumexp;
  Layouter layouter(problem.layout == Layout::kQkv ? Layout::kBshd : problem.layout, problem.seed + 3,
                    incoming.buffers);
  if (incoming.grad_out.given()) return incoming;
  if (Status s = layouter.add_heads(desc, desc.seqlen_q, desc.num_heads, desc.head_dim_v, incoming.grad_out); !s.ok()) {
    return s;
  }
  fill_normal(incoming.grad_out, problem.seed, kGradOutData);
  if (!problem.logsumexp || incoming.grad_logsumexp.given()) return incoming;
  const DType statistics = desc.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (Status s = layouter.add_statistics(desc, statistics, incoming.grad_logsumexp); !s.ok()) return s;
  fill_normal(incoming.grad_logsumexp, problem.seed, kGradLogsumexpData);
  return incoming;
}

void Gradients::give_to(BackwardArgs& args) const {
  for (size_t n = 0; n < kNumGradients; ++n) args.*kGradients[n].gradient = of[n];
}

Result<Gradients> new_gradients(const Problem& problem, const AttentionDesc& desc, GradientSet needs,
                                Precision precision) {
  Gradients gradients;
  if (Status s = Drawing(problem, desc, needs, precision, gradients).draw(); !s.ok()) return s;
  return gradients;
}

BackwardArgs backward_args(const ForwardArgs& forward, const Incoming& incoming, bool accumulate) {
  BackwardArgs args;
  args.forward = forward;
  args.forward.weights = args.forward.column_sums = {};
  args.grad_out = incoming.grad_out;
  args.grad_logsumexp = incoming.grad_logsumexp;
  args.accumulate = accumulate;
  return args;
}

double backward_flops(const AttentionDesc& desc, GradientSet needs, double visible_pairs) {
  constexpr GradientSet kQuery = 1, kKey = 2, kValue = 4;
  const auto dim = static_cast<double>(desc.head_dim), dim_v = static_cast<double>(desc.head_dim_v);
  double products = dim;                          // S
  if ((needs & ~kValue) != 0) products += dim_v;  // dP
  if ((needs & kQuery) != 0) products += dim;     // dQ
  if ((needs & kKey) != 0) products += dim;       // dK
  if ((needs & kValue) != 0) products += dim_v;   // dV
  return 2 * visible_pairs * products;
}

double traffic_bytes(const BackwardArgs& args) {
  double total = traffic_bytes(args.forward);
  const auto add = [&](const Tensor& t) {
    total += static_cast<double>(t.num_elements()) * static_cast<double>(dtype_size_bytes(t.dtype));
  };
  add(args.grad_out);
  add(args.grad_logsumexp);
  for (const GradientName& gradient : kGradients) add(args.*gradient.gradient);
  return total;
}

}  // namespace polyhead::tools
