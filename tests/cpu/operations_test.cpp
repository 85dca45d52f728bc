// reshape_and_cache and merge_attn_states through the backend.

#include <gtest/gtest.h>

#include <numeric>

#include "cpu/step.h"

namespace foveal::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Tokens and a cache in storage of its own, a fixed number of bytes off its alignment.
struct CacheWrite {
  DType dtype = DType::f32;
  DType cache_dtype = DType::f32;
  std::int64_t tokens = 70;
  std::int64_t heads = 3;
  std::int64_t size = 24;
  std::int64_t size_v = 40;
  std::int64_t block_size = 4;
  std::int64_t num_blocks = 40;
  std::int64_t row_gap = 0;  ///< Elements between the heads of a token.
  bool transposed = false;   ///< Heads outside tokens.
  std::int64_t misalign = 0;
  QuantScales scales;

  void check() {
    std::mt19937 random(5);
    std::normal_distribution<double> normal(0.0, 200.0);
    std::vector<std::byte> storage[4];
    TensorView views[4];
    for (const int i : {0, 1, 2, 3}) {
      const bool is_cache = i >= 2;
      const DType type = is_cache ? cache_dtype : dtype;
      const std::int64_t d = i % 2 == 0 ? size : size_v;
      const std::int64_t row = d + row_gap;
      const std::int64_t count = (is_cache ? num_blocks * block_size : tokens) * heads * row;
      storage[i].assign(static_cast<std::size_t>(count * size_of(type) + misalign), std::byte{0x7});
      std::byte* data = storage[i].data() + misalign;
      const std::int64_t token_stride = transposed ? row : heads * row;
      const std::int64_t head_stride = transposed ? (is_cache ? block_size : tokens) * row : row;
      if (is_cache) {
        const std::int64_t shape[] = {num_blocks, block_size, heads, d};
        const std::int64_t strides[] = {block_size * heads * row, token_stride, head_stride, 1};
        views[i] = TensorView(data, type, shape, strides);
      } else {
        const std::int64_t shape[] = {tokens, heads, d};
        const std::int64_t strides[] = {token_stride, head_stride, 1};
        views[i] = TensorView(data, type, shape, strides);
        for (std::int64_t n = 0; n < count; ++n) {
          std::vector<std::byte> element(8);
          store_element(element.data(), type, 0, n % 97 == 0 ? 1e6 : normal(random));
          std::copy_n(element.begin(), size_of(type), data + n * size_of(type));
        }
      }
    }
    std::vector<std::int64_t> slots(static_cast<std::size_t>(num_blocks * block_size));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    for (std::size_t t = 0; t < slots.size(); t += 5) {
      slots[t] = kPaddingSlot;
    }
    // Fewer slots than rows.
    const TensorView slot_mapping(slots.data(), DType::i64, {tokens - 2});
    const std::vector<std::byte> before[2] = {storage[2], storage[3]};
    const auto pool = make_thread_pool(2);
    ExecutionContext context;
    context.threads = pool.get();
    cpu_backend()->reshape_and_cache(views[0], views[1], {views[2], views[3]}, slot_mapping, scales,
                                     context);

    // The same by the scalar conversions, element by element.
    std::vector<std::byte> wanted[2] = {before[0], before[1]};
    for (const int i : {0, 1}) {
      const TensorView& from = views[i];
      const TensorView& to = views[i + 2];
      const double scale =
          is_fp8(cache_dtype) ? static_cast<double>(i == 0 ? scales.k : scales.v) : 1.0;
      for (std::int64_t t = 0; t < tokens - 2; ++t) {
        const std::int64_t slot = slots[static_cast<std::size_t>(t)];
        for (std::int64_t h = 0; h < heads && slot >= 0; ++h) {
          for (std::int64_t d = 0; d < to.size(3); ++d) {
            std::byte element[8];
            std::copy_n(from.as<const std::byte>() +
                            (t * from.stride(0) + h * from.stride(1) + d) * size_of(dtype),
                        size_of(dtype), element);
            const double value = load_element(element, dtype, 0);
            store_element(element, cache_dtype, 0, value / scale);
            std::copy_n(element, size_of(cache_dtype),
                        wanted[i].begin() + misalign +
                            (slot / block_size * to.stride(0) + slot % block_size * to.stride(1) +
                             h * to.stride(2) + d) *
                                size_of(cache_dtype));
          }
        }
      }
      EXPECT_EQ(storage[i + 2], wanted[i]) << to_string(dtype) << " to " << to_string(cache_dtype);
    }
  }
};

