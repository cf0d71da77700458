#include "graph/infer.h"

#include <cctype>
#include <unordered_map>

#include "graph/infer_rules.h"
#include "graph/nodes.h"
#include "graph/product.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace rules {

Shape broadcast(Symbols& symbols, const Shape& a, const Shape& b) {
  if (!a || !b) return std::nullopt;
  const Sizes& longer = a->size() >= b->size() ? *a : *b;
  const Sizes& shorter = a->size() >= b->size() ? *b : *a;
  Sizes result = longer;
  const size_t skipped = longer.size() - shorter.size();
  for (size_t i = 0; i < shorter.size(); ++i) result[skipped + i] = symbols.broadcast(longer[skipped + i], shorter[i]);
  return result;
}

std::optional<std::vector<bool>> marked_axes(const At& at, size_t rank) {
  const auto axes = axes_of(at.net, at.index);
  std::vector<bool> marked(rank);
  for (int64_t each : axes.value_or(std::vector<int64_t>())) {
    const auto axis = axis_of(each, rank);
    if (!axis) return std::nullopt;
    marked[*axis] = true;
  }
  return axes ? std::optional(marked) : std::nullopt;
}

}  // namespace rules

namespace {

using namespace rules;

void same_but_bool(const At& at) {
  same(at);
  at.results[0].type = ElementType::kBool;
}

void elementwise(const At& at) {
  at.results[0].type = at.in(0).type == ElementType::kUnknown ? at.in(1).type : at.in(0).type;
  at.results[0].shape = at.in(0).shape;
  for (size_t i = 1; i < at.node().inputs.size(); ++i) {
    at.results[0].shape = broadcast(at.symbols(), at.results[0].shape, at.in(i).shape);
  }
}

void comparison(const At& at) {
  elementwise(at);
  at.results[0].type = ElementType::kBool;
}

void where(const At& at) {
  elementwise(at);
  at.results[0].type = at.in(1).type == ElementType::kUnknown ? at.in(2).type : at.in(1).type;
}

void cast(const At& at) {
  same(at);
  at.results[0].type = static_cast<ElementType>(static_cast<int32_t>(integer_of(at.node(), "to", 0)));
  if (at.node().op_type == "CastLike") at.results[0].type = at.in(1).type;
}

void dequantize(const At& at) {
  same(at);
  at.results[0].type = at.in(1).type;
}

void quantize(const At& at) {
  constexpr auto kUint8 = static_cast<ElementType>(2);
  same(at);
  at.results[0].type = at.net.input(at.index, 2) == kNone ? kUint8 : at.in(2).type;
  for (size_t i = 1; i < at.results.size(); ++i)  // the scale and the zero point that DynamicQuantizeLinear finds
    at.results[i] = {i == 1 ? at.in(0).type : kUint8, Sizes()};
}

// Integers and integers, each with a scale and a zero point.
void quantized_elementwise(const At& at) {
  same(at);
  at.results[0].shape = broadcast(at.symbols(), at.in(0).shape, at.in(3).shape);
}

// Two stacks of matrices, of which FusedMatMul may transpose the last dims.
void matmul(const At& at) {
  const std::string& op = at.node().op_type;
  const size_t second = second_operand(at.net, at.index);
  at.results[0].type = op == "MatMulInteger" ? ElementType::kInt32 : at.in(op == "MatMulIntegerToFloat" ? 2 : 0).type;
  if (!at.in(0).shape || !at.in(second).shape) return;
  Sizes a = *at.in(0).shape, b = *at.in(second).shape;
  if (a.size() < 2 || b.size() < 2) return;
  if (integer_of(at.node(), "transA", 0) != 0) std::swap(a[a.size() - 1], a[a.size() - 2]);
  if (integer_of(at.node(), "transB", 0) != 0) std::swap(b[b.size() - 1], b[b.size() - 2]);
  const Size rows = a[a.size() - 2], columns = b.back();
  Shape stack = broadcast(at.symbols(), Sizes(a.begin(), a.end() - 2), Sizes(b.begin(), b.end() - 2));
  stack->push_back(rows);
  stack->push_back(columns);
  at.results[0].shape = stack;
}

void shape_of(const At& at) {
  Facts& result = at.results[0];
  result.type = ElementType::kInt64;
  if (!at.in(0).shape) {
    result.shape = fresh(at.symbols(), 1);
    return;
  }
  const auto& in = *at.in(0).shape;
  const auto rank = static_cast<int64_t>(in.size());
  const auto bound = [&](int64_t place) { return std::clamp<int64_t>(place < 0 ? place + rank : place, 0, rank); };
  const int64_t start = bound(integer_of(at.node(), "start", 0)), end = bound(integer_of(at.node(), "end", rank));
  result.elements = start < end ? Sizes(in.begin() + start, in.begin() + end) : Sizes();
  result.shape = Sizes{{static_cast<int64_t>(result.elements->size()), {}}};
}

void constant_of_shape(const At& at) {
  const Attribute* value = attribute_of(at.node(), "value");
  at.results[0].type = value != nullptr && !value->tensors.empty() ? value->tensors[0].type : ElementType::kFloat32;
  if (at.in(0).elements && at.in(0).elements->size() <= kMostDims) at.results[0].shape = *at.in(0).elements;
}

void reduce(const At& at) {
  same(at);
  const bool keeps = integer_of(at.node(), "keepdims", 1) != 0;
  const bool told = attribute_of(at.node(), "axes") != nullptr || at.net.input(at.index, 1) != kNone;
  at.results[0].shape.reset();
  if (!at.in(0).shape) return;
  const Sizes& in = *at.in(0).shape;
  const auto gone = told ? marked_axes(at, in.size()) : std::vector<bool>(in.size(), true);
  if (!gone) return;
  Sizes out;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!(*gone)[i]) out.push_back(in[i]);
    if ((*gone)[i] && keeps) out.push_back({1, {}});
  }
  at.results[0].shape = std::move(out);
}

