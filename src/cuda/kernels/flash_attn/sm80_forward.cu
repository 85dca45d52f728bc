// Attention forward with mma.sync and cp.async: sm_80 and later. One block takes one work item of
// the planner, a tile of query rows of one KV head against a range of keys:
//
//   load the query rows; keep `kStages` tiles of keys and values in flight
//   for each tile of keys:
//     scores = query · keysᵀ  →  cap, bias, mask  →  softmax  →  output += p · values
//   merge the warps that had other keys, normalise, store
//   where other blocks have other keys of the same rows: store a partial result instead, and the
//   last of them merges those
//
// Rows are query rows times heads of a group (packed GQA): row i is head i % group of query i /
// group, so keys and values are read once for the whole group, and a tile of rows spans few
// positions.
//
// Warps have rows of their own and all keys of a tile, or the same rows and some of its keys. The
// latter merge their results at the end or, where heads are so large that the output of 32 rows
// would not fit a warp's registers, form a team: for each tile they exchange weights, and each then
// has all keys, but some columns of the values.

#include "config.cuh"
#include "flash_attn/epilogue.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/sm80_fragments.cuh"
#include "flash_attn/sm80_store.cuh"
#include "ptx/cp_async.cuh"
#include "tile/copy.cuh"

namespace flash_attn {

// Copies are asked for by parts among the products: a thread that asked for all of a tile at once
// would wait until the memory has taken them. But where warps have different keys, memory is what
// counts, and copies begin as early as they can.
constexpr bool kLoadByParts = (kWarpsN == 1 || kTeams) && !kWidenInRegisters;
// A part every so many steps of the product with the keys…
constexpr int kLoadEvery = kKSteps >= 8 ? kKSteps / 4 : 1;
constexpr int kLoadParts = (kKSteps + kLoadEvery - 1) / kLoadEvery;
// …and, in teams, of that of 16 weights with values.
constexpr int kValueSteps = kValueTiles / 2;
constexpr int kLoadKeysEvery = (kValueSteps + 1) / 2;
constexpr int kLoadKeysParts = (kValueSteps + kLoadKeysEvery - 1) / kLoadKeysEvery;
static_assert(kTeams == (kStages == 1));

using KeyCopy =
    tile::TileCopy<kBlockN, kHeadSize * kCacheBytes, kFp8 ? (kHeadSize + 15) / 16 : kHeadPad / 8,
                   kKeyPitch, kThreads, kCacheVectorBytes, kPageSize, kShape.pages_aligned()>;
using ValueCopy =
    tile::TileCopy<kBlockN, kHeadSizeV * kCacheBytes, kFp8 ? (kHeadSizeV + 15) / 16 : kHeadPadV / 8,
                   kValuePitch, kThreads, kCacheVectorBytes, kPageSize, kShape.pages_aligned()>;

/// What the loop over keys must know of its rows.
struct BlockState {
  Rows rows;
  int low, high;          // Keys that any row of the tile sees…
  int all_low, all_high;  // …and those that all rows see.
  const int* table;
  const unsigned char* keys;  // Of the head; plain ones: of the request's first.
  const unsigned char* values;
};
static_assert(sizeof(BlockState) <= 96);
// Where accumulators and scores leave few registers, a block keeps its state in shared memory. It
// costs a few per cent where they do not.
constexpr bool kScarceRegisters = kRowTiles == 2 && kHeadPadV > 64 &&
                                  (kLeftBound || kRightBound || kPageSize > 0 || kTeams);

__device__ __forceinline__ BlockState block_state(const WorkItem& item, const Rows& rows,
                                                  const ForwardParams& p, int kv_head) {
  const int last = rows.count - 1;
  const long long key_start = kPageSize == 0 ? p.key_start_loc[item.request] : 0;
  const auto first_of = [&](const CacheView& view) {
    return static_cast<const unsigned char*>(view.data) + kv_head * view.head_bytes +
           key_start * view.token_bytes;
  };
  return {.rows = rows,
          .low = rows.low(0),
          .high = rows.high(last),
          .all_low = rows.low(last),
          .all_high = rows.high(0),
          .table = kPageSize == 0 ? nullptr : p.block_table + item.request * p.table_stride,
          .keys = first_of(p.key),
          .values = first_of(p.value)};
}

/// The copy of a tile of keys and values.
struct TileLoad {
  KeyCopy keys;
  ValueCopy values;
  unsigned stage;
  long long distance;

