// What decoding needs besides attention and products (contract/decoding.h), for the kernels' list.
#pragma once

#include "contract/decoding.h"

namespace polyhead::cuda {

Status append(const KvCacheDesc& cache, const AppendArgs& args, const Run& run);
Status copy_tokens(const KvCacheDesc& cache, const CopyTokensArgs& args, const Run& run);
Status read_tokens(const KvCacheDesc& cache, const ReadTokensArgs& args, const Run& run);
Status stand_at_step(const AttentionDesc& asked, const StepArgs& args, const Run& run);

}  // namespace polyhead::cuda
