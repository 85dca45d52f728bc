#include "core/metadata_checks.h"

#include <algorithm>
#include <limits>
#include <span>

#include "core/check.h"
#include "core/tensor_checks.h"

namespace foveal {
namespace {

/// The values of an i32 vector where the host can read them: from the tensor itself or from its
/// host copy; else empty.
std::span<const std::int32_t> host_values(const TensorView& tensor, const TensorView& host_copy) {
  for (const TensorView* view : {&tensor, &host_copy}) {
    if (!view->empty() && view->device().type == DeviceType::cpu) {
      return {view->as<const std::int32_t>(), static_cast<std::size_t>(view->size(0))};
    }
  }
  return {};
}

void check_vector(std::string_view name, const TensorView& tensor, std::int64_t size,
                  std::string_view form, Device device) {
  check_tensor(name, tensor, DType::i32, device, {size}, form);
  check(size <= 1 || tensor.stride(0) == 1, "{} has stride {}, it must be contiguous", name,
        tensor.stride(0));
}

void check_starts(std::string_view name, std::span<const std::int32_t> starts) {
  check(starts.front() == 0, "{}[0] is {}, it must be 0", name, starts.front());
  for (std::size_t i = 1; i < starts.size(); ++i) {
    check(starts[i] >= starts[i - 1], "{} decreases from {} to {} at index {}, it must not", name,
          starts[i - 1], starts[i], i);
  }
}

void check_query_lens(const CommonAttentionMetadata& common, std::span<const std::int32_t> starts) {
  check_starts("query_start_loc", starts);
  check(starts.back() <= common.num_actual_tokens,
        "query_start_loc ends at {}, it may end at num_actual_tokens = {} at most", starts.back(),
        common.num_actual_tokens);
  for (std::size_t r = 0; r + 1 < starts.size(); ++r) {
    check(starts[r + 1] - starts[r] <= common.max_query_len,
          "max_query_len is {}, it must be at least the {} queries of request {}",
          common.max_query_len, starts[r + 1] - starts[r], r);
  }
}

void check_seq_lens(const CommonAttentionMetadata& common, std::span<const std::int32_t> lens) {
  for (std::size_t r = 0; r < lens.size(); ++r) {
    check(lens[r] >= 0, "seq_lens[{}] is {}, it must be >= 0", r, lens[r]);
    check(lens[r] <= common.max_seq_len, "max_seq_len is {}, it must be at least seq_lens[{}] = {}",
          common.max_seq_len, r, lens[r]);
  }
}

void check_block_table(const BuilderConfig& config, const CommonAttentionMetadata& common,
                       std::span<const std::int32_t> lens) {
  const TensorView& table = common.block_table;
  check_tensor("block_table", table, DType::i32, config.device, {common.num_reqs, -1},
               "[num_reqs, max_blocks]");
  check_last_contiguous("block_table", table);
  const bool visible = table.device().type == DeviceType::cpu;
  const auto last_block = static_cast<std::uint32_t>(config.num_blocks - 1);
  for (std::size_t r = 0; r < lens.size(); ++r) {
    const std::int64_t needed = (lens[r] + config.block_size - 1) / config.block_size;
    check(needed <= table.size(1),
          "block_table has {} columns, request {} with seq_len {} needs {} blocks of {} tokens",
          table.size(1), r, lens[r], needed, config.block_size);
    if (!visible) {
      continue;
    }
    const std::int32_t* row =
        table.as<const std::int32_t>() + static_cast<std::int64_t>(r) * table.stride(0);
    // One pass that the compiler vectorises, and a second one only to name the culprit. The sign
    // bit of `outside` is set if an id is negative, or exceeds the last one: no branches, and
    // nothing that the oldest vector instructions lack.
    std::uint32_t outside = 0;
    for (std::int64_t i = 0; i < needed; ++i) {
      const auto id = static_cast<std::uint32_t>(row[i]);
      outside |= id | (last_block - id);
    }
    if (outside >> 31 != 0) {
      const std::int32_t* bad = std::find_if(
          row, row + needed, [&](std::int32_t id) { return id < 0 || id >= config.num_blocks; });
      check(bad == row + needed,
            "block_table[{}][{}] names block {}, it must be in [0, num_blocks = {})", r, bad - row,
            *bad, config.num_blocks);
    }
  }
}

void check_plain_keys(const BuilderConfig& config, const CommonAttentionMetadata& common,
                      std::span<const std::int32_t> query_starts,
                      std::span<const std::int32_t> lens) {
  std::string_view name = "query_start_loc";
  std::span<const std::int32_t> starts = query_starts;
  if (!common.key_start_loc.empty()) {
    name = "key_start_loc";
    check_vector(name, common.key_start_loc, common.num_reqs + 1, "[num_reqs + 1]", config.device);
    starts = host_values(common.key_start_loc, {});
    if (!starts.empty()) {
      check_starts(name, starts);
    }
  }
  for (std::size_t r = 0; r < lens.size() && r + 1 < starts.size(); ++r) {
    check(lens[r] <= starts[r + 1] - starts[r],
          "seq_lens[{}] is {}, it may be at most the {} keys that {} gives request {} (keys and "
          "values are plain: there is "
          "no block_table)",
          r, lens[r], starts[r + 1] - starts[r], name, r);
  }
}

void check_prefix(const BuilderConfig& config, const CommonAttentionMetadata& common,
                  std::int64_t prefix, std::span<const std::int32_t> starts,
                  std::span<const std::int32_t> lens) {
  const AttentionSpec& spec = config.spec;
  check(prefix >= 0, "common_prefix_len is {}, it must be >= 0", prefix);
  if (prefix == 0) {
    return;
  }
  check(prefix % config.block_size == 0,
        "common_prefix_len is {}, it must be a multiple of the block size {}", prefix,
        config.block_size);
  check(!common.block_table.empty(),
        "common_prefix_len is {}, cascade attention needs a block_table", prefix);
  check(prefix / config.block_size <= common.block_table.size(1),
        "common_prefix_len is {}, the {} columns of block_table hold less", prefix,
        common.block_table.size(1));
  check(spec.window.unlimited() && spec.alibi_slopes.empty() && !spec.score_mod && !spec.mask_mod &&
            spec.attn_type == AttnType::decoder && !spec.mla,
        "common_prefix_len is {}, it must be 0 for layers with a window, ALiBi, a custom score or "
        "mask, MLA or that are not "
        "decoders: their prefix is not the same for all rows",
        prefix);
  for (std::size_t r = 0; r < lens.size() && r + 1 < starts.size(); ++r) {
    const std::int32_t queries = starts[r + 1] - starts[r];
    check(queries == 0 || prefix <= lens[r] - queries,
          "common_prefix_len is {}, it may be at most the context of every request; request {} has "
          "{}",
          prefix, r, lens[r] - queries);
  }
  if (common.block_table.device().type != DeviceType::cpu || common.num_reqs == 0) {
    return;
  }
  const std::int32_t* first = nullptr;
  for (std::int64_t r = 0; r < common.num_reqs; ++r) {
    if (static_cast<std::size_t>(r) + 1 < starts.size() &&
        starts[static_cast<std::size_t>(r) + 1] == starts[static_cast<std::size_t>(r)]) {
      continue;
    }
    const std::int32_t* row =
        common.block_table.as<const std::int32_t>() + r * common.block_table.stride(0);
    if (first == nullptr) {
      first = row;
    }
    check(
        std::equal(first, first + prefix / config.block_size, row),
        "common_prefix_len is {}, but request {} names other blocks for it than the first request",
        prefix, r);
  }
}

}  // namespace

std::int64_t kernel_block_size(const BuilderConfig& config) {
  return config.kernel_block_size == 0 ? config.block_size : config.kernel_block_size;
}

void check_builder_config(const BuilderConfig& config) {
  config.spec.validate();
  constexpr std::int64_t kMaxBlockSize = std::int64_t{1} << 31;
  check(config.block_size > 0 && config.block_size <= kMaxBlockSize,
        "BuilderConfig: block_size is {}, it must be in [1, {}]", config.block_size, kMaxBlockSize);
  check(config.kernel_block_size >= 0 && config.block_size % kernel_block_size(config) == 0,
        "BuilderConfig: kernel_block_size is {}, it must divide block_size = {}, or be 0 for the "
        "same",
        config.kernel_block_size, config.block_size);
  constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
  check(config.num_blocks >= 0 && config.num_blocks <= kMaxBlocks,
        "BuilderConfig: num_blocks is {}, it must be in [0, {}], as block ids are int32",
        config.num_blocks, kMaxBlocks);
  check(config.num_splits >= 0,
        "BuilderConfig: num_splits is {}, it must be >= 1, or 0 for automatic", config.num_splits);
  check(config.num_threads >= 0,
        "BuilderConfig: num_threads is {}, it must be >= 1, or 0 for the default pool's",
        config.num_threads);
  check(config.flash_attn_version == 0 || config.flash_attn_version == 2 ||
            config.flash_attn_version == 3,
        "BuilderConfig: flash_attn_version is {}, it must be 2, 3, or 0 for automatic",
        config.flash_attn_version);
  check(!config.batch_invariant || config.num_splits <= 1,
        "BuilderConfig: num_splits is {}, it must be 0 or 1 where batch_invariant is set",
        config.num_splits);
}

void check_step(const BuilderConfig& config, const CommonAttentionMetadata& common,
                std::int64_t common_prefix_len) {
  const AttentionSpec& spec = config.spec;
  check(common.num_reqs >= 0, "num_reqs is {}, it must be >= 0", common.num_reqs);
  check(common.num_actual_tokens >= 0, "num_actual_tokens is {}, it must be >= 0",
        common.num_actual_tokens);
  check(spec.attn_type == AttnType::decoder || !common.causal,
        "causal is true, it must be false for attn_type {}", to_string(spec.attn_type));
  check(spec.uses_cache() || common.block_table.empty(),
        "block_table is given, attn_type {} has no cache: its keys and values are plain",
        to_string(spec.attn_type));
  check_vector("query_start_loc", common.query_start_loc, common.num_reqs + 1, "[num_reqs + 1]",
               config.device);
  check_vector("seq_lens", common.seq_lens, common.num_reqs, "[num_reqs]", config.device);
  if (!common.query_start_loc_host.empty()) {
    check_vector("query_start_loc_host", common.query_start_loc_host, common.num_reqs + 1,
                 "[num_reqs + 1]", {});
  }
  if (!common.seq_lens_host.empty()) {
    check_vector("seq_lens_host", common.seq_lens_host, common.num_reqs, "[num_reqs]", {});
  }
  const auto starts = host_values(common.query_start_loc, common.query_start_loc_host);
  if (!starts.empty()) {
    check_query_lens(common, starts);
  }
  const auto lens = host_values(common.seq_lens, common.seq_lens_host);
  check_seq_lens(common, lens);
  if (common.block_table.empty()) {
    check_plain_keys(config, common, starts, lens);
  } else {
    check(common.key_start_loc.empty(),
          "key_start_loc is given beside a block_table; it belongs to plain keys and values");
    check_block_table(config, common, lens);
  }
  if (!common.slot_mapping.empty()) {
    check_slot_mapping(common.slot_mapping, common.num_actual_tokens,
                       config.num_blocks * config.block_size, config.device);
  }
  check(common.cp_local_seq_lens.empty(),
        "cp_local_seq_lens is given, no backend gathers over ranks: pass the local lengths as "
        "seq_lens, and merge the ranks' parts by their lse");
  check_prefix(config, common, common_prefix_len, starts, lens);
}

}  // namespace foveal
