// Attention forward with mma.sync and cp.async: sm_80 and later. One block takes one work item of
// the planner, a tile of query rows of one KV head against a range of keys:
//
//   load the query rows; keep `kStages` tiles of keys and values in flight
//   for each tile of keys:  scores = query · keysᵀ  →  cap, bias, mask  →  softmax  →  output += p
//   · values merge the warps that had other keys, normalise, store (or store a partial result)
//
// Rows are query rows times heads of a group (packed GQA): row i is head i % group of query i /
// group, so keys and values are read once for the whole group, and a tile of rows spans few
// positions.

#include "config.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/shape.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/load.cuh"
#include "ptx/mma.cuh"
#include "tile/copy.cuh"
#include "tile/types.cuh"

namespace flash_attn {

using namespace config;
using namespace foveal::cuda::flash_attn;

using Query = tile::TypeOf<kQueryType>::type;
using Cache = tile::TypeOf<kCacheType>::type;

constexpr ForwardShape kShape{.head_size = kHeadSize,
                              .head_size_v = kHeadSizeV,
                              .cache_bytes = sizeof(Cache),
                              .page_size = kPageSize,
                              .row_tiles = kRowTiles,
                              .warps_m = kWarpsM,
                              .warps_n = kWarpsN,
                              .block_n = kBlockN,
                              .stages = kStages};
constexpr SharedLayout kLayout = shared_layout(kShape);
constexpr int kHeadPad = kShape.head_pad();
constexpr int kHeadPadV = kShape.head_pad_v();
constexpr int kPages = kShape.pages_per_tile();
constexpr int kPageRing = kShape.page_ring();
// Numbers of blocks are asked for so many tiles before the keys.
constexpr int kPageLead = kStages - 1;
constexpr int kPageTokens = kPages > 0 ? kPageSize : 1;
constexpr int kThreads = kShape.threads();
constexpr int kBlockM = kShape.block_m();
constexpr int kWarpKeys = kBlockN / kWarpsN;
constexpr int kQueryPitch = row_bytes(2 * kHeadPad);
constexpr int kOutputPitch = row_bytes(2 * kHeadPadV);
constexpr int kCacheBytes = sizeof(Cache);
constexpr bool kFp8 = kCacheBytes == 1;
constexpr int kKeyPitch = kFp8 ? row_bytes(kHeadSize) : kQueryPitch;
constexpr int kValuePitch = kFp8 ? row_bytes(kHeadSizeV) : kOutputPitch;
constexpr int kKSteps = kHeadPad / 16;      // Of the product with the keys.
constexpr int kKeyTiles = kWarpKeys / 8;    // n8 tiles of a warp's scores.
constexpr int kValueTiles = kHeadPadV / 8;  // n8 tiles of the output.
constexpr int kRows = 2 * kRowTiles;        // Rows of which a thread holds elements.
static_assert(kWarpKeys % 16 == 0);

// Scores are transformed before the maximum is taken; otherwise the scale is folded into the
// exponential. A scale that is not positive would turn the maximum around.
constexpr bool kTransform = kSoftCap || kAlibi || kSignedScale;
// The accumulators are rescaled only when a row's maximum has grown by more than this (base 2): p
// stays below 2^8, far inside float32 and f16, and the usual tile needs no rescaling at all.
constexpr float kSlack = 8.0F;

using KeyLoader =
    tile::KeyValueLoader<kBlockN, kHeadSize* static_cast<int>(sizeof(Cache)),
                         kFp8 ? (kHeadSize + 15) / 16 : kHeadPad / 8, kKeyPitch, kThreads,
                         kCacheVectorBytes, kPageSize, kShape.pages_aligned()>;
using ValueLoader =
    tile::KeyValueLoader<kBlockN, kHeadSizeV* static_cast<int>(sizeof(Cache)),
                         kFp8 ? (kHeadSizeV + 15) / 16 : kHeadPadV / 8, kValuePitch, kThreads,
                         kCacheVectorBytes, kPageSize, kShape.pages_aligned()>;

/// The rows of a work item and which keys they see.
struct Rows {
  int first;      // Of the request's packed rows.
  int count;      // At most kBlockM.
  int positions;  // Position of the request's first query row.
  int seq_len;
  int window_left, window_right;
  int key_begin;

