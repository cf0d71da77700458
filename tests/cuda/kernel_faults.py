"""The kernels that planted_faults.py compiles alone, and the faults that it plants in them.

A fault is named by its kernel and what is wrong. Whose text has changed gets the new one: what it breaks is the point, not the words.
"""

import dataclasses

P, B, G = "Problem", "BackwardProblem", "GemmProblem"


@dataclasses.dataclass(frozen=True)
class Cases:
    """Of a test program: names of cases, or gtest's filters, which have a dot."""

    program: str
    names: tuple
    environment: tuple = ()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled: instances of templates as kernels_*.txt name them, with their parameters; none: all of the file."""

    source: str
    instances: tuple
    cases: Cases
    arch: str = "80"


@dataclasses.dataclass(frozen=True)
class Fault:
    """said: with what the sentence begins that finds it; cases: if others than the kernel's."""

    file: str
    said: str
    text: str
    instead: str
    cases: Cases = None


def forward(*names):
    return Cases("cuda_attention_test", names)


def gradient(*names):
    return Cases("cuda_gradient_test", names)


def linear(program, *names, cases=""):
    return Cases(program, names, (("POLYHEAD_TEST_CASES", cases),) if cases else ())


HOPPER = (("POLYHEAD_SIMULATED_CAPABILITY", "9.0"),)


def forward_groups(*names):
    return Cases("cuda_attention_test", names, HOPPER)


def gradient_groups(*names):
    return Cases("cuda_gradient_test", names, HOPPER)


RANDOM_PRODUCTS = Cases("cuda_linear_test", ("LinearRandom.*",), (("POLYHEAD_RANDOM_PROBLEMS", "40"),))
LARGE_BIAS = Cases("cuda_groups_test", ("CudaGroups.TakeRowsOfLargeBias",))
MANY_KEYS = Cases("cuda_groups_test", ("CudaGroups.AgreeWithOtherGpusOnManyKeys",))

KERNELS = {
    "few": Kernel("attention_forward_sm80.cu", (("forward<BFloat16, 64, 0>", P),), forward("head_dim_20_bf16", "packed_decode_bf16")),
    "options": Kernel("attention_forward_sm80.cu", (("forward<BFloat16, 64, 1>", P),), forward("everything_bf16")),
    "sliced": Kernel("attention_forward_sm80.cu", (("forward<BFloat16, 512, 0>", P),), forward("head_dim_512_bf16")),
    "stored": Kernel("attention_forward_sm80.cu", (("forward_stored<128>", "StoredProblem"),), forward("stored_groups_int8")),
    "wide": Kernel("attention_forward_sm80.cu", (("forward_wide<BFloat16, 64>", P),), forward("gqa_bf16", "seqlens_bf16")),
    "wide_float32": Kernel("attention_forward_sm80.cu", (("forward_wide<Float32, 128>", P),), forward("head_dims_96_16_f32", "head_dims_64_80_f32")),
    "forward_groups": Kernel(
        "attention_forward_sm90.cu", (("forward_groups<BFloat16, 64, 0>", P),), forward_groups("window_bf16", "packed_causal_bf16"), "90a",
    ),
    "forward_groups_options": Kernel(
        "attention_forward_sm90.cu", (("forward_groups<BFloat16, 64, 1>", P),), forward_groups("mask_and_bias_odd_bf16", "dropout_bf16"), "90a",
    ),
    "backward": Kernel(
        "attention_backward_sm80.cu", (("backward<BFloat16, 64, 1, 0, 1>", B), ("backward<BFloat16, 64, 0, 0, 1>", B)), gradient("everything_bf16"),
    ),
    "backward_plain": Kernel(
        "attention_backward_sm80.cu", (("backward_plain<BFloat16, 64, 1>", B), ("backward_plain<BFloat16, 64, 0>", B)),
        gradient("causal_bf16_66x66", "seqlens_k_bf16"),
    ),
    "backward_float32": Kernel(
        "attention_backward_sm80.cu", (("backward_wide<128, 1>", B), ("backward_wide<128, 0>", B)), gradient("head_dims_96_16_f32"),
    ),
    "backward_groups": Kernel(
        "attention_backward_sm90.cu", (("backward_groups<BFloat16, 64, 1, 0>", B), ("backward_groups<BFloat16, 64, 0, 0>", B)),
        gradient_groups("gradient_group_3_bf16", "packed_causal_bf16"), "90a",
    ),
    "backward_groups_options": Kernel(
        "attention_backward_sm90.cu", (("backward_groups<BFloat16, 64, 1, 1>", B), ("backward_groups<BFloat16, 64, 0, 1>", B)),
        gradient_groups("mask_and_bias_odd_bf16", "dropout_bf16"), "90a",
    ),
    "pair_sums": Kernel("attention_pair_sums_sm80.cu", (("pair_sums<BFloat16, 64>", B, "PairSums"),), gradient("gradient_bias_few_1_bf16")),
    "gemm": Kernel("gemm_launch.cuh", (("gemm<BFloat16, 64, 64, 1, 0>", G),), linear("cuda_linear_test", "LinearCases.*", cases="blocks,rows")),
    "few_rows": Kernel("gemm_launch.cuh", (("few_rows<BFloat16, 0>", G),), linear("cuda_linear_test", "LinearCases.*", cases="rows,few_rows")),
    "norm": Kernel("norm_sm80.cu", (), linear("cuda_norm_test", "NormCases.*")),
    "rows": Kernel("rows_sm80.cu", (), linear("cuda_linear_test", "LinearCases.*", cases="epilogue")),
    "decoding": Kernel("decoding_sm80.cu", (), Cases("cuda_decoding_test", ("CudaDecoding.Stores*", "CudaDecoding.CopiesWhat*"))),
}

