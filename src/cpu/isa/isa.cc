#include "cpu/isa/isa.h"

#include <new>

#include "polyhead/kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

#include <cstdint>
#endif

namespace polyhead {
namespace cpu {
namespace {

#if defined(__x86_64__) || defined(__i386__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the CPU does not have the leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

// XCR0: which registers the operating system saves. Only where cpuid reports OSXSAVE.
uint32_t saved_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Bit numbers: Intel SDM volume 2A, CPUID.
Isa detect() {
  auto bit = [](uint32_t word, int n) { return (word >> n & 1) != 0; };
  Isa isa;
  const Registers basic = cpuid(1, 0);
  if (!bit(basic.ecx, 27)) return isa;  // OSXSAVE
  constexpr uint32_t kYmm = 0x06, kZmm = 0xe6;
  const uint32_t saved = saved_state();
  const bool fma = bit(basic.ecx, 12), avx = bit(basic.ecx, 28), f16c = bit(basic.ecx, 29);

  const Registers extended = cpuid(7, 0);
  isa.avx2 = (saved & kYmm) == kYmm && avx && fma && f16c && bit(extended.ebx, 5);
  const bool f = bit(extended.ebx, 16), dq = bit(extended.ebx, 17), bw = bit(extended.ebx, 30),
             vl = bit(extended.ebx, 31);
  isa.avx512 = isa.avx2 && (saved & kZmm) == kZmm && f && dq && bw && vl;
  isa.avx512bf16 = isa.avx512 && extended.eax >= 1 && bit(cpuid(7, 1).eax, 5);
  return isa;
}

#else

Isa detect() { return {}; }

#endif

}  // namespace

const Isa& isa() {
  static const Isa kIsa = detect();
  return kIsa;
}

}  // namespace cpu

std::string cpu_features() try {
  std::string names;
  auto add = [&](bool has, const char* name) {
    if (!has) return;
    if (!names.empty()) names += ' ';
    names += name;
  };
  add(cpu::isa().avx512bf16, "avx512bf16");
  add(cpu::isa().avx512, "avx512");
  add(cpu::isa().avx2, "avx2");
  return names;
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace polyhead
