#include "graph/attn_mask.h"

#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/nodes.h"
#include "graph/tensors.h"

namespace polyhead::graph {
namespace {

constexpr double kAboveLowest = -3.36e38;  // what bfloat16 and float32 tell from their lowest number
constexpr double kAbsorbs = -1e30, kAbsorbsBesideOthers = -1e8;  // fills of masks

class Writer {
 public:
  Writer(const Net& net, const Match& match, const Arrangement& plan, Target target, OperandSizes& sizes,
         NewNodes& new_nodes)
      : net_(net),
        match_(match),
        plan_(plan),
        target_(target),
        sizes_(sizes),
        new_(new_nodes),
        type_(net.facts(match.scores.left.value).type) {}

  AttnMask write() {
    AttnMask mask;
    // Where scores are returned behind their mask, ONNX Runtime's have float's lowest in the places that a boolean hides.
    const bool returns_masked = match_.returned.value != kNone && match_.returned.mode == Returned::kMasked;
    const bool all_bool =
        !returns_masked && std::all_of(match_.terms.begin(), match_.terms.end(), [](const MaskTerm& term) {
          return term.kind != MaskTerm::kAdded && std::isinf(term.number);
        });
    int most_dims = 0;
    for (const MaskTerm& term : match_.terms) {
      const ArrangedMask arranged = arranged_mask(net_, plan_, term);
      mask.reason = why_not(term, arranged.value);
      if (!mask.reason.empty()) return mask;
      std::string name(net_.value(arranged.value).name);
      if (!arranged.lead.empty()) name = regrouped(arranged);
      most_dims = std::max(most_dims, arranged.lead.empty() ? net_.rank(arranged.value) : 4);
      name = all_bool ? visible(term, name) : added(term, name);
      mask.name = mask.name.empty() ? name : new_.add(all_bool ? "And" : "Add", {mask.name, name});
    }
    if (mask.name.empty()) return mask;
    if (most_dims < 2)
      mask.name = new_.unsqueeze(mask.name, most_dims == 0 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{0});
    if (most_dims == 3) mask.name = new_.unsqueeze(mask.name, {0});
    if (target_ == Target::kOnnx) mask.name = written_out(mask.name);
    mask.broadcasts = target_ == Target::kPolyhead && !told_for_each(sequence_of(match_.scores.right), 0);
    return mask;
  }

 private:
  std::string name_of(int value) const { return std::string(net_.value(value).name); }

  // How many queries or keys there are, by an operand [lead..., sequence, dim] of the scores' product.
  const Size& sequence_of(const Operand& operand) const {
    return net_.shape(operand.value)[operand.order[operand.rank() - 2]];
  }

  // Whether a mask is known to have that size in the last dim but so many. One of another symbol may be 1 when the model runs.
  bool told_for_each(const Size& count, size_t behind) const {
    return count.is(1) || std::any_of(match_.terms.begin(), match_.terms.end(), [&](const MaskTerm& term) {
             const auto shape = net_.shape(term.value);
             return shape.size() > behind && shape[shape.size() - 1 - behind] == count;
           });
  }

  // A column of ONNX's mask is the first key's, not one for all of them; and ONNX Runtime's operator wants the rows written
  // out, though the standard does not. Once for each number of them.
  std::string written_out(const std::string& mask) {
    const Size queries = sequence_of(match_.scores.left), keys = sequence_of(match_.scores.right);
    const bool has_rows = told_for_each(queries, 1), has_columns = told_for_each(keys, 0);
    if (has_rows && has_columns) return mask;
    const Size counts[] = {has_rows ? Size{} : queries, has_columns ? Size{} : keys};
    const Form* forms[] = {&plan_.query, &plan_.key};
    std::string what = "written out " + mask;
    for (const Size& count : counts) {
      what += sentence(", ", count.factor);
      for (int symbol : count.symbols) what += sentence(" ", symbol);
    }
    return new_.once(what, [&] {
      std::vector<std::string> sizes_told;
      for (size_t i = 0; i < 2; ++i) {
        sizes_told.push_back(counts[i].is_constant() ? new_.integers({counts[i].factor})
                                                     : sizes_.of(*forms[i], forms[i]->order[forms[i]->flat ? 1 : 2]));
      }
      return new_.add("Expand", {mask, new_.add("Concat", sizes_told, {integer("axis", 0)})});
    });
  }

