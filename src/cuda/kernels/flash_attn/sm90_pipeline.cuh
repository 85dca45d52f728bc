#pragma once

// What the warps of sm90_forward.cu have in common: the shape, the rings of stages through which
// tiles pass from producers to consumers, and how a block comes by its work.

#include "config.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/sm90_shape.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/types.cuh"

namespace flash_attn {

using namespace config;
using namespace foveal::cuda::flash_attn;

template <config::DType kType>
using TypeOf = tile::TypeOf<kType>::type;
using Query = TypeOf<kQueryType>;
using Cache = TypeOf<kCacheType>;  // Keys and values as they come.

constexpr Sm90Shape kShape{.head_size = kHeadSize,
                           .head_size_v = kHeadSizeV,
                           .query_bytes = sizeof(Query),
                           .cache_bytes = sizeof(Cache),
                           .page_size = kPageSize,
                           .warpgroups = kWarpgroups,
                           .block_n = kBlockN,
                           .query_stages = kQueryStages,
                           .stages = kStages};
constexpr Sm90Layout kLayout = sm90_layout(kShape);
constexpr bool kWidenKeys = kShape.widens_keys();
constexpr bool kWidenValues = kShape.widens_values();
constexpr int kBlockM = kShape.block_m();
constexpr int kBox = kShape.box_tokens();
constexpr int kBoxes = kBlockN / kBox;
// Pieces of 128 bytes of a row: of queries, and of keys and values as they come.
constexpr int kQueryChunks = Sm90Shape::chunks(kHeadSize * sizeof(Query));
constexpr int kRawChunks = Sm90Shape::chunks(kHeadSize * sizeof(Cache));
constexpr int kRawChunksV = Sm90Shape::chunks(kHeadSizeV * sizeof(Cache));
constexpr int kValueChunks = Sm90Shape::chunks(kHeadSizeV * 2);
constexpr int kKSteps = (kHeadSize * sizeof(Query) + 31) / 32;  // Of 32 bytes of a row.
constexpr int kPSteps = kBlockN / 16;
constexpr int kStoreColumns = kShape.store_columns();
constexpr int kStorePitch = kShape.store_pitch();
constexpr bool kStoreInQuery = kLayout.output == kLayout.query;
static_assert(!kStoreInQuery || kQueryStages == 1);
constexpr int kWorkStages = Sm90Shape::work_stages();
// Tiles of keys still to be asked for when the next item is claimed.
constexpr int kClaimTiles = 3;
constexpr int kProducerThreads = kShape.threads() - kWarpgroups * 128;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kWideners = kShape.wideners();  // Warps.
constexpr int kRows = 2;  // Rows of which a thread holds elements: `row` and 8 below.
// Of a thread; together what an SM has.
constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = (kWarpgroups == 2 ? 232 : 160) - (kWideners == 4 ? 16 : 0);
constexpr int kPageTokens = kPageSize > 0 ? kPageSize : 1;
static_assert(kBoxes <= 32 && kBlockN % 16 == 0);

// Numbers of named barriers: of each warpgroup's threads, and of all consumers.
constexpr int kGroupOnly = 1;
constexpr int kConsumers = kGroupOnly + kWarpgroups;

using Scores = float[kBlockN / 2];
using Sums = float[kHeadSizeV / 2];  // Of the output.
using Weight = TypeOf<sizeof(Query) == 2 ? kQueryType : DType::f16>;
using Weights = unsigned[kPSteps][4];  // As A operands of the products with the values.

/// What all lanes of a warp know to be the same: lets the compiler know it too.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFFU, value, 0); }

/// Where a ring of stages stands: position n is stage n % kCount for the (n / kCount)-th time.
template <int kCount>
struct Position {
  unsigned number = 0;

  __device__ __forceinline__ unsigned stage() const { return number % kCount; }
  __device__ __forceinline__ unsigned parity() const { return number / kCount % 2; }
};

/// A ring's barriers: `full` when a stage has come, `empty` when its users are done with it.
template <int kCount>
struct Ring {
  unsigned full;

