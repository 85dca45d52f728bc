// AMX: tdpbf16ps multiplies 16 rows of 16 pairs with 16 pairs of rows of 16 columns, out of and
// into tile registers of 16 × 64 bytes.

#include <immintrin.h>

#include "cpu/bf16_instructions.h"

namespace foveal::cpu {
namespace {

/// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void begin() {
  // In memory, all of it: GCC 12's intrinsic tells the optimiser of the first bytes only.
  static const TileConfig config;
  _tile_loadconfig(&config);
}

void end() { _tile_release(); }

/// kRows × kColumns tiles of c in registers 0 to 3, two of a in 4 and 5, two of b in 6 and 7: four
/// products for four loads.
template <int kRows, int kColumns>
void multiply_block(const std::uint16_t* a, std::int64_t a_stride, const std::uint32_t* b,
                    std::int64_t b_stride, std::int64_t depth, bool accumulate, float* c,
                    std::int64_t c_stride) {
  constexpr bool kSecondRow = kRows == 2;
  constexpr bool kSecondColumn = kColumns == 2;
  float* const c1 = c + 16 * c_stride;
  const auto a_bytes = static_cast<std::size_t>(2 * a_stride);
  const auto b_bytes = static_cast<std::size_t>(4 * b_stride);
  const auto c_bytes = static_cast<std::size_t>(4 * c_stride);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kSecondColumn) {
      _tile_loadd(1, c + 16, c_bytes);
    }
    if constexpr (kSecondRow) {
      _tile_loadd(2, c1, c_bytes);
    }
    if constexpr (kSecondRow && kSecondColumn) {
      _tile_loadd(3, c1 + 16, c_bytes);
    }
  }
  for (std::int64_t t = 0; t < depth; t += 32) {
    _tile_loadd(4, a + t, a_bytes);
    _tile_loadd(6, b + t / 2 * b_stride, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kSecondColumn) {
      _tile_loadd(7, b + t / 2 * b_stride + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kSecondRow) {
      _tile_loadd(5, a + 16 * a_stride + t, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kSecondRow && kSecondColumn) {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kSecondColumn) {
    _tile_stored(1, c + 16, c_bytes);
  }
  if constexpr (kSecondRow) {
    _tile_stored(2, c1, c_bytes);
  }
  if constexpr (kSecondRow && kSecondColumn) {
    _tile_stored(3, c1 + 16, c_bytes);
  }
}

void multiply(const std::uint16_t* a, std::int64_t a_stride, const std::uint32_t* b,
              std::int64_t b_stride, std::int64_t depth, bool accumulate, float* c,
              std::int64_t c_stride, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t i = 0; i < rows; i += 32) {
    const bool tall = i + 32 <= rows;
    for (std::int64_t j = 0; j < columns; j += 32) {
      const bool wide = j + 32 <= columns;
      const auto block = tall ? (wide ? multiply_block<2, 2> : multiply_block<2, 1>)
                              : (wide ? multiply_block<1, 2> : multiply_block<1, 1>);
      block(a + i * a_stride, a_stride, b + j, b_stride, depth, accumulate, c + i * c_stride + j,
            c_stride);
    }
  }
}

}  // namespace

const Bf16Instructions kAmxBf16{"AMX_BF16", begin, end, multiply, transpose_bf16};

}  // namespace foveal::cpu