  __device__ __forceinline__ int position(int row) const {
    return positions + (first + row) / kGroup;
  }
  /// Row `row` sees keys low … high − 1.
  __device__ __forceinline__ int low(int row) const {
    return kLeftBound ? max(key_begin, position(row) - window_left) : key_begin;
  }
  __device__ __forceinline__ int high(int row) const {
    return kRightBound ? min(seq_len, position(row) + window_right + 1) : seq_len;
  }
};

__device__ __forceinline__ WorkItem load_item(const ForwardParams& p) {
  const auto* source = reinterpret_cast<const int4*>(p.items + blockIdx.x);
  const int4 a = ptx::load_global(source);
  const int4 b = ptx::load_global(source + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ Rows rows_of(const WorkItem& item, const ForwardParams& p) {
  return {.first = item.first_row,
          .count = min(kBlockM, item.query_len * kGroup - item.first_row),
          .positions = item.seq_len - item.query_len,
          .seq_len = item.seq_len,
          .window_left = p.window_left,
          .window_right = p.window_right,
          .key_begin = p.key_begin};
}

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
                                  (kLeftBound || kRightBound || kPageSize > 0);

__device__ __forceinline__ BlockState block_state(const WorkItem& item, const Rows& rows,
                                                  const ForwardParams& p, int kv_head) {
  const int last = rows.count - 1;
  const long long key_start = kPageSize == 0 ? p.key_start_loc[item.request] : 0;
  const int table_row = p.shared_table != 0 ? 0 : item.request;
  const auto first_of = [&](const CacheView& view) {
    return static_cast<const unsigned char*>(view.data) +
           (kv_head * view.head_stride + key_start * view.token_stride) * kCacheBytes;
  };
  return {.rows = rows,
          .low = rows.low(0),
          .high = rows.high(last),
          .all_low = rows.low(last),
          .all_high = rows.high(0),
          .table = kPageSize == 0 ? nullptr : p.block_table + table_row * p.table_stride,
          .keys = first_of(p.key),
          .values = first_of(p.value)};
}

struct State {
  float output[kRowTiles][kValueTiles][4];
  float maximum[kRows];  // Reference of the exponentials: a score the row has seen, or −inf.
  float sum[kRows];      // This thread's part.
};

__device__ __forceinline__ int thread_row(int i) { return i / 2 * 16 + i % 2 * 8; }

/// Query rows into shared memory, zeros past the last one.
__device__ __forceinline__ void load_query(unsigned char* tile_q, const ForwardParams& p,
                                           const WorkItem& item, const Rows& rows, int kv_head) {
  constexpr int kChunks = kHeadPad / 8;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int packed = rows.first + (row < rows.count ? row : 0);
    const Query* source = static_cast<const Query*>(p.query.data) +
                          (item.query_start + packed / kGroup) * p.query.row_stride +
                          (kv_head * kGroup + packed % kGroup) * p.query.head_stride;
    const int chunk = i % kChunks;
    const bool valid = row < rows.count && chunk * 8 < kHeadSize;
    tile::load_chunk<kRowVectorBytes, 2 * kHeadSize>(tile_q + row * kQueryPitch + chunk * 16,
                                                     source, valid ? chunk : 0, valid);
  }
}

/// One fp8 tile, widened. Warps with keys of their own widen just those.
template <int kSize, int kPad, int kPitch, int kWidePitch>
__device__ __forceinline__ void widen_tile(unsigned char* wide, const unsigned char* narrow) {
  constexpr int kChunks = kPad / 8;
  constexpr bool kOwnKeys = kWarpsM == 1;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int begin = kOwnKeys ? warp * kWarpKeys * kChunks + static_cast<int>(threadIdx.x) % 32
                             : static_cast<int>(threadIdx.x);
  constexpr int kStep = kOwnKeys ? 32 : kThreads;
  const int end = kOwnKeys ? (warp + 1) * kWarpKeys * kChunks : kBlockN * kChunks;
#pragma unroll 4
  for (int i = begin; i < end; i += kStep) {
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

using Scores = float[kRowTiles][kKeyTiles][4];
using Query16 = unsigned[kRowTiles][kKSteps][4];

__device__ __forceinline__ void clear(Scores& scores) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[m][n][e] = 0.0F;
      }
    }
  }
}

