#include "serving/hf_tokenizer.h"

#include <algorithm>
#include <unordered_map>

#include "serving/bpe_tokenizer.h"
#include "serving/json.h"
#include "serving/mapped_file.h"

namespace foveal::serving {
namespace {

constexpr std::int64_t kMaxTokens = 1 << 24;

using Ids = std::unordered_map<std::string, std::int32_t>;

/// Throws unsupported unless the member is absent, null or one of these.
void must_be(const std::string& file, const nlohmann::json& object, const std::string& key,
             std::initializer_list<nlohmann::json> allowed) {
  const nlohmann::json* value = find_member(object, key);
  if (value != nullptr && std::find(allowed.begin(), allowed.end(), *value) == allowed.end()) {
    fail(ErrorCode::unsupported, "{}: {} is {}, must be {}", file, key, describe_json(*value),
         describe_json(*allowed.begin()));
  }
}

std::string type_of(const nlohmann::json& object) {
  const nlohmann::json* type = object.is_object() ? find_member(object, "type") : nullptr;
  return type != nullptr && type->is_string() ? type->get<std::string>() : "";
}

const nlohmann::json& member(const std::string& file, const nlohmann::json& object,
                             const std::string& key, nlohmann::json::value_t type) {
  const nlohmann::json* value = find_member(object, key);
  if (value == nullptr || value->type() != type) {
    fail(ErrorCode::io, "{}: {} is {}, must be {}", file, key,
         value != nullptr ? describe_json(*value) : "missing",
         type == nlohmann::json::value_t::array ? "an array" : "an object");
  }
  return *value;
}

void read_pre_tokenizer(const std::string& file, const nlohmann::json& json,
                        BpeVocabulary& vocabulary) {
  const nlohmann::json* pre = find_member(json, "pre_tokenizer");
  nlohmann::json steps = nlohmann::json::array();
  if (pre != nullptr && type_of(*pre) == "Sequence") {
    steps = member(file, *pre, "pretokenizers", nlohmann::json::value_t::array);
  } else if (pre != nullptr) {
    steps.push_back(*pre);
  }
  // Digits, then ByteLevel, or ByteLevel alone: the order counts.
  std::size_t at = 0;
  if (at < steps.size() && type_of(steps[at]) == "Digits" &&
      steps[at].value("individual_digits", nlohmann::json()) == true) {
    vocabulary.split_digits = true;
    ++at;
  }
  if (at + 1 != steps.size() || type_of(steps[at]) != "ByteLevel") {
    fail(ErrorCode::unsupported,
         "{}: pre_tokenizer is {}, must be ByteLevel, or a Sequence of Digits (individual_digits) "
         "and "
         "ByteLevel",
         file, pre != nullptr ? describe_json(*pre) : "missing");
  }
  must_be(file, steps[at], "add_prefix_space", {false});
  if (steps[at].value("add_prefix_space", nlohmann::json()) != false) {
    fail(ErrorCode::unsupported, "{}: add_prefix_space is true by default, must be false", file);
  }
  must_be(file, steps[at], "use_regex", {true});
}

void set_token(const std::string& file, BpeVocabulary& vocabulary, Ids& ids,
               const std::string& text, const nlohmann::json& id, BpeVocabulary::Kind kind) {
  if (!id.is_number_unsigned() ||
      id.get<std::uint64_t>() >= static_cast<std::uint64_t>(kMaxTokens)) {
    fail(ErrorCode::io, "{}: token {} has id {}, must be from 0 to {}", file, text,
         describe_json(id), kMaxTokens - 1);
  }
  const auto index = id.get<std::size_t>();
  if (index >= vocabulary.tokens.size()) {
    // An id far beyond the others would make a table of nothing.
    if (index > 2 * ids.size() + 65536) {
      fail(ErrorCode::io, "{}: token {} has id {}, though there are only {} before it", file, text,
           index, ids.size());
    }
    vocabulary.tokens.resize(index + 1);
  }
  vocabulary.tokens[index] = {text, kind};
  ids[text] = static_cast<std::int32_t>(index);
}

void read_vocabulary(const std::string& file, const nlohmann::json& json, BpeVocabulary& vocabulary,
                     Ids& ids) {
  using Json = nlohmann::json;
  const Json& model = member(file, json, "model", Json::value_t::object);
  if (const std::string type = type_of(model); !type.empty() && type != "BPE") {
    fail(ErrorCode::unsupported, "{}: model is of type {}, must be BPE", file, type);
  }
  must_be(file, model, "dropout", {nullptr, 0.0});
  must_be(file, model, "unk_token", {nullptr});
  must_be(file, model, "continuing_subword_prefix", {nullptr, ""});
  must_be(file, model, "end_of_word_suffix", {nullptr, ""});
  must_be(file, model, "byte_fallback", {false});
  must_be(file, model, "ignore_merges", {false});

  // By id, so that a wild one is seen beside its neighbours, not by the order of the texts.
  std::vector<std::pair<std::string, Json>> tokens;
  for (const auto& [text, id] : member(file, model, "vocab", Json::value_t::object).items()) {
    tokens.emplace_back(text, id);
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const auto& a, const auto& b) { return a.second < b.second; });
  for (const auto& [text, id] : tokens) {
    set_token(file, vocabulary, ids, text, id, BpeVocabulary::Kind::text);
  }
  if (const Json* added = find_member(json, "added_tokens");
      added != nullptr && added->is_array()) {
    for (const Json& token : *added) {
      const Json* content = token.is_object() ? find_member(token, "content") : nullptr;
      if (content == nullptr || !content->is_string()) {
        fail(ErrorCode::io, "{}: added_tokens holds {}, must be objects with a content string",
             file, describe_json(token));
      }
      for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
        must_be(file, token, flag, {false});
      }
      const bool special = token.value("special", Json()) == true;
      set_token(file, vocabulary, ids, content->get<std::string>(), token.value("id", Json()),
                special ? BpeVocabulary::Kind::control : BpeVocabulary::Kind::added);
    }
  }
}

