#include "serving/bpe_tokenizer.h"

#include <utf8proc.h>

#include <algorithm>

#include "core/check.h"
#include "serving/merge_symbols.h"
#include "serving/pretokenizer.h"

namespace foveal::serving {
namespace {

/// GPT-2 spells a token's bytes in printable characters: those of Latin-1 stand for themselves, the
/// other bytes for U+0100, U+0101, … in order.
bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

/// The bytes that a token's spelling stands for, or the spelling itself when it holds a character
/// that is no stand-in.
std::string bytes_of_spelling(const std::string& spelling) {
  static const std::unordered_map<std::int32_t, char> spelled = [] {
    std::unordered_map<std::int32_t, char> bytes;
    std::int32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      bytes[stands_for_itself(byte) ? byte : next++] = static_cast<char>(byte);
    }
    return bytes;
  }();
  std::string out;
  for (std::size_t at = 0; at < spelling.size();) {
    const std::size_t rest = std::min<std::size_t>(spelling.size() - at, 4);
    std::int32_t code_point = -1;
    const auto length =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(spelling.data() + at),
                         static_cast<utf8proc_ssize_t>(rest), &code_point);
    const auto found = length > 0 ? spelled.find(code_point) : spelled.end();
    if (found == spelled.end()) {
      return spelling;
    }
    out += found->second;
    at += static_cast<std::size_t>(length);
  }
  return out;
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) |
         static_cast<std::uint32_t>(right);
}

}  // namespace

BpeTokenizer::BpeTokenizer(const BpeVocabulary& vocabulary)
    : split_digits_(vocabulary.split_digits),
      bos_(vocabulary.bos),
      stop_tokens_(vocabulary.stop_tokens) {
  using Kind = BpeVocabulary::Kind;
  const auto count = static_cast<std::int64_t>(vocabulary.tokens.size());
  if (count < 1 || count > (1 << 24)) {
    fail(ErrorCode::io, "{}: the vocabulary has {} tokens, must have 1 to 2^24", vocabulary.file,
         count);
  }
  const auto check_token = [&](std::string_view what, std::int32_t token) {
    if (token < 0 || token >= count) {
      fail(ErrorCode::io, "{}: {} is {}, must be a token from 0 to {}", vocabulary.file, what,
           token, count - 1);
    }
  };
  if (bos_) {
    check_token("the BOS token", *bos_);
  }
  for (const std::int32_t token : stop_tokens_) {
    check_token("an end token", token);
  }
  if (vocabulary.chat_template) {
    chat_template_ = recognise_chat_template(*vocabulary.chat_template);
  }

  byte_tokens_.fill(-1);
  std::unordered_map<std::string_view, std::int32_t> ids;
  for (std::int32_t id = 0; id < count; ++id) {
    const auto& [text, kind] = vocabulary.tokens[static_cast<std::size_t>(id)];
    if (kind != Kind::text) {
      if (!text.empty()) {
        special_[static_cast<unsigned char>(text[0])].emplace_back(text, id);
      }
      bytes_.push_back(kind == Kind::control ? "" : text);
      continue;
    }
    ids.emplace(text, id);
    bytes_.push_back(bytes_of_spelling(text));
    if (bytes_.back().size() == 1) {
      byte_tokens_[static_cast<unsigned char>(bytes_.back()[0])] = id;
    }
  }
  for (auto& tokens : special_) {
    std::stable_sort(tokens.begin(), tokens.end(),
                     [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  }

  merges_.reserve(vocabulary.merges.size());
  std::int32_t rank = 0;
  for (const auto& [left, right] : vocabulary.merges) {
    const auto left_id = ids.find(left);
    const auto right_id = ids.find(right);
    const auto merged = ids.find(std::string(left) + std::string(right));
    if (left_id == ids.end() || right_id == ids.end() || merged == ids.end()) {
      fail(ErrorCode::io,
           "{}: merge {} (\"{}\" and \"{}\") uses or makes a token that the vocabulary lacks",
           vocabulary.file, rank, left, right);
    }
    merges_.emplace(pair_key(left_id->second, right_id->second), RankedMerge{rank, merged->second});
    ++rank;
  }
}

void BpeTokenizer::encode_text(std::string_view text, std::vector<std::int32_t>& out) const {
  std::vector<std::int32_t> symbols;
  for (const std::string_view piece : split_gpt2(text, split_digits_)) {
    symbols.clear();
    for (const char byte : piece) {
      if (const std::int32_t token = byte_tokens_[static_cast<unsigned char>(byte)]; token >= 0) {
        symbols.push_back(token);
      }
    }
    const auto merged = merge_symbols<std::int32_t>(
        symbols, [&](std::int32_t left, std::int32_t right) -> std::optional<Merge<std::int32_t>> {
          const auto found = merges_.find(pair_key(left, right));
          if (found == merges_.end()) {
            return std::nullopt;
          }
          return Merge<std::int32_t>{found->second.rank, found->second.token};
        });
    out.insert(out.end(), merged.begin(), merged.end());
  }
}

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text, bool parse_special) const {
  std::vector<std::int32_t> out;
  std::size_t start = 0;
  for (std::size_t at = 0; parse_special && at < text.size();) {
    const auto& candidates = special_[static_cast<unsigned char>(text[at])];
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const auto& token) {
      return text.substr(at).starts_with(token.first);
    });
    if (found == candidates.end()) {
      ++at;
      continue;
    }
    encode_text(text.substr(start, at - start), out);
    out.push_back(found->second);
    at += found->first.size();
    start = at;
  }
  encode_text(text.substr(start), out);
  return out;
}

std::string BpeTokenizer::decode(std::int32_t token, std::int32_t /*previous*/) const {
  check(token >= 0 && token < vocab_size(), "token is {}, must be from 0 to {}", token,
        vocab_size() - 1);
  return bytes_[static_cast<std::size_t>(token)];
}

std::string BpeTokenizer::apply_chat_template(const std::vector<ChatMessage>& messages) const {
  if (!chat_template_) {
    fail(
        ErrorCode::unsupported,
        "chat_template is absent or not a plain ChatML one (<|im_start|>role…<|im_end|>), the only "
        "form that is supported; pass the prompt's text as the model wants it");
  }
  return chat_template_->render(messages);
}

}  // namespace foveal::serving
