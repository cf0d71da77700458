#include "random_program.h"

#include <algorithm>

namespace polyhead::testing {
namespace {

// Text, and how large its values can be.
struct Float {
  std::string text;
  double most;
};
struct Int {
  std::string text;
  int64_t low, high;
};

class Writer {
 public:
  Writer(Random& random, const Sizes4& sizes) : random_(random), s_(sizes) {}

  NamedProgram write() {
    NamedProgram program;
    const bool masks = random_.chance(0.6), scores = !masks || random_.chance(0.7);
    const std::string mask = masks ? boolean(3) : "", score = scores ? final_score() : "";
    for (const std::string& line : declarations_) program.text += line + "; ";
    for (const std::string& line : statements_) program.text += line + "; ";
    if (masks) program.text += "mask = " + mask + (scores ? "; " : "");
    if (scores) program.text += "score = " + score;
    program.captures = [captures = captures_](const Sizes4&) { return captures; };
    return program;
  }

 private:
  int64_t pick(int64_t count) { return random_.below(count); }
  std::string integer(int64_t low, int64_t high) {
    const int64_t n = random_.integer(low, high);
    return n < 0 ? "(" + std::to_string(n) + ")" : std::to_string(n);
  }
  std::string number(double low, double high) {
    const auto n = static_cast<int64_t>((low + (high - low) * random_.uniform()) * 64);
    const std::string text = std::to_string(static_cast<double>(n) / 64);
    return n < 0 ? "(" + text + ")" : text;
  }
  static std::string call(const std::string& word, const std::string& a) { return word + "(" + a + ")"; }
  static std::string infix(const std::string& a, const char* sign, const std::string& b) {
    return "(" + a + " " + sign + " " + b + ")";
  }

  // A score that follows the score that came, or not, and may hide.
  std::string final_score() {
    reads_score_ = true;
    const Float x = floating(3);
    std::string text = x.most > 12 ? "12 * tanh(" + x.text + " / 12)" : x.text;
    if (random_.chance(0.7)) text = infix("score", random_.chance(0.8) ? "+" : "-", text);
    if (random_.chance(0.2)) text = "where(" + boolean(2) + ", " + text + ", -inf)";
    return text;
  }

  // A value that several others use.
  Float named(const Float& x) {
    if (!random_.chance(0.15)) return x;
    const std::string name = "v" + std::to_string(statements_.size());
    statements_.push_back(name + " = " + x.text);
    floats_.push_back({name, x.most});
    return floats_.back();
  }

  Float leaf() {
    switch (pick(reads_score_ ? 6 : 4)) {
      case 0: return {number(-2, 2), 2};
      case 1: {
        const Int i = whole(1);
        const int64_t reach = std::max<int64_t>({std::abs(i.low), std::abs(i.high), 1});
        return {infix(call("float", i.text), "/", std::to_string(reach)), 1};
      }
      case 2:
        if (!floats_.empty()) return floats_[static_cast<size_t>(pick(static_cast<int64_t>(floats_.size())))];
        [[fallthrough]];
      case 3: return gathered();
      default: return {"score", 8};
    }
  }

  Float floating(int depth) { return depth == 0 || random_.chance(0.1) ? leaf() : named(operation(depth - 1)); }