/// scores += query · keysᵀ over 16 elements of the head.
__device__ __forceinline__ void product_with_keys(Scores& scores, const Query16& query,
                                                  unsigned query_address, unsigned key_address,
                                                  int k) {
  unsigned a[kRowTiles][4];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[m][e] = query[m][k][e];
      }
    } else {
      ptx::ldmatrix_x4(a[m], query_address + m * 16 * kQueryPitch + k * 32);
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles; n += 2) {
    unsigned b[4];
    ptx::ldmatrix_x4(b, key_address + n * 8 * kQueryPitch + k * 32);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::mma_m16n8k16<Query>(scores[m][n], a[m], b[0], b[1]);
      ptx::mma_m16n8k16<Query>(scores[m][n + 1], a[m], b[2], b[3]);
    }
  }
}

/// Scale, soft cap and ALiBi, to scores in base 2.
__device__ __forceinline__ void transform_scores(Scores& scores, const ForwardParams& p,
                                                 const float (&slopes)[kRows], const Rows& rows,
                                                 int row, int key) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int position = kAlibi ? rows.position(row + thread_row(i)) : 0;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[i / 2][n][i % 2 * 2 + e];
        score *= p.scale;
        if constexpr (kSoftCap) {
          score = soft_cap(score, p.soft_cap);
        }
        if constexpr (kAlibi) {
          score += slopes[i] * static_cast<float>(key + n * 8 + e - position);
        }
      }
    }
  }
}

/// Keys that a row does not see score −inf: chosen, never computed, whatever the score was.
__device__ __forceinline__ void mask_scores(Scores& scores, const Rows& rows, int row, int key) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int low = rows.low(row + thread_row(i)) - key;
    const int high = rows.high(row + thread_row(i)) - key;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (n * 8 + e >= high || n * 8 + e < low) {
          scores[i / 2][n][i % 2 * 2 + e] = -kInfinity;
        }
      }
    }
  }
}

/// Raises the rows' maxima where a score exceeds them by more than the slack.
__device__ __forceinline__ void raise_maxima(State& state, const Scores& scores, float slack,
                                             float scale) {
  float seen[kRows];
  bool grown = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    seen[i] = scores[i / 2][0][i % 2 * 2];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      seen[i] = fmaxf(seen[i], fmaxf(scores[i / 2][n][i % 2 * 2], scores[i / 2][n][i % 2 * 2 + 1]));
    }
    grown |= seen[i] > state.maximum[i] + slack;
  }
  if (!__any_sync(0xFFFFFFFFU, grown)) {
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float before = state.maximum[i];
    state.maximum[i] = fmaxf(before, quad_max(seen[i]));
    const float factor =
        before == state.maximum[i] ? 1.0F : ptx::exp2_approx((before - state.maximum[i]) * scale);
    state.sum[i] *= factor;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      state.output[i / 2][n][i % 2 * 2] *= factor;
      state.output[i / 2][n][i % 2 * 2 + 1] *= factor;
    }
  }
}

/// p = 2^(score − maximum), as the A operand of the product with the values.
struct Weights {
  static constexpr int kCount = kKeyTiles / 2 * kRowTiles * 4;
  unsigned packed[kKeyTiles / 2][kRowTiles][4];
  float offset[kRows];

