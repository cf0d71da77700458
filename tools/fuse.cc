// polyhead fuse: attention in a model that was exported becomes one operator.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "command.h"
#include "dot.h"
#include "file.h"
#include "fuse_check.h"
#include "polyhead/graph.h"
#include "report.h"
#include "selection.h"

namespace polyhead::tools {
namespace {

namespace fs = std::filesystem;

struct FuseCommand {
  std::string model, out, dot, domain = "onnx", unseen_rows = "keep", format = "md";
  bool force = false, report = false, layers = false;
  FuseCheck check;
};

Status refused(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

// External data is named relative to the model: a copy elsewhere would not find it.
Status check_place(const FuseCommand& command, const graph::Model& model) {
  if (Status status = check_may_write(command.out, command.force); !status.ok()) return status;
  std::error_code error;
  const fs::path out = fs::absolute(command.out).parent_path();
  const fs::path in = fs::absolute(command.model).parent_path();
  if (model.has_external_data && !fs::equivalent(in, out, error)) {
    return refused(fmt::format("{} has tensors in files beside it: --out must name a file in the same folder, got {}",
                               printable(command.model), printable(command.out)));
  }
  return {};
}

std::string summary(const graph::Report& told) {
  const auto count = [&](bool graph::Candidate::*what) {
    return std::count_if(told.candidates.begin(), told.candidates.end(), [&](const auto& each) { return each.*what; });
  };
  std::string products;
  if (!told.products.empty()) {
    const auto fused =
        std::count_if(told.products.begin(), told.products.end(), [](const auto& each) { return each.fused; });
    products = fmt::format(" and {} of {} products", fused, told.products.size());
  }
  return fmt::format("{} of {} attentions{} fused, {} -> {} nodes, opset {} -> {}", count(&graph::Candidate::fused),
                     count(&graph::Candidate::is_attention), products, told.num_nodes_before, told.num_nodes_after,
                     told.opset_before, told.opset_after);
}

Report table(const graph::Report& told) {
  Report report;
  report.facts = {{"nodes", fmt::format("{} -> {}", told.num_nodes_before, told.num_nodes_after)},
                  {"opset", fmt::format("{} -> {}", told.opset_before, told.opset_after)}};
  report.columns = {"place", "attention", "fused", "pattern", "became", "saved_bytes", "reason"};
  for (const auto* list : {&told.candidates, &told.products}) {
    for (const graph::Candidate& each : *list) {
      report.rows.push_back(
          {each.place, each.is_attention, each.fused, each.pattern, each.became, each.saved_bytes, each.reason});
    }
  }
  return report;
}

// The candidate that a picture is asked of, or why there is none.
Result<const graph::Candidate*> pictured(const graph::Report& told, const std::string& place) {
  std::string places;
  for (const graph::Candidate& each : told.candidates) {
    if (each.place == place) return &each;
    places += (places.empty() ? "" : ", ") + printable(each.place);
  }
  return refused(fmt::format("--dot is {}, must be the place of a softmax: {}", printable(place),
                             places.empty() ? "the model has none" : places));
}

// What is written where it goes; nothing where the command names no file.
Status write_model(const FuseCommand& command, const std::string& bytes) {
  if (command.out.empty()) return {};
  auto file = OutputFile::create(command.out, command.force);
  if (!file.ok()) return file.status();
  if (Status status = file->write(bytes.data(), bytes.size()); !status.ok()) return status;
  return file->commit();
}

// Runs the model of the file and the new one. 1, and nothing is written, where they differ.
Result<int> check_model(const FuseCommand& command, const graph::Model& model, const graph::Report& told,
                        Format format) {
  const auto original = graph::read_model(command.model);
  if (!original.ok()) return original.status();
  const std::string folder = fs::absolute(command.model).parent_path().string(), bytes = graph::encode_model(model);
  Report report = {{{"model", summary(told)}}, {}, {}};
  const auto same = check_fused(command.check, graph::encode_model(*original), bytes, folder, report);
  if (!same.ok()) return same.status();
  report.facts.emplace_back("result", *same ? "same" : "differs, or nothing ran; nothing is written");
  fmt::print("{}", report.text(format));
  if (!*same) return 1;
  if (Status status = write_model(command, bytes); !status.ok()) return status;
  return 0;
}

Status check_options(const FuseCommand& command) {
  const FuseCheck& check = command.check;
  const bool tells_how = !check.library.empty() || !check.inputs.empty() || !check.sizes.empty() || check.tolerance;
  if (tells_how && !check.asked) return refused("--onnxruntime, --inputs, --size and --tolerance are for --check");
  if (check.asked && (command.report || !command.dot.empty()))
    return refused("--check prints a table of its own: without --report and --dot");
  if (check.tolerance && !(*check.tolerance >= 0))
    return refused(fmt::format("--tolerance is {}, must be 0 or more", *check.tolerance));
  return {};
}

Result<int> fuse_model(const FuseCommand& command) {
  if (Status status = check_options(command); !status.ok()) return status;
  const auto format = parse_format(command.format);
  if (!format.ok()) return format.status();
  graph::FuseOptions options;
  if (command.domain != "onnx" && command.domain != "polyhead") {
    return refused(fmt::format("--domain is {}, must be onnx or polyhead", printable(command.domain)));
  }
  options.target = command.domain == "onnx" ? graph::Target::kOnnx : graph::Target::kPolyhead;
  if (command.unseen_rows != "keep" && command.unseen_rows != "zero") {
    return refused(fmt::format("--unseen-rows is {}, must be keep or zero", printable(command.unseen_rows)));
  }
  if (command.layers && command.domain != "polyhead")
    return refused("--layers needs --domain polyhead: ONNX has no operator for a product with a norm");
  options.layers = command.layers;
  if (command.unseen_rows == "zero") options.unseen_rows = graph::UnseenRows::kZero;
  auto model = graph::read_model(command.model);
  if (!model.ok()) return model.status();
  if (!command.out.empty()) {
    if (Status status = check_place(command, *model); !status.ok()) return status;
  }
  const graph::Report told = graph::fuse(*model, options);
  if (command.check.asked) return check_model(command, *model, told, *format);
  if (!command.dot.empty()) {
    const auto candidate = pictured(told, command.dot);
    if (!candidate.ok()) return candidate.status();
    fmt::print("{}", dot_of(**candidate));
    if (command.out.empty()) return 0;
  }
  if (Status status = write_model(command, graph::encode_model(*model)); !status.ok()) return status;
  if (!command.dot.empty()) return 0;
  if (command.report || *format != Format::kMarkdown) {
    fmt::print("{}", table(told).text(*format));
    return 0;
  }
  fmt::print("{}; --report tells more\n", summary(told));
  return 0;
}

}  // namespace

Command add_fuse(CLI::App& root) {
  CLI::App* app = root.add_subcommand("fuse", "replace attention in an ONNX model by one operator");
  const auto command = std::make_shared<FuseCommand>();
  app->add_option("model", command->model, "an .onnx file")->required();
  app->add_option("-o,--out", command->out, "the new model; without it, only what would be fused is told");
  app->add_option(
      "--domain", command->domain,
      "onnx (default): Attention of opset 23, to which the model is raised; polyhead: our own operator, in any "
      "opset");
  app->add_option(
      "--unseen-rows", command->unseen_rows,
      "of a row that a mask hides as a whole by a finite number: keep (default) the mean that it had; zero: "
      "give 0, as for -inf, which lets more masks become options of the operator");
  app->add_flag(
      "--layers", command->layers,
      "of --domain polyhead: products with constant matrices too, each with its bias, activation, residual and "
      "norm, where there is an attention");
  app->add_flag("--report", command->report, "what became of each softmax, or why it stays");
  app->add_option(
      "--dot", command->dot,
      "instead of that, a picture of the candidate at this place, before and after, in Graphviz's language");
  app->add_flag("--check", command->check.asked,
                "run the model and the new one in ONNX Runtime and compare their outputs, on random inputs of several "
                "sizes; where they differ nothing is written, and the exit code is 1");
  app->add_option("--inputs", command->check.inputs, "of --check: a .safetensors with the model's inputs by name");
  app->add_option("--size", command->check.sizes,
                  "of --check: NAME=SIZE, of a dim that the model only names; once for each")
      ->allow_extra_args(false);
  app->add_option("--tolerance", command->check.tolerance,
                  "of --check: the largest difference, by the largest number of the output. Default: 1e-4; 1e-2 of "
                  "float16, 5e-2 of bfloat16");
  app->add_option(
      "--onnxruntime", command->check.library,
      "of --check: ONNX Runtime's library. Default: the Python package's, if Python starts the command; else "
      "libonnxruntime.so as the system finds it");
  app->add_flag("--force", command->force, "replace the file that --out names");
  add_format_option(*app, command->format);
  app->footer(help_footer(false, "polyhead fuse model.onnx -o fused.onnx --report",
                          "polyhead fuse model.onnx --dot /attn/Softmax | dot -Tsvg -o attention.svg"));
  return {app, [command] { return fuse_model(*command); }};
}

}  // namespace polyhead::tools
