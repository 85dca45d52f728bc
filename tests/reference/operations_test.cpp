// Merging of partial attentions and writing of the cache, against numbers worked out by hand.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/convert.h"
#include "foveal/registry.h"
#include "foveal/selector.h"

namespace foveal {
namespace {

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
constexpr float kFloatNaN = std::numeric_limits<float>::quiet_NaN();

/// Two rows, one head, two dimensions.
struct PartData {
  std::vector<float> output;
  std::vector<float> lse;
  AttentionPart view() {
    return {{output.data(), DType::f32, {2, 1, 2}}, {lse.data(), DType::f32, {1, 2}}};
  }
};

void merge(const AttentionPart& result, const AttentionPart& a, const AttentionPart& b) {
  BackendRegistry::global().get("REFERENCE")->merge_attn_states(result, a, b, {});
}

TEST(Merge, WeighsByTheExponentialOfTheLse) {
  PartData a{{1, 2, 3, 4}, {0.0F, 1000.0F}};
  PartData b{{5, 6, 7, 8}, {std::log(3.0F), 1000.0F}};
  PartData result{std::vector<float>(4), std::vector<float>(2)};
  merge(result.view(), a.view(), b.view());
  EXPECT_NEAR(result.output[0], (1.0 + 3.0 * 5.0) / 4.0, 1e-6);
  EXPECT_NEAR(result.output[1], (2.0 + 3.0 * 6.0) / 4.0, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(4.0), 1e-6);
  EXPECT_FLOAT_EQ(result.output[2], 5.0F);
  EXPECT_NEAR(result.lse[1], 1000.0 + std::log(2.0), 1e-4);
}

TEST(Merge, AnEmptyPartContributesNothingEvenIfItHoldsNaN) {
  for (const float empty : {-kFloatInfinity, kFloatInfinity}) {
    PartData a{{kFloatNaN, kFloatNaN, 3, 4}, {empty, 0.5F}};
    PartData b{{5, 6, kFloatNaN, kFloatInfinity}, {-2.0F, empty}};
    PartData result{std::vector<float>(4), std::vector<float>(2)};
    merge(result.view(), a.view(), b.view());
    EXPECT_EQ(result.output, (std::vector<float>{5, 6, 3, 4}));
    EXPECT_EQ(result.lse, (std::vector<float>{-2.0F, 0.5F}));
  }
}

TEST(Merge, TwoEmptyPartsAreZeroAndMinusInfinity) {
  PartData a{{kFloatNaN, 1, 2, 3}, {-kFloatInfinity, kFloatInfinity}};
  PartData b{{1, kFloatNaN, 2, 3}, {kFloatInfinity, kFloatInfinity}};
  PartData result{{9, 9, 9, 9}, {9, 9}};
  merge(result.view(), a.view(), b.view());
  EXPECT_EQ(result.output, (std::vector<float>{0, 0, 0, 0}));
  EXPECT_EQ(result.lse, (std::vector<float>{-kFloatInfinity, -kFloatInfinity}));
}

TEST(Merge, ResultMayBeAnInputAndLseMayBeAbsent) {
  PartData a{{1, 2, 3, 4}, {0.0F, 0.0F}};
  PartData b{{3, 4, 5, 6}, {0.0F, 0.0F}};
  merge({a.view().output, {}}, a.view(), b.view());
  EXPECT_EQ(a.output, (std::vector<float>{2, 3, 4, 5}));
  PartData c{{1, 2, 3, 4}, {0.0F, 0.0F}};
  merge(b.view(), c.view(), b.view());
  EXPECT_EQ(b.output, (std::vector<float>{2, 3, 4, 5}));
}

/// A cache of two blocks of two tokens with one head of two dimensions, values behind keys.
template <typename T>
struct CacheData {
  std::vector<T> bytes;
  KVCacheView view(DType dtype) {
    const TensorView all(bytes.data(), dtype, {2, 2, 2, 1, 2});
    return KVCacheView::from_kv_first(all);
  }
};

void write(const KVCacheView& cache, std::vector<float> keys, std::vector<float> values,
           std::vector<std::int64_t> slots, const QuantScales& scales) {
  const std::int64_t rows = std::ssize(keys) / 2;
  BackendRegistry::global()
      .get("REFERENCE")
      ->reshape_and_cache(TensorView(keys.data(), DType::f32, {rows, 1, 2}),
                          TensorView(values.data(), DType::f32, {rows, 1, 2}), cache,
                          TensorView(slots.data(), DType::i64, {std::ssize(slots)}), scales, {});
}

TEST(CacheWrite, SlotsAreBlockTimesBlockSizePlusOffset) {
  CacheData<float> cache{std::vector<float>(16, -1.0F)};
  // Three rows, two slots: the row past slot_mapping and the one with −1 are not written. The
  // scales do not apply to a cache that is not fp8.
  write(cache.view(DType::f32), {1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}, {3, -1},
        {.k = 2.0F, .v = 4.0F});
  const std::vector<float> expected{-1, -1, -1, -1, -1, -1, 1, 2, -1, -1, -1, -1, -1, -1, 7, 8};
  EXPECT_EQ(cache.bytes, expected);
}

TEST(CacheWrite, Fp8IsScaledRoundedToEvenAndSaturated) {
  CacheData<std::uint8_t> cache{std::vector<std::uint8_t>(16, 0)};
  write(cache.view(DType::f8e4m3), {4.25F, 1e9F, -4.75F, kFloatNaN}, {17.0F, -1e9F, 19.0F, 0.0F},
        {0, 2}, {.k = 0.25F, .v = 0.5F});
  const auto at = [&](std::size_t i) { return f8e4m3_to_float(cache.bytes[i]); };
  EXPECT_EQ(at(0), 16.0F);  // 17 lies halfway between 16 and 18; 16 is even.
  EXPECT_EQ(at(1), 448.0F);
  EXPECT_EQ(at(4), -20.0F);  // −19 lies halfway between −18 and −20; 20 is even.
  EXPECT_TRUE(std::isnan(at(5)));
  EXPECT_EQ(at(8), 32.0F);  // 34 lies halfway between 32 and 36.
  EXPECT_EQ(at(9), -448.0F);
  EXPECT_EQ(at(12), 40.0F);  // 38 lies halfway between 36 and 40.
  CacheData<std::uint8_t> wide{std::vector<std::uint8_t>(16, 0)};
  write(wide.view(DType::f8e5m2), {1e9F, 4.5F}, {-1e9F, 5.5F}, {0}, {.k = 0.5F, .v = 0.5F});
  EXPECT_EQ(f8e5m2_to_float(wide.bytes[0]), 57344.0F);
  EXPECT_EQ(f8e5m2_to_float(wide.bytes[1]), 8.0F);
  EXPECT_EQ(f8e5m2_to_float(wide.bytes[8]), -57344.0F);
  EXPECT_EQ(f8e5m2_to_float(wide.bytes[9]), 12.0F);
}

TEST(Reference, IsChosenByNameOnlyAndRefusesNothing) {
  for (const AttentionBackendPtr& backend : {BackendRegistry::global().get("REFERENCE"),
                                             BackendRegistry::global().get("REFERENCE_MLA")}) {
    EXPECT_FALSE(backend->capabilities().auto_select);
    SelectorConfig config;
    config.use_mla = backend->capabilities().mla;
    config.head_size = 1;
    config.head_size_v = 3;
    config.kv_cache_dtype = DType::f8e5m2;
    config.block_size = 7;
    config.has_sinks = config.has_sliding_window = config.has_soft_cap = config.has_alibi = true;
    config.has_custom_score = config.use_non_causal = config.needs_lse = true;
    config.batch_invariant = true;
    EXPECT_TRUE(backend->validate(config).empty()) << backend->validate(config).front();
  }
}

}  // namespace
}  // namespace foveal
