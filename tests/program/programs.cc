#include "programs.h"

#include <algorithm>

namespace polyhead::testing {
namespace {

using Captures = std::vector<CaptureOf>;

CaptureOf floats(std::vector<int64_t> dims, DType dtype = DType::kFloat32) { return {dtype, std::move(dims), normal}; }
CaptureOf positive(std::vector<int64_t> dims) {
  return {DType::kFloat32, std::move(dims), [](int64_t, Random& r) { return 0.1 + std::fabs(r.normal()); }};
}
CaptureOf ints(std::vector<int64_t> dims, int64_t low, int64_t high, DType dtype = DType::kInt32) {
  return {dtype, std::move(dims), [=](int64_t, Random& r) { return static_cast<double>(r.integer(low, high)); }};
}
// Documents one after the other: rising numbers.
CaptureOf documents(int64_t batch, int64_t tokens, int64_t length, DType dtype = DType::kInt64) {
  return {dtype, {batch, tokens}, [=](int64_t n, Random&) { return static_cast<double>(n % tokens / length); }};
}
CaptureOf bools(std::vector<int64_t> dims) {
  return {DType::kBool, std::move(dims), [](int64_t, Random& r) { return static_cast<double>(r.integer(0, 3) != 0); }};
}

int64_t integer(const Array& a, std::initializer_list<int64_t> index) {
  return static_cast<int64_t>(element(a, index));
}

int64_t t5_bucket(int64_t d) {
  const int64_t n = std::max<int64_t>(d, 0);
  if (n < 16) return n;
  return std::min<int64_t>(31, 16 + static_cast<int64_t>(std::log(static_cast<float>(n) / 16.0f) * 7.6943735f));
}

std::vector<NamedProgram> masks_1() {
  return {
      {.name = "causal", .text = "mask = k <= q", .mask = [](const PairAt& p, const Arrays&) { return p.k <= p.q; }},
      {.name = "band",
       .text = "mask = abs(q - k) <= 9",
       .mask = [](const PairAt& p, const Arrays&) { return std::abs(p.q - p.k) <= 9; }},
      {.name = "streaming_llm",
       .text = "mask = k <= q and (k < 4 or q - k < 20)",
       .mask = [](const PairAt& p, const Arrays&) { return p.k <= p.q && (p.k < 4 || p.q - p.k < 20); }},
      {.name = "prefix_lm",
       .text = "prefix: int; mask = k <= q or k < prefix[b]",
       .captures = [](const Sizes4& s) { return Captures{ints({s.batch}, 0, s.seqlen_k)}; },
       .mask = [](const PairAt& p, const Arrays& c) { return p.k <= p.q || p.k < integer(c[0], {p.b}); }},
      {.name = "window_of_head",
       .text = "window: int; d = q - k; mask = 0 <= d and d < window[h]",
       .captures = [](const Sizes4& s) { return Captures{ints({s.heads}, 1, 40)}; },
       .mask = [](const PairAt& p, const Arrays& c) { return p.q >= p.k && p.q - p.k < integer(c[0], {p.h}); }},
      {.name = "lengths",
       .text = "lengths: int; mask = k < lengths[b] and q < lengths[b]",
       .captures = [](const Sizes4& s) { return Captures{ints({s.batch}, 0, s.seqlen_k, DType::kInt64)}; },
       .mask = [](const PairAt& p,
                  const Arrays& c) { return p.k < integer(c[0], {p.b}) && p.q < integer(c[0], {p.b}); }},
      {.name = "longformer_dilated",
       .text = "mask = abs(q - k) <= 24 and (q - k) % 3 == 0",
       .mask = [](const PairAt& p, const Arrays&) { return std::abs(p.q - p.k) <= 24 && (p.q - p.k) % 3 == 0; }},
      {.name = "sparse_strided",
       .text = "d = q - k; mask = d >= 0 and (d % 7 == 0 or d < 7)",
       .mask = [](const PairAt& p, const Arrays&) { return p.q >= p.k && ((p.q - p.k) % 7 == 0 || p.q - p.k < 7); }},
      {.name = "sparse_fixed",
       .text = "mask = k <= q and (q // 16 == k // 16 or k % 16 >= 12)",
       .mask = [](const PairAt& p, const Arrays&) { return p.k <= p.q && (p.q / 16 == p.k / 16 || p.k % 16 >= 12); }},
      {.name = "chunked_causal",
       .text = "mask = q // 50 == k // 50 and k <= q",
       .mask = [](const PairAt& p, const Arrays&) { return p.q / 50 == p.k / 50 && p.k <= p.q; }},
      {.name = "block_causal",
       .text = "mask = k // 32 <= q // 32",
       .mask = [](const PairAt& p, const Arrays&) { return p.k / 32 <= p.q / 32; }},
      {.name = "documents",
       .text = "doc_q: int; doc_k: int; mask = doc_q[b, q] == doc_k[b, k]",
       .captures =
           [](const Sizes4& s) {
             return Captures{documents(s.batch, s.seqlen_q, 37), documents(s.batch, s.seqlen_k, 37)};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return element(c[0], {p.b, p.q}) == element(c[1], {p.b, p.k});
           }},
      {.name = "global_tokens",
       .text = "on_q: bool; on_k: bool; mask = on_q[q] or on_k[k] or abs(q - k) <= 3",
       .captures =
           [](const Sizes4& s) {
             return Captures{bools({s.seqlen_q}), bools({s.seqlen_k})};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return element(c[0], {p.q}) != 0 || element(c[1], {p.k}) != 0 || std::abs(p.q - p.k) <= 3;
           }},
      {.name = "big_bird",
       .text = "table: bool; mask = table[h, q // 16, k // 16]",
       .captures =
           [](const Sizes4& s) {
             return Captures{bools({s.heads, s.seqlen_q / 16 + 1, s.seqlen_k / 16 + 1})};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return element(c[0], {p.h, p.q / 16, p.k / 16}) != 0;
           }},
  };
}

std::vector<NamedProgram> masks_2() {
  return {
      {.name = "flash_mask",
       .text = "lts: int; mask = k <= q and q < lts[b, k]",
       .captures =
           [](const Sizes4& s) {
             return Captures{ints({s.batch, s.seqlen_k}, 0, s.seqlen_q)};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return p.k <= p.q && p.q < integer(c[0], {p.b, p.k});
           }},
      {.name = "tree",
       .text = "tree: bool; mask = k < 5 or tree[q, clamp(k - 5, 0, 30)]",
       .captures =
           [](const Sizes4& s) {
             return Captures{bools({s.seqlen_q, 31})};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return p.k < 5 || element(c[0], {p.q, std::clamp<int64_t>(p.k - 5, 0, 30)}) != 0;
           }},
      {.name = "dense_mask",
       .text = "shown: bool; mask = shown[q, k]",
       .captures =
           [](const Sizes4& s) {
             return Captures{bools({s.seqlen_q, s.seqlen_k})};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return element(c[0], {p.q, p.k}) != 0;
           }},
      {.name = "natten_2d",
       .text = "mask = abs(q // 12 - k // 12) <= 2 and abs(q % 12 - k % 12) <= 2",
       .mask = [](const PairAt& p,
                  const Arrays&) { return std::abs(p.q / 12 - p.k / 12) <= 2 && std::abs(p.q % 12 - p.k % 12) <= 2; }},
      {.name = "morton",
       .text =
           "x = (q & 1) | (q >> 1 & 2) | (q >> 2 & 4); y = (k & 1) | (k >> 1 & 2) | (k >> 2 & 4); mask = (x ^ y) < 3",
       .mask =
           [](const PairAt& p, const Arrays&) {
             const auto x = [](int64_t n) { return (n & 1) | (n >> 1 & 2) | (n >> 2 & 4); };
             return (x(p.q) ^ x(p.k)) < 3;
           }},
      {.name = "images_or_causal",
       .text = "image_q: int; image_k: int; mask = k <= q or (image_q[q] == image_k[k] and image_k[k] >= 0)",
       .captures =
           [](const Sizes4& s) {
             return Captures{ints({s.seqlen_q}, -1, 2), ints({s.seqlen_k}, -1, 2)};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return p.k <= p.q || (element(c[0], {p.q}) == element(c[1], {p.k}) && element(c[1], {p.k}) >= 0);
           }},
      {.name = "keep",
       .text = "keep: bool; mask = keep[b, k]",
       .captures =
           [](const Sizes4& s) {
             return Captures{bools({s.batch, s.seqlen_k})};
           },
       .mask =
           [](const PairAt& p, const Arrays& c) {
             return element(c[0], {p.b, p.k}) != 0;
           }},
      {.name = "hash",
       .text = "mask = ((q * 40503 ^ k * 65537) * 48271 >> 7) % 4 < 2",
       .mask =
           [](const PairAt& p, const Arrays&) {
             const int64_t x = ((p.q * 40503) ^ (p.k * 65537)) * 48271 >> 7;
             return x - floor_of(x, 4) * 4 < 2;
           }},
      {.name = "nothing", .text = "mask = q < 0", .mask = [](const PairAt&, const Arrays&) { return false; }},
  };
}

std::vector<NamedProgram> scores_1() {
  return {
      {.name = "alibi",
       .text = "score = score - slope[h] * abs(q - k)",
       .captures = [](const Sizes4& s) { return Captures{floats({s.heads})}; },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score - element(c[0], {p.h}) * static_cast<double>(std::abs(p.q - p.k));
           }},
      {.name = "t5",
       .text = "n = max(q - k, 0); far = 16 + int(log(float(n) / 16) * 7.6943735);"
               "score = score + table[where(n < 16, n, min(far, 31)), h]",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({32, s.heads})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[0], {t5_bucket(p.q - p.k), p.h});
           }},
      {.name = "relative_position",
       .text = "score = score + table[h, clamp(q - k, -20, 20) + 20]; mask = k <= q + 30",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({s.heads, 41}, DType::kBFloat16)};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[0], {p.h, std::clamp<int64_t>(p.q - p.k, -20, 20) + 20});
           },
       .mask = [](const PairAt& p, const Arrays&) { return p.k <= p.q + 30; }},
      {.name = "swin",
       .text = "score = score + table[(q // 6 % 6 - k // 6 % 6 + 5) * 11 + q % 6 - k % 6 + 5, h]",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({121, s.heads})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[0], {(p.q / 6 % 6 - p.k / 6 % 6 + 5) * 11 + p.q % 6 - p.k % 6 + 5, p.h});
           }},
      {.name = "deberta",
       .text = "t = clamp(q - k + 8, 0, 15); score = score + c2p[b, h, q, t] + p2c[b, h, k, t]",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({s.batch, s.heads, s.seqlen_q, 16}), floats({s.batch, s.heads, s.seqlen_k, 16})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             const int64_t t = std::clamp<int64_t>(p.q - p.k + 8, 0, 15);
             return p.score + element(c[0], {p.b, p.h, p.q, t}) + element(c[1], {p.b, p.h, p.k, t});
           }},
      {.name = "pair_bias",
       .text = "score = score + bias[b, h, q, k]",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({s.batch, s.heads, s.seqlen_q, s.seqlen_k})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[0], {p.b, p.h, p.q, p.k});
           }},
      {.name = "graphormer",
       .text = "distance: int; table: float; score = score + table[h, distance[b, q, k]]",
       .captures =
           [](const Sizes4& s) {
             return Captures{ints({s.batch, s.seqlen_q, s.seqlen_k}, 0, 8), floats({s.heads, 9})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[1], {p.h, integer(c[0], {p.b, p.q, p.k})});
           }},
  };
}

