#pragma once

#include "ptx/cp_async.cuh"

namespace tile {

/// Brings one 16-byte chunk of a row into shared memory, of which bytes from `row_end` on are
/// zeroed, and all where not `valid` (then nothing is read). kVectorBytes is what the addresses of
/// the source allow: from 4 on the copy is asynchronous.
template <int kVectorBytes, int kRowBytes>
__device__ __forceinline__ void load_chunk(unsigned char* destination, const void* row, int chunk,
                                           bool valid) {
  const auto* source = static_cast<const unsigned char*>(row) + chunk * 16;
#pragma unroll
  for (int i = 0; i < 16; i += kVectorBytes) {
    const bool inside = valid && (kRowBytes % 16 == 0 || chunk * 16 + i < kRowBytes);
    if constexpr (kVectorBytes >= 4) {
      ptx::cp_async<kVectorBytes>(ptx::shared_address(destination + i), inside ? source + i : row,
                                  inside);
    } else if constexpr (kVectorBytes == 2) {
      *reinterpret_cast<unsigned short*>(destination + i) =
          inside ? *reinterpret_cast<const unsigned short*>(source + i) : 0;
    } else {
      destination[i] = inside ? source[i] : 0;
    }
  }
}

/// Where a thread stands in a tile of kRows rows of kChunks chunks that kThreads threads copy.
template <int kRows, int kChunks, int kThreads>
struct ChunkGrid {
  static constexpr int kPasses = (kRows * kChunks + kThreads - 1) / kThreads;
  static constexpr bool kWhole = kRows * kChunks % kThreads == 0;
  /// Every pass advances a thread by the same number of rows in the same column.
  static constexpr bool kRegular = kThreads % kChunks == 0;
  static constexpr int kRowStep = kThreads / kChunks;
  /// Full for kRegular; otherwise columns change from pass to pass.
  static constexpr bool kBounded = kRegular && kRows % (kRowStep > 0 ? kRowStep : 1) == 0;
};

/// Keys or values of one head, paged or plain, into tiles in shared memory.
///   kRowBytes    bytes of a token's row       kChunks     16-byte chunks of a tile's row, zeros
///   past kRowPitch    from row to row in the tile               kRowBytes kPage        tokens of a
///   block; 0: plain  kAligned    a tile begins with a block or inside one
template <int kRows, int kRowBytes, int kChunks, int kRowPitch, int kThreads, int kVectorBytes,
          int kPage, bool kAligned>
struct KeyValueLoader {
  using Grid = ChunkGrid<kRows, kChunks, kThreads>;

  const unsigned char* base;  ///< Of the head; plain keys: of the request's first.
  long long block_bytes;
  long long token_bytes;

  __device__ __forceinline__ KeyValueLoader(const unsigned char* head, long long block_stride,
                                            long long token_stride)
      : base(head), block_bytes(block_stride), token_bytes(token_stride) {}

  /// Tokens first … first + kRows − 1; those outside [low, high) become zeros and are not read.
  /// `pages` names the blocks of the tile.
  __device__ __forceinline__ void load(unsigned char* destination, const int* pages, int first,
                                       int low, int high) const {
    if (first >= low && first + kRows <= high) {
      load_checked<false>(destination, pages, first, low, high);
    } else {
      load_checked<true>(destination, pages, first, low, high);
    }
  }

 private:
  template <bool kCheck>
  __device__ __forceinline__ void load_checked(unsigned char* destination, const int* pages,
                                               int first, int low, int high) const {
    const int thread = static_cast<int>(threadIdx.x);
    const unsigned char* tile = base + row_offset(pages, first, 0, 0);
#pragma unroll
    for (int pass = 0; pass < Grid::kPasses; ++pass) {
      int row;
      int chunk;
      const unsigned char* source;
      if constexpr (Grid::kRegular) {
        row = thread / kChunks + pass * Grid::kRowStep;
        chunk = thread % kChunks;
      } else {
        row = (thread + pass * kThreads) / kChunks;
        chunk = (thread + pass * kThreads) % kChunks;
      }
      if (!Grid::kWhole && row >= kRows) {
        break;
      }
      const bool valid = !kCheck || (first + row >= low && first + row < high);
      const bool zeros = chunk * 16 >= kRowBytes;
      if constexpr (kPage == 0) {
        source = tile + row * token_bytes;
      } else if constexpr (kAligned && Grid::kRegular && kPage % Grid::kRowStep == 0) {
        // The pass stays inside one block, whose number is known at compile time.
        constexpr int kStep = Grid::kRowStep;
        const int page = kPage < kRows ? pass * kStep / kPage : 0;
        const int offset = kPage < kRows ? pass * kStep % kPage : first % kPage + pass * kStep;
        source = base + pages[page] * block_bytes + offset * token_bytes +
                 thread / kChunks * token_bytes;
      } else {
        source = base + row_offset(pages, first, row, valid ? 1 : 0);
      }
      load_chunk<kVectorBytes, kRowBytes>(destination + row * kRowPitch + chunk * 16,
                                          valid && !zeros ? source : base,
                                          valid && !zeros ? chunk : 0, valid && !zeros);
    }
  }

  __device__ __forceinline__ long long row_offset(const int* pages, int first, int row,
                                                  int valid) const {
    if constexpr (kPage == 0) {
      return static_cast<long long>(first + row) * token_bytes;
    } else {
      if (valid == 0) {
        return 0;
      }
      const int token = first + row;
      const int page = kAligned ? (kPage < kRows ? row / kPage : 0) : token / kPage - first / kPage;
      return pages[page] * block_bytes + static_cast<long long>(token % kPage) * token_bytes;
    }
  }
};

}  // namespace tile
