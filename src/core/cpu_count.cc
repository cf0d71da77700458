#include "core/cpu_count.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

namespace polyhead {
namespace {

// What the file directory/name holds, as far as there is room; "" if it cannot be read.
void read_text(const char* directory, const char* name, char* text, size_t size) {
  char path[PATH_MAX];
  text[0] = '\0';
  if (std::snprintf(path, sizeof path, "%s/%s", directory, name) >= static_cast<int>(sizeof path)) return;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  size_t length = 0;
  ssize_t got = 0;
  while (length + 1 < size && (got = read(file, text + length, size - 1 - length)) > 0) length += got;
  text[length] = '\0';
  close(file);
}

// 0, no limit, if the directory tells of none.
int quota_in(const char* directory) {
  char text[64], period[32];
  read_text(directory, "cpu.max", text, sizeof text);  // version 2
  if (text[0] != '\0') return cpus_of_quota(text);
  read_text(directory, "cpu.cfs_quota_us", text, sizeof text - sizeof period);
  read_text(directory, "cpu.cfs_period_us", period, sizeof period);
  return cpus_of_quota(std::strcat(text, period));  // each ends in a newline
}

int num_cpus_of_affinity() {
#if defined(__linux__)
  // The kernel refuses a set with room for fewer CPUs than it was built for.
  for (int room = CPU_SETSIZE; room <= 1 << 20; room *= 4) {
    cpu_set_t* cpus = CPU_ALLOC(room);
    if (cpus == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(room);
    const int count = sched_getaffinity(0, size, cpus) == 0 ? CPU_COUNT_S(size, cpus) : 0;
    CPU_FREE(cpus);
    if (count > 0) return count;
  }
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return static_cast<int>(std::clamp<long>(online, 1, INT_MAX));
}

}  // namespace

int cpus_of_quota(const char* text) {
  long long quota = 0, period = 0;
  if (std::sscanf(text, "%lld %lld", &quota, &period) != 2 || quota <= 0 || period <= 0) return 0;
  return static_cast<int>(std::min<long long>((quota - 1) / period + 1, INT_MAX));
}

bool find_cgroup(const char* text, const char* controller, char* path, size_t size) {
  std::snprintf(path, size, "/");
  const size_t name_length = std::strlen(controller);
  for (const char* line = text; line != nullptr && *line != '\0';) {
    const char* end = line + std::strcspn(line, "\n");
    const char* names = static_cast<const char*>(std::memchr(line, ':', end - line));
    const char* found =
        names == nullptr ? nullptr : static_cast<const char*>(std::memchr(names + 1, ':', end - names - 1));
    for (const char* name = names; found != nullptr && name < found;) {  // at the ':' or ',' before a name
      ++name;
      const char* next = name + std::strcspn(name, ",:");
      if (static_cast<size_t>(next - name) == name_length && std::memcmp(name, controller, name_length) == 0) {
        const size_t length = end - found - 1;
        if (length == 0 || length >= size || found[1] != '/') return false;
        std::memcpy(path, found + 1, length);
        path[length] = '\0';
        return true;
      }
      name = next;
    }
    line = *end == '\0' ? nullptr : end + 1;
  }
  return false;
}

int cpus_of_cgroups(const char* root, const char* text) {
  constexpr struct {
    const char *controller, *hierarchy;
  } kMounts[] = {{"", ""}, {"cpu", "/cpu"}, {"cpu", "/cpu,cpuacct"}};
  int least = 0;
  for (const auto& mount : kMounts) {
    char path[PATH_MAX / 2], directory[PATH_MAX];
    find_cgroup(text, mount.controller, path, sizeof path);
    // A container may see the host's path where its own cgroup is mounted: what is not there says nothing.
    for (;;) {
      const int length = std::snprintf(directory, sizeof directory, "%s%s%s", root, mount.hierarchy, path);
      const int quota = length < static_cast<int>(sizeof directory) ? quota_in(directory) : 0;
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
      char* slash = std::strrchr(path, '/');
      if (slash == nullptr) break;
      *slash = '\0';
    }
  }
  return least;
}

int num_cpus_allowed() {
  int allowed = num_cpus_of_affinity();
#if defined(__linux__)
  char text[PATH_MAX];
  read_text("/proc/self", "cgroup", text, sizeof text);
  const int quota = cpus_of_cgroups("/sys/fs/cgroup", text);
  if (quota > 0) allowed = std::min(allowed, quota);
#endif
  return allowed;
}

}  // namespace polyhead
