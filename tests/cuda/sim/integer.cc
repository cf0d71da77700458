// Integer instructions: PTX ISA 9.0, "Integer Arithmetic", "Comparison and Selection", "Logic and Shift", "mov",
// "cvta".
#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "opcodes.h"
#include "warp.h"

namespace cuda_sim {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
constexpr char kWord = sizeof(T) == 8 ? 'l' : 'w';

template <class T>
std::string signature(const char* pattern) {  // T stands for kWord<T>
  std::string text = pattern;
  std::replace(text.begin(), text.end(), 'T', kWord<T>);
  return text;
}

// Arithmetic wraps: it is done without a sign.
template <class T>
struct Add {
  static T of(T a, T b) { return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b)); }
};
template <class T>
struct Sub {
  static T of(T a, T b) { return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b)); }
};
template <class T>
struct MulLow {
  static T of(T a, T b) { return static_cast<T>(uint64_t{static_cast<Unsigned<T>>(a)} * static_cast<Unsigned<T>>(b)); }
};
template <class T>
struct MulHigh {
  __extension__ using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  static T of(T a, T b) { return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T))); }
};
template <class T>
struct Div {  // by 0: all ones, as the machine does; the ISA leaves it open
  static T of(T a, T b) {
    if (b == 0) return static_cast<T>(~Unsigned<T>{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub<T>::of(0, a);
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Rem {
  static T of(T a, T b) {
    if (b == 0) return a;
    return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
  }
};
template <class T>
struct Min {
  static T of(T a, T b) { return b < a ? b : a; }
};
template <class T>
struct Max {
  static T of(T a, T b) { return a < b ? b : a; }
};
template <class T>
struct And {
  static T of(T a, T b) { return static_cast<T>(a & b); }
};
template <class T>
struct Or {
  static T of(T a, T b) { return static_cast<T>(a | b); }
};
template <class T>
struct Xor {
  static T of(T a, T b) { return static_cast<T>(a ^ b); }
};

template <class T, template <class> class Op>
void binary(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T, T>(w, i, mask, [](T a, T b) { return Op<T>::of(a, b); });
}

template <class T, template <class> class Mul>
void mad(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T, T, T>(w, i, mask, [](T a, T b, T c) { return Add<T>::of(Mul<T>::of(a, b), c); });
}

template <class T>
using Twice = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                 std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

template <class T>
void mul_wide(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<Twice<T>, T, T>(
      w, i, mask, [](T a, T b) { return static_cast<Twice<T>>(static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b)); });
}

template <class T>
void mad_wide(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<Twice<T>, T, T, Twice<T>>(w, i, mask, [](T a, T b, Twice<T> c) {
    return Add<Twice<T>>::of(static_cast<Twice<T>>(a) * static_cast<Twice<T>>(b), c);
  });
}

template <class T>
void negate(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T>(w, i, mask, [](T a) { return Sub<T>::of(0, a); });
}

template <class T>
void absolute(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T>(w, i, mask, [](T a) { return a < 0 ? Sub<T>::of(0, a) : a; });
}

template <class T>
void complement(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T>(w, i, mask, [](T a) { return static_cast<T>(~a); });
}

template <class T>
void shift_left(Warp& w, const Instruction& i, uint32_t mask) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  map_lanes<T, T, uint32_t>(w, i, mask,
                            [](T a, uint32_t n) { return n >= kBits ? T{0} : static_cast<T>(uint64_t{a} << n); });
}

template <class T>
void shift_right(Warp& w, const Instruction& i, uint32_t mask) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  map_lanes<T, T, uint32_t>(w, i, mask, [](T a, uint32_t n) {
    if (n >= kBits) return std::is_signed_v<T> && a < 0 ? static_cast<T>(-1) : T{0};
    return static_cast<T>(a >> n);
  });
}

template <bool kLeft, bool kWrap>
void funnel_shift(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(w, i, mask, [](uint32_t low, uint32_t high, uint32_t c) {
    const uint32_t n = kWrap ? c & 31 : std::min(c, 32u);
    const uint64_t both = uint64_t{high} << 32 | low;
    return static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
  });
}

// lut is the truth table's column for a = 0xf0, b = 0xcc, c = 0xaa.
void lop3(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(
      w, i, mask, [](uint32_t a, uint32_t b, uint32_t c, uint32_t lut) {
        uint32_t d = 0;
        for (int n = 0; n < 8; ++n) {
          if (lut >> n & 1) d |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
        }
        return d;
      });
}

void permute_bytes(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, uint32_t, uint32_t, uint32_t>(w, i, mask, [](uint32_t a, uint32_t b, uint32_t selectors) {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t d = 0;
    for (int n = 0; n < 4; ++n) {
      const uint32_t selector = selectors >> (4 * n) & 0xf;
      uint32_t byte = static_cast<uint32_t>(both >> (8 * (selector & 7))) & 0xff;
      if (selector & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign
      d |= byte << (8 * n);
    }
    return d;
  });
}

template <class T>
void extract_bits(Warp& w, const Instruction& i, uint32_t mask) {  // bfe
  map_lanes<T, T, uint32_t, uint32_t>(w, i, mask, [](T a, uint32_t position, uint32_t length) {
    constexpr uint32_t kBits = 8 * sizeof(T);
    const uint32_t pos = position & 0xff, len = length & 0xff;
    T d = 0;
    const uint32_t top = std::min(pos + len - 1, kBits - 1);
    const bool sign = std::is_signed_v<T> && len > 0 && (static_cast<Unsigned<T>>(a) >> top & 1);
    for (uint32_t n = 0; n < kBits; ++n) {
      const bool bit = n < len && pos + n < kBits ? static_cast<Unsigned<T>>(a) >> (pos + n) & 1 : sign;
      d = static_cast<T>(d | static_cast<T>(Unsigned<T>{bit} << n));
    }
    return d;
  });
}

template <class T>
void insert_bits(Warp& w, const Instruction& i, uint32_t mask) {  // bfi: a's low bits into b
  map_lanes<T, T, T, uint32_t, uint32_t>(w, i, mask, [](T a, T b, uint32_t position, uint32_t length) {
    T d = b;
    for (uint32_t n = 0; n < (length & 0xff) && (position & 0xff) + n < 8 * sizeof(T); ++n) {
      const T bit = T{1} << ((position & 0xff) + n);
      d = a >> n & 1 ? d | bit : d & ~bit;
    }
    return d;
  });
}

template <class T>
void count_bits(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, T>(w, i, mask, [](T a) { return static_cast<uint32_t>(std::popcount(a)); });
}

template <class T>
void leading_zeros(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, T>(w, i, mask, [](T a) { return static_cast<uint32_t>(std::countl_zero(a)); });
}

void reverse_bits(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<uint32_t, uint32_t>(w, i, mask, [](uint32_t a) {
    uint32_t d = 0;
    for (int n = 0; n < 32; ++n) d |= (a >> n & 1) << (31 - n);
    return d;
  });
}

template <class T>
void move(Warp& w, const Instruction& i, uint32_t mask) {
  map_lanes<T, T>(w, i, mask, [](T a) { return a; });
}

template <class Whole, class Part, int kParts>
void pack(Warp& w, const Instruction& i, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint64_t whole = 0;
    for (int n = 0; n < kParts; ++n)
      whole |= uint64_t{w.get<Part>(i.args[1 + n], lane)} << (8 * sizeof(Part) * static_cast<size_t>(n));
    w.put<Whole>(i.args[0], lane, static_cast<Whole>(whole));
  });
}

