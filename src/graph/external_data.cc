#include "graph/external_data.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "core/sentence.h"
#include "graph/onnx_fields.h"
#include "graph/wire.h"

namespace polyhead::graph {
namespace {

constexpr uint64_t kMostRead = 64 << 10;                  // what larger tensors hold is nothing that fusion asks for
constexpr uint64_t kMostBytes = (uint64_t{1} << 31) - 1;  // a message of protocol buffers is no larger

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int operator*() const { return number_; }

 private:
  int number_;
};

std::string quoted(std::string_view text) {
  constexpr size_t kLongest = 120;
  std::string shown = "\"";
  for (char c : text.substr(0, kLongest)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  return shown + (text.size() > kLongest ? "...\"" : "\"");
}

std::optional<uint64_t> count_of(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Opens a path below `folder`, name by name, each without following a link.
Result<Descriptor> open_below(const std::string& folder, const std::string& location) {
  Descriptor at(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::string_view rest = location;
  while (true) {
    const size_t slash = rest.find('/');
    const std::string name(rest.substr(0, slash));
    const bool last = slash == std::string_view::npos;
    if (name == "." && !last) {
      rest.remove_prefix(slash + 1);
      continue;
    }
    if (name.empty() || name == "." || name == ".." || name.find('\0') != std::string::npos) {
      return invalid(sentence("its external data is at ", quoted(location),
                              ", must be a path of plain names below the model's folder"));
    }
    const int flags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (last ? 0 : O_DIRECTORY);
    Descriptor next(::openat(*at, name.c_str(), flags));
    if (*next < 0) {
      const bool link = errno == ELOOP || (errno == ENOTDIR && !last);
      return invalid(sentence("its external data ", quoted(location),
                              " cannot be opened: ", link ? "a symbolic link or no folder" : std::strerror(errno)));
    }
    if (last) return next;
    at = std::move(next);
    rest.remove_prefix(slash + 1);
  }
}

Status read_at(int descriptor, uint64_t offset, std::string& out) {
  for (size_t done = 0; done < out.size();) {
    const ssize_t got = ::pread(descriptor, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return invalid(got < 0 ? std::strerror(errno) : "the file became shorter");
    done += static_cast<size_t>(got);
  }
  return {};
}

}  // namespace

void add_entry(ExternalPlace& place, std::string_view entry) {
  std::string_view key, value;
  FieldReader reader(entry);
  for (Field field; reader.next(field);) {
    if (field.is(onnx::entry::kKey, Wire::kBytes)) key = field.bytes;
    if (field.is(onnx::entry::kValue, Wire::kBytes)) value = field.bytes;
  }
  if (key == "location") place.location = value;
  if (key != "offset" && key != "length") return;
  const auto count = count_of(value);
  if (!count) {
    place.problem = sentence("the ", key, " of its external data is ", quoted(value), ", must be a number of bytes");
  } else if (key == "offset") {
    place.offset = *count;
  } else {
    place.length = *count;
  }
}

Result<std::string> read_external(const ExternalPlace& place, const std::string& folder, uint64_t size) {
  if (!place.problem.empty()) return invalid(place.problem);
  if (folder.empty()) return invalid("its data is in another file, which cannot be found from bytes alone");
  const auto file = open_below(folder, place.location);
  if (!file.ok()) return file.status();
  struct stat facts {};
  if (::fstat(**file, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    return invalid(sentence("its external data ", quoted(place.location), " is not a regular file"));
  }
  const auto there = static_cast<uint64_t>(facts.st_size);
  if (place.offset > there || size > there - place.offset) {
    return invalid(sentence("its external data is at byte ", place.offset, " of ", quoted(place.location), " and has ",
                            size, " bytes; the file has ", there));
  }
  std::string data(size <= kMostRead ? size : 0, '\0');
  if (Status status = read_at(**file, place.offset, data); !status.ok()) {
    return invalid(sentence("its external data ", quoted(place.location), ": ", status.message()));
  }
  return data;
}

Result<std::string> read_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (*file < 0) return invalid(sentence("cannot open ", quoted(path), ": ", std::strerror(errno)));
  struct stat facts {};
  if (::fstat(*file, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    return invalid(sentence(quoted(path), " is not a regular file"));
  }
  if (static_cast<uint64_t>(facts.st_size) > kMostBytes) {
    return invalid(sentence(quoted(path), " has ", static_cast<int64_t>(facts.st_size), " bytes; a model has at most ",
                            kMostBytes, ", and keeps what is more in external data"));
  }
  std::string bytes(static_cast<size_t>(facts.st_size), '\0');
  if (Status status = read_at(*file, 0, bytes); !status.ok()) {
    return invalid(sentence("cannot read ", quoted(path), ": ", status.message()));
  }
  return bytes;
}

}  // namespace polyhead::graph
