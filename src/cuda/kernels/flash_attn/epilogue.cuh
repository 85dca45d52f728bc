#pragma once

// How rows end: normalised and stored, or, where other blocks have other keys of the same rows,
// stored as a partial result, which the block that finishes last merges with the others. Knows
// nothing of how a kernel holds its rows.

#include "config.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/atomic.cuh"
#include "ptx/convert.cuh"
#include "tile/types.cuh"

namespace flash_attn {

using Output = tile::TypeOf<kOutputType>::type;

/// What becomes of a row at its end: the factor that normalises its output, and its log-sum-exp.
struct RowEnd {
  float factor;
  float lse;  // Base 2, without the sink.
};
__device__ __forceinline__ RowEnd finish_row(float maximum, float sum, float sink, bool partial) {
  const float reference = maximum == -kInfinity ? 0.0F : maximum;
  float denominator = sum;
  if (kSinks && !partial) {
    denominator += ptx::exp2_approx(sink - reference);
  }
  return {sum == 0.0F ? 0.0F : 1.0F / denominator,
          sum == 0.0F ? -kInfinity : reference + ptx::log2_approx(sum)};
}

/// 0 for a row that saw no key, whatever stands there: 0 · NaN is NaN.
__device__ __forceinline__ float finish(float output, const RowEnd& end) {
  return end.factor == 0.0F ? 0.0F : output * end.factor;
}

__device__ __forceinline__ float row_sink(const HeadValues<kHeadValues>& heads, const Rows& rows,
                                          int kv_head, int row) {
  return kSinks ? heads.sink[kv_head * kGroup + (rows.first + row) % kGroup] : 0.0F;
}

/// Where one row's results go.
struct Destination {
  Output* output;  // Of the row and head; null where the result is partial.
  float* partial;  // Likewise.
};

__device__ __forceinline__ Output* output_row(const ForwardParams& p, const WorkItem& item,
                                              const Rows& rows, int kv_head, int row) {
  const int packed = rows.first + row;
  return static_cast<Output*>(p.output.data) +
         (item.query_start + packed / kGroup) * p.output.row_stride +
         (kv_head * kGroup + packed % kGroup) * p.output.head_stride;
}

/// In the tensors of the caller. The log-sum-exp (base 2) is stored at once.
__device__ __forceinline__ Destination final_destination(const ForwardParams& p,
                                                         const WorkItem& item, const Rows& rows,
                                                         int kv_head, int row, float lse) {
  const int packed = rows.first + row;
  const long long token = item.query_start + packed / kGroup;
  const int head = kv_head * kGroup + packed % kGroup;
  if (p.lse != nullptr) {
    p.lse[head * p.lse_head_stride + token * p.lse_row_stride] = lse * kLn2;
  }
  return {output_row(p, item, rows, kv_head, row), nullptr};
}

/// Number of a slot's first row among the partial results.
template <int kTileRows>
__device__ __forceinline__ long long first_partial_row(const ForwardParams& p, int slot,
                                                       int kv_head) {
  return (static_cast<long long>(slot) * p.num_kv_heads + kv_head) * kTileRows;
}

/// Among the partial results, where the item is a part of a tile.
template <int kTileRows>
__device__ __forceinline__ Destination destination(const ForwardParams& p, const WorkItem& item,
                                                   const Rows& rows, int kv_head, int row,
                                                   float lse) {
  if (item.slot < 0) {
    return final_destination(p, item, rows, kv_head, row, lse);
  }
  const long long at = first_partial_row<kTileRows>(p, item.slot, kv_head) + row;
  p.partial_lse[at] = lse;
  return {nullptr, p.partial_output + at * kHeadSizeV};
}

/// Four columns of a row.
__device__ __forceinline__ void store_columns(const Destination& to, int column,
                                              const float4& out) {
  if (to.partial != nullptr) {
    *reinterpret_cast<float4*>(to.partial + column) = out;
  } else if constexpr (kRowVectorBytes == 16) {
    *reinterpret_cast<uint2*>(to.output + column) = {ptx::pack<Output>(out.x, out.y),
                                                     ptx::pack<Output>(out.z, out.w)};
  } else {
    to.output[column] = ptx::from_float<Output>(out.x);
    to.output[column + 1] = ptx::from_float<Output>(out.y);
    to.output[column + 2] = ptx::from_float<Output>(out.z);
    to.output[column + 3] = ptx::from_float<Output>(out.w);
  }
}

/// Eight columns of a row that stand in shared memory.
__device__ __forceinline__ void store_chunk(Output* row, const unsigned char* source, int chunk) {
  if constexpr (kRowVectorBytes == 16) {
    *reinterpret_cast<uint4*>(row + chunk * 8) = *reinterpret_cast<const uint4*>(source);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      row[chunk * 8 + e] = reinterpret_cast<const Output*>(source)[e];
    }
  }
}

