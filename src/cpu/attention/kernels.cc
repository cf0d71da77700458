// The CPU kernels: which desc each takes.
#include "cpu/attention/kernels.h"

#include "cpu/attention/kernel_of.h"
#include "cpu/isa/isa.h"

namespace polyhead {
namespace cpu {
namespace {

template <Isa isa>
std::string here() {
  return why_not(isa);
}

}  // namespace

std::string why_no_tmm(const AttentionDesc& desc) {
  for (const DType dtype : {desc.dtype, out_dtype(desc)}) {
    if (dtype == DType::kBFloat16) continue;
    return std::string(dtype == desc.dtype ? "dtype is " : "out_dtype is ") + dtype_name(dtype) + ", takes bfloat16";
  }
  for (const DType dtype : {key_dtype(desc), value_dtype(desc)}) {
    if (dtype != desc.dtype) return std::string("keys or values are ") + dtype_name(dtype) + ", takes bfloat16";
  }
  if (tiny_takes(desc)) return "sizes of 16 at most are left to vectors, which hold a head in each lane";
  if (decode_takes(desc)) {
    return "seqlen_q is " + std::to_string(desc.seqlen_q) + ", takes " + std::to_string(kMaxDecodeQueries + 1) +
           " or more: fewer read keys and values but once, from memory, which vectors keep up with";
  }
  return "";
}

}  // namespace cpu

#define ROW(name, features) cpu::kernel_of<cpu::here<cpu::Isa::name>, cpu::name::kFunctions>("cpu_" #name),
constexpr Kernel kCpuKernels[] = {POLYHEAD_ISAS(ROW)};
#undef ROW

}  // namespace polyhead
