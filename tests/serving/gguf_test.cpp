#include "serving/gguf.h"

#include <gtest/gtest.h>

#include <limits>

#include "serving/gguf_builder.h"

namespace foveal::serving {
namespace {

using testing::append;
using testing::expect_error;
using testing::GgufBuilder;
using testing::TempDir;

/// Two layers, hidden 32, 4 heads of 8, 2 KV heads, feed-forward 64, 40 tokens. Every tensor is a
/// ramp that starts at a number of its own.
GgufBuilder tiny_metadata() {
  GgufBuilder file;
  file.string("general.architecture", "llama").string("general.name", "tiny");
  file.u32("llama.block_count", 2).u32("llama.embedding_length", 32);
  file.u32("llama.feed_forward_length", 64).u32("llama.context_length", 128);
  file.u32("llama.attention.head_count", 4).u32("llama.attention.head_count_kv", 2);
  file.f32("llama.attention.layer_norm_rms_epsilon", 1e-6F).f32("llama.rope.freq_base", 5000.0F);
  return file;
}

void add_tensors(GgufBuilder& file, bool with_output) {
  file.f32_tensor("token_embd.weight", {32, 40}, 0.0F, 1.0F);
  for (const std::string layer : {"blk.0.", "blk.1."}) {
    const float base = layer == "blk.0." ? 100.0F : 200.0F;
    file.f32_tensor(layer + "attn_norm.weight", {32}, base, 0.25F);
    file.f32_tensor(layer + "attn_q.weight", {32, 32}, base + 1, 0.25F);
    file.f32_tensor(layer + "attn_k.weight", {32, 16}, base + 2, 0.25F);
    file.f32_tensor(layer + "attn_v.weight", {32, 16}, base + 3, 0.25F);
    file.f32_tensor(layer + "attn_output.weight", {32, 32}, base + 4, 0.25F);
    file.f32_tensor(layer + "ffn_norm.weight", {32}, base + 5, 0.25F);
    file.f32_tensor(layer + "ffn_gate.weight", {32, 64}, base + 6, 0.25F);
    file.f32_tensor(layer + "ffn_up.weight", {32, 64}, base + 7, 0.25F);
    file.f32_tensor(layer + "ffn_down.weight", {64, 32}, base + 8, 0.25F);
  }
  file.f32_tensor("output_norm.weight", {32}, 300.0F, 0.25F);
  if (with_output) {
    file.f32_tensor("output.weight", {32, 40}, 400.0F, 0.25F);
  }
}

std::string tiny_gguf() {
  GgufBuilder file = tiny_metadata();
  add_tensors(file, false);
  return file.build();
}

class GgufTest : public ::testing::Test {
 protected:
  Model load(const std::string& content) { return load_model(folder_.write("m.gguf", content)); }
  void expect_refused(ErrorCode code, const std::vector<std::string>& parts,
                      const GgufBuilder& file) {
    expect_error(code, parts, [&] { load(file.build()); });
    expect_error(code, {"m.gguf"}, [&] { load(file.build()); });
  }
  TempDir folder_;
};

TEST_F(GgufTest, LoadsATiedModel) {
  const Model model = load(tiny_gguf());
  EXPECT_EQ(model.config.name, "tiny");
  EXPECT_EQ(model.config.num_layers, 2);
  EXPECT_EQ(model.config.head_size, 8);
  EXPECT_EQ(model.config.vocab_size, 40);
  EXPECT_EQ(model.config.max_seq_len, 128);
  EXPECT_EQ(model.config.rope_theta, 5000.0F);
  EXPECT_EQ(model.config.rms_norm_eps, 1e-6F);
  EXPECT_TRUE(model.config.rope_interleaved);
  ASSERT_EQ(model.layers.size(), 2U);
  const LayerWeights& layer = model.layers[1];
  EXPECT_EQ(layer.attn_norm[2], 200.5F);
  EXPECT_EQ(layer.qkv.rows, 64);
  EXPECT_EQ(layer.qkv.cols, 32);
  EXPECT_EQ(layer.qkv.data[0], 201.0F);        // Q
  EXPECT_EQ(layer.qkv.data[32 * 32], 202.0F);  // K after the 32 rows of Q
  EXPECT_EQ(layer.qkv.data[48 * 32], 203.0F);  // V after the 16 rows of K
  EXPECT_EQ(layer.output.data[0], 204.0F);
  EXPECT_EQ(layer.ffn_norm[0], 205.0F);
  EXPECT_EQ(layer.gate_up.rows, 128);
  EXPECT_EQ(layer.gate_up.data[1], 206.25F);
  EXPECT_EQ(layer.gate_up.data[64 * 32], 207.0F);
  EXPECT_EQ(layer.down.rows, 32);
  EXPECT_EQ(layer.down.cols, 64);
  EXPECT_EQ(layer.down.data[0], 208.0F);
  EXPECT_EQ(model.output_norm[0], 300.0F);
  EXPECT_EQ(model.lm_head.rows, 0);
  EXPECT_EQ(&model.head(), &model.token_embedding);
}

TEST_F(GgufTest, LoadsASeparateHeadAndVersion2) {
  GgufBuilder file = tiny_metadata();
  file.version = 2;
  add_tensors(file, true);
  const Model model = load(file.build());
  EXPECT_EQ(model.lm_head.rows, 40);
  EXPECT_EQ(model.head().data[1], 400.25F);
}

TEST_F(GgufTest, HonoursTheAlignmentKey) {
  GgufBuilder file = tiny_metadata();
  file.alignment = 64;
  file.u32("general.alignment", 64);
  add_tensors(file, false);
  EXPECT_EQ(load(file.build()).output_norm[1], 300.25F);
}

TEST_F(GgufTest, ReportsProgressUpToTheTotal) {
  const auto path = folder_.write("m.gguf", tiny_gguf());
  std::vector<std::pair<std::int64_t, std::int64_t>> calls;
  load_model(
      path,
      [](void* user, std::int64_t done, std::int64_t total) {
        static_cast<decltype(calls)*>(user)->emplace_back(done, total);
      },
      &calls);
  ASSERT_FALSE(calls.empty());
  EXPECT_EQ(calls.back().first, calls.back().second);
}

TEST_F(GgufTest, RefusesWhatItDoesNotCompute) {
  const auto refuse = [&](const std::vector<std::string>& parts, auto change) {
    GgufBuilder file = tiny_metadata();
    change(file);
    add_tensors(file, false);
    expect_refused(ErrorCode::unsupported, parts, file);
  };
  refuse({"llama.rope.scaling.type", "\"yarn\"", "\"none\""},
         [](GgufBuilder& f) { f.string("llama.rope.scaling.type", "yarn"); });
  refuse({"llama.expert_count is 8"}, [](GgufBuilder& f) { f.u32("llama.expert_count", 8); });
  refuse({"llama.rope.dimension_count is 4", "8"},
         [](GgufBuilder& f) { f.u32("llama.rope.dimension_count", 4); });
  refuse({"llama.logit_scale"}, [](GgufBuilder& f) { f.f32("llama.logit_scale", 2.0F); });
  refuse({"tensor blk.0.attn_q.bias"},
         [](GgufBuilder& f) { f.f32_tensor("blk.0.attn_q.bias", {32}, 0.0F, 1.0F); });
  refuse({"tensor rope_freqs.weight"},
         [](GgufBuilder& f) { f.f32_tensor("rope_freqs.weight", {4}, 1.0F, 0.0F); });

  GgufBuilder other;
  other.string("general.architecture", "gemma2");
  expect_refused(ErrorCode::unsupported, {"general.architecture is \"gemma2\"", "\"llama\""},
                 other);
  GgufBuilder old = tiny_metadata();
  old.version = 1;
  expect_refused(ErrorCode::unsupported, {"version is 1"}, old);
  old.version = 0x03000000;
  expect_refused(ErrorCode::unsupported, {"big-endian"}, old);
}

TEST_F(GgufTest, NamesAnUnknownTensorType) {
  GgufBuilder file = tiny_metadata();
  file.tensor("token_embd.weight", {32, 40}, 14, std::string(4096, '\0'));
  expect_refused(ErrorCode::unsupported, {"token_embd.weight", "Q6_K", "Q4_1"}, file);
}

TEST_F(GgufTest, RefusesContradictions) {
  const auto refuse = [&](const std::vector<std::string>& parts, auto make) {
    GgufBuilder file = tiny_metadata();
    make(file);
    expect_refused(ErrorCode::io, parts, file);
  };
  refuse({"tensor token_embd.weight is missing"}, [](GgufBuilder&) {});
  refuse({"metadata key general.name occurs twice"},
         [](GgufBuilder& f) { f.string("general.name", "again"); });
  refuse({"tensor token_embd.weight has shape [40, 16], must be [40, 32]"}, [](GgufBuilder& f) {
    f.f32_tensor("token_embd.weight", {16, 40}, 0.0F, 1.0F);
  });
  refuse({"tensor token_embd.weight", "does not lie in the file"}, [](GgufBuilder& f) {
    f.tensor_at("token_embd.weight", {32, 40}, 0, 1 << 20, std::string(5120, '\0'));
  });
  refuse({"tensor token_embd.weight", "does not lie in the file"}, [](GgufBuilder& f) {
    f.tensor_at("token_embd.weight", {32, 40}, 0, 0xFFFFFFFFFFFFFFE0ULL, std::string(5120, '\0'));
  });
  refuse({"tensor token_embd.weight has offset 7"}, [](GgufBuilder& f) {
    f.tensor_at("token_embd.weight", {32, 40}, 0, 7, std::string(5120, '\0'));
  });
  refuse({"tensor t has size"}, [](GgufBuilder& f) {
    f.tensor("t", {1ULL << 32, 1ULL << 32}, 0, "");
  });
  refuse({"tensor t has size 0"}, [](GgufBuilder& f) { f.tensor("t", {0}, 0, ""); });
  refuse({"tensor t has size -1"}, [](GgufBuilder& f) { f.tensor("t", {~0ULL}, 0, ""); });
  refuse({"tensor t has 9 dimensions"},
         [](GgufBuilder& f) { f.tensor("t", std::vector<std::uint64_t>(9, 1), 0, ""); });
  refuse({"llama.vocab_size is 41"}, [](GgufBuilder& f) {
    f.u32("llama.vocab_size", 41);
    add_tensors(f, false);
  });
  refuse({"general.alignment is 0"}, [](GgufBuilder& f) { f.u32("general.alignment", 0); });
  refuse({"key has value type 13"}, [](GgufBuilder& f) { f.raw("key", 13, ""); });
  refuse({"key is 18446744073709551615"},
         [](GgufBuilder& f) { f.u64("key", std::numeric_limits<std::uint64_t>::max()); });

  std::string nested;
  append(nested, std::uint32_t{9});
  append(nested, std::uint64_t{1});
  refuse({"key is an array of type 9"}, [&](GgufBuilder& f) { f.raw("key", 9, nested); });
  std::string endless;
  append(endless, std::uint32_t{8});
  append(endless, std::uint64_t{1} << 60);
  refuse({"key has 1152921504606846976 array elements"},
         [&](GgufBuilder& f) { f.raw("key", 9, endless); });
  std::string long_string;
  append(long_string, ~std::uint64_t{0});
  refuse({"key needs 18446744073709551615 bytes"},
         [&](GgufBuilder& f) { f.raw("key", 8, long_string); });
}

TEST_F(GgufTest, RefusesRowsThatAreNoWholeBlocks) {
  GgufBuilder file;
  file.string("general.architecture", "llama");
  file.u32("llama.block_count", 1).u32("llama.embedding_length", 16);
  file.u32("llama.feed_forward_length", 64).u32("llama.context_length", 128);
  file.u32("llama.attention.head_count", 2);
  file.tensor("token_embd.weight", {16, 2}, 8, std::string(34, '\0'));
  expect_refused(ErrorCode::io, {"token_embd.weight", "rows of 16 elements", "Q8_0"}, file);
}

TEST_F(GgufTest, SurvivesDamage) {
  GgufBuilder file = tiny_metadata();
  add_tensors(file, true);
  const auto path = folder_.path() / "m.gguf";
  testing::expect_survives_damage(folder_, "m.gguf", file.build(),
                                  [&] { load_gguf_model(path, nullptr, nullptr); });
  // The directory alone, every byte of it.
  GgufBuilder head = tiny_metadata();
  head.strings("words", {"a", "bc", ""}).i32s("numbers", {1, 2, 3});
  testing::expect_survives_damage(
      folder_, "m.gguf", head.build(), [&] { GgufFile directory(path); }, true);
}

TEST_F(GgufTest, RefusesOtherFiles) {
  expect_error(ErrorCode::io, {"m.gguf"}, [&] { load(""); });
  expect_error(ErrorCode::io, {"m.gguf"}, [&] { load("GGUF"); });
  expect_error(ErrorCode::io, {"absent"}, [&] { load_model(folder_.path() / "absent"); });
  expect_error(ErrorCode::io, {"config.json"}, [&] { load_model(folder_.path()); });
}

}  // namespace
}  // namespace foveal::serving
