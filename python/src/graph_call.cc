#include "graph_call.h"

#include <string>
#include <utility>

#include "arrays.h"
#include "polyhead/graph.h"

namespace polyhead::python {

namespace nb = nanobind;

nb::object fuse_model(nb::bytes model, nb::bytes folder, nb::str target, nb::str unseen_rows, bool layers) {
  std::string bytes(static_cast<const char*>(model.data()), model.size());
  const std::string where(static_cast<const char*>(folder.data()), folder.size());
  graph::FuseOptions options;
  if (std::string(target.c_str()) != "onnx") options.target = graph::Target::kPolyhead;
  if (std::string(target.c_str()) == "torch") options.backwards = graph::Backwards::kOfOperator;
  if (std::string(unseen_rows.c_str()) == "zero") options.unseen_rows = graph::UnseenRows::kZero;
  options.layers = layers;
  Result<graph::Model> read = graph::Model();
  graph::Report report;
  std::string out;
  {
    const nb::gil_scoped_release release;
    read = graph::parse_model(std::move(bytes), where);
    if (read.ok()) {
      report = graph::fuse(*read, options);
      out = graph::encode_model(*read);
    }
  }
  check(read.status());
  const auto told = [](const std::vector<graph::Candidate>& list) {
    nb::list all;
    for (const graph::Candidate& each : list) {
      all.append(nb::make_tuple(shown(each.place), each.is_attention, each.fused, shown(each.pattern),
                                shown(each.became), shown(each.reason), each.saved_bytes));
    }
    return all;
  };
  return nb::make_tuple(
      nb::bytes(out.data(), out.size()), read->has_external_data, told(report.candidates), told(report.products),
      nb::make_tuple(report.num_nodes_before, report.num_nodes_after, report.opset_before, report.opset_after));
}

}  // namespace polyhead::python
