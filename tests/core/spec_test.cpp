#include "foveal/spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/expect_error.h"

namespace foveal {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;

AttentionSpec spec_of(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size) {
  AttentionSpec spec;
  spec.num_heads = heads;
  spec.num_kv_heads = kv_heads;
  spec.head_size = head_size;
  return spec;
}

AttentionSpec mla_spec() {
  AttentionSpec spec = spec_of(16, 1, 576);
  spec.head_size_v = 512;
  spec.scale = 0.1F;
  spec.mla = MlaDims{};
  return spec;
}

TEST(AttentionSpec, Defaults) {
  const AttentionSpec spec = spec_of(8, 2, 64);
  spec.validate();
  EXPECT_EQ(spec.value_head_size(), 64);
  EXPECT_EQ(spec.cache_dtype(), spec.dtype);
  EXPECT_EQ(spec.group_size(), 4);
  EXPECT_FLOAT_EQ(spec.softmax_scale(), 0.125F);
  EXPECT_EQ(Window::of_tokens(4), (Window{3, 0}));
  mla_spec().validate();
}

TEST(AttentionSpec, RefusesContradictions) {
  const auto refuses = [](const std::string& part, auto&& change) {
    AttentionSpec spec = spec_of(8, 2, 64);
    change(spec);
    expect_error(
        ErrorCode::invalid_argument, [&] { spec.validate(); }, part);
  };
  refuses("num_heads is 9, it must be a multiple of num_kv_heads = 2",
          [](AttentionSpec& s) { s.num_heads = 9; });
  refuses("num_heads is 0", [](AttentionSpec& s) { s.num_heads = 0; });
  refuses("num_kv_heads is -1", [](AttentionSpec& s) { s.num_kv_heads = -1; });
  refuses("head_size is 0", [](AttentionSpec& s) { s.head_size = 0; });
  refuses("head_size_v is -8", [](AttentionSpec& s) { s.head_size_v = -8; });
  refuses("dtype is i32", [](AttentionSpec& s) { s.dtype = DType::i32; });
  refuses("kv_cache_dtype is u8", [](AttentionSpec& s) { s.kv_cache_dtype = DType::u8; });
  refuses("scale is inf",
          [](AttentionSpec& s) { s.scale = std::numeric_limits<float>::infinity(); });
  refuses("window is (-2, 0)", [](AttentionSpec& s) { s.window = {-2, 0}; });
  refuses("window is (-1, 9223372036854775807)", [](AttentionSpec& s) {
    s.window = {-1, std::numeric_limits<std::int64_t>::max()};
  });
  refuses("logits_soft_cap is -1", [](AttentionSpec& s) { s.logits_soft_cap = -1.0F; });
  refuses("logits_soft_cap is 1e-39", [](AttentionSpec& s) { s.logits_soft_cap = 1e-39F; });
  refuses("alibi_slopes has 3 entries, it must have num_heads = 8", [](AttentionSpec& s) {
    s.alibi_slopes = {1, 2, 3};
  });
  refuses("sinks has 9 entries", [](AttentionSpec& s) { s.sinks.resize(9); });
  refuses("sinks holds a value that is not finite",
          [](AttentionSpec& s) { s.sinks.assign(8, std::numeric_limits<float>::quiet_NaN()); });
  refuses("scales.k is 0", [](AttentionSpec& s) { s.scales.k = 0.0F; });
  refuses("score_mod and alibi_slopes", [](AttentionSpec& s) {
    s.alibi_slopes.assign(8, 0.5F);
    s.score_mod = [](float score, const ScoreIndex&) { return score; };
  });
}

TEST(AttentionSpec, RefusesContradictionsOfMla) {
  const auto refuses = [](const std::string& part, auto&& change) {
    AttentionSpec spec = mla_spec();
    change(spec);
    expect_error(
        ErrorCode::invalid_argument, [&] { spec.validate(); }, part);
  };
  refuses("num_kv_heads is 2, an MLA layer has 1", [](AttentionSpec& s) { s.num_kv_heads = 2; });
  refuses("head_size is 512", [](AttentionSpec& s) { s.head_size = 512; });
  refuses("head_size_v is 576", [](AttentionSpec& s) { s.head_size_v = 0; });
  refuses("scale is unset", [](AttentionSpec& s) { s.scale.reset(); });
  refuses("kv_lora_rank 0", [](AttentionSpec& s) { s.mla->kv_lora_rank = 0; });
}

TEST(KVCacheSpec, PageSizesByKind) {
  AttentionSpec spec = spec_of(8, 2, 64);
  spec.dtype = DType::bf16;
  KVCacheSpec full = KVCacheSpec::from(spec, 16);
  EXPECT_EQ(full.kind, KVCacheSpec::Kind::full);
  EXPECT_EQ(full.page_size_bytes(), 16 * 2 * (64 + 64) * 2);
  EXPECT_EQ(full.max_blocks_per_request(100, 32), 7);
  full.page_size_padded = 1 << 20;
  EXPECT_EQ(full.page_size_bytes(), 1 << 20);
  full.page_size_padded = 10;
  expect_error(
      ErrorCode::invalid_argument, [&] { full.page_size_bytes(); }, "page_size_padded is 10");

  spec.head_size_v = 128;
  spec.kv_cache_dtype = DType::f8e4m3;
  EXPECT_EQ(KVCacheSpec::from(spec, 16).page_size_bytes(), 16 * 2 * (64 + 128));

  spec.window = Window::of_tokens(48);
  const KVCacheSpec sliding = KVCacheSpec::from(spec, 16);
  EXPECT_EQ(sliding.kind, KVCacheSpec::Kind::sliding_window);
  EXPECT_EQ(sliding.sliding_window, 48);
  // 47 tokens behind and 33 new ones: 80 tokens, 5 blocks, and one more as the window may start
  // inside a block.
  EXPECT_EQ(sliding.max_blocks_per_request(10000, 33), 6);
  EXPECT_EQ(sliding.max_blocks_per_request(40, 33), 3);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(sliding.max_blocks_per_request(kMost, kMost), kMost / 16 + 1);

  const KVCacheSpec mla = KVCacheSpec::from(mla_spec(), 64);
  EXPECT_EQ(mla.kind, KVCacheSpec::Kind::mla);
  EXPECT_EQ(mla.page_size_bytes(), 64 * 576 * 2);

  AttentionSpec cross = spec_of(8, 2, 64);
  cross.attn_type = AttnType::encoder_decoder;
  EXPECT_EQ(KVCacheSpec::from(cross, 16).kind, KVCacheSpec::Kind::cross);
  cross.attn_type = AttnType::encoder_only;
  EXPECT_EQ(KVCacheSpec::from(cross, 16).kind, KVCacheSpec::Kind::encoder_only);
  EXPECT_EQ(KVCacheSpec::from(cross, 16).page_size_bytes(), 0);
  EXPECT_EQ(KVCacheSpec::from(cross, 16).max_blocks_per_request(100, 10), 0);
}

TEST(KVCacheLayout, StrideOrderMakesHnd) {
  const KVCacheLayout layout{{3, 2, 16, 4, 64}, {0, 1, 3, 2, 4}, DType::f32};
  std::vector<std::byte> memory(static_cast<std::size_t>(layout.size_bytes()));
  const TensorView cache = layout.view(memory.data());
  EXPECT_THAT(cache.shape(), ElementsAre(3, 2, 16, 4, 64));
  EXPECT_THAT(cache.strides(), ElementsAre(2 * 16 * 4 * 64, 16 * 4 * 64, 64, 16 * 64, 1));
  const KVCacheLayout wrong{{3, 2}, {0, 0}, DType::f32};
  expect_error(
      ErrorCode::invalid_argument, [&] { wrong.view(memory.data()); }, "not a permutation");
}

TEST(KVCacheView, LayoutsOfEngines) {
  std::vector<float> memory(5 * 2 * 16 * 4 * 64);
  const KVCacheView blocks_first =
      KVCacheView::from_blocks_first({memory.data(), DType::f32, {5, 2, 16, 4, 64}});
  EXPECT_THAT(blocks_first.value.shape(), ElementsAre(5, 16, 4, 64));
  EXPECT_EQ(blocks_first.value.as<float>() - blocks_first.key.as<float>(), 16 * 4 * 64);
  EXPECT_EQ(blocks_first.key.stride(0), 2 * 16 * 4 * 64);

  const KVCacheView kv_first =
      KVCacheView::from_kv_first({memory.data(), DType::f32, {2, 5, 16, 4, 64}});
  EXPECT_EQ(kv_first.value.as<float>() - kv_first.key.as<float>(), 5 * 16 * 4 * 64);

  const KVCacheView packed =
      KVCacheView::from_packed({memory.data(), DType::f32, {5, 4, 16, 128}}, 48);
  EXPECT_THAT(packed.key.shape(), ElementsAre(5, 16, 4, 48));
  EXPECT_THAT(packed.value.shape(), ElementsAre(5, 16, 4, 80));
  EXPECT_EQ(packed.value.as<float>() - packed.key.as<float>(), 48);
  EXPECT_EQ(packed.key.stride(1), 128);

  const TensorView wrong(memory.data(), DType::f32, {5, 3, 16, 4, 32});
  expect_error(
      ErrorCode::invalid_argument, [&] { KVCacheView::from_blocks_first(wrong); },
      "dimension 1 has size 3");
  expect_error(
      ErrorCode::invalid_argument, [&] { KVCacheView::from_packed(packed.key, 48); },
      "head_size is 48");
}

}  // namespace
}  // namespace foveal
