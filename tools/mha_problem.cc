#include "mha_problem.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "layer/words.h"
#include "testing/program_words.h"
#include "testing/random.h"

namespace polyhead::tools {
namespace {

// What kLayerSizes are.
constexpr const char* kSizeTexts[] = {
    "sequences (default 8; with --verify 2)",
    "query heads (default 8; with --verify 4)",
    "time steps of query and out, at most (default 128; with --verify 32)",
    "length of a vector of query (default 512; with --verify 64)",
    "beams of query and out (default 1)",
    "beams of key and value: 1 (default) or --beam",
    "key/value heads (default --heads)",
    "time steps of key and value, at most (default --seqlen-q)",
    "length of a vector of key (default --q-size)",
    "length of a vector of value (default --k-size)",
    "length of a projected head of q; 0: no projection (default --q-size / --heads)",
    "of k, likewise (default --q-proj)",
    "of v, likewise (default --q-proj)",
    "length of a vector of out; 0: no projection, heads side by side (default --q-size)",
};
static_assert(std::size(kSizeTexts) == std::size(kLayerSizes));

constexpr ProblemOption kOwnOptions[] = {
    {"--seqlens-q", "LIST", "the lengths of the sequences, as 8,3,5: one for each of --batch"},
    {"--seqlens-k", "LIST", "likewise of keys; see also --lengths"},
    {"--data-layout", "L", "order of the data in memory: t time, n batch, b beam; v last, as tnbv (default nbtv)"},
    {"--same", "T", "qkv: query, key and value are one tensor; kv: key and value are"},
    {"--biases", "[=qkvo]", "biases of all projections, or of some, as =qo"},
    {"--residual", "[=1]", "a tensor is added to out"},
    {"--output-dropout", "P", "dropout on out, before the residual"},
    {"--windows", "[=1]", "a random window of keys [lo, hi) for each time step of query"},
    {"--prepacked-weights", "[=1]", "the weights are prepacked once, before the calls"},
    {"--infer", "[=1]", "inference: forward alone, without dropout (default: training, with all gradients)"},
    {"--sweep", "[=1]", "inference, one time step after the other, on kept keys and values"},
};

// Those of problem_options() that a layer takes.
constexpr std::string_view kAttentionOptions[] = {
    "--dtype",    "--scale",        "--softcap",    "--dropout", "--causal",  "--window",     "--sink-keys",
    "--align",    "--query-offset", "--alibi",      "--sinks",   "--mask",    "--normalizer", "--score",
    "--captured", "--bias",         "--bias-dtype", "--lengths", "--weights", "--accumulate", "--seed"};

// small: layers that the plain loops of --verify end soon with.
int64_t default_size(const LayerDesc& desc, int64_t LayerDesc::*field, bool small) {
  if (field == &LayerDesc::batch) return small ? 2 : 8;
  if (field == &LayerDesc::num_heads) return small ? 4 : 8;
  if (field == &LayerDesc::seqlen_q) return small ? 32 : 128;
  if (field == &LayerDesc::query_size) return small ? 64 : 512;
  return default_layer_size(desc, field);
}

Status set_switch(const char* option, std::string_view value, bool& out) {
  if (value != "0" && value != "1") return invalid(fmt::format("{} is '{}', must be 0 or 1", option, value));
  out = value == "1";
  return {};
}

Status set_lengths(const char* option, const std::string& value, std::vector<int64_t>& lengths) {
  lengths.clear();
  for (const std::string& item : split(value, ',')) {
    const auto length = parse_number<int64_t>(item);
    if (!length || *length < 0) {
      return invalid(fmt::format("{} is '{}', must be one length for each sequence, as 8,3,5", option, value));
    }
    lengths.push_back(*length);
  }
  return {};
}

Status set_data_layout(const std::string& value, std::string& layout) {
  std::string sorted = value;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != "bntv" || value.back() != 'v') {
    return invalid(fmt::format("--data-layout is '{}', must be one of tnbv, tbnv, ntbv, nbtv, btnv, bntv", value));
  }
  layout = value;
  return {};
}

Status set_biases(const std::string& value, LayerDesc& desc) {
  for (const LayerBias& bias : kLayerBiases) desc.*bias.field = value.find(bias.letter) != std::string::npos;
  const bool known = value.find_first_not_of("qkvo") == std::string::npos;
  return known ? Status() : invalid(fmt::format("--biases is '{}', must be letters of qkvo", value));
}

Status set_same(const std::string& value, MhaProblem& problem) {
  problem.key_is_query = value == "qkv";
  problem.value_is_key = value == "qkv" || value == "kv";
  return problem.value_is_key ? Status() : invalid(fmt::format("--same is '{}', must be qkv or kv", value));
}

Status set_own_option(std::string_view name, const std::string& value, MhaProblem& problem) {
  if (name == "--seqlens-q") return set_lengths("--seqlens-q", value, problem.seqlens_q);
  if (name == "--seqlens-k") return set_lengths("--seqlens-k", value, problem.seqlens_k);
  if (name == "--data-layout") return set_data_layout(value, problem.data_layout);
  if (name == "--same") return set_same(value, problem);
  if (name == "--biases") return set_biases(value, problem.layer);
  if (name == "--residual") return set_switch("--residual", value, problem.layer.residual);
  if (name == "--windows") return set_switch("--windows", value, problem.layer.has_windows);
  if (name == "--prepacked-weights") return set_switch("--prepacked-weights", value, problem.prepacked_weights);
  if (name == "--sweep") return set_switch("--sweep", value, problem.sweep);
  if (name == "--infer") {
    bool infer = false;
    Status status = set_switch("--infer", value, infer);
    problem.training = !infer;
    return status;
  }
  const auto p = parse_number<double>(value);
  if (!p) return invalid(fmt::format("--output-dropout is '{}', must be a number", value));
  problem.layer.output_dropout_p = *p;
  return {};
}

const ProblemOption* find_option(std::span<const ProblemOption> options, std::string_view name) {
  const auto found =
      std::find_if(options.begin(), options.end(), [&](const ProblemOption& option) { return name == option.name; });
  return found == options.end() ? nullptr : &*found;
}

const LayerSize* find_size(std::string_view name) {
  const auto* found = std::find_if(std::begin(kLayerSizes), std::end(kLayerSizes),
                                   [&](const LayerSize& s) { return name == s.option; });
  return found == std::end(kLayerSizes) ? nullptr : found;
}

// One option with its value. Sizes that are not given stay -1.
Status set_option(std::string_view name, const std::string& value, MhaProblem& problem) {
  if (const LayerSize* size = find_size(name); size != nullptr) {
    const auto number = parse_number<int64_t>(value);
    if (!number || *number < 0) return invalid(fmt::format("{} is '{}', must be an integer >= 0", name, value));
    problem.layer.*size->field = *number;
    return {};
  }
  if (find_option(kOwnOptions, name) != nullptr) return set_own_option(name, value, problem);
  return set_problem_option(name, value, problem.attention);
}

Status check_lengths(const char* option, const std::vector<int64_t>& lengths, int64_t batch) {
  if (lengths.empty() || static_cast<int64_t>(lengths.size()) == batch) return {};
  return invalid(fmt::format("{} has {} lengths, must have one for each of --batch {}", option, lengths.size(), batch));
}

// What the sizes imply for the attention inside.
Status set_attention_sizes(MhaProblem& problem) {
  const LayerDesc& layer = problem.layer;
  AttentionDesc& desc = problem.attention.desc;
  desc.batch = layer.batch;
  desc.seqlen_q = layer.seqlen_q;
  desc.seqlen_k = layer.seqlen_k;
  desc.num_heads = layer.num_heads;
  desc.num_heads_kv = layer.num_heads_kv;
  desc.head_dim = layer.query_proj_size > 0 ? layer.query_proj_size : layer.query_size;
  desc.head_dim_v = layer.value_proj_size > 0 ? layer.value_proj_size : layer.value_size;
  return complete_operands(problem.attention);  // fails by programs alone
}

// Fills in the sizes that were not given, and what they imply.
Status complete(MhaProblem& problem, bool small) {
  for (const LayerSize& size : kLayerSizes) {
    int64_t& value = problem.layer.*size.field;
    if (value < 0) value = default_size(problem.layer, size.field, small);
  }
  if (Status s = set_attention_sizes(problem); !s.ok()) return s;
  const LayerDesc& layer = problem.layer;
  AttentionDesc& desc = problem.attention.desc;
  desc.has_seqlens_q = desc.has_seqlens_q || !problem.seqlens_q.empty();
  desc.has_seqlens_k = desc.has_seqlens_k || !problem.seqlens_k.empty();
  if (problem.sweep) problem.training = false;
  if (Status s = check_lengths("--seqlens-q", problem.seqlens_q, layer.batch); !s.ok()) return s;
  if (Status s = check_lengths("--seqlens-k", problem.seqlens_k, layer.batch); !s.ok()) return s;
  if (problem.key_is_query &&
      (layer.beam != layer.beam_kv || layer.seqlen_q != layer.seqlen_k || layer.query_size != layer.key_size)) {
    return invalid("--same qkv: query and key must have the same --beam, --seqlen and --size");
  }
  if (problem.value_is_key && layer.key_size != layer.value_size) {
    return invalid(fmt::format("--same: --k-size {} and --v-size {} must be equal", layer.key_size, layer.value_size));
  }
  if (!problem.training && problem.attention.accumulate) {
    return invalid("--accumulate with --infer or --sweep: inference has no gradients");
  }
  return {};
}

}  // namespace

