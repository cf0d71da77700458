// What must hold of any program: hidden is hidden, indices stay within, packed is the same as apart; refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "attention/far_rows.h"
#include "kernels_to_test.h"
#include "left_out.h"
#include "programs.h"
#include "testing/array.h"

namespace polyhead::testing {
namespace {

// One head of float32, with a program of no or one capture.
struct SmallCall {
  AttentionDesc desc;
  Array query, key, value, grad_out, capture, out, logsumexp, grad_query, grad_key, grad_value, grad_capture;
  Array sink = {};                 // [1]
  Tensor far = {}, grad_far = {};  // instead of the tensor captured, if given
  bool forward_alone = false;

  SmallCall(const char* text, int64_t queries, int64_t keys, const Array& captured = {}) : capture(captured) {
    constexpr int64_t kDim = 12;
    desc.seqlen_q = queries, desc.seqlen_k = keys, desc.head_dim = desc.head_dim_v = kDim;
    desc.program = *parse_program(text);
    if (capture.given()) {
      CaptureShape shape{capture.dtype, static_cast<int>(capture.dims.size()), {}};
      std::copy(capture.dims.begin(), capture.dims.end(), shape.dims);
      desc.captures.push_back(shape);
    }
    Random random(9);
    for (Array* a : {&query, &key, &value, &grad_out}) {
      *a = Array(DType::kFloat32, {1, a == &query || a == &grad_out ? queries : keys, 1, kDim});
      a->fill([&] { return random.normal(); });
    }
    out = grad_query = Array(DType::kFloat32, query.dims);
    grad_key = grad_value = Array(DType::kFloat32, key.dims);
    logsumexp = Array(DType::kFloat32, {1, 1, queries});
    grad_capture = capture;
  }

