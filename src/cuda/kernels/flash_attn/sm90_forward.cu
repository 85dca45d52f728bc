// Attention forward for sm_90a: TMA, wgmma, warp specialisation. There is one block an SM, which
// takes work items of the planner until none is left. Its warps have roles: producers, a warp or a
// few each, and two or three warpgroups of consumers with 64 rows each:
//
//   schedule        claims the next item and says what it is
//   produce_keys    its query, then its tiles of keys, as room comes up
//   produce_values  its tiles of values
//   widen           where they come in fp8: makes tiles of 16 bits of values, and of keys if the
//                   query has 16 bits
//   consume         scores of tile i + 1 = query · keysᵀ and output += p · values of tile i are
//                   issued together; the softmax of tile i + 1 runs beside the second of them, and
//                   beside the products of the other warpgroups. The first scores of the next item
//                   are issued before the output of this one is stored
//
// What passes between them stands in rings of stages in shared memory, each with a barrier for full
// and one for empty. Tiles of keys are walked from the last to the first, so that the masked ones
// of a causal layer come first. Rows are query rows times heads of a group (packed GQA): rows.cuh.

#include "config.cuh"
#include "flash_attn/epilogue.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores.cuh"
#include "flash_attn/sm90_pipeline.cuh"
#include "flash_attn/sm90_produce.cuh"
#include "flash_attn/sm90_softmax.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn {

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
    ptx::Wgmma<Weight, kHeadSizeV>::registers(output, weights[k], values.descriptor(k * 16 * 128));
  }
  ptx::wgmma_commit();
}

/// Values of tokens that no row may see are whatever lay there; 0 · NaN must not be.
__device__ __forceinline__ void clear_values(unsigned char* values, int first, int low, int high,
                                             int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  for (int i = thread; i < kBlockN * kValueChunks * 8; i += 128) {
    const int token = first + i / 8 % kBlockN;
    if (token < low || token >= high) {
      reinterpret_cast<uint4*>(values)[i] = {0U, 0U, 0U, 0U};
    }
  }
  ptx::fence_async_shared();
  ptx::barrier_sync<128>(kGroupOnly + warpgroup);
}

/// A warp's 16 rows, piece by piece: into shared memory as fragments, out of it as rows, so that
/// eight lanes write 128 bytes of one.
__device__ __forceinline__ void store_rows(const Sums& output, const float (&factors)[kRows],
                                           const ForwardParams& p, const WorkItem& item,
                                           const Rows& rows, int kv_head, int first_row,
                                           unsigned shared) {
  constexpr int kChunks = kStoreColumns / 8;
  constexpr int kPasses = 16 * kChunks / 32;
  int lane = static_cast<int>(threadIdx.x) % 32;
  // Else what follows from it would be held in registers from item to item.
  asm volatile("" : "+r"(lane));
  const unsigned piece = shared + kLayout.output + static_cast<unsigned>(first_row) * kStorePitch;
#pragma unroll
  for (int column = 0; column < kHeadSizeV; column += kStoreColumns) {
    __syncwarp();  // All lanes have read the piece before.
#pragma unroll
    for (int n = 0; n < kChunks; n += 2) {
      unsigned words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int at = (column / 8 + n + w / 2) * 4 + w % 2 * 2;
        words[w] = ptx::pack<Output>(output[at] * factors[w % 2], output[at + 1] * factors[w % 2]);
      }
      ptx::stmatrix_x4(piece + lane % 16 * kStorePitch + (n + lane / 16) * 16, words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = lane / kChunks + i * (32 / kChunks);
      const uint4 chunk = ptx::load_shared(piece + row * kStorePitch + lane % kChunks * 16);
      if (first_row + row < rows.count) {
        Output* to = output_row(p, item, rows, kv_head, first_row + row) + column;
        *reinterpret_cast<uint4*>(to + lane % kChunks * 8) = chunk;
      }
    }
  }
}

