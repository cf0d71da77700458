// polyhead run: one problem, computed once.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>

#include "array.h"
#include "attention/words.h"
#include "command.h"
#include "file.h"
#include "operands.h"
#include "report.h"
#include "safetensors.h"
#include "selection.h"
#include "testing/elements.h"
#include "testing/sizes.h"

namespace polyhead::tools {
namespace {

// Tensors that may come from files, with their options.
struct FileOperand {
  const char* name;  // in a safetensors file
  const char* option;
  const char* text;
  Tensor ForwardArgs::*forward;    // what forward takes,
  Tensor BackwardArgs::*backward;  // or, else, what comes in from behind
};
constexpr FileOperand kOperands[] = {
    {"query", "--query", "[B, Sq, H, D], packed [rows, H, D]; order as --layout", &ForwardArgs::query, nullptr},
    {"key", "--key", "[B, Sk, G, D]", &ForwardArgs::key, nullptr},
    {"value", "--value", "[B, Sk, G, Dv]", &ForwardArgs::value, nullptr},
    {"attn_mask", "--attn-mask", "boolean, up to 4 dims, broadcast to [B, H, Sq, Sk]", &ForwardArgs::attn_mask,
     nullptr},
    {"attn_bias", "--attn-bias", "likewise; added to the scores", &ForwardArgs::attn_bias, nullptr},
    {"alibi_slopes", "--alibi-slopes", "[H] or [B, H], float32", &ForwardArgs::alibi_slopes, nullptr},
    {"seqlens_q", "--seqlens-q", "[B], int32 or int64", &ForwardArgs::seqlens_q, nullptr},
    {"seqlens_k", "--seqlens-k", "[B]", &ForwardArgs::seqlens_k, nullptr},
    {"cu_seqlens_q", "--cu-seqlens-q", "[B + 1]; makes the operands packed", &ForwardArgs::cu_seqlens_q, nullptr},
    {"cu_seqlens_k", "--cu-seqlens-k", "[B + 1]", &ForwardArgs::cu_seqlens_k, nullptr},
    {"query_offsets", "--query-offsets", "[B]", &ForwardArgs::query_offsets, nullptr},
    {"grad_out", "--grad-out", "as out: [B, Sq, H, Dv]; with --gradients (default: random)", nullptr,
     &BackwardArgs::grad_out},
    {"grad_logsumexp", "--grad-logsumexp", "[B, H, Sq], packed [H, rows]; with --gradients", nullptr,
     &BackwardArgs::grad_logsumexp},
};
using Arrays = std::map<std::string, Array>;

struct RunOptions {
  std::array<std::string, std::size(kOperands)> files;
  std::vector<std::string> captured;  // NAME=FILE
  std::string input, out, kernel = "best", threads, format = "md";
  bool gradients = false, force = false;
};

Result<Arrays> read_inputs(const RunOptions& options) {
  Arrays arrays;
  if (!options.input.empty()) {
    const auto file = SafetensorsFile::open(options.input);
    if (!file.ok()) return file.status();
    for (const SafetensorsEntry& entry : file->entries()) {
      const bool used = std::any_of(std::begin(kOperands), std::end(kOperands), [&](const FileOperand& operand) {
        return entry.name == operand.name && (operand.forward != nullptr || options.gradients);
      });
      if (!used) {
        fmt::print(stderr, "polyhead run: tensor {} of {} is no operand and not used\n", printable(entry.name),
                   printable(options.input));
        continue;
      }
      auto array = file->read(entry.name);
      if (!array.ok()) return array.status();
      arrays.emplace(entry.name, std::move(*array));
    }
  }
  for (size_t i = 0; i < std::size(kOperands); ++i) {
    if (options.files[i].empty()) continue;
    if (kOperands[i].backward != nullptr && !options.gradients) {
      return invalid(fmt::format("{} is given without --gradients", kOperands[i].option));
    }
    auto array = read_array(options.files[i]);
    if (!array.ok()) return array.status();
    arrays.insert_or_assign(kOperands[i].name, std::move(*array));
  }
  return arrays;
}

// The tensors of --captured-file, by name, in the order given.
using CapturedFiles = std::vector<std::pair<std::string, Array>>;

Result<CapturedFiles> read_captured(const std::vector<std::string>& files) {
  CapturedFiles captured;
  for (const std::string& each : files) {
    const size_t equals = each.find('=');
    if (equals == 0 || equals == std::string::npos) {
      return invalid(fmt::format("--captured-file is '{}', must be NAME=FILE", printable(each)));
    }
    auto array = read_array(each.substr(equals + 1));
    if (!array.ok()) return array.status();
    if (array->is_void16) {
      return invalid(fmt::format("{} holds 2-byte void elements, as NumPy writes bfloat16; give it as .safetensors",
                                 printable(each)));
    }
    captured.emplace_back(each.substr(0, equals), std::move(*array));
  }
  return captured;
}

// "slope: f32[8]"; "" for a dtype that no program reads.
std::string captured_words(const std::string& name, const Tensor& tensor) {
  const auto* known = std::find_if(std::begin(kCaptureDTypeWords), std::end(kCaptureDTypeWords),
                                   [&](const Word<DType>& word) { return word.value == tensor.dtype; });
  if (known == std::end(kCaptureDTypeWords)) return "";
  return fmt::format("{}: {}[{}]", name, known->text, fmt::join(tensor.dims, tensor.dims + tensor.ndim, ", "));
}

bool has_option(const std::vector<std::string>& words, std::string_view name) {
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return word == name || word.rfind(std::string(name) + "=", 0) == 0;
  });
}

