#include "c_api/convert.h"

#include <array>
#include <cmath>

#include "c_api/handles.h"
#include "foveal/dlpack.h"

namespace foveal::c_api {
namespace {

// The names' numbers are those of the C++ enums, DType's moved by one.
static_assert(FOVEAL_F32 == static_cast<int>(DType::f32) + 1);
static_assert(FOVEAL_F8E5M2 == static_cast<int>(DType::f8e5m2) + 1);
static_assert(FOVEAL_U8 == static_cast<int>(DType::u8) + 1);
static_assert(FOVEAL_ENCODER_DECODER == static_cast<int>(AttnType::encoder_decoder));
static_assert(FOVEAL_HND == static_cast<int>(KVCacheOrder::hnd));
static_assert(FOVEAL_GRAPHS_ALWAYS == static_cast<int>(GraphSupport::always));
static_assert(FOVEAL_MAX_DIMS == TensorView::kMaxDims);

std::optional<DType> to_optional_dtype(std::string_view name, std::int32_t dtype) {
  return dtype == FOVEAL_DTYPE_DEFAULT ? std::nullopt : std::optional(to_dtype(name, dtype));
}

std::int32_t from_device_type(DeviceType type) {
  switch (type) {
    case DeviceType::cpu:
      return kDLCPU;
    case DeviceType::cuda:
      return kDLCUDA;
    case DeviceType::opencl:
      return kDLOpenCL;
  }
  return 0;
}

std::vector<float> to_floats(std::string_view name, const float* values, std::int64_t count) {
  check(count >= 0 && (count == 0 || values != nullptr),
        "{} is {} and its number is {}, it must be an array of num_heads floats, or NULL and 0",
        name, values == nullptr ? "NULL" : "given", count);
  // Longer ones are refused by the spec; what is read here must at least be an array.
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  check(count <= kMost, "{} has {} entries, at most {} are accepted", name, count, kMost);
  return {values, values + count};
}

foveal_score_index from_index(const ScoreIndex& index) {
  return {index.request, index.query_head, index.query_row, index.query_position,
          index.key_position};
}

}  // namespace

TensorView to_tensor(std::string_view name, const DLTensor* tensor) {
  if (tensor == nullptr) {
    return {};
  }
  check(tensor->ndim >= 0 && tensor->ndim <= TensorView::kMaxDims,
        "{} has {} dimensions, it must have 0 to {}", name, tensor->ndim, TensorView::kMaxDims);
  check(tensor->ndim == 0 || tensor->shape != nullptr, "{} has a NULL shape", name);
  check(tensor->data != nullptr || tensor->byte_offset == 0,
        "{} has a NULL data pointer and a byte_offset of {}", name, tensor->byte_offset);
  try {
    return from_dlpack(*tensor);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}", name, error.what());
  }
}

KVCacheView to_kv_cache(const DLTensor* key_cache, const DLTensor* value_cache) {
  check((key_cache == nullptr) == (value_cache == nullptr),
        "{} is NULL, key_cache and value_cache must both be given, or neither",
        key_cache == nullptr ? "key_cache" : "value_cache");
  return {to_tensor("key_cache", key_cache), to_tensor("value_cache", value_cache)};
}

void write_tensor(foveal_tensor& out, const TensorView& view) {
  const DLPackView source(view);
  out.tensor = source.tensor;
  std::copy(source.shape.begin(), source.shape.end(), out.shape);
  std::copy(source.strides.begin(), source.strides.end(), out.strides);
  out.tensor.shape = out.shape;
  out.tensor.strides = out.strides;
}

DType to_dtype(std::string_view name, std::int32_t dtype) {
  check(dtype >= FOVEAL_F32 && dtype <= FOVEAL_U8,
        "{} is {}, it must be a foveal_dtype from FOVEAL_F32 = 1 to FOVEAL_U8 = 9", name, dtype);
  return static_cast<DType>(dtype - 1);
}

std::int32_t from_dtype(DType dtype) { return static_cast<std::int32_t>(dtype) + 1; }

