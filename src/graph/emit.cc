// One Attention node, and the few around it that a mask, a transpose or a factor needs.
#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/attn_mask.h"
#include "graph/cached.h"
#include "graph/mask.h"
#include "graph/new_nodes.h"
#include "graph/nodes.h"
#include "graph/operand_sizes.h"
#include "graph/rewrite.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr int64_t kFirstWithWindows = 25;  // Attention of ONNX

class Emitter {
 public:
  Emitter(const Emission& emission, const Match& match)
      : e_(emission),
        net_(emission.net),
        given_(match),
        match_(match),
        type_(net_.facts(match.scores.left.value).type),
        new_(emission, type_, rewrite_) {
    if (!returns(Returned::kMasked)) tell_masks({0, {}});  // else -inf and numbers stay where they are
  }

  Rewrite emit() {
    if (!arranged() || !typed() || !scaled() || !trained() || !sunk()) return std::move(rewrite_);
    rewrite_.at = match_.result.node;
    rewrite_.removed = match_.nodes;
    if (match_.backward) remove(match_.backward->nodes);
    for (const Landing* each : {&plan_.out, &plan_.grad_query, &plan_.grad_key, &plan_.grad_value})
      remove(each->passed);
    std::vector<std::string> inputs = {multiplied_query()};
    for (const auto& [form, concat] : {std::pair(&plan_.key, cached_ ? cached_->keys : kNone),
                                       std::pair(&plan_.value, cached_ ? cached_->values : kNone)}) {
      inputs.push_back(concat == kNone ? operand(*form) : name_of(net_.input(concat, 1)));
    }
    OperandSizes sizes(net_, plan_, cached_.has_value(), new_);
    attn_mask_ = attn_mask_of(net_, match_, plan_, e_.options.target, sizes, new_);
    rewrite_.reason = attn_mask_.reason.empty() ? sizes.tell(match_, rewrite_) : attn_mask_.reason;
    if (!rewrite_.reason.empty()) return std::move(rewrite_);
    attention(std::move(inputs));
    rewrite_.pattern = pattern();
    return std::move(rewrite_);
  }

 private:
  void tell_masks(const Size& before) {
    const bool with_windows = e_.options.target == Target::kPolyhead || e_.opset >= kFirstWithWindows;
    match_.terms = given_.terms;
    masks_ = masks_of(net_, match_, {with_windows, e_.options.unseen_rows, before, e_.options.splits_masks});
    match_.terms = masks_.terms;
  }

  // Joins new keys to those of earlier runs, if masks allow it.
  void cache() {
    cached_ = e_.options.backwards == Backwards::kOfOperator ? std::nullopt : cached_of(net_, match_, plan_);
    if (!cached_) return;
    std::string why_not = e_.made.contains(what_is_joined()) ? "another attention joins them" : cached_->reason;
    if (why_not.empty()) {
      tell_masks(cached_->before);
      why_not = why_masks_stay();
      if (!why_not.empty()) tell_masks({0, {}});
    }
    if (why_not.empty()) return;
    joined_outside_ = sentence("keys that ", words_of(net_, cached_->keys), " joins outside: ", why_not);
    cached_.reset();
  }

  // Why a mask cannot be given in the dims of all keys; "" if every one can.
  std::string why_masks_stay() const {
    for (const MaskTerm& term : match_.terms) {
      if (arranged_mask(net_, plan_, term).value != kNone) continue;
      return sentence("the dims of the mask \"", name_of(term.value), "\" are not understood");
    }
    return "";
  }

  std::string what_is_joined() const { return "joined " + name_of(net_.output(cached_->keys, 0)); }

  bool refuse(std::string reason) {
    rewrite_.reason = std::move(reason);
    return false;
  }

  void remove(const std::vector<int>& nodes) {
    rewrite_.removed.insert(rewrite_.removed.end(), nodes.begin(), nodes.end());
  }

  std::string name_of(int value) const { return std::string(net_.value(value).name); }

  bool returns(Returned::Mode mode) const { return match_.returned.value != kNone && match_.returned.mode == mode; }

