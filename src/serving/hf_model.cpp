#include "serving/hf_model.h"

#include <set>
#include <string_view>
#include <system_error>
#include <unordered_map>

#include "serving/json.h"
#include "serving/mapped_file.h"
#include "serving/safetensors.h"
#include "serving/weights.h"

namespace foveal::serving {
namespace {

constexpr TensorNames kHfNames{
    .token_embedding = "model.embed_tokens.weight",
    .attn_norm = "model.layers.{}.input_layernorm.weight",
    .q = "model.layers.{}.self_attn.q_proj.weight",
    .k = "model.layers.{}.self_attn.k_proj.weight",
    .v = "model.layers.{}.self_attn.v_proj.weight",
    .output = "model.layers.{}.self_attn.o_proj.weight",
    .ffn_norm = "model.layers.{}.post_attention_layernorm.weight",
    .gate = "model.layers.{}.mlp.gate_proj.weight",
    .up = "model.layers.{}.mlp.up_proj.weight",
    .down = "model.layers.{}.mlp.down_proj.weight",
    .output_norm = "model.norm.weight",
    .lm_head = "lm_head.weight",
};

/// config.json with its path, for messages.
class Config {
 public:
  explicit Config(const std::filesystem::path& path)
      : file_(path.string()), json_(read_json_object(path)) {}

  const std::string& file() const { return file_; }
  const nlohmann::json* find(const std::string& key) const { return find_member(json_, key); }

  std::optional<std::int64_t> integer(const std::string& key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) {
      return std::nullopt;
    }
    if (!value->is_number_integer() ||
        (value->is_number_unsigned() && value->get<std::uint64_t>() > (1ULL << 62))) {
      fail(ErrorCode::io, "{}: {} is {}, must be an integer", file_, key, describe_json(*value));
    }
    return value->get<std::int64_t>();
  }

  std::int64_t required(const std::string& key) const {
    const auto value = integer(key);
    if (!value) {
      fail(ErrorCode::io, "{}: {} is missing", file_, key);
    }
    return *value;
  }

  float number(const nlohmann::json& object, const std::string& key, float fallback) const {
    const nlohmann::json* value = find_member(object, key);
    if (value != nullptr && !value->is_number()) {
      fail(ErrorCode::io, "{}: {} is {}, must be a number", file_, key, describe_json(*value));
    }
    return value != nullptr ? value->get<float>() : fallback;
  }
  float number(const std::string& key, float fallback) const {
    return number(json_, key, fallback);
  }

  /// Throws unsupported unless the key is absent, null or exactly this.
  void must_be(const std::string& key, const nlohmann::json& only) const {
    const nlohmann::json* value = find(key);
    if (value != nullptr && *value != only) {
      fail(ErrorCode::unsupported, "{}: {} is {}, must be {}", file_, key, describe_json(*value),
           describe_json(only));
    }
  }

 private:
  std::string file_;
  nlohmann::json json_;
};

void check_features(const Config& config) {
  const nlohmann::json* type = config.find("model_type");
  if (type == nullptr || *type != "llama") {
    fail(ErrorCode::unsupported, "{}: model_type is {}, must be \"llama\"", config.file(),
         type != nullptr ? describe_json(*type) : "missing");
  }
  config.must_be("architectures", nlohmann::json::array({"LlamaForCausalLM"}));
  config.must_be("hidden_act", "silu");
  config.must_be("attention_bias", false);
  config.must_be("mlp_bias", false);
  config.must_be("rope_interleaved", false);
  config.must_be("partial_rotary_factor", 1.0);
  config.must_be("sliding_window", nullptr);
  config.must_be("quantization_config", nullptr);
  config.must_be("rope_scaling", nullptr);
}

/// Newer configs keep the rotary numbers in an object of their own.
float read_rope_theta(const Config& config) {
  const nlohmann::json* rope = config.find("rope_parameters");
  if (rope == nullptr) {
    return config.number("rope_theta", 10000.0F);
  }
  const nlohmann::json* type = rope->is_object() ? find_member(*rope, "rope_type") : nullptr;
  if (!rope->is_object() || (type != nullptr && *type != "default")) {
    fail(ErrorCode::unsupported, "{}: rope_parameters is {}, must have rope_type \"default\"",
         config.file(), describe_json(*rope));
  }
  return config.number(*rope, "rope_theta", 10000.0F);
}

ModelConfig read_config(const Config& file) {
  check_features(file);
  ModelConfig config;
  config.num_layers = file.required("num_hidden_layers");
  config.hidden_size = file.required("hidden_size");
  config.intermediate_size = file.required("intermediate_size");
  config.num_heads = file.required("num_attention_heads");
  config.num_kv_heads = file.integer("num_key_value_heads").value_or(config.num_heads);
  config.vocab_size = file.required("vocab_size");
  config.max_seq_len = file.required("max_position_embeddings");
  config.rms_norm_eps = file.number("rms_norm_eps", 1e-6F);
  config.rope_theta = read_rope_theta(file);
  config.rope_interleaved = false;
  if (const auto head_size = file.integer("head_dim")) {
    config.head_size = *head_size;
  } else if (config.num_heads > 0 && config.hidden_size % config.num_heads == 0) {
    config.head_size = config.hidden_size / config.num_heads;
  } else {
    fail(ErrorCode::io, "{}: num_attention_heads is {}, must divide hidden_size, {}", file.file(),
         config.num_heads, config.hidden_size);
  }
  check_config(config, file.file());
  return config;
}

/// What the folder is called, also when it is given as "." or with a slash at the end.
std::string folder_name(const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::absolute(folder / "config.json", ignored)
      .parent_path()
      .filename()
      .string();
}

/// The weight files of a folder, by its index when there is one.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& folder) {
  const std::filesystem::path single = folder / "model.safetensors";
  if (file_exists(single)) {
    return {single};
  }
  const std::filesystem::path index_path = folder / "model.safetensors.index.json";
  if (!file_exists(index_path)) {
    fail(ErrorCode::io, "{}: has neither model.safetensors nor model.safetensors.index.json",
         folder.string());
  }
  const nlohmann::json index = read_json_object(index_path);
  const nlohmann::json* map = find_member(index, "weight_map");
  if (map == nullptr || !map->is_object()) {
    fail(ErrorCode::io, "{}: weight_map is not an object", index_path.string());
  }
  std::set<std::filesystem::path> files;
  for (const auto& [tensor, file] : map->items()) {
    // A plain name, so that an index cannot reach outside of its folder.
    const auto name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      fail(ErrorCode::io, "{}: weight_map has {} for {}, must be a file name", index_path.string(),
           describe_json(file), tensor);
    }
    files.insert(folder / name);
  }
  return {files.begin(), files.end()};
}

