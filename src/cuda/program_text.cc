// From the instructions of a schedule (program/code.h) to one function for each of its passes. What is the same for all
// pairs of a head is a member, computed once for a tile; the rest is computed for each pair.
#include "cuda/program_text.h"

#include <algorithm>
#include <bit>

#include "core/sentence.h"
#include "program/interval.h"
#include "program/ops.h"
#include "program/schedule.h"

namespace polyhead::cuda {
namespace {

using program::Code;
using program::Instruction;
using program::Pass;
using program::Rate;

bool is_empty(const CaptureShape& capture) {
  return std::any_of(capture.dims, capture.dims + capture.ndim, [](int64_t n) { return n == 0; });
}

// Whether all integers of visible pairs fit 32 bits, whatever the captures hold.
bool fits_int32(const AttentionDesc& desc, const Code& code) {
  Tensor captures[program::kMostCaptures];
  program::Call call;
  call.code = &code;
  call.captures = captures;
  for (size_t i = 0; i < desc.captures.size(); ++i) {
    const CaptureShape& shape = desc.captures[i];
    captures[i].dtype = shape.dtype;
    captures[i].ndim = shape.ndim;
    std::copy_n(shape.dims, shape.ndim, captures[i].dims);
  }
  program::find_ranges(*desc.program, &call);
  program::Range offset{-desc.seqlen_q, desc.seqlen_k};
  if (desc.query_offset) offset = {*desc.query_offset, *desc.query_offset};
  if (desc.has_query_offsets) offset = {INT64_MIN, INT64_MAX};
  const program::Region all{
      {0, desc.batch - 1}, {0, desc.num_heads - 1}, {0, desc.seqlen_q - 1}, {0, desc.seqlen_k - 1}, offset};
  return program::fits_int32(code, call, all);
}

class Writer {
 public:
  explicit Writer(const AttentionDesc& desc) : desc_(desc), code_(program::schedule_of(*desc.program)) {}

  std::string text() {
    const Pass* const passes[] = {&code_.for_mask, &code_.for_score, &code_.for_score_gradient, &code_.for_gradients};
    std::string members, set;
    for (int i = 0; i < code_.num_instructions; ++i) {
      const bool used =
          std::any_of(std::begin(passes), std::end(passes), [&](auto* pass) { return pass->place[i] >= 0; });
      if (!used || !is_member(i)) continue;
      members += sentence("  ", type(i), " ", name(i), ";\n");
      set += sentence("    ", name(i), " = ", value(i), ";\n");
    }
    return sentence("#pragma once\n#include \"cuda/problem.h\"\n#include \"cuda/program_words.cuh\"\n",
                    "namespace polyhead::cuda {\nstruct ScoreProgram {\n  using Int = ",
                    fits_int32(desc_, code_) ? "int32_t" : "int64_t",
                    ";\n  static constexpr bool kHasMask = ", code_.mask >= 0, ", kHasScore = ", code_.score >= 0,
                    ";\n  static constexpr int kGathers = ", code_.num_gathers, ";\n  const Captured* captures;\n",
                    members,
                    "  __device__ ScoreProgram(const Captured* captured, int64_t b, int64_t h, int64_t offset)",
                    " : captures(captured) {\n", set, "  }\n", mask(), score(), gradient(), gradients_of_captures(),
                    "};\n}  // namespace polyhead::cuda\n");
  }

 private:
  const Instruction& at(int i) const { return code_.instructions[i]; }
  const char* type(int i) const { return at(i).type == ValueType::kFloat ? "float" : "Int"; }
  bool is_member(int i) const { return at(i).rate == Rate::kUniform && at(i).op != Op::kConstant; }

  std::string name(int i) const {
    const Instruction& x = at(i);
    if (x.op == Op::kScore) return "x";
    if (x.op == program::kGradient) return "of_score";
    if (x.op != Op::kConstant) return sentence(is_member(i) ? "u" : "v", i);
    if (x.type != ValueType::kFloat) return sentence("static_cast<Int>(", static_cast<uint64_t>(x.integer), "ull)");
    return sentence("__uint_as_float(", std::bit_cast<uint32_t>(x.number), "u)");
  }
  std::string operand(int i, int n) const { return name(at(i).operands[n]); }

