// Forward of many queries of float32 with head dims above 64, whose scores are nothing but products, with FFMA. Keys and values
// lie in pieces of 16 bytes, and not in pages.
//   Q_i [64, D]  K_j, V_j [128, D]  S, P [64, 128]  O [64, D]  m, l, L [64]
// What FFMA multiplies has to be read from shared memory by each lane, so a lane has 8 x 8 of both results: 16 words for 64
// products. Therefore the warps of a block share its rows. For S each has 32 keys, as many as a step of the softmax
// (softmax.cuh), and for O each has 32 columns; weights are told through shared memory, sixteen keys at a time. K comes in
// chunks of sixteen columns, V of sixteen keys; two of them are on their way while one is used.
//   lane's rows     4 g .. 4 g + 3 and 32 + 4 g .. 32 + 4 g + 3     g = lane / 4, t = lane % 4
//   keys            8 n + 2 t + e of the warp's 32, as in fragments (mma.cuh): element 2 n + e
//   columns         4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3 of the warp's 32
#pragma once

#include "cuda/attention_forward_wide.cuh"

namespace polyhead::cuda {

template <>
struct WideMemory<Float32, 128> {
  static constexpr int kD = 128, kRows = kBlockRows, kKeys = 128, kOfStep = 32, kOfChunk = 16, kChunks = 3;
  static constexpr int kSteps = kKeys / kOfStep;
  static constexpr int kRowOfP = kRows + 4;  // the four lanes of a row write to different banks

  union Chunk {
    Tile<Float32, kOfChunk, kKeys> K;
    Tile<Float32, kD, kOfChunk, Layout::kInOrder> V;
  };
  float4 Q[kD / 2][kRows / 2];  // two columns of two rows, row by row
  Chunk chunks[kChunks];
  float P[kOfStep][kRowOfP];  // of a step: sixteen keys are used while the others come
  // Of each step of the keys in use: the largest scores, what O is multiplied by before it, and the sums of P, of every row,
  // and of each of the four lanes that share it. m: the largest scores before these keys, and behind them.
  float largest[kSteps][kRows], alpha[kSteps][kRows], sums[kSteps][4][kRows], m[2][kRows];
  float2 l[kBlockThreads];  // the sums of P before these keys: of row thread % 64, and two of its lanes
  int rescales[kSteps];     // whether some factor of a step is not 1
  int not_finite;           // 1 + the last chunk whose V had an infinity or a NaN that some row must not see
  WideBlock block;
  Keys of_row[kRows];                   // that each sees
  const float* from[2][kBlockThreads];  // of K and V: where a thread's first piece of the next chunk lies
  int64_t step_of_K, step_of_V;         // elements from a piece to the thread's next of K, and to that of the next V
};

template <>
class WideForward<Float32, 128> {
  using Memory = WideMemory<Float32, 128>;
  static constexpr int kRows = Memory::kRows, kKeys = Memory::kKeys, kOfStep = Memory::kOfStep;
  static constexpr int kOfChunk = Memory::kOfChunk, kOfLane = 8;
  static constexpr int kColumns = 32;  // of a warp
  static_assert(kOfLane * 8 == kRows && kOfLane * 4 == kOfStep && kOfLane * 4 == kColumns && kThreads == 128);

 public:
  __device__ WideForward(const Problem& problem, Memory& memory) : p(problem), shared(memory) {}

  __device__ void run() {
    prepare();
    end = shared.block.of_some.last;
    const int begin = shared.block.of_some.first / kKeys * kKeys;
    if (begin < end) {
      load_queries();
      load_K(shared.chunks[0], begin, 0);
      load_K(shared.chunks[1], begin, 1);
    }
    for (int j = begin; j < end; j += kKeys) {
      // Of the steps of the softmax those that somebody sees; some row does not see some key.
      const int first = shared.block.of_some.first > j ? (shared.block.of_some.first - j) / kOfStep : 0;
      const int last = j + kKeys < end ? Memory::kSteps : (end - j + kOfStep - 1) / kOfStep;
      const bool cut = j < shared.block.of_all.first || j + kKeys > shared.block.of_all.last;
      scores(j, first);
      weights(j, cut);
#pragma unroll 1
      for (int step = first; step < last; ++step) {
        values<0>(j, step, last, cut);
        values<1>(j, step, last, cut);
      }
      add_sums();
    }
    finish(shared.m[(begin < end ? (end + kKeys - 1) / kKeys : begin / kKeys) % 2]);
  }