template <class Whole, class Part, int kParts>
void unpack(Warp& w, const Instruction& i, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    const Whole whole = w.get<Whole>(i.args[kParts], lane);
    for (int n = 0; n < kParts; ++n)
      w.put<Part>(i.args[n], lane, static_cast<Part>(whole >> (8 * sizeof(Part) * static_cast<size_t>(n))));
  });
}

template <class T>
void select(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t chosen = w.predicate(i, 3);
  for_lanes(mask, [&](int lane) { w.put<T>(i.args[0], lane, w.get<T>(i.args[chosen >> lane & 1 ? 1 : 2], lane)); });
}

void put_predicate(Warp& w, int slot, uint32_t mask, uint32_t value) {
  w.put<uint32_t>(slot, 0, (w.predicate(slot) & ~mask) | (value & mask));
}

template <char kOp>
void predicate_logic(Warp& w, const Instruction& i, uint32_t mask) {
  const uint32_t a = w.predicate(i, 1), b = i.num_args > 2 ? w.predicate(i, 2) : 0;
  put_predicate(w, i.args[0], mask, kOp == '&' ? a & b : kOp == '|' ? a | b : kOp == '^' ? a ^ b : kOp == '~' ? ~a : a);
}

// The window is the opcode's variant: 1 shared, 2 local, 3 parameters, 0 global; kTo subtracts it.
template <bool kTo>
void convert_address(Warp& w, const Instruction& i, uint32_t mask) {
  const uint64_t window = uint64_t{i.variant} << 56;
  for_lanes(mask, [&](int lane) {
    const uint64_t address = w.get<uint64_t>(i.args[1], lane);
    if (kTo && (address & kWindowMask) != window) w.fault(i, "an address of another space is converted", lane);
    w.put<uint64_t>(i.args[0], lane, kTo ? address - window : address + window);
  });
}

