#include "cpu/attention/program/machine.h"

#include "cpu/attention/program/values.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

using program::Instruction;
using program::Pass;
using program::Rate;

// Int: int32_t where all integers of the call fit.
template <class Int>
class Machine {
 public:
  Machine(const program::Call& call, const Pass& pass, const ProgramPlace& at, const ProgramMemory& memory)
      : call_(call), code_(*call.code), pass_(pass), at_(at), memory_(memory) {}

  // What keys [begin, end) of the block need of the low rates.
  void prepare(int begin, int end) const {
    for (int i = 0; i < pass_.num_low; ++i) {
      const Instruction& x = code_.instructions[pass_.low[i]];
      const Shape shape = shape_of(x.rate, begin, end);
      const size_t bytes = x.type == ValueType::kFloat ? sizeof(float) : sizeof(Int);
      run(pass_.low[i], shape, low(pass_.low[i]) + static_cast<size_t>(shape.first) * bytes);
    }
  }

  // The full values of keys [key, key + rows). `result` goes to `to`, where that is not null.
  void run_strip(int key, int rows, int result = -1, float* to = nullptr) const {
    for (int i = 0; i < pass_.num_full; ++i) {
      const int at = pass_.full[i];
      void* const out = at == result && to != nullptr ? to : strip(at);
      run(at, {rows, kTile, key, Rate::kFull}, out);
    }
  }

  // Row `row` of keys from `key` on of a value; `buffer` has room for kTile.
  template <class T>
  const T* row(int instruction, int key, int row, T* buffer) const {
    return vector<T>(instruction, {kStripKeys, kTile, key, Rate::kFull}, row, buffer);
  }

  // The rows of a full value, of keys from `key` on.
  const float* full(int instruction, int key) const {
    return rows<float>(instruction, {kStripKeys, kTile, key, Rate::kFull}).first;
  }

  const Instruction& at(int instruction) const { return code_.instructions[instruction]; }

  // Elements of a gather's capture, counted in row-major order, for a row as above.
  void elements(const Instruction& gather, int key, int row, int64_t* elements) const {
    gather_elements(gather, {kStripKeys, kTile, key, Rate::kFull}, row, elements, nullptr);
  }

 private:
  // Rows of lanes: keys from `key` on, of all queries of a tile, or one row of what a low rate has, from place `first` on.
  struct Shape {
    int rows, lanes, key;
    Rate rate;
    int first = 0;
  };

  // What keys [begin, end) need of a low rate, in whole spans.
  static Shape shape_of(Rate rate, int begin, int end) {
    int first = 0, last = program::width_of(rate);
    if (rate == Rate::kKey) first = begin, last = end;
    if (rate == Rate::kDiagonal) first = program::kCodeKeys - end, last = program::kDiagonals - 1 - begin;
    first = first / kSpan * kSpan;
    return {1, (last - first + kSpan - 1) / kSpan * kSpan, 0, rate, first};
  }

  char* low(int i) const { return memory_.low + int64_t{pass_.place[i]} * static_cast<int64_t>(sizeof(Int)); }
  void* strip(int i) const {
    constexpr int64_t kBytes = int64_t{kStripKeys} * kTile * static_cast<int64_t>(sizeof(Int));
    return memory_.registers + int64_t{pass_.place[i]} * kBytes;
  }

