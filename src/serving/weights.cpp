#include "serving/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/convert.h"
#include "foveal/execution.h"

namespace foveal::serving {
namespace {

constexpr std::int64_t kQuantBlock = 32;

float read_f16(const std::byte* at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return f16_to_float(bits);
}

void decode_q8_0(const std::byte* block, float* out) {
  const float scale = read_f16(block);
  for (int i = 0; i < kQuantBlock; ++i) {
    out[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
  }
}

// Both 4-bit formats keep element i in the low half of byte i and element i + 16 in its high half.
void decode_q4_0(const std::byte* block, float* out) {
  const float scale = read_f16(block);
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    const int pair = std::to_integer<int>(block[2 + i]);
    out[i] = scale * static_cast<float>((pair & 15) - 8);
    out[i + kQuantBlock / 2] = scale * static_cast<float>((pair >> 4) - 8);
  }
}

void decode_q4_1(const std::byte* block, float* out) {
  const float scale = read_f16(block);
  const float minimum = read_f16(block + 2);
  for (int i = 0; i < kQuantBlock / 2; ++i) {
    const int pair = std::to_integer<int>(block[4 + i]);
    out[i] = scale * static_cast<float>(pair & 15) + minimum;
    out[i + kQuantBlock / 2] = scale * static_cast<float>(pair >> 4) + minimum;
  }
}

void decode_halves(const std::byte* data, std::int64_t count, float* out,
                   float (*widen)(std::uint16_t)) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, data + 2 * i, sizeof(bits));
    out[i] = widen(bits);
  }
}

void decode_blocks(Encoding encoding, const std::byte* data, std::int64_t blocks, float* out) {
  switch (encoding) {
    case Encoding::f32:
      std::memcpy(out, data, static_cast<std::size_t>(blocks) * sizeof(float));
      return;
    case Encoding::f16:
      return decode_halves(data, blocks, out, f16_to_float);
    case Encoding::bf16:
      return decode_halves(data, blocks, out, bf16_to_float);
    case Encoding::q8_0:
    case Encoding::q4_0:
    case Encoding::q4_1:
      break;
  }
  const std::int64_t bytes = info_of(encoding).block_bytes;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::byte* block = data + b * bytes;
    float* to = out + b * kQuantBlock;
    if (encoding == Encoding::q8_0) {
      decode_q8_0(block, to);
    } else if (encoding == Encoding::q4_0) {
      decode_q4_0(block, to);
    } else {
      decode_q4_1(block, to);
    }
  }
}

std::string name_of(std::string_view pattern, std::int64_t layer) {
  return fmt::format(fmt::runtime(pattern), layer);
}

struct StoredLayer {
  StoredTensor attn_norm, q, k, v, output, ffn_norm, gate, up, down;
};

class ProgressCounter {
 public:
  ProgressCounter(ProgressFn function, void* user, std::int64_t total)
      : function_(function), user_(user), total_(total) {}
  void add(std::int64_t bytes) {
    done_ += bytes;
    if (function_ != nullptr) {
      function_(user_, done_, total_);
    }
  }

 private:
  ProgressFn function_;
  void* user_;
  std::int64_t done_ = 0;
  std::int64_t total_;
};

std::vector<float> decode_vector(const StoredTensor& stored) {
  std::vector<float> out(static_cast<std::size_t>(stored.elements));
  decode(stored, out.data());
  return out;
}

/// The rows of all parts, one part after the other.
Matrix decode_matrix(std::initializer_list<StoredTensor> parts, std::int64_t cols) {
  std::int64_t elements = 0;
  for (const StoredTensor& part : parts) {
    elements += part.elements;
  }
  Matrix matrix{elements / cols, cols, std::vector<float>(static_cast<std::size_t>(elements))};
  float* out = matrix.data.data();
  for (const StoredTensor& part : parts) {
    decode(part, out);
    out += part.elements;
  }
  return matrix;
}

}  // namespace

EncodingInfo info_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::f32:
      return {"F32", 1, 4};
    case Encoding::f16:
      return {"F16", 1, 2};
    case Encoding::bf16:
      return {"BF16", 1, 2};
    case Encoding::q8_0:
      return {"Q8_0", kQuantBlock, 2 + 32};
    case Encoding::q4_0:
      return {"Q4_0", kQuantBlock, 2 + 16};
    case Encoding::q4_1:
      return {"Q4_1", kQuantBlock, 4 + 16};
  }
  return {"unknown", 1, 1};
}

std::int64_t StoredTensor::bytes() const {
  const EncodingInfo info = info_of(encoding);
  return elements / info.block_elements * info.block_bytes;
}

void decode(const StoredTensor& tensor, float* out) {
  const EncodingInfo info = info_of(tensor.encoding);
  // Chunks of 64 K elements: enough work to be worth a task.
  const std::int64_t blocks = tensor.elements / info.block_elements;
  const std::int64_t chunk = 65536 / info.block_elements;
  default_thread_pool().parallel_for((blocks + chunk - 1) / chunk, [&](std::int64_t task, int) {
    const std::int64_t first = task * chunk;
    decode_blocks(tensor.encoding, tensor.data + first * info.block_bytes,
                  std::min(chunk, blocks - first), out + first * info.block_elements);
  });
}

