#pragma once

#include <array>
#include <compare>
#include <map>
#include <memory>
#include <vector>

#include "cuda/flash_attn/metadata.h"
#include "foveal/backend.h"

namespace foveal::cuda::flash_attn {

/// Plans on the device: build() enqueues one small kernel on BuilderConfig::stream and reads
/// nothing back. What it writes stays at the same address for the same input tensors, so a captured
/// graph may either hold the planning too (build within the capture) or be replayed after another
/// build.
class FlashBuilder final : public AttentionMetadataBuilder {
 public:
  explicit FlashBuilder(const BuilderConfig& config);

  AttentionMetadataPtr build_for_graph_capture(const CommonAttentionMetadata& common) override;
  GraphSupport graph_support() const override { return GraphSupport::always; }
  bool use_cascade(const CascadeQuery& query) const override;

 private:
  /// What a plan belongs to: the same tensors and bounds share one, made anew by each build.
  struct PlanId {
    const void* query_start_loc;
    const void* seq_lens;
    std::int64_t num_reqs, num_tokens, max_query_len, prefix;
    bool causal;
    int page_size;
    friend auto operator<=>(const PlanId&, const PlanId&) = default;
  };
  struct PlanSlot {
    std::shared_ptr<DeviceBuffer> buffer;
    bool captured = false;
  };

  AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                const CommonAttentionMetadata& common, bool fast_build) override;
  AttentionMetadataPtr plan(std::int64_t common_prefix_len, const CommonAttentionMetadata& common,
                            bool for_capture);
  /// Whether the step may have requests with few rows, and with many.
  std::array<bool, 2> classes_of(const FlashMetadata& metadata, const Pass& pass,
                                 std::int64_t rows_max, bool for_capture) const;
  ClassPlan plan_class(const FlashMetadata& metadata, const Pass& pass, int number, bool alone);
  /// The tiles of the two classes; with batch_invariant they must not depend on the batch.
  TileConfig few_rows_tile(const HeadShape& head, const CommonAttentionMetadata& common) const;
  TileConfig many_rows_tile(const HeadShape& head, const CommonAttentionMetadata& common) const;
  /// Chooses the kernel, makes it ready and asks how many of its blocks the device runs at a time.
  void choose_kernel(ClassPlan& plan, const FlashMetadata& metadata, bool causal,
                     const TileConfig& tile);
  std::shared_ptr<DeviceBuffer> plan_buffer(PlanSlot& slot, std::int64_t bytes);
  std::shared_ptr<DeviceBuffer> workspace(std::int64_t bytes);

  struct ReadyKernel {
    const Kernel* kernel;
    int capacity;
  };

  const DeviceProperties& device_;
  std::map<ForwardVariant, ReadyKernel> kernels_;
  std::map<PlanId, PlanSlot> plans_;
  std::vector<std::shared_ptr<DeviceBuffer>> workspaces_;  ///< The last is the largest.
};

}  // namespace foveal::cuda::flash_attn