__device__ __forceinline__ void store(Sums& output, const Softmax& softmax, float scale,
                                      const ForwardParams& p, const HeadValues<kHeadValues>& heads,
                                      const WorkItem& item, const Rows& rows, int kv_head, int row,
                                      unsigned shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Else what follows from it would be held in registers from item to item.
  asm volatile("" : "+r"(row));
  const bool partial = item.slot >= 0;
  float factors[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = row + thread_row(i);
    const bool inside = r < rows.count;
    RowEnd end = finish_row(softmax.maximum[i] * scale, quad_sum(softmax.sum[i]),
                            inside ? row_sink(heads, rows, kv_head, r) : 0.0F, partial);
    end.factor *= p.value_scale;
    factors[i] = end.factor;
    if (!inside) {
      continue;
    }
    // All four lanes of a row write the same log-sum-exp.
    const Destination to = destination<kBlockM>(p, item, rows, kv_head, r, end.lse);
    if (partial) {
#pragma unroll
      for (int n = 0; n < kHeadSizeV / 8; ++n) {
        *reinterpret_cast<float2*>(to.partial + n * 8 + lane % 4 * 2) = {
            finish(output[n * 4 + i * 2], end), finish(output[n * 4 + i * 2 + 1], end)};
      }
    }
  }
  if (partial) {
    return;
  }
  // A row that saw no key becomes 0, whatever stands there: 0 · NaN is NaN.
  if (__any_sync(0xFFFFFFFFU, factors[0] == 0.0F || factors[1] == 0.0F)) {
#pragma unroll
    for (int n = 0; n < kHeadSizeV / 2; ++n) {
      output[n] = factors[n / 2 % 2] == 0.0F ? 0.0F : output[n];
    }
  }
  store_rows(output, factors, p, item, rows, kv_head, row - lane / 4, shared);
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
    return shared + kLayout.query + (at.stage() * kQueryChunks * kBlockM + warpgroup * 64) * 128;
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
  // The item in hand: its tiles, from the last that this warpgroup's rows see down to tile_begin,
  // of which all rows see those from plain_begin to plain_end − 1 whole.
  int tile = 0;
  int tile_begin = 0;
  int plain_begin = 0;
  int plain_end = 0;
  int passed_over = 0;  // Tiles before that, which other warpgroups' rows see.
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
    plain_end = uniform(work.plain_end[warpgroup]);
    ring.query.wait_full(query_at);
    ring.keys.wait_full(keys_at);
    if constexpr (kRightBound) {
      for (const int end = uniform(work.tile_end[warpgroup]); tile >= end; --tile) {
        ring.keys.release(keys_at);
        keys_at.number += 1;
        passed_over += 1;
        ring.keys.wait_full(keys_at);
      }
    }
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
    for (; passed_over > 0; --passed_over) {
      const Position<kStages> at{values_at().number - passed_over};
      ring.values.wait_full(at);
      ring.values.release(at);
    }
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
    if constexpr (!kStoreInQuery) {
      ring.query.release(query_at);
      query_at.number += 1;
    }
    wait_values(tile + 1);
    const Position<kStages> last_values = values_at();
    issue_output(output, weights, values(last_values));
    if constexpr (kQueryStages > 1) {
      begin_next();  // Beside the end of this one.
      ptx::wgmma_wait<1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    ptx::wgmma_touch(output);
    ring.values.release(last_values);
    const int kv_head = uniform(work.kv_head);
    if constexpr (kStoreInQuery) {
      // Everyone is done with the query, of which a warp's piece covers others' rows.
      ptx::barrier_sync<kWarpgroups * 128>(kConsumers);
    }
    store(output, softmax, scale, p, heads, work.item, work.rows, kv_head, row, shared);
    if constexpr (kStoreInQuery) {
      ptx::fence_async_shared();
      ring.query.release(query_at);
      query_at.number += 1;
    }
    if (uniform(work.item.slot) >= 0) {
      constexpr int kThreads = kWarpgroups * 128;
      const int thread = static_cast<int>(threadIdx.x) - kProducerThreads;
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
    ring.keys.init(kConsumerWarps, kWidenKeys ? kWideners : 1);
    ring.values.init(kConsumerWarps, kWidenValues ? kWideners : 1);
    ring.query.init(kConsumerWarps);
    if constexpr (kWidenValues) {
      ring.raw_keys.init(kWideners);
      ring.raw_values.init(kWideners);
    }
    ring.work.init(kConsumerWarps + kWideners + 2);
    ptx::mbarrier_init(ring.leave, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(query_map);
    ptx::prefetch_tensor_map(key_map);
    ptx::prefetch_tensor_map(value_map);
  }
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup * 128 < kProducerThreads) {
    ptx::give_registers<kProducerRegisters>();
    produce<Cache>(p, query_map, key_map, value_map, shared, works);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume(p, heads, shared, memory, works, warpgroup - kProducerThreads / 128);
  }
}

}  // namespace flash_attn