  // Why a term cannot be given to the operator; "" if it can.
  std::string why_not(const MaskTerm& term, int id) const {
    const auto shape = net_.shape(id), scores = net_.shape(match_.softmax_input);
    const std::string what = sentence("the mask \"", net_.value(id).name, "\" of ", words_of(net_, term.node));
    if (shape.empty() || (shape.back().is(1) && !scores.back().is(1))) {
      return what + " is one number for all keys";
    }
    const ElementType type = net_.facts(id).type;
    const bool is_bool = type == ElementType::kBool;
    const bool replaces = term.kind != MaskTerm::kAdded && std::isfinite(term.number);
    const bool beside_others = match_.terms.size() > 1;
    if (replaces && (type_ == ElementType::kFloat16 || (beside_others && term.number > kAbsorbsBesideOthers))) {
      return sentence(what, " hides scores by ", term.number, ", which as a bias would not be the same",
                      beside_others ? " beside other masks" : " in float16");
    }
    if (term.kind == MaskTerm::kAdded && type != type_ && type != ElementType::kUnknown) {
      return sentence(what, " is ", text_of(type), is_bool ? " and added, must be " : ", must be ", text_of(type_));
    }
    return "";
  }

  // [..., q, k] -> [batch, heads, q, k]
  std::string regrouped(const ArrangedMask& mask) {
    const int64_t rank = net_.rank(mask.value);
    const std::string shape = new_.shape_of(name_of(mask.value), rank - 2, rank);
    const auto concat = [&](const std::string& first, const std::string& rest) {
      return new_.add("Concat", {first, rest}, {integer("axis", 0)});
    };
    std::string name = new_.add("Reshape", {name_of(mask.value), concat(new_.integers(mask.lead), shape)});
    if (!mask.repeats) return name;
    const std::string batch = sizes_.of(plan_.query, plan_.query.order[0]);
    const std::string times = new_.add("Div", {batch, new_.shape_of(name, 0, 1)});
    return new_.add("Tile", {name, concat(times, new_.integers({1, 1, 1}))});
  }

  std::string visible(const MaskTerm& term, const std::string& name) {
    return term.kind == MaskTerm::kVisible ? name : new_.add("Not", {name});
  }

  // A bias in the place of a number that replaces scores: so low that the scores of a row that is hidden as a whole are
  // absorbed, and all its keys weigh the same as they did; not the type's lowest, which ONNX Runtime 1.32 takes for -inf.
  double fill_of(const MaskTerm& term) const {
    if (match_.terms.size() == 1 && std::isfinite(term.number)) return kAbsorbs;
    const bool is_lowest = target_ == Target::kOnnx && std::isfinite(term.number);
    return is_lowest ? std::max(term.number, kAboveLowest) : term.number;
  }

  std::string added(const MaskTerm& term, const std::string& name) {
    if (term.kind == MaskTerm::kAdded)
      return term.number == 1 ? name : new_.add("Mul", {name, new_.constant(term.number)});
    const std::string zero = new_.constant(0.0), fill = new_.constant(fill_of(term));
    const bool visible = term.kind == MaskTerm::kVisible;
    return new_.add("Where", {name, visible ? zero : fill, visible ? fill : zero});
  }

  const Net& net_;
  const Match& match_;
  const Arrangement& plan_;
  Target target_;
  OperandSizes& sizes_;
  NewNodes& new_;
  ElementType type_;
};

}  // namespace

AttnMask attn_mask_of(const Net& net, const Match& match, const Arrangement& plan, Target target, OperandSizes& sizes,
                      NewNodes& new_nodes) {
  return Writer(net, match, plan, target, sizes, new_nodes).write();
}

}  // namespace polyhead::graph