std::vector<NamedProgram> scores_2() {
  return {
      {.name = "forgetting",
       .text = "score = score + c_q[b, h, q] - c_k[b, h, k]; mask = k <= q",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({s.batch, s.heads, s.seqlen_q}), floats({s.batch, s.heads, s.seqlen_k})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[0], {p.b, p.h, p.q}) - element(c[1], {p.b, p.h, p.k});
           },
       .mask = [](const PairAt& p, const Arrays&) { return p.k <= p.q; }},
      {.name = "softcap",
       .text = "score = 2.5 * tanh(score / 2.5)",
       .score = [](const PairAt& p, const Arrays&) { return 2.5 * std::tanh(p.score / 2.5); }},
      {.name = "temperature",
       .text = "score = tau[h] * score",
       .captures = [](const Sizes4& s) { return Captures{positive({s.heads})}; },
       .score = [](const PairAt& p, const Arrays& c) { return element(c[0], {p.h}) * p.score; }},
      {.name = "log_length",
       .text = "score = score * log(q + 1.0)",
       .score = [](const PairAt& p, const Arrays&) { return p.score * std::log(static_cast<double>(p.q) + 1); }},
      {.name = "kerple",
       .text = "score = score - r1[h] * log(1 + r2[h] * abs(q - k))",
       .captures =
           [](const Sizes4& s) {
             return Captures{positive({s.heads}), positive({s.heads})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             const auto d = static_cast<double>(std::abs(p.q - p.k));
             return p.score - element(c[0], {p.h}) * std::log(1 + element(c[1], {p.h}) * d);
           }},
      // The gradients of what is not taken are infinite or NaN.
      {.name = "log_where_not_hidden",
       .text = "score = score + w[h] * log(q - k + 1.0); mask = k <= q",
       .captures = [](const Sizes4& s) { return Captures{floats({s.heads})}; },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + element(c[0], {p.h}) * std::log(static_cast<double>(p.q - p.k) + 1);
           },
       .mask = [](const PairAt& p, const Arrays&) { return p.k <= p.q; }},
      {.name = "log_where_taken",
       .text = "score = score + where(q > k, log(w[] * float(q - k)), 0)",
       .captures = [](const Sizes4&) { return Captures{positive({1})}; },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + (p.q > p.k ? std::log(c[0].at(0) * static_cast<double>(p.q - p.k)) : 0);
           }},
      {.name = "hidden_by_score",
       .text = "score = where(k <= q and k % 5 != 2, score * 1.5, -inf)",
       .score = [](const PairAt& p, const Arrays&) { return p.k <= p.q && p.k % 5 != 2 ? p.score * 1.5 : -HUGE_VAL; }},
      {.name = "score_read_thrice",
       .text = "score = score + 0.3 * sin(score) * sigmoid(score - a[h])",
       .captures = [](const Sizes4& s) { return Captures{floats({s.heads})}; },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return p.score + 0.3 * std::sin(p.score) / (1 + std::exp(element(c[0], {p.h}) - p.score));
           }},
      {.name = "score_ignored",
       .text = "score = table[h, k % 7]",
       .captures =
           [](const Sizes4& s) {
             return Captures{floats({s.heads, 7})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             return element(c[0], {p.h, p.k % 7});
           }},
  };
}

