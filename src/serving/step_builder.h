#pragma once

#include <cstdint>
#include <vector>

#include "foveal/metadata.h"
#include "serving/scheduler.h"

namespace foveal::serving {

/// A step as the model runner takes it; everything is borrowed from the StepBuilder.
struct StepInput {
  std::vector<std::int32_t> token_ids;  ///< [num_tokens]
  std::vector<std::int32_t> positions;  ///< [num_tokens]
  std::vector<std::int64_t>
      logits_rows;  ///< Rows whose logits are wanted: the samplers' last ones.
  CommonAttentionMetadata attention;
};

/// Lays a scheduled step out as flat arrays, in buffers that it keeps from step to step.
class StepBuilder {
 public:
  StepBuilder(std::int64_t max_num_seqs, std::int64_t max_num_tokens, std::int64_t block_size);

  /// Good until the next call.
  const StepInput& build(const ScheduledStep& step);

 private:
  std::int64_t block_size_;
  StepInput input_;
  std::vector<std::int32_t> query_start_loc_;
  std::vector<std::int32_t> seq_lens_;
  std::vector<std::int32_t> block_table_;
  std::vector<std::int64_t> slot_mapping_;
};

}  // namespace foveal::serving
