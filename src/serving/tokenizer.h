#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace foveal::serving {

struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// Text to token ids and back. Thread-safe once loaded.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::int64_t vocab_size() const = 0;
  /// Token ids of `text`, which is taken as plain text: special tokens spelled in it are matched
  /// only when `parse_special` is set (for text that apply_chat_template made). BOS is not added.
  virtual std::vector<std::int32_t> encode(std::string_view text,
                                           bool parse_special = false) const = 0;
  /// The bytes that `token` stands for, given the token before it (−1 at the start): llama2.c
  /// vocabularies strip a leading space after BOS. One token may be part of a UTF-8 character.
  /// Special tokens give "".
  virtual std::string decode(std::int32_t token, std::int32_t previous) const = 0;

  /// The token every sequence starts with, if the model wants one.
  virtual std::optional<std::int32_t> bos() const = 0;
  /// Generation ends after any of these.
  virtual const std::vector<std::int32_t>& stop_tokens() const = 0;

  /// Whether the model is a chat model whose template is known.
  virtual bool has_chat_template() const = 0;
  /// The prompt text of a conversation, the assistant's turn opened at the end; encode it with
  /// parse_special. Throws unsupported when has_chat_template() is false.
  virtual std::string apply_chat_template(const std::vector<ChatMessage>& messages) const = 0;
};

/// Loads the tokenizer of a model: from `tokenizer_path` when given (a llama2.c tokenizer `.bin`, a
/// GGUF file, or a Hugging Face tokenizer.json), otherwise from the model itself (a GGUF file, or
/// tokenizer.json beside safetensors). Throws io or unsupported with what to pass, e.g. "pass
/// --tokenizer".
std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& model_path,
                                          const std::filesystem::path& tokenizer_path,
                                          std::int64_t vocab_size);

}  // namespace foveal::serving
