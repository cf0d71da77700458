// What the interpreter counts of each kernel: instructions by name, waves of shared memory, sectors of global memory, as CSV,
//   dtype,head_dim,direction,seqlen_q,seqlen_k,kernel,name,count
// of one head at three sizes: their differences are what a tile costs; and
//   dtype,rows,product,columns,terms,kernel,name,count
// of one tile of a product, of fewer and more terms. Read by bench/cuda_model.py.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/sentence.h"
#include "cuda/call.h"
#include "cuda/linear_call.h"
#include "cuda/linear_launch.h"
#include "polyhead/attention.h"
#include "sim/cudart.h"

namespace polyhead {
namespace {

struct Sizes {
  int64_t queries, keys;
};
constexpr Sizes kSizes[] = {{128, 128}, {128, 256}, {256, 128}};

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "tile_counts: %s\n", why.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status.ok()) stop(status.message());
  if (cudaDeviceSynchronize() != cudaSuccess) stop(cuda_sim::take_fault());
}

class Memory {
 public:
  ~Memory() {
    for (void* each : all_) cudaFree(each);
  }

  void* zeros(size_t bytes) {
    void* at = nullptr;
    if (bytes == 0) return at;
    if (cudaMalloc(&at, bytes) != cudaSuccess) stop("no memory");
    cudaMemsetAsync(at, 0, bytes, nullptr);
    all_.push_back(at);
    return at;
  }

  Tensor like(Tensor t) {
    t.data = zeros(static_cast<size_t>(t.num_elements()) * dtype_size_bytes(t.dtype));
    t.device = Device::kCuda;
    return t;
  }

 private:
  std::vector<void*> all_;
};

// `what`: the first five cells of a line.
void print(const std::string& what) {
  for (const auto& [kernel, counters] : cuda_sim::take_counters_of_kernels()) {
    const auto line = [&, &name = kernel](const char* counted, uint64_t count) {
      std::printf("%s,%s,%s,%llu\n", what.c_str(), name.c_str(), counted, static_cast<unsigned long long>(count));
    };
    line("instructions", counters.instructions);
    line("bank_phases", counters.bank_phases);
    line("bank_waves", counters.bank_waves);
    line("sectors", counters.sectors);
    line("ideal_sectors", counters.ideal_sectors);
    for (const auto& [opcode, count] : counters.by_opcode) line(opcode.c_str(), count);
  }
}

void print(const AttentionDesc& desc, const char* direction) {
  print(sentence(dtype_name(desc.dtype), ",", desc.head_dim, ",", direction, ",", desc.seqlen_q, ",", desc.seqlen_k));
}

// One tile of Y = X W, each row after row.
void count_product(DType dtype, int terms) {
  Memory memory;
  const auto matrix_of = [&](int64_t rows, int64_t columns) {
    const Tensor t = memory.like({nullptr, dtype, {rows, columns}});
    return linear::matrix(t.data, dtype, rows, columns);
  };
  cuda::GemmProblem p;
  p.number = cuda::number_of(dtype);
  const cuda::GemmTile tile = cuda::gemm_tile(p.number, cuda::GemmSize::kLarge);
  p.m = tile.rows, p.n = tile.columns, p.k = terms;
  p.row_tiles = p.column_tiles = 1;
  p.a = cuda::factor_of(matrix_of(p.m, p.k));
  p.b = cuda::factor_of(matrix_of(p.k, p.n).transposed());
  const linear::Matrix y = matrix_of(p.m, p.n);
  p.finish = cuda::finish_of({}, y.rows, y, false);
  if (cudaDeviceSynchronize() != cudaSuccess) stop(cuda_sim::take_fault());
  cuda_sim::take_counters_of_kernels();
  const cudaError_t error = dtype == DType::kFloat32 ? launch_gemm<cuda::Float32>(p, cuda::GemmSize::kLarge, nullptr)
                            : dtype == DType::kBFloat16
                                ? launch_gemm<cuda::BFloat16>(p, cuda::GemmSize::kLarge, nullptr)
                                : launch_gemm<cuda::Float16>(p, cuda::GemmSize::kLarge, nullptr);
  if (error != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) stop(cuda_sim::take_fault());
  print(sentence(dtype_name(dtype), ",", p.m, ",product,", p.n, ",", terms));
}

void count(DType dtype, int head_dim, const Sizes& sizes) {
  AttentionDesc desc;
  desc.dtype = dtype;
  desc.seqlen_q = sizes.queries, desc.seqlen_k = sizes.keys;
  desc.head_dim = desc.head_dim_v = head_dim;
  const Result<Plan> made = plan(desc, {.kernel = {}, .where = {.device = Device::kCuda}});
  if (!made.ok()) stop(made.status().message());
  Memory memory;
  BackwardArgs args;
  for (Tensor ForwardArgs::*each :
       {&ForwardArgs::query, &ForwardArgs::key, &ForwardArgs::value, &ForwardArgs::out, &ForwardArgs::logsumexp}) {
    args.forward.*each = memory.like(expected_tensor(desc, each));
  }
  args.forward.workspace = memory.zeros(made->workspace_bytes());
  args.forward.workspace_bytes = made->workspace_bytes();
  if (cudaDeviceSynchronize() != cudaSuccess) stop(cuda_sim::take_fault());
  cuda_sim::take_counters_of_kernels();
  check(made->forward(args.forward));
  print(desc, "forward");
  args.forward.workspace = memory.zeros(made->backward_workspace_bytes());
  args.forward.workspace_bytes = made->backward_workspace_bytes();
  args.grad_out = memory.like(args.forward.out);
  args.grad_query = memory.like(args.forward.query);
  args.grad_key = memory.like(args.forward.key);
  args.grad_value = memory.like(args.forward.value);
  check(made->backward(args));
  print(desc, "backward");
}

}  // namespace
}  // namespace polyhead

int main() {
  using polyhead::DType;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const polyhead::Sizes& sizes : polyhead::kSizes) polyhead::count(dtype, head_dim, sizes);
    }
    for (const int terms : {256, 512}) polyhead::count_product(dtype, terms);
  }
}
