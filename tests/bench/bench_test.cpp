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
  EXPECT_EQ(shape.least_bytes(), 3 * 4 * 2 * 8 * 2 + 3 * 2 * 6 * 8 * (2 + 2));
  shape.causal = false;
  EXPECT_EQ(shape.flops(), 4.0 * 3 * 6 * 8 * 8);
  shape.kind = Kind::cache_write;
  EXPECT_EQ(shape.flops(), 0);
  EXPECT_EQ(shape.least_bytes(), 3 * 2 * 2 * 8 * 2 * (2 + 1));
}

TEST(BenchShapes, WorkOfMixedCascadeAndMlaIsCounted) {
  const Shape mixed{.kind = Kind::mixed,
                    .batch = 5,
                    .q_len = 3,
                    .kv_len = 7,
                    .decodes = 4,
                    .num_heads = 2,
                    .head_size = 8};
  EXPECT_EQ(mixed.tokens(), 4 + 3);
  EXPECT_EQ(mixed.flops(), 4.0 * 2 * 8 * (4 * 7 + 5 + 6 + 7));
  const Shape cascade{.kind = Kind::cascade,
                      .batch = 3,
                      .kv_len = 40,
                      .prefix_len = 32,
                      .num_heads = 4,
                      .num_kv_heads = 2,
                      .head_size = 8,
                      .kv_cache_dtype = DType::bf16};
  EXPECT_EQ(cascade.flops(), 4.0 * 3 * 4 * 8 * 40);
  EXPECT_EQ(cascade.kv_bytes(), 2 * (32 + 3 * 8) * 2 * 8 * 2);
  const std::vector<Shape> mla =
      make_shapes({.kinds = {Kind::mla}, .num_heads = 2, .batch = {3}, .seq_len = {5}});
  ASSERT_EQ(mla.size(), 2U);
  EXPECT_FALSE(mla[0].latent());
  EXPECT_EQ(mla[0].flops(), 2.0 * (192 + 128) * 3 * 2 * (1 + 2 + 3 + 4 + 5));
  EXPECT_EQ(mla[0].kv_bytes(), 3 * 5 * 2 * (192 + 128) * 4);
  EXPECT_TRUE(mla[1].latent());
  EXPECT_EQ(mla[1].flops(), 2.0 * (576 + 512) * 3 * 2 * 5);
  EXPECT_EQ(mla[1].kv_bytes(), 3 * 5 * 576 * 4);
}

TEST(BenchRoofline, TheSlowerOfProductsAndMemoryBounds) {
  Row row;
  row.shape = {
      .kind = Kind::decode, .kv_len = 1000, .dtype = DType::f32, .kv_cache_dtype = DType::f32};
  row.attention.times = {.median_us = 1000, .count = 3};
  const double compute_us = row.shape.flops() / 1e6;
  const double memory_us = row.shape.least_bytes() / 1e3;
  ASSERT_LT(compute_us, memory_us);
  Ceilings ceilings{.read_gb_per_s = 1, .products = ProductRate{.tflops = 1, .how = ""}};
  ASSERT_TRUE(roofline(ceilings, row).has_value());
  EXPECT_FALSE(roofline(ceilings, row)->compute_bound);
  EXPECT_DOUBLE_EQ(roofline(ceilings, row)->bound_us, memory_us);
  EXPECT_DOUBLE_EQ(roofline(ceilings, row)->fraction, memory_us / 1000);
  ceilings.read_gb_per_s = 1e6;
  EXPECT_TRUE(roofline(ceilings, row)->compute_bound);
  EXPECT_DOUBLE_EQ(roofline(ceilings, row)->bound_us, compute_us);
  // Without a rate of products nothing is said of rows that have some.
  ceilings.products.reset();
  EXPECT_FALSE(roofline(ceilings, row).has_value());
  row.shape.kind = Kind::cache_write;
  EXPECT_TRUE(roofline(ceilings, row).has_value());
  row.attention.times = {};
  EXPECT_FALSE(roofline(ceilings, row).has_value());
}

