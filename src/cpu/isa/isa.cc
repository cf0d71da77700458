#include "cpu/isa/isa.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "polyhead/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace polyhead {
namespace cpu {
namespace {

#define NUMBER(name, ...) kNumber##name,
enum FeatureNumber { POLYHEAD_X86_FEATURES(NUMBER) kNumFeatures };
#undef NUMBER

#define BIT(name, ...) constexpr uint32_t k##name = uint32_t{1} << kNumber##name;
POLYHEAD_X86_FEATURES(BIT)
#undef BIT

struct IsaRow {
  const char* name;
  uint32_t features;
};
#define ROW(name, features) {#name, features},
constexpr IsaRow kIsas[] = {POLYHEAD_ISAS(ROW)};
#undef ROW

#define NAME(name, ...) #name,
constexpr const char* kFeatureNames[] = {POLYHEAD_X86_FEATURES(NAME)};
#undef NAME

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the CPU does not have the leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

// XCR0: which registers the operating system saves.
uint32_t saved_registers() {
  if ((cpuid(1, 0).ecx >> 27 & 1) == 0) return 0;  // OSXSAVE
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

uint32_t detect() {
  constexpr uint32_t kNone = 0, kXmm = 0x02, kYmm = 0x06, kZmm = 0xe6, kTmm = 0x600e6;  // of XCR0
  const uint32_t saved = saved_registers();
  uint32_t found = 0;
#define ROW(name, leaf, subleaf, word, bit, registers) \
  if ((cpuid(leaf, subleaf).word >> bit & 1) != 0 && (saved & registers) == registers) found |= k##name;
  POLYHEAD_X86_FEATURES(ROW)
#undef ROW
  return found;
}

constexpr uint32_t kAsksFirst = kAMX_TILE | kAMX_BF16;

// Linux lets a process use AMX's registers, 8 KiB of state, only after it has asked; threads inherit what it was told.
std::string ask_for_registers() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kArchReqXcompPerm = 0x1023, kXtiledata = 18;
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtiledata) == 0) return "";
  return std::string("the system does not let this process use AMX: ") + std::strerror(errno);
#else
  return "no permission to use AMX is known on this system";
#endif
}

#else

uint32_t detect() { return 0; }
constexpr uint32_t kAsksFirst = 0;
std::string ask_for_registers() { return ""; }

#endif

uint32_t features_of(Isa isa) { return kIsas[static_cast<int>(isa)].features; }

uint32_t missing(Isa isa) {
  static const uint32_t kFound = detect();
  return features_of(isa) & ~kFound;
}

std::string names_of(uint32_t features, const char* separator) {
  std::string names;
  for (int i = 0; i < kNumFeatures; ++i) {
    if ((features >> i & 1) == 0) continue;
    if (!names.empty()) names += separator;
    names += kFeatureNames[i];
  }
  return names;
}

}  // namespace

const char* isa_name(Isa isa) { return kIsas[static_cast<int>(isa)].name; }

bool by_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

std::string isa_features(Isa isa) { return names_of(features_of(isa), " "); }

bool has(Isa isa) { return why_not(isa).empty(); }

std::string why_not(Isa isa) {
  if (missing(isa) != 0) return "this CPU has no " + names_of(missing(isa), ", ");
  if ((features_of(isa) & kAsksFirst) == 0) return "";
  static const std::string kRefusal = ask_for_registers();
  return kRefusal;
}

}  // namespace cpu

std::string cpu_features() try {
  std::string names;
  for (int i = 0; i < cpu::kNumIsas; ++i) {
    const cpu::Isa isa{i};
    if (isa == cpu::Isa::generic || !cpu::has(isa)) continue;
    if (!names.empty()) names += ' ';
    names += cpu::isa_name(isa);
  }
  return names;
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace polyhead
