// What a layer or a block computes, as a list of steps: products, norms, attention, copies and sums, in order. The lists
// are built once, when the layer or block is made; a call fills in its tensors and walks one of them. A list knows what
// each step reads and writes as a place, before the pointers of any call are known. How much scratch memory the steps
// need is asked of them by walking the same list (docs/decisions/0010-layers-as-steps.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <variant>
#include <vector>

#include "contract/linear.h"
#include "contract/operands.h"
#include "core/memory_size.h"
#include "layer/reserve.h"
#include "linear/prepacked.h"
#include "polyhead/attention.h"
#include "polyhead/block.h"
#include "polyhead/cache.h"

namespace polyhead {

inline constexpr int kMaxArguments = 71;  // those of all calls
inline constexpr int kMostInSets = 63;
using ArgumentSet = uint64_t;  // bit i: argument number i

// One call: its tensors, by number, with all their dims ([batch, beam, time, vector]), and its memory.
struct Call {
  Tensor tensors[kMaxArguments];
  char* workspace = nullptr;
  size_t workspace_bytes = 0;
  char* reserve = nullptr;  // null: inference
  size_t reserve_bytes = 0;
  const char* prepacked_weights = nullptr;
  size_t prepacked_weights_bytes = 0;
  bool accumulate = false;                         // add to the gradients of parameters
  int64_t step = -1;                               // of decoding; -1: all steps at once
  size_t num_captures = 0, num_grad_captures = 0;  // as given, more than the program has too
  DropoutStreams dropouts;
  Where where;

  bool any_given(ArgumentSet arguments) const {
    for (int i = 0; arguments >> i != 0; ++i) {
      if ((arguments >> i & 1) != 0 && tensors[i].given()) return true;
    }
    return false;
  }
};

// The memory of a call, and where it runs.
template <class Args>
void set_memory(const Args& args, Call* call) {
  call->workspace = static_cast<char*>(args.workspace);
  call->workspace_bytes = args.workspace_bytes;
  call->reserve = static_cast<char*>(args.reserve);
  call->reserve_bytes = args.reserve_bytes;
  call->prepacked_weights = static_cast<const char*>(args.prepacked_weights);
  call->prepacked_weights_bytes = args.prepacked_weights_bytes;
  call->where = args.where;
}

// Where a tensor of a step lies: one of the call's arguments, or a part of its workspace or reserve.
struct Place {
  enum class Room : uint8_t { kNowhere, kArgument, kWorkspace, kReserve };
  // How an argument [batch, beam, time, vector] is seen.
  enum class View : uint8_t {
    kWhole,
    kSameForHeads,  // [batch, beam, time, heads, vector]: every head sees the whole vector
    kSplit,         // [batch, beam, time, heads, dim]
    kOneStep,       // a cache [batch, beam, time, heads, dim], of which time step call.step alone
    kKept,          // a whole cache, whose one head all heads see
  };

  Room room = Room::kNowhere;
  View view = View::kWhole;
  int8_t argument = 0;
  int8_t unless = -1;    // where this argument is given, the place is `otherwise` instead
  int8_t otherwise = 0;  //   an argument
  View otherwise_view = View::kWhole;
  ArgumentSet wanted_by = 0;   // nowhere, unless one of these is given; 0: always there
  int64_t heads = 0, dim = 0;  // of kSameForHeads, kSplit and kKept
  size_t offset = 0;           // bytes from the start of workspace or reserve
  Tensor shape;                // and what lies there, without data

  bool somewhere() const { return room != Room::kNowhere || unless >= 0; }
  Place only_for(ArgumentSet arguments) const {
    Place place = *this;
    place.wanted_by = arguments;
    return place;
  }
  Place seen_as(View how, int64_t num_heads, int64_t head_dim) const {
    Place place = *this;
    place.view = place.otherwise_view = how;
    place.heads = num_heads, place.dim = head_dim;
    return place;
  }
  Place unless_given(int given, int argument_instead, View view_instead) const {
    Place place = *this;
    place.unless = static_cast<int8_t>(given);
    place.otherwise = static_cast<int8_t>(argument_instead);
    place.otherwise_view = view_instead;
    return place;
  }
};
Place argument(int number);

// Hands out places in the workspace or the reserve, and counts its bytes.
class Memory {
 public:
  explicit Memory(Place::Room room) : room_(room) {}
  Place take(DType dtype, std::initializer_list<int64_t> dims);
  // Matrices side by side: their rows have the columns of all of them. `columns`: heads * dim each.
  struct Columns {
    int64_t heads, dim;
  };
  void take_side_by_side(DType dtype, std::initializer_list<int64_t> rows, std::span<const Columns> columns,
                         Place* const* places);

  MemoryMap map;