  __device__ __forceinline__ Weights(const State& state, float scale) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // A row that has seen nothing yet: its scores are −inf, and so are they against any finite
      // offset.
      offset[i] = state.maximum[i] == -kInfinity ? 0.0F : -state.maximum[i] * scale;
    }
  }

  /// Two exponentials; `number` counts the registers of `packed`.
  __device__ __forceinline__ void compute(int number, State& state, const Scores& scores,
                                          float scale) {
    const int k = number / (kRowTiles * 4);
    const int m = number / 4 % kRowTiles;
    const int e = number % 4;
    const int i = 2 * m + e % 2;
    const float(&source)[4] = scores[m][2 * k + e / 2];
    const float p0 = ptx::exp2_approx(fmaf(source[e % 2 * 2], scale, offset[i]));
    const float p1 = ptx::exp2_approx(fmaf(source[e % 2 * 2 + 1], scale, offset[i]));
    state.sum[i] += p0 + p1;
    packed[k][m][e] = ptx::pack<Query>(p0, p1);
  }
};

/// output += p · values of 16 keys.
__device__ __forceinline__ void product_with_values(State& state, const Weights& weights,
                                                    unsigned value_address, int k) {
#pragma unroll
  for (int n = 0; n < kValueTiles; n += 2) {
    unsigned b[4];
    ptx::ldmatrix_x4_trans(b, value_address + k * 16 * kOutputPitch + n * 16);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::mma_m16n8k16<Query>(state.output[m][n], weights.packed[k][m], b[0], b[1]);
      ptx::mma_m16n8k16<Query>(state.output[m][n + 1], weights.packed[k][m], b[2], b[3]);
    }
  }
}

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

/// Where one row's results go.
struct Destination {
  Query* output;   // Of the row and head; null where the result is partial.
  float* partial;  // Likewise.
};
__device__ __forceinline__ Destination destination(const ForwardParams& p, const WorkItem& item,
                                                   const Rows& rows, int kv_head, int row,
                                                   float lse) {
  const int packed = rows.first + row;
  if (item.slot >= 0) {
    const long long at = (static_cast<long long>(item.slot) * gridDim.y + kv_head) * kBlockM + row;
    p.partial_lse[at] = lse;
    return {nullptr, p.partial_output + at * kHeadSizeV};
  }
  const long long token = item.query_start + packed / kGroup;
  const int head = kv_head * kGroup + packed % kGroup;
  if (p.lse != nullptr) {
    p.lse[head * p.lse_head_stride + token * p.lse_row_stride] = lse * kLn2;
  }
  return {static_cast<Query*>(p.output.data) + token * p.output.row_stride +
              head * p.output.head_stride,
          nullptr};
}

__device__ __forceinline__ void store_chunk(Query* row, const unsigned char* source, int chunk) {
  if constexpr (kRowVectorBytes == 16) {
    *reinterpret_cast<uint4*>(row + chunk * 8) = *reinterpret_cast<const uint4*>(source);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      row[chunk * 8 + e] = reinterpret_cast<const Query*>(source)[e];
    }
  }
}

