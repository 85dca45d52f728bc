// A backend in a shared library, whole: float32 decoder attention in plain loops.
// docs/write_a_backend.md builds it step by step.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "foveal/foveal.h"

namespace {

using namespace foveal;

constexpr char kId[] = "EXAMPLE";

/// A plan: whatever forward wants to have ready. The base class keeps the step and the kernel's
/// block size; the cache manager's is added, since the table counts in it.
class ExampleMetadata final : public AttentionMetadata {
 public:
  ExampleMetadata(const BuilderConfig& config, const CommonAttentionMetadata& step,
                  std::int64_t common_prefix_len)
      : AttentionMetadata(kId, config, step, common_prefix_len),
        table_block_size_(config.block_size) {}

  std::int64_t table_block_size() const { return table_block_size_; }

 private:
  std::int64_t table_block_size_;
};

class ExampleBuilder final : public AttentionMetadataBuilder {
 public:
  explicit ExampleBuilder(const BuilderConfig& config) : AttentionMetadataBuilder(kId, config) {}

 private:
  // build() has checked the step. The common prefix is a hint: the tables name its blocks too.
  AttentionMetadataPtr do_build(std::int64_t common_prefix_len, const CommonAttentionMetadata& step,
                                bool /*fast_build*/) override {
    return std::make_shared<ExampleMetadata>(config(), step, common_prefix_len);
  }
};

/// A token's head in [tokens, heads, size].
float* row_of(const TensorView& tensor, std::int64_t token, std::int64_t head) {
  return tensor.as<float>() + token * tensor.stride(0) + head * tensor.stride(1);
}

/// The same in one half of the cache, [num_blocks, block_size, num_kv_heads, head size].
float* slot_of(const TensorView& cache, std::int64_t slot, std::int64_t head) {
  const std::int64_t block = slot / cache.size(1);
  const std::int64_t offset = slot % cache.size(1);
  return cache.as<float>() + block * cache.stride(0) + offset * cache.stride(1) +
         head * cache.stride(2);
}

void write_half(const TensorView& rows, const TensorView& cache, const TensorView& slot_mapping) {
  for (std::int64_t token = 0; token < slot_mapping.size(0); ++token) {
    const std::int64_t slot = slot_mapping.as<std::int64_t>()[token];
    for (std::int64_t head = 0; head < rows.size(1) && slot != kPaddingSlot; ++head) {
      std::memcpy(slot_of(cache, slot, head), row_of(rows, token, head),
                  static_cast<std::size_t>(rows.size(2)) * sizeof(float));
    }
  }
}

/// The key, or value, at a position of a request: in the cache, where there is a table, or in the
/// plain tensor.
const float* find(const TensorView& cache, const TensorView& plain, const ExampleMetadata& plan,
                  std::int64_t request, std::int64_t position, std::int64_t head) {
  const CommonAttentionMetadata& step = plan.common();
  const TensorView& table = step.block_table;
  if (table.empty()) {
    const TensorView& starts =
        step.key_start_loc.empty() ? step.query_start_loc : step.key_start_loc;
    return row_of(plain, starts.as<std::int32_t>()[request] + position, head);
  }
  const std::int64_t size = plan.table_block_size();
  const std::int64_t block = table.as<std::int32_t>()[request * table.stride(0) + position / size];
  return slot_of(cache, block * size + position % size, head);
}

class ExampleImpl final : public AttentionImpl {
 public:
  explicit ExampleImpl(const AttentionSpec& spec) : AttentionImpl(kId, spec) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value, const KVCacheView& cache,
                          const TensorView& slot_mapping,
                          const ExecutionContext& /*context*/) const override {
    write_half(key, cache.key, slot_mapping);
    write_half(value, cache.value, slot_mapping);
  }

