#include "program/interval.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/dtype.h"

namespace polyhead::program {
namespace {

constexpr int64_t kMostScanned = 256;  // elements of a tensor that are looked at one by one

constexpr Interval kAnything{INT64_MIN, INT64_MAX, -HUGE_VAL, HUGE_VAL, true};

Interval ints(int64_t low, int64_t high) { return {low, high, 0, 0, false}; }
Interval bools(bool may_be_false, bool may_be_true) { return ints(may_be_false ? 0 : 1, may_be_true ? 1 : 0); }

// Kernels compute in float32: what they round may lie a little outside of what double tells.
Interval floats(double least, double most, bool may_be_nan) {
  const bool told = least <= most;
  const auto margin = [](double x) { return std::isfinite(x) ? std::fabs(x) * 1e-5 + 1e-30 : 0; };
  if (!told) return kAnything;
  return {0, 0, least - margin(least), most + margin(most), may_be_nan};
}

int64_t int_at(const Tensor& t, int64_t at) {
  if (t.dtype == DType::kBool) return static_cast<const uint8_t*>(t.data)[at] != 0;
  return t.dtype == DType::kInt32 ? static_cast<const int32_t*>(t.data)[at] : static_cast<const int64_t*>(t.data)[at];
}

int64_t offset_of(const Tensor& t, const int64_t (&index)[ProgramStep::kMostOperands]) {
  int64_t at = 0;
  for (int i = 0; i < t.ndim; ++i) at += index[i] * t.strides[i];
  return at;
}

// The least and the largest int of a box of a tensor.
Range scanned(const Tensor& t, const Range (&box)[ProgramStep::kMostOperands]) {
  Range found{INT64_MAX, INT64_MIN};
  int64_t index[ProgramStep::kMostOperands];
  for (int n = 0; n < t.ndim; ++n) index[n] = box[n].low;
  for (int n = 0; n >= 0;) {
    const int64_t x = int_at(t, offset_of(t, index));
    found = {std::min(found.low, x), std::max(found.high, x)};
    for (n = t.ndim - 1; n >= 0 && ++index[n] > box[n].high; --n) index[n] = box[n].low;
  }
  return found;
}

// Whether no row, along the last dim, ever falls: so do the numbers of documents that follow each other.
bool rises(const Tensor& t) {
  const int last = t.ndim - 1;
  int64_t index[ProgramStep::kMostOperands] = {};
  for (int n = 0; n >= 0;) {
    const int64_t row = offset_of(t, index);
    for (int64_t i = 1; i < t.dims[last]; ++i) {
      if (int_at(t, row + i * t.strides[last]) < int_at(t, row + (i - 1) * t.strides[last])) return false;
    }
    for (n = last - 1; n >= 0 && ++index[n] == t.dims[n]; --n) index[n] = 0;
  }
  return true;
}

Range range_of_dtype(DType dtype) {
  if (dtype == DType::kBool) return {0, 1};
  return dtype == DType::kInt32 ? Range{INT32_MIN, INT32_MAX} : Range{INT64_MIN, INT64_MAX};
}

struct Finder {
  const Call& call;
  const Region& region;
  Interval* all;

  Interval find(const Instruction& x) const {
    if (x.op == kDiagonal) return ints(region.q.low - region.k.high, region.q.high - region.k.low);
    switch (x.op) {
      case Op::kBatch: return ints(region.b.low, region.b.high);
      case Op::kHead: return ints(region.h.low, region.h.high);
      case Op::kQuery: return ints(region.q.low, region.q.high);
      case Op::kKey: return ints(region.k.low, region.k.high);
      case Op::kOffset: return ints(region.offset.low, region.offset.high);
      case Op::kConstant:
        if (x.type != ValueType::kFloat) return ints(x.integer, x.integer);
        return floats(double{x.number}, double{x.number}, false);
      case Op::kGather: return gather(x);
      case Op::kSelect: return select(all[x.operands[0]], all[x.operands[1]], all[x.operands[2]]);
      case Op::kAnd: return ints(least(x, 0) & least(x, 1), most(x, 0) & most(x, 1));
      case Op::kOr: return ints(least(x, 0) | least(x, 1), most(x, 0) | most(x, 1));
      case Op::kNot: return ints(1 - most(x, 0), 1 - least(x, 0));
      case Op::kToFloat: return floats(static_cast<double>(least(x, 0)), static_cast<double>(most(x, 0)), false);
      case Op::kToInt: return to_int(all[x.operands[0]]);
      default: break;
    }
    if (x.num_operands == 0) return kAnything;
    const Interval& a = all[x.operands[0]];
    const Interval& b = all[x.operands[x.num_operands - 1]];
    if (x.takes == ValueType::kFloat)
      return x.type == ValueType::kBool ? compare_floats(x.op, a, b) : of_floats(x.op, a, b);
    return x.type == ValueType::kBool ? compare_ints(x.op, a, b) : of_ints(x.op, a, b);
  }

