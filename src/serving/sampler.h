#pragma once

#include <cstdint>
#include <random>
#include <span>

namespace foveal::serving {

/// The seed of request `index` out of a run's seed. It depends on nothing else, so that a request
/// gives the same tokens alone or in a batch.
std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t index);

/// The next token: the largest logit (the first of equals) when temperature is 0, else drawn from
/// softmax(logits / temperature). Throws device when the logits hold no finite maximum, which means
/// that the model's weights or a kernel are broken.
std::int32_t sample(std::span<const float> logits, float temperature, std::mt19937_64& generator);

}  // namespace foveal::serving
