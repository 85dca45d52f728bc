#include "serving/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.h"

namespace foveal::serving {

std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t index) {
  std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                         static_cast<std::uint32_t>(index),
                         static_cast<std::uint32_t>(index >> 32)};
  std::array<std::uint32_t, 2> words{};
  sequence.generate(words.begin(), words.end());
  return std::uint64_t{words[1]} << 32 | words[0];
}

std::int32_t sample(std::span<const float> logits, float temperature, std::mt19937_64& generator) {
  const auto largest = std::ranges::max_element(logits);
  // max_element passes over a NaN except in the first place, so look at the sum too.
  double sum_of_all = 0.0;
  for (const float logit : logits) {
    sum_of_all += logit;
  }
  if (logits.empty() || !std::isfinite(sum_of_all)) {
    fail(ErrorCode::device, "the logits of a step are not finite");
  }
  if (temperature <= 0.0F) {
    return static_cast<std::int32_t>(largest - logits.begin());
  }

  const auto weight = [&](float logit) {
    return static_cast<double>(std::exp((logit - *largest) / temperature));
  };
  double total = 0.0;
  for (const float logit : logits) {
    total += weight(logit);
  }
  // 53 random bits are a uniform double in [0, 1), the same with every standard library.
  double rest = static_cast<double>(generator() >> 11) * 0x1.0p-53 * total;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    rest -= weight(logits[i]);
    if (rest < 0.0) {
      return static_cast<std::int32_t>(i);
    }
  }
  return static_cast<std::int32_t>(largest - logits.begin());  // Rounding left a crumb.
}

}  // namespace foveal::serving
