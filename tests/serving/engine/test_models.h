#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "serving/engine.h"
#include "serving/model.h"

namespace foveal::serving::testing {

/// A small model of random weights: 2 layers, 4 heads on 2 KV heads of 16, 97 tokens, 256
/// positions.
Model random_model(bool rope_interleaved = true, bool tied = false);

/// `count` random token ids of that model.
std::vector<std::int32_t> random_tokens(std::int64_t count, std::uint64_t seed);

/// Prompts for it that begin with the same 40 tokens and end with 1 to 7 of their own.
std::vector<std::vector<std::int32_t>> prompts_with_prefix(std::size_t count);

/// The tokens that follow `prompt` greedily, from a plain dense computation in float64 that
/// recomputes everything for every token.
std::vector<std::int32_t> dense_greedy(const Model& model, std::vector<std::int32_t> prompt,
                                       std::int64_t max_tokens);

/// Serves the prompts together, greedily.
std::vector<std::vector<std::int32_t>> serve(Engine& engine,
                                             const std::vector<std::vector<std::int32_t>>& prompts,
                                             std::int64_t max_tokens);

/// Serves the prompts together in an engine made for them.
std::vector<std::vector<std::int32_t>> serve(const Model& model, const EngineConfig& config,
                                             const std::vector<std::vector<std::int32_t>>& prompts,
                                             std::int64_t max_tokens, EngineStats* stats = nullptr);

/// Serves each prompt in an engine of its own.
std::vector<std::vector<std::int32_t>> serve_alone(
    const Model& model, const EngineConfig& config,
    const std::vector<std::vector<std::int32_t>>& prompts, std::int64_t max_tokens);

/// Greedy tokens computed in another precision may part from the expected ones, but only for a
/// token that is as likely: its logit, computed densely in float64, is within `tolerance` of the
/// largest. What follows it is another text, and not looked at.
void expect_greedy(const Model& model, const std::vector<std::vector<std::int32_t>>& prompts,
                   const std::vector<std::vector<std::int32_t>>& outputs,
                   const std::vector<std::vector<std::int32_t>>& expected, double tolerance);

/// $FOVEAL_SHARED_DIR, else the folder `shared` beside the source tree; it need not exist.
std::filesystem::path shared_dir();

}  // namespace foveal::serving::testing
