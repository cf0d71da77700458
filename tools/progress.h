// A progress bar on stderr, for work longer than a second on a terminal; otherwise nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace polyhead::tools {

class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of the total are done; `current` is under way.
  void show(int64_t done, std::string_view current);
  void hide();  // until the next show(): for lines of other text

 private:
  using Clock = std::chrono::steady_clock;
  int64_t total_;
  bool on_terminal_, visible_ = false;
  Clock::time_point start_ = Clock::now(), next_;
};

}  // namespace polyhead::tools