  int64_t least(const Instruction& x, int n) const { return all[x.operands[n]].low; }
  int64_t most(const Instruction& x, int n) const { return all[x.operands[n]].high; }

  Interval gather(const Instruction& x) const {
    if (x.type == ValueType::kFloat || call.captures == nullptr) {
      return x.type == ValueType::kBool ? ints(0, 1) : kAnything;
    }
    const Tensor& t = call.captures[x.capture];
    const Range whole = call.ints[x.capture];
    if (t.num_elements() == 0) return ints(0, 0);
    if (t.data == nullptr) return ints(whole.low, whole.high);
    Range box[ProgramStep::kMostOperands] = {};
    int64_t count = 1;
    bool one_row = true;
    for (int n = 0; n < x.num_operands; ++n) {
      const int64_t last = t.dims[n] - 1;
      box[n] = {std::clamp<int64_t>(least(x, n), 0, last), std::clamp<int64_t>(most(x, n), 0, last)};
      one_row = one_row && (n == x.num_operands - 1 || box[n].low == box[n].high);
      count = std::min(count * std::min(box[n].high - box[n].low + 1, kMostScanned + 1), kMostScanned + 1);
    }
    if (call.rises[x.capture] && one_row) {
      int64_t first[ProgramStep::kMostOperands] = {}, last[ProgramStep::kMostOperands] = {};
      for (int n = 0; n < t.ndim; ++n) first[n] = box[n].low, last[n] = box[n].high;
      return ints(int_at(t, offset_of(t, first)), int_at(t, offset_of(t, last)));
    }
    if (count > kMostScanned) return ints(whole.low, whole.high);
    const Range found = scanned(t, box);
    return ints(found.low, found.high);
  }

  static Interval select(const Interval& condition, const Interval& a, const Interval& b) {
    if (condition.low == 1) return a;
    if (condition.high == 0) return b;
    return {std::min(a.low, b.low), std::max(a.high, b.high), std::min(a.least, b.least), std::max(a.most, b.most),
            a.may_be_nan || b.may_be_nan};
  }

  static Interval to_int(const Interval& a) {
    const auto cut = [](double x) {
      return x >= 0x1p63 ? INT64_MAX : x < -0x1p63 ? INT64_MIN : static_cast<int64_t>(x);
    };
    const int64_t low = cut(a.least), high = cut(a.most);
    return a.may_be_nan ? ints(std::min<int64_t>(low, 0), std::max<int64_t>(high, 0)) : ints(low, high);
  }

  static Interval compare_ints(Op op, const Interval& a, const Interval& b) {
    switch (op) {
      case Op::kLess: return bools(a.high >= b.low, a.low < b.high);
      case Op::kLessEqual: return bools(a.high > b.low, a.low <= b.high);
      default: {
        const bool apart = a.high < b.low || b.high < a.low,
                   same = a.low == a.high && b.low == b.high && a.low == b.low;
        return bools(!same, !apart);
      }
    }
  }

  static Interval compare_floats(Op op, const Interval& a, const Interval& b) {
    const bool nan = a.may_be_nan || b.may_be_nan;
    switch (op) {
      case Op::kLess: return bools(nan || a.most >= b.least, a.least < b.most);
      case Op::kLessEqual: return bools(nan || a.most > b.least, a.least <= b.most);
      default: return bools(true, !(a.most < b.least || b.most < a.least));
    }
  }

