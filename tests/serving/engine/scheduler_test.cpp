#include "serving/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "foveal/error.h"
#include "test_models.h"

namespace foveal::serving {
namespace {

using testing::random_tokens;

/// A scheduler whose steps "run" at once. Every generated token is a function of the sequence so
/// far, as a model's would be.
class Simulation {
 public:
  Simulation(SchedulerConfig config, std::int64_t num_blocks, std::int64_t block_size)
      : config(std::move(config)), pool(num_blocks, block_size), scheduler(this->config, pool) {}

  Request& add(std::vector<std::int32_t> prompt, std::int64_t max_tokens) {
    auto request = std::make_unique<Request>();
    request->id = std::ssize(requests);
    request->num_prompt_tokens = std::ssize(prompt);
    request->tokens = std::move(prompt);
    request->sampling.max_tokens = max_tokens;
    scheduler.add(*request);
    requests.push_back(std::move(request));
    return *requests.back();
  }

  ScheduledStep step() {
    ScheduledStep step = scheduler.schedule();
    check(step);
    for (const ScheduledRequest& scheduled : step.requests) {
      scheduler.advance(scheduled);
      if (scheduled.samples) {
        std::uint64_t hash = 0;
        for (const std::int32_t token : scheduled.request->tokens) {
          hash = hash * 31 + static_cast<std::uint64_t>(token) + 7;
        }
        scheduler.append(*scheduled.request, static_cast<std::int32_t>(hash % 97));
      }
    }
    return step;
  }

  int run() {
    int steps = 0;
    while (!scheduler.idle()) {
      step();
      if (++steps > 100000) {
        ADD_FAILURE() << "no end";
        break;
      }
    }
    return steps;
  }

  void check(const ScheduledStep& step) {
    ASSERT_FALSE(step.requests.empty()) << "a step without progress";
    std::int64_t total = 0;
    bool past_decodes = false;
    std::set<std::int64_t> slots;
    for (const ScheduledRequest& scheduled : step.requests) {
      const Request& request = *scheduled.request;
      ASSERT_GE(scheduled.num_tokens, 1);
      total += scheduled.num_tokens;
      const std::int64_t end = request.num_computed + scheduled.num_tokens;
      ASSERT_LE(end, request.num_tokens());
      ASSERT_EQ(scheduled.samples, end == request.num_tokens());
      ASSERT_EQ(std::ssize(request.blocks), (end + pool.block_size() - 1) / pool.block_size());
      past_decodes = past_decodes || scheduled.num_tokens > config.reorder_threshold;
      ASSERT_EQ(past_decodes, scheduled.num_tokens > config.reorder_threshold)
          << "short queries must stand first";
      for (std::int64_t position = request.num_computed; position < end; ++position) {
        const auto block = request.blocks[static_cast<std::size_t>(position / pool.block_size())];
        ASSERT_NE(block, 0);
        ASSERT_TRUE(slots.insert(block * pool.block_size() + position % pool.block_size()).second)
            << "two tokens write to one slot";
      }
    }
    ASSERT_EQ(total, step.num_tokens);
    ASSERT_LE(total, config.max_num_batched_tokens);
    ASSERT_LE(std::ssize(step.requests), config.max_num_seqs);
  }

  SchedulerConfig config;
  BlockPool pool;
  Scheduler scheduler;
  std::vector<std::unique_ptr<Request>> requests;
};

SchedulerConfig config_of(std::int64_t seqs, std::int64_t tokens) {
  SchedulerConfig config;
  config.max_num_seqs = seqs;
  config.max_num_batched_tokens = tokens;
  config.max_seq_len = 256;
  return config;
}

TEST(Scheduler, RefusesContradictoryLimits) {
  BlockPool pool(8, 4);
  EXPECT_THROW(Scheduler(config_of(0, 8), pool), Error);
  EXPECT_THROW(Scheduler(config_of(9, 8), pool), Error);
}

TEST(Scheduler, RefusesRequestsThatCanNeverFit) {
  Simulation simulation(config_of(2, 16), 5, 4);  // 16 tokens of cache.
  EXPECT_THROW(simulation.add({}, 4), Error);
  EXPECT_THROW(simulation.add(random_tokens(257, 1), 4), Error);
  EXPECT_THROW(simulation.add(random_tokens(4, 1), 0), Error);
  // The last token generated needs no slot.
  simulation.add(random_tokens(10, 1), 7);
  try {
    simulation.add(random_tokens(10, 1), 8);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("17 tokens"));
  }
  EXPECT_THROW(simulation.add(random_tokens(10, 1), std::int64_t{1} << 62), Error);
  simulation.run();
  EXPECT_EQ(simulation.requests[0]->num_generated(), 7);
}

TEST(Scheduler, CutsPromptsToTheBudget) {
  Simulation simulation(config_of(4, 8), 64, 4);
  simulation.add(random_tokens(19, 1), 2);
  simulation.add(random_tokens(5, 2), 2);
  EXPECT_EQ(simulation.step().num_tokens, 8);
  EXPECT_EQ(simulation.step().num_tokens, 8);
  // The rest of the first prompt, and the second one in what is left.
  const ScheduledStep third = simulation.step();
  ASSERT_EQ(third.requests.size(), 2U);
  EXPECT_EQ(third.requests[0].num_tokens, 3);
  EXPECT_TRUE(third.requests[0].samples);
  EXPECT_EQ(third.requests[1].num_tokens, 5);
  EXPECT_TRUE(third.requests[1].samples);
}

TEST(Scheduler, RunningRequestsNeverWaitForPrompts) {
  Simulation simulation(config_of(4, 8), 128, 4);
  for (std::uint64_t i = 0; i < 3; ++i) {
    simulation.add(random_tokens(2, i), 30);
  }
  simulation.step();
  simulation.add(random_tokens(100, 9), 2);
  while (simulation.requests[3]->num_generated() == 0) {
    const ScheduledStep step = simulation.step();
    // One token for each of the three, what remains for the prompt.
    ASSERT_EQ(step.requests.size(), 4U);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(step.requests[i].num_tokens, 1);
      EXPECT_EQ(step.requests[i].request->id, static_cast<std::int64_t>(i));
    }
    EXPECT_LE(step.requests[3].num_tokens, 5);
  }
}

