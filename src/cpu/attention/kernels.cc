// The CPU kernels: which desc each takes.
#include "cpu/attention/kernels.h"

#include <cmath>

#include "core/sentence.h"
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

// Few queries and tiny heads go by vectors. What is refused is refused for any number of queries: a layer has one kernel for calls
// of any length.
std::string leaves_of_pairs(const AttentionDesc& desc) {
  for (const DType dtype : {desc.dtype, out_dtype(desc)}) {
    if (dtype == DType::kBFloat16) continue;
    return std::string(dtype == desc.dtype ? "dtype is " : "out_dtype is ") + dtype_name(dtype) + ", takes bfloat16";
  }
  for (const DType dtype : {key_dtype(desc), value_dtype(desc)}) {
    if (dtype != desc.dtype) return sentence("keys or values are ", dtype_name(dtype), ", takes bfloat16");
  }
  return "";
}

// Few queries and tiny heads go by vectors here, too.
std::string leaves_of_planes(const AttentionDesc& desc) {
  if (desc.dtype == DType::kBFloat16) return "dtype is bfloat16, takes float32 or float16";
  for (const DType dtype : {key_dtype(desc), value_dtype(desc)}) {
    if (dtype == desc.dtype) continue;
    return std::string("keys or values are ") + dtype_name(dtype) + ", takes those of the dtype of queries";
  }
  constexpr double kMostScale = 0x1p60;
  if (desc.scale && std::abs(*desc.scale) > kMostScale)
    return sentence("scale is ", *desc.scale, ", takes -2^60 to 2^60: others show what products below 2^-126 lose");
  if (desc.normalizer == Normalizer::kNone) return "normalizer is none, takes weights that a softmax bounds";
  if (desc.has_sink_logits)
    return "has_sink_logits is true, and beside a sink all weights of a row may be too small for it";
  return "";
}

namespace {

#ifdef __x86_64__
constexpr auto leaves_of(Isa isa) { return isa == Isa::amx ? leaves_of_pairs : leaves_nothing; }
#else
constexpr auto leaves_of(Isa) { return leaves_nothing; }
#endif

}  // namespace
}  // namespace cpu

#define ROW(name, features) \
  cpu::kernel_of<cpu::here<cpu::Isa::name>, cpu::name::kFunctions, cpu::leaves_of(cpu::Isa::name)>("cpu_" #name),
constexpr Kernel kCpuKernels[] = {POLYHEAD_ISAS(ROW)};
#undef ROW
#ifdef __x86_64__
constexpr Kernel kAmxFloat32 =
    cpu::kernel_of<cpu::here<cpu::Isa::amx>, cpu::amx::kFloat32Functions, cpu::leaves_of_planes>("cpu_amx_float32");
#endif

}  // namespace polyhead
