// `foveal bench` on tiny shapes of the CPU: rows, counts, JSON, and what is refused.

#include "bench/bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "foveal/error.h"
#include "foveal/registry.h"

namespace foveal::bench {
namespace {

using ::testing::HasSubstr;

ShapeOptions tiny(std::vector<Kind> kinds) {
  return {
      .kinds = std::move(kinds), .num_heads = 4, .head_size = 32, .batch = {2}, .seq_len = {40}};
}

std::string refusal(const ShapeOptions& options) {
  try {
    make_shapes(options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "nothing was refused";
}

TEST(BenchShapes, VisiblePairsAreThoseOfABruteCount) {
  const Window windows[] = {{-1, -1}, {-1, 0}, {3, 0}, {0, 0}, {4, 2}, {-1, 5}, {7, -1}};
  for (const Window& window : windows) {
    for (const auto& [q_len, kv_len] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 1}, {1, 17}, {17, 17}, {5, 17}, {17, 5}}) {
      std::int64_t count = 0;
      for (std::int64_t row = 0; row < q_len; ++row) {
        for (std::int64_t key = 0; key < kv_len; ++key) {
          const std::int64_t position = kv_len - q_len + row;
          count += (window.left < 0 || key >= position - window.left) &&
                   (window.right < 0 || key <= position + window.right);
        }
      }
      EXPECT_EQ(visible_pairs(q_len, kv_len, window), count)
          << q_len << " of " << kv_len << ", window " << window.left << ", " << window.right;
    }
  }
}

TEST(BenchShapes, WorkIsCounted) {
  Shape shape{.batch = 3,
              .q_len = 2,
              .kv_len = 4,
              .num_heads = 6,
              .num_kv_heads = 2,
              .head_size = 8,
              .causal = true,
              .dtype = DType::bf16,
              .kv_cache_dtype = DType::f8e4m3};
  EXPECT_EQ(shape.flops(), 4.0 * 3 * 6 * 8 * (3 + 4));
  EXPECT_EQ(shape.kv_bytes(), 3 * 4 * 2 * 8 * 2);
  EXPECT_EQ(shape.write_bytes(), 3 * 2 * 2 * 8 * 2 * (2 + 1));
  shape.causal = false;
  EXPECT_EQ(shape.flops(), 4.0 * 3 * 6 * 8 * 8);
}

TEST(BenchShapes, TheDefaultTablesHaveEveryKind) {
  for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) {
    const std::vector<Shape> shapes = make_shapes({.device = device});
    for (const char* name : {"prefill", "chunked", "decode", "cache-write", "naive"}) {
      EXPECT_TRUE(std::any_of(shapes.begin(), shapes.end(), [&](const Shape& shape) {
        return to_string(shape.kind) == name;
      })) << name;
    }
  }
}

TEST(BenchShapes, OptionsTakeThePlaceOfTheTable) {
  ShapeOptions options = tiny({Kind::decode});
  options.num_kv_heads = 2;
  options.batch = {1, 3};
  options.seq_len = {8, 9};
  options.block_size = 32;
  options.kv_cache_dtype = DType::f8e5m2;
  const std::vector<Shape> shapes = make_shapes(options);
  ASSERT_EQ(shapes.size(), 4U);
  EXPECT_EQ(shapes[3].batch, 3);
  EXPECT_EQ(shapes[3].q_len, 1);
  EXPECT_EQ(shapes[3].kv_len, 9);
  EXPECT_EQ(shapes[3].num_kv_heads, 2);
  EXPECT_EQ(shapes[3].block_size, 32);
  EXPECT_EQ(shapes[3].kv_cache_dtype, DType::f8e5m2);
  options.kinds = {Kind::chunked};
  options.seq_len = {1000};
  EXPECT_EQ(make_shapes(options)[0].q_len, 128);
}

TEST(BenchShapes, RefusalsNameTheArgument) {
  const auto with = [](auto&& change) {
    ShapeOptions options = tiny({Kind::decode});
    change(options);
    return refusal(options);
  };
  EXPECT_THAT(with([](auto& o) { o.num_heads = 0; }), HasSubstr("num_heads is 0"));
  EXPECT_THAT(with([](auto& o) { o.num_kv_heads = 0; }), HasSubstr("num_kv_heads is 0"));
  EXPECT_THAT(with([](auto& o) { o.num_kv_heads = 3; }), HasSubstr("num_kv_heads"));
  EXPECT_THAT(with([](auto& o) { o.head_size = 5000; }), HasSubstr("head_size is 5000"));
  EXPECT_THAT(with([](auto& o) { o.block_size = -1; }), HasSubstr("block_size is -1"));
  EXPECT_THAT(with([](auto& o) { o.batch = {0}; }), HasSubstr("batch is 0"));
  EXPECT_THAT(with([](auto& o) { o.seq_len = {0}; }), HasSubstr("seq_len is 0"));
  EXPECT_THAT(with([](auto& o) {
                o.batch = {1 << 20};
                o.seq_len = {1 << 20};
              }),
              HasSubstr("batch is 1048576"));
  EXPECT_THAT(with([](auto& o) { o.dtype = DType::f8e5m2; }), HasSubstr("dtype is f8e5m2"));
  EXPECT_THAT(with([](auto& o) {
                o.kinds = {Kind::naive};
                o.device = DeviceType::cuda;
                o.dtype = DType::f8e4m3;
              }),
              HasSubstr("naive takes f16 and bf16"));
  EXPECT_THAT(with([](auto& o) {
                o.kinds = {Kind::decode};
                o.block_size = 0;
                o.kv_cache_dtype = DType::f8e4m3;
              }),
              HasSubstr("block_size is 0"));
  EXPECT_THAT(with([](auto& o) {
                o.kinds = {Kind::cache_write};
                o.block_size = 0;
              }),
              HasSubstr("block_size is 0"));
  EXPECT_THAT(with([](auto& o) {
                o.kinds = {Kind::naive};
                o.num_kv_heads = 2;
              }),
              HasSubstr("num_kv_heads is 2"));
  EXPECT_THAT(with([](auto& o) {
                o.kinds = {Kind::naive};
                o.dtype = DType::bf16;
              }),
              HasSubstr("dtype is bf16"));
}

TEST(BenchRun, RefusesDevicesItDoesNotKnow) {
  try {
    run({.shapes = {.device = DeviceType::opencl}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("device is opencl"));
  }
}

TEST(BenchRun, RefusesWhatTheBackendCannot) {
  Options options{.shapes = tiny({Kind::prefill}), .backend = "NO_SUCH"};
  EXPECT_THROW(run(options), Error);
}

/// Every kind, paged and plain, in several dtypes: the samples that run() checks are right, all
/// numbers are there, and the documented fields are in the JSON.
TEST(BenchRun, TinyShapesGiveWholeRows) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<Kind> kinds{Kind::prefill, Kind::chunked, Kind::decode, Kind::cache_write};
    if (dtype == DType::f32) {
      kinds.push_back(Kind::naive);
    }
    Options options{.shapes = tiny(kinds), .num_threads = 2};
    options.shapes.dtype = dtype;
    std::size_t heard = 0;
    const Report report =
        run(options, {.on_row = [&](const Report& so_far) { heard = so_far.rows.size(); }});
    EXPECT_EQ(heard, report.rows.size());
    ASSERT_EQ(report.rows.size(), make_shapes(options.shapes).size());
    EXPECT_FALSE(report.machine.empty());
    EXPECT_GT(report.read_bandwidth.value_or(0), 0);
    const auto json = nlohmann::json::parse(to_json(report));
    EXPECT_EQ(json["device"], "cpu");
    for (const char* field : {"version", "machine", "read_gb_per_s"}) {
      EXPECT_TRUE(json.contains(field)) << field;
    }
    ASSERT_EQ(json["rows"].size(), report.rows.size());
    for (std::size_t i = 0; i < report.rows.size(); ++i) {
      const Row& row = report.rows[i];
      const auto& fields = json["rows"][i];
      SCOPED_TRACE(row.shape.text());
      EXPECT_EQ(row.attention.failure, "");
      EXPECT_GT(row.attention.times.median_us, 0);
      EXPECT_LE(row.attention.times.min_us, row.attention.times.median_us);
      EXPECT_LE(row.attention.times.median_us, row.attention.times.p90_us);
      EXPECT_EQ(fields["kind"], to_string(row.shape.kind));
      EXPECT_EQ(fields["dtype"], to_string(dtype));
      for (const char* field :
           {"batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_size", "causal",
            "block_size", "kv_cache_dtype", "backend", "median_us", "min_us", "p90_us", "repeats",
            "relative_error", "extra_bytes"}) {
        EXPECT_TRUE(fields.contains(field)) << field;
      }
      const Kind kind = row.shape.kind;
      EXPECT_EQ(fields.contains("tflops"), kind != Kind::cache_write);
      EXPECT_EQ(fields.contains("gb_per_s"), kind == Kind::decode || kind == Kind::cache_write);
      EXPECT_EQ(fields.contains("read_fraction"), kind == Kind::decode);
      EXPECT_EQ(fields.contains("build_us"), kind == Kind::decode);
      EXPECT_EQ(fields.contains("naive"), kind == Kind::naive);
      if (kind == Kind::naive) {
        ASSERT_TRUE(row.naive.has_value());
        EXPECT_EQ(row.naive->failure, "");
        EXPECT_EQ(row.naive->extra_bytes, 2 * 4 * 40 * 40 * 4);
        EXPECT_GT(fields["naive"]["ratio"], 0);
      }
      EXPECT_THAT(table_header(kind), HasSubstr(std::string(to_string(kind))));
      EXPECT_THAT(table_line(report, row), HasSubstr(row.backend));
    }
  }
}

