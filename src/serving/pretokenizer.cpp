#include "serving/pretokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace foveal::serving {
namespace {

enum class CharClass : std::uint8_t { letter, number, space, other };

struct Character {
  CharClass char_class;
  std::size_t length;
};

/// Unicode's White_Space property, which is not a general category.
bool is_white_space(std::int32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

CharClass class_of(std::int32_t c) {
  if (is_white_space(c)) {
    return CharClass::space;
  }
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::letter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::number;
    default:
      return CharClass::other;
  }
}

Character character_at(std::string_view text, std::size_t at) {
  // A character is at most four bytes; the length passed on must fit utf8proc's type.
  const std::string_view rest = text.substr(at, 4);
  std::int32_t code_point = -1;
  const utf8proc_ssize_t length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(rest.data()),
                       static_cast<utf8proc_ssize_t>(rest.size()), &code_point);
  if (length <= 0) {
    return {CharClass::other, 1};
  }
  return {class_of(code_point), static_cast<std::size_t>(length)};
}

/// Where the run of characters of this class that starts at `at` ends.
std::size_t end_of_run(std::string_view text, std::size_t at, CharClass char_class) {
  while (at < text.size()) {
    const Character c = character_at(text, at);
    if (c.char_class != char_class) {
      break;
    }
    at += c.length;
  }
  return at;
}

std::size_t contraction_length(std::string_view rest) {
  static constexpr std::array<std::string_view, 7> kContractions{"'s", "'t",  "'re", "'ve",
                                                                 "'m", "'ll", "'d"};
  for (const std::string_view contraction : kContractions) {
    if (rest.starts_with(contraction)) {
      return contraction.size();
    }
  }
  return 0;
}

/// White space from `at` on: up to its last character when something else follows (that one may
/// start the next piece), all of it at the end of the text or when it is one character.
std::size_t end_of_space(std::string_view text, std::size_t at) {
  std::size_t end = at;
  std::size_t last = at;
  while (end < text.size()) {
    const Character c = character_at(text, end);
    if (c.char_class != CharClass::space) {
      return last > at ? last : end;
    }
    last = end;
    end += c.length;
  }
  return end;
}

/// The end of the expression's match at `at`.
std::size_t end_of_piece(std::string_view text, std::size_t at) {
  if (const std::size_t length = contraction_length(text.substr(at)); length > 0) {
    return at + length;
  }
  const std::size_t start = text[at] == ' ' ? at + 1 : at;
  if (start < text.size()) {
    const CharClass char_class = character_at(text, start).char_class;
    if (char_class != CharClass::space) {
      return end_of_run(text, start, char_class);
    }
  }
  return end_of_space(text, at);
}

void split_by_expression(std::string_view text, std::vector<std::string_view>& pieces) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = end_of_piece(text, at);
    pieces.push_back(text.substr(at, end - at));
    at = end;
  }
}

}  // namespace

std::vector<std::string_view> split_gpt2(std::string_view text, bool split_digits) {
  std::vector<std::string_view> pieces;
  std::size_t start = 0;
  for (std::size_t at = 0; split_digits && at < text.size();) {
    const Character c = character_at(text, at);
    if (c.char_class == CharClass::number) {
      split_by_expression(text.substr(start, at - start), pieces);
      pieces.push_back(text.substr(at, c.length));
      start = at + c.length;
    }
    at += c.length;
  }
  split_by_expression(text.substr(start), pieces);
  return pieces;
}

}  // namespace foveal::serving
