#include "cpu/planned_step.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "core/check.h"
#include "cpu/instruction_set.h"

namespace foveal::cpu {
namespace {

constexpr std::size_t kWorkspaceAlignment = 64;

}  // namespace

/// Uninitialised scratch.
class Workspace {
 public:
  Workspace(const std::string& backend, std::int64_t size)
      : size_(size),
        data_(::operator new (static_cast<std::size_t>(size), std::align_val_t{kWorkspaceAlignment},
                              std::nothrow)) {
    if (data_ == nullptr) {
      fail(ErrorCode::out_of_memory, "{}: no memory for a workspace of {} bytes", backend, size);
    }
  }
  ~Workspace() { ::operator delete (data_, std::align_val_t{kWorkspaceAlignment}); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_;
  void* data_;
};

class PlannedStep final : public AttentionMetadata {
 public:
  PlannedStep(const std::string& backend, const BuilderConfig& config,
              const CommonAttentionMetadata& common, std::int64_t common_prefix_len, Plan plan,
              const Geometry& geometry, const WorkspaceLayout& layout,
              std::shared_ptr<Workspace> workspace)
      : AttentionMetadata(backend, config, common, common_prefix_len),
        plan_(std::move(plan)),
        geometry_(geometry),
        layout_(layout),
        workspace_(std::move(workspace)),
        manager_block_size_(config.block_size),
        batch_invariant_(config.batch_invariant) {}

  const Plan& plan() const { return plan_; }
  const Geometry& geometry() const { return geometry_; }
  const WorkspaceLayout& layout() const { return layout_; }
  std::int64_t workspace_bytes() const override { return layout_.size_bytes(); }
  std::int64_t manager_block_size() const { return manager_block_size_; }
  bool batch_invariant() const { return batch_invariant_; }

  float* workspace(const ExecutionContext& context) const {
    return static_cast<float*>(context.workspace.empty() ? workspace_->data()
                                                         : context.workspace.data());
  }