  // What instruction i is computed by.
  std::string value(int i) const {
    const Instruction& x = at(i);
    if (x.op == program::kDiagonal) return "static_cast<Int>(q - k)";
    if (x.op == program::kChain) return sentence("words::chain(", operand(i, 0), ", ", operand(i, 1), ")");
    const char* const word = program::row_of(x.op).word;
    switch (x.op) {
      case Op::kBatch:
      case Op::kHead:
      case Op::kQuery:
      case Op::kKey:
      case Op::kOffset: return sentence("static_cast<Int>(", word, ")");
      case Op::kGather: return gather(i);
      case Op::kNot: return sentence("1 - ", operand(i, 0));
      case Op::kSelect: return sentence(operand(i, 0), " != 0 ? ", operand(i, 1), " : ", operand(i, 2));
      case Op::kToFloat: return sentence("static_cast<float>(", operand(i, 0), ")");
      case Op::kToInt: return sentence("program::to_int<Int>(", operand(i, 0), ")");
      case Op::kAnd: return infix(i, "&");
      case Op::kOr: return infix(i, "|");
      case Op::kBitAnd:
      case Op::kBitOr:
      case Op::kBitXor:
      case Op::kLess:
      case Op::kLessEqual:
      case Op::kEqual: return infix(i, word);
      default: return call(i, word);
    }
  }
  std::string infix(int i, const char* word) const {
    return sentence("static_cast<Int>(", operand(i, 0), " ", word, " ", operand(i, 1), ")");
  }
  std::string call(int i, const char* word) const {
    switch (at(i).op) {
      case Op::kAdd: word = "add"; break;
      case Op::kSub: word = "sub"; break;
      case Op::kMul: word = "mul"; break;
      case Op::kDiv: word = "div"; break;
      case Op::kNeg: word = "neg"; break;
      case Op::kFloorDiv: word = "floor_div"; break;
      case Op::kMod: word = "floor_mod"; break;
      case Op::kShiftLeft: word = "shift_left"; break;
      case Op::kShiftRight: word = "shift_right"; break;
      default: break;
    }
    std::string operands = operand(i, 0);
    if (at(i).num_operands > 1) operands += sentence(", ", operand(i, 1));
    const bool of_ints = program::row_of(at(i).op).takes == program::Takes::kInts;
    return sentence(of_ints ? "program::" : "words::", word, "(", operands, ")");
  }

  const CaptureShape& capture_of(int i) const { return desc_.captures[static_cast<size_t>(at(i).capture)]; }

  std::string gather(int i) const {
    const Instruction& x = at(i);
    if (is_empty(capture_of(i))) return sentence("static_cast<", type(i), ">(0)");
    const std::string tensor = sentence("captures[", x.capture, "]");
    std::string place = "0";
    for (int n = 0; n < x.num_operands; ++n) {
      place +=
          sentence(" + words::within(", operand(i, n), ", ", tensor, ".dims[", n, "]) * ", tensor, ".strides[", n, "]");
    }
    const char* const load = [&] {
      switch (capture_of(i).dtype) {
        case DType::kBool: return "Int>(words::load<bool>";
        case DType::kInt32: return "Int>(words::load<int32_t>";
        case DType::kInt64: return "Int>(words::load<int64_t>";
        case DType::kBFloat16: return "float>(words::load<BFloat16>";
        case DType::kFloat16: return "float>(words::load<Float16>";
        case DType::kFloat64: return "float>(words::load<double>";
        default: return "float>(words::load<float>";
      }
    }();
    return sentence("static_cast<", load, "(", tensor, ", ", place, "))");
  }

  // The values of a pass that are not the same for all pairs.
  std::string steps(const Pass& pass) const {
    std::string text;
    for (int i = 0; i < code_.num_instructions; ++i) {
      if (pass.place[i] < 0 || at(i).op == Op::kConstant || is_member(i)) continue;
      text += sentence("    const ", type(i), " ", name(i), " = ", value(i), ";\n");
    }
    return text;
  }

  std::string mask() const {
    const std::string result = code_.mask < 0 ? "true" : sentence(name(code_.mask), " != 0");
    return sentence("  __device__ bool shows(int64_t q, int64_t k) const {\n", steps(code_.for_mask), "    return ",
                    result, ";\n  }\n");
  }
  std::string score() const {
    return sentence("  __device__ float score(float x, int64_t q, int64_t k) const {\n", steps(code_.for_score),
                    "    return ", code_.score < 0 ? "x" : name(code_.score), ";\n  }\n");
  }
  std::string gradient() const {
    const std::string none = code_.score < 0 ? "of_score" : "0";  // the score may not be read
    return sentence("  __device__ float gradient(float x, float of_score, int64_t q, int64_t k) const {\n",
                    steps(code_.for_score_gradient), "    return ",
                    code_.score_gradient < 0 ? none : name(code_.score_gradient), ";\n  }\n");
  }
  std::string gradients_of_captures() const {
    std::string adds;
    for (int n = 0; n < code_.num_gathers; ++n) {
      const auto& [i, adjoint, capture] = code_.gathers[n];
      if (is_empty(capture_of(i))) continue;
      std::string element = "int64_t{0}";
      for (int dim = 0; dim < at(i).num_operands; ++dim) {
        const std::string size = sentence("captures[", capture, "].dims[", dim, "]");
        element = sentence("(", element, " * ", size, " + words::within(", operand(i, dim), ", ", size, "))");
      }
      const bool uniform = at(i).rate == Rate::kUniform;
      adds += sentence("    add(", n, ", ", uniform, ", ", capture, ", ", element, ", ", name(adjoint), ");\n");
    }
    return sentence(
        "  template <class Add>\n  __device__ void gradients_of_captures(float x, float of_score, int64_t q, ",
        "int64_t k, const Add& add) const {\n", adds.empty() ? "" : steps(code_.for_gradients), adds, "  }\n");
  }

  const AttentionDesc& desc_;
  const Code& code_;
};

}  // namespace

uint64_t text_variant(const AttentionDesc& desc) {
  uint64_t variant = fits_int32(desc, program::schedule_of(*desc.program));
  for (const CaptureShape& capture : desc.captures) {
    variant = variant << 5 | static_cast<uint64_t>(capture.dtype) << 1 | static_cast<uint64_t>(is_empty(capture));
  }
  return variant;
}

std::string program_text(const AttentionDesc& desc) { return Writer(desc).text(); }

}  // namespace polyhead::cuda