  Float operation(int depth) {
    const Float a = floating(depth);
    const double one = std::max(a.most, 1.0);
    switch (pick(20)) {
      case 0:
      case 1: {
        const Float b = floating(depth);
        return {infix(a.text, "+", b.text), a.most + b.most};
      }
      case 2: {
        const Float b = floating(depth);
        return {infix(a.text, "-", b.text), a.most + b.most};
      }
      case 3:
      case 4: {
        const Float b = floating(depth);
        return bounded({infix(a.text, "*", b.text), a.most * b.most});
      }
      case 5: {
        const Float b = floating(depth);
        return bounded({infix(a.text, "/", "(abs(" + b.text + ") + 0.5)"), 2 * a.most});
      }
      case 6: {
        const Float b = floating(depth);
        return {call("min", a.text + ", " + b.text), std::max(a.most, b.most)};
      }
      case 7: {
        const Float b = floating(depth);
        return {call("max", a.text + ", " + b.text), std::max(a.most, b.most)};
      }
      case 8: return {call("abs", a.text), a.most};
      case 9: return {"(-" + a.text + ")", a.most};
      case 10: {
        const Float b = floating(depth);
        return {"where(" + boolean(depth) + ", " + a.text + ", " + b.text + ")", std::max(a.most, b.most)};
      }
      case 11: return {call("tanh", a.text), 1};
      case 12: return {call("sigmoid", a.text), 1};
      case 13: return {call(random_.chance(0.5) ? "sin" : "cos", a.text), 1};
      case 14: return {call("exp", "-abs(" + a.text + ")"), 1};
      case 15: return {call("log", "abs(" + a.text + ") + 0.5"), one};
      case 16: return {call(random_.chance(0.5) ? "sqrt" : "rsqrt", "abs(" + a.text + ") + 0.25"), one + 2};
      case 17: return {call("erf", a.text), 1};
      case 18: return bounded({infix("(abs(" + a.text + ") + 0.5)", "**", number(-1.5, 1.5)), (one + 1) * (one + 1)});
      default: return {"clamp(" + a.text + ", " + number(-3, 0) + ", " + number(0, 3) + ")", 3};
    }
  }
  static Float bounded(const Float& x) { return x.most <= 40 ? x : Float{"(20 * tanh(" + x.text + " / 20))", 20}; }

  // An element of one of a few tensors of floats, some of them new.
  Float gathered() {
    if (tensors_.empty() || (tensors_.size() < 4 && random_.chance(0.4))) {
      static constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
      tensors_.push_back(new_capture("float", kDTypes[pick(4)], normal));
    }
    return {element(tensors_[static_cast<size_t>(pick(static_cast<int64_t>(tensors_.size())))]), 3.5};
  }

  struct Tensor {
    std::string name;
    std::vector<int64_t> dims;
  };
  Tensor new_capture(const std::string& kind, DType dtype, std::function<double(int64_t, Random&)> element) {
    Tensor made{"t" + std::to_string(captures_.size()), {}};
    const int64_t sizes[] = {s_.batch, s_.heads, s_.seqlen_q, s_.seqlen_k, 7, s_.seqlen_q + s_.seqlen_k, 3};
    const auto ndim = random_.chance(0.1) ? 0 : random_.integer(1, random_.chance(0.2) ? 4 : 2);
    for (int64_t n = 0; n < ndim; ++n) made.dims.push_back(std::max<int64_t>(1, sizes[pick(n < 2 ? 7 : 2)]));
    declarations_.push_back(made.name + ": " + kind);
    captures_.push_back({dtype, ndim == 0 ? std::vector<int64_t>{1} : made.dims, std::move(element)});
    return made;
  }
  std::string element(Tensor tensor) {  // a copy: its indices may add to the list it comes from
    std::string indices;
    for (const int64_t size : tensor.dims) indices += (indices.empty() ? "" : ", ") + index(size);
    return tensor.name + "[" + indices + "]";
  }

  // From 0 to size - 1.
  std::string index(int64_t size) {
    std::vector<std::string> fitting;
    if (size == s_.batch) fitting.emplace_back("b");
    if (size == s_.heads) fitting.emplace_back("h");
    if (size == s_.seqlen_q) fitting.emplace_back("q");
    if (size == s_.seqlen_k) fitting.emplace_back("k");
    if (size == s_.seqlen_q + s_.seqlen_k) fitting.push_back("q - k + " + std::to_string(s_.seqlen_k));
    if (!fitting.empty() && random_.chance(0.7))
      return fitting[static_cast<size_t>(pick(static_cast<int64_t>(fitting.size())))];
    const std::string any = whole(2).text;
    if (random_.chance(0.5)) return any + " % " + std::to_string(size);
    return "clamp(" + any + ", 0, " + std::to_string(size - 1) + ")";
  }

