#include "shared_memory.h"

#include <algorithm>

#include "warp.h"

namespace cuda_sim {
namespace {

// "warp 1, lane 2, st.shared.u32 at k.cu:20"
std::string access_of(const Warp& any, int warp, int lane, int site) {
  const Instruction& i = any.launch.kernel.code[static_cast<size_t>(site)];
  return "warp " + std::to_string(warp) + (lane < 0 ? "" : ", lane " + std::to_string(lane)) + ", " + *i.name + " at " +
         any.launch.module.place(i.place);
}

constexpr size_t kCellsOfAPiece = 8;  // half-words in 16 bytes

uint16_t site_of(const Warp& warp, const Instruction& i) {
  return static_cast<uint16_t>(&i - warp.launch.kernel.code.data());
}

}  // namespace

SharedMemory::SharedMemory(int bytes, int num_warps)
    : num_warps_(num_warps),
      bytes_(static_cast<size_t>(bytes)),
      writers_(static_cast<size_t>(bytes + 1) / 2),
      readers_(writers_.size() * static_cast<size_t>(num_warps)),
      clocks_(static_cast<size_t>(num_warps) * static_cast<size_t>(num_warps)),
      product_readers_((writers_.size() / kCellsOfAPiece + 1) * static_cast<size_t>(num_warps)),
      ended_(static_cast<size_t>(num_warps)),
      fences_(static_cast<size_t>(num_warps)),
      num_fences_(static_cast<size_t>(num_warps)) {}

void SharedMemory::reset() {
  std::fill(bytes_.begin(), bytes_.end(), 0xa5);
  std::fill(writers_.begin(), writers_.end(), Writer{});
  std::fill(readers_.begin(), readers_.end(), Reader{});
  std::fill(clocks_.begin(), clocks_.end(), 0);
  mbarriers.reset();
  if (any_product_) std::fill(product_readers_.begin(), product_readers_.end(), ProductReader{});
  any_product_ = false;
  for (auto& of_warp : ended_) of_warp.clear();
  for (auto& of_warp : fences_) of_warp.clear();
  std::fill(num_fences_.begin(), num_fences_.end(), 0);
  for (int warp = 0; warp < num_warps_; ++warp) clock(warp, warp) = 1;
}

std::vector<uint32_t> SharedMemory::clocks(int warp) const {
  const auto begin = clocks_.begin() + warp * num_warps_;
  return {begin, begin + num_warps_};
}

void SharedMemory::join(int warp, const std::vector<uint32_t>& others) {
  for (int n = 0; n < num_warps_; ++n) clock(warp, n) = std::max(clock(warp, n), others[static_cast<size_t>(n)]);
}

size_t SharedMemory::check_bounds(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes) const {
  if (address >= bytes_.size() || static_cast<uint64_t>(bytes) > bytes_.size() - address) {
    warp.fault(
        i,
        "out of bounds: shared address " + std::to_string(address) + " of " + std::to_string(bytes_.size()) + " bytes",
        lane);
  }
  return address / 2;
}

void SharedMemory::race(const Warp& warp, const Instruction& i, int lane, const char* what, int other_warp,
                        int other_lane, int site) const {
  warp.fault(i,
             std::string("race: ") + what + " " + access_of(warp, other_warp, other_lane, site) +
                 ", without a barrier between",
             lane);
}

void SharedMemory::check_writer(const Warp& warp, const Instruction& i, int lane, const Writer& writer, Access access) {
  if (writer.clock == 0) {
    if (access != Access::kWrite) warp.fault(i, "shared memory read before it was written", lane);
    return;
  }
  if (writer.state == State::kInFlight) {
    race(warp, i, lane, "touched while a cp.async to it is in flight, issued by", writer.warp, writer.lane,
         writer.site);
  }
  if (access == Access::kAtomic && writer.state == State::kAtomic) return;
  if (writer.warp == warp.index && writer.lane == lane) return;
  if (!is_before(writer.clock, writer.warp, warp.index)) {
    race(warp, i, lane, access == Access::kWrite ? "written, and written by" : "read, and written by", writer.warp,
         writer.lane, writer.site);
  }
}

bool SharedMemory::is_before(uint32_t time, int of, int warp) {
  return of == warp ? time < clock(warp, warp) : clock(warp, of) >= time;
}

void SharedMemory::check_readers(const Warp& warp, const Instruction& i, int lane, size_t cell) {
  const Reader* readers = &readers_[cell * static_cast<size_t>(num_warps_)];
  for (int other = 0; other < num_warps_; ++other) {
    const Reader& reader = readers[other];
    if (reader.clock == 0) continue;
    if (other == warp.index && reader.lane == lane && !reader.many) continue;
    if (!is_before(reader.clock, other, warp.index)) {
      race(warp, i, lane, "written, and read by", other, reader.lane, reader.site);
    }
  }
  if (any_product_) check_products(warp, i, lane, cell);
}

// All lanes of a warp wait for its products together.
void SharedMemory::check_products(const Warp& warp, const Instruction& i, int lane, size_t cell) {
  const ProductReader* readers = &product_readers_[cell / kCellsOfAPiece * static_cast<size_t>(num_warps_)];
  for (int other = 0; other < num_warps_; ++other) {
    const auto& [product, site] = readers[other];
    if (product == 0) continue;
    const std::vector<uint32_t>& ended = ended_[static_cast<size_t>(other)];
    if (product > ended.size()) {
      warp.fault(i, "written, and read by a product that was not waited for: " + access_of(warp, other, -1, site),
                 lane);
    }
    if (other != warp.index && !is_before(ended[product - 1], other, warp.index)) {
      race(warp, i, lane, "written, and read by a product of", other, -1, site);
    }
  }
}

void SharedMemory::write(const Warp& warp, const Instruction& i, int lane, size_t cell, State state) {
  const uint32_t now = clock(warp.index, warp.index);
  if (now > UINT16_MAX) warp.fault(i, "more barriers than the race check can count");
  Writer& writer = writers_[cell];
  writer.clock = static_cast<uint16_t>(now);
  writer.site = site_of(warp, i);
  writer.warp = static_cast<uint8_t>(warp.index);
  writer.lane = lane & 31;
  writer.state = state;
  writer.fences = num_fences_[static_cast<size_t>(warp.index)];
  Reader* readers = &readers_[cell * static_cast<size_t>(num_warps_)];
  std::fill(readers, readers + num_warps_, Reader{});
}

void SharedMemory::read(const Warp& warp, const Instruction& i, int lane, size_t cell) {
  Reader& reader = readers_[cell * static_cast<size_t>(num_warps_) + static_cast<size_t>(warp.index)];
  const uint32_t now = clock(warp.index, warp.index);
  if (now > UINT16_MAX) warp.fault(i, "more barriers than the race check can count");
  const bool many = reader.clock == now && (reader.many || reader.lane != lane);
  reader = {static_cast<uint16_t>(now), site_of(warp, i), static_cast<uint8_t>(lane), many};
}

unsigned char* SharedMemory::reach(const Warp& warp, const Instruction& i, int lane, uint64_t address, int bytes,
                                   Access access) {
  const size_t first = check_bounds(warp, i, lane, address, bytes);
  const size_t last = (address + static_cast<uint64_t>(bytes) - 1) / 2;
  if (bytes == 1 && access != Access::kRead)
    warp.fault(i, "stores of one byte to shared memory are not modelled", lane);
  for (size_t cell = first; cell <= last; ++cell) {
    check_writer(warp, i, lane, writers_[cell], access);
    if (access == Access::kRead || access == Access::kConstantRead) {
      read(warp, i, lane, cell);
    } else {
      check_readers(warp, i, lane, cell);
      write(warp, i, lane, cell, access == Access::kAtomic ? State::kAtomic : State::kPlain);
    }
  }
  return &bytes_[address];
}

unsigned char* SharedMemory::reach_in_flight(const Warp& warp, const Instruction& i, int lane, uint64_t address,
                                             int bytes) {
  const size_t first = check_bounds(warp, i, lane, address, bytes);
  for (size_t cell = first; cell < first + static_cast<size_t>(bytes) / 2; ++cell) {
    check_writer(warp, i, lane, writers_[cell], Access::kWrite);
    check_readers(warp, i, lane, cell);
    write(warp, i, lane, cell, State::kInFlight);
  }
  return &bytes_[address];
}

void SharedMemory::land(const Warp& warp, int lane, uint64_t address, int bytes) {
  for (size_t cell = address / 2; cell < (address + static_cast<uint64_t>(bytes)) / 2; ++cell) {
    Writer& writer = writers_[cell];
    if (writer.state != State::kInFlight || writer.warp != warp.index || writer.lane != lane) continue;
    writer.state = State::kPlain;
    writer.clock = static_cast<uint16_t>(clock(warp.index, warp.index));
    writer.fences = num_fences_[static_cast<size_t>(warp.index)];
  }
}

void SharedMemory::fence(int warp, uint32_t mask) {
  fences_[static_cast<size_t>(warp)].push_back({clock(warp, warp), mask});
  if (++num_fences_[static_cast<size_t>(warp)] == 0) throw Fault("more fence.proxy.async than can be counted");
}

// The writer's first fence behind what it wrote, which must be before the barrier too.
void SharedMemory::check_fence(const Warp& warp, const Instruction& i, const Writer& writer) {
  const std::vector<Fence>& fences = fences_[writer.warp];
  const auto found = std::find_if(fences.begin() + writer.fences, fences.end(),
                                  [&](const Fence& fence) { return fence.mask >> writer.lane & 1; });
  if (found != fences.end() && is_before(found->clock, writer.warp, warp.index)) return;
  const std::string missing =
      found == fences.end() ? "no fence.proxy.async" : "no fence.proxy.async before the barrier";
  warp.fault(i, "read by a product, and " + missing +
                    " by the thread that wrote it: " + access_of(warp, writer.warp, writer.lane, writer.site));
}

const unsigned char* SharedMemory::reach_for_product(const Warp& warp, const Instruction& i, uint64_t address,
                                                     uint32_t product) {
  constexpr int kNoLane = -1;
  const size_t first = check_bounds(warp, i, kNoLane, address, 2 * kCellsOfAPiece);
  for (size_t cell = first; cell < first + kCellsOfAPiece; ++cell) {
    const Writer& writer = writers_[cell];
    if (cell > first && writer == writers_[cell - 1]) continue;
    check_writer(warp, i, kNoLane, writer, Access::kRead);
    check_fence(warp, i, writer);
  }
  const size_t reader = first / kCellsOfAPiece * static_cast<size_t>(num_warps_) + static_cast<size_t>(warp.index);
  any_product_ = true;
  product_readers_[reader] = {product, site_of(warp, i)};
  return &bytes_[address];
}

void SharedMemory::end_products(int warp, size_t count) {
  ended_[static_cast<size_t>(warp)].resize(count, clock(warp, warp));
}

}  // namespace cuda_sim
