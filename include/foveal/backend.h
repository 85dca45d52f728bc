#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/error.h"
#include "foveal/execution.h"
#include "foveal/export.h"
#include "foveal/metadata.h"
#include "foveal/spec.h"

namespace foveal {

struct SelectorConfig;

/// How far a builder's work can be captured in a device graph; an engine takes the minimum over its
/// builders. Cascade attention stands outside of it.
enum class GraphSupport : std::uint8_t {
  never,
  uniform_single_token_decode,  ///< Only steps in which every request has one query.
  uniform_batch,  ///< Every request has the same number of queries (speculative decoding).
  always,         ///< Mixed prefill and decode too.
};

FOVEAL_API std::string_view to_string(GraphSupport support);
FOVEAL_API std::optional<GraphSupport> graph_support_from_string(std::string_view name);

/// A supported kernel block size: exactly `size` tokens, or any multiple of it.
struct BlockSize {
  std::int64_t size = 1;
  bool multiples = true;
  constexpr bool accepts(std::int64_t block_size) const {
    return block_size > 0 && (multiples ? block_size % size == 0 : block_size == size);
  }
};

/// What a backend can do, as data: the selector's reasons, the listings of the command line and the
/// support matrix of the documentation all come from here.
struct BackendCapabilities {
  DeviceType device = DeviceType::cpu;
  int min_compute_capability = 0;  ///< CUDA: 10·major + minor, 0 elsewhere.
  int max_compute_capability = 0;  ///< 0 is no upper bound.
  std::vector<DType> dtypes{};
  /// Cache dtypes besides "the same as dtype", which is always accepted.
  std::vector<DType> kv_cache_dtypes{};
  std::int64_t head_size_multiple = 1;
  std::int64_t max_head_size = 0;
  std::vector<std::int64_t> head_sizes{};  ///< When not empty, only these.
  bool different_head_size_v = false;      ///< Values may have another head size than keys.
  std::vector<BlockSize> block_sizes{};    ///< Kernel block sizes; empty accepts any.
  std::vector<AttnType> attn_types{};
  bool mla = false;  ///< An MLA backend serves MLA layers only, and others none.
  bool sinks = false;
  bool sliding_window = false;
  bool soft_cap = false;
  bool alibi = false;
  bool custom_score = false;  ///< score_mod and mask_mod.
  bool non_causal = false;    ///< Bidirectional decoder layers over the paged cache.
  bool lse = false;           ///< forward can return the log-sum-exp.
  GraphSupport graphs = GraphSupport::never;
  bool decode_context_parallel = false;
  bool prefill_context_parallel = false;
  bool batch_invariant = false;
  bool cascade = false;
  /// Off for a backend that is only ever chosen by name (the oracle).
  bool auto_select = true;
};

/// What a builder needs to know once.
struct BuilderConfig {
  AttentionSpec spec{};
  std::int64_t block_size = 16;  ///< The cache manager's; block_table and slot_mapping count in it.
  /// The kernel's, which divides block_size: forward's cache views have blocks of this many tokens,
  /// and the builder splits the table. 0 means block_size.
  std::int64_t kernel_block_size = 0;
  std::int64_t num_blocks =
      0;  ///< Of the cache manager's pool; block ids and slots are checked against it.
  std::int64_t max_num_reqs = 0;    ///< For graph capture: the largest step; 0 where unused.
  std::int64_t max_num_tokens = 0;  ///< Likewise.
  /// Splits of the keys per task; 0 lets the planner decide. For tests and measurements.
  std::int64_t num_splits = 0;
  bool batch_invariant = false;
  /// FLASH_ATTN: 3 is the kernel of sm_90a (TMA and wgmma), 2 that of sm_80 and later; 0 takes 3
  /// where it serves the layer. 3 is refused where it does not.
  int flash_attn_version = 0;
  /// CPU: the most threads that forward will run on. It plans the splits and sizes the workspace; 0
  /// is what default_thread_pool() has.
  int num_threads = 0;
  Device device{};
  /// GPU backends: the stream on which build() plans. It reads the step's lengths there, and
  /// forward must come behind it: on the same stream, or one that waits for it. A later build()
  /// may plan in the same memory, so it must come behind the forwards of earlier plans likewise.
  void* stream = nullptr;
};

/// A backend's plan for one step, made by its builder and read by every layer of the group. It
/// stays valid as long as the tensors of the CommonAttentionMetadata do.
class FOVEAL_API AttentionMetadata {
 public:
  virtual ~AttentionMetadata();

