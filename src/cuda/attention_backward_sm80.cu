// The gradients of FlashAttention-2 (arXiv:2307.08691, section 3.1.2), with the words of sm_80. Its two sums run in two
// passes, each over tiles of its own: dQ over query tiles, dK and dV over key tiles. So no block adds to what another
// writes, and every sum has one order. P and dS: pairs.cuh.
//   dX = dS times the derivative of softcap   dQ = scale dX K   dK = scale dX^T Q   dV = dropout(P)^T dO
//   pass over queries   own Q, dO   others K, V    sums dQ
//   pass over keys      own K, V    others Q, dO   sums dK, dV; of many columns one of both, in a pass each
#include <cmath>

#include "cuda/pairs.cuh"

namespace polyhead::cuda {
namespace {

// What a pass sums.
constexpr int kOfQuery = 0, kOfKeyAndValue = 1, kOfKey = 2, kOfValue = 3;

// With 32 others at a time sums of many columns would be spilled: dK and dV of 128 264 bytes.
template <int kD, int kPass>
constexpr int kOthers = kD*(kPass == kOfKeyAndValue ? 2 : 1) > 128 ? 16 : 32;

// kWide: gradients are float32, of elements that are not.
template <class T, int kD, int kPass, bool kWide, bool kOptions>
class Backward : Pairs<T, kD, kPass != kOfQuery, kOptions, kOthers<kD, kPass>> {
  static constexpr bool kKeys = kPass != kOfQuery;
  static constexpr bool kScored = kPass != kOfValue;                               // dQ or dK, in sums[0]
  static constexpr bool kWeighted = kPass == kOfKeyAndValue || kPass == kOfValue;  // dV, in the last of sums
  static constexpr int kStep = kOthers<kD, kPass>, kSums = kScored + kWeighted;
  static constexpr int kStages = PairsMemory<T, kD>::kStages;
  using Base = Pairs<T, kD, kKeys, kOptions, kStep>;
  using Base::cut, Base::range, Base::range_of, Base::group, Base::row_index, Base::sees, Base::shows,
      Base::hides_pairs, Base::drops;
  using Base::p, Base::shared, Base::own, Base::b, Base::head, Base::first, Base::stage, Base::lane, Base::warp;
  using typename Base::Block;

 public:
  __device__ Backward(const BackwardProblem& problem, PairsMemory<T, kD>& memory) : Base(problem, memory) {
    const OwnRows rows(p, kKeys);
    b = rows.b, h = head = rows.h, own = rows.first;
  }

