#pragma once

#include "foveal/backend.h"

namespace foveal {

/// The kernel's block size of a builder config.
std::int64_t kernel_block_size(const BuilderConfig& config);

/// Sizes, divisibility, device; throws invalid_argument.
void check_builder_config(const BuilderConfig& config);

/// Everything about a step that the host can see; see AttentionMetadataBuilder::build.
void check_step(const BuilderConfig& config, const CommonAttentionMetadata& common,
                std::int64_t common_prefix_len);

}  // namespace foveal
