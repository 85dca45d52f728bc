#include <fmt/format.h>
#include <hwy/highway.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include "core/builtin_backends.h"
#include "core/check.h"
#include "cpu/attention_kernel.h"
#include "cpu/cache_ops.h"
#include "cpu/merge_states.h"
#include "cpu/plan.h"
#include "foveal/selector.h"

namespace foveal {
namespace {

constexpr const char* kName = "CPU_ATTN";
constexpr std::size_t kAlignment = 64;

/// Uninitialised scratch.
class Workspace {
 public:
  explicit Workspace(std::int64_t size)
      : size_(size),
        data_(::operator new (static_cast<std::size_t>(size), std::align_val_t{kAlignment},
                              std::nothrow)) {
    if (data_ == nullptr) {
      fail(ErrorCode::out_of_memory, "{}: no memory for a workspace of {} bytes", kName, size);
    }
  }
  ~Workspace() { ::operator delete (data_, std::align_val_t{kAlignment}); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
  void* data_;
};

/// The workspace: partial outputs, their maxima and sums, then each thread's scratch.
struct WorkspaceLayout {
  std::int64_t partial_rows = 0;  ///< Of all KV heads.
  std::int64_t partial_stride = 0;
  std::int64_t scratch_floats = 0;  ///< A thread.
  int num_threads = 0;

  /// Sections begin at multiples of 16 floats, that is of 64 bytes.
  std::int64_t partial_max() const { return partial_rows * partial_stride; }
  std::int64_t partial_sum() const { return partial_max() + cpu::padded_size(partial_rows); }
  std::int64_t scratch() const { return partial_sum() + cpu::padded_size(partial_rows); }
  std::int64_t size_bytes() const {
    return (scratch() + scratch_floats * num_threads) * static_cast<std::int64_t>(sizeof(float));
  }
};

class CpuMetadata final : public AttentionMetadata {
 public:
  CpuMetadata(const BuilderConfig& config, const CommonAttentionMetadata& common,
              std::int64_t common_prefix_len, cpu::Plan plan, const WorkspaceLayout& layout,
              std::shared_ptr<Workspace> workspace)
      : AttentionMetadata(kName, config, common, common_prefix_len),
        plan_(std::move(plan)),
        layout_(layout),
        workspace_(std::move(workspace)),
        manager_block_size_(config.block_size),
        batch_invariant_(config.batch_invariant) {}

  const cpu::Plan& plan() const { return plan_; }
  const WorkspaceLayout& layout() const { return layout_; }
  std::int64_t workspace_bytes() const override { return layout_.size_bytes(); }
  std::int64_t manager_block_size() const { return manager_block_size_; }
  bool batch_invariant() const { return batch_invariant_; }

  float* workspace(const ExecutionContext& context) const {
    return static_cast<float*>(context.workspace.empty() ? workspace_->data()
                                                         : context.workspace.data());
  }

 private:
  cpu::Plan plan_;
  WorkspaceLayout layout_;
  std::shared_ptr<Workspace> workspace_;
  std::int64_t manager_block_size_;
  bool batch_invariant_;
};

class CpuBuilder final : public AttentionMetadataBuilder {
 public:
  explicit CpuBuilder(const BuilderConfig& config) : AttentionMetadataBuilder(kName, config) {}

  /// From 256 shared tokens and 8 requests on, reading the prefix once instead of once a request
  /// outweighs merging two results. No cost model: on a CPU the saving grows with both.
  bool use_cascade(const CascadeQuery& query) const override {
    const AttentionSpec& spec = config().spec;
    const bool same_for_all_rows = spec.window.unlimited() && spec.alibi_slopes.empty() &&
                                   !spec.score_mod && !spec.mask_mod &&
                                   spec.attn_type == AttnType::decoder;
    return same_for_all_rows && !config().batch_invariant && query.common_prefix_len >= 256 &&
           query.num_reqs >= 8 && query.context_parallel_size == 1;
  }

