#include "graph/score_program.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <unordered_map>

#include "core/sentence.h"
#include "graph/nodes.h"
#include "graph/tensors.h"
#include "polyhead/program.h"

namespace polyhead::graph {
namespace {

constexpr size_t kRank = 4;
constexpr size_t kMostNodes = 100;
constexpr size_t kLongest = 4000;  // of an expression

// The text of an operator of one, two or three operands, %0, %1 and %2.
struct Words {
  std::string_view op_type;
  size_t num_operands;
  const char* text;
};
constexpr Words kWords[] = {
    {"Neg", 1, "(-%0)"},
    {"Abs", 1, "abs(%0)"},
    {"Exp", 1, "exp(%0)"},
    {"Log", 1, "log(%0)"},
    {"Sqrt", 1, "sqrt(%0)"},
    {"Reciprocal", 1, "(1.0 / %0)"},
    {"Tanh", 1, "tanh(%0)"},
    {"Sigmoid", 1, "sigmoid(%0)"},
    {"Erf", 1, "erf(%0)"},
    {"Relu", 1, "max(%0, 0.0)"},
    {"Sin", 1, "sin(%0)"},
    {"Cos", 1, "cos(%0)"},
    {"Softplus", 1, "(max(%0, 0.0) + log(1.0 + exp(-abs(%0))))"},
    {"Not", 1, "(not %0)"},
    {"Add", 2, "(%0 + %1)"},
    {"Sub", 2, "(%0 - %1)"},
    {"Mul", 2, "(%0 * %1)"},
    {"Div", 2, "(%0 / %1)"},
    {"Pow", 2, "(%0 ** %1)"},
    {"Min", 2, "min(%0, %1)"},
    {"Max", 2, "max(%0, %1)"},
    {"Less", 2, "(%0 < %1)"},
    {"LessOrEqual", 2, "(%0 <= %1)"},
    {"Greater", 2, "(%0 > %1)"},
    {"GreaterOrEqual", 2, "(%0 >= %1)"},
    {"Equal", 2, "(%0 == %1)"},
    {"And", 2, "(%0 and %1)"},
    {"Or", 2, "(%0 or %1)"},
    {"Where", 3, "where(%0, %1, %2)"},
    {"Clip", 3, "clamp(%0, %1, %2)"},
};

// A float's digits, which are never an integer's.
std::string literal(double number) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.17g", number);
  std::string text = digits;
  if (text.find_first_of(".einf") == std::string::npos) text += ".0";
  return text.front() == '-' ? "(" + text + ")" : text;
}

class Writer {
 public:
  Writer(const Net& net, int scores) : net_(net), scores_(scores), shape_(net.shape(scores)) {}

  std::optional<ScoreProgram> write() {
    if (shape_.size() != kRank || !leads(scores_) || product_ == kNone) return std::nullopt;
    std::string reason;
    const auto product = scores_product(net_, product_, reason);
    if (!product) return std::nullopt;
    program_.product = *product;
    begin();
    program_.text = sentence(declared_, "score = ", is_understood_ ? expression(scores_) : "");
    if (!is_understood_ || program_.captures.size() > Program::kMostCaptures || !parse_program(program_.text).ok())
      return std::nullopt;
    return program_;
  }

 private:
  // Whether a value is made of the scores of the one product that stands behind all of them.
  bool leads(int id) {
    const int node = net_.producer(id);
    if (node == kNone || !same_shape(id)) return false;
    if (const auto found = leads_.find(id); found != leads_.end()) return found->second;
    if (leads_.size() == kMostNodes) return is_understood_ = false;
    if (const int product = product_of(id); product != kNone) {
      is_understood_ = is_understood_ && (first_ == kNone || first_ == id);
      product_ = product;
      first_ = id;
      return leads_[id] = true;
    }
    leads_[id] = false;  // should it be made of itself
    if (!knows(node)) return false;
    bool any = false;
    for (size_t i = 0; i < net_.node(node).inputs.size(); ++i) any = leads(net_.input(node, i)) || any;
    return leads_[id] = any;
  }

  // The product that gives a value, perhaps with its batch and heads in one dim.
  int product_of(int id) const {
    int node = net_.producer(id);
    while (keeps_matrix(net_, node)) node = net_.producer(net_.input(node, 0));
    return is_product(net_, node) ? node : kNone;
  }

