#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "serving/chat_template.h"
#include "serving/tokenizer.h"

namespace foveal::serving {

/// What a file says of a byte-level BPE tokenizer (GPT-2's family), whichever its format.
struct BpeVocabulary {
  enum class Kind : std::uint8_t {
    text,     ///< an ordinary token: its text is spelled in GPT-2's stand-ins for bytes
    added,    ///< matched as a whole before splitting; visible when decoded
    control,  ///< as added, but decoded to nothing
  };
  struct Token {
    std::string text;
    Kind kind = Kind::text;
  };

  std::string file;  ///< for messages
  std::vector<Token> tokens;
  /// By rank, each in the tokens' spelling.
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  bool split_digits = false;
  std::optional<std::int32_t> bos;
  std::vector<std::int32_t> stop_tokens;
  std::optional<std::string> chat_template;  ///< Jinja
};

/// Byte-level BPE. Input need not be valid UTF-8. A byte without a token of its own (SmolLM2 has
/// none for six control characters and for bytes that UTF-8 hardly uses) is left out, as the
/// reference does.
class BpeTokenizer : public Tokenizer {
 public:
  /// Throws io when the vocabulary contradicts itself.
  explicit BpeTokenizer(const BpeVocabulary& vocabulary);

  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(bytes_.size()); }
  std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const override;
  std::string decode(std::int32_t token, std::int32_t previous) const override;
  std::optional<std::int32_t> bos() const override { return bos_; }
  const std::vector<std::int32_t>& stop_tokens() const override { return stop_tokens_; }
  bool has_chat_template() const override { return chat_template_.has_value(); }
  std::string apply_chat_template(const std::vector<ChatMessage>& messages) const override;

 private:
  void encode_text(std::string_view text, std::vector<std::int32_t>& out) const;

  std::vector<std::string> bytes_;               ///< by token, what it decodes to
  std::array<std::int32_t, 256> byte_tokens_{};  ///< by byte, −1 where there is none
  struct RankedMerge {
    std::int32_t rank;
    std::int32_t token;
  };
  std::unordered_map<std::uint64_t, RankedMerge> merges_;  ///< by left token · 2^32 + right token
  /// Added and control tokens by first byte, the longest first: the longest match wins.
  std::array<std::vector<std::pair<std::string, std::int32_t>>, 256> special_;
  bool split_digits_ = false;
  std::optional<std::int32_t> bos_;
  std::vector<std::int32_t> stop_tokens_;
  std::optional<ChatMlTemplate> chat_template_;
};

}  // namespace foveal::serving
