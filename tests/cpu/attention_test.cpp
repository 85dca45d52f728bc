#include <gtest/gtest.h>

#include <bit>
#include <string>

#include "cpu/step.h"
#include "support/expect_error.h"

namespace foveal::testing {
namespace {

/// Only the rounding of the output to a 16-bit dtype is allowed on top of float32, and for bfloat16
/// that of the weights too, where the machine multiplies them as that.
double tolerance(DType dtype) {
  return dtype == DType::f32 ? 1e-5 : (dtype == DType::f16 ? 6e-4 : 9e-3);
}

void expect_close(Step& step, const Result& got, const Result& wanted, const std::string& what) {
  const double limit = tolerance(step.spec.dtype);
  for (std::size_t i = 0; i < wanted.output.size(); ++i) {
    const double error = std::abs(got.output[i] - wanted.output[i]);
    ASSERT_LE(error, limit * std::max(std::abs(wanted.output[i]), 0.5))
        << what << ": output " << i << " is " << got.output[i] << ", wanted " << wanted.output[i];
  }
  for (std::size_t i = 0; i < wanted.lse.size(); ++i) {
    if (std::isinf(wanted.lse[i])) {
      ASSERT_EQ(got.lse[i], wanted.lse[i]) << what << ": lse " << i;
    } else {
      ASSERT_NEAR(got.lse[i], wanted.lse[i], 1e-5 * std::max(1.0F, std::abs(wanted.lse[i])))
          << what << ": lse " << i;
    }
  }
}

void expect_close(Step& step, const Result& got, const std::string& what) {
  expect_close(step, got, step.naive(), what);
}

void expect_same_bits(const Result& a, const Result& b) {
  ASSERT_EQ(a.output.size(), b.output.size());
  for (std::size_t i = 0; i < a.output.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint64_t>(a.output[i]), std::bit_cast<std::uint64_t>(b.output[i]))
        << "output " << i;
  }
  for (std::size_t i = 0; i < a.lse.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(a.lse[i]), std::bit_cast<std::uint32_t>(b.lse[i]))
        << "lse " << i;
  }
}

/// Prefill, a continued chunk, decodes, and the legal oddities: no keys, no queries, more queries
/// than keys.
std::vector<Request> mixed_requests() {
  return {{70, 70}, {5, 150}, {1, 131}, {1, 1}, {0, 40}, {3, 0}, {0, 0}, {6, 4}, {17, 64}};
}

Step mixed_step(const AttentionSpec& spec) {
  Step step;
  step.spec = spec;
  step.requests = mixed_requests();
  step.padding_rows = 2;
  step.untouched_rows = 3;
  return step;
}

struct Feature {
  const char* name;
  void (*apply)(Step& step);
};

const Feature kFeatures[] = {
    {"plain", [](Step&) {}},
    {"hnd", [](Step& s) { s.order = KVCacheOrder::hnd; }},
    {"non_causal", [](Step& s) { s.causal = false; }},
    {"window", [](Step& s) { s.spec.window = Window::of_tokens(20); }},
    {"window_both_sides",
     [](Step& s) {
       s.causal = false;
       s.spec.window = {7, 30};
     }},
    {"window_right_only",
     [](Step& s) {
       s.causal = false;
       s.spec.window = {-1, 3};
     }},
    {"soft_cap", [](Step& s) { s.spec.logits_soft_cap = 0.7F; }},
    {"alibi",
     [](Step& s) {
       for (std::int64_t h = 0; h < s.spec.num_heads; ++h) {
         s.spec.alibi_slopes.push_back(0.02F * static_cast<float>(h + 1));
       }
     }},
    {"sinks",
     [](Step& s) {
       for (std::int64_t h = 0; h < s.spec.num_heads; ++h) {
         s.spec.sinks.push_back(static_cast<float>(h) - 1.0F);
       }
     }},
    {"custom_mask",
     [](Step& s) {
       s.spec.mask_mod = [](const ScoreIndex& i) {
         return (i.key_position + i.query_head) % 3 != 1;
       };
     }},
    {"custom_score",
     [](Step& s) {
       s.spec.score_mod = [](float score, const ScoreIndex& i) {
         return score * 0.5F + 0.01F * static_cast<float>(i.key_position % 7 - i.query_row % 5);
       };
     }},
    {"all_at_once",
     [](Step& s) {
       s.order = KVCacheOrder::hnd;
       s.spec.window = Window::of_tokens(90);
       s.spec.logits_soft_cap = 2.0F;
       s.spec.alibi_slopes.assign(static_cast<std::size_t>(s.spec.num_heads), -0.01F);
       s.spec.sinks.assign(static_cast<std::size_t>(s.spec.num_heads), 0.5F);
     }},
    {"plain_keys", [](Step& s) { s.plain = true; }},
    {"encoder",
     [](Step& s) {
       s.plain = true;
       s.causal = false;
       s.spec.attn_type = AttnType::encoder_only;
     }},
    {"split_blocks",
     [](Step& s) {
       s.block_size = 48;
       s.kernel_block_size = 16;
     }},
    {"block_of_one", [](Step& s) { s.block_size = 1; }},
};

