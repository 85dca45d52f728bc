#pragma once

// What the warps of sm80_forward.cu hold in registers and do with it: fragments of mma.sync (see
// ptx/mma.cuh). A thread has kRows rows, eight apart, and of each two columns in every eight.

#include "config.cuh"
#include "flash_attn/params.cuh"
#include "flash_attn/rows.cuh"
#include "flash_attn/scores.cuh"
#include "flash_attn/shape.cuh"
#include "flash_attn/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/load.cuh"
#include "ptx/mma.cuh"
#include "ptx/named_barrier.cuh"
#include "tile/types.cuh"

namespace flash_attn {

using Query = tile::TypeOf<kQueryType>::type;
using Cache = tile::TypeOf<kCacheType>::type;

constexpr ForwardShape kShape{.head_size = kHeadSize,
                              .head_size_v = kHeadSizeV,
                              .cache_bytes = sizeof(Cache),
                              .page_size = kPageSize,
                              .row_tiles = kRowTiles,
                              .warps_m = kWarpsM,
                              .warps_n = kWarpsN,
                              .teams = kTeams,
                              .block_n = kBlockN,
                              .stages = kStages};
constexpr SharedLayout kLayout = shared_layout(kShape);
constexpr int kHeadPad = kShape.head_pad();
constexpr int kHeadPadV = kShape.head_pad_v();
constexpr int kPages = kShape.pages_per_tile();
constexpr int kPageRing = kShape.page_ring();
// Numbers of blocks are asked for so many tiles before the keys.
constexpr int kPageLead = kShape.ahead();
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
constexpr bool kWidenInRegisters = kShape.widens_in_registers();
constexpr int kKSteps = kHeadPad / 16;                              // Of the product with the keys.
constexpr int kKeyTiles = kWarpKeys / 8;                            // n8 tiles of a warp's scores.
constexpr int kColumns = kTeams ? kHeadPadV / kWarpsN : kHeadPadV;  // Of a warp's output.
constexpr int kValueTiles = kColumns / 8;                           // n8 tiles of it.
constexpr int kRows = 2 * kRowTiles;  // Rows of which a thread holds elements.
constexpr int kTeamBytes = kShape.team_bytes();
constexpr int kTeamWeights = 16 * kRowTiles * kBlockN * 2;  // Bytes of it; the rest: Team::combine.
static_assert(kWarpKeys % 16 == 0 && kColumns % 16 == 0);

struct State {
  float output[kRowTiles][kValueTiles][4];
  float maximum[kRows];  // Reference of the exponentials: a score the row has seen, or −inf.
  float sum[kRows];      // This thread's part.
};

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

/// scores += query · keysᵀ over 16 elements of the head from a[…], for the keys of fragment `n`.
__device__ __forceinline__ void multiply_keys(Scores& scores, const unsigned (&a)[kRowTiles][4],
                                              int n, unsigned b0, unsigned b1) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    ptx::mma_m16n8k16<Query>(scores[m][n], a[m], b0, b1);
  }
}

__device__ __forceinline__ void load_query_fragments(unsigned (&a)[kRowTiles][4],
                                                     const Query16& query, unsigned query_address,
                                                     int k) {
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
}

/// scores += query · keysᵀ. `beside(k)` is done beside step k.
template <typename Beside>
__device__ __forceinline__ void product_with_keys(Scores& scores, const Query16& query,
                                                  unsigned query_address, unsigned key_address,
                                                  Beside&& beside) {
  unsigned a[2][kRowTiles][4];
  unsigned b[2][kKeyTiles / 2][4];
  const auto load_queries = [&](int k) { load_query_fragments(a[k % 2], query, query_address, k); };
  const auto load_keys = [&](int k, int n) {
    ptx::ldmatrix_x4(b[k % 2][n / 2], key_address + n * 8 * kQueryPitch + k * 32);
  };
  const auto load_step = [&](int k) {
    load_queries(k);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      load_keys(k, n);
    }
  };
  // Teams, whose scores are fewer, have the registers to ask for a step's fragments before the
  // products of the step before.
  if constexpr (kTeams) {
    load_step(0);
  }
