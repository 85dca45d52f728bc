#pragma once

// What the host hands to the kernels of FLASH_ATTN. Included by both sides: built-in types only.
namespace foveal::cuda::flash_attn {

/// A tensor as kernels take it: element strides, the head dimension contiguous.
struct RowsView {
  void* data;
  long long row_stride;
  long long head_stride;
};

/// Paged keys or values: strides of any size and order, in bytes, as addresses are computed with
/// little else to do. Plain ones (no block table) leave block_bytes unused.
struct CacheView {
  const void* data;
  long long block_bytes;
  long long token_bytes;
  long long head_bytes;
};

/// One tile of query rows against a range of keys, for every KV head. Rows are the query rows of a
/// request times the heads of a group: row i is head i % group of query row i / group.
struct WorkItem {
  int request;
  int query_start;  ///< Of the request, in the batch's rows.
  int query_len;
  int seq_len;
  int first_row;
  int tile_begin;  ///< Tiles of keys, counted from the request's first key.
  int tile_end;
  int slot;        ///< Of the partial result, or −1: has all keys and writes the output itself.
  int first_slot;  ///< The tile's parts stand in consecutive slots…
  int num_slots;
  int counter;  ///< …and count those done here: number of a row of counters, one a KV head.
  int padding;
};

/// What the planner decides beside the items.
struct PlanCounts {
  int items;
  // For kernels whose blocks take work until none is left (sm90_forward.cu):
  unsigned next_work;  ///< Number of the next item; 0 between launches.
  int section_heads;   ///< KV heads whose items are taken together…
  int tail_heads;      ///< …and in the last section.
};

struct ForwardParams {
  RowsView query;
  RowsView output;
  CacheView key;
  CacheView value;
  float* lse;  ///< May be null.
  long long lse_head_stride;
  long long lse_row_stride;
  const int* block_table;
  long long table_stride;
  const int* key_start_loc;  ///< Plain keys: where each request's begin.
  PlanCounts* counts;
  const WorkItem* items;
  unsigned* counters;     ///< [counter, num_kv_heads]; all 0 between launches.
  float* partial_output;  ///< [slot, num_kv_heads, tile rows, head_size_v]
  float* partial_lse;     ///< [slot, num_kv_heads, tile rows], base 2
  float scale;            ///< From a product of query and key to a score in base 2.
  float inverse_scale;
  float soft_cap;  ///< In base 2.
  float value_scale;
  int window_left;
  int window_right;  ///< 0 for causal.
  int key_begin;     ///< Keys before are left to another pass (cascade).
  int num_kv_heads;
};

/// Values of each query head, by number; a kernel without such a feature takes kHeads = 1.
template <int kHeads>
struct HeadValues {
  float alibi_slope[kHeads];  ///< In base 2.
  float sink[kHeads];         ///< In base 2.
};

/// How the planner cuts the requests of one class.
struct PlanClass {
  PlanCounts* counts;
  WorkItem* items;
  unsigned* counters;  ///< Of max_slots / 2 tiles: each that is split has two slots at least.
  int block_rows;      ///< Rows of a tile.
  int block_keys;      ///< Keys of a tile.
  int capacity;        ///< Blocks that run at a time, over the KV heads.
  int waves;           ///< The most work items each of them should get…
  int good_tiles;      ///< …when they have at least so many key tiles…
  int min_tiles;       ///< …and the fewest key tiles of a split in any case.
  int forced_splits;   ///< 0: as the planner decides.
  int max_items;
  int max_slots;
};

struct PlanParams {
  const int* query_start_loc;
  const int* seq_lens;
  int num_requests;
  int num_rows;  ///< Of the batch, those that no request owns included.
  int group;
  int rows_max;  ///< Requests with at most so many rows belong to the first class.
  int num_kv_heads;
  int window_left;   ///< −1: unlimited.
  int window_right;  ///< 0 for causal, −1: unlimited.
  int key_begin;     ///< Keys before are left to another pass (cascade).
  int one_sequence;  ///< All rows as one request with this many keys (the prefix of a cascade); 0:
                     ///< no.
  int kv_token_bytes;    ///< Of keys and values of one head.
  PlanClass classes[2];  ///< Few rows (decode), and the rest.
};

}  // namespace foveal::cuda::flash_attn
