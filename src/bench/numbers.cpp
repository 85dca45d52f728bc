#include "bench/numbers.h"

#include <algorithm>
#include <bit>
#include <random>

#include "core/convert.h"

namespace foveal::bench {

Numbers::Numbers(DType dtype, std::uint32_t seed)
    : bytes_(static_cast<std::size_t>(kPeriod * size_of(dtype))), values_(kPeriod) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    store_element(bytes_.data(), dtype, i, normal(engine));
    values_[static_cast<std::size_t>(i)] =
        static_cast<float>(load_element(bytes_.data(), dtype, i));
  }
}

std::uint32_t Numbers::word_sum(std::int64_t count) const {
  const auto sum_of_first = [&](std::int64_t numbers) {
    std::uint32_t sum = 0;
    for (std::int64_t i = 0; i < numbers; ++i) {
      sum += std::bit_cast<std::uint32_t>(values_[static_cast<std::size_t>(i)]);
    }
    return sum;
  };
  return static_cast<std::uint32_t>(count / kPeriod) * sum_of_first(kPeriod) +
         sum_of_first(count % kPeriod);
}

void Numbers::fill(Machine& machine, void* to, std::int64_t bytes) const {
  std::int64_t filled = std::min(bytes, std::ssize(bytes_));
  machine.copy(to, bytes_.data(), filled);
  // A whole number of periods is there from now on, and is doubled.
  while (filled < bytes) {
    const std::int64_t more = std::min(filled, bytes - filled);
    machine.copy(static_cast<std::byte*>(to) + filled, to, more);
    filled += more;
  }
}

}  // namespace foveal::bench
