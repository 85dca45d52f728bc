#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace foveal::serving {

/// The numbers that define a Llama-type decoder.
struct ModelConfig {
  std::string name;
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_seq_len = 0;
  float rms_norm_eps = 1e-5F;
  float rope_theta = 10000.0F;
  /// true: rotary pairs are (2i, 2i+1), as in llama2.c and GGUF files of Llama models; false: (i, i
  /// + head_size/2), as in Hugging Face checkpoints.
  bool rope_interleaved = true;
};

/// A matrix [rows, cols], row-major float32: y[rows] = W · x[cols].
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> data;
};

struct LayerWeights {
  std::vector<float> attn_norm;  ///< [hidden_size]
  Matrix qkv;  ///< [(num_heads + 2·num_kv_heads)·head_size, hidden_size]: rows of Q, then K, then V
  Matrix output;                ///< [hidden_size, num_heads·head_size]
  std::vector<float> ffn_norm;  ///< [hidden_size]
  Matrix gate_up;  ///< [2·intermediate_size, hidden_size]: rows of the gate, then of up
  Matrix down;     ///< [hidden_size, intermediate_size]
};

/// A model's weights, dequantised to float32.
struct Model {
  ModelConfig config;
  Matrix token_embedding;  ///< [vocab_size, hidden_size]
  std::vector<LayerWeights> layers;
  std::vector<float> output_norm;  ///< [hidden_size]
  Matrix lm_head;  ///< [vocab_size, hidden_size]; no rows when it is tied to token_embedding

  const Matrix& head() const { return lm_head.rows == 0 ? token_embedding : lm_head; }
};

/// Called with the bytes done and the bytes in all while a model is read.
using ProgressFn = void (*)(void* user, std::int64_t done, std::int64_t total);

/// Loads a model, choosing the format by content: a GGUF file (by its magic), a llama2.c `.bin`, a
/// `.safetensors` file or a folder in Hugging Face's form (config.json beside the weights, sharded
/// or not). Throws io for a file that is missing, truncated or malformed, and unsupported (naming
/// what it met and what is accepted) for other architectures, tensor types or biases.
Model load_model(const std::filesystem::path& path, ProgressFn progress = nullptr,
                 void* user = nullptr);

/// Where scripts/fetch_model.sh puts the small chat model of the examples and tests:
/// models/SmolLM2-135M-Instruct.Q4_1.gguf under $FOVEAL_CACHE_DIR, else $XDG_CACHE_HOME/foveal,
/// else $HOME/.cache/foveal (a variable that is empty counts as unset). The file need not exist.
std::filesystem::path default_model_path();

}  // namespace foveal::serving
