// How many CPUs this process may use.
#pragma once

#include <cstddef>

namespace polyhead {

// The CPUs this process may run on, or fewer where a container's quota of CPU time is less; at least 1.
int num_cpus_allowed();

// What a cgroup's quota and period mean in CPUs, rounded up: "150000 100000" is 2. 0, no limit: "max 100000" (version 2),
// "-1 100000" (version 1), and what cannot be read.
int cpus_of_quota(const char* text);

// The path behind a controller's name in the text of /proc/self/cgroup, with its '/' in front: of "4:cpu,cpuacct:/a" and
// "cpu" it is "/a"; of "0::/b" (version 2) and "" it is "/b". False, and "/", if there is none or no room for it.
bool find_cgroup(const char* text, const char* controller, char* path, size_t size);

// The least quota, in CPUs, of a process whose /proc/self/cgroup holds `text`: of its cgroup and all above it, up to
// `root` ("/sys/fs/cgroup"). 0: no limit.
int cpus_of_cgroups(const char* root, const char* text);

}  // namespace polyhead
