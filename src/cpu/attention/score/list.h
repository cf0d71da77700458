// Options one after the other, as one.
#pragma once

#include "cpu/attention/score/option.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class... Options>
struct OptionList;

template <>
struct OptionList<> : Option {
  OptionList(const Problem&, const Sequence&, int64_t, int64_t) {}
  template <class O>
  bool only() const {
    return true;
  }
  void save(const Kept&, const Memory&, int64_t, const auto& /*seen*/) const {}
  void load_kept(Kept&, const Memory&, int64_t) const {}
};

template <class First, class... Rest>
struct OptionList<First, Rest...> {
  using Others = OptionList<Rest...>;
  First first;
  Others rest;

  struct View {
    typename First::View first;
    typename OptionList<Rest...>::View rest;
  };
  struct Memory {
    typename First::Memory first;
    typename OptionList<Rest...>::Memory rest;
  };
  struct Kept {
    typename First::Kept first;
    typename OptionList<Rest...>::Kept rest;
  };

  OptionList(const Problem& problem, const Sequence& sequence, int64_t b, int64_t h)
      : first(problem, sequence, b, h), rest(problem, sequence, b, h) {}

  bool on() const { return first.on() || rest.on(); }
  // Whether no option but O is on.
  template <class O>
  bool only() const {
    return (kSame<O, First> || !first.on()) && rest.template only<O>();
  }
  bool may_hide() const { return first.may_hide() || rest.may_hide(); }
  bool same_for_heads() const { return first.same_for_heads() && rest.same_for_heads(); }
  bool same_for_queries() const { return first.same_for_queries() && rest.same_for_queries(); }
  bool may_see(const Queries& queries, const KeyRange& keys) const {
    return first.may_see(queries, keys) && rest.may_see(queries, keys);
  }
  void add_ahead(auto& ahead, const Queries& queries, const KeyRange& keys) const {
    first.add_ahead(ahead, queries, keys);
    rest.add_ahead(ahead, queries, keys);
  }
  static int64_t memory_floats(const Asked& asked) {
    return First::memory_floats(asked) + OptionList<Rest...>::memory_floats(asked);
  }
  void take_memory(Memory& own, float*& memory, bool gradients) const {
    first.take_memory(own.first, memory, gradients);
    rest.take_memory(own.rest, memory, gradients);
  }
  bool look(View& view, Memory& own, const Queries& queries, Keys& keys) const {
    return first.look(view.first, own.first, queries, keys) && rest.look(view.rest, own.rest, queries, keys);
  }
  void look_row(View& view, int64_t query, int64_t first_key) const {
    first.look_row(view.first, query, first_key);
    rest.look_row(view.rest, query, first_key);
  }
  bool hides(const View& view) const { return first.hides(view.first) || rest.hides(view.rest); }

  M sees(M seen, const auto& at, const View& view) const {
    return rest.sees(first.sees(seen, at, view.first), at, view.rest);
  }
  F score(F s, const auto& at, const View& view, Kept& kept) const {
    s = first.score(s, at, view.first, kept.first);
    if constexpr (sizeof...(Rest) == 0) return s;
    s = rest.score(s, at, view.rest, kept.rest);
    if constexpr (!First::kHides) return s;
    return select(first.sees(mask_from_bits(~0u), at, view.first), s, broadcast(-kInfinity));
  }
  F raw_gradient(F ds, const auto& at, const View& view, const Kept& kept) const {
    return first.raw_gradient(rest.raw_gradient(ds, at, view.rest, kept.rest), at, view.first, kept.first);
  }

  // The gradient of what option O gave, from that of what the last one gave.
  template <class O>
  F gradient_after(F ds, const auto& at, const View& view, const Kept& kept) const {
    if constexpr (kSame<O, First>) {
      return rest.raw_gradient(ds, at, view.rest, kept.rest);
    } else {
      return rest.template gradient_after<O>(ds, at, view.rest, kept.rest);
    }
  }

  // What is kept of kLanes scores, element `at` of a tile on; 0 where not seen(), so that NaN does not meet dS = 0.
  void save(const Kept& kept, const Memory& own, int64_t at, const auto& seen) const {
    if constexpr (First::Kept::kNumber) {
      if (first.on()) store(first.kept_tile(own.first) + at, select(seen(), kept.first.number, broadcast(0.0f)));
    }
    rest.save(kept.rest, own.rest, at, seen);
  }
  void load_kept(Kept& kept, const Memory& own, int64_t at) const {
    if constexpr (First::Kept::kNumber) {
      if (first.on()) kept.first.number = load(first.kept_tile(own.first) + at);
    }
    rest.load_kept(kept.rest, own.rest, at);
  }
};

// The option of type O of a list, and likewise its view.
template <class O, class First, class... Rest>
const O& option(const OptionList<First, Rest...>& list) {
  if constexpr (kSame<O, First>) {
    return list.first;
  } else {
    return option<O>(list.rest);
  }
}
template <class O, class List>
const typename O::Memory& memory_of(const typename List::Memory& memory) {
  if constexpr (kSame<typename O::Memory, decltype(memory.first)>) {
    return memory.first;
  } else {
    return memory_of<O, typename List::Others>(memory.rest);
  }
}
template <class O, class First, class... Rest>
const typename O::View& view_of(const OptionList<First, Rest...>& list,
                                const typename OptionList<First, Rest...>::View& view) {
  if constexpr (kSame<O, First>) {
    return view.first;
  } else {
    return view_of<O>(list.rest, view.rest);
  }
}

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
