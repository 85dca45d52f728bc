#include <gtest/gtest.h>

#include "foveal/generate_command.h"

namespace foveal::tools {
namespace {

const std::string kReplacement = "\xEF\xBF\xBD";

TEST(Utf8Stream, HoldsBackIncompleteCharacters) {
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";
  for (std::size_t piece = 1; piece <= text.size(); ++piece) {
    Utf8Stream stream;
    std::string out;
    for (std::size_t i = 0; i < text.size(); i += piece) {
      const std::string complete = stream.push(text.substr(i, piece));
      out += complete;
      EXPECT_EQ(complete.find(kReplacement), std::string::npos);
    }
    EXPECT_EQ(out + stream.finish(), text);
  }
}

TEST(Utf8Stream, ReplacesWhatIsNotUtf8) {
  const auto convert = [](std::string_view bytes) {
    Utf8Stream stream;
    std::string out = stream.push(bytes);
    return out + stream.finish();
  };
  EXPECT_EQ(convert("a\x80z"), "a" + kReplacement + "z");
  EXPECT_EQ(convert("a\xFFz"), "a" + kReplacement + "z");
  EXPECT_EQ(convert("\xE2\x82"), kReplacement);                 // Cut short.
  EXPECT_EQ(convert("\xE2(z"), kReplacement + "(z");            // A lead byte without its rest.
  EXPECT_EQ(convert("\xC0\xAF"), kReplacement + kReplacement);  // Overlong.
  EXPECT_EQ(convert("\xED\xA0\x80"), kReplacement + kReplacement + kReplacement);  // Surrogate.
  EXPECT_EQ(convert(""), "");
}

}  // namespace
}  // namespace foveal::tools