// The tensor with dims in the contract's order, from an array in the order that --layout names.
Result<Tensor> heads_view(const Tensor& stored, Layout layout, bool packed, const char* name) {
  if (stored.ndim != (packed ? 3 : 4)) {
    return invalid(fmt::format("{} has shape {}, must have {} dims", name, dims_text(stored), packed ? 3 : 4));
  }
  if ((layout != Layout::kBshd && layout != Layout::kBhsd && layout != Layout::kSbhd) ||
      (packed && layout == Layout::kSbhd)) {
    return invalid("--layout of operands from files must be bshd, bhsd or sbhd (packed: bshd or bhsd)");
  }
  Tensor view = stored;
  const auto exchange = [&](int a, int b) {
    std::swap(view.dims[a], view.dims[b]);
    std::swap(view.strides[a], view.strides[b]);
  };
  if (layout == Layout::kBhsd) exchange(view.ndim - 3, view.ndim - 2);
  if (layout == Layout::kSbhd) exchange(0, 1);
  return view;
}

// Leading dims of size 1 may be left out, as in NumPy.
Result<Tensor> score_view(const Tensor& stored, const char* name) {
  if (stored.ndim > 4)
    return invalid(fmt::format("{} has shape {}, must have at most 4 dims", name, dims_text(stored)));
  Tensor view = stored;
  view.ndim = 4;
  const int missing = 4 - stored.ndim;
  for (int d = 0; d < 4; ++d) {
    view.dims[d] = d < missing ? 1 : stored.dims[d - missing];
    view.strides[d] = d < missing ? 0 : stored.strides[d - missing];
  }
  return view;
}

// What the command line and the files say together. Sizes come from the command line or from query, key and value.
class Request {
 public:
  Request(std::vector<std::string> words, const Arrays& arrays, const CapturedFiles& captured)
      : words_(std::move(words)), arrays_(arrays), captured_(captured) {}

  Problem problem;
  ForwardArgs preset;
  BackwardArgs incoming;  // grad_out and grad_logsumexp

  Status resolve() {
    const bool all_three = arrays_.count("query") != 0 && arrays_.count("key") != 0 && arrays_.count("value") != 0;
    const bool sizes_from_files = std::none_of(words_.begin(), words_.end(), names_sizes);
    if (sizes_from_files && !all_three) {
      return invalid("no sizes given: name them as BxHxSxD, or give --query, --key and --value");
    }
    if (Status s = describe_captured(); !s.ok()) return s;
    std::vector<std::string> words = words_;
    if (sizes_from_files) words.insert(words.begin(), "1x1x1x1");
    const auto parsed = select_problem(words);
    if (!parsed.ok()) return parsed.status();
    problem = *parsed;
    if (arrays_.count("cu_seqlens_q") != 0 || arrays_.count("cu_seqlens_k") != 0) problem.desc.packed = true;
    if (problem.desc.packed && !arrays_.empty() &&
        !(sizes_from_files && arrays_.count("cu_seqlens_q") != 0 && arrays_.count("cu_seqlens_k") != 0)) {
      return invalid("packed operands from files: give query, key, value, cu_seqlens_q and cu_seqlens_k, and no sizes");
    }
    if (Status s = take_dtype(); !s.ok()) return s;
    for (const FileOperand& operand : kOperands) {
      if (const auto array = arrays_.find(operand.name); array != arrays_.end()) {
        if (Status s = take(operand, array->second); !s.ok()) return s;
      }
    }
    if (sizes_from_files) {
      take_sizes();
      if (Status s = complete_operands(problem); !s.ok()) return s;
    }
    take_captured();
    return {};
  }

