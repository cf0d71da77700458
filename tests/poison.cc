#include "poison.h"

#include <cmath>
#include <cstring>

#include "testing/formats.h"

namespace polyhead::testing {
namespace {

const double kNan = std::nan("");

Inputs without_bias(Inputs in) {
  in.attn_bias = Array();
  return in;
}

void poison_rows(Array& a, int64_t row, int64_t dim, Random& random) {
  const double kBad[] = {kNan, HUGE_VAL, -HUGE_VAL, 3e38, kNan};  // 3e38 is inf in float16
  for (int64_t d = 0; d < dim; ++d) a.set(row * dim + d, kBad[random.integer(0, 4)]);
}

// The rows of `a` that hold a NaN.
std::vector<bool> rows_with_nan(const Array& a, int64_t dim) {
  std::vector<bool> rows(static_cast<size_t>(dim == 0 ? 0 : a.size() / dim));
  for (int64_t n = 0; n < a.size(); ++n) {
    if (std::isnan(a.at(n))) rows[static_cast<size_t>(n / dim)] = true;
  }
  return rows;
}

// Keys or values as numbers, [rows, dim].
Array in_numbers(const Array& stored, const Array& scales, int64_t dim) {
  const std::vector<double> x = stored_numbers<double>(stored, scales);
  Array a(DType::kFloat64, {dim == 0 ? 0 : static_cast<int64_t>(x.size()) / dim, dim});
  for (size_t n = 0; n < x.size(); ++n) a.set(static_cast<int64_t>(n), x[n]);
  return a;
}

// NaN in a row; where that has scales, in one of them.
void poke_row(Array& numbers, Array& scales, int64_t row, int64_t dim, Random& random) {
  Array& a = scales.given() ? scales : numbers;
  const int64_t columns = scales.given() ? scales.dims.back() : dim;
  a.set(row * columns + random.integer(0, columns - 1), kNan);
}

}  // namespace

Inputs poison_hidden(const AttentionDesc& d, const Inputs& in, uint64_t seed) {
  Random random(seed);
  Inputs bad = in;
  const VisibleParts seen(d, in, Visibility(d, in));
  auto poison = [&](Array& a, const std::vector<uint8_t>& used, int64_t dim) {
    for (size_t n = 0; n < used.size(); ++n) {
      if (!used[n]) poison_rows(a, static_cast<int64_t>(n), dim, random);
    }
  };
  poison(bad.query, seen.query, d.head_dim);
  poison(bad.key, seen.key, d.head_dim);
  poison(bad.value, seen.key, d.head_dim_v);
  for (Array* scales : {&bad.key_scales, &bad.value_scales}) {
    if (scales->given()) poison(*scales, seen.key, scales->dims.back());
  }
  if (in.attn_bias.given()) poison(bad.attn_bias, VisibleParts(d, in, Visibility(d, without_bias(in))).bias, 1);
  return bad;
}

Poked poke_visible(const AttentionDesc& d, const Inputs& in, Poke poke, uint64_t seed) {
  Poked poked;
  if (poke == Poke::kBias && !in.attn_bias.given()) return poked;
  if (poke == Poke::kValue ? d.head_dim_v == 0 : poke != Poke::kBias && d.head_dim == 0) return poked;
  Random random(seed);
  int64_t b = -1, h = 0, i = 0, j = 0, count = 0;
  // Where a pair that a bias hid becomes visible, a softmax makes the row NaN; without one its gradients are numbers.
  const bool softmax = d.normalizer == Normalizer::kSoftmax;
  Visibility(d, poke == Poke::kBias && softmax ? without_bias(in) : in)
      .for_each([&](int64_t b2, int64_t h2, int64_t i2, int64_t j2) {
        if (random.integer(0, count++) == 0) b = b2, h = h2, i = i2, j = j2;
      });
  if (b < 0) return poked;
  poked.done = true;
  poked.inputs = in;
  const Span s = span_of(d, in, b);
  const int64_t query = query_row(d, s, b, h, i), key = key_row(d, s, b, h, j);
  auto dim = [&](int64_t size) { return random.integer(0, size - 1); };
  switch (poke) {
    case Poke::kQuery: poked.inputs.query.set(query * d.head_dim + dim(d.head_dim), kNan); break;
    case Poke::kKey: poke_row(poked.inputs.key, poked.inputs.key_scales, key, d.head_dim, random); break;
    case Poke::kValue: poke_row(poked.inputs.value, poked.inputs.value_scales, key, d.head_dim_v, random); break;
    case Poke::kBias:
      poked.inputs.attn_bias.set(broadcast_index(in.attn_bias, b, h, i, j),
                                 random.chance(0.5) || !softmax ? kNan : HUGE_VAL);
      break;
  }
  constexpr const char* kNames[] = {"query", "key", "value", "bias"};
  poked.where = std::string("NaN in ") + kNames[static_cast<int>(poke)] + " at b " + std::to_string(b) + ", h " +
                std::to_string(h) + ", i " + std::to_string(i) + ", j " + std::to_string(j);
  return poked;
}

namespace {

// Counts the elements that must be NaN.
struct Wanted {
  std::vector<bool> out, logsumexp, attn_weights, column_sums;

