#include "serving/llama2c.h"

#include <gtest/gtest.h>

#include "serving/test_files.h"
#include "serving/tokenizer.h"

namespace foveal::serving {
namespace {

using testing::append;
using testing::bytes_of;
using testing::expect_error;
using testing::ramp;
using testing::TempDir;

/// dim 4, hidden 6, 2 layers, 2 heads, 1 KV head, 5 tokens, context 3; the weights count up from 0.
std::string tiny_file(bool tied) {
  std::string out = bytes_of(std::vector<std::int32_t>{4, 6, 2, 2, 1, tied ? 5 : -5, 3});
  const std::size_t per_layer = 4 + 16 + 8 + 8 + 16 + 4 + 24 + 24 + 24;
  const std::size_t tables = 2 * 3 * 1;
  const std::size_t count = 20 + 2 * per_layer + 4 + tables + (tied ? 0 : 20);
  return out + bytes_of(ramp(count, 0.0F, 1.0F));
}

class Llama2cTest : public ::testing::Test {
 protected:
  Model load(const std::string& content) { return load_model(folder_.write("m.bin", content)); }
  std::unique_ptr<Tokenizer> load_words(const std::string& content, std::int64_t vocab_size) {
    const auto path = folder_.write("t.bin", content);
    return load_tokenizer(folder_.path() / "m.bin", path, vocab_size);
  }
  TempDir folder_;
};

TEST_F(Llama2cTest, ReadsTheLayout) {
  const Model model = load(tiny_file(true));
  EXPECT_EQ(model.config.name, "m");
  EXPECT_EQ(model.config.head_size, 2);
  EXPECT_EQ(model.config.num_kv_heads, 1);
  EXPECT_EQ(model.config.max_seq_len, 3);
  EXPECT_TRUE(model.config.rope_interleaved);
  // The tensors of all layers of one kind follow each other: 20 embeddings, norms at 20, Q at 28, K
  // at 60, V at 76, output at 92, norms at 124, gate at 132, down at 180, up at 228, the last norm
  // at 276.
  EXPECT_EQ(model.token_embedding.data[19], 19.0F);
  const LayerWeights& layer = model.layers[1];
  EXPECT_EQ(layer.attn_norm[0], 24.0F);
  EXPECT_EQ(layer.qkv.rows, 8);
  EXPECT_EQ(layer.qkv.data[0], 44.0F);
  EXPECT_EQ(layer.qkv.data[16], 68.0F);
  EXPECT_EQ(layer.qkv.data[24], 84.0F);
  EXPECT_EQ(layer.output.data[0], 108.0F);
  EXPECT_EQ(layer.ffn_norm[0], 128.0F);
  EXPECT_EQ(layer.gate_up.data[0], 156.0F);
  EXPECT_EQ(layer.gate_up.data[24], 252.0F);
  EXPECT_EQ(layer.down.data[0], 204.0F);
  EXPECT_EQ(model.output_norm[0], 276.0F);
  EXPECT_EQ(model.lm_head.rows, 0);
}

TEST_F(Llama2cTest, ReadsASeparateClassifierAfterTheRotaryTables) {
  EXPECT_EQ(load(tiny_file(false)).head().data[0], 286.0F);
}

TEST_F(Llama2cTest, RefusesWhatDoesNotFit) {
  expect_error(ErrorCode::io, {"m.bin", "freq_cis_imag", "needs 12 bytes", "ends at"}, [&] {
    const std::string whole = tiny_file(true);
    load(whole.substr(0, whole.size() - 4));
  });
  expect_error(ErrorCode::io, {"m.bin", "4 bytes after"}, [&] { load(tiny_file(true) + "abcd"); });
  const auto refuse = [&](ErrorCode code, const std::vector<std::string>& parts, std::size_t field,
                          std::int32_t value) {
    std::string content = tiny_file(true);
    std::memcpy(content.data() + 4 * field, &value, sizeof(value));
    expect_error(code, parts, [&] { load(content); });
  };
  refuse(ErrorCode::io, {"hidden_size is 0"}, 0, 0);
  refuse(ErrorCode::io, {"intermediate_size is -6"}, 1, -6);
  refuse(ErrorCode::io, {"num_layers is 2147483647"}, 2, 2147483647);
  refuse(ErrorCode::io, {"n_heads is 3", "dim"}, 3, 3);
  refuse(ErrorCode::io, {"vocab_size is 2147483648"}, 5, std::numeric_limits<std::int32_t>::min());
  refuse(ErrorCode::io, {"token_embedding needs"}, 5, 1 << 20);
  refuse(ErrorCode::unsupported, {"ak42"}, 0, 0x616B3432);
}

TEST_F(Llama2cTest, SurvivesDamage) {
  const auto path = folder_.path() / "m.bin";
  testing::expect_survives_damage(folder_, "m.bin", tiny_file(false),
                                  [&] { load_llama2c_model(path, nullptr, nullptr); });
}

/// "<unk>", BOS, EOS, the 256 bytes, then these with their scores.
std::string vocabulary_file(const std::vector<std::pair<std::string, float>>& words) {
  std::string out;
  append(out, std::int32_t{16});
  const auto add = [&](const std::string& text, float score) {
    append(out, score);
    append(out, static_cast<std::int32_t>(text.size()));
    out += text;
  };
  add("<unk>", 0.0F);
  add("\n<s>\n", 0.0F);
  add("\n</s>\n", 0.0F);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", static_cast<unsigned>(byte));
    add(name, 0.0F);
  }
  for (const auto& [text, score] : words) {
    add(text, score);
  }
  return out;
}

TEST_F(Llama2cTest, MergesByScoreAndFallsBackToBytes) {
  folder_.write("m.bin", tiny_file(true));
  // Ids from 259 on.
  const auto words = load_words(vocabulary_file({{" ", -9},
                                                 {"a", -9},
                                                 {"b", -9},
                                                 {"ab", -2},
                                                 {" a", -3},
                                                 {" ab", -4},
                                                 {"ba", -1},
                                                 {"é", -9}}),
                                267);
  EXPECT_EQ(words->encode(""), (std::vector<std::int32_t>{}));
  EXPECT_EQ(words->encode("ab"), (std::vector<std::int32_t>{264}));        // ab, then " ab"
  EXPECT_EQ(words->encode("aba"), (std::vector<std::int32_t>{263, 265}));  // "ba" scores best
  EXPECT_EQ(words->encode("é"), (std::vector<std::int32_t>{259, 266}));
  EXPECT_EQ(words->encode("ü"), (std::vector<std::int32_t>{259, 3 + 0xC3, 3 + 0xBC}));
  EXPECT_EQ(words->encode("\xFF"), (std::vector<std::int32_t>{259, 3 + 0xFF}));

  EXPECT_EQ(words->decode(264, 1), "ab");
  EXPECT_EQ(words->decode(264, 263), " ab");
  EXPECT_EQ(words->decode(3 + 0xC3, 1), "\xC3");
  EXPECT_EQ(words->decode(1, -1), "");
  EXPECT_EQ(words->decode(2, 264), "");
  EXPECT_EQ(words->bos(), 1);
  EXPECT_EQ(words->stop_tokens(), (std::vector<std::int32_t>{1, 2}));
  EXPECT_FALSE(words->has_chat_template());
  expect_error(ErrorCode::unsupported, {"chat_template"}, [&] {
    words->apply_chat_template({{"user", "hi"}});
  });
  expect_error(ErrorCode::invalid_argument, {"token is 267"}, [&] { words->decode(267, 1); });
}

TEST_F(Llama2cTest, RefusesAVocabularyOfAnotherSize) {
  folder_.write("m.bin", tiny_file(true));
  const std::string words = vocabulary_file({{" ", -9}});
  expect_error(ErrorCode::io, {"t.bin", "bytes after 259 tokens"}, [&] { load_words(words, 259); });
  expect_error(ErrorCode::io, {"t.bin", "a token's score"}, [&] { load_words(words, 261); });
  expect_error(ErrorCode::io, {"t.bin", "vocab_size is 1000000"},
               [&] { load_words(words, 1000000); });
  expect_error(ErrorCode::io, {"t.bin", "vocab_size is -1"}, [&] { load_words(words, -1); });
  expect_error(ErrorCode::unsupported, {"m.bin", "--tokenizer"},
               [&] { load_tokenizer(folder_.path() / "m.bin", "", 260); });
  testing::expect_survives_damage(folder_, "t.bin", words, [&] {
    load_tokenizer(folder_.path() / "m.bin", folder_.path() / "t.bin", 260);
  });
}

TEST_F(Llama2cTest, LoadsTheSharedModel) {
  const auto models = testing::shared_dir() / "data" / "models";
  if (!std::filesystem::exists(models / "stories260K.bin")) {
    GTEST_SKIP() << models << " has no stories260K.bin; set FOVEAL_SHARED_DIR to run this test";
  }
  const Model model = load_model(models / "stories260K.bin");
  EXPECT_EQ(model.config.num_layers, 5);
  EXPECT_EQ(model.config.hidden_size, 64);
  EXPECT_EQ(model.config.intermediate_size, 172);
  EXPECT_EQ(model.config.num_heads, 8);
  EXPECT_EQ(model.config.num_kv_heads, 4);
  EXPECT_EQ(model.config.max_seq_len, 512);
  EXPECT_EQ(model.lm_head.rows, 0);
  const auto words =
      load_tokenizer(models / "stories260K.bin", models / "tok512.bin", model.config.vocab_size);

  std::ifstream in(models / "stories260K.expected.txt", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::string decoded;
  std::int32_t previous = *words->bos();
  for (const std::int32_t token : words->encode(text)) {
    decoded += words->decode(token, previous);
    previous = token;
  }
  EXPECT_EQ(decoded, text);
  // Few tokens: whole words, not letters.
  EXPECT_LT(words->encode(text).size(), text.size() / 2);
}

}  // namespace
}  // namespace foveal::serving
