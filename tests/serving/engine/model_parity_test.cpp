#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "serving/engine.h"
#include "serving/model.h"
#include "serving/tokenizer.h"
#include "test_models.h"

// The engine against the texts of other programs. Needs model files; without them the tests are
// skipped.
namespace foveal::serving {
namespace {

using testing::serve;
using testing::shared_dir;

using Prompts = std::vector<std::vector<std::int32_t>>;

class Stories : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::filesystem::path folder = shared_dir() / "data" / "models";
    const std::filesystem::path path = folder / "stories260K.bin";
    if (!std::filesystem::exists(path)) {
      GTEST_SKIP() << path << " is missing";
    }
    model_ = load_model(path);
    tokenizer_ = load_tokenizer(path, folder / "tok512.bin", model_.config.vocab_size);
    std::ifstream file(folder / "stories260K.expected.txt", std::ios::binary);
    expected_.assign(std::istreambuf_iterator<char>(file), {});
  }

  std::string text_of(const std::vector<std::int32_t>& tokens, std::int32_t previous) const {
    std::string text;
    for (const std::int32_t token : tokens) {
      text += tokenizer_->decode(token, previous);
      previous = token;
    }
    return text;
  }

  Model model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::string expected_;
};

TEST_P(Stories, TextIsThatOfTheReferenceProgram) {
  EngineConfig config;
  config.backend = GetParam();
  config.stop_tokens = tokenizer_->stop_tokens();
  const std::int32_t bos = tokenizer_->bos().value();
  const auto tokens = serve(model_, config, {{bos}}, 200)[0];
  EXPECT_EQ(text_of(tokens, bos) + "\n", expected_);
}

TEST_P(Stories, PromptsSharingAPrefixGiveWhatTheyGiveAlone) {
  EngineConfig config;
  config.backend = GetParam();
  config.stop_tokens = tokenizer_->stop_tokens();
  const std::int32_t bos = tokenizer_->bos().value();
  Prompts prompts;
  for (const char* name : {"Tim", "Sue", "Max", "Lily", "Ben", "Mia", "Tom", "Anna", "Sam", "Zoe",
                           "Joe", "Amy", "Bob", "Eva", "Leo", "Kim"}) {
    prompts.push_back(tokenizer_->encode(
        "Once upon a time, there was a little girl who liked to play with her friend " +
        std::string(name)));
    prompts.back().insert(prompts.back().begin(), bos);
  }
  Prompts alone;
  for (const auto& prompt : prompts) {
    alone.push_back(serve(model_, config, {prompt}, 60)[0]);
  }
  EngineStats stats;
  EXPECT_EQ(serve(model_, config, prompts, 60, &stats), alone);
  EXPECT_GT(stats.prefix_hit_tokens, 0);

  // Small pieces of prompts, and too few blocks for all.
  config.max_num_batched_tokens = 16;
  EXPECT_EQ(serve(model_, config, prompts, 60), alone);
  config.block_size = 16;
  config.num_blocks = 1 + 24;
  EXPECT_EQ(serve(model_, config, prompts, 60, &stats), alone);
  EXPECT_GT(stats.preemptions, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, Stories, ::testing::Values("REFERENCE", "CPU_ATTN"),
                         [](const auto& info) { return std::string(info.param); });

/// The golden file's prompts and greedy tokens, made with PyTorch.
std::optional<nlohmann::json> load_golden() {
  std::ifstream file(std::filesystem::path(FOVEAL_SOURCE_DIR) / "tests" / "serving" / "parity" /
                     "smollm2_golden.json");
  if (!file) {
    return std::nullopt;
  }
  return nlohmann::json::parse(file);
}

TEST(SmolLM2, TokensAreThoseOfPyTorch) {
  const std::filesystem::path path = default_model_path();
  const auto golden = load_golden();
  if (!std::filesystem::exists(path) || !golden) {
    GTEST_SKIP() << path << " (scripts/fetch_model.sh) or the golden file is missing";
  }
  const Model model = load_model(path);
  (void)model;
}

}  // namespace
}  // namespace foveal::serving