  // A value as the rows of a shape.
  template <class T>
  ValueRows<T> rows(int i, const Shape& shape) const {
    const Instruction& x = code_.instructions[i];
    if (x.rate == Rate::kFull) {
      if (x.op == Op::kScore) return {tile<T>(memory_.scores, shape.key), kTile, false};
      if (x.op == program::kGradient) return {tile<T>(memory_.gradients, shape.key), kTile, false};
      return {static_cast<const T*>(strip(i)), kTile, false};
    }
    const T* const values = reinterpret_cast<const T*>(low(i));
    if (x.rate == shape.rate || (x.rate == Rate::kQuery && shape.rate == Rate::kFull)) {
      return {values + shape.first, 0, false};
    }
    // q - k of lane 0 is first_query - (first_key + key): place kBlockKeys - 1 stands for the first of both.
    if (x.rate == Rate::kDiagonal) return {values + (program::kCodeKeys - 1) - shape.key, -1, false};
    if (x.rate == Rate::kKey) return {values + shape.key, 1, true};
    return {values, 0, true};
  }
  // One of these rows as a vector of lanes: in place, or spread into `buffer`.
  template <class T>
  const T* vector(int i, const Shape& shape, int row, T* buffer) const {
    const ValueRows<T> x = rows<T>(i, shape);
    const T* const values = x.first + row * x.step;
    if (!x.one_number) return values;
    for (int l = 0; l < shape.lanes; ++l) buffer[l] = *values;
    return buffer;
  }
  template <class T>
  static const T* tile(const float* values, int key) {
    return reinterpret_cast<const T*>(values + key * kTile);
  }

  void run(int i, const Shape& shape, void* out) const {
    const Instruction& x = code_.instructions[i];
    if (x.num_operands == 0) return fill(x, shape, out);
    if (x.op == Op::kGather) return gather(x, shape, out);
    // Strips and numbers lie one row after the other: that is one long row.
    const Shape rows = has_whole_strips(x) ? Shape{1, shape.rows * shape.lanes, shape.key, shape.rate} : shape;
    if (x.op == Op::kSelect) {
      x.type == ValueType::kFloat ? select<float>(x, rows, out) : select<Int>(x, rows, out);
    } else {
      x.takes == ValueType::kFloat ? compute<float>(x, rows, out) : compute<Int>(x, rows, out);
    }
  }

  bool has_whole_strips(const Instruction& x) const {
    for (int n = 0; n < x.num_operands; ++n) {
      const Rate rate = code_.instructions[x.operands[n]].rate;
      if (rate != Rate::kFull && rate != Rate::kUniform) return false;
    }
    return x.rate == Rate::kFull;
  }

  template <class T>
  void compute(const Instruction& x, const Shape& shape, void* out) const {
    const ValueRows<T> a = rows<T>(x.operands[0], shape), b = x.num_operands > 1 ? rows<T>(x.operands[1], shape) : a;
    if (x.type == ValueType::kFloat) {
      compute_rows(x.op, static_cast<float*>(out), a, b, shape.rows, shape.lanes);
    } else {
      compute_rows(x.op, static_cast<Int*>(out), a, b, shape.rows, shape.lanes);
    }
  }

  template <class T>
  void select(const Instruction& x, const Shape& shape, void* out) const {
    select_rows(static_cast<T*>(out), rows<Int>(x.operands[0], shape), rows<T>(x.operands[1], shape),
                rows<T>(x.operands[2], shape), shape.rows, shape.lanes);
  }

  // Values that have no operands: all of low rates.
  void fill(const Instruction& x, const Shape& shape, void* out) const {
    if (x.op == Op::kGather) return gather(x, shape, out);
    int64_t first = 0, step = 0;
    if (x.op == program::kDiagonal) {
      first = at_.first_query - at_.first_key - (program::kCodeKeys - 1), step = 1;
    } else if (x.op == Op::kQuery) {
      first = at_.first_query, step = 1;
    } else if (x.op == Op::kKey) {
      first = at_.first_key, step = 1;
    } else if (x.op == Op::kBatch) {
      first = at_.b;
    } else if (x.op == Op::kHead) {
      first = at_.h;
    } else if (x.op == Op::kOffset) {
      first = at_.offset;
    } else {
      first = x.integer;
    }
    for (int l = 0; l < shape.lanes; ++l) {
      if (x.type == ValueType::kFloat) {
        static_cast<float*>(out)[l] = x.number;
      } else {
        static_cast<Int*>(out)[l] = static_cast<Int>(first + (shape.first + l) * step);
      }
    }
  }

