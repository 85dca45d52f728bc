#include "cuda/flash_attn/kernels.h"

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace foveal::cuda::flash_attn {
namespace {

/// Loaded kernels by device and variant.
template <typename Variant>
class KernelTable {
 public:
  template <typename MakeKey>
  const Kernel& get(const Variant& variant, int device, MakeKey&& make_key) {
    return get(variant, device, make_key, [](const Variant&, const Kernel&) {});
  }

  /// `set_up` is called once a kernel is loaded.
  template <typename MakeKey, typename SetUp>
  const Kernel& get(const Variant& variant, int device, MakeKey&& make_key, SetUp&& set_up) {
    const std::pair<int, Variant> id{device, variant};
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = kernels_.find(id); found != kernels_.end()) {
        return *found->second;
      }
    }
    const std::string arch = arch_name(device_properties(device).compute_capability);
    const Kernel* kernel = Jit::global().prepare(make_key(variant, arch), device);
    set_up(variant, *kernel);
    const std::unique_lock lock(mutex_);
    return *kernels_.emplace(id, kernel).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<int, Variant>, const Kernel*> kernels_;
};

int head_values(bool needed) { return needed ? kMaxHeadValues : 1; }

/// Shared memory that devices of an architecture offer, for compiling without one.
DeviceProperties properties_of_arch(const std::string& arch) {
  struct Limits {
    std::string_view arch;
    int block_kib, sm_kib;
  };
  static constexpr std::array<Limits, 4> kLimits{
      {{"sm_80", 163, 164}, {"sm_87", 163, 164}, {"sm_90a", 227, 228}, {"sm_100a", 227, 228}}};
  DeviceProperties properties;
  properties.shared_bytes_per_block = 99 << 10;
  properties.shared_bytes_per_sm = 100 << 10;
  for (const Limits& limits : kLimits) {
    if (limits.arch == arch) {
      properties.shared_bytes_per_block = limits.block_kib << 10;
      properties.shared_bytes_per_sm = limits.sm_kib << 10;
    }
  }
  properties.compute_capability = arch == "sm_90a" ? 90 : 0;
  return properties;
}

}  // namespace

KernelKey forward_key(const ForwardVariant& v, const std::string& arch) {
  KernelKey key;
  key.entry = "flash_forward";
  key.arch = arch;
  key.set("kQueryType", v.dtype)
      .set("kCacheType", v.cache_dtype)
      .set("kOutputType", v.output_dtype)
      .set("kHeadSize", v.head.head_size)
      .set("kHeadSizeV", v.head.head_size_v)
      .set("kGroup", v.head.group)
      .set("kPageSize", v.head.page_size)
      .set("kPagesPerBlock", v.pages_per_block)
      .set("kLeftBound", v.left_bound)
      .set("kRightBound", v.right_bound)
      .set("kAlibi", v.alibi)
      .set("kSoftCap", v.soft_cap)
      .set("kSinks", v.sinks)
      .set("kSignedScale", v.signed_scale)
      .set("kHeadValues", head_values(v.alibi || v.sinks))
      .set("kRowVectorBytes", v.row_vector_bytes)
      .set("kBlockN", v.tile.block_n)
      .set("kStages", v.tile.stages);
  if (v.tile.is_sm90()) {
    key.source = "flash_attn/sm90_forward.cu";
    key.set("kWarpgroups", v.tile.warpgroups).set("kQueryStages", v.tile.query_stages);
    return key;
  }
  key.source = "flash_attn/sm80_forward.cu";
  key.set("kCacheVectorBytes", v.cache_vector_bytes)
      .set("kJointAddresses", v.joint_addresses)
      .set("kRowTiles", v.tile.row_tiles)
      .set("kWarpsM", v.tile.warps_m)
      .set("kWarpsN", v.tile.warps_n)
      .set("kTeams", v.tile.teams)
      .set("kQueryInRegisters", v.tile.query_in_registers)
      .set("kMinBlocks", v.tile.min_blocks);
  return key;
}

KernelKey cache_write_key(const CacheWriteVariant& v, const std::string& arch) {
  KernelKey key;
  key.source = "reshape_and_cache.cu";
  key.entry = "reshape_and_cache";
  key.arch = arch;
  key.set("kQueryType", v.dtype)
      .set("kCacheType", v.cache_dtype)
      .set("kHeadSize", v.head_size)
      .set("kHeadSizeV", v.head_size_v)
      .set("kVector", v.vector);
  return key;
}

