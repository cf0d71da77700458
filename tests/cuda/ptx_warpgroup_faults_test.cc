// What is wrong with products of warpgroups is found, and told with its place; what is right is not.
#include <gtest/gtest.h>

#include "planted.h"

namespace cuda_sim {
namespace {

// %r1 thread, %r2 lane, %r3 its 16 bytes of 2 KB of shared memory, %r4 0, %p9 true, %p0 thread 0, %p1 warp 0, %p2 thread
// 127. %rd20 tells the 2 KB as A [64, 16] and their beginning as B [16, 8], without a swizzle.
const char* const kPlaces =
    ".shared .align 1024 .b8 tiles[2048]; mov.u32 %r1, %tid.x; mov.u32 %r2, %laneid; mov.u32 %r5, tiles; mov.u32 %r4, "
    "0;\n"
    "shl.b32 %r6, %r1, 4; add.u32 %r3, %r5, %r6; shr.u32 %r5, %r5, 4; cvt.u64.u32 %rd19, %r5; or.b64 %rd20, %rd19, "
    "0x800400000;\n"
    "setp.eq.u32 %p9, %r4, 0; setp.eq.u32 %p0, %r1, 0; setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p2, %r1, 127;\n.loc 1 20 "
    "5\n";

// Words of the bodies, of which later ones may be part of earlier ones.
const std::pair<const char*, const char*> kWords[] = {
    {"<all>", "<begin> <product> <end>"},
    {"<begin>", "<store> <proxy> <barrier> <zero> <fence>"},
    {"<end>", "<commit> <wait>"},
    {"<first_of_four>", "setp.gt.u32 %p5, %r1, 255; @%p5 bra DONE; setp.gt.u32 %p5, %r1, 127; @%p5 bra SECOND;"},
    {"<phase>",
     "@%p0 mbarrier.init.shared::cta.b64 [smem], 4; bar.sync 0; setp.eq.u32 %p3, %r2, 0; xor.b32 %r8, %r6, 1536; "
     "mov.u32 %r9, tiles; add.u32 %r9, %r9, %r8; <store>"},
    {"<arrive>", "bar.warp.sync -1; @%p3 mbarrier.arrive.shared::cta.b64 %rd21, [smem];"},
    {"<await>", ".loc 1 40 5\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 %p4, [smem], 0; @!%p4 bra WAIT;\n"},
    {"<read>", "ld.shared.u32 %r7, [%r9];"},
    {"<store>", "st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4};"},
    {"<copy>", "cp.async.cg.shared.global [%r3], [%rd0], 16;"},
    {"<proxy>", "fence.proxy.async.shared::cta;"},
    {"<barrier>", "bar.sync 0;"},
    {"<zero>", "mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;"},
    {"<a>", "add.u32 %r10, %r1, 1; add.u32 %r11, %r1, 2; add.u32 %r12, %r1, 3; add.u32 %r13, %r1, 4;"},
    {"<fence>", "wgmma.fence.sync.aligned;"},
    {"<product>", ".loc 1 30 5\n<n8> {%f1, %f2, %f3, %f4}, %rd20, %rd20, %p9, 1, 1, 0, 0;\n.loc 1 31 5\n"},
    {"<product_a>",
     ".loc 1 30 5\n<n8> {%f1, %f2, %f3, %f4}, {%r10, %r11, %r12, %r13}, %rd20, %p9, 1, 1, 0;\n.loc 1 31 5\n"},
    {"<n8>", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"},
    {"<n16>", "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"},
    {"<commit>", "wgmma.commit_group.sync.aligned;"},
    {"<wait>", "wgmma.wait_group.sync.aligned 0;"},
    {"<wait1>", "wgmma.wait_group.sync.aligned 1;"},
    {"<use>", "add.f32 %f9, %f1, %f1;"},
};

std::string spelt(std::string body) {
  for (const auto& [word, text] : kWords) {
    for (size_t at = body.find(word); at != std::string::npos; at = body.find(word, at)) {
      body.replace(at, std::string(word).size(), text);
    }
  }
  return body;
}

const Shape kFourGroups = {{1, 1, 1}, {512, 1, 1}, 0};

const Planted kPlanted[] = {
    {"right", "<all> <use>", ""},
    {"right_again", "<all> <use> <barrier> <store> <proxy> <barrier> <fence> <product> <product> <end> <use>", ""},
    {"right_with_a", "<a> <begin> <product_a> <end> <a> <fence> <product_a> <end> <use>", ""},
    {"two_in_flight", "<a> <begin> <product_a> <product_a> <commit> <product> <commit> <wait1> <a> <wait> <use>", ""},

    // What is read of shared memory.
    {"no_proxy_fence", "<store> <barrier> <zero> <fence> <product> <end>",
     "read by a product, and no fence.proxy.async by the thread that wrote it: warp 0, lane 0, st.shared.v4.u32 at "
     "k.cu:20",
     "at k.cu:30, wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16, block (0, 0, 0), warp 0"},
    {"proxy_fence_before", "<proxy> <store> <barrier> <zero> <fence> <product> <end>",
     "read by a product, and no fence.proxy.async by"},
    {"proxy_fence_of_another", "<store> @%p0 fence.proxy.async; <barrier> <zero> <fence> <product> <end>",
     "read by a product, and no fence.proxy.async by the thread that wrote it: warp 2, lane 0"},
    {"proxy_fence_behind_the_barrier", "<store> <barrier> <proxy> <zero> <fence> <product> <end>",
     "read by a product, and no fence.proxy.async before the barrier"},
    {"no_barrier", "<store> <proxy> bar.warp.sync -1; <zero> <fence> <product> <end>",
     "shared memory read before it was written"},
    {"written_again", "<begin> <store> <proxy> <product> <end>", "race: read, and written by warp 0, lane 0"},
    {"never_written", "<zero> <fence> <product> <end>", "shared memory read before it was written"},
    {"copied", "<copy> cp.async.wait_all; <proxy> <barrier> <zero> <fence> <product> <end>", ""},
    {"copied_without_proxy_fence", "<copy> cp.async.wait_all; <barrier> <zero> <fence> <product> <end>",
     "read by a product, and no fence.proxy.async by the thread that wrote it: warp 0, lane 0, cp.async"},
    {"proxy_fence_before_the_copy_landed", "<copy> <proxy> cp.async.wait_all; <barrier> <zero> <fence> <product> <end>",
     "read by a product, and no fence.proxy.async by"},
    {"copy_in_flight", "<copy> <proxy> <barrier> <zero> <fence> <product> <end>",
     "race: touched while a cp.async to it is in flight"},

    // What is written there.
    {"overwritten", "<begin> <product> <commit> <store>",
     "written, and read by a product that was not waited for: warp 0, "
     "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 at "
     "k.cu:30",
     "at k.cu:31, st.shared.v4.u32, block (0, 0, 0), warp 0, lane 0"},
    {"copied_over", "<begin> <product> <commit> <copy>", "written, and read by a product that was not waited for"},
    {"overwritten_in_the_last_group", "<begin> <product> <commit> <product> <commit> <wait1> <store>",
     "written, and read by a product that was not waited for"},
    {"no_barrier_before_reuse", "<all> @%p2 st.shared.u32 [tiles], %r4;",
     "race: written, and read by a product of warp 0, wgmma", "warp 3, lane 31"},
    {"others_may_not_have_waited", "<begin> <product> <commit> <barrier> <wait> <store>",
     "written, and read by a product that was not waited for: warp 1"},
    {"barrier_before_the_wait", "<begin> <product> <commit> <barrier> @%p2 st.shared.u32 [tiles], %r4; <wait>",
     "race: written, and read by a product of warp 0", "warp 3, lane 31"},
    {"barrier_before_reuse", "<all> <barrier> <store>", ""},

    // Registers.
    {"no_fence", "<store> <proxy> <barrier> <zero> <product> <end>", "no wgmma.fence before the first product"},
    {"sum_written_behind_the_fence", "<store> <proxy> <barrier> <fence> <zero> <product> <end>",
     "register of a sum written since the last wgmma.fence", "at k.cu:30"},
    {"sum_written_between", "<all> add.f32 %f3, %f3, %f3; <product> <end>", "register of a sum written since"},
    {"a_written_behind_the_fence", "<begin> <a> <product_a> <end>", "register of A written since the last wgmma.fence"},
    {"sum_moved_behind_the_fence",
     "<store> <proxy> <barrier> mov.f32 %f11, 0f00000000; <fence> mov.f32 %f1, %f11; mov.f32 %f2, %f1; mov.f32 %f3, "
     "%f1; "
     "mov.f32 %f4, %f1; <product> <end>",
     ""},
    {"sum_read_too_early", "<begin> <product> <commit> <use> <wait>",
     "sum read before its product was waited for, wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 at k.cu:30, at "
     "k.cu:31, "
     "add.f32, block (0, 0, 0), warp 0, lane 0"},
    {"sum_moved_too_early",
     "<begin> <product> <commit> mov.f32 %f9, %f1; mov.f32 %f8, %f9; <wait> add.f32 %f9, %f8, %f8;", ""},
    {"what_was_moved_read_too_early", "<begin> <product> <commit> mov.f32 %f9, %f1; add.f32 %f8, %f9, %f9; <wait>",
     "sum read before its product was waited for"},
    {"sum_written_too_early", "<begin> <product> <commit> <zero> <wait>",
     "sum written before its product was waited for"},
    {"sum_read_behind_the_wrong_wait", "<begin> <product> <commit> <wait1> <use> <wait>", "sum read before"},
    {"no_commit", "<begin> <product> <wait> <use> <end>", "sum read before its product was waited for"},
    {"a_written_too_early", "<a> <begin> <product_a> <commit> <a> <wait>",
     "register of A written before its product was waited for"},
    {"a_read_too_early", "<a> <begin> <product_a> <commit> add.u32 %r14, %r10, %r10; <wait>",
     "register of A read before its product was waited for"},
    {"sum_as_a", "<begin> <product> <n8> {%f5, %f6, %f7, %f8}, {%f1, %f2, %f3, %f4}, %rd20, %p9, 1, 1, 0; <end>",
     "register of A is a sum of a product that was not waited for"},
    {"a_as_sum", "<a> <begin> <product_a> <fence> <n8> {%r10, %r11, %r12, %r13}, %rd20, %rd20, %p9, 1, 1, 0, 0; <end>",
     "sum is a register of A of a product that was not waited for"},
    {"another_shape",
     "mov.f32 %f5, 0f00000000; mov.f32 %f6, %f5; mov.f32 %f7, %f5; mov.f32 %f8, %f5; <begin> <product> <n16> {%f1, "
     "%f2, %f3, "
     "%f4, %f5, %f6, %f7, %f8}, %rd20, %rd20, %p9, 1, 1, 0, 0; <end>",
     "sum of a product of another shape, without wgmma.fence between"},
    {"another_shape_behind_a_fence",
     "mov.f32 %f5, 0f00000000; mov.f32 %f6, %f5; mov.f32 %f7, %f5; mov.f32 %f8, %f5; <begin> <product> <fence> <n16> "
     "{%f1, "
     "%f2, %f3, %f4, %f5, %f6, %f7, %f8}, %rd20, %rd20, %p9, 1, 1, 0, 0; <end>",
     ""},
    {"sum_never_written", "<store> <proxy> <barrier> <fence> <product> <end>", "register read before it was written"},
    {"sum_not_added", "<store> <proxy> <barrier> setp.ne.u32 %p9, %r4, 0; <fence> <product> <end> <use>", ""},
    {"a_never_written", "<begin> <product_a> <end>", "register read before it was written"},
    {"never_waited", "<begin> <product> <commit>", "the warp ends before it has waited for a product", "k.cu:30"},
    {"never_committed", "<begin> <product>", "the warp ends before it has committed a product"},

    // What warps and lanes do together.
    {"a_warp_leaves", "<begin> @%p1 ret; <product> <end>",
     "divergence: the warp has ended without it, warp 1 of the warpgroup has not, at k.cu:30", "warp 0"},
    {"lanes_stay_away", "<begin> setp.lt.u32 %p3, %r2, 16; @%p3 bra OUT; <product> <end> OUT: mov.u32 %r6, 0;",
     "divergence: lanes wait for others that never come", "lanes 16-31 at wgmma.mma_async"},
    {"another_order", "<begin> @%p1 bra OTHER; <product> <end> ret; OTHER: <commit> <product> <end>",
     "divergence: warp 0 of the warpgroup is at wgmma.commit_group.sync.aligned, k.cu:31", "warp 1"},
    {"not_whole",
     "<begin> <product> <end>",
     "the warpgroup is not whole: a block of 96 threads",
     "warp 0",
     {{1, 1, 1}, {96, 1, 1}, 0}},
    {"two_warpgroups",
     "shl.b32 %r7, %r1, 4; and.b32 %r7, %r7, 2047; mov.u32 %r3, tiles; add.u32 %r3, %r3, %r7; "
     "setp.lt.u32 %p3, %r1, 128; @%p3 <store> <proxy> <barrier> <zero> <fence> <product> <end>",
     "",
     "",
     {{1, 1, 1}, {256, 1, 1}, 0}},
    {"lanes_differ", "<begin> cvt.u64.u32 %rd21, %r2; add.s64 %rd20, %rd20, %rd21; <product> <end>",
     "lanes differ in the descriptor of B", "lane 1"},
    {"warps_differ_in_a",
     "<begin> mov.b64 %rd21, %rd20; @!%p1 add.s64 %rd21, %rd21, 8; <n8> {%f1, %f2, %f3, %f4}, %rd21, %rd20, %p9, 1, 1, "
     "0, 0; "
     "<end>",
     "operands differ from those of warp 0 of the warpgroup", "warp 1"},
    {"lanes_differ_in_adding", "<begin> setp.lt.u32 %p9, %r2, 7; <product> <end>",
     "lanes differ in whether D is added"},

    // Descriptors.
    {"out_of_bounds", "<begin> add.s64 %rd20, %rd20, 128; <product> <end>",
     "out of bounds: shared address 3072 of 3072 bytes"},
    {"unused_bits", "<begin> or.b64 %rd20, %rd20, 32768; <product> <end>",
     "the descriptor of B has bits that mean nothing"},
    {"base_offset", "<begin> or.b64 %rd20, %rd20, 0x2000000000000; <product> <end>",
     "the descriptor of B has a base offset, which is not modelled"},
    {"in_the_middle_of_a_pattern", "<begin> or.b64 %rd20, %rd20, 0x4000000000000008; <product> <end>",
     "the descriptor of B begins at 1152, in the middle of its swizzle's pattern"},
    {"leaves_its_lines", "<begin> or.b64 %rd20, %rd20, 0x4000000000000007; <product> <end>",
     "the descriptor of B begins at 1136, and leaves its lines"},
    {"misaligned_stride",
     "<begin> or.b64 %rd21, %rd19, 0x4000002000000000; <n8> {%f1, %f2, %f3, %f4}, %rd21, %rd20, %p9, 1, 1, 0, 0; <end>",
     "the descriptor of A has a stride of 512, misaligned"},
    {"misaligned_leading_stride",
     "<begin> or.b64 %rd21, %rd19, 0x8000002000010000; <n8> {%f1, %f2, %f3, %f4}, %rd21, %rd20, %p9, 1, 1, 1, 0; <end>",
     "the descriptor of A has a leading stride of 16, misaligned"},
    {"scale", "<begin> <n8> {%f1, %f2, %f3, %f4}, %rd20, %rd20, %p9, 1, 2, 0, 0; <end>",
     "a scale of 2, 1 or -1 is one"},
    {"transposed", "<begin> <n8> {%f1, %f2, %f3, %f4}, %rd20, %rd20, %p9, 1, 1, 0, 2; <end>", "transposed by 2"},
    {"too_few_sums", "<begin> <n8> {%f1, %f2, %f3}, %rd20, %rd20, %p9, 1, 1, 0, 0; <end>", "PTX line",
     "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 with 10 operands"},
    {"sum_of_64_bits", "<begin> <n8> {%f1, %f2, %f3, %rd4}, %rd20, %rd20, %p9, 1, 1, 0, 0; <end>", "PTX line",
     "no register of 32 bits %rd4"},
    {"scale_of_all", "<begin> <n8> {%f1, %f2, %f3, %f4}, %rd20, %rd20, 1, 1, 1, 0, 0; <end> <use>", ""},
    {"registers", "setmaxnreg.dec.sync.aligned.u32 30;", "30 registers a thread"},
    {"fewer_registers_by_inc", "setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.inc.sync.aligned.u32 32;",
     "32 registers a thread, it has 40"},
    {"more_registers_by_dec", "setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.dec.sync.aligned.u32 48;",
     "48 registers a thread, it has 40"},
    {"registers_given_back",
     "<first_of_four> setmaxnreg.dec.sync.aligned.u32 24; bra DONE; SECOND: setmaxnreg.inc.sync.aligned.u32 232; DONE:",
     "", "", kFourGroups},
    {"registers_that_nobody_gave_back",
     "<first_of_four> setmaxnreg.dec.sync.aligned.u32 24; bra DONE; SECOND: setmaxnreg.inc.sync.aligned.u32 240; DONE:",
     "the warps of the block want 66560 registers, it has 65536", "warp 4", kFourGroups},

    // Phases of an mbarrier of four arrivals, one a warp.
    {"phase", "<phase> <arrive> <await> <read>", ""},
    {"product_in_a_phase", "<phase> <store> <proxy> <arrive> <await> <zero> <fence> <product> <end>", ""},
    {"product_before_reuse", "<phase> <begin> <product> <end> <arrive> <await> <store>", ""},
    {"product_not_waited_for_in_its_phase", "<phase> <begin> <product> <commit> <arrive> <await> <wait> <store>",
     "written, and read by a product that was not waited for: warp 0"},
    {"no_wait", "<phase> <arrive> <read>", "shared memory read before it was written"},
    {"reads_too_early", "<phase> <arrive> <await> <read> <store>",
     "race: read, and written by warp 3, lane 0, st.shared.v4.u32"},
    {"writes_too_late", "<phase> <store> bar.sync 0; <arrive> <store> <await> <read>",
     "race: read, and written by warp 0"},
    {"lanes_do_not_wait_for_another",
     "<phase> <store> @%p3 mbarrier.arrive.shared::cta.b64 %rd21, [smem]; <await> <read>",
     "race: read, and written by warp 0"},
    {"a_warp_never_arrives", "<phase> @%p1 bra WAIT; <arrive> <await>",
     "barrier never opens; warp 0 waits at k.cu:40; warp 1 waits at k.cu:40"},
    {"waits_for_the_phase_before",
     "<phase> mbarrier.try_wait.parity.shared::cta.b64 %p4, [smem], 1; <arrive> <await> <read>", ""},
    {"waits_for_the_phase_behind", "<phase> <arrive> <await> mbarrier.try_wait.parity.shared::cta.b64 %p4, [smem], 1;",
     "barrier never opens"},
    {"begun_without_a_barrier",
     "@%p0 mbarrier.init.shared::cta.b64 [smem], 4; bar.warp.sync -1; setp.eq.u32 %p3, %r2, 0; <arrive>",
     "the mbarrier is not begun yet: warp 0, lane 0 does so without a barrier between"},
    {"never_begun", "@%p0 st.shared.u64 [smem], 0; setp.eq.u32 %p3, %r2, 0; bar.sync 0; <arrive>",
     "no mbarrier at shared address 0"},
    {"no_arrivals", "mbarrier.init.shared::cta.b64 [smem], 0;", "an mbarrier of 0 arrivals"},
    {"too_many_arrivals", "<phase> mbarrier.arrive.shared::cta.b64 %rd21, [smem], 3;",
     "more arrivals than the mbarrier's 4", "warp 0, lane 1"},
    {"different_phases", "<phase> and.b32 %r7, %r1, 1; mbarrier.try_wait.parity.shared::cta.b64 %p4, [smem], %r7;",
     "lanes wait for different phases"},
    {"misaligned_mbarrier", "mbarrier.init.shared::cta.b64 [smem+4], 1;", "misaligned"},
};

TEST(PtxWarpgroupFaults, AreFoundAndTellTheirPlace) {
  for (Planted planted : kPlanted) {
    if (planted.shape.block.x == 64) planted.shape.block.x = 128;
    expect(planted, fault_of(kernel_text(kPlaces + spelt(planted.body), 2, "sm_90a"), planted.shape));
  }
}

}  // namespace
}  // namespace cuda_sim