/// Output of warps that had all keys of their rows: through the query's shared memory, whose rows
/// each warp has to itself, to stores of 16 bytes.
__device__ __forceinline__ void store_rows(const State& state, float scale, const ForwardParams& p,
                                           const HeadValues<kHeadValues>& heads,
                                           const WorkItem& item, const Rows& rows, int kv_head,
                                           int warp_row, unsigned char* tile_o) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool partial = item.slot >= 0;
  __syncwarp();  // All lanes have read the query.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp_row + thread_row(i) + lane / 4;
    const float sink = kSinks ? heads.sink[kv_head * kGroup + (rows.first + row) % kGroup] : 0.0F;
    RowEnd end = finish_row(state.maximum[i] * scale, quad_sum(state.sum[i]), sink, partial);
    end.factor *= p.value_scale;
    Destination to{};
    if (row < rows.count) {
      // All four lanes of a row write the same log-sum-exp.
      to = destination(p, item, rows, kv_head, row, end.lse);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const float v0 = state.output[i / 2][n][i % 2 * 2] * end.factor;
      const float v1 = state.output[i / 2][n][i % 2 * 2 + 1] * end.factor;
      const int column = n * 8 + lane % 4 * 2;
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
  constexpr int kChunks = kHeadSizeV / 8;
#pragma unroll 2
  for (int i = lane; i < 16 * kRowTiles * kChunks; i += 32) {
    const int row = warp_row + i / kChunks;
    if (row < rows.count) {
      const int packed = rows.first + row;
      Query* to = static_cast<Query*>(p.output.data) +
                  (item.query_start + packed / kGroup) * p.output.row_stride +
                  (kv_head * kGroup + packed % kGroup) * p.output.head_stride;
      store_chunk(to, tile_o + row * kOutputPitch + i % kChunks * 16, i % kChunks);
    }
  }
}

