#include "foveal/backend.h"

#include <fmt/ranges.h>

#include <array>
#include <utility>

#include "core/check.h"
#include "core/metadata_checks.h"
#include "core/tensor_checks.h"
#include "foveal/ops.h"
#include "foveal/selector.h"

namespace foveal {
namespace {

constexpr std::array<std::pair<std::string_view, GraphSupport>, 4> kGraphSupports{{
    {"never", GraphSupport::never},
    {"uniform_single_token_decode", GraphSupport::uniform_single_token_decode},
    {"uniform_batch", GraphSupport::uniform_batch},
    {"always", GraphSupport::always},
}};

constexpr std::string_view kQueryForm = "[num_tokens, num_heads, head_size]";
constexpr std::string_view kOutputForm = "[num_tokens, num_heads, head_size_v]";
constexpr std::string_view kLseForm = "[num_heads, num_tokens]";

/// The plan was made by this backend, for layers of this geometry.
void check_metadata(std::string_view backend, const AttentionSpec& spec,
                    const AttentionMetadata& metadata) {
  check(metadata.backend() == backend,
        "metadata was built by {}, forward of {} needs metadata of its own builder",
        metadata.backend(), backend);
  const AttentionSpec& planned = metadata.spec();
  const auto agree = [](std::string_view name, const auto& got, const auto& wanted) {
    check(got == wanted, "metadata was built for {} = {}, this layer has {}", name, got, wanted);
  };
  agree("num_heads", planned.num_heads, spec.num_heads);
  agree("num_kv_heads", planned.num_kv_heads, spec.num_kv_heads);
  agree("head_size", planned.head_size, spec.head_size);
  agree("head_size_v", planned.value_head_size(), spec.value_head_size());
  agree("dtype", to_string(planned.dtype), to_string(spec.dtype));
  agree("kv_cache_dtype", to_string(planned.cache_dtype()), to_string(spec.cache_dtype()));
  agree("attn_type", to_string(planned.attn_type), to_string(spec.attn_type));
  agree("window.left", planned.window.left, spec.window.left);
  agree("window.right", planned.window.right, spec.window.right);
  check(planned.mla == spec.mla, "metadata was built for other MLA dimensions than this layer has");
  check(metadata.common_prefix_len() == 0 ||
            (spec.alibi_slopes.empty() && !spec.score_mod && !spec.mask_mod),
        "metadata was built for cascade attention, this layer has ALiBi or a custom score or mask: "
        "build without a "
        "common prefix");
}

/// [T ≥ num_actual_tokens, heads, size], heads contiguous.
void check_rows(std::string_view name, const TensorView& tensor, DType dtype, Device device,
                std::int64_t min_rows, std::int64_t heads, std::int64_t size,
                std::string_view form) {
  check_tensor(name, tensor, dtype, device, {-1, heads, size}, form);
  check_last_contiguous(name, tensor);
  check(tensor.size(0) >= min_rows, "{} is {}, it must have at least num_actual_tokens = {} rows",
        name, tensor, min_rows);
}

/// The output may be wider than an fp8 query.
void check_output(const TensorView& output, const AttentionSpec& spec, Device device,
                  std::int64_t min_rows, std::int64_t size) {
  check(!output.empty(), "output is absent, it must be given");
  const DType dtype = is_fp8(spec.dtype) ? output.dtype() : spec.dtype;
  check(is_float(dtype) && !is_fp8(dtype), "output is {}, its dtype must be f32, f16 or bf16",
        output);
  check_rows("output", output, dtype, device, min_rows, spec.num_heads, size, kOutputForm);
}

void check_lse(const TensorView& lse, std::int64_t num_heads, Device device,
               std::int64_t min_rows) {
  if (lse.empty()) {
    return;
  }
  check_tensor("lse", lse, DType::f32, device, {num_heads, -1}, kLseForm);
  check(lse.size(1) >= min_rows, "lse is {}, it must have at least num_actual_tokens = {} columns",
        lse, min_rows);
}

void check_workspace(const AttentionMetadata& metadata, const ExecutionContext& context,
                     Device device) {
  const TensorView& workspace = context.workspace;
  if (workspace.empty()) {
    return;
  }
  check_device("context.workspace", workspace, device);
  check(workspace.is_contiguous() &&
            workspace.numel() * size_of(workspace.dtype()) >= metadata.workspace_bytes(),
        "context.workspace is {}, it must be contiguous and hold workspace_bytes() = {} bytes",
        workspace, metadata.workspace_bytes());
  check(workspace.data() != nullptr || metadata.workspace_bytes() == 0,
        "context.workspace has a null data pointer");
  check(reinterpret_cast<std::uintptr_t>(workspace.data()) % 64 == 0,
        "context.workspace is not aligned to 64 bytes");
}

/// Plain keys reach as far as key_start_loc says, where the host can see it.
void check_plain_rows(std::string_view name, const TensorView& tensor,
                      const CommonAttentionMetadata& common) {
  const TensorView& starts =
      common.key_start_loc.empty() ? common.query_start_loc : common.key_start_loc;
  if (starts.device().type == DeviceType::cpu) {
    const std::int32_t needed = starts.as<const std::int32_t>()[common.num_reqs];
    check(tensor.size(0) >= needed,
          "{} is {}, it must have at least {} rows for the keys of all requests", name, tensor,
          needed);
  }
}

}  // namespace

std::string_view to_string(GraphSupport support) {
  return kGraphSupports[static_cast<std::size_t>(support)].first;
}

std::optional<GraphSupport> graph_support_from_string(std::string_view name) {
  for (const auto& [known, support] : kGraphSupports) {
    if (known == name) {
      return support;
    }
  }
  return std::nullopt;
}

AttentionBackend::~AttentionBackend() = default;

AttentionMetadata::~AttentionMetadata() = default;

AttentionMetadata::AttentionMetadata(std::string backend, const BuilderConfig& config,
                                     const CommonAttentionMetadata& common,
                                     std::int64_t common_prefix_len)
    : backend_(std::move(backend)),
      common_(common),
      spec_(config.spec),
      block_size_(kernel_block_size(config)),
      num_kernel_blocks_(config.num_blocks * (config.block_size / block_size_)),
      common_prefix_len_(common_prefix_len) {}

AttentionMetadataBuilder::~AttentionMetadataBuilder() = default;

AttentionMetadataBuilder::AttentionMetadataBuilder(std::string backend, BuilderConfig config)
    : backend_(std::move(backend)), config_(std::move(config)) {
  check_builder_config(config_);
}

AttentionMetadataPtr AttentionMetadataBuilder::build(std::int64_t common_prefix_len,
                                                     const CommonAttentionMetadata& common,
                                                     bool fast_build) {
  check_step(config_, common, common_prefix_len);
  return do_build(common_prefix_len, common, fast_build);
}

AttentionMetadataPtr AttentionMetadataBuilder::build_for_graph_capture(
    const CommonAttentionMetadata& common) {
  if (graph_support() == GraphSupport::never) {
    fail(ErrorCode::unsupported, "build_for_graph_capture: {} has graph support 'never'", backend_);
  }
  return build(0, common);
}

AttentionMetadataPtr AttentionMetadataBuilder::update_block_table(const AttentionMetadata& metadata,
                                                                  const TensorView& block_table,
                                                                  const TensorView& slot_mapping) {
  check(metadata.backend() == backend_,
        "metadata was built by {}, update_block_table of {} needs its own", metadata.backend(),
        backend_);
  CommonAttentionMetadata common = metadata.common();
  common.block_table = block_table;
  common.slot_mapping = slot_mapping;
  return build(metadata.common_prefix_len(), common);
}

bool AttentionMetadataBuilder::use_cascade(const CascadeQuery& /*query*/) const { return false; }

AttentionImpl::~AttentionImpl() = default;

AttentionImpl::AttentionImpl(std::string backend, AttentionSpec spec)
    : backend_(std::move(backend)), spec_(std::move(spec)) {
  spec_.validate();
  check(!spec_.mla, "AttentionSpec: mla is set, {} makes layers that are not MLA", backend_);
}

void AttentionImpl::update_kv_cache(const TensorView& key, const TensorView& value,
                                    const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                    const ExecutionContext& context) const {
  if (!spec_.uses_cache() || !spec_.kv_sharing_target.empty()) {
    return;
  }
  check_ndim("key", key, 3);
  const Device device = key.device();
  check_rows("key", key, spec_.dtype, device, 0, spec_.num_kv_heads, spec_.head_size,
             "[num_tokens, num_kv_heads, head_size]");
  check_rows("value", value, spec_.dtype, device, 0, spec_.num_kv_heads, spec_.value_head_size(),
             "[num_tokens, num_kv_heads, head_size_v]");
  check(key.size(0) == value.size(0), "value is {}, it must have the {} rows of key", value,
        key.size(0));
  check_kv_cache(kv_cache, -1, spec_.num_kv_heads, spec_.head_size, spec_.value_head_size(),
                 spec_.cache_dtype(), device);
  check_slot_mapping(slot_mapping, key.size(0), kv_cache.num_blocks() * kv_cache.block_size(),
                     device);
  do_update_kv_cache(key, value, kv_cache, slot_mapping, context);
}

void AttentionImpl::forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                            const ExecutionContext& context) const {
  check_metadata(backend_, spec_, metadata);
  const CommonAttentionMetadata& common = metadata.common();
  const Device device = common.query_start_loc.device();
  const std::int64_t tokens = common.num_actual_tokens;
  check_rows("query", args.query, spec_.dtype, device, tokens, spec_.num_heads, spec_.head_size,
             kQueryForm);
  check_output(args.output, spec_, device, tokens, spec_.value_head_size());
  check_lse(args.lse, spec_.num_heads, device, tokens);
  if (common.block_table.empty()) {
    check(args.kv_cache.empty(),
          "kv_cache is given, but the metadata has no block_table: keys and values must be plain");
    check_rows("key", args.key, spec_.dtype, device, 0, spec_.num_kv_heads, spec_.head_size,
               "[keys, num_kv_heads, head_size]");
    check_rows("value", args.value, spec_.dtype, device, 0, spec_.num_kv_heads,
               spec_.value_head_size(), "[keys, num_kv_heads, head_size_v]");
    check_plain_rows("key", args.key, common);
    check_plain_rows("value", args.value, common);
  } else {
    check(!args.kv_cache.empty(),
          "kv_cache is absent, the metadata has a block_table: the paged cache must be given");
    check_kv_cache(args.kv_cache, metadata.block_size(), spec_.num_kv_heads, spec_.head_size,
                   spec_.value_head_size(), spec_.cache_dtype(), device);
    check(args.kv_cache.num_blocks() >= metadata.num_kernel_blocks(),
          "kv_cache has {} blocks, it must have the {} that the metadata was built for",
          args.kv_cache.num_blocks(), metadata.num_kernel_blocks());
  }
  check_workspace(metadata, context, device);
  do_forward(args, metadata, context);
}

