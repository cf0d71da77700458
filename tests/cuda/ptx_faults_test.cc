// What is wrong with a kernel is found, and told with its place: each test plants one fault. Where the like without the
// fault could be reported by mistake, it runs too.
#include <gtest/gtest.h>

#include "one_kernel.h"
#include "planted.h"

namespace cuda_sim {
namespace {

using Words = OneKernel::Words;

// %rd0 and %rd1 point to 64 words, those of %rd1 never written. %r1 thread, %r2 lane, %r3 its place in shared memory (4 bytes a thread), %rd10 likewise in the buffer of %rd0, %rd11
// of %rd1
const char* const kPlaces =
    ".loc 1 10 1\nmov.u32 %r1, %tid.x; mov.u32 %r2, %laneid; mov.u32 %r90, smem; shl.b32 %r91, %r1, 2; add.u32 %r3, "
    "%r90, %r91;\n"
    "cvt.u64.u32 %rd90, %r91; add.s64 %rd10, %rd0, %rd90; add.s64 %rd11, %rd1, %rd90;\n.loc 1 20 5\n";

std::string fault_of(const Planted& planted) {
  return fault_of(kernel_text(kPlaces + std::string(planted.body), 2), planted.shape);
}

const Shape kFourWarps = {{1, 1, 1}, {128, 1, 1}, 0};

const Planted kPlanted[] = {
    {"missing_barrier",
     "st.shared.u32 [%r3], %r1;\n.loc 1 21 5\nxor.b32 %r4, %r91, 128; add.u32 %r5, %r90, %r4; ld.shared.u32 %r6, "
     "[%r5];",
     "shared memory read before it was written", "k.cu:21"},
    {"race_of_warps",
     "st.shared.u32 [%r3], %r1; bar.sync 0; st.shared.u32 [%r3], %r2;\n.loc 1 22 5\nxor.b32 %r4, %r91, 128; add.u32 "
     "%r5, %r90, %r4; ld.shared.u32 %r6, [%r5];",
     "race: written, and read by warp 0, lane 0, ld.shared.u32 at k.cu:22, without a barrier between, at k.cu:20, "
     "st.shared.u32",
     "block (0, 0, 0), warp 1, lane 0"},
    {"barrier_between",
     "st.shared.u32 [%r3], %r1; bar.sync 0; xor.b32 %r4, %r91, 128; add.u32 %r5, %r90, %r4; ld.shared.u32 %r6, [%r5];",
     ""},
    {"no_barrier_before_reuse",
     "st.shared.u32 [%r3], %r1; bar.sync 0; xor.b32 %r4, %r91, 128; add.u32 %r5, %r90, %r4; ld.shared.u32 %r6, [%r5]; "
     "st.shared.u32 [%r3], 0;",
     "race: read, and written by warp 0, lane 0, st.shared.u32"},
    {"missing_syncwarp",
     "st.shared.u32 [%r3], %r1;\n.loc 1 30 5\nxor.b32 %r4, %r91, 4; add.u32 %r5, %r90, %r4; ld.shared.u32 %r6, [%r5];",
     "race: read, and written by warp 0, lane 1", "at k.cu:20, without a barrier between, at k.cu:30"},
    {"syncwarp_between",
     "st.shared.u32 [%r3], %r1; bar.warp.sync -1; xor.b32 %r4, %r91, 4; add.u32 %r5, %r90, %r4; ld.shared.u32 %r6, "
     "[%r5];",
     ""},
    {"shuffle_is_no_fence",
     "st.shared.u32 [%r3], %r1; shfl.sync.idx.b32 %r7, %r1, 0, 31, -1; xor.b32 %r4, %r91, 4; add.u32 %r5, %r90, %r4; "
     "ld.shared.u32 %r6, [%r5];",
     "race: read, and written by warp 0, lane 1"},
    {"reused_without_syncwarp",
     "st.shared.u32 [%r3], %r1; bar.warp.sync -1; xor.b32 %r4, %r91, 4; add.u32 %r5, %r90, %r4; ld.shared.u32 %r6, "
     "[%r5]; st.shared.u32 [%r3], 0;",
     "race: written, and read by warp 0, lane 1"},
    {"two_lanes_write", "st.shared.u32 [smem], %r1;", "race: written, and written by warp 0, lane 0"},
    {"warp_skips_a_barrier",
     "setp.gt.u32 %p1, %r1, 31; st.shared.u32 [%r3], %r1; @%p1 bra NEXT; bar.sync 1, 32; NEXT: xor.b32 %r4, %r91, 128; "
     "add.u32 %r5, %r90, %r4; bar.sync 2, 32; ld.shared.u32 %r6, [%r5];",
     "race: read, and written by warp 0, lane 0"},
    {"atomics_do_not_race",
     "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [smem], 0; bar.sync 0; red.shared.add.u32 [smem], 1; bar.sync 0; "
     "ld.shared.u32 %r4, [smem];",
     ""},
    {"atomic_beside_a_read",
     "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [smem], 0; bar.sync 0; red.shared.add.u32 [smem], 1; ld.shared.u32 "
     "%r4, [smem];",
     "race: "},
    {"stale_shared_memory", "ld.shared.u32 %r4, [%r3];", "shared memory read before it was written"},
    {"wait_group_off_by_one",
     "shl.b32 %r4, %r1, 4; and.b32 %r4, %r4, 511; add.u32 %r5, %r90, %r4; setp.lt.u32 %p1, %r1, 32; @!%p1 ret; "
     "cp.async.cg.shared.global [%r5], [%rd0], 16;\n"
     "cp.async.commit_group; cp.async.cg.shared.global [%r5+512], [%rd0], 16; cp.async.commit_group;\n.loc 1 40 "
     "1\ncp.async.wait_group 1; ld.shared.u32 %r6, [%r5+512];",
     "race: touched while a cp.async to it is in flight, issued by warp 0, lane 0", "at k.cu:20"},
    {"missing_commit",
     "setp.eq.u32 %p1, %r1, 0; @!%p1 ret; cp.async.cg.shared.global [smem], [%rd0], 16; cp.async.wait_group 0; "
     "ld.shared.u32 %r6, [smem];",
     "race: touched while a cp.async to it is in flight"},
    {"waited_but_no_barrier",
     "setp.eq.u32 %p1, %r1, 0; @%p1 cp.async.cg.shared.global [smem], [%rd0], 16; cp.async.wait_all; bar.warp.sync -1; "
     "setp.ge.u32 %p2, %r1, 32; @%p2 ld.shared.u32 %r6, [smem];",
     "race: read, and written by warp 0, lane 0"},
    {"waited_and_barrier",
     "setp.eq.u32 %p1, %r1, 0; @%p1 cp.async.cg.shared.global [smem], [%rd0], 16; cp.async.wait_all; bar.sync 0; "
     "ld.shared.u32 %r6, [smem];",
     ""},
    {"written_while_in_flight",
     "setp.eq.u32 %p1, %r1, 0; @!%p1 ret; cp.async.ca.shared.global [smem], [%rd0], 8; st.shared.u32 [smem], 0;",
     "race: touched while a cp.async"},
    {"copy_past_the_tail", "setp.eq.u32 %p1, %r1, 33; @%p1 cp.async.cg.shared.global [smem], [%rd0+512], 16;",
     "out of bounds: global address",
     "512 bytes behind the beginning of a buffer of 512, at k.cu:20, cp.async.cg.shared.global, block (0, 0, 0), warp "
     "1, lane 1"},
    {"zero_fill_reads_nothing",
     "setp.eq.u32 %p1, %r1, 33; mov.u32 %r4, 0; @%p1 cp.async.cg.shared.global [smem], [%rd0+512], 16, %r4;", ""},
    {"copies_more_than_it_has",
     "setp.eq.u32 %p1, %r1, 33; mov.u32 %r4, 17; @%p1 cp.async.cg.shared.global [smem], [%rd0], 16, %r4;",
     "copies 17 of 16 bytes"},
    {"unguarded_tail_store", "shl.b64 %rd20, %rd90, 1; add.s64 %rd21, %rd1, %rd20; st.global.u32 [%rd21+8], %r1;",
     "out of bounds: global address", "warp 1, lane 31"},
    {"before_the_buffer", "setp.eq.u32 %p1, %r1, 3; @%p1 ld.global.u32 %r4, [%rd0+-4];",
     "out of bounds: global address", "warp 0, lane 3"},
    {"shared_out_of_bounds", "st.shared.u32 [%r3+1000], %r1;", "out of bounds: shared address 1024 of 1024 bytes",
     "lane 6"},
    {"misaligned", "ld.global.v2.u32 {%r4, %r5}, [%rd0+4];", "misaligned: address", "8 bytes"},
    {"uninitialised_register", "setp.lt.u32 %p1, %r1, 5; @%p1 mov.f32 %f1, 0f00000000; add.f32 %f2, %f1, %f1;",
     "register read before it was written: by lanes 5-31", "k.cu:20, add.f32"},
    {"uninitialised_guard", "@%p1 mov.u32 %r4, 0;", "register read before it was written"},
    {"half_warp_barrier", "setp.lt.u32 %p1, %r2, 16; @!%p1 bra OUT; bar.sync 0; OUT: mov.u32 %r4, 0;",
     "barrier never opens: divergence", "lanes 0-15 at bar.sync"},
    {"early_return", "setp.gt.u32 %p1, %r1, 40; @%p1 ret; bar.sync 0;", "barrier never opens: divergence",
     "lanes 9-31 have ended"},
    {"a_warp_has_ended", "setp.gt.u32 %p1, %r1, 31; @%p1 ret; bar.sync 0;",
     "barrier never opens; warp 0 waits at k.cu:20; warp 1 has ended"},
    {"pairs_share_a_barrier", "bar.sync 1, 64;",
     "barrier 1 of 64 threads: nothing tells whether the warp comes before it last opened, for warps 0, 1", "warp 2",
     kFourWarps},
    {"pairs_take_a_barrier_by_turns",
     "setp.gt.u32 %p1, %r1, 63; @%p1 bra SECOND; bar.sync 1, 64; bar.sync 0; bra OUT; SECOND: bar.sync 0; bar.sync 1, "
     "64; OUT: mov.u32 %r4, 0;",
     "", "", kFourWarps},
    {"a_barrier_for_each_pair", "shr.u32 %r4, %r1, 6; add.u32 %r4, %r4, 1; bar.sync %r4, 64; bar.sync %r4, 64;", "", "",
     kFourWarps},
    {"shuffle_in_divergent_code",
     "setp.lt.u32 %p1, %r2, 16; @!%p1 bra OUT; shfl.sync.idx.b32 %r4, %r1, 0, 31, -1; OUT: mov.u32 %r5, 0;",
     "divergence: lanes wait for others that never come", "lanes 0-15 at shfl.sync.idx.b32, k.cu:20"},
    {"shuffle_of_the_lanes_there",
     "setp.lt.u32 %p1, %r2, 16; @!%p1 bra OUT; shfl.sync.idx.b32 %r4, %r1, 0, 31, 65535; OUT: mov.u32 %r5, 0;", ""},
    {"not_its_own_member", "shfl.sync.idx.b32 %r4, %r1, 0, 31, 65535;", "divergence: the lane is not among the members",
     "lane 16"},
    {"guarded_matrix_words",
     "setp.lt.u32 %p1, %r2, 16; mov.u32 %r4, 0; mov.f32 %f1, 0f00000000; @%p1 "
     "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1, %f1, %f1, %f1}, {%r4, %r4}, {%r4}, {%f1, %f1, %f1, "
     "%f1};",
     "divergence: lanes wait"},
    {"sums_without_atomics",
     "setp.eq.u32 %p1, %r1, 0; @!%p1 ret; ld.global.f32 %f1, [%rd0]; add.f32 %f1, %f1, 0f3F800000; st.global.f32 "
     "[%rd0], %f1;",
     "race between blocks: read or updated, and written by block 0",
     "block (1, 0, 0)",
     {{2, 1, 1}, {32, 1, 1}, 0}},
    {"sums_by_atomics", "red.global.add.f32 [%rd0], 0f3F800000;", "", "", {{2, 1, 1}, {32, 1, 1}, 0}},
    {"atomic_beside_a_store",
     "mov.u32 %r4, %ctaid.x; setp.eq.u32 %p1, %r4, 0; setp.eq.u32 %p2, %r1, 0; @%p2 st.global.u32 [%rd0], 0; @!%p1 "
     "red.global.add.u32 [%rd0], 1;",
     "race between blocks: written by block 0",
     "",
     {{2, 1, 1}, {32, 1, 1}, 0}},
    {"both_blocks_write",
     "st.global.u32 [%rd10], %r1;",
     "race between blocks: written by block 0 of the grid, st.global.u32 at k.cu:20",
     "",
     {{2, 1, 1}, {32, 1, 1}, 0}},
    {"constant_load_of_what_is_written", "st.global.u32 [%rd10], %r1; ld.global.nc.u32 %r4, [%rd10];",
     "ld.global.nc of what this launch wrote"},
    {"written_after_a_constant_load", "ld.global.nc.u32 %r4, [%rd10]; st.global.u32 [%rd10], %r1;",
     "written, and read by ld.global.nc in this launch"},
    {"global_memory_nobody_wrote", "ld.global.u32 %r4, [%rd11];", "global memory read before it was written"},
    {"fence", "membar.gl;", "PTX line", "unknown instruction membar.gl, at k.cu:20"},
    {"volatile", "ld.volatile.global.u32 %r4, [%rd0];", "PTX line", "unknown instruction ld.volatile.global.u32"},
    {"unknown_rounding", "add.rm.f32 %f1, 0f00000000, 0f00000000;", "PTX line", "unknown instruction add.rm.f32"},
    {"byte_stores", "st.shared.u8 [%r3], %r1;", "stores of one byte to shared memory are not modelled"},
    {"wrong_width", "add.s64 %rd20, %r1, %rd0;", "PTX line", "operand %r1 has another width"},
    {"too_few_operands", "add.s32 %r4, %r1;", "PTX line", "add.s32 with 2 operands"},
    {"parameter_written", "cvta.param.u64 %rd20, 0; st.u32 [%rd20], 0;", "a parameter is written"},
    {"trap", "setp.eq.u32 %p1, %r1, 35; @%p1 trap;", "the kernel traps", "warp 1, lane 3"},
    {"too_many_threads", "", "launch of k: 1025 x 1 x 1 threads", "", {{1, 1, 1}, {1025, 1, 1}, 0}},
    {"grid_y", "", "launch of k: grid.y is 65536", "", {{1, 65536, 1}, {32, 1, 1}, 0}},
    {"too_much_shared_memory",
     "",
     "launch of k: 168960 bytes of shared memory",
     "",
     {{1, 1, 1}, {32, 1, 1}, 164 * 1024}},
};

TEST(PtxFaults, AreFoundAndTellTheirPlace) {
  for (const Planted& planted : kPlanted) expect(planted, fault_of(planted));
}

// What an inlined function does is told with the line that called it, the outermost.
TEST(PtxFaults, NameTheLineThatCalled) {
  const std::string fault = fault_of({"",
                                      ".loc 1 30 3, function_name $L__info0, inlined_at 1 20 5\n.loc 1 40 7, "
                                      "function_name $L__info1, inlined_at 1 30 3\n"
                                      "ld.shared.u32 %r4, [%r3];",
                                      ""});
  EXPECT_NE(fault.find("at k.cu:40 (from :20)"), std::string::npos) << fault;
}

TEST(PtxFaults, MalformedTextIsRefused) {
  for (const char* text : {"add.s32 %r1, 1, 2;", ".visible .entry k() { .reg .b32 %r<2>; mov.u32 %r1",
                           ".visible .entry k() { bra NOWHERE; }", ".visible .entry k() { mov.u32 %r7, 0; }", "}",
                           ".global .u32 x;", ".func f() { ret; }", ".visible .entry k() { @%p1 ret; }"}) {
    EXPECT_THROW(parse(head() + text), Fault) << text;
  }
}

// Lanes 128 bytes apart want one bank, and a sector each; lanes side by side neither.
TEST(PtxCounters, CountBankWavesAndSectors) {
  const auto counted = [](const std::string& body) {
    OneKernel kernel(kernel_text(kPlaces + body, 2));
    std::vector<Words> buffers = {Words(640), Words(1)};
    kernel.run(buffers, {{1, 1, 1}, {32, 1, 1}, 8192});
    return kernel.counters();
  };
  const Counters near = counted("st.shared.u32 [%r3], %r1; ld.global.u32 %r4, [%rd10];");
  EXPECT_EQ(near.bank_phases, 1u);
  EXPECT_EQ(near.bank_waves, 1u);
  EXPECT_EQ(near.sectors, 4u);
  EXPECT_EQ(near.ideal_sectors, 4u);
  const Counters far = counted(
      "shl.b32 %r4, %r1, 7; add.u32 %r4, %r4, %r90; st.shared.u32 [%r4], %r1; shl.b64 %rd20, %rd90, 5; add.s64 %rd21, "
      "%rd0, %rd20; ld.global.u32 %r5, [%rd21];");
  EXPECT_EQ(far.bank_phases, 1u);
  EXPECT_EQ(far.bank_waves, 32u);
  EXPECT_EQ(far.sectors, 32u);
  EXPECT_EQ(far.ideal_sectors, 4u);
  const Counters wide =
      counted("shl.b32 %r4, %r1, 4; add.u32 %r4, %r4, %r90; st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1};");
  EXPECT_EQ(wide.bank_phases, 4u);  // 8 lanes each
  EXPECT_EQ(wide.bank_waves, 4u);
}

}  // namespace
}  // namespace cuda_sim
