#include "cpu/merge_states.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "core/convert.h"
#include "cpu/row_convert.h"

namespace foveal::cpu {
namespace {

/// What the outputs of two parts count for, and the LSE of both. An empty part has the weight 0.
struct Weights {
  double a = 0.0;
  double b = 0.0;
  float lse = -std::numeric_limits<float>::infinity();
};

Weights weigh(float lse_a, float lse_b) {
  const bool a_empty = std::isinf(lse_a);
  const bool b_empty = std::isinf(lse_b);
  if (a_empty || b_empty) {
    return {a_empty ? 0.0 : 1.0, a_empty && !b_empty ? 1.0 : 0.0,
            !a_empty ? lse_a : (!b_empty ? lse_b : Weights{}.lse)};
  }
  const double max = std::max(lse_a, lse_b);
  const double a = std::exp(lse_a - max);
  const double b = std::exp(lse_b - max);
  return {a / (a + b), b / (a + b), static_cast<float>(max + std::log(a + b))};
}

/// Row of head `head` of token `token`.
std::byte* row_of(const TensorView& output, std::int64_t token, std::int64_t head) {
  return output.as<std::byte>() +
         (token * output.stride(0) + head * output.stride(1)) * size_of(output.dtype());
}

float& lse_of(const TensorView& lse, std::int64_t token, std::int64_t head) {
  return lse.as<float>()[head * lse.stride(0) + token * lse.stride(1)];
}

void merge_row_in_double(const Weights& weights, DType dtype, const std::byte* a,
                         const std::byte* b, std::byte* result, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) {
    double sum = 0.0;
    if (weights.a != 0.0) {
      sum += weights.a * load_element(a, dtype, i);
    }
    if (weights.b != 0.0) {
      sum += weights.b * load_element(b, dtype, i);
    }
    store_element(result, dtype, i, sum);
  }
}

}  // namespace

void merge_attn_states(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b,
                       const ExecutionContext& context) {
  const DType dtype = result.output.dtype();
  const std::int64_t num_heads = result.output.size(1);
  const std::int64_t size = result.output.size(2);
  const auto merge_token = [&](std::int64_t token, int /*worker*/) {
    // Each piece is read before it is written: the result may be one of the parts.
    constexpr std::int64_t kPiece = 256;
    std::array<float, kPiece> row_a;
    std::array<float, kPiece> row_b;
    for (std::int64_t head = 0; head < num_heads; ++head) {
      const Weights weights = weigh(lse_of(a.lse, token, head), lse_of(b.lse, token, head));
      const std::byte* const from_a = row_of(a.output, token, head);
      const std::byte* const from_b = row_of(b.output, token, head);
      std::byte* const to = row_of(result.output, token, head);
      if (is_row_dtype(dtype)) {
        for (std::int64_t i = 0; i < size; i += kPiece) {
          const std::int64_t at = i * size_of(dtype);
          const auto count = static_cast<std::size_t>(std::min(kPiece, size - i));
          row_to_float(dtype, from_a + at, row_a.data(), count);
          row_to_float(dtype, from_b + at, row_b.data(), count);
          blend_rows(row_a.data(), static_cast<float>(weights.a), row_b.data(),
                     static_cast<float>(weights.b), row_a.data(), count);
          row_from_float(dtype, row_a.data(), 1.0F, to + at, count);
        }
      } else {
        merge_row_in_double(weights, dtype, from_a, from_b, to, size);
      }
      if (!result.lse.empty()) {
        lse_of(result.lse, token, head) = weights.lse;
      }
    }
  };
  // By reference: a std::function of so large a lambda would allocate.
  context.pool().parallel_for(result.output.size(0), std::cref(merge_token));
}

}  // namespace foveal::cpu
