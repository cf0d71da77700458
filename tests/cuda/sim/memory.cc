// ld, st, atom, red: PTX ISA 9.0, "Data Movement", "Parallel Synchronization and Communication".
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "opcodes.h"
#include "reach.h"
#include "shared_memory.h"

namespace cuda_sim {

void check_aligned(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes) {
  if (address % static_cast<uint64_t>(bytes) == 0) return;
  warp.fault(i, "misaligned: address " + std::to_string(address) + ", " + std::to_string(bytes) + " bytes", lane);
}

unsigned char* reach(Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes, Access access) {
  check_aligned(warp, i, lane, address, bytes);
  Space space = i.space;
  if (space == Space::kGeneric) {
    constexpr Space kSpaces[] = {Space::kGlobal, Space::kShared, Space::kLocal, Space::kParam};
    const uint64_t window = address >> 56;
    if (window > 3) warp.fault(i, "out of bounds: no space has the address " + std::to_string(address), lane);
    space = kSpaces[window];
    address &= ~kWindowMask;
  }
  if (space == Space::kGlobal) return warp.launch.memory.reach(warp, i, lane, address, bytes, access);
  if (space == Space::kShared) return warp.shared.reach(warp, i, lane, address, bytes, access);
  std::vector<unsigned char>& all = space == Space::kParam ? warp.launch.parameters : warp.local;
  const size_t size = space == Space::kParam ? all.size() : all.size() / kLanes;
  if (space == Space::kParam && access != Access::kRead) warp.fault(i, "a parameter is written", lane);
  if (address >= size || static_cast<size_t>(bytes) > size - address) {
    warp.fault(i,
               std::string("out of bounds: ") + (space == Space::kParam ? "parameter" : "local") + " address " +
                   std::to_string(address),
               lane);
  }
  return &all[address + (space == Space::kParam ? 0 : size * static_cast<size_t>(lane))];
}

void count_banks(Counters& counters, const uint64_t* addresses, uint32_t mask, int bytes) {
  const int lanes_a_phase = bytes <= 4 ? 32 : 128 / bytes, words = std::max(bytes / 4, 1);
  for (int first = 0; first < kLanes; first += lanes_a_phase) {
    uint64_t seen[32][32];
    int count[32] = {}, waves = 0;
    for (int lane = first; lane < first + lanes_a_phase; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (int n = 0; n < words; ++n) {
        const uint64_t word = addresses[lane] / 4 + static_cast<uint64_t>(n);
        uint64_t* of_bank = seen[word % 32];
        int& found = count[word % 32];
        if (std::find(of_bank, of_bank + found, word) == of_bank + found) of_bank[found++] = word;
        waves = std::max(waves, found);
      }
    }
    counters.bank_phases += waves > 0;
    counters.bank_waves += static_cast<uint64_t>(waves);
  }
}

void count_sectors(Counters& counters, const uint64_t* addresses, uint32_t mask, int bytes) {
  uint64_t sectors[kLanes], lines[kLanes];
  int count = 0;
  for_lanes(mask, [&](int lane) {
    lines[count] = addresses[lane];
    sectors[count++] = addresses[lane] / 32;
  });
  const auto distinct = [](uint64_t* begin, uint64_t* end) {
    std::sort(begin, end);
    return static_cast<uint64_t>(std::unique(begin, end) - begin);
  };
  const uint64_t touched = distinct(lines, lines + count) * static_cast<uint64_t>(bytes);
  counters.sectors += distinct(sectors, sectors + count);
  counters.ideal_sectors += (touched + 31) / 32;
}

namespace {

void count(Warp& w, const Instruction& i, const uint64_t* addresses, uint32_t mask, int bytes) {
  const bool shared =
      i.space == Space::kShared || (i.space == Space::kGeneric && addresses[first_lane(mask)] >> 56 == 1);
  if (shared) count_banks(w.launch.counters, addresses, mask, bytes);
  if (i.space == Space::kGlobal) count_sectors(w.launch.counters, addresses, mask, bytes);
}

uint64_t element(const unsigned char* at, int bytes, bool sign) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, static_cast<size_t>(bytes));
  const int unused = 64 - 8 * bytes;
  return sign ? static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused) : bits;
}

void load(Warp& w, const Instruction& i, uint32_t mask) {
  const int bytes = i.bytes * i.vector;
  uint64_t addresses[kLanes];
  for_lanes(mask, [&](int lane) { addresses[lane] = w.address(i, i.vector, 0, lane); });
  for_lanes(mask, [&](int lane) {
    const unsigned char* at =
        reach(w, i, lane, addresses[lane], bytes, i.constant ? Access::kConstantRead : Access::kRead);
    for (int n = 0; n < i.vector; ++n) w.put_word(i, n, lane, element(at + n * i.bytes, i.bytes, i.sign));
  });
  if (mask) count(w, i, addresses, mask, bytes);
}

void store(Warp& w, const Instruction& i, uint32_t mask) {
  const int bytes = i.bytes * i.vector;
  uint64_t addresses[kLanes];
  for_lanes(mask, [&](int lane) {
    addresses[lane] = w.address(i, 0, 0, lane);
    unsigned char* at = reach(w, i, lane, addresses[lane], bytes, Access::kWrite);
    for (int n = 0; n < i.vector; ++n) {
      const uint64_t word = w.word(i, 1 + n, lane);
      std::memcpy(at + n * i.bytes, &word, i.bytes);
    }
  });
  if (mask) count(w, i, addresses, mask, bytes);
}

enum class Update : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCompare };

