#include "serving/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "foveal/error.h"
#include "serving/sampler.h"
#include "support/expect_error.h"
#include "test_models.h"

namespace foveal::serving {
namespace {

using foveal::testing::expect_error;
using testing::dense_greedy;
using testing::expect_greedy;
using testing::prompts_with_prefix;
using testing::random_model;
using testing::random_tokens;
using testing::serve;
using testing::serve_alone;

using Prompts = std::vector<std::vector<std::int32_t>>;

class EngineBackends : public ::testing::TestWithParam<const char*> {};

TEST_P(EngineBackends, GivesTheTokensOfADenseComputation) {
  for (const bool interleaved : {true, false}) {
    for (const bool tied : {true, false}) {
      const Model model = random_model(interleaved, tied);
      EngineConfig config;
      config.backend = GetParam();
      config.num_threads = 2;
      Prompts expected;
      const Prompts prompts = {random_tokens(1, 3), random_tokens(17, 4), random_tokens(33, 5)};
      for (const auto& prompt : prompts) {
        expected.push_back(dense_greedy(model, prompt, 12));
      }
      EXPECT_EQ(serve(model, config, prompts, 12), expected);
    }
  }
}

TEST_P(EngineBackends, ServesABatchLikeEachAlone) {
  const Model model = random_model();
  EngineConfig config;
  config.backend = GetParam();
  const Prompts prompts = prompts_with_prefix(16);
  EngineStats stats;
  const Prompts together = serve(model, config, prompts, 20, &stats);
  EXPECT_EQ(together, serve_alone(model, config, prompts, 20));
  EXPECT_GE(stats.prefix_hit_tokens, 15 * 32);
  EXPECT_EQ(stats.generated_tokens, 16 * 20);
  EXPECT_EQ(stats.preemptions, 0);
}

TEST_P(EngineBackends, ChunksDoNotChangeTokens) {
  const Model model = random_model();
  const Prompts prompts = prompts_with_prefix(4);
  EngineConfig config;
  config.backend = GetParam();
  const Prompts expected = serve_alone(model, config, prompts, 20);
  config.max_num_seqs = 4;
  for (const std::int64_t budget : {4, 5, 23, 64}) {
    config.max_num_batched_tokens = budget;
    EXPECT_EQ(serve(model, config, prompts, 20), expected) << budget;
  }
}

TEST_P(EngineBackends, PreemptionDoesNotChangeTokens) {
  const Model model = random_model();
  Prompts prompts;
  for (std::uint64_t i = 0; i < 6; ++i) {
    prompts.push_back(random_tokens(30 + static_cast<std::int64_t>(i), i));
  }
  EngineConfig config;
  config.backend = GetParam();
  const Prompts expected = serve_alone(model, config, prompts, 40);
  config.num_blocks = 1 + 9;  // A request grows to 5 blocks of 16.
  config.block_size = 16;
  EngineStats stats;
  EXPECT_EQ(serve(model, config, prompts, 40, &stats), expected);
  EXPECT_GT(stats.preemptions, 0);
  EXPECT_LE(stats.peak_blocks, 9);
  // And with prefixes that are shared, freed, revived and reused.
  const Prompts shared = prompts_with_prefix(6);
  config.num_blocks = 0;
  const Prompts expected_shared = serve_alone(model, config, shared, 60);
  config.num_blocks = 1 + 8;
  EXPECT_EQ(serve(model, config, shared, 60, &stats), expected_shared);
  EXPECT_GT(stats.preemptions, 0);
}

TEST_P(EngineBackends, ThreadsDoNotChangeTokens) {
  const Model model = random_model();
  const Prompts prompts = prompts_with_prefix(3);
  EngineConfig config;
  config.backend = GetParam();
  config.num_threads = 1;
  const Prompts expected = serve(model, config, prompts, 20);
  for (const int threads : {2, 3, 8}) {
    config.num_threads = threads;
    EXPECT_EQ(serve(model, config, prompts, 20), expected) << threads;
  }
}

TEST_P(EngineBackends, NarrowDtypesGiveTheSameTokens) {
  const Model model = random_model();
  const Prompts prompts = prompts_with_prefix(16);
  EngineConfig config;
  config.backend = GetParam();
  const Prompts expected = serve(model, config, prompts, 20);
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::f16, 0.01}, std::pair{DType::bf16, 0.1}}) {
    SCOPED_TRACE(to_string(dtype));
    config.dtype = dtype;
    const Prompts outputs = serve(model, config, prompts, 20);
    expect_greedy(model, prompts, outputs, expected, tolerance);
    EXPECT_EQ(serve_alone(model, config, prompts, 20), outputs);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, EngineBackends, ::testing::Values("REFERENCE", "CPU_ATTN"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Engine, CachedPromptsAreNotComputedAgain) {
  const Model model = random_model();
  Engine engine(model, {});
  const auto prompt = random_tokens(64, 1);
  const auto first = serve(engine, {prompt}, 5);
  const std::int64_t computed = engine.stats().prefill_tokens;
  EXPECT_EQ(computed, 64);
  EXPECT_EQ(serve(engine, {prompt}, 5), first);
  // 48 of 64 tokens come from the cache: the block of the last token is computed for its logits.
  EXPECT_EQ(engine.stats().prefill_tokens - computed, 16);
  EXPECT_EQ(engine.stats().prefix_hit_tokens, 48);
}

TEST(Engine, SamplesTheSameAloneOrTogether) {
  const Model model = random_model();
  const Prompts prompts = prompts_with_prefix(4);
  const auto sampled = [&](const std::vector<std::size_t>& indices, std::uint64_t seed) {
    Engine engine(model, {});
    Prompts outputs(indices.size());
    for (std::size_t i = 0; i < indices.size(); ++i) {
      engine.add_request(
          prompts[indices[i]],
          {.temperature = 1.5F, .seed = derive_seed(seed, indices[i]), .max_tokens = 16},
          [&outputs, i](const TokenEvent& event) { outputs[i].push_back(event.token); });
    }
    engine.run();
    return outputs;
  };
  const Prompts together = sampled({0, 1, 2, 3}, 7);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(sampled({i}, 7)[0], together[i]);
  }
  EXPECT_NE(sampled({0}, 8)[0], together[0]);
}

