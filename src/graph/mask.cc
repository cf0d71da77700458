#include "graph/mask.h"

#include <algorithm>
#include <cmath>

#include "core/sentence.h"
#include "graph/band.h"

namespace polyhead::graph {
namespace {

constexpr double kAbsorbs = -1e8;  // a score that this is added to has no weight beside any that is not

class Finder {
 public:
  Finder(const Net& net, const Match& match, const MaskRules& rules) : net_(net), match_(match), rules_(rules) {
    const auto scores = net.shape(match.softmax_input);
    if (scores.size() < 2) return;
    num_queries_ = scores[scores.size() - 2];
    num_keys_ = scores.back();
  }

  Masks find() {
    for (const MaskTerm& term : match_.terms) {
      auto hiding = hiding_of(term);
      if (hiding) count_from_place(hiding->shown);
      std::string why_not;
      if (hiding && hiding->shown.is_band()) why_not = why_not_option(term, *hiding);
      if (!hiding || !why_not.empty() || (!hiding->shown.is_band() && !zero_rows())) {
        masks_.terms.push_back(term);
        if (!why_not.empty()) masks_.words.push_back("a mask by places that stays a tensor: " + why_not);
        continue;
      }
      take(hiding->shown);
      for (const Shown::Part& part : hiding->shown.rest) {
        masks_.terms.push_back(term);
        masks_.terms.back().kind = part.negated ? MaskTerm::kHidden : MaskTerm::kVisible;
        masks_.terms.back().value = part.value;
        masks_.terms.back().number = -HUGE_VAL;
      }
    }
    if (masks_.is_causal) masks_.words.push_back("causal");
    if (masks_.left >= 0) masks_.words.push_back(sentence("a window of ", masks_.left, " keys to the left"));
    if (masks_.right >= 0) masks_.words.push_back(sentence("a window of ", masks_.right, " keys to the right"));
    return std::move(masks_);
  }

 private:
  bool zero_rows() const { return rules_.unseen_rows == UnseenRows::kZero && rules_.splits; }

  // Bounds by the distance from the query's own place.
  void count_from_place(Shown& shown) const {
    for (auto* bound : {&shown.lower, &shown.upper}) {
      if (*bound) *bound = net_.symbols().difference(**bound, rules_.before);
    }
  }

  std::optional<Hiding> hiding_of(const MaskTerm& term) const {
    if (term.kind != MaskTerm::kAdded) {
      return Hiding{shown_by(net_, term.value, term.kind == MaskTerm::kHidden, num_queries_, num_keys_), term.number};
    }
    auto hiding = hidden_by(net_, term.value, num_queries_, num_keys_);
    if (!hiding || !(term.number > 0)) return std::nullopt;
    hiding->fill *= term.number;
    return hiding;
  }

  // Why a band is no option of the operator, or not the same as what it does to scores; "" if it is.
  std::string why_not_option(const MaskTerm& term, const Hiding& hiding) const {
    const Shown& shown = hiding.shown;
    for (const auto* bound : {&shown.lower, &shown.upper}) {
      if (*bound && !(*bound)->is_constant()) return "its diagonal depends on sizes";
    }
    const bool is_causal = shown.upper && shown.upper->is(0);
    if ((shown.upper && shown.upper->factor < 0) || (shown.lower && shown.lower->factor > 0)) {
      return "it hides the key at the query's own place";
    }
    if (!rules_.with_windows && (shown.lower || !is_causal)) return "ONNX has windows from opset 25 on";
    if (!rules_.splits && !shown.rest.empty()) return "a part of it is more than its places";
    if (std::isinf(hiding.fill) || zero_rows()) return "";
    const bool is_alone = match_.terms.size() == 1 && shown.rest.empty();
    if (!is_alone || (shown.lower && net_.symbols().sum(num_queries_, rules_.before) != num_keys_)) {
      return "it hides by a finite number, which rows that see no key would tell from -inf";
    }
    if (term.kind == MaskTerm::kAdded && hiding.fill > kAbsorbs) return sentence("it hides by ", hiding.fill, " only");
    return "";
  }

  void take(const Shown& shown) {
    if (shown.upper && shown.upper->is(0)) masks_.is_causal = true;
    if (shown.upper && !shown.upper->is(0)) narrow(masks_.right, shown.upper->factor);
    if (shown.lower) narrow(masks_.left, -shown.lower->factor);
  }

  static void narrow(int64_t& window, int64_t size) { window = window < 0 ? size : std::min(window, size); }

  const Net& net_;
  const Match& match_;
  const MaskRules& rules_;
  Size num_queries_ = {-1, {}}, num_keys_ = {-1, {}};  // that no mask has
  Masks masks_;
};

}  // namespace

Masks masks_of(const Net& net, const Match& match, const MaskRules& rules) { return Finder(net, match, rules).find(); }

}  // namespace polyhead::graph
