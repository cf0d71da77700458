// What a verification found: how much passed, and a row for each output that was judged.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "polyhead/status.h"
#include "problem.h"
#include "report.h"
#include "testing/errors.h"

namespace polyhead::tools {

class Findings {
 public:
  // list_all: what passed and what was refused has rows too.
  explicit Findings(bool list_all);

  // `line` names the problem. `threads`: 0 where they do not matter.
  void add_refused(const std::string& line, const std::string& kernel, int threads, const std::string& reason);
  // `repeat`: the command line that judges this problem once more, for stderr if it failed.
  void add(const std::string& line, const std::string& kernel, int threads, const std::vector<Verdict>& verdicts,
           const std::string& repeat);
  void add_fact(std::string name, std::string value);  // stands behind the counts

  int num_failed() const { return num_failed_; }

  // Prints the report. `verified`: "500 problems". The command's exit code; an error if there was nothing to judge.
  Result<int> finish(const std::string& verified, Format format);

 private:
  bool list_all_;
  Report report_;
  std::vector<std::pair<std::string, std::string>> facts_;
  int num_passed_ = 0, num_failed_ = 0, num_refused_ = 0;
  std::string first_refusal_;
};

}  // namespace polyhead::tools
