#include "serving/hf_model.h"

#include <gtest/gtest.h>

#include <list>
#include <map>
#include <nlohmann/json.hpp>

#include "core/convert.h"
#include "serving/safetensors.h"
#include "serving/test_files.h"

namespace foveal::serving {
namespace {

using nlohmann::json;
using testing::expect_error;
using testing::TempDir;

/// hidden 8, 2 heads of 4, 1 KV head, feed-forward 6, 1 layer, 5 tokens.
json tiny_config() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", 8},
          {"intermediate_size", 6},
          {"num_hidden_layers", 1},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"vocab_size", 5},
          {"max_position_embeddings", 64},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 20000.0},
          {"rope_scaling", nullptr},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"tie_word_embeddings", false}};
}

/// Tensors of small whole numbers, exact in every type.
class TinyTensors {
 public:
  void add(const std::string& name, std::vector<std::int64_t> shape, float first,
           DType dtype = DType::f32) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) {
      count *= size;
    }
    auto& data = storage_.emplace_back(static_cast<std::size_t>(count * size_of(dtype)));
    for (std::int64_t i = 0; i < count; ++i) {
      store_element(data.data(), dtype, i, first + static_cast<float>(i % 16));
    }
    all[name] = {dtype, false, std::move(shape), data};
  }
  void add_model() {
    const std::string layer = "model.layers.0.";
    add("model.embed_tokens.weight", {5, 8}, 0);
    add(layer + "input_layernorm.weight", {8}, 10);
    add(layer + "self_attn.q_proj.weight", {8, 8}, 20, DType::bf16);
    add(layer + "self_attn.k_proj.weight", {4, 8}, 30, DType::f16);
    add(layer + "self_attn.v_proj.weight", {4, 8}, 40);
    add(layer + "self_attn.o_proj.weight", {8, 8}, 50);
    add(layer + "post_attention_layernorm.weight", {8}, 60);
    add(layer + "mlp.gate_proj.weight", {6, 8}, 70);
    add(layer + "mlp.up_proj.weight", {6, 8}, 80);
    add(layer + "mlp.down_proj.weight", {8, 6}, 90);
    add("model.norm.weight", {8}, 100);
    add("lm_head.weight", {5, 8}, 110);
  }
  std::map<std::string, SafetensorsTensor> all;

 private:
  std::list<std::vector<std::byte>> storage_;
};

class HfModelTest : public ::testing::Test {
 protected:
  HfModelTest() {
    tensors_.add_model();
    write_config(tiny_config());
  }
  void write_config(const json& config) { folder_.write("config.json", config.dump()); }
  void write_weights() { write_safetensors(folder_.path() / "model.safetensors", tensors_.all); }
  void expect_refused(ErrorCode code, const std::vector<std::string>& parts) {
    expect_error(code, parts, [&] { load_model(folder_.path()); });
  }
  TempDir folder_;
  TinyTensors tensors_;
};

void expect_tiny(const Model& model) {
  EXPECT_EQ(model.config.head_size, 4);
  EXPECT_EQ(model.config.rope_theta, 20000.0F);
  EXPECT_FALSE(model.config.rope_interleaved);
  const LayerWeights& layer = model.layers.at(0);
  EXPECT_EQ(layer.qkv.rows, 16);
  EXPECT_EQ(layer.qkv.data[1], 21.0F);
  EXPECT_EQ(layer.qkv.data[64 + 2], 32.0F);
  EXPECT_EQ(layer.qkv.data[96 + 3], 43.0F);
  EXPECT_EQ(layer.output.data[0], 50.0F);
  EXPECT_EQ(layer.ffn_norm[0], 60.0F);
  EXPECT_EQ(layer.gate_up.data[48], 80.0F);
  EXPECT_EQ(layer.down.cols, 6);
  EXPECT_EQ(model.output_norm[7], 107.0F);
}

TEST_F(HfModelTest, LoadsAFolderAndAFile) {
  write_weights();
  const Model model = load_model(folder_.path());
  expect_tiny(model);
  EXPECT_EQ(model.config.name, folder_.path().filename().string());
  EXPECT_EQ(model.head().data[0], 110.0F);
  expect_tiny(load_model(folder_.path() / "model.safetensors"));
}

