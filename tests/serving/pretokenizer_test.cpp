#include "serving/pretokenizer.h"

#include <gtest/gtest.h>

#include <string>

namespace foveal::serving {
namespace {

using Pieces = std::vector<std::string_view>;

TEST(Pretokenizer, SplitsAsTheExpressionDoes) {
  const auto split = [](std::string_view text) { return split_gpt2(text, false); };
  EXPECT_EQ(split(""), Pieces{});
  EXPECT_EQ(split("Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(split("I'll we've can't 'Tis"),
            (Pieces{"I", "'ll", " we", "'ve", " can", "'t", " '", "Tis"}));
  EXPECT_EQ(split("I'LL"), (Pieces{"I", "'", "LL"}));
  EXPECT_EQ(split("a 123 b4"), (Pieces{"a", " 123", " b", "4"}));
  EXPECT_EQ(split("x+=1;"), (Pieces{"x", "+=", "1", ";"}));
  // White space gives its last character to what follows, if that is a space.
  EXPECT_EQ(split("a   b"), (Pieces{"a", "  ", " b"}));
  EXPECT_EQ(split("a\n\nb"), (Pieces{"a", "\n", "\n", "b"}));
  EXPECT_EQ(split("a \nb"), (Pieces{"a", " ", "\n", "b"}));
  EXPECT_EQ(split("a \n"), (Pieces{"a", " \n"}));
  EXPECT_EQ(split("  "), (Pieces{"  "}));
}

TEST(Pretokenizer, KnowsUnicode) {
  const auto split = [](std::string_view text) { return split_gpt2(text, false); };
  EXPECT_EQ(split("naïve Ж日本"), (Pieces{"naïve", " Ж日本"}));
  EXPECT_EQ(split("x²½Ⅷ"), (Pieces{"x", "²½Ⅷ"}));
  EXPECT_EQ(split("e\u0301"), (Pieces{"e", "\u0301"}));  // a mark is no letter
  EXPECT_EQ(split("a\u00a0\u3000b"), (Pieces{"a", "\u00a0", "\u3000", "b"}));
  EXPECT_EQ(split("a\u200bb"), (Pieces{"a", "\u200b", "b"}));  // zero width is no white space
}

TEST(Pretokenizer, TakesDigitsOutFirst) {
  const auto split = [](std::string_view text) { return split_gpt2(text, true); };
  EXPECT_EQ(split("a 123"), (Pieces{"a", " ", "1", "2", "3"}));
  EXPECT_EQ(split("1  2"), (Pieces{"1", "  ", "2"}));
  EXPECT_EQ(split("v2.0'll"), (Pieces{"v", "2", ".", "0", "'ll"}));
  EXPECT_EQ(split("½x"), (Pieces{"½", "x"}));
}

TEST(Pretokenizer, CoversInvalidUtf8) {
  EXPECT_EQ(split_gpt2("a\xFF\xFE"
                       "b",
                       true),
            (Pieces{"a", "\xFF\xFE", "b"}));
  EXPECT_EQ(split_gpt2("\xE6\x97", true), (Pieces{"\xE6\x97"}));  // a character cut short
  EXPECT_EQ(split_gpt2(" \xC0\x80", true), (Pieces{" \xC0\x80"}));
  // Any bytes at all, joined again.
  std::string bytes;
  for (unsigned i = 0; i < 65536; ++i) {
    bytes += static_cast<char>((i * 2654435761U) >> 13);
  }
  std::string joined;
  for (const std::string_view piece : split_gpt2(bytes, true)) {
    EXPECT_FALSE(piece.empty());
    joined += piece;
  }
  EXPECT_EQ(joined, bytes);
}

}  // namespace
}  // namespace foveal::serving
