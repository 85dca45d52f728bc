// Attention forward for sm_90a: TMA, wgmma, warp specialisation. There is one block an SM, which takes
// work items of the planner until none is left. It has a warpgroup of producers, of which three
// warps work, and two or three warpgroups of consumers with 64 rows each:
//
//   schedule        claims the next item and says what it is
//   produce_keys    its query, then its tiles of keys, as room comes up
//   produce_values  its tiles of values
//   consume         scores of tile i + 1 = query · keysᵀ and output += p · values of tile i are issued
//                   together; the softmax of tile i + 1 runs beside the second of them, and beside
//                   the products of the other warpgroups. The first scores of the next item are
//                   issued before the output of this one is stored
//
// What passes between them stands in rings of stages in shared memory, each with a barrier for full and
// one for empty. Tiles of keys are walked from the last to the first, so that the masked ones of a
// causal layer come first. Rows are query rows times heads of a group (packed GQA): rows.cuh.

#include "config.cuh"
#include "flash_attn/epilogue.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores.cuh"
#include "flash_attn/sm90_shape.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/types.cuh"

namespace flash_attn {

using namespace config;
using namespace foveal::cuda::flash_attn;

using Query = Output;

constexpr Sm90Shape kShape{.head_size = kHeadSize,
                           .head_size_v = kHeadSizeV,
                           .page_size = kPageSize,
                           .warpgroups = kWarpgroups,
                           .block_n = kBlockN,
                           .query_stages = kQueryStages,
                           .stages = kStages};
constexpr Sm90Layout kLayout = sm90_layout(kShape);
constexpr int kBlockM = kShape.block_m();
constexpr int kBox = kShape.box_tokens();
constexpr int kBoxes = kBlockN / kBox;
constexpr int kChunks = kShape.chunks();  // Of 64 elements of the head.
constexpr int kChunksV = kShape.chunks_v();
constexpr int kKSteps = (kHeadSize + 15) / 16;
constexpr int kPSteps = kBlockN / 16;
constexpr int kWorkStages = kShape.work_stages();
// Tiles of keys still to be asked for when the next item is claimed.
constexpr int kClaimTiles = 3;
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kRows = 2;  // Rows of which a thread holds elements: `row` and 8 below.
constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;
constexpr int kPageTokens = kPageSize > 0 ? kPageSize : 1;
static_assert(kBoxes <= 32);

// Numbers of named barriers: of each warpgroup's threads, and of all consumers.
constexpr int kGroupOnly = 1;
constexpr int kConsumers = kGroupOnly + kWarpgroups;

using Scores = float[kBlockN / 2];
using Sums = float[kHeadSizeV / 2];  // Of the output.
using Weights = unsigned[kPSteps][4];

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
  /// `warps` release a stage.
  __device__ __forceinline__ void init(int warps) const {
    for (int s = 0; s < kCount; ++s) {
      ptx::mbarrier_init(full + s * 8, 1);
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
  Ring<kStages> keys, values;
  Ring<kQueryStages> query;
  Ring<kWorkStages> work;
  unsigned leave;  // To claim an item: a barrier, one phase an item that is nearly asked for.
};

__device__ __forceinline__ Rings rings(unsigned shared) {
  const Ring<kStages> keys{shared + kLayout.barriers};
  const Ring<kStages> values{keys.end()};
  const Ring<kQueryStages> query{values.end()};
  const Ring<kWorkStages> work{query.end()};
  return {keys, values, query, work, work.end()};
}

/// What the producer tells the consumers of an item.
struct Work {
  WorkItem item;
  Rows rows;
  int kv_head;    // −1: nothing is left.
  int low, high;  // Keys that any row sees.
  // Tiles of keys that all rows see whole.
  int plain_begin, plain_end;
};
static_assert(sizeof(Work) <= kShape.work_bytes());

/// The block's next piece of work: a number below items · num_kv_heads, or one past them. The counter
/// returns to 0 by itself once every block has been told that nothing is left.
__device__ __forceinline__ unsigned next_work(const ForwardParams& p, unsigned total) {
  return atomicInc(&p.counts->next_work, total + gridDim.x - 1);
}

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
      ptx::tma_load(tiles + at.stage() * kTileBytes + c * kBlockN * 128 + lane * kBoxBytes, map, full,
                    c * 64, kv_head, box.row, box.block);
    }
  }
  at.number += 1;
}

