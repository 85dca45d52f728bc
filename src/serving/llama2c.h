#pragma once

#include <filesystem>

#include "serving/model.h"

namespace foveal::serving {

/// Loads a llama2.c checkpoint in its first format: seven int32 (dim, hidden_dim, n_layers,
/// n_heads, n_kv_heads, vocab_size, seq_len; a negative vocab_size tells of a separate classifier),
/// then float32 weights. The file has no magic, so everything that is no other known format comes
/// here.
Model load_llama2c_model(const std::filesystem::path& path, ProgressFn progress, void* user);

}  // namespace foveal::serving