  const std::string& backend() const { return backend_; }
  const CommonAttentionMetadata& common() const { return common_; }
  /// Layers may use the plan only when they agree with the spec it was made for in geometry and
  /// mask.
  const AttentionSpec& spec() const { return spec_; }
  std::int64_t block_size() const { return block_size_; }  ///< The kernel's.
  /// Blocks of that size in the cache that the plan was checked against.
  std::int64_t num_kernel_blocks() const { return num_kernel_blocks_; }
  std::int64_t common_prefix_len() const { return common_prefix_len_; }
  /// Scratch forward needs, in bytes.
  virtual std::int64_t workspace_bytes() const { return 0; }

 protected:
  AttentionMetadata(std::string backend, const BuilderConfig& config,
                    const CommonAttentionMetadata& common, std::int64_t common_prefix_len);

 private:
  std::string backend_;
  CommonAttentionMetadata common_;
  AttentionSpec spec_;
  std::int64_t block_size_;
  std::int64_t num_kernel_blocks_;
  std::int64_t common_prefix_len_;
};

using AttentionMetadataPtr = std::shared_ptr<const AttentionMetadata>;

/// The inputs of the decision for cascade attention (the shared prefix once for all, suffixes each,
/// then merge).
struct CascadeQuery {
  std::int64_t common_prefix_len = 0;
  std::int64_t num_reqs = 0;
  std::int64_t num_tokens = 0;
  bool single_token_queries = false;
  std::int64_t context_parallel_size = 1;
};

/// Plans a step once for all layers of a KV-cache group. Not thread-safe; one builder a group.
class FOVEAL_API AttentionMetadataBuilder {
 public:
  virtual ~AttentionMetadataBuilder();

  const BuilderConfig& config() const { return config_; }

  /// Checks everything the host can see (see CommonAttentionMetadata), then plans.
  /// `common_prefix_len`, a multiple of the block size, is the number of leading keys that all
  /// requests share in the same blocks; above 0 it makes the step a cascade. `fast_build` favours a
  /// cheap plan over a fast forward (drafting). Throws invalid_argument: wrong shapes, dtypes or
  /// devices, decreasing query_start_loc, a length beyond the table's width, a block id or slot out
  /// of range, a prefix longer than the shortest context.
  AttentionMetadataPtr build(std::int64_t common_prefix_len, const CommonAttentionMetadata& common,
                             bool fast_build = false);
  /// As build, at the largest sizes, for capture into a device graph. A replay reads the plan of
  /// the latest build() over the same tensors with the same num_reqs, num_actual_tokens,
  /// max_query_len and causal; keep this metadata as long as the graph. Throws unsupported below
  /// the support needed.
  virtual AttentionMetadataPtr build_for_graph_capture(const CommonAttentionMetadata& common);
  /// The same plan over other blocks: for a second layer group with the same lengths. The checks of
  /// build apply.
  AttentionMetadataPtr update_block_table(const AttentionMetadata& metadata,
                                          const TensorView& block_table,
                                          const TensorView& slot_mapping);

  virtual GraphSupport graph_support() const { return GraphSupport::never; }
  /// Requests with at most this many queries should stand first in the batch; empty when order does
  /// not matter.
  virtual std::optional<std::int64_t> reorder_threshold() const { return std::nullopt; }
  virtual bool use_cascade(const CascadeQuery& query) const;

 protected:
  AttentionMetadataBuilder(std::string backend, BuilderConfig config);
  const std::string& backend() const { return backend_; }

 private:
  virtual AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                        const CommonAttentionMetadata& common, bool fast_build) = 0;

