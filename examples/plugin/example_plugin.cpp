// A backend in a shared library, whole: float32 decoder attention in plain loops. Load it with
//   BackendRegistry::global().add_library("EXAMPLE", "Example plug-in",
//   "libfoveal_example_plugin.so");
// Three parts: a builder that keeps what it is told, an impl that computes, and the traits type
// that says what they can do.

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "foveal/foveal.h"

namespace {

using namespace foveal;

constexpr char kId[] = "EXAMPLE";

/// A plan is whatever forward wants to have ready. Here the common metadata is enough.
class ExampleMetadata final : public AttentionMetadata {
 public:
  ExampleMetadata(const BuilderConfig& config, const CommonAttentionMetadata& common)
      : AttentionMetadata(kId, config, common, /*common_prefix_len=*/0) {}
};

class ExampleBuilder final : public AttentionMetadataBuilder {
 public:
  explicit ExampleBuilder(const BuilderConfig& config) : AttentionMetadataBuilder(kId, config) {}

 private:
  // The base class has checked the step before it calls this.
  AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                const CommonAttentionMetadata& common,
                                bool /*fast_build*/) override {
    if (common_prefix_len != 0) {
      throw Error(ErrorCode::unsupported,
                  "common_prefix_len must be 0: EXAMPLE has no cascade attention");
    }
    if (common.block_table.empty()) {
      throw Error(ErrorCode::unsupported,
                  "block_table must be given: EXAMPLE reads the paged cache only");
    }
    return std::make_shared<ExampleMetadata>(config(), common);
  }
};

/// One token's head in a cache view [num_blocks, block_size, num_kv_heads, head size] of any
/// strides.
float* cache_row(const TensorView& cache, std::int64_t block, std::int64_t offset,
                 std::int64_t head) {
  return cache.as<float>() + block * cache.stride(0) + offset * cache.stride(1) +
         head * cache.stride(2);
}

float* row_of(const TensorView& tensor, std::int64_t token, std::int64_t head) {
  return tensor.as<float>() + token * tensor.stride(0) + head * tensor.stride(1);
}

void write_cache(const TensorView& key, const TensorView& value, const KVCacheView& cache,
                 const TensorView& slots) {
  for (std::int64_t token = 0; token < slots.size(0); ++token) {
    const std::int64_t slot = slots.as<std::int64_t>()[token];
    if (slot == kPaddingSlot) {
      continue;
    }
    const std::int64_t block = slot / cache.block_size();
    const std::int64_t offset = slot % cache.block_size();
    for (std::int64_t head = 0; head < key.size(1); ++head) {
      std::memcpy(cache_row(cache.key, block, offset, head), row_of(key, token, head),
                  static_cast<std::size_t>(key.size(2)) * sizeof(float));
      std::memcpy(cache_row(cache.value, block, offset, head), row_of(value, token, head),
                  static_cast<std::size_t>(value.size(2)) * sizeof(float));
    }
  }
}

