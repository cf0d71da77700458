#include "guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace polyhead::testing {
namespace {

constexpr uint8_t kPoison = 0xff;  // NaN in every floating-point type, true as a bool, -1 as an integer
constexpr uint8_t kCanary = 0xa5;

// The dims of a tensor from the outermost to the innermost in memory.
std::vector<int> memory_order(Layout layout, int ndim) {
  if (ndim == 4) {
    switch (layout) {
      case Layout::kBhsd: return {0, 2, 1, 3};
      case Layout::kSbhd: return {1, 0, 2, 3};
      case Layout::kTransposed: return {0, 2, 3, 1};
      default: return {0, 1, 2, 3};
    }
  }
  if (ndim == 3) {
    switch (layout) {
      case Layout::kBhsd:
      case Layout::kSbhd: return {1, 0, 2};
      case Layout::kTransposed: return {1, 2, 0};
      default: return {0, 1, 2};
    }
  }
  if (ndim == 2 && layout == Layout::kTransposed) return {1, 0};
  std::vector<int> order;
  for (int n = 0; n < ndim; ++n) order.push_back(n);
  return order;
}

// Whether all elements along dim n are the same.
bool repeats(const Array& a, size_t n) {
  const size_t element = dtype_size_bytes(a.dtype);
  size_t inner = element;
  for (size_t d = n + 1; d < a.dims.size(); ++d) inner *= static_cast<size_t>(a.dims[d]);
  const size_t outer = inner * static_cast<size_t>(a.dims[n]);
  for (size_t first = 0; first < a.bytes.size(); first += outer) {
    for (size_t at = first + inner; at < first + outer; at += inner) {
      if (std::memcmp(a.bytes.data() + first, a.bytes.data() + at, inner) != 0) return false;
    }
  }
  return true;
}

// Sets the strides of `t`, whose dims are set. `values` (null for an output) tells what the expanded layout may repeat.
void set_strides(Tensor& t, Layout layout, const Array* values, bool may_be_negative) {
  int64_t stride = layout == Layout::kPadded || (layout == Layout::kTransposed && t.ndim == 1) ? 2 : 1;
  const std::vector<int> order = memory_order(layout, t.ndim);
  for (size_t n = order.size(); n-- > 0;) {
    const int dim = order[n];
    const bool repeated =
        layout == Layout::kExpanded && values && t.dims[dim] > 1 && repeats(*values, static_cast<size_t>(dim));
    t.strides[dim] = repeated ? 0 : stride;
    if (!repeated) stride *= std::max<int64_t>(t.dims[dim], 1);
    if (layout == Layout::kPadded) stride += 3;
    if (layout == Layout::kQkv && t.ndim >= 3 && dim == t.ndim - 2) stride *= 3;  // heads of q, k and v in one row
    if (layout == Layout::kNegative && may_be_negative) t.strides[dim] = -t.strides[dim];
  }
  if (layout != Layout::kJunk) return;
  constexpr int64_t kJunkStrides[] = {0, 99990001, 7, 3331333, 1};
  for (int n = 0; n < t.ndim; ++n) {
    if (t.dims[n] == 1) t.strides[n] = values && n % 2 == 1 ? -kJunkStrides[n] : kJunkStrides[n];
  }
}

// Calls visit(offset of the element from `data`, in elements) in row-major order of the dims.
template <class Visit>
void for_each_element(const Tensor& t, Visit visit) {
  const int64_t count = t.num_elements();
  int64_t index[Tensor::kMaxDims] = {};
  int64_t offset = 0;
  for (int64_t n = 0; n < count; ++n) {
    visit(offset);
    for (int d = t.ndim - 1; d >= 0; --d) {
      offset += t.strides[d];
      if (++index[d] < t.dims[d]) break;
      offset -= t.dims[d] * t.strides[d];
      index[d] = 0;
    }
  }
}

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
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inner = (num_bytes + page - 1) / page * page;
  map_bytes_ = inner + 2 * page;
  void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || (inner > 0 && mprotect(static_cast<uint8_t*>(map) + page, inner, PROT_READ | PROT_WRITE))) {
    std::perror("guarded memory");
    std::abort();
  }
  map_ = static_cast<uint8_t*>(map);
  data_ = map_ + page + (guard == Guard::kEnd ? inner - num_bytes : 0);
  std::memset(map_ + page, fill, inner);
}

