// FlashAttention-2 forward, algorithm 1 of arXiv:2307.08691, with the words of sm_80: mma.sync, ldmatrix, cp.async.
//   Q_i [64, D]  K_j, V_j [64, D or Dv]  S, P [64, 64]  O [64, Dv]  m, l, L [64]
// A block of four warps computes 64 queries of a head, a warp 16 of them. K_j+1 is on its way while V_j is used, and
// V_j while K_j is. Of a lane's fragments (mma.cuh) elements 0 and 1 belong to row g, 2 and 3 to row g + 8.
#include <cmath>

#include "cuda/band.cuh"
#include "cuda/pages.cuh"
#include "cuda/parts.cuh"
#include "cuda/products.cuh"
#include "cuda/score.cuh"

namespace polyhead::cuda {
namespace {

template <class T, int kD>
struct Memory {
  // Of more columns of V a block does 128, since O would not fit in the registers of a thread: another does the rest.
  static constexpr int kColumns = kD < 128 ? kD : 128;

  Tile<T, kD> Q, K;
  Tile<T, kColumns> V;
  int not_finite;  // 1 + the last key tile whose V had an infinity or a NaN that some row must not see
  // Not held in registers: of the block's sequence, and the keys that all of the block's queries see.
  Band band;
  Range all;
  Range part;        // of the keys, that this block does
  KeyPlaces places;  // of the keys in pages
  Kept kept;         // by dropout, of the key tile
};

static_assert(sizeof(Memory<Float32, kMostHeadDimFloat32>) <= kEveryGpuBytes);
static_assert(sizeof(Memory<BFloat16, kMostHeadDim>) <= kEveryGpuBytes);

// One warp's share of a tile of scores: S, then P.
struct Scores {
  float x[8][4];  // eight blocks of eight keys
};

// Of a lane's two rows.
struct Row {
  TileRange keys;       // of the tile, that it sees
  float m = -INFINITY;  // the largest score so far
  float l = 0;          // sum of exp(S - m), this lane's part
  float l_rounded = 0;  // the same of the weights as they multiply V
  bool seen = false;    // some of this lane's keys, as far as options tell
};

template <class T, int kD, bool kOptions>  // kOptions: a score is more than a product, see Problem
class Forward {
  static constexpr int kColumns = Memory<T, kD>::kColumns;

 public:
  __device__ Forward(const Problem& problem, Memory<T, kD>& memory)
      : p(problem), shared(memory), lane(static_cast<int>(threadIdx.x) % 32), warp(static_cast<int>(threadIdx.x) / 32) {
    const OwnRows own(p, false);
    b = own.b, h = own.h, query = own.first;
  }

  __device__ void run() {
    const Band band(p, b);
    const int64_t end_q = query + kBlockRows < band.queries ? query + kBlockRows : band.queries;
    const Range of_first = band.keys_of(query), of_last = band.keys_of(end_q - 1);
    // Keys that some query of the tile sees, or of these the block's part.
    int64_t begin = of_first.first / kTileRows * kTileRows, end = query < end_q ? of_last.last : 0;
    if (p.parts > 1) {
      const int64_t share = (end - begin + p.parts - 1) / p.parts, least = kLeastKeysOfPart;
      const int64_t keys = share > least ? (share + kTileRows - 1) / kTileRows * kTileRows : least;
      begin += blockIdx.y * keys;
      if (end > begin + keys) end = begin + keys;
    }
    if (kOptions && begin >= band.sinks && begin < band.behind_sinks(query)) begin = band.behind_sinks(query);
    if (threadIdx.x == 0) {
      shared.not_finite = 0;
      shared.band = band;
      shared.all = {of_last.first, of_first.last};
      shared.part = {begin, end};
    }
    if (in_pages()) shared.places.find(p.pages, b, begin, band.keys);
    __syncthreads();
    if (begin < end) {
      load_tile(shared.Q, p.query, b, h, band.first_q, query, end_q, p.head_dim);
      load_keys(shared.K, p.key, begin, p.head_dim);
    }
    for (int64_t j = begin, next; j < end; j = next) {
      next = tile_behind(j);
      wait_for_copies();
      __syncthreads();  // K_j is there, V is free
      load_keys(shared.V, p.value, j, p.head_dim_v - first_column(), first_column());
      if (in_pages() && next < end) shared.places.find(p.pages, b, next, shared.band.keys);
      if (busy()) scores();
      wait_for_copies();
      __syncthreads();  // V_j is there, K is free
      if (next < end) load_keys(shared.K, p.key, next, p.head_dim);
      // Some row does not see some key.
      const bool cut = hides_pairs() || j < shared.all.first || j + kTileRows > shared.all.last;
      if (busy()) weights(j, cut);
      bool careful = false;
      if (cut) {
        if (clear_not_finite(shared.V)) atomicMax(&shared.not_finite, static_cast<int>(j / kTileRows) + 1);
        __syncthreads();
        careful = shared.not_finite == static_cast<int>(j / kTileRows) + 1;
      }
      if (busy()) multiply();
      if (careful && busy()) add_not_finite(j);
    }
    finish();
  }

