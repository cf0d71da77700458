#include "testing/problem_words.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>

#include "attention/words.h"
#include "testing/pages.h"
#include "testing/program_words.h"
#include "testing/sizes.h"
#include "testing/words.h"

namespace polyhead::testing {
namespace {

constexpr int64_t kMaxDrawnBatch = 10'000'000;  // sequences whose lengths or offsets are drawn

template <class T>
Status set_number(std::string_view option, std::string_view value, T& out) {
  const auto number = parse_number<T>(value);
  if (!number) {
    const char* kind = std::is_floating_point_v<T> ? "a number"
                       : std::is_signed_v<T>       ? "an integer"
                                                   : "an integer >= 0";
    return invalid(std::string(option) + " is " + quoted(value) + ", must be " + kind);
  }
  out = *number;
  return {};
}

Status set_switch(std::string_view option, std::string_view value, bool& out) {
  if (value != "0" && value != "1") return invalid(std::string(option) + " is " + quoted(value) + ", must be 0 or 1");
  out = value == "1";
  return {};
}

template <class T, size_t n>
Status set_word(std::string_view option, std::string_view value, const Word<T> (&words)[n], T& out) {
  std::string known;
  for (const auto& [text, meaning] : words) {
    if (value == text) {
      out = meaning;
      return {};
    }
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  return invalid(std::string(option) + " is " + quoted(value) + ", must be one of " + known);
}

constexpr Word<Layout> kLayoutNames[] = {
    {"bshd", Layout::kBshd},         {"bhsd", Layout::kBhsd},       {"sbhd", Layout::kSbhd},
    {"qkv", Layout::kQkv},           {"strided", Layout::kStrided}, {"transposed", Layout::kTransposed},
    {"padded", Layout::kPadded},     {"junk", Layout::kJunk},       {"negative", Layout::kNegative},
    {"expanded", Layout::kExpanded}, {"mixed", Layout::kMixed}};
constexpr Word<Fill> kFills[] = {{"normal", Fill::kNormal},        {"shift_up", Fill::kShiftUp},
                                 {"shift_down", Fill::kShiftDown}, {"large", Fill::kLarge},
                                 {"underflow", Fill::kUnderflow},  {"outliers", Fill::kOutliers}};
enum class Packed { kNo, kSequences, kRows };
constexpr Word<Packed> kPackings[] = {{"0", Packed::kNo}, {"1", Packed::kSequences}, {"rows", Packed::kRows}};
constexpr Word<MaskKind> kMaskKinds[] = {
    {"random", MaskKind::kRandom}, {"padding", MaskKind::kPadding}, {"blocks", MaskKind::kBlocks}};
constexpr Word<int> kAlibis[] = {{"0", 0}, {"head", 1}, {"batch", 2}};
enum class Lengths { kNone, kQuery, kKey, kBoth };
constexpr Word<Lengths> kLengths[] = {
    {"0", Lengths::kNone}, {"q", Lengths::kQuery}, {"k", Lengths::kKey}, {"both", Lengths::kBoth}};

// "b,1,q,k" or "8,1,512,512": the dims of an operand that broadcasts to [batch, num_heads, seqlen_q, seqlen_k]. A letter
// stands for the full size, known once the sizes are: -1 until then.
Status set_dims(std::string_view option, std::string_view value, BroadcastOperand& operand) {
  const std::vector<std::string> sizes = split(value, ',');
  const auto bad = [&] {
    return invalid(std::string(option) + " is " + quoted(value) +
                   ", must be four sizes as b,h,q,k with 1 where it broadcasts");
  };
  if (sizes.size() != 4) return bad();
  for (size_t i = 0; i < 4; ++i) {
    const auto number = parse_number<int64_t>(sizes[i]);
    const bool is_letter = sizes[i] == std::string(1, "bhqk"[i]);
    if (!is_letter && (!number || *number < 0)) return bad();
    operand.dims[i] = is_letter ? -1 : *number;
  }
  operand.given = true;
  return {};
}

// "16,0", as many integers as `to` has.
Status set_integers(std::string_view option, std::string_view value, const char* form,
                    std::initializer_list<int64_t*> to) {
  const std::vector<std::string> integers = split(value, ',');
  if (integers.size() != to.size()) {
    return invalid(std::string(option) + " is " + quoted(value) + ", must be " + form);
  }
  auto each = integers.begin();
  for (int64_t* integer : to) {
    if (Status s = set_number(option, *each++, *integer); !s.ok()) return s;
  }
  return {};
}

// Dims, or the text of a program.
Status set_mask(std::string_view value, Problem& problem) {
  if (!is_mask_dims(value)) {
    problem.mask_text = value;
    return {};
  }
  if (const size_t colon = value.find(':'); colon != std::string_view::npos) {
    const std::string_view kind = value.substr(colon + 1);
    if (Status s = set_word("--mask's kind", kind, kMaskKinds, problem.mask_kind); !s.ok()) return s;
    value = value.substr(0, colon);
  }
  problem.desc.attn_mask.dtype = DType::kBool;
  return set_dims("--mask", value, problem.desc.attn_mask);
}

Status set_packed(std::string_view value, Problem& problem) {
  Packed packed{};
  if (Status s = set_word("--packed", value, kPackings, packed); !s.ok()) return s;
  problem.desc.packed = packed != Packed::kNo;
  problem.cuts_rows = packed == Packed::kRows;
  return {};
}

// "mixed", or with the seed of gaps and of the choice "mixed:7".
Status set_layout(std::string_view value, Problem& problem) {
  problem.layout_seed = 0;
  if (const size_t colon = value.find(':'); colon != std::string_view::npos) {
    if (Status s = set_number("--layout's seed", value.substr(colon + 1), problem.layout_seed); !s.ok()) return s;
    value = value.substr(0, colon);
  }
  return set_word("--layout", value, kLayoutNames, problem.layout);
}

Status set_offset(std::string_view value, AttentionDesc& desc) {
  if (value == "random") {
    desc.has_query_offsets = true;
    desc.query_offset.reset();
    return {};
  }
  int64_t offset = 0;
  if (!parse_number<int64_t>(value)) {
    return invalid("--query-offset is " + quoted(value) + ", must be an integer or 'random' (one per sequence)");
  }
  if (Status s = set_number("--query-offset", value, offset); !s.ok()) return s;
  desc.query_offset = offset;
  desc.has_query_offsets = false;
  return {};
}

Status set_needs(std::string_view value, GradientSet& needs) {
  needs = 0;
  for (const std::string& operand : split(value, ',')) {
    if (operand == "captured") {
      needs |= kCapturedGradients;
      continue;
    }
    const auto* found = std::find_if(std::begin(kGradients), std::end(kGradients),
                                     [&](const GradientName& gradient) { return operand == gradient.operand; });
    if (found == std::end(kGradients)) {
      return invalid(
          "--needs has " + quoted(operand) +
          ", must be names of query, key, value, attn_bias, alibi_slopes, sink_logits, captured, separated by "
          "commas");
    }
    needs |= 1U << (found - std::begin(kGradients));
  }
  return {};
}

// Sets one option. The dims of mask and bias are completed once the sizes are known.
Status apply(std::string_view option, std::string_view value, Problem& problem) {
  AttentionDesc& desc = problem.desc;
  if (option == "--dtype") return set_word(option, value, kDTypeWords, desc.dtype);
  if (option == "--out-dtype") return set_word(option, value, kDTypeWords, desc.out_dtype.emplace());
  if (option == "--grad-dtype") return set_word(option, value, kDTypeWords, desc.grad_dtype.emplace());
  if (option == "--key-dtype") return set_word(option, value, kStoredDTypeWords, desc.key_dtype.emplace());
  if (option == "--key-group") return set_number(option, value, desc.key_group);
  if (option == "--value-dtype") return set_word(option, value, kStoredDTypeWords, desc.value_dtype.emplace());
  if (option == "--value-group") return set_number(option, value, desc.value_group);
  if (option == "--causal") return set_switch(option, value, desc.causal);
  if (option == "--window") {
    return set_integers(option, value, "LEFT,RIGHT, each -1 (open) or more", {&desc.window_left, &desc.window_right});
  }
  if (option == "--sink-keys") return set_number(option, value, desc.sink_keys);
  if (option == "--align") return set_word(option, value, kAlignWords, desc.align);
  if (option == "--query-offset") return set_offset(value, desc);
  if (option == "--scale") return set_number(option, value, desc.scale.emplace());
  if (option == "--softcap") return set_number(option, value, desc.softcap);
  if (option == "--alibi") return set_word(option, value, kAlibis, desc.alibi_slopes_ndim);
  if (option == "--sinks") return set_switch(option, value, desc.has_sink_logits);
  if (option == "--normalizer") return set_word(option, value, kNormalizerWords, desc.normalizer);
  if (option == "--mask") return set_mask(value, problem);
  if (option == "--mask-at-end") return set_switch(option, value, desc.mask_at_end);
  if (option == "--score") {
    problem.score_text = value;
    return {};
  }
  if (option == "--captured") {
    auto tensors = parse_captured(value);
    if (tensors.ok()) problem.captured = std::move(*tensors);
    return tensors.status();
  }
  if (option == "--bias") return set_dims(option, value, desc.attn_bias);
  if (option == "--bias-dtype") return set_word(option, value, kDTypeWords, desc.attn_bias.dtype);
  if (option == "--page-size") return set_number(option, value, desc.page_size);
  if (option == "--windows") return set_switch(option, value, desc.has_windows);
  if (option == "--packed") return set_packed(value, problem);
  if (option == "--dropout") return set_number(option, value, desc.dropout_p);
  if (option == "--dropout-origin") {
    DropoutOrigin& origin = desc.dropout_origin;
    return set_integers(option, value, "HEAD,HEADS,QUERY,KEY",
                        {&origin.first_head, &origin.num_heads, &origin.first_query, &origin.first_key});
  }
  if (option == "--weights") return set_word(option, value, kReturnWeightsWords, desc.return_weights);
  if (option == "--column-sums") return set_switch(option, value, desc.return_column_sums);
  if (option == "--logsumexp") return set_switch(option, value, problem.logsumexp);
  if (option == "--needs") return set_needs(value, problem.needs);
  if (option == "--accumulate") return set_switch(option, value, problem.accumulate);
  if (option == "--delta") return set_switch(option, value, problem.delta);
  if (option == "--repeat-grad-out") return set_number(option, value, problem.repeated_grad_out);
  if (option == "--fill") return set_word(option, value, kFills, problem.fill);
  if (option == "--edges") return set_switch(option, value, problem.edges);
  if (option == "--layout") return set_layout(value, problem);
  if (option == "--seed") return set_number(option, value, problem.seed);
  Lengths lengths{};
  const Status status = set_word(option, value, kLengths, lengths);
  desc.has_seqlens_q = lengths == Lengths::kQuery || lengths == Lengths::kBoth;
  desc.has_seqlens_k = lengths == Lengths::kKey || lengths == Lengths::kBoth;
  return status;
}

// Values that hold commas themselves are listed with '+'; programs are no lists.
std::vector<std::string> values_of(std::string_view option, std::string_view value) {
  const bool own_commas = option == "--window" || option == "--mask" || option == "--bias" || option == "--needs" ||
                          option == "--dropout-origin";
  if (option == "--score" || option == "--captured" || (option == "--mask" && !is_mask_dims(value))) {
    return {std::string(value)};
  }
  return split(value, own_commas ? '+' : ',');
}

const ProblemOption* find_option(std::string_view name) {
  for (const ProblemOption& option : problem_options()) {
    if (name == option.name) return &option;
  }
  return nullptr;
}

void full_sizes(const AttentionDesc& desc, int64_t (&sizes)[4]) {
  sizes[0] = desc.batch;
  sizes[1] = desc.num_heads;
  sizes[2] = desc.seqlen_q;
  sizes[3] = desc.seqlen_k;
}

void complete(BroadcastOperand& operand, const AttentionDesc& desc) {
  int64_t full[4];
  full_sizes(desc, full);
  for (int i = 0; i < 4; ++i) {
    if (operand.dims[i] < 0) operand.dims[i] = full[i];
  }
}

// Appends `base` with every combination of sizes; the head dims vary fastest.
Status append_sizes(const Sizes& sizes, const Problem& base, std::vector<Problem>& problems) {
  for (const SizePair& batch : sizes[0]) {
    for (const SizePair& heads : sizes[1]) {
      for (const SizePair& lengths : sizes[2]) {
        for (const SizePair& dims : sizes[3]) {
          if (problems.size() == kMaxProblems) {
            return invalid("the lists name more than " + std::to_string(kMaxProblems) + " problems");
          }
          Problem problem = base;
          AttentionDesc& desc = problem.desc;
          desc.batch = batch.first;
          std::tie(desc.num_heads, desc.num_heads_kv) = heads;
          std::tie(desc.seqlen_q, desc.seqlen_k) = lengths;
          std::tie(desc.head_dim, desc.head_dim_v) = dims;
          const bool draws = desc.packed || desc.has_seqlens_q || desc.has_seqlens_k || desc.has_query_offsets;
          if (draws && desc.batch > kMaxDrawnBatch) {
            return invalid("batch is " + std::to_string(desc.batch) + ", must be at most " +
                           std::to_string(kMaxDrawnBatch) + " with random lengths or offsets");
          }
          if (Status s = complete_operands(problem); !s.ok()) return s;
          problems.push_back(problem);
        }
      }
    }
  }
  return {};
}

struct Words {
  std::vector<std::string> shapes;
  std::vector<std::pair<std::string, std::vector<std::string>>> options;  // name, values
};

Status read_words(std::span<const std::string> words, Words& out) {
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word.substr(0, 1) != "-") {
      out.shapes.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const ProblemOption* option = find_option(name);
    if (option == nullptr) return invalid("unknown option " + quoted(name) + "; --help lists the known ones");
    std::string value;
    if (equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else if (option->value[0] == '[') {
      value = std::string(option->value).substr(2);
      value.pop_back();
    } else if (i + 1 < words.size()) {
      value = words[++i];
    } else {
      return invalid(name + " needs a value: " + name + " " + option->value);
    }
    // A mask of dims and the program of another stand side by side.
    const bool dims = is_mask_dims(value);
    std::erase_if(out.options, [&](const auto& earlier) {
      return earlier.first == name && (name != "--mask" || is_mask_dims(earlier.second.front()) == dims);
    });
    out.options.emplace_back(name, values_of(name, value));
  }
  if (out.shapes.empty()) return invalid("no problem given; name one as BxHxSxD, for example 8x16x512x64");
  return {};
}

}  // namespace

Problem plain_problem() {
  Problem problem;
  problem.layout = Layout::kBshd;
  problem.edges = problem.cuts_rows = false;
  return problem;
}

const char* layout_name(Layout layout) { return word_of(kLayoutNames, layout); }
const char* fill_name(Fill fill) { return word_of(kFills, fill); }

Result<DType> parse_dtype(std::string_view text) {
  DType dtype{};
  if (Status s = set_word("dtype", text, kDTypeWords, dtype); !s.ok()) return s;
  return dtype;
}

const char* short_dtype_name(DType dtype) { return word_of(kDTypeWords, dtype); }

Result<std::vector<Problem>> parse_problems(std::span<const std::string> words) {
  Words read;
  if (Status s = read_words(words, read); !s.ok()) return s;
  std::vector<Problem> bases(1, plain_problem());
  for (const auto& [option, values] : read.options) {
    std::vector<Problem> next;
    for (const Problem& base : bases) {
      for (const std::string& value : values) {
        if (next.size() == kMaxProblems) {
          return invalid("the lists name more than " + std::to_string(kMaxProblems) + " problems");
        }
        next.push_back(base);
        if (Status s = apply(option, value, next.back()); !s.ok()) return s;
      }
    }
    bases = std::move(next);
  }
  std::vector<Problem> problems;
  for (const std::string& text : read.shapes) {
    Sizes sizes;
    if (Status s = parse_sizes(text, sizes); !s.ok()) return s;
    for (const Problem& base : bases) {
      if (Status s = append_sizes(sizes, base, problems); !s.ok()) return s;
    }
  }
  return problems;
}

std::vector<std::string> split_words(std::string_view line) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;  // that ends what is quoted
  for (char c : line) {
    if (c == '#' && quote == 0) break;
    const bool blank = quote == 0 && (c == ' ' || c == '\t' || c == '\r' || c == '\n');
    if (!blank && !in_word) words.emplace_back();
    in_word = !blank;
    if (quote == 0 ? c == '\'' || c == '"' : c == quote) {
      quote = quote == 0 ? c : 0;
    } else if (!blank) {
      words.back() += c;
    }
  }
  return words;
}

std::string options_line(const Problem& problem) {
  const std::string kind =
      problem.mask_kind == MaskKind::kRandom ? "" : std::string(":") + word_of(kMaskKinds, problem.mask_kind);
  std::string line = options_in_words(problem.desc, kind, problem.cuts_rows) + program_line(problem);
  const auto add = [&](const char* option, const std::string& value = "") {
    line += std::string(" ") + option + (value.empty() ? "" : " ") + value;
  };
  if (problem.logsumexp) add("--logsumexp");
  if (problem.needs != kAllGradients) add("--needs", gradient_names(problem.needs));
  if (problem.accumulate) add("--accumulate");
  if (problem.delta) add("--delta");
  if (problem.repeated_grad_out != 0) add("--repeat-grad-out", std::to_string(problem.repeated_grad_out));
  if (problem.fill != Fill::kNormal) add("--fill", fill_name(problem.fill));
  if (problem.edges) add("--edges");
  const std::string layout_seed = problem.layout_seed != 0 ? ":" + std::to_string(problem.layout_seed) : "";
  if (problem.layout != Layout::kBshd || !layout_seed.empty())
    add("--layout", layout_name(problem.layout) + layout_seed);
  if (problem.seed != 1) add("--seed", std::to_string(problem.seed));
  return line;
}

std::string problem_line(const Problem& problem) { return sizes_in_words(problem.desc) + options_line(problem); }

std::string forward_command(const std::string& kernel, const Problem& problem) {
  return "polyhead verify " + problem_line(problem) + " --kernel " + kernel +
         (problem.name.empty() ? "" : "  # " + problem.name);
}

std::string backward_command(const std::string& kernel, const Problem& problem) {
  std::string line = forward_command(kernel, problem);
  return line.insert(line.find(" --kernel "), " --gradients");
}

Status set_problem_option(std::string_view option, std::string_view value, Problem& problem) {
  return apply(option, value, problem);
}

Status complete_operands(Problem& problem) {
  complete(problem.desc.attn_mask, problem.desc);
  complete(problem.desc.attn_bias, problem.desc);
  if (problem.desc.page_size > 0) problem.desc.num_pages = enough_pages(problem.desc);
  return complete_program(problem);
}

}  // namespace polyhead::testing
