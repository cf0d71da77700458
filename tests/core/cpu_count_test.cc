#include "core/cpu_count.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace polyhead {
namespace {

TEST(CpuCount, QuotasAreRoundedUp) {
  const struct {
    const char* text;
    int expected;
  } rows[] = {{"max 100000\n", 0},
              {"200000 100000\n", 2},
              {"150000 100000\n", 2},
              {"1 100000", 1},
              {"-1\n100000\n", 0},
              {"250000\n100000\n", 3},
              {"0 100000", 0},
              {"100000 0", 0},
              {"100000 -1", 0},
              {"100000", 0},
              {"", 0},
              {"a b", 0},
              {"99999999999999 1", 2147483647}};
  for (const auto& row : rows) EXPECT_EQ(cpus_of_quota(row.text), row.expected) << row.text;
}

TEST(CpuCount, ThePathOfACgroup) {
  const char* const both = "12:cpuset:/set\n4:cpu,cpuacct:/docker/a\n3:cpuacct:/b\n0::/unified\n";
  const struct {
    const char *text, *controller, *expected;  // expected: null where there is none
  } rows[] = {{both, "cpu", "/docker/a"},
              {both, "", "/unified"},
              {both, "cpuset", "/set"},
              {both, "memory", nullptr},
              {"4:cpuacct,cpu:/c", "cpu", "/c"},
              {"0::/a:b", "", "/a:b"},
              {"0::/far/too/long/for/the/room/here", "", nullptr},
              {"0::", "", nullptr},
              {"0:", "", nullptr},
              {":::\n\n", "cpu", nullptr},
              {"", "", nullptr}};
  for (const auto& row : rows) {
    char path[24];
    EXPECT_EQ(find_cgroup(row.text, row.controller, path, sizeof path), row.expected != nullptr) << row.text;
    EXPECT_STREQ(path, row.expected == nullptr ? "/" : row.expected) << row.text;
  }
}

class Cgroups : public testing::Test {
 protected:
  Cgroups() : root_(std::filesystem::temp_directory_path() / ("polyhead_cgroups_" + std::to_string(getpid()))) {}
  ~Cgroups() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  int cpus(const std::string& text) const { return cpus_of_cgroups(root_.c_str(), text.c_str()); }

 private:
  std::filesystem::path root_;
};

TEST_F(Cgroups, TheLeastOnTheWayUpCounts) {
  EXPECT_EQ(cpus("0::/a/b\n"), 0);
  write("cpu.max", "max 100000\n");
  EXPECT_EQ(cpus("0::/a/b\n"), 0);
  write("a/cpu.max", "300000 100000\n");
  EXPECT_EQ(cpus("0::/a/b\n"), 3);
  write("a/b/cpu.max", "800000 100000\n");
  EXPECT_EQ(cpus("0::/a/b\n"), 3);
  write("a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpus("0::/a/b\n"), 1);
  EXPECT_EQ(cpus("0::/a\n"), 3);
  EXPECT_EQ(cpus("0::/elsewhere\n"), 0);
}

TEST_F(Cgroups, AContainerThatSeesTheHostsPath) {
  write("cpu.max", "200000 100000\n");
  EXPECT_EQ(cpus("0::/system.slice/docker-1.scope\n"), 2);
  EXPECT_EQ(cpus("0::/\n"), 2);
  EXPECT_EQ(cpus(""), 2);
}

TEST_F(Cgroups, Version1) {
  write("cpu,cpuacct/docker/a/cpu.cfs_quota_us", "350000\n");
  write("cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000\n");
  write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus("4:cpu,cpuacct:/docker/a\n0::/\n"), 4);
  EXPECT_EQ(cpus("4:cpu,cpuacct:/docker\n"), 0);
  write("cpu/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(cpus("4:cpu,cpuacct:/docker/a\n"), 4);  // a quota without its period says nothing
  write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpus("4:cpu,cpuacct:/docker/a\n"), 1);
}

TEST(CpuCount, AtMostWhatTheProcessMayRunOn) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(num_cpus_allowed(), 1);
  EXPECT_LE(num_cpus_allowed(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(num_cpus_allowed(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace polyhead