  __device__ void run() {
    const Band band(p, b);
    this->offset = band.offset;
    const int64_t limit = kKeys ? band.keys : band.queries, first_own = kKeys ? band.first_k : band.first_q;
    const int64_t end_own = own + kBlockRows < limit ? own + kBlockRows : limit;
    const Range of_first = range_of(band, own), of_last = range_of(band, end_own - 1);
    const bool sinks = kOptions && kKeys && own < band.sinks;  // seen by queries to the last
    const int64_t begin = of_first.first / kTileRows * kTileRows,
                  end = own < end_own ? (sinks ? of_first : of_last).last : 0;
    int64_t before_gap = 0, gap = 0;
    if constexpr (kOptions && !kKeys) {
      before_gap = (band.sinks + kTileRows - 1) / kTileRows;
      const int64_t behind = band.behind_sinks(own), whole_tiles = (end + kTileRows - 1) / kTileRows * kTileRows;
      gap = (behind < whole_tiles ? behind : whole_tiles) - before_gap * kTileRows;
      if (gap < 0) gap = 0;
    }
    if (threadIdx.x == 0) {
      shared.not_finite = 0;
      shared.band = band;
      shared.all = {of_last.first, of_first.last};
      shared.begin = begin;
      shared.before_gap = static_cast<int>(before_gap);
      shared.gap = gap;
    }
    __syncthreads();
    tiles = begin < end ? static_cast<int>((end - begin - gap + kTileRows - 1) / kTileRows) : 0;
    const int all = kKeys ? tiles * static_cast<int>(group()) : tiles;  // of each query head that reads these keys
    if (all > 0) {
      load_tile(shared.own[0], kKeys ? p.key : p.query, b, h, first_own, own, end_own, p.head_dim);
      load_tile(shared.own[1], kKeys ? p.value : p.grad_out, b, h, first_own, own, end_own, p.head_dim_v);
    }
    if constexpr (!kKeys) this->read_statistics(band);
    for (int t = kStages == 1 ? 0 : -1; t < all; ++t) {
      if constexpr (kStages == 1) {
        __syncthreads();  // tile t - 1 has been used
        load_others(t);
      }
      wait_for_copies();
      __syncthreads();  // tile t is there, the other stage is free
      if (kStages == 2 && t + 1 < all) load_others(t + 1);
      if (t < 0) continue;
      first = first_of_tile(t);
      stage = t % kStages;
      cut = hides_pairs() || first < shared.all.first || first + kTileRows > shared.all.last;
      for (int r = 0; r < 2; ++r) {
        if constexpr (kOptions && !kKeys) {
          range[r] = {shared.band.seen_by(p, row_index(r)), first};
        } else {
          range[r] = {range_of(shared.band, row_index(r)), first};
        }
      }
      if constexpr (kKeys) head = h * static_cast<int>(group()) + t / tiles;
      this->draw();
      careful = cut && hides_not_finite(t + 1);
#pragma unroll 1
      for (int from = 0; from < kTileRows; from += kStep) step(from);
    }
    if constexpr (kScored) store(kKeys ? p.grad_key : p.grad_query, sums[0], p.head_dim, p.scale);
    if constexpr (kWeighted) store(p.grad_value, sums[kSums - 1], p.head_dim_v, 1);
  }

 private:
  __device__ int64_t num_others() const { return kKeys ? shared.band.queries : shared.band.keys; }
  __device__ int64_t first_other() const { return kKeys ? shared.band.first_q : shared.band.first_k; }

  __device__ int64_t first_of_tile(int t) const {
    const int64_t other = shared.begin + t % tiles * kTileRows;
    if constexpr (!kOptions || kKeys) return other;
    return t < shared.before_gap ? other : other + shared.gap;
  }

  __device__ void load_others(int t) {
    const int64_t others = kKeys ? h * group() + t / tiles : h / group(), row = first_of_tile(t);
    const int to = t % kStages;
    load_tile(shared.others[to][0], kKeys ? p.query : p.key, b, others, first_other(), row, num_others(), p.head_dim);
    load_tile(shared.others[to][1], kKeys ? p.grad_out : p.value, b, others, first_other(), row, num_others(),
              p.head_dim_v);
    if (!kKeys || threadIdx.x >= kTileRows) return;
    const int x = static_cast<int>(threadIdx.x);
    const bool there = row + x < num_others();
    shared.L[to][x] = there ? statistic(p.logsumexp, b, others, first_other() + row + x) : 0;
    shared.delta[to][x] = there ? statistic(p.delta, b, others, first_other() + row + x) : 0;
  }

  // Whether the others hold an infinity or a NaN: tensor cores would multiply it by the 0 of a row that does not see it.
  __device__ bool hides_not_finite(int tile) {
    bool found = has_not_finite(shared.others[stage][0]);
    if constexpr (kKeys) found |= has_not_finite(shared.others[stage][1]);
    if (found) atomicMax(&shared.not_finite, tile);
    __syncthreads();
    return shared.not_finite == tile;
  }

