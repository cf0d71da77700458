// PTX to instructions, as nvcc writes it: directives, declarations, scopes, labels and statements.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "fault.h"
#include "operands.h"
#include "program.h"

namespace cuda_sim {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

std::string without_comments(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t n = 0; n < text.size(); ++n) {
    if (text[n] == '"') {
      const size_t end = text.find('"', n + 1);
      out += text.substr(n, end - n + 1);
      n = end;
    } else if (text.substr(n, 2) == "//") {
      while (n < text.size() && text[n] != '\n') ++n;
      if (n < text.size()) out += '\n';
    } else if (text.substr(n, 2) == "/*") {
      const size_t end = text.find("*/", n);
      for (; n < end; ++n) out += text[n] == '\n' ? "\n" : "";
      ++n;
    } else {
      out += text[n];
    }
  }
  return out;
}

int bytes_of_type(const std::string& type) {
  const size_t digits = type.find_first_of("0123456789");
  return digits == std::string::npos ? 0 : std::atoi(type.c_str() + digits) / 8;
}

class Parser {
 public:
  // nvcc names the files at the end.
  explicit Parser(std::string_view ptx) : text_(without_comments(ptx)) {
    for (size_t at = text_.find(".file"); at != std::string::npos; at = text_.find(".file", at + 1)) {
      file(text_.substr(at, text_.find('\n', at) - at));
    }
  }