MlaAttentionImpl::~MlaAttentionImpl() = default;

MlaAttentionImpl::MlaAttentionImpl(std::string backend, AttentionSpec spec)
    : backend_(std::move(backend)), spec_(std::move(spec)) {
  spec_.validate();
  check(spec_.mla.has_value(), "AttentionSpec: mla is unset, {} makes MLA layers only", backend_);
}

void MlaAttentionImpl::update_kv_cache(const TensorView& latent, const TensorView& key_rope,
                                       const TensorView& kv_cache, const TensorView& slot_mapping,
                                       const ExecutionContext& context) const {
  if (!spec_.kv_sharing_target.empty()) {
    return;
  }
  const MlaDims& dims = *spec_.mla;
  check_ndim("latent", latent, 2);
  const Device device = latent.device();
  check_tensor("latent", latent, spec_.dtype, device, {-1, dims.kv_lora_rank},
               "[num_tokens, kv_lora_rank]");
  check_tensor("key_rope", key_rope, spec_.dtype, device, {latent.size(0), dims.qk_rope_head_dim},
               "[num_tokens, qk_rope_head_dim]");
  check_last_contiguous("latent", latent);
  check_last_contiguous("key_rope", key_rope);
  check_tensor("kv_cache", kv_cache, spec_.cache_dtype(), device, {-1, -1, dims.cache_entry()},
               "[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]");
  check_last_contiguous("kv_cache", kv_cache);
  check_slot_mapping(slot_mapping, latent.size(0), kv_cache.size(0) * kv_cache.size(1), device);
  do_update_kv_cache(latent, key_rope, kv_cache, slot_mapping, context);
}

