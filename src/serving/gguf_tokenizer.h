#pragma once

#include <filesystem>
#include <memory>

#include "serving/tokenizer.h"

namespace foveal::serving {

/// The tokenizer in a GGUF file's metadata (tokenizer.ggml.model "gpt2", pre-tokenizer "smollm",
/// "gpt-2" or "default"). Throws unsupported for others by name.
std::unique_ptr<Tokenizer> load_gguf_tokenizer(const std::filesystem::path& path);

}  // namespace foveal::serving
