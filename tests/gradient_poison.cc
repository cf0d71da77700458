#include "gradient_poison.h"

#include <cmath>
#include <cstring>

#include "testing/definition.h"

namespace polyhead::testing {
namespace {

// The element of logsumexp for a row of query.
int64_t statistic_of_row(const AttentionDesc& d, int64_t row) {
  const int64_t h = row % d.num_heads, b = row / d.num_heads / d.seqlen_q, i = row / d.num_heads % d.seqlen_q;
  return (b * d.num_heads + h) * d.seqlen_q + i;
}

// Which rows of query are not padding.
std::vector<uint8_t> rows_there(const AttentionDesc& d, const Inputs& in) {
  std::vector<uint8_t> there(static_cast<size_t>((d.packed ? 1 : d.batch) * d.seqlen_q * d.num_heads));
  for (int64_t b = 0; b < d.batch; ++b) {
    const Span s = span_of(d, in, b);
    for (int64_t h = 0; h < d.num_heads; ++h) {
      for (int64_t i = 0; i < s.len_q; ++i) there[static_cast<size_t>(query_row(d, s, b, h, i))] = 1;
    }
  }
  return there;
}

}  // namespace

BackwardInputs poison_hidden(const AttentionDesc& d, const BackwardInputs& in, uint64_t seed) {
  BackwardInputs bad = in;
  bad.forward = poison_hidden(d, in.forward, seed);
  Random random(seed + 1);
  const double kBad[] = {std::nan(""), HUGE_VAL, -HUGE_VAL, 3e38, std::nan("")};
  auto poison = [&](Array& a, int64_t first, int64_t count) {
    for (int64_t n = first; a.given() && n < first + count; ++n) a.set(n, kBad[random.integer(0, 4)]);
  };
  const VisibleParts seen(d, in.forward, Visibility(d, in.forward));
  const std::vector<uint8_t> there = rows_there(d, in.forward);
  for (size_t n = 0; n < seen.query.size(); ++n) {
    if (seen.query[n]) continue;
    const int64_t row = static_cast<int64_t>(n);
    poison(bad.grad_out, row * d.head_dim_v, d.head_dim_v);
    // A row that sees no key has a sink all the same, which the rest is read for.
    if (d.has_sink_logits && there[n]) continue;
    poison(bad.out, row * d.head_dim_v, d.head_dim_v);
    poison(bad.grad_logsumexp, statistic_of_row(d, row), 1);
    poison(bad.delta, statistic_of_row(d, row), 1);
  }
  return bad;
}

PokedBackward poke_visible(const AttentionDesc& d, const BackwardInputs& in, GradientPoke poke, uint64_t seed) {
  PokedBackward poked;
  poked.inputs = in;
  Random random(seed * 7 + static_cast<uint64_t>(poke));
  if (poke == GradientPoke::kGradOut || poke == GradientPoke::kGradLogsumexp) {
    const bool is_out = poke == GradientPoke::kGradOut;
    Array& a = is_out ? poked.inputs.grad_out : poked.inputs.grad_logsumexp;
    const VisibleParts seen(d, in.forward, Visibility(d, in.forward));
    int64_t row = -1, count = 0;
    for (size_t n = 0; n < seen.query.size(); ++n) {
      if (seen.query[n] && random.integer(0, count++) == 0) row = static_cast<int64_t>(n);
    }
    if (row < 0 || a.size() == 0) return poked;
    const int64_t at = is_out ? row * d.head_dim_v + random.integer(0, d.head_dim_v - 1) : statistic_of_row(d, row);
    a.set(at, std::nan(""));
    poked.where = std::string("NaN in ") + (is_out ? "grad_out" : "grad_logsumexp") + " at " + std::to_string(at);
  } else {
    Poked forward = poke_visible(d, in.forward, static_cast<Poke>(poke), random.bits());
    if (!forward.done) return poked;
    poked.inputs.forward = std::move(forward.inputs);
    poked.where = forward.where;
    if (poke == GradientPoke::kBias || random.chance(0.5)) {
      compute_forward(d, poked.inputs);
      poked.where += ", out and logsumexp of it";
    }
  }
  poked.defined = defined_gradients<double>(d, poked.inputs, Visibility(d, poked.inputs.forward), true);
  poked.done = true;
  return poked;
}

std::string poke_mismatch(const PokedBackward& poked, const Gradients& clean, const Gradients& got) {
  if (!got.faults.empty()) return got.faults.front();
  for (const GradientName& name : kGradients) {
    const Array &e = poked.defined.*name.gradient, &g = got.*name.gradient, &c = clean.*name.gradient;
    const size_t element = dtype_size_bytes(g.dtype);
    for (int64_t at = 0; at < e.size(); ++at) {
      const size_t byte = static_cast<size_t>(at) * element;
      const bool nan = std::isnan(e.at(at)), same = std::memcmp(&c.bytes[byte], &g.bytes[byte], element) == 0;
      if (nan ? std::isnan(g.at(at)) : same) continue;
      return std::string(name.name) + ": element " + std::to_string(at) + " is " + std::to_string(g.at(at)) +
             (nan ? ", expected NaN" : ", was " + std::to_string(c.at(at)) + " without a NaN that it does not see");
    }
  }
  return "";
}

}  // namespace polyhead::testing