  std::string backend_;
  BuilderConfig config_;
};

/// Tensors of one attention call. T = rows of query, at least num_actual_tokens; rows past it are
/// padding and are neither read nor written.
struct ForwardArgs {
  TensorView
      query;  ///< [T, num_heads, head_size]; the last dimension contiguous, as in all of these.
  /// [keys, num_kv_heads, head_size] and [keys, num_kv_heads, head_size_v]: plain keys and values,
  /// read when kv_cache is absent (encoders, or attention without a cache).
  TensorView key{};
  TensorView value{};
  /// The paged cache; new tokens must have been written by update_kv_cache.
  KVCacheView kv_cache{};
  TensorView output{};  ///< [T, num_heads, head_size_v], written in place.
  TensorView lse{};     ///< f32 [num_heads, T], natural log, without the sink. Absent: not wanted.
};

/// Attention of one layer that is not MLA. One a layer; const calls may run on several threads with
/// different metadata.
class FOVEAL_API AttentionImpl {
 public:
  virtual ~AttentionImpl();

  const AttentionSpec& spec() const { return spec_; }

  /// Writes new keys and values, [T, num_kv_heads, head size], into the cache at slot_mapping (i64
  /// [≤ T]; −1 is skipped), quantising by spec().scales where the cache is fp8. Does nothing for
  /// encoders and for a layer that shares another's cache. Throws invalid_argument for wrong
  /// shapes, dtypes, devices and, where the host can see them, slots out of range; then nothing has
  /// been written.
  void update_kv_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const ExecutionContext& context = {}) const;

  /// output = softmax(mask(bias(cap(scale · query · keyᵀ)))) · value for every request of the step;
  /// see the numbers in docs/contracts.md. Throws invalid_argument for wrong shapes, dtypes,
  /// devices, and for metadata of another backend or of another geometry; then nothing has been
  /// written.
  void forward(const ForwardArgs& args, const AttentionMetadata& metadata,
               const ExecutionContext& context = {}) const;

  virtual bool can_return_lse_for_decode() const { return true; }
  virtual bool lse_base_on_e() const { return true; }  ///< false: log2.
  /// Whether context parallelism must gather every rank's tokens before the call.
  virtual bool needs_all_tokens_on_every_rank() const { return false; }
  virtual bool supports_prefill_context_parallel() const { return false; }

 protected:
  /// Validates the spec.
  AttentionImpl(std::string backend, AttentionSpec spec);

 private:
  virtual void do_update_kv_cache(const TensorView& key, const TensorView& value,
                                  const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                  const ExecutionContext& context) const = 0;
  virtual void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                          const ExecutionContext& context) const = 0;

  std::string backend_;
  AttentionSpec spec_;
};

/// Tensors of forward_mha: multi-head attention on decompressed keys and values (prefill). With R =
/// qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim. The keys may be the step's own tokens
/// (causal) or a chunk of the context (not causal); the caller merges the parts by their lse.
struct MlaPrefillArgs {
  TensorView query{};   ///< [T, num_heads, P + R]
  TensorView key{};     ///< [keys, num_heads, P + R]
  TensorView value{};   ///< [keys, num_heads, V]
  TensorView output{};  ///< [T, num_heads, V]
  TensorView lse{};     ///< f32 [num_heads, T]; may be absent.
};

/// Tensors of forward_mqa: multi-query attention on the compressed latent (decode). With L =
/// kv_lora_rank: the value of a token is the first L elements of its cache entry.
struct MlaDecodeArgs {
  TensorView query{};     ///< [T, num_heads, L + R]: the absorbed query, then its rotated part.
  TensorView kv_cache{};  ///< [num_blocks, block_size, L + R]
  TensorView output{};    ///< [T, num_heads, L]
  TensorView lse{};       ///< f32 [num_heads, T]; may be absent.
};

/// Attention of one MLA layer. It has no `forward`: the engine chooses the way by phase.
class FOVEAL_API MlaAttentionImpl {
 public:
  virtual ~MlaAttentionImpl();

