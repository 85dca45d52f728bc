#pragma once

#include <filesystem>
#include <memory>

#include "serving/tokenizer.h"

namespace foveal::serving {

/// A Hugging Face tokenizer.json of type BPE with a ByteLevel pre-tokenizer, after Digits splitting
/// or not; anything else is refused by name. End tokens, and the chat template, are read from
/// tokenizer_config.json and generation_config.json beside it where these exist.
std::unique_ptr<Tokenizer> load_hf_tokenizer(const std::filesystem::path& path);

}  // namespace foveal::serving
