// The words by which lists of cases are written.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "testing/operands.h"
#include "testing/pages.h"
#include "testing/problem_words.h"
#include "testing/program_words.h"

namespace polyhead::testing {

class CaseList {
 protected:
  struct TypeName {
    DType dtype;
    const char* name;
  };
  static constexpr TypeName kHalfAndSingle[] = {
      {DType::kFloat32, "f32"}, {DType::kBFloat16, "bf16"}, {DType::kFloat16, "f16"}};

  static AttentionDesc sizes(int64_t batch, int64_t heads, int64_t heads_kv, int64_t q, int64_t k, int64_t d,
                             int64_t dv = -1) {
    AttentionDesc desc;
    desc.batch = batch, desc.num_heads = heads, desc.num_heads_kv = heads_kv;
    desc.seqlen_q = q, desc.seqlen_k = k, desc.head_dim = d, desc.head_dim_v = dv < 0 ? d : dv;
    return desc;
  }

  static std::string num(int64_t n) { return std::to_string(n); }

  Problem& add(const std::string& name, const AttentionDesc& desc) {
    Problem p;
    p.name = name;
    p.desc = desc;
    p.seed = cases_.size() + 1;
    cases_.push_back(p);
    return cases_.back();
  }

  template <class Change>
  Problem& add(const std::string& name, AttentionDesc desc, Change change) {
    change(desc);
    return add(name, desc);
  }

  // The same in each dtype that kernels take.
  template <class Change>
  void add_in_each_dtype(const std::string& name, const AttentionDesc& desc, Change change) {
    for (const TypeName& type : kHalfAndSingle) {
      add(name + "_" + type.name, desc, [&](AttentionDesc& d) {
        d.dtype = type.dtype;
        change(d);
      });
    }
  }

  static void operand(BroadcastOperand& o, const AttentionDesc& d, int full_dims, DType dtype) {
    const int64_t full[4] = {d.batch, d.num_heads, d.seqlen_q, d.seqlen_k};
    o.given = true;
    o.dtype = dtype;
    for (int n = 0; n < 4; ++n) o.dims[n] = full_dims >> (3 - n) & 1 ? full[n] : 1;
  }
  static void paged(AttentionDesc& d, int64_t page_size) {
    d.page_size = page_size, d.has_seqlens_k = true, d.num_pages = enough_pages(d);
  }
  static void end_mask(AttentionDesc& d, int64_t batch, int64_t heads, int64_t keys) {
    d.attn_mask = {true, DType::kBool, {batch, heads, d.seqlen_q, keys}}, d.mask_at_end = d.has_seqlens_k = true;
  }
  static constexpr int kBatch = 8, kHead = 4, kQuery = 2, kKey = 1;  // dims in which an operand does not broadcast

  // To the last cases, so many.
  void give_program(size_t count, const char* score, const char* mask = "") {
    for (size_t n = cases_.size() - count; n < cases_.size(); ++n) {
      cases_[n].score_text = score, cases_[n].mask_text = mask;
      cases_[n].captured = *parse_captured("shift: f32[h] -3..0");
      if (!complete_program(cases_[n]).ok()) std::abort();
    }
  }

  std::vector<Problem> cases_;
};

}  // namespace polyhead::testing
