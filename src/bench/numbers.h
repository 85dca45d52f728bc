#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/machine.h"
#include "foveal/dtype.h"

namespace foveal::bench {

/// Normally distributed numbers that repeat, so that any element of gigabytes of them is known
/// without reading it back.
class Numbers {
 public:
  /// Numbers after which they repeat. A prime: rows, whatever their length, are equal only when as
  /// many others lie between them.
  static constexpr std::int64_t kPeriod = 1048583;

  Numbers(DType dtype, std::uint32_t seed);

  double at(std::int64_t element) const {
    return values_[static_cast<std::size_t>(element % kPeriod)];
  }
  /// The sum, modulo 2³², of the bits of the first f32 numbers.
  std::uint32_t word_sum(std::int64_t count) const;
  void fill(Machine& machine, void* to, std::int64_t bytes) const;

 private:
  std::vector<std::byte> bytes_;
  std::vector<float> values_;  ///< What the bytes stand for.
};

}  // namespace foveal::bench