TEST_F(HfModelTest, LoadsShards) {
  std::map<std::string, SafetensorsTensor> first;
  std::map<std::string, SafetensorsTensor> second;
  json map;
  for (const auto& [name, tensor] : tensors_.all) {
    const bool in_first = map.size() % 2 == 0;
    (in_first ? first : second)[name] = tensor;
    map[name] = in_first ? "a.safetensors" : "b.safetensors";
  }
  write_safetensors(folder_.path() / "a.safetensors", first);
  write_safetensors(folder_.path() / "b.safetensors", second);
  folder_.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  expect_tiny(load_model(folder_.path()));

  map["lm_head.weight"] = "../b.safetensors";
  folder_.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  expect_refused(ErrorCode::io, {"index.json", "../b.safetensors", "lm_head.weight"});
  map["lm_head.weight"] = "c.safetensors";
  folder_.write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  expect_refused(ErrorCode::io, {"c.safetensors"});
}

TEST_F(HfModelTest, TiesTheHead) {
  json config = tiny_config();
  config["tie_word_embeddings"] = true;
  write_config(config);
  write_weights();  // with a stored head, which is not used
  EXPECT_EQ(load_model(folder_.path()).lm_head.rows, 0);
  tensors_.all.erase("lm_head.weight");
  write_weights();
  EXPECT_EQ(load_model(folder_.path()).lm_head.rows, 0);
  write_config(tiny_config());
  expect_refused(ErrorCode::io, {"tensor lm_head.weight is missing"});
}

TEST_F(HfModelTest, ReadsTheNewerRotaryParameters) {
  json config = tiny_config();
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500.0}};
  write_config(config);
  write_weights();
  EXPECT_EQ(load_model(folder_.path()).config.rope_theta, 500.0F);
}

TEST_F(HfModelTest, RefusesWhatItDoesNotCompute) {
  write_weights();
  const auto refuse = [&](const std::string& key, const json& value) {
    json config = tiny_config();
    config[key] = value;
    write_config(config);
    expect_refused(ErrorCode::unsupported, {"config.json", key});
  };
  refuse("model_type", "mistral");
  refuse("architectures", json::array({"MistralForCausalLM"}));
  refuse("hidden_act", "gelu");
  refuse("attention_bias", true);
  refuse("mlp_bias", true);
  refuse("rope_scaling", {{"type", "linear"}, {"factor", 2.0}});
  refuse("rope_parameters", {{"rope_type", "llama3"}});
  refuse("quantization_config", {{"bits", 4}});
  write_config(tiny_config());
  tensors_.add("model.layers.0.self_attn.q_proj.bias", {8}, 0);
  write_weights();
  expect_refused(ErrorCode::unsupported, {"tensor model.layers.0.self_attn.q_proj.bias"});
}

TEST_F(HfModelTest, RefusesContradictions) {
  expect_refused(ErrorCode::io, {"neither model.safetensors"});
  write_weights();
  const auto refuse = [&](const std::string& key, const json& value, const std::string& part) {
    json config = tiny_config();
    config[key] = value;
    write_config(config);
    expect_refused(ErrorCode::io, {part});
  };
  refuse("hidden_size", "8", "hidden_size is \"8\", must be an integer");
  refuse("hidden_size", nullptr, "hidden_size is missing");
  refuse("num_hidden_layers", 1ULL << 63, "num_hidden_layers is 9223372036854775808");
  refuse("num_hidden_layers", 2, "model.layers.1.");
  refuse("num_attention_heads", 0, "num_attention_heads is 0");
  refuse("vocab_size", 6, "tensor model.embed_tokens.weight has shape [5, 8], must be [6, 8]");
  refuse("rms_norm_eps", "x", "rms_norm_eps is \"x\"");
  folder_.write("config.json", "{\"model_type\":");
  expect_refused(ErrorCode::io, {"config.json", "is not JSON"});
  write_config(tiny_config());
  tensors_.add("model.norm.weight", {8}, 0, DType::i64);
  write_weights();
  expect_refused(ErrorCode::unsupported, {"model.norm.weight", "i64"});
}

TEST_F(HfModelTest, SurvivesDamagedConfigs) {
  write_weights();
  testing::expect_survives_damage(folder_, "config.json", tiny_config().dump(),
                                  [&] { load_model(folder_.path()); });
}

}  // namespace
}  // namespace foveal::serving