__device__ __forceinline__ Work find_work(const ForwardParams& p, unsigned number, unsigned items) {
  Work work{};
  // Section by section of KV heads, whose keys and values the L2 cache holds with ease; the items of
  // a section from the longest to the shortest. The last section has more heads, so that the work
  // ends with many short items.
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
  work.plain_end = work.rows.high(0) / kBlockN;
  return work;
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

/// The first warp of producers decides what the block works on. An item is claimed shortly before the
/// one before it ends, so that the last ones are shared out evenly; see produce_keys.
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
      load_tile<kChunks>(key_map, ring.keys, keys_at, shared + kLayout.keys, box, kv_head);
      box = next;
    };
    load_next();
    ring.query.wait_empty(query_at);
    if (lane == 0) {
      const unsigned full = ring.query.full + query_at.stage() * 8;
      ptx::mbarrier_arrive_expect_bytes(full, kChunks * kBlockM * 128);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ptx::tma_load(shared + kLayout.query + (query_at.stage() * kChunks + c) * kBlockM * 128,
                      query_map, full, c * 64, kv_head * kGroup,
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
      load_tile<kChunksV>(value_map, ring.values, values_at, shared + kLayout.values, box, kv_head);
      box = next;
    }
    ring.work.release(work_at);
  }
}

struct Softmax {
  float maximum[kRows];  // Reference of the exponentials: a score the row has seen, or −inf.
  float sum[kRows];      // This thread's part.
  float factor[kRows];   // What the output is due to be multiplied with.

  /// Raises the maxima where a score exceeds them by more than the slack; whether any did.
  __device__ __forceinline__ bool raise(const Scores& scores, float slack, float scale) {
    float seen[kRows];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Two chains: one would be as long as the products beside it.
      float a = scores[i * 2];
      float b = scores[i * 2 + 1];
#pragma unroll
      for (int n = 1; n < kBlockN / 8; ++n) {
        a = fmaxf(a, scores[n * 4 + i * 2]);
        b = fmaxf(b, scores[n * 4 + i * 2 + 1]);
      }
      seen[i] = fmaxf(a, b);
      grown |= seen[i] > maximum[i] + slack;
    }
    if (!__any_sync(0xFFFFFFFFU, grown)) {
      return false;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float before = maximum[i];
      maximum[i] = fmaxf(before, quad_max(seen[i]));
      factor[i] =
          before == maximum[i] ? 1.0F : ptx::exp2_approx((before - maximum[i]) * scale);
      sum[i] *= factor[i];
    }
    return true;
  }

  /// score → 2^(score − maximum)
  __device__ __forceinline__ void exponentials(Scores& scores, float scale) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // A row that has seen nothing yet: its scores are −inf, also against any finite offset.
      const float offset = maximum[i] == -kInfinity ? 0.0F : -maximum[i] * scale;
      float a = 0.0F;
      float b = 0.0F;
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        float& s0 = scores[n * 4 + i * 2];
        float& s1 = scores[n * 4 + i * 2 + 1];
        s0 = ptx::exp2_approx(fmaf(s0, scale, offset));
        s1 = ptx::exp2_approx(fmaf(s1, scale, offset));
        a += s0;
        b += s1;
      }
      sum[i] += a + b;
    }
  }

  /// Keeps the exponentials before what follows, beside the products under way: the compiler would
  /// rather have them behind the wait for those. It cannot know that all lanes are active, so the
  /// barrier seems to depend on the sums.
  __device__ __forceinline__ void hold() const {
    __syncwarp(__activemask() | __float_as_uint(sum[0]) | __float_as_uint(sum[1]));
  }

  __device__ __forceinline__ void rescale(Sums& output) const {
#pragma unroll
    for (int n = 0; n < kHeadSizeV / 2; ++n) {
      output[n] *= factor[n / 2 % 2];
    }
  }
};

