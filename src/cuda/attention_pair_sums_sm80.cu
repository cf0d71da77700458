// The kernels of attention_pair_sums.cuh, and those that finish their sums.
#include "cuda/attention_pair_sums.cuh"
#include "cuda/launch.h"

namespace polyhead::cuda {
namespace {

static_assert(sizeof(PairSumsMemory<Float32, 64>) <= kEveryGpuBytes &&
              sizeof(PairSumsMemory<BFloat16, 128>) <= kEveryGpuBytes &&
              sizeof(PairSumsMemory<BFloat16, kManyColumns>) <= kEveryGpuBytes);
static_assert(sizeof(PairSumsMemory<Float32, kManyColumns>) <= kWideBytes);
static_assert(sizeof(PairSumsMemory<BFloat16, kMostTileColumns>) <= kWideBytes);
static_assert(sizeof(StoredWeights::Memory) <= kEveryGpuBytes);

template <class T, int kD>
__global__ void __launch_bounds__(kThreads)
    pair_sums_kernel(const __grid_constant__ BackwardProblem problem, const __grid_constant__ PairSums sums) {
  SumsOfPairs<T, kD>(problem, sums, dynamic_shared<PairSumsMemory<T, kD>>()).run();
}

// Two on a multiprocessor: so that three fit, ptxas would spill.
__global__ void __launch_bounds__(kThreads, 2)
    stored_weights_kernel(const __grid_constant__ StoredWeightsProblem problem, const __grid_constant__ PairSums sums) {
  StoredWeights(problem, sums, dynamic_shared<StoredWeights::Memory>()).run();
}

// Adds the parts of a tile of the result.
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const __grid_constant__ BackwardProblem p, const __grid_constant__ PairSums sums) {
  const int64_t tile = blockIdx.x, elements = sums.rows() * sums.columns();
  for (int n = static_cast<int>(threadIdx.x); n < elements; n += kThreads) {
    float sum = 0;
    for (int64_t part = 0; part < sums.parts; ++part) sum += sums.partial[(part * sums.tiles + tile) * elements + n];
    put(p, sums, tile, n / static_cast<int>(sums.columns()), n % static_cast<int>(sums.columns()), sum);
  }
}

// A block for each head. A query whose out is 0 passes nothing on to the sink, whatever its grad_out: D is 0.
__global__ void __launch_bounds__(kThreads) sink_gradient_kernel(const __grid_constant__ BackwardProblem p) {
  __shared__ float sums[kThreads];
  const int64_t h = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const float sink = sink_of(p, h);
  float sum = 0;
  for (int64_t b = 0; b < (p.packed ? 1 : p.batch) && sink != -INFINITY; ++b) {
    const int64_t queries = p.packed ? first_row(p.cu_seqlens_q, p.batch, p.batch, p.seqlen_q)  // of all sequences
                                     : length(p.seqlens_q, b, p.seqlen_q);
    for (int64_t i = thread; i < queries; i += kThreads) {
      float gradient = -statistic(p.delta, b, h, i);
      if (gradient != gradient && p.given_delta.data == nullptr) {
        const int64_t out = b * p.out.batch + h * p.out.head + i * p.out.row;
        bool zero = true;
        for (int c = 0; c < p.head_dim_v; ++c) {
          zero &= load_number(p.out.data, p.out.number, out + c * p.out.column) == 0;
        }
        if (zero) gradient = p.grad_logsumexp.data == nullptr ? 0 : statistic(p.grad_logsumexp, b, h, i);
      }
      sum += exponential<Float32>(sink - statistic(p.logsumexp, b, h, i)) * gradient;
    }
  }
  sums[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread > 0) return;
  float& to = p.grad_sinks[h * p.grad_sinks_stride];
  to = p.accumulate ? to + sums[0] : sums[0];
}

// An element of a capture a thread.
__global__ void __launch_bounds__(kThreads)
    capture_gradients_kernel(const __grid_constant__ CaptureSums sums, bool accumulate) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= sums.first[kMostCaptures]) return;
  int c = 0;
  while (at >= sums.first[c + 1]) ++c;
  const Captured& to = sums.gradients[c];
  if (to.data == nullptr) return;
  int64_t n = at - sums.first[c], element = 0;
  for (int dim = 3; dim >= 0; --dim) {
    element += n % to.dims[dim] * to.strides[dim];
    n /= to.dims[dim];
  }
  float value = Units(sums, c).number(static_cast<long long>(sums.sums[at]));
  if (const unsigned found = sums.not_finite[at]; found != 0)
    value = found == 1 ? INFINITY : found == 2 ? -INFINITY : NAN;
  if (accumulate) value += load_number(to.data, sums.numbers[c], element);
  store_number(to.data, sums.numbers[c], element, value);
}

