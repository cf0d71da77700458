// The command's problems are those of testing/, as are the words for them.
#pragma once

#include "testing/problem_words.h"
#include "testing/words.h"

namespace polyhead::tools {
using namespace testing;
}  // namespace polyhead::tools
