// How errors travel: a code and one sentence. The library throws nothing, prints nothing and never aborts.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace polyhead {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,  ///< the caller's sizes, types, strides or pointers do not make sense
  kUnsupported = 2,      ///< well formed, but no kernel (or not the forced one) can compute it
  kOutOfMemory = 3,      ///< memory ran out while a plan was made
  kInternal = 4,         ///< a defect of the library
};

/// The outcome of a call. Default: success. `message` names the argument, what was expected and what came.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: `status` must not be ok

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  /// The value; only when ok().
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace polyhead