  Int whole(int depth) {
    if (depth == 0) return whole_leaf();
    const Int a = whole(depth - 1);
    const std::string n = integer(1, 9);
    const int64_t reach = std::max(std::abs(a.low), std::abs(a.high));
    switch (pick(12)) {
      case 0: {
        const Int b = whole(depth - 1);
        return {infix(a.text, "+", b.text), a.low + b.low, a.high + b.high};
      }
      case 1: {
        const Int b = whole(depth - 1);
        return {infix(a.text, "-", b.text), a.low - b.high, a.high - b.low};
      }
      case 2: return {infix(a.text, "*", n), -9 * reach, 9 * reach};
      case 3: return {infix(a.text, "//", integer(-5, 9)), -reach - 1, reach + 1};  // 0 too
      case 4: return {infix(a.text, "%", integer(-5, 9)), -5, 9};
      case 5: {
        const Int b = whole(depth - 1);
        return {call(random_.chance(0.5) ? "min" : "max", a.text + ", " + b.text), std::min(a.low, b.low),
                std::max(a.high, b.high)};
      }
      case 6: return {call("abs", a.text), 0, reach};
      case 7: return {infix(a.text, random_.chance(0.5) ? "&" : ">>", integer(0, 5)), -reach - 8, reach + 8};
      case 8: {
        const Int b = whole(depth - 1);
        return {infix(a.text, random_.chance(0.5) ? "^" : "|", b.text), -(1 << 20), 1 << 20};
      }
      case 9: {
        const Int b = whole(depth - 1);
        return {"where(" + boolean(depth - 1) + ", " + a.text + ", " + b.text + ")", std::min(a.low, b.low),
                std::max(a.high, b.high)};
      }
      case 10: return {call("int", "floor(float(" + a.text + ") * 0.3125 + 0.125)"), -reach - 1, reach + 1};
      default:
        if (random_.chance(0.1)) return {infix(infix(a.text, "*", "1000003"), "%", "4099"), 0, 4098};  // needs 64 bits
        return a;
    }
  }
  Int whole_leaf() {
    switch (pick(8)) {
      case 0: return {"b", 0, s_.batch};
      case 1: return {"h", 0, s_.heads};
      case 2: return {"q", 0, s_.seqlen_q};
      case 3: return {"k", 0, s_.seqlen_k};
      case 4:
      case 5: return {"(q - k)", -s_.seqlen_k, s_.seqlen_q};
      case 6: {
        if (ints_.empty() || (ints_.size() < 2 && random_.chance(0.3))) {
          ints_.push_back(new_capture("int", random_.chance(0.5) ? DType::kInt32 : DType::kInt64,
                                      [](int64_t, Random& r) { return static_cast<double>(r.integer(-3, 40)); }));
        }
        return {element(ints_[static_cast<size_t>(pick(static_cast<int64_t>(ints_.size())))]), -3, 40};
      }
      default: return {integer(-9, 60), -9, 60};
    }
  }

  std::string boolean(int depth) {
    if (depth > 0) {
      switch (pick(7)) {
        case 0: return infix(boolean(depth - 1), random_.chance(0.5) ? "and" : "&", boolean(depth - 1));
        case 1:
        case 2: return infix(boolean(depth - 1), random_.chance(0.5) ? "or" : "|", boolean(depth - 1));
        case 3: return "(not " + boolean(depth - 1) + ")";
        case 4: return infix(boolean(depth - 1), "^", boolean(depth - 1));
        default: break;
      }
    }
    switch (pick(9)) {
      case 0: {
        if (bools_.empty()) {
          bools_.push_back(new_capture("bool", DType::kBool,
                                       [](int64_t, Random& r) { return static_cast<double>(r.integer(0, 3) != 0); }));
        }
        return element(bools_[0]);
      }
      case 1: return "(k <= q + " + integer(-3, 90) + ")";
      case 2: return infix(whole(1).text + " % " + integer(2, 7), "!=", integer(0, 2));
      case 3: return infix(integer(-20, 3) + " <= " + whole(1).text, "<", integer(20, 200));
      case 4: return infix(whole(1).text, random_.chance(0.8) ? "!=" : "==", whole(1).text);
      default: {
        static constexpr const char* kSigns[] = {"<", "<=", ">", ">="};
        return infix(whole(2).text, kSigns[pick(4)], whole(1).text);
      }
    }
  }

  Random& random_;
  const Sizes4& s_;
  bool reads_score_ = false;
  std::vector<std::string> declarations_, statements_;
  std::vector<CaptureOf> captures_;
  std::vector<Float> floats_;
  std::vector<Tensor> tensors_, ints_, bools_;
};

}  // namespace

NamedProgram random_program(Random& random, const Sizes4& sizes) { return Writer(random, sizes).write(); }

}  // namespace polyhead::testing
