// The one list of cases: every kernel is tested on all of them, in forward and in backward.
//
// Sizes sit on the edges of what kernels do: vectors of 4, 8 and 16 lanes, tiles of 64 queries and 64 keys, keys in
// chunks of 512 and 1024, at most 8 queries (decoding), S and D up to 16 (tiny heads).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "case_list.h"
#include "core/memory_size.h"

namespace polyhead::testing {

class Cases : private CaseList {
 public:
  static std::vector<Problem> make() {
    Cases list;
    list.sequence_lengths();
    list.head_dims();
    list.single_options();
    list.operands();
    list.combinations();
    list.numbers();
    list.tiny_heads();
    list.decoding();
    list.empty();
    list.sinks();
    list.scores_as_weights();
    list.short_heads();
    list.pages();
    list.formats();
    return std::move(list.cases_);
  }

 private:
  void sequence_lengths() {
    constexpr int64_t kPairs[][2] = {
        {1, 1},     {1, 2},     {2, 3},     {3, 7},     {7, 8},     {8, 7},     {8, 8},     {8, 9},    {9, 8},
        {9, 1},     {15, 16},   {16, 15},   {16, 16},   {16, 17},   {17, 16},   {17, 33},   {31, 33},  {32, 32},
        {33, 31},   {33, 63},   {63, 65},   {64, 64},   {65, 63},   {65, 65},   {66, 66},   {64, 1},   {65, 2},
        {66, 130},  {127, 128}, {128, 127}, {128, 128}, {129, 129}, {130, 64},  {64, 512},  {65, 511}, {192, 191},
        {191, 193}, {193, 66},  {513, 65},  {130, 513}, {512, 64},  {1, 511},   {1, 512},   {8, 513},  {9, 513},
        {2, 1023},  {7, 1024},  {8, 1025},  {3, 1026},  {9, 1026},  {66, 1025}, {1025, 33}, {1, 2049}};
    constexpr int64_t kDims[] = {16, 64, 20, 40};
    size_t n = 0;
    for (const auto& [q, k] : kPairs) {
      const AttentionDesc desc = sizes(1, 2, 1, q, k, kDims[n++ % 4]);
      const std::string name = num(q) + "x" + num(k);
      const Problem& full = add("full_" + name, desc);
      const bool repeat_in_half = full.seed % 2 == 0;
      add("causal_top_left_" + name, desc, [](auto& d) { d.causal = true, d.align = Align::kTopLeft; });
      add("causal_bottom_right_" + name, desc, [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
      add("causal_bf16_" + name, desc, [&](auto& d) {
        d.dtype = repeat_in_half ? DType::kBFloat16 : DType::kFloat16;
        d.causal = true;
        d.align = Align::kBottomRight;
      });
    }
  }

  void head_dims() {
    for (int64_t d : {1, 2, 3, 7, 8, 16, 20, 24, 40, 63, 64, 65, 72, 80, 96, 104, 128, 129, 192, 256, 500, 512}) {
      add_in_each_dtype("head_dim_" + num(d), sizes(1, 2, 2, 34, 66, d), [](auto&) {});
      add("head_dim_" + num(d) + "_decode", sizes(1, 4, 2, 1, 70, d), [](auto&) {});
    }
    constexpr int64_t kPairs[][2] = {{64, 80}, {80, 64}, {1, 512}, {512, 1}, {7, 65}, {192, 128}, {96, 16}, {3, 17}};
    for (const auto& [d, dv] : kPairs) {
      add_in_each_dtype("head_dims_" + num(d) + "_" + num(dv), sizes(2, 2, 1, 66, 34, d, dv), [](auto&) {});
    }
  }

  void single_options() {
    const AttentionDesc base = sizes(2, 4, 2, 70, 130, 24, 32);
    auto each = [&](const std::string& name, auto change) { add_in_each_dtype(name, base, change); };
    each("gqa", [](auto&) {});
    each("mqa", [](auto& d) { d.num_heads_kv = 1; });
    each("mha", [](auto& d) { d.num_heads_kv = 4; });
    each("causal", [](auto& d) { d.causal = true, d.align = Align::kTopLeft; });
    each("causal_bottom_right", [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
    each("query_offset", [](auto& d) { d.causal = true, d.query_offset = 30; });
    each("query_offset_blind_rows", [](auto& d) { d.causal = true, d.query_offset = -40; });
    each("query_offsets", [](auto& d) { d.causal = true, d.has_query_offsets = true; });
    each("window", [](auto& d) { d.window_left = 20, d.window_right = 3, d.align = Align::kBottomRight; });
    each("window_left", [](auto& d) { d.window_left = 0, d.align = Align::kTopLeft; });
    each("window_right", [](auto& d) { d.window_right = 5, d.align = Align::kTopLeft; });
    each("window_self", [](auto& d) { d.window_left = 0, d.window_right = 0, d.align = Align::kBottomRight; });
    each("window_causal",
         [](auto& d) { d.window_left = 9, d.window_right = 50, d.causal = true, d.align = Align::kBottomRight; });
    each("window_sinks",
         [](auto& d) { d.window_left = 20, d.sink_keys = 5, d.causal = true, d.align = Align::kBottomRight; });
    each("window_many_sinks",
         [](auto& d) {  // sinks end behind the window of some queries, and in another block than it begins
           d.window_left = 9, d.window_right = 5, d.sink_keys = 150, d.seqlen_k = 400, d.query_offset = 100;
         });
    each("windows_sinks", [](auto& d) { d.has_windows = true, d.sink_keys = 3; });
    each("alibi", [](auto& d) { d.alibi_slopes_ndim = 1, d.align = Align::kBottomRight; });
    each("alibi_per_sequence", [](auto& d) { d.alibi_slopes_ndim = 2, d.causal = true, d.align = Align::kTopLeft; });
    each("softcap", [](auto& d) { d.softcap = 2; });
    each("softcap_50", [](auto& d) { d.softcap = 50; });
    each("scale", [](auto& d) { d.scale = 0.5; });
    each("scale_negative", [](auto& d) { d.scale = -0.25; });
    each("scale_zero", [](auto& d) { d.scale = 0; });
    each("seqlens_k", [](auto& d) { d.has_seqlens_k = true; });
    each("seqlens_q", [](auto& d) { d.has_seqlens_q = true; });
    each("seqlens", [](auto& d) {
      d.batch = 5, d.has_seqlens_q = true, d.has_seqlens_k = true, d.causal = true, d.align = Align::kBottomRight;
    });
    each("packed", [](auto& d) { d.batch = 6, d.packed = true, d.seqlen_q = 300, d.seqlen_k = 280; });
    each("packed_causal", [](auto& d) {
      d.batch = 6, d.packed = true, d.seqlen_q = 300, d.seqlen_k = 280, d.causal = true, d.align = Align::kBottomRight;
    });
    each("dropout", [](auto& d) { d.dropout_p = 0.1; });
    each("dropout_half", [](auto& d) { d.dropout_p = 0.5, d.causal = true, d.align = Align::kTopLeft; });
    each("dropout_all", [](auto& d) { d.dropout_p = 1; });
    each("dropout_long", [](auto& d) { d.seqlen_k = 1300, d.dropout_p = 0.3; });
    each("weights", [](auto& d) { d.return_weights = ReturnWeights::kPerHead; });
    each("weights_mean", [](auto& d) { d.return_weights = ReturnWeights::kMean; });
    each("weights_dropped", [](auto& d) { d.return_weights = ReturnWeights::kPerHead, d.dropout_p = 0.3; });
    each("column_sums", [](auto& d) { d.return_column_sums = true; });
    each("column_sums_causal", [](auto& d) {
      d.return_column_sums = true, d.dropout_p = 0.3, d.causal = true, d.align = Align::kBottomRight;
    });
    for (int64_t offset : {INT64_MIN, INT64_MAX}) {
      const std::string name = offset < 0 ? "offset_min" : "offset_max";
      add("causal_" + name, base, [&](auto& d) { d.causal = true, d.query_offset = offset; });
      add("window_" + name, base,
          [&](auto& d) { d.window_left = d.window_right = INT64_MAX, d.query_offset = offset; });
    }
    for (int layout = 0; layout < kNumLayouts; ++layout) {
      const Layout l = static_cast<Layout>(layout);
      add(std::string("layout_") + layout_name(l), base).layout = l;
    }
  }

  void operands() {
    const AttentionDesc base = sizes(2, 4, 2, 70, 130, 16);
    for (int dims = 0; dims < 16; ++dims) {
      add("mask_" + num(dims), base, [&](auto& d) { operand(d.attn_mask, d, dims, DType::kBool); });
      for (const TypeName& type : kHalfAndSingle) {
        add("bias_" + num(dims) + "_" + type.name, base, [&](auto& d) {
          operand(d.attn_bias, d, dims, type.dtype);
          d.dtype = kHalfAndSingle[dims % 3].dtype;
        });
      }
    }
    add_in_each_dtype("mask_blocks", sizes(2, 2, 1, 260, 330, 16),
                      [](auto& d) { operand(d.attn_mask, d, kBatch | kQuery | kKey, DType::kBool); });
    add_in_each_dtype("mask_at_end", sizes(2, 4, 2, 70, 130, 24, 32), [](auto& d) { end_mask(d, 1, 4, 65); });
    add_in_each_dtype("mask_padding", sizes(4, 2, 2, 65, 200, 64),
                      [](auto& d) { operand(d.attn_mask, d, kBatch | kKey, DType::kBool); });
    add_in_each_dtype("bias_blocks", sizes(1, 2, 1, 260, 330, 16),
                      [](auto& d) { operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kFloat32); });
    // Rows begin at odd elements, so that no two lie in an aligned word of all of them.
    add_in_each_dtype("mask_and_bias_odd", sizes(1, 4, 2, 99, 131, 20), [](auto& d) {
      operand(d.attn_mask, d, kHead | kQuery | kKey, DType::kBool);
      operand(d.attn_bias, d, kQuery | kKey, DType::kBFloat16);
    });
    add_in_each_dtype("mask_and_bias", base, [](auto& d) {
      operand(d.attn_mask, d, kBatch | kKey, DType::kBool);
      operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kFloat32);
    });
  }

  void combinations() {
    auto all_masks = [](auto& d) {
      d.causal = true, d.window_left = 60, d.align = Align::kBottomRight;
      d.has_seqlens_q = d.has_seqlens_k = true;
      operand(d.attn_mask, d, kBatch | kQuery | kKey, DType::kBool);
      operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kBFloat16);
      d.alibi_slopes_ndim = 1, d.softcap = 5, d.dropout_p = 0.2, d.scale = 0.3, d.has_sink_logits = true;
    };
    add_in_each_dtype("everything", sizes(3, 4, 2, 130, 200, 40, 24), all_masks);
    add_in_each_dtype("everything_returned", sizes(2, 4, 2, 66, 130, 24), [&](auto& d) {
      all_masks(d);
      d.return_weights = ReturnWeights::kPerHead, d.return_column_sums = true;
    });
    add_in_each_dtype("everything_wide", sizes(1, 2, 1, 66, 70, 100, 72), all_masks);
    add_in_each_dtype("everything_widest", sizes(1, 2, 1, 66, 70, 200, 140), all_masks);
    add_in_each_dtype("everything_decode", sizes(3, 8, 2, 3, 600, 64), all_masks);
    add_in_each_dtype("everything_tiny", sizes(3, 6, 3, 9, 13, 8), all_masks);
    add_in_each_dtype("everything_packed", sizes(7, 4, 2, 400, 500, 40, 24), [](auto& d) {
      d.packed = true, d.causal = true, d.window_left = 30, d.align = Align::kBottomRight;
      d.alibi_slopes_ndim = 2, d.softcap = 5, d.dropout_p = 0.2;
    });
    add_in_each_dtype("decode_many", sizes(5, 4, 2, 1, 1300, 32), [](auto& d) { d.dropout_p = 0.3; });
    add_in_each_dtype("packed_decode", sizes(9, 4, 1, 20, 900, 64), [](auto& d) { d.packed = true; });
    add_in_each_dtype("packed_decode_beside_tiles", sizes(8, 8, 2, 90, 4000, 64), [](auto& d) {
      d.packed = d.causal = true, d.window_left = 700, d.align = Align::kBottomRight;
      d.alibi_slopes_ndim = 2, d.softcap = 5, d.dropout_p = 0.2, d.has_sink_logits = true;
    });
    add("packed_decode_pages", sizes(7, 8, 2, 20, 1104, 48),
        [](auto& d) { paged(d, 48), d.packed = d.causal = true, d.align = Align::kBottomRight; });
    add("packed_decode_stored", sizes(6, 8, 2, 14, 3000, 64), [](auto& d) {
      d.key_dtype = DType::kInt8, d.value_dtype = DType::kFloat8E4M3, d.dtype = DType::kBFloat16, d.packed = true;
    });
    add_in_each_dtype("softcap_alibi_bias", sizes(2, 2, 2, 129, 65, 64), [](auto& d) {
      operand(d.attn_bias, d, kKey, DType::kFloat16);
      d.alibi_slopes_ndim = 2, d.softcap = 30, d.has_query_offsets = true;
    });
    add("float64", sizes(2, 4, 2, 33, 65, 40, 24), [&](auto& d) {
      all_masks(d);
      d.dtype = DType::kFloat64, d.attn_bias.dtype = DType::kFloat64;
      d.return_weights = ReturnWeights::kMean, d.return_column_sums = true;
    });
    add("float64_packed", sizes(4, 2, 1, 60, 70, 16), [](auto& d) { d.dtype = DType::kFloat64, d.packed = true; });
  }

  void numbers() {
    constexpr const char* kNames[] = {"normal", "shift_up", "shift_down", "large", "underflow", "outliers"};
    const AttentionDesc base = sizes(1, 4, 4, 128, 192, 64);
    for (const TypeName& type : kHalfAndSingle) {
      for (int fill = 0; fill < 6; ++fill) {
        const std::string name = std::string("numbers_") + kNames[fill] + "_" + type.name;
        add(name, base, [&](auto& d) { d.dtype = type.dtype; }).fill = static_cast<Fill>(fill);
        add(name + "_decode", sizes(2, 8, 2, 4, 1100, 64), [&](auto& d) {
          d.dtype = type.dtype;
          d.causal = true, d.align = Align::kBottomRight;
        }).fill = static_cast<Fill>(fill);
      }
    }
    add_in_each_dtype("numbers_huge", base, [](auto& d) { d.scale = 20; });  // logits of 250000
    for (size_t n = cases_.size() - 3; n < cases_.size(); ++n) cases_[n].fill = Fill::kLarge;
    add_in_each_dtype("long", sizes(1, 2, 1, 384, 640, 64),
                      [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
  }

  void tiny_heads() {
    constexpr int64_t kSizes[][5] = {// batch, heads, q, k, d
                                     {8, 32, 8, 8, 4},   {5, 7, 4, 4, 16},  {1, 17, 16, 16, 16},
                                     {3, 11, 15, 16, 7}, {2, 16, 1, 1, 1},  {1, 15, 2, 3, 5},
                                     {4, 4, 12, 1, 8},   {1, 33, 16, 9, 3}, {1, 1, 5, 5, 5}};
    for (const auto& [b, h, q, k, dim] : kSizes) {
      const std::string name = "tiny_" + num(b) + "x" + num(h) + "x" + num(q) + "x" + num(k) + "x" + num(dim);
      add_in_each_dtype(name, sizes(b, h, h, q, k, dim), [](auto&) {});
      add_in_each_dtype(name + "_causal", sizes(b, h, h, q, k, dim),
                        [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
      add_in_each_dtype(name + "_weights", sizes(b, h, h, q, k, dim), [](auto& d) {
        d.causal = true, d.align = Align::kBottomRight, d.return_weights = ReturnWeights::kPerHead;
      });
      add_in_each_dtype(name + "_mean", sizes(b, h, h, q, k, dim), [](auto& d) {
        d.causal = true, d.align = Align::kBottomRight, d.return_weights = ReturnWeights::kMean;
      });
    }
  }

  void decoding() {
    constexpr int64_t kSizes[][5] = {// heads, heads_kv, q, k, d
                                     {8, 2, 1, 1025, 64},   {32, 4, 1, 700, 128}, {7, 7, 2, 513, 80},
                                     {40, 40, 1, 1030, 16}, {12, 1, 5, 600, 40},  {6, 3, 8, 1023, 65}};
    for (const auto& [h, g, q, k, dim] : kSizes) {
      const std::string name = "decode_" + num(h) + "x" + num(g) + "x" + num(q) + "x" + num(k) + "x" + num(dim);
      add_in_each_dtype(name, sizes(1, h, g, q, k, dim),
                        [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
      add_in_each_dtype(name + "_seqlens", sizes(3, h, g, q, k, dim), [](auto& d) { d.has_seqlens_k = true; });
    }
    add_in_each_dtype("decode_window", sizes(2, 8, 2, 1, 1100, 64),
                      [](auto& d) { d.window_left = 100, d.align = Align::kBottomRight; });
    add_in_each_dtype("decode_window_sinks", sizes(2, 8, 2, 3, 2100, 64), [](auto& d) {
      d.window_left = 100, d.sink_keys = 4, d.causal = d.has_seqlens_k = true, d.align = Align::kBottomRight;
    });
    add_in_each_dtype("decode_window_many_sinks", sizes(2, 6, 3, 2, 1600, 40), [](auto& d) {
      d.window_left = 30, d.sink_keys = 700, d.align = Align::kBottomRight, d.alibi_slopes_ndim = 1;
    });
    add_in_each_dtype("decode_tree", sizes(3, 8, 2, 7, 1100, 40), [](auto& d) { end_mask(d, 3, 1, 7); });
    add_in_each_dtype("decode_weights", sizes(2, 4, 2, 3, 530, 32),
                      [](auto& d) { d.return_weights = ReturnWeights::kMean, d.return_column_sums = true; });
  }

  // Of few queries, fewer keys: on either side of where the path of decoding ends.
  void short_heads() {
    constexpr int64_t kSizes[][5] = {// heads, heads_kv, q, k, d
                                     {4, 2, 13, 16, 64},  {3, 3, 16, 16, 80}, {8, 2, 16, 9, 64},  {2, 2, 16, 17, 64},
                                     {4, 4, 15, 1, 128},  {6, 1, 16, 16, 65}, {2, 2, 17, 16, 64}, {2, 1, 14, 0, 64},
                                     {12, 12, 9, 13, 40}, {5, 5, 4, 4, 64},   {2, 2, 16, 16, 48}, {4, 2, 20, 32, 64},
                                     {2, 2, 21, 32, 64},  {2, 1, 19, 33, 64}, {2, 2, 18, 27, 72}};
    for (const auto& [h, g, q, k, dim] : kSizes) {
      const std::string name = "short_" + num(h) + "x" + num(g) + "x" + num(q) + "x" + num(k) + "x" + num(dim);
      add_in_each_dtype(name, sizes(2, h, g, q, k, dim), [](auto&) {});
      add_in_each_dtype(name + "_causal_seqlens", sizes(3, h, g, q, k, dim), [](auto& d) {
        d.causal = d.has_seqlens_q = d.has_seqlens_k = true, d.align = Align::kBottomRight;
      });
    }
    add_in_each_dtype("short_everything", sizes(2, 4, 2, 14, 16, 64, 72), [](auto& d) {
      d.causal = true, d.window_left = 9, d.sink_keys = 1, d.align = Align::kBottomRight;
      operand(d.attn_mask, d, kBatch | kQuery | kKey, DType::kBool);
      operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kFloat32);
      d.alibi_slopes_ndim = 1, d.softcap = 5, d.scale = 0.3, d.has_sink_logits = true, d.dropout_p = 0.2;
      d.return_weights = ReturnWeights::kMean, d.return_column_sums = true;
    });
    add_in_each_dtype("short_packed", sizes(9, 4, 2, 110, 100, 64),
                      [](auto& d) { d.packed = d.causal = true, d.align = Align::kBottomRight; });
    add_in_each_dtype("short_pages", sizes(5, 4, 2, 15, 16, 64), [&](auto& d) { paged(d, 4); });
    for (const int64_t keys : {32, 64}) {  // of a table, whatever a sequence has
      add_in_each_dtype("short_packed_pages_" + num(keys), sizes(12, 4, 2, 160, keys, 64),
                        [&](auto& d) { paged(d, 16), d.packed = d.causal = true, d.align = Align::kBottomRight; });
    }
  }

  // Blocks of 16 keys (decoding) and of 64 that lie in one page, in some, in many; lengths of 0 and at the edges of pages.
  void pages() {
    for (const int64_t page_size : {1, 3, 16, 48, 512, 1000}) {
      const bool shared = page_size < 16 || page_size > 48;  // keys of many queries, by blocks of a GPU
      const int64_t keys = pieces(600, page_size) * page_size, few = pieces(200, page_size) * page_size;
      add("pages_decode_" + num(page_size), sizes(4, 8, 2, 1, keys, 64), [&](auto& d) {
        paged(d, page_size);
        d.dtype = kHalfAndSingle[page_size % 3].dtype, d.causal = true, d.align = Align::kBottomRight;
      });
      add("pages_prefill_" + num(page_size), sizes(3, 4, 2, 70, shared ? keys : few, 40, 24), [&](auto& d) {
        paged(d, page_size);
        d.dtype = kHalfAndSingle[page_size % 3].dtype, d.causal = true, d.align = Align::kBottomRight,
        d.window_left = 300;
      });
    }
    for (const int64_t n : {5, 7, 71}) {
      add("pages_group_of_" + num(n), sizes(2, n, 1, 1, 144, n == 7 ? 96 : 80), [&](auto& d) { paged(d, 16); });
    }
    add_in_each_dtype("pages_odd_head", sizes(5, 5, 5, 3, 93, 71, 65), [&](auto& d) { paged(d, 31); });
    add("pages_latent", sizes(2, 16, 1, 1, 96, 576, 512), [&](auto& d) { paged(d, 8), d.dtype = DType::kBFloat16; });
    add_in_each_dtype("pages_packed", sizes(6, 4, 2, 130, 120, 32), [&](auto& d) {
      paged(d, 12);
      d.packed = d.causal = true, d.align = Align::kBottomRight;
    });
    add("pages_everything", sizes(3, 4, 2, 9, 96, 24), [&](auto& d) {
      paged(d, 6);
      d.causal = true, d.window_left = 60, d.align = Align::kBottomRight, d.has_seqlens_q = true;
      operand(d.attn_mask, d, kBatch | kQuery | kKey, DType::kBool);
      operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kBFloat16);
      d.alibi_slopes_ndim = 1, d.softcap = 5, d.scale = 0.3, d.has_sink_logits = true;
      d.return_weights = ReturnWeights::kMean, d.return_column_sums = true, d.dropout_p = 0.2;
    });
    add("pages_float64", sizes(2, 4, 2, 33, 65, 40, 24), [&](auto& d) { paged(d, 5), d.dtype = DType::kFloat64; });
    add("pages_no_keys", sizes(2, 4, 2, 5, 0, 24), [&](auto& d) { paged(d, 4); });
    add("pages_no_batch", sizes(0, 4, 2, 5, 8, 24), [&](auto& d) { paged(d, 4); });
  }

  // Keys and values as caches store them: one scale a row, read where they lie or copied, and several; rows of any size.
  void formats() {
    constexpr DType kFormats[] = {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt4x2};
    const auto store = [](AttentionDesc& d, DType key, DType value, int64_t group = 0) {
      d.key_dtype = key, d.value_dtype = value, d.key_group = d.value_group = group;
    };
    for (size_t n = 0; n < 4; ++n) {
      const DType format = kFormats[n], other = kFormats[(n + 1) % 4];
      const TypeName& type = kHalfAndSingle[n % 3];
      const std::string name = dtype_name(format);
      add("stored_decode_" + name, sizes(4, 8, 2, 1, 560, 64), [&](auto& d) {
        store(d, format, format), d.dtype = type.dtype;
        d.has_seqlens_k = d.causal = true, d.align = Align::kBottomRight;
      });
      add("stored_groups_" + name, sizes(2, 8, 2, 3, 130, 96),
          [&](auto& d) { store(d, format, format, 32), d.dtype = type.dtype, paged(d, 5); });
      add("stored_prefill_" + name, sizes(2, 4, 2, 70, 140, 80, 64), [&](auto& d) {
        store(d, format, other, 16), d.dtype = type.dtype, paged(d, 10);
        d.causal = true, d.align = Align::kBottomRight;
      });
    }
    add("stored_odd_head", sizes(3, 5, 5, 2, 93, 71, 65), [&](auto& d) { store(d, DType::kInt8, DType::kFloat8E4M3); });
    add("stored_values_alone", sizes(3, 6, 2, 2, 93, 48), [&](auto& d) {
      d.value_dtype = DType::kInt8, d.dtype = DType::kBFloat16, d.return_weights = ReturnWeights::kPerHead;
    });
    add("stored_packed", sizes(4, 4, 2, 130, 120, 32), [&](auto& d) {
      store(d, DType::kInt8, DType::kInt4x2), d.packed = d.causal = true, d.align = Align::kBottomRight;
    });
    add("stored_tiny", sizes(3, 4, 2, 3, 4, 6), [&](auto& d) { store(d, DType::kInt8, DType::kInt8); });
    add("stored_float64", sizes(2, 2, 2, 9, 33, 32),
        [&](auto& d) { store(d, DType::kFloat8E5M2, DType::kInt4x2, 16), d.dtype = DType::kFloat64; });
    add("stored_no_keys", sizes(2, 4, 2, 5, 0, 24), [&](auto& d) { store(d, DType::kInt4x2, DType::kInt8); });
    add("stored_returned", sizes(2, 2, 1, 5, 80, 144, 32), [&](auto& d) {
      store(d, DType::kInt8, DType::kFloat8E4M3, 16), d.dtype = DType::kBFloat16, paged(d, 10), d.dropout_p = 0.2;
      d.return_weights = ReturnWeights::kPerHead, d.return_column_sums = d.causal = true, d.align = Align::kBottomRight;
    });
    add("stored_mean", sizes(2, 2, 2, 66, 30, 40), [&](auto& d) {
      store(d, DType::kFloat8E5M2, DType::kInt8), d.return_weights = ReturnWeights::kMean, d.alibi_slopes_ndim = 1;
      d.align = Align::kBottomRight;
    });
    add("stored_program", sizes(2, 4, 2, 9, 100, 48), [&](auto& d) {
      store(d, DType::kInt4x2, DType::kFloat8E5M2, 16), d.dtype = DType::kFloat16, paged(d, 5), d.softcap = 5;
    });
    give_program(1, "score * 0.5 + shift[h]", "(q + k) % 5 != 2");
    add("stored_program_returned", sizes(2, 4, 2, 1, 272, 32), [&](auto& d) {
      store(d, DType::kFloat8E4M3, DType::kInt4x2), d.dtype = DType::kBFloat16, paged(d, 16);
      d.return_weights = ReturnWeights::kPerHead, d.return_column_sums = true;
    });
    give_program(1, "tanh(score) + shift[h]");
  }

  void empty() {
    add("no_batch", sizes(0, 2, 1, 5, 6, 8));
    add("no_heads", sizes(2, 0, 0, 5, 6, 8));
    add("no_heads_mean", sizes(2, 0, 0, 5, 6, 8), [](auto& d) { d.return_weights = ReturnWeights::kMean; });
    add("no_queries", sizes(2, 2, 1, 0, 6, 8));
    add("no_queries_column_sums", sizes(2, 2, 1, 0, 6, 8), [](auto& d) { d.return_column_sums = true; });
    add_in_each_dtype("no_keys", sizes(2, 4, 2, 70, 0, 24), [](auto&) {});
    add("no_keys_tiny", sizes(2, 4, 2, 5, 0, 8), [](auto& d) { d.return_weights = ReturnWeights::kMean; });
    add_in_each_dtype("no_head_dim", sizes(2, 4, 2, 70, 130, 0, 24), [](auto&) {});
    add("no_head_dim_bias", sizes(2, 4, 2, 70, 130, 0, 24),
        [](auto& d) { operand(d.attn_bias, d, kHead | kQuery | kKey, DType::kFloat32); });
    add("no_head_dim_scale", sizes(2, 4, 2, 7, 13, 0, 24), [](auto& d) { d.scale = 3; });
    add_in_each_dtype("no_head_dim_v", sizes(2, 4, 2, 70, 130, 24, 0), [](auto&) {});
    add("no_dims", sizes(2, 2, 2, 5, 6, 0, 0));
    add("packed_no_rows", sizes(3, 2, 1, 0, 0, 8), [](auto& d) { d.packed = true; });
    add("packed_no_sequences", sizes(0, 2, 1, 9, 7, 8), [](auto& d) { d.packed = true; });
    add("packed_no_keys", sizes(3, 2, 1, 90, 0, 8), [](auto& d) { d.packed = true; });
  }

  // Also of queries that see no key.
  void sinks() {
    const auto each = [&](const std::string& name, const AttentionDesc& desc, auto change) {
      add_in_each_dtype("sinks_" + name, desc, [&](auto& d) {
        d.has_sink_logits = true;
        change(d);
      });
    };
    const AttentionDesc base = sizes(2, 4, 2, 70, 130, 24, 32);
    each("causal", base, [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
    each("blind_rows", base, [](auto& d) { d.causal = true, d.query_offset = -40; });
    each("returned", base,
         [](auto& d) { d.return_weights = ReturnWeights::kPerHead, d.return_column_sums = d.has_seqlens_q = true; });
    each("packed", sizes(5, 4, 2, 200, 300, 16),
         [](auto& d) { d.packed = true, d.causal = true, d.align = Align::kBottomRight; });
    each("decode", sizes(2, 8, 2, 2, 1100, 64),
         [](auto& d) { d.causal = true, d.window_left = 100, d.query_offset = -1, d.has_seqlens_q = true; });
    each("tiny", sizes(3, 11, 11, 15, 16, 7), [](auto& d) { d.causal = true, d.query_offset = -1; });
    each("tiny_mean", sizes(2, 17, 17, 4, 9, 16), [](auto& d) { d.return_weights = ReturnWeights::kMean; });
    each("no_keys", sizes(2, 4, 2, 70, 0, 24), [](auto&) {});
    each("no_keys_decode", sizes(2, 4, 2, 3, 0, 24), [](auto&) {});
    for (const Fill fill : {Fill::kShiftUp, Fill::kShiftDown, Fill::kLarge, Fill::kUnderflow}) {
      each("numbers", sizes(1, 4, 4, 66, 130, 64), [](auto&) {});
      for (size_t n = cases_.size() - 3; n < cases_.size(); ++n) {
        cases_[n].name += "_" + num(static_cast<int>(fill));
        cases_[n].fill = fill;
      }
    }
  }

  // Normalizer::kNone: with a program its score is the weight, without one the scaled product.
  void scores_as_weights() {
    const auto each = [&](const std::string& name, const AttentionDesc& desc, const char* score, auto change) {
      add_in_each_dtype("none_" + name, desc, [&](auto& d) {
        d.normalizer = Normalizer::kNone;
        change(d);
      });
      if (*score != 0) give_program(3, score);
    };
    constexpr const char* kSigmoid = "sigmoid(score + shift[h])";
    const AttentionDesc base = sizes(2, 4, 2, 70, 130, 24, 32);
    each("causal", base, "", [](auto& d) { d.causal = true, d.align = Align::kBottomRight; });
    each("sigmoid", base, kSigmoid, [](auto& d) { d.causal = true, d.query_offset = -40; });
    each("squared", base, "max(score + shift[h], 0) * score",
         [](auto& d) { d.has_seqlens_q = d.has_seqlens_k = true; });
    each("masked", base, "", [](auto& d) {
      operand(d.attn_mask, d, kQuery | kKey, DType::kBool);
      operand(d.attn_bias, d, kHead | kKey, DType::kFloat32);
      d.alibi_slopes_ndim = 1, d.softcap = 5, d.align = Align::kTopLeft, d.dropout_p = 0.2;
    });
    each("returned", base, kSigmoid, [](auto& d) {
      d.return_weights = ReturnWeights::kPerHead, d.return_column_sums = d.has_seqlens_q = true, d.dropout_p = 0.3;
    });
    each("mean", base, "",
         [](auto& d) { d.return_weights = ReturnWeights::kMean, d.window_left = 20, d.align = Align::kTopLeft; });
    each("packed", sizes(5, 4, 2, 200, 300, 16), kSigmoid,
         [](auto& d) { d.packed = true, d.causal = true, d.align = Align::kBottomRight; });
    each("decode", sizes(2, 8, 2, 2, 1100, 64), kSigmoid,
         [](auto& d) { d.causal = true, d.window_left = 100, d.query_offset = -1, d.has_seqlens_q = true; });
    each("decode_linear", sizes(2, 4, 2, 1, 600, 32), "", [](auto& d) { d.has_seqlens_k = true; });
    each("tiny", sizes(3, 11, 11, 15, 16, 7), "", [](auto& d) { d.causal = true, d.query_offset = -1; });
    each("no_keys", sizes(2, 4, 2, 70, 0, 24), "", [](auto&) {});
  }
};

inline const std::vector<Problem>& cases() {
  static const std::vector<Problem> list = Cases::make();
  return list;
}

}  // namespace polyhead::testing
