// Products of four warps on the tensor cores of 9.0, whose factors lie in shared memory and which run while the warps go on
// (PTX ISA, wgmma.mma_async): D [64, N] += A [64, 16] B [16, N]. Warp w of the four has rows 16 w to 16 w + 15 of D, and of an A
// in registers, in the fragments of mma.cuh.
#pragma once

#include "cuda/lane_rows.cuh"
#include "cuda/mma.cuh"
#include "cuda/tile.cuh"

namespace polyhead::cuda {

constexpr int kGroupThreads = OneGroup::kThreads, kGroupRows = 64;
constexpr int kGroupBytes = 227 * 1024;  // of shared memory, that a block may have on 9.0

// Rows of a matrix as such products read them: panels of 64 columns, each with its rows of 128 bytes one behind the other, in which
// piece c of row r lies at c ^ (r % 8).
template <class T, int kD, int kRows>
using Panels = Tile<T, kD, kRows, Layout::kPanels>;

// Registers of products are the warps' until this, and shared memory is written.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last kGroups groups are done.
template <int kGroups>
__device__ inline void wait_for_products_before() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// What this thread wrote to shared memory is there for products behind the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What tells where a factor lies, which all lanes know: its first bytes, how far apart panels are (of columns, where these are not the terms), and
// groups of eight rows.
__device__ inline uint64_t factor_at(unsigned shared_bytes, unsigned panel_bytes) {
  constexpr uint64_t kSwizzled = 1, kEightRows = 8 * 128;
  const unsigned first =
      __shfl_sync(kAllLanes, shared_bytes >> 4 | panel_bytes >> 4 << 16, 0);  // one register for all lanes
  return first | (kEightRows >> 4) << 32 | kSwizzled << 62;
}
// The same factor, so many bytes further.
__device__ inline uint64_t further(uint64_t factor, unsigned bytes) {
  return (factor & ~uint64_t{0xffffffff}) | (static_cast<unsigned>(factor) + (bytes >> 4));
}

// What a thread of this warpgroup may have from here on: all of its warps call it.
template <int kRegisters>
__device__ inline void give_registers_to_group() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers_from_group() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barriers of some threads of a block, beside that of all.
constexpr int kCopiesBarrier = 1, kComputingBarrier = 2, kFirstGroupBarrier = 3;
__device__ inline void wait_for_group(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A barrier that threads arrive at and wait for later, again and again: its phase is over when all warps of a block, as many as
// init() says, have arrived.
class Phases {
 public:
  // One thread; then a barrier.
  __device__ void init(int warps) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&bits_)), "r"(warps) : "memory");
  }
  // A warp has done what others wait for.
  __device__ void arrive(int lane) {
    __syncwarp();
    if (lane != 0) return;
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(shared_address(&bits_))
                 : "memory");
  }
  // Until phase n, counted from 0, is over: the last that may be, or that before it.
  __device__ void wait(int n) {
    const unsigned address = shared_address(&bits_), parity = n & 1;
    int over = 0;
    while (over == 0) {
      asm volatile(
          "{.reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.b32 %0, 1, 0, over;}"
          : "=r"(over)
          : "r"(address), "r"(parity)
          : "memory");
    }
  }

 private:
  uint64_t bits_;
};

#define POLYHEAD_C(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define POLYHEAD_C8(n)                                                                                          \
  POLYHEAD_C(n), POLYHEAD_C(n + 1), POLYHEAD_C(n + 2), POLYHEAD_C(n + 3), POLYHEAD_C(n + 4), POLYHEAD_C(n + 5), \
      POLYHEAD_C(n + 6), POLYHEAD_C(n + 7)
#define POLYHEAD_D32                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define POLYHEAD_D64                                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "                         \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
  "%41, "                                                                                                          \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// C [64, 64 or 128] = A B^T, or if `add` C + A B^T, of rows A and B: columns of a panel are the terms.
template <class T>
__device__ inline void multiply_rows_async(float (&c)[8][4], uint64_t a, uint64_t b, bool add);
template <class T>
__device__ inline void multiply_rows_async(float (&c)[16][4], uint64_t a, uint64_t b, bool add);

// C [64, 64 or 128] += A B of A in registers: rows of B are the terms. C [64, 8] += A B^T of eight rows B.
template <class T>
__device__ inline void multiply_weights_async(float (&c)[8][4], const unsigned (&a)[4], uint64_t b);
template <class T>
__device__ inline void multiply_weights_async(float (&c)[16][4], const unsigned (&a)[4], uint64_t b);
template <class T>
__device__ inline void multiply_weights_async(float (&c)[1][4], const unsigned (&a)[4], uint64_t b);

#define POLYHEAD_PRODUCTS(Type, name)                                                                                 \
  template <>                                                                                                         \
  __device__ inline void multiply_rows_async<Type>(float(&c)[8][4], uint64_t a, uint64_t b, bool add) {               \
    asm volatile(                                                                                                     \
        "{.reg .pred add; setp.ne.b32 add, %34, 0;\n"                                                                 \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " POLYHEAD_D32 ", %32, %33, add, 1, 1, 0, 0;}"  \
        : POLYHEAD_C8(0)                                                                                              \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                                \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_rows_async<Type>(float(&c)[16][4], uint64_t a, uint64_t b, bool add) {              \
    asm volatile(                                                                                                     \
        "{.reg .pred add; setp.ne.b32 add, %66, 0;\n"                                                                 \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " POLYHEAD_D64 ", %64, %65, add, 1, 1, 0, 0;}" \
        : POLYHEAD_C8(0), POLYHEAD_C8(8)                                                                              \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                                \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_weights_async<Type>(float(&c)[8][4], const unsigned(&a)[4], uint64_t b) {           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " POLYHEAD_D32                         \
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                                           \
                 : POLYHEAD_C8(0)                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                               \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_weights_async<Type>(float(&c)[16][4], const unsigned(&a)[4], uint64_t b) {          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " POLYHEAD_D64                        \
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                           \
                 : POLYHEAD_C8(0), POLYHEAD_C8(8)                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                               \
  }                                                                                                                   \
  template <>                                                                                                         \
  __device__ inline void multiply_weights_async<Type>(float(&c)[1][4], const unsigned(&a)[4], uint64_t b) {           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." name "." name                                           \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"                                               \
                 : POLYHEAD_C(0)                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                               \
  }
POLYHEAD_PRODUCTS(BFloat16, "bf16")
POLYHEAD_PRODUCTS(Float16, "f16")

#undef POLYHEAD_PRODUCTS
#undef POLYHEAD_C
#undef POLYHEAD_C8
#undef POLYHEAD_D32
#undef POLYHEAD_D64

// Of 64 rows of the tile from row `first` on, as the left factor of multiply_rows_async, and of all of it.
template <class T, int kD, int kRows>
__device__ inline uint64_t factor_of(Panels<T, kD, kRows>& tile, int first = 0) {
  return factor_at(shared_address(tile.elements) + first * 128, kRows * 128);
}

// Where column 16 k of a factor whose columns are the terms begins, of so many rows, in bytes.
template <int kRows>
constexpr unsigned kBytesToColumns(int k) {
  return k / 4 * kRows * 128 + k % 4 * 32;
}

}  // namespace polyhead::cuda