template <class T>
T updated(Update update, T old, T b, T c) {
  if constexpr (std::is_integral_v<T>) {
    if (update == Update::kAnd) return old & b;
    if (update == Update::kOr) return old | b;
    if (update == Update::kXor) return old ^ b;
    if (update == Update::kCompare) return old == b ? c : old;
  }
  if (update == Update::kAdd) {
    if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
      using Wraps = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Wraps>(old) + static_cast<Wraps>(b));
    }
    return old + b;
  }
  if (update == Update::kMin) return std::min(old, b);
  if (update == Update::kMax) return std::max(old, b);
  return b;
}

// Lanes in their order: the machine has none.
template <class T>
void atomic(Warp& w, const Instruction& i, uint32_t mask) {
  const int first = i.num_results;  // the address
  for_lanes(mask, [&](int lane) {
    unsigned char* at = reach(w, i, lane, w.address(i, first, 0, lane), sizeof(T), Access::kAtomic);
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T b = w.get<T>(i.args[first + 1], lane);
    const T c = i.num_args > first + 2 ? w.get<T>(i.args[first + 2], lane) : T{};
    const T now = updated(static_cast<Update>(i.variant), old, b, c);
    std::memcpy(at, &now, sizeof(T));
    if (first == 1) w.put<T>(i.args[0], lane, old);
  });
}

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts(1);
  for (const char c : name) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

bool is_hint(const std::string& part) {  // to the caches: changes no value
  static const char* const kHints[] = {
      "ca",      "cg",       "cs",      "lu", "cv", "wb", "wt", "L1::no_allocate", "L1::evict_last", "L1::evict_first",
      "L2::64B", "L2::128B", "L2::256B"};
  return std::any_of(std::begin(kHints), std::end(kHints), [&](const char* hint) { return part == hint; });
}

bool set_space(const std::string& part, Opcode* o) {
  if (part == "global") return o->space = Space::kGlobal, true;
  if (part == "shared") return o->space = Space::kShared, true;
  if (part == "local") return o->space = Space::kLocal, true;
  if (part == "param") return o->space = Space::kParam, true;
  return false;
}

bool set_type(const std::string& type, Opcode* o) {
  if (type.size() < 2 || !std::strchr("busf", type[0])) return false;
  const std::string bits = type.substr(1);
  o->sign = type[0] == 's';
  o->bytes = bits == "8" ? 1 : bits == "16" ? 2 : bits == "32" ? 4 : bits == "64" ? 8 : 0;
  return o->bytes > 0;
}

Opcode load_or_store(const std::vector<std::string>& parts) {
  Opcode o;
  for (size_t n = 1; n < parts.size(); ++n) {
    const std::string& part = parts[n];
    if (n + 1 == parts.size() ? set_type(part, &o) : set_space(part, &o) || is_hint(part)) continue;
    if (part == "nc" && parts[0] == "ld" && o.space == Space::kGlobal) {
      o.constant = true;
    } else if (part == "v2" || part == "v4") {
      o.vector = part == "v2" ? 2 : 4;
    } else {
      return {};  // volatile, acquire, another space: not modelled
    }
  }
  if (o.bytes == 0 || o.bytes * o.vector > 16) return {};
  const std::string elements(o.vector, '*');
  o.signature = parts[0] == "ld" ? elements + "=@" : "=@" + elements;
  o.run = parts[0] == "ld" ? load : store;
  return o;
}

Handler handler_of(const std::string& type, Update update) {
  const bool bits = update == Update::kAnd || update == Update::kOr || update == Update::kXor ||
                    update == Update::kExchange || update == Update::kCompare;
  if (bits) return type == "b32" ? atomic<uint32_t> : type == "b64" ? atomic<uint64_t> : nullptr;
  if (type == "f32") return update == Update::kAdd ? atomic<float> : nullptr;
  if (type == "f64") return update == Update::kAdd ? atomic<double> : nullptr;
  return type == "s32"   ? atomic<int32_t>
         : type == "u32" ? atomic<uint32_t>
         : type == "s64" ? atomic<int64_t>
         : type == "u64" ? atomic<uint64_t>
                         : nullptr;
}

// atom|red[.space].operation.type, of the default order: relaxed
Opcode update(const std::vector<std::string>& parts) {
  static const std::pair<const char*, Update> kUpdates[] = {
      {"add", Update::kAdd}, {"min", Update::kMin}, {"max", Update::kMax},       {"and", Update::kAnd},
      {"or", Update::kOr},   {"xor", Update::kXor}, {"exch", Update::kExchange}, {"cas", Update::kCompare}};
  Opcode o;
  const size_t last = parts.size() - 1;
  if (last < 2 || last > 3 || (last == 3 && !set_space(parts[1], &o)) || !set_type(parts[last], &o)) return {};
  for (const auto& [name, what] : kUpdates) {
    if (parts[last - 1] != name) continue;
    const bool returns = parts[0] == "atom";
    if (!returns && (what == Update::kExchange || what == Update::kCompare)) return {};
    o.run = handler_of(parts[last], what);
    o.variant = static_cast<uint8_t>(what);
    o.signature = std::string(returns ? "*" : "") + "=@*" + (what == Update::kCompare ? "*" : "");
  }
  return o;
}

}  // namespace

Opcode memory_opcode(const std::string& name) {
  const std::vector<std::string> parts = parts_of(name);
  if (parts[0] == "ld" || parts[0] == "st") return load_or_store(parts);
  if (parts[0] == "atom" || parts[0] == "red") return update(parts);
  return {};
}

}  // namespace cuda_sim
