#pragma once

#include <string_view>
#include <vector>

namespace foveal::serving {

/// Splits text as GPT-2 does before byte-level BPE, by the expression
///   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
/// with Unicode's letters, numbers and white space. With `split_digits`, every number character is
/// a piece of its own first, and what stands between is split by the expression by itself. The
/// pieces are views of `text` and cover it; a byte that is not valid UTF-8 is a character that is
/// neither letter, number nor space.
std::vector<std::string_view> split_gpt2(std::string_view text, bool split_digits);

}  // namespace foveal::serving
