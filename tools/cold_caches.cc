#include "cold_caches.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

#include "machine.h"
#include "problem.h"

namespace polyhead::tools {
namespace {

// The first word of a file of sysfs, "" if there is none.
std::string word_of(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// CPUs of a list as "0-3,8-11".
int64_t count_cpus(const std::string& list) {
  int64_t count = 0;
  for (const std::string& range : split(list, ',')) {
    const auto first = parse_number<int64_t>(range.substr(0, range.find('-')));
    const auto last = parse_number<int64_t>(range.substr(range.find('-') + 1));
    if (first && last && *last >= *first) count += *last - *first + 1;
  }
  return count;
}

// Bytes of the last-level caches that num_usable_cpus() may fill: each is shared by a number of CPUs.
int64_t last_level_bytes() {
  int64_t bytes = 0;
  for (int index = 0; index < 8; ++index) {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string size = word_of(cache + "size");  // "32768K"
    if (size.size() < 2 || size.back() != 'K') continue;
    const auto kib = parse_number<int64_t>(size.substr(0, size.size() - 1));
    const int64_t sharing = std::max<int64_t>(count_cpus(word_of(cache + "shared_cpu_list")), 1);
    if (kib) bytes = std::max(bytes, *kib * 1024 * ((num_usable_cpus() + sharing - 1) / sharing));
  }
  return bytes > 0 ? bytes : int64_t{32} << 20;
}

struct Part {
  std::byte* memory;
  int64_t size_bytes;
  int count;
  unsigned char value;
};

}  // namespace

Result<ColdCaches> ColdCaches::create() {
  ColdCaches caches;
  caches.size_bytes_ = 2 * last_level_bytes();
  caches.memory_ = new_buffer(static_cast<size_t>(caches.size_bytes_));
  if (!caches.memory_) {
    return invalid("--cold needs " + std::to_string(caches.size_bytes_ >> 20) + " MiB of memory, which are not there");
  }
  return caches;
}

void ColdCaches::empty(Executor& executor) {
  Part part = {memory_.get(), size_bytes_, executor.num_threads(), ++value_};
  executor.parallel_for(
      part.count,
      [](void* context, int index) {
        const Part& p = *static_cast<const Part*>(context);
        const int64_t begin = p.size_bytes * index / p.count, end = p.size_bytes * (index + 1) / p.count;
        std::memset(p.memory + begin, p.value, static_cast<size_t>(end - begin));
      },
      &part);
}

}  // namespace polyhead::tools
