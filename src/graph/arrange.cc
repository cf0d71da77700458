#include "graph/arrange.h"

#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/nodes.h"
#include "graph/tensors.h"
#include "graph/terms.h"

namespace polyhead::graph {
namespace {

// The one that stands furthest above, and one that needs no transpose if there is any. Flat ones that may need one have one
// head: above it, query, key and value might be told apart in different dims.
const Form* last(const std::vector<Form>& forms, bool flat, bool turns, const Size& repeats) {
  const Form* transposed = nullptr;
  for (auto at = forms.rbegin(); at != forms.rend(); ++at) {
    if (at->flat != flat || at->repeats != repeats || (flat && turns && !at->heads.is(1))) continue;
    if (std::is_sorted(at->order.begin(), at->order.end())) return &*at;
    if (turns && transposed == nullptr) transposed = &*at;
  }
  return transposed;
}

// Two batches are one size; dims that carry different names are believed to be equal: a product needs that too, or a 1.
std::string why_not_together(const Form& query, const Form& key, const Form& value, Symbols& symbols) {
  for (const Form* other : {&key, &value}) {
    const bool told = query.batch.is_constant() && other->batch.is_constant();
    if (query.batch != other->batch && (told || query.batch.is(1) || other->batch.is(1))) {
      return "the batches of query, key and value are not known to be equal";
    }
  }
  if (key.heads != value.heads) return "key and value are not known to have as many heads";
  if (query.heads != symbols.product(key.heads, key.repeats) && !key.heads.is(1)) {
    return "query and key are not known to have as many heads";
  }
  return "";
}

// Where a result [lead..., sequence, dim] of a product goes.
class Lander {
 public:
  Lander(const Net& net, Arrangement::Kind kind, const Size& heads, const Size& repeats = {})
      : net_(net), kind_(kind), heads_(heads), repeats_(repeats) {}

  // The value behind the product that has the operator's own form, or else is a transpose of it; what the numbers on the
  // way multiply by is `times`. Behind the sum over the repeats of a head, if there are any.
  std::optional<Landing> land(int value, const std::vector<size_t>& dims, double times) const {
    if (net_.rank(value) != static_cast<int>(dims.size()) || dims.size() < 3) return std::nullopt;
    Layout layout(net_, value);
    layout.watched.resize(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) layout.watched[dims[i]] = layout.dims()[i];
    if (dims.size() == 5) layout.watched = as_four(layout.watched);
    std::optional<Landing> found;
    if (kind_ == Arrangement::kStacks && dims.size() == 3 && std::is_sorted(dims.begin(), dims.end()) &&
        nearly(times, 1) && repeats_.is(1))
      found = {value, {}, {}, true};
    double factor = 1;
    bool is_whole = repeats_.is(1), is_last = false;
    std::vector<int> passed;
    size_t num_passed = 0;
    while (!is_last) {
      const auto order = is_whole && nearly(factor, times) ? order_of(layout) : std::nullopt;
      if (order) found = {layout.value(), {}, *order, false};
      if (order) num_passed = passed.size();
      const NetValue& value_here = net_.value(layout.value());
      is_last = (order && order->empty()) || value_here.is_output || value_here.users.size() != 1;
      if (is_last) break;
      const int next = value_here.users.front();
      if (const auto number = layout.down_number(next)) {
        factor *= *number;
      } else if (!is_whole && sums_repeats(layout, next)) {
        is_whole = true;
      } else {
        is_last = !layout.down(next);
      }
      passed.push_back(next);
    }
    if (found) found->passed.assign(passed.begin(), passed.begin() + static_cast<std::ptrdiff_t>(num_passed));
    return found;
  }

 private:
  // Whether a node sums over the minor part of the heads.
  bool sums_repeats(Layout& layout, int node) const {
    const auto summed = layout.down_sum(node);
    Atoms& heads = layout.watched[layout.watched.size() - 3];
    if (!summed || layout.size(*summed) != repeats_ || summed->size() > heads.size() ||
        !std::equal(summed->rbegin(), summed->rend(), heads.rbegin()))
      return false;
    heads.resize(heads.size() - summed->size());
    return true;
  }

