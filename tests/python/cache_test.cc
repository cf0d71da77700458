// Plans and blocks of calls from Python, remembered.
#include "cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace polyhead::python {
namespace {

using Strings = Cache<int, std::string, std::hash<int>>;

template <class Make>
Result<std::shared_ptr<const std::string>> get(Strings& cache, int key, Make make) {
  return cache.get([&](int last) { return last == key; }, [&] { return key; }, make);
}

TEST(Cache, NoCallWaitsWhileAnotherIsMade) {
  Strings cache(8);
  std::promise<void> making, may_end;
  std::thread slow([&] {
    const auto made = get(cache, 1, [&]() -> Result<std::string> {
      making.set_value();
      may_end.get_future().wait();
      return std::string("slow");
    });
    EXPECT_EQ(**made, "slow");
  });
  making.get_future().wait();
  auto quick = std::async(std::launch::async, [&] {
    return **get(cache, 2, []() -> Result<std::string> { return std::string("quick"); });
  });
  const auto status = quick.wait_for(std::chrono::seconds(30));
  may_end.set_value();
  slow.join();
  EXPECT_EQ(status, std::future_status::ready) << "it waited for the lock";
  EXPECT_EQ(quick.get(), "quick");
}

TEST(Cache, OfThoseMadeAtOnceOneStays) {
  Strings cache(8);
  constexpr int kThreads = 8;
  std::atomic<int> started = 0;
  std::vector<std::shared_ptr<const std::string>> got(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      got[i] = *get(cache, 1, [&]() -> Result<std::string> {
        ++started;
        while (started < kThreads) std::this_thread::yield();
        return std::to_string(i);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& each : got) EXPECT_EQ(each, got[0]);
}

TEST(Cache, KeepsNoMoreThanItMay) {
  Strings cache(4);
  int made = 0;
  const auto ask = [&](int key) {
    return **get(cache, key, [&]() -> Result<std::string> { return std::to_string(++made); });
  };
  for (const int key : {1, 2, 3, 4, 1, 2, 4, 3}) ask(key);
  EXPECT_EQ(made, 4);
  EXPECT_EQ(ask(5), "5");  // all others are forgotten
  EXPECT_EQ(ask(1), "6");
}

TEST(Cache, ErrorsAreNotRemembered) {
  Strings cache(4);
  const auto refused = get(cache, 1, []() -> Result<std::string> { return Status(StatusCode::kUnsupported, "no"); });
  EXPECT_EQ(refused.status().message(), "no");
  EXPECT_EQ(**get(cache, 1, []() -> Result<std::string> { return std::string("yes"); }), "yes");
}

}  // namespace
}  // namespace polyhead::python