/// One thread of each part's block calls this, behind a barrier that follows the block's stores of
/// its partial result. True for the block that comes last: it merges the parts, its other threads
/// behind another barrier. The counter is 0 again then, for the next layer or replay.
///
/// Why that block sees every part, whichever it is. The stores of a part's threads precede its
/// caller's atomic in causality order, through the barrier; the atomic releases them, since a
/// release covers what the caller has seen as well as what it wrote. The atomics of all parts form
/// one chain of read-modify-writes, so each of them comes before the last one's read in
/// observation order: the last one's acquire synchronises with all the releases. The second barrier
/// carries that on to the other threads of the last block. Without the acquire an old line in its
/// L1 could be read; without the release a part could still be on its way.
__device__ __forceinline__ bool arrives_last(const ForwardParams& p, const WorkItem& item,
                                             int kv_head) {
  const unsigned last = static_cast<unsigned>(item.num_slots - 1);
  return ptx::atomic_inc_acq_rel(p.counters + item.counter * p.num_kv_heads + kv_head, last) ==
         last;
}

/// Merges a tile's parts in the order of their slots, so that the result is the same bit for bit
/// whichever block comes last, and applies the sink. `thread` of `kThreads` has four columns of a
/// row at a time.
template <int kTileRows, int kThreads>
__device__ __forceinline__ void merge_parts(const ForwardParams& p,
                                            const HeadValues<kHeadValues>& heads,
                                            const WorkItem& item, const Rows& rows, int kv_head,
                                            int thread) {
  constexpr int kQuads = kHeadSizeV / 4;
  constexpr int kBatch = 16;  // Parts whose loads are under way together.
  const long long stride = static_cast<long long>(p.num_kv_heads) * kTileRows;
  const long long first = first_partial_row<kTileRows>(p, item.first_slot, kv_head);
  for (int i = thread; i < rows.count * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int column = i % kQuads * 4;
    const float* lse = p.partial_lse + first + row;
    const float* output = p.partial_output + (first + row) * kHeadSizeV + column;
    float maximum = -kInfinity;
    float sum = 0.0F;
    float4 out = {0.0F, 0.0F, 0.0F, 0.0F};
    for (int begin = 0; begin < item.num_slots; begin += kBatch) {
      float ends[kBatch];
      float4 parts[kBatch];
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        const bool valid = begin + s < item.num_slots;
        const long long at = valid ? (begin + s) * stride : 0;
        ends[s] = valid ? lse[at] : -kInfinity;
        parts[s] = *reinterpret_cast<const float4*>(output + at * kHeadSizeV);
      }
      float top = maximum;
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        top = fmaxf(top, ends[s]);
      }
      const float before = top == maximum ? 1.0F : ptx::exp2_approx(maximum - top);
      maximum = top;
      sum *= before;
      out = {out.x * before, out.y * before, out.z * before, out.w * before};
#pragma unroll
      for (int s = 0; s < kBatch; ++s) {
        if (ends[s] != -kInfinity) {  // An empty part counts for nothing, whatever it holds.
          const float weight = ptx::exp2_approx(ends[s] - maximum);
          sum += weight;
          out.x += weight * parts[s].x;
          out.y += weight * parts[s].y;
          out.z += weight * parts[s].z;
          out.w += weight * parts[s].w;
        }
      }
    }
    const RowEnd end = finish_row(maximum, sum, row_sink(heads, rows, kv_head, row), false);
    store_columns(final_destination(p, item, rows, kv_head, row, end.lse), column,
                  {finish(out.x, end), finish(out.y, end), finish(out.z, end), finish(out.w, end)});
  }
}

}  // namespace flash_attn
