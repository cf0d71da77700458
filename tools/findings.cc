#include "findings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "testing/words.h"

namespace polyhead::tools {
namespace {

Cell threads_cell(int threads) { return threads > 0 ? Cell(int64_t{threads}) : Cell(); }

}  // namespace

Findings::Findings(bool list_all) : list_all_(list_all) {
  report_.columns = {"problem", "kernel", "threads",      "output", "largest_error",
                     "allowed", "rmse",   "allowed_rmse", "result", "note"};
}

void Findings::add_refused(const std::string& line, const std::string& kernel, int threads, const std::string& reason) {
  ++num_refused_;
  if (first_refusal_.empty()) first_refusal_ = reason;
  if (!list_all_) return;
  report_.rows.push_back({line, kernel, threads_cell(threads), {}, {}, {}, {}, {}, std::string("refused"), reason});
}

void Findings::add(const std::string& line, const std::string& kernel, int threads,
                   const std::vector<Verdict>& verdicts, const std::string& repeat) {
  for (const Verdict& verdict : verdicts) {
    if (verdict.passed && !list_all_) continue;
    report_.rows.push_back({line, kernel, threads_cell(threads), verdict.output, verdict.error, verdict.allowed,
                            verdict.rmse, verdict.allowed_rmse, std::string(verdict.passed ? "PASS" : "FAIL"),
                            verdict.fault});
  }
  const bool passed = std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.passed; });
  ++(passed ? num_passed_ : num_failed_);
  if (!passed) fmt::print(stderr, "FAIL, repeat with: {}\n", repeat);
}

void Findings::add_fact(std::string name, std::string value) { facts_.emplace_back(std::move(name), std::move(value)); }

Result<int> Findings::finish(const std::string& verified, Format format) {
  report_.facts = {{"verified", verified},
                   {"passed", fmt::format("{}", num_passed_)},
                   {"failed", fmt::format("{}", num_failed_)},
                   {"refused", fmt::format("{}", num_refused_)}};
  report_.facts.insert(report_.facts.end(), facts_.begin(), facts_.end());
  if (!list_all_ && report_.rows.empty()) report_.columns.clear();
  fmt::print("{}", report_.text(format));
  if (num_passed_ + num_failed_ == 0) return invalid("nothing was verified: " + first_refusal_);
  return num_failed_ > 0 ? 1 : 0;
}

}  // namespace polyhead::tools