class ExampleImpl final : public AttentionImpl {
 public:
  explicit ExampleImpl(const AttentionSpec& spec) : AttentionImpl(kId, spec) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value, const KVCacheView& cache,
                          const TensorView& slots,
                          const ExecutionContext& /*context*/) const override {
    write_cache(key, value, cache, slots);
  }

  // The base class has checked the tensors against the spec and the metadata.
  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    const CommonAttentionMetadata& common = metadata.common();
    const auto* starts = common.query_start_loc.as<std::int32_t>();
    context.pool().parallel_for(common.num_reqs, [&](std::int64_t request, int /*worker*/) {
      for (std::int64_t token = starts[request]; token < starts[request + 1]; ++token) {
        for (std::int64_t head = 0; head < spec().num_heads; ++head) {
          attend(args, metadata, request, token - starts[request], token, head);
        }
      }
    });
    for (std::int64_t token = starts[common.num_reqs]; token < common.num_actual_tokens; ++token) {
      for (std::int64_t head = 0; head < spec().num_heads; ++head) {
        finish(args, token, head,
               std::vector<float>(static_cast<std::size_t>(spec().value_head_size())), 0.0F, 0.0F);
      }
    }
  }

  /// One row of one head: two passes over its keys.
  void attend(const ForwardArgs& args, const AttentionMetadata& metadata, std::int64_t request,
              std::int64_t row, std::int64_t token, std::int64_t head) const {
    const CommonAttentionMetadata& common = metadata.common();
    const auto* starts = common.query_start_loc.as<std::int32_t>();
    const std::int64_t keys = common.seq_lens.as<std::int32_t>()[request];
    const std::int64_t position = keys - (starts[request + 1] - starts[request]) + row;
    const std::int64_t visible = common.causal ? std::min(keys, position + 1) : keys;
    const std::int64_t kv_head = head / spec().group_size();
    // The table counts in the cache manager's blocks; the kernel's are the same here, as
    // block_sizes says.
    const auto* table =
        common.block_table.as<std::int32_t>() + request * common.block_table.stride(0);
    const std::int64_t block_size = metadata.block_size();
    const float* query = row_of(args.query, token, head);

    std::vector<float> scores;
    float highest = -std::numeric_limits<float>::infinity();
    for (std::int64_t key = 0; key < visible; ++key) {
      const float* k =
          cache_row(args.kv_cache.key, table[key / block_size], key % block_size, kv_head);
      float score = 0.0F;
      for (std::int64_t d = 0; d < spec().head_size; ++d) {
        score += query[d] * k[d];
      }
      scores.push_back(score * spec().softmax_scale());
      highest = std::max(highest, scores.back());
    }
    std::vector<float> sum(static_cast<std::size_t>(spec().value_head_size()));
    float weight_sum = 0.0F;
    for (std::int64_t key = 0; key < visible; ++key) {
      const float* v =
          cache_row(args.kv_cache.value, table[key / block_size], key % block_size, kv_head);
      const float weight = std::exp(scores[static_cast<std::size_t>(key)] - highest);
      weight_sum += weight;
      for (std::size_t d = 0; d < sum.size(); ++d) {
        sum[d] += weight * v[d];
      }
    }
    finish(args, token, head, sum, weight_sum, highest);
  }

  /// Writes a row; one that saw no key is 0 with an LSE of −inf.
  static void finish(const ForwardArgs& args, std::int64_t token, std::int64_t head,
                     const std::vector<float>& sum, float weight_sum, float highest) {
    float* output = row_of(args.output, token, head);
    for (std::size_t d = 0; d < sum.size(); ++d) {
      output[d] = weight_sum > 0.0F ? sum[d] / weight_sum : 0.0F;
    }
    if (!args.lse.empty()) {
      args.lse.as<float>()[head * args.lse.stride(0) + token * args.lse.stride(1)] =
          weight_sum > 0.0F ? highest + std::log(weight_sum)
                            : -std::numeric_limits<float>::infinity();
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
    can.non_causal = true;
    can.lse = true;
    return can;
  }

  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return {
        {num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v},
        order == KVCacheOrder::hnd ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 2, 1, 3},
        spec.dtype};
  }
  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::from_packed(cache, spec.head_size);
  }
  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    if (config.kernel_block_size != 0 && config.kernel_block_size != config.block_size) {
      throw Error(ErrorCode::unsupported,
                  "kernel_block_size must be block_size: EXAMPLE does not split the table");
    }
    return std::make_unique<ExampleBuilder>(config);
  }
  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<ExampleImpl>(spec);
  }

  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& cache, const TensorView& slots,
                                const QuantScales& /*scales*/,
                                const ExecutionContext& /*context*/) {
    write_cache(key, value, cache, slots);
  }
  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    // A plug-in may lean on the library for what it has nothing to add to.
    foveal::merge_attn_states(result, a, b, context);
  }
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