/// The tensors of all weight files.
class WeightFiles {
 public:
  explicit WeightFiles(const std::vector<std::filesystem::path>& paths) {
    for (const auto& path : paths) {
      files_.emplace_back(path);
    }
    for (const SafetensorsFile& file : files_) {
      for (const auto& [name, tensor] : file.tensors()) {
        if (!where_.emplace(name, &file).second) {
          fail(ErrorCode::io, "{}: tensor {} is also in {}", file.name(), name,
               where_.at(name)->name());
        }
      }
    }
  }

  const std::unordered_map<std::string, const SafetensorsFile*>& where() const { return where_; }

  StoredTensor find(const std::string& name, const std::vector<std::int64_t>& shape) const {
    const auto found = where_.find(name);
    if (found == where_.end()) {
      fail(ErrorCode::io, "{}: tensor {} is missing", files_.empty() ? "" : files_.front().name(),
           name);
    }
    const SafetensorsFile& file = *found->second;
    const SafetensorsTensor& tensor = file.tensor(name);
    if (tensor.shape != shape) {
      fail(ErrorCode::io, "{}: tensor {} has shape [{}], must be [{}]", file.name(), name,
           fmt::join(tensor.shape, ", "), fmt::join(shape, ", "));
    }
    const auto elements = static_cast<std::int64_t>(tensor.data.size()) / size_of(tensor.dtype);
    switch (tensor.dtype) {
      case DType::f32:
        return {Encoding::f32, tensor.data.data(), elements};
      case DType::f16:
        return {Encoding::f16, tensor.data.data(), elements};
      case DType::bf16:
        return {Encoding::bf16, tensor.data.data(), elements};
      default:
        fail(ErrorCode::unsupported, "{}: tensor {} has dtype {}, must be F32, F16 or BF16",
             file.name(), name, to_string(tensor.dtype));
    }
  }

 private:
  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string, const SafetensorsFile*> where_;
};

}  // namespace

Model load_hf_model(const std::filesystem::path& path, ProgressFn progress, void* user) {
  const bool given_folder = is_folder(path);
  const std::filesystem::path folder = given_folder ? path : path.parent_path();
  const Config file(folder / "config.json");
  ModelConfig config = read_config(file);
  config.name = folder_name(folder);
  const WeightFiles weights(given_folder ? weight_files(path) : std::vector{path});

  const nlohmann::json* tie = file.find("tie_word_embeddings");
  const bool tied = tie != nullptr && *tie == true;
  const auto expected = expected_tensors(config, kHfNames, tied);
  for (const auto& [name, where] : weights.where()) {
    // A tied head may be stored again, and old checkpoints hold the rotary frequencies, which
    // follow from rope_theta.
    const bool redundant =
        (tied && name == kHfNames.lm_head) || name.ends_with(".rotary_emb.inv_freq");
    if (!expected.contains(name) && !redundant) {
      fail(ErrorCode::unsupported,
           "{}: tensor {} is not one of a plain Llama decoder (biases and adapters are not "
           "supported)",
           where->name(), name);
    }
  }
  return assemble_model(
      config, kHfNames, tied,
      [&](const std::string& name, const std::vector<std::int64_t>& shape) {
        return weights.find(name, shape);
      },
      progress, user);
}

}  // namespace foveal::serving
