// Layers on a cache that turns keys and queries and stores them rounded, by plain loops, on every kernel.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels_to_test.h"
#include "layer_on_cache.h"
#include "left_out.h"
#include "testing/bounds.h"
#include "testing/judge.h"

namespace polyhead::testing {
namespace {

struct Format {
  const char* name;
  DType dtype, key, value;
  int64_t rotary_dim;
  bool interleaved, hadamard;
};
constexpr Format kFormats[] = {{"rotary", DType::kFloat32, DType::kFloat32, DType::kFloat32, 12, false, false},
                               {"hadamard", DType::kFloat16, DType::kFloat16, DType::kFloat16, 0, false, true},
                               {"int8", DType::kFloat32, DType::kInt8, DType::kInt8, 16, true, true},
                               {"bfloat16", DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, 16, true, false},
                               {"float8_int4", DType::kBFloat16, DType::kFloat8E4M3, DType::kInt4x2, 8, false, false}};

// Two sequences of some text, whose layer turns its heads.
struct Text {
  static constexpr int64_t kBatch = 2, kSteps = 11, kHeads = 4, kGroups = 2, kDim = 16, kDimV = 8, kSize = 20;
  static constexpr int64_t kPositions = 40;

  Format format;
  LayerDesc desc;
  LayerInputs in;
  Array cos{DType::kFloat32, {kPositions, 0}}, sin, lengths, positions;

  Text(const Format& of, uint64_t seed) : format(of) {
    desc.batch = kBatch, desc.seqlen_q = desc.seqlen_k = kSteps;
    desc.num_heads = kHeads, desc.num_heads_kv = kGroups;
    desc.query_size = desc.key_size = desc.value_size = desc.out_proj_size = kSize;
    desc.query_proj_size = desc.key_proj_size = kDim, desc.value_proj_size = kDimV;
    desc.query_bias = desc.value_bias = true;
    desc.dtype = of.dtype;
    desc.attention.causal = true;
    desc.attention.align = Align::kBottomRight;
    in = random_inputs({.name = of.name, .desc = desc, .key_is_query = true, .value_is_key = true, .seed = seed});
    cos = sin = Array(DType::kFloat32, {kPositions, of.rotary_dim / 2});
    Random random(seed, 5);
    for (int64_t n = 0; n < cos.size(); ++n) {
      const double angle = 7 * random.uniform();
      cos.set(n, std::cos(angle)), sin.set(n, std::sin(angle));
    }
    lengths = integers_of({kSteps, 6}, {kBatch});
    std::vector<int64_t> all;
    for (int64_t n = 0; n < kBatch * kSteps; ++n) all.push_back(n < kSteps ? 2 * n : 3 + n);
    positions = integers_of(all, {kBatch, kSteps});
  }
  int64_t length(int64_t b) const { return static_cast<int64_t>(lengths.at(b)); }

  // x Wi + bi of one token, all heads.
  template <class T, class Round>
  std::vector<T> projected(int i, int64_t token, Round round) const {
    const Array &w = in.weights[static_cast<size_t>(i)], &bias = in.weights[static_cast<size_t>(i) + 4];
    std::vector<T> y(static_cast<size_t>(w.dims[1]));
    for (int64_t c = 0; c < w.dims[1]; ++c) {
      T sum = 0;
      for (int64_t n = 0; n < kSize; ++n) {
        sum += static_cast<T>(in.query.at(token * kSize + n)) * static_cast<T>(w.at(n * w.dims[1] + c));
      }
      y[static_cast<size_t>(c)] = round(sum + static_cast<T>(bias.given() ? bias.at(c) : 0));
    }
    return y;
  }