TEST(CpuAttention, EveryFeatureOnEveryTarget) {
  for (const Feature& feature : kFeatures) {
    Step step = mixed_step(make_spec(6, 2, 40));
    feature.apply(step);
    step.fill(3);
    const Result wanted = step.naive();
    for_each_target([&](const char* target) {
      expect_close(step, step.run(), wanted, std::string(target) + " " + feature.name);
    });
  }
}

TEST(CpuAttention, EveryFeatureSplit) {
  for (const Feature& feature : kFeatures) {
    Step step = mixed_step(make_spec(4, 2, 16));
    feature.apply(step);
    step.fill(4);
    const Result wanted = step.naive();
    for (const std::int64_t splits : {2, 3, 100}) {
      BuilderConfig config = step.config();
      config.num_splits = splits;
      expect_close(step, step.run(config), wanted, feature.name);
    }
  }
}

TEST(CpuAttention, DtypesAndHeadSizes) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType cache_dtype : {dtype, DType::f8e4m3, DType::f8e5m2}) {
      for (const auto& [size, size_v] : {std::pair{64, 64}, {72, 72}, {8, 24}, {192, 128}}) {
        Step step = mixed_step(make_spec(4, 1, size, dtype));
        step.spec.head_size_v = size_v;
        step.spec.kv_cache_dtype = cache_dtype;
        step.spec.scales = {3.0F, 0.5F, 0.25F};
        step.fill(5);
        const Result wanted = step.naive();
        const std::string what = std::string(to_string(dtype)) + " " +
                                 std::string(to_string(cache_dtype)) + " " + std::to_string(size);
        for_each_target([&](const char* target) {
          expect_close(step, step.run(), wanted, std::string(target) + " " + what);
        });
      }
    }
  }
}

TEST(CpuAttention, LargestHeadAndOddGroups) {
  for (const auto& [heads, kv_heads, size] :
       {std::tuple{2, 2, 512}, {71, 1, 64}, {150, 2, 16}, {3, 1, 8}, {1, 1, 256}}) {
    Step step = mixed_step(make_spec(heads, kv_heads, size));
    step.fill(6);
    expect_close(step, step.run(), std::to_string(heads) + "/" + std::to_string(kv_heads));
  }
}

TEST(CpuAttention, HugeLogits) {
  Step step = mixed_step(make_spec(2, 1, 32));
  step.spec.scale = 2e4F;
  step.fill(7, 10.0);
  const Result got = step.run();
  const Result wanted = step.naive();
  for (std::size_t i = 0; i < wanted.output.size(); ++i) {
    // A float32 score of 1e5 is good to 0.01; only say that the result is a mean of values.
    ASSERT_TRUE(std::abs(got.output[i]) <= 1.3) << i << ": " << got.output[i];
  }
  for (std::size_t i = 0; i < wanted.lse.size(); ++i) {
    if (std::isfinite(wanted.lse[i])) {
      ASSERT_NEAR(got.lse[i], wanted.lse[i], 1e-6 * std::abs(wanted.lse[i]) + 1.0) << i;
    }
  }
}

