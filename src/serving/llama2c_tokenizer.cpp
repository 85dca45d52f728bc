#include "serving/llama2c_tokenizer.h"

#include <array>
#include <cstdint>
#include <unordered_map>

#include "serving/byte_reader.h"
#include "serving/mapped_file.h"
#include "serving/merge_symbols.h"

namespace foveal::serving {
namespace {

constexpr std::int32_t kUnknown = 0;
constexpr std::int32_t kBos = 1;
constexpr std::int32_t kEos = 2;
/// Tokens 3 to 258 are the bytes, spelled "<0x00>" to "<0xFF>".
constexpr std::int32_t kFirstByte = 3;
constexpr std::int32_t kFirstText = kFirstByte + 256;

/// SentencePiece's BPE as llama2.c has it: characters (or their bytes, where a character is no
/// token), merged greedily by the score of the token that a merge makes.
class Llama2cTokenizer : public Tokenizer {
 public:
  explicit Llama2cTokenizer(ByteReader& reader, std::int64_t vocab_size) {
    const auto max_length = reader.read<std::int32_t>("max_token_length");
    for (std::int64_t i = 0; i < vocab_size; ++i) {
      const auto score = reader.read<float>("a token's score");
      const auto length = reader.read<std::int32_t>("a token's length");
      if (length < 0 || length > max_length) {
        fail(ErrorCode::io, "{}: token {} has length {}, must be from 0 to max_token_length, {}",
             reader.file_name(), i, length, max_length);
      }
      if (score != score) {
        fail(ErrorCode::io, "{}: token {} has a score that is not a number", reader.file_name(), i);
      }
      tokens_.emplace_back(
          reader.take_string(static_cast<std::uint64_t>(length), "a token's text"));
      scores_.push_back(score);
    }
    if (reader.remaining() != 0) {
      fail(ErrorCode::io,
           "{}: has {} bytes after {} tokens, must have none (is it another model's?)",
           reader.file_name(), reader.remaining(), vocab_size);
    }
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      ids_.emplace(tokens_[i], static_cast<std::int32_t>(i));
    }
  }

  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(tokens_.size()); }

  std::vector<std::int32_t> encode(std::string_view text, bool /*parse_special*/) const override {
    if (text.empty()) {
      return {};
    }
    std::vector<std::int32_t> symbols;
    append_character(" ", symbols);  // the vocabulary's words begin with a space, the first one too
    for (std::size_t at = 0; at < text.size();) {
      // A leading byte and what continues it, at most four bytes; not checked further, since what
      // is no token is taken byte by byte anyway.
      std::size_t length = 1;
      while (length < 4 && at + length < text.size() &&
             (static_cast<unsigned char>(text[at + length]) & 0xC0U) == 0x80U) {
        ++length;
      }
      append_character(text.substr(at, length), symbols);
      at += length;
    }
    std::string joined;
    return merge_symbols<float>(
        symbols, [&](std::int32_t left, std::int32_t right) -> std::optional<Merge<float>> {
          joined = tokens_[static_cast<std::size_t>(left)];
          joined += tokens_[static_cast<std::size_t>(right)];
          const auto found = ids_.find(joined);
          if (found == ids_.end()) {
            return std::nullopt;
          }
          return Merge<float>{-scores_[static_cast<std::size_t>(found->second)], found->second};
        });
  }

  std::string decode(std::int32_t token, std::int32_t previous) const override {
    check(token >= 0 && token < vocab_size(), "token is {}, must be from 0 to {}", token,
          vocab_size() - 1);
    if (token == kBos || token == kEos) {
      return "";
    }
    if (token >= kFirstByte && token < kFirstText && is_byte_token(token)) {
      return std::string(1, static_cast<char>(token - kFirstByte));
    }
    const std::string& text = tokens_[static_cast<std::size_t>(token)];
    return previous == kBos && text.starts_with(' ') ? text.substr(1) : text;
  }

  std::optional<std::int32_t> bos() const override { return kBos; }
  const std::vector<std::int32_t>& stop_tokens() const override { return stop_tokens_; }
  bool has_chat_template() const override { return false; }
  std::string apply_chat_template(const std::vector<ChatMessage>& /*messages*/) const override {
    fail(ErrorCode::unsupported,
         "chat_template is absent: a llama2.c model has none; pass the prompt's text as the model "
         "wants it");
  }

 private:
  bool is_byte_token(std::int32_t token) const {
    return tokens_[static_cast<std::size_t>(token)] ==
           fmt::format("<0x{:02X}>", token - kFirstByte);
  }

  void append_character(std::string_view character, std::vector<std::int32_t>& symbols) const {
    if (const auto found = ids_.find(std::string(character)); found != ids_.end()) {
      symbols.push_back(found->second);
      return;
    }
    for (const char byte : character) {
      const std::int32_t token = kFirstByte + static_cast<unsigned char>(byte);
      symbols.push_back(token < vocab_size() ? token : kUnknown);
    }
  }

  std::vector<std::string> tokens_;
  std::vector<float> scores_;
  std::unordered_map<std::string, std::int32_t> ids_;
  /// Training texts were joined by BOS, so the model says BOS where a text ends.
  std::vector<std::int32_t> stop_tokens_{kBos, kEos};
};

}  // namespace

std::unique_ptr<Tokenizer> load_llama2c_tokenizer(const std::filesystem::path& path,
                                                  std::int64_t vocab_size) {
  const MappedFile file(path);
  ByteReader reader(file.name(), file.bytes());
  // A token is at least its score and its length.
  if (vocab_size <= kEos || vocab_size > static_cast<std::int64_t>(file.bytes().size() / 8)) {
    fail(ErrorCode::io, "{}: vocab_size is {}, must be from 3 to what a file of {} bytes can hold",
         file.name(), vocab_size, file.bytes().size());
  }
  return std::make_unique<Llama2cTokenizer>(reader, vocab_size);
}

}  // namespace foveal::serving
