// Gradients of what is added to scores: sums of dS over the pairs that share an element of the bias, and over all pairs
// of a head for a slope of ALiBi; and of sinks. P and dS: pairs.cuh.
//   dbias = sum dS   dslope = -sum dS |i + offset - j|   dsink = sum_i exp(sink - L) (dL - D) = -sum_i exp(sink - L) delta
// A block owns a tile of 64 x 64 elements of the gradient, less where that broadcasts, and walks over the tiles of pairs
// whose sum it is. Where few blocks would have all the work, several share a tile of the gradient, each with a part of its
// pairs, and a second kernel adds what they found in order.
#include "cuda/pairs.cuh"

namespace polyhead::cuda {
namespace {

template <class T, int kD>
struct Memory {
  PairsMemory<T, kD> pairs;
  float columns[kThreads / 32][kTileRows];  // sums over the rows of a warp
};

static_assert(sizeof(Memory<Float32, 64>) <= kEveryGpuBytes && sizeof(Memory<BFloat16, 128>) <= kEveryGpuBytes);
static_assert(sizeof(Memory<Float32, kMostHeadDimFloat32>) <= kWideBytes);
static_assert(sizeof(Memory<BFloat16, kMostHeadDim>) <= kWideBytes);

// Number n of dims[0] x dims[1] x dims[2] x dims[3]: a tile of pairs, or of the gradient.
struct Place {
  int64_t b, h, query_tile, key_tile;

  __device__ Place(int64_t n, const int64_t (&dims)[4]) {
    key_tile = n % dims[3], n /= dims[3];
    query_tile = n % dims[2], n /= dims[2];
    h = n % dims[1], b = n / dims[1];
  }
};

// Element (i, j) of a tile of the gradient.
__device__ inline void put(const BackwardProblem& p, const PairSums& sums, int64_t tile, int i, int j, float sum) {
  const Place at(tile, sums.own);
  const int64_t row = at.query_tile * kTileRows + i, column = at.key_tile * kTileRows + j;
  if (row >= p.seqlen_q || column >= p.seqlen_k) return;
  const Broadcast& to = sums.gradient;
  const int64_t element = at.b * to.batch + at.h * to.head + row * to.query + column * to.key;
  if (p.accumulate) sum += load_number(to.data, to.number, element);
  store_number(to.data, to.number, element, sum);
}

template <class T, int kD>
class ScoreGradients : Pairs<T, kD, false, true, kTileRows> {
  using Base = Pairs<T, kD, false, true, kTileRows>;
  using Base::p, Base::shared, Base::own, Base::b, Base::head, Base::first, Base::offset, Base::lane, Base::warp;
  using Base::range, Base::row_index, Base::local_row;
  using typename Base::Block;

 public:
  __device__ ScoreGradients(const BackwardProblem& problem, const PairSums& pair_sums, Memory<T, kD>& memory)
      : Base(problem, memory.pairs), sums(pair_sums), columns(memory.columns) {}

  __device__ void run() {
    tile = blockIdx.x / sums.parts;
    part = blockIdx.x % sums.parts;
    const Place to(tile, sums.own);
    own = -1;  // no tile of queries is there yet
    int64_t summed[4] = {sums.summed[0], sums.summed[1], sums.summed[2], sums.summed[3]};
    const int64_t b0 = to.b + part % sums.sequences, parts = sums.parts / sums.sequences, index = part / sums.sequences;
    int64_t pairs = sums.pairs;
    if (p.packed) {  // only here is known how many tiles a sequence has
      const Band band(p, b0);
      summed[0] = 1;
      summed[2] = (band.queries + kTileRows - 1) / kTileRows;
      summed[3] = (band.keys + kTileRows - 1) / kTileRows;
      pairs = summed[1] * summed[2] * summed[3];
    }
    for (int64_t n = pairs * index / parts; n < pairs * (index + 1) / parts; ++n) {
      Place at(n, summed);
      at.b += b0, at.h += to.h, at.query_tile += to.query_tile, at.key_tile += to.key_tile;
      add(at);
    }
    if (sums.by_query && sums.by_key) {
      store_elements();
    } else if (sums.by_query) {
      store_rows();
    } else {
      store_columns();
    }
  }

