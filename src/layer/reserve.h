// What forward leaves in a reserve for backward: which layer or block filled it, how far the calls have come, and what
// dropout drew.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "polyhead/status.h"

namespace polyhead {

// One of the two dropouts of a call, and the random bits that it draws: those of `seed` and of `num_offsets` offsets from
// `offset` on.
struct DropoutStream {
  const char* name = "";  // its arguments are NAME_p, NAME_seed and NAME_offset
  double p = 0;
  std::optional<uint64_t> seed;
  uint32_t offset = 0;
  int64_t num_offsets = 1;
};
using DropoutStreams = std::array<DropoutStream, 2>;

// In training, each dropout above 0 needs a seed, and no two may draw the same bits, or both would drop the same places.
Status check_dropouts(const DropoutStreams& streams);

// What stands at the start of a reserve.
struct ReserveHeader {
  static constexpr uint64_t kMagic = 0x706f6c7968656164;  // "polyhead"
  enum Stage : uint64_t { kForwardDone = 1, kBackwardDataDone = 2 };

  uint64_t magic = 0;
  uint64_t fingerprint = 0;  // of the desc
  uint64_t stage = 0;
  struct {
    uint64_t seed = 0, offset = 0;
  } dropouts[2];
};

// What forward writes, and what backward_data adds.
void begin_reserve(void* reserve, uint64_t fingerprint, const DropoutStreams& streams);
void set_stage(void* reserve, uint64_t stage);

// Whether backward may go on with it: `stage` must have been done, by the same owner ("layer", "block"), and the
// dropouts of this call must be those of forward.
Status check_reserve(const void* reserve, uint64_t fingerprint, uint64_t stage, const DropoutStreams& streams,
                     const char* owner);

}  // namespace polyhead