TEST(CpuAttention, RowsWithoutKeys) {
  Step step;
  step.spec = make_spec(4, 2, 16);
  step.spec.sinks = {0.0F, 100.0F, -100.0F, 1.0F};
  step.requests = {{4, 2}, {2, 0}, {1, 200}};
  step.padding_rows = 3;
  step.untouched_rows = 1;
  step.fill();
  for (const std::int64_t splits : {0, 2}) {
    BuilderConfig config = step.config();
    config.num_splits = splits;
    const Result got = step.run(config);
    expect_close(step, got, "sinks");
    // Rows 0 and 1 stand before the first key; 4 and 5 have none; 7 to 9 are nobody's.
    for (const std::size_t row : {0, 1, 4, 5, 7, 8, 9}) {
      for (std::size_t i = 0; i < 64; ++i) {
        EXPECT_EQ(std::bit_cast<std::uint64_t>(got.output[row * 64 + i]), 0U);
      }
      EXPECT_EQ(got.lse[row], -std::numeric_limits<float>::infinity());
    }
    EXPECT_EQ(got.lse[10], 77.0F);
    EXPECT_NE(got.output[10 * 64], 0.0);
  }
}

TEST(CpuAttention, InfiniteValueOfAKeyThatSomeRowsDoNotSee) {
  Step step;
  step.spec = make_spec(2, 1, 16);
  step.requests = {{40, 40}};
  step.fill();
  step.store(true, 0, 20, 0, 3, std::numeric_limits<double>::infinity());
  step.store(true, 0, 30, 0, 5, std::numeric_limits<double>::quiet_NaN());
  const Result got = step.run();
  for (std::size_t row = 0; row < 40; ++row) {
    for (std::size_t i = 0; i < 32; ++i) {
      const double output = got.output[row * 32 + i];
      if (row >= 20 && i % 16 == 3) {
        EXPECT_EQ(output, std::numeric_limits<double>::infinity());
      } else if (row >= 30 && i % 16 == 5) {
        EXPECT_TRUE(std::isnan(output));
      } else {
        EXPECT_TRUE(std::isfinite(output)) << row << " " << i;
      }
    }
  }
}

TEST(CpuAttention, NanOfAVisibleKeyIsNotHidden) {
  for (const std::int64_t query_len : {1, 40}) {
    Step step;
    step.spec = make_spec(2, 1, 16);
    step.requests = {{query_len, 40}};
    step.fill();
    step.store(false, 0, 0, 0, 3, std::numeric_limits<double>::quiet_NaN());
    for (const double output : step.run().output) {
      EXPECT_TRUE(std::isnan(output));
    }
  }
}

TEST(CpuAttention, LseOfAnyStrides) {
  Step step = mixed_step(make_spec(4, 2, 16));
  step.fill();
  const Result wanted = step.run();
  const auto metadata = cpu_backend()->make_builder(step.config())->build(0, step.common());
  std::vector<float> storage(static_cast<std::size_t>(step.rows() * 8));
  std::vector<float> output(static_cast<std::size_t>(step.rows() * 4 * 16));
  const std::int64_t shape[] = {4, step.rows()};
  const std::int64_t strides[] = {2, 8};
  ForwardArgs args;
  args.query = step.query_view();
  args.kv_cache = step.cache_view();
  args.output = {output.data(), DType::f32, {step.rows(), 4, 16}};
  args.lse = {storage.data(), DType::f32, shape, strides};
  const auto pool = make_thread_pool(2);
  ExecutionContext context;
  context.threads = pool.get();
  cpu_backend()->make_impl(step.spec)->forward(args, *metadata, context);
  for (std::int64_t h = 0; h < 4; ++h) {
    for (std::int64_t t = 0; t < step.num_tokens; ++t) {
      EXPECT_EQ(storage[static_cast<std::size_t>(t * 8 + h * 2)],
                wanted.lse[static_cast<std::size_t>(h * step.rows() + t)]);
    }
  }
}

TEST(CpuAttention, Cascade) {
  for (const std::int64_t splits : {0, 1, 3}) {
    Step step;
    step.spec = make_spec(6, 2, 32);
    step.spec.sinks = {0.1F, 0.2F, -0.3F, 2.0F, 0.0F, 1.0F};
    step.requests = {{0, 256}, {1, 300}, {5, 261}, {1, 257}, {30, 400}, {2, 258}, {90, 350}};
    step.shared_prefix = 256;
    step.padding_rows = 1;
    step.fill(8);
    for (std::int64_t r = 2; r < 7; ++r) {
      for (std::int64_t p = 0; p < 256; ++p) {
        ASSERT_EQ(step.load(false, r, p, 0, 0), step.load(false, 1, p, 0, 0));
      }
    }
    BuilderConfig config = step.config();
    config.num_splits = splits;
    expect_close(step, step.run(config, 256), "cascade");
    config.num_splits = 0;
    config.batch_invariant = true;
    expect_same_bits(step.run(config, 256), step.run(config, 0));
  }
}