/// `storage` keeps the texts that the vocabulary's merges view.
void read_merges(const std::string& file, const nlohmann::json& json, BpeVocabulary& vocabulary,
                 std::vector<std::pair<std::string, std::string>>& storage) {
  const nlohmann::json& merges =
      member(file, json["model"], "merges", nlohmann::json::value_t::array);
  for (const nlohmann::json& merge : merges) {
    // Either "a b" or, in newer files, ["a", "b"].
    if (merge.is_string()) {
      const auto text = merge.get<std::string>();
      const std::size_t space = text.find(' ');
      if (space != std::string::npos && space > 0 && space + 1 < text.size()) {
        storage.emplace_back(text.substr(0, space), text.substr(space + 1));
        continue;
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      storage.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    fail(ErrorCode::io, "{}: merges holds {}, must be two tokens", file, describe_json(merge));
  }
  vocabulary.merges.assign(storage.begin(), storage.end());
}

/// Llama-type files put BOS in front with a template as their post-processor.
void read_post_processor(const std::string& file, const nlohmann::json& json,
                         BpeVocabulary& vocabulary, const Ids& ids) {
  const nlohmann::json* processor = find_member(json, "post_processor");
  if (processor == nullptr || type_of(*processor) == "ByteLevel") {
    return;
  }
  const nlohmann::json* single = find_member(*processor, "single");
  if (type_of(*processor) == "TemplateProcessing" && single != nullptr && single->is_array()) {
    const nlohmann::json& parts = *single;
    const auto is_text = [](const nlohmann::json& part) {
      return part.is_object() && part.contains("Sequence");
    };
    if (parts.size() == 1 && is_text(parts[0])) {
      return;
    }
    if (parts.size() == 2 && is_text(parts[1]) && parts[0].is_object() &&
        parts[0].contains("SpecialToken")) {
      const nlohmann::json id = parts[0]["SpecialToken"].value("id", nlohmann::json());
      const auto found = id.is_string() ? ids.find(id.get<std::string>()) : ids.end();
      if (found != ids.end()) {
        vocabulary.bos = found->second;
        return;
      }
    }
  }
  fail(ErrorCode::unsupported,
       "{}: post_processor is {}, must be ByteLevel or a TemplateProcessing that puts one token in "
       "front",
       file, describe_json(*processor));
}

/// The text of a token in tokenizer_config.json: a string, or an object that holds it.
std::optional<std::string> token_text(const nlohmann::json* value) {
  if (value != nullptr && value->is_object()) {
    value = find_member(*value, "content");
  }
  return value != nullptr && value->is_string() ? std::optional(value->get<std::string>())
                                                : std::nullopt;
}

void read_neighbours(const std::filesystem::path& folder, BpeVocabulary& vocabulary,
                     const Ids& ids) {
  std::vector<std::int32_t>& stop = vocabulary.stop_tokens;
  const auto add_stop = [&](const std::string& text) {
    if (const auto found = ids.find(text); found != ids.end()) {
      stop.push_back(found->second);
    }
  };
  const std::filesystem::path config_path = folder / "tokenizer_config.json";
  if (file_exists(config_path)) {
    const auto config = read_json_object(config_path);
    if (const auto eos = token_text(find_member(config, "eos_token"))) {
      add_stop(*eos);
    }
    if (const nlohmann::json* text = find_member(config, "chat_template");
        text != nullptr && text->is_string()) {
      vocabulary.chat_template = text->get<std::string>();
    }
  }
  const std::filesystem::path generation_path = folder / "generation_config.json";
  if (file_exists(generation_path)) {
    const auto config = read_json_object(generation_path);
    const nlohmann::json eos = config.value("eos_token_id", nlohmann::json());
    for (const nlohmann::json& id : eos.is_array() ? eos : nlohmann::json::array({eos})) {
      if (id.is_number_unsigned() && id.get<std::uint64_t>() < vocabulary.tokens.size()) {
        stop.push_back(id.get<std::int32_t>());
      } else if (!id.is_null()) {
        fail(ErrorCode::io, "{}: eos_token_id holds {}, must be a token below {}",
             generation_path.string(), describe_json(id), vocabulary.tokens.size());
      }
    }
  }
  // Chat models end a turn or a document with one or the other.
  for (const char* end : {"<|im_end|>", "<|endoftext|>"}) {
    if (const auto found = ids.find(end);
        found != ids.end() && vocabulary.tokens[static_cast<std::size_t>(found->second)].kind ==
                                  BpeVocabulary::Kind::control) {
      stop.push_back(found->second);
    }
  }
  std::sort(stop.begin(), stop.end());
  stop.erase(std::unique(stop.begin(), stop.end()), stop.end());
}

}  // namespace

std::unique_ptr<Tokenizer> load_hf_tokenizer(const std::filesystem::path& path) {
  const std::string file = path.string();
  const nlohmann::json json = read_json_object(path);
  if (const nlohmann::json* normalizer = find_member(json, "normalizer")) {
    fail(ErrorCode::unsupported, "{}: normalizer is {}, must be null", file,
         describe_json(*normalizer));
  }
  BpeVocabulary vocabulary;
  vocabulary.file = file;
  Ids ids;
  std::vector<std::pair<std::string, std::string>> merges;
  read_vocabulary(file, json, vocabulary, ids);
  read_pre_tokenizer(file, json, vocabulary);
  read_merges(file, json, vocabulary, merges);
  read_post_processor(file, json, vocabulary, ids);
  read_neighbours(path.parent_path(), vocabulary, ids);
  return std::make_unique<BpeTokenizer>(vocabulary);
}

}  // namespace foveal::serving
