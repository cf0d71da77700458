#include "text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

#include "testing/random.h"
#include "tools/file.h"

namespace polyhead::demo {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostBytes = 256 << 20;
constexpr size_t kLongestStretch = 16 << 10;
constexpr size_t kEveryTenth = 10;

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

Status append_file(const std::string& path, std::vector<uint8_t>& bytes) {
  const auto file = tools::InputFile::open(path);
  if (!file.ok()) return file.status();
  const size_t before = bytes.size();
  if (file->size_bytes() > kMostBytes - before) {
    return invalid(fmt::format("{}: more than {} bytes of text", tools::printable(path), kMostBytes));
  }
  bytes.resize(before + file->size_bytes());
  return file->read_at(0, bytes.data() + before, bytes.size() - before);
}

bool is_text(const fs::path& path) {
  constexpr std::string_view kEndings[] = {".md", ".txt", ".h", ".cc", ".c", ".py", ".cmake"};
  return std::find(std::begin(kEndings), std::end(kEndings), path.extension().string()) != std::end(kEndings);
}

bool is_passed_over(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return name == "build" || name == "demo" || (!name.empty() && name[0] == '.');
}

// Sorted, so that the text is the same wherever it is read.
Result<std::vector<std::string>> text_files(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, error);
  for (; !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    const fs::file_status status = at->symlink_status(error);
    if (error) break;
    if (fs::is_directory(status) && is_passed_over(at->path())) at.disable_recursion_pending();
    if (fs::is_regular_file(status) && is_text(at->path())) found.push_back(at->path().string());
  }
  if (error) return invalid(fmt::format("cannot read {}: {}", tools::printable(folder.string()), error.message()));
  std::sort(found.begin(), found.end());
  return found;
}

void append_sequence(Batch& batch, const std::vector<uint8_t>& from, int64_t start, int64_t context) {
  const auto first = from.begin() + start;
  batch.inputs.insert(batch.inputs.end(), first, first + context);
  batch.targets.insert(batch.targets.end(), first + 1, first + context + 1);
}

}  // namespace

Result<Text> read_text(const std::string& path, int64_t context) {
  Text text;
  text.name = tools::printable(path);
  std::vector<uint8_t> bytes;
  std::error_code error;
  std::vector<std::string> files = {path};
  if (fs::is_directory(path, error)) {
    auto found = text_files(path);
    if (!found.ok()) return found.status();
    files = std::move(*found);
  }
  text.num_files = files.size();
  for (const std::string& file : files) {
    if (Status status = append_file(file, bytes); !status.ok()) return status;
  }
  const size_t stretch = std::clamp<size_t>(bytes.size() / (2 * kEveryTenth), 1, kLongestStretch);
  for (size_t start = 0; start < bytes.size(); start += stretch) {
    const bool held_out = start / stretch % kEveryTenth == kEveryTenth - 1;
    const auto first = bytes.begin() + static_cast<int64_t>(start);
    const auto last = bytes.begin() + static_cast<int64_t>(std::min(start + stretch, bytes.size()));
    std::vector<uint8_t>& to = held_out ? text.validation : text.train;
    to.insert(to.end(), first, last);
  }
  const int64_t least = context + 1;
  if (static_cast<int64_t>(text.validation.size()) < least || static_cast<int64_t>(text.train.size()) < least) {
    return invalid(fmt::format("{}: {} bytes of text are too few: {} to train on and {} held out, each must be {}",
                               tools::printable(path), bytes.size(), text.train.size(), text.validation.size(), least));
  }
  return text;
}

Batch training_batch(const Text& text, const ModelDesc& desc, uint64_t seed, int64_t step) {
  testing::Random random(seed, static_cast<uint64_t>(step));
  Batch batch;
  for (int64_t b = 0; b < desc.batch; ++b) {
    const int64_t start = random.below(static_cast<int64_t>(text.train.size()) - desc.context);
    append_sequence(batch, text.train, start, desc.context);
  }
  return batch;
}

std::vector<Batch> validation_batches(const Text& text, const ModelDesc& desc, int64_t most) {
  const int64_t last = static_cast<int64_t>(text.validation.size()) - desc.context - 1;
  const int64_t count = std::clamp<int64_t>(last / desc.num_rows(), 1, most) * desc.batch;
  std::vector<Batch> batches;
  for (int64_t n = 0; n < count; ++n) {
    if (n % desc.batch == 0) batches.emplace_back();
    append_sequence(batches.back(), text.validation, count > 1 ? n * last / (count - 1) : 0, desc.context);
  }
  return batches;
}

double bigram_loss(const Text& text, const std::vector<Batch>& batches) {
  std::vector<double> pairs(static_cast<size_t>(kNumBytes * kNumBytes)), singles(static_cast<size_t>(kNumBytes));
  for (size_t i = 0; i + 1 < text.train.size(); ++i) {
    pairs[static_cast<size_t>(text.train[i] * kNumBytes + text.train[i + 1])] += 1;
    singles[text.train[i]] += 1;
  }
  double best = std::numeric_limits<double>::infinity();
  for (const double alpha : {1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001}) {
    double sum = 0, count = 0;
    for (const Batch& batch : batches) {
      for (size_t i = 0; i < batch.inputs.size(); ++i) {
        const double pair = pairs[static_cast<size_t>(batch.inputs[i] * kNumBytes + batch.targets[i])];
        const double single = singles[batch.inputs[i]];
        sum -= std::log((pair + alpha) / (single + static_cast<double>(kNumBytes) * alpha));
        count += 1;
      }
    }
    best = std::min(best, sum / count);
  }
  return best;
}

}  // namespace polyhead::demo
