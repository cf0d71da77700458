// The subcommands of `polyhead`.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "polyhead/status.h"

namespace polyhead::tools {

// `app` has parsed the command line when `run` is called; the answer is the exit code: 0, or 1 if a check failed.
struct Command {
  CLI::App* app = nullptr;
  std::function<Result<int>()> run;
};

Command add_run(CLI::App& root);
Command add_bench(CLI::App& root);
Command add_verify(CLI::App& root);
Command add_mha(CLI::App& root);
Command add_explain(CLI::App& root);
Command add_kernels(CLI::App& root);
Command add_fuse(CLI::App& root);
Command add_compare(CLI::App& root);
Command add_info(CLI::App& root);

}  // namespace polyhead::tools
