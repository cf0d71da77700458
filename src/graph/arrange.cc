#include "graph/arrange.h"

#include <algorithm>

#include "core/sentence.h"

namespace polyhead::graph {
namespace {

// The one that stands furthest above; of stacks, one that needs no transpose if there is any.
const Form* last(const std::vector<Form>& forms, bool flat, const Size& repeats) {
  const Form* transposed = nullptr;
  for (auto at = forms.rbegin(); at != forms.rend(); ++at) {
    if (at->flat != flat || at->repeats != repeats || (!flat && at->order.size() != 4)) continue;
    if (flat || std::is_sorted(at->order.begin(), at->order.end())) return &*at;
    if (transposed == nullptr) transposed = &*at;
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

// The value behind the product that has the operator's own form, and the nodes up to it.
bool find_out(const Net& net, const Match& match, const Form& query, bool flat, Arrangement& arrangement) {
  Layout layout(net, match.out);
  if (net.rank(match.out) != static_cast<int>(match.result.out.size())) return false;
  const bool merged = match.result.out.size() == 3;
  layout.watched.resize(match.result.out.size());
  for (size_t i = 0; i < match.result.out.size(); ++i) layout.watched[match.result.out[i]] = layout.dims()[i];
  const auto fits = [&] {
    const std::vector<Atoms>&dims = layout.dims(), &wanted = layout.watched;
    const Atoms &sequence = wanted[merged ? 1 : 2], &dim = wanted[merged ? 2 : 3];
    Atoms lead = wanted[0];
    if (!merged) lead.insert(lead.end(), wanted[1].begin(), wanted[1].end());
    Atoms batch_heads = dims.empty() ? Atoms() : dims[0];
    if (dims.size() != (flat ? 3 : 4)) return false;
    Atoms heads = dims[flat ? 2 : 1];
    if (flat) {
      if (heads.size() < dim.size() || !std::equal(dim.rbegin(), dim.rend(), heads.rbegin())) return false;
      heads.resize(heads.size() - dim.size());
    } else if (dims[3] != dim) {
      return false;
    }
    batch_heads.insert(batch_heads.end(), heads.begin(), heads.end());
    return dims[flat ? 1 : 2] == sequence && batch_heads == lead && layout.size(heads) == query.heads;
  };
  std::vector<int> passed;
  while (!fits()) {
    const NetValue& value = net.value(layout.value());
    if (value.is_output || value.users.size() != 1 || !layout.down(value.users.front())) return false;
    passed.push_back(value.users.front());
  }
  arrangement.out = layout.value();
  arrangement.passed = std::move(passed);
  return true;
}

}  // namespace

ArrangedMask arranged_mask(const Net& net, const Arrangement& arrangement, const MaskTerm& term) {
  const int rank = net.rank(term.value);
  if (rank < 0 || rank > 4 || static_cast<size_t>(rank) > term.rank_of_scores) return {};
  const bool one_batch = arrangement.kind == Arrangement::kOneBatch;
  if (term.rank_of_scores == 4) {
    const bool same_heads = !one_batch && net.shape(net.output(term.node, 0))[1] == arrangement.query.heads;
    return same_heads ? ArrangedMask{term.value} : ArrangedMask();
  }
  if (term.rank_of_scores != 3) return {};
  if (rank < 3 || one_batch || net.shape(term.value)[0].is(1)) return {term.value};
  Layout layout(net, term.value);  // [batch * heads, ...]: one with 4 dims above it
  layout.watched = layout.dims();
  while (layout.up()) {
    const auto& dims = layout.dims();
    if (dims.size() != 4 || dims[2] != layout.watched[1] || dims[3] != layout.watched[2]) continue;
    Atoms lead = dims[0];
    lead.insert(lead.end(), dims[1].begin(), dims[1].end());
    if (lead == layout.watched[0] && layout.size(dims[1]) == arrangement.query.heads) return {layout.value()};
  }
  const Size lead = net.shape(term.value)[0];
  const bool is_both = lead == net.symbols().product(arrangement.query.batch, arrangement.query.heads);
  return is_both && arrangement.query.heads.is_constant() ? ArrangedMask{term.value, true} : ArrangedMask();
}

namespace {

bool masks_fit(const Net& net, const Match& match, const Arrangement& arrangement) {
  return std::all_of(match.terms.begin(), match.terms.end(),
                     [&](const MaskTerm& term) { return arranged_mask(net, arrangement, term).value != kNone; });
}

// [batch * heads, sequence, dim] as it is.
bool arrange_one_batch(const Net& net, const Match& match, Arrangement& arrangement) {
  const Operand *query = &match.scores.left, *key = &match.scores.right, *value = &match.result.right;
  if (query->rank() != 3 || key->rank() != 3 || value->rank() != 3 || net.rank(match.softmax_input) != 3) return false;
  const auto heads = [&](const Operand* operand) -> Size {
    const auto shape = net.shape(operand->value);
    return shape.size() == 3 ? shape[operand->order[0]] : Size{-1, {}};
  };
  if (heads(query) != heads(key) || heads(query) != heads(value)) return false;
  arrangement.kind = Arrangement::kOneBatch;
  const auto as_is = [](const Operand* operand) { return Form{false, operand->value, operand->order, 1, {}, {}, {}}; };
  arrangement.query = as_is(query);
  arrangement.key = as_is(key);
  arrangement.value = as_is(value);
  arrangement.out = match.out;
  arrangement.passed.clear();
  for (size_t i = 0; i < 3; ++i) {
    if (match.result.out[i] != i) return false;
  }
  return masks_fit(net, match, arrangement);
}

}  // namespace

Arrangement arrange(const Net& net, const Match& match) {
  Arrangement arrangement;
  for (const Operand* operand : {&match.scores.left, &match.scores.right, &match.result.right}) {
    if (operand->rank() != 3 && operand->rank() != 4) {
      arrangement.reason = sentence("the operands of the products have ", static_cast<int64_t>(operand->rank()),
                                    " dims, must have 3 or 4");
      return arrangement;
    }
  }
  const auto queries = forms_of(net, match.scores.left), keys = forms_of(net, match.scores.right);
  Operand value = match.result.right;  // [lead..., keys, dim] already
  const auto values = forms_of(net, value);
  const int rank = net.rank(match.softmax_input);
  std::string why = "batch and heads, which are one dim of the operands, cannot be told apart";
  // What is returned keeps its dims.
  const bool one_batch_only = net.rank(match.returned.value) == 3;
  for (const bool flat : {true, false}) {
    if (one_batch_only) break;
    for (const Size& repeats : {keys.back().repeats, Size{}}) {
      const Form *q = last(queries, flat, Size{}), *k = last(keys, flat, repeats), *v = last(values, flat, repeats);
      if (q == nullptr || k == nullptr || v == nullptr) continue;
      const std::string objection = why_not_together(*q, *k, *v, net.symbols());
      if (!objection.empty()) {
        why = objection;
        continue;
      }
      arrangement = {flat ? Arrangement::kFlat : Arrangement::kStacks, *q, *k, *v};
      const bool sizes_told =
          !flat || (q->heads.is_constant() && k->heads.is_constant() && net.shape(v->value).back().is_constant());
      const bool same_heads = rank != 4 || net.shape(match.softmax_input)[1] == q->heads;
      if (!sizes_told || !same_heads || !masks_fit(net, match, arrangement)) continue;
      if (find_out(net, match, *q, flat, arrangement)) return arrangement;
      if (!flat && match.result.out.size() == 4) {
        arrangement.out = match.out;
        arrangement.transposes_out = true;
        return arrangement;
      }
      if (!flat && std::is_sorted(match.result.out.begin(), match.result.out.end())) {
        arrangement.out = match.out;
        arrangement.merges_out = true;
        return arrangement;
      }
    }
  }
  arrangement = {};
  if (!arrange_one_batch(net, match, arrangement)) arrangement.reason = why;
  return arrangement;
}

}  // namespace polyhead::graph