void MlaAttentionImpl::forward_mha(const MlaPrefillArgs& args, const AttentionMetadata& metadata,
                                   const ExecutionContext& context) const {
  check_metadata(backend_, spec_, metadata);
  const MlaDims& dims = *spec_.mla;
  const CommonAttentionMetadata& common = metadata.common();
  const Device device = common.query_start_loc.device();
  check(common.block_table.empty(),
        "the metadata has a block_table, forward_mha reads plain keys and values: build it "
        "without one, with seq_lens and key_start_loc of the keys passed");
  check_rows("query", args.query, spec_.dtype, device, common.num_actual_tokens, spec_.num_heads,
             dims.qk_head_dim(), "[num_tokens, num_heads, qk_head_dim]");
  check_rows("key", args.key, spec_.dtype, device, 0, spec_.num_heads, dims.qk_head_dim(),
             "[keys, num_heads, qk_head_dim]");
  check_rows("value", args.value, spec_.dtype, device, 0, spec_.num_heads, dims.v_head_dim,
             "[keys, num_heads, v_head_dim]");
  check_plain_rows("key", args.key, common);
  check_plain_rows("value", args.value, common);
  check_output(args.output, spec_, device, common.num_actual_tokens, dims.v_head_dim);
  check_lse(args.lse, spec_.num_heads, device, common.num_actual_tokens);
  check_workspace(metadata, context, device);
  do_forward_mha(args, metadata, context);
}

