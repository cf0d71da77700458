// Weights as products read them, prepacked once for many calls: a head that tells whose they are, then the matrices. On a
// device the head stays empty: the host could not look at it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "contract/operands.h"
#include "linear/product.h"

namespace polyhead {

// Where prepacked matrices lie, in bytes from the start.
struct PrepackedLayout {
  static constexpr int kMaxMatrices = 4;
  size_t begin[kMaxMatrices] = {}, end[kMaxMatrices] = {};  // end 0: no neighbour may follow
  size_t bytes = 0;
  uint64_t fingerprint = 0;
};

struct PrepackedHeader {
  static constexpr uint64_t kMagic = 0x7061636b65642077;  // "packed w"

  uint64_t magic = kMagic;
  uint64_t fingerprint = 0;  // of the kernel, the type and the sizes: layers that agree in these may share one
};

// A weight [in, out] that is prepacked; nothing, if either is 0.
struct MatrixSize {
  int64_t in = 0, out = 0;
};

// Fills `layout`. False if it leaves the address space.
bool lay_out_prepacked(const linear::Kernel& kernel, DType dtype, std::span<const MatrixSize> matrices,
                       PrepackedLayout* layout);

// Whether `maker` has filled it, the argument `name`, for such a layer, block or product.
Status check_prepacked(const linear::Kernel& kernel, const PrepackedLayout& layout, const char* name, const char* maker,
                       const void* prepacked);

// Matrix `index`, where it is prepacked.
PrepackedMatrix prepacked_matrix(const PrepackedLayout& layout, int index, const void* prepacked);

// The head, then `matrices`, in the order of the layout; those that are not given are left out.
Status write_prepacked(const linear::Kernel& kernel, const PrepackedLayout& layout,
                       std::span<const linear::Matrix> matrices, void* prepacked, const Run& run);

}  // namespace polyhead
