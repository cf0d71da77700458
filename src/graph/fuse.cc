#include <algorithm>
#include <deque>
#include <set>

#include "core/sentence.h"
#include "graph/checks.h"
#include "graph/joined.h"
#include "graph/linear.h"
#include "graph/match.h"
#include "graph/nodes.h"
#include "graph/opset.h"
#include "graph/rewrite.h"
#include "polyhead/graph.h"

namespace polyhead::graph {
namespace {

constexpr int64_t kFirstWithAttention = 23;

// A graph, its net, and what becomes of it; bodies behind the graph that holds them.
struct Work {
  Graph* graph = nullptr;
  Work* outer = nullptr;
  int holder = kNone;  // the node of `outer` whose body this is
  size_t attribute = 0;
  std::string place;  // of its nodes: the names of those around
  std::unique_ptr<Net> net;
  std::vector<Joined> joined;
  std::vector<Node> apart;  // the graph's nodes, if any are joined
  std::vector<Rewrite> rewrites;
  Made made;  // by them
  bool changed = false;
};

// Names, by the rewrites of a graph that are accepted.
struct Taken {
  std::set<std::string> gone, read;
};

class Fusion {
 public:
  Fusion(Model& model, const FuseOptions& options) : model_(model), options_(options), names_(model.graph) {}

  Report run() {
    report_.opset_before = report_.opset_after = opset_of(model_);
    report_.num_nodes_before = report_.num_nodes_after = count(model_.graph);
    add(model_.graph, nullptr, kNone, 0, "");
    to_ = options_.target == Target::kOnnx ? std::max(report_.opset_before, kFirstWithAttention) : report_.opset_before;
    objection_ = objection();
    for (Work& work : works_) search(work);
    if (std::none_of(works_.begin(), works_.end(), [](const Work& work) { return !work.rewrites.empty(); })) {
      for (auto work = works_.rbegin(); work != works_.rend(); ++work) part(*work);
      return report_;
    }
    if (to_ != report_.opset_before) raise();
    for (auto work = works_.rbegin(); work != works_.rend(); ++work) finish(*work);
    import();
    report_.num_nodes_after = count(model_.graph);
    report_.opset_after = to_;
    return report_;
  }

 private:
  void join(Work& work, const Net* around) {
    std::vector<Node> nodes = work.graph->nodes;
    work.joined = join_products(*work.net, *work.graph, names_);
    if (work.joined.empty()) return;
    work.apart = std::move(nodes);
    work.net = std::make_unique<Net>(model_, *work.graph, symbols_, around);
  }

  // Graphs that stay are as they were, to the order of their nodes.
  static void part(Work& work) {
    if (work.joined.empty()) return;
    if (work.rewrites.empty() && !work.changed) {
      work.graph->nodes = std::move(work.apart);
    } else {
      part_products(*work.graph, work.joined);
    }
  }

  static int64_t count(const Graph& graph) {
    auto nodes = static_cast<int64_t>(graph.nodes.size());
    for (const Node& node : graph.nodes) {
      for (const Attribute& attribute : node.attributes) {
        for (const Graph& body : attribute.graphs) nodes += count(body);
      }
    }
    return nodes;
  }

  void add(Graph& graph, Work* outer, int holder, size_t attribute, const std::string& place) {
    works_.push_back({&graph, outer, holder, attribute, place, nullptr, {}, {}, {}, {}, false});
    Work& work = works_.back();
    const Net* around = outer == nullptr ? nullptr : outer->net.get();
    work.net = std::make_unique<Net>(model_, graph, symbols_, around);
    if (options_.backwards != Backwards::kOfOperator) join(work, around);
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      Node& node = graph.nodes[i];
      for (size_t k = 0; k < node.attributes.size(); ++k) {
        for (Graph& body : node.attributes[k].graphs) {
          add(body, &work, static_cast<int>(i), k, sentence(place, node.name, "/", node.attributes[k].name, "/"));
        }
      }
    }
  }

  // Why no node of the target can stand in this model.
  std::string objection() const {
    if (options_.target == Target::kPolyhead)
      return to_ < 11 ? sentence("the model's opset is ", to_, ", must be 11 at least") : "";
    if (to_ == report_.opset_before) return "";
    if (model_.num_functions > 0) return "the opset of a model with functions of its own is not raised";
    for (const Work& work : works_) {
      std::string why = why_not_raised(*work.net, to_);
      if (!why.empty()) return why;
    }
    return "";
  }