 private:
  Plan plan_;
  Geometry geometry_;
  WorkspaceLayout layout_;
  std::shared_ptr<Workspace> workspace_;
  std::int64_t manager_block_size_;
  bool batch_invariant_;
};

namespace {

RowTensor as_rows(const TensorView& tensor) {
  const std::int64_t bytes = size_of(tensor.dtype());
  return {tensor.as<std::byte>(), tensor.dtype(), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes};
}

TokenTensor as_tokens(const TensorView& tensor) {
  const std::int64_t bytes = size_of(tensor.dtype());
  if (tensor.ndim() == 3) {  // Plain.
    return {tensor.as<const std::byte>(), tensor.dtype(), 0, tensor.stride(0) * bytes,
            tensor.stride(1) * bytes};
  }
  return {tensor.as<const std::byte>(), tensor.dtype(), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes, tensor.stride(2) * bytes};
}

AttentionCall make_call(const AttentionSpec& spec, const CallTensors& tensors,
                        const PlannedStep& step, const ExecutionContext& context) {
  const CommonAttentionMetadata& common = step.common();
  const WorkspaceLayout& layout = step.layout();
  float* const workspace = step.workspace(context);

  AttentionCall call;
  call.query = as_rows(tensors.query);
  call.output = as_rows(tensors.output);
  if (!tensors.lse.empty()) {
    call.lse = tensors.lse.as<float>();
    call.lse_head_stride = tensors.lse.stride(0);
    call.lse_token_stride = tensors.lse.stride(1);
  }
  call.key = as_tokens(tensors.key);
  call.value = as_tokens(tensors.value);
  call.values_in_keys = spec.mla && !common.block_table.empty();
  if (!common.block_table.empty()) {
    call.index.block_table = common.block_table.as<const std::int32_t>();
    call.index.table_stride = common.block_table.stride(0);
    call.index.block_size = static_cast<std::uint32_t>(step.block_size());
    call.index.blocks_per_entry =
        static_cast<std::uint32_t>(step.manager_block_size() / step.block_size());
  } else {
    const TensorView& starts =
        common.key_start_loc.empty() ? common.query_start_loc : common.key_start_loc;
    call.index.key_start_loc = starts.as<const std::int32_t>();
  }
  call.partials = {workspace, workspace + layout.partial_max(), workspace + layout.partial_sum(),
                   layout.partial_stride, step.plan().partial_rows};
  call.group_size = step.geometry().group_size;
  call.head_size = step.geometry().head_size;
  call.head_size_v = step.geometry().head_size_v;
  call.mask = {common.causal, spec.window};
  call.scale = spec.softmax_scale() * tensors.key_scale;
  call.value_scale = tensors.value_scale;
  call.soft_cap = spec.logits_soft_cap;
  call.alibi_slopes = spec.alibi_slopes.empty() ? nullptr : spec.alibi_slopes.data();
  call.sinks = spec.sinks.empty() ? nullptr : spec.sinks.data();
  call.score_mod = spec.score_mod ? &spec.score_mod : nullptr;
  call.mask_mod = spec.mask_mod ? &spec.mask_mod : nullptr;
  call.batch_invariant = step.batch_invariant();
  const auto is_bf16 = [](DType dtype) { return dtype == DType::bf16 || is_fp8(dtype); };
  if (call.query.dtype == DType::bf16 && is_bf16(call.key.dtype) && is_bf16(call.value.dtype)) {
    call.bf16 = instruction_set().bf16;
  }
  return call;
}

/// Rows of padding between the last request's and num_actual_tokens: 0, and an LSE of −∞.
void write_rows_without_request(const AttentionCall& call, const CommonAttentionMetadata& common,
                                std::int64_t num_heads) {
  const std::int64_t first = common.query_start_loc.as<const std::int32_t>()[common.num_reqs];
  const auto row_bytes = static_cast<std::size_t>(call.head_size_v * size_of(call.output.dtype));
  for (std::int64_t token = first; token < common.num_actual_tokens; ++token) {
    for (std::int64_t head = 0; head < num_heads; ++head) {
      std::fill_n(call.output.row(token, head), row_bytes, std::byte{0});
      if (call.lse != nullptr) {
        call.lse[head * call.lse_head_stride + token * call.lse_token_stride] =
            -std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace

BackendCapabilities capabilities_of_kernel() {
  BackendCapabilities can;
  can.device = DeviceType::cpu;
  can.dtypes = {DType::f32, DType::f16, DType::bf16};
  can.kv_cache_dtypes = {DType::f8e4m3, DType::f8e5m2};
  can.different_head_size_v = true;
  can.block_sizes = {{1, true}};
  can.sinks = true;
  can.sliding_window = true;
  can.soft_cap = true;
  can.alibi = true;
  can.custom_score = true;
  can.non_causal = true;
  can.lse = true;
  can.batch_invariant = true;
  return can;
}

Geometry geometry_of(const AttentionSpec& spec, bool paged) {
  if (spec.mla && !paged) {
    return {spec.num_heads, 1, spec.mla->qk_head_dim(), spec.mla->v_head_dim};
  }
  return {spec.num_kv_heads, spec.group_size(), spec.head_size, spec.value_head_size()};
}

bool StepBuilder::use_cascade(const CascadeQuery& query) const {
  const AttentionSpec& spec = config().spec;
  const bool same_for_all_rows = spec.window.unlimited() && spec.alibi_slopes.empty() &&
                                 !spec.score_mod && !spec.mask_mod &&
                                 spec.attn_type == AttnType::decoder && !spec.mla;
  if (!same_for_all_rows || config().batch_invariant || query.common_prefix_len < 256 ||
      query.num_reqs < 8 || query.context_parallel_size > 1) {
    return false;
  }
  return cascade_pays({.common_prefix_len = query.common_prefix_len,
                       .num_reqs = query.num_reqs,
                       .num_tokens = query.num_tokens,
                       .group_size = spec.group_size(),
                       .head_size = spec.head_size,
                       .head_size_v = spec.value_head_size(),
                       .max_item_rows = max_item_rows(spec.head_size, spec.value_head_size())});
}

/// A plan takes microseconds, so that fast_build changes nothing.
AttentionMetadataPtr StepBuilder::do_build(std::int64_t common_prefix_len,
                                           const CommonAttentionMetadata& common,
                                           bool /*fast_build*/) {
  const AttentionSpec& spec = config().spec;
  const Geometry geometry = geometry_of(spec, !common.block_table.empty());
  const auto num_reqs = static_cast<std::size_t>(common.num_reqs);
  const int num_threads =
      config().num_threads > 0 ? config().num_threads : default_thread_pool().num_threads();
  // Parts and their merge would make a row depend on what it shares a prefix with.
  const bool invariant = config().batch_invariant;
  Plan plan =
      make_plan({.query_start_loc = {common.query_start_loc.as<const std::int32_t>(), num_reqs + 1},
                 .seq_lens = {common.seq_lens.as<const std::int32_t>(), num_reqs},
                 .mask = {common.causal, spec.window},
                 .num_kv_heads = geometry.num_kv_heads,
                 .group_size = geometry.group_size,
                 .common_prefix_len = invariant ? 0 : common_prefix_len,
                 .num_threads = num_threads,
                 .num_splits = invariant ? 1 : config().num_splits,
                 .max_item_rows = max_item_rows(geometry.head_size, geometry.head_size_v)});

  const WorkspaceLayout layout{
      .partial_rows = plan.partial_rows * geometry.num_kv_heads,
      .partial_stride = padded_size(geometry.head_size_v),
      .scratch_floats = scratch_floats(geometry.head_size, geometry.head_size_v, plan.max_rows),
      .num_threads = num_threads};
  if (workspace_ == nullptr || workspace_->size() < layout.size_bytes()) {
    // Plans made before keep theirs.
    workspace_ = std::make_shared<Workspace>(backend(), layout.size_bytes());
  }
  return std::make_shared<PlannedStep>(backend(), config(), common, common_prefix_len,
                                       std::move(plan), geometry, layout, workspace_);
}

void attend(const AttentionSpec& spec, const CallTensors& tensors,
            const AttentionMetadata& metadata, const ExecutionContext& context) {
  const auto& step = dynamic_cast<const PlannedStep&>(metadata);
  ThreadPool& pool = context.pool();
  check(pool.num_threads() <= step.layout().num_threads,
        "context.threads has {} threads, the metadata was built for {} at most: set "
        "BuilderConfig::num_threads",
        pool.num_threads(), step.layout().num_threads);

  const AttentionCall call = make_call(spec, tensors, step, context);
  write_rows_without_request(call, step.common(), spec.num_heads);
  const Plan& plan = step.plan();
  const std::int64_t kv_heads = step.geometry().num_kv_heads;
  float* const scratch = step.workspace(context) + step.layout().scratch();
  const std::int64_t thread_floats = step.layout().scratch_floats;
  const auto attend_item = [&](std::int64_t index, int worker) {
    const Task task = plan.tasks[static_cast<std::size_t>(index)];
    run_work_item(call, plan.items[static_cast<std::size_t>(task.item)], task.kv_head,
                  scratch + worker * thread_floats);
  };
  const auto merge_item = [&](std::int64_t task, int worker) {
    run_merge_item(call, plan, plan.merges[static_cast<std::size_t>(task / kv_heads)],
                   task % kv_heads, scratch + worker * thread_floats);
  };
  // By reference: a std::function of so large a lambda would allocate.
  pool.parallel_for(std::ssize(plan.tasks), std::ref(attend_item));
  pool.parallel_for(std::ssize(plan.merges) * kv_heads, std::ref(merge_item));
}

}  // namespace foveal::cpu
