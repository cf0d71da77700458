// torch's autograd as a witness: tools/mha_torch.py in a child process, which computes the exact results once more.
#pragma once

#include <sys/types.h>

#include <string>

#include "layer_truth.h"
#include "mha_operands.h"
#include "mha_problem.h"
#include "verify.h"

namespace polyhead::tools {

class Autograd {
 public:
  // Runs `python`, found as a shell would. Without torch there: an Autograd that is not there() and says why.
  static Result<Autograd> start(const std::string& python);

  Autograd(Autograd&& other) noexcept;
  ~Autograd();

  bool there() const { return there_; }
  const std::string& version() const { return version_; }  // "torch 2.8.0", or why it is not there

  // Whether `exact` are the results that autograd gives for the operands.
  Result<Verdict> check(const MhaProblem& problem, const Layer& layer, const MhaOperands& operands,
                        const LayerNumbers& numbers, const LayerTruth& truth);

 private:
  Autograd() = default;
  Status send(const std::string& line) const;
  Result<std::string> receive();

  pid_t child_ = -1;
  int socket_ = -1;     // the child's stdin and stdout
  std::string unread_;  // what came behind the last line
  std::string folder_;  // of the file that both look at
  bool there_ = false;
  std::string version_;
};

}  // namespace polyhead::tools