std::vector<NamedProgram> scores_3() {
  return {
      {.name = "read_twice",
       .text = "score = score + t[q % 5] * t[k % 5] + erf(t[0])",
       .captures = [](const Sizes4&) { return Captures{floats({5})}; },
       .score = [](const PairAt& p,
                   const Arrays& c) { return p.score + c[0].at(p.q % 5) * c[0].at(p.k % 5) + std::erf(c[0].at(0)); }},
      // Heads and keys count different dims at the two places.
      {.name = "read_across",
       .text = "score = score + t[h, (q + k) % 4] * t[(q + k) % 4, h]",
       .captures =
           [](const Sizes4&) {
             return Captures{floats({4, 4})};
           },
       .score =
           [](const PairAt& p, const Arrays& c) {
             const int64_t n = (p.q + p.k) % 4;
             return p.score + element(c[0], {p.h, n}) * element(c[0], {n, p.h});
           }},
      {.name = "functions",
       .text =
           "a = abs(w[q % 3]) + 0.5; score = score / sqrt(a) + rsqrt(a) * cos(score) + exp(-abs(score)) + a ** 1.5 + "
           "min(score, 0.5) - max(score, w[k % 3]) + floor(score)",
       .captures = [](const Sizes4&) { return Captures{floats({3})}; },
       .score =
           [](const PairAt& p, const Arrays& c) {
             const double a = std::fabs(c[0].at(p.q % 3)) + 0.5, s = p.score;
             return s / std::sqrt(a) + std::cos(s) / std::sqrt(a) + std::exp(-std::fabs(s)) + std::pow(a, 1.5) +
                    std::min(s, 0.5) - std::max(s, c[0].at(p.k % 3)) + std::floor(s);
           }},
  };
}

}  // namespace

const std::vector<NamedProgram>& named_programs() {
  static const std::vector<NamedProgram> all = [] {
    std::vector<NamedProgram> list;
    for (const auto& part : {masks_1(), masks_2(), scores_1(), scores_2(), scores_3()}) {
      list.insert(list.end(), part.begin(), part.end());
    }
    return list;
  }();
  return all;
}

}  // namespace polyhead::testing
