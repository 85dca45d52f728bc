#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "serving/engine.h"
#include "serving/model.h"
#include "serving/tokenizer.h"
#include "test_models.h"

// The engine against the texts of other programs. Needs model files; without them the tests are
// skipped.
namespace foveal::serving {
namespace {

using testing::expect_greedy;
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

TEST_P(Stories, NarrowDtypesGiveTheSameText) {
  EngineConfig config;
  config.backend = GetParam();
  const Prompts prompts = {{tokenizer_->bos().value()}};
  const Prompts expected = serve(model_, config, prompts, 100);
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::f16, 0.01}, std::pair{DType::bf16, 0.1}}) {
    SCOPED_TRACE(to_string(dtype));
    config.dtype = dtype;
    expect_greedy(model_, prompts, serve(model_, config, prompts, 100), expected, tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Stories, ::testing::Values("REFERENCE", "CPU_ATTN"),
                         [](const auto& info) { return std::string(info.param); });

/// The small chat model of scripts/fetch_model.sh, and what the independent program of
/// tests/serving/parity makes of its prompts.
class SmolLM2 : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path path = default_model_path();
    if (!std::filesystem::exists(path)) {
      GTEST_SKIP() << path << " is missing; scripts/fetch_model.sh downloads it";
    }
    model_ = load_model(path);
    tokenizer_ = load_tokenizer(path, {}, model_.config.vocab_size);
    std::ifstream file(std::filesystem::path(FOVEAL_SOURCE_DIR) / "tests" / "serving" / "parity" /
                       "smollm2_golden.json");
    runs_ = nlohmann::json::parse(file).at("runs");
  }

  Model model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  nlohmann::json runs_;
};

TEST_F(SmolLM2, TokensAreTheGoldenOnes) {
  Prompts prompts;
  for (const auto& run : runs_) {
    prompts.push_back(run.at("prompt_ids"));
    EXPECT_EQ(tokenizer_->encode(run.at("prompt").get<std::string>(), true), prompts.back());
  }
  // No stop tokens: the golden runs go on after the end of the answer.
  EngineStats stats;
  const Prompts outputs = serve(model_, {}, prompts, 64, &stats);
  EXPECT_GT(stats.prefix_hit_tokens, 0) << "the system prompt is shared";
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::vector<std::int32_t> expected = runs_[i].at("generated_ids");
    const std::vector<double> gaps = runs_[i].at("top2_gaps");
    const auto differs = std::ranges::mismatch(outputs[i], expected).in1 - outputs[i].begin();
    // Where the two likeliest tokens are that close, float32 summed in another order may swap them.
    EXPECT_TRUE(differs == std::ssize(expected) || gaps[static_cast<std::size_t>(differs)] < 1e-3)
        << "run " << i << " differs at token " << differs;
  }
}

TEST_F(SmolLM2, Float16GivesTheSameTokens) {
  Prompts prompts;
  for (const auto& run : runs_) {
    prompts.push_back(run.at("prompt_ids"));
  }
  const Prompts expected = serve(model_, {}, prompts, 32);
  EngineConfig config;
  config.dtype = DType::f16;
  expect_greedy(model_, prompts, serve(model_, config, prompts, 32), expected, 0.05);
}

TEST_F(SmolLM2, SixteenPromptsGiveWhatTheyGiveAlone) {
  constexpr std::int64_t kTokens = 10;
  Prompts prompts;
  for (const char* what :
       {"France", "Italy", "Spain", "Japan", "Peru", "Chile", "Egypt", "Kenya", "India", "Nepal",
        "Norway", "Poland", "Greece", "Turkey", "Canada", "Brazil"}) {
    prompts.push_back(
        tokenizer_->encode(tokenizer_->apply_chat_template(
                               {{"user", "What is the capital of " + std::string(what) + "?"}}),
                           true));
  }
  EngineConfig one_by_one;
  one_by_one.max_num_seqs = 1;
  Prompts alone;
  for (const auto& prompt : prompts) {
    alone.push_back(serve(model_, one_by_one, {prompt}, kTokens)[0]);
  }
  EngineStats stats;
  EXPECT_EQ(serve(model_, {}, prompts, kTokens, &stats), alone);
  EXPECT_GE(stats.prefix_hit_blocks, 15);
  EngineConfig narrow;
  narrow.num_blocks = 1 + 24;
  narrow.max_num_batched_tokens = 48;
  narrow.max_seq_len = 128;
  EXPECT_EQ(serve(model_, narrow, prompts, kTokens, &stats), alone);
  EXPECT_LE(stats.peak_blocks, 24);
}

}  // namespace
}  // namespace foveal::serving
