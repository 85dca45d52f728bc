#include "serving/gguf_tokenizer.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "serving/bpe_tokenizer.h"
#include "serving/gguf.h"

namespace foveal::serving {
namespace {

// Values of tokenizer.ggml.token_type.
constexpr std::int64_t kControl = 3;
constexpr std::int64_t kUserDefined = 4;

BpeVocabulary::Kind kind_of(std::int64_t token_type) {
  if (token_type == kControl) {
    return BpeVocabulary::Kind::control;
  }
  return token_type == kUserDefined ? BpeVocabulary::Kind::added : BpeVocabulary::Kind::text;
}

std::optional<std::int32_t> token_id(const GgufFile& file, const std::string& key,
                                     std::size_t count) {
  const auto value = file.integer(key);
  if (!value) {
    return std::nullopt;
  }
  if (*value < 0 || *value >= static_cast<std::int64_t>(count)) {
    fail(ErrorCode::io, "{}: {} is {}, must be a token from 0 to {}", file.name(), key, *value,
         count - 1);
  }
  return static_cast<std::int32_t>(*value);
}

template <typename Array>
const Array& required(const GgufFile& file, const std::string& key, const Array* array) {
  if (array == nullptr) {
    fail(ErrorCode::io, "{}: {} is missing", file.name(), key);
  }
  return *array;
}

void read_tokens(const GgufFile& file, BpeVocabulary& vocabulary) {
  const std::string tokens_key = "tokenizer.ggml.tokens";
  const std::string types_key = "tokenizer.ggml.token_type";
  const auto& tokens = required(file, tokens_key, file.strings(tokens_key));
  const auto& types = required(file, types_key, file.integers(types_key));
  if (types.size() != tokens.size()) {
    fail(ErrorCode::io, "{}: {} has {} elements, must have one for each of the {} tokens",
         file.name(), types_key, types.size(), tokens.size());
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    vocabulary.tokens.push_back({std::string(tokens[i]), kind_of(types[i])});
  }
}

void read_merges(const GgufFile& file, BpeVocabulary& vocabulary) {
  const std::string key = "tokenizer.ggml.merges";
  for (const std::string_view merge : required(file, key, file.strings(key))) {
    const std::size_t space = merge.find(' ', 1);
    if (space == std::string_view::npos || space + 1 == merge.size()) {
      fail(ErrorCode::io, "{}: {} holds \"{}\", must be two tokens with a space between",
           file.name(), key, merge);
    }
    vocabulary.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
}

void read_stop_tokens(const GgufFile& file, BpeVocabulary& vocabulary) {
  std::vector<std::int32_t>& stop = vocabulary.stop_tokens;
  const std::size_t count = vocabulary.tokens.size();
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (const auto token = token_id(file, key, count)) {
      stop.push_back(*token);
    }
  }
  // Files name one end token, but chat models also end a turn or a document with the other.
  static constexpr std::array<std::string_view, 2> kEnds{"<|im_end|>", "<|endoftext|>"};
  for (std::size_t i = 0; i < count; ++i) {
    const auto& token = vocabulary.tokens[i];
    if (token.kind == BpeVocabulary::Kind::control &&
        std::find(kEnds.begin(), kEnds.end(), token.text) != kEnds.end()) {
      stop.push_back(static_cast<std::int32_t>(i));
    }
  }
  std::sort(stop.begin(), stop.end());
  stop.erase(std::unique(stop.begin(), stop.end()), stop.end());
}

}  // namespace

std::unique_ptr<Tokenizer> load_gguf_tokenizer(const std::filesystem::path& path) {
  const GgufFile file(path);
  const std::string model = file.string("tokenizer.ggml.model").value_or("");
  if (model != "gpt2") {
    fail(ErrorCode::unsupported,
         "{}: tokenizer.ggml.model is \"{}\", must be \"gpt2\" (byte-level BPE); pass --tokenizer "
         "with "
         "the model's tokenizer.json",
         file.name(), model);
  }
  const std::string pre = file.string("tokenizer.ggml.pre").value_or("default");
  if (pre != "smollm" && pre != "gpt-2" && pre != "default") {
    fail(ErrorCode::unsupported,
         "{}: tokenizer.ggml.pre is \"{}\", must be \"smollm\", \"gpt-2\" or \"default\"",
         file.name(), pre);
  }
  if (file.boolean("tokenizer.ggml.add_space_prefix").value_or(false)) {
    fail(ErrorCode::unsupported, "{}: tokenizer.ggml.add_space_prefix is true, must be false",
         file.name());
  }

  BpeVocabulary vocabulary;
  vocabulary.file = file.name();
  vocabulary.split_digits = pre == "smollm";
  read_tokens(file, vocabulary);
  read_merges(file, vocabulary);
  read_stop_tokens(file, vocabulary);
  if (file.boolean("tokenizer.ggml.add_bos_token").value_or(false)) {
    vocabulary.bos = token_id(file, "tokenizer.ggml.bos_token_id", vocabulary.tokens.size());
  }
  vocabulary.chat_template = file.string("tokenizer.chat_template");
  return std::make_unique<BpeTokenizer>(vocabulary);
}

}  // namespace foveal::serving
