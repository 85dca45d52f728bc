#include "cpu/plan.h"

#include <numeric>

namespace foveal::cpu {
namespace {

/// A split that is shorter than this costs more to merge than it saves.
constexpr std::int64_t kMinTilesPerSplit = 4;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Loading a key and its value costs as much as multiplying so many rows with them.
constexpr std::int64_t kLoadRows = 16;
/// Products and sums that a core does while it moves a byte to or from memory.
constexpr std::int64_t kFlopsPerByte = 13;

/// Relative time of an item.
std::int64_t cost(const WorkItem& item) { return item.keys.tiles() * (item.num_rows + kLoadRows); }

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
  // The rows of a shared prefix are those of all requests.
  std::int64_t longest = input.common_prefix_len > 0 ? input.query_start_loc.back() : 0;
  for (std::size_t r = 0; r < input.seq_lens.size(); ++r) {
    longest =
        std::max<std::int64_t>(longest, input.query_start_loc[r + 1] - input.query_start_loc[r]);
  }
  std::int64_t rows =
      std::min(input.max_item_rows, ceil_div(longest * input.group_size, kBlockRows) * kBlockRows);
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
  return std::max(rows, kBlockRows);
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
  tiles.reserve(input.seq_lens.size());
  for (std::size_t r = 0; r < input.seq_lens.size(); ++r) {
    const std::int64_t start = input.query_start_loc[r];
    const std::int64_t query_len = input.query_start_loc[r + 1] - start;
    for_each_item(query_len * input.group_size, item_rows,
                  [&](std::int64_t row, std::int64_t rows) {
                    WorkItem& item = tiles.emplace_back();  // A copy would wait for its stores.
                    item.request = static_cast<std::int64_t>(r);
                    item.first_token = start;
                    item.first_row = row;
                    item.num_rows = rows;
                    item.first_position = input.seq_lens[r] - query_len;
                    item.seq_len = input.seq_lens[r];
                    item.keys = visible_to_any(input, item);
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
  if (cost(item) <= share) {
    return 1;
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

/// See Plan::tasks.
std::vector<Task> tasks_of(const std::vector<WorkItem>& items, std::int64_t num_kv_heads) {
  struct Request {
    std::int64_t cost;  // Of its longest item.
    std::int32_t begin;
    std::int32_t end;
  };
  const auto num_items = static_cast<std::int32_t>(items.size());
  const auto item = [&](std::int32_t i) -> const WorkItem& {
    return items[static_cast<std::size_t>(i)];
  };
  std::vector<std::int32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<Request> requests;
  requests.reserve(items.size());
  for (std::int32_t begin = 0; begin < num_items;) {
    std::int32_t end = begin + 1;
    while (end < num_items && item(end).request == item(begin).request) {
      ++end;
    }
    if (end - begin > 1) {  // It would take memory for one, too.
      std::stable_sort(
          order.begin() + begin, order.begin() + end,
          [&](std::int32_t a, std::int32_t b) { return cost(item(a)) > cost(item(b)); });
    }
    requests.push_back({cost(item(order[static_cast<std::size_t>(begin)])), begin, end});
    begin = end;
  }
  std::sort(requests.begin(), requests.end(), [](const Request& a, const Request& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.begin < b.begin;
  });
  std::vector<Task> tasks(items.size() * static_cast<std::size_t>(num_kv_heads));
  auto task = tasks.begin();
  for (const Request& request : requests) {
    for (std::int32_t head = 0; head < num_kv_heads; ++head) {
      for (std::int32_t i = request.begin; i < request.end; ++i) {
        *task++ = {order[static_cast<std::size_t>(i)], head};
      }
    }
  }
  return tasks;
}

}  // namespace

bool cascade_pays(const CascadeInput& input) {
  const std::int64_t rows = input.num_tokens * input.group_size;
  const std::int64_t items_of_request =
      ceil_div(ceil_div(rows, input.num_reqs), input.max_item_rows);
  const std::int64_t loads_saved =
      input.num_reqs * items_of_request - ceil_div(rows, input.max_item_rows);
  const std::int64_t flops_of_row = 2 * (input.head_size + input.head_size_v);  // And a key.
  const std::int64_t saved = loads_saved * input.common_prefix_len * kLoadRows * flops_of_row;
  // Two float32 outputs a row, each of which is fetched to be written, written, and read.
  const std::int64_t merged_bytes = rows * 2 * 3 * 4 * input.head_size_v;
  return saved > merged_bytes * kFlopsPerByte;
}

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

  plan.items.reserve(plan.items.size() + tiles.size());
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
  plan.tasks = tasks_of(plan.items, input.num_kv_heads);
  for (const WorkItem& item : plan.items) {
    plan.max_rows = std::max(plan.max_rows, item.num_rows);
  }
  return plan;
}

}  // namespace foveal::cpu