 private:
  __device__ bool drops() const { return kOptions && p.dropout.on; }
  __device__ bool hides_pairs() const { return kOptions && p.hides_pairs; }
  __device__ int local_row(int r) const { return warp * 16 + lane / 4 + 8 * r; }
  __device__ int64_t row_index(int r) const { return query + local_row(r); }
  // Whether the warp has queries: where they are few it brings keys alone.
  __device__ bool busy() const { return query + warp * 16 < shared.band.queries; }
  __device__ int64_t h_kv() const { return h / (p.heads / p.heads_kv); }
  // Of V and O, that the block does.
  __device__ int first_column() const { return kColumns < kD ? static_cast<int>(blockIdx.z) * kColumns : 0; }
  __device__ bool in_pages() const { return p.pages.table != nullptr; }

  // Sinks of the tile at key j.
  __device__ int sinks_from(int64_t j) const { return kOptions ? TileRange::bounded(p.sink_keys - j) : 0; }

  // The key at which the next tile begins. What nobody sees between sinks and windows is left out, but for one tile where
  // KeyPlaces would have the place of that at j for it.
  __device__ int64_t tile_behind(int64_t j) const {
    const int64_t next = j + kTileRows;
    if constexpr (!kOptions) return next;
    const int64_t behind = shared.band.behind_sinks(query);
    if (next < shared.band.sinks || next >= behind) return next;
    return (behind - j) / kTileRows % 2 == 0 ? behind - kTileRows : behind;
  }

  // Key or value j of the sequence, which is below its length; null: its page does not exist.
  __device__ const T* row_of(const Rows& rows, int64_t j) const {
    const auto* base = static_cast<const T*>(rows.data) + h_kv() * rows.head;
    if (!in_pages()) return base + b * rows.batch + (shared.band.first_k + j) * rows.row;
    const KeyPlace place = shared.places.of(j);
    return place.page < 0 ? nullptr : base + place.page * rows.batch + place.within * rows.row;
  }

  // K_j or V_j
  template <int kWidth>
  __device__ void load_keys(Tile<T, kWidth>& tile, const Rows& rows, int64_t j, int columns, int from = 0) {
    load_rows(tile, rows, columns, [&](int n) {
      const T* row = j + n < shared.band.keys ? row_of(rows, j + n) : nullptr;
      return row == nullptr ? row : row + from * rows.column;
    });
  }

  // S = scale Q K^T
  __device__ void scores() {
    for (int n = 0; n < 8; ++n) {
      for (int e = 0; e < 4; ++e) S.x[n][e] = 0;
    }
    multiply_rows(S.x, shared.Q, warp * 16, shared.K, 0, p.head_dim, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S.x[n][e] *= p.scale;
    }
  }

  // S <- P of the tile at key j. `cut`: not every row sees every key.
  __device__ void weights(int64_t j, bool cut) {
    if constexpr (kOptions) {
      for (int r = 0; r < 2; ++r) rows[r].keys = {shared.band.seen_by(p, row_index(r)), j};
      apply_options(j);
    } else if (cut) {
      for (int r = 0; r < 2; ++r) rows[r].keys = {shared.band.keys_of(row_index(r)), j};
      hide();
    }
    softmax();
    if (drops()) shared.kept.fill(p.dropout, b, h, query, j, false);
  }

  // S = -inf at the keys that a row does not see
  __device__ void hide() {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = n * 8 + lane % 4 * 2 + e % 2;
        if (!rows[e / 2].keys.holds(key)) S.x[n][e] = -INFINITY;
      }
    }
  }

  // The same, of the scores that options make.
  __device__ void apply_options(int64_t j) {
    const Score score(p, shared.band.offset, b, h, query, j);
    const int sinks = sinks_from(j);
#pragma unroll 1
    for (int key = lane % 4 * 2; key < kTileRows; key += 8) {
      float done[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        Row& row = rows[e / 2];
        float x = S.x[0][e], derivative;
        const bool visible =
            row.keys.holds(key + e % 2, sinks) && score.of(x, derivative, local_row(e / 2), key + e % 2);
        done[e] = visible ? x : -INFINITY;
        row.seen |= visible;
      }
      append(S.x, done);
    }
  }

