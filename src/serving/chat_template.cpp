#include "serving/chat_template.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <utility>

namespace foveal::serving {
namespace {

/// The template's pieces: text and expressions, which give output, and blocks, which control.
enum class PieceKind : std::uint8_t { output, block };
struct Piece {
  PieceKind kind;
  std::string text;
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

/// Code between {{ }} or {% %} in one spelling: no white space outside of strings, single quotes,
/// escaped newlines as newlines, message.role for message['role'], joined string constants.
std::string normalise_code(std::string_view code) {
  std::string out;
  char quote = 0;
  for (std::size_t i = 0; i < code.size(); ++i) {
    const char c = code[i];
    if (quote != 0) {
      if (c == '\\' && i + 1 < code.size()) {
        ++i;
        out += code[i] == 'n' ? '\n' : code[i];
      } else if (c == quote) {
        quote = 0;
        out += '\'';
      } else {
        out += c;
      }
    } else if (c == '\'' || c == '"') {
      quote = c;
      out += '\'';
    } else if (std::isspace(static_cast<unsigned char>(c)) == 0) {
      out += c;
    }
  }
  replace_all(out, "['role']", ".role");
  replace_all(out, "['content']", ".content");
  replace_all(out, "'+'", "");
  return out;
}

void add_output(std::vector<Piece>& pieces, const std::string& expression) {
  if (!pieces.empty() && pieces.back().kind == PieceKind::output) {
    pieces.back().text += "+" + expression;
    replace_all(pieces.back().text, "'+'", "");
  } else {
    pieces.push_back({PieceKind::output, expression});
  }
}

/// Literal text between tags. Chat templates are rendered with Jinja's trim_blocks and
/// lstrip_blocks: a newline right after a block, and blanks from a line's start to a block, are not
/// output.
void add_text(std::vector<Piece>& pieces, std::string_view text, bool after_block,
              bool before_block, bool trim_front, bool trim_back) {
  constexpr std::string_view kSpace = " \t\r\n";
  bool line_start = pieces.empty();
  if (after_block && text.starts_with('\n')) {
    text.remove_prefix(1);
    line_start = true;
  }
  if (trim_front) {
    text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  }
  if (before_block) {
    const std::size_t kept = text.find_last_not_of(" \t") + 1;
    if (kept > 0 ? text[kept - 1] == '\n' : line_start) {
      text = text.substr(0, kept);
    }
  }
  if (trim_back) {
    text = text.substr(0, text.find_last_not_of(kSpace) + 1);
  }
  if (!text.empty()) {
    add_output(pieces, "'" + std::string(text) + "'");
  }
}

/// Empty when the template is not well-formed.
std::vector<Piece> parse(std::string_view jinja) {
  std::vector<Piece> pieces;
  bool after_block = false;
  bool trim_front = false;
  for (std::size_t at = 0; at < jinja.size();) {
    std::size_t open = jinja.find('{', at);
    while (open != std::string_view::npos && jinja.substr(open, 2) != "{{" &&
           jinja.substr(open, 2) != "{%") {
      open = jinja.find('{', open + 1);
    }
    if (open == std::string_view::npos) {
      add_text(pieces, jinja.substr(at), after_block, false, trim_front, false);
      break;
    }
    const bool block = jinja[open + 1] == '%';
    const std::size_t close = jinja.find(block ? "%}" : "}}", open);
    if (close == std::string_view::npos) {
      return {};
    }
    std::string_view code = jinja.substr(open + 2, close - open - 2);
    const bool trim_back = code.starts_with('-');
    add_text(pieces, jinja.substr(at, open - at), after_block, block, trim_front, trim_back);
    trim_front = code.ends_with('-');
    code.remove_prefix(trim_back ? 1 : 0);
    code.remove_suffix(trim_front && !code.empty() ? 1 : 0);
    if (block) {
      pieces.push_back({PieceKind::block, normalise_code(code)});
    } else {
      add_output(pieces, normalise_code(code));
    }
    after_block = block;
    at = close + 2;
  }
  return pieces;
}

/// Walks over the pieces, comparing.
class Matcher {
 public:
  explicit Matcher(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  bool block(std::string_view text) { return take(PieceKind::block, text); }
  bool output(std::string_view text) { return take(PieceKind::output, text); }
  /// The middle of an output that has this start and end.
  std::optional<std::string> output_between(std::string_view start, std::string_view end) {
    if (at_ == pieces_.size() || pieces_[at_].kind != PieceKind::output) {
      return std::nullopt;
    }
    const std::string& text = pieces_[at_].text;
    if (text.size() < start.size() + end.size() || !text.starts_with(start) ||
        !text.ends_with(end)) {
      return std::nullopt;
    }
    ++at_;
    return text.substr(start.size(), text.size() - start.size() - end.size());
  }
  bool done() const { return at_ == pieces_.size(); }

 private:
  bool take(PieceKind kind, std::string_view text) {
    if (at_ == pieces_.size() || pieces_[at_].kind != kind || pieces_[at_].text != text) {
      return false;
    }
    ++at_;
    return true;
  }

  std::vector<Piece> pieces_;
  std::size_t at_ = 0;
};

}  // namespace

std::optional<ChatMlTemplate> recognise_chat_template(std::string_view jinja) {
  Matcher matcher(parse(jinja));
  ChatMlTemplate result;
  // A default for a variable that is always set here.
  if (matcher.block("ifnotadd_generation_promptisdefined") &&
      !(matcher.block("setadd_generation_prompt=false") && matcher.block("endif"))) {
    return std::nullopt;
  }
  if (!matcher.block("formessageinmessages")) {
    return std::nullopt;
  }
  if (matcher.block("ifloop.firstandmessages[0].role!='system'")) {
    result.default_system = matcher.output_between("'<|im_start|>system\n", "<|im_end|>\n'");
    if (!result.default_system || result.default_system->find('\'') != std::string::npos ||
        !matcher.block("endif")) {
      return std::nullopt;
    }
  }
  const bool rest =
      matcher.output("'<|im_start|>'+message.role+'\n'+message.content+'<|im_end|>\n'") &&
      matcher.block("endfor") && matcher.block("ifadd_generation_prompt") &&
      matcher.output("'<|im_start|>assistant\n'") && matcher.block("endif") && matcher.done();
  return rest ? std::optional(result) : std::nullopt;
}

std::string ChatMlTemplate::render(const std::vector<ChatMessage>& messages) const {
  std::string out;
  const auto add = [&](const std::string& role, const std::string& content) {
    out += "<|im_start|>" + role + "\n" + content + "<|im_end|>\n";
  };
  if (default_system && !messages.empty() && messages.front().role != "system") {
    add("system", *default_system);
  }
  for (const ChatMessage& message : messages) {
    add(message.role, message.content);
  }
  out += "<|im_start|>assistant\n";
  return out;
}

}  // namespace foveal::serving
