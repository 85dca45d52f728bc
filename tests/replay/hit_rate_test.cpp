#include <gtest/gtest.h>

#include "hash_id_cache.h"
#include "replay/replay.h"
#include "serving/test_files.h"
#include "test_traces.h"

// What the replay reports of the prefix cache, against a count over the trace's own hash ids.
namespace foveal::replay {
namespace {

using testing::branching_trace;
using testing::CacheCount;
using testing::count_hits_without_end;

Options tiny_options(std::int64_t num_blocks, std::int64_t max_num_seqs,
                     std::int64_t max_num_batched_tokens) {
  Options options;
  options.geometry = testing::tiny_geometry();
  options.block_size = 16;
  options.num_blocks = num_blocks;
  options.max_num_seqs = max_num_seqs;
  options.max_num_batched_tokens = max_num_batched_tokens;
  return options;
}

CacheCount counted(const Trace& trace, const Options& options) {
  return testing::count_hits(trace, {.block_size = options.block_size,
                                     .num_blocks = options.num_blocks,
                                     .max_num_seqs = options.max_num_seqs,
                                     .max_num_batched_tokens = options.max_num_batched_tokens});
}

void expect_counted(const Report& report, const CacheCount& count) {
  EXPECT_EQ(report.cached_tokens, count.cached_tokens);
  EXPECT_EQ(report.preemptions, count.preemptions);
  EXPECT_EQ(report.all.steps, count.steps);
  EXPECT_EQ(report.peak_blocks, count.peak_blocks);
  EXPECT_DOUBLE_EQ(report.hit_rate(), static_cast<double>(count.cached_tokens) /
                                          static_cast<double>(report.prompt_tokens));
}

TEST(HitRate, IsThatOfTheHashIds) {
  const Trace trace = branching_trace(60, 1);
  const Options options = tiny_options(10000, 8, 300);
  const Report report = run(trace, options);
  expect_counted(report, counted(trace, options));
  EXPECT_EQ(report.cached_tokens, count_hits_without_end(trace, 16));
  EXPECT_GT(report.hit_rate(), 0.2);
}

TEST(HitRate, IsThatOfTheHashIdsInAPoolThatEvicts) {
  const Trace trace = branching_trace(80, 2);
  const std::int64_t without_end = count_hits_without_end(trace, 16);
  std::int64_t preemptions = 0;
  for (const std::int64_t num_blocks : {105, 150, 220, 400}) {
    for (const std::int64_t max_num_seqs : {1, 6, 20}) {
      SCOPED_TRACE(::testing::Message()
                   << num_blocks << " blocks, " << max_num_seqs << " requests");
      const Options options = tiny_options(num_blocks, max_num_seqs, 256);
      const Report report = run(trace, options);
      const CacheCount count = counted(trace, options);
      expect_counted(report, count);
      EXPECT_LE(report.peak_blocks, num_blocks);
      EXPECT_LT(report.cached_tokens, without_end);
      EXPECT_GT(report.cached_tokens, 0);
      preemptions += report.preemptions;
    }
  }
  EXPECT_GT(preemptions, 0);
}

TEST(HitRate, IsZeroWithoutHashIds) {
  Trace trace = branching_trace(10, 3);
  trace.format = TraceFormat::azure;
  for (TraceRequest& request : trace.requests) {
    request.hash_ids.clear();
  }
  const Options options = tiny_options(10000, 8, 300);
  EXPECT_EQ(run(trace, options).cached_tokens, 0);
  EXPECT_EQ(counted(trace, options).cached_tokens, 0);
}

/// A real trace, half of whose requests begin alike.
TEST(HitRate, IsThatOfTheHashIdsOfMooncake) {
  const std::filesystem::path file =
      serving::testing::shared_dir() / "data/traces/mooncake_arxiv_slice.jsonl";
  if (!std::filesystem::exists(file)) {
    GTEST_SKIP() << file << " is not there; set FOVEAL_SHARED_DIR to run this test";
  }
  Trace trace = read_trace(file);
  trace.requests.resize(20);
  for (const std::int64_t num_blocks : {60000, 1300}) {
    Options options = tiny_options(num_blocks, 64, 2048);
    options.check_every = 100;
    const Report report = run(trace, options);
    expect_counted(report, counted(trace, options));
    EXPECT_EQ(report.cached_tokens == count_hits_without_end(trace, 16), num_blocks == 60000);
  }
}

}  // namespace
}  // namespace foveal::replay
