#include "mha_torch.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "array.h"
#include "file.h"
#include "mha_files.h"
#include "safetensors.h"
#include "tools/mha_torch_script.h"  // kMhaTorchScript
#include "words.h"

namespace polyhead::tools {
namespace {

constexpr time_t kPatienceSeconds = 600;  // for one answer
constexpr double kAllowed = 1e-10;        // ALLOWED of mha_torch.py

Status failed(std::string_view what) {
  return {StatusCode::kInvalidArgument, fmt::format("cannot {}: {}", what, std::strerror(errno))};
}

// A view of numbers, all in float64.
Tensor float64_view(const Numbers& numbers) {
  Tensor tensor = *view_of(numbers.dims, DType::kFloat64, /*column_major=*/false);
  tensor.data = const_cast<double*>(numbers.values.data());
  return tensor;
}

Result<std::string> new_folder() {
  std::error_code error;
  std::string name = (std::filesystem::temp_directory_path(error) / "polyhead_mha_XXXXXX").string();
  if (error || mkdtemp(name.data()) == nullptr) return failed("make a temporary folder");
  return name;
}

// Starts `python` on the script, with `socket` as its stdin and stdout.
Result<pid_t> spawn(const std::string& python, int socket) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, socket, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, socket, STDOUT_FILENO);
  std::string name = python, command = "-c", script = kMhaTorchScript;
  char* const arguments[] = {name.data(), command.data(), script.data(), nullptr};
  pid_t child = -1;
  const int error = posix_spawnp(&child, python.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return invalid(fmt::format("cannot run {}: {}", printable(python), std::strerror(error)));
  return child;
}

}  // namespace

Result<Autograd> Autograd::start(const std::string& python) {
  Autograd autograd;
  int sockets[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) return failed("make a socket");
  autograd.socket_ = sockets[0];
  const timeval patience = {kPatienceSeconds, 0};
  setsockopt(autograd.socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const auto child = spawn(python, sockets[1]);
  ::close(sockets[1]);
  if (!child.ok()) {
    autograd.version_ = child.status().message();
    return autograd;
  }
  autograd.child_ = *child;
  const auto greeting = autograd.receive();
  autograd.version_ = greeting.ok() ? *greeting : greeting.status().message();
  autograd.there_ = autograd.version_.rfind("torch ", 0) == 0;
  if (!autograd.there_) return autograd;
  auto folder = new_folder();
  if (!folder.ok()) return folder.status();
  autograd.folder_ = std::move(*folder);
  return autograd;
}

Autograd::Autograd(Autograd&& other) noexcept
    : child_(std::exchange(other.child_, -1)),
      socket_(std::exchange(other.socket_, -1)),
      unread_(std::move(other.unread_)),
      folder_(std::exchange(other.folder_, "")),
      there_(other.there_),
      version_(std::move(other.version_)) {}

// The end of its stdin ends the child.
Autograd::~Autograd() {
  if (socket_ >= 0) ::close(socket_);
  if (child_ > 0) {
    while (waitpid(child_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

Status Autograd::send(const std::string& line) const {
  size_t sent = 0;
  while (sent < line.size()) {
    const ssize_t count = ::send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return failed("ask torch");
    sent += static_cast<size_t>(count);
  }
  return {};
}

Result<std::string> Autograd::receive() {
  while (true) {
    if (const size_t end = unread_.find('\n'); end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    char chunk[4096];
    const ssize_t count = ::recv(socket_, chunk, sizeof chunk, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return failed("hear from torch");
    if (count == 0) return invalid("python ended without an answer");
    unread_.append(chunk, static_cast<size_t>(count));
  }
}

Result<Verdict> Autograd::check(const MhaProblem& problem, const Layer& layer, const MhaOperands& operands,
                                const LayerNumbers& numbers, const LayerTruth& truth) {
  const auto kept = kept_by_dropout(problem, layer, operands);
  if (!kept.ok()) return kept.status();
  NamedTensors tensors = input_tensors(operands, *kept);
  const NamedTensors weights = weight_tensors(operands.args.weights);
  tensors.insert(tensors.end(), weights.begin(), weights.end());
  for (size_t kind = 0; kind < kNumWeightKinds; ++kind) {
    const Numbers& before = numbers.grad_weights[kind];
    if (before.given()) tensors.emplace_back(std::string("before.") + kWeightFields[kind].name, float64_view(before));
  }
  for (size_t n = 0; n < kNumLayerResults; ++n) {
    if (!truth.exact[n].given()) continue;
    tensors.emplace_back(std::string("exact.") + kLayerResultNames[n], float64_view(truth.exact[n]));
    tensors.emplace_back(std::string("magnitude.") + kLayerResultNames[n], float64_view(truth.magnitude[n]));
  }
  const std::string file = folder_ + "/problem.safetensors";
  if (Status s = write_safetensors(file, tensors, /*overwrite=*/true); !s.ok()) return s;
  nlohmann::json request;
  request["file"] = file;
  request["problem"] = nlohmann::json::parse(mha_json(problem, layer));
  if (Status s = send(request.dump() + "\n"); !s.ok()) return s;
  const auto answer = receive();
  if (!answer.ok()) return answer.status();
  Verdict verdict{"float64 results", 0, kAllowed, answer->rfind("ok ", 0) == 0, ""};
  if (verdict.passed) {
    verdict.error = parse_number<double>(std::string_view(*answer).substr(3)).value_or(0);
  } else {
    verdict.error = NAN;
    verdict.fault = *answer;
  }
  return verdict;
}

}  // namespace polyhead::tools
