#include "file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace polyhead::tools {
namespace {

Status failed(std::string_view what, const std::string& path) {
  return {StatusCode::kInvalidArgument, fmt::format("cannot {} {}: {}", what, printable(path), std::strerror(errno))};
}

Status exists_already(const std::string& path) {
  return {StatusCode::kInvalidArgument, fmt::format("{} exists already; --force replaces it", printable(path))};
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kLongest = 120;
  std::string shown = "'";
  for (char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '\'' || c == '\\') {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += c;
    }
  }
  return shown + (text.size() > kLongest ? "...'" : "'");
}

Result<InputFile> InputFile::open(const std::string& path) {
  InputFile file;
  file.descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.descriptor_ < 0) return failed("open", path);
  struct stat facts {};
  if (fstat(file.descriptor_, &facts) != 0) return failed("read", path);
  if (!S_ISREG(facts.st_mode)) {
    return Status(StatusCode::kInvalidArgument, printable(path) + " is not a regular file");
  }
  file.size_bytes_ = static_cast<uint64_t>(facts.st_size);
  return file;
}

InputFile::InputFile(InputFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), size_bytes_(other.size_bytes_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status InputFile::read_at(uint64_t offset, void* out, size_t count) const {
  auto* to = static_cast<char*>(out);
  while (count > 0) {
    const ssize_t got = ::pread(descriptor_, to, count, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return {StatusCode::kInvalidArgument, fmt::format("cannot read: {}", std::strerror(errno))};
    if (got == 0) {
      return {StatusCode::kInvalidArgument, fmt::format("file ends at byte {}, {} more expected", offset, count)};
    }
    to += got;
    count -= static_cast<size_t>(got);
    offset += static_cast<uint64_t>(got);
  }
  return {};
}

Status check_may_write(const std::string& path, bool overwrite) {
  struct stat facts {};
  if (lstat(path.c_str(), &facts) != 0) return {};
  if (!overwrite) return exists_already(path);
  if (S_ISREG(facts.st_mode) || S_ISLNK(facts.st_mode)) return {};
  return {StatusCode::kInvalidArgument, printable(path) + " is not a regular file and will not be replaced"};
}

Result<OutputFile> OutputFile::create(const std::string& path, bool overwrite) {
  if (Status s = check_may_write(path, overwrite); !s.ok()) return s;
  OutputFile file;
  file.path_ = path;
  file.overwrite_ = overwrite;
  for (int attempt = 0; file.descriptor_ < 0; ++attempt) {
    file.temporary_ = fmt::format("{}.{}.{}.tmp", path, getpid(), attempt);
    file.descriptor_ = ::open(file.temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (file.descriptor_ < 0 && (errno != EEXIST || attempt == 100)) return failed("create", file.temporary_);
  }
  return file;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      overwrite_(other.overwrite_),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

Status OutputFile::write(const void* data, size_t count) {
  const auto* from = static_cast<const char*>(data);
  while (count > 0) {
    const ssize_t put = ::write(descriptor_, from, count);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return failed("write", temporary_);
    from += put;
    count -= static_cast<size_t>(put);
  }
  return {};
}

Status OutputFile::commit() {
  if (::fsync(descriptor_) != 0) return failed("write", temporary_);
  // link() never replaces a file that appeared meanwhile; where a file system has no links, the check above must do.
  const bool linked = !overwrite_ && ::link(temporary_.c_str(), path_.c_str()) == 0;
  if (!overwrite_ && !linked && errno == EEXIST) return exists_already(path_);
  if (linked) {
    ::unlink(temporary_.c_str());
  } else if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return failed("create", path_);
  }
  ::close(std::exchange(descriptor_, -1));
  return {};
}

}  // namespace polyhead::tools
