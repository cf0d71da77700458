// Whether a model that was rewritten computes what it did: both run in ONNX Runtime on the same inputs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "polyhead/status.h"
#include "report.h"

namespace polyhead::tools {

struct FuseCheck {
  bool asked = false;
  std::string library;             // ONNX Runtime's; "": the one that the system's loader finds
  std::string inputs;              // a .safetensors with all of them; "": random ones
  std::vector<std::string> sizes;  // "NAME=SIZE", of dims that the model only names
  std::optional<double> tolerance;
};

// A row of `report` for each output in each set of inputs. True: all are the same, and some were compared. The models are the
// bytes of files whose tensors in other files lie in `folder`.
Result<bool> check_fused(const FuseCheck& check, const std::string& before, const std::string& after,
                         const std::string& folder, Report& report);

}  // namespace polyhead::tools
