// An option of the scores that is not a field of the desc but a thing of its own, with tensors of its own: what a score
// program will be. A kernel computes the options that it was built with and refuses the others.
#pragma once

#include <span>
#include <string>

#include "contract/operands.h"
#include "core/sentence.h"
#include "polyhead/attention.h"

namespace polyhead {

// A tensor that it reads. Each call gives it, in ForwardArgs::captures.
struct Capture {
  const char* name;                                  // in sentences
  OperandShape (*shape)(const AttentionDesc& desc);  // no dims: the desc does not ask for it
};

struct ScoreOption {
  const char* name;
  std::span<const Capture> captures;  // in the order in which a call gives them
};

// Why a kernel that was built with `own` alone (null: with none) cannot compute the desc; "" if it can.
inline std::string other_score_option(const AttentionDesc& desc, const ScoreOption* own = nullptr) {
  if (desc.score_option == own) return "";
  if (desc.score_option == nullptr) return sentence("score_option is none, takes ", own->name);
  return sentence("score_option is ", desc.score_option->name, ", takes ", own != nullptr ? own->name : "none");
}

}  // namespace polyhead