  Wanted(const AttentionDesc& d, const Inputs& in, const Outputs& o)
      : out(static_cast<size_t>(o.out.size())),
        logsumexp(static_cast<size_t>(o.logsumexp.size())),
        attn_weights(static_cast<size_t>(o.attn_weights.size())),
        column_sums(static_cast<size_t>(o.column_sums.size())) {
    auto mark = [](std::vector<bool>& wanted, int64_t n) {
      if (!wanted.empty()) wanted[static_cast<size_t>(n)] = true;
    };
    const Visibility seen(d, in);
    const std::vector<bool> query_nan = rows_with_nan(in.query, d.head_dim),
                            key_nan = rows_with_nan(in_numbers(in.key, in.key_scales, d.head_dim), d.head_dim);
    const Array value = in_numbers(in.value, in.value_scales, d.head_dim_v);
    const std::vector<bool> value_nan = rows_with_nan(value, d.head_dim_v);
    auto has = [](const std::vector<bool>& rows, int64_t n) { return !rows.empty() && rows[static_cast<size_t>(n)]; };
    std::vector<Span> spans;
    for (int64_t b = 0; b < d.batch; ++b) spans.push_back(span_of(d, in, b));
    std::vector<bool> bad_row(static_cast<size_t>(d.batch * d.num_heads * d.seqlen_q));
    const bool softmax = d.normalizer == Normalizer::kSoftmax;  // else a weight is by itself
    auto row = [&](int64_t b, int64_t h, int64_t i) {
      return static_cast<size_t>((b * d.num_heads + h) * d.seqlen_q + i);
    };
    const auto weight = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const int64_t weight_row =
          d.return_weights == ReturnWeights::kMean ? b * d.seqlen_q + i : static_cast<int64_t>(row(b, h, i));
      mark(attn_weights, weight_row * d.seqlen_k + j);
      mark(column_sums, (b * d.num_heads + h) * d.seqlen_k + j);
    };
    seen.for_each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const Span& s = spans[static_cast<size_t>(b)];
      const int64_t query = query_row(d, s, b, h, i), key = key_row(d, s, b, h, j);
      const double bias = in.attn_bias.given() ? in.attn_bias.at(broadcast_index(in.attn_bias, b, h, i, j)) : 0;
      if (has(query_nan, query) || has(key_nan, key) || !(bias < HUGE_VAL)) {
        bad_row[row(b, h, i)] = softmax;
        if (!softmax) weight(b, h, i, j);
        for (int64_t c = 0; c < d.head_dim_v; ++c) mark(out, query * d.head_dim_v + c);
        mark(logsumexp, d.packed ? h * d.seqlen_q + s.first_q + i : static_cast<int64_t>(row(b, h, i)));
      }
      for (int64_t c = 0; has(value_nan, key) && c < d.head_dim_v; ++c) {
        if (std::isnan(value.at(key * d.head_dim_v + c))) mark(out, query * d.head_dim_v + c);
      }
    });
    if (attn_weights.empty() && column_sums.empty()) return;
    seen.for_each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
      if (bad_row[row(b, h, i)]) weight(b, h, i, j);
    });
  }
};

std::string compare(const char* name, const Array& clean, const Array& got, const std::vector<bool>& nan) {
  const size_t element = dtype_size_bytes(got.dtype);
  for (size_t n = 0; n < nan.size(); ++n) {
    const bool same = std::memcmp(&clean.bytes[n * element], &got.bytes[n * element], element) == 0;
    const double value = got.at(static_cast<int64_t>(n));
    if (nan[n] ? std::isnan(value) : same) continue;
    return std::string(name) + ": element " + std::to_string(n) + " is " + std::to_string(value) +
           (nan[n] ? ", expected NaN" : ", changed, yet it sees no NaN");
  }
  return "";
}

}  // namespace

std::string poke_mismatch(const AttentionDesc& d, const Inputs& in, const Outputs& clean, const Outputs& got) {
  if (!got.faults.empty()) return got.faults.front();
  const Wanted wanted(d, in, got);
  std::string text = compare("out", clean.out, got.out, wanted.out);
  if (text.empty()) text = compare("logsumexp", clean.logsumexp, got.logsumexp, wanted.logsumexp);
  if (text.empty()) text = compare("attn_weights", clean.attn_weights, got.attn_weights, wanted.attn_weights);
  if (text.empty()) text = compare("column_sums", clean.column_sums, got.column_sums, wanted.column_sums);
  return text;
}

}  // namespace polyhead::testing