 private:
  /// A plan takes microseconds, so that fast_build changes nothing.
  AttentionMetadataPtr do_build(std::int64_t common_prefix_len,
                                const CommonAttentionMetadata& common,
                                bool /*fast_build*/) override {
    const AttentionSpec& spec = config().spec;
    const auto num_reqs = static_cast<std::size_t>(common.num_reqs);
    const int num_threads =
        config().num_threads > 0 ? config().num_threads : default_thread_pool().num_threads();
    // Parts and their merge would make a row depend on what it shares a prefix with.
    const bool invariant = config().batch_invariant;
    cpu::Plan plan = cpu::make_plan(
        {.query_start_loc = {common.query_start_loc.as<const std::int32_t>(), num_reqs + 1},
         .seq_lens = {common.seq_lens.as<const std::int32_t>(), num_reqs},
         .mask = {common.causal, spec.window},
         .num_kv_heads = spec.num_kv_heads,
         .group_size = spec.group_size(),
         .common_prefix_len = invariant ? 0 : common_prefix_len,
         .num_threads = num_threads,
         .num_splits = invariant ? 1 : config().num_splits});

    const WorkspaceLayout layout{
        .partial_rows = plan.partial_rows * spec.num_kv_heads,
        .partial_stride = cpu::padded_size(spec.value_head_size()),
        .scratch_floats = cpu::scratch_floats(spec.head_size, spec.value_head_size()),
        .num_threads = num_threads};
    if (workspace_ == nullptr || workspace_->size() < layout.size_bytes()) {
      // Plans made before keep theirs.
      workspace_ = std::make_shared<Workspace>(layout.size_bytes());
    }
    return std::make_shared<CpuMetadata>(config(), common, common_prefix_len, std::move(plan),
                                         layout, workspace_);
  }

  std::shared_ptr<Workspace> workspace_;
};

cpu::RowTensor as_rows(const TensorView& tensor) {
  const std::int64_t bytes = size_of(tensor.dtype());
  return {tensor.as<std::byte>(), tensor.dtype(), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes};
}

cpu::TokenTensor as_tokens(const TensorView& tensor) {
  const std::int64_t bytes = size_of(tensor.dtype());
  if (tensor.ndim() == 3) {  // Plain.
    return {tensor.as<const std::byte>(), tensor.dtype(), 0, tensor.stride(0) * bytes,
            tensor.stride(1) * bytes};
  }
  return {tensor.as<const std::byte>(), tensor.dtype(), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes, tensor.stride(2) * bytes};
}

class CpuImpl final : public AttentionImpl {
 public:
  explicit CpuImpl(const AttentionSpec& spec) : AttentionImpl(kName, spec) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& context) const override {
    cpu::reshape_and_cache(key, value, kv_cache, slot_mapping, spec().scales, context);
  }

  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    const auto& planned = dynamic_cast<const CpuMetadata&>(metadata);
    ThreadPool& pool = context.pool();
    check(pool.num_threads() <= planned.layout().num_threads,
          "context.threads has {} threads, the metadata was built for {} at most: set "
          "BuilderConfig::num_threads",
          pool.num_threads(), planned.layout().num_threads);

    const cpu::AttentionCall call = make_call(args, planned, context);
    write_rows_without_request(call, planned.common());
    const cpu::Plan& plan = planned.plan();
    const std::int64_t kv_heads = spec().num_kv_heads;
    float* const scratch = planned.workspace(context) + planned.layout().scratch();
    const std::int64_t scratch_floats = planned.layout().scratch_floats;
    const auto attend = [&](std::int64_t task, int worker) {
      cpu::run_work_item(call, plan.items[static_cast<std::size_t>(task / kv_heads)],
                         task % kv_heads, scratch + worker * scratch_floats);
    };
    const auto merge = [&](std::int64_t task, int worker) {
      cpu::run_merge_item(call, plan, plan.merges[static_cast<std::size_t>(task / kv_heads)],
                          task % kv_heads, scratch + worker * scratch_floats);
    };
    // By reference: a std::function of so large a lambda would allocate.
    pool.parallel_for(std::ssize(plan.items) * kv_heads, std::ref(attend));
    pool.parallel_for(std::ssize(plan.merges) * kv_heads, std::ref(merge));
  }

