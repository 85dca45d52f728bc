#pragma once

#include <filesystem>
#include <memory>

#include "serving/tokenizer.h"

namespace foveal::serving {

/// The tokenizer of a llama2.c model: int32 max_token_length, then for each token a float32 score,
/// an int32 length and its bytes. The file does not tell how many tokens it has; `vocab_size`, the
/// model's, is how many it must have.
std::unique_ptr<Tokenizer> load_llama2c_tokenizer(const std::filesystem::path& path,
                                                  std::int64_t vocab_size);

}  // namespace foveal::serving
