#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/load.cuh"

namespace tile {

/// Brings one 16-byte chunk of a row to an address in shared memory. Bytes from kRowBytes on become
/// zeros, and all of them where not `valid`; then nothing is read, whatever the row's address.
/// kVectorBytes is what the addresses of the source allow: from 4 on the copy is asynchronous.
template <int kVectorBytes, int kRowBytes>
__device__ __forceinline__ void load_chunk(unsigned destination, const unsigned char* row,
                                           int chunk, bool valid) {
  const unsigned char* source = row + chunk * 16;
#pragma unroll
  for (int i = 0; i < 16; i += kVectorBytes) {
    const bool inside = valid && (kRowBytes % 16 == 0 || chunk * 16 + i < kRowBytes);
    if constexpr (kVectorBytes >= 4) {
      ptx::cp_async<kVectorBytes>(destination + i, source + i, inside);
    } else if constexpr (kVectorBytes == 2) {
      const auto* value = reinterpret_cast<const unsigned short*>(source + i);
      ptx::store_shared(destination + i, inside ? *value : static_cast<unsigned short>(0));
    } else {
      ptx::store_shared(destination + i, inside ? source[i] : static_cast<unsigned char>(0));
    }
  }
}

/// A copy of one tile of keys or values of one head, paged or plain, into shared memory, by all
/// threads of a block. Each thread brings one chunk in each of kPasses passes, which may stand
/// apart, between other work: the memory takes its time to accept a request.
///   kRowBytes  bytes of a token's row     kChunks   16-byte chunks of a tile's row, zeros past
///   kRowPitch  from row to row in the tile          kRowBytes
///   kPage      tokens of a block; 0: plain
///   kAligned   a tile begins with a block or inside one
template <int kRows, int kRowBytes, int kChunks, int kRowPitch, int kThreads, int kVectorBytes,
          int kPage, bool kAligned>
class TileCopy {
  static constexpr bool kWhole = kRows * kChunks % kThreads == 0;
  /// Every pass advances a thread by the same number of rows in the same column.
  static constexpr bool kRegular = kThreads % kChunks == 0;
  static constexpr int kRowStep = kRegular ? kThreads / kChunks : 1;
  /// Each pass of the copy stays inside one block…
  static constexpr bool kWholePasses =
      kRegular && kPage > 0 && kPage % kRowStep == 0 && kRows % kRowStep == 0;
  /// …whose place in the tile is known at compile time.
  static constexpr bool kFast = kWholePasses && kAligned;
  static constexpr int kTokens = kPage > 0 ? kPage : 1;

 public:
  static constexpr int kPasses = (kRows * kChunks + kThreads - 1) / kThreads;

  /// Tokens first … first + kRows − 1; those outside [low, high) become zeros and are not read.
  /// `head` is the head's first token, of the cache or, where plain, of the request; `pages` names
  /// the blocks of the tile.
  __device__ __forceinline__ TileCopy(const unsigned char* head, long long block_bytes,
                                      long long token_bytes, const int* pages, int first, int low,
                                      int high, int thread)
      : rows_(head),
        block_bytes_(block_bytes),
        token_bytes_(token_bytes),
        pages_(pages),
        first_(first),
        low_(low),
        count_(max(high - low, 0)),
        thread_(thread) {
    if constexpr (kPage == 0) {
      rows_ += first * token_bytes;
    } else if constexpr (kFast) {
      page_ = pages[0];
      if constexpr (kPage > kRows) {
        rows_ += first % kPage * token_bytes;
      }
    }
    if constexpr (kRegular) {
      rows_ += thread_ / kChunks * token_bytes;
    }
  }

  __device__ __forceinline__ void pass(int number, unsigned tile) {
    copy<false>(number, tile, 0U, 0);
  }
  /// Keys, and values that lie `distance` bytes from them throughout: one address serves both.
  __device__ __forceinline__ void pass_of_both(int number, unsigned keys, unsigned values,
                                               long long distance) {
    copy<true>(number, keys, values, distance);
  }

 private:
  template <bool kBoth>
  __device__ __forceinline__ void copy(int number, unsigned tile, unsigned second,
                                       long long distance) {
    const int at = kRegular ? thread_ : thread_ + number * kThreads;
    const int row = at / kChunks + (kRegular ? number * kRowStep : 0);
    const int chunk = at % kChunks;
    if (!kWhole && row >= kRows) {
      return;
    }
    const bool valid = static_cast<unsigned>(first_ + row - low_) < static_cast<unsigned>(count_) &&
                       chunk * 16 < kRowBytes;
    const unsigned char* source = row_of(number, row, valid);
    const int to = row * kRowPitch + chunk * 16;
    load_chunk<kVectorBytes, kRowBytes>(tile + to, source, chunk, valid);
    if constexpr (kBoth) {
      load_chunk<kVectorBytes, kRowBytes>(second + to, source + distance, chunk, valid);
    }
  }

  __device__ __forceinline__ const unsigned char* row_of(int number, int row, bool valid) {
    if constexpr (kPage == 0) {
      return rows_ + (kRegular ? number * kRowStep : row) * token_bytes_;
    } else if constexpr (kFast) {
      const int token = number * kRowStep;
      if (token % kPage == 0) {
        block_ = rows_ + page_ * block_bytes_;
        if (token + kPage < kRows) {
          page_ = pages_[token / kPage + 1];
        }
      }
      return block_ + token % kPage * token_bytes_;
    } else if constexpr (kWholePasses) {
      const int token = first_ % kPage + number * kRowStep;
      return rows_ + pages_[token / kPage] * block_bytes_ + token % kPage * token_bytes_;
    } else {
      const int token = first_ + row;
      const int page =
          kAligned ? (kPage < kRows ? row / kTokens : 0) : token / kTokens - first_ / kTokens;
      const int within = token % kTokens - (kRegular ? thread_ / kChunks : 0);
      return rows_ + (valid ? pages_[page] : 0) * block_bytes_ + within * token_bytes_;
    }
  }

  const unsigned char* rows_;  ///< Of this thread in the first pass, but for its block.
  long long block_bytes_;
  long long token_bytes_;
  const int* pages_;
  const unsigned char* block_;  ///< The same in the block.
  int page_;  ///< Number of the next block, read when that of the one before has been used.
  int first_;
  int low_;
  int count_;
  int thread_;
};

}  // namespace tile
