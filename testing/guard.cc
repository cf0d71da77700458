#include "testing/guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace polyhead::testing {
namespace {

constexpr uint8_t kPoison = 0xff;  // NaN in every floating-point type, true as a bool, -1 as an integer
constexpr uint8_t kCanary = 0xa5;

// Calls visit(offset of the first element from `data`, count, stride), in elements, for runs of elements one stride apart:
// all of them, in row-major order of the dims.
template <class Visit>
void for_each_run(const Tensor& t, Visit visit) {
  if (t.num_elements() == 0) return;
  int inner = t.ndim;  // dims [inner, ndim) are one run
  int64_t count = 1, stride = 1;
  while (inner > 0 && (count == 1 || t.strides[inner - 1] == count * stride)) {
    --inner;
    if (count == 1) stride = t.strides[inner];
    count *= t.dims[inner];
  }
  int64_t index[Tensor::kMaxDims] = {};
  int64_t offset = 0;
  while (true) {
    visit(offset, count, stride);
    int d = inner - 1;
    for (; d >= 0; --d) {
      offset += t.strides[d];
      if (++index[d] < t.dims[d]) break;
      offset -= t.dims[d] * t.strides[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// Calls f(E()) with the unsigned integer of as many bytes as an element of `dtype` has.
template <class F>
void with_bits_type(DType dtype, F f) {
  switch (dtype_size_bytes(dtype)) {
    case 1: return f(uint8_t());
    case 2: return f(uint16_t());
    case 4: return f(uint32_t());
    default: return f(uint64_t());
  }
}

// Elements [0, count) of `from` to those of `to`, which may be some strides apart.
template <class E>
void copy_elements(E* to, int64_t to_stride, const E* from, int64_t from_stride, int64_t count) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(E));
    return;
  }
  for (int64_t n = 0; n < count; ++n) to[n * to_stride] = from[n * from_stride];
}

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Readable pages between two that nobody may touch. Those of operands that are gone serve the next of their size: to map
// and unmap them for each operand took 40 % of a test's time.
class Mappings {
 public:
  static Mappings& get() {
    static Mappings& all = *new Mappings;
    return all;
  }

  uint8_t* take(size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<uint8_t*>& free = free_[num_bytes];
    if (free.empty()) return map(num_bytes);
    uint8_t* mapping = free.back();
    free.pop_back();
    free_bytes_ -= num_bytes;
    return mapping;
  }

  void give_back(uint8_t* mapping, size_t num_bytes) {
    constexpr size_t kMostFreeBytes = 256 << 20;
    const std::lock_guard lock(mutex_);
    if (free_bytes_ + num_bytes > kMostFreeBytes) {
      munmap(mapping, num_bytes);
      return;
    }
    free_[num_bytes].push_back(mapping);
    free_bytes_ += num_bytes;
  }

 private:
  static uint8_t* map(size_t num_bytes) {
    void* mapping = mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const size_t inner = num_bytes - 2 * page_bytes();
    uint8_t* first = static_cast<uint8_t*>(mapping);
    if (mapping == MAP_FAILED || (inner > 0 && mprotect(first + page_bytes(), inner, PROT_READ | PROT_WRITE))) {
      std::perror("guarded memory");
      std::abort();
    }
    return first;
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<uint8_t*>> free_;  // by bytes
  size_t free_bytes_ = 0;
};

char running[2048];
struct sigaction previous[NSIG];

void report_crash(int signal, siginfo_t*, void*) {
  constexpr char kHead[] = "\ncrashed while running: ";
  (void)!write(STDERR_FILENO, kHead, sizeof kHead - 1);
  (void)!write(STDERR_FILENO, running, std::strlen(running));
  (void)!write(STDERR_FILENO, "\n", 1);
  sigaction(signal, &previous[signal], nullptr);  // the instruction runs again and faults for good
}

}  // namespace

GuardedBytes::GuardedBytes(size_t num_bytes, Guard guard, uint8_t fill) : size_(num_bytes) {
  if (guard == Guard::kNone) {
    heap_ = data_ = static_cast<uint8_t*>(std::aligned_alloc(64, (num_bytes + 64) / 64 * 64));
    if (data_ == nullptr) {
      std::perror("memory of an operand");
      std::abort();
    }
    std::memset(data_, fill, num_bytes);
    return;
  }
  const size_t page = page_bytes(), pages = (num_bytes + page - 1) / page;
  const size_t step = std::max<size_t>(std::bit_ceil(pages) / 8, 1);  // few sizes, so that mappings find a next operand
  const size_t inner = (pages + step - 1) / step * step * page;
  map_bytes_ = inner + 2 * page;
  map_ = Mappings::get().take(map_bytes_);
  data_ = map_ + page + (guard == Guard::kEnd ? inner - num_bytes : 0);
  std::memset(map_ + page, fill, inner);
}

GuardedBytes::GuardedBytes(GuardedBytes&& other) noexcept
    : map_(std::exchange(other.map_, nullptr)),
      map_bytes_(other.map_bytes_),
      heap_(std::exchange(other.heap_, nullptr)),
      data_(other.data_),
      size_(other.size_) {}

GuardedBytes::~GuardedBytes() {
  if (map_) Mappings::get().give_back(map_, map_bytes_);
  std::free(heap_);
}

Placed Placed::place(Tensor tensor, Guard guard, uint8_t fill) {
  int64_t first = 0, last = 0;  // reach from element [0, 0, ...], in elements
  for (int n = 0; n < tensor.ndim; ++n) {
    (tensor.strides[n] < 0 ? first : last) += (tensor.dims[n] - 1) * tensor.strides[n];
  }
  const size_t element = dtype_size_bytes(tensor.dtype);
  const size_t num_bytes = tensor.num_elements() == 0 ? 0 : static_cast<size_t>(last - first + 1) * element;
  GuardedBytes bytes(num_bytes, guard, fill);
  tensor.data = bytes.data() + (num_bytes == 0 ? 0 : static_cast<size_t>(-first) * element);
  return Placed(tensor, std::move(bytes));
}

void Placed::fill(const Array& array) {
  with_bits_type(tensor_.dtype, [&](auto bits) {
    using E = decltype(bits);
    E* const data = static_cast<E*>(tensor_.data);
    const E* from = reinterpret_cast<const E*>(array.bytes.data());
    for_each_run(tensor_, [&](int64_t first, int64_t count, int64_t stride) {
      copy_elements(data + first, stride, from, 1, count);
      from += count;
    });
  });
}

void Placed::set_elements(uint8_t byte) const {
  with_bits_type(tensor_.dtype, [&](auto bits) {
    std::memset(&bits, byte, sizeof bits);
    auto* const data = static_cast<decltype(bits)*>(tensor_.data);
    for_each_run(tensor_, [&](int64_t first, int64_t count, int64_t stride) {
      for (int64_t n = 0; n < count; ++n) data[first + n * stride] = bits;
    });
  });
}

Placed Placed::input(const Array& array, Layout layout, Guard guard, uint64_t gaps_seed) {
  if (!array.given()) return Placed(Tensor(), GuardedBytes(0, guard, kPoison));
  Tensor t = view(array);
  Random gaps(gaps_seed);
  set_strides(t, layout, OperandRole::kInput, &array, gaps);
  Placed placed = place(t, guard, kPoison);
  placed.fill(array);
  if (guard != Guard::kNone) {
    placed.before_.assign(placed.bytes_.data(), placed.bytes_.data() + placed.bytes_.size());
  }
  return placed;
}

Placed Placed::output(DType dtype, const std::vector<int64_t>& dims, Layout layout, Guard guard, OperandRole role,
                      uint64_t gaps_seed) {
  if (dims.empty()) return Placed(Tensor(), GuardedBytes(0, guard, kCanary));
  Tensor t;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), t.dims);
  Random gaps(gaps_seed);
  set_strides(t, layout, role, nullptr, gaps);
  Placed placed = place(t, guard, kCanary);
  placed.set_elements(kPoison);
  return placed;
}