GuardedBytes::GuardedBytes(GuardedBytes&& other) noexcept
    : map_(std::exchange(other.map_, nullptr)), map_bytes_(other.map_bytes_), data_(other.data_), size_(other.size_) {}

GuardedBytes::~GuardedBytes() {
  if (map_) munmap(map_, map_bytes_);
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
  const size_t element = dtype_size_bytes(tensor_.dtype);
  uint8_t* data = static_cast<uint8_t*>(tensor_.data);
  const uint8_t* from = array.bytes.data();
  for_each_element(tensor_, [&](int64_t offset) {
    std::memcpy(data + offset * static_cast<int64_t>(element), from, element);
    from += element;
  });
}

Placed Placed::input(const Array& array, Layout layout, Guard guard) {
  if (!array.given()) return Placed(Tensor(), GuardedBytes(0, guard, kPoison));
  Tensor t = view(array);
  set_strides(t, layout, &array, true);
  Placed placed = place(t, guard, kPoison);
  placed.fill(array);
  placed.before_.assign(placed.bytes_.data(), placed.bytes_.data() + placed.bytes_.size());
  return placed;
}

Placed Placed::output(DType dtype, const std::vector<int64_t>& dims, Layout layout, Guard guard, Written kind) {
  if (dims.empty()) return Placed(Tensor(), GuardedBytes(0, guard, kCanary));
  Tensor t;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), t.dims);
  set_strides(t, layout, nullptr, kind == Written::kGradient);
  Placed placed = place(t, guard, kCanary);
  const int64_t element = static_cast<int64_t>(dtype_size_bytes(dtype));
  uint8_t* data = static_cast<uint8_t*>(placed.tensor_.data);
  for_each_element(placed.tensor_, [&](int64_t offset) {
    std::memset(data + offset * element, kPoison, static_cast<size_t>(element));
  });
  return placed;
}

Placed Placed::accumulator(const Array& array, Layout layout, Guard guard, Written kind) {
  Placed placed = output(array.dtype, array.dims, layout, guard, kind);
  if (array.given()) placed.fill(array);
  return placed;
}

bool Placed::unchanged() const {
  return before_.empty() || std::memcmp(before_.data(), bytes_.data(), before_.size()) == 0;
}

Array Placed::result(const char* name, std::vector<std::string>* faults) const {
  if (!tensor_.given()) return {};
  Array array(tensor_.dtype, std::vector<int64_t>(tensor_.dims, tensor_.dims + tensor_.ndim));
  const int64_t element = static_cast<int64_t>(dtype_size_bytes(tensor_.dtype));
  uint8_t* data = static_cast<uint8_t*>(tensor_.data);
  uint8_t* to = array.bytes.data();
  int64_t unwritten = 0;
  for_each_element(tensor_, [&](int64_t offset) {
    uint8_t* from = data + offset * element;
    unwritten += std::all_of(from, from + element, [](uint8_t byte) { return byte == kPoison; });
    std::memcpy(to, from, static_cast<size_t>(element));
    to += element;
    std::memset(from, kCanary, static_cast<size_t>(element));
  });
  if (unwritten > 0) faults->push_back(std::string(name) + ": " + std::to_string(unwritten) + " elements not written");
  const uint8_t* end = bytes_.data() + bytes_.size();
  const int64_t gaps =
      std::count_if(static_cast<const uint8_t*>(bytes_.data()), end, [](uint8_t b) { return b != kCanary; });
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