 private:
  Place::Room room_;
};

// What a step does to its result before it is written (linear::Epilogue), in places.
struct EpiloguePlaces {
  Place bias;
  linear::Activation activation = linear::Activation::kNone;
  bool gradient = false;
  Place pre_activation;
  int dropout = -1;  // which of the call's streams; -1: none
  Place residual;
};

// y = epilogue(x w), or a gradient of it: the one that `gives` names, from those of the others.
struct ProductStep {
  enum class Gives : uint8_t {
    kY,  // epilogue(x w + bias)
    kX,  // epilogue(y w^T); adds to x, where an earlier step of the call gave the same x
    kW,  // x^T y; and the sum over tokens of y as the bias; each if it is given
  };
  Gives gives = Gives::kY;
  Place x, w, bias, y;
  EpiloguePlaces epilogue = {};
  int prepacked = -1;  // which of the prepacked matrices w is; -1: never prepacked
  bool joins = false;  // it and the product before it are one, where they have one x and lie side by side in all else
  // kW: sequences end after these lengths [batch, beam], and what x holds behind is not seen. Both: the longer one counts.
  ArgumentSet lengths = 0;
  Place copy = {};  // of x, without what is not seen
};

// y = epilogue(x), and the sums over its rows, each if it is somewhere.
struct PointwiseStep {
  Place x, y;
  EpiloguePlaces epilogue = {};
  Place sums = {};
};

struct NormStep {
  NormDesc desc;
  Place x, y, gamma, beta;
  Place mean, rstd;  // nowhere: not kept
};

struct NormBackwardStep {
  NormDesc desc;
  Place x, gamma, mean, rstd, grad_y, residual;
  Place grad_x, grad_gamma, grad_beta;  // each if it is somewhere
};

// New keys and values, to the pages of a cache, and queries turned as they are (cache/append.h). Any may not be there.
struct AppendStep {
  const KvCacheDesc* cache = nullptr;
  Place query, query_out;   // [batch, 1, time, heads, dim]; nowhere: nothing turns
  Place key, value;         // likewise
  bool same_tokens = true;  // key's are query's
  // On the host alone: what check_append() has read of this call, int64 [2, tokens] and [tokens].
  Place slots, positions;
  Place heads;  // likewise: float32 [threads, elements]
};

// Attention, beam after beam. Masks, lengths and the rest are the layer's arguments (arguments.h).
struct AttentionStep {
  const Plan* plan = nullptr;
  const AttentionDesc* asked = nullptr;  // of all time steps, where this is one step of decoding
  int64_t beams = 1;
  Place query, key, value, out, logsumexp;  // key and value nowhere: they are the pages of a cache
  Place lengths;                            // for one step of decoding: int64 [3, batch], room for StepArgs::to
};

struct AttentionBackwardStep {
  const Plan* plan = nullptr;
  int64_t beams = 1;
  Place query, key, value, out, logsumexp, grad_out;
  Place grads[3];   // of query, key and value
  Place wanted[3];  // if this is not given, that gradient is not computed; nowhere: it always is
  // Several beams add up what they share: all of this is zeros at first.
  Place::Room room = Place::Room::kNowhere;
  size_t begin = 0, end = 0;
  // Gradients of keys and values that all beams share, in 16 bits [1, rows of the matrix]: summed over beams in float32.
  Place shared, shared_sums;
};

// A copy of x [batch, beam, time, vector] with zeros after the lengths.
struct UnpadStep {
  Place x, y;
  ArgumentSet lengths = 0;
};

// to[batch, beam, time, dim] = sum over heads; adds, where an earlier step of the call gave the same tensor.
struct SumHeadsStep {
  Place from, to;
};

using Step = std::variant<ProductStep, PointwiseStep, NormStep, NormBackwardStep, AppendStep, AttentionStep,
                          AttentionBackwardStep, UnpadStep, SumHeadsStep>;

// What a call of a list is given: its tensors in the order in which they are checked, outputs last.
struct Expected {
  enum class Kind : uint8_t {
    kRequired,
    kOptional,
    kRefused,
    kUnlessPrepacked,  // required, but not looked at where prepacked weights are given
  };
  int argument = 0;
  const char* name = "";
  Role role = Role::kInput;
  Kind kind = Kind::kRequired;
  const char* refusal = "the plan was made without";
  int rows_of = -1;            // its first dim is that argument's, however many rows that has
  bool may_be_shared = false;  // an output that may be the same view as an earlier one of the same shape
  OperandShape shape = {};
};

struct StepList {
  std::vector<Expected> expected;
  std::vector<Step> steps;
  size_t scratch = 0;  // where in the workspace the memory begins that one step after the other uses
};

// What the steps of a layer or block run on.
struct Machine {
  const linear::Kernel* linear = nullptr;
  Run run;
  const PrepackedLayout* prepacked = nullptr;  // where ProductStep::prepacked are
};

// Puts the scratch memory that the steps need behind what `workspace` has handed out. False if that leaves the address
// space. `one_step`: calls of this list are of one step of decoding.
bool finish(const Machine& machine, Memory& workspace, StepList* list, bool one_step = false);

// The call has been checked.
Status run(const Machine& machine, const StepList& list, const Call& call);

}  // namespace polyhead
