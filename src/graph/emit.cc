// One Attention node, and the few around it that a mask, a transpose or a factor needs.
#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/mask.h"
#include "graph/rewrite.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr double kAbsorbs = -1e30, kAbsorbsBesideOthers = -1e8;  // fills of masks
constexpr int64_t kAxesAreInputs = 13;                           // of Unsqueeze and Squeeze, since that opset
constexpr int64_t kFirstWithWindows = 25;                        // Attention of ONNX

Attribute integer(std::string name, int64_t value) { return {std::move(name), value}; }
Attribute number(std::string name, double value) { return {std::move(name), {}, static_cast<float>(value)}; }
Attribute list(std::string name, std::vector<int64_t> values) {
  return {std::move(name), {}, {}, {}, std::move(values)};
}

std::string text_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return "float32";
    case ElementType::kFloat16: return "float16";
    case ElementType::kBFloat16: return "bfloat16";
    case ElementType::kFloat64: return "float64";
    case ElementType::kBool: return "bool";
    default: return sentence("element type ", static_cast<int32_t>(type));
  }
}

class Emitter {
 public:
  Emitter(const Emission& emission, const Match& match)
      : e_(emission), net_(emission.net), match_(match), type_(net_.facts(match.scores.left.value).type) {
    const bool with_windows = e_.options.target == Target::kPolyhead || e_.opset >= kFirstWithWindows;
    if (returns(Returned::kMasked)) return;  // -inf and numbers stay where they are
    masks_ = masks_of(net_, match, {with_windows, e_.options.unseen_rows, e_.options.splits_masks});
    match_.terms = masks_.terms;
  }

  Rewrite emit() {
    if (!arranged() || !typed() || !scaled()) return std::move(rewrite_);
    rewrite_.at = match_.result.node;
    rewrite_.removed = match_.nodes;
    rewrite_.removed.insert(rewrite_.removed.end(), plan_.passed.begin(), plan_.passed.end());
    const std::string query = operand(plan_.query, "query"), key = operand(plan_.key, "key");
    const std::string value = operand(plan_.value, "value");
    std::string attn_mask;
    if (!mask(attn_mask)) return std::move(rewrite_);
    attention({query, key, value, attn_mask});
    rewrite_.pattern = pattern();
    return std::move(rewrite_);
  }

 private:
  bool refuse(std::string reason) {
    rewrite_.reason = std::move(reason);
    return false;
  }

  bool returns(Returned::Mode mode) const { return match_.returned.value != kNone && match_.returned.mode == mode; }

  bool arranged() {
    plan_ = arrange(net_, match_);
    if (!plan_.reason.empty()) return refuse(plan_.reason);
    return match_.returned.value == kNone || returnable();
  }

  // What others read of the scores and weights has the operator's dims, type and numbers.
  bool returnable() {
    const int id = match_.returned.value, num_dims = plan_.kind == Arrangement::kOneBatch ? 3 : 4;
    const bool weights = match_.returned.mode == Returned::kWeights;
    const std::string what =
        sentence(weights ? "the weights \"" : "the scores \"", net_.value(id).name, "\" are read by others too, and ");
    if (net_.rank(id) != num_dims) {
      return refuse(sentence(what, "have ", net_.rank(id), " dims, must have ", num_dims));
    }
    if (e_.options.target == Target::kOnnx && returns(Returned::kScores) && match_.softcap > 0) {
      return refuse(what + "come before a softcap, where ONNX Runtime 1.32 gives those behind it");
    }
    const ElementType type = net_.facts(id).type;
    if (!weights && type != type_) return refuse(sentence(what, "are ", text_of(type), ", must be ", text_of(type_)));
    for (const MaskTerm& term : match_.terms) {
      if (!returns(Returned::kMasked) || term.kind == MaskTerm::kAdded || std::isinf(term.number)) continue;
      return refuse(sentence(what, "hold ", term.number, " in hidden places, where the operator has -inf"));
    }
    return true;
  }

  bool typed() {
    if (!is_float(type_)) {
      return refuse(sentence("query \"", net_.value(match_.scores.left.value).name, "\" has ",
                             type_ == ElementType::kUnknown ? "a type that is not known" : text_of(type_)));
    }
    for (int id : {match_.scores.right.value, match_.result.right.value}) {
      const ElementType type = net_.facts(id).type;
      if (type != type_ && type != ElementType::kUnknown) {
        return refuse(sentence("query is ", text_of(type_), " and \"", net_.value(id).name, "\" ", text_of(type)));
      }
    }
    return true;
  }