DeviceType to_device_type(std::string_view name, std::int32_t type) {
  switch (type) {
    case kDLCPU:
      return DeviceType::cpu;
    case kDLCUDA:
      return DeviceType::cuda;
    case kDLOpenCL:
      return DeviceType::opencl;
    default:
      fail(ErrorCode::invalid_argument,
           "{} is {}, accepted are kDLCPU = 1, kDLCUDA = 2 and kDLOpenCL = 4", name, type);
  }
}

Device to_device(std::string_view name, DLDevice device) {
  const auto type = static_cast<std::int32_t>(device.device_type);
  if (type == 0) {
    check(device.device_id == 0, "{} has device_type 0 and device_id {}, {{0, 0}} is the CPU", name,
          device.device_id);
    return {};
  }
  check(device.device_id >= 0, "{} has device_id {}, it must be >= 0", name, device.device_id);
  return {to_device_type(fmt::format("{}.device_type", name), type), device.device_id};
}

AttentionSpec to_spec(std::string_view name, const foveal_spec* given) {
  const foveal_spec c = read_struct(name, given);
  AttentionSpec spec;
  spec.num_heads = c.num_heads;
  spec.num_kv_heads = c.num_kv_heads;
  spec.head_size = c.head_size;
  spec.head_size_v = c.head_size_v;
  if (!std::isnan(c.scale)) {
    spec.scale = c.scale;
  }
  spec.dtype = to_dtype("spec.dtype", c.dtype);
  spec.kv_cache_dtype = to_optional_dtype("spec.kv_cache_dtype", c.kv_cache_dtype);
  spec.attn_type = to_enum("spec.attn_type", c.attn_type, AttnType::encoder_decoder);
  spec.window = {c.window_left, c.window_right};
  spec.logits_soft_cap = c.logits_soft_cap;
  spec.alibi_slopes = to_floats("spec.alibi_slopes", c.alibi_slopes, c.num_alibi_slopes);
  spec.sinks = to_floats("spec.sinks", c.sinks, c.num_sinks);
  spec.scales = {c.q_scale, c.k_scale, c.v_scale};
  if (c.mla != nullptr) {
    spec.mla = MlaDims{c.mla->kv_lora_rank, c.mla->qk_nope_head_dim, c.mla->qk_rope_head_dim,
                       c.mla->v_head_dim};
  }
  if (c.kv_sharing_target != nullptr) {
    spec.kv_sharing_target = c.kv_sharing_target;
  }
  if (c.score_mod != nullptr) {
    spec.score_mod = [mod = c.score_mod, data = c.mod_user_data](float score,
                                                                 const ScoreIndex& index) {
      const foveal_score_index where = from_index(index);
      return mod(score, &where, data);
    };
  }
  if (c.mask_mod != nullptr) {
    spec.mask_mod = [mod = c.mask_mod, data = c.mod_user_data](const ScoreIndex& index) {
      const foveal_score_index where = from_index(index);
      return mod(&where, data);
    };
  }
  return spec;
}

SelectorConfig to_selector_config(const foveal_selector_config* given) {
  const foveal_selector_config c = read_struct("config", given);
  SelectorConfig config;
  config.device = to_device_type("config.device_type", c.device_type);
  config.compute_capability = c.compute_capability;
  config.head_size = c.head_size;
  config.head_size_v = c.head_size_v;
  config.dtype = to_dtype("config.dtype", c.dtype);
  config.kv_cache_dtype = to_optional_dtype("config.kv_cache_dtype", c.kv_cache_dtype);
  if (c.block_size != 0) {
    config.block_size = c.block_size;
  }
  config.attn_type = to_enum("config.attn_type", c.attn_type, AttnType::encoder_decoder);
  config.use_mla = c.use_mla;
  config.has_sinks = c.has_sinks;
  config.has_sliding_window = c.has_sliding_window;
  config.has_soft_cap = c.has_soft_cap;
  config.has_alibi = c.has_alibi;
  config.has_custom_score = c.has_custom_score;
  config.use_non_causal = c.use_non_causal;
  config.needs_lse = c.needs_lse;
  config.needs_graphs = to_enum("config.needs_graphs", c.needs_graphs, GraphSupport::always);
  config.decode_context_parallel_size = c.decode_context_parallel_size;
  config.prefill_context_parallel_size = c.prefill_context_parallel_size;
  config.batch_invariant = c.batch_invariant;
  if (c.backend != nullptr) {
    config.backend = c.backend;
  }
  return config;
}