#pragma unroll
  for (int k = 0; k < kKSteps; ++k) {
    if (kTeams && k + 1 < kKSteps) {
      load_step(k + 1);
    }
    if constexpr (!kTeams) {
      load_queries(k);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      if constexpr (!kTeams) {
        load_keys(k, n);
      }
      const unsigned(&keys)[4] = b[k % 2][n / 2];
      multiply_keys(scores, a[k % 2], n, keys[0], keys[1]);
      multiply_keys(scores, a[k % 2], n + 1, keys[2], keys[3]);
    }
    beside(k);
  }
}

/// The same with fp8 keys. ldmatrix, which moves pairs of bytes, gives a lane four neighbouring
/// elements of a key, of which the fragments take the even ones and then the odd ones. So the
/// product runs over the even elements of each 16 and then the odd, in the query too
/// (permute_query). At the end of an odd number of steps the second half is not used; it lies in
/// shared memory still.
template <typename Narrow>
__device__ __forceinline__ void product_with_narrow_keys(Scores& scores, const Query16& query,
                                                         unsigned query_address,
                                                         unsigned key_address) {
#pragma unroll
  for (int k = 0; k < kKSteps; k += 2) {
    unsigned a[2][kRowTiles][4];
    load_query_fragments(a[0], query, query_address, k);
    if (k + 1 < kKSteps) {
      load_query_fragments(a[1], query, query_address, k + 1);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      unsigned bytes[4];
      ptx::ldmatrix_x4(bytes, key_address + n * 8 * kKeyPitch + k * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (k + i % 2 < kKSteps) {
          unsigned b[2];
          ptx::widen_even_odd<Query, Narrow>(b, bytes[i]);
          multiply_keys(scores, a[i % 2], n + i / 2, b[0], b[1]);
        }
      }
    }
  }
}

/// What the warps of a team, which have the same rows, exchange. A warp without one is its own.
struct Team {
  unsigned address;  // Of this lane's part of the first weights.

  __device__ __forceinline__ int barrier() const {
    return 1 + static_cast<int>(threadIdx.x) / (32 * kWarpsN);
  }
  __device__ __forceinline__ void wait() const { ptx::barrier_sync<32 * kWarpsN>(barrier()); }
  __device__ __forceinline__ bool any(bool value) const {
    return kTeams ? ptx::barrier_or<32 * kWarpsN>(barrier(), value)
                  : __any_sync(0xFFFFFFFFU, value) != 0;
  }
  /// Each row's numbers of all warps as one, through what lies behind the weights. The four lanes
  /// of a row have the same.
  template <typename Combine>
  __device__ __forceinline__ void combine(float (&number)[kRows], Combine&& combine) const {
    if constexpr (kTeams) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int warp_n = static_cast<int>(threadIdx.x) / 32 % kWarpsN;
      const auto at = [&](int warp, int i) {
        return address - lane * 16 + kTeamWeights +
               (warp * 16 * kRowTiles + thread_row(i) + lane / 4) * 4;
      };
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::store_shared(at(warp_n, i), number[i]);
      }
      wait();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int w = 1; w < kWarpsN; ++w) {
          number[i] = combine(number[i], ptx::load_shared_float(at((warp_n + w) % kWarpsN, i)));
        }
      }
    }
  }
};