 private:
  // What follows from it is computed anew each time: registers that kept it would be too many.
  __device__ static int thread() {
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));
    return thread;
  }
  __device__ static int lane() { return thread() & 31; }
  __device__ static int warp() { return thread() >> 5; }
  __device__ static int first_row() { return lane() & ~3; }
  __device__ int local_row(int r) const { return first_row() + (r < 4 ? r : 28 + r); }
  __device__ int key_of(int n) const { return n / 2 * 8 + lane() % 4 * 2 + n % 2; }
  __device__ int column_of(int c) const { return warp() * kColumns + lane() % 4 * 4 + (c < 4 ? c : 12 + c); }

  // What rows r to r + 3 of a lane have in an array of all rows: r is 0 or 4. Row i may lie at i ^ place.
  __device__ static float4& four(float* of_rows, int r, int place = 0) {
    return *reinterpret_cast<float4*>(of_rows + (first_row() ^ place) + 8 * r);
  }
  __device__ void get(float (&x)[kOfLane], float* of_rows) const {
    const float4 low = four(of_rows, 0), high = four(of_rows, 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }
  __device__ void put(const float (&x)[kOfLane], float* of_rows) const {
    four(of_rows, 0) = {x[0], x[1], x[2], x[3]};
    four(of_rows, 4) = {x[4], x[5], x[6], x[7]};
  }

  // What lies in shared memory but chunks.
  __device__ void prepare() {
    const WideBlock block(p, kRows);
    const int begin = block.of_some.first;
    if (threadIdx.x == 0) {
      shared.not_finite = 0;
      shared.block = block;
      shared.step_of_K = p.key.row * (kThreads / 4);
      shared.step_of_V = p.value.row * kOfChunk;
    }
    if (thread() < kRows) shared.of_row[thread()] = {block.band, block.own.first + thread()};
    shared.l[thread()] = {0, 0};
    if (thread() < kRows) shared.m[begin / kKeys % 2][thread()] = -INFINITY;
    __syncthreads();
    const int row_of_K = begin / kKeys * kKeys + (thread() >> 2),
              row_of_V = begin / kOfStep * kOfStep + (thread() >> 3);
    shared.from[0][thread()] = static_cast<const float*>(p.key.data) + row_of(false, row_of_K) + (thread() & 3) * 4;
    shared.from[1][thread()] = static_cast<const float*>(p.value.data) + row_of(true, row_of_V) + (thread() & 7) * 4;
  }

  // A warp brings four columns of eight rows, of which four times four lie side by side.
  __device__ void load_queries() {
    const int64_t begin = shared.block.first_query(p), rows = shared.block.band.queries - shared.block.own.first;
#pragma unroll 1
    for (int n = warp(); n < kRows / 8 * (Memory::kD / 16); n += kThreads / 32) {
      const int row = n % 8 * 8 + lane() / 4, column = n / 8 * 16 + lane() % 4 * 4;
      float4 x = {0, 0, 0, 0};
      if (row < rows) x = four_columns(p.query, begin + row * p.query.row, column, p.head_dim);
      for (const bool second : {false, true}) {
        auto* to = reinterpret_cast<float2*>(&shared.Q[column / 2 + second][row / 2]) + row % 2;
        *to = second ? float2{x.z, x.w} : float2{x.x, x.y};
      }
    }
  }
  // Of the row that begins at element `begin`: 0 from column `columns` on.
  __device__ static float4 four_columns(const Rows& rows, int64_t begin, int column, int columns) {
    if (rows.in_pieces) {
      const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + begin + column);
      return column < columns ? *from : float4{0, 0, 0, 0};
    }
    const auto at = [&](int n) { return n < columns ? number_at<Float32>(rows, begin, n) : 0; };
    return {at(column), at(column + 1), at(column + 2), at(column + 3)};
  }

  // Where key or value j of the sequence begins.
  __device__ int64_t row_of(bool value, int j) const {
    return shared.block.first_element[value] + static_cast<int64_t>(j) * (value ? p.value : p.key).row;
  }

  // Of K that is used, sixteen columns each; two at least, since so many are on their way.
  __device__ int chunks_of_K() const { return p.head_dim > kOfChunk ? (p.head_dim + kOfChunk - 1) / kOfChunk : 2; }

  // Puts chunk n of the keys from j on on its way to `free`, the chunk that was used before this one.
  __device__ void load_K(Memory::Chunk& free, int j, int n) {
    const int row = thread() >> 2, piece = thread() & 3, column = n * kOfChunk;
    const int left = column + piece * 4 < p.head_dim ? end - j - row : 0;
    const float* from = shared.from[0][thread()] + column;
    const int64_t step = shared.step_of_K;
    Float32* const to = free.K.piece(row, piece);
#pragma unroll
    for (int m = 0; m < 4; ++m, from += step) copy_piece(to + m * 32 * kOfChunk, from, m * 32 < left);
    commit_copies();
  }
  // K of the next keys is loaded now.
  __device__ void next_K() { shared.from[0][thread()] += 4 * shared.step_of_K; }
  // The same of the sixteen values from j on, behind which the next are loaded.
  __device__ void load_V(Memory::Chunk& free, int j) {
    const int row = thread() >> 3, piece = thread() & 7;
    const float* const from = shared.from[1][thread()];
    shared.from[1][thread()] = from + shared.step_of_V;
    const int left = row < end - j ? p.head_dim_v - piece * 4 : 0;
    Float32* const to = free.V.piece(row, piece);
#pragma unroll
    for (int m = 0; m < 4; ++m) copy_piece(to + m * 32, from + m * 32, m * 32 < left);
    commit_copies();
  }

  struct Turn {
    Memory::Chunk &used, &free;
  };
  // The next chunk, which has arrived, of all that the block sees; and that before it, which is free.
  __device__ Turn next_chunk() {
    auto& free = shared.chunks[used_chunk];
    used_chunk = used_chunk + 1 < Memory::kChunks ? used_chunk + 1 : 0;
    wait_for_copies_before<Memory::kChunks - 2>();
    __syncthreads();
    return {shared.chunks[used_chunk], free};
  }

  // S = Q K^T of the warp's keys. Behind K come the values from step `first` on.
  __device__ void scores(int j, int first) {
    const bool busy = j + (warp() + 1) * kOfStep > shared.block.of_some.first && j + warp() * kOfStep < end;
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
#pragma unroll
      for (int r = 0; r < kOfLane; ++r) S[n][r] = 0;
    }