/// CPU_ATTN with another softmax scale than it is asked for.
class WrongBackend final : public AttentionBackend {
 public:
  std::string_view name() const override { return right_->name(); }
  const BackendCapabilities& capabilities() const override { return right_->capabilities(); }
  std::vector<std::string> validate(const SelectorConfig& config) const override {
    return right_->validate(config);
  }
  KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                KVCacheOrder order) const override {
    return right_->kv_cache_layout(spec, num_blocks, order);
  }
  KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) const override {
    return right_->kv_cache_view(cache, spec);
  }
  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      const BuilderConfig& config) const override {
    return right_->make_builder(config);
  }
  std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) const override {
    AttentionSpec wrong = spec;
    wrong.scale = 1.1F * spec.softmax_scale();
    return right_->make_impl(wrong);
  }
  std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) const override {
    return right_->make_mla_impl(spec);
  }
  void reshape_and_cache(const TensorView& key, const TensorView& value,
                         const KVCacheView& kv_cache, const TensorView& slot_mapping,
                         const QuantScales& scales,
                         const ExecutionContext& context) const override {
    right_->reshape_and_cache(key, value, kv_cache, slot_mapping, scales, context);
  }
  void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                         const AttentionPart& b, const ExecutionContext& context) const override {
    right_->merge_attn_states(result, a, b, context);
  }

 private:
  AttentionBackendPtr right_ = BackendRegistry::global().get("CPU_ATTN");
};