Placed Placed::accumulator(const Array& array, Layout layout, Guard guard, OperandRole role, uint64_t gaps_seed) {
  Placed placed = output(array.dtype, array.dims, layout, guard, role, gaps_seed);
  if (array.given()) placed.fill(array);
  return placed;
}

bool Placed::unchanged() const {
  return before_.empty() || std::memcmp(before_.data(), bytes_.data(), before_.size()) == 0;
}

Array Placed::result(const char* name, std::vector<std::string>* faults) const {
  if (!tensor_.given()) return {};
  Array array(tensor_.dtype, std::vector<int64_t>(tensor_.dims, tensor_.dims + tensor_.ndim));
  int64_t unwritten = 0;
  with_bits_type(tensor_.dtype, [&](auto bits) {
    using E = decltype(bits);
    const E* const data = static_cast<const E*>(tensor_.data);
    E* to = reinterpret_cast<E*>(array.bytes.data());
    for_each_run(tensor_, [&](int64_t first, int64_t count, int64_t stride) {
      copy_elements(to, 1, data + first, stride, count);
      to += count;
    });
    unwritten = std::count(to - array.size(), to, static_cast<E>(-1));
  });
  set_elements(kCanary);
  if (unwritten > 0) faults->push_back(std::string(name) + ": " + std::to_string(unwritten) + " elements not written");
  const uint8_t* const begin = bytes_.data();
  const bool whole = bytes_.size() == 0 || (*begin == kCanary && std::memcmp(begin, begin + 1, bytes_.size() - 1) == 0);
  const int64_t gaps =
      whole ? 0 : std::count_if(begin, begin + bytes_.size(), [](uint8_t byte) { return byte != kCanary; });
  if (gaps > 0) faults->push_back(std::string(name) + ": " + std::to_string(gaps) + " bytes written between elements");
  return array;
}

void set_running(const std::string& what) {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = report_crash;
    action.sa_flags = SA_SIGINFO;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, &previous[signal]);
    return true;
  }();
  (void)installed;
  const size_t length = std::min(what.size(), sizeof running - 1);
  std::memcpy(running, what.data(), length);
  running[length] = 0;
}

}  // namespace polyhead::testing