#pragma unroll 1
    for (int n = 0; n < chunks_of_K(); ++n) {
      const Turn chunk = next_chunk();
      const int behind = n + 2 - chunks_of_K();
      behind < 0 ? load_K(chunk.free, j, n + 2) : load_V(chunk.free, j + first * kOfStep + behind * kOfChunk);
      if (busy) multiply_queries(chunk.used.K, n * kOfChunk);
    }
    next_K();
  }
  __device__ static float2 load_two(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
  }
  __device__ static float4 load_four(unsigned address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
  }

  // Two columns at a time. More in a round of the loop would leave no registers.
  __device__ void multiply_queries(Tile<Float32, kOfChunk, kKeys>& K, int d) {
    const unsigned keys = K.address(warp() * kOfStep + lane() % 4 * 2, 0);
    unsigned queries = shared_address(&shared.Q[d / 2][first_row() / 2]);
#pragma unroll 1
    for (unsigned at = 0; at < K.kRowBytes; at += 8, queries += sizeof(shared.Q[0])) {
      const float4 rows[4] = {load_four(queries), load_four(queries + 16), load_four(queries + 256),
                              load_four(queries + 272)};
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) {
        const float2 x = load_two((keys ^ at) + (n / 2 * 8 + n % 2) * K.kRowBytes);
#pragma unroll
        for (int r = 0; r < kOfLane; r += 2) {
          S[n][r] = fmaf(rows[r / 2].y, x.y, fmaf(rows[r / 2].x, x.x, S[n][r]));
          S[n][r + 1] = fmaf(rows[r / 2].w, x.y, fmaf(rows[r / 2].z, x.x, S[n][r + 1]));
        }
      }
    }
  }

  // S <- P: a step of the softmax for each warp, one behind the other.
  __device__ void weights(int j, bool cut) {
#pragma unroll
    for (int r = 0; r < kOfLane; ++r) {
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) S[n][r] = rounded_product(S[n][r], p.scale);
    }
    if (cut) hide(j + warp() * kOfStep);
#pragma unroll
    for (int r = 0; r < kOfLane; r += 4) {
      float4 largest;
      largest.x = largest_of(r), largest.y = largest_of(r + 1), largest.z = largest_of(r + 2),
      largest.w = largest_of(r + 3);
      if (lane() % 4 == 0) four(shared.largest[warp()], r) = largest;
    }
    __syncthreads();
    bool any = false;