  // elements[lane]: in row-major order; offsets[lane]: by the strides. Indices beyond the tensor count as its ends.
  void gather_elements(const Instruction& x, const Shape& shape, int r, int64_t* elements, int64_t* offsets) const {
    const Tensor& t = call_.captures[x.capture];
    alignas(64) Int buffer[program::kDiagonals];
    for (int l = 0; l < shape.lanes; ++l) (elements != nullptr ? elements : offsets)[l] = 0;
    for (int n = 0; n < x.num_operands; ++n) {
      const Int* const index = vector<Int>(x.operands[n], shape, r, buffer);
      const int64_t last = t.dims[n] - 1, stride = t.strides[n], size = t.dims[n];
      for (int l = 0; l < shape.lanes; ++l) {
        const int64_t i = index[l] < 0 ? 0 : index[l] > last ? last : index[l];
        if (elements != nullptr) {
          elements[l] = elements[l] * size + i;
        } else {
          offsets[l] += i * stride;
        }
      }
    }
  }

  void gather(const Instruction& x, const Shape& shape, void* out) const {
    const Tensor& t = call_.captures[x.capture];
    int64_t offsets[program::kDiagonals];
    const bool empty = has_no_elements(t);
    for (int r = 0; r < shape.rows; ++r) {
      if (!empty) gather_elements(x, shape, r, nullptr, offsets);
      if (x.type == ValueType::kFloat) {
        load_floats(t, empty, offsets, static_cast<float*>(out) + r * shape.lanes, shape.lanes);
      } else {
        load_integers(t, empty, offsets, static_cast<Int*>(out) + r * shape.lanes, shape.lanes);
      }
    }
  }

  const program::Call& call_;
  const program::Code& code_;
  const Pass& pass_;
  const ProgramPlace& at_;
  const ProgramMemory& memory_;
};

template <class Int>
inline I nonzero_lanes(const Int* p) {
  alignas(64) int32_t lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = p[l] != 0;
  return load_int(lanes);
}
inline I nonzero_lanes(const int32_t* p) { return load_int(p); }

template <class Int>
program::Seen mask(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end,
                   int num_queries, uint16_t (*seen)[kTileQueries / 4]) {
  const Machine<Int> machine(call, call.code->for_mask, at, memory);
  machine.prepare(begin, end);
  alignas(64) Int buffer[kTile];
  uint32_t some = 0, all = ~0u;
  const I zero = broadcast_int(0);
  for (int key = begin; key < end; key += kStripKeys) {
    const int rows = end - key < kStripKeys ? end - key : kStripKeys;
    machine.run_strip(key, rows);
    for (int r = 0; r < rows; ++r) {
      const Int* const shown = machine.row(call.code->mask, key, r, buffer);
      for (int v = 0; v < kVecs; ++v) {
        const uint32_t bit = bits(less_int(zero, nonzero_lanes(shown + v * kLanes)));
        const int lanes = num_queries - v * kLanes;
        const uint32_t present = lanes <= 0 ? 0 : lanes >= kLanes ? (1u << (kLanes - 1) << 1) - 1 : (1u << lanes) - 1;
        seen[key + r][v] = static_cast<uint16_t>(bit);
        some |= bit & present;
        all &= bit | ~present;
      }
    }
  }
  return some == 0 ? program::Seen::kNone : all == ~0u ? program::Seen::kAll : program::Seen::kSome;
}

template <class Int>
void score(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end) {
  const int result = call.code->score;
  const Machine<Int> machine(call, call.code->for_score, at, memory);
  const bool computed = machine.at(result).rate == Rate::kFull && machine.at(result).op != Op::kScore;
  for (int key = begin; key < end; key += kStripKeys) {
    const int rows = end - key < kStripKeys ? end - key : kStripKeys;
    float* const to = memory.results + key * kTile;
    // In place, the score is still to be read when its own strip is written, element by element.
    machine.run_strip(key, rows, result, to);
    if (computed) continue;
    alignas(64) float buffer[kTile];
    for (int r = 0; r < rows; ++r)
      __builtin_memmove(to + r * kTile, machine.row(result, key, r, buffer), sizeof buffer);
  }
}

