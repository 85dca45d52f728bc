#include "serving/step_builder.h"

#include <algorithm>

namespace foveal::serving {
namespace {

template <typename T>
TensorView vector_view(std::vector<T>& data, DType dtype) {
  return TensorView(data.data(), dtype, {std::ssize(data)});
}

}  // namespace

StepBuilder::StepBuilder(std::int64_t max_num_seqs, std::int64_t max_num_tokens,
                         std::int64_t block_size)
    : block_size_(block_size) {
  const auto seqs = static_cast<std::size_t>(max_num_seqs);
  const auto tokens = static_cast<std::size_t>(max_num_tokens);
  input_.token_ids.reserve(tokens);
  input_.positions.reserve(tokens);
  input_.logits_rows.reserve(seqs);
  query_start_loc_.reserve(seqs + 1);
  seq_lens_.reserve(seqs);
  slot_mapping_.reserve(tokens);
}

const StepInput& StepBuilder::build(const ScheduledStep& step) {
  input_.token_ids.clear();
  input_.positions.clear();
  input_.logits_rows.clear();
  query_start_loc_.assign(1, 0);
  seq_lens_.clear();
  slot_mapping_.clear();

  std::int64_t table_width = 1;
  std::int64_t max_query_len = 0;
  std::int64_t max_seq_len = 0;
  for (const ScheduledRequest& scheduled : step.requests) {
    const Request& request = *scheduled.request;
    const std::int64_t begin = request.num_computed;
    const std::int64_t end = begin + scheduled.num_tokens;
    for (std::int64_t position = begin; position < end; ++position) {
      const std::int64_t block = request.blocks[static_cast<std::size_t>(position / block_size_)];
      input_.token_ids.push_back(request.tokens[static_cast<std::size_t>(position)]);
      input_.positions.push_back(static_cast<std::int32_t>(position));
      slot_mapping_.push_back(block * block_size_ + position % block_size_);
    }
    query_start_loc_.push_back(static_cast<std::int32_t>(std::ssize(input_.token_ids)));
    seq_lens_.push_back(static_cast<std::int32_t>(end));
    if (scheduled.samples) {
      input_.logits_rows.push_back(std::ssize(input_.token_ids) - 1);
    }
    table_width = std::max(table_width, std::ssize(request.blocks));
    max_query_len = std::max(max_query_len, scheduled.num_tokens);
    max_seq_len = std::max(max_seq_len, end);
  }

  // Entries past a request's blocks name the null block.
  const std::int64_t num_reqs = std::ssize(step.requests);
  block_table_.assign(static_cast<std::size_t>(num_reqs * table_width),
                      static_cast<std::int32_t>(kNullBlock));
  for (std::int64_t r = 0; r < num_reqs; ++r) {
    std::ranges::copy(step.requests[static_cast<std::size_t>(r)].request->blocks,
                      block_table_.begin() + r * table_width);
  }

  CommonAttentionMetadata& attention = input_.attention;
  attention.num_reqs = num_reqs;
  attention.num_actual_tokens = step.num_tokens;
  attention.max_query_len = max_query_len;
  attention.max_seq_len = max_seq_len;
  attention.query_start_loc = vector_view(query_start_loc_, DType::i32);
  attention.seq_lens = vector_view(seq_lens_, DType::i32);
  attention.block_table = TensorView(block_table_.data(), DType::i32, {num_reqs, table_width});
  attention.slot_mapping = vector_view(slot_mapping_, DType::i64);
  return input_;
}

}  // namespace foveal::serving
