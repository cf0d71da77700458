// polyhead: attention from the command line.
#include <fmt/format.h>

#include <exception>
#include <new>
#include <string>
#include <vector>

#include "command.h"
#include "machine.h"

namespace {

constexpr int kBadInput = 2;  // the exit code for what cannot be asked or read; 1 is a failed check

int run_command(int argc, char** argv) {
  using namespace polyhead::tools;
  CLI::App app("Multi-head attention: compute, time and check it.", "polyhead");
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  const std::vector<Command> commands = {add_run(app),     add_bench(app),   add_verify(app),
                                         add_explain(app), add_kernels(app), add_info(app)};
  app.footer("polyhead COMMAND --help tells more. Exit codes: 0 done, 1 a check failed, 2 bad input.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadInput;
  }
  for (const Command& command : commands) {
    if (!command.app->parsed()) continue;
    const auto code = command.run();
    if (code.ok()) return *code;
    fmt::print(stderr, "polyhead {}: {}\n", command.app->get_name(), code.status().message());
    return kBadInput;
  }
  return kBadInput;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run_command(argc, argv);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "polyhead: not enough memory; choose smaller sizes\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "polyhead: {}\n", error.what());
  }
  return kBadInput;
}