  const AttentionSpec& spec() const { return spec_; }

  /// Writes latents [T, L] and rotated keys [T, R] as entries [L + R] at slot_mapping; otherwise as
  /// AttentionImpl::update_kv_cache. One scale (scales.k) serves the whole entry.
  void update_kv_cache(const TensorView& latent, const TensorView& key_rope,
                       const TensorView& kv_cache, const TensorView& slot_mapping,
                       const ExecutionContext& context = {}) const;
  void forward_mha(const MlaPrefillArgs& args, const AttentionMetadata& metadata,
                   const ExecutionContext& context = {}) const;
  void forward_mqa(const MlaDecodeArgs& args, const AttentionMetadata& metadata,
                   const ExecutionContext& context = {}) const;

  virtual bool can_return_lse_for_decode() const { return true; }
  virtual bool lse_base_on_e() const { return true; }
  virtual bool needs_all_tokens_on_every_rank() const { return false; }
  virtual bool supports_prefill_context_parallel() const { return false; }

 protected:
  MlaAttentionImpl(std::string backend, AttentionSpec spec);

 private:
  virtual void do_update_kv_cache(const TensorView& latent, const TensorView& key_rope,
                                  const TensorView& kv_cache, const TensorView& slot_mapping,
                                  const ExecutionContext& context) const = 0;
  virtual void do_forward_mha(const MlaPrefillArgs& args, const AttentionMetadata& metadata,
                              const ExecutionContext& context) const = 0;
  virtual void do_forward_mqa(const MlaDecodeArgs& args, const AttentionMetadata& metadata,
                              const ExecutionContext& context) const = 0;

  std::string backend_;
  AttentionSpec spec_;
};

/// One part of a split attention: output [T, num_heads, head_size_v] and lse f32 [num_heads, T].
struct AttentionPart {
  TensorView output{};
  TensorView lse{};
};

/// A backend, erased: a stateless factory that says what it is and makes what serves a layer. Get
/// one from select_backend or the BackendRegistry; write one as a traits type (below).
class FOVEAL_API AttentionBackend {
 public:
  virtual ~AttentionBackend();

  virtual std::string_view name() const = 0;
  virtual const BackendCapabilities& capabilities() const = 0;
  /// What it runs on here, for people: the instruction set, the driver's version; may be empty.
  virtual std::string runtime() const { return {}; }
  /// Every reason why the config cannot be served; empty when it can.
  virtual std::vector<std::string> validate(const SelectorConfig& config) const = 0;

  /// The cache tensor for `num_blocks` blocks of spec.block_size tokens.
  virtual KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                        KVCacheOrder order = KVCacheOrder::nhd) const = 0;
  /// Keys and values inside a cache tensor of that layout. Throws unsupported for an MLA backend.
  virtual KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) const = 0;

  virtual std::unique_ptr<AttentionMetadataBuilder> make_builder(
      const BuilderConfig& config) const = 0;
  /// Throws unsupported, saying to call the other one, when the backend is an MLA backend (or is
  /// not one).
  virtual std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) const = 0;
  virtual std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) const = 0;

  /// The work behind the functions of ops.h, which check the arguments: call those.
  virtual void reshape_and_cache(const TensorView& key, const TensorView& value,
                                 const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                 const QuantScales& scales,
                                 const ExecutionContext& context) const = 0;
  virtual void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                 const AttentionPart& b, const ExecutionContext& context) const = 0;
};

using AttentionBackendPtr = std::shared_ptr<const AttentionBackend>;

