#include "cpu/plan.h"

namespace foveal::cpu {
namespace {

/// A split that is shorter than this costs more to merge than it saves.
constexpr std::int64_t kMinTilesPerSplit = 4;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Relative time of an item. Loading keys and values costs as much as about 16 rows of arithmetic.
std::int64_t cost(const WorkItem& item) { return item.keys.tiles() * (item.num_rows + 16); }

/// Calls emit(first row, rows) for each item of packed rows.
template <typename Emit>
void for_each_item(std::int64_t num_rows, std::int64_t item_rows, const Emit& emit) {
  for (std::int64_t row = 0; row < num_rows; row += item_rows) {
    emit(row, std::min(item_rows, num_rows - row));
  }
}

/// Rows an item has at most: as many as leave each thread some items to balance the load with.
std::int64_t rows_per_item(const PlanInput& input) {
  constexpr std::int64_t kItemsPerThread = 4;
  std::int64_t rows = input.max_item_rows;
  for (; rows > kBlockRows; rows -= kBlockRows) {
    std::int64_t items = 0;
    for (std::size_t r = 0; r < input.seq_lens.size(); ++r) {
      const std::int64_t query_len = input.query_start_loc[r + 1] - input.query_start_loc[r];
      items += ceil_div(query_len * input.group_size, rows);
    }
    if (items * input.num_kv_heads >= kItemsPerThread * input.num_threads) {
      break;
    }
  }
  return rows;
}

/// The keys that at least one of the rows sees: both ends of a row's range grow with its position.
KeyRange visible_to_any(const PlanInput& input, const WorkItem& item) {
  const std::int64_t first = item.first_row / input.group_size;
  const std::int64_t last = (item.first_row + item.num_rows - 1) / input.group_size;
  const std::int64_t begin = input.mask.visible(item.seq_len, item.first_position + first).begin;
  const std::int64_t end = input.mask.visible(item.seq_len, item.first_position + last).end;
  return {std::max(begin, input.common_prefix_len), end};
}

std::vector<WorkItem> request_tiles(const PlanInput& input, std::int64_t item_rows) {
  std::vector<WorkItem> tiles;
  for (std::size_t r = 0; r < input.seq_lens.size(); ++r) {
    const std::int64_t start = input.query_start_loc[r];
    const std::int64_t query_len = input.query_start_loc[r + 1] - start;
    for_each_item(query_len * input.group_size, item_rows,
                  [&](std::int64_t row, std::int64_t rows) {
                    WorkItem item{.request = static_cast<std::int64_t>(r),
                                  .first_token = start,
                                  .first_row = row,
                                  .num_rows = rows,
                                  .keys = {},
                                  .first_position = input.seq_lens[r] - query_len,
                                  .seq_len = input.seq_lens[r]};
                    item.keys = visible_to_any(input, item);
                    tiles.push_back(item);
                  });
  }
  return tiles;
}

/// The shared prefix, for the rows of all requests as if they were one (no row is masked in it).
std::vector<WorkItem> prefix_tiles(const PlanInput& input, std::int64_t item_rows) {
  std::vector<WorkItem> tiles;
  if (input.common_prefix_len == 0 || input.query_start_loc.back() == 0) {
    return tiles;
  }
  // The table's row of a request without queries may be padding.
  std::int64_t request = 0;
  while (input.query_start_loc[static_cast<std::size_t>(request) + 1] == 0) {
    ++request;
  }
  for_each_item(input.query_start_loc.back() * input.group_size, item_rows,
                [&](std::int64_t row, std::int64_t rows) {
                  tiles.push_back({.request = request,
                                   .first_token = 0,
                                   .first_row = row,
                                   .num_rows = rows,
                                   .keys = {0, input.common_prefix_len},
                                   .first_position = 0,
                                   .seq_len = input.common_prefix_len,
                                   .unmasked = true});
                });
  return tiles;
}

/// The work above which an item is cut: a thread's equal share of the step.
std::int64_t fair_share(const PlanInput& input, const std::vector<WorkItem>& prefix,
                        const std::vector<WorkItem>& tiles) {
  std::int64_t total = 0;
  for (const std::vector<WorkItem>* items : {&prefix, &tiles}) {
    for (const WorkItem& item : *items) {
      total += cost(item);
    }
  }
  return std::max<std::int64_t>(1, ceil_div(total * input.num_kv_heads, input.num_threads));
}

std::int64_t split_count(const PlanInput& input, const WorkItem& item, std::int64_t share) {
  const std::int64_t tiles = item.keys.tiles();
  if (input.num_splits > 0) {
    return std::clamp<std::int64_t>(input.num_splits, 1, std::max<std::int64_t>(tiles, 1));
  }
  const std::int64_t wanted = ceil_div(cost(item), share);
  return std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(tiles / kMinTilesPerSplit, 1));
}

/// Part `index` of `count` of the keys, cut between tiles.
KeyRange split_keys(const KeyRange& keys, std::int64_t index, std::int64_t count) {
  const std::int64_t first_tile = keys.begin / kTileKeys;
  const auto bound = [&](std::int64_t i) {
    return (first_tile + i * keys.tiles() / count) * kTileKeys;
  };
  return {std::max(keys.begin, bound(index)), std::min(keys.end, bound(index + 1))};
}

/// The end of the items from `first` on that are of the same request.
std::size_t end_of_request(const std::vector<WorkItem>& items, std::size_t first) {
  std::size_t end = first;
  while (end < items.size() && items[end].request == items[first].request) {
    ++end;
  }
  return end;
}

/// See Plan::tasks.
void order_items(std::vector<WorkItem>& items) {
  const auto longer = [](const WorkItem& a, const WorkItem& b) { return cost(a) > cost(b); };
  std::vector<std::span<const WorkItem>> requests;
  for (std::size_t first = 0; first < items.size();) {
    const std::size_t end = end_of_request(items, first);
    std::stable_sort(items.begin() + first, items.begin() + end, longer);
    requests.push_back({items.data() + first, end - first});
    first = end;
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [&](const auto& a, const auto& b) { return longer(a.front(), b.front()); });
  std::vector<WorkItem> ordered;
  ordered.reserve(items.size());
  for (const std::span<const WorkItem> request : requests) {
    ordered.insert(ordered.end(), request.begin(), request.end());
  }
  items.swap(ordered);
}

std::vector<Task> tasks_of(const std::vector<WorkItem>& items, std::int64_t num_kv_heads) {
  std::vector<Task> tasks;
  tasks.reserve(items.size() * static_cast<std::size_t>(num_kv_heads));
  for (std::size_t first = 0; first < items.size();) {
    const std::size_t end = end_of_request(items, first);
    for (std::int64_t head = 0; head < num_kv_heads; ++head) {
      for (std::size_t item = first; item < end; ++item) {
        tasks.push_back({static_cast<std::int32_t>(item), static_cast<std::int32_t>(head)});
      }
    }
    first = end;
  }
  return tasks;
}

}  // namespace

