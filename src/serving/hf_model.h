#pragma once

#include <filesystem>

#include "serving/model.h"

namespace foveal::serving {

/// Loads a Llama model in Hugging Face's form: a folder with config.json and model.safetensors or
/// model.safetensors.index.json, or one .safetensors file with config.json beside it.
Model load_hf_model(const std::filesystem::path& path, ProgressFn progress, void* user);

}  // namespace foveal::serving
