// The example that trains a transformer: its gradients against slopes, its decoder against the whole pass, unfused
// attention against fused, and that it learns, and goes on from a file with the same bits.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "testing/random.h"
#include "train_text/comparison.h"
#include "train_text/course.h"
#include "train_text/decoder.h"
#include "train_text/lanes.h"

namespace polyhead::demo {
namespace {

namespace fs = std::filesystem;

ModelDesc small_model() {
  ModelDesc desc;
  desc.batch = 2, desc.context = 24, desc.size = 32, desc.inner_size = 48, desc.num_heads = 2, desc.num_layers = 2;
  return desc;
}

// Sentences of a few words in random order.
std::vector<uint8_t> sentences(uint64_t seed, size_t num_bytes) {
  static constexpr const char* kWords[] = {"the ", "key ", "sees ", "a ", "query", ". ", "value ", "heads "};
  testing::Random random(seed, 0);
  std::string text;
  while (text.size() < num_bytes) text += kWords[random.below(static_cast<int64_t>(std::size(kWords)))];
  return {text.begin(), text.begin() + static_cast<int64_t>(num_bytes)};
}

Text small_text() { return {"sentences", 1, sentences(1, 20000), sentences(2, 2000)}; }

class TrainText : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("polyhead_train_text_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }

  fs::path folder_;
};

TrainingDesc training_of(int64_t num_steps, uint64_t seed = 1) {
  TrainingDesc training;
  training.seed = seed;
  training.num_steps = num_steps;
  training.learning_rate = 3e-3;
  return training;
}

TEST_F(TrainText, StepsLowerTheLoss) {
  const Text text = small_text();
  const ModelDesc desc = small_model();
  auto trainer = Trainer::make(desc, training_of(150));
  ASSERT_TRUE(trainer.ok()) << trainer.status().message();
  CourseDesc course;
  course.checkpoint = path("model.safetensors");
  course.losses = path("losses.csv");
  Transcript transcript;
  const auto result = train(*trainer, text, course, transcript);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_NEAR(result->first_validation_loss, std::log(256.0), 0.2);  // it knows nothing yet
  EXPECT_LT(result->last_validation_loss, result->first_validation_loss - 1.5);
  EXPECT_EQ(trainer->num_steps_done(), 150);
  const std::string losses = read("losses.csv");
  EXPECT_EQ(losses.substr(0, losses.find('\n')), "step,tokens,loss,validation_loss,bigram_loss");
  EXPECT_EQ(std::count(losses.begin(), losses.end(), '\n'), 1 + 150 + 1 + kNumEvaluations);
}

TEST_F(TrainText, ResumingGivesTheSameBits) {
  const Text text = small_text();
  auto straight = Trainer::make(small_model(), training_of(8));
  auto first = Trainer::make(small_model(), training_of(8));
  auto second = Trainer::make(small_model(), training_of(99, /*seed=*/5));  // all of it comes from the file
  ASSERT_TRUE(straight.ok() && first.ok() && second.ok());
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(straight->step(text).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(first->step(text).ok());
  ASSERT_EQ(first->save(path("middle.safetensors")).message(), "");
  ASSERT_EQ(second->load(path("middle.safetensors")).message(), "");
  EXPECT_EQ(second->num_steps_done(), 3);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(second->step(text).ok());
  ASSERT_EQ(straight->save(path("straight.safetensors")).message(), "");
  ASSERT_EQ(second->save(path("resumed.safetensors")).message(), "");
  EXPECT_TRUE(read("straight.safetensors") == read("resumed.safetensors"));
  EXPECT_FALSE(read("straight.safetensors") == read("middle.safetensors"));
}

TEST_F(TrainText, RefusesFilesOfAnotherModelAndBrokenOnes) {
  ModelDesc larger = small_model();
  larger.size = 48;
  auto trainer = Trainer::make(small_model(), training_of(8)), other = Trainer::make(larger, training_of(8));
  ASSERT_TRUE(trainer.ok() && other.ok());
  ASSERT_EQ(trainer->save(path("before.safetensors")).message(), "");
  ASSERT_EQ(other->save(path("other.safetensors")).message(), "");
  const std::string whole = read("before.safetensors");
  write("cut.safetensors", whole.substr(0, whole.size() - 100));
  std::string renamed = whole;
  renamed.replace(renamed.find("h.1.mlp.c_fc.bias"), 17, "h.1.mlp.c_fc.bios");
  write("renamed.safetensors", renamed);

  std::string infinite = whole;  // its last four bytes: the last of the second moments
  const uint32_t bits = 0xff800000;
  infinite.replace(infinite.size() - sizeof bits, sizeof bits, reinterpret_cast<const char*>(&bits), sizeof bits);
  write("infinite.safetensors", infinite);

  const std::string sizes = trainer->load(path("other.safetensors")).message();
  EXPECT_NE(sizes.find("size 48"), std::string::npos) << sizes;
  EXPECT_FALSE(trainer->load(path("cut.safetensors")).ok());
  const std::string missing = trainer->load(path("renamed.safetensors")).message();
  EXPECT_NE(missing.find("h.1.mlp.c_fc.bias"), std::string::npos) << missing;
  EXPECT_FALSE(trainer->load(path("nowhere.safetensors")).ok());
  const std::string number = trainer->load(path("infinite.safetensors")).message();
  EXPECT_NE(number.find("training.second_moments has -inf"), std::string::npos) << number;
  ASSERT_EQ(trainer->save(path("after.safetensors")).message(), "");
  EXPECT_TRUE(read("after.safetensors") == whole);
}

// The slope of the loss along a parameter's own gradient is that gradient's length.
TEST_F(TrainText, GradientsAreSlopes) {
  const Text text = small_text();
  const ModelDesc desc = small_model();
  const Parameters parameters(desc);
  std::vector<float> memory(static_cast<size_t>(parameters.size())), gradient_memory(memory.size());
  parameters.initialize(1, memory.data());
  const auto weights = bind(desc, parameters, memory.data());
  const auto gradients = bind(desc, parameters, gradient_memory.data());
  ASSERT_TRUE(weights.ok() && gradients.ok());
  auto model = Model::make(desc, AttentionKind::kFused);
  ASSERT_TRUE(model.ok()) << model.status().message();
  const Batch batch = training_batch(text, desc, 1, 0);
  ASSERT_TRUE(model->loss_and_gradients(*weights, batch.bytes(), *gradients).ok());
  for (const Parameter& parameter : parameters.all()) {
    const auto first = static_cast<size_t>(parameter.offset), last = first + static_cast<size_t>(parameter.size());
    double square = 0;
    for (size_t i = first; i < last; ++i) square += std::pow(static_cast<double>(gradient_memory[i]), 2);
    const double length = std::sqrt(square);
    const std::vector<float> before = memory;
    const auto loss_at = [&](double way) {
      for (size_t i = first; i < last && length > 0; ++i) {
        memory[i] = before[i] + static_cast<float>(way * static_cast<double>(gradient_memory[i]) / length);
      }
      const auto loss = model->loss(*weights, batch.bytes());
      memory = before;  // of the same size: the views stay
      return loss.ok() ? *loss : NAN;
    };
    constexpr double kWay = 1e-2;
    const double slope = (loss_at(kWay) - loss_at(-kWay)) / (2 * kWay);
    EXPECT_NEAR(slope, length, 0.02 * length + 2e-4) << parameter.name;
  }
}

TEST_F(TrainText, UnfusedAttentionComputesTheSame) {
  const Text text = small_text();
  const ModelDesc desc = small_model();
  auto trainer = Trainer::make(desc, training_of(20));
  ASSERT_TRUE(trainer.ok()) << trainer.status().message();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(trainer->step(text).ok());  // so that weights are not all alike
  const auto comparison = compare_attention(desc, trainer->parameters(), trainer->weights(),
                                            training_batch(text, desc, 1, 0), /*seconds=*/0);
  ASSERT_TRUE(comparison.ok()) << comparison.status().message();
  EXPECT_LT(comparison->loss_difference, 1e-5);
  EXPECT_LT(comparison->gradient_difference, 1e-4);
  EXPECT_LT(comparison->fused.attention_bytes, comparison->unfused.attention_bytes);
}

TEST_F(TrainText, DecodingMatchesTheWholePass) {
  const Text text = small_text();
  ModelDesc desc = small_model();
  desc.batch = 1;
  auto trainer = Trainer::make(desc, training_of(20));
  ASSERT_TRUE(trainer.ok()) << trainer.status().message();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(trainer->step(text).ok());
  const std::vector<Batch> batches = validation_batches(text, desc, 1);
  ASSERT_EQ(batches.size(), 1u);
  const auto whole = trainer->validation_loss(batches);
  ASSERT_TRUE(whole.ok());
  auto decoder = Decoder::make(desc, trainer->weights());
  ASSERT_TRUE(decoder.ok()) << decoder.status().message();
  double sum = 0;
  for (size_t i = 0; i < batches[0].inputs.size(); ++i) {
    ASSERT_EQ(decoder->read(batches[0].inputs[i]).message(), "");
    double exponentials = 0;
    for (int c = 0; c < kNumBytes; ++c) exponentials += std::exp(static_cast<double>(decoder->logits()[c]));
    sum += std::log(exponentials) - static_cast<double>(decoder->logits()[batches[0].targets[i]]);
  }
  EXPECT_NEAR(sum / static_cast<double>(desc.context), *whole, 1e-5);
  EXPECT_EQ(decoder->read('a').message(), "the text is longer than the model's context of 24 bytes");
  auto prompted = Decoder::make(desc, trainer->weights());  // all but the last two bytes in one call
  const std::string_view inputs(reinterpret_cast<const char*>(batches[0].inputs.data()), batches[0].inputs.size());
  ASSERT_TRUE(prompted.ok() && prompted->read(inputs.substr(0, 22)).ok());
  ASSERT_TRUE(prompted->read(inputs.substr(22, 1)).ok() && prompted->read(inputs.substr(23)).ok());
  EXPECT_EQ(prompted->position(), desc.context);
  for (int64_t c = 0; c < kNumBytes; ++c) ASSERT_NEAR(prompted->logits()[c], decoder->logits()[c], 1e-4) << c;
}

TEST_F(TrainText, SamplesAreOfTheSeedAndPassTheContext) {
  const ModelDesc desc = small_model();
  auto trainer = Trainer::make(desc, training_of(1));
  ASSERT_TRUE(trainer.ok()) << trainer.status().message();
  const auto one = sample(desc, trainer->weights(), "the ", 100, 1.0, 1);
  const auto same = sample(desc, trainer->weights(), "the ", 100, 1.0, 1);
  const auto other = sample(desc, trainer->weights(), "the ", 100, 1.0, 2);
  ASSERT_TRUE(one.ok() && same.ok() && other.ok());
  EXPECT_EQ(one->size(), 100u);
  EXPECT_EQ(*one, *same);
  EXPECT_NE(*one, *other);
  // What follows a full context is what follows the last half of it.
  const std::string whole = "the " + *one, half = whole.substr(static_cast<size_t>(desc.context + 1) / 2 + 1);
  Result<Decoder> decoder = Decoder::make(desc, trainer->weights());
  ASSERT_TRUE(decoder.ok());
  ASSERT_TRUE(decoder->read(whole.substr(0, static_cast<size_t>(desc.context))).ok());
  decoder->forget();
  ASSERT_TRUE(decoder->read(half.substr(0, static_cast<size_t>(desc.context) / 2)).ok());
  Result<Decoder> fresh = Decoder::make(desc, trainer->weights());
  ASSERT_TRUE(fresh.ok() && fresh->read(half.substr(0, static_cast<size_t>(desc.context) / 2)).ok());
  for (int64_t n = 0; n < kNumBytes; ++n) ASSERT_EQ(decoder->logits()[n], fresh->logits()[n]) << n;
  EXPECT_FALSE(sample(desc, trainer->weights(), "", 10, 1.0, 1).ok());
}

TEST_F(TrainText, TheTableOfPairsKnowsWhatFollows) {
  const ModelDesc desc = small_model();
  Text text;
  for (int i = 0; i < 4000; ++i) text.train.push_back(static_cast<uint8_t>("abc"[i % 3]));
  text.validation = text.train;
  EXPECT_LT(bigram_loss(text, validation_batches(text, desc, 4)), 1e-3);
  testing::Random random(1, 0);
  for (uint8_t& byte : text.train) byte = static_cast<uint8_t>("ab"[random.below(2)]);
  text.validation = text.train;
  EXPECT_NEAR(bigram_loss(text, validation_batches(text, desc, 4)), std::log(2.0), 0.02);
}

TEST_F(TrainText, ReadsFilesAndFolders) {
  fs::create_directories(folder_ / "build");
  write("b.md", std::string(600, 'b'));
  write("a.txt", std::string(600, 'a'));
  write("picture.png", std::string(600, 'p'));
  write("build/c.md", std::string(600, 'c'));
  const auto text = read_text(folder_.string(), 24);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(text->train.size() + text->validation.size(), 1200u);
  EXPECT_EQ(text->train.front(), 'a');
  EXPECT_EQ(text->train.back(), 'b');
  EXPECT_EQ(text->validation.size(), 120u);
  EXPECT_NE(read_text(path("a.txt"), 512).status().message().find("600 bytes of text are too few"), std::string::npos);
  EXPECT_FALSE(read_text(path("nowhere"), 24).ok());
}

TEST_F(TrainText, ExponentialIsAccurate) {
  for (double x = 0; x > -86; x -= 0.0137) {
    const auto rounded = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(rounded));
    EXPECT_NEAR(static_cast<double>(exp_of_negative(rounded)) / exact, 1, 4e-7) << x;
  }
  EXPECT_EQ(exp_of_negative(0.0f), 1.0f);
  EXPECT_LT(exp_of_negative(-1000.0f), 1e-37f);
}

TEST_F(TrainText, LearningRateRisesAndFalls) {
  EXPECT_DOUBLE_EQ(learning_rate_share(0, 100), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate_share(5, 100), 1);
  EXPECT_NEAR(learning_rate_share(99, 100), 0.1, 0.01);
  EXPECT_DOUBLE_EQ(learning_rate_share(1000, 100), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate_share(0, 1), 1);
}

TEST_F(TrainText, RefusesSizesThatDoNotAgree) {
  ModelDesc desc = small_model();
  desc.num_heads = 3;
  EXPECT_EQ(Model::make(desc, AttentionKind::kFused).status().message(), "num_heads is 3, must divide size 32");
  desc.num_heads = 0;
  EXPECT_EQ(Model::make(desc, AttentionKind::kFused).status().message(), "num_heads is 0, must be 1 to 1024");
}

}  // namespace
}  // namespace polyhead::demo