__device__ __forceinline__ void pack_weights(Weights& weights, const Scores& scores) {
#pragma unroll
  for (int k = 0; k < kPSteps; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // a[0], a[1]: first 8 keys, both rows; a[2], a[3]: the next 8.
      const int at = (2 * k + e / 2) * 4 + e % 2 * 2;
      weights[k][e] = ptx::pack<Query>(scores[at], scores[at + 1]);
    }
  }
}

/// Issues scores = query · keysᵀ.
__device__ __forceinline__ void issue_scores(Scores& scores, unsigned query_address,
                                             unsigned key_address) {
  const ptx::MatrixAt<0> query(query_address);
  const ptx::MatrixAt<0> keys(key_address);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kKSteps; ++k) {
    ptx::Wgmma<Query, kBlockN>::shared(scores, query.descriptor(k / 4 * kBlockM * 128 + k % 4 * 32),
                                       keys.descriptor(k / 4 * kBlockN * 128 + k % 4 * 32), k > 0);
  }
  ptx::wgmma_commit();
}

/// Issues output += weights · values.
__device__ __forceinline__ void issue_output(Sums& output, const Weights& weights,
                                             unsigned value_address) {
  const ptx::MatrixAt<kBlockN * 128> values(value_address);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kPSteps; ++k) {
    ptx::Wgmma<Query, kHeadSizeV>::registers(output, weights[k], values.descriptor(k * 16 * 128));
  }
  ptx::wgmma_commit();
}

/// Values of tokens that no row may see are whatever lay there; 0 · NaN must not be.
__device__ __forceinline__ void clear_values(unsigned char* values, int first, int low, int high,
                                             int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  for (int i = thread; i < kBlockN * kChunksV * 8; i += 128) {
    const int token = first + i / 8 % kBlockN;
    if (token < low || token >= high) {
      reinterpret_cast<uint4*>(values)[i] = {0U, 0U, 0U, 0U};
    }
  }
  ptx::fence_async_shared();
  ptx::barrier_sync<128>(kGroupOnly + warpgroup);
}

/// In groups of four lanes that hold a row: word i of lane j to word j of lane i.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const auto swap = [](unsigned& a, unsigned& b, bool keep_b, int distance) {
    const unsigned got = __shfl_xor_sync(0xFFFFFFFFU, keep_b ? a : b, distance);
    (keep_b ? a : b) = got;
  };
  swap(words[0], words[1], (lane & 1) != 0, 1);
  swap(words[2], words[3], (lane & 1) != 0, 1);
  swap(words[0], words[2], (lane & 2) != 0, 2);
  swap(words[1], words[3], (lane & 2) != 0, 2);
}

__device__ __forceinline__ void store(const Sums& output, const Softmax& softmax, float scale,
                                      const ForwardParams& p, const HeadValues<kHeadValues>& heads,
                                      const WorkItem& item, const Rows& rows, int kv_head, int row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = row + thread_row(i);
    const bool inside = r < rows.count;
    RowEnd end = finish_row(softmax.maximum[i] * scale, quad_sum(softmax.sum[i]),
                            inside ? row_sink(heads, rows, kv_head, r) : 0.0F, item.slot >= 0);
    end.factor *= p.value_scale;
    Destination to{};
    if (inside) {
      // All four lanes of a row write the same log-sum-exp.
      to = destination<kBlockM>(p, item, rows, kv_head, r, end.lse);
    }
    if (item.slot >= 0) {
#pragma unroll
      for (int n = 0; n < kHeadSizeV / 8; ++n) {
        if (inside) {
          *reinterpret_cast<float2*>(to.partial + n * 8 + lane % 4 * 2) = {
              finish(output[n * 4 + i * 2], end), finish(output[n * 4 + i * 2 + 1], end)};
        }
      }
      continue;
    }
#pragma unroll
    for (int n = 0; n < kHeadSizeV / 8; n += 4) {
      unsigned words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = ptx::pack<Query>(finish(output[(n + w) * 4 + i * 2], end),
                                    finish(output[(n + w) * 4 + i * 2 + 1], end));
      }
      transpose_quad(words);
      if (inside) {
        *reinterpret_cast<uint4*>(to.output + (n + lane % 4) * 8) = {words[0], words[1], words[2],
                                                              words[3]};
      }
    }
  }
}

