// Products of 16 x 16 by 16 x 8 on tensor cores, and their fragments from shared memory. g = lane / 4, t = lane % 4:
//   A[16, 16]  a[0] (g, 2t), a[1] (g + 8, 2t), a[2] (g, 2t + 8), a[3] (g + 8, 2t + 8), each with the next column
//   B[16, 8]   b0 (2t, g), b1 (2t + 8, g), each with the row below
//   C[16, 8]   c[0] (g, 2t), c[1] (g, 2t + 1), c[2] (g + 8, 2t), c[3] (g + 8, 2t + 1)        (PTX ISA, mma.m16n8k16)
#pragma once

#include "cuda/numbers.cuh"

namespace polyhead::cuda {

__device__ inline unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// C += A B
template <class T>
__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#define POLYHEAD_MULTIPLY_ADD(Type, name)                                                                    \
  template <>                                                                                                \
  __device__ inline void multiply_add<Type>(float(&c)[4], const unsigned(&a)[4], unsigned b0, unsigned b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                      \
                 ".f32 "                                                                                     \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                           \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                            \
  }
POLYHEAD_MULTIPLY_ADD(BFloat16, "bf16")
POLYHEAD_MULTIPLY_ADD(Float16, "f16")
#undef POLYHEAD_MULTIPLY_ADD

// C = A B
template <class T>
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#define POLYHEAD_MULTIPLY(Type, name)                                                                    \
  template <>                                                                                            \
  __device__ inline void multiply<Type>(float(&c)[4], const unsigned(&a)[4], unsigned b0, unsigned b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                  \
                 ".f32 "                                                                                 \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"                   \
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));              \
  }
POLYHEAD_MULTIPLY(BFloat16, "bf16")
POLYHEAD_MULTIPLY(Float16, "f16")
#undef POLYHEAD_MULTIPLY

// Four matrices [8, 8]: lanes 8n .. 8n + 7 say where the rows of matrix n lie in shared memory, 16 bytes each.
__device__ inline void load_matrices(unsigned (&d)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&d)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices(unsigned (&d)[4], const void* row) { load_matrices(d, shared_address(row)); }
__device__ inline void load_matrices_transposed(unsigned (&d)[4], const void* row) {
  load_matrices_transposed(d, shared_address(row));
}

}  // namespace polyhead::cuda