  // The kStep others from first + from on.
  __device__ void step(int from) {
    Block P = {}, dS = {};
    this->products(P, 0, from);
    if constexpr (kScored) this->products(dS, 1, from);
    if constexpr (kOptions) {
      const auto of_product = [](float gradient, float derivative, int, int) { return gradient * derivative; };
      this->weights_by_options(P, dS, from, this->score_of_tile(), of_product);
    } else {
      this->weights(P, dS, from);
    }
    if (careful) clear_others(from);
    if constexpr (kScored) multiply(sums[0], dS, shared.others[stage][0], from);
    if constexpr (kWeighted) multiply(sums[kSums - 1], P, shared.others[stage][1], from);
    if (careful) add_not_finite(P, from);
  }

  // sum += factors [16, kStep] others [kStep, kD]
  __device__ void multiply(float (&sum)[kD / 8][4], Block& factors, Tile<T, kD>& others, int from) {
    if constexpr (kWide) {
      multiply_exactly(sum, factors, others, from);
    } else if constexpr (T::kOnTensorCores) {
      multiply_rounded(sum, factors, others, from);
    } else {
      multiply_weights(sum, factors, others, from, lane);
    }
  }

  __device__ void multiply_rounded(float (&sum)[kD / 8][4], const Block& factors, Tile<T, kD>& others, int from) {
    constexpr bool kRest = T::kRestOfWeights;
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      unsigned whole[4], rest[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = factors[2 * k + a / 2][a % 2 * 2], high = factors[2 * k + a / 2][a % 2 * 2 + 1];
        whole[a] = packed<T>(low, high);
        if constexpr (kRest) rest[a] = packed<T>(low - low_half<T>(whole[a]), high - high_half<T>(whole[a]));
      }
#pragma unroll
      for (int n = 0; n < kD / 8; n += 2) {
        unsigned x[4];
        load_matrices_transposed(x, others.piece(from + k * 16 + lane % 16, n + lane / 16));
        multiply_add<T>(sum[n], whole, x[0], x[1]);
        multiply_add<T>(sum[n + 1], whole, x[2], x[3]);
        if constexpr (kRest) {
          multiply_add<T>(sum[n], rest, x[0], x[1]);
          multiply_add<T>(sum[n + 1], rest, x[2], x[3]);
        }
      }
    }
  }

  // The same with factors in two numbers, of 16 (float16 22) bits. A row's are scaled so that the largest is near 2^15: of
  // what is below 6e-5 float16 would hold few digits.
  __device__ void multiply_exactly(float (&sum)[kD / 8][4], const Block& factors, Tile<T, kD>& others, int from) {
    float up[2], down[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) {
        largest = fmaxf(largest, fmaxf(fabsf(factors[n][2 * r]), fabsf(factors[n][2 * r + 1])));
      }
      const unsigned exponent = __float_as_uint(max_of_row(largest)) >> 23;  // 127 of 1
      const unsigned of_up = exponent < 15 ? 253 : 268 - exponent;           // largest * up: from 2^14 to 2^15
      up[r] = __uint_as_float(of_up << 23);
      down[r] = __uint_as_float((254 - of_up) << 23);
    }
    unsigned whole[kStep / 16][4], rest[kStep / 16][4];
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = up[a % 2] * factors[2 * k + a / 2][a % 2 * 2],
                    high = up[a % 2] * factors[2 * k + a / 2][a % 2 * 2 + 1];
        whole[k][a] = packed<T>(low, high);
        rest[k][a] = packed<T>(low - low_half<T>(whole[k][a]), high - high_half<T>(whole[k][a]));
      }
    }
