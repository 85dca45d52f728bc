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
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTokens = kPage > 0 ? kPage : 1;
  /// Where all rows of a warp can lie in one block of the cache, it brings successive ones, and
  /// computes that block's address once.
  static constexpr int kWarpRows = kRows / kWarps;
  static constexpr bool kOneBlock = kPage > 0 && kAligned && kRows % kWarps == 0 &&
                                    kTokens % kWarpRows == 0 && 32 % kChunks == 0 &&
                                    (kWarpRows * kChunks) % 32 == 0;
  /// Every pass advances a thread by the same number of rows in the same column.
  static constexpr bool kRegular = kOneBlock || kThreads % kChunks == 0;
  static constexpr int kRowStep = kOneBlock ? 32 / kChunks : kRegular ? kThreads / kChunks : 1;
  /// Each pass of the copy stays inside one block…
  static constexpr bool kWholePasses =
      !kOneBlock && kRegular && kPage > 0 && kTokens % kRowStep == 0 && kRows % kRowStep == 0;
  /// …whose place in the tile is known at compile time.
  static constexpr bool kFast = kWholePasses && kAligned;

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
    } else if constexpr (kOneBlock || kFast) {
      if constexpr (kPage > kRows) {
        rows_ += first % kTokens * token_bytes;
      }
      page_ = pages[kOneBlock && kPage < kRows ? thread / 32 * kWarpRows / kTokens : 0];
    }
    if constexpr (kOneBlock) {
      const int row = kPage < kRows ? first_row() % kTokens : first_row();
      rows_ += row * token_bytes;
      // As one address: else parts of the sum would be added for each block.
      asm volatile("" : "+l"(rows_));
    } else if constexpr (kRegular) {
      rows_ += first_row() * token_bytes;
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
    const int row = kRegular ? first_row() + number * kRowStep : at / kChunks;
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

  /// This thread's row in the first pass, where regular.
  __device__ __forceinline__ int first_row() const {
    return kOneBlock ? thread_ / 32 * kWarpRows + thread_ % 32 / kChunks : thread_ / kChunks;
  }

  /// Numbers of blocks are not negative: so a multiplication less.
  __device__ __forceinline__ long long block_offset(int page) const {
    return static_cast<long long>(static_cast<unsigned>(page) *
                                  static_cast<unsigned long long>(block_bytes_));
  }

  __device__ __forceinline__ const unsigned char* row_of(int number, int row, bool valid) {
    const int token = number * kRowStep;
    if constexpr (kPage == 0) {
      return rows_ + (kRegular ? token : row) * token_bytes_;
    } else if constexpr (kOneBlock) {
      if (number == 0) {
        block_ = rows_ + block_offset(page_);
      }
      return block_ + token * token_bytes_;
    } else if constexpr (kFast) {
      if (token % kTokens == 0) {
        block_ = rows_ + block_offset(page_);
        if (token + kTokens < kRows) {
          page_ = pages_[token / kTokens + 1];
        }
      }
      return block_ + token % kTokens * token_bytes_;
    } else if constexpr (kWholePasses) {
      const int at = first_ % kTokens + token;
      return rows_ + block_offset(pages_[at / kTokens]) + at % kTokens * token_bytes_;
    } else {
      const int at = first_ + row;
      const int page =
          kAligned ? (kPage < kRows ? row / kTokens : 0) : at / kTokens - first_ / kTokens;
      const int within = at % kTokens - (kRegular ? first_row() : 0);
      return rows_ + block_offset(valid ? pages_[page] : 0) + within * token_bytes_;
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