  // From results at the corners, in more bits than an int has.
  __extension__ using Wide = __int128;
  template <class F>
  static Interval corners(const Interval& a, const Interval& b, const F& f) {
    const Wide x[4] = {f(a.low, b.low), f(a.low, b.high), f(a.high, b.low), f(a.high, b.high)};
    const Wide low = *std::min_element(x, x + 4), high = *std::max_element(x, x + 4);
    if (low < INT64_MIN || high > INT64_MAX) return kAnything;
    return ints(static_cast<int64_t>(low), static_cast<int64_t>(high));
  }

  static Interval of_ints(Op op, const Interval& a, const Interval& b) {
    switch (op) {
      case Op::kAdd: return corners(a, b, [](Wide x, Wide y) { return x + y; });
      case Op::kSub: return corners(a, b, [](Wide x, Wide y) { return x - y; });
      case Op::kMul: return corners(a, b, [](Wide x, Wide y) { return x * y; });
      case Op::kNeg: return corners(a, a, [](Wide x, Wide) { return -x; });
      case Op::kAbs: {
        const Interval x = corners(a, a, [](Wide y, Wide) { return y < 0 ? -y : y; });
        return a.low <= 0 && a.high >= 0 ? ints(0, x.high) : x;
      }
      case Op::kMin: return ints(std::min(a.low, b.low), std::min(a.high, b.high));
      case Op::kMax: return ints(std::max(a.low, b.low), std::max(a.high, b.high));
      case Op::kFloorDiv: return floor_div(a, b);
      case Op::kMod: return mod(a, b);
      default: return of_bits(op, a, b);
    }
  }

  static Interval floor_div(const Interval& a, const Interval& b) {
    const auto floor = [](Wide x, Wide y) { return y == 0 ? Wide{0} : x / y - (x % y != 0 && (x < 0) != (y < 0)); };
    if (b.low > 0 || b.high < 0) return corners(a, b, floor);
    const Interval most = of_ints(Op::kAbs, a, a);  // by 1 or -1, and 0 for 0
    return most.high == INT64_MAX ? kAnything : ints(-most.high, most.high);
  }

  static Interval mod(const Interval& a, const Interval& b) {
    if (b.low > 0 && a.low >= 0 && a.high < b.low) return ints(a.low, a.high);
    const int64_t most = std::max<int64_t>(b.high - (b.high > INT64_MIN ? 1 : 0), 0);
    const int64_t least = std::min<int64_t>(b.low < INT64_MAX ? b.low + 1 : b.low, 0);
    return ints(least, most);
  }

  static Interval of_bits(Op op, const Interval& a, const Interval& b) {
    switch (op) {
      case Op::kBitAnd: {
        const bool all_ones = b.low == b.high && b.low >= 0 && std::has_single_bit(static_cast<uint64_t>(b.low) + 1);
        if (all_ones && (a.low & ~b.low) == (a.high & ~b.low)) return ints(a.low & b.low, a.high & b.low);
        if (a.low >= 0 && b.low >= 0) return ints(0, std::min(a.high, b.high));
        if (a.low >= 0 || b.low >= 0) return ints(0, a.low >= 0 ? a.high : b.high);
        return kAnything;
      }
      case Op::kBitOr:
      case Op::kBitXor: {
        if (a.low < 0 || b.low < 0) return kAnything;
        const uint64_t most = std::bit_ceil(static_cast<uint64_t>(std::max(a.high, b.high)) + 1) - 1;
        return ints(op == Op::kBitOr ? std::max(a.low, b.low) : 0, static_cast<int64_t>(most));
      }
      case Op::kShiftLeft: {
        const Interval by = ints(std::clamp<int64_t>(b.low, 0, 63), std::clamp<int64_t>(b.high, 0, 63));
        return corners(a, by, [](Wide x, Wide y) { return x * (Wide{1} << static_cast<int>(y)); });
      }
      case Op::kShiftRight: {
        const Interval by = ints(std::clamp<int64_t>(b.low, 0, 63), std::clamp<int64_t>(b.high, 0, 63));
        return corners(a, by, [](Wide x, Wide y) { return x >> static_cast<int>(y); });
      }
      default: return kAnything;
    }
  }