#pragma unroll
    for (int n = 0; n < kD / 8; n += 2) {
      float product[2][4] = {};
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
        unsigned x[4];
        load_matrices_transposed(x, others.piece(from + k * 16 + lane % 16, n + lane / 16));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          multiply_add<T>(product[c], rest[k], x[2 * c], x[2 * c + 1]);
          multiply_add<T>(product[c], whole[k], x[2 * c], x[2 * c + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[n + e / 4][e % 4] += down[e / 2 % 2] * product[e / 4][e % 4];
    }
  }

  __device__ void clear_others(int from) {
    __syncthreads();  // their products have been made
    clear_not_finite(shared.others[stage][0], from, kStep);
    if constexpr (kKeys) clear_not_finite(shared.others[stage][1], from, kStep);
    __syncthreads();
  }

  // What infinities and NaNs add to the rows that see them. In a query or key they make its scores infinite or NaN, so
  // that dS is 0 or NaN, and dS times them is NaN; of grad_out it is what P makes of them.
  __device__ void add_not_finite(const Block& P, int from) {
    const Score score = this->score_of_tile();
    unsigned positive[2] = {};  // bit x: P of other x is not 0
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned lanes = __ballot_sync(kAllLanes, P[n][e] > 0) >> (lane & ~3);
        for (int t = 0; t < 4; ++t) positive[e / 2] |= (lanes >> t & 1) << (n * 8 + 2 * t + e % 2);
      }
    }
    const int64_t others = kKeys ? head : head / group(), row = first_other() + first + from;
    const T* scored = at(kKeys ? p.query : p.key, others, row);
    const T* weighted = at(p.grad_out, others, row);  // in the pass over keys
#pragma unroll 1
    for (int x = 0; x < kStep; ++x) {
      bool seen[2];
      for (int r = 0; r < 2; ++r) seen[r] = sees(r, from + x) && shows(score, r, from + x);
#pragma unroll 1
      for (int first_column = lane % 4 * 2; first_column < kD; first_column += 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = first_column + e % 2;
          if constexpr (kScored) {
            const bool there = seen[e / 2] && column < p.head_dim;
            if (there && !finite(scored, kKeys ? p.query : p.key, x, column)) sums[0][0][e] = NAN;
          }
          if constexpr (kWeighted) {
            if (!seen[e / 2] || column >= p.head_dim_v || finite(weighted, p.grad_out, x, column)) continue;
            const float grad = to_float(weighted[x * p.grad_out.row + column * p.grad_out.column]);
            sums[kSums - 1][0][e] += positive[e / 2] >> x & 1 ? grad : NAN;
          }
        }
        rotate(sums[0]);
        if constexpr (kSums == 2) rotate(sums[1]);
      }
    }
  }

  __device__ const T* at(const Rows& rows, int64_t of_head, int64_t row) const {
    return static_cast<const T*>(rows.data) + b * rows.batch + of_head * rows.head + row * rows.row;
  }
  __device__ static bool finite(const T* base, const Rows& rows, int row, int column) {
    const float x = to_float(base[row * rows.row + column * rows.column]);
    return x - x == 0;
  }

  // A row that takes part in no visible pair gets 0, or keeps what is there.
  __device__ void store(const Rows& rows, float (&sum)[kD / 8][4], int columns, float factor) {
    if (rows.data == nullptr) return;
    const Band& band = shared.band;
    const int64_t num_own = kKeys ? band.rows_k : band.rows_q, first_own = kKeys ? band.first_k : band.first_q;
    const bool unseen[2] = {range_of(band, row_index(0)).empty(), range_of(band, row_index(1)).empty()};
#pragma unroll 1
    for (int first_column = lane % 4 * 2; first_column < kD; first_column += 8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = row_index(e / 2);
        const int column = first_column + e % 2;
        if (row >= num_own || column >= columns || (unseen[e / 2] && p.accumulate)) continue;
        const int64_t at = b * rows.batch + h * rows.head + (first_own + row) * rows.row + column * rows.column;
        float value = unseen[e / 2] ? 0 : factor * sum[0][e] + 0.f;  // -0 + 0 is +0
        if constexpr (kWide || sizeof(T) == sizeof(float)) {
          float* to = static_cast<float*>(rows.data) + at;
          *to = p.accumulate ? *to + value : value;
        } else {
          T* to = static_cast<T*>(rows.data) + at;
          if (p.accumulate) value += to_float(*to);
          *to = rounded<T>(value);
        }
      }
      rotate(sum);
    }
  }

  int h;  // of the own rows
  int tiles = 0;
  bool careful = false;
  float sums[kSums][kD / 8][4] = {};
};

