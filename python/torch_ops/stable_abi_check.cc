// Compiles only if stable_abi.h declares what torch's headers declare: extern "C" functions cannot be overloaded.
#include <torch/csrc/stable/c/shim.h>

#include "stable_abi.h"