  cpu::AttentionCall make_call(const ForwardArgs& args, const CpuMetadata& metadata,
                               const ExecutionContext& context) const {
    const CommonAttentionMetadata& common = metadata.common();
    const bool paged = !common.block_table.empty();
    const WorkspaceLayout& layout = metadata.layout();
    float* const workspace = metadata.workspace(context);

    cpu::AttentionCall call;
    call.query = as_rows(args.query);
    call.output = as_rows(args.output);
    if (!args.lse.empty()) {
      call.lse = args.lse.as<float>();
      call.lse_head_stride = args.lse.stride(0);
      call.lse_token_stride = args.lse.stride(1);
    }
    call.key = as_tokens(paged ? args.kv_cache.key : args.key);
    call.value = as_tokens(paged ? args.kv_cache.value : args.value);
    if (paged) {
      call.index.block_table = common.block_table.as<const std::int32_t>();
      call.index.table_stride = common.block_table.stride(0);
      call.index.manager_block_size = metadata.manager_block_size();
      call.index.block_size = metadata.block_size();
    } else {
      const TensorView& starts =
          common.key_start_loc.empty() ? common.query_start_loc : common.key_start_loc;
      call.index.key_start_loc = starts.as<const std::int32_t>();
    }
    call.partials = {workspace, workspace + layout.partial_max(), workspace + layout.partial_sum(),
                     layout.partial_stride, metadata.plan().partial_rows};
    call.group_size = spec().group_size();
    call.head_size = spec().head_size;
    call.head_size_v = spec().value_head_size();
    call.mask = {common.causal, spec().window};
    call.scale = spec().softmax_scale() * (is_fp8(call.key.dtype) ? spec().scales.k : 1.0F);
    call.value_scale = is_fp8(call.value.dtype) ? spec().scales.v : 1.0F;
    call.soft_cap = spec().logits_soft_cap;
    call.alibi_slopes = spec().alibi_slopes.empty() ? nullptr : spec().alibi_slopes.data();
    call.sinks = spec().sinks.empty() ? nullptr : spec().sinks.data();
    call.score_mod = spec().score_mod ? &spec().score_mod : nullptr;
    call.mask_mod = spec().mask_mod ? &spec().mask_mod : nullptr;
    call.batch_invariant = metadata.batch_invariant();
    return call;
  }

  /// Rows of padding between the last request's and num_actual_tokens: 0, and an LSE of −∞.
  void write_rows_without_request(const cpu::AttentionCall& call,
                                  const CommonAttentionMetadata& common) const {
    const std::int64_t first = common.query_start_loc.as<const std::int32_t>()[common.num_reqs];
    const auto row_bytes = static_cast<std::size_t>(call.head_size_v * size_of(call.output.dtype));
    for (std::int64_t token = first; token < common.num_actual_tokens; ++token) {
      for (std::int64_t head = 0; head < spec().num_heads; ++head) {
        std::fill_n(call.output.row(token, head), row_bytes, std::byte{0});
        if (call.lse != nullptr) {
          call.lse[head * call.lse_head_stride + token * call.lse_token_stride] =
              -std::numeric_limits<float>::infinity();
        }
      }
    }
  }
};

struct CpuAttention {
  static std::string_view name() { return kName; }

  static BackendCapabilities capabilities() {
    BackendCapabilities can;
    can.device = DeviceType::cpu;
    can.dtypes = {DType::f32, DType::f16, DType::bf16};
    can.kv_cache_dtypes = {DType::f8e4m3, DType::f8e5m2};
    can.head_size_multiple = 8;
    can.max_head_size = 512;
    can.different_head_size_v = true;
    can.block_sizes = {{1, true}};
    can.attn_types = {AttnType::decoder, AttnType::encoder, AttnType::encoder_only,
                      AttnType::encoder_decoder};
    can.sinks = true;
    can.sliding_window = true;
    can.soft_cap = true;
    can.alibi = true;
    can.custom_score = true;
    can.non_causal = true;
    can.lse = true;
    can.batch_invariant = true;
    can.cascade = true;
    return can;
  }

  static std::string runtime() {
    // Targets are bits, the best one lowest.
    const std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
    return fmt::format("instruction set {}", hwy::TargetName(targets & -targets));
  }

  /// The capabilities say it all.
  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }

  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return KVCacheLayout::flash(spec, num_blocks, order);
  }

  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return KVCacheView::flash(cache, spec);
  }

  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<CpuBuilder>(config);
  }

  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<CpuImpl>(spec);
  }

  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                const QuantScales& scales, const ExecutionContext& context) {
    cpu::reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
  }

  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    cpu::merge_attn_states(result, a, b, context);
  }
};

}  // namespace

AttentionBackendPtr make_cpu_attn_backend() { return make_backend<CpuAttention>(); }

}  // namespace foveal