 private:
  __device__ void add(const Place& at) {
    const Band band(p, at.b);
    const bool loaded = own == at.query_tile * kTileRows && b == at.b && head == at.h;
    own = at.query_tile * kTileRows, b = static_cast<int>(at.b), head = static_cast<int>(at.h), offset = band.offset;
    first = at.key_tile * kTileRows;
    const int64_t end = own + kTileRows < band.queries ? own + kTileRows : band.queries;
    const bool gap = first >= band.sinks && first < band.behind_sinks(own);
    const bool some =
        own < end && !gap && band.keys_of(own).first < first + kTileRows && first < band.keys_of(end - 1).last;
    __syncthreads();  // the last tiles have been used
    if (!loaded) {
      load_tile(shared.own[0], p.query, b, head, band.first_q, own, end, p.head_dim);
      load_tile(shared.own[1], p.grad_out, b, head, band.first_q, own, end, p.head_dim_v);
      this->read_statistics(band);
    }
    if (!some) return;
    for (int r = 0; r < 2; ++r) range[r] = {band.seen_by(p, row_index(r)), first};
    load_tile(shared.others[0][0], p.key, b, head / this->group(), band.first_k, first, band.keys, p.head_dim);
    load_tile(shared.others[0][1], p.value, b, head / this->group(), band.first_k, first, band.keys, p.head_dim_v);
    this->draw();
    wait_for_copies();
    __syncthreads();
    Block P = {}, dS = {};
    this->products(P, 0, 0);
    this->products(dS, 1, 0);
    const Score score = this->score_of_tile();
    this->weights_by_options(P, dS, 0, score, [&](float gradient, float, int i, int j) {
      return sums.by_distance ? -gradient * score.distance(i, j) : gradient;
    });
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] += dS[n][e];
    }
  }

  __device__ void store(int i, int j, float x) {
    if (sums.partial == nullptr) return put(p, sums, tile, i, j, x);
    sums.partial[((part * sums.tiles + tile) * sums.rows() + i) * sums.columns() + j] = x;
  }

  __device__ void store_elements() {
#pragma unroll 1
    for (int column = lane % 4 * 2; column < kTileRows; column += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) store(local_row(e / 2), column + e % 2, sum[0][e]);
      rotate(sum);
    }
  }

  __device__ void store_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) row += sum[n][2 * r] + sum[n][2 * r + 1];
      row = sum_of_row(row);
      if (lane % 4 == 0) store(local_row(r), 0, row);
    }
  }

  __device__ void store_columns() {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float column = sum[n][e] + sum[n][e + 2];
        for (int lanes = 4; lanes < 32; lanes *= 2) column += __shfl_xor_sync(kAllLanes, column, lanes);
        if (lane < 4) columns[warp][n * 8 + lane * 2 + e] = column;
      }
    }
    __syncthreads();
    const int x = static_cast<int>(threadIdx.x);
    if (x < kTileRows) {
      for (int w = 1; w < kThreads / 32; ++w) columns[0][x] += columns[w][x];
      if (sums.by_key) store(0, x, columns[0][x]);
    }
    __syncthreads();
    if (sums.by_key || x > 0) return;
    float all = 0;
    for (int column = 0; column < kTileRows; ++column) all += columns[0][column];
    store(0, 0, all);
  }

  const PairSums& sums;
  float (&columns)[kThreads / 32][kTileRows];
  int64_t tile = 0, part = 0;
  Block sum = {};
};

template <class T, int kD>
__global__ void __launch_bounds__(kThreads)
    score_gradients_kernel(const __grid_constant__ BackwardProblem problem, const __grid_constant__ PairSums sums) {
  ScoreGradients<T, kD>(problem, sums, dynamic_shared<Memory<T, kD>>()).run();
}

// Adds the parts of a tile of the gradient.
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
template <class T>
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
        const T* out = static_cast<const T*>(p.out.data) + b * p.out.batch + h * p.out.head + i * p.out.row;
        bool zero = true;
        for (int c = 0; c < p.head_dim_v; ++c) zero &= to_float(out[c * p.out.column]) == 0;
        if (zero) gradient = p.grad_logsumexp.data == nullptr ? 0 : statistic(p.grad_logsumexp, b, h, i);
      }
      sum += exponential<T>(sink - statistic(p.logsumexp, b, h, i)) * gradient;
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

template <class T, int kD>
cudaError_t launch_sums(const BackwardProblem& p, const PairSums& sums, cudaStream_t stream) {
  if (sums.gradient.data == nullptr || sums.tiles == 0) return cudaSuccess;
  const int bytes = sizeof(Memory<T, kD>);
  const cudaError_t error =
      cudaFuncSetAttribute(score_gradients_kernel<T, kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const auto tiles = static_cast<unsigned>(sums.tiles), parts = static_cast<unsigned>(sums.parts);
  score_gradients_kernel<T, kD><<<tiles * parts, kThreads, bytes, stream>>>(p, sums);
  if (sums.partial != nullptr) add_parts_kernel<<<tiles, kThreads, 0, stream>>>(p, sums);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const BackwardProblem& p, cudaStream_t stream) {
  const int columns = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  for (const PairSums& sums : {p.bias_sums, p.slope_sums}) {
    const cudaError_t error = with_columns<T>(columns, [&]<int kD>() { return launch_sums<T, kD>(p, sums, stream); });
    if (error != cudaSuccess) return error;
  }
  if (p.grad_sinks == nullptr || p.heads == 0) return cudaSuccess;
  sink_gradient_kernel<T><<<static_cast<unsigned>(p.heads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_score_gradients(const BackwardProblem& p, cudaStream_t stream) {
  return with_elements(p.elements, [&]<class T>(T) { return launch<T>(p, stream); });
}

}  // namespace polyhead::cuda
