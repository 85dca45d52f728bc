#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "serving/gguf.h"

namespace foveal::serving {
namespace {

constexpr TensorNames kNames{
    .token_embedding = "token_embd.weight",
    .attn_norm = "blk.{}.attn_norm.weight",
    .q = "blk.{}.attn_q.weight",
    .k = "blk.{}.attn_k.weight",
    .v = "blk.{}.attn_v.weight",
    .output = "blk.{}.attn_output.weight",
    .ffn_norm = "blk.{}.ffn_norm.weight",
    .gate = "blk.{}.ffn_gate.weight",
    .up = "blk.{}.ffn_up.weight",
    .down = "blk.{}.ffn_down.weight",
    .output_norm = "output_norm.weight",
    .lm_head = "output.weight",
};

std::int64_t required(const GgufFile& file, const std::string& key) {
  const auto value = file.integer(key);
  if (!value) {
    fail(ErrorCode::io, "{}: {} is missing", file.name(), key);
  }
  return *value;
}

/// Throws unsupported for the model features that files of this architecture can ask for and Foveal
/// lacks. A llama.* key that is not known here may change the arithmetic, so it is refused as well.
void check_features(const GgufFile& file) {
  const auto refuse = [&](const std::string& key, const std::string& what) {
    fail(ErrorCode::unsupported, "{}: {} {}", file.name(), key, what);
  };
  const std::string scaling = file.string("llama.rope.scaling.type").value_or("none");
  if (scaling != "none") {
    refuse("llama.rope.scaling.type", fmt::format("is \"{}\", must be \"none\"", scaling));
  }
  for (const char* key :
       {"llama.expert_count", "llama.expert_used_count", "llama.attention.sliding_window"}) {
    if (const auto value = file.integer(key); value.value_or(0) != 0) {
      refuse(key, fmt::format("is {}, must be 0", *value));
    }
  }
  if (!file.boolean("llama.attention.causal").value_or(true)) {
    refuse("llama.attention.causal", "is false, must be true");
  }
  static constexpr std::string_view kKnown[] = {
      "llama.block_count",
      "llama.context_length",
      "llama.embedding_length",
      "llama.feed_forward_length",
      "llama.attention.head_count",
      "llama.attention.head_count_kv",
      "llama.attention.layer_norm_rms_epsilon",
      "llama.attention.key_length",
      "llama.attention.value_length",
      "llama.attention.causal",
      "llama.attention.sliding_window",
      "llama.rope.freq_base",
      "llama.rope.dimension_count",
      "llama.rope.scaling.type",
      "llama.vocab_size",
      "llama.expert_count",
      "llama.expert_used_count",
  };
  for (const auto& [key, value] : file.metadata()) {
    const bool known = std::find(std::begin(kKnown), std::end(kKnown), key) != std::end(kKnown);
    // Parameters of a scaling that is not applied.
    const bool idle = key.starts_with("llama.rope.scaling.");
    if (key.starts_with("llama.") && !known && !idle) {
      refuse(key, "is a model parameter that Foveal does not support");
    }
  }
}

ModelConfig read_config(const GgufFile& file) {
  ModelConfig config;
  config.name = file.string("general.name").value_or("");
  config.num_layers = required(file, "llama.block_count");
  config.hidden_size = required(file, "llama.embedding_length");
  config.intermediate_size = required(file, "llama.feed_forward_length");
  config.num_heads = required(file, "llama.attention.head_count");
  config.num_kv_heads = file.integer("llama.attention.head_count_kv").value_or(config.num_heads);
  config.max_seq_len = required(file, "llama.context_length");
  config.rms_norm_eps = static_cast<float>(
      file.number("llama.attention.layer_norm_rms_epsilon").value_or(config.rms_norm_eps));
  config.rope_theta =
      static_cast<float>(file.number("llama.rope.freq_base").value_or(config.rope_theta));
  config.rope_interleaved = true;

  if (const auto head_size = file.integer("llama.attention.key_length")) {
    config.head_size = *head_size;
  } else if (config.num_heads > 0 && config.hidden_size % config.num_heads == 0) {
    config.head_size = config.hidden_size / config.num_heads;
  } else {
    fail(ErrorCode::io, "{}: llama.attention.head_count is {}, must divide {}", file.name(),
         config.num_heads, config.hidden_size);
  }
  for (const char* key : {"llama.attention.value_length", "llama.rope.dimension_count"}) {
    if (const auto size = file.integer(key); size.value_or(config.head_size) != config.head_size) {
      fail(ErrorCode::unsupported, "{}: {} is {}, must be the head size, {}", file.name(), key,
           *size, config.head_size);
    }
  }

  const auto embedding = file.tensors().find(std::string(kNames.token_embedding));
  if (embedding == file.tensors().end()) {
    fail(ErrorCode::io, "{}: tensor {} is missing", file.name(), kNames.token_embedding);
  }
  config.vocab_size = embedding->second.shape.front();
  if (const auto size = file.integer("llama.vocab_size");
      size.value_or(config.vocab_size) != config.vocab_size) {
    fail(ErrorCode::io, "{}: llama.vocab_size is {}, must be the rows of {}, {}", file.name(),
         *size, kNames.token_embedding, config.vocab_size);
  }
  check_config(config, file.name());
  return config;
}

}  // namespace

Model load_gguf_model(const std::filesystem::path& path, ProgressFn progress, void* user) {
  const GgufFile file(path);
  const std::string architecture = file.string("general.architecture").value_or("");
  if (architecture != "llama") {
    fail(ErrorCode::unsupported, "{}: general.architecture is \"{}\", must be \"llama\"",
         file.name(), architecture);
  }
  check_features(file);
  const ModelConfig config = read_config(file);

  const bool tied = !file.tensors().contains(std::string(kNames.lm_head));
  const auto expected = expected_tensors(config, kNames, tied);
  for (const auto& [tensor_name, info] : file.tensors()) {
    if (!expected.contains(tensor_name)) {
      fail(
          ErrorCode::unsupported,
          "{}: tensor {} is not one of a plain Llama decoder (biases, experts and rope factors are "
          "not supported)",
          file.name(), tensor_name);
    }
  }
  return assemble_model(
      config, kNames, tied,
      [&](const std::string& name, const std::vector<std::int64_t>& shape) {
        return file.find(name, shape);
      },
      progress, user);
}

}  // namespace foveal::serving
