#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

namespace polyhead::tools {

using std::chrono::milliseconds;

Progress::Progress(int64_t total)
    : total_(std::max<int64_t>(total, 1)),
      on_terminal_(isatty(STDERR_FILENO) == 1),
      next_(start_ + milliseconds(1000)) {}

Progress::~Progress() { hide(); }

void Progress::hide() {
  if (!visible_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  visible_ = false;
}

void Progress::show(int64_t done, std::string_view current) {
  const Clock::time_point now = Clock::now();
  if (!on_terminal_ || now < next_) return;
  next_ = now + milliseconds(100);
  visible_ = true;
  constexpr int64_t kWidth = 24;
  const auto filled = static_cast<size_t>(std::clamp<int64_t>(done * kWidth / total_, 0, kWidth));
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - start_).count();
  // Short enough for a terminal of 80 columns: a wrapped line could not be overwritten.
  fmt::print(stderr, "\r[{}] {}/{} {}:{:02} {}\x1b[K", bar, done, total_, seconds / 60, seconds % 60,
             current.substr(0, 32));
  std::fflush(stderr);
}

}  // namespace polyhead::tools