TEST(CpuAttention, UseCascade) {
  BuilderConfig config;
  config.spec = make_spec(8, 2, 64);
  const CascadeQuery good{.common_prefix_len = 256, .num_reqs = 8, .num_tokens = 8};
  const auto decide = [&](CascadeQuery query) {
    return cpu_backend()->make_builder(config)->use_cascade(query);
  };
  EXPECT_TRUE(decide(good));
  CascadeQuery query = good;
  query.common_prefix_len = 255;
  EXPECT_FALSE(decide(query));
  query = good;
  query.num_reqs = 7;
  EXPECT_FALSE(decide(query));
  query = good;
  query.context_parallel_size = 2;
  EXPECT_FALSE(decide(query));
  query = good;
  query.num_tokens = 8 * 256;  // Whose rows fill items.
  EXPECT_FALSE(decide(query));
  query.num_tokens = 8 * 16;  // 64 rows a request pay from 357 tokens on.
  EXPECT_FALSE(decide(query));
  query.common_prefix_len = 368;
  EXPECT_TRUE(decide(query));
  config.batch_invariant = true;
  EXPECT_FALSE(decide(good));
  config.batch_invariant = false;
  config.spec.window = Window::of_tokens(100);
  EXPECT_FALSE(decide(good));
  config.spec.window = {};
  config.spec.alibi_slopes.assign(8, 0.5F);
  EXPECT_FALSE(decide(good));
  config.spec.alibi_slopes.clear();
  EXPECT_TRUE(decide(good));
}

TEST(CpuAttention, SameBitsFromRunToRun) {
  Step step = mixed_step(make_spec(6, 2, 64, DType::f32));
  step.requests.push_back({1, 3000});
  step.fill(9);
  const auto metadata = cpu_backend()->make_builder(step.config())->build(0, step.common());
  const Result first = step.run_planned(*metadata);
  for (int i = 0; i < 5; ++i) {
    expect_same_bits(first, step.run_planned(*metadata, 1 + i % 2));
  }
}

/// One request of a batch, with what it has in the cache.
Step only_request(Step& batch, std::size_t r, std::int64_t query_begin, std::int64_t query_end) {
  Step solo;
  solo.spec = batch.spec;
  const Request request = batch.requests[r];
  const std::int64_t context = request.seq_len - request.query_len;
  solo.requests = {{query_end - query_begin, context + query_end}};
  solo.fill(99);
  for (std::int64_t p = 0; p < context + query_end; ++p) {
    for (std::int64_t h = 0; h < batch.spec.num_kv_heads; ++h) {
      for (std::int64_t d = 0; d < batch.spec.head_size; ++d) {
        for (const bool is_value : {false, true}) {
          solo.store(is_value, 0, p, h, d,
                     batch.load(is_value, static_cast<std::int64_t>(r), p, h, d));
        }
      }
    }
  }
  const std::int64_t row = batch.spec.num_heads * batch.spec.head_size * size_of(batch.spec.dtype);
  std::copy_n(batch.query.begin() + (batch.query_start_loc[r] + query_begin) * row,
              (query_end - query_begin) * row, solo.query.begin());
  return solo;
}

void expect_batch_invariance(DType dtype, const Window& window, const std::string& what) {
  Step batch;
  batch.spec = make_spec(6, 2, 72, dtype);
  batch.spec.window = window;
  batch.requests = {{70, 70}, {5, 150}, {1, 459}, {1, 1}, {33, 300}};
  batch.fill(10, 6.0);  // Scores so large that the running maximum moves.
  BuilderConfig config = batch.config();
  config.batch_invariant = true;
  const Result together = batch.run(config);
  expect_same_bits(together, batch.run(config, 0, 1));
  for (std::size_t r = 0; r < batch.requests.size(); ++r) {
    // Alone and whole, in two chunks, and the last token as a decode.
    const std::int64_t query_len = batch.requests[r].query_len;
    const std::vector<std::pair<std::int64_t, std::int64_t>> chunks{
        {0, query_len}, {0, query_len / 3}, {query_len / 3, query_len}, {query_len - 1, query_len}};
    for (const auto& [begin, end] : chunks) {
      if (begin == end) {
        continue;
      }
      Step solo = only_request(batch, r, begin, end);
      BuilderConfig solo_config = solo.config();
      solo_config.batch_invariant = true;
      const Result alone = solo.run(solo_config);
      const std::size_t row = 6 * 72;
      const std::size_t offset =
          (static_cast<std::size_t>(batch.query_start_loc[r]) + static_cast<std::size_t>(begin)) *
          row;
      for (std::size_t i = 0; i < alone.output.size(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint64_t>(alone.output[i]),
                  std::bit_cast<std::uint64_t>(together.output[offset + i]))
            << what << ", " << to_string(dtype) << ", request " << r << " from row " << begin
            << ", element " << i;
      }
    }
  }
}