void check_config(const ModelConfig& config, const std::string& file) {
  const auto check_size = [&](std::string_view field, std::int64_t value, std::int64_t max) {
    if (value < 1 || value > max) {
      fail(ErrorCode::io, "{}: {} is {}, must be from 1 to {}", file, field, value, max);
    }
  };
  check_size("num_layers", config.num_layers, 1 << 12);
  check_size("hidden_size", config.hidden_size, 1 << 20);
  check_size("intermediate_size", config.intermediate_size, 1 << 24);
  check_size("num_heads", config.num_heads, 1 << 14);
  check_size("num_kv_heads", config.num_kv_heads, config.num_heads);
  check_size("head_size", config.head_size, 1 << 14);
  check_size("vocab_size", config.vocab_size, 1 << 24);
  check_size("max_seq_len", config.max_seq_len, 1 << 30);
  if (config.num_heads % config.num_kv_heads != 0) {
    fail(ErrorCode::io, "{}: num_kv_heads is {}, must divide num_heads, which is {}", file,
         config.num_kv_heads, config.num_heads);
  }
  if (config.head_size % 2 != 0) {
    fail(ErrorCode::io, "{}: head_size is {}, must be even for rotary embeddings", file,
         config.head_size);
  }
  if (!(config.rms_norm_eps >= 0.0F) || !std::isfinite(config.rms_norm_eps)) {
    fail(ErrorCode::io, "{}: rms_norm_eps is {}, must be finite and not negative", file,
         config.rms_norm_eps);
  }
  if (!(config.rope_theta > 0.0F) || !std::isfinite(config.rope_theta)) {
    fail(ErrorCode::io, "{}: rope_theta is {}, must be finite and positive", file,
         config.rope_theta);
  }
}

std::unordered_set<std::string> expected_tensors(const ModelConfig& config,
                                                 const TensorNames& names, bool tied) {
  std::unordered_set<std::string> expected{std::string(names.token_embedding),
                                           std::string(names.output_norm)};
  if (!tied) {
    expected.emplace(names.lm_head);
  }
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    for (const std::string_view pattern : {names.attn_norm, names.q, names.k, names.v, names.output,
                                           names.ffn_norm, names.gate, names.up, names.down}) {
      expected.insert(name_of(pattern, layer));
    }
  }
  return expected;
}

Model assemble_model(const ModelConfig& config, const TensorNames& names, bool tied,
                     const FindTensor& find, ProgressFn progress, void* user) {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t q_rows = config.num_heads * config.head_size;
  const std::int64_t kv_rows = config.num_kv_heads * config.head_size;
  std::int64_t total = 0;
  const auto find_counted = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    const StoredTensor stored = find(name, shape);
    total += stored.bytes();
    return stored;
  };

  const StoredTensor embedding =
      find_counted(std::string(names.token_embedding), {config.vocab_size, hidden});
  std::vector<StoredLayer> layers;
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    layers.push_back({
        .attn_norm = find_counted(name_of(names.attn_norm, i), {hidden}),
        .q = find_counted(name_of(names.q, i), {q_rows, hidden}),
        .k = find_counted(name_of(names.k, i), {kv_rows, hidden}),
        .v = find_counted(name_of(names.v, i), {kv_rows, hidden}),
        .output = find_counted(name_of(names.output, i), {hidden, q_rows}),
        .ffn_norm = find_counted(name_of(names.ffn_norm, i), {hidden}),
        .gate = find_counted(name_of(names.gate, i), {config.intermediate_size, hidden}),
        .up = find_counted(name_of(names.up, i), {config.intermediate_size, hidden}),
        .down = find_counted(name_of(names.down, i), {hidden, config.intermediate_size}),
    });
  }
  const StoredTensor output_norm = find_counted(std::string(names.output_norm), {hidden});
  StoredTensor lm_head;
  if (!tied) {
    lm_head = find_counted(std::string(names.lm_head), {config.vocab_size, hidden});
  }

  ProgressCounter counter(progress, user, total);
  Model model;
  model.config = config;
  model.token_embedding = decode_matrix({embedding}, hidden);
  counter.add(embedding.bytes());
  for (const StoredLayer& stored : layers) {
    LayerWeights& layer = model.layers.emplace_back();
    layer.attn_norm = decode_vector(stored.attn_norm);
    layer.qkv = decode_matrix({stored.q, stored.k, stored.v}, hidden);
    layer.output = decode_matrix({stored.output}, q_rows);
    layer.ffn_norm = decode_vector(stored.ffn_norm);
    layer.gate_up = decode_matrix({stored.gate, stored.up}, hidden);
    layer.down = decode_matrix({stored.down}, config.intermediate_size);
    counter.add(stored.attn_norm.bytes() + stored.q.bytes() + stored.k.bytes() + stored.v.bytes() +
                stored.output.bytes() + stored.ffn_norm.bytes() + stored.gate.bytes() +
                stored.up.bytes() + stored.down.bytes());
  }
  model.output_norm = decode_vector(output_norm);
  counter.add(output_norm.bytes());
  if (!tied) {
    model.lm_head = decode_matrix({lm_head}, hidden);
    counter.add(lm_head.bytes());
  }
  return model;
}

}  // namespace foveal::serving
