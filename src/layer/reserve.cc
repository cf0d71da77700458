#include "layer/reserve.h"

#include <cstddef>
#include <cstring>

#include "core/dropout.h"
#include "core/sentence.h"

namespace polyhead {

Status check_dropouts(const DropoutStreams& streams) {
  for (const DropoutStream& s : streams) {
    if (Status status = check_dropout_seed(s.name, s.p, s.seed); !status.ok()) return status;
  }
  const DropoutStream &first = streams[0], &second = streams[1];
  if (first.p <= 0 || second.p <= 0 || *first.seed != *second.seed) return {};
  const uint32_t distance = second.offset - first.offset;  // offsets wrap around
  if (distance >= static_cast<uint64_t>(first.num_offsets)) return {};
  return invalid(sentence(second.name, "_seed is ", *second.seed, " and ", second.name, "_offset ", second.offset,
                          ", with which ", first.name, " draws too: both would drop the same places, give another ",
                          "seed or offset"));
}

void begin_reserve(void* reserve, uint64_t fingerprint, const DropoutStreams& streams) {
  ReserveHeader header = {ReserveHeader::kMagic, fingerprint, ReserveHeader::kForwardDone, {}};
  for (size_t i = 0; i < streams.size(); ++i) {
    if (streams[i].p > 0) header.dropouts[i] = {*streams[i].seed, streams[i].offset};
  }
  std::memcpy(reserve, &header, sizeof header);
}

void set_stage(void* reserve, uint64_t stage) {
  std::memcpy(static_cast<char*>(reserve) + offsetof(ReserveHeader, stage), &stage, sizeof stage);
}

Status check_reserve(const void* reserve, uint64_t fingerprint, uint64_t stage, const DropoutStreams& streams,
                     const char* owner) {
  ReserveHeader header;
  std::memcpy(&header, reserve, sizeof header);
  if (header.magic != ReserveHeader::kMagic || header.stage == 0) {
    return invalid("reserve holds no forward call: forward with this reserve comes first");
  }
  if (header.fingerprint != fingerprint)
    return invalid(sentence("reserve was filled by another ", owner, "'s forward"));
  if (header.stage < stage) {
    return invalid("backward_weights comes after backward_data: call that with this reserve first");
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const DropoutStream& s = streams[i];
    if (s.p <= 0) continue;
    if (!s.seed.has_value()) return check_dropouts(streams);
    if (*s.seed != header.dropouts[i].seed) {
      return invalid(
          sentence(s.name, "_seed is ", *s.seed, ", that of the forward call was ", header.dropouts[i].seed));
    }
    if (s.offset != header.dropouts[i].offset) {
      return invalid(
          sentence(s.name, "_offset is ", s.offset, ", that of the forward call was ", header.dropouts[i].offset));
    }
  }
  return {};
}

}  // namespace polyhead
