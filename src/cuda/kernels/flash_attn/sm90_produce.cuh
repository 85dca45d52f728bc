#pragma once

// The producers of sm90_forward.cu, a warp each.

#include "flash_attn/sm90_pipeline.cuh"
#include "ptx/convert.cuh"
#include "ptx/load.cuh"
#include "ptx/tma.cuh"

namespace flash_attn {

/// One lane's part of a tile: a box of tokens of one block of the cache.
struct Box {
  bool wanted;
  int row;  // In the block; plain: among all.
  int block;
};

__device__ __forceinline__ Box find_box(const Work& work, const int* table, int plain_start,
                                        int tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = tile * kBlockN + lane * kBox;
  Box box{lane < kBoxes && token < work.high && token + kBox > work.low, plain_start + token, 0};
  if constexpr (kPageSize > 0) {
    box.row = token % kPageTokens;
    if (box.wanted) {
      const int page = token / kPageTokens;
      box.block = kPagesPerBlock == 1
                      ? table[page]
                      : table[page / kPagesPerBlock] * kPagesPerBlock + page % kPagesPerBlock;
    }
  }
  return box;
}

/// One tile of keys or values, box by box.
template <int kTileChunks>
__device__ __forceinline__ void load_tile(const ptx::TensorMap& map, const Ring<kStages>& ring,
                                          Position<kStages>& at, unsigned tiles, const Box& box,
                                          int kv_head) {
  constexpr unsigned kBoxBytes = kBox * 128;
  constexpr unsigned kTileBytes = kTileChunks * kBlockN * 128;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned boxes = __popc(__ballot_sync(0xFFFFFFFFU, box.wanted));
  ring.wait_empty(at);
  const unsigned full = ring.full + at.stage() * 8;
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_bytes(full, boxes * kTileChunks * kBoxBytes);
  }
  __syncwarp();
  if (box.wanted) {
#pragma unroll
    for (int c = 0; c < kTileChunks; ++c) {
      ptx::tma_load(tiles + at.stage() * kTileBytes + c * kBlockN * 128 + lane * kBoxBytes, map,
                    full, c * (128 / static_cast<int>(sizeof(Cache))), kv_head, box.row, box.block);
    }
  }
  at.number += 1;
}

/// Where an item's keys are, as a producer looks for them.
struct KeySource {
  const int* table;
  int plain_start;

  __device__ __forceinline__ KeySource(const ForwardParams& p, const WorkItem& item) {
    table = nullptr;
    plain_start = 0;
    if constexpr (kPageSize > 0) {
      table = p.block_table + item.request * p.table_stride;
    } else {
      plain_start = p.key_start_loc[item.request];
    }
  }

  __device__ __forceinline__ Box box(const Work& work, int tile) const {
    return tile >= work.item.tile_begin ? find_box(work, table, plain_start, tile) : Box{};
  }
};

/// The first warp of producers decides what the block works on. An item is claimed shortly before
/// the one before it ends, so that the last ones are shared out evenly; see produce_keys.
__device__ __forceinline__ void schedule(const ForwardParams& p, unsigned shared, Work* works) {
  const Rings ring = rings(shared);
  const bool leader = threadIdx.x % 32 == 0;
  const unsigned items = p.counts->items;
  const unsigned total = items * p.num_kv_heads;
  for (Position<kWorkStages> work_at;; work_at.number += 1) {
    ring.work.wait_empty(work_at);
    if (work_at.number > 0) {
      ptx::mbarrier_wait(ring.leave, (work_at.number - 1) % 2);
    }
    const unsigned number = uniform(leader ? next_work(p, total) : 0);
    if (leader) {
      if (number < total) {
        works[work_at.stage()] = find_work(p, number, items);
      } else {
        works[work_at.stage()].kv_head = -1;
      }
      ptx::mbarrier_arrive(ring.work.full + work_at.stage() * 8);
    }
    if (number >= total) {
      return;
    }
  }
}