/// Raises the rows' maxima where a score exceeds them by more than the slack.
__device__ __forceinline__ void raise_maxima(State& state, const Scores& scores, const Team& team,
                                             float slack, float scale) {
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
  if (!team.any(grown)) {
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    seen[i] = quad_max(seen[i]);
  }
  team.combine(seen, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float before = state.maximum[i];
    state.maximum[i] = fmaxf(before, seen[i]);
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

/// To the team's other warps: fragments as they are. They are theirs behind a barrier.
__device__ __forceinline__ void give_weights(const Weights& weights, const Team& team) {
  const int first = static_cast<int>(threadIdx.x) / 32 % kWarpsN * (kKeyTiles / 2);
#pragma unroll
  for (int k = 0; k < kKeyTiles / 2; ++k) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const auto& w = weights.packed[k][m];
      ptx::store_shared(team.address + ((first + k) * kRowTiles + m) * 512,
                        {w[0], w[1], w[2], w[3]});
    }
  }
}
/// Those of the tile's 16 keys number `k`.
__device__ __forceinline__ void take_weights(unsigned (&weights)[kRowTiles][4], const Team& team,
                                             int k) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const uint4 w = ptx::load_shared(team.address + (k * kRowTiles + m) * 512);
    weights[m][0] = w.x;
    weights[m][1] = w.y;
    weights[m][2] = w.z;
    weights[m][3] = w.w;
  }
}

/// output += p · values of 16 keys. `beside(n)` is done beside step n, of 16 columns.
template <typename Beside>
__device__ __forceinline__ void product_with_values(State& state,
                                                    const unsigned (&weights)[kRowTiles][4],
                                                    unsigned value_address, int k,
                                                    Beside&& beside) {
#pragma unroll
  for (int n = 0; n < kValueTiles; n += 2) {
    unsigned b[4];
    ptx::ldmatrix_x4_trans(b, value_address + k * 16 * kOutputPitch + n * 16);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::mma_m16n8k16<Query>(state.output[m][n], weights[m], b[0], b[1]);
      ptx::mma_m16n8k16<Query>(state.output[m][n + 1], weights[m], b[2], b[3]);
    }
    beside(n / 2);
  }
}

/// The same with fp8 values. Transposed pairs of bytes are two neighbouring columns: fragment n of
/// the output takes the even ones of 16, fragment n + 1 the odd ones (columns_of).
template <typename Narrow>
__device__ __forceinline__ void product_with_narrow_values(State& state, const Weights& weights,
                                                           unsigned value_address, int k) {
#pragma unroll
  for (int n = 0; n < kValueTiles; n += 4) {
    unsigned bytes[4];
    ptx::ldmatrix_x4_trans(bytes, value_address + k * 16 * kValuePitch + n * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (n + 2 * i < kValueTiles) {
        unsigned b0[2];
        unsigned b1[2];
        ptx::widen_even_odd<Query, Narrow>(b0, bytes[2 * i]);
        ptx::widen_even_odd<Query, Narrow>(b1, bytes[2 * i + 1]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16<Query>(state.output[m][n + 2 * i], weights.packed[k][m], b0[0], b1[0]);
          ptx::mma_m16n8k16<Query>(state.output[m][n + 2 * i + 1], weights.packed[k][m], b0[1],
                                   b1[1]);
        }
      }
    }
  }
}

/// Of the warp's output.
__device__ __forceinline__ int first_column() {
  return kTeams ? static_cast<int>(threadIdx.x) / 32 % kWarpsN * kColumns : 0;
}

/// Pair `n` of neighbouring columns of a thread's row `i`.
struct Columns {
  float first, second;
  int column;
};
__device__ __forceinline__ Columns columns_of(const State& state, int i, int n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = first_column();
  const auto& output = state.output[i / 2];
  if constexpr (kWidenInRegisters) {
    const int pair = n % 2;
    return {output[n - pair][i % 2 * 2 + pair], output[n - pair + 1][i % 2 * 2 + pair],
            n / 2 * 16 + lane % 4 * 4 + pair * 2};
  } else {
    return {output[n][i % 2 * 2], output[n][i % 2 * 2 + 1], first + n * 8 + lane % 4 * 2};
  }
}

}  // namespace flash_attn
