// polyhead: attention from the command line.
#include <fmt/format.h>

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "command.h"
#include "file.h"
#include "machine.h"

namespace {

constexpr int kBadInput = 2;  // the exit code for what cannot be asked or read; 1 is a failed check

// Says in the usage line that sizes and options of problems follow.
class Formatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, name);
    if (app->get_allow_extras()) usage.insert(usage.find_last_not_of('\n') + 1, " PROBLEM...");
    return usage;
  }
};

int run_command(int argc, char** argv) {
  using namespace polyhead::tools;
  CLI::App app("Multi-head attention: compute, time and check it.", "polyhead");
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  app.formatter(std::make_shared<Formatter>());
  app.get_formatter()->column_width(34);
  const std::vector<Command> commands = {add_run(app),     add_bench(app),   add_compare(app),
                                         add_verify(app),  add_mha(app),     add_fuse(app),
                                         add_explain(app), add_kernels(app), add_info(app)};
  app.footer("polyhead COMMAND --help tells more. Exit codes: 0 done, 1 a check failed, 2 bad input.");
  std::string known;
  bool is_known = argc < 2 || argv[1][0] == '-';
  for (const Command& command : commands) {
    known += (known.empty() ? "" : ", ") + command.app->get_name();
    is_known = is_known || command.app->get_name() == argv[1];
  }
  if (!is_known) {
    fmt::print(stderr, "polyhead: unknown command {}; known are {}\n", printable(argv[1]), known);
    return kBadInput;
  }
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