  template <class T>
  void turn(int64_t token, T* x) const {
    const auto position = static_cast<int64_t>(positions.at(token));
    const int64_t pairs = format.rotary_dim / 2;
    for (int64_t p = 0; p < pairs; ++p) {
      T &a = x[format.interleaved ? 2 * p : p], &b = x[format.interleaved ? 2 * p + 1 : p + pairs];
      const T c = static_cast<T>(cos.at(position * pairs + p)), s = static_cast<T>(sin.at(position * pairs + p));
      const T first = a * c - b * s;
      b = a * s + b * c, a = first;
    }
    if (!format.hadamard) return;
    const std::vector<T> from(x, x + kDim);
    for (int64_t row = 0; row < kDim; ++row) {
      x[row] = 0;
      for (int64_t n = 0; n < kDim; ++n) {
        const bool minus = __builtin_popcountll(static_cast<uint64_t>(row & n)) % 2 == 1;
        x[row] += (minus ? -1 : 1) * from[static_cast<size_t>(n)] / T{4};
      }
    }
  }
};

// Tokens of the cache, as they are stored: [tokens, heads * dim] in float32.
struct StoredTokens {
  Array key, value;
};

// Out of query t of sequence b, from the keys that are stored; `magnitude`: the sums of absolute values.
template <class T, class Round>
void attend(const Text& text, const StoredTokens& stored, int64_t b, int64_t t, Round round, Array* out,
            std::vector<double>* magnitude) {
  constexpr int64_t D = Text::kDim, Dv = Text::kDimV;
  const int64_t token = b * Text::kSteps + t;
  std::vector<T> q = text.projected<T>(0, token, round), heads;
  std::vector<double> sizes;
  for (int64_t h = 0; h < Text::kHeads; ++h) {
    T* const x = q.data() + h * D;
    text.turn(token, x);
    for (int64_t d = 0; d < D; ++d) x[d] = round(x[d]);
    std::vector<T> p;
    T sum = 0, most = -HUGE_VALF;
    for (int64_t j = 0; j <= t; ++j) {
      T score = 0;
      for (int64_t d = 0; d < D; ++d) {
        score += x[d] * static_cast<T>(stored.key.at(((b * Text::kSteps + j) * Text::kGroups + h / 2) * D + d));
      }
      p.push_back(score / T{4});
      most = std::max(most, p.back());
    }
    for (T& each : p) sum += each = std::exp(each - most);
    for (int64_t d = 0; d < Dv; ++d) {
      T value = 0;
      double size = 0;
      for (int64_t j = 0; j <= t; ++j) {
        const double v = stored.value.at(((b * Text::kSteps + j) * Text::kGroups + h / 2) * Dv + d);
        value += p[static_cast<size_t>(j)] / sum * static_cast<T>(v);
        size += static_cast<double>(p[static_cast<size_t>(j)] / sum) * std::fabs(v);
      }
      heads.push_back(round(value));
      sizes.push_back(size);
    }
  }
  const Array& wo = text.in.weights[3];
  for (int64_t c = 0; c < Text::kSize; ++c) {
    T sum = 0;
    double size = 0;
    for (size_t n = 0; n < heads.size(); ++n) {
      const double w = wo.at(static_cast<int64_t>(n) * Text::kSize + c);
      sum += heads[n] * static_cast<T>(w);
      size += sizes[n] * std::fabs(w);
    }
    out->set(token * Text::kSize + c, static_cast<double>(sum));
    (*magnitude)[static_cast<size_t>(token * Text::kSize + c)] = size;
  }
}

KvCacheDesc cache_of(const Text& text, int64_t page_size) {
  KvCacheDesc cache = format_of(text.desc, page_size);
  cache.key_dtype = text.format.key, cache.value_dtype = text.format.value;
  cache.rotary_dim = text.format.rotary_dim, cache.interleaved = text.format.interleaved;
  cache.hadamard = text.format.hadamard;
  return cache;
}

// The text in calls of a few time steps; and what its cache holds then.
Array run(const Text& text, const Cut& cut, StoredTokens* stored, const std::vector<int64_t>& rows = {0, 1}) {
  LayerDesc d = text.desc;
  d.batch = static_cast<int64_t>(rows.size());
  const KvCacheDesc cache = cache_of(text, cut.page_size);
  const PagesOfBatch pages(cache, d.batch, Text::kSteps, 3);
  const std::unique_ptr<Loan> loan = new_loan(cut.kernel);
  const KvTensors pool = lend(*loan, pages.pool);
  d.cache = pages.desc;
  d.seqlen_k = pages.capacity;
  d.attention.has_seqlens_q = true;
  Array out(d.dtype, {d.batch, Text::kSteps, Text::kSize});
  Array all_slots(DType::kInt64, {Text::kBatch * Text::kSteps});
  int64_t width = 0;
  for (int64_t first = 0, call = 0; first < Text::kSteps; first += width, ++call) {
    width =
        std::min(cut.widths[std::min<size_t>(static_cast<size_t>(call), cut.widths.size() - 1)], Text::kSteps - first);
    d.seqlen_q = width;
    const Result<Layer> made = layer(d, options_of(cut.kernel, cut.threads));
    EXPECT_TRUE(made.ok()) << made.status().message();
    std::vector<int64_t> of_q, of_k, to, at;
    Array x(d.dtype, {d.batch, width, Text::kSize});
    for (int64_t b = 0; b < d.batch; ++b) {
      const int64_t row = rows[static_cast<size_t>(b)], length = text.length(row);
      of_q.push_back(std::clamp<int64_t>(length - first, 0, width));
      of_k.push_back(std::min(length, first + width));
      for (int64_t t = first; t < first + width; ++t) {
        const bool padding = t >= length;
        to.push_back(padding ? 999 : pages.slot(b, t));  // not looked at
        at.push_back(padding ? -999 : static_cast<int64_t>(text.positions.at(row * Text::kSteps + t)));
        if (!padding) all_slots.set(row * Text::kSteps + t, static_cast<double>(pages.slot(b, t)));
        for (int64_t c = 0; c < Text::kSize; ++c) {
          const double number = text.in.query.at((row * Text::kSteps + t) * Text::kSize + c);
          x.set((b * width + t - first) * Text::kSize + c, padding ? NAN : number);
        }
      }
    }
    const Array seqlens_q = integers_of(of_q, {d.batch}), seqlens_k = integers_of(of_k, {d.batch});
    const Array slots = integers_of(to, {d.batch, width}), positions = integers_of(at, {d.batch, width});
    const Array table = pages.table_for(seqlens_k);
    LayerForwardArgs args;
    args.query = args.key = args.value = view(x);
    args.weights = weights_of(text.in.weights);
    args.seqlens_q = view(seqlens_q), args.seqlens_k = view(seqlens_k);
    args.cache = {pool, view(table), view(slots), {}, {}, {}};
    if (cache.rotary_dim > 0) {
      args.cache.positions = view(positions), args.cache.cos = view(text.cos), args.cache.sin = view(text.sin);
    }
    args.out = part(view(out), 1, first, width);
    const GuardedBytes workspace(made->workspace_bytes(), Guard::kEnd, 0xff);
    args.workspace = workspace.data(), args.workspace_bytes = made->workspace_bytes();
    LentCall lent(cut.kernel);
    lent.lend(&args);
    EXPECT_EQ(made->forward(args).message(), "");
    EXPECT_EQ(lent.finish(), "");
  }
  EXPECT_EQ(loan->finish(), "");
  if (stored == nullptr) return out;
  stored->key = Array(DType::kFloat32, {all_slots.size(), Text::kGroups, Text::kDim});
  stored->value = Array(DType::kFloat32, {all_slots.size(), Text::kGroups, Text::kDimV});
  const Status read = kv_cache(pages.desc)->read(pages.pool, view(all_slots), view(stored->key), view(stored->value));
  EXPECT_EQ(read.message(), "");
  return out;
}

// A head as it is stored is what is to be stored, rounded.
void expect_stored(const Text& text, const StoredTokens& stored) {
  const auto quantum = [](DType dtype) {
    switch (dtype) {
      case DType::kFloat32: return 1e-5;
      case DType::kBFloat16:
      case DType::kInt8: return 1.0 / 100;
      case DType::kFloat16: return 1.0 / 500;
      default: return 1.0 / 12;
    }
  };
  for (int64_t token = 0; token < Text::kBatch * Text::kSteps; ++token) {
    if (token % Text::kSteps >= text.length(token / Text::kSteps)) continue;
    const auto exact = [](double x) { return x; };
    std::vector<double> key = text.projected<double>(1, token, exact), value = text.projected<double>(2, token, exact);
    for (int64_t g = 0; g < Text::kGroups; ++g) text.turn(token, key.data() + g * Text::kDim);
    const auto compare = [&](const std::vector<double>& want, const Array& got, DType dtype) {
      double most = 0;
      for (const double x : want) most = std::max(most, std::fabs(x));
      for (size_t n = 0; n < want.size(); ++n) {
        const auto at = token * static_cast<int64_t>(want.size()) + static_cast<int64_t>(n);
        ASSERT_NEAR(got.at(at), want[n], most * (quantum(dtype) + (text.desc.dtype == DType::kBFloat16 ? 0.01 : 0)));
      }
    };
    compare(key, stored.key, text.format.key);
    compare(value, stored.value, text.format.value);
  }
}

TEST(LayerOnCache, RotaryPositionsAndFormatsByPlainLoops) {
  for (const Format& format : kFormats) {
    for (const Kernel* kernel : kernels_to_test(device_under_test.device)) {
      Errors errors("out", layer_bound("out"));
      for (uint64_t seed = 1; seed <= 3; ++seed) {
        const Text text(format, seed);
        LayerDesc d = text.desc;
        const PagesOfBatch pages(cache_of(text, 2), d.batch, Text::kSteps, 1);
        d.cache = pages.desc, d.seqlen_k = pages.capacity;
        if (refused(layer(d, options_of(kernel->name, 1)).status())) break;
        StoredTokens stored;
        const Array got = run(text, {.kernel = kernel->name, .threads = 2, .widths = {4, 1, 2}}, &stored);
        expect_stored(text, stored);
        Array exact(DType::kFloat64, got.dims), naive(got.dtype, got.dims);
        std::vector<double> magnitude(static_cast<size_t>(got.size()));
        const auto rounded = [&](float x) {
          Array one(d.dtype, {1});
          one.set(0, static_cast<double>(x));
          return static_cast<float>(one.at(0));
        };
        for (int64_t n = 0; n < got.size(); ++n) exact.set(n, got.at(n)), naive.set(n, got.at(n));  // padding
        for (int64_t b = 0; b < Text::kBatch; ++b) {
          for (int64_t t = 0; t < text.length(b); ++t) {
            attend<float>(text, stored, b, t, rounded, &naive, &magnitude);
            attend<double>(
                text, stored, b, t, [](double x) { return x; }, &exact, &magnitude);
          }
        }
        add_errors(errors, got, exact, naive, magnitude);
      }
      EXPECT_EQ(text_of(errors), "") << format.name << " on " << kernel->name;
    }
  }
}

// Sequences do not know of each other, pages or calls.
TEST(LayerOnCache, SameBitsAlone) {
  for (const Format& format : kFormats) {
    const Text text(format, 4);
    const Array both = run(text, {.widths = {4, 1, 2}, .page_size = 2}, nullptr);
    for (const int64_t row : {0, 1}) {
      const Array alone = run(text, {.threads = 3, .widths = {1}, .page_size = 16}, nullptr, {row});
      for (int64_t n = 0; n < text.length(row) * Text::kSize; ++n) {
        ASSERT_EQ(both.at(row * Text::kSteps * Text::kSize + n), alone.at(n)) << format.name << " " << row << " " << n;
      }
    }
  }
}

}  // namespace
}  // namespace polyhead::testing
