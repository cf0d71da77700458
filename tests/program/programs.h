// Programs that people write, each as text and as what it means in double: two tellings of one thing.
// Sources: FlexAttention's examples (attention-gym), ALiBi (arXiv:2108.12409), T5 (1910.10683), Gemma 2 (2408.00118),
// KERPLE (2205.09921), Longformer (2004.05150), Sparse Transformer (1904.10509), Swin (2103.14030), Graphormer
// (2106.05234), Forgetting Transformer (2503.02130), StreamingLLM (2309.17453), FlashMask (2410.01359).
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "polyhead/attention.h"
#include "testing/array.h"
#include "testing/random.h"

namespace polyhead::testing {

struct PairAt {
  double score;
  int64_t b, h, q, k;
};

struct Sizes4 {
  int64_t batch, heads, seqlen_q, seqlen_k;
};

// A tensor of a program: its dims of the sizes, and element n of it.
struct CaptureOf {
  DType dtype;
  std::vector<int64_t> dims;
  std::function<double(int64_t n, Random& random)> element;
};

using Arrays = std::vector<Array>;

struct NamedProgram {
  std::string name, text;
  std::function<std::vector<CaptureOf>(const Sizes4&)> captures = [](const Sizes4&) {
    return std::vector<CaptureOf>();
  };
  std::function<double(const PairAt&, const Arrays&)> score = nullptr;  // null: scores stay
  std::function<bool(const PairAt&, const Arrays&)> mask = nullptr;     // null: all
};

inline void PrintTo(const NamedProgram& program, std::ostream* out) { *out << program.text; }

inline double normal(int64_t, Random& random) { return random.normal(); }

// Element [i, j, ...] of an array.
inline double element(const Array& a, std::initializer_list<int64_t> index) { return a.at(a.index(index)); }

inline int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

const std::vector<NamedProgram>& named_programs();

}  // namespace polyhead::testing
