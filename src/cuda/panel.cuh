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
// Until all but the last `kGroups` groups of copies have landed.
template <int kGroups>
__device__ inline void wait_for_copies_before() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Lines from `first` on, of `lines`, and terms from `term` on, of `end_term`; the others are 0. Copies are in flight until
// they are waited for.
template <class T, int kLines, bool kTermsInside>
__device__ void load_panel(Panel<T, kLines, kTermsInside>& panel, const Factor& x, int first, int lines, int term,
                           int end_term) {
  using Of = Panel<T, kLines, kTermsInside>;
  const T* const data = static_cast<const T*>(x.data);
#pragma unroll
  for (int n = static_cast<int>(threadIdx.x); n < Of::kRows * Of::kPieces; n += kThreads) {
    const int row = n / Of::kPieces, c = n % Of::kPieces, inner = c * Of::kPiece;
    const int line = first + (kTermsInside ? row : inner), k = term + (kTermsInside ? inner : row);
    const int inside = kTermsInside ? end_term - k : lines - line;  // elements from here on
    const int left = (kTermsInside ? line < lines : k < end_term) ? inside : 0;
    const int there = left < 0 ? 0 : left < Of::kPiece ? left : Of::kPiece;
    T* const to = panel.piece(row, c);
    if (x.in_pieces) {
      const int64_t at = there > 0 ? offset_of(x.lines, line) + offset_of(x.terms, k) : 0;
      copy_bytes(to, data + at, there * static_cast<int>(sizeof(T)));
      continue;
    }
    constexpr int kInWord = Of::kPiece / 4;
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      const auto bits = [&](int i) -> unsigned {
        if (i >= there) return 0;
        return data[offset_of(x.lines, kTermsInside ? line : line + i) + offset_of(x.terms, kTermsInside ? k + i : k)]
            .bits;
      };
      unsigned both = bits(kInWord * word);
      if constexpr (kInWord == 2) both |= bits(2 * word + 1) << 16;
      reinterpret_cast<unsigned*>(to)[word] = both;
    }
  }
}

}  // namespace polyhead::cuda