  bool same_shape(int id) const {
    const auto shape = net_.shape(id);
    return std::equal(shape.begin(), shape.end(), shape_.begin(), shape_.end());
  }

  bool is_same(int node) const { return net_.is(node, "Identity") || is_idle_dropout(net_, node); }

  static const Words* words_of(const Net& net, int node) {
    const auto at = std::find_if(std::begin(kWords), std::end(kWords),
                                 [&](const Words& words) { return net.is(node, words.op_type); });
    return at == std::end(kWords) || net.node(node).inputs.size() != at->num_operands ? nullptr : at;
  }

  bool knows(int node) const { return is_same(node) || net_.is(node, "Cast") || words_of(net_, node) != nullptr; }

  // The product's scores, or what becomes of them by positive numbers alone: that is the operator's scale.
  void begin() {
    int id = first_;
    program_.factor = program_.product.factor;
    while (net_.value(id).users.size() == 1 && !net_.value(id).is_output) {
      const int node = net_.value(id).users.front();
      const auto scaled = scaled_by(net_, node);
      if (!scaled || scaled->value != id || !same_shape(net_.output(node, 0)) || id == scores_) break;
      const double factor = scaled->of(program_.factor);
      if (!(factor > 0) || !std::isfinite(factor)) break;
      program_.factor = factor;
      id = net_.output(node, 0);
    }
    known_[id] = "score";
  }

  // Of a value.
  std::string expression(int id) {
    if (const auto found = known_.find(id); found != known_.end()) return found->second;
    const auto number = net_.number(id);
    if (number && !std::isnan(*number) && net_.facts(id).type != ElementType::kBool) return literal(*number);
    if (id == kNone || !leads(id)) return known_[id] = element(id);
    const int node = net_.producer(id);
    const ElementType type = net_.facts(id).type;
    if (is_same(node)) return expression(net_.input(node, 0));
    if (net_.is(node, "Cast")) {
      if (!is_float(type)) return refuse();
      const std::string x = expression(net_.input(node, 0));
      return is_float(net_.facts(net_.input(node, 0)).type) ? x : sentence("float(", x, ")");
    }
    const Words* words = words_of(net_, node);
    if (words == nullptr) return refuse();
    std::vector<std::string> operands;
    for (size_t i = 0; i < words->num_operands; ++i) operands.push_back(expression(net_.input(node, i)));
    std::string text;
    for (const char* at = words->text; *at != '\0'; ++at) {
      if (*at == '%') {
        text += operands[static_cast<size_t>(*++at - '0')];
      } else {
        text += *at;
      }
    }
    return known_[id] = text.size() > kLongest ? refuse() : text;
  }

  // Of a tensor that broadcasts to the scores.
  std::string element(int id) {
    constexpr const char* kIndices[kRank] = {"b", "h", "q", "k"};
    if (id == kNone || net_.rank(id) < 0 || net_.rank(id) > static_cast<int>(kRank)) return refuse();
    const auto shape = net_.shape(id);
    const ElementType type = net_.facts(id).type;
    const bool is_int = type == ElementType::kInt32 || type == ElementType::kInt64;
    if (!is_float(type) && !is_int && type != ElementType::kBool) return refuse();
    const std::string name = sentence("c", program_.captures.size());
    std::string indices;
    for (size_t i = 0; i < shape.size(); ++i) {
      const size_t dim = kRank - shape.size() + i;
      if (!shape[i].is(1) && shape[i] != shape_[dim]) return refuse();
      indices += sentence(i == 0 ? "" : ", ", shape[i].is(1) ? "0" : kIndices[dim]);
    }
    declared_ += sentence(name, is_int ? ": int; " : type == ElementType::kBool ? ": bool; " : ": float; ");
    program_.captures.push_back(id);
    return sentence(name, "[", indices, "]");
  }

  std::string refuse() {
    is_understood_ = false;
    return "";
  }

  const Net& net_;
  int scores_;
  std::span<const Size> shape_;
  int product_ = kNone, first_ = kNone;  // and its scores, with the dims of those of the softmax
  bool is_understood_ = true;
  std::unordered_map<int, bool> leads_;
  std::unordered_map<int, std::string> known_;  // what stands for a value
  std::string declared_;
  ScoreProgram program_;
};

}  // namespace

std::optional<ScoreProgram> score_program_of(const Net& net, int scores) { return Writer(net, scores).write(); }

}  // namespace polyhead::graph