foveal_selector_config from_selector_config(const SelectorConfig& config) {
  foveal_selector_config c{};
  c.device_type = from_device_type(config.device);
  c.compute_capability = config.compute_capability;
  c.head_size = config.head_size;
  c.head_size_v = config.head_size_v;
  c.dtype = from_dtype(config.dtype);
  c.kv_cache_dtype =
      config.kv_cache_dtype ? from_dtype(*config.kv_cache_dtype) : FOVEAL_DTYPE_DEFAULT;
  c.block_size = config.block_size.value_or(0);
  c.attn_type = static_cast<std::int32_t>(config.attn_type);
  c.use_mla = config.use_mla;
  c.has_sinks = config.has_sinks;
  c.has_sliding_window = config.has_sliding_window;
  c.has_soft_cap = config.has_soft_cap;
  c.has_alibi = config.has_alibi;
  c.has_custom_score = config.has_custom_score;
  c.use_non_causal = config.use_non_causal;
  c.needs_lse = config.needs_lse;
  c.needs_graphs = static_cast<std::int32_t>(config.needs_graphs);
  c.decode_context_parallel_size = config.decode_context_parallel_size;
  c.prefill_context_parallel_size = config.prefill_context_parallel_size;
  c.batch_invariant = config.batch_invariant;
  return c;
}

BuilderConfig to_builder_config(const foveal_builder_config* given) {
  const foveal_builder_config c = read_struct("config", given);
  BuilderConfig config;
  config.spec = to_spec("config.spec", c.spec);
  config.block_size = c.block_size;
  config.kernel_block_size = c.kernel_block_size;
  config.num_blocks = c.num_blocks;
  config.max_num_reqs = c.max_num_reqs;
  config.max_num_tokens = c.max_num_tokens;
  config.num_splits = c.num_splits;
  config.batch_invariant = c.batch_invariant;
  config.flash_attn_version = c.flash_attn_version;
  config.num_threads = c.num_threads;
  config.device = to_device("config.device", c.device);
  config.stream = c.stream;
  return config;
}

CommonAttentionMetadata to_common(const foveal_step* given) {
  const foveal_step c = read_struct("step", given);
  CommonAttentionMetadata common;
  common.num_reqs = c.num_reqs;
  common.num_actual_tokens = c.num_actual_tokens;
  common.max_query_len = c.max_query_len;
  common.max_seq_len = c.max_seq_len;
  common.query_start_loc = to_tensor("query_start_loc", c.query_start_loc);
  common.seq_lens = to_tensor("seq_lens", c.seq_lens);
  common.query_start_loc_host = to_tensor("query_start_loc_host", c.query_start_loc_host);
  common.seq_lens_host = to_tensor("seq_lens_host", c.seq_lens_host);
  common.block_table = to_tensor("block_table", c.block_table);
  common.slot_mapping = to_tensor("slot_mapping", c.slot_mapping);
  common.key_start_loc = to_tensor("key_start_loc", c.key_start_loc);
  common.causal = !c.non_causal;
  common.cp_local_seq_lens = to_tensor("cp_local_seq_lens", c.cp_local_seq_lens);
  return common;
}

ExecutionContext to_context(const foveal_context* given) {
  if (given == nullptr) {
    return {};
  }
  const foveal_context c = read_struct("context", given);
  return {.threads = c.threads == nullptr ? nullptr : c.threads->pool.get(),
          .stream = c.stream,
          .workspace = to_tensor("context.workspace", c.workspace)};
}

}  // namespace foveal::c_api
