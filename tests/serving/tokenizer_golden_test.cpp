// The tokenizer and chat template of a real model against what independent implementations made of
// them (parity/make_golden.py).

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "serving/gguf_tokenizer.h"
#include "serving/model.h"
#include "serving/test_files.h"

namespace foveal::serving {
namespace {

using nlohmann::json;
using Ids = std::vector<std::int32_t>;

/// The list under `key` of a golden file.
std::vector<json> golden(const std::string& name, const std::string& key) {
  std::ifstream in(std::filesystem::path(FOVEAL_SOURCE_DIR) / "tests/serving/parity" / name);
  return json::parse(in).at(key).get<std::vector<json>>();
}

class TokenizerGolden : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto path = default_model_path();
    if (!std::filesystem::exists(path)) {
      GTEST_SKIP() << path << " is missing; scripts/fetch_model.sh fetches it";
    }
    tokenizer_ = load_gguf_tokenizer(path);
  }
  std::string decode(const Ids& ids) const {
    std::string text;
    std::int32_t previous = -1;
    for (const std::int32_t id : ids) {
      text += tokenizer_->decode(id, previous);
      previous = id;
    }
    return text;
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(TokenizerGolden, EncodesTheSame) {
  const std::vector<json> strings = golden("tokenizer_golden.json", "strings");
  EXPECT_GE(strings.size(), 40U);
  for (const json& entry : strings) {
    const auto text = entry["text"].get<std::string>();
    const Ids ids = tokenizer_->encode(text);
    EXPECT_EQ(ids, entry["ids"].get<Ids>()) << text;
    EXPECT_EQ(decode(ids), text);
  }
}

TEST_F(TokenizerGolden, RendersAndEncodesTheSamePrompts) {
  ASSERT_TRUE(tokenizer_->has_chat_template());
  const std::vector<json> runs = golden("smollm2_golden.json", "runs");
  EXPECT_EQ(runs.size(), 5U);
  for (const json& run : runs) {
    std::vector<ChatMessage> messages;
    for (const json& message : run["messages"]) {
      messages.push_back({message["role"], message["content"]});
    }
    const std::string prompt = tokenizer_->apply_chat_template(messages);
    EXPECT_EQ(prompt, run["prompt"].get<std::string>());
    EXPECT_EQ(tokenizer_->encode(prompt, true), run["prompt_ids"].get<Ids>()) << prompt;
  }
}

TEST_F(TokenizerGolden, HasTheModelsEnds) {
  EXPECT_EQ(tokenizer_->stop_tokens(), (Ids{0, 2}));  // <|endoftext|>, <|im_end|>
  EXPECT_FALSE(tokenizer_->bos());                    // add_bos_token is false
}

TEST_F(TokenizerGolden, RoundTripsBytes) {
  // Invalid UTF-8, but for the bytes that this vocabulary has no token for.
  const std::string bytes = "\x80\xE6\x97z\xED\xA0\x80 \xF0\x9F\x98\n\xC3";
  EXPECT_EQ(decode(tokenizer_->encode(bytes)), bytes);
  EXPECT_EQ(decode(tokenizer_->encode("a\xFF"
                                      "b\xC0")),
            "ab");
}

}  // namespace
}  // namespace foveal::serving
