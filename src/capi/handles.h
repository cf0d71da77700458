// What the functions of plans, layers and blocks have in common: they make a handle, ask it something, run a call on it.
#pragma once

#include <utility>

#include "capi/last_error.h"
#include "capi/tables.h"
#include "polyhead/layer.h"

// The handle behind a layer, and a block's own.
struct polyhead_layer {
  polyhead::Layer layer;
};

namespace polyhead::capi {

// `options` may be null: the defaults.
inline Status translate(const polyhead_plan_options* options, PlanOptions* to) {
  return options != nullptr ? translate(options, {"options"}, to) : Status();
}

// `name` is what sentences call a handle; make(desc, options) gives what one of Handle begins with, as a Result.
template <class Handle, class Desc, class Make>
polyhead_status create(const Desc* desc, const polyhead_plan_options* options, const char* name, Handle** handle,
                       Make make) {
  return guarded([&]() -> Status {
    if (Status s = need(handle, name); !s.ok()) return s;
    *handle = nullptr;
    if (Status s = need(desc, "desc"); !s.ok()) return s;
    typename Table<Desc>::Cpp checked;
    PlanOptions chosen;
    if (Status s = translate(desc, {"desc"}, &checked); !s.ok()) return s;
    if (Status s = translate(options, &chosen); !s.ok()) return s;
    auto made = make(checked, chosen);
    if (!made.ok()) return made.status();
    *handle = new Handle{std::move(*made)};
    return {};
  });
}

// What `handle` tells; of a null handle `otherwise`.
template <class Handle, class Told, class Tell>
Told ask(const Handle* handle, const char* name, Told otherwise, Tell tell) {
  if (guarded([&] { return need(handle, name); }) != POLYHEAD_OK) return otherwise;
  return tell(*handle);
}

// run(handle, args), which returns a Status.
template <class Handle, class Args, class Run>
polyhead_status call(const Handle* handle, const char* name, const Args* args, Run run) {
  return guarded([&]() -> Status {
    if (Status s = need(handle, name); !s.ok()) return s;
    if (Status s = need(args, "args"); !s.ok()) return s;
    typename Table<Args>::Cpp tensors;
    if (Status s = translate(args, {"args", "args"}, &tensors); !s.ok()) return s;
    if constexpr (requires { tensors.join(); }) tensors.join();
    return run(*handle, tensors);
  });
}

// Weights prepacked by `pack(handle, weights, prepacked, bytes)`.
template <class Handle, class Weights, class Pack>
polyhead_status pack(const Handle* handle, const char* name, const Weights* weights, void* prepacked, size_t bytes,
                     Pack pack) {
  return guarded([&]() -> Status {
    if (Status s = need(handle, name); !s.ok()) return s;
    if (Status s = need(weights, "weights"); !s.ok()) return s;
    typename Table<Weights>::Cpp tensors;
    if (Status s = translate(weights, kWeights, &tensors); !s.ok()) return s;
    return pack(*handle, tensors, prepacked, bytes);
  });
}

}  // namespace polyhead::capi