  Status run(const char* kernel) {
    PlanOptions options;
    options.kernel = kernel;
    const Result<Plan> made = plan(desc, options);
    if (!made.ok()) return made.status();
    const size_t backward_bytes = forward_alone ? 0 : made->backward_workspace_bytes();
    std::vector<char> memory(std::max(made->workspace_bytes(), backward_bytes) + 64);
    void* aligned = memory.data();
    size_t space = memory.size();
    std::align(64, space - 64, aligned, space);
    const bool is_far = far.data != nullptr;
    const Tensor captures[] = {is_far ? far : view(capture)},
                 grad_captures[] = {is_far ? grad_far : view(grad_capture)};
    BackwardArgs args;
    ForwardArgs& forward = args.forward;
    forward.sink_logits = view(sink);
    forward.query = view(query), forward.key = view(key), forward.value = view(value);
    forward.out = view(out), forward.logsumexp = view(logsumexp);
    forward.workspace = aligned, forward.workspace_bytes = space;
    if (capture.given()) forward.captures = captures;
    if (Status status = made->forward(forward); !status.ok() || forward_alone) return status;
    args.grad_out = view(grad_out);
    args.grad_query = view(grad_query), args.grad_key = view(grad_key), args.grad_value = view(grad_value);
    if (capture.given() && capture.dtype == DType::kFloat32) args.grad_captures = grad_captures;
    return made->backward(args);
  }
};

// Those of this machine that take a call; of the others it is said why not.
std::vector<const Kernel*> kernels_that_take(const AttentionDesc& desc) {
  std::vector<const Kernel*> list;
  for (const Kernel* kernel : kernels_to_test()) {
    if (!refuses(kernel->name, kernel->why_not(desc))) list.push_back(kernel);
  }
  return list;
}

void set_rows(Array& a, int64_t first, int64_t last, double value) {
  const int64_t row = a.size() / a.dims[1];
  for (int64_t n = first * row; n < last * row; ++n) a.set(n, value);
}

// Keys from 40 on, and every fifth, are hidden: by a mask, or by a score of -inf.
void expect_hidden(int64_t queries) {
  for (const char* text : {"mask = k < 40 and k % 5 != 1", "score = where(k < 40 and k % 5 != 1, score * 2, -inf)",
                           "score = where(k < 40 and k % 5 != 1, score + t[k], -inf * t[k])"}) {
    Array table;
    if (std::string(text).find("t[") != std::string::npos) {
      table = Array(DType::kFloat32, {200});
      table.fill([n = 0]() mutable { return 0.01 * ++n; });
    }
    for (const Kernel* kernel : kernels_that_take(SmallCall(text, queries, 200, table).desc)) {
      SmallCall clean(text, queries, 200, table), poisoned(text, queries, 200, table);
      for (int64_t k = 0; k < 200; ++k) {
        if (k < 40 && k % 5 != 1) continue;
        set_rows(poisoned.key, k, k + 1, k % 2 == 0 ? NAN : HUGE_VAL);
        set_rows(poisoned.value, k, k + 1, k % 3 == 0 ? NAN : -HUGE_VAL);
      }
      ASSERT_EQ(clean.run(kernel->name).message(), "");
      ASSERT_EQ(poisoned.run(kernel->name).message(), "");
      const std::string what = std::string(kernel->name) + ": " + text;
      EXPECT_TRUE(clean.out == poisoned.out) << what;
      EXPECT_TRUE(clean.logsumexp == poisoned.logsumexp) << what;
      EXPECT_TRUE(clean.grad_query == poisoned.grad_query) << what;
      EXPECT_TRUE(clean.grad_key == poisoned.grad_key) << what;
      EXPECT_TRUE(clean.grad_value == poisoned.grad_value) << what;
      EXPECT_TRUE(clean.grad_capture == poisoned.grad_capture) << what;
      EXPECT_TRUE(std::isfinite(clean.out.at(0)) && clean.out.at(0) != 0) << what;
      EXPECT_EQ(poisoned.grad_key.at(1 * 12), 0) << what;
    }
  }
}

constexpr int64_t kFew = 7;  // queries, which decoding takes

TEST(ProgramLaws, HiddenIsHidden) { expect_hidden(70); }
TEST(ProgramLaws, HiddenIsHiddenInDecoding) { expect_hidden(kFew); }

// Rows that see nothing: by the mask, by the score, by both.
void expect_nothing(int64_t queries) {
  for (const char* text : {"mask = q % 3 != 0", "score = where(q % 3 != 0, score, -inf)",
                           "mask = q % 6 != 0; score = where(q % 6 != 3, score, -inf)"}) {
    for (const Kernel* kernel : kernels_that_take(SmallCall(text, queries, 130).desc)) {
      SmallCall call(text, queries, 130);
      for (const double sink : {-HUGE_VAL, 1.5}) {  // none, then one
        if (std::isfinite(sink)) call.sink = Array(DType::kFloat32, {1}), call.sink.set(0, sink);
        call.desc.has_sink_logits = call.sink.given();
        if (refuses(kernel->name, kernel->why_not(call.desc))) continue;
        ASSERT_EQ(call.run(kernel->name).message(), "");
        const std::string what = std::string(kernel->name) + ": " + text + ", sink " + std::to_string(sink);
        for (int64_t q = 0; q < queries; ++q) {
          const bool nothing = q % 3 == 0;
          EXPECT_EQ(call.logsumexp.at(q) == sink, nothing) << what << ", query " << q;
          EXPECT_EQ(call.out.at(q * 12) == 0 && call.grad_query.at(q * 12) == 0, nothing) << what << ", query " << q;
        }
      }
    }
  }
}

TEST(ProgramLaws, WhoSeesNothingGetsNothing) { expect_nothing(67); }
TEST(ProgramLaws, WhoSeesNothingGetsNothingInDecoding) { expect_nothing(kFew); }

TEST(ProgramLaws, IndicesOfVisiblePairsStayWithin) {
  Array table(DType::kFloat32, {1, 50});
  const char* const text = "score = score + table[h, q - k]";
  for (const Kernel* kernel : kernels_that_take(SmallCall(text, 50, 50, table).desc)) {
    SmallCall outside(text, 50, 50, table);
    outside.out.set(0, 77);
    EXPECT_EQ(outside.run(kernel->name).message(),
              "program: element [0, -1] of table [1, 50] is asked for at batch 0, head 0, query 0, key 1, which lies "
              "outside; hide the pair or clamp the index")
        << kernel->name;
    EXPECT_EQ(outside.out.at(0), 77) << "outputs are untouched";
    SmallCall causal("score = score + table[h, q - k]; mask = k <= q", 50, 50, table);
    EXPECT_EQ(causal.run(kernel->name).message(), "") << kernel->name;
    SmallCall by_option(text, 50, 50, table);
    by_option.desc.causal = true;
    EXPECT_EQ(by_option.run(kernel->name).message(), "") << kernel->name;
    SmallCall beyond("score = score + table[h, q - k]; mask = k <= q", 51, 51, table);
    EXPECT_NE(beyond.run(kernel->name).message().find("[0, 50] of table [1, 50]"), std::string::npos) << kernel->name;
  }
}

// Large indices: the products of positions do not fit 32 bits.
void expect_wide(int64_t queries) {
  Array ids(DType::kInt64, {140});
  ids.fill([n = 0]() mutable { return static_cast<double>((int64_t{1} << 40) + n++ / 30); });
  for (const char* text :
       {"ids: int; mask = ids[q] == ids[k]", "mask = (q * 3000000000 - k * 3000000000) // 3000000000 < 5"}) {
    SmallCall reference(text, queries, 140, std::string(text).find("ids") == 0 ? ids : Array());
    ASSERT_EQ(reference.run("reference").message(), "");
    for (const Kernel* kernel : kernels_that_take(reference.desc)) {
      SmallCall call = reference;
      ASSERT_EQ(call.run(kernel->name).message(), "");
      for (int64_t n = 0; n < call.out.size(); ++n) {
        ASSERT_NEAR(call.out.at(n), reference.out.at(n), 1e-5) << kernel->name << ": " << text;
      }
    }
  }
}

TEST(ProgramLaws, IntegersAreWide) { expect_wide(140); }
TEST(ProgramLaws, IntegersAreWideInDecoding) { expect_wide(kFew); }

// What has no quotient, or one that 64 bits do not hold: each text beside what it means.
void expect_quotients(int64_t queries) {
  const std::pair<const char*, const char*> programs[] = {
      {"low = q - q + -9223372036854775808; mask = low // (k - k - 1) < 0 and low % (k - k - 1) == 0 and k % 3 != 1",
       "mask = k % 3 != 1"},
      {"mask = q // (k % 2) >= 3 or 5 % (k - k) == 1 or k == 0", "mask = (k % 2 == 1 and q >= 3) or k == 0"},
      {"mask = -7 // (k % 5 + 1) == -2 and -7 % -(k % 5 + 1) == -3", "mask = k % 5 == 3"},
      {"mask = (q - q + 4611686018427387904) * (k % 4) < 0", "mask = k % 4 == 2 or k % 4 == 3"}};
  for (const auto& [text, meaning] : programs) {
    for (const Kernel* kernel : kernels_that_take(SmallCall(text, queries, 140).desc)) {
      SmallCall call(text, queries, 140), meant(meaning, queries, 140);
      ASSERT_EQ(call.run(kernel->name).message(), "");
      ASSERT_EQ(meant.run(kernel->name).message(), "");
      EXPECT_TRUE(call.out == meant.out && call.grad_key == meant.grad_key) << kernel->name << ": " << text;
    }
  }
}

TEST(ProgramLaws, IntegersHaveAResultForEverything) { expect_quotients(70); }
TEST(ProgramLaws, IntegersHaveAResultForEverythingInDecoding) { expect_quotients(kFew); }

// Rows of a tensor 2^31 elements apart, and one of 2^33 elements and more, whose gradient no memory holds.
void expect_far(int64_t queries) {
  const char* const text = "score = score + t[b, k % 5, h, q % 3]";
  Array table(DType::kFloat32, {1, 5, 1, 3});
  table.fill([n = 0]() mutable { return 0.1 * (n++ % 11); });
  const FarRows rows(table), grad_rows(table);
  if (!rows.tensor().data || !grad_rows.tensor().data) GTEST_SKIP() << "this machine has no 86 GB of addresses to give";
  SmallCall all(text, queries, 140, table);
  const auto same = [&](const SmallCall& near, const SmallCall& far, const char* kernel) {
    EXPECT_TRUE(near.out == far.out && near.logsumexp == far.logsumexp) << kernel;
  };
  for (const Kernel* kernel : kernels_that_take(all.desc)) {
    SmallCall near = all, far = all, wide = all;
    ASSERT_EQ(near.run(kernel->name).message(), "");
    far.far = rows.tensor(), far.grad_far = grad_rows.tensor();
    ASSERT_EQ(far.run(kernel->name).message(), "");
    same(near, far, kernel->name);
    EXPECT_TRUE(near.grad_query == far.grad_query && near.grad_key == far.grad_key) << kernel->name;
    for (int64_t k = 0; k < 5; ++k) {
      ASSERT_EQ(std::memcmp(grad_rows.row(k), &near.grad_capture.bytes[k * rows.row_bytes()], rows.row_bytes()), 0);
    }
    wide.forward_alone = true;
    wide.far = rows.tensor();
    wide.far.dims[3] = wide.desc.captures[0].dims[3] = int64_t{1} << 31;
    ASSERT_EQ(wide.run(kernel->name).message(), "");
    same(near, wide, kernel->name);
  }
}

TEST(ProgramLaws, TensorsMayBeLarge) { expect_far(70); }
TEST(ProgramLaws, TensorsMayBeLargeInDecoding) { expect_far(kFew); }

TEST(ProgramLaws, PackedSequencesCountForThemselves) {
  const char* const text = "t: float; score = score + t[b, (q - k) % 4]; mask = k <= q + 3 and k % 4 != 2";
  Array table(DType::kFloat32, {2, 4});
  table.fill([n = 0]() mutable { return 0.3 * n++; });
  const int64_t lengths[] = {70, 45};
  for (const Kernel* kernel : kernels_that_take(SmallCall(text, 115, 115, table).desc)) {
    SmallCall packed(text, 115, 115, table);
    AttentionDesc& desc = packed.desc;
    desc.packed = true;
    desc.batch = 2;
    Array cu(DType::kInt32, {3});
    cu.set(1, 70), cu.set(2, 115);
    const Tensor captures[] = {view(table)};
    ForwardArgs args;
    args.captures = captures;
    const auto rows = [](const Array& a) { return Tensor(a.bytes.data(), a.dtype, {a.dims[1], 1, 12}); };
    args.query = rows(packed.query), args.key = rows(packed.key), args.value = rows(packed.value);
    args.out = rows(packed.out);
    args.cu_seqlens_q = args.cu_seqlens_k = view(cu);
    PlanOptions options;
    options.kernel = kernel->name;
    const Result<Plan> made = plan(desc, options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    std::vector<char> memory(made->workspace_bytes() + 64);
    void* aligned = memory.data();
    size_t space = memory.size();
    std::align(64, space - 64, aligned, space);
    args.workspace = aligned, args.workspace_bytes = space;
    ASSERT_EQ(made->forward(args).message(), "");
    int64_t first = 0;
    for (int64_t b = 0; b < 2; first += lengths[b++]) {
      Array row(DType::kFloat32, {1, 4});
      for (int64_t n = 0; n < 4; ++n) row.set(n, table.at(b * 4 + n));
      SmallCall alone(text, lengths[b], lengths[b], row);
      for (Array SmallCall::*a : {&SmallCall::query, &SmallCall::key, &SmallCall::value}) {
        for (int64_t n = 0; n < (alone.*a).size(); ++n) (alone.*a).set(n, (packed.*a).at(first * 12 + n));
      }
      ASSERT_EQ(alone.run(kernel->name).message(), "");
      for (int64_t n = 0; n < alone.out.size(); ++n) {
        ASSERT_EQ(alone.out.at(n), packed.out.at(first * 12 + n)) << kernel->name << ", sequence " << b;
      }
    }
  }
}

std::string refused(const AttentionDesc& desc) { return plan(desc).status().message(); }

TEST(ProgramLaws, WhatDoesNotFitIsRefused) {
  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = 4, desc.head_dim = desc.head_dim_v = 4;
  desc.program = *parse_program("doc: int; score = score + w[h, q]; mask = doc[q] == doc[k]");
  EXPECT_EQ(refused(desc), "captures describes 0 tensors, the program captures 2");
  desc.captures = {{DType::kFloat32, 1, {4}}, {DType::kFloat32, 2, {1, 4}}};
  EXPECT_EQ(refused(desc), "doc is float32, the program takes int32 or int64");
  desc.captures[0].dtype = DType::kInt32;
  desc.captures[1].ndim = 1;
  EXPECT_EQ(refused(desc), "w has 1 dims, the program takes 2");
  desc.captures[1].ndim = 2;
  EXPECT_EQ(refused(desc), "");
  desc.program = nullptr;
  EXPECT_EQ(refused(desc), "captures describes 2 tensors, no program captures 0");

  Array table(DType::kFloat32, {1, 4});
  SmallCall call("score = score + w[h, q]", 4, 4, table);
  call.capture = Array();
  EXPECT_EQ(call.run("").message(), "w is missing");
  call.capture = Array(DType::kFloat32, {1, 5});
  EXPECT_EQ(call.run("").message(), "w dim 1 (dim) is 5, the plan's is 4");
}

}  // namespace
}  // namespace polyhead::testing
