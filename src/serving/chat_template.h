#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serving/tokenizer.h"

namespace foveal::serving {

/// A conversation in ChatML: "<|im_start|>role\ncontent<|im_end|>\n" for each message.
struct ChatMlTemplate {
  /// What a conversation that does not start with a system message begins with, if anything.
  std::optional<std::string> default_system;

  /// The prompt text, with the assistant's turn opened at the end.
  std::string render(const std::vector<ChatMessage>& messages) const;
};

/// Recognises a Jinja chat template that does exactly what ChatMlTemplate does. There is no Jinja
/// interpreter here, so the template is brought to one spelling and compared; one that does
/// anything more (tools, reasoning, trimmed contents) is not recognised, rather than rendered
/// nearly right.
std::optional<ChatMlTemplate> recognise_chat_template(std::string_view jinja);

}  // namespace foveal::serving
