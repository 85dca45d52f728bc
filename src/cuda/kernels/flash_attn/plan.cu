// The plan of a step, made on the device since lengths may be known only there: cuts every request
// into tiles of query rows, and the keys of a tile into as many parts as give each block that the
// device can run an equal share of the batch's keys. One block, since a step's requests are few.

#include "config.cuh"
#include "flash_attn/params.cuh"

namespace flash_attn {

using namespace foveal::cuda::flash_attn;

constexpr int kThreads = 1024;

struct Request {
  int index;
  int query_start;
  int query_len;
  int seq_len;
};

struct Tile {
  int first_row;
  int begin;  // Tiles of keys.
  int end;
};

/// The prefix of a cascade is read through the table's row of the first request that has queries:
/// rows of others may be padding. `prefix_row` is that request.
///
/// Behind the requests stands one of the rows that no request owns: it sees nothing, so zeros are
/// written.
__device__ __forceinline__ int num_requests(const PlanParams& p) {
  return (p.one_sequence > 0 ? 1 : p.num_requests) + 1;
}

__device__ __forceinline__ Request load_request(const PlanParams& p, int prefix_row, int index) {
  if (index == num_requests(p) - 1) {
    const int start = p.query_start_loc[p.num_requests];
    return {0, start, p.num_rows - start, 0};
  }
  if (p.one_sequence > 0) {
    return {prefix_row, 0, p.query_start_loc[p.num_requests], p.one_sequence};
  }
  const int start = p.query_start_loc[index];
  return {index, start, p.query_start_loc[index + 1] - start, p.seq_lens[index]};
}

__device__ __forceinline__ int class_of(const PlanParams& p, const Request& request) {
  return request.query_len * p.group <= p.rows_max ? 0 : 1;
}

/// Tile of query rows number `index`, and the keys that any of its rows sees.
__device__ __forceinline__ Tile tile_of(const PlanParams& p, const PlanClass& c,
                                        const Request& request, int index) {
  const int first_row = index * c.block_rows;
  const int last_row = min(first_row + c.block_rows, request.query_len * p.group) - 1;
  const int positions = request.seq_len - request.query_len;
  int low = p.key_begin;
  int high = request.seq_len;
  if (p.window_left >= 0) {
    low = max(low, positions + first_row / p.group - p.window_left);
  }
  if (p.window_right >= 0) {
    high = min(high, positions + last_row / p.group + p.window_right + 1);
  }
  if (high <= low) {
    return {first_row, 0, 0};
  }
  return {first_row, low / c.block_keys, (high + c.block_keys - 1) / c.block_keys};
}

/// Calls visit(request, class, tile) for every tile of query rows. A lane takes a request with few
/// tiles, a warp one with many; the last tiles, which see most keys, come first.
template <typename Visit>
__device__ __forceinline__ void for_each_tile(const PlanParams& p, int prefix_row, Visit&& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int count = num_requests(p);
  for (int base = static_cast<int>(threadIdx.x) - lane; base < count; base += kThreads) {
    const bool valid = base + lane < count;
    const Request request = valid ? load_request(p, prefix_row, base + lane) : Request{0, 0, 0, 0};
    const int number = class_of(p, request);
    const PlanClass& c = p.classes[number];
    const int tiles = (request.query_len * p.group + c.block_rows - 1) / c.block_rows;
    const bool many = tiles > 4;
    if (!many) {
      for (int t = tiles - 1; t >= 0; --t) {
        visit(request, number, tile_of(p, c, request, t));
      }
    }
    for (unsigned left = __ballot_sync(0xFFFFFFFFU, many); left != 0U; left &= left - 1U) {
      const int source = __ffs(static_cast<int>(left)) - 1;
      const Request r{__shfl_sync(0xFFFFFFFFU, request.index, source),
                      __shfl_sync(0xFFFFFFFFU, request.query_start, source),
                      __shfl_sync(0xFFFFFFFFU, request.query_len, source),
                      __shfl_sync(0xFFFFFFFFU, request.seq_len, source)};
      const int n = class_of(p, r);
      const PlanClass& k = p.classes[n];
      for (int t = (r.query_len * p.group + k.block_rows - 1) / k.block_rows - 1 - lane; t >= 0;
           t -= 32) {
        visit(r, n, tile_of(p, k, r, t));
      }
    }
  }
}

/// Lengths of a part that are tried: an equal share, and longer by an eighth each.
constexpr int kCandidates = 4;
/// Work items by length, four buckets for each power of two.
constexpr int kBuckets = 128;
/// Of the L2 cache: what the keys and values may take of KV heads whose work is done together, and of
/// those at the end, where it matters more that the last items are short.
constexpr long long kSectionBytes = 12 << 20;
constexpr long long kTailBytes = 36 << 20;

struct ClassState {
  unsigned long long key_tiles;
  unsigned long long keys;  // Of all requests.
  int candidates[kCandidates];
  int items_of[kCandidates];  // Items that each would make.
  int part;                   // Key tiles of a part at most.
  int slots;
  int split_tiles;
  int items;
  int bucket_items[kBuckets];
  int bucket_next[kBuckets];
};

/// Key tiles of each of so many equal parts of a class's work.
__device__ __forceinline__ int share(const PlanParams& p, const ClassState& state, int parts) {
  const unsigned long long tiles = state.key_tiles * p.num_kv_heads;
  return static_cast<int>(min((tiles + parts - 1) / parts, 1ULL << 30));
}

/// One item for each block that runs at a time, where that makes none much longer than its share.
/// Else several for each, so that other lengths even out: long enough for their beginning and end
/// to weigh little, but no longer than a share.
__device__ __forceinline__ int choose_part(const PlanParams& p, const PlanClass& c,
                                           const ClassState& state) {
  for (int i = 0; i < kCandidates; ++i) {
    if (static_cast<long long>(state.items_of[i]) * p.num_kv_heads <= c.capacity) {
      return state.candidates[i];
    }
  }
  const int several = max(share(p, state, c.capacity * c.waves), c.good_tiles);
  return max(min(several, share(p, state, c.capacity)), c.min_tiles);
}

/// How many KV heads' keys and values fit.
__device__ __forceinline__ int heads_in(const PlanParams& p, const ClassState& state,
                                        long long bytes) {
  const long long head_bytes = static_cast<long long>(state.keys) * p.kv_token_bytes;
  return static_cast<int>(max(1LL, min(bytes / max(head_bytes, 1LL),
                                       static_cast<long long>(p.num_kv_heads))));
}

/// A tile that sees nothing still writes zeros.
__device__ __forceinline__ int parts_of(const PlanClass& c, int part, int length) {
  return max(1, c.forced_splits > 0 ? min(c.forced_splits, length) : (length + part - 1) / part);
}

/// The longest first.
__device__ __forceinline__ int bucket_of(int length) {
  const int power = 31 - __clz(length | 1);
  const int quarter = power >= 2 ? length >> (power - 2) : length << (2 - power);
  return kBuckets - 1 - (4 * power + quarter % 4);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_plan(const __grid_constant__ PlanParams p) {
  __shared__ ClassState states[2];
  __shared__ int prefix_row;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < static_cast<int>(sizeof(states) / sizeof(int)); i += kThreads) {
    reinterpret_cast<int*>(states)[i] = 0;
  }
  if (thread == 0) {
    prefix_row = max(p.num_requests - 1, 0);
  }
  __syncthreads();
  if (p.one_sequence > 0) {
    for (int i = thread; i < p.num_requests; i += kThreads) {
      if (p.query_start_loc[i + 1] > 0) {
        atomicMin(&prefix_row, i);
      }
    }
    __syncthreads();
  }

  unsigned long long key_tiles[2] = {0ULL, 0ULL};
  for_each_tile(p, prefix_row, [&](const Request&, int number, const Tile& tile) {
    key_tiles[number] += static_cast<unsigned long long>(tile.end - tile.begin);
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (key_tiles[n] != 0ULL) {
      atomicAdd(&states[n].key_tiles, key_tiles[n]);
    }
  }
  for (int i = thread; i < num_requests(p); i += kThreads) {
    const Request request = load_request(p, prefix_row, i);
    atomicAdd(&states[class_of(p, request)].keys,
              static_cast<unsigned long long>(max(request.seq_len, 0)));
  }
  __syncthreads();
  if (thread < 2 * kCandidates) {
    ClassState& state = states[thread / kCandidates];
    const PlanClass& c = p.classes[thread / kCandidates];
    const int number = thread % kCandidates;
    const long long equal = share(p, state, c.capacity);
    state.candidates[number] = max(static_cast<int>(equal + equal * number / 8), c.min_tiles);
  }
  __syncthreads();

  int items_of[2][kCandidates] = {};
  for_each_tile(p, prefix_row, [&](const Request&, int number, const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
      const int parts =
          parts_of(p.classes[number], states[number].candidates[i], tile.end - tile.begin);
      items_of[0][i] += number == 0 ? parts : 0;
      items_of[1][i] += number == 0 ? 0 : parts;
    }
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) {
      const int sum = __reduce_add_sync(0xFFFFFFFFU, items_of[n][i]);
      if (thread % 32 == 0 && sum != 0) {
        atomicAdd(&states[n].items_of[i], sum);
      }
    }
  }
  __syncthreads();
  if (thread < 2) {
    states[thread].part = choose_part(p, p.classes[thread], states[thread]);
  }
  __syncthreads();

  for_each_tile(p, prefix_row, [&](const Request&, int number, const Tile& tile) {
    ClassState& state = states[number];
    const int length = tile.end - tile.begin;
    const int parts = parts_of(p.classes[number], state.part, length);
    atomicAdd(&state.bucket_items[bucket_of(length / parts)], parts);
  });
  __syncthreads();
  if (thread < 2 * kBuckets) {
    ClassState& state = states[thread / kBuckets];
    const int bucket = thread % kBuckets;
    int before = 0;
#pragma unroll
    for (int i = 0; i < kBuckets; ++i) {
      before += i < bucket ? state.bucket_items[i] : 0;
    }
    state.bucket_next[bucket] = before;
    if (bucket == kBuckets - 1) {
      state.items = before + state.bucket_items[bucket];
    }
  }
  __syncthreads();

  for_each_tile(p, prefix_row, [&](const Request& r, int number, const Tile& tile) {
    const PlanClass& c = p.classes[number];
    ClassState& state = states[number];
    const int length = tile.end - tile.begin;
    const int parts = parts_of(c, state.part, length);
    const int at = atomicAdd(&state.bucket_next[bucket_of(length / parts)], parts);
    WorkItem item{.request = r.index,
                  .query_start = r.query_start,
                  .query_len = r.query_len,
                  .seq_len = r.seq_len,
                  .first_row = tile.first_row,
                  .tile_begin = tile.begin,
                  .tile_end = tile.end,
                  .slot = -1,
                  .first_slot = parts > 1 ? atomicAdd(&state.slots, parts) : 0,
                  .num_slots = parts,
                  .counter = 0,
                  .padding = 0};
    const bool split = parts > 1 && item.first_slot + parts <= c.max_slots;
    if (split) {
      item.counter = atomicAdd(&state.split_tiles, 1);
    }
    for (int s = 0; s < parts && at + s < c.max_items; ++s) {
      if (split) {
        item.tile_end = item.tile_begin + length / parts + (s < length % parts ? 1 : 0);
        item.slot = item.first_slot + s;
      } else if (s > 0) {
        // More slots than the host's bounds allow: the first item has all keys, the others no rows.
        item.query_len = item.first_row = item.tile_begin = item.tile_end = 0;
      }
      c.items[at + s] = item;
      item.tile_begin = item.tile_end;
    }
  });
  __syncthreads();
  for (int n = 0; n < 2; ++n) {
    const PlanClass& c = p.classes[n];
    if (thread == 0) {
      *c.counts = {.items = min(states[n].items, c.max_items),
                   .next_work = 0U,
                   .section_heads = heads_in(p, states[n], kSectionBytes),
                   .tail_heads = heads_in(p, states[n], kTailBytes)};
    }
    // The memory is new or was another plan's.
    for (int i = thread; i < states[n].split_tiles * p.num_kv_heads; i += kThreads) {
      c.counters[i] = 0U;
    }
  }
}

}  // namespace flash_attn