TEST(Scheduler, ServesInOrderOfArrival) {
  Simulation simulation(config_of(2, 16), 64, 4);
  for (std::uint64_t i = 0; i < 6; ++i) {
    simulation.add(random_tokens(4 + static_cast<std::int64_t>(i), i), 3);
  }
  std::vector<std::int64_t> first_seen;
  while (!simulation.scheduler.idle()) {
    for (const ScheduledRequest& scheduled : simulation.step().requests) {
      if (std::ranges::find(first_seen, scheduled.request->id) == first_seen.end()) {
        first_seen.push_back(scheduled.request->id);
      }
    }
  }
  EXPECT_TRUE(std::ranges::is_sorted(first_seen));
  EXPECT_EQ(first_seen.size(), 6U);
}

TEST(Scheduler, RequestsOfOneStepShareTheirPrefix) {
  Simulation simulation(config_of(4, 64), 64, 4);
  const auto prefix = random_tokens(16, 1);
  for (std::uint64_t i = 0; i < 4; ++i) {
    auto prompt = prefix;
    const auto own = random_tokens(3, 100 + i);
    prompt.insert(prompt.end(), own.begin(), own.end());
    simulation.add(prompt, 4);
  }
  const ScheduledStep step = simulation.step();
  ASSERT_EQ(step.requests.size(), 4U);
  EXPECT_EQ(step.num_tokens, 19 + 3 * 3);
  EXPECT_EQ(simulation.pool.stats().hit_tokens, 3 * 16);
  EXPECT_EQ(simulation.pool.stats().used, 4 + 4);
  simulation.run();
}

TEST(Scheduler, StopsAtStopTokenAndFullContext) {
  SchedulerConfig config = config_of(2, 16);
  config.max_seq_len = 12;
  Simulation probe(config, 64, 4);
  probe.add(random_tokens(5, 1), 100);
  probe.run();
  const Request& full = *probe.requests[0];
  EXPECT_EQ(full.finish, FinishReason::max_seq_len);
  EXPECT_EQ(full.num_tokens(), 13);  // All 12 positions were computed, and the last gave a token.

  config.stop_tokens = {full.tokens[7]};
  Simulation stopped(config, 64, 4);
  stopped.add(random_tokens(5, 1), 100);
  stopped.run();
  EXPECT_EQ(stopped.requests[0]->finish, FinishReason::stop);
  EXPECT_EQ(stopped.requests[0]->tokens.back(), full.tokens[7]);
  EXPECT_EQ(stopped.pool.stats().used, 0);
}

TEST(Scheduler, PreemptsTheNewestWhenBlocksRunOut) {
  Simulation simulation(config_of(3, 32), 10, 4);  // 36 tokens of cache.
  for (std::uint64_t i = 0; i < 3; ++i) {
    simulation.add(random_tokens(8, i), 20);
  }
  std::vector<std::int64_t> finished;
  while (!simulation.scheduler.idle()) {
    simulation.step();
    for (const auto& request : simulation.requests) {
      if (request->finish != FinishReason::none &&
          std::ranges::find(finished, request->id) == finished.end()) {
        finished.push_back(request->id);
      }
    }
  }
  EXPECT_GT(simulation.scheduler.num_preemptions(), 0);
  EXPECT_THAT(finished, ::testing::ElementsAre(0, 1, 2));
}

/// Whatever the limits, each request ends with the tokens it gets alone.
TEST(Scheduler, LimitsDoNotChangeTokens) {
  const auto run = [](std::int64_t seqs, std::int64_t budget, std::int64_t num_blocks,
                      std::int64_t block_size) {
    Simulation simulation(config_of(seqs, budget), num_blocks, block_size);
    for (std::uint64_t i = 0; i < 12; ++i) {
      auto prompt = random_tokens(static_cast<std::int64_t>(i * 3 % 11), 1);
      const auto own = random_tokens(1 + static_cast<std::int64_t>(i * 7 % 23), i);
      prompt.insert(prompt.end(), own.begin(), own.end());
      simulation.add(prompt, 1 + static_cast<std::int64_t>(i * 5 % 19));
    }
    simulation.run();
    EXPECT_EQ(simulation.pool.stats().used, 0);
    std::vector<std::vector<std::int32_t>> tokens;
    for (const auto& request : simulation.requests) {
      tokens.push_back(request->tokens);
    }
    return tokens;
  };
  const auto expected = run(1, 256, 200, 16);
  for (const std::int64_t seqs : {1, 3, 12}) {
    for (const std::int64_t budget : {12, 17, 256}) {
      for (const std::int64_t num_blocks : {14, 20, 100}) {
        EXPECT_EQ(run(seqs, budget, num_blocks, 4), expected);
      }
    }
  }
}

}  // namespace
}  // namespace foveal::serving
