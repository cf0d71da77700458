// What a command line asks for: problems, kernels, threads; and the help texts that all subcommands share.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "polyhead/executor.h"
#include "polyhead/status.h"
#include "problem.h"

namespace CLI {
class App;
}

namespace polyhead::tools {

// The problems of `words` (sizes and options), or of the suites' lines with the options of `words` behind each.
Result<std::vector<Problem>> select_problems(const std::vector<std::string>& words,
                                             const std::vector<std::string>& suites = {});

// Of exactly one problem.
Result<Problem> select_problem(const std::vector<std::string>& words);

// "best": "", which leaves the choice to the plan. "all": the kernels that this machine can run, without the reference
// unless it is alone. Else the names in a comma list, each known.
Result<std::vector<std::string>> select_kernels(std::string_view list);

// Names of all kernels of this build, also those that this machine cannot run.
std::vector<std::string> known_kernels();

// A number of threads and who runs them.
struct Threads {
  int count = 0;
  Executor* executor = nullptr;
  std::unique_ptr<Executor> own;
};

// "1,2"; empty: the library's default.
Result<std::vector<Threads>> select_threads(std::string_view list);

// --format and --json, which every command with a table has.
void add_format_option(CLI::App& app, std::string& format);

// A list of options, one a line.
std::string options_text(std::span<const ProblemOption> options);

// Text under a subcommand's options: the options of a problem, then two examples.
std::string help_footer(bool with_problem, std::string_view example, std::string_view another);

}  // namespace polyhead::tools
