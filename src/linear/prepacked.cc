#include "linear/prepacked.h"

#include <cstring>
#include <string_view>

#include "core/fingerprint.h"
#include "core/memory_size.h"
#include "core/sentence.h"

namespace polyhead {

bool lay_out_prepacked(const linear::Kernel& kernel, DType dtype, std::span<const MatrixSize> matrices,
                       PrepackedLayout* layout) {
  constexpr int64_t kMostPanelColumns = 64;  // what a matrix of fewer columns may be padded to
  MemoryMap map, padded;
  map.take_bytes(sizeof(PrepackedHeader));
  const int64_t panel = kernel.panel_columns();
  Fingerprint print;
  print.add(std::string_view(kernel.name), linear::kPackedVersion, dtype);
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto [in, out] = matrices[i];
    print.add(in, out);
    padded.take({in, out}, 8);
    padded.take({in, kMostPanelColumns}, 8);
    if (!padded.fits()) return false;
    const MemorySize size_bytes = kernel.packed_bytes(in, out, dtype);
    layout->begin[i] = map.take_bytes(size_bytes);
    layout->end[i] =
        panel > 0 && out % panel == 0 ? layout->begin[i] + size_bytes.value() : 0;  // before what aligns the next
  }
  layout->bytes = map.bytes();
  layout->fingerprint = print.value();
  return map.fits();
}

Status check_prepacked(const linear::Kernel& kernel, const PrepackedLayout& layout, const char* name, const char* maker,
                       const void* prepacked) {
  if (kernel.device != Device::kCpu) return {};
  PrepackedHeader header;
  std::memcpy(&header, prepacked, sizeof header);
  if (header.magic != PrepackedHeader::kMagic) {
    return invalid(sentence(name, " holds none: ", maker, "() with this memory comes first"));
  }
  if (header.fingerprint == layout.fingerprint) return {};
  return invalid(sentence(name, " was prepacked for other sizes, another dtype or another kernel"));
}

PrepackedMatrix prepacked_matrix(const PrepackedLayout& layout, int index, const void* prepacked) {
  if (prepacked == nullptr) return {};
  const char* const start = static_cast<const char*>(prepacked);
  return {start + layout.begin[index], layout.end[index] > 0 ? start + layout.end[index] : nullptr};
}

Status write_prepacked(const linear::Kernel& kernel, const PrepackedLayout& layout,
                       std::span<const linear::Matrix> matrices, void* prepacked, const Run& run) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (!matrices[i].given()) continue;
    Status status = kernel.pack(matrices[i], static_cast<char*>(prepacked) + layout.begin[i], run);
    if (!status.ok()) return status;
  }
  if (kernel.device != Device::kCpu) return {};
  PrepackedHeader header;
  header.fingerprint = layout.fingerprint;
  std::memcpy(prepacked, &header, sizeof header);
  return {};
}

}  // namespace polyhead