  // Part `number` of `parts`.
  __device__ __forceinline__ void load_keys(int number, int parts) {
#pragma unroll
    for (int i = number * KeyCopy::kPasses / parts; i < (number + 1) * KeyCopy::kPasses / parts;
         ++i) {
      keys.pass(i, stage);
    }
  }
  __device__ __forceinline__ void load_values(int number, int parts) {
#pragma unroll
    for (int i = number * ValueCopy::kPasses / parts; i < (number + 1) * ValueCopy::kPasses / parts;
         ++i) {
      values.pass(i, stage + kLayout.key_bytes);
    }
  }
  __device__ __forceinline__ void load_both(int number, int parts) {
    if constexpr (kJointAddresses) {
#pragma unroll
      for (int i = number * KeyCopy::kPasses / parts; i < (number + 1) * KeyCopy::kPasses / parts;
           ++i) {
        keys.pass_of_both(i, stage, stage + kLayout.key_bytes, distance);
      }
    } else {
      load_keys(number, parts);
      load_values(number, parts);
    }
  }
};

/// Query rows into shared memory, zeros past the last one.
__device__ __forceinline__ void load_query(unsigned tile_q, const ForwardParams& p,
                                           const WorkItem& item, const Rows& rows, int kv_head) {
  constexpr int kChunks = kHeadPad / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int packed = rows.first + (row < rows.count ? row : 0);
    const auto* source = static_cast<const Query*>(p.query.data) +
                         (item.query_start + packed / kGroup) * p.query.row_stride +
                         (kv_head * kGroup + packed % kGroup) * p.query.head_stride;
    const int chunk = i % kChunks;
    const bool valid = row < rows.count && chunk * 8 < kHeadSize;
    tile::load_chunk<kRowVectorBytes, 2 * kHeadSize>(tile_q + row * kQueryPitch + chunk * 16,
                                                     reinterpret_cast<const unsigned char*>(source),
                                                     chunk, valid);
  }
}

/// The even elements of each 16 before the odd ones: the order in which narrow keys are multiplied.
__device__ __forceinline__ void permute_query(unsigned char* tile_q) {
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kKSteps; i += kThreads) {
    auto* group = reinterpret_cast<uint4*>(tile_q + i / kKSteps * kQueryPitch + i % kKSteps * 32);
    const uint4 a = group[0];
    const uint4 b = group[1];
    const auto even = [](unsigned x, unsigned y) { return __byte_perm(x, y, 0x5410); };
    const auto odd = [](unsigned x, unsigned y) { return __byte_perm(x, y, 0x7632); };
    group[0] = {even(a.x, a.y), even(a.z, a.w), even(b.x, b.y), even(b.z, b.w)};
    group[1] = {odd(a.x, a.y), odd(a.z, a.w), odd(b.x, b.y), odd(b.z, b.w)};
  }
}

