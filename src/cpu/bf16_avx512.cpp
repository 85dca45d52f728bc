// AVX512-BF16: vdpbf16ps multiplies 16 pairs with 16 pairs and adds each to a float32.

#include <immintrin.h>

#include "cpu/bf16_instructions.h"

namespace foveal::cpu {
namespace {

/// Four rows of a, kVectors vectors of columns.
template <int kVectors>
void multiply_block(const std::uint16_t* a, std::int64_t a_stride, const std::uint32_t* b,
                    std::int64_t b_stride, std::int64_t depth, bool accumulate, float* c,
                    std::int64_t c_stride) {
  constexpr int kRows = 4;
  __m512 sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = accumulate ? _mm512_load_ps(c + i * c_stride + 16 * j) : _mm512_setzero_ps();
    }
  }
  for (std::int64_t t = 0; t < depth; t += 2, b += b_stride) {
    __m512bh columns[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      columns[j] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + 16 * j));
    }
    for (int i = 0; i < kRows; ++i) {
      const auto* pair = reinterpret_cast<const int*>(a + i * a_stride + t);
      const auto row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(*pair));
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, columns[j]);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      _mm512_store_ps(c + i * c_stride + 16 * j, sums[i][j]);
    }
  }
}

void multiply(const std::uint16_t* a, std::int64_t a_stride, const std::uint32_t* b,
              std::int64_t b_stride, std::int64_t depth, bool accumulate, float* c,
              std::int64_t c_stride, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t j = 0; j < columns;) {
    const bool wide = j + 64 <= columns;
    const auto block = wide ? multiply_block<4> : multiply_block<1>;
    for (std::int64_t i = 0; i < rows; i += 4) {
      block(a + i * a_stride, a_stride, b + j, b_stride, depth, accumulate, c + i * c_stride + j,
            c_stride);
    }
    j += wide ? 64 : 16;
  }
}

void nothing() {}

/// 16 vectors of 16 dwords as their transpose.
void transpose_dwords(__m512i (&v)[16]) {
  __m512i pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // quads[4i + e]: in each 128-bit block the elements e of four vectors from 4i on.
  __m512i quads[16];
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  // The blocks, which are a matrix of 4 by 4, likewise.
  for (int e = 0; e < 4; ++e) {
    const __m512i even_low = _mm512_shuffle_i32x4(quads[e], quads[4 + e], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(quads[e], quads[4 + e], 0xDD);
    const __m512i even_high = _mm512_shuffle_i32x4(quads[8 + e], quads[12 + e], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(quads[8 + e], quads[12 + e], 0xDD);
    v[e] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    v[4 + e] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    v[8 + e] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    v[12 + e] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

}  // namespace

const Bf16Instructions kAvx512Bf16{"AVX512_BF16", nothing, nothing, multiply, transpose_bf16};

void transpose_bf16(const std::uint16_t* source, std::int64_t source_stride, std::int64_t rows,
                    std::int64_t columns, std::uint16_t* target, std::int64_t target_stride) {
  for (std::int64_t row = 0; row < rows; row += 32) {
    for (std::int64_t column = 0; column < columns; column += 16) {
      __m512i pairs[16];  // Of two rows each.
      for (int i = 0; i < 16; ++i) {
        const auto* const even = source + (row + 2 * i) * source_stride + column;
        const auto load = [](const std::uint16_t* from) {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        };
        pairs[i] = _mm512_or_si512(load(even), _mm512_slli_epi32(load(even + source_stride), 16));
      }
      transpose_dwords(pairs);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(target + (column + i) * target_stride + row, pairs[i]);
      }
    }
  }
}

}  // namespace foveal::cpu
