// Programs as text: words, names, and the canonical form.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "polyhead/program.h"

namespace polyhead::program {

// Whether a tensor or value may have this name: an identifier that is not a word of the language.
bool is_free_name(std::string_view name);

// Every capture declared, in order; then a name `_1`, `_2`, ... for each value that is used more than once; then mask and
// score.
std::string text_of(const Program& program);

// Of every step: "_1 = q - k" of a value that has a name there, else its expression.
std::vector<std::string> texts_of_steps(const Program& program);

}  // namespace polyhead::program
