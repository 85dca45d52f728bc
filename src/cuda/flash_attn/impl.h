#pragma once

#include <optional>

#include "cuda/flash_attn/kernels.h"
#include "cuda/flash_attn/metadata.h"
#include "cuda/flash_attn/tensor_maps.h"
#include "cuda/kernels/flash_attn/params.cuh"
#include "foveal/backend.h"

namespace foveal::cuda::flash_attn {

class FlashImpl final : public AttentionImpl {
 public:
  explicit FlashImpl(const AttentionSpec& spec);

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& context) const override;
  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override;
  void run_pass(const ForwardArgs& args, const FlashMetadata& metadata, const Pass& pass,
                unsigned char* workspace, Stream stream) const;
  struct Launch {
    const Kernel* kernel = nullptr;
    LaunchConfig config{};
    bool head_values = false;
    std::optional<TensorMaps> maps{};  ///< Of the kernel of sm_90a.
  };
  template <typename... Maps>
  void launch_forward(const Launch& found, const ForwardParams& params, const Maps&... maps) const;

  HeadValues<kMaxHeadValues> head_values_{};  ///< ALiBi slopes and sinks, in base 2.
};

/// The work behind the operations, which several backends of CUDA devices share.
void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales,
                       const ExecutionContext& context);
/// With `sinks` (of the layer's heads, in base 2) the result gets them, which the parts left out.
void merge_attn_states(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b,
                       const HeadValues<kMaxHeadValues>* sinks, const ExecutionContext& context);

}  // namespace foveal::cuda::flash_attn