LayerDesc layer_desc(const MhaProblem& problem) {
  LayerDesc desc = problem.layer;
  desc.dtype = problem.attention.desc.dtype;
  desc.attention = problem.attention.desc;
  const AttentionDesc unset;  // the layer sets the sizes
  desc.attention.batch = unset.batch;
  desc.attention.seqlen_q = unset.seqlen_q;
  desc.attention.seqlen_k = unset.seqlen_k;
  desc.attention.num_heads = unset.num_heads;
  desc.attention.num_heads_kv = unset.num_heads_kv;
  desc.attention.head_dim = unset.head_dim;
  desc.attention.head_dim_v = unset.head_dim_v;
  desc.attention.dtype = unset.dtype;
  return desc;
}

std::vector<ProblemOption> mha_options() {
  std::vector<ProblemOption> options;
  for (size_t i = 0; i < std::size(kLayerSizes); ++i) options.push_back({kLayerSizes[i].option, "N", kSizeTexts[i]});
  options.insert(options.end(), std::begin(kOwnOptions), std::end(kOwnOptions));
  for (const ProblemOption& option : problem_options()) {  // --mask twice: a tensor, or a program
    const auto* const end = std::end(kAttentionOptions);
    if (std::find(std::begin(kAttentionOptions), end, option.name) != end) options.push_back(option);
  }
  return options;
}

