#include "operands.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>

#include "fault.h"

namespace cuda_sim {
namespace {

bool is_blank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string trimmed(const std::string& text) {
  size_t begin = 0, end = text.size();
  while (begin < end && is_blank(text[begin])) ++begin;
  while (end > begin && is_blank(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

// Parts between the `separator`s that stand outside of brackets and braces.
std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  for (const char c : text) {
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    if (c == separator && depth == 0) {
      parts.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty()) parts.push_back(trimmed(part));
  return parts;
}

const std::map<std::string, Special>& specials() {
  static const std::map<std::string, Special> names = {{"%tid.x", Special::kTidX},
                                                       {"%tid.y", Special::kTidY},
                                                       {"%tid.z", Special::kTidZ},
                                                       {"%ntid.x", Special::kNtidX},
                                                       {"%ntid.y", Special::kNtidY},
                                                       {"%ntid.z", Special::kNtidZ},
                                                       {"%ctaid.x", Special::kCtaidX},
                                                       {"%ctaid.y", Special::kCtaidY},
                                                       {"%ctaid.z", Special::kCtaidZ},
                                                       {"%nctaid.x", Special::kNctaidX},
                                                       {"%nctaid.y", Special::kNctaidY},
                                                       {"%nctaid.z", Special::kNctaidZ},
                                                       {"%laneid", Special::kLane},
                                                       {"%warpid", Special::kWarp},
                                                       {"%lanemask_eq", Special::kMaskEqual},
                                                       {"%lanemask_lt", Special::kMaskLess},
                                                       {"%lanemask_le", Special::kMaskLessEqual},
                                                       {"%lanemask_gt", Special::kMaskGreater},
                                                       {"%lanemask_ge", Special::kMaskGreaterEqual}};
  return names;
}

// 12, -12, 0x1f, 0f3F800000 (float32), 0d... (float64)
std::optional<uint64_t> immediate(const std::string& text) {
  const size_t digit = text[0] == '-' ? 1 : 0;
  if (digit >= text.size() || !std::isdigit(static_cast<unsigned char>(text[digit]))) return std::nullopt;
  const char kind = text.size() > 1 ? text[1] : ' ';
  if (text[0] == '0' && (kind == 'f' || kind == 'd' || kind == 'F' || kind == 'D')) {
    return std::strtoull(text.c_str() + 2, nullptr, 16);
  }
  char* end = nullptr;
  const uint64_t magnitude = std::strtoull(text.c_str() + digit, &end, 0);
  if (*end != '\0' && *end != 'U') return std::nullopt;
  return digit == 1 ? 0 - magnitude : magnitude;
}

struct Piece {
  std::string text;
  bool address = false;
};

// A statement cut up, before its opcode is known.
struct Statement {
  std::string guard, name;
  std::vector<Piece> pieces;
};

void add_pieces(const std::string& operand, std::vector<Piece>* pieces) {
  if (operand[0] == '[') {
    pieces->push_back({trimmed(operand.substr(1, operand.size() - 2)), true});
  } else if (operand[0] == '{') {
    for (const std::string& part : parts_of(operand.substr(1, operand.size() - 2), ',')) pieces->push_back({part});
  } else {
    for (const std::string& part : parts_of(operand, '|')) pieces->push_back({part});
  }
}

Statement cut(const std::string& text) {
  Statement out;
  size_t at = 0;
  const auto word = [&] {
    while (at < text.size() && is_blank(text[at])) ++at;
    const size_t begin = at;
    while (at < text.size() && !is_blank(text[at])) ++at;
    return text.substr(begin, at - begin);
  };
  out.name = word();
  if (out.name[0] == '@') {
    out.guard = out.name.substr(1);
    out.name = word();
  }
  const std::vector<std::string> operands = parts_of(text.substr(at), ',');
  for (const std::string& operand : operands) add_pieces(operand, &out.pieces);
  if (operands.empty()) return out;
  if (operands[0][0] != '{' && operands[0].find('|') != std::string::npos) out.name += '|';
  if (out.name.rfind("mov.", 0) == 0 && operands.size() == 2) {
    const std::string count = std::to_string(out.pieces.size() - 1);
    if (operands[0][0] == '{') out.name += "/unpack" + count;
    if (operands[1][0] == '{') out.name += "/pack" + count;
  }
  return out;
}

class Builder {
 public:
  Builder(const Lookup& lookup, Slots& slots) : lookup_(lookup), slots_(slots) {}

  Instruction build(const Statement& statement, const Opcode& opcode, std::string* label) {
    static_cast<Opcode&>(out_) = opcode;
    if (!statement.guard.empty()) guard(statement.guard);
    size_t next = 0;
    bool results = opcode.signature.find('=') != std::string::npos;
    for (const char kind : opcode.signature) {
      if (kind == '=') {
        out_.num_results = out_.num_args;
        results = false;
        continue;
      }
      const Piece& piece = statement.pieces[next++];
      if (piece.address != (kind == '@'))
        throw Fault("operand " + piece.text + " is not what " + statement.name + " takes");
      if (kind == '>') {
        *label = piece.text;
      } else if (kind == '@') {
        address(piece.text);
      } else if (kind == '+') {
        sum(piece.text);
      } else {
        operand(piece.text, kind, results);
      }
    }
    return out_;
  }

 private:
  void guard(std::string text) {
    out_.unless = text[0] == '!';
    if (out_.unless) text.erase(0, 1);
    const Slot* slot = lookup_.slot(text);
    if (!slot || !slot->predicate) throw Fault("no predicate " + text);
    out_.guard = static_cast<int16_t>(slot->index);
  }

  void push(int slot, bool wide) {
    out_.wide |= static_cast<uint32_t>(wide) << out_.num_args;
    out_.args[out_.num_args++] = static_cast<int16_t>(slot);
  }

  void sum(const std::string& text) {
    const Slot* slot = lookup_.slot(text);
    if (!slot || slot->predicate || slot->wide) throw Fault("no register of 32 bits " + text);
    out_.sums.push_back(static_cast<int16_t>(slot->index));
  }

  void operand(std::string text, char kind, bool result) {
    if (kind == 'p' && text[0] == '!') {
      out_.negated |= 1u << out_.num_args;
      text.erase(0, 1);
    }
    if (const Slot* slot = lookup_.slot(text)) {
      const bool fits = kind == '*'   ? !slot->predicate
                        : kind == 'p' ? slot->predicate
                                      : !slot->predicate && slot->wide == (kind == 'l');
      if (!fits) throw Fault("operand " + text + " has another width than the instruction");
      return push(slot->index, slot->wide);
    }
    const bool wide = kind == 'l' || (kind == '*' && out_.bytes == 8);
    if (result) {
      if (text != "_") throw Fault("no register " + text);
      return push(slots_.add(wide, kind == 'p').index, wide);
    }
    if (kind == 'p') return push(slots_.constant(value(text) != 0 ? UINT32_MAX : 0, false), false);
    const auto special = specials().find(text);
    if (special != specials().end() && !wide) return push(slots_.special(special->second), false);
    push(slots_.constant(value(text), wide), wide);
  }

  // An immediate, or a symbol with or without an offset.
  uint64_t value(const std::string& text) {
    if (const std::optional<uint64_t> bits = immediate(text)) return *bits;
    const size_t plus = text.find('+');
    const std::optional<uint64_t> offset = plus == std::string::npos ? 0 : immediate(trimmed(text.substr(plus + 1)));
    int64_t base = 0;
    if (!offset || !lookup_.symbol(trimmed(text.substr(0, plus)), &base))
      throw Fault("no register, number or symbol " + text);
    return static_cast<uint64_t>(base) + *offset;
  }

  // %rd1, %rd1+16, name, name+4, or a number
  void address(const std::string& text) {
    const size_t plus = text.find('+');
    const std::string base = trimmed(text.substr(0, plus));
    const Slot* slot = lookup_.slot(base);
    if (!slot) {
      ++num_addresses_;
      return push(slots_.constant(value(text), true), true);
    }
    const std::optional<uint64_t> offset = plus == std::string::npos ? 0 : immediate(trimmed(text.substr(plus + 1)));
    if (!offset || slot->predicate) throw Fault("no address " + text);
    out_.offset[num_addresses_++] = static_cast<int64_t>(*offset);
    push(slot->index, slot->wide);
  }

  const Lookup& lookup_;
  Slots& slots_;
  Instruction out_;
  int num_addresses_ = 0;
};

size_t num_pieces(const std::string& signature) {
  return signature.size() - static_cast<size_t>(std::count(signature.begin(), signature.end(), '='));
}

}  // namespace

Slot Slots::add(bool wide, bool predicate) {
  const Slot slot{next_, wide, predicate};
  next_ += wide ? 2 : 1;
  if (next_ > 32000) throw Fault("a kernel of more than 32000 slots");
  return slot;
}

int Slots::constant(uint64_t bits, bool wide) {
  const auto found = constants_.find({bits, wide});
  return found != constants_.end() ? found->second : constants_[{bits, wide}] = add(wide, false).index;
}

int Slots::special(Special what) {
  const auto found = specials_.find(what);
  return found != specials_.end() ? found->second : specials_[what] = add(false, false).index;
}

void Slots::move_to(Kernel& kernel) {
  const int align = kernel.dynamic_align;
  const auto is_dynamic = [](uint64_t bits) { return bits >> 32 == kDynamicShared >> 32; };
  const bool dynamic =
      std::any_of(constants_.begin(), constants_.end(), [&](const auto& each) { return is_dynamic(each.first.first); });
  if (dynamic) kernel.shared_bytes = (kernel.shared_bytes + align - 1) / align * align;
  for (const auto& [key, slot] : constants_) {
    uint64_t bits = key.first;
    if (is_dynamic(bits)) bits += static_cast<uint64_t>(kernel.shared_bytes) - kDynamicShared;
    kernel.constants.push_back({slot, key.second, bits});
  }
  for (const auto& [what, slot] : specials_) kernel.specials.push_back({slot, what});
  kernel.num_slots = next_;
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text + " ") {
    if (is_blank(c) || c == ',') {
      if (!word.empty()) words.push_back(word);
      word.clear();
    } else {
      word += c;
    }
  }
  return words;
}

Instruction instruction_of(const std::string& text, const Lookup& lookup, Slots& slots, Module& module,
                           std::string* label) {
  const Statement statement = cut(text);
  std::string name = statement.name;
  if (name.rfind("cvt.", 0) == 0 && name.size() > 4 && name.substr(name.size() - 2) == "32") {
    const Slot* source = lookup.slot(statement.pieces.back().text);  // cvt takes a register that is wider than its type
    if (source && source->wide) name += "/wide";
  }
  auto known = module.used.find(name);
  Opcode opcode = known != module.used.end() ? known->second : find_opcode(name);
  if (!opcode.run || num_pieces(opcode.signature) != statement.pieces.size()) {
    const std::string counted = name + "/" + std::to_string(statement.pieces.size());
    const Opcode other = find_opcode(counted);
    if (!other.run && opcode.run) throw Fault(name + " with " + std::to_string(statement.pieces.size()) + " operands");
    if (!other.run) throw Fault("unknown instruction " + name);
    opcode = other;
    name = counted;
  }
  opcode.moves = name.rfind("mov.", 0) == 0 && opcode.signature == "w=w";
  known = module.used.emplace(name, opcode).first;
  Instruction out = Builder(lookup, slots).build(statement, opcode, label);
  out.name = &known->first;
  return out;
}

}  // namespace cuda_sim