FAULTS = {
    # attention_forward.cuh
    "few.no_barrier_behind_keys": Fault("attention_forward.cuh", "race: ", "      __syncthreads();  // K_j is there, V is free\n", ""),
    "few.no_barrier_behind_values": Fault("attention_forward.cuh", "race: ", "      __syncthreads();  // V_j is there, K is free\n", ""),
    "few.values_not_waited_for": Fault(
        "attention_forward.cuh", "race: touched while a cp.async to it is in flight", "      wait_for_copies();\n      __syncthreads();  // V_j",
        "      __syncthreads();  // V_j",
    ),
    "few.mask_off_by_one": Fault(
        "attention_forward.cuh", "wrong: ", "if (!rows[e / 2].keys.holds(key)) S.x", "if (!rows[e / 2].keys.holds(key - 1)) S.x",
    ),
    "few.flag_without_barrier": Fault(
        "attention_forward.cuh", "race: ", "static_cast<int>(j / kTileRows) + 1);\n        __syncthreads();", "static_cast<int>(j / kTileRows) + 1);",
        forward("tiny_5x7x4x4x16_causal_bf16"),
    ),
    "few.unguarded_columns": Fault("attention_forward.cuh", "out of bounds: ", "if (column < p.head_dim_v) store_out", "store_out"),
    "few.unguarded_rows": Fault(
        "attention_forward.cuh", "out of bounds: ", "if (i >= band.rows_q || !is_of_tile(i)) continue;", "if (!is_of_tile(i)) continue;",
    ),
    "few.early_return": Fault(
        "attention_forward.cuh", "barrier never opens", "    for (int64_t j = begin, next; j < end; j = next) {",
        "    if (!busy()) return;\n    for (int64_t j = begin, next; j < end; j = next) {",
    ),
    "few.divergent_shuffle": Fault(
        "attention_forward.cuh", "divergence: ", "row.l = sum_of_row(rows[r].l);", "row.l = row_index(r) < band.rows_q ? sum_of_row(rows[r].l) : 0;",
    ),
    "few.part_of_another_block": Fault(
        "attention_forward.cuh", "race between blocks: ", "float* out = parts.sums(blockIdx.y);", "float* out = parts.sums(0);",
    ),
    "few.uninitialised_sums": Fault(
        "attention_forward.cuh", "register read before it was written", "float O[kColumns / 8][4] = {};", "float O[kColumns / 8][4];",
    ),
    "few.scores_not_cleared": Fault(
        "attention_forward.cuh", "register read before it was written", "for (int e = 0; e < 4; ++e) S.x[n][e] = 0;",
        "for (int e = 0; e < 3; ++e) S.x[n][e] = 0;",
    ),
    "few.shuffle_lane": Fault(
        "lane_rows.cuh", "wrong: ", "return x + __shfl_xor_sync(kAllLanes, x, 2);", "return x + __shfl_xor_sync(kAllLanes, x, 4);",
    ),
    "few.rescale_if_both": Fault(
        "softmax.cuh", "wrong: ", "if (__any_sync(kAllLanes, alpha[0] != 1 || alpha[1] != 1)) multiply",
        "if (__any_sync(kAllLanes, alpha[0] != 1 && alpha[1] != 1)) multiply",
    ),
    "few.merge_one_column_short": Fault("parts.cuh", "wrong: ", "if (column < p.head_dim_v) O[c] +=", "if (column < p.head_dim_v - 1) O[c] +="),
    "options.kept_without_syncwarp": Fault(
        "score.cuh", "race: ", "dropout, head, query, group + 1) << 8);\n    }\n    __syncwarp();", "dropout, head, query, group + 1) << 8);\n    }",
        forward("dropout_bf16"),
    ),
    "options.one_pair_of_two": Fault("score.cuh", "wrong: ", "in_block < 2 ? in_block : 2", "in_block < 1 ? in_block : 1"),
    "options.keys_of_another_lane": Fault("score.cuh", "wrong: ", "(of.data) + begin + other * of_others;", "(of.data) + begin;"),
    "options.rows_behind_the_queries": Fault(
        "score.cuh", "out of bounds: ", "(own[r] < last_query ? own[r] : last_query) * of_own", "own[r] * of_own", forward("mask_and_bias_bf16"),
    ),
    "sliced.no_barrier_before_reuse": Fault("attention_forward.cuh", "race: ", "        __syncthreads();  // a slice of K_j has been used\n", ""),
    "stored.no_scale_of_the_tail": Fault(
        "stored.cuh", "out of bounds: ", "const bool there = is_there(place) && column < columns;", "const bool there = column < columns;",
    ),
    # tile.cuh
    "wide.wrong_swizzle": Fault(
        "tile.cuh", "wrong: ", "(c ^ (kPieces == 4 ? row / 2 & 3 : row & 7)) * kPiece;\n  }\n",
        "(c ^ (kPieces == 4 ? row / 2 & 3 : row / 4 & 7)) * kPiece;\n  }\n",
    ),
    "wide.copy_past_the_tail": Fault(
        "tile.cuh", "out of bounds: ", "end < kRows ? static_cast<int>(end) : kRows;", "end < kRows ? static_cast<int>(end) + 1 : kRows;",
        forward("gqa_bf16"),
    ),
    "wide.missing_commit": Fault(
        "tile.cuh", "race: touched while a cp.async to it is in flight", "from, n < left);\n  commit_copies();", "from, n < left);",
    ),
    "wide.missing_wait": Fault("attention_forward_wide.cuh", "race: touched while a cp.async to it is in flight", "      wait_for_copies();\n", ""),
    "wide.wrong_stage": Fault(
        "attention_forward_wide.cuh", "race: ", "load_keys(shared.stages[stage ^ 1], j + kKeys)", "load_keys(shared.stages[stage], j + kKeys)",
    ),
    "wide.no_barrier_before_reuse": Fault(
        "attention_forward_wide.cuh", "race: ", "      __syncthreads();  // this stage is there, and nobody reads the other\n", "",
    ),
    "wide.warp_skips_barrier": Fault(
        "attention_forward_wide.cuh", "barrier never opens", "    if (cut) {\n      const int number",
        "    if (cut && busy) {\n      const int number",
    ),
    "wide.swapped_operands": Fault(
        "attention_forward_wide.cuh", "wrong: ", "multiply_add<T>(O[a][n], P[a], values[0], values[1]);",
        "multiply_add<T>(O[a][n], P[a], values[1], values[0]);",
    ),
    "wide.fragment_row": Fault("attention_forward_wide.cuh", "wrong: ", "V.address(lane % 16, lane / 16)", "V.address(lane % 8, lane / 16)"),
    "wide.mask_off_by_one": Fault(
        "attention_forward_wide.cuh", "wrong: ", "return first <= key && key < last;", "return first <= key && key <= last;",
    ),
    "wide.two_places_of_pages": Fault(
        "attention_forward_wide.cuh", "wrong: ", "KeyPlaces<kKeys, 3> places;", "KeyPlaces<kKeys, 2> places;", forward("pages_prefill_16"),
    ),
    # attention_forward_float32.cuh
    "wide_float32.wait_off_by_one": Fault(
        "attention_forward_float32.cuh", "race: touched while a cp.async to it is in flight", "wait_for_copies_before<Memory::kChunks - 2>();",
        "wait_for_copies_before<Memory::kChunks - 1>();",
    ),
    "wide_float32.missing_commit": Fault(
        "attention_forward_float32.cuh", "race: touched while a cp.async to it is in flight", "    } else {\n      commit_copies();\n    }", "    }",
    ),
    "wide_float32.largest_not_by_turns": Fault(
        "attention_forward_float32.cuh", "race: ", "four(shared.m[(j / kKeys + 1) % 2], r) = m;", "four(shared.m[j / kKeys % 2], r) = m;",
    ),
    "wide_float32.sums_without_barrier": Fault("attention_forward_float32.cuh", "race: ", "= l.x + l.y;\n    __syncthreads();", "= l.x + l.y;"),
    "wide_float32.weights_of_the_other_half": Fault(
        "attention_forward_float32.cuh", "shared memory read before it was written", "multiply_weights(V, kHalf * kOfChunk);",
        "multiply_weights(V, (1 - kHalf) * kOfChunk);",
    ),
    "forward_groups_options.kept_of_another_group": Fault(
        "attention_forward_groups.cuh", "race: ", "Kept& bits = shared.kept[group];", "Kept& bits = shared.kept[0];", forward_groups("dropout_bf16"),
    ),
    "forward_groups_options.hidden_are_seen": Fault(
        "attention_forward_groups.cuh", "wrong: ", "if (!cut) return;", "return;",
    ),
    "forward_groups_options.rounded_power_of_far_rows": Fault("softmax.cuh", "wrong: ", "kFar = 1024;", "kFar = 1e38f;", LARGE_BIAS),
    "backward_groups_options.rounded_power_of_far_rows": Fault(
        "attention_backward_groups.cuh", "wrong: ", "exp2_approx((S[b][e] - of_query) * kLog2E)",
        "exp2_approx(fmaf(S[b][e], kLog2E, -(kLog2E * of_query)))", LARGE_BIAS,
    ),
    "backward_groups_options.kept_of_another_group": Fault(
        "attention_backward_groups.cuh", "race: ", "Kept& bits = shared.kept[group];", "Kept& bits = shared.kept[0];", gradient_groups("dropout_bf16"),
    ),
    "backward_groups_options.dropped_in_dS_alone": Fault(
        "attention_backward_groups.cuh", "wrong: ", "S[b][e] = visible ? weight * factor : 0;", "S[b][e] = visible ? weight : 0;", gradient_groups("dropout_bf16"),
    ),
    # attention_forward_groups.cuh, warpgroup.cuh
    "forward_groups.missing_commit": Fault(
        "attention_forward_groups.cuh", "sum read before its product was waited for",
        "further(keys, kBytesToColumns<kKeys>(k)), k > 0);\n    }\n    commit_products();",
        "further(keys, kBytesToColumns<kKeys>(k)), k > 0);\n    }",
    ),
    "forward_groups.no_fence": Fault(
        "attention_forward_groups.cuh", "no wgmma.fence before the first product", "factor_of(shared.stages[t % kStages].K);\n    begin_products();",
        "factor_of(shared.stages[t % kStages].K);",
    ),
    "forward_groups.wait_off_by_one": Fault(
        "attention_forward_groups.cuh", "sum read before its product was waited for", "wait_for_products_before<1>();",
        "wait_for_products_before<2>();",
    ),
    "forward_groups.no_wait_for_sums": Fault(
        "attention_forward_groups.cuh", "sum read before its product was waited for", "    wait_for_products_before<0>();\n    rescale();",
        "    rescale();",
    ),
    "forward_groups.no_proxy_fence": Fault(
        "attention_forward_groups.cuh", "read by a product, and no fence.proxy.async by the thread that wrote it",
        "    show_to_products();\n    shared.full", "    shared.full",
    ),
    "forward_groups.phase_before": Fault(
        "attention_forward_groups.cuh", "shared memory read before it was written", "shared.full[t % kStages].wait(t / kStages);",
        "shared.full[t % kStages].wait(t / kStages - 1);",
    ),
    "forward_groups.phase_behind": Fault(
        "attention_forward_groups.cuh", "shared memory read before it was written", "shared.full[t % kStages].wait(t / kStages);",
        "shared.full[t % kStages].wait(t / kStages + 1);",
    ),
    "forward_groups.free_not_waited_for": Fault(
        "attention_forward_groups.cuh", "race: ", "if (t >= kStages) shared.free", "if (t > kStages) shared.free", MANY_KEYS,
    ),
    "forward_groups.one_warp_more_arrives": Fault(
        "attention_forward_groups.cuh", "barrier never opens", "shared.full[thread].init(kGroupThreads / 32);",
        "shared.full[thread].init(kGroupThreads / 32 + 1);",
    ),
    "forward_groups.one_warp_less_arrives": Fault(
        "attention_forward_groups.cuh", "race: ", "shared.full[thread].init(kGroupThreads / 32);",
        "shared.full[thread].init(kGroupThreads / 32 - 1);",
    ),
    "forward_groups.too_many_registers": Fault(
        "attention_forward_groups.cuh", "the warps of the block want 68608 registers, it has 65536",
        "kRegistersOfProducts = kGroups > 2 ? 160 : 240;", "kRegistersOfProducts = kGroups > 2 ? 168 : 240;",
    ),
    "forward_groups.no_registers_given_back": Fault(
        "attention_forward_groups.cuh", "the warps of the block want 77824 registers, it has 65536",
        "    take_registers_from_group<kRegistersOfCopies>();\n", "",
    ),
    "forward_groups.missing_syncwarp": Fault("attention_forward_groups.cuh", "race: ", "    __syncwarp();\n", ""),
    "forward_groups.rows_over_queries_in_use": Fault(
        "attention_forward_groups.cuh", "race: ",
        "    if (in_pieces) wait_for_group(kFirstGroupBarrier + group, kGroupThreads);  // nobody reads Q\n", "",
    ),
    "forward_groups.columns_of_a_factor": Fault("warpgroup.cuh", "wrong: ", "k % 4 * 32;", "k % 4 * 16;"),
    "forward_groups.mask_off_by_one": Fault("attention_forward_groups.cuh", "wrong: ", "8 * n + e >= last) S", "8 * n + e > last) S"),
    "forward_groups.arrives_with_half_a_warp": Fault(
        "warpgroup.cuh", "race: ", "    __syncwarp();\n    if (lane != 0) return;\n", "    if (lane != 0) return;\n",
    ),
    # attention_backward.cuh, pairs.cuh
    "backward.no_barrier_between_tiles": Fault(
        "attention_backward.cuh", "race: ", "      __syncthreads();  // tile t is there, the other stage is free\n", "",
    ),
    "backward.statistics_of_the_other_stage": Fault(
        "attention_backward.cuh", "shared memory read before it was written", "shared.delta[to][x] = there", "shared.delta[0][x] = there",
    ),
    "backward.flag_without_barrier": Fault(
        "attention_backward.cuh", "race: ", "if (found) atomicMax(&shared.not_finite, tile);\n    __syncthreads();",
        "if (found) atomicMax(&shared.not_finite, tile);",
    ),
    "backward.cleared_while_in_use": Fault("attention_backward.cuh", "race: ", "    __syncthreads();  // their products have been made\n", ""),
    "backward.unguarded_rows": Fault(
        "gradient_rows.cuh", "out of bounds: ", "if (row >= end || column >= columns", "if (column >= columns", gradient("everything_tiny_bf16"),
    ),
    "backward.window_ends_early": Fault(
        "pairs.cuh", "wrong: ", "return j < element(p.window_hi, i) &&", "return j + 1 < element(p.window_hi, i) &&", gradient("windows_sinks_bf16"),
    ),
    # attention_backward_plain.cuh
    "backward_plain.no_barrier_of_the_pair": Fault(
        "attention_backward_plain.cuh", "shared memory read before it was written", "    wait_for_other_warp();\n    hear(told, 0, whole);",
        "    hear(told, 0, whole);",
    ),
    "backward_plain.told_not_by_turns": Fault(
        "attention_backward_plain.cuh", "race: ", "reinterpret_cast<float4(&)[4][32]>(shared.told[from / kStep % 2][pair]);",
        "reinterpret_cast<float4(&)[4][32]>(shared.told[0][pair]);",
    ),
    "backward_plain.pairs_share_a_barrier": Fault(
        "attention_backward_plain.cuh", "barrier 1 of 64 threads: nothing tells", '::"r"(1 + pair)', '::"r"(1)',
    ),
    "backward_plain.wrong_stage": Fault("attention_backward_plain.cuh", "race: ", "load_others(next, stage ^ 1)", "load_others(next, stage)"),
    "backward_plain.cleared_while_in_use": Fault(
        "attention_backward_plain.cuh", "race: ", "    __syncthreads();  // their products have been made\n", "", gradient("window_causal_bf16"),
    ),
    "backward_plain.unguarded_statistics": Fault(
        "attention_backward_plain.cuh", "out of bounds: ", "return x < end ? of.data[", "return x < end + 1 ? of.data[",
    ),
    "backward_plain.fragment_row": Fault(
        "attention_backward_plain.cuh", "wrong: ", "pair * 32 + lane % 16, lane / 16);", "pair * 32 + lane % 8, lane / 16);",
    ),
    "backward_plain.own_rows_not_kept": Fault(
        "attention_backward_plain.cuh", "race: touched while a cp.async to it is in flight",
        "      wait_for_copies();\n      __syncthreads();\n      keep_own();", "      keep_own();",
    ),
    # attention_backward_float32.cuh
    "backward_float32.no_barrier_before_reuse": Fault(
        "attention_backward_float32.cuh", "race: ", "    __syncthreads();  // those of the last tile have been used\n", "",
    ),
    "backward_float32.gradients_without_barrier": Fault(
        "attention_backward_float32.cuh", "race: ", "    if constexpr (!kKeys) __syncthreads();\n", "",
    ),
    "backward_float32.chunk_not_waited_for": Fault(
        "attention_backward_float32.cuh", "race: touched while a cp.async to it is in flight", "    wait_for_copies();\n    wait_for_pair();\n",
        "    wait_for_pair();\n",
    ),
    "backward_float32.copy_past_the_tail": Fault(
        "attention_backward_float32.cuh", "global memory read before it was written", "left = shared.others.rows - row;",
        "left = shared.others.rows - row + 1;",
    ),
    "backward_float32.halves_without_barrier": Fault(
        "attention_backward_float32.cuh", "race: ", "if (!kHalves || side() == 0) put_sums<false>();\n    __syncthreads();",
        "if (!kHalves || side() == 0) put_sums<false>();",
    ),
    # attention_backward_groups.cuh
    "backward_groups.wait_off_by_one": Fault(
        "attention_backward_groups.cuh", "sum read before its product was waited for", "wait_for_products_before<1>();  // of S",
        "wait_for_products_before<2>();  // of S",
    ),
    "backward_groups.copies_off_by_one": Fault(
        "attention_backward_stages.cuh", "race: ", "wait_for_copies_before<2 * kInFlight>();", "wait_for_copies_before<2 * kInFlight + 1>();",
    ),
    "backward_groups.groups_share_a_barrier": Fault(
        "attention_backward_groups.cuh", "barrier 3 of 128 threads: nothing tells",
        "shared.seen[row] = seen_by(shared.rows.first + row);\n    wait_for_group(kFirstGroupBarrier + group, kGroupThreads);",
        "shared.seen[row] = seen_by(shared.rows.first + row);\n    wait_for_group(kFirstGroupBarrier, kGroupThreads);",
    ),
    "backward_groups.copy_past_the_tail": Fault(
        "attention_backward_stages.cuh", "out of bounds: ", "of.data + (x < end ? at : 0), x < end);", "of.data + at, true);",
    ),
    "backward_groups.cleared_unseen_by_products": Fault(
        "attention_backward_groups.cuh", "read by a product, and no fence.proxy.async by the thread that wrote it",
        "    show_to_products();\n    wait_for_group(kComputingBarrier", "    wait_for_group(kComputingBarrier",
    ),
    "backward_groups.missing_commit": Fault(
        "attention_backward_groups.cuh", "sum read before its product was waited for", "multiply(sums[0], factors.dS, n, 0);\n    commit_products();",
        "multiply(sums[0], factors.dS, n, 0);",
    ),
    "backward_groups.freed_before_use": Fault(
        "attention_backward_groups.cuh", "barrier never opens", "      const bool now = sees(n);\n",
        "      const bool now = sees(n);\n      shared.free[n % kStages].arrive(lane);\n",
    ),
    # attention_pair_sums.cuh
    "pair_sums.columns_without_barrier": Fault(
        "attention_pair_sums.cuh", "race: ", "    __syncthreads();\n    const int x = static_cast<int>(threadIdx.x);",
        "    const int x = static_cast<int>(threadIdx.x);",
    ),
    "pair_sums.part_of_another_block": Fault(
        "attention_pair_sums.cuh", "race between blocks: ", "sums.partial[((part * sums.tiles + tile)", "sums.partial[((0 * sums.tiles + tile)",
    ),
    # gemm.cuh, few_rows.cuh, panel.cuh
    "gemm.wait_off_by_one": Fault(
        "gemm.cuh", "race: touched while a cp.async to it is in flight", "wait_for_copies_before<kStages - 2>();",
        "wait_for_copies_before<kStages - 1>();",
    ),
    "gemm.no_barrier_before_reuse": Fault("gemm.cuh", "race: ", "      __syncthreads();  // the stage is there, and the one before it is free\n", ""),
    "gemm.wrong_stage": Fault(
        "gemm.cuh", "shared memory read before it was written", "load((stage + kStages - 1) % kStages,", "load((stage + 1) % kStages,",
    ),
    "gemm.unguarded_rows": Fault("gemm.cuh", "out of bounds: ", "if (i >= p.m || j >= p.n) continue;", "if (j >= p.n) continue;"),
    "gemm.uninitialised_sums": Fault(
        "gemm.cuh", "register read before it was written", "float C[kRowBlocks][kColumnBlocks][4] = {};", "float C[kRowBlocks][kColumnBlocks][4];",
    ),
    "gemm.swapped_fragments": Fault(
        "gemm.cuh", "wrong: ", "multiply_add<T>(C[i][n + 1], a[i], b[2], b[3]);", "multiply_add<T>(C[i][n + 1], a[i], b[3], b[2]);",
    ),
    "gemm.sums_over_stages_in_use": Fault("gemm.cuh", "race: ", "      __syncthreads();  // nobody reads what lies there any more\n", ""),
    "gemm.tail_of_terms": Fault("panel.cuh", "out of bounds: ", "left < kPiece ? left : kPiece", "left < kPiece ? kPiece : kPiece", RANDOM_PRODUCTS),
    "few_rows.stage_in_use": Fault("few_rows.cuh", "race: ", "load(stage > 0 ? stage - 1 : kFewStages - 1,", "load(stage,"),
    # norm.cuh, rows.cuh, decoding.cuh, cached_tokens.cuh
    "norm.half_a_warp": Fault("norm.cuh", "wrong: ", "for (int half = 16; half > 0; half /= 2) x +=", "for (int half = 8; half > 0; half /= 2) x +="),
    "norm.sums_over_blocks": Fault("norm.cuh", "race between blocks: ", "p.partial + rows.block_of_rows * 2 * p.stride;", "p.partial;"),
    "norm.no_barrier_before_reuse": Fault("rows.cuh", "race: ", "    to[column] = sum;\n  }\n  __syncthreads();", "    to[column] = sum;\n  }"),
    "rows.sums_without_barrier": Fault("rows.cuh", "race: ", "  __syncthreads();\n  const int column", "  const int column"),
    "decoding.missing_syncwarp": Fault(
        "decoding.cuh", "race: ", "        x[d + half] = a - b;\n      }\n      __syncwarp();", "        x[d + half] = a - b;\n      }",
    ),
    "decoding.slot_not_checked": Fault(
        "decoding.cuh", "out of bounds: ", "if (slot < 0 || slot >= p.num_slots) return;", "if (slot < 0) return;",
        Cases("cuda_decoding_test", ("CudaDecoding.TrustsNo*",)),
    ),
    "decoding.copied_without_barrier": Fault("cached_tokens.cuh", "wrong: ", "  __syncthreads();\n", ""),
}
