#pragma once

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

namespace foveal::serving {

enum class FinishReason : std::uint8_t {
  none,         ///< Not finished.
  stop,         ///< The model produced a stop token, which is the last of its tokens.
  max_tokens,   ///< As many tokens as asked for.
  max_seq_len,  ///< The sequence fills the model's context.
};

std::string_view to_string(FinishReason reason);

/// How a request wants its tokens drawn.
struct SamplingParams {
  float temperature = 0.0F;  ///< 0 is greedy.
  std::uint64_t seed = 0;    ///< Of this request's own generator; see derive_seed.
  std::int64_t max_tokens = 256;
};

/// One sequence on its way through the engine.
struct Request {
  std::int64_t id = 0;
  std::vector<std::int32_t> tokens;  ///< The prompt, then what has been generated.
  std::int64_t num_prompt_tokens = 0;
  /// Leading tokens whose keys and values are in the cache. Preemption sets it back to 0; the
  /// tokens stay, so that what was generated is recomputed like a prompt.
  std::int64_t num_computed = 0;
  std::vector<std::int32_t> blocks;       ///< Block table, in order of position.
  std::int64_t num_cacheable_blocks = 0;  ///< Leading blocks that the pool knows the content of.
  SamplingParams sampling;
  std::mt19937_64 generator;
  FinishReason finish = FinishReason::none;

  std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t num_generated() const { return num_tokens() - num_prompt_tokens; }
};

}  // namespace foveal::serving