  Module parse() {
    while (skip_space(), at_ < text_.size()) {
      if (text_[at_] == '{') {
        open();
      } else if (text_[at_] == '}') {
        close();
      } else if (is_directive()) {
        directive();
      } else if (!label()) {
        statement();
      }
    }
    return std::move(module_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Fault("PTX line " + std::to_string(line_) + ": " + what);
  }

  void advance(size_t to) {
    for (; at_ < to && at_ < text_.size(); ++at_) line_ += text_[at_] == '\n';
  }
  void skip_space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) advance(at_ + 1);
  }
  std::string until(char end) {
    const size_t found = text_.find(end, at_);
    if (found == std::string::npos) fail(std::string("no '") + end + "' ends what begins here");
    std::string part = text_.substr(at_, found - at_);
    advance(found + 1);
    return part;
  }

  void open() {
    advance(at_ + 1);
    scopes_.emplace_back();
  }

  void close() {
    advance(at_ + 1);
    if (scopes_.empty()) fail("a scope is closed that was not opened");
    resolve_labels();
    scopes_.pop_back();
    if (scopes_.empty()) finish_kernel();
  }

  bool is_directive() const { return text_[at_] == '.'; }

  void directive() {
    size_t end = at_;
    while (end < text_.size() && is_word(text_[end])) ++end;
    const std::string name = text_.substr(at_, end - at_);
    if (name == ".version" || name == ".address_size" || name == ".file") {
      until('\n');
    } else if (name == ".target") {
      target(words_of(until('\n')));
    } else if (name == ".loc") {
      loc(words_of(until('\n')));
    } else if (name == ".section") {
      until('}');
    } else if (name == ".pragma") {
      until(';');
    } else if (name == ".reg") {
      registers(until(';'));
    } else if (name == ".global") {
      global(until(';'));
    } else if (name == ".shared" || name == ".local" || name == ".extern") {
      variable(until(';'));
    } else if (name == ".visible" || name == ".entry" || name == ".weak") {
      entry(until('{'));
    } else {
      fail("unknown directive " + name);
    }
  }

  // .target sm_90a
  void target(const std::vector<std::string>& words) {
    if (words.size() < 2 || words[1].rfind("sm_", 0) != 0) fail(".target names no compute capability");
    module_.target = words[1];
  }

  // .loc file line column[, function_name label, inlined_at file line column]
  void loc(const std::vector<std::string>& words) {
    if (words.size() < 4) fail(".loc has no line and column");
    place_ = {std::atoi(words[1].c_str()), std::atoi(words[2].c_str())};
    const std::tuple<int, int, int> here(place_.file, place_.line, std::atoi(words[3].c_str()));
    for (size_t n = 4; n + 3 < words.size(); ++n) {
      if (words[n] != "inlined_at") continue;
      const std::tuple<int, int, int> at(std::atoi(words[n + 1].c_str()), std::atoi(words[n + 2].c_str()),
                                         std::atoi(words[n + 3].c_str()));
      const auto outer = called_from_.find(at);
      const auto from = outer == called_from_.end() ? std::pair(std::get<0>(at), std::get<1>(at)) : outer->second;
      std::tie(place_.from_file, place_.from) = called_from_[here] = from;
      return;
    }
    called_from_.erase(here);
  }

  // .file number "path"
  void file(const std::string& rest) {
    const size_t open_quote = rest.find('"'), end_quote = rest.rfind('"'), slash = rest.rfind('/');
    const size_t number = static_cast<size_t>(std::atoi(rest.c_str() + 5));
    if (open_quote == std::string::npos || number > 10000) fail(".file has no name");
    if (module_.files.size() <= number) module_.files.resize(number + 1);
    const size_t begin = slash == std::string::npos ? open_quote + 1 : slash + 1;
    module_.files[number] = rest.substr(begin, end_quote - begin);
  }

  // .reg .b32 %r<15>, %x;
  void registers(const std::string& rest) {
    const std::vector<std::string> words = words_of(rest);
    if (words.size() < 3 || scopes_.empty()) fail(".reg names no register of a kernel");
    const bool predicate = words[1] == ".pred";
    const int bytes = predicate ? 4 : bytes_of_type(words[1]);
    if (bytes != 2 && bytes != 4 && bytes != 8) fail("registers of type " + words[1] + " are not modelled");
    for (size_t n = 2; n < words.size(); ++n) {
      const size_t angle = words[n].find('<');
      const std::string base = words[n].substr(0, angle);
      const int count = angle == std::string::npos ? -1 : std::atoi(words[n].c_str() + angle + 1);
      if (count < 0) scopes_.back().names[base] = slots_.add(bytes == 8, predicate);
      for (int k = 0; k < count; ++k)
        scopes_.back().names[base + std::to_string(k)] = slots_.add(bytes == 8, predicate);
    }
  }

  // [.extern] .shared|.local .align 16 .b8 name[64];
  void variable(const std::string& rest) {
    const std::vector<std::string> words = words_of(rest);
    const bool external = words[0] == ".extern";
    const bool local = words[0] == ".local";
    int align = 1, bytes = 0;
    for (size_t n = 1; n + 1 < words.size(); ++n) {
      if (words[n] == ".align") align = std::atoi(words[n + 1].c_str());
      bytes = bytes_of_type(words[n]) ? bytes_of_type(words[n]) : bytes;
    }
    const size_t bracket = words.back().find('[');
    const std::string name = words.back().substr(0, bracket);
    const int count = bracket == std::string::npos ? 1 : std::atoi(words.back().c_str() + bracket + 1);
    if (external && (rest.find(".shared") == std::string::npos || count != 0)) {
      fail("an external variable that is not the launch's shared memory: " + name);
    }
    if (align > 1024 || bytes == 0) fail("a variable that is not understood: " + rest);
    if (external) {
      module_symbols_[name] = {0, true};  // behind the declared ones
      dynamic_align_ = std::max(dynamic_align_, align);
      return;
    }
    const bool outside = scopes_.empty();
    if (outside && local) fail("a local variable outside of a kernel: " + name);
    int& end = local ? local_bytes_ : outside ? module_shared_bytes_ : shared_bytes_;
    end = (end + align - 1) / align * align;
    (outside ? module_symbols_ : symbols_)[name] = {end, false};
    end += bytes * count;
  }

  // .global .align 4 .b8 name[24] = {65, 144, ...}; of the module, with what it holds.
  void global(const std::string& rest) {
    const size_t begin = rest.find('{'), end = rest.find('}');
    const std::vector<std::string> words = words_of(rest.substr(0, rest.find('=')));
    if (begin == std::string::npos || end == std::string::npos || words.size() < 5 || words[3] != ".b8") {
      fail("a variable that is not understood: " + rest);
    }
    std::vector<unsigned char> bytes;
    for (const std::string& number : words_of(rest.substr(begin + 1, end - begin - 1))) {
      bytes.push_back(static_cast<unsigned char>(std::atoi(number.c_str())));
    }
    module_.globals.emplace_back((bytes.size() + 7) / 8);  // aligned
    std::memcpy(module_.globals.back().data(), bytes.data(), bytes.size());
    const std::string name = words.back().substr(0, words.back().find('['));
    module_symbols_[name] = {reinterpret_cast<int64_t>(module_.globals.back().data()), false};
  }

  // .visible .entry name(.param .u64 .ptr .align 1 name_param_0, ...) .maxntid 128, 1, 1
  void entry(const std::string& header) {
    const size_t open_paren = header.find('('), close_paren = header.find(')');
    const std::vector<std::string> words = words_of(header.substr(0, open_paren));
    if (words.size() < 2 || words[words.size() - 2] != ".entry") fail("a function that is no kernel: " + words.back());
    if (!scopes_.empty()) fail("a kernel within a kernel");
    if (module_.target.empty()) fail("a kernel without .target");
    kernel_ = &module_.kernels[words.back()];
    shared_bytes_ = module_shared_bytes_;
    kernel_->name = words.back();
    if (open_paren != std::string::npos) parameters(header.substr(open_paren + 1, close_paren - open_paren - 1));
    const std::vector<std::string> tail =
        words_of(header.substr(close_paren == std::string::npos ? header.size() : close_paren + 1));
    for (size_t n = 0; n + 1 < tail.size(); ++n) {
      if (tail[n] != ".maxntid" && tail[n] != ".reqntid") continue;
      kernel_->most_threads = 1;
      for (size_t k = n + 1; k < tail.size() && tail[k][0] != '.'; ++k)
        kernel_->most_threads *= std::atoi(tail[k].c_str());
    }
    scopes_.emplace_back();
  }

  void parameters(const std::string& list) {
    size_t begin = 0;
    while (begin < list.size()) {
      const size_t comma = std::min(list.find(',', begin), list.size());
      const std::vector<std::string> words = words_of(list.substr(begin, comma - begin));
      begin = comma + 1;
      if (words.empty()) continue;
      int bytes = bytes_of_type(words[1]), align = bytes;
      if (words[1] == ".align") align = std::atoi(words[2].c_str()), bytes = bytes_of_type(words[3]);
      const size_t bracket = words.back().find('[');
      if (bracket != std::string::npos) bytes *= std::atoi(words.back().c_str() + bracket + 1);
      if (words[0] != ".param" || bytes == 0) fail("a parameter that is not understood");
      const int offset = (kernel_->parameter_bytes + align - 1) / align * align;
      kernel_->parameters.push_back({words.back().substr(0, bracket), offset, bytes});
      symbols_[kernel_->parameters.back().name] = {offset, false};
      kernel_->parameter_bytes = offset + bytes;
    }
  }

  bool label() {
    size_t end = at_;
    while (end < text_.size() && is_word(text_[end])) ++end;
    if (end == at_ || end + 1 >= text_.size() || text_[end] != ':' || text_[end + 1] == ':') return false;
    if (!kernel_) fail("a label outside of a kernel");
    scopes_.back().labels[text_.substr(at_, end - at_)] = static_cast<int>(kernel_->code.size());
    advance(end + 1);
    return true;
  }

  void statement() {
    const std::string text = until(';');
    if (!kernel_) fail("a statement outside of a kernel: " + text);
    Instruction instruction;
    std::string wanted;  // label
    const Lookup lookup{[this](const std::string& name) { return named(name); },
                        [this](const std::string& name, int64_t* value) { return symbol(name, value); }};
    try {
      instruction = instruction_of(text, lookup, slots_, module_, &wanted);
    } catch (const Fault& fault) {
      fail(std::string(fault.what()) + ", at " + module_.place(place_));
    }
    instruction.place = place_;
    if (!wanted.empty()) scopes_.back().jumps.emplace_back(kernel_->code.size(), wanted);
    kernel_->code.push_back(instruction);
  }

  const Slot* named(const std::string& name) const {
    for (size_t n = scopes_.size(); n-- > 0;) {
      const auto found = scopes_[n].names.find(name);
      if (found != scopes_[n].names.end()) return &found->second;
    }
    return nullptr;
  }

  bool symbol(const std::string& name, int64_t* value) {
    const auto inner = symbols_.find(name);
    const auto outer = module_symbols_.find(name);
    if (inner == symbols_.end() && outer == module_symbols_.end()) return false;
    const Symbol& found = inner != symbols_.end() ? inner->second : outer->second;
    *value = found.dynamic ? kDynamicShared : found.offset;
    return true;
  }

  // Jumps to labels that the closing scope knows; the others are the outer scope's.
  void resolve_labels() {
    for (const auto& [index, name] : scopes_.back().jumps) {
      const auto found = scopes_.back().labels.find(name);
      if (found != scopes_.back().labels.end()) {
        kernel_->code[index].target = found->second;
      } else if (scopes_.size() > 1) {
        scopes_[scopes_.size() - 2].jumps.emplace_back(index, name);
      } else {
        fail("no label " + name);
      }
    }
  }

  void finish_kernel() {
    kernel_->shared_bytes = shared_bytes_;
    kernel_->local_bytes = local_bytes_;
    kernel_->dynamic_align = dynamic_align_;
    slots_.move_to(*kernel_);
    slots_ = {};
    symbols_.clear();
    local_bytes_ = 0;
    kernel_ = nullptr;
  }

  struct Symbol {
    int64_t offset = 0;  // of a .global: its address
    bool dynamic = false;
  };
  struct Scope {
    std::unordered_map<std::string, Slot> names;
    std::unordered_map<std::string, int> labels;
    std::vector<std::pair<size_t, std::string>> jumps;
  };

  const std::string text_;
  size_t at_ = 0;
  int line_ = 1;
  Module module_;
  Place place_;
  // Of a place of an inlined function, file and line that called it, the outermost.
  std::map<std::tuple<int, int, int>, std::pair<int, int>> called_from_;
  Kernel* kernel_ = nullptr;
  std::vector<Scope> scopes_;
  Slots slots_;
  std::unordered_map<std::string, Symbol> symbols_, module_symbols_;
  int dynamic_align_ = 16;                  // of what launches ask for
  int module_shared_bytes_ = 0;             // declared outside of kernels: every kernel behind has them
  int shared_bytes_ = 0, local_bytes_ = 0;  // of the kernel
};

}  // namespace

std::string Module::place(const Place& place) const {
  const auto name = [this](int file) {
    return static_cast<size_t>(file) < files.size() ? files[static_cast<size_t>(file)] : "";
  };
  if (name(place.file).empty()) return "line " + std::to_string(place.line);
  const std::string at = name(place.file) + ":" + std::to_string(place.line);
  if (place.from == 0) return at;
  return at + " (from " + (place.from_file == place.file ? "" : name(place.from_file)) + ":" +
         std::to_string(place.from) + ")";
}

bool runs_on(const Module& module, int capability) {
  const int needed = std::atoi(module.target.c_str() + 3);  // behind sm_
  return module.target.ends_with('a') ? capability == needed : capability >= needed;
}

// "Compute Capabilities" of the CUDA C++ Programming Guide.
int most_shared_bytes(const Module& module) { return (module.target == "sm_90a" ? 227 : 163) * 1024; }

Module parse(std::string_view ptx) { return Parser(ptx).parse(); }

}  // namespace cuda_sim
