#pragma once

#include <cstdint>
#include <optional>
#include <queue>
#include <span>
#include <vector>

namespace foveal::serving {

/// A merge of two neighbouring tokens: the smallest priority is done first, the leftmost among
/// equals.
template <typename Priority>
struct Merge {
  Priority priority;
  std::int32_t token;
};

/// Merges neighbours until `find(left, right)` offers no merge for any, and returns the tokens that
/// are left. This is the greedy rule of byte-pair encoding, with a queue in place of a search for
/// each merge: n log n steps, so that a long text without spaces is no attack.
template <typename Priority, typename Find>
std::vector<std::int32_t> merge_symbols(std::span<const std::int32_t> symbols, const Find& find) {
  struct Candidate {
    Priority priority;
    std::size_t left, right;
    std::int32_t left_token, right_token, merged;
  };
  const auto later = [](const Candidate& a, const Candidate& b) {
    return b.priority < a.priority || (!(a.priority < b.priority) && b.left < a.left);
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> queue(later);

  constexpr std::int32_t kGone = -1;
  const std::size_t count = symbols.size();
  std::vector<std::int32_t> tokens(symbols.begin(), symbols.end());
  std::vector<std::size_t> next(count);
  std::vector<std::size_t> previous(count);
  const auto offer = [&](std::size_t left, std::size_t right) {
    if (const std::optional<Merge<Priority>> merge = find(tokens[left], tokens[right])) {
      queue.push({merge->priority, left, right, tokens[left], tokens[right], merge->token});
    }
  };
  for (std::size_t i = 0; i < count; ++i) {
    next[i] = i + 1;
    previous[i] = i == 0 ? count : i - 1;
  }
  for (std::size_t i = 0; i + 1 < count; ++i) {
    offer(i, i + 1);
  }
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    // An earlier merge may have taken either side, or put another token between them.
    if (tokens[best.left] != best.left_token || next[best.left] != best.right ||
        tokens[best.right] != best.right_token) {
      continue;
    }
    tokens[best.left] = best.merged;
    tokens[best.right] = kGone;
    next[best.left] = next[best.right];
    if (next[best.left] != count) {
      previous[next[best.left]] = best.left;
      offer(best.left, next[best.left]);
    }
    if (previous[best.left] != count) {
      offer(previous[best.left], best.left);
    }
  }
  std::erase(tokens, kGone);
  return tokens;
}

}  // namespace foveal::serving
