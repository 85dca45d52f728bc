#include "serving/chat_template.h"

#include <gtest/gtest.h>

namespace foveal::serving {
namespace {

// As SmolLM2's files have it, newlines inside of strings and all.
const std::string kSmol =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\nBe nice.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + "
    "'\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}";

TEST(ChatTemplate, TakesTheDefaultSystemText) {
  const auto chat = recognise_chat_template(kSmol);
  ASSERT_TRUE(chat);
  EXPECT_EQ(chat->default_system, "Be nice.");
  EXPECT_EQ(chat->render({{"user", "Hi"}}),
            "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(chat->render({{"system", "S"}, {"user", "Hi"}, {"assistant", "Ho"}, {"user", "?"}}),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(chat->render({}), "<|im_start|>assistant\n");
}

TEST(ChatTemplate, ReadsOtherSpellingsOfTheSame) {
  // Escapes, double quotes, attributes, trimmed tags and lines of their own.
  const auto chat = recognise_chat_template(R"({%- for message in messages -%}
    {{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
)");
  ASSERT_TRUE(chat);
  EXPECT_FALSE(chat->default_system);
  EXPECT_EQ(chat->render({{"user", "Hi"}}),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");

  EXPECT_TRUE(
      recognise_chat_template("{% if not add_generation_prompt is defined %}{% set "
                              "add_generation_prompt = false %}{% endif %}"
                              "{% for message in messages %}{{'<|im_start|>' + message['role'] + "
                              "'\\n' + message['content'] + "
                              "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
                              "'<|im_start|>assistant\\n' "
                              "}}{% endif %}"));
}

TEST(ChatTemplate, DoesNotGuessAtOthers) {
  const auto changed = [](const std::string& from, const std::string& to) {
    std::string text = kSmol;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  EXPECT_FALSE(recognise_chat_template(""));
  EXPECT_FALSE(recognise_chat_template("{{"));
  EXPECT_FALSE(recognise_chat_template(
      "{% for message in messages %}[INST]{{ message.content }}{% endfor %}"));
  EXPECT_FALSE(recognise_chat_template(changed("message['content']", "message['content'] | trim")));
  EXPECT_FALSE(recognise_chat_template(changed("{% endfor %}", "{% endfor %}x")));
  EXPECT_FALSE(recognise_chat_template(changed("{% endfor %}", "\n{% endfor %}")));
  EXPECT_FALSE(recognise_chat_template(changed("{{'<", "{% if tools %}{{tools}}{% endif %}{{'<")));
  EXPECT_FALSE(recognise_chat_template("{{ bos_token }}" + kSmol));
  EXPECT_FALSE(recognise_chat_template(changed("Be nice.", "Be ' + name + '.")));
}

}  // namespace
}  // namespace foveal::serving
