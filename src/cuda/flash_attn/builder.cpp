#include "cuda/flash_attn/builder.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/metadata_checks.h"
#include "cuda/flash_attn/kernels.h"

namespace foveal::cuda::flash_attn {
namespace {

/// Work items that the planner aims at for each block the device can run at a time: several even
/// out lengths, but each split of a tile of many rows costs a large partial result.
constexpr std::array<int, 2> kWaves{3, 1};
/// Keys of a split that make up for its beginning and end.
constexpr std::array<int, 2> kGoodSplitKeys{2048, 0};
/// Fewest keys of a split.
constexpr std::array<int, 2> kMinSplitKeys{128, 512};

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t align(std::int64_t bytes) { return divide_up(bytes, 256) * 256; }

/// What stands before `bytes` more, which are then counted in.
std::int64_t take(std::int64_t& total, std::int64_t bytes) {
  const std::int64_t offset = total;
  total += align(bytes);
  return offset;
}

struct PlanOffsets {
  std::int64_t counts, items, counters;
};

}  // namespace

FlashBuilder::FlashBuilder(const BuilderConfig& config)
    : AttentionMetadataBuilder(kName, config), device_(device_properties(config.device.index)) {
  const AttentionSpec& spec = config.spec;
  check(config.device.type == DeviceType::cuda,
        "BuilderConfig: device is {}, it must be a CUDA device", to_string(config.device));
  const ContextGuard guard(config.device.index);
  // The kernels of most steps are made ready now, not in the first one.
  plan_kernel(config.device.index);
  CommonAttentionMetadata usual;
  usual.causal = spec.attn_type == AttnType::decoder;
  FlashMetadata metadata(config, usual, 0);
  if (spec.uses_cache()) {
    metadata.page_size = static_cast<int>(kernel_block_size(config));
    metadata.pages_per_block = static_cast<int>(config.block_size / kernel_block_size(config));
  }
  const HeadShape head = head_shape(spec, metadata.page_size);
  if (config.flash_attn_version == 3 || is_fp8(spec.dtype)) {
    const std::string reason = why_not_sm90(head, device_);
    if (!reason.empty()) {
      fail(ErrorCode::unsupported,
           "BuilderConfig: flash_attn_version 3 was {}, which cannot serve this: {}; {}",
           config.flash_attn_version == 3 ? "asked for" : "needed for a query in fp8", reason,
           is_fp8(spec.dtype) ? "convert the query to f16 or bf16" : "0 chooses");
    }
  }
  check(!is_fp8(spec.dtype) || config.flash_attn_version != 2,
        "BuilderConfig: flash_attn_version is 2, a query in fp8 needs 3; 0 chooses");
  for (const TileConfig& tile :
       {decode_tile(head, 1, device_),
        prefill_tile(head, config.max_num_tokens, config.flash_attn_version, device_)}) {
    ClassPlan plan;
    choose_kernel(plan, metadata, usual.causal, tile);
  }
}

bool FlashBuilder::use_cascade(const CascadeQuery& query) const {
  const AttentionSpec& spec = config().spec;
  if (query.common_prefix_len < 256 || query.num_reqs < 8 || query.context_parallel_size > 1 ||
      !spec.window.unlimited() || !spec.alibi_slopes.empty() ||
      spec.attn_type != AttnType::decoder) {
    return false;
  }
  if (spec.group_size() == 1 || !query.single_token_queries) {
    return true;
  }
  // Both ways cost blocks of work: tiles of 128 rows by 128 keys, over the device's SMs.
  const std::int64_t prefix_tiles = divide_up(query.common_prefix_len, 128);
  const std::int64_t sms = device_.sm_count;
  const std::int64_t cascade =
      divide_up(spec.num_heads * divide_up(query.num_tokens, 128), sms) * prefix_tiles;
  const std::int64_t each = divide_up(
      query.num_reqs * spec.num_kv_heads * divide_up(spec.group_size(), 128) * prefix_tiles, sms);
  return cascade < each;
}

AttentionMetadataPtr FlashBuilder::build_for_graph_capture(const CommonAttentionMetadata& common) {
  check_step(config(), common, 0);
  return plan(0, common, true);
}

AttentionMetadataPtr FlashBuilder::do_build(std::int64_t common_prefix_len,
                                            const CommonAttentionMetadata& common,
                                            bool /*fast_build*/) {
  const ContextGuard guard(config().device.index);
  return plan(common_prefix_len, common, is_capturing(config().stream));
}

void FlashBuilder::choose_kernel(ClassPlan& plan, const FlashMetadata& metadata, bool causal,
                                 const TileConfig& tile) {
  plan.variant =
      forward_variant(config().spec, causal, metadata.page_size, metadata.pages_per_block, tile);
  // A cascade's passes leave the sink to their merge.
  plan.variant.sinks &= metadata.passes.size() < 2;
  auto found = kernels_.find(plan.variant);
  if (found == kernels_.end()) {
    const Kernel& kernel = forward_kernel(plan.variant, metadata.device);
    const int blocks = max_active_blocks_per_sm(kernel.function, tile.threads(plan.variant.head),
                                                tile.shared_bytes(plan.variant.head));
    check(blocks > 0, "the tile of {} does not fit on {}", kernel.name, device_.name);
    const ReadyKernel ready{&kernel, blocks * device_.sm_count};
    found = kernels_.emplace(plan.variant, ready).first;
  }
  plan.kernel = found->second.kernel;
  plan.capacity = found->second.capacity;
}

TileConfig FlashBuilder::few_rows_tile(const HeadShape& head,
                                       const CommonAttentionMetadata& common) const {
  return decode_tile(head, config().batch_invariant ? 1 : common.max_query_len, device_);
}

TileConfig FlashBuilder::many_rows_tile(const HeadShape& head,
                                        const CommonAttentionMetadata& common) const {
  constexpr std::int64_t kAnyLength = std::int64_t{1} << 30;
  return prefill_tile(head, config().batch_invariant ? kAnyLength : common.max_query_len,
                      config().flash_attn_version, device_);
}

std::array<bool, 2> FlashBuilder::classes_of(const FlashMetadata& metadata, const Pass& pass,
                                             std::int64_t rows_max, bool for_capture) const {
  const CommonAttentionMetadata& common = metadata.common();
  const std::int64_t group = config().spec.group_size();
  if (pass.shared_table) {  // One request with all rows.
    const bool few = common.num_actual_tokens * group <= rows_max;
    return {few, !few};
  }
  if (common.max_query_len * group <= rows_max) {
    return {true, false};
  }
  if (for_capture || common.query_start_loc_host.empty()) {
    return {true, true};
  }
  std::array<bool, 2> found{false, true};
  const auto* starts = common.query_start_loc_host.as<const std::int32_t>();
  for (std::int64_t r = 0; r < common.num_reqs; ++r) {
    const std::int64_t rows = (starts[r + 1] - starts[r]) * group;
    found[0] |= rows > 0 && rows <= rows_max;
  }
  return found;
}

/// Buffers large enough for any lengths that these bounds allow.
ClassPlan FlashBuilder::plan_class(const FlashMetadata& metadata, const Pass& pass, int number,
                                   bool alone) {
  const CommonAttentionMetadata& common = metadata.common();
  const AttentionSpec& spec = config().spec;
  const HeadShape head = head_shape(spec, metadata.page_size);
  ClassPlan result;
  result.active = true;
  const TileConfig tile = number == 0 ? few_rows_tile(head, common) : many_rows_tile(head, common);
  choose_kernel(result, metadata, pass.causal, tile);

  const std::int64_t rows = common.num_actual_tokens * spec.group_size();
  // Rows that no request owns count as one more request; so does, in a cascade's prefix, the batch.
  const std::int64_t requests = (pass.shared_table ? 1 : common.num_reqs) + 1;
  // In the class of few rows a request has one tile, unless the class is alone.
  const std::int64_t tiles = number == 0 && !alone ? requests : requests + rows / tile.block_m();
  const std::int64_t parts = divide_up(static_cast<std::int64_t>(result.capacity) *
                                           kWaves[static_cast<std::size_t>(number)],
                                       spec.num_kv_heads) +
                             2;
  std::int64_t items = tiles;
  std::int64_t slots = 0;
  if (config().num_splits > 1) {
    items = tiles * config().num_splits;
    slots = items;
  } else if (config().num_splits == 0 && !config().batch_invariant) {
    // A tile is cut when it is longer than the share of a part, and there are only so many shares.
    items = tiles + parts;
    slots = 2 * parts;
  }
  check(items <= std::numeric_limits<int>::max(), "num_actual_tokens is {}, too many for one step",
        common.num_actual_tokens);
  result.max_items = static_cast<int>(items);
  result.max_slots = static_cast<int>(slots);
  return result;
}

AttentionMetadataPtr FlashBuilder::plan(std::int64_t common_prefix_len,
                                        const CommonAttentionMetadata& common, bool for_capture) {
  // Two passes and their merge would make a row depend on what it shares a prefix with.
  const std::int64_t prefix = config().batch_invariant ? 0 : common_prefix_len;
  const AttentionSpec& spec = config().spec;
  const int device = config().device.index;
  if (!common.cp_local_seq_lens.empty()) {
    fail(ErrorCode::unsupported,
         "cp_local_seq_lens is given, {} does not serve context parallelism", kName);
  }
  auto metadata = std::make_shared<FlashMetadata>(config(), common, common_prefix_len);
  if (!common.block_table.empty()) {
    metadata->page_size = static_cast<int>(kernel_block_size(config()));
    metadata->pages_per_block = static_cast<int>(config().block_size / kernel_block_size(config()));
  }
  if (common.num_actual_tokens == 0) {
    return metadata;
  }
  const ContextGuard guard(device);
  if (prefix > 0) {
    metadata->passes.push_back({.causal = false, .shared_table = true});
  }
  metadata->passes.push_back({.causal = common.causal, .key_begin = static_cast<int>(prefix)});

  const PlanId id{.query_start_loc = common.query_start_loc.data(),
                  .seq_lens = common.seq_lens.data(),
                  .num_reqs = common.num_reqs,
                  .num_tokens = common.num_actual_tokens,
                  .max_query_len = common.max_query_len,
                  .prefix = prefix,
                  .causal = common.causal,
                  .page_size = metadata->page_size};
  PlanSlot& slot = plans_[id];
  // A graph that was captured reads this plan too: classes and offsets must be what they were then.
  slot.captured |= for_capture;

  std::int64_t plan_bytes = 0;
  std::array<std::array<PlanOffsets, 2>, 2> offsets{};
  for (std::size_t pass = 0; pass < metadata->passes.size(); ++pass) {
    Pass& p = metadata->passes[pass];
    const HeadShape head = head_shape(spec, metadata->page_size);
    const std::int64_t few_rows = few_rows_tile(head, common).block_m();
    const std::array<bool, 2> found = classes_of(*metadata, p, few_rows, slot.captured);
    p.rows_max = !found[0]   ? 0
                 : !found[1] ? std::numeric_limits<int>::max()
                             : static_cast<int>(few_rows);
    for (std::size_t n = 0; n < 2; ++n) {
      ClassPlan& c = p.classes[n];
      if (found[n]) {
        c = plan_class(*metadata, p, static_cast<int>(n), !found[1 - n]);
      }
      offsets[pass][n] = {
          .counts = take(plan_bytes, sizeof(PlanCounts)),
          .items = take(plan_bytes, c.max_items * static_cast<std::int64_t>(sizeof(WorkItem))),
          .counters = take(plan_bytes, c.max_slots / 2 * spec.num_kv_heads *
                                           static_cast<std::int64_t>(sizeof(unsigned)))};
      const std::int64_t partial_rows =
          static_cast<std::int64_t>(c.max_slots) * spec.num_kv_heads * c.variant.tile.block_m();
      c.partial_output = take(metadata->workspace_size, partial_rows * spec.value_head_size() * 4);
      c.partial_lse = take(metadata->workspace_size, partial_rows * 4);
    }
    if (prefix > 0) {
      const std::int64_t rows = common.num_actual_tokens * spec.num_heads;
      p.output = take(metadata->workspace_size,
                      rows * spec.value_head_size() * size_of(output_dtype(spec)));
      p.lse = take(metadata->workspace_size, rows * 4);
    }
  }
  metadata->plan = plan_buffer(slot, plan_bytes);
  if (metadata->workspace_size > 0) {
    metadata->workspace = workspace(metadata->workspace_size);
  }

  auto* memory = metadata->plan->as<unsigned char>();
  for (std::size_t pass = 0; pass < metadata->passes.size(); ++pass) {
    Pass& p = metadata->passes[pass];
    PlanParams params{};
    params.query_start_loc = common.query_start_loc.as<const int>();
    params.seq_lens = common.seq_lens.as<const int>();
    params.num_requests = static_cast<int>(common.num_reqs);
    params.num_rows = static_cast<int>(common.num_actual_tokens);
    params.group = static_cast<int>(spec.group_size());
    params.rows_max = p.rows_max;
    params.num_kv_heads = static_cast<int>(spec.num_kv_heads);
    params.window_left = p.shared_table ? -1 : window_bound(spec.window.left);
    params.window_right = p.causal ? 0 : (p.shared_table ? -1 : window_bound(spec.window.right));
    params.key_begin = p.key_begin;
    params.kv_token_bytes =
        static_cast<int>((spec.head_size + spec.value_head_size()) * size_of(spec.cache_dtype()));
    params.one_sequence = p.shared_table ? static_cast<int>(prefix) : 0;
    for (std::size_t n = 0; n < 2; ++n) {
      ClassPlan& c = p.classes[n];
      const PlanOffsets& at = offsets[pass][n];
      auto* counts = reinterpret_cast<PlanCounts*>(memory + at.counts);
      auto* items = reinterpret_cast<WorkItem*>(memory + at.items);
      auto* counters = reinterpret_cast<unsigned*>(memory + at.counters);
      params.classes[n] = {
          .counts = counts,
          .items = items,
          .counters = counters,
          .block_rows = c.variant.tile.block_m(),
          .block_keys = c.variant.tile.block_n,
          .capacity = c.capacity,
          .waves = kWaves[n],
          .good_tiles = static_cast<int>(divide_up(kGoodSplitKeys[n], c.variant.tile.block_n)),
          .min_tiles = static_cast<int>(divide_up(kMinSplitKeys[n], c.variant.tile.block_n)),
          .forced_splits = config().batch_invariant ? 1 : static_cast<int>(config().num_splits),
          .max_items = c.max_items,
          .max_slots = c.max_slots};
      c.counts = counts;
      c.items = items;
      c.counters = counters;
    }
    launch(plan_kernel(device),
           {.grid = {1, 1, 1}, .block = {1024, 1, 1}, .stream = config().stream}, params);
  }
  return metadata;
}

std::shared_ptr<DeviceBuffer> FlashBuilder::plan_buffer(PlanSlot& slot, std::int64_t bytes) {
  const auto large_enough = [&](const std::shared_ptr<DeviceBuffer>& buffer) {
    return buffer && buffer->bytes() >= static_cast<std::size_t>(bytes);
  };
  if (!large_enough(slot.buffer)) {
    // One that no metadata uses any more, of inputs that were never captured.
    for (auto other = plans_.begin(); other != plans_.end(); ++other) {
      PlanSlot& candidate = other->second;
      if (&candidate != &slot && !candidate.captured && large_enough(candidate.buffer) &&
          candidate.buffer.use_count() == 1) {
        slot.buffer = std::move(candidate.buffer);
        plans_.erase(other);
        return slot.buffer;
      }
    }
    std::erase_if(plans_, [&](const auto& entry) {
      return &entry.second != &slot && !entry.second.captured &&
             entry.second.buffer.use_count() <= 1;
    });
    const RelaxedCaptureScope relaxed;
    slot.buffer = std::make_shared<DeviceBuffer>(config().device.index,
                                                 static_cast<std::size_t>(bytes + bytes / 2));
  }
  return slot.buffer;
}

std::shared_ptr<DeviceBuffer> FlashBuilder::workspace(std::int64_t bytes) {
  if (workspaces_.empty() || workspaces_.back()->bytes() < static_cast<std::size_t>(bytes)) {
    const RelaxedCaptureScope relaxed;
    workspaces_.push_back(
        std::make_shared<DeviceBuffer>(config().device.index, static_cast<std::size_t>(bytes)));
  }
  return workspaces_.back();
}

}  // namespace foveal::cuda::flash_attn