void MlaAttentionImpl::forward_mqa(const MlaDecodeArgs& args, const AttentionMetadata& metadata,
                                   const ExecutionContext& context) const {
  check_metadata(backend_, spec_, metadata);
  const MlaDims& dims = *spec_.mla;
  const CommonAttentionMetadata& common = metadata.common();
  const Device device = common.query_start_loc.device();
  check(!common.block_table.empty(),
        "the metadata has no block_table, forward_mqa reads the paged latent cache");
  check_rows("query", args.query, spec_.dtype, device, common.num_actual_tokens, spec_.num_heads,
             dims.cache_entry(), "[num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim]");
  check_tensor("kv_cache", args.kv_cache, spec_.cache_dtype(), device,
               {-1, metadata.block_size(), dims.cache_entry()},
               "[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]");
  check_last_contiguous("kv_cache", args.kv_cache);
  check(args.kv_cache.size(0) >= metadata.num_kernel_blocks(),
        "kv_cache has {} blocks, it must have the {} that the metadata was built for",
        args.kv_cache.size(0), metadata.num_kernel_blocks());
  check_output(args.output, spec_, device, common.num_actual_tokens, dims.kv_lora_rank);
  check_lse(args.lse, spec_.num_heads, device, common.num_actual_tokens);
  check_workspace(metadata, context, device);
  do_forward_mqa(args, metadata, context);
}

namespace detail {

void require_served(std::string_view backend, const BackendCapabilities& can,
                    const AttentionSpec& spec, const BuilderConfig* builder) {
  SelectorConfig wanted = SelectorConfig::from(spec, can.device, can.min_compute_capability);
  if (builder != nullptr) {
    check_builder_config(*builder);
    check(builder->device.type == can.device, "BuilderConfig: device is {}, {} serves {}",
          to_string(builder->device), backend, to_string(can.device));
    wanted.block_size = kernel_block_size(*builder);
    wanted.batch_invariant = builder->batch_invariant;
  }
  const std::vector<std::string> reasons = capability_reasons(can, wanted);
  if (!reasons.empty()) {
    fail(ErrorCode::unsupported, "{} cannot serve the layer: {}", backend,
         fmt::join(reasons, "; "));
  }
}

void throw_wrong_impl(std::string_view backend, bool is_mla) {
  if (is_mla) {
    fail(ErrorCode::unsupported,
         "{} serves MLA layers, which have no forward and no paged keys and values: call "
         "make_mla_impl, and forward_mha or "
         "forward_mqa on what it returns",
         backend);
  }
  fail(ErrorCode::unsupported, "{} does not serve MLA layers: call make_impl", backend);
}

}  // namespace detail

}  // namespace foveal
