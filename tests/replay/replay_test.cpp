#include "replay/replay.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "foveal/registry.h"
#include "foveal/selector.h"
#include "replay/row_check.h"
#include "replay/synthetic.h"
#include "support/browser.h"
#include "support/expect_error.h"
#include "test_traces.h"

namespace foveal::replay {
namespace {

using foveal::testing::expect_error;
using testing::branching_trace;
using testing::tiny_geometry;

Options tiny_options() {
  Options options;
  options.geometry = tiny_geometry();
  options.num_blocks = 200;
  options.max_num_seqs = 4;
  options.max_num_batched_tokens = 128;
  options.check_every = 1;
  return options;
}

Trace short_trace() {
  Trace trace{.format = TraceFormat::azure, .requests = {}};
  trace.requests.push_back({.line = 2, .arrival_s = 0.0, .input_length = 300, .output_length = 3});
  trace.requests.push_back({.line = 3, .arrival_s = 5.0, .input_length = 17, .output_length = 1});
  trace.requests.push_back({.line = 4, .arrival_s = 5.5, .input_length = 40, .output_length = 9});
  return trace;
}

TEST(Replay, CountsWhatItServes) {
  const Report report = run(short_trace(), tiny_options());
  EXPECT_EQ(report.requests, 3);
  EXPECT_EQ(report.prompt_tokens, 357);
  EXPECT_EQ(report.generated_tokens, 13);
  // The last token of an answer is never computed.
  EXPECT_EQ(report.computed_tokens, 357 + 13 - 3);
  EXPECT_EQ(report.preemptions, 0);
  EXPECT_EQ(report.cached_tokens, 0);
  // 300 tokens fill steps of 128 thrice, the third with the other two prompts; then 8 of one token.
  EXPECT_EQ(report.all.steps, 11);
  EXPECT_EQ(report.prefill.steps, 3);
  EXPECT_EQ(report.decode.steps, 8);
  EXPECT_EQ(report.rows_checked, 11);
  EXPECT_EQ(report.peak_blocks, 19 + 2 + 3);
  // Keys and values of 8 float32, of 1 head. By step: prompts, then answers.
  const double token = 2 * 8 * 4;
  const double prefill = 128 + 256 + 300 + 17 + 40;
  const double decode = 301 + 302 + (41 + 42 + 43 + 44 + 45 + 46 + 47 + 48);
  EXPECT_DOUBLE_EQ(report.kv_bytes, token * (prefill + decode));
  EXPECT_DOUBLE_EQ(report.decode_kv_bytes, token * decode);
  EXPECT_DOUBLE_EQ(report.clock_seconds, report.all.seconds);
  EXPECT_LE(report.all.p50_ms, report.all.p99_ms);
  EXPECT_LE(report.all.p99_ms, report.all.max_ms);
}

TEST(Replay, KeysOutsideOfTheWindowAreNotRead) {
  Options options = tiny_options();
  AttentionSpec windowed = options.geometry.layers[0];
  windowed.window = Window::of_tokens(50);
  options.geometry.layers.push_back(windowed);
  const Report report = run(short_trace(), options);
  const double token = 2 * 8 * 4;
  const double full =
      128 + 256 + 300 + 17 + 40 + 301 + 302 + (41 + 42 + 43 + 44 + 45 + 46 + 47 + 48);
  // The rows of a step see the window of the first of them, and themselves.
  const double seen =
      128 + (49 + 128) + (49 + 44) + 17 + 40 + 50 + 50 + (41 + 42 + 43 + 44 + 45 + 46 + 47 + 48);
  EXPECT_DOUBLE_EQ(report.kv_bytes, token * (full + seen));
}

TEST(Replay, ServesOnlyTheFirstRequests) {
  Options options = tiny_options();
  options.max_requests = 2;
  const Report report = run(short_trace(), options);
  EXPECT_EQ(report.requests, 2);
  EXPECT_EQ(report.prompt_tokens, 317);
  options.max_requests = 100;
  EXPECT_EQ(run(short_trace(), options).requests, 3);
}

TEST(Replay, HonoursArrivalTimes) {
  Options options = tiny_options();
  options.speed = 0.5;
  const Report report = run(short_trace(), options);
  // Nothing here takes seconds, so requests never meet.
  EXPECT_EQ(report.all.steps, (3 + 2) + 1 + (1 + 8));
  EXPECT_EQ(report.peak_blocks, 19);
  EXPECT_GE(report.clock_seconds, 11.0);
  EXPECT_LT(report.clock_seconds, 12.0);
  EXPECT_LT(report.all.seconds, 1.0);
}

/// Every kind of layer that a geometry has, in every dtype, whole and out of the cache.
TEST(Replay, EveryGeometryIsRight) {
  for (const Geometry& geometry : geometries()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(geometry.name + " in " + std::string(to_string(dtype)));
      Trace trace = branching_trace(3, 4);
      // Longer than the shorter window; ends of the prompts differ from ends of blocks.
      trace.requests[0].input_length = 300;
      trace.requests[0].hash_ids = {1};
      trace.requests[1] = trace.requests[0];
      trace.requests.resize(2);
      Options options = tiny_options();
      options.geometry = geometry;
      options.dtype = dtype;
      const Report report = run(trace, options);
      EXPECT_EQ(report.rows_checked, report.all.steps);
      EXPECT_EQ(report.cached_tokens, 288);
      EXPECT_EQ(report.options.num_layers, std::ssize(geometry.layers));
    }
  }
}

TEST(Replay, QuantisedCachesAreRight) {
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    Options options = tiny_options();
    options.kv_cache_dtype = dtype;
    EXPECT_GT(run(branching_trace(5, 5), options).rows_checked, 20);
  }
}