  // S <- P = exp(S - m), O and l <- theirs times exp(m_old - m)
  __device__ void softmax() {
    float alpha[2], m[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = rows[r].m;
#pragma unroll
      for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(S.x[n][2 * r], S.x[n][2 * r + 1]));
      largest = max_of_row(largest);
      m[r] = largest == -INFINITY ? 0 : largest;  // -inf - -inf is NaN
      alpha[r] = exponential<T>(rows[r].m - m[r]);
      rows[r].m = largest;
      rows[r].l *= alpha[r];
      rows[r].l_rounded *= alpha[r];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S.x[n][e] = exponential<T>(S.x[n][e] - m[e / 2]);
        rows[e / 2].l += S.x[n][e];
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[n][e] *= alpha[e / 2];
    }
  }

  // O += P V
  __device__ void multiply() {
    if constexpr (T::kOnTensorCores) {
      multiply_rounded();
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rows[e / 2].l_rounded += S.x[n][e];
          if (drops() && !shared.kept.holds(local_row(e / 2), n * 8 + lane % 4 * 2 + e % 2)) S.x[n][e] = 0;
        }
      }
      multiply_weights(O, S.x, shared.V, 0, lane);
    }
  }

  __device__ void multiply_rounded() {
    constexpr bool kRest = T::kRestOfWeights;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned P[4], rest[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float low = S.x[2 * k + a / 2][a % 2 * 2], high = S.x[2 * k + a / 2][a % 2 * 2 + 1];
        P[a] = packed<T>(low, high);
        const float low_rounded = low_half<T>(P[a]), high_rounded = high_half<T>(P[a]);
        if constexpr (kRest) rest[a] = packed<T>(low - low_rounded, high - high_rounded);
        rows[a % 2].l_rounded += kRest ? low + high : low_rounded + high_rounded;
        if (drops()) {
          const unsigned keys = shared.kept.sixteen(local_row(a % 2), k) >> (a / 2 * 8 + lane % 4 * 2);
          const unsigned halves = (keys & 1 ? 0xffffu : 0) | (keys & 2 ? 0xffff0000u : 0);
          P[a] &= halves;
          if constexpr (kRest) rest[a] &= halves;
        }
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        unsigned values[4];
        load_matrices_transposed(values, shared.V.piece(k * 16 + lane % 16, n + lane / 16));
        multiply_add<T>(O[n], P, values[0], values[1]);
        multiply_add<T>(O[n + 1], P, values[2], values[3]);
        if constexpr (kRest) {
          multiply_add<T>(O[n], rest, values[0], values[1]);
          multiply_add<T>(O[n + 1], rest, values[2], values[3]);
        }
      }
    }
  }

  // O += P V with the infinities and NaNs of V alone, for the rows that see them: tensor cores would multiply them by
  // the 0 of a row that does not. What is added is +-inf, or NaN, also where P underflowed to 0.
  __device__ void add_not_finite(int64_t j) {
    uint64_t positive[2] = {};  // bit k: P of key j + k is not 0
    const Score score(p, shared.band.offset, b, h, query, j);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool kept = !drops() || shared.kept.holds(local_row(e / 2), n * 8 + lane % 4 * 2 + e % 2);
        const unsigned lanes = __ballot_sync(kAllLanes, kept && S.x[n][e] > 0) >> (lane & ~3);
        for (int t = 0; t < 4; ++t) positive[e / 2] |= static_cast<uint64_t>(lanes >> t & 1) << (n * 8 + 2 * t + e % 2);
      }
    }