TEST(Engine, ReportsTokensAsTheyCome) {
  const Model model = random_model();
  Engine engine(model, {});
  std::vector<TokenEvent> events;
  const auto on_token = [&](const TokenEvent& event) { events.push_back(event); };
  EXPECT_EQ(engine.add_request(random_tokens(3, 1), {.max_tokens = 2}, on_token), 0);
  EXPECT_EQ(engine.add_request(random_tokens(4, 2), {.max_tokens = 1}, on_token), 1);
  EXPECT_TRUE(engine.step());
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].finish, FinishReason::none);
  EXPECT_EQ(events[1].request, 1);
  EXPECT_EQ(events[1].finish, FinishReason::max_tokens);
  EXPECT_TRUE(engine.step());
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[2].request, 0);
  EXPECT_EQ(events[2].finish, FinishReason::max_tokens);
  EXPECT_FALSE(engine.step());
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.steps, 2);
  EXPECT_EQ(stats.prompt_tokens, 7);
  EXPECT_EQ(stats.prefill_tokens, 7);
  EXPECT_EQ(stats.decode_tokens, 1);
}

TEST(Engine, CallbacksMayAddRequests) {
  const Model model = random_model();
  Engine engine(model, {});
  std::vector<std::int32_t> second;
  engine.add_request(random_tokens(3, 1), {.max_tokens = 1}, [&](const TokenEvent& event) {
    engine.add_request({event.token}, {.max_tokens = 3},
                       [&](const TokenEvent& next) { second.push_back(next.token); });
  });
  engine.run();
  EXPECT_EQ(second.size(), 3U);
}

TEST(Engine, StopTokensEndARequest) {
  const Model model = random_model();
  const auto prompt = random_tokens(9, 2);
  const auto tokens = serve(model, {}, {prompt}, 30)[0];
  EngineConfig config;
  config.stop_tokens = {tokens[4]};
  const auto stopped = serve(model, config, {prompt}, 30)[0];
  const auto first = std::ranges::find(tokens, tokens[4]);
  EXPECT_EQ(stopped, std::vector<std::int32_t>(tokens.begin(), first + 1));
}

TEST(Engine, FillsTheContextToItsEnd) {
  const Model model = random_model();
  const auto tokens = serve(model, {}, {random_tokens(250, 2)}, 100)[0];
  EXPECT_EQ(tokens.size(), 7U);
}

TEST(Engine, RefusesWhatItCannotServe) {
  const Model model = random_model();
  EngineConfig config;
  config.block_size = 16;
  config.num_blocks = 4;
  Engine engine(model, config);
  EXPECT_THROW(engine.add_request({}, {}, nullptr), Error);
  EXPECT_THROW(engine.add_request({97}, {}, nullptr), Error);
  EXPECT_THROW(engine.add_request({-1}, {}, nullptr), Error);
  EXPECT_THROW(engine.add_request(random_tokens(257, 1), {}, nullptr), Error);
  EXPECT_THROW(engine.add_request(random_tokens(40, 1), {.max_tokens = 10}, nullptr), Error);
  EXPECT_THROW(engine.add_request({1}, {.temperature = -0.5F}, nullptr), Error);
  EXPECT_THROW(engine.add_request({1}, {.temperature = std::nanf("")}, nullptr), Error);
  EXPECT_FALSE(engine.step()) << "a refused request leaves nothing behind";
  // The engine serves on.
  EXPECT_EQ(serve(engine, {random_tokens(40, 1)}, 9)[0].size(), 9U);
}

TEST(Engine, NamesBackendsThatCannotServe) {
  const Model model = random_model();
  EngineConfig config;
  config.backend = "NO_SUCH_BACKEND";
  EXPECT_THROW(Engine(model, config), Error);
  config.backend = "";
  config.max_seq_len = 257;
  EXPECT_THROW(Engine(model, config), Error);
}

TEST(Engine, NamesDtypesThatItDoesNotHave) {
  const Model model = random_model();
  for (const DType dtype : {DType::f64, DType::f8e4m3, DType::i32}) {
    EngineConfig config;
    config.dtype = dtype;
    expect_error(
        ErrorCode::invalid_argument, [&] { Engine(model, config); }, "f32, f16 or bf16");
  }
}

TEST(Engine, KeepsTheCacheInFp8) {
  const Model model = random_model();
  EngineConfig config;
  config.kv_cache_dtype = DType::f8e4m3;
  config.backend = "REFERENCE";
  const Prompts prompts = prompts_with_prefix(3);
  const Prompts tokens = serve(model, config, prompts, 10);
  EXPECT_EQ(tokens, serve_alone(model, config, prompts, 10));
}

}  // namespace
}  // namespace foveal::serving