  static Interval rising(const Interval& a, double (*f)(double), bool may_be_nan) {
    return floats(f(a.least), f(a.most), may_be_nan);
  }

  static Interval of_floats(Op op, const Interval& a, const Interval& b) {
    const bool nan = a.may_be_nan || b.may_be_nan;
    const bool finite =
        std::isfinite(a.least) && std::isfinite(a.most) && std::isfinite(b.least) && std::isfinite(b.most);
    switch (op) {
      case Op::kAdd: return floats(a.least + b.least, a.most + b.most, nan || !finite);
      case Op::kSub: return floats(a.least - b.most, a.most - b.least, nan || !finite);
      case Op::kNeg: return floats(-a.most, -a.least, nan);
      case Op::kMin: return floats(std::min(a.least, b.least), std::min(a.most, b.most), nan);
      case Op::kMax: return floats(std::max(a.least, b.least), std::max(a.most, b.most), nan);
      case Op::kAbs: {
        const double most = std::max(std::fabs(a.least), std::fabs(a.most));
        return floats(a.least <= 0 && a.most >= 0 ? 0 : std::min(std::fabs(a.least), std::fabs(a.most)), most, nan);
      }
      case Op::kMul: {
        if (!finite) return kAnything;
        const double x[4] = {a.least * b.least, a.least * b.most, a.most * b.least, a.most * b.most};
        return floats(*std::min_element(x, x + 4), *std::max_element(x, x + 4), nan);
      }
      case Op::kDiv: {
        if (!finite || (b.least <= 0 && b.most >= 0)) return kAnything;
        const double x[4] = {a.least / b.least, a.least / b.most, a.most / b.least, a.most / b.most};
        return floats(*std::min_element(x, x + 4), *std::max_element(x, x + 4), nan);
      }
      case Op::kFloor: return rising(a, std::floor, nan);
      case Op::kExp: return rising(a, std::exp, nan);
      case Op::kTanh: return rising(a, std::tanh, nan);
      case Op::kErf: return rising(a, std::erf, nan);
      case Op::kSigmoid: return floats(0, 1, nan);
      case Op::kSin:
      case Op::kCos: return floats(-1, 1, nan || !finite);
      case Op::kLog: return a.least >= 0 ? rising(a, std::log, nan) : kAnything;
      case Op::kSqrt: return a.least >= 0 ? rising(a, std::sqrt, nan) : kAnything;
      default: return kAnything;
    }
  }
};

}  // namespace

void find_ranges(const Program& program, Call* call) {
  for (size_t i = 0; i < program.captures().size(); ++i) {
    if (program.captures()[i].type == ValueType::kFloat) continue;
    const Tensor& t = call->captures[i];
    call->ints[i] = range_of_dtype(t.dtype);
    if (t.dtype == DType::kBool || t.num_elements() == 0 || t.data == nullptr) continue;
    Range box[ProgramStep::kMostOperands] = {};
    for (int n = 0; n < t.ndim; ++n) box[n] = {0, t.dims[n] - 1};
    call->ints[i] = scanned(t, box);
    call->rises[i] = rises(t);
  }
}

void find_intervals(const Code& code, const Pass& pass, const Call& call, const Region& region, Interval* intervals) {
  const Finder finder{call, region, intervals};
  for (int i = 0; i < code.num_instructions; ++i) {
    const Instruction& x = code.instructions[i];
    if (pass.place[i] >= 0 || x.op == Op::kScore || x.op == kGradient) intervals[i] = finder.find(x);
  }
}

bool fits_int32(const Code& code, const Call& call, const Region& region) {
  Interval intervals[kMostInstructions];
  for (const Pass* pass : {&code.for_mask, &code.for_score, &code.for_score_gradient, &code.for_gradients}) {
    find_intervals(code, *pass, call, region, intervals);
    for (int i = 0; i < code.num_instructions; ++i) {
      if (pass->place[i] < 0 || code.instructions[i].type != ValueType::kInt) continue;
      if (intervals[i].low < INT32_MIN || intervals[i].high > INT32_MAX) return false;
    }
  }
  return true;
}

}  // namespace polyhead::program