__device__ __forceinline__ void consume(const ForwardParams& p,
                                        const HeadValues<kHeadValues>& heads, unsigned shared,
                                        unsigned char* memory, const Work* works, int warpgroup) {
  const Rings ring = rings(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
  const float scale = kTransform ? 1.0F : p.scale;
  const float slack = kTransform ? kSlack : kSlack * p.inverse_scale;
  const auto query = [&](Position<kQueryStages> at) {
    return shared + kLayout.query + (at.stage() * kChunks * kBlockM + warpgroup * 64) * 128;
  };
  const auto keys = [&](Position<kStages> at) {
    return shared + kLayout.keys + at.stage() * kLayout.key_bytes;
  };
  const auto values = [&](Position<kStages> at) {
    return shared + kLayout.values + at.stage() * kLayout.value_bytes;
  };
  Position<kWorkStages> work_at;
  Position<kQueryStages> query_at;
  Position<kStages> keys_at;
  Scores scores;
  Weights weights;
  // The item in hand: its tiles, from the last down to tile_begin, of which all rows see those from
  // plain_begin to plain_end − 1 whole.
  int tile = 0;
  int tile_begin = 0;
  int plain_begin = 0;
  int plain_end = 0;
  /// False when nothing is left.
  const auto begin_item = [&] {
    ring.work.wait_full(work_at);
    const Work& work = works[work_at.stage()];
    if (uniform(work.kv_head) < 0) {
      return false;
    }
    tile = uniform(work.item.tile_end) - 1;
    tile_begin = uniform(work.item.tile_begin);
    plain_begin = uniform(work.plain_begin);
    plain_end = uniform(work.plain_end);
    ring.query.wait_full(query_at);
    ring.keys.wait_full(keys_at);
    return true;
  };
  // Values come one tile behind the keys.
  const auto values_at = [&] { return Position<kStages>{keys_at.number - 1}; };
  const auto wait_next_keys = [&] {
    if (tile > tile_begin) {
      ring.keys.wait_full(keys_at);
    }
  };

  bool more = begin_item();
  issue_scores(scores, query(query_at), keys(keys_at));
  while (more) {
    const Work& work = works[work_at.stage()];
    Sums output;
    Softmax softmax;
    float slopes[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Rows past the request's end hold others' queries: their maxima must not be what makes those
      // of a warp grow, or a request's results would depend on its neighbours.
      const bool inside = row + thread_row(i) < work.rows.count;
      softmax.maximum[i] = inside ? -kInfinity : kInfinity;
      softmax.sum[i] = 0.0F;
      softmax.factor[i] = 1.0F;
      const int head = work.kv_head * kGroup + (work.rows.first + row + thread_row(i)) % kGroup;
      slopes[i] = kAlibi ? heads.alibi_slope[head] : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kHeadSizeV / 2; ++i) {
      output[i] = 0.0F;
    }
    const auto score = [&](int i, int n, int e) -> float& { return scores[n * 4 + i * 2 + e]; };
    const auto settle = [&] {
      const int key = tile * kBlockN + lane % 4 * 2;
      if constexpr (kTransform) {
        transform_scores<kRows, kBlockN / 8>(score, p, slopes, work.rows, row, key);
      }
      if (tile < plain_begin || tile >= plain_end) {
        mask_scores<kRows, kBlockN / 8>(score, work.rows, row, key);
      }
    };
    /// Values of a tile have come, and hold nothing that was not asked for.
    const auto wait_values = [&](int number) {
      ring.values.wait_full(values_at());
      if (number < plain_begin || number >= plain_end) {
        const int first = number * kBlockN;
        if (first < work.low || first + kBlockN > work.high) {
          clear_values(memory + kLayout.values + values_at().stage() * kLayout.value_bytes, first,
                       work.low, work.high, warpgroup);
        }
      }
    };

    /// When nothing is left, nobody looks at the scores.
    const auto begin_next = [&] {
      work_at.number += 1;
      more = begin_item();
      issue_scores(scores, query(query_at), keys(keys_at));
    };

    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(scores);
    ring.keys.release(keys_at);
    keys_at.number += 1;
    settle();
    softmax.raise(scores, slack, scale);
    softmax.exponentials(scores, scale);
    pack_weights(weights, scores);
    wait_next_keys();

    while (--tile >= tile_begin) {
      issue_scores(scores, query(query_at), keys(keys_at));
      wait_values(tile + 1);
      issue_output(output, weights, values(values_at()));
      ptx::wgmma_wait<1>();
      ptx::wgmma_touch(scores);
      ring.keys.release(keys_at);
      keys_at.number += 1;
      settle();
      const bool raised = softmax.raise(scores, slack, scale);
      softmax.exponentials(scores, scale);
      softmax.hold();
      wait_next_keys();
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(output);
      ptx::wgmma_touch(weights);
      ring.values.release({keys_at.number - 2});
      if (raised) {
        softmax.rescale(output);
      }
      pack_weights(weights, scores);
    }
    ring.query.release(query_at);
    query_at.number += 1;
    wait_values(tile + 1);
    issue_output(output, weights, values(values_at()));
    if constexpr (kQueryStages > 1) {
      begin_next();  // Beside the end of this one.
      ptx::wgmma_wait<1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    ptx::wgmma_touch(output);
    ring.values.release(values_at());
    const int kv_head = uniform(work.kv_head);
    store(output, softmax, scale, p, heads, work.item, work.rows, kv_head, row);
    if (uniform(work.item.slot) >= 0) {
      constexpr int kThreads = kWarpgroups * 128;
      const int thread = static_cast<int>(threadIdx.x) - 128;
      ptx::barrier_sync<kThreads>(kConsumers);
      const bool last = thread == 0 && arrives_last(p, work.item, kv_head);
      if (ptx::barrier_or<kThreads>(kConsumers, last)) {
        merge_parts<kBlockM, kThreads>(p, heads, work.item, work.rows, kv_head, thread);
      }
    }
    if constexpr (kQueryStages == 1) {
      begin_next();
    }
    ring.work.release({work_at.number - 1});
  }
  ptx::wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kShape.threads(), 1)
    flash_forward(const __grid_constant__ ForwardParams p,
                  const __grid_constant__ ptx::TensorMap query_map,
                  const __grid_constant__ ptx::TensorMap key_map,
                  const __grid_constant__ ptx::TensorMap value_map,
                  const __grid_constant__ HeadValues<kHeadValues> heads) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = ptx::shared_address(memory);
  auto* works = reinterpret_cast<Work*>(memory + kLayout.works);
  if (threadIdx.x == 0) {
    const Rings ring = rings(shared);
    ring.keys.init(kConsumerWarps);
    ring.values.init(kConsumerWarps);
    ring.query.init(kConsumerWarps);
    ring.work.init(kConsumerWarps + 2);
    ptx::mbarrier_init(ring.leave, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(query_map);
    ptx::prefetch_tensor_map(key_map);
    ptx::prefetch_tensor_map(value_map);
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::give_registers<kProducerRegisters>();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 0) {
      schedule(p, shared, works);
    } else if (warp == 1) {
      produce_keys(p, query_map, key_map, shared, works);
    } else if (warp == 2) {
      produce_values(p, value_map, shared, works);
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(p, heads, shared, memory, works, warpgroup - 1);
  }
}

}  // namespace flash_attn
