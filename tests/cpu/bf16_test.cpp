#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/convert.h"
#include "cpu/attention_kernel.h"
#include "cpu/instruction_set.h"
#include "hwy/targets.h"

namespace foveal::cpu {
namespace {

/// As aligned as scratch is.
template <typename T>
struct Matrix {
  Matrix(std::int64_t row_count, std::int64_t row_stride)
      : stride(row_stride), storage(static_cast<std::size_t>(row_count * row_stride) + 64) {
    void* begin = storage.data();
    std::size_t space = storage.size() * sizeof(T);
    data = static_cast<T*>(std::align(64, 1, begin, space));
  }
  T& at(std::int64_t row, std::int64_t column) { return data[row * stride + column]; }

  std::int64_t stride;
  std::vector<T> storage;
  T* data;
};

TEST(Bf16, ProductsAreThoseOfTheNumbers) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const Bf16Instructions* instructions : bf16_instructions()) {
    for (const std::int64_t rows : {16, 32, 48, 64}) {
      for (const std::int64_t columns : {16, 32, 48, 64}) {
        for (const std::int64_t depth : {32, 96, 128}) {
          Matrix<std::uint16_t> a(rows, depth + 32);
          Matrix<std::uint32_t> b(depth / 2, 80);
          Matrix<float> c(rows, 80);
          std::vector<double> wanted;
          for (std::int64_t i = 0; i < rows * a.stride; ++i) {
            a.data[i] = float_to_bf16(normal(random));
          }
          for (std::int64_t i = 0; i < depth / 2 * b.stride; ++i) {
            b.data[i] = float_to_bf16(normal(random)) | std::uint32_t{float_to_bf16(normal(random))}
                                                            << 16;
          }
          for (std::int64_t i = 0; i < rows; ++i) {
            for (std::int64_t j = 0; j < c.stride; ++j) {
              c.at(i, j) = normal(random);
              double sum = 0.0;
              for (std::int64_t t = 0; j < columns && t < depth; ++t) {
                const std::uint32_t pair = b.at(t / 2, j);
                sum += bf16_to_float(a.at(i, t)) *
                       bf16_to_float(static_cast<std::uint16_t>(t % 2 == 0 ? pair : pair >> 16));
              }
              wanted.push_back(sum);
            }
          }
          const std::vector<float> before(c.data, c.data + rows * c.stride);
          for (const bool accumulate : {true, false}) {
            std::copy(before.begin(), before.end(), c.data);
            instructions->begin();
            instructions->multiply(a.data, a.stride, b.data, b.stride, depth, accumulate, c.data,
                                   c.stride, rows, columns);
            instructions->end();
            for (std::int64_t i = 0; i < rows * c.stride; ++i) {
              const auto at = static_cast<std::size_t>(i);
              const bool written = i % c.stride < columns;
              const double expected =
                  wanted[at] + (accumulate || !written ? double{before[at]} : 0.0);
              ASSERT_NEAR(c.data[i], expected, written ? 1e-4 : 0.0)
                  << instructions->name << " " << rows << " x " << columns << " x " << depth
                  << ", element " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Bf16, Transposes) {
  for (const Bf16Instructions* instructions : bf16_instructions()) {
    Matrix<std::uint16_t> source(64, 48);
    Matrix<std::uint16_t> target(48, 80);
    for (std::int64_t i = 0; i < 64 * 48; ++i) {
      source.data[i] = static_cast<std::uint16_t>(i);
    }
    instructions->transpose(source.data, 48, 64, 48, target.data, 80);
    for (std::int64_t row = 0; row < 64; ++row) {
      for (std::int64_t column = 0; column < 48; ++column) {
        ASSERT_EQ(target.at(column, row), source.at(row, column)) << row << ", " << column;
      }
    }
  }
}

int begun = 0;

TEST(Bf16, EndsWhereTheUsersScoreThrows) {
  if ((hwy::SupportedTargets() & (2 * HWY_AVX3 - 1)) == 0) {  // Better ones are lower bits.
    GTEST_SKIP() << "no AVX-512";
  }
  const Bf16Instructions fake{"fake", [] { ++begun; }, [] { --begun; }, [](auto...) {},
                              [](auto...) {}};
  Matrix<std::uint16_t> rows(64, 32);
  const std::int32_t start = 0;
  const ScoreMod score = [](float, const ScoreIndex&) -> float {
    EXPECT_EQ(begun, 1);
    throw std::runtime_error("no score");
  };
  AttentionCall call;
  call.query = {reinterpret_cast<std::byte*>(rows.data), DType::bf16, 64, 64};
  call.output = call.query;
  call.key = {reinterpret_cast<const std::byte*>(rows.data), DType::bf16, 0, 64, 64};
  call.value = call.key;
  call.index.key_start_loc = &start;
  call.head_size = call.head_size_v = 32;
  call.score_mod = &score;
  call.bf16 = &fake;
  const WorkItem item{.num_rows = 64, .keys = {0, 64}, .seq_len = 64};
  Matrix<float> scratch(1, scratch_floats(32, 32, 64));
  EXPECT_THROW(run_work_item(call, item, 0, scratch.data), std::runtime_error);
  EXPECT_EQ(begun, 0);
}

}  // namespace
}  // namespace foveal::cpu
