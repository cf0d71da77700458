// Why a program costs what it costs: what each of its values depends on, and which blocks of a call its mask leaves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "polyhead/api.h"
#include "polyhead/attention.h"

namespace polyhead {

/// A value of a program, and what it depends on besides sequence and head: how often kernels compute it.
struct ProgramValue {
  std::string expression;  ///< as Program::text() has it: "slope[h] * float(abs(q - k))", "_1 = q - k", "score = ..."
  std::string depends_on;  ///< "nothing": once a head; "q", "k" or "q - k": once a query, key or diagonal of a tile;
                           ///< "q, k": for every pair
};

/// Mask and score, values with a name, and every value that depends on something else than what it is used for; operands
/// first. The finest of them tell the cost: docs/programs.md has the figures.
POLYHEAD_API std::vector<ProgramValue> explain_program(const Program& program);

/// How many blocks of 64 queries x 128 keys, of all sequences and heads of a call, are seen: as bounds tell it, by which
/// kernels leave out blocks and masking. Blocks at the end of a sequence may be smaller.
struct MaskBlocks {
  int64_t none = 0;  ///< hidden throughout by causal, windows, lengths or the program's mask: never computed
  int64_t some = 0;  ///< seen in part, or not told: computed and masked
  int64_t all = 0;   ///< seen throughout

  bool operator==(const MaskBlocks&) const = default;
};

/// Of `args` what the desc asks for of captures, lengths, offsets and windows is read, and nothing else; attn_mask and
/// attn_bias are not looked at. Also of a desc without a program.
/// Errors: a desc that is none, tensors that do not fit it; the sentence names them.
POLYHEAD_API Result<MaskBlocks> count_mask_blocks(const AttentionDesc& desc, const ForwardArgs& args);

/// Whether the program's mask alone says what a table of blocks says: hides every block that the table calls 0 and shows
/// every one that it calls 2. Of blocks with other values nothing is asked. false also where that is not found out in
/// reasonable time; true is certain. `table`: int32 [1 or batch, 1 or num_heads, blocks of block_q queries, blocks of
/// block_k keys]. Of `args` the captures are read.
/// Errors: a desc that is none or is packed or has no mask program, tensors that do not fit it.
POLYHEAD_API Result<bool> mask_implies_blocks(const AttentionDesc& desc, const ForwardArgs& args, int64_t block_q,
                                              int64_t block_k, const Tensor& table);

}  // namespace polyhead