  void search(Work& work) {
    const Net& net = *work.net;
    Taken taken;
    for (size_t i = 0; i < work.graph->nodes.size(); ++i) {
      const auto match = match_at(net, static_cast<int>(i), options_);
      if (!match) continue;
      Candidate candidate = {work.place + place_of(net.node(match->softmax)), match->is_attention};
      candidate.reason = match->reason;
      if (candidate.reason.empty()) candidate.reason = objection_;
      if (candidate.reason.empty()) accept(work, rewrite(emission(work), *match), taken, candidate);
      candidate.fused = candidate.reason.empty();
      const Rewrite* rewrite = candidate.fused ? &work.rewrites.back() : nullptr;
      candidate.before = nodes_before(net, *match, rewrite);
      if (candidate.fused) candidate.after = rewrite->nodes;
      report_.candidates.push_back(std::move(candidate));
    }
    if (options_.layers && (!work.rewrites.empty() || has_attention(*work.graph))) search_products(work, taken);
  }

  // As a node of its own that our library computes.
  static bool has_attention(const Graph& graph) {
    return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& n) {
      if (n.domain == "com.microsoft") return lists(" MultiHeadAttention GroupQueryAttention ", n.op_type);
      return n.op_type == "Attention" && (n.domain.empty() || n.domain == "polyhead");
    });
  }

  void search_products(Work& work, Taken& taken) {
    const Net& net = *work.net;
    const auto stays = [&](int value) { return taken.read.contains(std::string(net.value(value).name)); };
    for (int i = 0; i < static_cast<int>(work.graph->nodes.size()); ++i) {
      const auto linear = linear_at(net, i, stays);
      if (!linear) continue;
      Candidate candidate = {work.place + place_of(net.node(i)), false};
      candidate.reason = linear->reason;
      if (candidate.reason.empty()) accept(work, rewrite(emission(work), *linear), taken, candidate);
      candidate.fused = candidate.reason.empty();
      report_.products.push_back(std::move(candidate));
    }
  }

  static const std::string& place_of(const Node& node) { return node.name.empty() ? node.outputs[0] : node.name; }

  Emission emission(const Work& work) { return {model_, *work.net, names_, options_, to_, work.made}; }

  void accept(Work& work, Rewrite each, Taken& taken, Candidate& candidate) {
    candidate.reason = each.reason;
    if (!each.reason.empty()) return;
    std::set<std::string> without = taken.gone;  // and what goes away with this one
    for (int node : each.removed) {
      without.insert(work.net->node(node).outputs.begin(), work.net->node(node).outputs.end());
    }
    for (const Node& node : each.nodes) {
      for (const std::string& name : node.inputs) {
        if (name.empty() || !without.contains(name)) continue;
        candidate.reason = sentence("it reads \"", name, "\", which ",
                                    taken.gone.contains(name) ? "another operator" : "it", " replaces");
        return;
      }
      for (const std::string& name : node.outputs) without.erase(name);
    }
    for (const std::string& name : taken.read) {
      if (name.empty() || !without.contains(name)) continue;
      candidate.reason = sentence("it replaces \"", name, "\", which another operator reads");
      return;
    }
    taken.gone = std::move(without);
    for (const Node& node : each.nodes) taken.read.insert(node.inputs.begin(), node.inputs.end());
    candidate.became = each.became;
    candidate.pattern = each.pattern;
    candidate.saved_bytes = each.saved_bytes;
    work.made.merge(each.made);
    work.rewrites.push_back(std::move(each));
  }

  void raise() {
    for (Work& work : works_) raise_nodes(model_, *work.graph, *work.net, to_, names_);
  }

  // Bodies first: what they changed is noted in the node that holds them.
  void finish(Work& work) {
    work.changed =
        work.changed || !work.rewrites.empty() ||
        std::any_of(work.graph->nodes.begin(), work.graph->nodes.end(), [](const Node& n) { return n.changed; });
    if (work.outer != nullptr && work.changed) {
      Node& holder = work.outer->graph->nodes[static_cast<size_t>(work.holder)];
      holder.changed = holder.attributes[work.attribute].changed = work.outer->changed = true;
    }
    apply(*work.graph, work.rewrites);
    part(work);
  }

  void import() {
    const std::string domain = options_.target == Target::kPolyhead ? "polyhead" : "";
    const int64_t version = options_.target == Target::kPolyhead ? 1 : to_;
    for (OpsetImport& import : model_.opsets) {
      if (import.domain != domain) continue;
      import.version = version;
      return;
    }
    model_.opsets.push_back({domain, version});
  }

  Model& model_;
  const FuseOptions& options_;
  Names names_;
  Symbols symbols_;
  std::deque<Work> works_;
  Report report_;
  std::string objection_;
  int64_t to_ = 0;
};

}  // namespace

Report fuse(Model& model, const FuseOptions& options) { return Fusion(model, options).run(); }

}  // namespace polyhead::graph
