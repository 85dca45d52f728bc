#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/flash_attn/kernels.h"
#include "cuda/kernels/flash_attn/params.cuh"
#include "foveal/backend.h"

namespace foveal::cuda::flash_attn {

inline constexpr const char* kName = "FLASH_ATTN";

/// Requests with few rows, or with many: how their kernels are launched in one pass.
struct ClassPlan {
  bool active = false;
  ForwardVariant variant;  ///< For a layer whose tensors are aligned; its kernel.
  const Kernel* kernel = nullptr;
  int capacity = 1;  ///< Blocks of it that the device runs at a time.
  int max_items = 0;
  int max_slots = 0;             ///< 0: nothing is split.
  PlanCounts* counts = nullptr;  ///< On the device, like all the planner wrote.
  const WorkItem* items = nullptr;
  unsigned* counters = nullptr;

  std::int64_t partial_output = 0;  ///< Offsets in the workspace.
  std::int64_t partial_lse = 0;
};

/// A side of a window, small enough that position ± it is an int; no sequence is as long.
inline int window_bound(std::int64_t side) {
  return static_cast<int>(std::min(side, std::int64_t{1} << 30));
}

/// One sweep over keys: all of them, or in a cascade the common prefix and then the rest.
struct Pass {
  bool causal = false;
  int key_begin = 0;
  bool shared_table = false;
  int rows_max = 0;  ///< Requests with at most so many rows belong to the first class.
  std::array<ClassPlan, 2> classes{};
  std::int64_t output = 0;  ///< Cascade: offsets in the workspace of this pass's result.
  std::int64_t lse = 0;
};

class FlashMetadata final : public AttentionMetadata {
 public:
  FlashMetadata(const BuilderConfig& config, const CommonAttentionMetadata& common,
                std::int64_t common_prefix_len)
      : AttentionMetadata(kName, config, common, common_prefix_len), device(config.device.index) {}

  std::int64_t workspace_bytes() const override { return workspace_size; }

  int device;
  std::vector<Pass> passes;
  int page_size = 0;  ///< 0: plain keys and values.
  int pages_per_block = 1;
  std::int64_t workspace_size = 0;
  std::shared_ptr<DeviceBuffer> plan;       ///< Held, so that it outlives the plan's use.
  std::shared_ptr<DeviceBuffer> workspace;  ///< The builder's; null where workspace_size is 0.
};

}  // namespace foveal::cuda::flash_attn
