#include "device_of_test.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <vector>

#include "../cuda/reach.h"
#include "cache/append.h"
#include "contract/kernel.h"
#include "contract/linear.h"
#include "contract/sequences.h"
#include "core/sentence.h"
#include "device_under_test.h"
#include "reference/attention.h"
#include "reference/linear.h"

namespace polyhead {
namespace testing {
namespace {

// Pages that nobody can touch, but while a kernel runs.
struct Pages {
  char* start = nullptr;
  size_t bytes = 0;
};

struct State {
  std::list<Pages> pages;
  int calls = 0, fails = -1;
} state;

void set_open(bool open) {
  for (const Pages& each : state.pages) mprotect(each.start, each.bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

bool is_lent(const void* data) {
  const char* const at = static_cast<const char*>(data);
  for (const Pages& each : state.pages) {
    if (at >= each.start && at < each.start + each.bytes) return true;
  }
  return false;
}

// A verb of the device's kernel.
template <class Compute>
Status computed(const Run& run, const Compute& compute) {
  ++state.calls;
  if (state.fails >= 0 && state.fails-- == 0) return {StatusCode::kInternal, "the device of the test fails"};
  if (run.stream != stream_of_test()) return {StatusCode::kInternal, "a step runs on another stream"};
  set_open(true);
  Status status = compute();
  set_open(false);
  return status;
}

class LoanOfTest : public Loan {
 public:
  ~LoanOfTest() override { give_back(); }

  void lend(Tensor& t, bool) override {
    t.device = Device::kCuda;
    if (!t.given() || t.num_elements() == 0) return;
    const Reach reach = reach_of(t);
    t.data = copied(static_cast<char*>(t.data) + reach.first, reach.bytes()) - reach.first;
  }
  void* lend(void* memory, size_t bytes, bool) override { return bytes == 0 ? memory : copied(memory, bytes); }
  void* lend_scratch(void* memory, size_t bytes) override { return lend(memory, bytes, false); }
  std::string finish() override {
    give_back();
    return "";
  }

 private:
  struct Part {
    void* host;
    size_t bytes;
    std::list<Pages>::iterator pages;
  };

  // As misaligned as it is on the host.
  char* copied(void* host, size_t bytes) {
    const size_t shift = reinterpret_cast<uintptr_t>(host) % 64;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), all = (bytes + shift + page - 1) / page * page;
    void* const map = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    state.pages.push_back({static_cast<char*>(map), all});
    parts_.push_back({host, bytes, std::prev(state.pages.end())});
    std::memcpy(static_cast<char*>(map) + shift, host, bytes);
    mprotect(map, all, PROT_NONE);
    return static_cast<char*>(map) + shift;
  }

  void give_back() {
    for (const Part& part : parts_) {
      mprotect(part.pages->start, part.pages->bytes, PROT_READ);
      std::memcpy(part.host, part.pages->start + reinterpret_cast<uintptr_t>(part.host) % 64, part.bytes);
      munmap(part.pages->start, part.pages->bytes);
      state.pages.erase(part.pages);
    }
    parts_.clear();
  }

  std::list<Part> parts_;
};

const bool kUnderTest = [] {
  device_under_test = {Device::kCuda, "cuda_of_test", stream_of_test,
                       [] { return std::unique_ptr<Loan>(new LoanOfTest); }};
  return true;
}();

}  // namespace

void* stream_of_test() {
  static char stream;
  return &stream;
}

int take_calls() { return std::exchange(state.calls, 0); }

void fail_call(int index) { state.fails = index; }

}  // namespace testing

using testing::computed;

extern const Kernel kDeviceOfTest;
const Kernel kDeviceOfTest = {
    "cuda_of_test",
    Device::kCuda,
    [](const AttentionDesc& desc) { return kReference.why_not(desc); },
    [](const AttentionDesc& desc, int threads) { return kReference.workspace_bytes(desc, threads); },
    [](const AttentionDesc& desc, int threads) { return kReference.backward_workspace_bytes(desc, threads); },
    [](const AttentionDesc& desc, const ForwardArgs& args, const Run& run) {
      return computed(run, [&] { return kReference.forward(desc, args, run); });
    },
    [](const AttentionDesc& desc, const BackwardArgs& args, const Run& run) {
      return computed(run, [&] { return kReference.backward(desc, args, run); });
    }};

namespace linear {
namespace {

// The reference's verb, on the device.
template <auto verb>
constexpr auto on_device = [](const auto&... args) {
  const Run& run = std::get<sizeof...(args) - 1>(std::tie(args...));
  return computed(run, [&] { return (kReference.*verb)(args...); });
};

Status check_place(std::span<const NamedMemory> memory, const Run& run) {
  if (run.stream != testing::stream_of_test()) return invalid("stream is not a stream of CUDA here");
  for (const auto& [name, data] : memory) {
    if (!testing::is_lent(data)) return invalid(sentence(name, " lies in the host's memory"));
  }
  return {};
}

// What lies in [batch, time], or [batch] without a time.
int64_t number_at(const Tensor& t, int64_t b, int64_t time = 0) {
  Tensor row = t;
  row.ndim = 1, row.strides[0] = 1;
  return integer_at(row, b * t.strides[0] + time * t.strides[1]);
}

// As the host does it, but that numbers out of range are no errors.
void append_here(const KvCacheDesc& cache, const AppendArgs& args) {
  const Tensor& any = args.key.given() ? args.key : args.query;
  const int64_t steps = any.dims[1], count = any.dims[0] * steps, num_slots = cache.num_pages * cache.page_size;
  std::vector<int64_t> slots(static_cast<size_t>(count), -1), positions = slots;
  const bool turns = args.positions.given() && args.cos.dims[0] > 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t b = n / steps, t = n % steps;
    if (args.lengths.given() && t >= number_at(args.lengths, b)) continue;
    const int64_t slot = args.slots.given() ? number_at(args.slots, b, t) : -1;
    if (slot < num_slots) slots[static_cast<size_t>(n)] = slot;
    if (turns) {
      positions[static_cast<size_t>(n)] = std::clamp<int64_t>(number_at(args.positions, b, t), 0, args.cos.dims[0] - 1);
    }
  }
  const Heads key{args.key, steps}, value{args.value, steps}, query{args.query, steps};
  const Heads query_out{args.query_out, steps};
  NewTokens tokens{count, nullptr, positions.data(), &args.cos, &args.sin};
  if (args.key.given()) tokens.slots = slots.data(), tokens.key = &key, tokens.value = &value;
  if (args.query.given()) tokens.query = &query, tokens.query_out = &query_out;
  std::vector<float> memory(static_cast<size_t>(longest_head(cache)));
  polyhead::append(cache, args.pool, tokens, memory.data(), testing::executor(1));
}

}  // namespace

extern const Kernel kDeviceOfTest;
const Kernel kDeviceOfTest = {
    "cuda_of_test",
    Device::kCuda,
    [](DType dtype) { return kReference.why_not(dtype); },
    [](int64_t k, int64_t n, DType dtype) { return kReference.packed_bytes(k, n, dtype); },
    [](const Matrix& b, void* packed, const Run& run) { return on_device<&Kernel::pack>(b, packed, run); },
    [] { return kReference.panel_columns(); },
    [](const GemmDesc& desc, int threads) { return kReference.gemm_workspace_bytes(desc, threads); },
    [](const GemmDesc& desc, const GemmArgs& args, const Run& run) {
      return on_device<&Kernel::gemm>(desc, args, run);
    },
    [](int64_t m, int64_t n, DType dtype) { return kReference.sums_workspace_bytes(m, n, dtype); },
    [](const PointwiseArgs& args, const Run& run) { return on_device<&Kernel::pointwise>(args, run); },
    [](const NormForwardArgs& args, const Run& run) { return on_device<&Kernel::norm_forward>(args, run); },
    [](const NormBackwardArgs& args, const Run& run) { return on_device<&Kernel::norm_backward>(args, run); },
    [](const CopyRowsArgs& args, const Run& run) { return on_device<&Kernel::copy_rows>(args, run); },
    [](const SumHeadsArgs& args, const Run& run) { return on_device<&Kernel::sum_heads>(args, run); },
    [](void* data, size_t bytes, const Run& run) { return on_device<&Kernel::clear>(data, bytes, run); },
    check_place,
    [](const KvCacheDesc& cache, const AppendArgs& args, const Run& run) {
      return computed(run, [&] { return append_here(cache, args), Status(); });
    },
    [](const AttentionDesc& asked, const StepArgs& args, const Run& run) {
      return computed(run, [&] { return polyhead::stand_at_step(asked, args), Status(); });
    }};

}  // namespace linear
}  // namespace polyhead