TEST(Replay, RecomputesWhatItPreempts) {
  Trace trace{.format = TraceFormat::azure, .requests = {}};
  for (std::int64_t line = 2; line < 6; ++line) {
    trace.requests.push_back(
        {.line = line, .arrival_s = 0.0, .input_length = 100, .output_length = 150});
  }
  Options options = tiny_options();
  options.num_blocks = 40;  // Two and a half grown requests.
  const Report report = run(trace, options);
  EXPECT_GT(report.preemptions, 0);
  EXPECT_EQ(report.peak_blocks, 40);
  EXPECT_EQ(report.generated_tokens, 4 * 150);
  EXPECT_GT(report.computed_tokens, 4 * (100 + 149));
  // What a request finds of its own when it comes back is no hit of its prompt.
  EXPECT_EQ(report.cached_tokens, 0);
  EXPECT_EQ(report.rows_checked, report.all.steps);
}

// A backend that is CPU_ATTN, but for one thing that a test makes wrong.
using Mistake = void (*)(const ForwardArgs& args, const CommonAttentionMetadata& common);
Mistake mistake = nullptr;

class WrongImpl final : public AttentionImpl {
 public:
  WrongImpl(std::unique_ptr<AttentionImpl> inner)
      : AttentionImpl("CPU_ATTN", inner->spec()), inner_(std::move(inner)) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& context) const override {
    inner_->update_kv_cache(key, value, kv_cache, slot_mapping, context);
  }
  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    inner_->forward(args, metadata, context);
    mistake(args, metadata.common());
  }
  std::unique_ptr<AttentionImpl> inner_;
};

AttentionBackendPtr right_backend;

struct WrongBackend {
  static const char* name() { return "CPU_ATTN"; }
  static BackendCapabilities capabilities() { return right_backend->capabilities(); }
  static std::vector<std::string> validate(const SelectorConfig&) { return {}; }
  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return right_backend->kv_cache_layout(spec, num_blocks, order);
  }
  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return right_backend->kv_cache_view(cache, spec);
  }
  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return right_backend->make_builder(config);
  }
  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<WrongImpl>(right_backend->make_impl(spec));
  }
  static void reshape_and_cache(const TensorView&, const TensorView&, const KVCacheView&,
                                const TensorView&, const QuantScales&, const ExecutionContext&) {}
  static void merge_attn_states(const AttentionPart&, const AttentionPart&, const AttentionPart&,
                                const ExecutionContext&) {}
};

class WrongReplay : public ::testing::Test {
 protected:
  void SetUp() override {
    right_backend = BackendRegistry::global().get("CPU_ATTN");
    BackendRegistry::global().override_backend("CPU_ATTN", make_backend<WrongBackend>);
  }
  void TearDown() override {
    BackendRegistry::global().clear_override("CPU_ATTN");
    right_backend.reset();
  }
};

