// Who holds which page of a cache.
#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "core/memory_size.h"
#include "core/sentence.h"
#include "polyhead/cache.h"

namespace polyhead {
namespace {

struct Sequence {
  int64_t length = 0;
  std::vector<int64_t> pages;
};

Status no_such(int64_t sequence) {
  return invalid(sentence("sequence is ", sequence, ", there is none of that number"));
}

}  // namespace

struct PageTable::State {
  int64_t page_size;
  std::vector<int64_t> holders;  // of each page
  std::vector<int64_t> free;     // the next one last
  std::map<int64_t, Sequence> sequences;
  int64_t next = 0;  // sequence

  Sequence* find(int64_t sequence) {
    const auto found = sequences.find(sequence);
    return found == sequences.end() ? nullptr : &found->second;
  }
  int64_t take() {
    const int64_t page = free.back();
    free.pop_back();
    holders[static_cast<size_t>(page)] = 1;
    return page;
  }
  void give_up(int64_t page) {
    if (--holders[static_cast<size_t>(page)] == 0) free.push_back(page);  // free has room for all
  }
};

Result<PageTable> page_table(int64_t num_pages, int64_t page_size) try {
  if (num_pages < 0) return invalid(sentence("num_pages is ", num_pages, ", must not be negative"));
  if (page_size < 1) return invalid(sentence("page_size is ", page_size, ", must be 1 or more"));
  auto state = std::make_unique<PageTable::State>(PageTable::State{page_size, {}, {}, {}});
  const auto pages = static_cast<size_t>(num_pages);
  state->holders.resize(pages);
  state->free.reserve(pages);
  for (size_t page = pages; page > 0; --page) state->free.push_back(static_cast<int64_t>(page) - 1);
  return PageTable(std::move(state));
} catch (const std::exception&) {  // a vector can hold less than there are numbers
  return out_of_memory();
}

PageTable::PageTable(std::unique_ptr<State> state) : state_(std::move(state)) {}
PageTable::~PageTable() = default;
PageTable::PageTable(PageTable&&) noexcept = default;
PageTable& PageTable::operator=(PageTable&&) noexcept = default;

int64_t PageTable::num_free() const { return static_cast<int64_t>(state_->free.size()); }

Result<int64_t> PageTable::add() try {
  state_->sequences[state_->next];
  return state_->next++;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Result<int64_t> PageTable::fork(int64_t sequence) try {
  const Sequence* const parent = state_->find(sequence);
  if (parent == nullptr) return no_such(sequence);
  state_->sequences.emplace(state_->next, *parent);
  for (const int64_t page : parent->pages) ++state_->holders[static_cast<size_t>(page)];
  return state_->next++;
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

Status PageTable::remove(int64_t sequence) {
  Sequence* const held = state_->find(sequence);
  if (held == nullptr) return no_such(sequence);
  for (const int64_t page : held->pages) state_->give_up(page);
  state_->sequences.erase(sequence);
  return {};
}

Status PageTable::resize(int64_t sequence, int64_t length, Copy* copy) try {
  *copy = {};
  State& s = *state_;
  Sequence* const held = s.find(sequence);
  if (held == nullptr) return no_such(sequence);
  if (length < 0) return invalid(sentence("length is ", length, ", must not be negative"));
  const int64_t pages = pieces(length, s.page_size), had = static_cast<int64_t>(held->pages.size());
  // Tokens will be written to the last page that was begun: it must be the sequence's own.
  const bool begun = length > held->length && held->length % s.page_size != 0;
  const bool shared = begun && s.holders[static_cast<size_t>(held->pages.back())] > 1;
  const int64_t needed = std::max<int64_t>(pages - had, 0) + (shared ? 1 : 0);
  if (needed > num_free()) {
    return invalid(sentence("length is ", length, ", which needs ", needed, " more pages, ", num_free(), " are free"));
  }
  held->pages.reserve(static_cast<size_t>(std::max(pages, had)));
  if (shared) {
    *copy = {held->pages.back(), s.take()};
    s.give_up(copy->from);
    held->pages.back() = copy->to;
  }
  for (int64_t page = had; page < pages; ++page) held->pages.push_back(s.take());
  for (int64_t page = pages; page < had; ++page) {
    s.give_up(held->pages.back());
    held->pages.pop_back();
  }
  held->length = length;
  return {};
} catch (const std::bad_alloc&) {
  return out_of_memory();
}

int64_t PageTable::length(int64_t sequence) const {
  const Sequence* const held = state_->find(sequence);
  return held == nullptr ? -1 : held->length;
}

std::span<const int64_t> PageTable::pages(int64_t sequence) const {
  const Sequence* const held = state_->find(sequence);
  return held == nullptr ? std::span<const int64_t>() : std::span<const int64_t>(held->pages);
}

int64_t PageTable::slot(int64_t sequence, int64_t token) const {
  const Sequence* const held = state_->find(sequence);
  if (held == nullptr || token < 0 || token >= held->length) return -1;
  const int64_t page = token / state_->page_size;
  return held->pages[static_cast<size_t>(page)] * state_->page_size + token % state_->page_size;
}

int64_t PageTable::num_holders(int64_t page) const {
  const auto at = static_cast<size_t>(page);  // a negative one is beyond all
  return at < state_->holders.size() ? state_->holders[at] : 0;
}

}  // namespace polyhead
