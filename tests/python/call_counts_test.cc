// The counts behind polyhead.torch.report(): no call is lost, however many threads there are, and whoever reads.
#include "call_counts.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <thread>
#include <vector>

namespace polyhead::torch_ops {
namespace {

constexpr const char* kKernel = "cpu_any";

void call(int64_t seqlen) {
  AttentionDesc desc;
  desc.seqlen_q = seqlen;
  count_call(Counted::kAttentionForward, desc, kKernel);
}

// By seqlen_q; those of any sizes as -1.
std::map<int64_t, int64_t> taken(bool reset = true) {
  std::vector<CallCount> counts(6000);
  counts.resize(static_cast<size_t>(polyhead_torch_call_counts(counts.data(), 6000, reset ? 1 : 0)));
  std::map<int64_t, int64_t> by_length;
  for (const CallCount& each : counts) {
    EXPECT_EQ(each.kernel, kKernel);
    by_length[each.other != 0 ? -1 : each.seqlen_q] += each.count;
  }
  return by_length;
}

TEST(CallCounts, AddUpOverThreadsWhileTheyAreRead) {
  constexpr int kThreads = 8, kSizes = 100, kRounds = 50;  // more sizes than a thread tells apart by itself
  taken();
  std::atomic<int> running = kThreads;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&running, thread] {
      for (int round = 0; round < kRounds; ++round) {
        for (int size = 0; size < kSizes; ++size) {
          call(size % 2 == 0 ? size : 1000 * (thread + 1) + size);  // half of them are every thread's
          call(7);
        }
      }
      --running;
    });
  }
  std::map<int64_t, int64_t> all;
  const auto add = [&](const std::map<int64_t, int64_t>& some) {
    for (const auto& [size, count] : some) all[size] += count;
  };
  while (running > 0) add(taken());
  for (std::thread& thread : threads) thread.join();
  add(taken());
  EXPECT_EQ(all[7], kThreads * kRounds * kSizes);
  for (int size = 0; size < kSizes; size += 2) EXPECT_EQ(all[size], kThreads * kRounds) << size;
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int size = 1; size < kSizes; size += 2) EXPECT_EQ(all[1000 * (thread + 1) + size], kRounds) << size;
  }
  EXPECT_EQ(all.size(), 1u + kSizes / 2 + kThreads * kSizes / 2);
  EXPECT_TRUE(taken().empty());
}

TEST(CallCounts, StayUntilTheyAreReset) {
  taken();
  call(3);
  EXPECT_EQ(taken(false), (std::map<int64_t, int64_t>{{3, 1}}));
  call(3);
  EXPECT_EQ(taken(false), (std::map<int64_t, int64_t>{{3, 2}}));
  CallCount one;
  call(4);
  EXPECT_EQ(polyhead_torch_call_counts(&one, 1, 1), 2);  // not all fit: nothing is reset
  EXPECT_EQ(taken(), (std::map<int64_t, int64_t>{{3, 2}, {4, 1}}));
}

TEST(CallCounts, TooManySizesAreCountedTogether) {
  taken();
  for (int64_t size = 0; size < 5000; ++size) call(size);
  const auto all = taken();
  EXPECT_EQ(all.size(), 4097u);
  EXPECT_EQ(all.at(-1), 5000 - 4096);
}

}  // namespace
}  // namespace polyhead::torch_ops
