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
};

/// Keys or values of one head, paged or plain, into tiles in shared memory.
///   kRowBytes    bytes of a token's row       kChunks     16-byte chunks of a tile's row, zeros
///   past kRowPitch    from row to row in the tile               kRowBytes kPage        tokens of a
///   block; 0: plain  kAligned    a tile begins with a block or inside one
template <int kRows, int kRowBytes, int kChunks, int kRowPitch, int kThreads, int kVectorBytes,
          int kPage, bool kAligned>
struct KeyValueLoader {
  using Grid = ChunkGrid<kRows, kChunks, kThreads>;
  /// Each pass of the copy stays inside one block…
  static constexpr int kStep = Grid::kRegular ? Grid::kRowStep : 1;
  static constexpr bool kWholePasses =
      kPage > 0 && Grid::kRegular&& kPage % kStep == 0 && kRows % kStep == 0;
  /// …whose place in the tile is known at compile time.
  static constexpr bool kFast = kWholePasses && kAligned;
  static constexpr int kPagesHeld = kFast && kPage < kRows ? kRows / kPage : 1;

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
    load_checked<false>(destination, nullptr, 0, pages, first, low, high);
  }

  /// Keys, and values that lie `distance` bytes from them throughout: one address serves both.
  __device__ __forceinline__ void load_both(unsigned char* keys, unsigned char* values,
                                            long long distance, const int* pages, int first,
                                            int low, int high) const {
    load_checked<true>(keys, values, distance, pages, first, low, high);
  }

 private:
  /// Most tiles need no check of their tokens.
  template <bool kBoth>
  __device__ __forceinline__ void load_checked(unsigned char* destination, unsigned char* second,
                                               long long distance, const int* pages, int first,
                                               int low, int high) const {
    if (first >= low && first + kRows <= high) {
      copy<kBoth, false>(destination, second, distance, pages, first, low, high);
    } else {
      copy<kBoth, true>(destination, second, distance, pages, first, low, high);
    }
  }

  template <bool kBoth, bool kCheck>
  __device__ __forceinline__ void copy(unsigned char* destination, unsigned char* second,
                                       long long distance, const int* pages, int first, int low,
                                       int high) const {
    const int thread = static_cast<int>(threadIdx.x);
    // Where each block begins for this thread; read before the copies begin, which wait for no
    // load.
    const unsigned char* page_rows[kPagesHeld];
    if constexpr (kFast) {
#pragma unroll
      for (int i = 0; i < kPagesHeld; ++i) {
        page_rows[i] = base + pages[i] * block_bytes + thread / kChunks * token_bytes;
      }
    } else if constexpr (kPage == 0) {
      page_rows[0] = base + static_cast<long long>(first) * token_bytes;
    }
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
        source = page_rows[0] + row * token_bytes;
      } else if constexpr (kFast) {
        // The pass stays inside one block, whose number is known at compile time.
        const int page = kPage < kRows ? pass * kStep / kPage : 0;
        const int offset = kPage < kRows ? pass * kStep % kPage : first % kPage + pass * kStep;
        source = page_rows[page] + offset * token_bytes;
      } else if constexpr (kWholePasses) {
        const int start = first % kPage + pass * kStep;
        source = base + pages[start / kPage] * block_bytes +
                 (start % kPage + thread / kChunks) * token_bytes;
      } else {
        source = base + row_offset(pages, first, row, valid ? 1 : 0);
      }
      const bool read = valid && !zeros;
      const int at = row * kRowPitch + chunk * 16;
      load_chunk<kVectorBytes, kRowBytes>(destination + at, read ? source : base, read ? chunk : 0,
                                          read);
      if constexpr (kBoth) {
        load_chunk<kVectorBytes, kRowBytes>(second + at, read ? source + distance : base,
                                            read ? chunk : 0, read);
      }
    }
  }

  __device__ __forceinline__ long long row_offset(const int* pages, int first, int row,
                                                  int valid) const {
    if (kPage == 0 || valid == 0) {
      return 0;
    }
    constexpr int kTokens = kPage > 0 ? kPage : 1;
    const int token = first + row;
    const int page =
        kAligned ? (kPage < kRows ? row / kTokens : 0) : token / kTokens - first / kTokens;
    return pages[page] * block_bytes + static_cast<long long>(token % kTokens) * token_bytes;
  }
};

}  // namespace tile