KernelKey merge_key(const MergeVariant& v, const std::string& arch) {
  KernelKey key;
  key.source = "merge_attn_states.cu";
  key.entry = "merge_attn_states";
  key.arch = arch;
  key.set("kQueryType", v.dtype)
      .set("kHeadSizeV", v.head_size_v)
      .set("kVector", v.vector)
      .set("kSinks", v.sinks)
      .set("kHeadValues", head_values(v.sinks));
  return key;
}

KernelKey plan_key(const std::string& arch) {
  KernelKey key;
  key.source = "flash_attn/plan.cu";
  key.entry = "flash_plan";
  key.arch = arch;
  return key;
}

const Kernel& forward_kernel(const ForwardVariant& variant, int device) {
  static KernelTable<ForwardVariant> table;
  return table.get(variant, device, forward_key, [](const ForwardVariant& v, const Kernel& kernel) {
    kernel.set_max_dynamic_shared_bytes(v.tile.shared_bytes(v.head));
  });
}

const Kernel& cache_write_kernel(const CacheWriteVariant& variant, int device) {
  static KernelTable<CacheWriteVariant> table;
  return table.get(variant, device, cache_write_key);
}

const Kernel& merge_kernel(const MergeVariant& variant, int device) {
  static KernelTable<MergeVariant> table;
  return table.get(variant, device, merge_key);
}

const Kernel& plan_kernel(int device) {
  static KernelTable<int> table;
  return table.get(0, device, [](int, const std::string& arch) { return plan_key(arch); });
}

HeadShape head_shape(const AttentionSpec& spec, std::int64_t page_size) {
  return {.head_size = static_cast<int>(spec.head_size),
          .head_size_v = static_cast<int>(spec.value_head_size()),
          .query_bytes = static_cast<int>(size_of(spec.dtype)),
          .cache_bytes = static_cast<int>(size_of(page_size > 0 ? spec.cache_dtype() : spec.dtype)),
          .page_size = static_cast<int>(page_size),
          .group = static_cast<int>(spec.group_size())};
}

DType output_dtype(const AttentionSpec& spec) {
  return is_fp8(spec.dtype) ? DType::bf16 : spec.dtype;
}

ForwardVariant forward_variant(const AttentionSpec& spec, bool causal, std::int64_t page_size,
                               int pages_per_block, const TileConfig& tile) {
  return {.dtype = spec.dtype,
          .cache_dtype = page_size > 0 ? spec.cache_dtype() : spec.dtype,
          .output_dtype = output_dtype(spec),
          .head = head_shape(spec, page_size),
          .pages_per_block = pages_per_block,
          .left_bound = spec.window.left >= 0,
          .right_bound = causal || spec.window.right >= 0,
          .alibi = !spec.alibi_slopes.empty(),
          .soft_cap = spec.logits_soft_cap > 0.0F,
          .sinks = !spec.sinks.empty(),
          .signed_scale = !(spec.softmax_scale() > 0.0F),
          .joint_addresses = !tile.is_sm90() && spec.head_size == spec.value_head_size(),
          .tile = tile};
}

std::vector<KernelKey> keys_for_model(const AttentionSpec& spec, std::int64_t block_size,
                                      const std::string& arch) {
  const DeviceProperties limits = properties_of_arch(arch);
  const std::int64_t page_size = spec.uses_cache() ? block_size : 0;
  const bool causal = spec.attn_type == AttnType::decoder;
  const HeadShape head = head_shape(spec, page_size);
  if (is_fp8(spec.dtype)) {
    const std::string reason = why_not_sm90(head, limits);
    if (!reason.empty()) {
      fail(ErrorCode::unsupported, "dtype is {}, and {}", to_string(spec.dtype), reason);
    }
  }
  std::set<TileConfig> tiles;
  for (const std::int64_t queries : {1, 8192}) {
    tiles.insert(prefill_tile(head, queries, 0, limits));
  }
  for (const std::int64_t queries : {1, 2, 4, 8}) {
    tiles.insert(decode_tile(head, queries, limits));
  }
  std::vector<KernelKey> keys{plan_key(arch)};
  for (const TileConfig& tile : tiles) {
    keys.push_back(forward_key(forward_variant(spec, causal, page_size, 1, tile), arch));
  }
  if (spec.uses_cache()) {
    keys.push_back(cache_write_key({.dtype = spec.dtype,
                                    .cache_dtype = spec.cache_dtype(),
                                    .head_size = head.head_size,
                                    .head_size_v = head.head_size_v},
                                   arch));
  }
  for (const bool sinks : {false, true}) {
    if (!sinks || !spec.sinks.empty()) {
      keys.push_back(merge_key(
          {.dtype = output_dtype(spec), .head_size_v = head.head_size_v, .sinks = sinks}, arch));
    }
  }
  return keys;
}

}  // namespace foveal::cuda::flash_attn