// What rows of gradients give to the sums of a capture. Gradients are full: their rows follow each other.
template <class Int>
void add_strip(const Machine<Int>& machine, const program::GatherGradient& gather, const ProgramPlace& at, int key,
               int rows, float* sums, int64_t keys) {
  const float* gradient = machine.full(gather.adjoint, key);
  const Instruction& x = machine.at(gather.gather);
  const int64_t first_key = at.first_key + key;
  switch (x.rate) {
    case Rate::kUniform: return add_columns(sums, gradient, rows);
    case Rate::kQuery: return add_columns(sums + at.first_query, gradient, rows);
    case Rate::kKey: return add_rows(sums + first_key, gradient, rows);
    case Rate::kDiagonal: return add_diagonals(sums + at.first_query - (first_key + rows - 1) + keys, gradient, rows);
    case Rate::kFull: break;
  }
  for (int r = 0; r < rows; ++r, gradient += kTile) {
    int64_t elements[kTile];
    machine.elements(x, key, r, elements);
    for (int l = 0; l < kTile; ++l) {
      if (gradient[l] != 0) sums[elements[l]] += gradient[l];
    }
  }
}

const Pass& gradient_pass(const program::Call& call, bool captures) {
  return captures ? call.code->for_gradients : call.code->for_score_gradient;
}

template <class Int>
void gradients(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end,
               const CaptureSums& captures) {
  const program::Code& code = *call.code;
  const Machine<Int> machine(call, gradient_pass(call, captures.sums != nullptr), at, memory);
  for (int key = begin; key < end; key += kStripKeys) {
    const int rows = end - key < kStripKeys ? end - key : kStripKeys;
    machine.run_strip(key, rows);
    for (int g = 0; captures.sums != nullptr && g < code.num_gathers; ++g) {
      if (captures.sums[g] != nullptr) {
        add_strip(machine, code.gathers[g], at, key, rows, captures.sums[g], captures.keys);
      }
    }
    float* const to = memory.gradients + key * kTile;
    const size_t bytes = static_cast<size_t>(rows) * kTile * sizeof(float);
    if (code.score_gradient < 0) {  // the score is not read
      __builtin_memset(to, 0, bytes);
    } else if (!code.same_gradient) {
      __builtin_memcpy(to, machine.full(code.score_gradient, key), bytes);
    }
  }
}

template <class Int>
void prepare(const program::Call& call, const Pass& pass, const ProgramPlace& at, const ProgramMemory& memory,
             int begin, int end) {
  Machine<Int>(call, pass, at, memory).prepare(begin, end);
}

}  // namespace

program::Seen run_mask(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin,
                       int end, int num_queries, uint16_t (*seen)[kTileQueries / 4]) {
  return call.wide ? mask<int64_t>(call, at, memory, begin, end, num_queries, seen)
                   : mask<int32_t>(call, at, memory, begin, end, num_queries, seen);
}

void prepare_score(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end) {
  call.wide ? prepare<int64_t>(call, call.code->for_score, at, memory, begin, end)
            : prepare<int32_t>(call, call.code->for_score, at, memory, begin, end);
}

void run_score(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end) {
  call.wide ? score<int64_t>(call, at, memory, begin, end) : score<int32_t>(call, at, memory, begin, end);
}

void prepare_gradients(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin,
                       int end, bool captures) {
  const Pass& pass = gradient_pass(call, captures);
  call.wide ? prepare<int64_t>(call, pass, at, memory, begin, end)
            : prepare<int32_t>(call, pass, at, memory, begin, end);
}

void run_gradients(const program::Call& call, const ProgramPlace& at, const ProgramMemory& memory, int begin, int end,
                   const CaptureSums& captures) {
  call.wide ? gradients<int64_t>(call, at, memory, begin, end, captures)
            : gradients<int32_t>(call, at, memory, begin, end, captures);
}

}  // namespace polyhead::cpu::POLYHEAD_ISA