  bool scaled() {
    scale_ = match_.scale * plan_.query.scale * plan_.key.scale;
    if (scale_ > 0 && std::isfinite(scale_)) return true;
    return refuse(sentence("the scale is ", scale_, ", must be positive and finite"));
  }

  // What was computed before, for this attention or another one of the graph, is there already.
  std::string add(const char* op_type, std::vector<std::string> inputs, std::vector<Attribute> attributes = {}) {
    std::string what = op_type;
    for (const std::string& input : inputs) what += sentence(" ", input);
    for (const Attribute& each : attributes) {
      what += sentence(" ", each.name, each.integer.value_or(0));
      for (int64_t element : each.integers) what += sentence(" ", element);
    }
    return once(what, [&] {
      return add_as(e_.names.fresh(std::string("polyhead_") + op_type), op_type, std::move(inputs),
                    std::move(attributes));
    });
  }

  std::string once(const std::string& what, auto make) {
    if (const auto found = e_.made.find(what); found != e_.made.end()) return found->second;
    if (const auto found = rewrite_.made.find(what); found != rewrite_.made.end()) return found->second;
    return rewrite_.made[what] = make();
  }

  std::string add_as(std::string output, const char* op_type, std::vector<std::string> inputs,
                     std::vector<Attribute> attributes = {}) {
    const std::string name = e_.names.fresh(std::string("polyhead_") + op_type);
    rewrite_.nodes.push_back({name, op_type, "", std::move(inputs), {output}, std::move(attributes)});
    return output;
  }

  std::string integers(const std::vector<int64_t>& elements) {
    std::string what = "integers";
    for (int64_t each : elements) what += sentence(" ", each);
    return once(what, [&] {
      const std::string name = e_.names.fresh("polyhead_integers");
      rewrite_.constants.push_back(tensor_of_integers(e_.model, name, elements));
      return name;
    });
  }