  __device__ __forceinline__ unsigned empty() const { return full + kCount * 8; }
  __device__ __forceinline__ unsigned end() const { return full + 2 * kCount * 8; }
  /// `warps` release a stage; `fillers` arrive when one has come.
  __device__ __forceinline__ void init(int warps, int fillers = 1) const {
    for (int s = 0; s < kCount; ++s) {
      ptx::mbarrier_init(full + s * 8, fillers);
      ptx::mbarrier_init(empty() + s * 8, warps);
    }
  }
  __device__ __forceinline__ void wait_full(Position<kCount> at) const {
    ptx::mbarrier_wait(full + at.stage() * 8, at.parity());
  }
  __device__ __forceinline__ void wait_empty(Position<kCount> at) const {
    ptx::mbarrier_wait(empty() + at.stage() * 8, at.parity() ^ 1U);
  }
  __device__ __forceinline__ void release(Position<kCount> at) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(empty() + at.stage() * 8);
    }
  }
};

struct Rings {
  Ring<kStages> keys;
  Ring<kStages> values;
  Ring<kStages> raw_keys;  // As they come, where they are to be widened.
  Ring<kStages> raw_values;
  Ring<kQueryStages> query;
  Ring<kWorkStages> work;
  unsigned leave;  // To claim an item: a barrier, one phase an item that is nearly asked for.
};

__device__ __forceinline__ Rings rings(unsigned shared) {
  const Ring<kStages> keys{shared + kLayout.barriers};
  const Ring<kStages> values{keys.end()};
  const Ring<kStages> raw_keys{values.end()};
  const Ring<kStages> raw_values{raw_keys.end()};
  const Ring<kQueryStages> query{raw_values.end()};
  const Ring<kWorkStages> work{query.end()};
  return {keys, values, raw_keys, raw_values, query, work, work.end()};
}

/// What the producer tells the consumers of an item.
struct Work {
  WorkItem item;
  Rows rows;
  int kv_head;      // −1: nothing is left.
  int low, high;    // Keys that any row sees.
  int plain_begin;  // The first tile of keys that all rows see whole.
  // Of a warpgroup's rows: past the last tile that all of them see whole, and past the last that
  // any of them sees. It passes over the item's tiles from there on, but not over more than the
  // ring has stages less one: their keys are let go of before their values.
  int plain_end[kWarpgroups];
  int tile_end[kWarpgroups];
};
static_assert(sizeof(Work) <= kShape.work_bytes());

/// The block's next piece of work: a number below items · num_kv_heads, or one past them. The
/// counter returns to 0 by itself once every block has been told that nothing is left.
__device__ __forceinline__ unsigned next_work(const ForwardParams& p, unsigned total) {
  return atomicInc(&p.counts->next_work, total + gridDim.x - 1);
}

__device__ __forceinline__ Work find_work(const ForwardParams& p, unsigned number, unsigned items) {
  Work work{};
  // Section by section of KV heads, whose keys and values the L2 cache holds with ease; the items
  // of a section from the longest to the shortest. The last section has more heads, so that the
  // work ends with many short items.
  const unsigned front = (p.num_kv_heads - p.counts->tail_heads) * items;
  const bool tail = number >= front;
  const unsigned size = tail ? p.counts->tail_heads : p.counts->section_heads;
  const unsigned begin = tail ? front : number / (items * size) * (items * size);
  const unsigned heads = tail ? size : min(size, (front - begin) / items);
  work.kv_head = static_cast<int>(begin / items + (number - begin) % heads);
  work.item = load_item(p, static_cast<int>((number - begin) / heads));
  work.rows = rows_of(work.item, p, kBlockM);
  if (work.item.tile_begin >= work.item.tile_end) {
    // No row sees a key: one tile of which nothing is loaded and all is masked gives the zeros.
    work.item.tile_begin = 0;
    work.item.tile_end = 1;
    work.rows.seq_len = 0;
  }
  const int last = work.rows.count - 1;
  work.low = work.rows.low(0);
  work.high = work.rows.high(last);
  work.plain_begin = (work.rows.low(last) + kBlockN - 1) / kBlockN;
#pragma unroll
  for (int w = 0; w < kWarpgroups; ++w) {
    work.plain_end[w] = work.rows.high(min(w * 64, last)) / kBlockN;
    const int high = w * 64 <= last ? work.rows.high(min(w * 64 + 63, last)) : 0;
    const int least = max(work.item.tile_begin + 1, work.item.tile_end - kStages + 1);
    work.tile_end[w] = max((high + kBlockN - 1) / kBlockN, least);
  }
  return work;
}

}  // namespace flash_attn
