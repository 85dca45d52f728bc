#pragma once

#include <cstdint>

namespace foveal::cpu {

/// Products of bfloat16 with float32 sums, by instructions made for them. Numbers below 2^−126
/// count as 0 there.
struct Bf16Instructions {
  const char* name;

  /// Around the products of a task, on its thread, also where it throws.
  void (*begin)();
  void (*end)();

  /// c[i][j] = [c[i][j] +] Σ_t a[i][t] · b[t][j] for `rows` (a multiple of 16) rows of a and
  /// `columns` (likewise) of b; `depth` is a multiple of 32. b holds pairs: element [t / 2][j] is
  /// b[t][j] in the lower half and b[t + 1][j] in the upper one.
  void (*multiply)(const std::uint16_t* a, std::int64_t a_stride, const std::uint32_t* b,
                   std::int64_t b_stride, std::int64_t depth, bool accumulate, float* c,
                   std::int64_t c_stride, std::int64_t rows, std::int64_t columns);

  /// target[column][row] = source[row][column] for a multiple of 32 rows and of 16 columns.
  void (*transpose)(const std::uint16_t* source, std::int64_t source_stride, std::int64_t rows,
                    std::int64_t columns, std::uint16_t* target, std::int64_t target_stride);
};

#if defined(__x86_64__)
extern const Bf16Instructions kAvx512Bf16;
extern const Bf16Instructions kAmxBf16;

/// Bf16Instructions::transpose with AVX-512, for both.
void transpose_bf16(const std::uint16_t* source, std::int64_t source_stride, std::int64_t rows,
                    std::int64_t columns, std::uint16_t* target, std::int64_t target_stride);
#endif

}  // namespace foveal::cpu