Result<MhaProblem> parse_mha(std::span<const std::string> words, bool small) {
  const std::vector<ProblemOption> options = mha_options();
  MhaProblem problem;
  for (const LayerSize& size : kLayerSizes) problem.layer.*size.field = -1;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    const std::string name = words[i].substr(0, equals);
    const ProblemOption* option = find_option(options, name);
    if (option == nullptr) return invalid("unknown option " + quoted(name) + "; --help lists the known ones");
    std::string value;
    if (equals != std::string::npos) {
      value = words[i].substr(equals + 1);
    } else if (option->value[0] == '[') {
      value = std::string(option->value).substr(2);
      value.pop_back();
    } else if (i + 1 < words.size()) {
      value = words[++i];
    } else {
      return invalid(name + " needs a value: " + name + " " + option->value);
    }
    if (Status s = set_option(name, value, problem); !s.ok()) return s;
  }
  if (Status s = complete(problem, small); !s.ok()) return s;
  return problem;
}

std::string mha_line(const MhaProblem& problem) {
  std::string line = layer_in_words(problem.layer);
  const auto add = [&](const std::string& word) { line += " " + word; };
  if (problem.value_is_key) add(problem.key_is_query ? "--same qkv" : "--same kv");
  if (problem.data_layout != "nbtv") add("--data-layout " + problem.data_layout);
  if (problem.prepacked_weights) add("--prepacked-weights");
  if (problem.sweep) add("--sweep");
  if (!problem.training && !problem.sweep) add("--infer");
  Problem attention = problem.attention;
  if (!problem.seqlens_q.empty()) attention.desc.has_seqlens_q = false;
  if (!problem.seqlens_k.empty()) attention.desc.has_seqlens_k = false;
  line += options_line(attention);
  if (!problem.seqlens_q.empty()) add(fmt::format("--seqlens-q {}", fmt::join(problem.seqlens_q, ",")));
  if (!problem.seqlens_k.empty()) add(fmt::format("--seqlens-k {}", fmt::join(problem.seqlens_k, ",")));
  return line;
}