#pragma unroll
    for (int r = 0; r < kOfLane; r += 4) any |= step_of_four(r, j);
    any = __any_sync(kAllLanes, any);
    if (lane() == 0) shared.rescales[warp()] = any;
  }

  // The largest score of row r among the warp's keys.
  __device__ float largest_of(int r) const {
    float largest = S[0][r];
#pragma unroll
    for (int n = 1; n < kOfLane; ++n) largest = fmaxf(largest, S[n][r]);
    return max_of_row(largest);
  }

  // Of rows r to r + 3. Returns whether O of one of them changes.
  __device__ bool step_of_four(int r, int j) {
    float4 before = four(shared.m[j / kKeys % 2], r);
#pragma unroll 1
    for (int step = 0; step < warp(); ++step) before = largest_of_both(before, four(shared.largest[step], r));
    const float4 m = largest_of_both(before, four(shared.largest[warp()], r));
    if (warp() == Memory::kSteps - 1 && lane() % 4 == 0) four(shared.m[(j / kKeys + 1) % 2], r) = m;
    float4 alpha, sums;
    take_step(r, before.x, m.x, alpha.x, sums.x);
    take_step(r + 1, before.y, m.y, alpha.y, sums.y);
    take_step(r + 2, before.z, m.z, alpha.z, sums.z);
    take_step(r + 3, before.w, m.w, alpha.w, sums.w);
    if (lane() % 4 == 0) four(shared.alpha[warp()], r) = alpha;
    four(shared.sums[warp()][lane() % 4], r, lane() % 4 * 8) = sums;
    return alpha.x != 1 || alpha.y != 1 || alpha.z != 1 || alpha.w != 1;
  }
  __device__ static float4 largest_of_both(const float4& a, const float4& b) {
    return {fmaxf(a.x, b.x), fmaxf(a.y, b.y), fmaxf(a.z, b.z), fmaxf(a.w, b.w)};
  }
  // As softmax_step does it.
  __device__ void take_step(int r, float before, float m, float& alpha, float& sum) {
    const float finite = m == -INFINITY ? 0 : m;
    alpha = exponential<Float32>(before - finite);
#pragma unroll
    for (int n = 0; n < kOfLane; ++n) {
      S[n][r] = exponential<Float32>(S[n][r] - finite);
      sum = n == 0 ? S[n][r] : sum + S[n][r];
    }
  }

  // S = -inf at the keys from `first` on that a row does not see
  __device__ void hide(int first) {
#pragma unroll
    for (int r = 0; r < kOfLane; ++r) {
      const Keys seen = shared.of_row[local_row(r)];
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) {
        if (!seen.hold(first + key_of(n))) S[n][r] = -INFINITY;
      }
    }
  }

  // l <- l alpha + sum P, a step after the other: of a row, and of two of the lanes that share it.
  __device__ void add_sums() {
    const int row = thread() % kRows, t = thread() / kRows * 2;
    float2 l = shared.l[thread()];
#pragma unroll
    for (int step = 0; step < Memory::kSteps; ++step) {
      const float alpha = shared.alpha[step][row];
      l.x = rounded_product(l.x, alpha) + shared.sums[step][t][row ^ 8 * t];
      l.y = rounded_product(l.y, alpha) + shared.sums[step][t + 1][row ^ 8 * (t + 1)];
    }
    shared.l[thread()] = l;
  }

  // O += P V of a half of a step, of the keys at j.
  template <int kHalf>
  __device__ void values(int j, int step, int last, bool cut) {
    if (warp() == step) put_weights<kHalf>();
    const Turn chunk = next_chunk();
    auto& V = chunk.used.V;
    const int first = j + step * kOfStep + kHalf * kOfChunk;
    if (step + 1 < last) {
      load_V(chunk.free, first + kOfStep);
    } else if (j + kKeys < end) {
      load_K(chunk.free, j + kKeys, kHalf);
    } else {
      commit_copies();
    }
    bool careful = false;
    if (cut) {
      const int number = first / kOfChunk + 1;
      if (clear_not_finite(V)) atomicMax(&shared.not_finite, number);
      __syncthreads();
      careful = shared.not_finite == number;
    }
    if (kHalf == 0) rescale(step);
    if (warp() * kColumns < p.head_dim_v) multiply_weights(V, kHalf * kOfChunk);
    if (careful) add_not_finite_values(first, kHalf * kOfChunk);
  }

  template <int kHalf>
  __device__ void put_weights() {
#pragma unroll
    for (int n = kHalf * kOfLane / 2; n < (kHalf + 1) * kOfLane / 2; ++n) put(S[n], shared.P[key_of(n)]);
  }

  __device__ void rescale(int step) {
    if (!shared.rescales[step]) return;
    float alpha[kOfLane];
    get(alpha, shared.alpha[step]);
#pragma unroll
    for (int r = 0; r < kOfLane; ++r) {
#pragma unroll
      for (int c = 0; c < kOfLane; ++c) O[r][c] *= alpha[r];
    }
  }

  // Of P the rows from `key` on.
  __device__ void multiply_weights(Tile<Float32, Memory::kD, kOfChunk, Layout::kInOrder>& V, int key) {
    unsigned of_P = shared_address(&shared.P[key][first_row()]);
    unsigned of_V = V.address(0, warp() * (kColumns / 4) + lane() % 4);
#pragma unroll 1
    for (const unsigned end_of_P = of_P + kOfChunk * sizeof(shared.P[0]); of_P != end_of_P;) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // more would leave no registers
        const unsigned P = of_P + k * sizeof(shared.P[0]), columns = of_V + k * V.kRowBytes;
        const float4 p0 = load_four(P), p1 = load_four(P + 128), v0 = load_four(columns), v1 = load_four(columns + 64);
        const float rows[kOfLane] = {p0.x, p0.y, p0.z, p0.w, p1.x, p1.y, p1.z, p1.w};
        const float x[kOfLane] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
#pragma unroll
        for (int r = 0; r < kOfLane; ++r) {
#pragma unroll
          for (int c = 0; c < kOfLane; ++c) O[r][c] = fmaf(rows[r], x[c], O[r][c]);
        }
      }
      of_P += 2 * sizeof(shared.P[0]), of_V += 2 * V.kRowBytes;
    }
  }

  // O += P V with the infinities and NaNs of a chunk of V, which are not in shared memory: see products.cuh.
  __device__ void add_not_finite_values(int first, int of_P) {
#pragma unroll 1
    for (int k = 0; k < kOfChunk && first + k < shared.block.band.keys; ++k) {
      const int64_t row = row_of(true, first + k);
      unsigned seen = 0, above = 0;
      for (int r = 0; r < kOfLane; ++r) {
        seen |= shared.of_row[local_row(r)].hold(first + k) ? 1u << r : 0;
        above |= shared.P[of_P + k][local_row(r)] > 0 ? 1u << r : 0;
      }
#pragma unroll
      for (int c = 0; c < kOfLane; ++c) {
        const float x = column_of(c) < p.head_dim_v ? number_at<Float32>(p.value, row, column_of(c)) : 0;
        if (x - x == 0) continue;
#pragma unroll
        for (int r = 0; r < kOfLane; ++r) {
          if (seen >> r & 1) O[r][c] += above >> r & 1 ? x : NAN;
        }
      }
    }
  }

  // O / l and L = m + log l, of the block's queries, when their largest scores are m.
  __device__ void finish(const float* m) {
    const Band& band = shared.block.band;
    const int b = shared.block.own.b, h = shared.block.own.h;
    // As sum_of_row adds them.
    const float2 l = shared.l[thread()];
    shared.largest[thread() / kRows][thread() % kRows] = l.x + l.y;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kOfLane; ++r) {
      const int64_t i = shared.block.own.first + local_row(r);
      if (i >= band.rows_q) continue;
      RowSums sums;
      sums.m = m[local_row(r)];
      sums.l = sums.l_rounded = shared.largest[0][local_row(r)] + shared.largest[1][local_row(r)];
      const Keys seen = shared.of_row[local_row(r)];
      sums.state = i >= band.queries ? RowSums::kPadding : seen.empty() ? RowSums::kUnseen : RowSums::kSeen;
      const FinishedRow<false> finished(p, h, sums);
      const int64_t row = band.first_q + i, out = b * p.out.batch + h * p.out.head + row * p.out.row;
#pragma unroll
      for (int c = 0; c < kOfLane; ++c) {
        if (column_of(c) >= p.head_dim_v) continue;
        store_sum<Float32>(p.out, out + column_of(c) * p.out.column, finished.out(O[r][c]));
      }
      if (p.logsumexp.data != nullptr && warp() == 0 && lane() % 4 == 0)
        statistic(p.logsumexp, b, h, row) = finished.logsumexp();
    }
  }

  const Problem& p;
  Memory& shared;
  int used_chunk = Memory::kChunks - 1;
  int end;                    // of the keys that some query sees
  float S[kOfLane][kOfLane];  // [key][row], then P
  float O[kOfLane][kOfLane] = {};
};

}  // namespace polyhead::cuda
