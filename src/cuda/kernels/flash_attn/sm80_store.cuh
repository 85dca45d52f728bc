#pragma once

// From the fragments of sm80_forward.cu to rows: directly, or through the warps that had other keys
// of the same rows.

#include "flash_attn/epilogue.cuh"
#include "flash_attn/sm80_fragments.cuh"

namespace flash_attn {

/// Output of warps that have all keys of their rows: through the query's shared memory, whose rows
/// each warp has to itself, to stores of 16 bytes.
__device__ __forceinline__ void store_rows(State& state, const Team& team, float scale,
                                           const ForwardParams& p,
                                           const HeadValues<kHeadValues>& heads,
                                           const WorkItem& item, const Rows& rows, int kv_head,
                                           int warp_row, unsigned char* tile_o) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool partial = item.slot >= 0;
  __syncwarp();  // All lanes have read the query.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    state.sum[i] = quad_sum(state.sum[i]);
  }
  team.combine(state.sum, [](float a, float b) { return a + b; });
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp_row + thread_row(i) + lane / 4;
    RowEnd end = finish_row(state.maximum[i] * scale, state.sum[i],
                            row_sink(heads, rows, kv_head, row), partial);
    end.factor *= p.value_scale;
    Destination to{};
    if (row < rows.count) {
      // All four lanes of a row write the same log-sum-exp.
      to = destination<kBlockM>(p, item, rows, kv_head, row, end.lse);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const Columns columns = columns_of(state, i, n);
      const float v0 = finish(columns.first, end);
      const float v1 = finish(columns.second, end);
      const int column = columns.column;
      if (!partial) {
        *reinterpret_cast<unsigned*>(tile_o + row * kOutputPitch + column * 2) =
            ptx::pack<Query>(v0, v1);
      } else if (to.partial != nullptr && column < kHeadSizeV) {
        *reinterpret_cast<float2*>(to.partial + column) = {v0, v1};
      }
    }
  }
  if (partial) {
    return;
  }
  __syncwarp();
  constexpr int kChunks = kColumns / 8;
#pragma unroll 2
  for (int i = lane; i < 16 * kRowTiles * kChunks; i += 32) {
    const int row = warp_row + i / kChunks;
    const int chunk = first_column() / 8 + i % kChunks;
    if (row < rows.count && chunk * 8 < kHeadSizeV) {
      const int packed = rows.first + row;
      Query* to = static_cast<Query*>(p.output.data) +
                  (item.query_start + packed / kGroup) * p.output.row_stride +
                  (kv_head * kGroup + packed % kGroup) * p.output.head_stride;
      store_chunk(to, tile_o + row * kOutputPitch + chunk * 16, chunk);
    }
  }
}

/// Output of warps that had different keys: all meet in shared memory.
__device__ __forceinline__ void merge_warps(const State& state, float scale, const ForwardParams& p,
                                            const HeadValues<kHeadValues>& heads,
                                            const WorkItem& item, const Rows& rows, int kv_head,
                                            int warp_row, int warp_n, unsigned char* scratch) {
  constexpr int kPitch = kHeadPadV + 4;
  auto* outputs = reinterpret_cast<float*>(scratch);  // [kWarpsN][kBlockM][kPitch]
  auto* ends = reinterpret_cast<float2*>(outputs + kWarpsN * kBlockM * kPitch);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp_n * kBlockM + warp_row + thread_row(i) + lane / 4;
    const float sum = quad_sum(state.sum[i]);
    if (lane % 4 == 0) {
      ends[row] = {state.maximum[i] * scale, sum};
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const Columns columns = columns_of(state, i, n);
      *reinterpret_cast<float2*>(outputs + row * kPitch + columns.column) = {columns.first,
                                                                             columns.second};
    }
  }
  __syncthreads();
  constexpr int kQuads = kHeadSizeV / 4;
  for (int i = static_cast<int>(threadIdx.x); i < rows.count * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int column = i % kQuads * 4;
    float maximum = -kInfinity;
#pragma unroll
    for (int w = 0; w < kWarpsN; ++w) {
      maximum = fmaxf(maximum, ends[w * kBlockM + row].x);
    }
    float sum = 0.0F;
    float4 out = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int w = 0; w < kWarpsN; ++w) {
      const float2 end = ends[w * kBlockM + row];
      if (end.y == 0.0F) {
        continue;  // Saw nothing.
      }
      const float weight = end.x == maximum ? 1.0F : ptx::exp2_approx(end.x - maximum);
      const auto part =
          *reinterpret_cast<const float4*>(outputs + (w * kBlockM + row) * kPitch + column);
      sum += weight * end.y;
      out.x += weight * part.x;
      out.y += weight * part.y;
      out.z += weight * part.z;
      out.w += weight * part.w;
    }
    RowEnd end = finish_row(maximum, sum, row_sink(heads, rows, kv_head, row), item.slot >= 0);
    end.factor *= p.value_scale;
    store_columns(destination<kBlockM>(p, item, rows, kv_head, row, end.lse), column,
                  {finish(out.x, end), finish(out.y, end), finish(out.z, end), finish(out.w, end)});
  }
}

}  // namespace flash_attn