/// Output of warps that had different keys: all meet in shared memory.
__device__ __forceinline__ void merge_and_store(const State& state, float scale,
                                                const ForwardParams& p,
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
      *reinterpret_cast<float2*>(outputs + row * kPitch + n * 8 + lane % 4 * 2) = {
          state.output[i / 2][n][i % 2 * 2], state.output[i / 2][n][i % 2 * 2 + 1]};
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
    const float sink = kSinks ? heads.sink[kv_head * kGroup + (rows.first + row) % kGroup] : 0.0F;
    RowEnd end = finish_row(maximum, sum, sink, item.slot >= 0);
    end.factor *= p.value_scale;
    out = {out.x * end.factor, out.y * end.factor, out.z * end.factor, out.w * end.factor};
    const Destination to = destination(p, item, rows, kv_head, row, end.lse);
    if (to.partial != nullptr) {
      *reinterpret_cast<float4*>(to.partial + column) = out;
    } else if constexpr (kRowVectorBytes == 16) {
      *reinterpret_cast<uint2*>(to.output + column) = {ptx::pack<Query>(out.x, out.y),
                                                       ptx::pack<Query>(out.z, out.w)};
    } else {
      to.output[column] = ptx::from_float<Query>(out.x);
      to.output[column + 1] = ptx::from_float<Query>(out.y);
      to.output[column + 2] = ptx::from_float<Query>(out.z);
      to.output[column + 3] = ptx::from_float<Query>(out.w);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    flash_forward(const __grid_constant__ ForwardParams p,
                  const __grid_constant__ HeadValues<kHeadValues> heads) {
  extern __shared__ __align__(128) unsigned char shared[];
  const WorkItem item = load_item(p);  // Under way beside the count; the list is long enough.
  if (static_cast<int>(blockIdx.x) >= p.counts->items) {
    return;
  }
  const int kv_head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_n = thread / 32 % kWarpsN;
  const int warp_row = thread / 32 / kWarpsN * 16 * kRowTiles;
  const Rows rows = rows_of(item, p);
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
  const auto load_tile = [&](int tile) {
    if (tile < item.tile_end) {
      unsigned char* stage = shared + kLayout.stages + tile % kStages * kLayout.stage_bytes;
      const int* pages = page_ids + tile % kPageRing * kPages;
      const KeyLoader keys(block.keys, p.key.block_stride * kCacheBytes,
                           p.key.token_stride * kCacheBytes);
      if constexpr (kJointAddresses) {
        keys.load_both(stage, stage + kLayout.key_bytes, block.values - block.keys, pages,
                       tile * kBlockN, block.low, block.high);
      } else {
        const ValueLoader values(block.values, p.value.block_stride * kCacheBytes,
                                 p.value.token_stride * kCacheBytes);
        keys.load(stage, pages, tile * kBlockN, block.low, block.high);
        values.load(stage + kLayout.key_bytes, pages, tile * kBlockN, block.low, block.high);
      }
    }
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
    load_query(shared + kLayout.query, p, item, rows, kv_head);
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    load_tile(item.tile_begin + s);
    load_pages(item.tile_begin + s + kPageLead);
    ptx::cp_async_commit();
  }

  // Fragment addresses of this lane; see ldmatrix.cuh and mma.cuh.
  const unsigned query_address = ptx::shared_address(
      shared + kLayout.query + (warp_row + lane % 16) * kQueryPitch + lane / 16 * 16);
  const int key_offset =
      (warp_n * kWarpKeys + lane / 16 * 8 + lane % 8) * kQueryPitch + lane / 8 % 2 * 16;
  const int value_offset = (warp_n * kWarpKeys + lane % 16) * kOutputPitch + lane / 16 * 16;
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

  if constexpr (kQueryInRegisters) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // The query came with the first tile.
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kKSteps; ++k) {
        ptx::ldmatrix_x4(query[m][k], query_address + m * 16 * kQueryPitch + k * 32);
      }
    }
  }

  const int row = warp_row + lane / 4;
  /// Everything between the scores of a step's keys, the first of which is `first`, and their
  /// weights.
  const auto settle = [&](Scores& scores, int first) {
    const int key = first + warp_n * kWarpKeys + lane % 4 * 2;
    if constexpr (kTransform) {
      transform_scores(scores, p, slopes, block.rows, row, key);
    }
    if (first < block.all_low || first + kBlockN > block.all_high) {
      mask_scores(scores, block.rows, row, key);
    }
    raise_maxima(state, scores, slack, scale);
  };

  for (int tile = item.tile_begin; tile < item.tile_end; ++tile) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // Everyone's part of this tile has come, and everyone is done with the last.
    load_tile(tile + kStages - 1);
    load_pages(tile + kStages - 1 + kPageLead);
    ptx::cp_async_commit();

    unsigned char* tile_k = shared + kLayout.stages + tile % kStages * kLayout.stage_bytes;
    unsigned char* tile_v = tile_k + kLayout.key_bytes;
    if constexpr (kFp8) {
      widen_tile<kHeadSize, kHeadPad, kKeyPitch, kQueryPitch>(shared + kLayout.wide_key, tile_k);
      widen_tile<kHeadSizeV, kHeadPadV, kValuePitch, kOutputPitch>(shared + kLayout.wide_value,
                                                                   tile_v);
      tile_k = shared + kLayout.wide_key;
      tile_v = shared + kLayout.wide_value;
      if constexpr (kWarpsM == 1) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    }

    Scores scores;
    clear(scores);
#pragma unroll
    for (int k = 0; k < kKSteps; ++k) {
      product_with_keys(scores, query, query_address, ptx::shared_address(tile_k) + key_offset, k);
    }
    settle(scores, tile * kBlockN);
    // Exponentials of 16 keys at a time, so that they run beside the products of the 16 before.
    Weights weights(state, scale);
#pragma unroll
    for (int k = 0; k < kKeyTiles / 2; ++k) {
#pragma unroll
      for (int i = 0; i < kRowTiles * 4; ++i) {
        weights.compute(k * kRowTiles * 4 + i, state, scores, scale);
      }
      product_with_values(state, weights, ptx::shared_address(tile_v) + value_offset, k);
    }
  }

  ptx::cp_async_wait<0>();
  // Read again: in the loop above every register counts.
  const WorkItem done = load_item(p);
  const Rows ended = rows_of(done, p);
  if constexpr (kWarpsN == 1) {
    store_rows(state, scale, p, heads, done, ended, kv_head, warp_row, shared + kLayout.query);
  } else {
    __syncthreads();
    merge_and_store(state, scale, p, heads, done, ended, kv_head, warp_row, warp_n,
                    shared + kLayout.stages);
  }
}

}  // namespace flash_attn
