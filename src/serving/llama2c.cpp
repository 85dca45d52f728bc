#include "serving/llama2c.h"

#include <unordered_map>

#include "serving/byte_reader.h"
#include "serving/mapped_file.h"
#include "serving/weights.h"

namespace foveal::serving {
namespace {

constexpr TensorNames kLlama2cNames{
    .token_embedding = "token_embedding",
    .attn_norm = "rms_att.{}",
    .q = "wq.{}",
    .k = "wk.{}",
    .v = "wv.{}",
    .output = "wo.{}",
    .ffn_norm = "rms_ffn.{}",
    .gate = "w1.{}",
    .up = "w3.{}",
    .down = "w2.{}",
    .output_norm = "rms_final",
    .lm_head = "wcls",
};

/// The first word of llama2.c's later export formats, "ak42".
constexpr std::int32_t kVersionedMagic = 0x616B3432;

struct Header {
  ModelConfig config;
  bool tied = true;
};

Header read_header(ByteReader& reader) {
  Header header;
  ModelConfig& config = header.config;
  config.hidden_size = reader.read<std::int32_t>("dim");
  if (config.hidden_size == kVersionedMagic) {
    fail(
        ErrorCode::unsupported,
        "{}: is a llama2.c file with a version (\"ak42\"), must be in the first format without one",
        reader.file_name());
  }
  config.intermediate_size = reader.read<std::int32_t>("hidden_dim");
  config.num_layers = reader.read<std::int32_t>("n_layers");
  config.num_heads = reader.read<std::int32_t>("n_heads");
  config.num_kv_heads = reader.read<std::int32_t>("n_kv_heads");
  const std::int64_t vocab_size = reader.read<std::int32_t>("vocab_size");
  header.tied = vocab_size > 0;
  config.vocab_size = header.tied ? vocab_size : -vocab_size;
  config.max_seq_len = reader.read<std::int32_t>("seq_len");
  if (config.num_heads < 1 || config.hidden_size % config.num_heads != 0) {
    fail(ErrorCode::io, "{}: n_heads is {}, must divide dim, which is {}", reader.file_name(),
         config.num_heads, config.hidden_size);
  }
  config.head_size = config.hidden_size / config.num_heads;
  config.rope_interleaved = true;
  check_config(config, reader.file_name());
  return header;
}

}  // namespace

Model load_llama2c_model(const std::filesystem::path& path, ProgressFn progress, void* user) {
  const MappedFile file(path);
  ByteReader reader(file.name(), file.bytes());
  const Header header = read_header(reader);
  ModelConfig config = header.config;
  config.name = path.stem().string();

  // check_config bounds every size, so no product below overflows.
  std::unordered_map<std::string, StoredTensor> tensors;
  const auto take = [&](const std::string& name, std::int64_t elements) {
    const auto bytes = reader.take(static_cast<std::uint64_t>(elements) * sizeof(float), name);
    tensors[name] = {Encoding::f32, bytes.data(), elements};
  };
  const auto take_layers = [&](std::string_view pattern, std::int64_t elements) {
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      take(fmt::format(fmt::runtime(pattern), layer), elements);
    }
  };
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t q_rows = config.num_heads * config.head_size;
  const std::int64_t kv_rows = config.num_kv_heads * config.head_size;
  take(std::string(kLlama2cNames.token_embedding), config.vocab_size * hidden);
  take_layers(kLlama2cNames.attn_norm, hidden);
  take_layers(kLlama2cNames.q, q_rows * hidden);
  take_layers(kLlama2cNames.k, kv_rows * hidden);
  take_layers(kLlama2cNames.v, kv_rows * hidden);
  take_layers(kLlama2cNames.output, hidden * q_rows);
  take_layers(kLlama2cNames.ffn_norm, hidden);
  take_layers(kLlama2cNames.gate, config.intermediate_size * hidden);
  take_layers(kLlama2cNames.down, hidden * config.intermediate_size);
  take_layers(kLlama2cNames.up, config.intermediate_size * hidden);
  take(std::string(kLlama2cNames.output_norm), hidden);
  // Tables of the rotary cosines and sines, which Foveal computes.
  take("freq_cis_real", config.max_seq_len * config.head_size / 2);
  take("freq_cis_imag", config.max_seq_len * config.head_size / 2);
  if (!header.tied) {
    take(std::string(kLlama2cNames.lm_head), config.vocab_size * hidden);
  }
  if (reader.remaining() != 0) {
    fail(ErrorCode::io,
         "{}: has {} bytes after the weights that its header tells of, must have none", file.name(),
         reader.remaining());
  }
  return assemble_model(
      config, kLlama2cNames, header.tied,
      [&](const std::string& name, const std::vector<std::int64_t>&) { return tensors.at(name); },
      progress, user);
}

}  // namespace foveal::serving
