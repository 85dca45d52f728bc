#include "serving/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include "serving/gguf_builder.h"
#include "serving/tokenizer.h"

namespace foveal::serving {
namespace {

using testing::expect_error;
using testing::GgufBuilder;
using testing::TempDir;
using Ids = std::vector<std::int32_t>;

struct Words {
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;

  void add(const std::string& text, std::int32_t type = 1) {
    tokens.push_back(text);
    types.push_back(type);
  }
};

/// 0 <|end|>, 1 <|x|>, 2 <|x|>+ (all control, the last user-defined), then printable ASCII from "!"
/// = 3, the space 97, the newline 98, the bytes of "é" 99 and 100, then merges.
Words tiny_words() {
  Words words;
  words.add("<|endoftext|>", 3);
  words.add("<|x|>", 3);
  words.add("<|x|>+", 4);
  for (char c = '!'; c <= '~'; ++c) {
    words.add(std::string(1, c));
  }
  words.add("Ġ");
  words.add("Ċ");
  words.add("Ã");
  words.add("©");
  for (const char* merged : {"he", "ll", "hell", "hello", "Ġhello", "Ã©", "aa"}) {
    words.add(merged);  // 101 to 107
  }
  return words;
}

GgufBuilder tokenizer_file(const Words& words = tiny_words(), const std::string& pre = "smollm") {
  GgufBuilder file;
  file.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", pre);
  file.strings("tokenizer.ggml.tokens", words.tokens)
      .i32s("tokenizer.ggml.token_type", words.types);
  file.strings("tokenizer.ggml.merges", {"h e", "l l", "he ll", "hell o", "Ġ hello", "Ã ©", "a a"});
  return file;
}

std::int32_t ascii(char c) { return 3 + c - '!'; }

class GgufTokenizerTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tokenizer> load(const GgufBuilder& file, std::int64_t vocab_size = 200) {
    return load_tokenizer(folder_.write("m.gguf", file.build()), "", vocab_size);
  }
  TempDir folder_;
};

TEST_F(GgufTokenizerTest, MergesByRank) {
  const auto tokenizer = load(tokenizer_file());
  EXPECT_EQ(tokenizer->vocab_size(), 108);
  EXPECT_EQ(tokenizer->encode(""), Ids{});
  EXPECT_EQ(tokenizer->encode("hello hello"), (Ids{104, 105}));
  EXPECT_EQ(tokenizer->encode("hel"), (Ids{101, ascii('l')}));
  EXPECT_EQ(tokenizer->encode("aaa aaaa"), (Ids{107, ascii('a'), 97, 107, 107}));
  EXPECT_EQ(tokenizer->encode("é\n"), (Ids{106, 98}));
  EXPECT_EQ(tokenizer->encode("12"), (Ids{ascii('1'), ascii('2')}));
  EXPECT_EQ(tokenizer->decode(105, -1), " hello");
  EXPECT_EQ(tokenizer->decode(99, -1), "\xC3");
  expect_error(ErrorCode::invalid_argument, {"token is 108"}, [&] { tokenizer->decode(108, -1); });
  expect_error(ErrorCode::invalid_argument, {"token is -1"}, [&] { tokenizer->decode(-1, -1); });
}

TEST_F(GgufTokenizerTest, MatchesSpecialTokensOnlyWhenAsked) {
  const auto tokenizer = load(tokenizer_file());
  EXPECT_EQ(tokenizer->encode("<|x|>").size(), 5U);
  EXPECT_EQ(tokenizer->encode("a<|x|>hello<|endoftext|>", true), (Ids{ascii('a'), 1, 104, 0}));
  EXPECT_EQ(tokenizer->encode("<|x|>+<|x|", true).front(), 2);  // the longest
  EXPECT_EQ(tokenizer->decode(1, -1), "");
  EXPECT_EQ(tokenizer->decode(2, -1), "<|x|>+");
}

TEST_F(GgufTokenizerTest, LeavesOutBytesWithoutAToken) {
  const auto tokenizer = load(tokenizer_file());
  EXPECT_EQ(tokenizer->encode("a\xFF"
                              "b"),
            (Ids{ascii('a'), ascii('b')}));
}

TEST_F(GgufTokenizerTest, IsQuickOnALongWord) {
  const auto tokenizer = load(tokenizer_file());
  EXPECT_EQ(tokenizer->encode(std::string(1'000'000, 'a')).size(), 500'000U);
}

TEST_F(GgufTokenizerTest, ReadsTheTokensOfTheEnds) {
  EXPECT_EQ(load(tokenizer_file())->stop_tokens(), Ids{0});
  EXPECT_FALSE(load(tokenizer_file())->bos());
  GgufBuilder file = tokenizer_file();
  file.u32("tokenizer.ggml.eos_token_id", 2).u32("tokenizer.ggml.eot_token_id", 1);
  file.u32("tokenizer.ggml.bos_token_id", 1).boolean("tokenizer.ggml.add_bos_token", true);
  EXPECT_EQ(load(file)->stop_tokens(), (Ids{0, 1, 2}));
  EXPECT_EQ(load(file)->bos(), 1);
}

TEST_F(GgufTokenizerTest, SaysWhenThereIsNoChatTemplate) {
  const auto none = load(tokenizer_file());
  EXPECT_FALSE(none->has_chat_template());
  expect_error(ErrorCode::unsupported, {"chat_template"}, [&] {
    none->apply_chat_template({{"user", "x"}});
  });
  GgufBuilder file = tokenizer_file();
  file.string("tokenizer.chat_template", "{{ something_else }}");
  EXPECT_FALSE(load(file)->has_chat_template());
}

TEST_F(GgufTokenizerTest, RefusesOthersByName) {
  expect_error(ErrorCode::unsupported, {"m.gguf", "tokenizer.ggml.pre is \"llama-bpe\"", "smollm"},
               [&] { load(tokenizer_file(tiny_words(), "llama-bpe")); });
  GgufBuilder other;
  other.string("tokenizer.ggml.model", "llama");
  expect_error(ErrorCode::unsupported,
               {"m.gguf", "tokenizer.ggml.model is \"llama\"", "--tokenizer"},
               [&] { load(other); });
  expect_error(ErrorCode::unsupported, {"add_space_prefix"},
               [&] { load(tokenizer_file().boolean("tokenizer.ggml.add_space_prefix", true)); });
}

TEST_F(GgufTokenizerTest, RefusesContradictions) {
  expect_error(ErrorCode::io, {"108 tokens", "vocab_size, 100"},
               [&] { load(tokenizer_file(), 100); });
  Words words = tiny_words();
  words.types.pop_back();
  expect_error(ErrorCode::io, {"token_type has 107 elements"},
               [&] { load(tokenizer_file(words)); });
  words = tiny_words();
  words.tokens[101] = "hx";
  expect_error(ErrorCode::io, {"merge 0", "\"h\" and \"e\""}, [&] { load(tokenizer_file(words)); });
  expect_error(ErrorCode::io, {"eos_token_id is 108"},
               [&] { load(tokenizer_file().u32("tokenizer.ggml.eos_token_id", 108)); });
  GgufBuilder file;
  file.string("tokenizer.ggml.model", "gpt2");
  expect_error(ErrorCode::io, {"tokenizer.ggml.tokens is missing"}, [&] { load(file); });
  file.strings("tokenizer.ggml.tokens", {"a"}).i32s("tokenizer.ggml.token_type", {1});
  file.strings("tokenizer.ggml.merges", {"ab"});
  expect_error(ErrorCode::io, {"merges holds \"ab\""}, [&] { load(file); });
}

TEST_F(GgufTokenizerTest, SurvivesDamage) {
  testing::expect_survives_damage(
      folder_, "m.gguf", tokenizer_file().build(),
      [&] {
        const auto tokenizer = load_gguf_tokenizer(folder_.path() / "m.gguf");
        const Ids ids = tokenizer->encode("hello <|x|> é 12", true);
        for (const std::int32_t id : ids) {
          tokenizer->decode(id, -1);
        }
      },
      true);
}

}  // namespace
}  // namespace foveal::serving
