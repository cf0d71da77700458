// A block: a norm before or after f, which is the layer or the feed-forward part.
//   pre-norm:   n = norm(x)   y = x + f(n)          z = x + f(x)   y = norm(z)   :post-norm
// Saved for backward: z, and the norm's statistics, beside what f saves; n is computed once more.
#pragma once

#include <vector>

#include "layer/module.h"
#include "polyhead/block.h"

namespace polyhead {

// What f reads and writes: out = residual + f(in).
struct InnerPlaces {
  Place in, out, residual;
  Place grad_out, grad_in;
  Place grad_past;  // is added to grad_in: what comes past f and past no norm; nowhere, if nothing does
};

struct NormBlock : Module {
  NormDesc norm;
  bool residual = false;
  int64_t batch = 0, beam = 1, seqlen = 0, size = 0;  // of what is normed
  // Of f's backward: it reads `in` only if one of these is asked for (0: always), and may write grad_in over it.
  ArgumentSet in_wanted_by = 0;
  bool grad_in_over_in = false;

  bool pre() const { return norm.kind != NormKind::kNone && norm.pre; }
  bool post() const { return norm.kind != NormKind::kNone && !norm.pre; }

  void emit(Pass pass, Memory& workspace, Memory& reserve, StepList* list) const final;
  // Of f: what it is given, with gamma and beta between, and its steps.
  virtual void expect(Pass pass, StepList* list) const = 0;
  virtual void emit_inner(Pass pass, const InnerPlaces& f, Memory& workspace, Memory& reserve,
                          std::vector<Step>* steps) const = 0;
};

}  // namespace polyhead