TEST(CpuAttention, BatchInvariance) {
  for_each_target([](const char* name) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect_batch_invariance(dtype, {}, name);
      expect_batch_invariance(dtype, Window::of_tokens(50), name);
    }
  });
}

TEST(CpuAttention, WorkspaceOfTheCaller) {
  Step step = mixed_step(make_spec(4, 2, 16));
  step.fill();
  const auto builder = cpu_backend()->make_builder(step.config());
  const auto metadata = builder->build(0, step.common());
  EXPECT_GT(metadata->workspace_bytes(), 0);
  std::vector<std::byte> bytes(static_cast<std::size_t>(metadata->workspace_bytes()) + 128);
  std::byte* aligned =
      bytes.data() + (64 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 64) % 64;
  // A canary behind it.
  bytes[static_cast<std::size_t>(aligned - bytes.data() + metadata->workspace_bytes())] =
      std::byte{0x5A};
  const Result got =
      step.run_planned(*metadata, 2, TensorView(aligned, DType::u8, {metadata->workspace_bytes()}));
  expect_same_bits(got, step.run_planned(*metadata));
  EXPECT_EQ(bytes[static_cast<std::size_t>(aligned - bytes.data() + metadata->workspace_bytes())],
            std::byte{0x5A});
  expect_error(
      ErrorCode::invalid_argument,
      [&] {
        step.run_planned(*metadata, 2,
                         TensorView(aligned, DType::u8, {metadata->workspace_bytes() - 1}));
      },
      "workspace");
}

TEST(CpuAttention, MoreThreadsThanPlannedIsAnError) {
  Step step = mixed_step(make_spec(4, 2, 16));
  step.fill();
  BuilderConfig config = step.config();
  config.num_threads = 1;
  const auto metadata = cpu_backend()->make_builder(config)->build(0, step.common());
  expect_error(
      ErrorCode::invalid_argument, [&] { step.run_planned(*metadata, 2); }, "threads", "2", "1");
}

TEST(CpuAttention, PlansOutliveTheBuilderAndItsGrowth) {
  Step step = mixed_step(make_spec(4, 2, 16));
  step.fill();
  AttentionMetadataPtr metadata;
  {
    const auto builder = cpu_backend()->make_builder(step.config());
    metadata = builder->build(0, step.common());
    Step larger;
    larger.spec = step.spec;
    larger.requests = {{1, 20000}};
    larger.block_size = step.block_size;
    larger.fill();
    larger.num_blocks = step.num_blocks;
    std::fill(larger.block_table.begin(), larger.block_table.end(), 0);
    builder->build(0, larger.common());
  }
  expect_close(step, step.run_planned(*metadata), "old plan");
}

TEST(CpuAttention, UpdateBlockTable) {
  Step step = mixed_step(make_spec(4, 2, 16));
  step.fill(11);
  const auto builder = cpu_backend()->make_builder(step.config());
  std::vector<std::int32_t> zeros(step.block_table.size(), 0);
  CommonAttentionMetadata common = step.common();
  const TensorView table = common.block_table;
  common.block_table = {zeros.data(), DType::i32, {common.num_reqs, step.table_width}};
  const auto other = builder->build(0, common);
  const auto metadata = builder->update_block_table(*other, table, {});
  expect_close(step, step.run_planned(*metadata), "updated table");
}

TEST(CpuAttention, EmptyStep) {
  Step step;
  step.spec = make_spec(2, 1, 16);
  step.untouched_rows = 1;
  step.fill();
  const Result got = step.run();
  EXPECT_EQ(got.lse[0], 77.0F);
}

}  // namespace
}  // namespace foveal::testing
