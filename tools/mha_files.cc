#include "mha_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "file.h"
#include "new_tensors.h"
#include "polyhead/dropout.h"
#include "safetensors.h"
#include "testing/words.h"

namespace polyhead::tools {
namespace {

constexpr const char* kDumpFiles[] = {"problem.json", "inputs.safetensors", "weights.safetensors",
                                      "results.safetensors"};

Status write_text(const std::string& path, const std::string& text, bool overwrite) {
  auto file = OutputFile::create(path, overwrite);
  if (!file.ok()) return file.status();
  if (Status s = file->write(text.data(), text.size()); !s.ok()) return s;
  return file->commit();
}

// With both dropouts, when training.
double dropout_of_weights(const MhaProblem& problem) { return problem.training ? problem.attention.desc.dropout_p : 0; }
double dropout_of_out(const MhaProblem& problem) { return problem.training ? problem.layer.output_dropout_p : 0; }

}  // namespace

std::string mha_json(const MhaProblem& problem, const Layer& layer) {
  const LayerDesc& sizes = problem.layer;
  const AttentionDesc& desc = problem.attention.desc;
  const auto dim = static_cast<double>(std::max<int64_t>(desc.head_dim, 1));
  nlohmann::ordered_json json;
  json["problem"] = mha_line(problem);
  json["dtype"] = dtype_name(desc.dtype);
  json["training"] = problem.training;
  json["batch"] = sizes.batch;
  json["beam"] = sizes.beam;
  json["beam_kv"] = sizes.beam_kv;
  json["seqlen_q"] = sizes.seqlen_q;
  json["seqlen_k"] = sizes.seqlen_k;
  json["num_heads"] = sizes.num_heads;
  json["num_heads_kv"] = sizes.num_heads_kv;
  json["head_dim"] = desc.head_dim;
  json["head_dim_v"] = desc.head_dim_v;
  json["out_size"] = layer.out_size();
  json["key_is_query"] = problem.key_is_query;
  json["value_is_key"] = problem.value_is_key;
  json["scale"] = desc.scale.value_or(1 / std::sqrt(dim));
  json["softcap"] = desc.softcap;
  json["normalizer"] = desc.normalizer == Normalizer::kNone ? "none" : "softmax";
  json["causal"] = desc.causal;
  json["window_left"] = desc.window_left;
  json["window_right"] = desc.window_right;
  json["sink_keys"] = desc.sink_keys;
  json["bottom_right"] = desc.align == Align::kBottomRight;
  json["query_offset"] = desc.query_offset.value_or(0);
  json["dropout_p"] = dropout_of_weights(problem);
  json["output_dropout_p"] = dropout_of_out(problem);
  const char* const kReturned[] = {"none", "head", "mean"};
  json["attn_weights"] = kReturned[static_cast<int>(desc.return_weights)];
  return json.dump();
}

NamedTensors weight_tensors(const LayerWeights& weights) {
  NamedTensors tensors;
  for (const WeightField& weight : kWeightFields) {
    if ((weights.*weight.field).given()) tensors.emplace_back(weight.name, weights.*weight.field);
  }
  return tensors;
}

Result<KeptByDropout> kept_by_dropout(const MhaProblem& problem, const Layer& layer, const MhaOperands& operands) {
  KeptByDropout kept;
  const LayerDesc& d = problem.layer;
  const LayerForwardArgs& args = operands.args;
  NewTensors tensors(kept.buffers);
  if (const double p = dropout_of_weights(problem); p > 0) {
    const std::initializer_list<int64_t> dims = {d.batch, d.beam, d.num_heads, d.seqlen_q, d.seqlen_k};
    if (Status s = tensors.add(DType::kBool, dims, {1, 0, 2, 3, 4}, kept.weights); !s.ok()) return s;
    for (int64_t n = 0; n < d.beam; ++n) {
      const Tensor beam(static_cast<std::byte*>(kept.weights.data) + n * kept.weights.strides[1], DType::kBool,
                        {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k});
      const Status s = dropout_mask(p, *args.dropout_seed, args.dropout_offset + static_cast<uint32_t>(n), beam);
      if (!s.ok()) return s;
    }
  }
  if (const double p = dropout_of_out(problem); p > 0) {
    if (Status s = tensors.add(DType::kBool, {d.batch, d.beam, d.seqlen_q, layer.out_size()}, kept.out); !s.ok()) {
      return s;
    }
    const Status s = dropout_mask(p, *args.output_dropout_seed, args.output_dropout_offset, kept.out);
    if (!s.ok()) return s;
  }
  return kept;
}

NamedTensors input_tensors(const MhaOperands& operands, const KeptByDropout& kept) {
  NamedTensors tensors;
  const auto add = [&](const char* name, const Tensor& tensor) {
    if (tensor.given()) tensors.emplace_back(name, tensor);
  };
  for (const InputField& input : kInputFields) add(input.name, operands.args.*input.field);
  for (size_t n = 0; n < operands.captures.size(); ++n)
    add(fmt::format("captures[{}]", n).c_str(), operands.captures[n]);
  add("grad_out", operands.grad_out);
  add("kept_weights", kept.weights);
  add("kept_out", kept.out);
  return tensors;
}

Status check_may_dump(const std::string& folder, bool overwrite) {
  for (const char* file : kDumpFiles) {
    if (Status s = check_may_write(folder + "/" + file, overwrite); !s.ok()) return s;
  }
  return {};
}

Status write_dump(const std::string& folder, bool overwrite, const MhaProblem& problem, const Layer& layer,
                  const MhaOperands& operands, const MhaResults& results) {
  std::error_code error;
  std::filesystem::create_directory(folder, error);
  if (error) return invalid(fmt::format("cannot make {}: {}", printable(folder), error.message()));
  const auto kept = kept_by_dropout(problem, layer, operands);
  if (!kept.ok()) return kept.status();
  NamedTensors written;
  for (size_t n = 0; n < kNumLayerResults; ++n) {
    if (results.of[n].given()) written.emplace_back(kLayerResultNames[n], results.of[n]);
  }
  const auto path = [&](size_t file) { return folder + "/" + kDumpFiles[file]; };
  NamedTensors inputs = input_tensors(operands, *kept);
  const auto before = new_results(problem, layer);
  if (!before.ok()) return before.status();
  for (size_t kind = 0; kind < kNumWeightKinds && problem.attention.accumulate; ++kind) {
    const Tensor& held = before->of[kLayerGradWeights + kind];
    if (held.given()) inputs.emplace_back(std::string("before.") + kWeightFields[kind].name, held);
  }
  Status s = write_text(path(0), mha_json(problem, layer) + "\n", overwrite);
  if (s.ok()) s = write_safetensors(path(1), inputs, overwrite);
  if (s.ok()) s = write_safetensors(path(2), weight_tensors(operands.args.weights), overwrite);
  if (s.ok()) s = write_safetensors(path(3), written, overwrite);
  return s;
}

}  // namespace polyhead::tools