void convolution(const At& at) {
  same(at);
  if (!at.in(0).shape || at.in(0).shape->size() < 2) return;
  Sizes out = fresh(at.symbols(), at.in(0).shape->size());
  out[0] = at.in(0).shape->front();
  if (at.in(1).shape && at.node().op_type == "Conv") out[1] = at.in(1).shape->front();
  at.results[0].shape = std::move(out);
}

void gemm(const At& at) {
  at.results[0].type = at.in(0).type;
  if (!at.in(0).shape || !at.in(1).shape || at.in(0).shape->size() != 2 || at.in(1).shape->size() != 2) return;
  const size_t row = integer_of(at.node(), "transA", 0) != 0, column = integer_of(at.node(), "transB", 0) == 0;
  at.results[0].shape = Sizes{(*at.in(0).shape)[row], (*at.in(1).shape)[column]};
}

void einsum(const At& at) {
  at.results[0].type = at.in(0).type;
  const Attribute* equation = attribute_of(at.node(), "equation");
  if (equation == nullptr || !equation->text) return;
  std::string text = *equation->text;
  std::erase_if(text, [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; });
  const size_t arrow = text.find("->");
  if (arrow == std::string::npos || text.find('.') != std::string::npos) return;
  std::unordered_map<char, Size> sizes;
  size_t operand = 0, axis = 0;
  for (char c : text.substr(0, arrow)) {
    if (c == ',') {
      ++operand;
      axis = 0;
      continue;
    }
    const Shape& in = at.in(operand).shape;
    if (!in || axis >= in->size()) return;
    sizes.try_emplace(c, (*in)[axis++]);
  }
  Sizes out;
  for (char c : text.substr(arrow + 2)) {
    if (!sizes.contains(c)) return;
    out.push_back(sizes.at(c));
  }
  at.results[0].shape = std::move(out);
}

// As the query, but for the last dim, where heads of values may have another size. What is packed stays unknown.
void attention(const At& at) {
  const Shape &query = at.in(0).shape, &value = at.in(2).shape;
  at.results[0].type = at.in(0).type;
  if (!query || !value || query->size() != value->size()) return;
  Sizes out = *query;
  const int64_t heads = integer_of(at.node(), "q_num_heads", integer_of(at.node(), "num_heads", 1));
  const int64_t groups = integer_of(at.node(), "kv_num_heads", heads);
  const Size& last = value->back();
  if (query->size() == 4 || groups == heads) {
    out.back() = last;
  } else if (last.is_constant() && groups > 0) {
    out.back() = {last.factor / groups * heads, {}};
  } else {
    return;
  }
  at.results[0].shape = std::move(out);
}

void range(const At& at) {
  at.results[0].type = at.in(0).type;
  const auto &start = at.in(0).elements, &end = at.in(1).elements;
  std::optional<Size> count;
  if (at.net.number(at.net.input(at.index, 2)) == 1.0 && start && end && start->size() == 1 && end->size() == 1)
    count = start->front().is(0) ? end->front() : at.symbols().remainder(end->front(), start->front());
  at.results[0].shape = count ? Sizes{*count} : fresh(at.symbols(), 1);
}