TEST_F(WrongReplay, NoMistakeIsNone) {
  mistake = [](const ForwardArgs&, const CommonAttentionMetadata&) {};
  EXPECT_EQ(run(short_trace(), tiny_options()).rows_checked, 11);
}

TEST_F(WrongReplay, NamesTheFirstWrongRow) {
  // Only rows of the third request's answer are wrong, and those by little.
  mistake = [](const ForwardArgs& args, const CommonAttentionMetadata& common) {
    if (common.max_seq_len == 45) {
      for (std::int64_t i = 0; i < args.output.numel(); ++i) {
        args.output.as<float>()[i] += 1e-4F;
      }
    }
  };
  expect_error(
      ErrorCode::device, [] { run(short_trace(), tiny_options()); },
      "CPU_ATTN computed a row wrongly in step 7: request 2 (line 4 of the trace), position 44, "
      "layer 0, head ",
      "expected", "bound");
  Options unchecked = tiny_options();
  unchecked.check_every = 0;
  EXPECT_EQ(run(short_trace(), unchecked).rows_checked, 0);
}

TEST_F(WrongReplay, SeesABlockThatHoldsOtherTokens) {
  mistake = [](const ForwardArgs& args, const CommonAttentionMetadata& common) {
    // What the second block of the first request holds goes to the third: as if a wrong one had
    // been found in the prefix cache. Seen by the steps after.
    const auto* table = common.block_table.as<std::int32_t>();
    if (common.seq_lens.as<std::int32_t>()[0] >= 48) {
      std::copy_n(args.kv_cache.key.select(0, table[1]).as<float>(), 16 * 8,
                  args.kv_cache.key.select(0, table[2]).as<float>());
    }
  };
  expect_error(
      ErrorCode::device, [] { run(short_trace(), tiny_options()); },
      "request 0 (line 2 of the trace)");
}

TEST(Replay, RefusesWhatItCannotServe) {
  const auto refused = [](auto change, const auto&... parts) {
    Options options = tiny_options();
    change(options);
    expect_error(
        ErrorCode::invalid_argument, [&] { run(short_trace(), options); }, parts...);
  };
  refused([](Options& o) { o.num_blocks = 18; }, "line 2 of the trace", "303 tokens",
          "need 19 blocks; the pool has 18");
  refused([](Options& o) { o.pool_gib = 1.0; }, "num_blocks is 200 and pool_gib 1");
  refused([](Options& o) { o.num_blocks = -1; }, "num_blocks is -1");
  refused([](Options& o) { o.max_num_seqs = 0; }, "max_num_seqs is 0");
  refused([](Options& o) { o.max_num_batched_tokens = 3; }, "max_num_batched_tokens 3");
  refused([](Options& o) { o.num_layers = 2000; }, "num_layers is 2000");
  refused([](Options& o) { o.max_requests = -1; }, "max_requests is -1");
  refused([](Options& o) { o.speed = -1.0; }, "speed is -1");
  refused([](Options& o) { o.check_every = -1; }, "check_every is -1");
  refused([](Options& o) { o.dtype = DType::f8e4m3; }, "dtype is f8e4m3", "f32, f16, bf16");
  refused([](Options& o) { o.device = DeviceType::opencl; }, "device is opencl", "cpu, cuda");
  Options options = tiny_options();
  options.backend = "CPU_MLA";
  expect_error(
      ErrorCode::unsupported, [&] { run(short_trace(), options); }, "CPU_MLA");
  options = tiny_options();
  options.num_blocks = 2'000'000'000;
  options.num_layers = 1000;
  expect_error(
      ErrorCode::out_of_memory, [&] { run(short_trace(), options); }, "2000000001 blocks",
      "1000 layers", "cpu has");
  expect_error(
      ErrorCode::invalid_argument, [] { find_geometry("llama"); }, "'llama'", "llama-3-8b",
      "deepseek-v3");
}

