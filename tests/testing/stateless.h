// A kernel's functions are plain pointers; tests want kernels that differ in what they do wrong.
#pragma once

#include <type_traits>
#include <utility>

#include "polyhead/status.h"

namespace polyhead::testing {

// The last kCount functions of one type that a test asked for, each with a place of its own.
template <class... Args>
class Stateless {
 public:
  using Function = void (*)(const Args&...);
  using WithStatus = Status (*)(const Args&...);

  static WithStatus with_status(Function function) { return next(function, std::make_integer_sequence<int, kCount>()); }

 private:
  static constexpr int kCount = 8;
  static inline Function functions_[kCount];
  static inline int used_ = 0;

  template <int kPlace>
  static Status call(const Args&... args) {
    functions_[kPlace](args...);
    return {};
  }
  template <int... kPlace>
  static WithStatus next(Function function, std::integer_sequence<int, kPlace...>) {
    static constexpr WithStatus kCalls[] = {call<kPlace>...};
    const int place = used_++ % kCount;
    functions_[place] = function;
    return kCalls[place];
  }
};

// `function` as a kernel has it: with a Status, which is ok.
template <class... Args>
Status (*with_status(void (*function)(const Args&...)))(const Args&...) {
  return Stateless<Args...>::with_status(function);
}

}  // namespace polyhead::testing