void constant(const At& at) {
  for (const Attribute& attribute : at.node().attributes) {
    Facts& result = at.results[0];
    if (!attribute.tensors.empty()) result = facts_of(attribute.tensors[0]);
    if (attribute.name == "value_int" || attribute.name == "value_ints") {
      Sizes elements;
      if (attribute.integer) elements.push_back({*attribute.integer, {}});
      for (int64_t each : attribute.integers) elements.push_back({each, {}});
      const bool is_list = attribute.name == "value_ints";
      result = {ElementType::kInt64, is_list ? Sizes{{static_cast<int64_t>(elements.size()), {}}} : Sizes{}, elements};
      if (elements.size() == 1) result.filled = static_cast<double>(elements[0].factor);
    }
    if (attribute.name == "value_float" && attribute.number) {
      result = {ElementType::kFloat32, Sizes{}, std::nullopt, static_cast<double>(*attribute.number)};
    }
  }
}

struct Rule {
  std::string_view op_types;  // between blanks
  void (*apply)(const At&);
};

constexpr Rule kRules[] = {
    {" Identity Relu Gelu Erf Tanh Sigmoid HardSigmoid HardSwish Swish Mish Softmax LogSoftmax Hardmax "
     "LayerNormalization "
     "SimplifiedLayerNormalization RMSNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization "
     "BatchNormalization InstanceNormalization GroupNormalization LpNormalization Dropout Neg Exp Log Sqrt Abs Sign "
     "Floor "
     "Ceil Round Reciprocal Clip LeakyRelu Elu Selu Celu Softplus Softsign Sin Cos Trilu CumSum RotaryEmbedding "
     "QuickGelu FastGelu BiasGelu ScatterND ScatterElements ReverseSequence EyeLike "
     "SoftmaxGrad SoftmaxGrad_13 LogSoftmaxGrad_13 DropoutGrad QLinearSoftmax QLinearSigmoid QLinearLeakyRelu ",
     same},
    {" Not IsNaN IsInf ", same_but_bool},
    {" Add Sub Mul Div Pow Mod Max Min Sum PRelu BitwiseAnd BitwiseOr ", elementwise},
    {" And Or Xor Equal Less Greater LessOrEqual GreaterOrEqual ", comparison},
    {" Where ", where},
    {" Cast CastLike ", cast},
    {" QuantizeLinear DynamicQuantizeLinear ", quantize},
    {" QLinearAdd QLinearMul ", quantized_elementwise},
    {" DequantizeLinear ", dequantize},
    {" Transpose ", transpose},
    {" MatMul FusedMatMul MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QLinearMatMul ", matmul},
    {" Gemm ", gemm},
    {" Einsum ", einsum},
    {" Attention MultiHeadAttention GroupQueryAttention ", attention},
    {" Reshape ", reshape},
    {" Flatten ", flatten},
    {" Squeeze ", squeeze},
    {" Unsqueeze ", unsqueeze},
    {" Concat ", concat},
    {" Split ", split},
    {" Slice ", slice},
    {" Pad ", pad},
    {" Gather ", gather},
    {" GatherND ", gather_nd},
    {" GatherElements ", gather_elements},
    {" Expand ", expand},
    {" Tile ", tile},
    {" Shape ", shape_of},
    {" ConstantOfShape ", constant_of_shape},
    {" ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceLogSumExp ReduceSumSquare ReduceL2 ", reduce},
    {" Conv ConvTranspose MaxPool AveragePool GlobalAveragePool ", convolution},
    {" Range ", range},
    {" Constant ", constant},
};

}  // namespace

void infer(const Net& net, int node, std::vector<Facts>& results) {
  if (results.empty()) return;
  const At at = {net, node, results};
  for (const Rule& rule : kRules) {
    if (lists(rule.op_types, net.node(node).op_type)) {
      rule.apply(at);
      break;
    }
  }
  for (Facts& result : results) {
    if (result.shape && result.shape->size() > kMostDims) result.shape.reset();
  }
  infer_numbers(net, node, results[0]);
}

void add_told(Symbols& symbols, const ValueInfo& told, Facts& facts) {
  if (facts.type == ElementType::kUnknown) facts.type = told.type;
  if (!told.shape || told.shape->size() > kMostDims) return;
  const bool agrees = facts.shape && facts.shape->size() == told.shape->size();
  if (facts.shape && !agrees) return;  // one of the two is wrong: ours
  if (!facts.shape) facts.shape = fresh(symbols, told.shape->size());
  for (size_t i = 0; i < told.shape->size(); ++i) {
    const Dim& dim = (*told.shape)[i];
    Size& size = (*facts.shape)[i];
    if (size.is_constant()) continue;
    if (dim.size >= 0) size = {dim.size, {}};
    if (dim.size < 0 && !dim.name.empty() && !agrees) size = symbols.named(dim.name);
  }
}

}  // namespace polyhead::graph
