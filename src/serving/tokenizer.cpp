#include "serving/tokenizer.h"

#include "core/check.h"
#include "serving/gguf.h"
#include "serving/gguf_tokenizer.h"
#include "serving/hf_tokenizer.h"
#include "serving/llama2c_tokenizer.h"
#include "serving/mapped_file.h"
#include "serving/safetensors.h"

namespace foveal::serving {
namespace {

bool is_json(std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) {
    const char c = static_cast<char>(byte);
    if (c != ' ' && c != '\t' && c != '\r' && c != '\n') {
      return c == '{';
    }
  }
  return false;
}

std::unique_ptr<Tokenizer> load_from(const std::filesystem::path& path, std::int64_t vocab_size) {
  if (is_folder(path)) {
    return load_hf_tokenizer(path / "tokenizer.json");
  }
  const MappedFile file(path);
  if (is_gguf(file.bytes())) {
    return load_gguf_tokenizer(path);
  }
  if (is_json(file.bytes())) {
    return load_hf_tokenizer(path);
  }
  try {
    return load_llama2c_tokenizer(path, vocab_size);
  } catch (const Error& error) {
    fail(error.code(),
         "{} (read as a tokenizer of llama2.c, for it is no GGUF file and no tokenizer.json)",
         error.what());
  }
}

/// Where a model keeps its tokenizer.
std::filesystem::path tokenizer_of(const std::filesystem::path& model_path) {
  std::filesystem::path folder = model_path;
  if (!is_folder(model_path)) {
    const MappedFile file(model_path);
    if (is_gguf(file.bytes())) {
      return model_path;
    }
    if (!is_safetensors(file.bytes())) {
      fail(ErrorCode::unsupported,
           "{}: a llama2.c model has no tokenizer of its own; pass --tokenizer with its tokenizer "
           ".bin",
           model_path.string());
    }
    folder = model_path.parent_path();
  }
  std::filesystem::path beside = folder / "tokenizer.json";
  if (!file_exists(beside)) {
    fail(ErrorCode::io, "{}: is missing; pass --tokenizer with the model's tokenizer.json",
         beside.string());
  }
  return beside;
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& model_path,
                                          const std::filesystem::path& tokenizer_path,
                                          std::int64_t vocab_size) {
  const std::filesystem::path path =
      tokenizer_path.empty() ? tokenizer_of(model_path) : tokenizer_path;
  auto tokenizer = load_from(path, vocab_size);
  // Models may pad their vocabulary, but a token beyond it would have no embedding.
  if (tokenizer->vocab_size() > vocab_size) {
    fail(ErrorCode::io, "{}: has {} tokens, must have at most the model's vocab_size, {}",
         path.string(), tokenizer->vocab_size(), vocab_size);
  }
  return tokenizer;
}

}  // namespace foveal::serving