/// The second: queries and keys. Gives leave to claim the next item.
__device__ __forceinline__ void produce_keys(const ForwardParams& p,
                                             const ptx::TensorMap& query_map,
                                             const ptx::TensorMap& key_map, unsigned shared,
                                             const Work* works) {
  const Rings ring = rings(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Ring<kStages> keys = kWidenKeys ? ring.raw_keys : ring.keys;
  constexpr unsigned kKeys = kWidenKeys ? kLayout.raw_keys : kLayout.keys;
  Position<kQueryStages> query_at;
  Position<kStages> keys_at;
  for (Position<kWorkStages> work_at;; work_at.number += 1) {
    ring.work.wait_full(work_at);
    const Work& work = works[work_at.stage()];
    const int kv_head = work.kv_head;
    if (kv_head < 0) {
      return;
    }
    const WorkItem& item = work.item;
    const KeySource source(p, item);
    int tile = item.tile_end - 1;
    // Block numbers are looked up a tile ahead.
    Box box = source.box(work, tile);
    const auto load_next = [&] {
      const Box next = source.box(work, --tile);
      load_tile<kRawChunks>(key_map, keys, keys_at, shared + kKeys, box, kv_head);
      box = next;
    };
    load_next();
    ring.query.wait_empty(query_at);
    if (lane == 0) {
      const unsigned full = ring.query.full + query_at.stage() * 8;
      ptx::mbarrier_arrive_expect_bytes(full, kQueryChunks * kBlockM * 128);
#pragma unroll
      for (int c = 0; c < kQueryChunks; ++c) {
        ptx::tma_load(
            shared + kLayout.query + (query_at.stage() * kQueryChunks + c) * kBlockM * 128,
            query_map, full, c * (128 / static_cast<int>(sizeof(Query))), kv_head * kGroup,
            item.query_start + item.first_row / kGroup, 0);
      }
    }
    __syncwarp();
    query_at.number += 1;
    while (tile >= item.tile_begin + kClaimTiles) {
      load_next();
    }
    if (lane == 0) {
      ptx::mbarrier_arrive(ring.leave);
    }
    while (tile >= item.tile_begin) {
      load_next();
    }
    ring.work.release(work_at);
  }
}

/// The third: values.
__device__ __forceinline__ void produce_values(const ForwardParams& p,
                                               const ptx::TensorMap& value_map, unsigned shared,
                                               const Work* works) {
  const Rings ring = rings(shared);
  const Ring<kStages> values = kWidenValues ? ring.raw_values : ring.values;
  constexpr unsigned kValues = kWidenValues ? kLayout.raw_values : kLayout.values;
  Position<kStages> values_at;
  for (Position<kWorkStages> work_at;; work_at.number += 1) {
    ring.work.wait_full(work_at);
    const Work& work = works[work_at.stage()];
    const int kv_head = work.kv_head;
    if (kv_head < 0) {
      return;
    }
    const KeySource source(p, work.item);
    int tile = work.item.tile_end - 1;
    Box box = source.box(work, tile);
    while (tile >= work.item.tile_begin) {
      const Box next = source.box(work, --tile);
      load_tile<kRawChunksV>(value_map, values, values_at, shared + kValues, box, kv_head);
      box = next;
    }
    ring.work.release(work_at);
  }
}

/// One warp's part of widening a tile from fp8: 8 rows by 64 columns at a time, four of them under
/// way together. Which rows a lane has beside its neighbours keeps both sides free of bank
/// conflicts: rows r and r ^ 5 side by side.
template <typename To, typename From, int kTileChunks>
__device__ __forceinline__ void widen_tile(unsigned from, unsigned to, int warp) {
  constexpr int kRowGroups = kBlockN / 8;  // Which warps take in turns.
  constexpr int kUnits = (kRowGroups + kWideners - 1) / kWideners * kTileChunks;
  constexpr int kBatch = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = (lane / 8) ^ (lane / 4 % 2 * 5);  // Of 8.
  const int piece = lane % 4;                       // 16 bytes of the 64.
  const unsigned source = from + warp * 1024 + row * 128 + (piece ^ row) * 16;
  const unsigned target = to + warp * 1024 + row * 128 + ((2 * piece) ^ row) * 16;
  const auto wanted = [&](int unit) {
    const int group = unit / kTileChunks * kWideners;
    return unit < kUnits && (kRowGroups % kWideners == 0 || group + warp < kRowGroups);
  };
#pragma unroll
  for (int begin = 0; begin < kUnits; begin += kBatch) {
    uint4 in[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int group = (begin + b) / kTileChunks * kWideners;
      const int chunk = (begin + b) % kTileChunks;
      if (wanted(begin + b)) {
        in[b] =
            ptx::load_shared((source ^ chunk % 2 * 64) + chunk / 2 * kBlockN * 128 + group * 1024);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int group = (begin + b) / kTileChunks * kWideners;
      const int chunk = (begin + b) % kTileChunks;
      if (wanted(begin + b)) {
        const uint2 w0 = ptx::widen_sm89<To, From>(in[b].x);
        const uint2 w1 = ptx::widen_sm89<To, From>(in[b].y);
        const uint2 w2 = ptx::widen_sm89<To, From>(in[b].z);
        const uint2 w3 = ptx::widen_sm89<To, From>(in[b].w);
        const unsigned further = chunk * kBlockN * 128 + group * 1024;
        ptx::store_shared(target + further, {w0.x, w0.y, w1.x, w1.y});
        ptx::store_shared((target ^ 16) + further, {w2.x, w2.y, w3.x, w3.y});
      }
    }
  }
}

/// Make tiles of 16 bits of those that come in fp8, in the order in which consumers take them.
template <typename From>
__device__ __forceinline__ void widen(unsigned shared, const Work* works, int warp) {
  const Rings ring = rings(shared);
  Position<kStages> keys_at;
  Position<kStages> values_at;
  Position<kStages> raw_keys_at;
  Position<kStages> raw_values_at;
  const auto next = [&](const Ring<kStages>& raw, Position<kStages>& raw_at,
                        const Ring<kStages>& wide, Position<kStages>& wide_at, auto&& tile) {
    raw.wait_full(raw_at);
    wide.wait_empty(wide_at);
    tile(raw_at.stage(), wide_at.stage());
    ptx::fence_async_shared();
    raw.release(raw_at);
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(wide.full + wide_at.stage() * 8);
    }
    raw_at.number += 1;
    wide_at.number += 1;
  };
  for (Position<kWorkStages> work_at;; work_at.number += 1) {
    ring.work.wait_full(work_at);
    const Work& work = works[work_at.stage()];
    if (work.kv_head < 0) {
      return;
    }
    // Consumers take a tile's values behind the keys of the next.
    const int tiles = work.item.tile_end - work.item.tile_begin;
    for (int i = 0; i <= tiles; ++i) {
      if constexpr (sizeof(Query) > sizeof(From)) {
        if (i < tiles) {
          next(ring.raw_keys, raw_keys_at, ring.keys, keys_at, [&](unsigned raw, unsigned wide) {
            widen_tile<Query, From, kQueryChunks>(
                shared + kLayout.raw_keys + raw * kLayout.raw_key_bytes,
                shared + kLayout.keys + wide * kLayout.key_bytes, warp);
          });
        }
      }
      if (i > 0) {
        next(ring.raw_values, raw_values_at, ring.values, values_at,
             [&](unsigned raw, unsigned wide) {
               widen_tile<Weight, From, kValueChunks>(
                   shared + kLayout.raw_values + raw * kLayout.raw_value_bytes,
                   shared + kLayout.values + wide * kLayout.value_bytes, warp);
             });
      }
    }
    ring.work.release(work_at);
  }
}

/// What a warp of producers does; `From` is Cache.
template <typename From>
__device__ __forceinline__ void produce(const ForwardParams& p, const ptx::TensorMap& query_map,
                                        const ptx::TensorMap& key_map,
                                        const ptx::TensorMap& value_map, unsigned shared,
                                        Work* works) {
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp == 0) {
    schedule(p, shared, works);
  } else if (warp == 1) {
    produce_keys(p, query_map, key_map, shared, works);
  } else if (warp == 2) {
    produce_values(p, value_map, shared, works);
  } else if constexpr (sizeof(From) == 1) {
    constexpr int kFirst = kWideners == 1 ? 3 : 4;
    if (warp >= kFirst) {
      widen<From>(shared, works, warp - kFirst);
    }
  }
}

}  // namespace flash_attn