  // forward() has checked the tensors against the spec, and that the plan is one of ours.
  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    const auto& plan = static_cast<const ExampleMetadata&>(metadata);
    const CommonAttentionMetadata& step = plan.common();
    const auto* starts = step.query_start_loc.as<std::int32_t>();
    const std::int64_t heads = spec().num_heads;
    context.pool().parallel_for(step.num_reqs * heads, [&](std::int64_t task, int /*worker*/) {
      const std::int64_t request = task / heads;
      for (std::int64_t token = starts[request]; token < starts[request + 1]; ++token) {
        attend(args, plan, request, token, task % heads);
      }
    });
    // Rows of padding belong to no request.
    for (std::int64_t token = starts[step.num_reqs]; token < step.num_actual_tokens; ++token) {
      for (std::int64_t head = 0; head < heads; ++head) {
        write_row(args, token, head, {}, 0.0F, 0.0F);
      }
    }
  }

  /// One row of one head: scores, then the mean of the values, weighted by exp(score).
  void attend(const ForwardArgs& args, const ExampleMetadata& plan, std::int64_t request,
              std::int64_t token, std::int64_t head) const {
    const CommonAttentionMetadata& step = plan.common();
    const auto* starts = step.query_start_loc.as<std::int32_t>();
    const std::int64_t keys = step.seq_lens.as<std::int32_t>()[request];
    const std::int64_t position = keys - starts[request + 1] + token;
    const Window& window = spec().window;
    const std::int64_t begin =
        window.left < 0 ? 0 : std::max<std::int64_t>(0, position - window.left);
    std::int64_t end = step.causal ? position + 1 : keys;
    end = window.right < 0 ? end : std::min(end, position + window.right + 1);

    const std::int64_t kv_head = head / spec().group_size();
    const float* query = row_of(args.query, token, head);
    std::vector<float> scores;
    float highest = -std::numeric_limits<float>::infinity();
    for (std::int64_t at = begin; at < end; ++at) {
      const float* key = find(args.kv_cache.key, args.key, plan, request, at, kv_head);
      float score = 0.0F;
      for (std::int64_t d = 0; d < spec().head_size; ++d) {
        score += query[d] * key[d];
      }
      scores.push_back(score * spec().softmax_scale());
      highest = std::max(highest, scores.back());
    }
    std::vector<float> sum(static_cast<std::size_t>(spec().value_head_size()));
    float weights = 0.0F;
    for (std::int64_t at = begin; at < end; ++at) {
      const float* value = find(args.kv_cache.value, args.value, plan, request, at, kv_head);
      const float weight = std::exp(scores[static_cast<std::size_t>(at - begin)] - highest);
      weights += weight;
      for (std::size_t d = 0; d < sum.size(); ++d) {
        sum[d] += weight * value[d];
      }
    }
    write_row(args, token, head, sum, weights, highest);
  }

  /// Output and log-sum-exp; a row that saw no key has 0 and −∞.
  void write_row(const ForwardArgs& args, std::int64_t token, std::int64_t head,
                 const std::vector<float>& sum, float weights, float highest) const {
    float* output = row_of(args.output, token, head);
    for (std::int64_t d = 0; d < spec().value_head_size(); ++d) {
      output[d] = weights > 0.0F ? sum[static_cast<std::size_t>(d)] / weights : 0.0F;
    }
    if (!args.lse.empty()) {
      args.lse.as<float>()[head * args.lse.stride(0) + token * args.lse.stride(1)] =
          weights > 0.0F ? highest + std::log(weights) : -std::numeric_limits<float>::infinity();
    }
  }
};

struct ExampleTraits {
  static std::string_view name() { return kId; }

  static BackendCapabilities capabilities() {
    BackendCapabilities can;
    can.device = DeviceType::cpu;
    can.dtypes = {DType::f32};
    can.different_head_size_v = true;
    can.attn_types = {AttnType::decoder};
    can.sliding_window = true;
    can.non_causal = true;
    can.lse = true;
    can.batch_invariant = true;
    return can;
  }

  // What capabilities cannot say, such as "sinks, but not with heads of 256".
  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return KVCacheLayout::flash(spec, num_blocks, order);
  }
  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::flash(cache, spec);
  }
  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<ExampleBuilder>(config);
  }
  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<ExampleImpl>(spec);
  }

  // foveal::reshape_and_cache and foveal::merge_attn_states call the first backend of the device,
  // with any dtype. This one may be the first, so it asks another one by name.
  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& cache, const TensorView& slot_mapping,
                                const QuantScales& scales, const ExecutionContext& context) {
    other()->reshape_and_cache(key, value, cache, slot_mapping, scales, context);
  }
  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    other()->merge_attn_states(result, a, b, context);
  }
  static AttentionBackendPtr other() { return BackendRegistry::global().get("CPU_ATTN"); }
};

const AttentionBackend* create_backend(const char* id) {
  return std::strcmp(id, kId) == 0 ? new detail::ErasedBackend<ExampleTraits> : nullptr;
}

void destroy_backend(const AttentionBackend* backend) { delete backend; }

}  // namespace

extern "C" FOVEAL_API const FovealPlugin* foveal_plugin_v1() {
  static const FovealPlugin plugin{FOVEAL_PLUGIN_ABI_VERSION,
                                   sizeof(FovealPlugin),
                                   "example",
                                   "1.0",
                                   create_backend,
                                   destroy_backend};
  return &plugin;
}
