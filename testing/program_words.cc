#include "testing/program_words.h"

#include <algorithm>
#include <cmath>

#include "attention/words.h"
#include "testing/random.h"
#include "testing/words.h"

namespace polyhead::testing {
namespace {

constexpr const char* kForm = "NAME: DTYPE[SIZES] LOW..HIGH rising, as 'slope: f32[h]; doc: i64[b, k] 0..7 rising'";

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t first = std::min(text.find_first_not_of(kBlanks), text.size());
  text.remove_prefix(first);
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

bool is_name(std::string_view text) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return !text.empty() && is_letter(text[0]) &&
         std::all_of(text.begin(), text.end(), [&](char c) { return is_letter(c) || (c >= '0' && c <= '9'); });
}

bool is_integer(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

Status bad_captured(std::string_view tensor) {
  return invalid("--captured has " + quoted(tensor) + ", must be " + kForm);
}

// "q+k-1": a sum of integers and of the letters b, h, q, k. false: something else.
bool add_up(std::string_view sum, const AttentionDesc& desc, int64_t& total) {
  total = 0;
  for (size_t at = 0; at < sum.size();) {
    const int sign = sum[at] == '-' ? -1 : 1;
    if (sum[at] == '-' || sum[at] == '+') ++at;
    const size_t end = std::min(sum.find_first_of("+-", at), sum.size());
    const std::string_view term = trimmed(sum.substr(at, end - at));
    const auto number = parse_number<int64_t>(term);
    int64_t value = number.value_or(0);
    if (!number) {
      if (term.size() != 1 || std::string_view("bhqk").find(term[0]) == std::string_view::npos) return false;
      value = term[0] == 'b'   ? desc.batch
              : term[0] == 'h' ? desc.num_heads
              : term[0] == 'q' ? desc.seqlen_q
                               : desc.seqlen_k;
    }
    if (__builtin_add_overflow(total, sign * value, &total)) return false;
    at = end;
  }
  return !trimmed(sum).empty();
}

// "0..7 rising": what stands behind the sizes.
bool read_values(std::string_view text, DrawnCapture& tensor) {
  for (const std::string& word : split(text, ' ')) {
    if (word.empty()) continue;
    const size_t dots = word.find("..");
    if (word == "rising") {
      tensor.rising = true;
    } else if (dots != std::string::npos) {
      const auto low = parse_number<double>(std::string_view(word).substr(0, dots));
      const auto high = parse_number<double>(std::string_view(word).substr(dots + 2));
      if (!low || !high || !(*low <= *high) || !std::isfinite(*high - *low)) return false;
      if (is_integer(tensor.dtype) && (std::floor(*low) != *low || std::floor(*high) != *high)) return false;
      tensor.range = {*low, *high};
    } else {
      return false;
    }
  }
  return tensor.dtype != DType::kBool || (!tensor.range && !tensor.rising);
}

bool read_tensor(std::string_view text, DrawnCapture& tensor) {
  const size_t colon = std::min(text.find(':'), text.size()), open = text.find('['), close = text.find(']');
  if (open == std::string_view::npos || close == std::string_view::npos || colon > open || open > close) return false;
  tensor.name = trimmed(text.substr(0, colon));
  if (!is_name(tensor.name)) return false;
  const std::string_view dtype = trimmed(text.substr(colon + 1, open - colon - 1));
  const auto* known = std::find_if(std::begin(kCaptureDTypeWords), std::end(kCaptureDTypeWords),
                                   [&](const Word<DType>& word) { return dtype == word.text; });
  if (known == std::end(kCaptureDTypeWords)) return false;
  tensor.dtype = known->value;
  const std::string_view sizes = trimmed(text.substr(open + 1, close - open - 1));
  if (!sizes.empty()) tensor.sizes = split(sizes, ',');
  int64_t size = 0;
  for (std::string& sum : tensor.sizes) {
    sum = trimmed(sum);
    if (!add_up(sum, {}, size)) return false;
  }
  return tensor.sizes.size() <= ProgramStep::kMostOperands && read_values(text.substr(close + 1), tensor);
}

// A text's statements.
std::vector<std::string> statements(std::string_view text) {
  std::string lines(text);
  std::replace(lines.begin(), lines.end(), '\n', ';');
  std::vector<std::string> list;
  for (const std::string& statement : split(lines, ';')) {
    if (!trimmed(statement).empty()) list.emplace_back(trimmed(statement));
  }
  return list;
}

// The name that a statement declares, as "lts" of "lts: int"; "": none.
std::string_view declared_by(std::string_view statement) {
  const std::string_view name = trimmed(statement.substr(0, std::min(statement.find(':'), statement.size())));
  return is_name(name) && name.size() < statement.size() && statement.find('=') == std::string_view::npos ? name : "";
}

bool assigns(std::string_view statement) {
  const size_t equals = statement.find('=');
  return equals != std::string_view::npos && statement.substr(equals, 2) != "==" &&
         is_name(trimmed(statement.substr(0, equals)));
}

const char* type_word(DType dtype) { return dtype == DType::kBool ? "bool" : is_integer(dtype) ? "int" : "float"; }

// The statements of all words together.
std::string program_text(const Problem& problem) {
  std::vector<std::string> all = statements(problem.mask_text);
  if (!all.empty() && !assigns(all.back())) all.back() = "mask = " + all.back();
  std::vector<std::string> of_score = statements(problem.score_text);
  if (!of_score.empty() && !assigns(of_score.back())) of_score.back() = "score = " + of_score.back();
  all.insert(all.end(), of_score.begin(), of_score.end());
  std::string text;
  for (const DrawnCapture& tensor : problem.captured) {
    const auto declares = [&](const std::string& statement) { return declared_by(statement) == tensor.name; };
    if (std::none_of(all.begin(), all.end(), declares)) text += tensor.name + ": " + type_word(tensor.dtype) + "; ";
  }
  for (const std::string& statement : all) text += statement + (&statement == &all.back() ? "" : "; ");
  return text;
}

Status complete_capture(const DrawnCapture& tensor, const AttentionDesc& desc, CaptureShape& shape) {
  shape.dtype = tensor.dtype;
  shape.ndim = std::max(static_cast<int>(tensor.sizes.size()), 1);
  shape.dims[0] = 1;
  for (size_t n = 0; n < tensor.sizes.size(); ++n) {
    if (add_up(tensor.sizes[n], desc, shape.dims[n]) && shape.dims[n] >= 0) continue;
    return invalid("--captured: size " + quoted(tensor.sizes[n]) + " of " + tensor.name + " is " +
                   std::to_string(shape.dims[n]) + ", must be 0 or more");
  }
  return {};
}

Array draw(const DrawnCapture& tensor, const CaptureShape& shape, int64_t keys, Random random) {
  Array a(shape.dtype, {shape.dims, shape.dims + shape.ndim});
  const bool integer = is_integer(shape.dtype);
  const std::pair<double, double> range =
      tensor.range.value_or(std::pair<double, double>(0, static_cast<double>(std::max<int64_t>(keys - 1, 0))));
  a.fill([&]() -> double {
    if (shape.dtype == DType::kBool) return random.below(4) != 0;
    if (integer)
      return static_cast<double>(random.integer(static_cast<int64_t>(range.first), static_cast<int64_t>(range.second)));
    return tensor.range ? range.first + (range.second - range.first) * random.uniform() : random.normal();
  });
  const int64_t row = a.dims.back();
  std::vector<double> sorted(static_cast<size_t>(row));
  for (int64_t first = 0; tensor.rising && first < a.size(); first += row) {
    for (int64_t n = 0; n < row; ++n) sorted[static_cast<size_t>(n)] = a.at(first + n);
    std::sort(sorted.begin(), sorted.end());
    for (int64_t n = 0; n < row; ++n) a.set(first + n, sorted[static_cast<size_t>(n)]);
  }
  return a;
}

std::string text_of(const DrawnCapture& tensor) {
  std::string text = tensor.name + ": " + word_of(kCaptureDTypeWords, tensor.dtype) + "[";
  for (size_t n = 0; n < tensor.sizes.size(); ++n) text += (n == 0 ? "" : ", ") + tensor.sizes[n];
  text += "]";
  if (tensor.range) text += " " + number_word(tensor.range->first) + ".." + number_word(tensor.range->second);
  return text + (tensor.rising ? " rising" : "");
}

}  // namespace

Result<std::vector<DrawnCapture>> parse_captured(std::string_view text) {
  std::vector<DrawnCapture> tensors;
  for (const std::string& each : statements(text)) {
    DrawnCapture tensor;
    if (!read_tensor(each, tensor)) return bad_captured(each);
    const auto is_same = [&](const DrawnCapture& other) { return other.name == tensor.name; };
    if (std::any_of(tensors.begin(), tensors.end(), is_same)) {
      return invalid("--captured names " + tensor.name + " twice");
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

bool is_mask_dims(std::string_view value) {
  const std::string_view dims = value.substr(0, std::min(value.find(':'), value.size()));
  const auto is_size = [](char c) { return (c >= '0' && c <= '9') || std::string_view("bhqk,-+").find(c) < 7; };
  return dims.find(',') != std::string_view::npos && std::all_of(dims.begin(), dims.end(), is_size);
}

Status complete_program(Problem& problem) {
  AttentionDesc& desc = problem.desc;
  if (problem.score_text.empty() && problem.mask_text.empty()) {
    if (problem.captured.empty()) return {};
    return invalid("--captured is given without --score or --mask, which could read it");
  }
  const Result<SharedProgram> program = parse_program(program_text(problem));
  if (!program.ok()) return program.status();
  desc.program = *program;
  desc.captures.clear();
  std::vector<DrawnCapture> in_order;  // the program's
  for (const Capture& capture : desc.program->captures()) {
    const auto found = std::find_if(problem.captured.begin(), problem.captured.end(),
                                    [&](const DrawnCapture& tensor) { return tensor.name == capture.name; });
    if (found == problem.captured.end()) {
      return invalid("the program reads " + capture.name + ", which --captured does not tell: " + kForm);
    }
    if (static_cast<int>(found->sizes.size()) != capture.ndim) {
      return invalid("--captured: " + capture.name + " has " + std::to_string(found->sizes.size()) +
                     " dims, the program reads it with " + std::to_string(capture.ndim));
    }
    in_order.push_back(*found);
    if (Status s = complete_capture(*found, desc, desc.captures.emplace_back()); !s.ok()) return s;
  }
  problem.captured = std::move(in_order);
  return {};
}

std::string program_line(const Problem& problem) {
  if (problem.desc.program == nullptr) return "";
  std::string line = program_in_words(*problem.desc.program), tensors;
  for (const DrawnCapture& tensor : problem.captured) tensors += (tensors.empty() ? "" : "; ") + text_of(tensor);
  return line + (tensors.empty() ? "" : " --captured '" + tensors + "'");
}

std::vector<Array> draw_captures(const Problem& problem, std::span<const Tensor> given) {
  std::vector<Array> arrays(problem.captured.size());
  for (size_t n = 0; n < arrays.size(); ++n) {
    if (n < given.size() && given[n].given()) continue;
    arrays[n] = draw(problem.captured[n], problem.desc.captures[n], problem.desc.seqlen_k,
                     Random(problem.seed, streams::kCapturesData + n));
  }
  return arrays;
}

}  // namespace polyhead::testing
