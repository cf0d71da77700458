// What a test leaves out, counted by its reason and printed when the program ends.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>

#include "polyhead/status.h"

namespace polyhead::testing {

class LeftOut : public ::testing::Environment {
 public:
  void add(const std::string& reason) { ++cases_[reason]; }

  void TearDown() override {
    for (const auto& [reason, count] : cases_) std::printf("left out, %d times: %s\n", count, reason.c_str());
  }

 private:
  std::map<std::string, int> cases_;
};

inline LeftOut& left_out() {
  static auto& list =
      *static_cast<LeftOut*>(::testing::AddGlobalTestEnvironment(new LeftOut));  // GoogleTest deletes it
  return list;
}

// Whether a kernel's `why_not` leaves something out.
inline bool refuses(const char* kernel, const std::string& why) {
  if (!why.empty()) left_out().add(std::string(kernel) + ": " + why);
  return !why.empty();
}

// Whether what was to be made on a kernel by name is left out, because that kernel does not take it.
inline bool refused(const Status& status) {
  if (status.code() != StatusCode::kUnsupported) return false;
  left_out().add(status.message());
  return true;
}

}  // namespace polyhead::testing