template <class T>
void add_type(OpcodeTable& t, const std::string& type) {
  const std::string two = signature<T>("T=TT"), three = signature<T>("T=TTT");
  t["add." + type] = {binary<T, Add>, two};
  t["sub." + type] = {binary<T, Sub>, two};
  t["mul.lo." + type] = {binary<T, MulLow>, two};
  t["mul.hi." + type] = {binary<T, MulHigh>, two};
  t["mad.lo." + type] = {mad<T, MulLow>, three};
  t["div." + type] = {binary<T, Div>, two};
  t["rem." + type] = {binary<T, Rem>, two};
  t["min." + type] = {binary<T, Min>, two};
  t["max." + type] = {binary<T, Max>, two};
  t["shr." + type] = {shift_right<T>, signature<T>("T=Tw")};
  t["mov." + type] = {move<T>, signature<T>("T=T")};
  t["selp." + type] = {select<T>, signature<T>("T=TTp")};
  if (std::is_signed_v<T>) {
    t["neg." + type] = {negate<T>, signature<T>("T=T")};
    t["abs." + type] = {absolute<T>, signature<T>("T=T")};
  }
  if constexpr (sizeof(T) <= 4) {
    const char* wide = sizeof(T) == 4 ? "l=ww" : "w=ww";
    t["mul.wide." + type] = {mul_wide<T>, wide};
    t["mad.wide." + type] = {mad_wide<T>, sizeof(T) == 4 ? "l=wwl" : "w=www"};
  }
  if constexpr (sizeof(T) >= 4) {
    t["bfe." + type] = {extract_bits<T>, signature<T>("T=Tww")};
  }
}

template <class T>
void add_bits(OpcodeTable& t, const std::string& type) {
  t["and." + type] = {binary<T, And>, signature<T>("T=TT")};
  t["or." + type] = {binary<T, Or>, signature<T>("T=TT")};
  t["xor." + type] = {binary<T, Xor>, signature<T>("T=TT")};
  t["not." + type] = {complement<T>, signature<T>("T=T")};
  t["shl." + type] = {shift_left<T>, signature<T>("T=Tw")};
  t["shr." + type] = {shift_right<T>, signature<T>("T=Tw")};
  t["mov." + type] = {move<T>, signature<T>("T=T")};
  t["selp." + type] = {select<T>, signature<T>("T=TTp")};
  if constexpr (sizeof(T) >= 4) {
    t["popc." + type] = {count_bits<T>, signature<T>("w=T")};
    t["clz." + type] = {leading_zeros<T>, signature<T>("w=T")};
  }
}

}  // namespace

void add_integer_opcodes(OpcodeTable& t) {
  add_type<int16_t>(t, "s16");
  add_type<uint16_t>(t, "u16");
  add_type<int32_t>(t, "s32");
  add_type<uint32_t>(t, "u32");
  add_type<int64_t>(t, "s64");
  add_type<uint64_t>(t, "u64");
  add_bits<uint16_t>(t, "b16");
  add_bits<uint32_t>(t, "b32");
  add_bits<uint64_t>(t, "b64");
  t["mov.f32"] = {move<uint32_t>, "w=w"};
  t["mov.f64"] = {move<uint64_t>, "l=l"};
  t["selp.f32"] = {select<uint32_t>, "w=wwp"};
  t["selp.f64"] = {select<uint64_t>, "l=llp"};
  t["shf.l.wrap.b32"] = {funnel_shift<true, true>, "w=www"};
  t["shf.l.clamp.b32"] = {funnel_shift<true, false>, "w=www"};
  t["shf.r.wrap.b32"] = {funnel_shift<false, true>, "w=www"};
  t["shf.r.clamp.b32"] = {funnel_shift<false, false>, "w=www"};
  t["lop3.b32"] = {lop3, "w=wwww"};
  t["prmt.b32"] = {permute_bytes, "w=www"};
  t["bfi.b32"] = {insert_bits<uint32_t>, "w=wwww"};
  t["bfi.b64"] = {insert_bits<uint64_t>, "l=llww"};
  t["brev.b32"] = {reverse_bits, "w=w"};
  t["mov.b32/pack2"] = {pack<uint32_t, uint16_t, 2>, "w=ww"};
  t["mov.b64/pack2"] = {pack<uint64_t, uint32_t, 2>, "l=ww"};
  t["mov.b64/pack4"] = {pack<uint64_t, uint16_t, 4>, "l=wwww"};
  t["mov.b32/unpack2"] = {unpack<uint32_t, uint16_t, 2>, "ww=w"};
  t["mov.b64/unpack2"] = {unpack<uint64_t, uint32_t, 2>, "ww=l"};
  t["mov.b64/unpack4"] = {unpack<uint64_t, uint16_t, 4>, "wwww=l"};
  t["mov.pred"] = {predicate_logic<'='>, "p=p"};
  t["not.pred"] = {predicate_logic<'~'>, "p=p"};
  t["and.pred"] = {predicate_logic<'&'>, "p=pp"};
  t["or.pred"] = {predicate_logic<'|'>, "p=pp"};
  t["xor.pred"] = {predicate_logic<'^'>, "p=pp"};
  constexpr const char* kSpaces[] = {"global", "shared", "local", "param"};
  for (uint8_t n = 0; n < 4; ++n) {
    Opcode from{convert_address<false>, "l=l"}, to{convert_address<true>, "l=l"};
    from.variant = to.variant = n;
    t[std::string("cvta.") + kSpaces[n] + ".u64"] = from;
    t[std::string("cvta.to.") + kSpaces[n] + ".u64"] = to;
  }
}

}  // namespace cuda_sim