template <class P>
cudaError_t launch_sums(P p, const PairSums& sums, const void* kernel, int bytes, cudaStream_t stream) {
  if (sums.result.data == nullptr || sums.tiles == 0) return cudaSuccess;
  if (sums.summed == Summed::kWeightsBeforeDropout) p.dropout.on = false;
  const auto tiles = static_cast<unsigned>(sums.tiles), parts = static_cast<unsigned>(sums.parts);
  const cudaError_t error = launch(kernel, dim3(tiles * parts), bytes, stream, p, sums);
  if (error != cudaSuccess || sums.partial == nullptr) return error;
  add_parts_kernel<<<tiles, kThreads, 0, stream>>>(p, sums);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_pair_sums(const BackwardProblem& p, const ProgramKernels& of_program, cudaStream_t stream) {
  for (const PairSums& sums : p.sums) {
    const cudaError_t error = with_elements(p.elements, [&]<class T>(T) {
      return with_columns(columns_of(p), [&]<int kD>() {
        const void* const kernel = of_program.pair_sums != nullptr
                                       ? of_program.pair_sums
                                       : reinterpret_cast<const void*>(pair_sums_kernel<T, kD>);
        return launch_sums(p, sums, kernel, sizeof(PairSumsMemory<T, kD>), stream);
      });
    });
    if (error != cudaSuccess) return error;
  }
  if (p.grad_sinks == nullptr || p.heads == 0) return cudaSuccess;
  sink_gradient_kernel<<<static_cast<unsigned>(p.heads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_stored_weights(const StoredWeightsProblem& p, const ProgramKernels& of_program,
                                  cudaStream_t stream) {
  const void* const kernel =
      of_program.pair_sums != nullptr ? of_program.pair_sums : reinterpret_cast<const void*>(stored_weights_kernel);
  for (const PairSums& sums : p.sums) {
    const cudaError_t error = launch_sums(p, sums, kernel, sizeof(StoredWeights::Memory), stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_capture_gradients(const BackwardProblem& p, CaptureSums sums, const ProgramKernels& of_program,
                                     cudaStream_t stream) {
  const int64_t elements = sums.first[kMostCaptures];
  if (elements == 0) return cudaSuccess;
  const auto* const end = reinterpret_cast<const char*>(sums.not_finite + elements);
  const auto bytes = static_cast<size_t>(end - reinterpret_cast<const char*>(sums.largest));
  if (const cudaError_t error = cudaMemsetAsync(sums.largest, 0, bytes, stream); error != cudaSuccess) return error;
  for (const bool adds : {false, true}) {
    sums.adds = adds;
    const cudaError_t error = with_elements(p.elements, [&]<class T>(T) {
      return with_columns(columns_of(p), [&]<int kD>() {
        if (p.query_blocks == 0) return cudaSuccess;
        const int bytes = sizeof(PairSumsMemory<T, kD>);
        return launch(of_program.capture_gradients, dim3(p.query_blocks), bytes, stream, p, sums);
      });
    });
    if (error != cudaSuccess) return error;
  }
  const auto blocks = static_cast<unsigned>((elements + kThreads - 1) / kThreads);
  capture_gradients_kernel<<<blocks, kThreads, 0, stream>>>(sums, p.accumulate);
  return cudaGetLastError();
}

}  // namespace polyhead::cuda
