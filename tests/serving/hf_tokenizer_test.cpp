#include "serving/hf_tokenizer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "serving/test_files.h"
#include "serving/tokenizer.h"

namespace foveal::serving {
namespace {

using nlohmann::json;
using testing::expect_error;
using testing::TempDir;
using Ids = std::vector<std::int32_t>;

json byte_level() {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
}

json tiny_tokenizer() {
  return {{"version", "1.0"},
          {"added_tokens",
           {{{"id", 0}, {"content", "<|im_end|>"}, {"special", true}, {"lstrip", false}},
            {{"id", 9}, {"content", "<tool>"}, {"special", false}, {"lstrip", false}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", true}}, byte_level()}}}},
          {"post_processor", nullptr},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"vocab",
             {{"<|im_end|>", 0},
              {"a", 1},
              {"b", 2},
              {"ab", 3},
              {"Ġ", 4},
              {"Ġab", 5},
              {"1", 6},
              {"11", 7},
              {"Ċ", 8}}},
            {"merges", {"a b", "Ġ ab", "1 1"}}}}};
}

class HfTokenizerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tokenizer> load(const json& content) {
    folder_.write("tokenizer.json", content.dump());
    return load_tokenizer(folder_.path(), "", 100);
  }
  void write(const std::string& name, const json& content) { folder_.write(name, content.dump()); }
  TempDir folder_;

  void SetUp() override { write("config.json", json::object()); }
};

TEST_F(HfTokenizerTest, Encodes) {
  const auto tokenizer = load(tiny_tokenizer());
  EXPECT_EQ(tokenizer->vocab_size(), 10);
  EXPECT_EQ(tokenizer->encode("ab ab11\n"), (Ids{3, 5, 6, 6, 8}));
  EXPECT_EQ(tokenizer->encode("ab<tool><|im_end|>", true), (Ids{3, 9, 0}));
  EXPECT_EQ(tokenizer->decode(5, -1), " ab");
  EXPECT_EQ(tokenizer->decode(9, -1), "<tool>");
  EXPECT_EQ(tokenizer->decode(0, -1), "");
  EXPECT_EQ(tokenizer->stop_tokens(), Ids{0});
  EXPECT_FALSE(tokenizer->bos());
}

TEST_F(HfTokenizerTest, ReadsMergesAsPairsAndByteLevelAlone) {
  json content = tiny_tokenizer();
  content["pre_tokenizer"] = byte_level();
  content["model"]["merges"] =
      json::array({json::array({"a", "b"}), json::array({"Ġ", "ab"}), json::array({"1", "1"})});
  EXPECT_EQ(load(content)->encode("ab ab11"), (Ids{3, 5, 7}));
}

TEST_F(HfTokenizerTest, ReadsWhatIsBesideIt) {
  write("tokenizer_config.json", {{"eos_token", {{"content", "b"}}},
                                  {"chat_template",
                                   "{% for message in messages %}{{'<|im_start|>' + "
                                   "message['role'] + '\n' + message['content'] + "
                                   "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt "
                                   "%}{{ '<|im_start|>assistant\n' "
                                   "}}{% endif %}"}});
  write("generation_config.json", {{"eos_token_id", {1, 0}}});
  json content = tiny_tokenizer();
  content["post_processor"] = {{"type", "TemplateProcessing"},
                               {"single",
                                {{{"SpecialToken", {{"id", "<|im_end|>"}, {"type_id", 0}}}},
                                 {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}}};
  const auto tokenizer = load(content);
  EXPECT_EQ(tokenizer->stop_tokens(), (Ids{0, 1, 2}));
  EXPECT_EQ(tokenizer->bos(), 0);
  EXPECT_TRUE(tokenizer->has_chat_template());
  EXPECT_EQ(tokenizer->apply_chat_template({{"user", "x"}}),
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n");
  write("generation_config.json", {{"eos_token_id", 10}});
  expect_error(ErrorCode::io, {"generation_config.json", "eos_token_id holds 10"},
               [&] { load(tiny_tokenizer()); });
}

TEST_F(HfTokenizerTest, RefusesOthersByName) {
  const auto refuse = [&](const std::string& pointer, const json& value, const std::string& part) {
    json content = tiny_tokenizer();
    content[json::json_pointer(pointer)] = value;
    expect_error(ErrorCode::unsupported, {"tokenizer.json", part}, [&] { load(content); });
  };
  refuse("/normalizer", {{"type", "NFC"}}, "NFC");
  refuse("/pre_tokenizer", {{"type", "Metaspace"}}, "Metaspace");
  refuse("/pre_tokenizer", nullptr, "pre_tokenizer is missing");
  refuse("/pre_tokenizer/pretokenizers/0/individual_digits", false, "Digits");
  refuse("/pre_tokenizer/pretokenizers/1/add_prefix_space", true, "add_prefix_space");
  refuse("/pre_tokenizer/pretokenizers/1/use_regex", false, "use_regex");
  refuse("/model/type", "WordPiece", "WordPiece");
  refuse("/model/byte_fallback", true, "byte_fallback");
  refuse("/model/ignore_merges", true, "ignore_merges");
  refuse("/model/unk_token", "a", "unk_token");
  refuse("/added_tokens/1/lstrip", true, "lstrip");
  refuse("/post_processor", {{"type", "BertProcessing"}}, "BertProcessing");
}

TEST_F(HfTokenizerTest, RefusesContradictions) {
  const auto refuse = [&](const std::string& pointer, const json& value, const std::string& part) {
    json content = tiny_tokenizer();
    content[json::json_pointer(pointer)] = value;
    expect_error(ErrorCode::io, {"tokenizer.json", part}, [&] { load(content); });
  };
  refuse("/model", nullptr, "model is missing");
  refuse("/model/vocab", 3, "vocab is 3");
  refuse("/model/vocab/a", -1, "token a has id -1");
  refuse("/model/vocab/a", 16000000, "token a has id 16000000");
  refuse("/model/vocab/a", 70000, "token a has id 70000, though there are only 8 before it");
  refuse("/model/merges", json::array({"ab"}), "merges holds \"ab\"");
  refuse("/model/merges", json::array({"a q"}), "merge 0");
  refuse("/added_tokens", json::array({3}), "added_tokens holds 3");
  expect_error(ErrorCode::io, {"tokenizer.json", "--tokenizer"}, [&] {
    std::filesystem::remove(folder_.path() / "tokenizer.json");
    load_tokenizer(folder_.path(), "", 100);
  });
}

TEST_F(HfTokenizerTest, SurvivesDamage) {
  testing::expect_survives_damage(folder_, "tokenizer.json", tiny_tokenizer().dump(), [&] {
    load_hf_tokenizer(folder_.path() / "tokenizer.json")->encode("ab <tool> 11", true);
  });
}

}  // namespace
}  // namespace foveal::serving