#pragma unroll 1
    for (int key = 0; key < kTileRows && j + key < shared.band.keys; ++key) {
      const T* value = row_of(p.value, j + key);
      if (value == nullptr) continue;
      bool sees[2];
      for (int r = 0; r < 2; ++r) {
        sees[r] = rows[r].keys.holds(key, sinks_from(j)) && (!hides_pairs() || score.shows(local_row(r), key));
      }
#pragma unroll 1
      for (int of_lane = lane % 4 * 2; of_lane < kColumns; of_lane += 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = first_column() + of_lane + e % 2;
          if (!sees[e / 2] || column >= p.head_dim_v) continue;
          const float v = to_float(value[column * p.value.column]);
          if (v - v != 0) O[0][e] += positive[e / 2] >> key & 1 ? v : NAN;
        }
        rotate(O);
      }
    }
  }

  // O / l and L = m + log l, or what the merging kernel makes them of.
  __device__ void finish() {
    const Band& band = shared.band;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowSums row;
      row.m = rows[r].m;
      row.l = sum_of_row(rows[r].l);
      row.l_rounded = sum_of_row(rows[r].l_rounded);
      const Range keys = band.keys_of(row_index(r)), &part = shared.part;
      const bool sees = keys.first < part.last && part.first < keys.last && !keys.empty();
      const bool seen = kOptions ? sum_of_row(rows[r].seen ? 1 : 0) > 0 : sees && !part.empty();
      const int64_t i = row_index(r);
      if (i >= band.rows_q) continue;
      row.state = i >= band.queries ? RowSums::kPadding : seen ? RowSums::kSeen : RowSums::kUnseen;
      if (p.parts == 1) {
        write(row, r, i);
      } else {
        leave(row, r, i);
      }
    }
  }

  __device__ void write(const RowSums& sums, int r, int64_t i) const {
    const FinishedRow<T, kOptions> finished(p, h, sums);
    const int64_t row = shared.band.first_q + i;
    T* out = static_cast<T*>(p.out.data) + b * p.out.batch + h * p.out.head + row * p.out.row;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        const int column = first_column() + n * 8 + lane % 4 * 2 + e;
        if (column < p.head_dim_v) out[column * p.out.column] = finished.out(O[n][2 * r + e]);
      }
    }
    if (p.logsumexp.data != nullptr && tells_statistics()) statistic(p.logsumexp, b, h, row) = finished.logsumexp();
  }

  // One of the lanes and blocks that know them.
  __device__ bool tells_statistics() const { return lane % 4 == 0 && first_column() == 0; }

  // Where no key was seen O is not read.
  __device__ void leave(const RowSums& sums, int r, int64_t i) const {
    const RowParts parts(p, b, h, shared.band.first_q, i);
    if (tells_statistics()) parts.store(blockIdx.y, sums);
    if (!sums.seen()) return;
    float* out = parts.sums(blockIdx.y);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int e = 0; e < 2; ++e) {
        const int column = first_column() + n * 8 + lane % 4 * 2 + e;
        if (column < p.head_dim_v) out[column] = O[n][2 * r + e];
      }
    }
  }

  const Problem& p;
  Memory<T, kD>& shared;
  int64_t query;  // the first of the tile
  int b, h;       // its sequence and head
  int lane, warp;
  Row rows[2];
  Scores S;
  float O[kColumns / 8][4] = {};
};

template <class T, int kD, bool kOptions>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const __grid_constant__ Problem problem) {
  Forward<T, kD, kOptions>(problem, dynamic_shared<Memory<T, kD>>()).run();
}

template <class T, int kD>
cudaError_t launch_kernel(const Problem& p, cudaStream_t stream) {
  const int bytes = sizeof(Memory<T, kD>);
  const auto kernel = p.has_options ? forward_kernel<T, kD, true> : forward_kernel<T, kD, false>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const int column_blocks = p.head_dim_v > Memory<T, kD>::kColumns ? kD / Memory<T, kD>::kColumns : 1;
  const dim3 grid(p.query_blocks, static_cast<unsigned>(p.parts), static_cast<unsigned>(column_blocks));
  kernel<<<grid, kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// A warp merges the parts of a row.
template <class T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Problem p, int64_t rows) {
  const int64_t n = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (n >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t i = n % p.seqlen_q, h = n / p.seqlen_q % p.heads, b = n / p.seqlen_q / p.heads;
  const RowParts parts(p, n);
  const RowSums sums = parts.merged<T>();
  const FinishedRow<T, true> finished(p, h, sums);
  T* out = static_cast<T*>(p.out.data) + b * p.out.batch + h * p.out.head + i * p.out.row;
  float O[kMostHeadDim / 32] = {};
  parts.merge_sums<T>(sums.m, lane, O);
#pragma unroll
  for (int c = 0; c < kMostHeadDim / 32; ++c) {
    const int column = lane + 32 * c;
    if (column < p.head_dim_v) out[column * p.out.column] = finished.out(O[c]);
  }
  if (p.logsumexp.data != nullptr && lane == 0) statistic(p.logsumexp, b, h, i) = finished.logsumexp();
}

template <class T>
cudaError_t launch_merge(const Problem& p, cudaStream_t stream) {
  const int64_t rows = (p.packed ? 1 : p.batch) * p.heads * p.seqlen_q, of_block = kThreads / 32;
  merge_kernel<T><<<static_cast<unsigned>((rows + of_block - 1) / of_block), kThreads, 0, stream>>>(p, rows);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const Problem& p, cudaStream_t stream) {
  const int columns = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  const cudaError_t error = with_columns<T>(columns, [&]<int kD>() { return launch_kernel<T, kD>(p, stream); });
  return error == cudaSuccess && p.parts > 1 ? launch_merge<T>(p, stream) : error;
}

}  // namespace

cudaError_t launch_forward(const Problem& p, cudaStream_t stream) {
  return with_elements(p.elements, [&]<class T>(T) { return launch<T>(p, stream); });
}

}  // namespace polyhead::cuda