TEST(CpuReshapeAndCache, EveryDtypeAndLayout) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    for (const DType cache_dtype : {dtype, DType::f8e4m3, DType::f8e5m2}) {
      for (const bool transposed : {false, true}) {
        for (const std::int64_t row_gap : {0, 3}) {
          CacheWrite write;
          write.dtype = dtype;
          write.cache_dtype = cache_dtype;
          write.transposed = transposed;
          write.row_gap = row_gap;
          write.scales = {1.0F, 0.37F, 2.9F};
          write.check();
        }
      }
    }
  }
}

TEST(CpuReshapeAndCache, MisalignedElements) {
  CacheWrite write;
  write.dtype = DType::f16;
  write.cache_dtype = DType::f8e5m2;
  write.misalign = 2;
  write.check();
  write.cache_dtype = DType::f16;
  write.check();
}

TEST(CpuReshapeAndCache, Fp8Saturates) {
  float key[8] = {1e9F, -1e9F, kInfinity, 448.0F, 464.0F, -500.0F, kNaN, 1.0F};
  std::uint8_t cache[64] = {};  // GCC 12 warns of the wider dtypes that load_element also knows.
  std::int64_t slot = 0;
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    const TensorView tokens(key, DType::f32, {1, 1, 8});
    const KVCacheView views{TensorView(cache, dtype, {1, 1, 1, 8}),
                            TensorView(cache + 8, dtype, {1, 1, 1, 8})};
    cpu_backend()->reshape_and_cache(tokens, tokens, views, TensorView(&slot, DType::i64, {1}), {},
                                     {});
    const double max = dtype == DType::f8e4m3 ? 448.0 : 57344.0;
    EXPECT_EQ(load_element(cache, dtype, 0), max);
    EXPECT_EQ(load_element(cache, dtype, 1), -max);
    EXPECT_EQ(load_element(cache, dtype, 3), 448.0);
    EXPECT_EQ(load_element(cache, dtype, 4), 448.0);
    EXPECT_EQ(load_element(cache, dtype, 5), dtype == DType::f8e4m3 ? -448.0 : -512.0);
    EXPECT_TRUE(std::isnan(load_element(cache, dtype, 6)));
    EXPECT_EQ(load_element(cache, dtype, 7), 1.0);
  }
}

struct Part {
  std::vector<std::byte> output;
  std::vector<float> lse;
  AttentionPart view;
};

constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kHeads = 3;
constexpr std::int64_t kSize = 20;

/// The LSE lies [tokens][heads], that is with unusual strides.
Part make_part(DType dtype, unsigned seed, std::vector<float> lse) {
  Part part;
  part.output.resize(static_cast<std::size_t>(kTokens * kHeads * kSize * size_of(dtype)));
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  part.lse = std::move(lse);
  for (std::int64_t i = 0; i < kTokens * kHeads * kSize; ++i) {
    const bool empty = std::isinf(part.lse[static_cast<std::size_t>(i / kSize)]);
    store_element(part.output.data(), dtype, i,
                  empty ? static_cast<double>(kNaN) : uniform(random));
  }
  const std::int64_t shape[] = {kHeads, kTokens};
  const std::int64_t strides[] = {1, kHeads};
  part.view.output = {part.output.data(), dtype, {kTokens, kHeads, kSize}};
  part.view.lse = {part.lse.data(), DType::f32, shape, strides};
  return part;
}