 private:
  // Puts what files hold into --captured.
  Status describe_captured() {
    if (captured_.empty()) return {};
    const auto is_captured = [](const std::string& word) { return word.rfind("--captured", 0) == 0; };
    const auto found = std::find_if(words_.begin(), words_.end(), is_captured);
    std::string text;
    if (found != words_.end()) {
      const bool glued = found->find('=') != std::string::npos;
      if (!glued && found + 1 == words_.end()) return {};  // the parser says so
      text = glued ? found->substr(found->find('=') + 1) : found[1];
      words_.erase(found, found + (glued ? 1 : 2));
    }
    for (const auto& [name, array] : captured_) {
      const std::string described = captured_words(name, array.tensor);
      if (described.empty()) {
        return invalid(fmt::format("--captured-file: {} has dtype {}, must be a float, int32, int64 or bool", name,
                                   dtype_name(array.tensor.dtype)));
      }
      text += "; " + described;
    }
    words_.push_back("--captured=" + text);
    return {};
  }

  // The tensors that files hold, in the program's order.
  void take_captured() {
    for (const DrawnCapture& tensor : problem.captured) {
      Tensor& view = captures_.emplace_back();
      for (const auto& [name, array] : captured_) {
        if (name == tensor.name) view = array.tensor;
      }
      if (view.given() && view.ndim == 0) view.ndim = 1, view.dims[0] = 1, view.strides[0] = 1;
    }
    preset.captures = captures_;
  }

  Status take_dtype() {
    if (has_option(words_, "--dtype")) return {};
    for (const char* name : {"query", "key", "value"}) {
      const auto array = arrays_.find(name);
      if (array == arrays_.end()) continue;
      problem.desc.dtype = array->second.tensor.dtype;
      return {};
    }
    return {};
  }

  Status take(const FileOperand& operand, const Array& array) {
    AttentionDesc& desc = problem.desc;
    const std::string_view name = operand.name;
    const bool is_bias = name == "attn_bias";
    const char* dtype_option = is_bias ? "--bias-dtype" : "--dtype";
    if (array.is_void16 && !has_option(words_, dtype_option)) {
      return invalid(
          fmt::format("{} holds 2-byte void elements, as NumPy writes bfloat16; say {} bf16", name, dtype_option));
    }
    Tensor& tensor = operand.forward != nullptr ? preset.*operand.forward : incoming.*operand.backward;
    tensor = array.tensor;
    if (name == "query" || name == "key" || name == "value" || name == "grad_out") {
      const auto view = heads_view(array.tensor, problem.layout, desc.packed, operand.name);
      if (!view.ok()) return view.status();
      tensor = *view;
    } else if (name == "attn_mask" || is_bias) {
      const auto view = score_view(array.tensor, operand.name);
      if (!view.ok()) return view.status();
      tensor = *view;
      BroadcastOperand& told = is_bias ? desc.attn_bias : desc.attn_mask;
      if (!is_bias || !has_option(words_, "--bias-dtype")) told.dtype = tensor.dtype;
      told.given = true;
      std::copy_n(tensor.dims, 4, told.dims);
    } else if (name == "alibi_slopes") {
      desc.alibi_slopes_ndim = tensor.ndim;
    }
    desc.has_seqlens_q = desc.has_seqlens_q || name == "seqlens_q";
    desc.has_seqlens_k = desc.has_seqlens_k || name == "seqlens_k";
    desc.has_query_offsets = desc.has_query_offsets || name == "query_offsets";
    return {};
  }

