// What a block of threads multiplies at a time: 64 bytes of terms of kLines rows of A, or columns of B, in shared memory.
//   terms inside   [line, term]   four pieces of 16 bytes a row
//   lines inside   [term, line]
// Pieces are swizzled, so that eight rows of a matrix of ldmatrix, or what eight lanes read, lie in different banks.
#pragma once

#include "cuda/eight.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

template <class T, int kLines, bool kTermsInside>
struct Panel {
  static constexpr int kPiece = 16 / sizeof(T);  // elements
  static constexpr int kTerms = 64 / sizeof(T);
  static constexpr int kRows = kTermsInside ? kLines : kTerms;
  static constexpr int kPieces = (kTermsInside ? kTerms : kLines) / kPiece;  // of a row
  T elements[kLines * kTerms];

  __device__ T* piece(int row, int c) {
    const int place = kPieces == 4 ? c ^ (row / 2 & 3) : c ^ (row & 7);
    return elements + (row * kPieces + place) * kPiece;
  }
  __device__ float4 four(int row, int c) { return *reinterpret_cast<const float4*>(piece(row, c)); }
};

// The first `bytes` of 16 to shared memory, and zeros; without bytes `from` is not read.
__device__ inline void copy_bytes(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// Fills panels with lines from `first` on, of `lines`, and terms from `term` on, of `end_term`; the others are 0. Each
// thread has one piece of some rows, whose places do not depend on the terms where these lie inside.
template <class T, int kLines, bool kTermsInside>
class PanelSource {
  using To = Panel<T, kLines, kTermsInside>;
  static constexpr int kPiece = To::kPiece, kRowsOfThreads = kThreads / To::kPieces;
  static constexpr int kRowsAtOnce = kRowsOfThreads < To::kRows ? kRowsOfThreads : To::kRows;
  static constexpr int kCount = To::kRows / kRowsAtOnce;
  static_assert(kCount * kRowsAtOnce == To::kRows);

 public:
  __device__ PanelSource(const Factor& factor, int first_line, int num_lines)
      : x(factor), first(first_line), lines(num_lines) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int line = first + (kTermsInside ? row(i) : piece() * kPiece);
      places[i] = line < lines ? offset_of(x.lines, line) : kNoRow;
    }
  }

  // Copies are in flight until they are waited for.
  __device__ void load(To& panel, int term, int end_term) const {
    if (kRowsAtOnce < kRowsOfThreads && row(0) >= To::kRows) return;  // of few rows some threads have none
    if (!x.in_pieces) return load_elements(panel, term, end_term);
    const T* const data = static_cast<const T*>(x.data);
    const int inner = term + piece() * kPiece;
    const int left = kTermsInside ? end_term - inner : lines - first - piece() * kPiece;
    const int bytes = (left < 0 ? 0 : left < kPiece ? left : kPiece) * static_cast<int>(sizeof(T));
    const int64_t at = kTermsInside && bytes > 0 ? offset_of(x.terms, inner) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t place = places[kTermsInside ? i : 0];
      const int k = term + row(i);
      const bool there = place != kNoRow && bytes > 0 && (kTermsInside || k < end_term);
      const int64_t from = !there ? 0 : place + (kTermsInside ? at : offset_of(x.terms, k));
      copy_bytes(panel.piece(row(i), piece()), data + from, there ? bytes : 0);
    }
  }

 private:
  static constexpr int kPlaces = kTermsInside ? kCount : 1;

  __device__ static int piece() { return static_cast<int>(threadIdx.x) % To::kPieces; }
  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / To::kPieces + i * kRowsAtOnce; }

  // One by one, as they lie.
  __device__ void load_elements(To& panel, int term, int end_term) const {
    constexpr int kInWord = kPiece / 4;
#pragma unroll 1
    for (int n = 0; n < 4 * kCount; ++n) {
      const int r = row(n / 4), word = n % 4, inner = piece() * kPiece + word * kInWord;
      const auto bits = [&](int i) -> unsigned {
        const int line = first + (kTermsInside ? r : inner + i), k = term + (kTermsInside ? inner + i : r);
        if (line >= lines || k >= end_term) return 0;
        return static_cast<const T*>(x.data)[offset_of(x.lines, line) + offset_of(x.terms, k)].bits;
      };
      unsigned both = bits(0);
      if constexpr (kInWord == 2) both |= bits(1) << 16;
      reinterpret_cast<unsigned*>(panel.piece(r, piece()))[word] = both;
    }
  }

  const Factor& x;
  int first, lines;
  int64_t places[kPlaces];  // of the rows' lines, or of the piece's, in elements
};

}  // namespace polyhead::cuda