TEST(CpuMerge, EveryDtypeEmptyPartsAndAliases) {
  std::vector<float> lse_a(kTokens * kHeads, 0.3F);
  std::vector<float> lse_b(kTokens * kHeads, -1.2F);
  lse_a[1] = lse_a[7] = -kInfinity;
  lse_a[2] = kInfinity;
  lse_b[3] = lse_b[7] = -kInfinity;
  lse_b[8] = 1e5F;
  lse_a[9] = lse_b[9] = 88000.0F;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
    for (const int alias : {0, 1, 2}) {
      Part a = make_part(dtype, 1, lse_a);
      Part b = make_part(dtype, 2, lse_b);
      Part result = make_part(dtype, 3, lse_a);
      const std::vector<std::byte> output_a = a.output;
      const std::vector<std::byte> output_b = b.output;
      const AttentionPart target = alias == 0 ? result.view : (alias == 1 ? a.view : b.view);
      cpu_backend()->merge_attn_states(target, a.view, b.view, {});
      const double limit = dtype == DType::bf16 ? 5e-3 : (dtype == DType::f16 ? 6e-4 : 1e-6);
      for (std::size_t row = 0; row < kTokens * kHeads; ++row) {
        const bool a_empty = std::isinf(lse_a[row]);
        const bool b_empty = std::isinf(lse_b[row]);
        const double max = std::max(a_empty ? -1e30 : lse_a[row], b_empty ? -1e30 : lse_b[row]);
        const double wa = a_empty ? 0.0 : std::exp(lse_a[row] - max);
        const double wb = b_empty ? 0.0 : std::exp(lse_b[row] - max);
        const float lse = target.lse.as<float>()[row];
        if (a_empty && b_empty) {
          EXPECT_EQ(lse, -kInfinity);
        } else {
          EXPECT_FLOAT_EQ(lse, static_cast<float>(max + std::log(wa + wb)));
        }
        for (std::int64_t d = 0; d < kSize; ++d) {
          const std::int64_t i = static_cast<std::int64_t>(row) * kSize + d;
          double wanted = 0.0;
          if (!a_empty) {
            wanted += wa / (wa + wb) * load_element(output_a.data(), dtype, i);
          }
          if (!b_empty) {
            wanted += wb / (wa + wb) * load_element(output_b.data(), dtype, i);
          }
          const double got = load_element(target.output.data(), dtype, i);
          EXPECT_NEAR(got, wanted, limit) << to_string(dtype) << " row " << row;
          if (a_empty != b_empty) {
            EXPECT_EQ(got, wanted);  // The other part unchanged.
          }
        }
      }
    }
  }
}

TEST(CpuMerge, WithoutLseOfTheResult) {
  Part a = make_part(DType::f32, 1, std::vector<float>(kTokens * kHeads, 0.5F));
  Part b = make_part(DType::f32, 2, std::vector<float>(kTokens * kHeads, 0.5F));
  Part result = make_part(DType::f32, 3, std::vector<float>(kTokens * kHeads, 9.0F));
  cpu_backend()->merge_attn_states({result.view.output, {}}, a.view, b.view, {});
  EXPECT_EQ(result.lse[0], 9.0F);
  EXPECT_NEAR(load_element(result.output.data(), DType::f32, 0),
              0.5 * (load_element(a.output.data(), DType::f32, 0) +
                     load_element(b.output.data(), DType::f32, 0)),
              1e-6);
}

TEST(CpuBackend, CacheLayouts) {
  const auto backend = cpu_backend();
  KVCacheSpec spec;
  spec.num_kv_heads = 2;
  spec.head_size = spec.head_size_v = 32;
  for (const KVCacheOrder order : {KVCacheOrder::nhd, KVCacheOrder::hnd}) {
    for (const std::int64_t size_v : {32, 16}) {
      spec.head_size_v = size_v;
      const KVCacheLayout layout = backend->kv_cache_layout(spec, 5, order);
      EXPECT_EQ(layout.size_bytes(), 5 * spec.page_size_bytes());
      std::vector<std::byte> data(static_cast<std::size_t>(layout.size_bytes()));
      const KVCacheView view = backend->kv_cache_view(layout.view(data.data()), spec);
      EXPECT_EQ(view.key.describe(), "bf16[5, 16, 2, 32] on cpu");
      EXPECT_EQ(view.value.size(3), size_v);
      EXPECT_EQ(view.key.stride(3), 1);
      EXPECT_EQ(view.value.stride(3), 1);
      EXPECT_EQ(view.key.stride(1) < view.key.stride(2), order == KVCacheOrder::hnd);
    }
  }
}

}  // namespace
}  // namespace foveal::testing
