// The text that is learned: a file, or the documents and sources of a folder; a tenth of it held out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model_desc.h"
#include "polyhead/status.h"
#include "rows.h"

namespace polyhead::demo {

struct Text {
  std::string name;
  size_t num_files = 1;
  std::vector<uint8_t> train;
  std::vector<uint8_t> validation;  // every tenth stretch of at most 16 KiB
};

/// A regular file, or a folder: its .md, .txt, .h, .cc, .c, .py and .cmake files in the order of their paths, without
/// hidden folders, build/, demo/ and links. Each part must have more than `context` bytes.
Result<Text> read_text(const std::string& path, int64_t context);

/// A batch [batch, context]: its rows, one behind the other.
struct Batch {
  std::vector<uint8_t> inputs, targets;
  Bytes bytes() const { return {inputs.data(), targets.data()}; }
};

/// Sequences of the training text, at places that depend on seed and step alone.
Batch training_batch(const Text& text, const ModelDesc& desc, uint64_t seed, int64_t step);

/// Batches of sequences that lie evenly over the held-out text, at most `most`; at least one.
std::vector<Batch> validation_batches(const Text& text, const ModelDesc& desc, int64_t most);

/// What a table of pairs gives on the same bytes: the mean of -log P(target | input), P counted on the training text:
///   P(b | a) = (count(a, b) + alpha) / (count(a) + 256 alpha),
/// and of several alpha the one that suits the held-out bytes best, so that the table is not beaten by its smoothing.
double bigram_loss(const Text& text, const std::vector<Batch>& batches);

}  // namespace polyhead::demo
