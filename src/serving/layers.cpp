#include "serving/layers.h"

#include <bit>
#include <cmath>

namespace foveal::serving {
namespace {

/// e^x to 2 units in the last place, for |x| < 87, written so that the compiler vectorises loops
/// over it: e^x = 2^n · e^r with n = round(x / ln 2), |r| ≤ ln 2 / 2, and e^r by its Taylor series,
/// whose first term left out is below 2e-8.
inline float fast_exp(float x) {
  // Adding 1.5 · 2^23 rounds to an integer, which then stands in the low bits.
  constexpr float kRound = 12582912.0F;
  const float shifted = x * 1.44269504F + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts, the first short enough that n · it is exact.
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const auto exponent = std::bit_cast<std::uint32_t>(shifted) << 23;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) + exponent);
}

}  // namespace

void rms_norm(const float* x, const float* weight, std::int64_t size, float eps, float* out) {
  // Sixteen sums in a fixed order: the compiler may not reorder a single one into vectors.
  constexpr std::int64_t kLanes = 16;
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += x[i + lane] * x[i + lane];
    }
  }
  for (; i < size; ++i) {
    sums[0] += x[i] * x[i];
  }
  float sum = 0.0F;
  for (const float part : sums) {
    sum += part;
  }
  const float scale = 1.0F / std::sqrt(sum / static_cast<float>(size) + eps);
  for (i = 0; i < size; ++i) {
    out[i] = x[i] * scale * weight[i];
  }
}

void rope(float* heads, std::int64_t num_heads, std::int64_t head_size, const float* cos,
          const float* sin, bool interleaved) {
  const std::int64_t half = head_size / 2;
  const std::int64_t stride = interleaved ? 2 : 1;
  const std::int64_t partner = interleaved ? 1 : half;
  for (std::int64_t h = 0; h < num_heads; ++h) {
    float* head = heads + h * head_size;
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = head[i * stride];
      const float b = head[i * stride + partner];
      head[i * stride] = a * cos[i] - b * sin[i];
      head[i * stride + partner] = a * sin[i] + b * cos[i];
    }
  }
}

void silu_and_mul(const float* gate_up, std::int64_t size, float* out) {
  const float* up = gate_up + size;
  for (std::int64_t i = 0; i < size; ++i) {
    // Beyond 80, silu(x) is x or 0 to float32's precision.
    const float x = gate_up[i];
    const float limited = std::min(std::max(-x, -80.0F), 80.0F);
    out[i] = x / (1.0F + fast_exp(limited)) * up[i];
  }
}

}  // namespace foveal::serving