  std::string constant(double scalar) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%a", scalar);
    return once(sentence("number ", static_cast<int32_t>(type_), " ", digits), [&] {
      const std::string name = e_.names.fresh("polyhead_number");
      rewrite_.constants.push_back(scalar_of(e_.model, name, type_, scalar));
      return name;
    });
  }

  std::string unsqueeze(const std::string& name, std::vector<int64_t> axes) {
    if (e_.opset < kAxesAreInputs) return add("Unsqueeze", {name}, {list("axes", std::move(axes))});
    return add("Unsqueeze", {name, integers(axes)});
  }

  void squeeze_as(const std::string& output, const std::string& name) {
    if (e_.opset < kAxesAreInputs) {
      add_as(output, "Squeeze", {name}, {list("axes", {0})});
    } else {
      add_as(output, "Squeeze", {name, integers({0})});
    }
  }

  static bool is_identity(const std::vector<size_t>& order) {
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i] != i) return false;
    }
    return true;
  }

  static Attribute perm(const std::vector<size_t>& order) {
    return list("perm", std::vector<int64_t>(order.begin(), order.end()));
  }

  std::string operand(const Form& form, const char*) {
    std::string name(net_.value(form.value).name);
    if (!form.flat && !is_identity(form.order)) name = add("Transpose", {name}, {perm(form.order)});
    return plan_.kind == Arrangement::kOneBatch ? unsqueeze(name, {0}) : name;
  }

  // The sum, or the conjunction, of all terms; "" for none.
  bool mask(std::string& attn_mask) {
    // Where scores are returned behind their mask, ONNX Runtime's have float's lowest in the places that a boolean hides.
    const bool all_bool =
        !returns(Returned::kMasked) && std::all_of(match_.terms.begin(), match_.terms.end(), [](const MaskTerm& term) {
          return term.kind != MaskTerm::kAdded && std::isinf(term.number);
        });
    int most_dims = 0;
    for (const MaskTerm& term : match_.terms) {
      const ArrangedMask arranged = arranged_mask(net_, plan_, term);
      if (!term_fits(term, arranged.value)) return false;
      std::string name(net_.value(arranged.value).name);
      if (arranged.is_cut) name = by_heads(name);
      most_dims = std::max(most_dims, arranged.is_cut ? 4 : net_.rank(arranged.value));
      name = all_bool ? visible(term, name) : added(term, name);
      attn_mask = attn_mask.empty() ? name : add(all_bool ? "And" : "Add", {attn_mask, name});
    }
    if (attn_mask.empty()) return true;
    if (most_dims < 2)
      attn_mask = unsqueeze(attn_mask, most_dims == 0 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0});
    if (most_dims == 3) attn_mask = unsqueeze(attn_mask, {0});
    if (e_.options.target == Target::kOnnx && !told_for_each_query()) attn_mask = for_each_query(attn_mask);
    return true;
  }

  // Whether the mask has a row for each query, as it is, or because there is one query.
  bool told_for_each_query() const {
    const auto scores = net_.shape(match_.softmax_input);
    const Size& num_queries = scores[scores.size() - 2];
    return num_queries.is(1) || std::any_of(match_.terms.begin(), match_.terms.end(), [&](const MaskTerm& term) {
             const auto shape = net_.shape(term.value);
             return shape.size() >= 2 && !shape[shape.size() - 2].is(1);
           });
  }

  // ONNX Runtime's operator wants the rows written out, though the standard does not. Once for each number of them.
  std::string for_each_query(const std::string& mask) {
    const auto scores = net_.shape(match_.softmax_input);
    const Size& num_queries = scores[scores.size() - 2];
    std::string what = sentence("rows of ", mask, " for ", num_queries.factor);
    for (int symbol : num_queries.symbols) what += sentence(" ", symbol);
    return once(what, [&] {
      if (num_queries.is_constant()) return add("Expand", {mask, integers({num_queries.factor, 1})});
      const bool flat = plan_.kind == Arrangement::kFlat;
      const auto& order = plan_.query.order;
      const auto axis = static_cast<int64_t>(flat ? 1 : order[order.size() - 2]);
      const std::string count = shape_of(std::string(net_.value(plan_.query.value).name), axis, axis + 1);
      return add("Expand", {mask, add("Concat", {count, integers({1})}, {integer("axis", 0)})});
    });
  }

  bool term_fits(const MaskTerm& term, int id) {
    const auto shape = net_.shape(id), scores = net_.shape(match_.softmax_input);
    const std::string what = sentence("the mask \"", net_.value(id).name, "\" of ", words_of(net_, term.node));
    if (shape.empty() || (shape.back().is(1) && !scores.back().is(1))) {
      return refuse(sentence(what, " is one number for all keys"));
    }
    const ElementType type = net_.facts(id).type;
    const bool is_bool = type == ElementType::kBool;
    const bool replaces = term.kind != MaskTerm::kAdded && std::isfinite(term.number);
    const bool beside_others = match_.terms.size() > 1;
    if (replaces && (type_ == ElementType::kFloat16 || (beside_others && term.number > kAbsorbsBesideOthers))) {
      return refuse(sentence(what, " hides scores by ", term.number, ", which as a bias would not be the same",
                             beside_others ? " beside other masks" : " in float16"));
    }
    if (term.kind == MaskTerm::kAdded && type != type_ && type != ElementType::kUnknown) {
      return refuse(
          sentence(what, " is ", text_of(type), is_bool ? " and added, must be " : ", must be ", text_of(type_)));
    }
    return true;
  }

  // [batch * heads, q, k] -> [batch, heads, q, k]
  std::string by_heads(const std::string& name) {
    const std::string shape = shape_of(name, 1, 3);
    const std::string lead = integers({-1, plan_.query.heads.factor});
    return add("Reshape", {name, add("Concat", {lead, shape}, {integer("axis", 0)})});
  }

  std::string shape_of(const std::string& name, int64_t start, int64_t end) {
    constexpr int64_t kShapeHasRange = 15;
    if (e_.opset >= kShapeHasRange) return add("Shape", {name}, {integer("start", start), integer("end", end)});
    const auto place = [&](int64_t at) { return integers({at}); };
    return add("Slice", {add("Shape", {name}), place(start), place(end)});
  }

  std::string visible(const MaskTerm& term, const std::string& name) {
    return term.kind == MaskTerm::kVisible ? name : add("Not", {name});
  }

  // A bias in the place of a number that replaces scores: so low that the scores of a row that is hidden as a whole are
  // absorbed, and all its keys weigh the same as they did.
  double fill_of(const MaskTerm& term) const {
    return match_.terms.size() == 1 && std::isfinite(term.number) ? std::min(term.number, kAbsorbs) : term.number;
  }

  std::string added(const MaskTerm& term, const std::string& name) {
    if (term.kind == MaskTerm::kAdded) return term.number == 1 ? name : add("Mul", {name, constant(term.number)});
    const std::string zero = constant(0.0), fill = constant(fill_of(term));
    const bool visible = term.kind == MaskTerm::kVisible;
    return add("Where", {name, visible ? zero : fill, visible ? fill : zero});
  }

  void attention(std::vector<std::string> inputs) {
    if (inputs.back().empty()) inputs.pop_back();
    std::vector<Attribute> attributes = {number("scale", scale_)};
    if (match_.softcap > 0) attributes.push_back(number("softcap", match_.softcap));
    if (masks_.is_causal) attributes.push_back(integer("is_causal", 1));
    if (masks_.left >= 0) attributes.push_back(integer("left_window_size", masks_.left));
    if (masks_.right >= 0) attributes.push_back(integer("right_window_size", masks_.right));
    if (plan_.kind == Arrangement::kFlat) {
      attributes.push_back(integer("q_num_heads", plan_.query.heads.factor));
      attributes.push_back(integer("kv_num_heads", plan_.key.heads.factor));
    }
    const ElementType inside = net_.facts(match_.softmax_input).type;
    if (inside != type_ && is_float(inside)) {
      attributes.push_back(integer("softmax_precision", static_cast<int64_t>(inside)));
    }
    const std::string name = e_.names.fresh("polyhead_attention");
    const std::string out(net_.value(plan_.out).name);
    const double factor = match_.out_factor * plan_.value.scale;
    const bool direct = factor == 1 && !needs_transpose() && plan_.kind != Arrangement::kOneBatch && !plan_.merges_out;
    std::vector<std::string> outputs = {direct ? out : e_.names.fresh("polyhead_out")};
    const bool returns = match_.returned.value != kNone;
    if (returns) {
      attributes.push_back(integer("qk_matmul_output_mode", match_.returned.mode));
      const std::string weights(net_.value(match_.returned.value).name);
      const bool direct_weights = plan_.kind != Arrangement::kOneBatch;
      outputs.insert(outputs.end(), {"", "", direct_weights ? weights : e_.names.fresh("polyhead_weights")});
    }
    if (plan_.kind == Arrangement::kFlat) tell_shape(outputs[0]);
    const std::string weights = outputs.back();
    const std::string domain = e_.options.target == Target::kPolyhead ? "polyhead" : "";
    std::string result = outputs[0];
    rewrite_.nodes.push_back({name, "Attention", domain, std::move(inputs), std::move(outputs), std::move(attributes)});
    rewrite_.became = sentence(domain.empty() ? "" : "polyhead.", "Attention \"", name, "\"");
    if (returns && plan_.kind == Arrangement::kOneBatch) {
      squeeze_as(std::string(net_.value(match_.returned.value).name), weights);
    }
    if (direct) return;
    const bool more = needs_transpose() || plan_.kind == Arrangement::kOneBatch || plan_.merges_out;
    if (factor != 1) {
      const std::string scaled = more ? e_.names.fresh("polyhead_scaled") : out;
      result = add_as(scaled, "Mul", {result, constant(factor)});
    }
    if (needs_transpose()) add_as(out, "Transpose", {result}, {perm(match_.result.out)});
    if (plan_.kind == Arrangement::kOneBatch) squeeze_as(out, result);
    if (!plan_.merges_out) return;
    const std::string lead = integers({-1});
    add_as(out, "Reshape", {result, add("Concat", {lead, shape_of(result, 2, 4)}, {integer("axis", 0)})});
  }

  // ONNX Runtime 1.32 takes the last dim of a flat result for 0 where it cannot infer that of value.
  void tell_shape(const std::string& out) {
    ValueInfo told = {out, type_, std::vector<Dim>()};
    for (const Size& size : net_.shape(plan_.out)) told.shape->push_back({size.is_constant() ? size.factor : -1, ""});
    rewrite_.values.push_back(std::move(told));
  }

  bool needs_transpose() const { return plan_.transposes_out && !is_identity(match_.result.out); }

  std::string pattern() const {
    std::string text = sentence("scale ", scale_);
    for (const MaskTerm& term : match_.terms) {
      const char* kind = term.kind == MaskTerm::kAdded ? "added mask"
                         : std::isinf(term.number)     ? "boolean mask"
                                                       : "mask of a large negative number";
      text += sentence(", ", kind);
    }
    if (!plan_.key.repeats.is(1)) text += ", repeated heads of key and value";
    if (match_.returned.value != kNone) {
      text += match_.returned.mode == Returned::kWeights ? ", returned weights" : ", returned scores";
    }
    for (const auto* words : {&masks_.words, &match_.words}) {
      for (const std::string& word : *words) text += sentence(", ", word);
    }
    return text;
  }

  const Emission& e_;
  const Net& net_;
  Match match_;
  Masks masks_;
  ElementType type_;
  Arrangement plan_;
  double scale_ = 1;
  Rewrite rewrite_;
};

}  // namespace

Rewrite rewrite(const Emission& emission, const Match& match) { return Emitter(emission, match).emit(); }

}  // namespace polyhead::graph