MhaProblem random_mha(uint64_t seed) {
  Random random(seed, 0x6d6861);
  const auto chance = [&](double p) { return random.uniform() < p; };
  const auto size = [&](int64_t most) { return chance(0.03) ? 0 : 1 + random.below(most); };
  MhaProblem problem;
  const Problem drawn = without_cache(random_problem(seed));
  problem.attention.seed = seed;
  problem.attention.mask_kind = drawn.mask_kind;
  problem.attention.accumulate = drawn.accumulate;
  AttentionDesc& desc = problem.attention.desc;
  desc = drawn.desc;
  problem.attention.score_text = drawn.score_text;
  problem.attention.mask_text = drawn.mask_text;
  problem.attention.captured = drawn.captured;
  desc.packed = desc.return_column_sums = desc.has_windows = false;
  if (std::exchange(desc.mask_at_end, false)) desc.attn_mask.dims[3] = desc.seqlen_k;
  desc.dropout_origin = {};
  desc.out_dtype.reset();
  desc.grad_dtype.reset();
  LayerDesc& layer = problem.layer;
  layer.batch = desc.batch;
  layer.seqlen_q = desc.seqlen_q;
  layer.seqlen_k = desc.seqlen_k;
  layer.num_heads = desc.num_heads;
  layer.num_heads_kv = desc.num_heads_kv;
  layer.beam = chance(0.3) ? 1 + random.below(3) : 1;
  layer.beam_kv = chance(0.5) ? layer.beam : 1;
  // So that the naive loops over projections, and those over pairs of a query and a key, end soon. Mostly small ones.
  constexpr double kMaxProducts = 1e6;
  const int64_t rows = layer.batch * layer.beam * (layer.seqlen_q + layer.seqlen_k) * layer.num_heads;
  const double large =
      std::clamp(std::sqrt(kMaxProducts / static_cast<double>(std::max<int64_t>(rows, 1))), 32.0, 600.0);
  const double largest = chance(0.2) ? large : 32;
  const auto vector = static_cast<int64_t>(largest);
  const double pairs = static_cast<double>(desc.batch * desc.num_heads * layer.beam * desc.seqlen_q * desc.seqlen_k);
  const auto most = static_cast<int64_t>(std::clamp(kMaxProducts / std::max(pairs, 1.0), 1.0, largest));
  const int64_t head_dim = size(most), head_dim_v = chance(0.5) ? head_dim : size(most);
  layer.query_proj_size = chance(0.8) ? head_dim : 0;
  layer.key_proj_size = chance(0.8) ? head_dim : 0;
  layer.value_proj_size = chance(0.8) ? head_dim_v : 0;
  layer.out_proj_size = chance(0.8) ? size(vector) : 0;
  layer.query_size = layer.query_proj_size > 0 ? size(vector) : head_dim;
  layer.key_size = layer.key_proj_size == 0 ? head_dim : chance(0.5) ? layer.query_size : size(vector);
  layer.value_size = layer.value_proj_size == 0 ? head_dim_v : chance(0.5) ? layer.key_size : size(vector);
  layer.query_bias = layer.query_proj_size > 0 && chance(0.5);
  layer.key_bias = layer.key_proj_size > 0 && chance(0.5);
  layer.value_bias = layer.value_proj_size > 0 && chance(0.5);
  layer.out_bias = layer.out_proj_size > 0 && chance(0.5);
  layer.residual = chance(0.4);
  layer.has_windows = chance(0.2);
  if (chance(0.2)) layer.output_dropout_p = chance(0.2) ? 1 : 0.6 * random.uniform();
  const bool same_tokens = layer.beam == layer.beam_kv && layer.seqlen_q == layer.seqlen_k;
  problem.key_is_query =
      same_tokens && layer.key_size == layer.query_size && layer.value_size == layer.key_size && chance(0.7);
  problem.value_is_key = problem.key_is_query || (layer.value_size == layer.key_size && chance(0.5));
  constexpr const char* kLayouts[] = {"tnbv", "tbnv", "ntbv", "nbtv", "btnv", "bntv"};
  problem.data_layout = kLayouts[random.below(6)];
  problem.training = chance(0.75);
  problem.sweep = !problem.training && chance(0.5);
  if (!problem.training) problem.attention.accumulate = false;
  problem.prepacked_weights = chance(0.3);
  static_cast<void>(set_attention_sizes(problem));  // the words of `drawn` are programs
  return problem;
}

}  // namespace polyhead::tools
