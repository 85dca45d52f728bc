#include "bench/cpu_products.h"

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <vector>

#include "core/check.h"
#include "core/convert.h"
#include "cpu/instruction_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/cpu_products.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace foveal {
namespace bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// As the kernel caps its vectors.
using Floats = hn::CappedTag<float, 16>;

std::size_t float_lanes() { return hn::Lanes(Floats()); }
const char* target_name() { return hwy::TargetName(HWY_TARGET); }

/// Twelve sums ← sums · factor + addend, `rounds` times, and all of it added up: as many chains as
/// it takes to hide an FMA's latency, and as sixteen registers hold.
float fma_rounds(std::int64_t rounds, float factor, float addend) {
  const Floats d;
  const auto f = hn::Set(d, factor);
  const auto a = hn::Set(d, addend);
  auto s0 = hn::Zero(d);
  auto s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0, s9 = s0, s10 = s0,
       s11 = s0;
  for (std::int64_t i = 0; i < rounds; ++i) {
    s0 = hn::MulAdd(s0, f, a);
    s1 = hn::MulAdd(s1, f, a);
    s2 = hn::MulAdd(s2, f, a);
    s3 = hn::MulAdd(s3, f, a);
    s4 = hn::MulAdd(s4, f, a);
    s5 = hn::MulAdd(s5, f, a);
    s6 = hn::MulAdd(s6, f, a);
    s7 = hn::MulAdd(s7, f, a);
    s8 = hn::MulAdd(s8, f, a);
    s9 = hn::MulAdd(s9, f, a);
    s10 = hn::MulAdd(s10, f, a);
    s11 = hn::MulAdd(s11, f, a);
  }
  const auto low = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), hn::Add(s4, s5));
  const auto high = hn::Add(hn::Add(hn::Add(s6, s7), hn::Add(s8, s9)), hn::Add(s10, s11));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace bench
}  // namespace foveal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foveal::bench {

HWY_EXPORT(float_lanes);
HWY_EXPORT(target_name);
HWY_EXPORT(fma_rounds);

namespace {

constexpr std::int64_t kChains = 12;
constexpr std::int64_t kRounds = 200000;

// Both operands of a product of bfloat16, which fit into the second cache; so often.
constexpr std::int64_t kRows = 32;
constexpr std::int64_t kColumns = 64;
constexpr std::int64_t kDepth = 256;
constexpr std::int64_t kProducts = 2000;

std::int64_t lanes() { return static_cast<std::int64_t>(HWY_DYNAMIC_DISPATCH(float_lanes)()); }

void run_fma() {
  // Sums go towards 2, and are there after some twenty rounds.
  const float sum = HWY_DYNAMIC_DISPATCH(fma_rounds)(kRounds, 0.5F, 1.0F);
  const auto expected = static_cast<float>(2 * kChains * lanes());
  if (sum != expected) {
    fail(ErrorCode::device, "the sum that measures the FMA rate is {}, it must be {}", sum,
         expected);
  }
}

/// Memory as the products take it: its beginning a multiple of 64 bytes.
template <typename T>
class Aligned {
 public:
  Aligned(std::int64_t count, T value) : memory_(static_cast<std::size_t>(count) + 64, value) {
    while (std::bit_cast<std::uintptr_t>(memory_.data() + first_) % 64 != 0) {
      ++first_;
    }
  }
  T* data() { return memory_.data() + first_; }

 private:
  std::vector<T> memory_;
  std::size_t first_ = 0;
};

void run_bf16(const cpu::Bf16Instructions& instructions) {
  std::uint16_t one = 0;
  store_element(&one, DType::bf16, 0, 1.0);
  Aligned<std::uint16_t> a(kRows * kDepth, one);
  Aligned<std::uint32_t> b(kDepth / 2 * kColumns, (std::uint32_t{one} << 16) | one);
  Aligned<float> c(kRows * kColumns, 0.0F);
  instructions.begin();
  for (std::int64_t i = 0; i < kProducts; ++i) {
    instructions.multiply(a.data(), kDepth, b.data(), kColumns, kDepth, i > 0, c.data(), kColumns,
                          kRows, kColumns);
  }
  instructions.end();
  // Below 2^24, so exact.
  const auto expected = static_cast<float>(kDepth * kProducts);
  if (*c.data() != expected) {
    fail(ErrorCode::device, "a sum that measures {} is {}, it must be {}", instructions.name,
         *c.data(), expected);
  }
}

}  // namespace

CpuProducts::CpuProducts(DType dtype)
    : bf16_(dtype == DType::bf16 && cpu::instruction_set().bf16 != nullptr) {
  if (bf16_) {
    name_ = cpu::instruction_set().bf16->name;
    flops_ = 2.0 * static_cast<double>(kRows * kColumns * kDepth * kProducts);
    return;
  }
  name_ = fmt::format(
      "f32 FMA ({}){}", HWY_DYNAMIC_DISPATCH(target_name)(),
      dtype == DType::f32 ? std::string() : fmt::format(", {} widened", to_string(dtype)));
  flops_ = 2.0 * static_cast<double>(kChains * lanes() * kRounds);
}

void CpuProducts::run() const {
  if (bf16_) {
    run_bf16(*cpu::instruction_set().bf16);
  } else {
    run_fma();
  }
}

}  // namespace foveal::bench
#endif  // HWY_ONCE