TEST(Replay, PoolSizesInGiB) {
  Options options = tiny_options();
  options.num_blocks = 0;
  options.block_size = 16;
  options.pool_gib = 40.0 * 16 * 2 * 8 * 4 / (1 << 30);
  Report report = run(short_trace(), options);
  EXPECT_EQ(report.options.num_blocks, 40);
  EXPECT_DOUBLE_EQ(report.options.pool_gib, options.pool_gib);
  // By default what all need together.
  options.pool_gib = 0.0;
  EXPECT_EQ(run(short_trace(), options).options.num_blocks, 19 + 2 + 3);
}

TEST(Replay, Reports) {
  const Report report = run(branching_trace(10, 7), tiny_options());
  const std::string text = to_text(report);
  for (const std::string& part :
       {std::string("hit rate "),
        fmt::format("{} rows checked against the oracle, 0 mismatches", report.rows_checked),
        fmt::format("at most {} of 200", report.peak_blocks)}) {
    EXPECT_THAT(text, ::testing::HasSubstr(part));
  }

  const auto json = nlohmann::json::parse(to_json(report));
  EXPECT_EQ(json["geometry"], "tiny");
  EXPECT_EQ(json["backend"], "CPU_ATTN");
  EXPECT_EQ(json["cached_tokens"], report.cached_tokens);
  EXPECT_EQ(json["step_latency"]["all"]["steps"], report.all.steps);
  std::int64_t steps = 0;
  std::int64_t peak = 0;
  double last = 0.0;
  for (const auto& interval : json["timeline"]) {
    steps += interval["steps"].get<std::int64_t>();
    peak = std::max(peak, interval["blocks_max"].get<std::int64_t>());
    EXPECT_GE(interval["begin_s"], last);
    last = interval["end_s"];
  }
  EXPECT_EQ(steps, report.all.steps);
  EXPECT_EQ(peak, report.peak_blocks);
  EXPECT_NEAR(last, report.clock_seconds, 1e-9);

  const std::string html = to_html(report);
  EXPECT_THAT(html, ::testing::StartsWith("<!DOCTYPE html>"));
  for (const char* elsewhere : {"http", "src=", "@import", "url(", "nan", "inf\""}) {
    EXPECT_THAT(html, ::testing::Not(::testing::HasSubstr(elsewhere)));
  }
  EXPECT_THAT(html, ::testing::HasSubstr("Blocks in use over time"));
}

TEST(Replay, PageIsReadableInABrowser) {
  if (!foveal::testing::has_browser()) {
    GTEST_SKIP() << "chromium is not installed";
  }
  const foveal::testing::Rendered page =
      foveal::testing::expect_readable(to_html(run(branching_trace(10, 7), tiny_options())));
  EXPECT_EQ(page.plots, 3);
  EXPECT_GT(page.table_rows.size(), 10U);
}

TEST(WrongInRow, SeesOneWrongKey) {
  const AttentionSpec spec = [] {
    AttentionSpec made = tiny_geometry().layers[0];
    made.dtype = DType::f32;
    return made;
  }();
  const SyntheticRows rows(spec.dtype, 64);
  std::vector<std::int32_t> tokens = {5, 7, 9, 11};
  // Softmax by hand, of head 1 on its only KV head.
  std::vector<double> expected(8, 0.0);
  double sum = 0.0;
  for (const std::int32_t token : tokens) {
    double product = 0.0;
    for (std::size_t i = 0; i < 8; ++i) {
      product += rows.numbers(SyntheticRows::Role::query, 11, 8, 8)[i] *
                 rows.numbers(SyntheticRows::Role::key, token, 0, 8)[i];
    }
    const double weight = std::exp(product / std::sqrt(8.0));
    sum += weight;
    for (std::size_t i = 0; i < 8; ++i) {
      expected[i] += weight * rows.numbers(SyntheticRows::Role::value, token, 0, 8)[i];
    }
  }
  for (double& number : expected) {
    number /= sum;
  }
  EXPECT_EQ(wrong_in_row(spec, rows, tokens, 1, expected), "");
  EXPECT_NE(wrong_in_row(spec, rows, tokens, 0, expected), "");
  tokens[1] = 8;
  EXPECT_NE(wrong_in_row(spec, rows, tokens, 1, expected), "");
}

}  // namespace
}  // namespace foveal::replay
