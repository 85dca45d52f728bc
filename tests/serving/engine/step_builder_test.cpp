#include "serving/step_builder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace foveal::serving {
namespace {

using ::testing::ElementsAre;

template <typename T>
std::vector<T> values(const TensorView& view) {
  return {view.as<const T>(), view.as<const T>() + view.numel()};
}

TEST(StepBuilder, LaysOutDecodesAndPrefills) {
  StepBuilder builder(4, 16, 4);
  Request decode;
  decode.tokens = {5, 6, 7, 8, 9, 10};
  decode.num_computed = 5;
  decode.blocks = {3, 7};
  Request chunk;
  chunk.tokens = {20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  chunk.num_computed = 3;
  chunk.blocks = {2, 9, 4};
  ScheduledStep step;
  step.requests = {{&decode, 1, true}, {&chunk, 6, false}};
  step.num_tokens = 7;

  const StepInput& input = builder.build(step);
  EXPECT_THAT(input.token_ids, ElementsAre(10, 23, 24, 25, 26, 27, 28));
  EXPECT_THAT(input.positions, ElementsAre(5, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(input.logits_rows, ElementsAre(0));
  const CommonAttentionMetadata& attention = input.attention;
  EXPECT_EQ(attention.num_reqs, 2);
  EXPECT_EQ(attention.num_actual_tokens, 7);
  EXPECT_EQ(attention.max_query_len, 6);
  EXPECT_EQ(attention.max_seq_len, 9);
  EXPECT_THAT(values<std::int32_t>(attention.query_start_loc), ElementsAre(0, 1, 7));
  EXPECT_THAT(values<std::int32_t>(attention.seq_lens), ElementsAre(6, 9));
  EXPECT_THAT(values<std::int64_t>(attention.slot_mapping),
              ElementsAre(29, 11, 36, 37, 38, 39, 16));
  EXPECT_THAT(attention.block_table.shape(), ElementsAre(2, 3));
  EXPECT_THAT(values<std::int32_t>(attention.block_table), ElementsAre(3, 7, 0, 2, 9, 4));

  // A smaller step after it leaves nothing of the larger one behind.
  decode.num_computed = 0;
  step.requests = {{&decode, 6, true}};
  step.num_tokens = 6;
  const StepInput& second = builder.build(step);
  EXPECT_THAT(second.token_ids, ElementsAre(5, 6, 7, 8, 9, 10));
  EXPECT_THAT(second.logits_rows, ElementsAre(5));
  EXPECT_THAT(values<std::int32_t>(second.attention.block_table), ElementsAre(3, 7));
  EXPECT_THAT(values<std::int32_t>(second.attention.query_start_loc), ElementsAre(0, 6));
}

}  // namespace
}  // namespace foveal::serving
