#include "core/threads.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "sanitizer.h"

namespace {
std::atomic<bool> in_forked_child = false;
}  // namespace

// LeakSanitizer asks before it looks for leaks. A child of fork() has lost the stacks of the parent's other threads, and
// what they alone pointed to would seem lost.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return in_forked_child ? 1 : 0; }

namespace polyhead {
namespace {

std::unique_ptr<Executor> pool(int num_threads) { return std::unique_ptr<Executor>(new_thread_pool(num_threads)); }

template <class Body>
void parallel_for(Executor& executor, int count, const Body& body) {
  executor.parallel_for(
      count, [](void* context, int i) { (*static_cast<const Body*>(context))(i); }, const_cast<Body*>(&body));
}

// The sum of 0..999, by tasks on all lanes.
int64_t sum_on(Executor& executor) {
  std::atomic<int64_t> sum = 0;
  run_tasks(executor, 1000, [&](int64_t i, int) { sum += i; });
  return sum;
}
constexpr int64_t kSum = 999 * 1000 / 2;

int num_threads_of_process() {
  // The thread sanitizer starts one of its own beside a process's first thread.
  static const bool started = [] {
    if (!under_thread_sanitizer()) return true;
    std::thread([] {}).join();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return true;
  }();
  EXPECT_TRUE(started);
  int count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

// A thread stays listed for a moment after it has been joined.
bool num_threads_falls_to(int expected) {
  for (int wait_ms = 0; wait_ms < 1000 && num_threads_of_process() != expected; ++wait_ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return num_threads_of_process() == expected;
}

class Pools : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, Pools, testing::Range(1, 8));

TEST_P(Pools, EachIndexRunsExactlyOnce) {
  const auto executor = pool(GetParam());
  EXPECT_EQ(executor->num_threads(), GetParam());
  for (int round = 0; round < 300; ++round) {
    const int count = round % (GetParam() + 1);
    std::atomic<int> runs[8] = {};
    parallel_for(*executor, count, [&](int i) { ++runs[i]; });
    for (int i = 0; i < 8; ++i) ASSERT_EQ(runs[i], i < count ? 1 : 0) << "round " << round;
  }
}

TEST_P(Pools, AllThreadsWorkAtOnce) {
  const auto executor = pool(GetParam());
  std::atomic<int> arrived = 0;
  parallel_for(*executor, GetParam(), [&](int) {
    ++arrived;
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (arrived < GetParam() && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, GetParam());
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int> inside = 0;
  parallel_for(*executor, GetParam(), [&](int) {
    ++inside;
    while (inside < GetParam()) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), static_cast<size_t>(GetParam()));
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 1u);
}

TEST_P(Pools, TasksRunOnceEachInALaneOfTheirOwn) {
  const auto executor = pool(GetParam());
  for (const int64_t num_tasks : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{5}, int64_t{1000}}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(num_tasks));
    std::vector<std::atomic<bool>> busy(static_cast<size_t>(GetParam()));
    std::vector<int64_t> last(static_cast<size_t>(GetParam()), -1);  // of each lane: not atomic, the lane owns it
    std::atomic<bool> shared = false, out_of_order = false;
    run_tasks(*executor, num_tasks, [&](int64_t i, int lane) {
      const auto l = static_cast<size_t>(lane);
      if (busy[l].exchange(true)) shared = true;
      if (last[l] >= i) out_of_order = true;
      last[l] = i;
      ++runs[static_cast<size_t>(i)];
      busy[l] = false;
    });
    EXPECT_FALSE(shared);
    EXPECT_FALSE(out_of_order);
    for (const auto& run : runs) ASSERT_EQ(run, 1);
  }
}

TEST_P(Pools, NestedCallsEnd) {
  const auto executor = pool(GetParam());
  std::atomic<int> leaves = 0;
  for (int round = 0; round < 20; ++round) {
    parallel_for(*executor, GetParam(), [&](int) {
      parallel_for(*executor, GetParam(), [&](int) { parallel_for(*executor, GetParam(), [&](int) { ++leaves; }); });
    });
  }
  EXPECT_EQ(leaves, 20 * GetParam() * GetParam() * GetParam());
}

TEST_P(Pools, ManyCallersAtOnce) {
  const auto executor = pool(GetParam());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 60; ++round) wrong += sum_on(*executor) != kSum;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(Pools, ThreadsStartLateAndEndWithThePool) {
  const int before = num_threads_of_process();
  auto executor = pool(GetParam());
  EXPECT_EQ(num_threads_of_process(), before);
  sum_on(*executor);
  EXPECT_EQ(num_threads_of_process(), before + GetParam() - 1);
  executor.reset();
  EXPECT_TRUE(num_threads_falls_to(before));
}

TEST(Threads, IdleThreadsSleep) {
  const auto executor = pool(4);
  sum_on(*executor);
  timespec start{}, end{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  const double cpu_ms =
      1e3 * static_cast<double>(end.tv_sec - start.tv_sec) + 1e-6 * static_cast<double>(end.tv_nsec - start.tv_nsec);
  EXPECT_LT(cpu_ms, 50);  // three spinning threads would take 200 or more
}

TEST(Threads, SizesOutOfRangeAreClamped) {
  EXPECT_EQ(pool(0)->num_threads(), 1);
  EXPECT_EQ(pool(-5)->num_threads(), 1);
  EXPECT_EQ(pool(1 << 30)->num_threads(), kMaxThreads);
}

TEST(Threads, OneThreadIsTheCallersOwnInOrder) {
  const auto executor = pool(1);
  std::vector<int64_t> order;
  run_tasks(*executor, 5, [&](int64_t i, int lane) {
    EXPECT_EQ(lane, 0);
    order.push_back(i);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(Threads, AHostThatRunsAllOnOneThreadIsFine) {
  class Serial final : public Executor {
   public:
    int num_threads() const override { return 3; }
    void parallel_for(int count, void (*body)(void*, int), void* context) override {
      for (int i = count - 1; i >= 0; --i) body(context, i);
    }
  } serial;
  EXPECT_EQ(sum_on(serial), kSum);
}

TEST(Threads, WorkersTakeTheCallersRounding) {
  const auto executor = pool(3);
  for (const int mode : {FE_UPWARD, FE_TONEAREST, FE_DOWNWARD}) {
    std::atomic<int> inside = 0, wrong = 0;
    ASSERT_EQ(fesetround(mode), 0);
    parallel_for(*executor, 3, [&](int) {
      ++inside;
      while (inside < 3) std::this_thread::yield();
      wrong += fegetround() != mode;
    });
    EXPECT_EQ(fegetround(), mode);
    fesetround(FE_TONEAREST);
    EXPECT_EQ(wrong, 0);
  }
}

TEST(Threads, WorkersLeaveSignalsToTheHost) {
  const auto executor = pool(3);
  const pthread_t caller = pthread_self();
  std::atomic<int> inside = 0, wrong = 0;
  parallel_for(*executor, 3, [&](int) {
    ++inside;
    while (inside < 3) std::this_thread::yield();
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    const bool worker = pthread_equal(pthread_self(), caller) == 0;
    wrong += (sigismember(&blocked, SIGINT) == 1) != worker || sigismember(&blocked, SIGSEGV) == 1;
  });
  EXPECT_EQ(wrong, 0);
}

// Whether `work` gives true in a forked child within a second (ten where a sanitizer slows everything).
template <class Work>
testing::AssertionResult in_child(const Work& work) {
  const unsigned seconds = under_address_sanitizer() ? 10 : 1;
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGALRM, SIG_DFL);
    alarm(seconds);
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) return testing::AssertionFailure() << "waitpid failed";
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return testing::AssertionFailure() << "the child hangs";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "wait status " << status;
}

// The address sanitizer of GCC 12 does not hold its allocator's locks across fork(): a thread that is just starting (it
// allocates there, inside the sanitizer) leaves one locked in the child for ever. So under it, and only there, the
// threads of `executor` have all started before the process forks.
void start_fully(Executor& executor) {
  if (!under_address_sanitizer()) return;
  std::atomic<int> inside = 0;
  parallel_for(executor, executor.num_threads(), [&](int) {
    ++inside;
    while (inside < executor.num_threads()) std::this_thread::yield();
  });
}

class Fork : public testing::Test {
 protected:
  void SetUp() override {
    if (under_thread_sanitizer()) GTEST_SKIP() << "ThreadSanitizer cannot start threads in a forked child";
  }
};

TEST_F(Fork, TheChildStartsItsOwnThreads) {
  const auto executor = pool(3);
  ASSERT_EQ(sum_on(*executor), kSum);
  start_fully(*executor);
  EXPECT_TRUE(in_child([&] {
    if (num_threads_of_process() != 1) return false;
    for (int round = 0; round < 50; ++round) {
      if (sum_on(*executor) != kSum) return false;
    }
    return num_threads_of_process() == 3;
  }));
  EXPECT_EQ(sum_on(*executor), kSum);
}

TEST_F(Fork, BeforeFirstUse) {
  const auto executor = pool(3);
  EXPECT_TRUE(in_child([&] { return sum_on(*executor) == kSum; }));
  EXPECT_EQ(sum_on(*executor), kSum);
}

TEST_F(Fork, ChildrenOfChildren) {
  const auto executor = pool(3);
  ASSERT_EQ(sum_on(*executor), kSum);
  start_fully(*executor);
  EXPECT_TRUE(in_child([&] {
    if (sum_on(*executor) != kSum) return false;
    start_fully(*executor);
    return in_child([&] { return sum_on(*executor) == kSum; }) && sum_on(*executor) == kSum;
  }));
}

TEST_F(Fork, WhileOtherThreadsCompute) {
  const auto executor = pool(4);
  std::atomic<bool> stop = false;
  std::atomic<int> wrong = 0, running = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 2; ++c) {
    callers.emplace_back([&] {
      ++running;
      while (!stop) wrong += sum_on(*executor) != kSum;
    });
  }
  while (running < 2) std::this_thread::yield();
  start_fully(*executor);
  bool well = true;
  for (int round = 0; round < 300 && well; ++round) {
    const testing::AssertionResult child = in_child([&] { return sum_on(*executor) == kSum; });
    EXPECT_TRUE(child) << "round " << round;
    well = child;
  }
  stop = true;
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// The parent's only worker is busy, so that a job with an index left lies in the list when the process forks.
TEST_F(Fork, TheChildForgetsTheParentsJobs) {
  const auto executor = pool(2);
  std::atomic<bool> release = false;
  std::atomic<int> entered = 0, left_over = 0;
  auto wait = [&] {
    ++entered;
    while (!release) std::this_thread::yield();
  };
  std::thread first([&] { parallel_for(*executor, 2, [&](int) { wait(); }); });
  while (entered < 2) std::this_thread::yield();
  std::thread second([&] {
    volatile char depth[1 << 16];  // keeps the job intact where the child gives this stack to a new thread
    depth[0] = 0;
    static_cast<void>(depth[0]);
    parallel_for(*executor, 2, [&](int i) {
      if (i == 0) return wait();
      ++left_over;
    });
  });
  while (entered < 3) std::this_thread::yield();
  EXPECT_TRUE(in_child([&] {
    std::atomic<int> inside = 0;
    parallel_for(*executor, 2, [&](int) {
      ++inside;
      while (inside < 2) std::this_thread::yield();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for the worker to look for more
    return left_over == 0;
  }));
  release = true;
  first.join();
  second.join();
  EXPECT_EQ(left_over, 1);
}

// The status that `child` ends with; -1 if it has to be killed. A thread of the pool's lets no alarm through.
int status_of(pid_t child) {
  for (int wait_ms = 0; wait_ms < 10000; ++wait_ms) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return -1;
}

// body(0) forks, on the caller's thread: once while another index runs and one is left, once while all others run.
TEST_F(Fork, InsideABodyOnTheCallersThread) {
  for (const int count : {3, 2}) {
    const auto executor = pool(2);
    const pid_t parent = getpid();
    std::atomic<int> entered = 0, ended = 0;
    std::atomic<pid_t> child = -1;
    parallel_for(*executor, count, [&](int i) {
      if (i == 0) {
        while (entered == 0) std::this_thread::yield();
        child = fork();
        if (child == 0) entered = 1000;  // what is left does not wait
      }
      ++entered;
      while (i != 0 && child == -1 && entered < 1000) std::this_thread::yield();
      ++ended;
    });
    if (getpid() != parent) {
      const bool rest_ran = ended == count - 1;  // all but the index that ran on the lost thread
      _exit(rest_ran && sum_on(*executor) == kSum && num_threads_of_process() == 2 ? 0 : 1);
    }
    EXPECT_EQ(ended, count);
    EXPECT_EQ(status_of(child), 0) << count << " indices";
    EXPECT_EQ(sum_on(*executor), kSum);
  }
}

TEST_F(Fork, InsideABodyOnAThreadOfThePool) {
  const auto executor = pool(2);
  std::atomic<pid_t> child = -1;
  parallel_for(*executor, 2, [&](int i) {
    if (i == 1) {
      child = fork();
      in_forked_child = child == 0;
    }
    while (child == -1) std::this_thread::yield();
  });
  EXPECT_EQ(status_of(child), 0);
  EXPECT_EQ(sum_on(*executor), kSum);
}

TEST_F(Fork, TheChildMayDeleteThePool) {
  auto executor = pool(3);
  ASSERT_EQ(sum_on(*executor), kSum);
  start_fully(*executor);
  EXPECT_TRUE(in_child([&] {
    executor.reset();
    return sum_on(*pool(2)) == kSum;
  }));
}

TEST_F(Fork, TheDefaultPoolAndAFullExit) {
  ASSERT_EQ(sum_on(default_executor()), kSum);
  start_fully(default_executor());
  EXPECT_TRUE(in_child([]() -> bool {
    if (sum_on(default_executor()) != kSum) return false;
    exit(0);  // static destructors and exit handlers, in a process that has lost the parent's threads
  }));
  EXPECT_TRUE(in_child([]() -> bool { exit(0); }));
}

TEST_F(Fork, CodeThatRunsAfterThePoolHasStopped) {
  EXPECT_TRUE(in_child([]() -> bool {
    std::atexit([] { _exit(sum_on(default_executor()) == kSum ? 0 : 1); });  // runs last: the pool is made after it
    sum_on(*new_thread_pool(3));                                             // never deleted
    std::atexit([] {});
    exit(2);
  }));
}

TEST(Unload, AClosedLibraryLeavesNoThreadAndNoForkHandler) {
  const int before = num_threads_of_process();
  for (int round = 0; round < 3; ++round) {
    void* library = dlopen(POLYHEAD_THREADS_MODULE, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    auto executor = reinterpret_cast<Executor& (*)()>(dlsym(library, "_ZN8polyhead16default_executorEv"));
    ASSERT_NE(executor, nullptr);
    std::atomic<int> runs = 0;
    auto body = [](void* context, int) { ++*static_cast<std::atomic<int>*>(context); };
    executor().parallel_for(executor().num_threads(), body, &runs);
    EXPECT_EQ(runs, executor().num_threads());
    ASSERT_EQ(dlclose(library), 0);
    EXPECT_TRUE(num_threads_falls_to(before));
    EXPECT_EQ(dlopen(POLYHEAD_THREADS_MODULE, RTLD_NOW | RTLD_NOLOAD), nullptr);
    EXPECT_TRUE(in_child([] { return true; }));
  }
}

}  // namespace
}  // namespace polyhead