TEST(BenchShapes, TheDefaultTablesHaveEveryKind) {
  for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) {
    const std::vector<Shape> shapes = make_shapes({.device = device});
    for (const char* name :
         {"prefill", "chunked", "decode", "mixed", "cascade", "mla", "cache-write", "naive"}) {
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
                o.kinds = {Kind::cascade};
                o.block_size = 0;
              }),
              HasSubstr("cascade needs a paged cache"));
  EXPECT_THAT(with([](auto& o) {
                o.kinds = {Kind::cascade};
                o.block_size = 64;
              }),
              HasSubstr("seq_len is 40, cascade shares seven eighths"));
  EXPECT_THAT(with([](auto& o) { o.kinds = {Kind::mla}; }), HasSubstr("head_size is 32, mla has"));
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
    std::vector<Kind> kinds{Kind::prefill, Kind::chunked, Kind::decode,     Kind::mixed,
                            Kind::cascade, Kind::mla,     Kind::cache_write};
    if (dtype == DType::f32) {
      kinds.push_back(Kind::naive);
    }
    Options options{.shapes = tiny(kinds), .num_threads = 2};
    options.shapes.dtype = dtype;
    options.shapes.head_size.reset();  // mla has its own.
    std::size_t heard = 0;
    const Report report =
        run(options, {.on_row = [&](const Report& so_far) { heard = so_far.rows.size(); }});
    EXPECT_EQ(heard, report.rows.size());
    ASSERT_EQ(report.rows.size(), make_shapes(options.shapes).size());
    EXPECT_FALSE(report.machine.empty());
    EXPECT_GT(report.ceilings.read_gb_per_s, 0);
    ASSERT_TRUE(report.ceilings.products.has_value());
    EXPECT_GT(report.ceilings.products->tflops, 0);
    const auto json = nlohmann::json::parse(to_json(report));
    EXPECT_EQ(json["device"], "cpu");
    for (const char* field :
         {"version", "machine", "read_gb_per_s", "product_tflops", "products", "left_out"}) {
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
           {"batch",        "q_len",     "kv_len",      "decodes", "prefix_len", "num_heads",
            "num_kv_heads", "head_size", "head_size_v", "causal",  "block_size", "kv_cache_dtype",
            "backend",      "median_us", "min_us",      "p90_us",  "repeats",    "relative_error",
            "extra_bytes",  "flops",     "least_bytes", "roofline"}) {
        EXPECT_TRUE(fields.contains(field)) << field;
      }
      const Kind kind = row.shape.kind;
      EXPECT_EQ(fields.contains("tflops"), kind != Kind::cache_write);
      EXPECT_EQ(fields.contains("gb_per_s"), row.shape.decodes_only() || kind == Kind::cache_write);
      EXPECT_EQ(fields.contains("build_us"), row.shape.decodes_only());
      EXPECT_GT(fields["roofline"]["fraction"], 0);
      EXPECT_GT(fields["roofline"]["bound_us"], 0);
      EXPECT_EQ(fields.contains("without_cascade"), kind == Kind::cascade);
      if (kind == Kind::cascade) {
        EXPECT_EQ(fields["prefix_len"], 32);
        EXPECT_GT(fields["without_cascade"]["ratio"], 0);
      }
      EXPECT_EQ(fields.contains("naive"), kind == Kind::naive);
      if (kind == Kind::naive) {
        ASSERT_TRUE(row.other.has_value());
        EXPECT_EQ(row.other->failure, "");
        EXPECT_EQ(row.other->extra_bytes, 2 * 4 * 40 * 40 * 4);
        EXPECT_GT(fields["naive"]["ratio"], 0);
      }
      EXPECT_THAT(table_header(kind), HasSubstr(std::string(to_string(kind))));
      EXPECT_THAT(table_line(report, row), HasSubstr(row.backend));
    }
  }
}

/// A backend with another softmax scale than it is asked for.
class WrongBackend final : public AttentionBackend {
 public:
  explicit WrongBackend(std::string_view id) : right_(BackendRegistry::global().get(id)) {}

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
    return right_->make_impl(wrong(spec));
  }
  std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) const override {
    return right_->make_mla_impl(wrong(spec));
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
  static AttentionSpec wrong(AttentionSpec spec) {
    spec.scale = 1.1F * spec.softmax_scale();
    return spec;
  }

  AttentionBackendPtr right_;
};

TEST(BenchRun, NoTimesForWrongNumbers) {
  BackendRegistry::global().add("WRONG", "CPU_ATTN with a wrong scale",
                                [] { return std::make_shared<WrongBackend>("CPU_ATTN"); });
  BackendRegistry::global().add("WRONG_MLA", "CPU_MLA with a wrong scale",
                                [] { return std::make_shared<WrongBackend>("CPU_MLA"); });
  for (const Kind kind :
       {Kind::prefill, Kind::chunked, Kind::decode, Kind::mixed, Kind::cascade, Kind::mla}) {
    Options options{.shapes = tiny({kind}),
                    .backend = kind == Kind::mla ? "WRONG_MLA" : "WRONG",
                    .num_threads = 1};
    options.shapes.dtype = DType::bf16;
    if (kind == Kind::mla) {
      options.shapes.head_size.reset();
    }
    try {
      run(options);
      FAIL() << to_string(kind);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("wrongly"));
    }
  }
}

TEST(BenchRun, KindsThatNobodyServesAreLeftOutAndSaySo) {
  Options options{.shapes = tiny({}), .backend = "CPU_MLA", .num_threads = 1};
  options.shapes.head_size.reset();
  const Report report = run(options);
  EXPECT_EQ(report.left_out.size(), 7U);
  EXPECT_THAT(header_text(report), HasSubstr("left out: prefill: CPU_MLA does not serve it"));
  ASSERT_EQ(report.rows.size(), 2U);
  EXPECT_EQ(report.rows[0].shape.kind, Kind::mla);
  // Asked for by name it is refused, and so is what leaves nothing.
  options.shapes.kinds = {Kind::mla};
  options.backend = "CPU_ATTN";
  EXPECT_THROW(run(options), Error);
  options.shapes.kinds = {};
  options.shapes.head_size = 1000;
  EXPECT_THROW(run(options), Error);
}

TEST(BenchRun, NarrowCachesAndBlocksOfAnySize) {
  Options options{.shapes = tiny({Kind::chunked, Kind::mixed, Kind::cascade, Kind::cache_write}),
                  .num_threads = 1};
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