  // The dims of the operator's result that a value's are; nothing if it is no transpose, empty if it is the result.
  std::optional<std::vector<size_t>> order_of(const Layout& layout) const {
    for (const auto& stack : layout.stacks()) {
      if (layout.size(stack[1]) != heads_) continue;
      const auto order = layout.order_of(kind_ == Arrangement::kFlat ? as_flat(stack) : stack);
      if (!order) return std::nullopt;
      std::vector<size_t> inverse = inverse_of(*order);
      if (std::is_sorted(inverse.begin(), inverse.end())) inverse.clear();
      return inverse;
    }
    return std::nullopt;
  }

  const Net& net_;
  Arrangement::Kind kind_;
  Size heads_, repeats_;
};

// Where the operators' results go, by transposes if it `turns`. Of a gradient that goes nowhere, why.
bool land_all(const Net& net, const Match& match, bool turns, Arrangement& arrangement, std::string& why) {
  const Arrangement::Kind kind = arrangement.kind;
  const auto out = Lander(net, kind, arrangement.query.heads).land(match.out, match.result.out, 1);
  if (!out || (!turns && !out->order.empty())) return false;
  arrangement.out = *out;
  if (!match.backward) return true;
  const auto gradient = [&](const char* what, const Gradient& told, const Form& form, Landing& landing) {
    if (told.value == kNone) return true;
    const auto found =
        Lander(net, kind, form.heads, form.repeats).land(told.value, told.order, form.scale / told.factor);
    if (found && (turns || found->order.empty())) {
      landing = *found;
    } else if (!nearly(told.factor, 1)) {
      why = sentence("\"", net.value(told.value).name, "\", for the gradient of the ", what, ", is ", told.factor,
                     " times what the forward's scale gives");
    } else {
      why = sentence("the layout of \"", net.value(told.value).name, "\", the gradient of the ", what,
                     ", is not understood");
    }
    return landing.value != kNone;
  };
  const Backward& b = *match.backward;
  return gradient("query", b.query, arrangement.query, arrangement.grad_query) &&
         gradient("key", b.key, arrangement.key, arrangement.grad_key) &&
         gradient("value", b.value, arrangement.value, arrangement.grad_value);
}

// The dims of a mask that are not 1, by those of the scores.
std::vector<bool> told_dims(std::span<const Size> mask, size_t rank) {
  std::vector<bool> told(rank);
  for (size_t i = 0; i < mask.size(); ++i) told[rank - mask.size() + i] = !mask[i].is(1);
  return told;
}

// Of scores whose dims ahead of rows and keys are others than batch and heads, such as [batch, heads, repeats, q, k],
// [batch * heads, q, k], or windows apart from images: the mask's, put together anew.
ArrangedMask regrouped_mask(const Net& net, const Size& heads, const MaskTerm& term) {
  const int scores = net.output(term.node, 0);
  const auto shape = net.shape(scores);
  const Size all = net.symbols().product(Sizes(shape.begin(), shape.end() - 2));
  const auto batch = net.symbols().quotient(all, heads);
  Layout layout(net, scores);
  layout.watched = layout.dims();
  if (!batch || !layout.regroup(Sizes{*batch, heads, shape[shape.size() - 2], shape.back()})) return {};
  const std::vector<bool> told = told_dims(net.shape(term.value), shape.size());
  const auto is_told = [&](int atom) {
    for (size_t i = 0; i < told.size(); ++i) {
      const Atoms& dim = layout.watched[i];
      if (std::find(dim.begin(), dim.end(), atom) != dim.end()) return static_cast<bool>(told[i]);
    }
    return false;
  };
  const Atoms &of_batch = layout.dims()[0], &of_heads = layout.dims()[1];
  // Of dims that are put together, one that turned out to be 1 would leave its place to others.
  const auto dims_in = [&](const Atoms& whole) {
    std::vector<size_t> dims;
    for (size_t i = 0; i + 2 < told.size(); ++i) {
      const Atoms& dim = layout.watched[i];
      if (told[i] && std::find_first_of(dim.begin(), dim.end(), whole.begin(), whole.end()) != dim.end())
        dims.push_back(i);
    }
    return dims;
  };
  const auto mask = net.shape(term.value);
  const auto are_known = [&](const std::vector<size_t>& dims) {
    return std::all_of(dims.begin(), dims.end(),
                       [&](size_t i) { return mask[i + mask.size() - shape.size()] == shape[i]; });
  };
  const auto stays_in_place = [&] {
    const std::vector<size_t> batch_dims = dims_in(of_batch), head_dims = dims_in(of_heads);
    const bool apart = !batch_dims.empty() && batch_dims != head_dims;
    return (batch_dims.size() < 2 || are_known(batch_dims)) &&
           (head_dims.size() < (apart ? 1 : 2) || are_known(head_dims));
  };
  const auto first_told = std::find_if(of_batch.begin(), of_batch.end(), is_told);
  const bool any_batch = first_told != of_batch.end(),
             any_heads = std::any_of(of_heads.begin(), of_heads.end(), is_told);
  if (!std::all_of(first_told, of_batch.end(), is_told) ||
      (any_heads && !std::all_of(of_heads.begin(), of_heads.end(), is_told)) ||
      (any_batch && any_heads && !heads.is_constant()) || !stays_in_place())
    return {};
  const int64_t num_heads = any_batch ? heads.factor : -1;
  return {term.value, {any_batch ? -1 : 1, any_heads ? num_heads : 1}, any_batch && first_told != of_batch.begin()};
}

// One above such a mask that has batch and heads already, if there is any.
int mask_above(const Net& net, const Size& heads, const ArrangedMask& mask) {
  Layout layout(net, mask.value);
  layout.watched = layout.dims();
  while (!mask.repeats && layout.up()) {
    const auto &dims = layout.dims(), &below = layout.watched;
    if (dims.size() != 4 || dims[2] != below[below.size() - 2] || dims[3] != below.back()) continue;
    const bool batch_fits = dims[0].empty() == (mask.lead[0] == 1);
    if (batch_fits && (mask.lead[1] == 1 ? dims[1].empty() : layout.size(dims[1]) == heads)) return layout.value();
  }
  return kNone;
}

}  // namespace

ArrangedMask arranged_mask(const Net& net, const Arrangement& arrangement, const MaskTerm& term) {
  const auto mask = net.shape(term.value);
  const Size& heads = arrangement.query.heads;
  if (net.rank(term.value) < 0 || mask.size() > term.rank_of_scores || term.rank_of_scores < 3) return {};
  if (term.rank_of_scores == 4 && net.shape(net.output(term.node, 0))[1] == heads) return {term.value};
  const auto lead = mask.first(mask.size() - std::min<size_t>(mask.size(), 2));
  const bool is_one = std::all_of(lead.begin(), lead.end(), [](const Size& size) { return size.is(1); });
  if (mask.size() < 5 && is_one) return {term.value};
  const ArrangedMask regrouped = regrouped_mask(net, heads, term);
  const int above = regrouped.value == kNone ? kNone : mask_above(net, heads, regrouped);
  return above == kNone ? regrouped : ArrangedMask{above};
}

namespace {

bool masks_fit(const Net& net, const Match& match, const Arrangement& arrangement, std::string& why) {
  for (const MaskTerm& term : match.terms) {
    if (arranged_mask(net, arrangement, term).value != kNone) continue;
    const std::string_view mask = term.value == kNone ? std::string_view() : net.value(term.value).name;
    why = sentence("the dims of the mask \"", mask, "\" are not understood beside batch and heads");
    return false;
  }
  return true;
}

}  // namespace

Arrangement arrange(const Net& net, const Match& match) {
  Arrangement arrangement;
  for (const Operand* operand : {&match.scores.left, &match.scores.right, &match.result.right}) {
    if (operand->rank() < 3 || operand->rank() > (match.backward ? 4 : 5)) {
      arrangement.reason = sentence("the operands of the products have ", static_cast<int64_t>(operand->rank()),
                                    " dims, must have 3 or 4", match.backward ? "" : ", or 5 with repeats of heads");
      return arrangement;
    }
  }
  const auto scores = net.shape(match.softmax_input);
  if (!match.row_factors.empty() && match.scores.left.rank() != 4) {
    arrangement.reason = "the scores are multiplied by a tensor and have not 4 dims";
    return arrangement;
  }
  const Size repeated = scores.size() == 5 ? scores[2] : Size{};
  const auto queries = forms_of(net, match.scores.left), keys = forms_of(net, match.scores.right, repeated);
  auto values = forms_of(net, match.result.right, repeated);  // [lead..., keys, dim] already
  std::vector<Form> grads;
  if (match.backward) {
    grads = forms_of(net, match.backward->grad_out);
    for (auto* forms : {&values, &grads}) std::erase_if(*forms, [](const Form& form) { return form.scale != 1; });
  }
  std::string why = "batch and heads, which are one dim of the operands, cannot be told apart";
  struct Way {
    bool flat, turns;
  };
  constexpr Way kFlatAsTheyAre = {true, false}, kStacks = {false, true}, kFlatOfOneHead = {true, true};
  for (const auto& [flat, turns] : {kFlatAsTheyAre, kStacks, kFlatOfOneHead}) {
    if (flat && !match.row_factors.empty()) continue;  // they have the dims of heads
    for (const Size& repeats : {keys.empty() ? Size{} : keys.back().repeats, Size{}}) {
      const Form *q = last(queries, flat, turns, Size{}), *k = last(keys, flat, turns, repeats),
                 *v = last(values, flat, turns, repeats);
      const Form* g = match.backward ? last(grads, flat, turns, Size{}) : q;
      if (q == nullptr || k == nullptr || v == nullptr || g == nullptr) continue;
      const std::string objection = why_not_together(*q, *k, *v, net.symbols());
      if (!objection.empty()) {
        why = objection;
        continue;
      }
      arrangement = {flat ? Arrangement::kFlat : Arrangement::kStacks, *q, *k, *v, *g};
      const bool sizes_told = !flat || (q->heads.is_constant() && k->heads.is_constant() &&
                                        net.shape(v->value)[v->order.back()].is_constant());
      const bool same_heads =
          (scores.size() < 4 || net.symbols().product(scores[1], repeated) == q->heads) && g->heads == q->heads;
      if (!sizes_told || !same_heads || !masks_fit(net, match, arrangement, why)) continue;
      if (land_all(net, match, turns, arrangement, why)) return arrangement;
    }
  }
  arrangement = {};
  arrangement.reason = why;
  return arrangement;
}

std::string why_not_returned(const Net& net, const Match& match, bool by_onnx) {
  const auto& [id, mode] = match.returned;
  if (id == kNone) return "";
  const bool weights = mode == Returned::kWeights;
  const std::string what =
      sentence(weights ? "the weights \"" : "the scores \"", net.value(id).name, "\" are read by others too, and ");
  if (net.rank(id) != 3 && net.rank(id) != 4) return sentence(what, "have ", net.rank(id), " dims, must have 3 or 4");
  if (by_onnx && mode == Returned::kScores && match.softcap > 0)
    return what + "come before a softcap, where ONNX Runtime 1.32 gives those behind it";
  const ElementType type = net.facts(id).type, of_query = net.facts(match.scores.left.value).type;
  if (!weights && type != of_query) return sentence(what, "are ", text_of(type), ", must be ", text_of(of_query));
  for (const MaskTerm& term : match.terms) {
    if (mode == Returned::kMasked && term.kind != MaskTerm::kAdded && !std::isinf(term.number))
      return sentence(what, "hold ", term.number, " in hidden places, where the operator has -inf");
  }
  return "";
}

}  // namespace polyhead::graph