TEST(BenchRun, NoTimesForWrongNumbers) {
  BackendRegistry::global().add("WRONG", "CPU_ATTN with a wrong scale",
                                [] { return std::make_shared<WrongBackend>(); });
  for (const Kind kind : {Kind::prefill, Kind::chunked, Kind::decode}) {
    Options options{.shapes = tiny({kind}), .backend = "WRONG", .num_threads = 1};
    options.shapes.dtype = DType::bf16;
    try {
      run(options);
      FAIL() << to_string(kind);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("wrongly"));
    }
  }
}

TEST(BenchRun, NarrowCachesAndBlocksOfAnySize) {
  Options options{.shapes = tiny({Kind::chunked, Kind::cache_write}), .num_threads = 1};
  options.shapes.kv_cache_dtype = DType::f8e4m3;
  options.shapes.num_kv_heads = 1;
  options.shapes.block_size = 32;
  for (const Row& row : run(options).rows) {
    EXPECT_GT(row.attention.times.count, 0) << row.shape.text();
  }
}

TEST(BenchRun, WhatDoesNotFitIsARowsFailure) {
  Options options{.shapes = tiny({Kind::prefill}), .num_threads = 1};
  options.shapes.num_heads = 4096;
  options.shapes.head_size = 256;
  options.shapes.batch = {1};
  options.shapes.seq_len = {1 << 28};
  options.shapes.block_size = 0;
  const Report report = run(options);
  ASSERT_FALSE(report.rows.empty());
  EXPECT_THAT(report.rows[0].attention.failure, HasSubstr("out of memory"));
  EXPECT_THAT(table_line(report, report.rows[0]), HasSubstr("GiB wanted"));
  EXPECT_THAT(to_json(report), HasSubstr("\"failure\""));
}

}  // namespace
}  // namespace foveal::bench