  void take_sizes() {
    AttentionDesc& desc = problem.desc;
    const int rows = preset.query.ndim - 3;
    desc.batch = desc.packed ? std::max<int64_t>(preset.cu_seqlens_q.dims[0] - 1, 0) : preset.query.dims[0];
    desc.seqlen_q = preset.query.dims[rows];
    desc.seqlen_k = preset.key.dims[rows];
    desc.num_heads = preset.query.dims[rows + 1];
    desc.num_heads_kv = preset.key.dims[rows + 1];
    desc.head_dim = preset.query.dims[rows + 2];
    desc.head_dim_v = preset.value.dims[rows + 2];
  }

  std::vector<std::string> words_;
  const Arrays& arrays_;
  const CapturedFiles& captured_;
  std::vector<Tensor> captures_;
};

// FNV-1a, 64 bits, over the elements in row-major order.
std::string checksum(const Tensor& tensor) {
  uint64_t hash = 0xcbf29ce484222325;
  const size_t element_bytes = dtype_size_bytes(tensor.dtype);
  for_each_element(tensor, [&](const void* element) {
    for (size_t i = 0; i < element_bytes; ++i) {
      hash = (hash ^ static_cast<const unsigned char*>(element)[i]) * 0x100000001b3;
    }
  });
  return fmt::format("{:016x}", hash);
}

