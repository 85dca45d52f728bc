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

/// Behind the requests stands one of the rows that no request owns: it sees nothing, so zeros are
/// written.
__device__ __forceinline__ int num_requests(const PlanParams& p) {
  return (p.one_sequence > 0 ? 1 : p.num_requests) + 1;
}

__device__ __forceinline__ Request load_request(const PlanParams& p, int index) {
  if (index == num_requests(p) - 1) {
    const int start = p.query_start_loc[p.num_requests];
    return {0, start, p.num_rows - start, 0};
  }
  if (p.one_sequence > 0) {
    return {0, 0, p.query_start_loc[p.num_requests], p.one_sequence};
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
__device__ __forceinline__ void for_each_tile(const PlanParams& p, Visit&& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int count = num_requests(p);
  for (int base = static_cast<int>(threadIdx.x) - lane; base < count; base += kThreads) {
    const bool valid = base + lane < count;
    const Request request = valid ? load_request(p, base + lane) : Request{0, 0, 0, 0};
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

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_plan(const __grid_constant__ PlanParams p) {
  __shared__ unsigned long long key_tiles[2];
  __shared__ int items[2];
  __shared__ int combines[2];
  __shared__ int slots[2];
  __shared__ int part[2];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 2) {
    key_tiles[thread] = 0ULL;
    items[thread] = combines[thread] = slots[thread] = 0;
  }
  __syncthreads();
  unsigned long long seen[2] = {0ULL, 0ULL};
  for_each_tile(p, [&](const Request&, int number, const Tile& tile) {
    seen[number] += static_cast<unsigned long long>(tile.end - tile.begin);
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (seen[n] != 0ULL) {
      atomicAdd(&key_tiles[n], seen[n]);
    }
  }
  __syncthreads();
  if (thread < 2) {
    const PlanClass& c = p.classes[thread];
    const unsigned long long share =
        (key_tiles[thread] * p.num_kv_heads + static_cast<unsigned>(c.capacity * c.waves) - 1) /
        static_cast<unsigned>(c.capacity * c.waves);
    part[thread] = max(static_cast<int>(min(share, 1ULL << 30)), c.min_tiles);
  }
  __syncthreads();
  for_each_tile(p, [&](const Request& r, int number, const Tile& tile) {
    const PlanClass& c = p.classes[number];
    const int length = tile.end - tile.begin;
    int splits = c.forced_splits > 0 ? min(c.forced_splits, length)
                                     : (length + part[number] - 1) / part[number];
    int slot = -1;
    if (splits > 1) {
      slot = atomicAdd(&slots[number], splits);
      if (slot + splits > c.max_slots) {
        // Cannot happen with the sizes the host computes; a wrong answer would be worse than slow.
        splits = 1;
        slot = -1;
      }
    }
    splits = max(splits, 1);  // A tile that sees nothing still writes zeros.
    const int at = atomicAdd(&items[number], splits);
    for (int s = 0; s < splits && at + s < c.max_items; ++s) {
      c.items[at + s] = {
          .request = r.index,
          .query_start = r.query_start,
          .query_len = r.query_len,
          .seq_len = r.seq_len,
          .first_row = tile.first_row,
          .tile_begin = tile.begin + static_cast<int>(static_cast<long long>(length) * s / splits),
          .tile_end =
              tile.begin + static_cast<int>(static_cast<long long>(length) * (s + 1) / splits),
          .slot = slot < 0 ? -1 : slot + s};
    }
    if (splits > 1) {
      c.combines[atomicAdd(&combines[number], 1)] = {.query_start = r.query_start,
                                                     .query_len = r.query_len,
                                                     .first_row = tile.first_row,
                                                     .first_slot = slot,
                                                     .num_slots = splits,
                                                     .padding = {0, 0, 0}};
    }
  });
  __syncthreads();
  if (thread < 2) {
    *p.classes[thread].counts = {.items = min(items[thread], p.classes[thread].max_items),
                                 .combines = combines[thread],
                                 .slots = slots[thread],
                                 .padding = 0};
  }
}

}  // namespace flash_attn