  bool arranged() {
    plan_ = arrange(net_, match_);
    if (!plan_.reason.empty()) return refuse(plan_.reason);
    cache();
    const std::string why = why_not_returned(net_, match_, e_.options.target == Target::kOnnx);
    return why.empty() || refuse(why);
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

  // What a pair of operators can say that ONNX's own cannot, and what it cannot.
  bool trained() {
    if (!match_.backward && e_.options.backwards != Backwards::kOfOperator) return true;
    if (!match_.row_factors.empty())
      return refuse(sentence("the scores are multiplied by \"", name_of(match_.row_factors.front().value),
                             "\", which has a gradient of its own"));
    if (match_.backward && e_.options.target == Target::kOnnx)
      return refuse("its backward is in the graph too, for which ONNX has no operator: target polyhead replaces both");
    if (match_.backward && match_.out_factor * plan_.value.scale != 1)
      return refuse("its output is multiplied by a number");
    for (const MaskTerm& term : match_.terms) {
      if (term.kind == MaskTerm::kAdded || std::isinf(term.number)) continue;
      return refuse(sentence("the mask of ", words_of(net_, term.node), " hides scores by ", term.number,
                             ", whose gradients in a row that sees no key are not those of a bias: unseen_rows zero"));
    }
    return !match_.backward || tells_gradients();
  }

  // Gradients of what is beside query, key and value, in the dims that the graph wants.
  bool tells_gradients() {
    const Backward& b = *match_.backward;
    const std::string what = sentence("the gradient of a mask, \"", b.bias == kNone ? "" : name_of(b.bias), "\", ");
    const MaskTerm* added = nullptr;
    for (const MaskTerm& term : match_.terms) {
      const ArrangedMask arranged = b.bias == kNone ? ArrangedMask{term.value} : arranged_mask(net_, plan_, term);
      if (arranged.value != term.value || !arranged.lead.empty())
        return refuse(what + "cannot be told from that of other masks");
      if (term.kind == MaskTerm::kAdded) added = &term;
    }
    if (!tells_bias(net_, match_)) return refuse(what + "cannot be told from that of other masks");
    const bool told = (b.bias == kNone || tells(b.bias, net_.shape(added->value), true)) &&
                      (b.sinks == kNone || tells(b.sinks, net_.shape(match_.sinks->logits), false));
    for (size_t i = 0; told && i < b.captures.size(); ++i) {
      if (b.captures[i] != kNone && !tells(b.captures[i], net_.shape(match_.program->captures[i]), false)) return false;
    }
    return told;
  }

  // The operator's gradient has the dims of its operand, of a mask 2 or 4; the graph's perhaps others of the same elements.
  bool tells(int gradient, std::span<const Size> operand, bool is_mask) {
    Sizes dims(operand.begin(), operand.end());
    while (is_mask && (dims.size() < 2 || dims.size() == 3)) dims.insert(dims.begin(), Size{});
    if (dims.empty()) dims.push_back(Size{});
    const auto wanted = net_.shape(gradient);
    if (same_shape(dims, wanted)) return true;
    std::vector<int64_t>& reshaped = reshaped_[gradient];
    for (const Size& each : wanted) reshaped.push_back(each.is_constant() ? each.factor : -1);
    const bool same_elements =
        net_.symbols().product(dims) == net_.symbols().product(Sizes(wanted.begin(), wanted.end()));
    return (same_elements && std::count(reshaped.begin(), reshaped.end(), -1) < 2) ||
           refuse(sentence("the gradient \"", name_of(gradient), "\" has dims that are not known"));
  }

  // A logit for each head, as the operator takes it.
  bool sunk() {
    if (!match_.sinks) return true;
    const std::string what = sentence("the sinks \"", name_of(match_.sinks->logits), "\" ");
    if (e_.options.target == Target::kOnnx)
      return refuse(what + "are logits for which ONNX's operator has no input: target polyhead takes them");
    if (are_of_heads(net_, *match_.sinks)) {
      sinks_ = name_of(match_.sinks->logits);
    } else if (const auto logits = constant_logits(net_, *match_.sinks)) {
      sinks_ = new_.numbers(*logits);
    } else {
      return refuse(what + "are not known to be one for each head");
    }
    return true;
  }

  std::string operand(const Form& form) {
    const std::string name = name_of(form.value);
    const bool is_turned = !std::is_sorted(form.order.begin(), form.order.end());
    return is_turned ? new_.add("Transpose", {name}, {perm(form.order)}) : name;
  }

  std::string multiplied_query() {
    std::string name = operand(plan_.query);
    for (const RowFactor& factor : match_.row_factors)
      name = new_.add(factor.divides ? "Div" : "Mul", {name, name_of(factor.value)});
    return name;
  }

  std::vector<Attribute> options() const {
    std::vector<Attribute> attributes = {number("scale", scale_)};
    if (match_.softcap > 0) attributes.push_back(number("softcap", match_.softcap));
    if (masks_.is_causal) attributes.push_back(integer("is_causal", 1));
    if (masks_.left >= 0) attributes.push_back(integer("left_window_size", masks_.left));
    if (masks_.right >= 0) attributes.push_back(integer("right_window_size", masks_.right));
    if (match_.program) attributes.push_back(text("score", match_.program->text));
    if (match_.dropped) attributes.push_back(number("dropout_p", match_.dropped.p));
    if (attn_mask_.broadcasts) attributes.push_back(integer("mask_broadcasts", 1));
    if (plan_.kind == Arrangement::kFlat) {
      attributes.push_back(integer("q_num_heads", plan_.query.heads.factor));
      attributes.push_back(integer("kv_num_heads", plan_.key.heads.factor));
    }
    return attributes;
  }

  void attention(std::vector<std::string> inputs) {
    std::vector<std::string> grad_inputs = inputs;
    const auto past = [&](int concat) { return name_of(net_.input(concat, 0)); };
    inputs.insert(inputs.end(), {attn_mask_.name, cached_ ? past(cached_->keys) : "",
                                 cached_ ? past(cached_->values) : "", ""});  // no lengths
    add_sinks_and_captures(inputs);
    drop_empty_ends(inputs);
    std::vector<Attribute> attributes = options();
    const ElementType inside = net_.facts(match_.softmax_input).type;
    if (inside != type_ && is_float(inside)) {
      attributes.push_back(integer("softmax_precision", static_cast<int64_t>(inside)));
    }
    const std::string name = e_.names.fresh("polyhead_attention");
    const double factor = match_.out_factor * plan_.value.scale;
    const std::string out = result_name(plan_.out, factor);
    std::vector<std::string> outputs = {out};
    if (cached_) {
      remove({cached_->keys, cached_->values});
      rewrite_.made[what_is_joined()] = out;
      for (int concat : {cached_->keys, cached_->values}) {
        const int present = net_.output(concat, 0);
        // ONNX Runtime 1.32 wants an output for what is joined.
        const bool is_told = e_.options.target == Target::kOnnx || is_read_elsewhere(net_, match_, present);
        outputs.push_back(is_told ? name_of(present) : "");
      }
    }
    std::string weights;
    if (match_.returned.value != kNone) {
      attributes.push_back(integer("qk_matmul_output_mode", match_.returned.mode));
      weights =
          net_.rank(match_.returned.value) == 4 ? name_of(match_.returned.value) : e_.names.fresh("polyhead_weights");
      outputs.resize(3);
      outputs.push_back(weights);
    }
    drop_empty_ends(outputs);
    if (match_.backward) {
      outputs.insert(outputs.end(), {"", "", "", e_.names.fresh("polyhead_logsumexp")});
      grad_inputs.insert(grad_inputs.end(), {out, outputs.back(), operand(plan_.grad_out), attn_mask_.name});
      if (match_.dropped) outputs.push_back(e_.names.fresh("polyhead_dropout"));
      grad_inputs.push_back(match_.dropped ? outputs.back() : "");
    }
    if (plan_.kind == Arrangement::kFlat) {
      const std::vector<size_t>& order = plan_.out.order;
      tell_shape(inputs[2], plan_.value.value, plan_.value.order);
      tell_shape(out, plan_.out.value, order.empty() ? std::vector<size_t>{0, 1, 2} : inverse_of(order));
    }
    const std::string domain = e_.options.target == Target::kPolyhead ? "polyhead" : "";
    rewrite_.nodes.push_back({name, "Attention", domain, std::move(inputs), std::move(outputs), std::move(attributes)});
    rewrite_.became = sentence(domain.empty() ? "" : "polyhead.", "Attention \"", name, "\"");
    if (!weights.empty() && net_.rank(match_.returned.value) == 3)
      deliver(weights, {match_.returned.value, {}, {}, true}, 1);
    deliver(out, plan_.out, factor);
    if (match_.backward) gradient(std::move(grad_inputs));
  }

  void add_sinks_and_captures(std::vector<std::string>& inputs) const {
    inputs.push_back(sinks_);
    if (!match_.program) return;
    for (int each : match_.program->captures) inputs.push_back(name_of(each));
  }

  static void drop_empty_ends(std::vector<std::string>& names) {
    while (!names.empty() && names.back().empty()) names.pop_back();
  }

  void gradient(std::vector<std::string> inputs) {
    const Backward& backward = *match_.backward;
    const Landing* landings[] = {&plan_.grad_query, &plan_.grad_key, &plan_.grad_value};
    std::vector<std::string> outputs;
    for (const Landing* each : landings) outputs.push_back(each->value == kNone ? "" : result_name(*each, 1));
    std::vector<std::pair<std::string, int>> delivered;  // by a Reshape
    std::vector<int> others = {backward.bias, backward.sinks};
    others.insert(others.end(), backward.captures.begin(), backward.captures.end());
    for (int each : others) {
      const bool turns = reshaped_.contains(each);
      outputs.push_back(each == kNone ? "" : turns ? e_.names.fresh("polyhead_gradient") : name_of(each));
      if (turns) delivered.emplace_back(outputs.back(), each);
    }
    add_sinks_and_captures(inputs);
    drop_empty_ends(inputs);
    std::vector<std::string> results = outputs;
    drop_empty_ends(outputs);
    const std::string name = e_.names.fresh("polyhead_attention_grad");
    rewrite_.nodes.push_back({name, "AttentionGrad", "polyhead", std::move(inputs), std::move(outputs), options()});
    rewrite_.became += sentence(" and polyhead.AttentionGrad \"", name, "\"");
    for (size_t i = 0; i < 3; ++i) {
      if (landings[i]->value != kNone) deliver(results[i], *landings[i], 1);
    }
    for (const auto& [result, value] : delivered)
      new_.add_as(name_of(value), "Reshape", {result, new_.integers(reshaped_.at(value))});
    rewrite_.saved_bytes = backward.saved_bytes;
  }

  // The name of an operator's result: the landing's own where nothing is done to it.
  std::string result_name(const Landing& landing, double factor) const {
    const bool direct = factor == 1 && landing.order.empty() && !landing.merges;
    return direct ? name_of(landing.value) : e_.names.fresh("polyhead_out");
  }

  void deliver(std::string result, const Landing& landing, double factor) {
    const std::string out = name_of(landing.value);
    const bool turns = !landing.order.empty();
    if (factor != 1) {
      const std::string scaled = turns || landing.merges ? e_.names.fresh("polyhead_scaled") : out;
      result = new_.add_as(scaled, "Mul", {result, new_.constant(factor)});
    }
    if (turns) new_.add_as(out, "Transpose", {result}, {perm(landing.order)});
    if (!landing.merges) return;
    const std::string lead = new_.integers({-1});
    new_.add_as(out, "Reshape",
                {result, new_.add("Concat", {lead, new_.shape_of(result, 2, 4)}, {integer("axis", 0)})});
  }

  // ONNX Runtime 1.32 takes the last dim of a flat result for 0 where it cannot infer that of value.
  void tell_shape(const std::string& name, int like, const std::vector<size_t>& order) {
    ValueInfo told = {name, type_, std::vector<Dim>()};
    for (size_t dim : order) {
      const Size& size = net_.shape(like)[dim];
      told.shape->push_back({size.is_constant() ? size.factor : -1, ""});
    }
    rewrite_.values.push_back(std::move(told));
  }

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
    if (match_.program) text += sentence(", the score program ", match_.program->text);
    if (match_.sinks) text += ", sinks";
    if (cached_) text += ", a cache";
    if (!joined_outside_.empty()) text += ", " + joined_outside_;
    if (match_.backward) text += ", its backward";
    for (const auto* words : {&masks_.words, &match_.words}) {
      for (const std::string& word : *words) text += sentence(", ", word);
    }
    return text;
  }

  const Emission& e_;
  const Net& net_;
  const Match& given_;
  Match match_;
  Masks masks_;
  std::optional<Cached> cached_;
  std::string joined_outside_;  // by which node, and why; "": no keys are
  ElementType type_;
  Arrangement plan_;
  double scale_ = 1;
  std::string sinks_;  // "": none
  AttnMask attn_mask_;
  std::unordered_map<int, std::vector<int64_t>>
      reshaped_;  // gradients, to these dims; others: as the operator gives them
  Rewrite rewrite_;
  NewNodes new_;
};

}  // namespace

Rewrite rewrite(const Emission& emission, const Match& match) { return Emitter(emission, match).emit(); }

}  // namespace polyhead::graph