std::vector<Cell> tensor_row(const std::string& name, const Tensor& tensor) {
  double low = std::numeric_limits<double>::infinity(), high = -low, sum = 0;
  int64_t num_nan = 0;
  for_each_element(tensor, [&](const void* element) {
    const double value = element_value(tensor.dtype, element);
    num_nan += std::isnan(value);
    if (std::isnan(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
    sum += value;
  });
  const int64_t counted = tensor.num_elements() - num_nan;
  std::vector<Cell> row = {name, dims_text(tensor), std::string(dtype_name(tensor.dtype)), checksum(tensor)};
  if (counted == 0) {
    row.insert(row.end(), 3, std::monostate());
  } else {
    row.insert(row.end(), {low, sum / static_cast<double>(counted), high});
  }
  row.emplace_back(num_nan);
  return row;
}

NamedTensors named(const ForwardArgs& forward, const BackwardArgs& backward, const Problem& problem) {
  NamedTensors tensors = {{"out", forward.out}};
  if (problem.logsumexp) tensors.emplace_back("logsumexp", forward.logsumexp);
  if (forward.attn_weights.given()) tensors.emplace_back("attn_weights", forward.attn_weights);
  if (forward.column_sums.given()) tensors.emplace_back("column_sums", forward.column_sums);
  for (const GradientName& gradient : kGradients) {
    if ((backward.*gradient.tensor).given()) tensors.emplace_back(gradient.name, backward.*gradient.tensor);
  }
  for (size_t n = 0; n < backward.grad_captures.size(); ++n) {
    const Tensor& gradient = backward.grad_captures[n];
    if (gradient.given()) tensors.emplace_back("grad_captures." + problem.captured[n].name, gradient);
  }
  return tensors;
}

class Timer {
 public:
  std::string text() const {
    const std::chrono::duration<double, std::milli> elapsed_ms = std::chrono::steady_clock::now() - start_;
    return number_text(elapsed_ms.count()) + " ms";
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Computed {
  ForwardArgs forward;
  BackwardArgs backward;
  std::string time;
};

Status compute_gradients(const Request& request, const Plan& planned, Operands& operands, Computed& computed) {
  if (request.problem.accumulate) return invalid("--accumulate: a run has no gradients to add to; leave it out");
  const auto args = operands.backward(request.problem, request.incoming);
  if (!args.ok()) return args.status();
  computed.backward = *args;
  const auto workspace = give_workspace(planned.backward_workspace_bytes(), computed.backward.forward);
  if (!workspace.ok()) return workspace.status();
  const Timer timer;
  if (Status s = planned.backward(computed.backward); !s.ok()) return s;
  computed.time += " forward, " + timer.text() + " backward";
  return {};
}

Status compute(const Request& request, const Plan& planned, bool gradients, Operands& operands, Computed& computed) {
  computed.forward = operands.forward();
  if (!request.problem.logsumexp && !gradients) computed.forward.logsumexp = {};
  const auto workspace = give_workspace(planned.workspace_bytes(), computed.forward);
  if (!workspace.ok()) return workspace.status();
  const Timer timer;
  if (Status s = planned.forward(computed.forward); !s.ok()) return s;
  computed.time = timer.text();
  return gradients ? compute_gradients(request, planned, operands, computed) : Status();
}

Result<int> run(const RunOptions& options, const std::vector<std::string>& words) {
  const auto format = parse_format(options.format);
  if (!format.ok()) return format.status();
  if (!options.out.empty()) {
    if (Status s = check_may_write(options.out, options.force); !s.ok()) return s;
  }
  const auto kernel = select_kernels(options.kernel);
  if (!kernel.ok()) return kernel.status();
  const auto threads = select_threads(options.threads);
  if (!threads.ok()) return threads.status();
  const auto arrays = read_inputs(options);
  if (!arrays.ok()) return arrays.status();
  const auto captured = read_captured(options.captured);
  if (!captured.ok()) return captured.status();
  Request request(words, *arrays, *captured);
  if (Status s = request.resolve(); !s.ok()) return s;
  const Problem& problem = request.problem;

  // The plan is made first: it names sizes that do not fit, before operands of such sizes are drawn.
  const bool packed_here = problem.desc.packed && !request.preset.query.given();
  PlanOptions plan_options;
  plan_options.kernel = kernel->front();
  plan_options.where.executor = threads->front().executor;
  const auto planned = plan(packed_here ? problem_desc(problem) : problem.desc, plan_options);
  if (!planned.ok()) return planned.status();
  auto operands = Operands::create(problem, request.preset);
  if (!operands.ok()) return operands.status();
  Computed computed;
  if (Status s = compute(request, *planned, options.gradients, *operands, computed); !s.ok()) return s;

  Report report;
  report.facts = {{"problem", problem_line(problem)},
                  {"kernel", planned->kernel_name()},
                  {"threads", fmt::format("{}", threads->front().count)},
                  {"time", computed.time + (options.gradients ? " (one call each, cold)" : " (one call, cold)")}};
  report.columns = {"tensor", "shape", "dtype", "fnv1a", "min", "mean", "max", "nan"};
  const NamedTensors results = named(computed.forward, computed.backward, problem);
  for (const auto& [name, tensor] : results) report.rows.push_back(tensor_row(name, tensor));
  if (!options.out.empty()) {
    if (Status s = write_arrays(options.out, results, options.force); !s.ok()) return s;
    report.facts.emplace_back("wrote", options.out);
  }
  fmt::print("{}", report.text(*format));
  return 0;
}

}  // namespace

Command add_run(CLI::App& root) {
  CLI::App* app = root.add_subcommand("run", "compute one problem, on random operands or on arrays from files");
  const auto options = std::make_shared<RunOptions>();
  app->allow_extras();
  app->add_option("--out", options->out, "write the outputs: .safetensors, or .npy if out is the only one");
  app->add_flag("--gradients", options->gradients, "forward, then the gradients that the problem --needs");
  app->add_flag("--force", options->force, "replace the file of --out if it exists");
  app->add_option("--input", options->input, "take operands by name from this .safetensors");
  for (size_t i = 0; i < std::size(kOperands); ++i) {
    app->add_option(kOperands[i].option, options->files[i], kOperands[i].text)
        ->type_name("FILE")
        ->group("Operands, each FILE.npy or FILE.safetensors:NAME");
  }
  app->add_option("--captured-file", options->captured, "a tensor that the program reads; any number of them")
      ->type_name("NAME=FILE")
      ->allow_extra_args(false)
      ->group("Operands, each FILE.npy or FILE.safetensors:NAME");
  app->add_option("--kernel", options->kernel, "best (default) or a kernel's name");
  app->add_option("--threads", options->threads, "number of threads (default: POLYHEAD_THREADS, else all CPUs)");
  add_format_option(*app, options->format);
  app->footer(help_footer(
      true, "polyhead run 1x16x384x64 --causal --logsumexp --out out.safetensors",
      "polyhead run --query q.npy --key k.npy --value v.npy --gradients --grad-out do.npy --out g.safetensors"));
  return {app, [app, options] { return run(*options, app->remaining()); }};
}

}  // namespace polyhead::tools
