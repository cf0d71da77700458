// Runs the command as its users do, in a folder of its own.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "left_out.h"

namespace polyhead::testing {

struct Ran {
  int code = -1;
  std::string out, err;
};

class ToolsCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("POLYHEAD_KERNEL");
    unsetenv("POLYHEAD_THREADS");
    folder_ = std::filesystem::temp_directory_path() / ("polyhead_command_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string read(const std::string& file) const {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  // `arguments` as typed into a shell.
  Ran run(const std::string& arguments, const std::string& environment = "") const {
    const std::string line =
        environment + " '" POLYHEAD_COMMAND "' " + arguments + " 2> '" + path("stderr") + "' < /dev/null";
    Ran ran;
    FILE* pipe = popen(line.c_str(), "r");
    if (pipe == nullptr) return ran;
    std::array<char, 4096> chunk;
    for (size_t got; (got = fread(chunk.data(), 1, chunk.size(), pipe)) > 0;) ran.out.append(chunk.data(), got);
    const int status = pclose(pipe);
    ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    ran.err = read(path("stderr"));
    return ran;
  }

  nlohmann::json run_json(const std::string& arguments) const {
    const Ran ran = run(arguments + " --format json");
    EXPECT_EQ(ran.code, 0) << arguments << "\n" << ran.err;
    return nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
  }

  std::filesystem::path folder_;
};

// Whether a row of `verify` says that a kernel by name does not take the problem, which is counted.
inline bool leaves_out(const nlohmann::json& row) {
  if (row["result"] != "refused") return false;
  left_out().add(row["note"].get<std::string>());
  return true;
}

}  // namespace polyhead::testing