/// One fp8 tile in 16 bits, for all warps.
template <int kSize, int kPad, int kPitch, int kWidePitch>
__device__ __forceinline__ void widen_tile(unsigned char* wide, const unsigned char* narrow) {
  constexpr int kChunks = kPad / 8;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kBlockN * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    uint4 out = {0U, 0U, 0U, 0U};
    if (kSize == kPad || chunk * 8 < kSize) {
      const uint2 in = *reinterpret_cast<const uint2*>(narrow + row * kPitch + chunk * 8);
      unsigned low[2];
      unsigned high[2];
      ptx::widen<Query, Cache>(low, in.x);
      ptx::widen<Query, Cache>(high, in.y);
      out = {low[0], low[1], high[0], high[1]};
    }
    *reinterpret_cast<uint4*>(wide + row * kWidePitch + chunk * 16) = out;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    flash_forward(const __grid_constant__ ForwardParams p,
                  const __grid_constant__ HeadValues<kHeadValues> heads) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int number = static_cast<int>(blockIdx.x);
  const WorkItem item = load_item(p, number);  // Beside the count; the list is long enough.
  if (number >= p.counts->items) {
    return;
  }
  const int kv_head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_n = thread / 32 % kWarpsN;
  const int warp_row = thread / 32 / kWarpsN * 16 * kRowTiles;
  const Rows rows = rows_of(item, p, kBlockM);
  const unsigned shared_start = ptx::shared_address(shared);
  const BlockState found = block_state(item, rows, p, kv_head);
  auto& kept = *reinterpret_cast<BlockState*>(shared + kLayout.block_state);
  if constexpr (kScarceRegisters) {
    if (thread == 0) {
      kept = found;
    }
    __syncthreads();
  }
  const BlockState& block = kScarceRegisters ? kept : found;
  auto* page_ids = reinterpret_cast<int*>(shared + kLayout.page_ids);

  // The numbers of a tile's blocks come in the same pipeline, some tiles ahead of its keys.
  const auto load_pages = [&](int tile) {
    if constexpr (kPages > 0) {
      if (thread < kPages && tile < item.tile_end) {
        const int page = tile * kBlockN / kPageTokens + thread;
        int* id = page_ids + tile % kPageRing * kPages + thread;
        const bool valid = page * kPageTokens < block.high;
        if constexpr (kPagesPerBlock == 1) {
          ptx::cp_async<4>(ptx::shared_address(id), block.table + page, valid);
        } else {  // The table counts in blocks of the cache manager, each of several pages.
          *id = valid ? block.table[page / kPagesPerBlock] * kPagesPerBlock + page % kPagesPerBlock
                      : 0;
        }
      }
    }
  };
  // Of a tile past the last nothing is read.
  const auto load_of = [&](int tile) -> TileLoad {
    const int* pages = page_ids + tile % kPageRing * kPages;
    const int high = tile < item.tile_end ? block.high : block.low;
    int copier = thread;
    if constexpr (kTeams) {
      // Else what follows from it would be held in registers from tile to tile.
      asm volatile("" : "+r"(copier));
    }
    return {.keys = {block.keys, p.key.block_bytes, p.key.token_bytes, pages, tile * kBlockN,
                     block.low, high, copier},
            .values = {block.values, p.value.block_bytes, p.value.token_bytes, pages,
                       tile * kBlockN, block.low, high, copier},
            .stage = shared_start + kLayout.stages + tile % kStages * kLayout.stage_bytes,
            .distance = block.values - block.keys};
  };

#pragma unroll
  for (int s = 0; s < kPageLead; ++s) {
    load_pages(item.tile_begin + s);
  }
  if constexpr (kPages > 0) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  if (item.tile_begin < item.tile_end) {  // Else nothing may still arrive where the output goes.
    load_query(shared_start + kLayout.query, p, item, rows, kv_head);
  }
#pragma unroll
  for (int s = 0; s < kShape.ahead(); ++s) {
    TileLoad load = load_of(item.tile_begin + s);
    if constexpr (kTeams) {
      load.load_keys(0, 1);
    } else {
      load.load_both(0, 1);
    }
    load_pages(item.tile_begin + s + kPageLead);
    ptx::cp_async_commit();
  }

  // Fragment addresses of this lane; see ldmatrix.cuh and mma.cuh.
  const unsigned query_address =
      shared_start + kLayout.query + (warp_row + lane % 16) * kQueryPitch + lane / 16 * 16;
  constexpr int kUsedKeyPitch = kWidenInRegisters ? kKeyPitch : kQueryPitch;
  constexpr int kUsedValuePitch = kWidenInRegisters ? kValuePitch : kOutputPitch;
  const int key_offset =
      (warp_n * kWarpKeys + lane / 16 * 8 + lane % 8) * kUsedKeyPitch + lane / 8 % 2 * 16;
  const int value_offset = ((kTeams ? 0 : warp_n * kWarpKeys) + lane % 16) * kUsedValuePitch +
                           lane / 16 * 16 + first_column() * 2;
  unsigned query[kRowTiles][kKSteps][4];

  float slopes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int head = kv_head * kGroup + (rows.first + warp_row + thread_row(i) + lane / 4) % kGroup;
    slopes[i] = kAlibi ? heads.alibi_slope[head] : 0.0F;
  }
  const float scale = kTransform ? 1.0F : p.scale;
  const float slack = kTransform ? kSlack : kSlack * p.inverse_scale;

  State state;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    state.maximum[i] = -kInfinity;
    state.sum[i] = 0.0F;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      state.output[i / 2][n][i % 2 * 2] = 0.0F;
      state.output[i / 2][n][i % 2 * 2 + 1] = 0.0F;
    }
  }

  if constexpr (kWidenInRegisters || kQueryInRegisters) {
    ptx::cp_async_wait<kShape.ahead() - 1>();
    __syncthreads();  // The query came with the first tile.
  }
  if constexpr (kWidenInRegisters) {
    permute_query(shared + kLayout.query);
    __syncthreads();
  }
  if constexpr (kQueryInRegisters) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kKSteps; ++k) {
        ptx::ldmatrix_x4(query[m][k], query_address + m * 16 * kQueryPitch + k * 32);
      }
    }
  }

  const Team team{shared_start + kLayout.teams + thread / (32 * kWarpsN) * kTeamBytes + lane * 16};
  const int row = warp_row + lane / 4;
  /// Everything between the scores of a step's keys, the first of which is `first`, and their
  /// weights.
  const auto settle = [&](Scores& scores, int first) {
    const int key = first + warp_n * kWarpKeys + lane % 4 * 2;
    const auto score = [&](int i, int n, int e) -> float& {
      return scores[i / 2][n][i % 2 * 2 + e];
    };
    if constexpr (kTransform) {
      transform_scores<kRows, kKeyTiles>(score, p, slopes, block.rows, row, key);
    }
    if (first < block.all_low || first + kBlockN > block.all_high) {
      mask_scores<kRows, kKeyTiles>(score, block.rows, row, key);
    }
    raise_maxima(state, scores, team, slack, scale);
  };

  for (int tile = item.tile_begin; tile < item.tile_end; ++tile) {
    ptx::cp_async_wait<kShape.ahead() - 1>();
    __syncthreads();  // Everyone's part of this tile has come, and everyone is done with the last.
    // Teams load values while keys are in use, and the next keys while values are.
    TileLoad next = load_of(kTeams ? tile : tile + kShape.ahead());
    load_pages(tile + kShape.ahead() + kPageLead);
    if constexpr (!kLoadByParts) {
      if (tile + kShape.ahead() < item.tile_end) {
        next.load_both(0, 1);
      }
      ptx::cp_async_commit();
    }

    unsigned char* tile_k = shared + kLayout.stages + tile % kStages * kLayout.stage_bytes;
    unsigned char* tile_v = tile_k + kLayout.key_bytes;
    if constexpr (kFp8 && !kWidenInRegisters) {
      widen_tile<kHeadSize, kHeadPad, kKeyPitch, kQueryPitch>(shared + kLayout.wide_key, tile_k);
      widen_tile<kHeadSizeV, kHeadPadV, kValuePitch, kOutputPitch>(shared + kLayout.wide_value,
                                                                   tile_v);
      tile_k = shared + kLayout.wide_key;
      tile_v = shared + kLayout.wide_value;
      __syncthreads();
    }
    const unsigned key_address = ptx::shared_address(tile_k) + key_offset;
    const unsigned value_address = ptx::shared_address(tile_v) + value_offset;

    Scores scores;
    clear(scores);
    if constexpr (kWidenInRegisters) {
      product_with_narrow_keys<Cache>(scores, query, query_address, key_address);
    } else {
      product_with_keys(scores, query, query_address, key_address, [&](int k) {
        if (kLoadByParts && k % kLoadEvery == 0) {
          if constexpr (kTeams) {
            next.load_values(k / kLoadEvery, kLoadParts);
          } else {
            next.load_both(k / kLoadEvery, kLoadParts);
          }
        }
      });
    }
    if constexpr (kLoadByParts) {
      ptx::cp_async_commit();
    }
    settle(scores, tile * kBlockN);
    Weights weights(state, scale);
    if constexpr (kTeams) {
#pragma unroll
      for (int i = 0; i < Weights::kCount; ++i) {
        weights.compute(i, state, scores, scale);
      }
      give_weights(weights, team);
      ptx::cp_async_wait<0>();
      __syncthreads();  // Weights and values have come, and everyone is done with the keys.
      TileLoad after = load_of(tile + 1);
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {
        unsigned taken[kRowTiles][4];
        take_weights(taken, team, k);
        product_with_values(state, taken, value_address, k, [&](int n) {
          // In the first half: what comes last is needed soon.
          if (k < kBlockN / 32 && n % kLoadKeysEvery == 0) {
            after.load_keys(k * kLoadKeysParts + n / kLoadKeysEvery, kBlockN / 32 * kLoadKeysParts);
          }
        });
      }
      ptx::cp_async_commit();
    } else {
      // Exponentials of 16 keys at a time, so that they run beside the products of the 16 before.
#pragma unroll
      for (int k = 0; k < kKeyTiles / 2; ++k) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) {
          weights.compute(k * kRowTiles * 4 + i, state, scores, scale);
        }
        if constexpr (kWidenInRegisters) {
          product_with_narrow_values<Cache>(state, weights, value_address, k);
        } else {
          product_with_values(state, weights.packed[k], value_address, k, [](int) {});
        }
      }
    }
  }

  ptx::cp_async_wait<0>();
  // Read again: in the loop above every register counts.
  const WorkItem done = load_item(p, number);
  const Rows ended = rows_of(done, p, kBlockM);
  if constexpr (kWarpsN == 1 || kTeams) {
    store_rows(state, team, scale, p, heads, done, ended, kv_head, warp_row,
               shared + kLayout.query);
  } else {
    __syncthreads();
    merge_warps(state, scale, p, heads, done, ended, kv_head, warp_row, warp_n,
                shared + kLayout.stages);
  }
  if (done.slot >= 0) {
    __syncthreads();
    const bool last = thread == 0 && arrives_last(p, done, kv_head);
    if (__syncthreads_or(last ? 1 : 0) != 0) {
      merge_parts<kBlockM, kThreads>(p, heads, done, ended, kv_head, thread);
    }
  }
}

}  // namespace flash_attn