/// What a backend's traits type must have. The two ways to make an impl are optional, one of them
/// is needed.
template <typename T>
concept AttentionBackendTraits = requires(const SelectorConfig& config, const KVCacheSpec& kv_spec,
                                          const BuilderConfig& builder, const AttentionPart& part,
                                          const ExecutionContext& context) {
  { T::name() } -> std::convertible_to<std::string_view>;
  { T::capabilities() } -> std::same_as<BackendCapabilities>;
  /// Reasons beyond those that follow from the capabilities: joint constraints.
  { T::validate(config) } -> std::same_as<std::vector<std::string>>;
  { T::kv_cache_layout(kv_spec, std::int64_t{}, KVCacheOrder{}) } -> std::same_as<KVCacheLayout>;
  { T::make_builder(builder) } -> std::same_as<std::unique_ptr<AttentionMetadataBuilder>>;
  T::merge_attn_states(part, part, part, context);
}
&&(
    requires(const AttentionSpec& spec, const TensorView& tensor, const KVCacheSpec& kv_spec,
             const KVCacheView& view, const QuantScales& scales, const ExecutionContext& context) {
      { T::make_impl(spec) } -> std::same_as<std::unique_ptr<AttentionImpl>>;
      { T::kv_cache_view(tensor, kv_spec) } -> std::same_as<KVCacheView>;
      T::reshape_and_cache(tensor, tensor, view, tensor, scales, context);
    } ||
    requires(const AttentionSpec& spec) {
      { T::make_mla_impl(spec) } -> std::same_as<std::unique_ptr<MlaAttentionImpl>>;
    });

/// The reasons that follow from the capabilities alone, in the order of the members of
/// SelectorConfig.
FOVEAL_API std::vector<std::string> capability_reasons(const BackendCapabilities& capabilities,
                                                       const SelectorConfig& config);

namespace detail {
[[noreturn]] FOVEAL_API void throw_wrong_impl(std::string_view backend, bool is_mla);
/// Throws unsupported, with every reason, when the capabilities do not cover the layer.
FOVEAL_API void require_served(std::string_view backend, const BackendCapabilities& can,
                               const AttentionSpec& spec, const BuilderConfig* builder);

template <AttentionBackendTraits T>
class ErasedBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return T::name(); }
  const BackendCapabilities& capabilities() const override { return capabilities_; }
  std::string runtime() const override {
    if constexpr (requires { T::runtime(); }) {
      return T::runtime();
    } else {
      return {};
    }
  }
  std::vector<std::string> validate(const SelectorConfig& config) const override {
    std::vector<std::string> reasons = capability_reasons(capabilities_, config);
    for (std::string& reason : T::validate(config)) {
      reasons.push_back(std::move(reason));
    }
    return reasons;
  }
  KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                KVCacheOrder order) const override {
    return T::kv_cache_layout(spec, num_blocks, order);
  }
  KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) const override {
    if constexpr (requires { T::kv_cache_view(cache, spec); }) {
      return T::kv_cache_view(cache, spec);
    } else {
      throw_wrong_impl(name(), true);
    }
  }
  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      const BuilderConfig& config) const override {
    require_served(name(), capabilities_, config.spec, &config);
    return T::make_builder(config);
  }
  std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) const override {
    if constexpr (requires { T::make_impl(spec); }) {
      require_served(name(), capabilities_, spec, nullptr);
      return T::make_impl(spec);
    } else {
      throw_wrong_impl(name(), true);
    }
  }
  std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) const override {
    if constexpr (requires { T::make_mla_impl(spec); }) {
      require_served(name(), capabilities_, spec, nullptr);
      return T::make_mla_impl(spec);
    } else {
      throw_wrong_impl(name(), false);
    }
  }
  void reshape_and_cache(const TensorView& key, const TensorView& value,
                         const KVCacheView& kv_cache, const TensorView& slot_mapping,
                         const QuantScales& scales,
                         const ExecutionContext& context) const override {
    if constexpr (requires {
                    T::reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
                  }) {
      T::reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
    } else {
      throw_wrong_impl(name(), true);
    }
  }
  void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                         const AttentionPart& b, const ExecutionContext& context) const override {
    T::merge_attn_states(result, a, b, context);
  }

 private:
  BackendCapabilities capabilities_ = T::capabilities();
};
}  // namespace detail

/// The erased form of a traits type.
template <AttentionBackendTraits T>
AttentionBackendPtr make_backend() {
  return std::make_shared<detail::ErasedBackend<T>>();
}

}  // namespace foveal
