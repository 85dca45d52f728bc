// The targets on damaged seeds, without a fuzzer: FOVEAL_FUZZ_SECONDS each, 1 by default.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "fuzz/targets.h"

namespace foveal::fuzz {
namespace {

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

/// A few changes: of bits and bytes, digits and signs, and of pieces that move, double or vanish.
std::string damaged(std::string text, std::mt19937& random) {
  const auto below = [&](std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random);
  };
  for (std::size_t left = 1 + below(6); left > 0; --left) {
    const std::size_t at = below(text.size() + 1);
    const std::size_t length = below(std::min<std::size_t>(16, text.size() - at) + 1);
    switch (below(6)) {
      case 0:
        text.erase(at, length);
        break;
      case 1:
        text.insert(below(text.size() + 1), text.substr(at, length));
        break;
      case 2:
        text.insert(at, 1, static_cast<char>(below(256)));
        break;
      case 3:
        text.insert(at, 1, "0129-.eE\"[]{},:\n\xFF"[below(17)]);
        break;
      default:
        if (at < text.size()) {
          text[at] = static_cast<char>(below(2) == 0 ? text[at] ^ (1 << below(8)) : below(256));
        }
    }
  }
  return text;
}

class Fuzz : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Fuzz, ReadsOrRefuses) {
  const char* seconds = std::getenv("FOVEAL_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(seconds == nullptr ? 1 : std::stoi(seconds));
  const Target& target = targets()[GetParam()];
  std::vector<std::string> pool = target.seeds();
  for (const std::string& seed : pool) {
    run(target, bytes_of(seed));
  }
  std::mt19937 random(1);
  while (std::chrono::steady_clock::now() < end) {
    const std::string input = damaged(pool[random() % pool.size()], random);
    ASSERT_NO_THROW(run(target, bytes_of(input))) << ::testing::PrintToString(input);
    if (pool.size() < 200 && random() % 50 == 0) {
      pool.push_back(input);  // Damage adds up.
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Fuzz, ::testing::Range(std::size_t{0}, targets().size()),
                         [](const auto& info) { return targets()[info.param].name; });

/// A seed that is refused at its first byte would leave all behind it untried.
TEST(FuzzSeeds, AreRead) {
  for (const Target& target : targets()) {
    for (const std::string& seed : target.seeds()) {
      EXPECT_NO_THROW(target.run(bytes_of(seed))) << target.name;
    }
  }
}

}  // namespace
}  // namespace foveal::fuzz
