// Scores of one's own: a learned number for each distance, as in T5, and a causal mask, in one fused kernel; the gradient
// of those numbers comes out of its backward pass.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "polyhead/attention.h"

constexpr int64_t kTokens = 200, kHeads = 4, kDim = 32, kDistances = 64;

int main() {
  // [the program]
  using namespace polyhead;
  const auto program = parse_program("score = score + table[h, min(q - k, 63)]; mask = k <= q");
  if (!program.ok()) return std::fprintf(stderr, "%s\n", program.status().message().c_str()), 1;

  AttentionDesc desc;
  desc.seqlen_q = desc.seqlen_k = kTokens;
  desc.num_heads = desc.num_heads_kv = kHeads;
  desc.head_dim = desc.head_dim_v = kDim;
  desc.program = *program;
  desc.captures = {{DType::kFloat32, 2, {kHeads, kDistances}}};  // table
  const auto made = plan(desc);
  if (!made.ok()) return std::fprintf(stderr, "%s\n", made.status().message().c_str()), 1;
  // [the same by expressions]
  ProgramBuilder p;
  const CapturedTensor table_of = p.capture("table", ValueType::kFloat, 2);
  const auto same = p.build(p.score() + table_of(p.head(), min(p.query() - p.key(), 63)), p.key() <= p.query());
  const bool is_same = same.ok() && *same == *program;  // equal programs are one object
  // [a call]
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> query(kTokens * kHeads * kDim), key(query), value(query), out(query), grad_out(query),
      table(kHeads * kDistances);
  for (auto* operand : {&query, &key, &value, &grad_out, &table}) {
    for (float& x : *operand) x = normal(random);
  }
  std::vector<float> logsumexp(kHeads * kTokens), grad_query(query), grad_key(query), grad_value(query),
      grad_table(table);
  std::vector<std::byte> workspace(std::max(made->workspace_bytes(), made->backward_workspace_bytes()) + 64);
  const auto rows = [](const std::vector<float>& x) {
    return Tensor(x.data(), DType::kFloat32, {1, kTokens, kHeads, kDim});
  };
  // [the tensors]
  const Tensor captures[] = {{table.data(), DType::kFloat32, {kHeads, kDistances}}};
  ForwardArgs args;
  args.query = rows(query), args.key = rows(key), args.value = rows(value), args.out = rows(out);
  args.logsumexp = {logsumexp.data(), DType::kFloat32, {1, kHeads, kTokens}};
  args.captures = captures;
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  args.workspace_bytes = workspace.size() - 64;
  Status status = made->forward(args);

  const Tensor grad_captures[] = {{grad_table.data(), DType::kFloat32, {kHeads, kDistances}}};
  BackwardArgs back;
  back.forward = args;
  back.grad_out = rows(grad_out);
  back.grad_query = rows(grad_query), back.grad_key = rows(grad_key), back.grad_value = rows(grad_value);
  back.grad_captures = grad_captures;
  if (status.ok()) status = made->backward(back);
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  // [what must hold]

  // One number more for all distances changes no weight: a head's gradients add up to 0.
  float worst = 0, largest = 0;
  for (int64_t h = 0; h < kHeads; ++h) {
    float sum = 0;
    for (int64_t d = 0; d < kDistances; ++d) {
      sum += grad_table[h * kDistances + d];
      largest = std::fmax(largest, std::fabs(grad_table[h * kDistances + d]));
    }
    worst = std::fmax(worst, std::fabs(sum));
  }
  std::printf("%s\n%s: gradients of up to %.2f, a head's sum is 0 but for %.1e\n", desc.program->text().c_str(),
              made->kernel_name(), largest, worst);
  return is_same && largest > 0.1f && worst < 1e-3f ? 0 : 1;
}