Plan make_plan(const PlanInput& input) {
  Plan plan;
  const std::int64_t item_rows = rows_per_item(input);
  const std::vector<WorkItem> prefix = prefix_tiles(input, item_rows);
  const std::vector<WorkItem> tiles = request_tiles(input, item_rows);
  const std::int64_t share = fair_share(input, prefix, tiles);

  // All tiles of the prefix are split alike; the partial of packed row i of the step lies at i.
  std::vector<std::int64_t> prefix_parts;
  if (!prefix.empty()) {
    const std::int64_t splits = split_count(input, prefix.front(), share);
    for (std::int64_t s = 0; s < splits; ++s) {
      prefix_parts.push_back(plan.partial_rows);
      for (WorkItem item : prefix) {
        item.keys = split_keys(item.keys, s, splits);
        item.partial_row = plan.partial_rows + item.first_row;
        plan.items.push_back(item);
      }
      plan.partial_rows += input.query_start_loc.back() * input.group_size;
    }
  }

  for (const WorkItem& tile : tiles) {
    const std::int64_t splits = split_count(input, tile, share);
    if (splits == 1 && prefix_parts.empty()) {
      plan.items.push_back(tile);
      continue;
    }
    plan.merges.push_back({.first_token = tile.first_token,
                           .first_row = tile.first_row,
                           .num_rows = tile.num_rows,
                           .first_part = static_cast<std::int64_t>(plan.parts.size()),
                           .num_parts = static_cast<std::int64_t>(prefix_parts.size()) + splits});
    for (const std::int64_t part : prefix_parts) {
      plan.parts.push_back(part + tile.first_token * input.group_size + tile.first_row);
    }
    for (std::int64_t s = 0; s < splits; ++s) {
      WorkItem item = tile;
      if (splits > 1) {
        item.keys = split_keys(tile.keys, s, splits);
      }
      item.partial_row = plan.partial_rows;
      plan.parts.push_back(plan.partial_rows);
      plan.partial_rows += tile.num_rows;
      plan.items.push_back(item);
    }
  }
  order_items(plan.items);
  plan.tasks = tasks_of(plan.items, input.num_kv_heads);
  for (const WorkItem& item : plan.items) {
    plan.max_rows = std::max(plan.max_rows, item.num_rows);
  }
  return plan;
}

}  // namespace foveal::cpu
