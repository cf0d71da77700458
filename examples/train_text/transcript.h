// What is printed, kept to be written to a file under the facts of the machine.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "polyhead/status.h"
#include "tools/file.h"
#include "tools/machine.h"

namespace polyhead::demo {

class Transcript {
 public:
  void print(const std::string& text) {
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
    text_ += text;
  }

  /// As Markdown.
  Status write(const std::string& path, const std::string& command) const {
    std::string page = fmt::format("# A small transformer trained by polyhead\n\n`{}`\n\n", command);
    for (const auto& [name, value] : tools::machine_facts()) page += fmt::format("- {}: {}\n", name, value);
    page += "\n```\n" + text_ + "```\n";
    auto file = tools::OutputFile::create(path, /*overwrite=*/true);
    if (!file.ok()) return file.status();
    Status status = file->write(page.data(), page.size());
    return status.ok() ? file->commit() : status;
  }

 private:
  std::string text_;
};

}  // namespace polyhead::demo
