// What is known of each op: how it is written, what it takes and gives.
#pragma once

#include "polyhead/program.h"

namespace polyhead::program {

// How an op stands in the text.
enum class Form : uint8_t { kName, kPrefix, kInfix, kCall, kOther };

// What an op takes: operands of one type, which its result has too unless it says otherwise.
enum class Takes : uint8_t {
  kNothing,
  kNumbers,  // float or int
  kFloats,
  kInts,
  kBools,
  kOther,
};

struct OpRow {
  Op op;
  const char* word;
  Form form;
  int num_operands;  // of kGather: what its capture has
  Takes takes;
  ValueType gives;  // kFloat where the operands tell
};

const OpRow& row_of(Op op);

// The op of a function's name; null: none.
const OpRow* function_named(std::string_view name);

constexpr const char* type_name(ValueType type) {
  return type == ValueType::kFloat ? "float" : type == ValueType::kInt ? "int" : "bool";
}

}  // namespace polyhead::program