// delta = sum_c dO O - dL, a warp for each row
template <class T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ BackwardProblem p) {
  const int64_t heads = (p.packed ? 1 : p.batch) * p.heads, index = blockIdx.x;
  const int64_t b = index % heads / p.heads, h = index % p.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int n = warp; n < kBlockRows; n += kThreads / 32) {
    const int64_t i = index / heads * kBlockRows + n;
    if (i >= p.seqlen_q) return;
    float sum = 0;
    if (p.given_delta.data != nullptr) {
      sum = statistic(p.given_delta, b, h, i);
    } else {
      const auto at = [&](const Rows& x) {
        return static_cast<const T*>(x.data) + b * x.batch + h * x.head + i * x.row;
      };
      const T *dO = at(p.grad_out), *O = at(p.out);
      for (int c = lane; c < p.head_dim_v; c += 32) {
        sum += to_float(dO[c * p.grad_out.column]) * to_float(O[c * p.out.column]);
      }
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    }
    if (p.grad_logsumexp.data != nullptr) sum -= statistic(p.grad_logsumexp, b, h, i);
    if (lane == 0) statistic(p.delta, b, h, i) = sum;
  }
}

template <class T, int kD, int kPass, bool kWide, bool kOptions>
__global__ void __launch_bounds__(kThreads, kD > 128 ? 1 : 2)
    backward_kernel(const __grid_constant__ BackwardProblem problem) {
  Backward<T, kD, kPass, kWide, kOptions>(problem, dynamic_shared<PairsMemory<T, kD>>()).run();
}

template <class T, int kD, int kPass>
cudaError_t launch_pass(const BackwardProblem& p, cudaStream_t stream) {
  const unsigned blocks = kPass == kOfQuery ? p.query_blocks : p.key_blocks;
  if (blocks == 0) return cudaSuccess;
  const int bytes = sizeof(PairsMemory<T, kD>);
  auto kernel =
      p.has_options ? backward_kernel<T, kD, kPass, false, true> : backward_kernel<T, kD, kPass, false, false>;
  if constexpr (T::kOnTensorCores) {
    if (p.wide_gradients) kernel = backward_kernel<T, kD, kPass, true, true>;  // asks for each option
  }
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T, int kD>
cudaError_t launch_passes(const BackwardProblem& p, cudaStream_t stream) {
  const bool of_query = p.grad_query.data != nullptr, of_key = p.grad_key.data != nullptr,
             of_value = p.grad_value.data != nullptr;
  cudaError_t error = cudaSuccess;
  if (of_query) error = launch_pass<T, kD, kOfQuery>(p, stream);
  if constexpr (kD > 128) {
    if (error == cudaSuccess && of_key) error = launch_pass<T, kD, kOfKey>(p, stream);
    if (error == cudaSuccess && of_value) error = launch_pass<T, kD, kOfValue>(p, stream);
  } else if (error == cudaSuccess && (of_key || of_value)) {
    error = launch_pass<T, kD, kOfKeyAndValue>(p, stream);
  }
  return error;
}

template <class T>
cudaError_t launch(const BackwardProblem& p, cudaStream_t stream) {
  if (p.query_blocks > 0) {
    delta_kernel<T><<<p.query_blocks, kThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  const int columns = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  return with_columns<T>(columns, [&]<int kD>() { return launch_passes<T, kD>(p, stream); });
}

}  // namespace

cudaError_t launch_backward(const BackwardProblem& p, cudaStream_t stream) {
  return with_elements(p.elements, [&]<class T>(T) { return launch<T>(p, stream); });
}

}  // namespace polyhead::cuda
